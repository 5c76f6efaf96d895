"""Steps of a foreign loop: the interface on which the adapters of other trainers are built. Runs in
the worker.

A trainer that runs as if it were alone does gradient accumulation over M micro-batches. Each rank
does its share of them, in the trainer's own forward and backward; the trainer has scaled every loss
so that the plain sum of all M gradients is right. Then, on all ranks:

    loop = own_loop(run, micro_batches=M, micro_batch=B, data="...")
    step = loop.begin()
    for m in step.mine:
        step.micro(m)                       # the trainer reads, forwards
        step.read(m, keys=indices)
        ...                                 # ... and goes backward
        step.done(m, loss, weight)
    while step.sync(): ...                  # gradients are sums over all ranks
    ...                                     # the trainer clips, its optimizers step
    step.end(lr)
    loop.boundary()

Only the trainer knows what lies at a position of the data. So records hold positions, which add up
independently of the trainer, and a hash of what was read there, to compare with other runs.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from harness.bucket.layout import IDENTITY, Identity
from harness.core.batch import TooManyRanks, seed_for
from harness.core.formatting import batch_text
from harness.core.world import BadInput
from harness.node.heartbeat import WorkerPhase
from harness.worker import boundary as machine
from harness.worker.alone import world as hidden_world
from harness.worker.batches.loader import seed_everything
from harness.worker.gradients.parallel import Replicated
from harness.worker.gradients.parallel import once as norm_once
from harness.worker.run_context import SCRIPT_WORLD
from harness.worker.step import Sums, Work
from harness.worker.step_timing import BACKWARD, COMMUNICATION, DATA, FORWARD, OPTIMIZER, OTHER
from harness.worker.training_state import Judged
from storage.canonical_json import BadObject
from storage.errors import NotFound

if TYPE_CHECKING:
    from harness.worker.process_group import Peers
    from harness.worker.session import Session

# Heartbeats while a script does work of its own between steps: preparing data, evaluating,
# merging and pushing the trained model.

BEAT_S = 20.0
OWN_MOST_S = 6 * 3600.0  # the longest that heartbeats continue for one piece of work


class OwnWork:
    """The heartbeat thread of the script's own work. `alive`: sends one heartbeat."""

    @classmethod
    def of(cls, run: Session) -> OwnWork:
        """Return the one that all loops of a session share."""
        found: OwnWork = vars(run).setdefault("_own_work", cls(run._peers.life.tell))
        return found

    def __init__(self, alive: Callable[[], None]):
        self._alive = alive
        self._since_s: float | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Send heartbeats from now on, for at most OWN_MOST_S."""
        self._since_s = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="own-work", daemon=True)
            self._thread.start()

    def end(self) -> None:
        self._since_s = None

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            since_s = self._since_s
            if since_s is not None and time.monotonic() - since_s < OWN_MOST_S:
                self._alive()


MOST_RANKS = 1 << 20
WhatWasRead = Sequence[int] | np.ndarray[Any, Any]


class DataPlace:
    """The place in the data where the next step begins: the number of samples consumed so far."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = int(state["position"])


