"""Objects of a bucket, damaged in every way: what reads them gives a value or its one error.

Every decoder gets any bytes, and every kind of change to a real object (hypothesis; the same
examples at every run).
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.canonical_json import canonical, digest

QUICK = settings(
    max_examples=200, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@dataclass(frozen=True)
class Decoder:
    """`errors`: all that it may raise. `real`: objects as they are written."""

    name: str
    decode: Callable[[bytes], Any]
    errors: tuple[type[Exception], ...]
    real: tuple[bytes, ...]
    reseal: str = ""  # the field that holds the hash of the rest

    def __str__(self) -> str:
        return self.name


NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2**31, 2**53, 2**64, 10**40])
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=12)
JSONS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
DEEP = [b"[" * n for n in (70, 1000, 100_000)] + [
    b'{"a":' * 300 + b"1" + b"}" * 300,
    b"[" * 200 + b"]" * 200,
]
STRANGE = st.sampled_from(
    [*DEEP, b"", b"null", b"[]", b"{}", b"5", b"\xff\xfe\x00", b'"\\ud800"', b"9" * 5000, b"1e999",
     b"Infinity", b'{"protocol":-1}', b'{"protocol":"2"}', b'{"version":NaN}', b"\n\n", b"{}\n[]"]
)  # fmt: skip
ANYTHING = STRANGE | st.binary(max_size=60) | JSONS.map(lambda v: json.dumps(v).encode())


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = (
        value.items() if isinstance(value, dict)
        else enumerate(value) if isinstance(value, list)
        else ()
    )  # fmt: skip
    return [at, *(p for key, one in inside for p in paths(one, (*at, key)))]


def change(draw: st.DrawFn, value: Any) -> Any:
    """One place of it is another value, is gone, or has a neighbour."""
    place = draw(st.sampled_from(paths(value)))
    if not place:
        return draw(JSONS) if draw(st.booleans()) else value
    inside = value
    for key in place[:-1]:
        inside = inside[key]
    how = draw(st.sampled_from(["replace", "replace", "drop", "add"]))
    if how == "replace":
        inside[place[-1]] = draw(JSONS)
    elif how == "drop":
        del inside[place[-1]]
    elif isinstance(inside, dict):
        inside[draw(st.text(max_size=8))] = draw(JSONS)
    else:
        inside.insert(place[-1], draw(JSONS))
    return value


@st.composite
def damaged(draw: st.DrawFn, decoder: Decoder) -> bytes:
    """A real object with a few changes: to its values, which are sealed again, or to its bytes."""
    data = draw(st.sampled_from(decoder.real))
    if draw(st.integers(0, 3)) == 0:
        cut, length = draw(st.integers(0, len(data))), draw(st.integers(0, 8))
        return data[:cut] + draw(st.binary(max_size=8)) + data[cut + length :]
    lines = []
    for line in data.splitlines():
        value = json.loads(line)
        for _ in range(draw(st.integers(0, 3))):
            value = change(draw, value)
        if decoder.reseal and isinstance(value, dict) and draw(st.booleans()):
            value.pop(decoder.reseal, None)
            value[decoder.reseal] = digest(canonical(value))
        lines.append(json.dumps(value).encode())
    return b"\n".join(lines)


def reads_what_is_real(decoder: Decoder) -> None:
    for data in decoder.real:
        assert decoder.decode(data)


def bears_any_bytes(decoder: Decoder) -> None:
    @QUICK
    @given(ANYTHING)
    def check(data: bytes) -> None:
        with contextlib.suppress(*decoder.errors):
            decoder.decode(data)

    check()


def bears_any_change(decoder: Decoder, use: Callable[[Any], None]) -> None:
    """`use` does with what was accepted what its readers do with it."""

    @QUICK
    @given(damaged(decoder))
    def check(data: bytes) -> None:
        with contextlib.suppress(*decoder.errors):
            use(decoder.decode(data))

    check()
