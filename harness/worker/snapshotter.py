"""The life of snapshots: copied to host memory beside the training, sent, landed. Runs in the
worker.

One snapshot is on its way at a time. The next one waits for it, unless time is short: then it
overtakes the other and carries its step records as well.
"""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from harness.core import records as rec
from harness.core.facts import SnapshotFailed
from harness.core.world import Fenced, HarnessError
from harness.node.progress import WorkerPhase
from harness.worker import replicas
from harness.worker.environment import environment
from harness.worker.frozen import Frozen
from harness.worker.hold import Hold, filled_of, tensor_of
from harness.worker.peers import Peers
from harness.worker.pretrained import config_of
from harness.worker.resume import LastSeen
from harness.worker.rhythm import Rhythm
from harness.worker.run import Run
from harness.worker.steplog import StepLog
from harness.worker.training import Training, common
from storage import dcp
from storage.errors import StoreError
from storage.manifest import Manifest, Ref
from storage.retention import TAKEN, Keep
from storage.staging import Segment
from storage.upload import UploadJob, UploadOutcome
from storage.upload_job import TrainingBeside

COMMIT_TIMEOUT_S = 600.0  # the longest that leaving waits for its snapshot


class CommitTimeout(HarnessError):
    """A snapshot that had to be committed was not, within its bound."""


@dataclass
class Agreement:
    """Do all ranks hold the same, of the planned structure? Known when `work` has ended."""

    held: replicas.Held  # what must be the same on all ranks, as it was
    # (1 + 2 * stages,) int64: has the structure changed on any rank; of each stage of a pipeline
    # greatest and -least
    flags: torch.Tensor
    work: Any

    @property
    def changed(self) -> bool:
        return bool(int(self.flags[0]))

    @property
    def differs(self) -> bool:
        return any(greatest != -least for greatest, least in self.flags[1:].view(-1, 2).tolist())


@dataclass
class Landing:
    """How the flight of a snapshot ended, once that is `told`."""

    told: threading.Event = field(default_factory=threading.Event)
    committed: bool = False
    error: BaseException | None = None


@dataclass
class Flight:
    """A snapshot on its way to the bucket."""

    ref: Ref
    t_start: float
    why: str
    records: list[rec.StepRecord]  # of the steps since the last snapshot
    tensors: dict[str, torch.Tensor]
    plain: dict[str, Any]
    data: dict[str, Any]
    agreement: Agreement | None = None
    staged: dcp.Staged | None = None  # None: the structure is not the planned one
    segment: Segment | None = None
    finished: bool = False  # training may change the state
    stall_s: float = 0.0
    within_s: float = 0.0  # see `TrainingBeside`
    waiting_since_s: float | None = None
    landing: Landing = field(default_factory=Landing)


