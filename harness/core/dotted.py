"""Functions of users, named by dotted path: `pkg.module:function?name=value&name=value`. Pure."""

from __future__ import annotations

import functools
import inspect
import math
import pkgutil
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

from harness.core.world import BadInput


def imported(what: str, path: str) -> Any:
    """What a path such as `pkg.module:name` names. Raises BadInput; `what` begins its message."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as e:
        raise BadInput(
            f"{what} {path!r} cannot be imported ({e}); is its package installed or on PYTHONPATH?"
        ) from e


def with_options(
    what: str, path: str, function: Callable[..., Any], query: str, arguments: int
) -> Callable[..., Any]:
    """The function with the options of `name=value&name=value`; what looks like a number is one.
    It will be called with so many arguments. Raises BadInput."""
    options = {key: _value(what, value) for key, value in parse_qsl(query, keep_blank_values=True)}
    try:
        takes = inspect.signature(function)
    except ValueError:  # built-in functions do not say; their call will
        return functools.partial(function, **options)
    try:
        takes.bind(*[None] * arguments, **options)
    except TypeError as e:
        raise BadInput(
            f"{what} {f'{path}?{query}' if query else path!r}: {e}; it is {path}{takes}; options "
            f"are written {path}?name=value&name=value"
        ) from e
    return functools.partial(function, **options) if options else function


def _value(what: str, text: str) -> float | str:
    try:
        found = float(text)
    except ValueError:
        return text
    if not math.isfinite(found):
        raise BadInput(f"the option {text!r} of a {what}: wanted a finite number")
    return found
