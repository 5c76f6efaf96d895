"""What a store can say instead of an answer."""

from __future__ import annotations


class StoreError(Exception):
    """The store said no."""


class WrongInput(StoreError, ValueError):
    """A URL or a variable that no store can have, whoever asks: what was wanted, what was found,
    what to do."""


class NotFound(StoreError):
    """No such object."""


class StoreRefused(StoreError):
    """It lets us do nothing: no credentials, no permission, no such bucket, no space."""


class StoreUnavailable(StoreError):
    """No answer; whether a write happened is unknown."""


class NoSnapshot(StoreError):
    """There is nothing to load."""


class StepBehind(StoreError):
    """A greater step is committed already."""


class StateMismatch(StoreError, ValueError):
    """What is loaded into is not laid out like what was saved, or ranks that save together do not
    have the same."""


class UnsupportedValue(StoreError, TypeError):
    """A state holds something that cannot be stored without pickling it."""
