"""What the rules of an audit have in common: a violation, and the one spelling of objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.bucket.layout import EPOCH_NBYTES
from harness.core.fact_lines import is_spelled
from harness.core.identity import batching_of
from harness.core.values import canonical, parsed
from harness.core.world import BadInput

FIELDS = {
    "version": int,
    "seed": int,
    "samples": int,
    "global_batch": int,
    "micro_batch": int,
    "shuffle": bool,
}


class RuleBroken(Exception):
    """A rule is broken: what was wanted, what was found, which object."""


def json_of(key: str, data: bytes) -> Any:
    """Raises RuleBroken."""
    try:
        return parsed(data, most_nbytes=EPOCH_NBYTES)
    except ValueError as e:
        raise RuleBroken(
            f"{key}: wanted JSON, found {len(data)} bytes that are not ({e}); it was changed"
        ) from e


def identity_of(key: str, data: bytes) -> dict[str, Any]:
    """What run.json says, in its one spelling. Raises RuleBroken."""
    found = json_of(key, data)
    if not isinstance(found, dict) or canonical(found) != data:
        raise RuleBroken(
            "run.json: wanted canonical JSON as it was created, found another spelling; it was "
            "changed"
        )
    for name, kind in FIELDS.items():
        if type(found.get(name)) is not kind:
            raise RuleBroken(
                f"run.json: wanted {name} of type {kind.__name__}, found {found.get(name)!r}; "
                "it was changed"
            )
    try:
        batching_of(found)
    except BadInput as e:
        raise RuleBroken(f"run.json: {e}") from e
    return found


def whole_lines(key: str, data: bytes) -> Iterator[tuple[str, str]]:
    """Lines of a fact segment, each in exactly the spelling that fact_lines.Chain writes. Raises
    RuleBroken."""
    *lines, rest = data.split(b"\n")
    if rest or not lines:
        raise RuleBroken(
            f"{key}: wanted whole lines, found {len(rest)} bytes after the last; it was cut or "
            "changed"
        )
    for number, line in enumerate(lines, 1):
        body = json_of(f"{key}, line {number}", line)
        if not is_spelled(body, line):
            raise RuleBroken(
                f"{key}, line {number}: wanted the fact as it was written, found another spelling; "
                "it was changed"
            )
        yield f"{key}, line {number}", line.decode()
