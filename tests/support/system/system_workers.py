"""The workers of one epoch: the session's real machine, plan, records and restore; only what they
compute is played. Pure.

All ranks do the same at the same time, as collectives make them; each has its own state, looks at
its own node's mark, reads with its own node's eyes and sends its own share.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.bucket.layout import IDENTITY, Epoch, Identity
from harness.core import batch
from harness.core import step_records as rec
from harness.core.world import BadInput, HarnessError, whole_replicas
from harness.node.heartbeat import WorkerPhase
from harness.node.marks import WAITING, Want
from harness.worker import boundary
from harness.worker.boundary import BoundaryAction
from storage.canonical_json import BadObject, canonical, digest
from storage.errors import NotFound, StoreError, StoreUnavailable
from storage.snapshots.manifest import Manifest, Ref
from storage.snapshots.restore import PAUSES_S, ReadRetries, Rewind
from storage.snapshots.snapshots import Snapshots
from storage.testing.faulty_store import Crash
from storage.tiers.tiers import Tiered
from support.system.system_checks import Resumed, Stepped, WorkersLeft
from support.system.system_uploads import Sending

if TYPE_CHECKING:
    from support.system.system_bucket import Access
    from support.system.system_node import SimNode, SimWorker
    from support.system.system_run import WholeSystem

# What a simulated run trains: samples, digests and weights as functions of the step. Pure.

MICRO = 2  # samples of a micro-batch


def batching(micro_batches: int) -> batch.Batching:
    return batch.Batching(1000, MICRO * micro_batches, MICRO, seed=7)


@functools.cache
def consumed(micro_batches: int, step: int, micro: int) -> int:
    """Sum of the hashes of one micro-batch's samples, as a loader makes it."""
    b = batching(micro_batches)
    where = batch.positions(b, step, micro)
    return batch.digest(batch.sample_hash(where, batch.indices_at(b, where)))


@functools.cache
def expected(micro_batches: int, step: int) -> str:
    """The digest of a step, whoever did it."""
    return f"{batch.expected_digest(batching(micro_batches), step):016x}"


@functools.cache
def state_after(micro_batches: int, step: int) -> str:
    """The weights after a step are a function of the samples up to it."""
    if not step:
        return "initial weights"
    return digest(
        f"{state_after(micro_batches, step - 1)} {expected(micro_batches, step)}".encode()
    )


def identity(micro_batches: int, total_steps: int) -> dict[str, Any]:
    b = batching(micro_batches)
    return {
        "samples": b.samples,
        "global_batch": b.global_batch,
        "micro_batch": b.micro_batch,
        "seed": b.seed,
        "steps": total_steps,
    }


START_TIMEOUT_S = 40.0  # for all ranks to come
COLLECTIVE_TIMEOUT_S = 60.0  # of a rank that waits for another
FEEL_S = 0.5  # from a peer's end until its neighbours feel it
LAND_S = 200.0  # the longest that a snapshot is waited for
FROZEN = b"an embedding that is never trained, of rank "


@dataclass
class _NearTier:
    """What lies staged on a node."""

    chunks: dict[str, bytes]
    name: str = "memory"

    def get(self, id: str) -> bytes | None:
        return self.chunks.get(id)

    def put(self, chunks: Mapping[str, bytes | memoryview]) -> int:
        return 0

    def drop(self, id: str) -> None:
        self.chunks.pop(id, None)


@dataclass
class _OnItsWay:
    """A snapshot. `jobs`: by rank."""

    ref: Ref
    records: list[rec.StepRecord]
    jobs: dict[int, Sending]

    @property
    def told(self) -> bool:
        return all(job.outcome is not None for job in self.jobs.values())


@dataclass
class _Lost(Exception):
    """Nobody can go on: who fails with what."""

    errors: dict[int, tuple[str, str]]


