"""What a store can say instead of an answer."""

from __future__ import annotations


class StoreError(Exception):
    """The store said no."""


class NotFound(StoreError):
    """No such object."""


class StoreRefused(StoreError):
    """It lets us do nothing: no credentials, no permission, no such bucket, no space."""


class StoreUnavailable(StoreError):
    """No answer; whether a write happened is unknown."""
