"""The making of snapshots: copied to host memory during training, uploaded, committed. Runs in the
worker.

One snapshot is in flight at a time. The next one waits for it, unless time is short: then it
overtakes the other and carries its step records as well.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.core import step_records as rec
from harness.core.facts import SnapshotFailed
from harness.core.world import BadInput, Fenced, HarnessError
from harness.node.heartbeat import WorkerPhase
from harness.uploader.handoff import courier_at
from harness.uploader.senders import InProcessSender, SnapshotSender
from harness.worker import replica_check
from harness.worker.frozen_weights import Frozen
from harness.worker.process_group import Peers
from harness.worker.resuming.ahead_states import StateInMemory
from harness.worker.resuming.hand_over import chained
from harness.worker.resuming.kept_state import StateOrigin
from harness.worker.resuming.resume import NewestCommitted
from harness.worker.run_context import Run
from harness.worker.setup_check import environment
from harness.worker.snapshot_timer import Rhythm
from harness.worker.step_log import StepLog
from harness.worker.training_state import Training, common, model_config
from storage.errors import StoreError
from storage.snapshots.manifest import Manifest, Ref
from storage.snapshots.retention import TAKEN, Keep
from storage.snapshots.staging import Segment, StageFull
from storage.snapshots.upload import TrainingBeside, Unchanged, UploadJob, UploadOutcome
from storage.tensor_threads import TensorThread, start_thread
from storage.tensors import dcp, state_tree
from storage.tensors.dcp import Filled, Layout

# Host memory for this rank's share of a snapshot, and the plan of which rank writes what.

# names of tensors -> those of them that training does not change
LeftAlone = Callable[[Collection[str]], set[str]]


class StagingBuffers:
    """Staging memory and uploader of one rank. `courier_at`: the folder of the node's uploader;
    None: this process uploads its snapshots itself."""

    def __init__(self, peers: Peers, run: Run, courier_at: str | None):
        self._peers, self._run, self._courier_at = peers, run, courier_at
        self._courier: SnapshotSender | None = None
        self._meeting = threading.Lock()
        self._preparing: threading.Thread | None = None
        self._sent: _Sent | None = None
        # gives memory back that a snapshot needs more
        self.give_way: Callable[[], None] = lambda: None

    @functools.cached_property
    def saver(self) -> dcp.Saver:
        return dcp.Saver(self._run.snapshots, self._peers.control, own_memory=False)

    @functools.cached_property
    def sender(self) -> TensorThread:
        """The thread that sends snapshots."""
        return TensorThread("snapshot")

    @property
    def courier(self) -> SnapshotSender:
        """The courier that takes snapshots to the bucket. Any thread may read this."""
        with self._meeting:
            if self._courier is None:
                self._courier = self._met()
            return self._courier

    def _met(self) -> SnapshotSender:
        local = InProcessSender(self._run.store, self._run.record_outcome, self._peers.life)
        if not self._courier_at:
            return local
        return courier_at(Path(self._courier_at), self._run.epoch, self._peers.local_rank, local)

    def prepare(self, state: Callable[[], dict[str, Any]], left_alone: LeftAlone) -> None:
        """Plan the snapshot and reserve its memory in a thread, before the first snapshot needs it.
        Called after each step; acts once, after the first, when the optimizer has its state."""
        if self._run.url and self._preparing is None:
            tensors, plain = state_tree.split(state())
            if not self.saver.planned:
                self.plan(tensors, plain, left_alone(tensors))
            self.sender  # noqa: B018 - starts it
            take = functools.partial(self._take_memory, self.saver.nbytes)
            self._preparing = start_thread("stage", take)

    def plan_anew(self) -> None:
        """Drop the plan, since other objects are trained from now on."""
        if self._preparing is not None:
            self._preparing.join()
        self._preparing = self._sent = None
        self.__dict__.pop("saver", None)

    def plan(
        self, tensors: dict[str, torch.Tensor], plain: dict[str, Any], still: Collection[str]
    ) -> None:
        """Agree which rank writes which tensor. `still`: names of unchanged tensors, which get
        separate files. Raises BadInput on all ranks if their states differ."""
        if self._peers.control is not None:
            size = self._peers.copy_ranks
            mine = replica_check.held(common(tensors), common(plain), within_replicas=size > 1)
            said = (mine.total(), mine.shards_total(), environment(self._peers.device))
            totals, shards, kinds = zip(*self._peers.gather(said), strict=True)
            apart = any(len(set(shards[place::size])) > 1 for place in range(size))
            if apart or any(len(set(one.values())) > 1 for one in self._peers.by_stage(totals)):
                self.refuse_differences(mine, alike=all(kind == kinds[0] for kind in kinds))
        self.saver.plan(tensors, still)

    def refuse_differences(self, mine: replica_check.Held, alike: bool = True) -> None:
        """Raise BadInput that names the tensors in which ranks differ. All ranks call this.
        `alike`: their devices and libraries are of one kind; otherwise arithmetic may differ, and
        differences in model and optimizer tensors only cause a warning."""
        leaves, shards = zip(*self._peers.gather((mine.leaves(), mine.shards)), strict=True)
        found, size = [], self._peers.copy_ranks
        for stage in self._peers.by_stage(leaves):
            found += replica_check.differing(list(stage.values()), list(stage))
        for place in range(size):
            ranks = range(place, self._peers.world, size)
            found += replica_check.differing(shards[place::size], ranks)
        if (
            found
            and not alike
            and all(
                path in mine.tensors and path.startswith(("model/", "optimizer/"))
                for path, _ in found
            )
        ):
            self._run.warn(
                "ranks are of different kinds (device or library), and their copies of "
                f"{found[0][0]!r} (one of {len(found)}) are no longer the same to the bit; a "
                "snapshot takes each tensor from one of them"
            )
            return
        raise BadInput(replica_check.explain(found))

    def since_last(self, staged: dcp.Staged, name: str) -> Unchanged:
        """Return what of a staged snapshot is unchanged since the last one that was handed over.
        `name`: the name of the staged one."""
        last, now = self._sent, _Sent(staged.layout, dict(staged.still()), name)
        self._sent = now
        if last is None or last.layout is not now.layout:
            return Unchanged()
        same = {place for place, found in now.prints.items() if last.prints.get(place) == found}
        return Unchanged(last.name, now.layout.ranges(same))

    def _take_memory(self, nbytes: int) -> None:
        with contextlib.suppress(StageFull):  # reported when a snapshot needs the memory
            segment = self.courier.segment(nbytes)
            dcp.pin(tensor_of(segment), segment)
            self.courier.give_back(segment)

    def close(self) -> None:
        """Let go of the uploader: another world has its own connection."""
        if self._courier is not None:
            self._courier.close()

    def segment(self, make_room: Callable[[], None]) -> Segment:
        """Return memory for this rank's share of a snapshot. `make_room`: waits until everything
        sent is committed or has failed; called if the stage is full. Raises StageFull."""
        if self._preparing is not None:
            self._preparing.join()
        try:
            segment = self.courier.segment(self.saver.nbytes)
        except StageFull:
            self.give_way()
            make_room()  # there is room for one buffer only
            segment = self.courier.segment(self.saver.nbytes)
        dcp.pin(tensor_of(segment), segment)
        return segment


@dataclass(frozen=True)
class _Sent:
    """A snapshot that was handed over: its layout, and fingerprints of its unchanged tensors."""

    layout: Layout
    prints: dict[int, str]
    name: str


def filled_of(segment: Segment) -> Filled:
    """Return the record of what the segment holds already, made on the first call."""
    if segment.filled is None:
        segment.filled = Filled()
    found: Filled = segment.filled
    return found


def tensor_of(segment: Segment) -> torch.Tensor:
    """Return the segment's memory as a uint8 tensor."""
    return torch.frombuffer(segment.view, dtype=torch.uint8)


