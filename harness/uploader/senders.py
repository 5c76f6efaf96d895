"""The interface of a session to the sender of its snapshots, and the sender that works in the
trainer's own process: without a node's uploader, or where that is gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from harness.bucket.layout import newest_epoch
from harness.core.decoding import NewerProtocol
from harness.core.facts import Fact, SnapshotCommitted, SnapshotFailed
from harness.core.world import Fenced
from harness.node.heartbeat import WAITS_FOR_SNAPSHOTS, ProgressFile, Sign
from storage.snapshots.manifest import Ref
from storage.snapshots.pacer import IdlePriority, TrainingSeen
from storage.snapshots.staging import Segment, StageFull
from storage.snapshots.upload import Uploader, UploadJob, UploadOutcome
from storage.stores.bounded_store import once_unread
from storage.stores.objects import ObjectStore

BUFFERS = 2  # one being sent, one being filled
NICE = 10
Done = Callable[[UploadOutcome], None]


class SnapshotSender(Protocol):
    """The interface of a session to the sender of its snapshots."""

    def segment(self, nbytes: int, must: bool = True) -> Segment:
        """Return memory for one more snapshot, which the caller owns until it sends it or gives it
        back. `must`: wait for memory that will be free soon. Raises StageFull."""

    def give_back(self, segment: Segment) -> None:
        """Release a segment that is not needed after all."""

    def send(self, job: UploadJob, segment: Segment, done: Done) -> None:
        """Hand over a snapshot. `done` is called with the outcome. The segment becomes free then or
        some time later; get the next one by `segment`."""

    def keep(self, job: UploadJob, segment: Segment, done: Done) -> None:
        """Hash this share of a state that goes into no bucket, and copy it to the next node. `done`
        is called with the outcome: "kept", with the share's part list in `note["part_list"]`, or
        "failed". The segment is the caller's until it gives it back."""

    def set_ahead(self, state: str) -> None:
        """Record the state that the nodes keep together, for the next generation; "": none."""

    def ahead(self) -> str:
        """Return what `set_ahead` was last given on this node; "": nothing."""

    def held(self, ref: Ref) -> dict[str, Any]:
        """Return where a snapshot lies nearer than in the bucket, in the form that
        `node_tiers.tiers_for` takes; {}: nowhere."""

    def open_data(self, folder: str, nbytes: int) -> dict[str, Any]:
        """Open a cache of data to other nodes. Return where theirs are, in the form that
        `node_tiers.data_peers` takes; {}: nowhere."""

    def close(self) -> None:
        """Let go of the node's uploader, which goes on with what it was given."""


def fence(store: ObjectStore) -> Callable[[Ref], None]:
    """Return a check that raises Fenced for snapshots of a generation (the code's `epoch`) if a
    newer one exists. It runs before each commit."""

    def check(ref: Ref) -> None:
        try:
            newest = newest_epoch(store).epoch
        except NewerProtocol as e:
            raise Fenced(
                f"generation {ref.epoch} is over: newer code has begun another ({e})"
            ) from e
        if newest > ref.epoch:
            raise Fenced(
                f"generation {ref.epoch} is over: a newer one exists, so its snapshot of step "
                f"{ref.step} is not committed"
            )

    return check


def sign_seen(sign: Sign | None) -> TrainingSeen | None:
    """Convert a trainer's heartbeat to what `storage.snapshots.pacer.TrainingWatch` returns."""
    if sign is None:
        return None
    return TrainingSeen(sign.step, sign.place in WAITS_FOR_SNAPSHOTS, sign.step_s)


@dataclass
class Slot:
    """A segment and its use. `near`: its snapshot is committed, and is being copied to nearer
    tiers."""

    segment: Segment
    busy: bool = False
    near: bool = False


class InProcessSender:
    """The courier that uploads from the trainer's own process and memory."""

    def __init__(
        self,
        store: ObjectStore,
        on_outcome: Callable[[UploadJob, UploadOutcome], None],
        progress: ProgressFile | None = None,
    ):
        seen = (
            (lambda where: sign_seen(progress.sign))
            if progress is not None
            else (lambda where: None)
        )
        self._uploader = Uploader(
            store, fence(store), on_outcome, line=IdlePriority(NICE), watch=seen
        )
        self._slots: list[Slot] = []

    def segment(self, nbytes: int, must: bool = True) -> Segment:
        self._slots = [s for s in self._slots if s.busy or s.segment.nbytes >= nbytes]
        for slot in self._slots:
            if not slot.busy:
                slot.busy = True
                return slot.segment
        if len(self._slots) >= BUFFERS:
            raise StageFull(f"{BUFFERS} snapshots are on their way already")
        self._slots.append(Slot(Segment.anonymous(nbytes).touch(), busy=True))
        return self._slots[-1].segment

    def give_back(self, segment: Segment) -> None:
        for slot in self._slots:
            if slot.segment is segment:
                slot.busy = False

    def send(self, job: UploadJob, segment: Segment, done: Done) -> None:
        def landed(outcome: UploadOutcome) -> None:
            once_unread(segment.view, lambda: self.give_back(segment))
            done(outcome)

        self._uploader.submit(job, segment.view, landed)

    def keep(self, job: UploadJob, segment: Segment, done: Done) -> None:
        done(not_kept(job, "this node has no uploader"))

    def set_ahead(self, state: str) -> None: ...

    def ahead(self) -> str:
        return ""

    def held(self, ref: Ref) -> dict[str, Any]:
        return {}

    def open_data(self, folder: str, nbytes: int) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def not_kept(job: UploadJob, why: str) -> UploadOutcome:
    """Return the outcome of a share that is not kept."""
    return UploadOutcome(job.ref, job.rank, "failed", error=why, kind="StoreError", note=job.note)


def fact_of(job: UploadJob, outcome: UploadOutcome) -> Fact:
    """Return the fact that records a job's outcome."""
    note, ref = job.note, job.ref
    if outcome.state != "committed":
        return SnapshotFailed(ref.step, ref.epoch, outcome.error)
    commit_s = time.time() - note["t_start"]
    return SnapshotCommitted(
        ref.step,
        ref.epoch,
        outcome.nbytes,
        note["stall_s"],
        commit_s,
        note["why"],
        note["t_start"],
        outcome.weights,
        outcome.slowdown,
        outcome.pace,
        note.get("interval_s", 0.0),
        note.get("between_losses_s", 0.0),
    )
