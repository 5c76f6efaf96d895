"""Values from a bucket: the single engine that turns JSON into dataclasses, within bounds.

Pure. An object in a bucket may come from an older or newer version or from another program, or be
damaged. `parsed` turns bytes into JSON within bounds on size and depth, `built` turns that into a
dataclass by its annotations, and `decoded` does both. They return a value or raise `BadObject`, and
nothing else. The rules:

- an unknown field (of a newer version) is ignored; hashes include it
- a missing field gets its default; without one, the object is bad
- a value of another type, or out of its bounds, makes the object bad; nothing is converted
- numbers are finite, except for a `Reading`, which is a measurement
- a `protocol` newer than PROTOCOL raises `NewerProtocol`, a BadObject that says what to do

The keys of a run's bucket and the decoder of each are in `bucket/layout.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from storage.canonical_json import (
    MOST_INT,
    MOST_NBYTES,
    BadObject,
    brief,
    parsed,
    whole,
)

T = TypeVar("T")
# The protocol of this code in a run's bucket: members, generations (`epochs`), lease terms, facts,
# run.json. Raise it when something is written that older code would misunderstand, not for a field
# that it may ignore. 1 is not written: objects without a number are of protocol 1.
PROTOCOL = 1
# The newest run.json that this code reads: version 2 has an `order` (sample_order.py), which older
# code would overlook.
RUN_VERSION = 2
# A number beyond these bounds is damage. MOST_T: wall clock, the year 5138.
MOST_FLOAT, MOST_COUNT, MOST_T = 1e15, 10**6, 1e11


@dataclass(frozen=True)
class Within:
    """The bounds of a number, both included, for use in an annotation."""

    low: float
    high: float


Reading = Annotated[float, "a measurement: may be NaN or infinite"]
Count = Annotated[int, Within(0, MOST_COUNT)]  # a number of things that readers iterate over
Natural = Annotated[int, Within(0, MOST_INT)]
Amount = Annotated[float, Within(0, MOST_FLOAT)]  # a price, a speed, seconds
Port = Annotated[int, Within(0, 65535)]
Checked = Callable[[Any], Any]


class NewerProtocol(BadObject):
    """The object was written by a newer version of this code; it is sound, the reader too old."""


# ---- versions ------------------------------------------------------------------------------------
def protocol_of(body: Mapping[str, Any]) -> int:
    """Return the protocol that an object names, or 1 if it names none. Raises BadObject if it is
    not a number."""
    return int(whole(body.get("protocol", 1), 1))


def check_protocol(body: Mapping[str, Any]) -> None:
    """Raise NewerProtocol for an object that this code may misunderstand."""
    if (found := protocol_of(body)) > PROTOCOL:
        raise NewerProtocol(
            f"it is of protocol {found}, this code reads up to {PROTOCOL}; update the package here"
        )


def written_protocol() -> int:
    """Return the protocol of the objects that this code writes."""
    return PROTOCOL


def stamped(body: dict[str, Any]) -> dict[str, Any]:
    """Return `body` with its protocol, by default that of this code; 1 is not written."""
    found = body.pop("protocol", PROTOCOL)
    return {**body, "protocol": found} if found > 1 else body


# ---- dataclasses ---------------------------------------------------------------------------------
def decoded(cls: type[T], text: str | bytes, *, most_nbytes: int = MOST_NBYTES) -> T:
    """Decode a bucket's object, of this protocol or an older one, into a dataclass. Raises
    BadObject, NewerProtocol."""
    body = parsed(text, most_nbytes=most_nbytes)
    if isinstance(body, dict):
        check_protocol(body)
        body = {"protocol": 1, **body}
    return built(cls, body)


def built(cls: type[T], body: Any) -> T:
    """Build a dataclass from parsed JSON: lists become tuples, unknown fields are ignored, types
    and bounds are checked. Raises BadObject."""
    if not isinstance(body, dict):
        raise BadObject(f"wanted a JSON object, found {brief(body)}")
    values: dict[str, Any] = {}
    for name, check, is_needed in _checks(cls):  # type: ignore[arg-type]
        if name in body:
            try:
                values[name] = check(body[name])
            except BadObject as e:
                raise BadObject(f"{name}: {e}") from None
        elif is_needed:
            raise BadObject(f"wanted a field {name}, found none")
    return cls(**values)


@functools.cache
def _checks(cls: type[Any]) -> tuple[tuple[str, Checked, bool], ...]:
    """Return (name, check, whether it is required) for each field."""
    hints, nothing = typing.get_type_hints(cls, include_extras=True), dataclasses.MISSING
    return tuple(
        (f.name, _check_of(hints[f.name]), f.default is nothing and f.default_factory is nothing)
        for f in dataclasses.fields(cls)
    )


def _check_of(hint: Any) -> Checked:
    """Return the function that checks a JSON value against a type hint. It returns the value,
    with lists as tuples, or raises BadObject."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if hint is float:
        return number
    if origin is Annotated:
        bounds = next((each for each in inside[1:] if isinstance(each, Within)), None)
        if bounds is None:
            return _reading
        if inside[0] is float:
            return functools.partial(number, low=bounds.low, high=bounds.high)
        return functools.partial(whole, low=int(bounds.low), high=int(bounds.high))
    if hint is int:
        return whole
    if origin in (typing.Union, types.UnionType):
        check = _check_of(next(i for i in inside if i is not type(None)))
        return lambda value: None if value is None else check(value)
    if origin is tuple:
        check = _check_of(inside[0])
        return lambda value: tuple(check(v) for v in _of(list, value))
    if origin is dict:
        check = _check_of(inside[1])
        return lambda value: {k: check(v) for k, v in _of(dict, value).items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return functools.partial(built, hint)
    return functools.partial(_of, hint)


# ---- values --------------------------------------------------------------------------------------
def number(value: Any, low: float = -MOST_FLOAT, high: float = MOST_FLOAT) -> float:
    """Return `value` if it is a finite number in [low, high]. Raises BadObject."""
    if type(value) not in (int, float) or not low <= value <= high:
        raise BadObject(f"wanted a number in [{low:g}, {high:g}], found {brief(value)}")
    return value  # type: ignore[no-any-return]


def amount(value: Any) -> float:
    """Return a free-form price, speed or count if it is a number >= 0, else 0 (unknown)."""
    return float(value) if type(value) in (int, float) and 0 <= value <= MOST_FLOAT else 0.0


def word(value: Any, most: int = MOST_NBYTES) -> str:
    """Return free-form text, cut off at `most` characters; "" if `value` is not text."""
    return value[:most] if isinstance(value, str) else ""


def _of(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise BadObject(f"wanted {kind.__name__}, found {brief(value)}")
    return value


def _reading(value: Any) -> Any:
    if type(value) is not float:
        whole(value)
    return value