COMMIT_TIMEOUT_S = 600.0  # the longest wait for the last snapshot before leaving


class CommitTimeout(HarnessError):
    """The error for a required snapshot that was not committed within the time limit."""


@dataclass
class Agreement:
    """The comparison of state and its structure between ranks, valid when `work` has ended."""

    held: replica_check.Held  # this rank's part that must be the same on all ranks
    # (1 + 2 * stages,) int64: whether the structure has changed on any rank; then, for each
    # pipeline stage, the greatest hash and the negative of the least
    flags: torch.Tensor
    work: Any

    @property
    def changed(self) -> bool:
        return bool(int(self.flags[0]))

    @property
    def differs(self) -> bool:
        return any(greatest != -least for greatest, least in self.flags[1:].view(-1, 2).tolist())


@dataclass
class SnapshotOutcome:
    """The outcome of a snapshot's flight, valid once `told` is set."""

    told: threading.Event = field(default_factory=threading.Event)
    committed: bool = False
    error: BaseException | None = None


@dataclass
class PendingSnapshot:
    """A snapshot in flight: being copied or uploaded."""

    ref: Ref
    t_start: float
    why: str
    records: list[rec.StepRecord]  # those of the steps since the last snapshot
    tensors: dict[str, torch.Tensor]
    plain: dict[str, Any]
    data: dict[str, Any]
    agreement: Agreement | None = None
    staged: dcp.Staged | None = None  # None: the structure differs from the planned one
    segment: Segment | None = None
    finished: bool = False  # training may change the state
    stall_s: float = 0.0
    within_s: float = 0.0  # see `TrainingBeside`
    waiting_since_s: float | None = None
    landing: SnapshotOutcome = field(default_factory=SnapshotOutcome)


