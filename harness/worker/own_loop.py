"""Steps of a loop that is not ours: the seam on which the adapters of other trainers hang. Runs in
the worker.

A trainer that believes that it is alone asks for an accumulation of M micro-batches. Each rank
does those of its share, in the trainer's own forward and backward; the trainer has scaled every
loss so that the plain sum of all M gradients is right. Then, on all ranks:

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

What lies at a position of the data is the trainer's affair, so records hold positions, which
anybody can add up, and a hash of what was read there, which other runs can be compared with.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.bucket.layout import IDENTITY, Identity
from harness.core.batch import TooManyRanks, seed_for
from harness.core.values import BadObject
from harness.core.world import BadInput
from harness.node.progress import WorkerPhase
from harness.worker import machine
from harness.worker.hands import Hands
from harness.worker.hidden import world as hidden_world
from harness.worker.loader import seed_everything
from harness.worker.norm_once import once as norm_once
from harness.worker.own_work import OwnWork
from harness.worker.parallel import Replicated
from harness.worker.peers import Peers
from harness.worker.run import Run
from harness.worker.setup_check import SetupCheck
from harness.worker.step import Sums, Work
from harness.worker.timing import BACKWARD, COMMUNICATION, DATA, FORWARD, OPTIMIZER, OTHER
from storage.errors import NotFound

SCRIPT_WORLD = "HARNESS_SCRIPT_WORLD"  # see `OwnLoops.script_world`
MOST_RANKS = 1 << 20
WhatWasRead = Sequence[int] | np.ndarray[Any, Any]


class DataPlace:
    """Where in the data the next step begins: samples consumed so far."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = int(state["position"])


def begin_micro(work: Work, number: int, m: int, seed: int, last: bool) -> None:
    """Before the forward of micro-batch m of step `number`; what it draws depends on these and the
    run's `seed`. `last`: it is this rank's last one of the step."""
    work.training.strategy.micro(last=last)
    work.timer.enter(FORWARD)
    work.training.statistics.take_up(m, counts=True)
    seed_everything(seed_for(seed, number, m))


class OwnLoop:
    """Made by `Session.own_loop`; see the module. `micro_batches`: of a full step, on all ranks
    together; `micro_batch`: samples in each."""

    def __init__(self, work: Work, hands: Hands, place: DataPlace):
        self._work, self._hands, self._place = work, hands, place
        if work.training.statistics.loads.watches:
            raise BadInput(
                "the model has routers that are balanced once per step, and this trainer does not "
                "say when a backward begins; use run.steps(...) or run.loader, or balance them by "
                "an auxiliary loss"
            )
        batching = work.batching
        self.micro_batches, self.micro_batch = batching.micro_batches, batching.micro_batch
        self.share = work.feed.plan.micros(work.peers.rank)
        self.leads = work.peers.rank == 0
        self._own_work = OwnWork(work.peers.life.tell)
        self.seed_between()

    def begin(self, micro_batches: int | None = None, samples: int | None = None) -> OwnStep:
        """The next optimizer step. `micro_batches`: fewer, of a step that ends an epoch;
        `samples`: fewer than `micro_batch` for each, if the last one is short. All ranks say the
        same."""
        count = self.micro_batches if micro_batches is None else micro_batches
        if not 1 <= count <= self.micro_batches:
            raise ValueError(f"wanted 1 to {self.micro_batches} micro-batches, found {count}")
        full = count * self.micro_batch
        if samples is not None and not 0 < samples <= full:
            raise ValueError(f"wanted 1 to {full} samples, found {samples}")
        self._own_work.end()
        self._work.peers.life.tell(WorkerPhase.COMPUTE, self._work.run.step)
        return OwnStep(self, self._work, count, full if samples is None else samples, self._place)

    def boundary(self) -> None:
        """Between two steps: agree on what to do and do it, all ranks at the same boundary. Raises
        SystemExit when the node is asked to leave, or a replay is at its last step: the snapshot is
        committed then."""
        self._own_work.end()
        with hidden_world.inside():
            self._hands.boundary()
        self._work.timer.rest()
        self._own_work.begin()
        if self._work.run.step >= self._hands.until:
            self._hands.turn(machine.Finished())
            sys.exit(0)

    def finished(self) -> None:
        """The training is done, what follows is the script's own: commit the final snapshot."""
        self._own_work.end()
        self._hands.turn(machine.Reached())
        self._own_work.begin()

    def seed_between(self) -> None:
        """What runs between two steps draws the same on any world."""
        feed, step = self._work.feed, self._work.run.step
        seed_everything(seed_for(feed.seed, step, self.micro_batches))


