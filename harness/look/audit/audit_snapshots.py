"""Checks in an audit that all records of commits agree: facts, listings, marks, names of step
records, losses, hashes of weights.

Pure but for the store it is given.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.bucket.archive import RecordsPart
from harness.bucket.layout import Epoch, epoch_key
from harness.core import step_records
from harness.core import step_records as rec
from harness.core.facts import SnapshotCommitted
from harness.core.step_records import Columns
from harness.look.audit.audit_rules import RuleBroken
from storage.errors import NotFound
from storage.export.safetensors import PREFIX
from storage.snapshots.manifest import Manifest, Ref, SnapshotCorrupt
from storage.snapshots.restore import rewind_allowed
from storage.snapshots.retention import DOOMED_KEPT
from storage.snapshots.snapshot_keys import doom_key, manifest_key, quarantine_key
from storage.snapshots.snapshots import Snapshots, scratch
from storage.snapshots.tensor_hash import sum_of_stored

# largest difference (s) between two recorded begins of one and the same step
SAME_S = 1e-3


def check_commits(
    snapshots: Snapshots, told: Iterable[SnapshotCommitted], manifests: Iterable[Manifest]
) -> tuple[int, str]:
    """Check that committed snapshots exist or were superseded, and that no mark hides a whole
    newest snapshot. Call it after reading the facts. Raises RuleBroken, StoreError.

    `told`: the facts of commits. Returns the number of commits and a description.
    """
    by_ref = {Ref(f.epoch, f.step): f for f in told}
    committed, doomed = snapshots.manifests()
    since = rewind_allowed(snapshots.store)
    newest = max(committed, default=None)
    if newest is not None and newest in doomed and newest.epoch >= since:
        raise RuleBroken(
            f"{doom_key(newest)}: wanted no such mark on the newest snapshot, since a prune spares "
            "it; it was put there by hand"
        )
    known = max((ref for ref in by_ref if ref.epoch >= since), default=None)
    if known is not None and (newest is None or newest < known):
        raise RuleBroken(
            f"{manifest_key(known)}: wanted the snapshot that a fact tells to be committed, or a "
            f"newer one; found {newest or 'none'}. Snapshots were lost, or rolled back"
        )
    # a prune keeps only this many marks and deletes the oldest
    floor = min(doomed) if len(doomed) >= DOOMED_KEPT else Ref(0, 0)
    for ref in sorted(by_ref.keys() - committed - doomed, reverse=True):
        if ref.epoch >= since and ref > floor:
            raise RuleBroken(
                f"{manifest_key(ref)}: wanted the snapshot that a fact tells to be committed, or "
                "the mark of a prune; found neither: it was deleted by hand"
            )
    for m in manifests:
        if (fact := by_ref.get(m.ref)) is None:
            continue
        wanted = m.nbytes, str(m.data.get("weights") or "")
        if (found := (fact.nbytes, fact.weights or wanted[1])) != wanted:
            raise RuleBroken(
                f"{manifest_key(m.ref)}: wanted {found[0]} bytes and weights {found[1] or 'unsaid'}"
                f" as a fact tells, found {wanted[0]} bytes and weights {wanted[1] or 'unsaid'}"
            )
    _check_marks(snapshots, committed - doomed)
    return len(by_ref), "as the facts tell, and none newer was lost"


def _check_marks(snapshots: Snapshots, committed: Collection[Ref]) -> None:
    """Check that the newest snapshots are not quarantined while whole. Raises RuleBroken."""
    marked = snapshots.quarantined()
    usable = max((ref for ref in committed if ref not in marked), default=None)
    for ref in sorted(marked.intersection(committed), reverse=True):
        if usable is not None and ref < usable:
            return
        try:
            snapshots.verify(snapshots.load(ref))
        except (SnapshotCorrupt, NotFound):
            continue
        raise RuleBroken(
            f"{quarantine_key(ref)}: wanted a damaged snapshot where the newest is marked, found "
            f"it whole; `harness snapshots verify {snapshots.store.url}` takes the mark back"
        )


def check_begun(snapshots: Snapshots, uncommitted: Iterable[RecordsPart]) -> None:
    """Check that no records begin after a step that was never committed: records from step k + 1 on
    are written after k is committed. `uncommitted`: the records that no retained snapshot leads to.
    Raises RuleBroken, StoreError."""
    committed = snapshots.manifests()[0]
    newest, since = max(committed, default=Ref(0, 0)), rewind_allowed(snapshots.store)
    for part in uncommitted:
        epoch, before = int(part.rows["epoch"][0]), int(part.rows["step"][0]) - 1
        if epoch >= max(newest.epoch, since) and before > newest.step:
            raise RuleBroken(
                f"{part.key}: wanted a snapshot of step {before}, which is committed before such "
                f"records are written; the newest is {newest if committed else 'missing'}. "
                "Snapshots were lost, or rolled back"
            )


def check_losses(
    told: Columns, recorded: Columns, manifests: Iterable[Manifest], off: Collection[Ref]
) -> tuple[int, str]:
    """Check that losses agree. `told`: the steps in facts, `recorded`: the records of the run's
    line; both sorted by epoch and step, each once. Raises RuleBroken."""
    facts, records = step_records.in_both(told, recorded)
    same = (facts["loss"] == records["loss"]) | (
        np.isnan(facts["loss"]) & np.isnan(records["loss"])
    )
    # a loop that runs again in the same session records its steps again
    same |= np.abs(facts["start"] - records["start"]) > SAME_S
    if not same.all():
        fact, record = (rows[int(np.argmin(same))] for rows in (facts, records))
        raise RuleBroken(
            f"step {fact['step']} of generation {fact['epoch']}: wanted the loss {fact['loss']} "
            f"that a fact tells, found {record['loss']} in its step record"
        )
    for m in manifests:
        loss = m.data.get("loss")
        if m.ref in off or not isinstance(loss, float) or not 0 < m.step <= len(recorded):
            continue
        if recorded["step"][m.step - 1] != m.step:
            continue  # the records do not begin at step 1, which another check reports
        found = float(recorded["loss"][m.step - 1])
        if found != loss and not np.isnan([found, loss]).all():
            raise RuleBroken(
                f"{manifest_key(m.ref)}: wanted the loss {found} of the record of step {m.step}, "
                f"found {loss}"
            )
    return len(facts), "of facts, records and manifests, the same"


def check_weights(snapshots: Snapshots, manifest: Manifest) -> bool:
    """Check the hash of the weights in a manifest against its tensors. Return False if it has none.

    Raises RuleBroken, SnapshotCorrupt, StoreError.
    """
    if not (named := manifest.data.get("weights")):
        return False
    memory = scratch()
    try:
        found = sum_of_stored(
            manifest.tensors,
            PREFIX,
            lambda part, start, end: snapshots.read_into(manifest, part, start, end, memory),
        )
    except ValueError as e:
        raise RuleBroken(f"{manifest_key(manifest.ref)}: {e}; it was changed") from e
    if found != named:
        raise RuleBroken(
            f"{manifest_key(manifest.ref)}: wanted the hash {found} of its weights, found {named}"
        )
    return True


def on_line(parts: Sequence[RecordsPart]) -> Columns:
    """Join the rows of `parts` (newest first) in ascending order of steps."""
    return step_records.joined(part.rows for part in reversed(parts))


__all__ = ["check_begun", "check_commits", "check_losses", "check_weights", "on_line"]


# Checks of snapshots in an audit against the records that they name: which snapshots lie on the
# run's line, and which a newer generation has superseded.

_STEPS = re.compile(rf"{rec.SAMPLES}(\d+)-(\d+)-[0-9a-f]+\.jsonl")


@dataclass
class RecordEnds:
    """The known ends of step records. `ends`, `begins`: by key of an object, the hash of its last
    record, and of the record before its first. `heads`: by step of a snapshot, the hash of the
    record there on the run's line. `genesis`: the hash before step 1, if known."""

    ends: dict[str, str] = field(default_factory=dict)
    begins: dict[str, str] = field(default_factory=dict)
    heads: dict[int, str] = field(default_factory=dict)
    genesis: str = ""


def check_lineage(
    manifests: Sequence[Manifest], worlds: Mapping[int, Epoch], line: RecordEnds
) -> list[Ref]:
    """Return the superseded snapshots, which no newer generation grew from. `manifests`: newest
    first. Raises RuleBroken."""
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
        # a generation has one history; only a zombie of an older one may have another
        if m.epoch >= newest.epoch:
            raise RuleBroken(
                f"snapshot {m.ref.name}: wanted the record of step {m.step} that snapshot "
                f"{newest.ref.name} grew from, found another history ({named.head[:16]})"
            )
        _check_own_line(m, named, line)
        off.append(m.ref)
    return off


def _check_end(m: Manifest, named: rec.RecordsRef, line: RecordEnds) -> None:
    """Check that the object ends with the record that the manifest names, and at its step."""
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
    """Check a superseded snapshot's history: object after object, back to the first step."""
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
    """Return the first and last step in the name of an object of records; `prove` checks it."""
    found = _STEPS.fullmatch(key)
    return (int(found[1]), int(found[2])) if found else (0, -1)


def _came_before(parent: object, ref: Ref) -> bool:
    try:
        found = Ref.parse(str(parent))
    except ValueError:
        return False
    return found < ref and found.step <= ref.step
