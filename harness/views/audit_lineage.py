"""Snapshots in an audit, against the records that they name: which lie on the run's line, and which
a newer epoch has superseded.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.bucket.layout import Epoch, epoch_key
from harness.core import records as rec
from harness.views.audit_rules import RuleBroken
from storage.manifest import Manifest, Ref

_STEPS = re.compile(rf"{rec.SAMPLES}(\d+)-(\d+)-[0-9a-f]+\.jsonl")


@dataclass
class RecordEnds:
    """What is known of step records. `ends`, `begins`: by key of an object, the hash of its last
    record, and of the record before its first. `heads`: by step of a snapshot, the hash of the
    record there on the run's line. `genesis`: of the record before step 1, if that is known."""

    ends: dict[str, str] = field(default_factory=dict)
    begins: dict[str, str] = field(default_factory=dict)
    heads: dict[int, str] = field(default_factory=dict)
    genesis: str = ""


def check_lineage(
    manifests: Sequence[Manifest], worlds: Mapping[int, Epoch], line: RecordEnds
) -> list[Ref]:
    """`manifests`: newest first. Those that a newer epoch did not grow from. Raises RuleBroken."""
    off: list[Ref] = []
    for m in manifests:
        newest = manifests[0]
        parent = m.data.get("parent") or ""
        if parent and not _came_before(parent, m.ref):
            raise RuleBroken(
                f"snapshot {m.ref.name}: wanted a parent that came before it, found {parent}"
            )
        if worlds and (m.epoch not in worlds or worlds[m.epoch].world != m.world):
            raise RuleBroken(
                f"snapshot {m.ref.name}: wanted the ranks of {epoch_key(m.epoch)}, its "
                f"manifest is of {m.world} ranks"
            )
        named = rec.named(m.data)
        if not named:
            if m.step and newest.data.get("samples"):
                raise RuleBroken(
                    f"snapshot {m.ref.name}: wanted the records of steps 1-{m.step}, its "
                    "manifest names none"
                )
            continue
        _check_end(m, named, line)
        if line.heads.get(m.step) == named.head:
            continue
        # one epoch has one history; only a zombie of an older one may have another
        if m.epoch >= newest.epoch:
            raise RuleBroken(
                f"snapshot {m.ref.name}: wanted the record of step {m.step} that snapshot "
                f"{newest.ref.name} grew from, found another history ({named.head[:16]})"
            )
        _check_own_line(m, named, line)
        off.append(m.ref)
    return off


def _check_end(m: Manifest, named: rec.RecordsRef, line: RecordEnds) -> None:
    """Does the object end with the record that the manifest names, which is its own step's?"""
    if line.ends.get(named.key) != named.head:
        raise RuleBroken(
            f"snapshot {m.ref.name}: wanted {named.key} to end with record "
            f"{named.head[:16]}, found no such end"
        )
    if (named.first, named.last) != (found := _steps(named.key)) or found[1] != m.step:
        raise RuleBroken(
            f"snapshot {m.ref.name}: wanted the record of step {m.step}, found {named.key}, said "
            f"to be of steps {named.first}-{named.last}"
        )


def _check_own_line(m: Manifest, named: rec.RecordsRef, line: RecordEnds) -> None:
    """A superseded snapshot has a history, too: object after object, back to the first step."""
    by_end = {(head, _steps(key)[1]): key for key, head in line.ends.items()}
    key = named.key
    while key in line.begins:
        before, first = line.begins[key], _steps(key)[0]
        if first == 1:
            if line.genesis and before != line.genesis:
                raise RuleBroken(
                    f"snapshot {m.ref.name}: wanted its step 1 to follow the run's identity "
                    f"({line.genesis[:16]}), found it after {before[:16]}"
                )
            return
        if (before, first - 1) not in by_end:
            raise RuleBroken(
                f"snapshot {m.ref.name}: wanted the record of step {first - 1} that {key} follows "
                f"({before[:16]}), found none"
            )
        key = by_end[before, first - 1]


def _steps(key: str) -> tuple[int, int]:
    """First and last step of an object of records, by its name, which is proved to fit."""
    found = _STEPS.fullmatch(key)
    return (int(found[1]), int(found[2])) if found else (0, -1)


def _came_before(parent: object, ref: Ref) -> bool:
    try:
        found = Ref.parse(str(parent))
    except ValueError:
        return False
    return found < ref and found.step <= ref.step