class Snapshotter:
    """`parent`: the newest snapshot that was begun or loaded. `saved_step`: of the newest that is
    surely committed."""

    def __init__(
        self,
        peers: Peers,
        run: Run,
        training: Training,
        log: StepLog,
        hold: Hold,
        rhythm: Rhythm,
        last_seen: LastSeen,
        keep: Keep,
    ):
        self._peers, self._run, self._training, self._log = peers, run, training, log
        self._hold, self._rhythm, self._last_seen, self._keep = hold, rhythm, last_seen, keep
        self.parent: Ref | None = None
        self.saved_step = -1
        self._resumed_ref = ""  # the snapshot that this epoch went on from
        self._last_samples: dict[str, Any] | None = None
        self._flight: Flight | None = None
        self._older: list[Flight] = []  # overtaken by a snapshot that could not wait
        # parameters and optimizer state are copied beside the next forward and backward
        self._beside = True

    # ---- what is known ---------------------------------------------------------------------------
    def resumed(self, manifest: Manifest | None) -> None:
        """What was restored is what the next snapshot follows; None: nothing was."""
        where = f"{self._peers.world} {self._run.url}"
        self._rhythm.resumed(manifest.data if manifest else None, where)
        if manifest is not None:
            self.parent, self.saved_step = manifest.ref, manifest.step
            self._resumed_ref = manifest.ref.name
            self._last_samples = manifest.data.get("samples")
            head = self._last_samples["head"] if self._last_samples else self._run.genesis()
        else:
            head = self._run.genesis()
        self._log.head = head

    @property
    def _frozen(self) -> Frozen:
        return self._training.frozen

    @property
    def resumed_step(self) -> int:
        """Of the snapshot that this epoch went on from; 0: it began."""
        return Ref.parse(self._resumed_ref).step if self._resumed_ref else 0

    @property
    def flight_step(self) -> int | None:
        """Of the snapshot that is on its way, or landed and was not looked at."""
        return self._flight.ref.step if self._flight is not None else None

    @property
    def quiet(self) -> bool:
        """No snapshot is on its way."""
        return self._flight is None or self._flight.landing.told.is_set()

    @property
    def copies(self) -> bool:
        """The state may not change yet."""
        return self._flight is not None and not self._flight.finished

    def due(self) -> bool:
        return bool(self._run.url) and self.quiet and self._rhythm.due(self._run.step)

    # ---- begin -----------------------------------------------------------------------------------
    def take(self, why: str, ended: str = "", own_loop: bool = False) -> None:
        """Begin to copy the state to host memory; from there it is sent in the background.

        What only the optimizer changes is copied beside the next forward and backward;
        `finish_staging` waits for the rest of it. `ended`: how the run ended, of its final
        snapshot. `own_loop`: the steps were not ours, so buffers are still each rank's own.
        """
        if not self._run.url:
            return
        self._peers.life.tell(WorkerPhase.STAGING, self._run.step)
        if self._log.pending is None and own_loop:
            self._training.share_buffers(look=True)  # our own steps have done it
        t_start, t0 = time.time(), time.perf_counter()
        if why == "notice" and not self.quiet:
            self._overtake()
        self.land(must=False)
        self._log.settle()
        ref = Ref(epoch=self._run.epoch, step=self._run.step)
        tensors, plain = dcp.split(self._training.state())
        unsaved, self._log.unsaved = self._log.unsaved, []
        data = self._data(why, plain, unsaved, ended)
        if self._peers.rank == 0:
            data[TAKEN] = t_start
        flight = Flight(ref, t_start, why, unsaved, tensors, plain, data)
        if why == "interval":
            flight.within_s = self._rhythm.within_s
        self._begin_copy(flight)
        self.parent, self._flight = ref, flight
        self._rhythm.begin()
        flight.stall_s = self._rhythm.stall_s = max(time.perf_counter() - t0, 1e-4)
        self._hold.sender.run(functools.partial(self._send, flight, flight.agreement))

    def _data(
        self, why: str, plain: dict[str, Any], unsaved: list[rec.StepRecord], ended: str
    ) -> dict[str, Any]:
        """What the manifest says beside the tensors."""
        data = self._training.plain_of_rank(plain)
        if self._peers.rank == 0:
            data |= {
                "final": bool(ended),
                **({"ended": ended} if ended else {}),
                "parent": self.parent.name if self.parent else "",
                "samples": self._last_samples,
                "metrics": dict(self._log.last_metrics),
                "environment": environment(self._peers.device),
                **({"adapters": adapters} if (adapters := self._frozen.adapters()) else {}),
                **({"config": config} if (config := config_of(self._training.model)) else {}),
                # its line was begun under the guard of storage/restore.py
                "resumed": self._resumed_ref,
                "losses": self._rhythm.losses(why),
                "pace": self._rhythm.pace_data(),
            }
            if unsaved:
                data["samples"] = {
                    "key": rec.key(unsaved),
                    "head": unsaved[-1].h,
                    "first": unsaved[0].step,
                    "last": unsaved[-1].step,
                }
                data["loss"] = unsaved[-1].loss
        if unsaved:
            self._last_samples = data.get("samples")
        return data

    def _begin_copy(self, flight: Flight) -> None:
        tensors, saver, control = flight.tensors, self._hold.saver, self._peers.control
        changed = not saver.fits(tensors)
        still = self._frozen.left_alone(tensors)
        between = self._training.between_updates(tensors) | still
        if not saver.planned or control is None:
            if changed:
                self._hold.plan(tensors, flight.plain, still)
        else:
            # Whether it has changed on any rank, or differs between ranks, is known when it is
            # needed: before the optimizer steps.
            held = replicas.held_aside(common(tensors), common(flight.plain), between)
            grouping, total = self._peers.grouping, held.total()
            flags = torch.full((1 + 2 * grouping.stages,), -(1 << 62))  # what others say is greater
            mine = 1 + 2 * grouping.stage(self._peers.rank)
            flags[0], flags[mine : mine + 2] = changed, torch.tensor([total, -total])
            work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=control, async_op=True)
            flight.agreement = Agreement(held, flags, work)
        if flight.agreement is None or not changed:
            flight.segment = self._hold.segment(self._wait_for_older)
            later = between if self._beside else set()
            buffer, filled = tensor_of(flight.segment), filled_of(flight.segment)
            flight.staged = saver.begin(tensors, later, buffer, still, filled)

    def _wait_for_older(self) -> None:
        for flight in self._older:
            flight.landing.told.wait(COMMIT_TIMEOUT_S)

    def _overtake(self) -> None:
        """Time is short: the next snapshot does not wait for the one that is on its way, and
        carries its records as well."""
        self.finish_staging()
        assert self._flight is not None
        self._log.unsaved = self._flight.records + self._log.unsaved
        self._older, self._flight = [*self._older, self._flight], None

    # ---- copy ------------------------------------------------------------------------------------
    def finish_staging(self) -> None:
        """The state is about to change: wait for what is not copied yet. All ranks come here at
        the same point, between the same steps."""
        flight = self._flight
        if flight is None or flight.finished:
            return
        t0 = flight.waiting_since_s = time.perf_counter()
        if flight.agreement is not None:
            self._act_on(flight, flight.agreement)
        assert flight.staged is not None
        flight.staged.wait()
        flight.finished = True
        flight.stall_s += time.perf_counter() - t0
        self._rhythm.stall_s = flight.stall_s
        if self._beside and (touched := flight.staged.touched()):
            self._beside = False
            self._run.warn_here(
                f"{touched[0]!r} (one of {len(touched)}) was changed in place between two "
                "optimizer steps; from now on snapshots are copied while training stands still"
            )

    def _act_on(self, flight: Flight, agreement: Agreement) -> None:
        """Refuse what differs; copy anew what has another structure."""
        agreement.work.wait()
        if agreement.differs:
            self._flight = None  # nobody sends it
            if flight.segment is not None and flight.staged is not None:
                flight.staged.arrive()
                self._hold.courier.give_back(flight.segment)
            self._hold.refuse_differences(agreement.held)
        # plan anew; nothing has changed the state so far
        if agreement.changed:
            still = self._frozen.left_alone(flight.tensors)
            self._hold.plan(flight.tensors, flight.plain, still)
            if flight.staged is not None:
                flight.staged.arrive()
            if flight.segment is not None:
                self._hold.courier.give_back(flight.segment)
            flight.segment = self._hold.segment(self._wait_for_older)
            buffer = tensor_of(flight.segment)
            flight.staged = self._hold.saver.begin(flight.tensors, (), buffer)
            self._hold.sender.run(functools.partial(self._send, flight, None))

    # ---- send ------------------------------------------------------------------------------------
    def _send(self, flight: Flight, agreement: Agreement | None) -> None:
        """In the background: when the bytes are in host memory, hand them to whoever sends them."""
        try:
            if agreement is not None:
                agreement.work.wait()
                if agreement.changed or agreement.differs:
                    return  # `finish_staging` copies again, or refuses
            staged, segment = flight.staged, flight.segment
            assert staged is not None and segment is not None
            staged.arrive()
            # In this order: what is found before `finished` was set is a fault, and what the next
            # optimizer step changes after that is none.
            touched = staged.touched() if self._beside else []
            if touched and not flight.finished:
                raise StoreError(
                    f"snapshot of step {flight.ref.step}: {touched[0]!r} was changed in place "
                    "while it was copied"
                )
            job = self._job(flight, staged)
            self._hold.courier.send(job, segment, lambda outcome: self._landed(flight, outcome))
        except (StoreError, RuntimeError) as e:
            self._run.fact(SnapshotFailed(flight.ref.step, flight.ref.epoch, str(e)))
            if flight.segment is not None:
                self._hold.courier.give_back(flight.segment)
            flight.landing.error = e
            flight.landing.told.set()

    def _job(self, flight: Flight, staged: dcp.Staged) -> UploadJob:
        leads, since_s = self._peers.rank == 0, flight.waiting_since_s
        stall_s = flight.stall_s
        if since_s is not None and not flight.finished:
            stall_s += time.perf_counter() - since_s
        before = (
            {rec.key(flight.records): rec.encode(flight.records).decode()}
            if flight.records and leads
            else {}
        )
        token = f"{self._run.token}{self._peers.rank}"
        unchanged = self._hold.since_last(staged, f"{token} {flight.ref.name}")
        return UploadJob(
            flight.ref,
            self._peers.rank,
            self._peers.world,
            token,
            dict(staged.layout.files),
            staged.layout.index,
            flight.data,
            weights="model/",
            unchanged=unchanged,
            before=before,
            keep=asdict(self._keep) if leads else None,
            beside=TrainingBeside(
                self._rhythm.calm_step_s,
                flight.within_s,
                self._rhythm.pace,
                self._peers.life.path or "here",
            ),
            note={
                "t_start": flight.t_start,
                "stall_s": stall_s,
                "why": flight.why,
                "interval_s": self._rhythm.interval_s(),
                "between_losses_s": self._rhythm.between_losses_s,
            },
        )

    # ---- land ------------------------------------------------------------------------------------
    def _landed(self, flight: Flight, outcome: UploadOutcome) -> None:
        if outcome.state == "committed":
            flight.landing.committed = True
            self._last_seen.note(flight.ref)
            self._rhythm.landed(time.time() - flight.t_start, outcome.slowdown, flight.within_s)
            self._rhythm.pace = outcome.pace or self._rhythm.pace
        else:
            known = {"Fenced": Fenced, "CommitTimeout": CommitTimeout}
            flight.landing.error = known.get(outcome.kind, StoreError)(outcome.error)
        flight.landing.told.set()

    def land(self, must: bool) -> None:
        """Wait for the snapshot that is on its way. `must`: its failure is ours (we are about
        to leave). Raises StoreError, Fenced, CommitTimeout."""
        self.finish_staging()
        flight, self._flight = self._flight, None
        if flight is None:
            return
        self._peers.life.tell(WorkerPhase.SAVING)
        flight.landing.told.wait(COMMIT_TIMEOUT_S + 60.0)
        if not flight.landing.committed:
            error = flight.landing.error or CommitTimeout(
                f"nothing was heard of the snapshot of step {flight.ref.step}"
            )
            if must:
                raise error
            # the next snapshot carries these as well
            self._log.unsaved = flight.records + self._log.unsaved
            print(
                f"harness: snapshot of step {flight.ref.step} failed, training goes on: {error}",
                flush=True,
            )
        else:
            self.saved_step = flight.ref.step
