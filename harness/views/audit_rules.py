"""What the rules of an audit have in common: a violation, and the one spelling of objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.bucket.layout import EPOCH_NBYTES
from harness.core.facts import is_spelled
from harness.core.values import parsed


class Violation(Exception):
    """A rule is broken: what was wanted, what was found, which object."""


def json_of(key: str, data: bytes) -> Any:
    """Raises Violation."""
    try:
        return parsed(data, most_nbytes=EPOCH_NBYTES)
    except ValueError as e:
        raise Violation(
            f"{key}: wanted JSON, found {len(data)} bytes that are not ({e}); it was changed"
        ) from e


def whole_lines(key: str, data: bytes) -> Iterator[tuple[str, str]]:
    """Lines of a fact segment, each in exactly the spelling that facts.Chain writes. Raises
    Violation."""
    *lines, rest = data.split(b"\n")
    if rest or not lines:
        raise Violation(
            f"{key}: wanted whole lines, found {len(rest)} bytes after the last; it was cut or "
            "changed"
        )
    for number, line in enumerate(lines, 1):
        body = json_of(f"{key}, line {number}", line)
        if not is_spelled(body, line):
            raise Violation(
                f"{key}, line {number}: wanted the fact as it was written, found another spelling; "
                "it was changed"
            )
        yield f"{key}, line {number}", line.decode()