class Snapshotter:
    """The maker of this rank's part of snapshots. `parent`: the newest snapshot that was begun or
    loaded. `saved_step`: step of the newest that is known to be committed; -1: none."""

    def __init__(
        self,
        peers: Peers,
        run: Run,
        training: Training,
        log: StepLog,
        hold: StagingBuffers,
        rhythm: Rhythm,
        last_seen: NewestCommitted,
        keep: Keep,
    ):
        self._peers, self._run, self._training, self._log = peers, run, training, log
        self._hold, self._rhythm, self._last_seen, self._keep = hold, rhythm, last_seen, keep
        self.parent: Ref | None = None
        self._saved: Ref | None = None
        self._resumed_ref = ""  # the snapshot that this world resumed from, or that its state is of
        self._last_samples: dict[str, Any] | None = None
        self._flight: PendingSnapshot | None = None
        self._older: list[PendingSnapshot] = []  # overtaken by a snapshot that could not wait
        # parameters and optimizer state are copied during the next forward and backward
        self._beside = True

    # ---- state -----------------------------------------------------------------------------------
    def resumed(self, manifest: Manifest | None, kept: StateInMemory | None = None) -> None:
        """Continue from the snapshot that was restored; None: there was none. `kept`: the state
        that was restored instead, which comes after that snapshot."""
        where = f"{self._peers.world} {self._run.url}"
        self._rhythm.resumed(manifest.data if manifest else None, where, kept is not None)
        if manifest is not None:
            self.parent = self._saved = manifest.ref
            self._resumed_ref = manifest.ref.name
            self._last_samples = manifest.data.get("samples")
            head = self._last_samples["head"] if self._last_samples else self._run.genesis()
        else:
            head = self._run.genesis()
        self._log.head = head
        if kept is not None:
            behind = chained(kept.steps(), manifest.step if manifest is not None else 0, head)
            self._log.unsaved = behind
            if behind:
                self._log.head, self._log.last = behind[-1].h, behind[-1]

    @property
    def saved_step(self) -> int:
        return -1 if self._saved is None else self._saved.step

    def origin(self) -> StateOrigin:
        """Return where the present state comes from."""
        now = [] if self._flight is None else [self._flight]
        saved = "" if self._saved is None else self._saved.name
        behind = [saved, *(flight.ref.name for flight in [*self._older, *now])]
        records = [record for flight in now for record in flight.records]
        return StateOrigin(tuple(behind), (*records, *self._log.unsaved))

    @property
    def _frozen(self) -> Frozen:
        return self._training.frozen

    @property
    def flight_step(self) -> int | None:
        """Step of the snapshot in flight, or landed but not handled yet; None: there is none."""
        return self._flight.ref.step if self._flight is not None else None

    @property
    def quiet(self) -> bool:
        """True if no snapshot is in flight."""
        return self._flight is None or self._flight.landing.told.is_set()

    @property
    def copies(self) -> bool:
        """True while a snapshot is being copied, so that the state must not change."""
        return self._flight is not None and not self._flight.finished

    def due(self, step: int) -> bool:
        """Return whether a snapshot is due behind this step."""
        return bool(self._run.url) and self.quiet and self._rhythm.due(step)

    # ---- begin -----------------------------------------------------------------------------------
    def take(self, why: str, ended: str = "", own_loop: bool = False) -> None:
        """Begin to copy the state to host memory, from where it is uploaded in the background.

        State that only the optimizer changes is copied during the next forward and backward;
        `finish_staging` waits for the end of that. `ended`: how the run ended, for its final
        snapshot. `own_loop`: the steps were made by the script's own loop, so buffers may still
        differ between ranks.
        """
        if not self._run.url:
            return
        self._peers.life.tell(WorkerPhase.STAGING, self._run.step)
        if self._log.pending is None and own_loop:
            self._training.share_buffers(look=True)  # `Work.done` does this in our own steps
        t_start, t0 = time.time(), time.perf_counter()
        if why == "notice" and not self.quiet:
            self._overtake()
        self.land(must=False)
        self._log.settle()
        ref = Ref(epoch=self._run.epoch, step=self._run.step)
        tensors, plain = self._training.split()
        unsaved, self._log.unsaved = self._log.unsaved, []
        data = self._data(why, plain, unsaved, ended)
        if self._peers.rank == 0:
            data[TAKEN] = t_start
        flight = PendingSnapshot(ref, t_start, why, unsaved, tensors, plain, data)
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
        """Return the manifest's data besides the tensors."""
        data = self._training.plain_of_rank(plain)
        if self._peers.rank == 0:
            data |= {
                "final": bool(ended),
                **({"ended": ended} if ended else {}),
                **({"phase": phase} if (phase := self._run.phase.number) > 1 else {}),
                "parent": self.parent.name if self.parent else "",
                "samples": self._last_samples,
                "metrics": dict(self._log.last_metrics),
                "environment": environment(self._peers.device),
                **({"adapters": adapters} if (adapters := self._frozen.adapters()) else {}),
                **({"config": config} if (config := model_config(self._training.model)) else {}),
                # its presence shows that this line of snapshots has the guard of
                # storage/snapshots/restore.py
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

    def _begin_copy(self, flight: PendingSnapshot) -> None:
        tensors, saver, control = flight.tensors, self._hold.saver, self._peers.control
        changed = not saver.fits(tensors)
        still = self._frozen.left_alone(tensors)
        between = self._training.between_updates(tensors) | still
        if not saver.planned or control is None:
            if changed:
                self._hold.plan(tensors, flight.plain, still)
        else:
            # Whether the structure has changed on any rank, or the state differs between ranks, is
            # only needed before the optimizer steps, so the exchange is asynchronous.
            held = replica_check.held_aside(common(tensors), common(flight.plain), between)
            grouping, total = self._peers.grouping, held.total()
            flags = torch.full((1 + 2 * grouping.stages,), -(1 << 62))  # less than any real value
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
        """Let the next snapshot not wait for the one in flight, since time is short. It carries
        that one's records as well."""
        self.finish_staging()
        assert self._flight is not None
        self._log.unsaved = self._flight.records + self._log.unsaved
        self._older, self._flight = [*self._older, self._flight], None

    # ---- copy ------------------------------------------------------------------------------------
    def finish_staging(self) -> None:
        """Wait for the copy in progress, before the state changes. All ranks call it at the same
        point, between the same steps."""
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

    def abandon(self) -> None:
        """Wait for the copy in progress, and for no other rank: the world is over, and the next one
        changes the state."""
        flight = self._flight
        if flight is not None and flight.staged is not None:
            flight.staged.wait()
            flight.finished = True

    def _act_on(self, flight: PendingSnapshot, agreement: Agreement) -> None:
        """Refuse state that differs between ranks, or copy again if its structure has changed."""
        agreement.work.wait()
        if agreement.differs:
            self._flight = None  # it is not uploaded
            if flight.segment is not None and flight.staged is not None:
                flight.staged.arrive()
                self._hold.courier.give_back(flight.segment)
            self._hold.refuse_differences(agreement.held)
        # plan again; nothing has changed the state so far
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
    def _send(self, flight: PendingSnapshot, agreement: Agreement | None) -> None:
        """Wait, in the background, until the bytes are in host memory, and pass them to the
        uploader."""
        try:
            if agreement is not None:
                agreement.work.wait()
                if agreement.changed or agreement.differs:
                    return  # `finish_staging` copies again or refuses the state
            staged, segment = flight.staged, flight.segment
            assert staged is not None and segment is not None
            staged.arrive()
            # The order matters: a change found before `finished` was set is an error, but one that
            # the next optimizer step makes after that is not.
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

    def _job(self, flight: PendingSnapshot, staged: dcp.Staged) -> UploadJob:
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
            keep=asdict(self._keep) | {"ends": self._run.phase.ended} if leads else None,
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
    def _landed(self, flight: PendingSnapshot, outcome: UploadOutcome) -> None:
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
        """Wait for the snapshot in flight. `must`: raise if it failed, as this process is about to
        leave. Raises StoreError, Fenced, CommitTimeout."""
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
            # the next snapshot carries these records as well
            self._log.unsaved = flight.records + self._log.unsaved
            print(
                f"harness: snapshot of step {flight.ref.step} failed, training goes on: {error}",
                flush=True,
            )
        else:
            self._saved = flight.ref
