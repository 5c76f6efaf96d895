"""Functions of users, named by dotted path: `pkg.module:function?name=value&name=value`. Pure."""

from __future__ import annotations

import functools
import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from harness.core.world import BadInput

NUMBERS = (float, int, "float", "int", "float | None", "int | None")  # as annotations


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
    options = options_of(what, query)
    check_call(
        f"{what} {f'{path}?{query}' if query else path!r}",
        path,
        function,
        [None] * arguments,
        options,
        f"options are written {path}?name=value&name=value",
    )
    return functools.partial(function, **options) if options else function


def options_of(what: str, query: str) -> dict[str, float | str]:
    """Of `name=value&name=value`. Raises BadInput."""
    return {key: value_of(what, value) for key, value in parse_qsl(query, keep_blank_values=True)}


def check_call(
    where: str,
    path: str,
    function: Callable[..., Any],
    arguments: Sequence[object],
    options: Mapping[str, object],
    written: str,
) -> None:
    """Raises BadInput if the function cannot be called so. Of built-in functions, which do not say
    what they take, nothing is known."""
    try:
        takes = inspect.signature(function)
    except ValueError:
        return
    try:
        takes.bind(*arguments, **options)
    except TypeError as e:
        raise BadInput(f"{where}: {e}; it is {path}{takes}; {written}") from e
    for name, value in options.items():
        wanted = takes.parameters[name].annotation if name in takes.parameters else ""
        if wanted in NUMBERS and isinstance(value, str):
            raise BadInput(f"{where}: wanted {name} as a number, found {value!r}")


def value_of(what: str, text: str) -> float | str:
    """What looks like a number is one. Raises BadInput for one that is not finite."""
    try:
        found = float(text)
    except ValueError:
        return text
    if not math.isfinite(found):
        raise BadInput(f"the option {text!r} of a {what}: wanted a finite number")
    return found
