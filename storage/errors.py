"""Errors that a store or a snapshot operation raises."""

from __future__ import annotations


class StoreError(Exception):
    """Base class of all errors of this package: the store refused or could not do a request."""


class WrongInput(StoreError, ValueError):
    """A URL or a setting that is invalid for every store. The message says what was wanted, what
    was found, and what to do."""


class NotFound(StoreError):
    """The object does not exist."""


class StoreRefused(StoreError):
    """The store allows nothing: no credentials, no permission, no such bucket, or no space."""


class StoreUnavailable(StoreError):
    """The store did not answer. The outcome of a write is unknown."""


class NoSnapshot(StoreError):
    """The store has no snapshot to load."""


class StepBehind(StoreError):
    """A greater step is already committed."""


class StateMismatch(StoreError, ValueError):
    """The load target is not laid out like the saved state, or ranks that save together have
    different states."""


class UnsupportedValue(StoreError, TypeError):
    """A state holds a value that cannot be stored without pickling it."""
