"""Which faults a simulated run may name as the reason of a bad end. Pure.

A run that ends badly says why. That is excused only by faults that did it: as many as the reason
counts, each in an epoch or on a node of its own, at the step that the reason names. Anything else
could have ended well.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field

SCRIPT = r"the script failed (\d+) times .*\(after step (\d+)\): (.*)\. Mend the script"
UNREADABLE = r"none of its snapshots can be used|its newest \d+ snapshots cannot be used"
TOGETHER_S = 120.0  # two hosts that read at most this long after another can agree
AGENTS = r"the script failed (\d+) times in a row after step (\d+); "
WORDS = {"RuntimeError: simulated: the script raises": "fail-script", "SIGKILL": "kill-worker"}


@dataclass(frozen=True)
class Blow:
    """A fault ended a worker of this epoch, or (epoch 0) the agent of this attempt. `step`: the
    greatest that was committed then."""

    t: float
    kind: str
    attempt: int
    epoch: int
    step: int


@dataclass
class Blows:
    """`misread`: by attempt, when a node last was given damaged bytes of a snapshot."""

    all: list[Blow] = field(default_factory=list)
    misread: dict[int, float] = field(default_factory=dict)

    def explain(self, reason: str) -> bool:
        """Are these the reason that a run gives for its end?"""
        if found := re.search(SCRIPT, reason):
            times, step, failure = int(found[1]), int(found[2]), found[3]
            kind = WORDS.get(failure)
            return len({b.epoch for b in self.all if (b.kind, b.step) == (kind, step)}) >= times
        if found := re.search(AGENTS, reason):
            times, step = int(found[1]), int(found[2])
            died = {b.attempt for b in self.all if (b.kind, b.step) == ("crash-agent", step)}
            return len(died) >= times
        if re.search(UNREADABLE, reason):  # one host is not believed
            times_s = sorted(self.misread.values())
            return any(b - a <= TOGETHER_S for a, b in itertools.pairwise(times_s))
        return False

    def __str__(self) -> str:
        return "; ".join(
            f"{b.kind} at {b.t:.1f} s (attempt {b.attempt}, epoch {b.epoch}, step {b.step})"
            for b in self.all
        )