@dataclass(frozen=True)
class ReadingRanks:
    """The ranks of a copy of the model that read parts of its micro-batches, each its own. `count`:
    their number; `number`: which of them this rank is, or reads the same as."""

    count: int = 1
    number: int = 0

    @classmethod
    def of(cls, peers: Peers, count: int) -> ReadingRanks:
        """Return those of this rank's replica, whose ranks that read the same are neighbours."""
        place = peers.rank % peers.replica_ranks
        return cls(count, place // (peers.replica_ranks // count))

    def part(self, m: int) -> int:
        """Return the number of this rank's part of micro-batch m, over all parts of a step."""
        return m * self.count + self.number


def begin_micro(
    work: Work, number: int, m: int, seed: int, last: bool, reading: ReadingRanks = ReadingRanks()
) -> None:
    """Prepare the forward of micro-batch m of step `number`, and seed the generators by these and
    the run's `seed`. `last`: it is this rank's last one of the step."""
    work.training.strategy.micro(last=last)
    work.timer.enter(FORWARD)
    for take_up in work.training.hooks.before_micro:
        take_up(m, True, False)
    seed_everything(seed_for(seed, number, reading.part(m)))


class OwnLoop:
    """A foreign loop, made by `own_loop`; see the module. `micro_batches`: their number in
    a full step, on all ranks together; `micro_batch`: samples in each."""

    def __init__(self, run: Session, place: DataPlace, reading: ReadingRanks):
        work = self._work = run._work
        self._hands, self._place, self.halves = run._hands, place, run._halves
        self._keeper = run._keeper
        work.log.when_whole = lambda: None  # the trainer's own state is whole at boundaries only
        self.reading, self._own_work = reading, OwnWork.of(run)
        if work.training.loads.watches:
            raise BadInput(
                "the model has routers that are balanced once per step, and this trainer does not "
                "say when a backward begins; use run.steps(...) or run.loader, or balance them by "
                "an auxiliary loss"
            )
        batching, parts = work.batching, reading.count
        self.micro_batches = batching.micro_batches // parts
        self.micro_batch = batching.micro_batch * parts
        mine = work.feed.plan.micros(work.peers.rank)
        self.share = range(mine.start // parts, mine.stop // parts)
        self.leads = work.peers.rank == 0
        self.has_guards = work.training.guard is not None
        self.seed_between()

    def begin(
        self,
        micro_batches: int | None = None,
        samples: int | None = None,
        rounds: int | None = None,
    ) -> OwnStep:
        """Begin the next optimizer step. `micro_batches`: their number, for a shorter step at the
        end of an epoch; `samples`: the step's samples, if its last micro-batch is short; None: a
        full step. `rounds`: the trainer goes through its step in so many parts on every rank, and
        calls `OwnStep.round` before each, since ranks communicate in them, or read in them what
        they compare; 0: it calls that never; None: it is called for each micro-batch. All ranks
        pass the same. Raises ValueError."""
        count = self.micro_batches if micro_batches is None else micro_batches
        if not 1 <= count <= self.micro_batches:
            raise ValueError(f"wanted 1 to {self.micro_batches} micro-batches, found {count}")
        full = count * self.micro_batch
        if samples is not None and not 0 < samples <= full:
            raise ValueError(f"wanted 1 to {full} samples, found {samples}")
        self._own_work.end()
        self._work.peers.life.tell(WorkerPhase.COMPUTE, self._work.run.step)
        samples = full if samples is None else samples
        return OwnStep(self, self._work, count, samples, rounds, self._place)

    def boundary(self) -> None:
        """Agree between two steps on what to do, and do it, on all ranks at the same boundary.
        Raises SystemExit, with the snapshot committed, when the node must leave or a replay is at
        its last step."""
        self._own_work.end()
        with hidden_world.inside():
            self._keeper.note()
            self._hands.boundary()
            self.halves.note()
        self._work.timer.rest()
        self._own_work.begin()
        if self._work.run.step >= self._hands.until:
            self._hands.turn(machine.Finished())
            sys.exit(0)

    def finished(self) -> None:
        """Commit the final snapshot, after the training and before the script's own work."""
        self._own_work.end()
        self._hands.turn(machine.Reached())
        # The script draws the same next, whoever has made the last step, and other numbers than
        # behind its other trainings.
        seed_everything(seed_for(self._work.feed.seed, self._work.run.step, self.micro_batches))
        self._own_work.begin()

    def seed_between(self) -> None:
        """Seed the generators, so that code between two steps draws the same on any world."""
        feed, run = self._work.feed, self._work.run
        step = run.step - run.phase.begins
        seed_everything(seed_for(feed.seed, step, self.micro_batches))


class OwnStep:
    """One optimizer update of a foreign loop; see the module. `number`: its place in this
    training of the script."""

    def __init__(
        self,
        loop: OwnLoop,
        work: Work,
        count: int,
        samples: int,
        rounds: int | None,
        place: DataPlace,
    ):
        self.number = work.run.step - work.run.phase.begins + 1
        self.count, self.samples = count, samples
        self._loop, self._work, self._place = loop, work, place
        plan, peers = work.feed.plan, work.peers
        self.mine = range(loop.share.start, max(loop.share.start, min(loop.share.stop, count)))
        self._sums = Sums(work.batching, peers.device, peers.leads_replica)
        self._sums.begins = place.position
        parts = loop.reading.count
        if count < loop.micro_batches:
            self._sums.shares = tuple(
                max(0, min(start + share, count * parts) - start)
                for start, share in zip(plan.starts, plan.shares, strict=True)
            )
        # in a short step, some ranks may have no micro-batch
        self.some_idle = count < loop.micro_batches
        self._micros = 0
        self._floats: torch.Tensor | None = None
        self._began = time.time(), time.perf_counter()
        work.timer.begin(work.run.step + 1)
        work.timer.enter(DATA)
        work.training.strategy.zero()
        self._in_rounds = rounds is not None
        if rounds is None:
            shares = tuple(share // parts for share in self._sums.shares or plan.shares)
            self._noted = loop.halves.begin(len(self.mine), shares)
        else:
            self._noted = loop.halves.begin(rounds, (rounds,))
        if self._noted and work.training.buffers is not None:
            work.training.buffers.note()

    def first_of(self, m: int) -> int:
        """Return the position of micro-batch m's first sample."""
        return self._place.position + m * self._loop.micro_batch

    def micro(self, m: int) -> None:
        """Prepare the forward of micro-batch m, one of this rank's. Random numbers in it depend on
        seed, step and m. Raises ValueError; SystemExit, if the step would end too late for a
        notice: the state before it is committed then."""
        if m not in self.mine:
            raise ValueError(f"wanted one of this rank's micro-batches {self.mine}, found {m}")
        if not self._in_rounds:
            self.round(m - self.mine.start)
        seed, last = self._work.feed.seed, m == self.mine[-1]
        begin_micro(self._work, self.number, m, seed, last, self._loop.reading)

    def round(self, done: int) -> None:
        """Agree with the other ranks whether the step must be dropped, before the part of it that
        follows `done` ones; see `OwnLoop.begin`. Raises SystemExit as `micro` does."""
        with hidden_world.inside():
            self._loop.halves.look(done)

    def idle(self) -> None:
        """Announce a forward of something that is no micro-batch of this step."""
        self._work.training.norms.rest()

    def read(
        self, m: int, keys: WhatWasRead | None = None, contents: WhatWasRead | None = None
    ) -> None:
        """Record the samples of micro-batch m: indices in the dataset (`keys`), or hashes of the
        items where there are no indices (`contents`, by `content_hash`)."""
        said = keys if keys is not None else contents
        if not isinstance(said, np.ndarray) or said.dtype != np.int64:
            values = () if said is None else said
            said = np.array([int(value) % 2**63 for value in values], np.int64)
        first = self.first_of(m)
        at = np.arange(first, first + len(said), dtype=np.int64)
        self._sums.note_foreign(at, said & np.int64(2**63 - 1))

    def done(self, m: int, loss: torch.Tensor | float, weight: float) -> None:
        """Record micro-batch m, after its backward. `loss`: the mean over it, or over this rank's
        part of it; `weight`: the number of samples or tokens of the whole micro-batch. Collective
        over the ranks of a copy of the model, whose losses count equally."""
        self._work.timer.enter(OTHER)
        self._work.training.strategy.micro_done()
        value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss))
        peers = self._work.peers
        if peers.replica_ranks > 1:
            value = value.double().clone()
            dist.all_reduce(value, group=peers.within)
            value /= peers.replica_ranks
        parts = self._loop.reading.count
        for part in range(m * parts, (m + 1) * parts):
            self._sums.add(part, value.reshape(()), float(weight) / parts)
        self._sums.tokens_weighted = True
        self._micros += 1

    def hold(self) -> None:
        """Let `sync` send the gradients of this micro-batch, rather than its backward. Called
        before that, for a trainer whose ranks may be at different points of a step by then."""
        strategy = self._work.training.strategy
        if isinstance(strategy, Replicated):
            strategy.hold()

    def backward_begins(self) -> None:
        """Note, for the time breakdown, that the backward begins."""
        self._work.timer.enter(BACKWARD)

    def sync(self, redo: Callable[[], None] | None = None) -> None:
        """Sum the gradients over all ranks. `redo`: repeats the forward and backward of all this
        rank's micro-batches, needed with exact sums if a gradient did not fit. Raises BadInput if
        that is needed and there is no `redo`, or if this training had ended before this step."""
        work, strategy = self._work, self._work.training.strategy
        if work.run.phase.ends == work.run.step:
            raise BadInput(
                f"{work.run.phase.label} ended at step {self.number - 1}, and the script trains on "
                "in it now: wanted the steps that it had when the run began"
            )
        work.peers.life.tell(WorkerPhase.REDUCE)
        work.timer.enter(COMMUNICATION)
        with hidden_world.inside():
            if not self.mine:
                strategy.micro(last=True)
            while strategy.may_repeat and strategy.again():
                if redo is None:
                    wider = ", or 'exact' instead of 'exact32'" * (strategy.sums == "exact32")
                    raise BadInput(
                        f"step {self.number}: a gradient did not fit into exact sums, and this "
                        f"trainer cannot do a step again; use reduce='fast'{wider}"
                    )
                what = "a gradient did not fit: the step is done again"
                work.run.warn(what, work.run.step + 1)
                redo()
                if not self.mine:
                    strategy.micro(last=True)
            if self._noted and work.training.buffers is not None:
                work.training.buffers.learn()
            self._floats, _ = work.summed(self._sums)
            strategy.divide(1.0)
            norm = strategy.norm()
            self._floats[2] = norm
            most = work.judge(self._sums, self._floats, some_idle=self.some_idle)
            if most is not None:
                strategy.clip(most / (norm + 1e-6))
        work.finish_staging()
        work.timer.enter(OPTIMIZER)

    @property
    def judged(self) -> Judged:
        """The guards' judgement, after `sync`."""
        return self._sums.judged

    @property
    def loss(self) -> float:
        """The loss over the global batch, after `sync`. Waits for the device."""
        assert self._floats is not None
        total, weight = self._floats[:2].tolist()
        return total / weight if weight else math.nan

    @property
    def weight(self) -> float:
        """The weight of the global batch, after `sync`. Waits for the device."""
        assert self._floats is not None
        return float(self._floats[1])

    def end(self, lr: float) -> None:
        """Record the step, after the optimizers have stepped. `lr`: the learning rate."""
        assert self._floats is not None
        norm_once.forget()
        begins, self._place.position = self._place.position, self._place.position + self.samples
        with hidden_world.inside():
            self._work.done(self._sums, self._began, self._micros, self._floats, lr, begins)
        self._loop.seed_between()


GUARDED = ("run.loader", "transformers")  # loops whose updates guards may skip


def script_world(run: Session, alike: int = 1) -> int:
    """Return the world size whose global batch is kept, that is the number of ranks that an
    unchanged script is assumed to be written for: the one that this run began with, else
    HARNESS_SCRIPT_WORLD, else this world's. `alike`: so many ranks, which read the same samples,
    count as one. Raises BadInput."""
    said = run.said_world
    if said and not (said.isdecimal() and 1 <= int(said) <= MOST_RANKS):
        raise BadInput(f"{SCRIPT_WORLD}={said!r}: wanted a number of ranks, at least 1")

    def look() -> int:
        begun: dict[str, Any] = {}
        # `Run.identify` refuses a broken identity later, with a better message.
        with contextlib.suppress(NotFound, BadObject):
            if run._run.url:
                begun = Identity.decode(run._run.store.get(IDENTITY)).body
        found = begun.get("script_world")
        if isinstance(found, int) and 1 <= found <= MOST_RANKS:
            return found
        return max(1, (int(said) if said else run._peers.world) // alike)

    return int(run._peers.agree(look))


@contextlib.contextmanager
def gradients_kept(run: Session) -> Iterator[None]:
    """Preserve the gradients across `own_loop` and the first `begin`, for a trainer that does
    micro-batches of the first step before it knows how many a step has."""
    assert run._work.training.model is not None
    before = [(p, p.grad) for p in run._work.training.model.parameters()]
    yield
    for p, grad in before:
        p.grad = grad


def own_loop(
    run: Session,
    *,
    micro_batches: int,
    micro_batch: int,
    data: str,
    seed: int = 0,
    total: int = 0,
    adapter: str = "",
    per_device: bool = True,
    reading_ranks: int = 1,
    alike: int = 1,
) -> OwnLoop:
    """Resume, and begin a foreign trainer's loop, for adapters (see the module).
    `micro_batches`: their number in a step, on all ranks together; `micro_batch`: samples in
    each; `data`: a description of its data and their order; `total`: its last step, 0: not
    known; `per_device`: the script says what each rank does, and the global batch is that of
    `script_world` ranks, else it names the global batch; `reading_ranks`: of the ranks of a copy of
    the model, those that read different parts of a micro-batch; `alike`: see `script_world`. Raises
    BadInput, StoreError, SystemExit."""
    training, feed = run._work.training, run._work.feed
    if training.model is None:
        raise BadInput("call run.prepare(model, optimizer) before own_loop(run, ...)")
    if run._hands.has_looped:
        raise BadInput(
            f"{adapter}: this script trains a second time, and with this trainer one run is one "
            "training: make the second a script and a run of its own, which begins with the "
            "weights of the first"
        )
    first_ranks = script_world(run, alike)
    foreign = {"data": data, "adapter": adapter, "script_world": first_ranks}
    place = training.keep_place(DataPlace())
    if training.guard is not None and adapter not in GUARDED:
        raise BadInput(
            f"guards are not built for {adapter}: wanted run.steps, run.loader or transformers; "
            "leave out --guards (HARNESS_GUARDS)"
        )
    run._work.shrinking.refuse(adapter or "a loop of its own")
    if reading_ranks > 1 and training.norms.watches:
        raise BadInput(
            "the model has BatchNorm, whose averages would be of a part of each micro-batch on "
            "each rank of a copy of the model: wanted LayerNorm, GroupNorm or RMSNorm"
        )
    with hidden_world.inside():
        try:
            feed.first_ranks = first_ranks if per_device else 0
            feed.open_foreign(micro_batches, micro_batch, seed, foreign, reading_ranks)
        except TooManyRanks as e:
            run._announce(feed.identity(training.model, run.reduce))
            run._shrink(e)
            raise
        run._announce(feed.identity(training.model, run.reduce))
        run._setup.settle()
        run._hands.total = run._run.phase.begins + total if total else 0
        run._hands.turn(machine.Looped())
        training.strategy.start(micro_batches)
        training.strategy.zero()
    norm_once.install()
    if per_device and not run.step:
        each = micro_batch // reading_ranks
        readers = feed.first_ranks * alike * reading_ranks // run.replica_ranks
        batch = batch_text(micro_batches * micro_batch, each, readers)
        run.print(f"harness: {batch}, and stays so on any number of ranks")
    return OwnLoop(run, place, ReadingRanks.of(run._peers, reading_ranks))
