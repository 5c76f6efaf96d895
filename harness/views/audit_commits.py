"""What a run says of its commits in different places: facts, listings, marks, the names of step
records, losses, hashes of weights. In an audit they must agree.

Pure but for the store it is given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from harness.bucket.recorded import RecordsPart
from harness.core import columns
from harness.core.columns import Columns
from harness.core.facts import SnapshotCommitted
from harness.views.audit_rules import RuleBroken
from storage.errors import NotFound
from storage.export import PREFIX
from storage.manifest import Manifest, Ref, SnapshotCorrupt
from storage.pruning import DOOMED_KEPT
from storage.restore import rewind_allowed
from storage.snapshot_keys import doom_key, manifest_key, quarantine_key
from storage.snapshots import Snapshots, scratch
from storage.weights import sum_of_stored

# by so much the begin of a step may differ in two places, in seconds, and be the same step
SAME_S = 1e-3


def check_commits(
    snapshots: Snapshots, told: Iterable[SnapshotCommitted], manifests: Iterable[Manifest]
) -> tuple[int, str]:
    """What was told to be committed is there, or older than what is; nothing marks the newest
    snapshot though it is whole. To be asked when the facts are read. Raises RuleBroken,
    StoreError."""
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
    # of so many a prune has taken the oldest marks away
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
    """Raises RuleBroken."""
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
    """Records from step k + 1 on are written when k is committed. `uncommitted`: those that no
    retained snapshot leads to. Raises RuleBroken, StoreError."""
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
    """`told`: steps as facts tell them, `recorded`: the records of the run's line; both by epoch
    and step, each once. Raises RuleBroken."""
    facts, records = columns.in_both(told, recorded)
    same = (facts["loss"] == records["loss"]) | (
        np.isnan(facts["loss"]) & np.isnan(records["loss"])
    )
    # a loop that is run again in the same session tells its steps again
    same |= np.abs(facts["start"] - records["start"]) > SAME_S
    if not same.all():
        fact, record = (rows[int(np.argmin(same))] for rows in (facts, records))
        raise RuleBroken(
            f"step {fact['step']} of epoch {fact['epoch']}: wanted the loss {fact['loss']} that a "
            f"fact tells, found {record['loss']} in its step record"
        )
    for m in manifests:
        loss = m.data.get("loss")
        if m.ref in off or not isinstance(loss, float) or not 0 < m.step <= len(recorded):
            continue
        if recorded["step"][m.step - 1] != m.step:
            continue  # they do not begin at step 1, which another check says
        found = float(recorded["loss"][m.step - 1])
        if found != loss and not np.isnan([found, loss]).all():
            raise RuleBroken(
                f"{manifest_key(m.ref)}: wanted the loss {found} of the record of step {m.step}, "
                f"found {loss}"
            )
    return len(facts), "of facts, records and manifests, the same"


def check_weights(snapshots: Snapshots, manifest: Manifest) -> bool:
    """Is the hash of the weights that a manifest names made of its tensors? False: it names none.
    Raises RuleBroken, SnapshotCorrupt, StoreError."""
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
    """`parts`: newest first."""
    return columns.joined(part.rows for part in reversed(parts))


__all__ = ["check_begun", "check_commits", "check_losses", "check_weights", "on_line"]