class OwnStep:
    """One optimizer update of somebody else's loop; see the module."""

    def __init__(self, loop: OwnLoop, work: Work, count: int, samples: int, place: DataPlace):
        self.number = work.run.step + 1
        self.count, self.samples = count, samples
        self._loop, self._work, self._place = loop, work, place
        plan, peers = work.feed.plan, work.peers
        self.mine = range(loop.share.start, max(loop.share.start, min(loop.share.stop, count)))
        self._sums = Sums(work.batching, peers.device, peers.leads_replica)
        if count < loop.micro_batches:
            self._sums.shares = tuple(
                max(0, min(start + share, count) - start)
                for start, share in zip(plan.starts, plan.shares, strict=True)
            )
        # of the others, some may have had no micro-batch
        self.some_idle = count < loop.micro_batches
        self._micros = 0
        self._floats: torch.Tensor | None = None
        self._began = time.time(), time.perf_counter()
        work.timer.begin(self.number)
        work.timer.enter(DATA)
        work.training.strategy.zero()

    def first_of(self, m: int) -> int:
        """The position of micro-batch m's first sample."""
        return self._place.position + m * self._loop.micro_batch

    def micro(self, m: int) -> None:
        """Before the forward of an own micro-batch; what it draws depends on seed, step and m."""
        if m not in self.mine:
            raise ValueError(f"wanted one of this rank's micro-batches {self.mine}, found {m}")
        begin_micro(self._work, self.number, m, self._work.feed.seed, last=m == self.mine[-1])

    def idle(self) -> None:
        """The script forwards something that is no micro-batch of this step."""
        self._work.training.statistics.norms.rest()

    def read(
        self, m: int, keys: WhatWasRead | None = None, contents: WhatWasRead | None = None
    ) -> None:
        """What micro-batch m consists of: indices of the dataset (`keys`), or hashes of the items
        where there are none (`contents`, of `loader.content_hash`)."""
        said = keys if keys is not None else contents
        if not isinstance(said, np.ndarray) or said.dtype != np.int64:
            values = () if said is None else said
            said = np.array([int(value) % 2**63 for value in values], np.int64)
        first = self.first_of(m)
        at = np.arange(first, first + len(said), dtype=np.int64)
        self._sums.note_foreign(at, said & np.int64(2**63 - 1))

    def done(self, m: int, loss: torch.Tensor | float, weight: float) -> None:
        """After its backward. `loss`: the mean over it; `weight`: for how many samples or tokens
        that stands."""
        self._work.timer.enter(OTHER)
        self._work.training.strategy.micro_done()
        value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss))
        self._sums.add(m, value.reshape(()), float(weight))
        self._sums.tokens_weighted = True
        self._micros += 1

    def hold(self) -> None:
        """Before the backward of an own micro-batch: its gradients are not sent while it runs, but
        by `sync`. For a trainer whose ranks may be at different points of a step by then."""
        strategy = self._work.training.strategy
        if isinstance(strategy, Replicated):
            strategy.hold()

    def backward_begins(self) -> None:
        """For reports on where time goes."""
        self._work.timer.enter(BACKWARD)

    def sync(self, redo: Callable[[], None] | None = None) -> None:
        """Gradients are sums over all ranks from here on. `redo`: does all own micro-batches again
        (forward and backward; with exact sums a gradient may not have fitted). Raises BadInput
        where that is needed and cannot be done."""
        work, strategy = self._work, self._work.training.strategy
        work.peers.life.tell(WorkerPhase.REDUCE)
        work.timer.enter(COMMUNICATION)
        with hidden_world.inside():
            if not self.mine:
                strategy.micro(last=True)
            while strategy.may_repeat and strategy.again():
                if redo is None:
                    raise BadInput(
                        f"step {self.number}: a gradient did not fit into exact sums, and this "
                        "trainer cannot do a step again; use reduce='fast', or 'exact' instead of "
                        "'exact32'"
                    )
                work.run.warn("a gradient did not fit: the step is done again", self.number)
                redo()
                if not self.mine:
                    strategy.micro(last=True)
            self._floats, _ = work.summed(self._sums)
            work.training.settle_norms(self.count, self.some_idle)
            strategy.divide(1.0)
            self._floats[2] = strategy.norm()
        work.finish_staging()
        work.timer.enter(OPTIMIZER)

    @property
    def loss(self) -> float:
        """Over the global batch, after `sync`; waits for the device."""
        assert self._floats is not None
        total, weight = self._floats[:2].tolist()
        return total / weight if weight else math.nan

    @property
    def weight(self) -> float:
        """Of the global batch, after `sync`; waits for the device."""
        assert self._floats is not None
        return float(self._floats[1])

    def end(self, lr: float) -> None:
        """The optimizers have stepped."""
        assert self._floats is not None
        norm_once.forget()
        begins, self._place.position = self._place.position, self._place.position + self.samples
        with hidden_world.inside():
            self._work.done(self._sums, self._began, self._micros, self._floats, lr, begins)
        self._loop.seed_between()


