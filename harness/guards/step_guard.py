"""The guards of a session: each step's sums are judged before its update. Runs in the worker.

A judgement needs the loss and the norm on the host. On a CPU they are there, and a trainer that
reads the norm to log it waits for it anyway; otherwise the host waits here once for the device,
between the sums and the optimizer, and is no longer ahead of it by a step. Every rank has the same
numbers, so nothing is exchanged.

Nobody knows whose gradient was not finite when all losses were, since only the sum is left. So the
gradients of each micro-batch are looked at for some steps after the first such case; who has caused
the next one is then known, and with it whose fault it is that a run stops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from harness.core.batch import indices_at
from harness.core.facts import LOSS_SPIKE, GuardTripped, StepSkipped
from harness.core.world import BadInput
from harness.guards.guard_rules import HOLD, REWIND, Guards, StepFinding, StepRules, guards_of
from harness.guards.rewind import Rewinds
from harness.worker.gradients.parallel import Replicated, Sharded, Single
from harness.worker.gradients.sharding import fsdp_groups
from harness.worker.training_state import PASSED, Judged, StepHooks, Training

if TYPE_CHECKING:
    from harness.worker.step import Sums, Work

TOO_MANY = "too many bad steps"  # of GuardTripped
MOST_NAMED = 8  # micro-batches, and samples of each, in one line


class GradientWatch:
    """A look at the gradients of each micro-batch, where autograd has made them."""

    def __init__(self, gradients_of: Callable[[], Sequence[torch.Tensor]], device: torch.device):
        """`gradients_of`: returns the tensors that autograd makes gradients for on this rank, as
        far as they exist."""
        self._gradients_of, self._device = gradients_of, device
        self._hooks: list[Any] = []
        self._micro, self._counts = 0, True
        self._bad: dict[int, torch.Tensor] = {}  # by micro-batch of this rank: 0-d, bool

    @property
    def is_on(self) -> bool:
        return bool(self._hooks)

    def turn(self, on: bool) -> None:
        """Begin to look, or end it."""
        if on and not self._hooks:
            self._hooks = [
                p.register_hook(self._look)  # type: ignore[no-untyped-call]
                for p in self._gradients_of()
            ]
        elif not on:
            while self._hooks:
                self._hooks.pop().remove()
        self._bad.clear()

    def take_up(self, micro: int, counts: bool, more: bool) -> None:
        """Attribute the next gradients to this micro-batch; see `StepHooks.before_micro`."""
        self._micro, self._counts = micro, counts

    def _look(self, grad: torch.Tensor) -> None:
        if not self._counts:
            return
        values = grad.coalesce().values() if grad.is_sparse else grad
        bad = ~torch.isfinite(values).all()
        self._bad[self._micro] = bad | self._bad.get(self._micro, bad)

    def found(self, micro_batches: int, alone: bool) -> list[int]:
        """Return the micro-batches of all ranks with a gradient that was not finite, on all ranks
        together."""
        every = torch.zeros(micro_batches, dtype=torch.int64, device=self._device)
        for micro, bad in self._bad.items():
            every[micro] = bad
        if not alone:
            dist.all_reduce(every)
        return [micro for micro, bad in enumerate(every.tolist()) if bad]


def _whole_parameters(training: Training) -> list[torch.Tensor]:
    """Return the parameters that forwards use here; FSDP2 makes its own in the first one."""
    assert training.model is not None
    if not isinstance(training.strategy, Sharded):
        return [p for p in training.model.parameters() if p.requires_grad]
    gathered = (
        getattr(one, "_unsharded_param", None)
        for group in fsdp_groups(training.model)
        for one in group.fsdp_params
    )
    return [p for p in gathered if p is not None and p.requires_grad]


@dataclass(frozen=True)
class Culprit:
    """A micro-batch that is not finite. `ranks`: who has done it; `samples`: for people."""

    micro: int
    ranks: tuple[int, ...]
    samples: str

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"micro-batch {self.micro} of rank {ranks} ({self.samples})"


def culprits(work: Work, sums: Sums, micros: Sequence[int]) -> list[Culprit]:
    """Return who has done these micro-batches of the step, and with which samples."""
    plan = work.feed.plan
    owners = [replica for replica, n in enumerate(sums.shares or plan.shares) for _ in range(n)]
    found = []
    for micro in micros:
        ranks = tuple(r for r in range(plan.ranks) if plan.replica(r) == owners[micro])
        found.append(Culprit(micro, ranks, _samples(work, sums, micro)))
    return found


def _samples(work: Work, sums: Sums, micro: int) -> str:
    """Return the samples of a micro-batch: indices in the dataset where the harness has chosen
    them, else positions in the order of the data."""
    batching = work.batching
    begins = sums.begins if sums.begins >= 0 else work.run.step * batching.global_batch
    first = begins + micro * batching.micro_batch
    if sums.begins >= 0 or work.feed.stream is not None:
        return f"positions {first} to {first + batching.micro_batch - 1} of the data"
    at = indices_at(batching, np.arange(first, first + batching.micro_batch)).tolist()
    more = ", ..." if len(at) > MOST_NAMED else ""
    return f"samples {', '.join(map(str, at[:MOST_NAMED]))}{more}"


class StepGuard:
    """The guards of one session; see the module. Their state is a part of each snapshot."""

    def __init__(self, guards: Guards, leave: Callable[[], None]):
        self.guards, self._leave = guards, leave
        self._rules, self._rewinds = StepRules(guards), Rewinds(guards)
        self._watch: GradientWatch | None = None

    @classmethod
    def of(cls, asked: object, leave: Callable[[], None]) -> StepGuard | None:
        """Return the guards that `guards_of` finds. `leave`: ends this generation on all ranks, for
        another one to go on from an older snapshot (SystemExit). Raises BadInput."""
        guards = guards_of(asked)
        return None if guards is None else cls(guards, leave)

    def hooked(self, hooks: StepHooks, training: Training) -> StepHooks:
        """Return the hooks with those of the guards. Raises BadInput for what they cannot guard."""
        strategy = training.strategy
        if training.whole is not None:
            raise BadInput("guards are not built for harness.pipeline; leave out guards=")
        if not isinstance(strategy, Single | Replicated | Sharded):
            raise BadInput(
                f"guards are not built for the strategy {getattr(strategy, 'name', strategy)!r}, "
                "as it may keep gradients elsewhere than in p.grad; leave out guards="
            )
        self._rewinds.rewarm(training.optimizers)
        assert training.model is not None
        first = next(training.model.parameters())
        self._watch = GradientWatch(partial(_whole_parameters, training), first.device)
        return replace(
            hooks, judge=self.judge, before_micro=(*hooks.before_micro, self._watch.take_up)
        )

    def judge(self, work: Work, sums: Sums, floats: torch.Tensor) -> Judged:
        """Judge a step before its update, on all ranks; see `StepHooks.judge`. Raises BadInput when
        too many updates were skipped: a retry would skip them again."""
        number = work.run.step + 1
        total, weight, norm = floats[:3].tolist()
        if not weight and total == 0.0:
            return PASSED  # the script has skipped all of it
        loss = total / weight if weight else math.nan
        if why := self._rewinds.why_left_out(work, number):
            return self._left_out(work, why, (loss, norm))
        found = self._rules.judge(number, loss, norm, work.training.scaler is not None)
        if found.spike is not None:
            work.run.fact(GuardTripped(number, work.run.epoch, LOSS_SPIKE, loss))
            usual = f"step {number}: the loss is {loss:.4g}, {found.spike[1]:.4g} is usual"
            work.peers.print(f"harness: {usual}")
        if found.spikes and not found.skip and self.guards.spike == REWIND:
            self._rewinds.order(work, number, loss, median(self._rules.losses))
            self._leave()
        if found.skip:
            self._skip(work, sums, found, (loss, norm))
        if self._watch is not None:
            self._watch.turn(self._rules.watches(number + 1))
        most = found.most_norm
        clips = most is not None and norm > most
        return Judged(
            found.skip, bool(found.skip) and self.guards.skip == HOLD, most if clips else None
        )

    def _left_out(self, work: Work, why: str, numbers: tuple[float, float]) -> Judged:
        """Skip an update that a rewind leaves out: the rules neither judge nor remember it."""
        number = work.run.step + 1
        self._rules.skipped += 1
        work.run.fact(StepSkipped(number, work.run.epoch, why, *numbers, (), (), ""))
        work.peers.print(f"harness: step {number} is {why}")
        return Judged(why, self.guards.skip == HOLD)

    def _skip(
        self, work: Work, sums: Sums, found: StepFinding, numbers: tuple[float, float]
    ) -> None:
        """Record a skipped update. Raises BadInput when there were too many."""
        run, number = work.run, work.run.step + 1
        assert sums.every is not None
        micros = [m for m, loss in enumerate(sums.every.tolist()) if not math.isfinite(loss)]
        if found.in_gradients and self._watch is not None and self._watch.is_on:
            micros = self._watch.found(work.batching.micro_batches, work.peers.control is None)
        guilty = culprits(work, sums, micros[:MOST_NAMED])
        ranks = tuple(sorted({rank for one in guilty for rank in one.ranks}))
        where = "; ".join(map(str, guilty))
        run.fact(
            StepSkipped(number, run.epoch, found.skip, *numbers, tuple(micros), ranks, where)
        )
        text = f"{found.skip}{f': {where}' if where else ''}"
        work.peers.print(f"harness: step {number} is skipped: {text}")
        if found.bad:
            run.fact(GuardTripped(number, run.epoch, TOO_MANY, float(found.bad)))
            run.close()
            raise BadInput(
                f"step {number}: {text}. {found.bad} updates of the last {self.guards.bad_window} "
                f"steps were skipped, wanted at most {self.guards.most_bad} (guards: most_bad). "
                "The newest snapshot is good; look at these samples (`harness data exclude` leaves "
                "them out), the learning rate and the precision, then launch again"
            )

    # ---- state -----------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered of the steps so far, the same on all ranks."""
        return self._rules.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._rules.load_state_dict(state)
        if self._watch is not None:
            self._watch.turn(bool(self._rules.blind))
