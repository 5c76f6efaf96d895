"""The state that nodes keep in memory ahead of a loss, where survivors could not keep it once they
hear of one: one copy of the model lies on all ranks, its state is on GPUs, or is read by all ranks
together. Runs in the worker.

It is a snapshot that goes to no bucket. At a step boundary on which the ranks agree by their votes
(`Want.KEEP_AHEAD`), each rank copies its share to host memory. Its node's uploader hashes that and
copies it to the next node (`uploader/handoff.py`), while training goes on. At a later boundary, the
ranks exchange the part lists of their shares; only with all of them do the nodes have a state to go
on from. Where both holders of a share are lost, the next world goes on from the last snapshot.

This takes as much of the training's time as `SHARE` says: rank 0 measures what each state cost, and
from that follows when the next one is due.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.core import step_records as rec
from harness.uploader.ahead_state import AheadState
from harness.uploader.senders import not_kept
from harness.worker.process_group import Peers
from harness.worker.resuming.kept_state import SHARE, KnowsOrigin, StateKeeper, StateOrigin
from harness.worker.run_context import Run
from harness.worker.snapshot_timer import Rhythm
from harness.worker.snapshotter import StagingBuffers, filled_of, tensor_of
from harness.worker.training_state import Training
from storage.errors import StoreError
from storage.snapshots.manifest import Ref
from storage.snapshots.staging import Segment, StageFull
from storage.snapshots.upload import UploadJob, UploadOutcome
from storage.tensors import dcp

LEAST_S = 2.0  # between two states, whatever they cost
FAILED_S = 60.0  # the pause after a rank could not keep its share; each time twice as long
WORTH = 0.5  # of the interval between snapshots: a longer one between these states is of no use


@dataclass
class AheadShare:
    """A rank's share of a state. `outcome`: once the share is kept, or is not."""

    ref: Ref
    phase: int
    segment: Segment
    origin: StateOrigin
    outcome: UploadOutcome | None = None
    told: threading.Event = field(default_factory=threading.Event)

    def tell(self, outcome: UploadOutcome) -> None:
        self.outcome = outcome
        self.told.set()