class OwnLoops:
    """What a session gives to adapters."""

    _work: Work
    _hands: Hands
    _peers: Peers
    _run: Run
    _setup: SetupCheck
    reduce: str
    _said_world: str  # HARNESS_SCRIPT_WORLD

    if TYPE_CHECKING:

        def _announce(self, identity: dict[str, Any]) -> None: ...

        def _shrink(self, why: TooManyRanks) -> None: ...

    def script_world(self) -> int:
        """The world whose batch is kept: how many ranks an unchanged script is taken to have been
        written for. What this run began with; else HARNESS_SCRIPT_WORLD; else this world. Raises
        BadInput."""
        said = self._said_world
        if said and not (said.isdecimal() and 1 <= int(said) <= MOST_RANKS):
            raise BadInput(f"{SCRIPT_WORLD}={said!r}: wanted a number of ranks, at least 1")

        def look() -> int:
            begun: dict[str, Any] = {}
            # what is broken `Run.identify` will refuse, in its words
            with contextlib.suppress(NotFound, BadObject):
                if self._run.url:
                    begun = Identity.decode(self._run.store.get(IDENTITY)).body
            found = begun.get("script_world")
            if isinstance(found, int) and 1 <= found <= MOST_RANKS:
                return found
            return int(said) if said else self._peers.world

        return int(self._peers.agree(look))

    @contextlib.contextmanager
    def gradients_kept(self) -> Iterator[None]:
        """What lies in the gradients stays there. Around `own_loop` and its first `begin`, of a
        trainer that has done micro-batches of that step before it knew how many a step has."""
        assert self._work.training.model is not None
        before = [(p, p.grad) for p in self._work.training.model.parameters()]
        yield
        for p, grad in before:
            p.grad = grad

    def own_loop(
        self,
        *,
        micro_batches: int,
        micro_batch: int,
        data: str,
        seed: int = 0,
        total: int = 0,
        adapter: str = "",
    ) -> OwnLoop:
        """Resume, and begin steps that another trainer makes: what adapters are built on (see the
        module). `micro_batches`: of a step, on all ranks together; `micro_batch`: samples in each;
        `data`: what its data and their order are; `total`: its last step, 0: not known. Raises
        BadInput, StoreError, SystemExit."""
        training, feed = self._work.training, self._work.feed
        if training.model is None:
            raise BadInput("call run.prepare(model, optimizer) before run.own_loop(...)")
        foreign = {"data": data, "adapter": adapter, "script_world": self.script_world()}
        place = training.keep_place(DataPlace())
        with hidden_world.inside():
            try:
                feed.open_foreign(micro_batches, micro_batch, seed, foreign)
            except TooManyRanks as e:
                self._announce(feed.identity(training.model, self.reduce))
                self._shrink(e)
                raise
            self._announce(feed.identity(training.model, self.reduce))
            self._setup.settle()
            self._hands.total = total
            self._hands.turn(machine.Looped())
            training.strategy.start(micro_batches)
            training.strategy.zero()
        norm_once.install()
        return OwnLoop(self._work, self._hands, place)
