"""The guards of a session: each step's sums are judged before its update. Runs in the worker.

A judgement needs the loss and the norm on the host. On a CPU they are there, and a trainer that
reads the norm to log it waits for it anyway; otherwise the host waits here once for the device,
between the sums and the optimizer, and is no longer ahead of it by a step. Every rank has the same
numbers, so nothing is exchanged.

Nobody knows whose gradient was not finite when all losses were, since only the sum is left. So the
gradients of each micro-batch are looked at for some steps after the first such case
(gradient_watch.py); who has caused the next one is then known, and with it whose fault it is that a
run stops. `harness runs bisect` has them looked at in each step, and recorded (StepLines).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from harness.core.facts import LOSS_SPIKE, GuardTripped, StepSkipped
from harness.core.world import BadInput
from harness.guards.gradient_watch import (
    MOST_NAMED,
    GradientWatch,
    StepLines,
    culprits,
    whole_parameters,
)
from harness.guards.guard_rules import (
    HOLD,
    MOST_STEPS,
    OFF,
    REWIND,
    Guards,
    StepFinding,
    StepRules,
    guards_of,
)
from harness.guards.rewind import Rewinds
from harness.worker.gradients.parallel import Replicated, Sharded, Single
from harness.worker.training_state import PASSED, Judged, StepHooks, Training

if TYPE_CHECKING:
    from harness.worker.step import Sums, Work

TOO_MANY = "too many bad steps"  # of GuardTripped


class StepGuard:
    """The guards of one session; see the module. Their state is a part of each snapshot."""

    def __init__(self, guards: Guards, leave: Callable[[], None], lines: StepLines | None = None):
        self.guards, self._leave, self._lines = guards, leave, lines
        self._rules, self._rewinds = StepRules(guards), Rewinds(guards)
        self._watch: GradientWatch | None = None

    @classmethod
    def of(cls, asked: object, leave: Callable[[], None], lines: str = "") -> StepGuard | None:
        """Return the guards that `guards_of` finds. `leave`: ends this generation on all ranks, for
        another one to go on from an older snapshot (SystemExit). `lines`: the file of `StepLines`;
        then the guards judge alike, and end nothing. Raises BadInput."""
        guards = guards_of(asked)
        if guards is None or not lines:
            return None if guards is None else cls(guards, leave)
        calm = replace(guards, spike=OFF, most_bad=MOST_STEPS)
        return cls(calm, leave, StepLines(Path(lines)))

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
        self._rules = StepRules(self.guards)  # what an earlier training's losses were says nothing
        self._rewinds.rewarm(training.optimizers)
        assert training.model is not None
        first = next(training.model.parameters())
        self._watch = GradientWatch(partial(whole_parameters, training), first.device)
        self._watch.turn(self._lines is not None)
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
        if self._lines is not None and self._watch is not None:
            norms = self._watch.norms(work.batching.micro_batches, work.peers.control is None)
            self._lines.note(work, sums, (loss, norm, weight), norms)
            self._watch.turn(False)
            self._watch.turn(True)
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
        if self._watch is not None and self._lines is None:
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