class AheadKeeper:
    """Keeps states ahead of a loss; see the module."""

    def __init__(
        self,
        peers: Peers,
        run: Run,
        training: Training,
        origin: KnowsOrigin,
        rhythm: Rhythm,
        hold: StagingBuffers,
        keeper: StateKeeper,
    ):
        self._peers, self._run, self._training = peers, run, training
        self._origin, self._rhythm, self._hold, self._keeper = origin, rhythm, hold, keeper
        self._coming: AheadShare | None = None  # not all ranks have said so far that they keep it
        self._newest: AheadShare | None = None  # the one that all ranks keep
        self._asked_at = -2  # the step behind which rank 0 has last asked for a turn
        self._again_s = 0.0  # when rank 0 may ask again (perf_counter)
        self._pause_s = FAILED_S
        self._told_s = 0.0  # the interval that was last printed
        self._cost = AheadCost()
        hold.give_way = self._give_way

    # ---- on rank 0 -------------------------------------------------------------------------------
    def due(self, step: int) -> bool:
        """Return whether the ranks should take their turn behind this step. Called on rank 0, at
        each boundary."""
        now_s, calm_s = time.perf_counter(), self._rhythm.calm_step_s
        coming = self._coming
        if coming is not None:
            self._cost.beside(now_s, step, calm_s, ended=coming.told.is_set())
        # with votes that are counted late, the turn that was asked for last is still to come
        if step <= self._asked_at + 1 or now_s < self._again_s:
            return False
        wanted = coming.told.is_set() if coming is not None else self._is_wanted and calm_s > 0
        if wanted:
            self._asked_at = step
        return wanted

    @property
    def _is_wanted(self) -> bool:
        training, keeper = self._training, self._keeper
        return (
            self._peers.world > 1
            and keeper.folder is not None
            and bool(self._run.url)
            and training.model is not None
            and self._hold.saver.planned
            and (not keeper.is_possible or training.only_first_knows)
            and self._cost.interval_s < WORTH * self._rhythm.interval_s()
        )

    # ---- on all ranks ----------------------------------------------------------------------------
    def turn(self, own_loop: bool) -> None:
        """Copy this rank's share to host memory, or find out whether all ranks have kept theirs.
        All ranks call it at the same boundary, once the step's record is known. `own_loop`: as in
        `Snapshotter.take`."""
        began_s = time.perf_counter()
        if self._coming is None:
            if own_loop:
                self._training.share_buffers(look=True)
            self._begin()
        else:
            self._end(self._coming)
        self._cost.stood(time.perf_counter() - began_s)
        if self._coming is None:
            self._again_s = max(self._again_s, time.perf_counter() + self._cost.end())
            self._tell()

    def _begin(self) -> None:
        if self._newest is not None and self._newest.ref.step <= self._origin.saved_step:
            self._give_way()
        tensors, plain = self._training.split()
        data = self._training.plain_of_rank(plain)
        saver = self._hold.saver
        segment = self._memory(saver) if saver.fits(tensors) else None
        if not all(self._peers.gather(segment is not None)) or segment is None:
            if segment is not None:
                self._hold.courier.give_back(segment)
            self._wait_longer()
            return
        staged = saver.begin(tensors, (), tensor_of(segment), filled=filled_of(segment))
        staged.wait()
        ref, phase = Ref(epoch=self._run.epoch, step=self._run.step), self._run.phase.number
        kept = self._coming = AheadShare(ref, phase, segment, self._origin.origin())
        self._cost.begin(time.perf_counter(), self._run.step)
        self._rhythm.is_disturbed = True
        self._hold.sender.run(lambda: self._send(kept, staged, data))

    def _memory(self, saver: dcp.Saver) -> Segment | None:
        """Return memory for one more share; None: there is none to spare."""
        try:
            segment = self._hold.courier.segment(saver.nbytes, must=False)
        except StageFull:
            return None
        dcp.pin(tensor_of(segment), segment)
        return segment

    def _send(self, kept: AheadShare, staged: dcp.Staged, data: dict[str, Any]) -> None:
        """Pass the share to the uploader. Runs in the background."""
        layout, peers = staged.layout, self._peers
        token = f"{self._run.token}{peers.rank}k"
        files = dict(layout.files)
        job = UploadJob(kept.ref, peers.rank, peers.world, token, files, layout.index, data)
        try:
            staged.arrive()
            self._hold.courier.keep(job, kept.segment, kept.tell)
        except (StoreError, RuntimeError) as e:
            kept.tell(not_kept(job, str(e)))

    def _end(self, coming: AheadShare) -> None:
        outcome = coming.outcome
        told = None if outcome is None else outcome.note.get("part_list", "")
        every = self._peers.gather((told, None if outcome is None else outcome.error))
        lists = [text for text, _ in every]
        if any(text is None for text in lists):
            self._again_s = time.perf_counter() + self._cost.stood_s
            return
        self._coming, self._rhythm.is_disturbed = None, False
        if why := next((error for _, error in every if error), ""):
            self._hold.courier.give_back(coming.segment)
            self._wait_longer()
            self._peers.print(f"harness: the nodes keep no state in memory: {why}")
            return
        if self._peers.local_rank == 0:
            self._hold.courier.set_ahead(self._described(coming, lists).encode())
        self._give_way()
        self._newest = coming

    def _wait_longer(self) -> None:
        self._again_s = time.perf_counter() + self._pause_s
        self._pause_s *= 2.0

    def _described(self, kept: AheadShare, lists: Sequence[str]) -> AheadState:
        records = [one for one in kept.origin.records if one.step <= kept.ref.step]
        return AheadState(
            run=self._run.url or "",
            phase=kept.phase,
            epoch=kept.ref.epoch,
            step=kept.ref.step,
            behind=kept.origin.behind,
            records=rec.encode(records).decode(),
            told=tuple(lists),
        )

    def _tell(self) -> None:
        """Print that a state is kept, the first time and when the interval has changed much."""
        told_s, interval_s = self._told_s, self._cost.interval_s
        if self._newest is not None and not told_s / 2 <= interval_s <= told_s * 2:
            self._told_s = interval_s
            self._peers.print(
                f"harness: the nodes keep the state of step {self._newest.ref.step} in memory, and "
                f"the next one in {interval_s:.0f} s"
            )

    def _give_way(self) -> None:
        """Let go of this rank's memory: a newer state is kept or committed, or a snapshot needs it,
        and the next node still has a copy of the share."""
        if self._newest is not None:
            self._hold.courier.give_back(self._newest.segment)
            self._newest = None


@dataclass
class AheadCost:
    """The time that one state takes of the training: `stood_s`, in which it stands still, and
    `slowed_s`, by which steps beside it are longer. `interval_s`: between two states, so that they
    take no more than `SHARE`."""

    stood_s: float = 0.0
    slowed_s: float = 0.0
    interval_s: float = LEAST_S
    _began_s: float = 0.0
    _step: int = 0
    _is_beside: bool = False
    _is_first: bool = True

    def begin(self, now_s: float, step: int) -> None:
        """Record that the state is copied, behind this step, and on its way."""
        self._began_s, self._step, self._is_beside = now_s, step, True

    def beside(self, now_s: float, step: int, calm_step_s: float, ended: bool) -> None:
        """Record a boundary behind `step`, while the state is on its way. `calm_step_s`: of a step
        without one; `ended`: this rank's share has arrived."""
        if self._is_beside:
            usual_s = (step - self._step) * calm_step_s
            self.slowed_s = max(0.0, now_s - self._began_s - usual_s)
            self._is_beside = not ended

    def stood(self, seconds: float) -> None:
        """Record that training stood still."""
        self.stood_s += seconds

    def end(self) -> float:
        """Record that the state has arrived. Return the seconds until the next one may begin. The
        first one sets up what later ones use, so it costs more, and does not count."""
        cost_s = 0.0 if self._is_first else self.stood_s + self.slowed_s
        self.stood_s = self.slowed_s = 0.0
        self._is_first = False
        self.interval_s = max(LEAST_S, cost_s / SHARE)
        return self.interval_s