@dataclass
class Ensemble:
    sim: WholeSystem
    epoch: Epoch
    workers: dict[int, SimWorker] = field(default_factory=dict)
    over: bool = False
    step: int = 0
    weights: str = ""
    head: str = ""
    states: dict[int, boundary.SessionState] = field(default_factory=dict)
    parent: Ref | None = None
    genesis: str = ""  # since its ranks have connected
    resumed: str = ""
    saved_step: int = -1
    unsaved: list[rec.StepRecord] = field(default_factory=list)
    flight: _OnItsWay | None = None
    last_samples: dict[str, Any] | None = None
    snapshot_s: float = 0.0
    _stalled_s: float | None = None

    def __post_init__(self) -> None:
        self.actor = f"epoch-{self.epoch.epoch}"
        self.rng = self.sim.random(self.actor)
        self._life = self._run()

    # ---- coming together -------------------------------------------------------------------------
    def join(self, worker: SimWorker) -> None:
        if not (worker.at_work and worker.node.runs()):
            return
        if not self.workers:
            self.sim.kernel.after(START_TIMEOUT_S, self._start_or_fail, self.actor)
        self.workers[worker.rank] = worker
        worker.tell(WorkerPhase.START, 0)
        if len(self.workers) == self.epoch.world:
            self._later(self.rng.uniform(0.5, 2.0))

    def _start_or_fail(self) -> None:
        if len(self.workers) < self.epoch.world:
            self.over = True
            for worker in self.workers.values():
                worker.exit(1, "DistStoreError", "Timed out waiting for clients")

    def _later(self, seconds: float) -> None:
        self.sim.kernel.after(seconds, self._go_on, self.actor)

    def _go_on(self) -> None:
        if self.over:
            return
        try:
            if self._waits():
                self._later(0.5)
                return
            self._later(next(self._life))
        except StopIteration:
            self.over = True
        except _Lost as lost:
            self._end(lost.errors)
        except Crash:  # a node in the middle of an operation: the others will feel it
            self._later(FEEL_S)
            self._life = iter(())
        except Rewind as e:
            self._end(dict.fromkeys(self.workers, ("BadInput", str(e))))
        except (StoreError, HarnessError) as e:
            name = type(e).__name__
            self._end(dict.fromkeys(self.workers, (name, f"{name}: {e}")))

    def _end(self, errors: Mapping[int, tuple[str, str]]) -> None:
        """These fail by themselves, the others feel it."""
        self.over = True
        for rank, (error, text) in errors.items():
            self.workers[rank].exit(1, error, text)
        left = [w for w in self.workers.values() if w.at_work]
        self.sim.kernel.after(self.rng.uniform(0.1, FEEL_S), lambda: self._feel(left))

    def _feel(self, left: Collection[SimWorker]) -> None:
        for worker in left:
            if worker.node.runs() and not worker.stuck:
                worker.exit(1, "RuntimeError", "Connection closed by peer")

    def _waits(self) -> bool:
        """Somebody does not come to the collective. Raises _Lost when that is felt, or waited for
        too long."""
        ranks = self.workers.values()
        if any(not w.at_work and w.node.alive for w in ranks):
            raise _Lost({})
        nodes = {w.node.number: w.node for w in ranks}.values()
        net = self.sim.net
        linked = net.connected if self.genesis else net.dials  # of all pairs, both ways
        stalled = any(w.stuck or not w.node.alive or w.node.frozen() for w in ranks) or any(
            not linked(a, b) for a in nodes for b in nodes if a is not b
        )
        now = self.sim.kernel.now_s
        if not stalled:
            self._stalled_s = None
            return False
        if len(nodes) == 1 and all(w.node.alive and not w.stuck for w in ranks):
            self._stalled_s = None  # all stand still with their machine: nobody waits for another
            return True
        for worker in ranks:
            if worker.signs.sign is not None and not worker.stuck and self._stalled_s is None:
                worker.tell(WorkerPhase.REDUCE, self.step)
        self._stalled_s = now if self._stalled_s is None else self._stalled_s
        if now - self._stalled_s > COLLECTIVE_TIMEOUT_S:
            words = ("RuntimeError", f"Timed out waiting {COLLECTIVE_TIMEOUT_S:.0f} s for recv")
            raise _Lost(
                {w.rank: words for w in ranks if w.at_work and w.node.runs() and not w.stuck}
            )
        return True

    # ---- a session's life ------------------------------------------------------------------------
    def _run(self) -> Iterator[float]:
        setting = self.sim.setting
        for worker in self.workers.values():
            worker.began = True
        self._tell(WorkerPhase.START)
        self.states = dict.fromkeys(self.workers, boundary.SessionState(by_script=True))
        yield from self._identify()
        yield 0.1
        try:
            plan = self.sim.build.plan(setting.micro_batches, self.epoch.world)
        except batch.TooManyRanks as e:
            smaller = bool(whole_replicas(self.epoch.nproc, 1, e.room))
            yield from self._turn(boundary.Overfull(smaller, str(e)))
            return
        yield from self._turn(boundary.Looped())
        speed = min(self.epoch.speeds)
        step_s = setting.step_s * plan.rounds / setting.micro_batches / speed
        while self.step < setting.total_steps:
            yield step_s
            self._train(plan, step_s)
            self._tell(WorkerPhase.COMPUTE)
            yield from self._boundary()
        yield from self._turn(boundary.Reached())
        yield 0.2
        yield from self._turn(boundary.Ended())
        for worker in self.workers.values():
            worker.exit(0)

    def _tell(self, place: WorkerPhase) -> None:
        for worker in self.workers.values():
            if not worker.stuck:
                worker.tell(place, self.step)

    def _store(self, rank: int = 0, reads: bool = False) -> Access:
        worker = self.workers[rank]
        name = f"worker-{worker.node.number}"
        return worker.node.access(name, reads, lambda: worker.at_work and worker.node.runs())

    def _identify(self) -> Iterator[float]:
        """As `Run._recorded`: what one host cannot read is asked of another."""
        mine = identity(self.sim.setting.micro_batches, self.sim.setting.total_steps)
        self.genesis = rec.genesis(mine)
        if self._store().create(IDENTITY, canonical(mine)):
            return
        first = self.workers[0].node
        second = next((r for r, w in sorted(self.workers.items()) if w.node is not first), None)
        why = ""
        for rank in (0,) if second is None else (0, second):
            found, why = yield from self._read_identity(rank)
            if found is not None:
                if found != mine:
                    raise BadInput(f"the bucket holds another run: {found}, not {mine}")
                return
        self._refuse_identity(why, second is not None)

    def _read_identity(self, rank: int) -> Generator[float, None, tuple[dict[str, Any] | None, str]]:
        """As `Run._read_identity`."""
        why = ""
        for pause_s in (0.0, *PAUSES_S):
            if pause_s:
                yield pause_s
            try:
                return Identity.decode(self._store(rank).get(IDENTITY)).body, ""
            except (BadObject, NotFound) as e:
                why = str(e)
            except StoreError:
                if not rank:
                    raise
                return None, ""  # the others wait for a word
        return None, why

    def _refuse_identity(self, why: str, by_two: bool) -> None:
        if why and by_two:
            raise BadInput(f"{IDENTITY}: {why}, from two hosts")
        raise StoreUnavailable(f"{IDENTITY}: {why}, and no other host says so")

    def _train(self, plan: batch.Plan, step_s: float) -> None:
        for worker in self.workers.values():
            if worker.to_fail:
                text, worker.to_fail = worker.to_fail, ""
                self.sim.struck("fail-script", worker.node, self.epoch.epoch, self.step)
                raise _Lost({worker.rank: ("RuntimeError", text)})
        setting = self.sim.setting
        self.step += 1
        total = sum(
            consumed(setting.micro_batches, self.step, micro)
            for rank in range(self.epoch.world)
            for micro in plan.micros(rank)
        )
        found = f"{total % 2**64:016x}"
        record = rec.StepRecord(
            self.step, self.epoch.epoch, self.epoch.world, plan.shares,
            MICRO * sum(plan.shares), found, float(MICRO * sum(plan.shares)),
            int(found[:4], 16) / 65536, 0.1, self._wall_s(), step_s,
        ).chained(self.head)  # fmt: skip
        self.head = record.h
        self.weights = digest(f"{self.weights} {found}".encode())
        self.unsaved.append(record)
        self.sim.steps_done += 1
        self.sim.emit(Stepped(self.sim.kernel.now_s, self.epoch.epoch, self.step))

    def _wall_s(self) -> float:
        return self.workers[0].node.host.wall()

    def _boundary(self) -> Iterator[float]:
        """The ranks vote on what is wanted."""
        votes = [0] * len(Want)
        marks = {rank: w.node.read_mark() for rank, w in self.workers.items()}
        quiet = self.flight is None or self.flight.told
        for mark in marks.values():
            if quiet or mark.want not in WAITING:
                votes[mark.want] += 1
        interval = self.sim.setting.interval
        since_s = self.sim.kernel.now_s - self.snapshot_s
        if quiet and interval.due(self.step, since_s, interval.seconds(0.0, 0.01, 0.0)):
            votes[Want.SNAPSHOT] += 1
        want = self.sim.build.winner(votes)
        if want is not Want.NOTHING:
            asked = {rank: boundary.VoteResult(want, mark) for rank, mark in marks.items()}
            yield from self._turns(asked)

    # ---- events and acts -------------------------------------------------------------------------
    def _seen(self, rank: int) -> boundary.BoundaryInputs:
        return boundary.BoundaryInputs(
            step=self.step,
            total=self.sim.setting.total_steps,
            saved_step=self.saved_step,
            flight_step=self.flight.ref.step if self.flight else None,
            unsaved=bool(self.unsaved),
            leads=rank == 0,
        )

    def _turn(self, event: boundary.SessionEvent) -> Iterator[float]:
        return self._turns(dict.fromkeys(self.workers, event))

    def _turns(self, events: Mapping[int, boundary.SessionEvent]) -> Iterator[float]:
        turns = {
            rank: self.sim.build.turn(self.states[rank], event, self._seen(rank))
            for rank, event in events.items()
        }
        shapes = {(shape(t.first), shape(t.after)) for t in turns.values()}
        if len(shapes) > 1:
            self.sim.violated(
                f"same acts: the ranks of epoch {self.epoch.epoch} do different things: {shapes}"
            )
        lead = turns[0]
        for act in lead.first:
            yield from self._do(act, turns)
        self.states = {rank: turn.state for rank, turn in turns.items()}
        for act in lead.after:
            yield from self._do(act, turns)

    def _do(
        self, act: boundary.SessionAct, turns: Mapping[int, boundary.Transition]
    ) -> Iterator[float]:
        match act:
            case boundary.Snapshot(why, final):
                yield from self._take(why, final)
            case boundary.Leave(_, code) if code is not None:
                self.sim.emit(WorkersLeft(self.sim.kernel.now_s, self.epoch.epoch, self.step))
                self._leave(dict.fromkeys(self.workers, code))
                yield 0.0
            case boundary.Refuse(what):
                raise BadInput(what)
            case BoundaryAction.RESUME:
                yield from self._resume()
            case BoundaryAction.LAND:
                yield from self._land(must=True)
            case BoundaryAction.MARK_END | BoundaryAction.MARK_END_ALONE:
                self._mark_end()
            case _:
                pass
        for rank, turn in turns.items():
            if BoundaryAction.ANSWER in turn.first:
                node = self.workers[rank].node
                node.answered = node.mark.id

    def _leave(self, codes: Mapping[int, int]) -> None:
        self._tell(WorkerPhase.LEAVING)
        self.over = True
        for rank, code in codes.items():
            self.workers[rank].exit(code)

    def _mark_end(self) -> None:
        snapshots = self.sim.build.snapshots(self._store())
        if self.parent is not None and not snapshots.ended(snapshots.load(self.parent)):
            snapshots.end(self.parent, boundary.end_words(self._seen(0)))

    # ---- snapshots -------------------------------------------------------------------------------
    def _take(self, why: str, final: bool) -> Iterator[float]:
        self._tell(WorkerPhase.STAGING)
        if why == "notice" and self.flight is not None and not self.flight.told:
            self.unsaved, self.flight = self.flight.records + self.unsaved, None  # overtaken
        yield from self._land(must=False)
        ref, records = Ref(self.epoch.epoch, self.step), self.unsaved
        data: dict[str, Any] = {
            "final": final,
            "parent": self.parent.name if self.parent else "",
            "samples": self.last_samples,
            "resumed": self.resumed,
        }
        before: dict[str, bytes] = {}
        if records:
            key = rec.key(records)
            data["samples"] = self.last_samples = {
                "key": key, "head": records[-1].h, "first": records[0].step,
                "last": records[-1].step,
            }  # fmt: skip
            before[key] = rec.encode(records)
        self.unsaved, self.parent, self.snapshot_s = [], ref, self.sim.kernel.now_s
        self.flight = _OnItsWay(ref, records, {})
        for rank, worker in self.workers.items():
            files = {"state.bin": self.weights.encode(), "frozen.bin": FROZEN + b"%d" % rank}
            uploads = worker.node.uploads
            here = not uploads.up or self.sim.trouble.reigns("full-disk", worker.node)
            job = self.sim.build.sending(
                worker.node, worker, ref, self.epoch.world, files, data if rank == 0 else {},
                before if rank == 0 else {}, here, worker.node.rng,
            )  # fmt: skip
            self.flight.jobs[rank] = job
            uploads.jobs.append(job)
        yield 0.05

    def _land(self, must: bool) -> Iterator[float]:
        flight = self.flight
        if flight is None:
            return
        self._tell(WorkerPhase.SAVING)
        until_s = self.sim.kernel.now_s + LAND_S
        while not flight.told and self.sim.kernel.now_s < until_s:
            yield 0.5
        self.flight = None
        bad = {rank: job for rank, job in flight.jobs.items() if job.outcome != "committed"}
        if not bad:
            self.saved_step = flight.ref.step
        elif must:
            raise _Lost({rank: _words(job) for rank, job in bad.items()})
        elif 0 in bad:
            self.unsaved = flight.records + self.unsaved

    # ---- resuming --------------------------------------------------------------------------------
    def _resume(self) -> Iterator[float]:
        self._tell(WorkerPhase.RESTORE)
        sim = self.sim
        nodes = {w.node.number: w.node for w in self.workers.values()}
        eyes = {
            f"node-{w.node.number}": (w.node, self._store(rank, reads=True))
            for rank, w in sorted(self.workers.items(), reverse=True)
        }
        manifest, weights = self._restore(dict(reversed(eyes.items())))
        for _, access in eyes.values():
            access.live()  # all that they read may have taken long
        yield max(access.waited_s for _, access in eyes.values())
        if manifest is None:
            self.step, self.head = 0, self.genesis
            self.weights = state_after(sim.setting.micro_batches, 0)
        else:
            self.step, self.saved_step = manifest.step, manifest.step
            self.parent, self.resumed = manifest.ref, manifest.ref.name
            self.weights, self.last_samples = weights, manifest.data.get("samples")
            self.head = self.last_samples["head"] if self.last_samples else self.genesis
            for node in nodes.values():
                node.seen = max(node.seen or manifest.ref, manifest.ref)
        self.snapshot_s = sim.kernel.now_s
        sim.emit(Resumed(sim.kernel.now_s, self.epoch.epoch, self.parent, self.step, self.weights))

    def _restore(self, eyes: Mapping[str, tuple[SimNode, Access]]) -> tuple[Manifest | None, str]:
        """As `worker/resume.py`: the first rank chooses, every host reads, and what they find is
        judged. Raises StoreError, Rewind, _Lost."""
        build = self.sim.build
        seen = max((node.seen for node, _ in eyes.values() if node.seen), default=None)

        def one(host: str, node: SimNode, access: Access) -> Any:
            looks = ReadRetries(lambda: access, access.sleep)
            return build.restore(
                build.snapshots(access), host, looks,
                epoch=self.epoch.epoch, seen=seen, must_list=IDENTITY,
            )  # fmt: skip

        each = {host: one(host, *it) for host, it in eyes.items()}
        chooser = next(iter(each.values()))
        first = self.sim.build.snapshots(next(iter(eyes.values()))[1])
        while ref := chooser.choose():
            token = f"e{self.epoch.epoch}"
            with contextlib.suppress(StoreError):
                first.begin_reading(ref, token)
            found = {
                host: restore.read(ref, self._reader(ref, eyes[host][0]))
                for host, restore in each.items()
            }
            with contextlib.suppress(StoreError):
                first.end_reading(ref, token)
            bad = {host: why for host, (_, why) in found.items() if why}
            if not bad:
                chooser.done(ref)
                self.sim.blows.read_s.append(self.sim.kernel.now_s)
                best: tuple[Manifest, str] | None = next(iter(found.values()))[0]
                return best or (None, "")
            if unfit := chooser.blame(ref, bad, self._refuted(each, ref, bad)):
                self._refuse(unfit)
        return None, ""

    def _refuted(self, each: Mapping[str, Any], ref: Ref, bad: dict[str, str]) -> bool:
        """Somebody on another host has read it: it shall read all of it, past everything near."""
        second = next((host for host in each if host not in bad), None)
        if second is None:
            return False
        try:
            said = each[second].verify(ref)
        except StoreUnavailable:
            return False
        if said:
            bad[second] = said
        return not said

    def _reader(self, ref: Ref, node: SimNode) -> Callable[[Snapshots, int], tuple[Manifest, str]]:
        def read(snapshots: Snapshots, look: int) -> tuple[Manifest, str]:
            manifest = snapshots.load(ref)
            tiers = [_NearTier(node.near)] if look == 0 else []
            through = self.sim.build.snapshots(Tiered(snapshots.store, manifest, tiers))
            through.verify(manifest)
            part = next(p for p in manifest.parts if p.key.endswith("state.bin"))
            return manifest, through.read(manifest, part.key, 0, part.nbytes).decode()

        return read

    def _refuse(self, unfit: Mapping[str, str]) -> None:
        """As `HostsUnfit` says. The epoch is over."""
        codes: dict[int, int] = {}
        for rank, worker in self.workers.items():
            event = boundary.HostsUnfit(f"node-{worker.node.number}" in unfit)
            turn = self.sim.build.turn(self.states[rank], event, self._seen(rank))
            for act in turn.after:
                if isinstance(act, boundary.Leave) and act.code is not None:
                    codes[rank] = act.code
        self._leave(codes)
        raise _Lost({})


def _words(job: Sending) -> tuple[str, str]:
    error = job.error or StoreUnavailable(f"snapshot {job.ref} was not committed in time")
    return type(error).__name__, f"{type(error).__name__}: {error}"


def shape(acts: Collection[boundary.SessionAct]) -> tuple[Any, ...]:
    """What all ranks must do alike: not who answers which request, nor in which words, nor what
    rank 0 writes alone."""
    alone = (BoundaryAction.ANSWER, BoundaryAction.MARK_END_ALONE)
    return tuple(
        act.value
        if isinstance(act, BoundaryAction)
        else (type(act).__name__, getattr(act, "code", ""))
        for act in acts
        if act not in alone
    )
