"""Methods of single objects, replaced while a training runs. Runs in the worker."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_NOTHING = object()
Original = Callable[..., Any]  # what stood in the place of a hook


class Hooks:
    """A method of an object is the outermost one of its class and all classes above, so what is
    put in its place sees every call, whatever a subclass overrides."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """From here on `owner.name(...)` is `function(original, ...)`."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        self._before.append((owner, name, vars(owner).get(name, _NOTHING)))
        setattr(owner, name, hooked)

    def clear(self) -> None:
        """All are as they were."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
