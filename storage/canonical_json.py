"""JSON in a bucket, within bounds: the one parser of everything that others wrote, and the one
canonical encoding that is hashed.

Pure. Objects in a bucket may be damaged or foreign, so their size and depth are limited, and there
is one error for everything.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

MOST_NBYTES = 1 << 20  # default limit for one text: an object, a line of facts
MOST_DEPTH = 64  # nesting of brackets
MOST_INT = 2**53

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=True)


class BadObject(ValueError):
    """The text is not what is expected there: damaged, foreign, or of another version."""


def canonical(value: object) -> bytes:
    """Return the canonical JSON encoding, which hashes are computed from. Floats keep every bit
    (repr round-trips), including NaN and inf."""
    return _CANONICAL.encode(value).encode()


def digest(data: bytes | memoryview) -> str:
    """Return the blake2b-128 hash, as 32 hex digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def parsed(
    text: str | bytes,
    *,
    most_nbytes: int = MOST_NBYTES,
    most_depth: int = MOST_DEPTH,
    finite: bool = False,
) -> Any:
    """Parse JSON from a bucket. `finite`: refuse NaN and infinities anywhere. Raises BadObject."""
    if len(text) > most_nbytes:
        raise BadObject(f"wanted at most {most_nbytes} bytes, found {len(text)}")
    try:
        found = json.loads(text)
    except RecursionError:
        raise BadObject(f"wanted JSON, found brackets nested deeper than {most_depth}") from None
    except ValueError as e:  # also raised for text that is not UTF-8, and for overlong numbers
        raise BadObject(f"wanted JSON, found something else ({e})") from None
    if finite or _brackets(text) > most_depth:
        _look_through(found, most_depth, finite)
    return found


def whole(value: Any, low: int = -MOST_INT, high: int = MOST_INT) -> int:
    """Return `value` if it is a whole number in [low, high]; raise BadObject otherwise."""
    if type(value) is not int or not low <= value <= high:
        raise BadObject(f"wanted a whole number in [{low}, {high}], found {brief(value)}")
    return value


def brief(value: Any) -> str:
    """Return a short form of a value for an error message."""
    return (
        type(value).__name__
        if isinstance(value, (list, dict)) or value is None
        else f"{value!r:.40}"
    )


def _brackets(text: str | bytes) -> int:
    """Count the opening brackets, an upper bound of the nesting depth."""
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def _look_through(value: Any, most_depth: int, finite: bool) -> None:
    level: list[Any] = [value]
    for _ in range(most_depth + 1):
        inside: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inside += one.values()
            elif isinstance(one, list):
                inside += one
            elif finite and type(one) is float and not math.isfinite(one):
                raise BadObject(f"wanted finite numbers, found {one}")
        if not inside:
            return
        level = inside
    raise BadObject(f"wanted JSON, found brackets nested deeper than {most_depth}")
