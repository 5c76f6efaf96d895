"""What the rules of alerts know of a run: a fold of its facts, with a short memory.

`LiveState` (`watching.py`) is most of it, so that an alert and `harness status` cannot disagree.
Beside it are the last snapshots, how fast each world was, what nodes measured, and what an
evaluator sees that no fact tells (`Sight`).

Pure: no store, no clock.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from harness.core import facts as f
from harness.core.facts import Stamped
from harness.views.watching import LiveState

IDLE_BELOW = 10.0  # percent of a GPU
RECENT, BASE = 20, 500  # steps
SLOWER = 1.3  # times the usual step
SPIKE, FREAK = 1.5, 10.0  # of a loss: times the usual one, and times the usual distance from it
BROKEN = ("failed", "killed", "hung", "unfit", "peer-lost")  # facts.EpochLeft.why


@dataclass(frozen=True)
class Sight:
    """What an evaluator sees besides facts, by its own clock. None: it does not look, or all is
    well. Times are wall clock seconds."""

    leader_silent_s: float | None = None  # since when the lease's beat stands still
    bucket_silent_s: float | None = None  # for how long the bucket did not answer, until just now


@dataclass
class Speeds:
    """How long steps took, by world size: the same work on other numbers of ranks is no
    regression."""

    world: int = 0
    epoch: int = 0
    base: dict[int, deque[float]] = field(default_factory=dict)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _count: int = 0
    _every: int = 1  # of the steps that become usual; few of those that are far slower

    def add(self, step: f.StepDone, world: int) -> None:
        if step.epoch < self.epoch:
            return
        self._count += 1
        if (world, step.epoch) != (self.world, self.epoch):
            self.recent.clear()
            self.world, self.epoch, self._every = world, step.epoch, 1
        if len(self.recent) == RECENT and self._count % self._every == 0:
            self.base.setdefault(world, deque(maxlen=BASE)).append(self.recent[0])
        self.recent.append(step.seconds)
        if self._count % RECENT == 0:
            found = self.slowdown()
            self._every = 10 if found and found[0] > SLOWER * found[1] else 1

    def slowdown(self) -> tuple[float, float] | None:
        """Median seconds of the recent steps, and of the ones before in the same world; None: too
        few."""
        known = self.base.get(self.world, ())
        if len(known) < RECENT or len(self.recent) < RECENT:
            return None
        return median(self.recent), median(known)


@dataclass
class RecentLosses:
    """The losses of the last steps. `limit`: what the newest one was measured by; it follows them
    every few steps, so that a million of them cost little."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=200))
    usual: float = math.nan
    limit: float = math.inf
    _next_limit: float = math.inf
    _count: int = 0

    def add(self, loss: float) -> None:
        self.limit = self._next_limit
        if not math.isfinite(loss):
            return
        self.recent.append(loss)
        self._count += 1
        if self._count % RECENT == 0 and len(self.recent) >= 50:
            self.usual = median(self.recent)
            far = median(abs(x - self.usual) for x in self.recent)
            self._next_limit = self.usual + max(FREAK * far, (SPIKE - 1) * abs(self.usual))


@dataclass
class RunSoFar:
    """All that rules may look at. `apply` takes facts in any order; newer ones win."""

    live: LiveState = field(default_factory=LiveState)
    sight: Sight = field(default_factory=Sight)
    started_s: float | None = None  # when somebody first asked for this run
    # when it was committed, and the fact; the newest few
    commits: deque[tuple[float, f.SnapshotCommitted]] = field(
        default_factory=lambda: deque(maxlen=64)
    )
    session_s: float | None = None  # when the newest world was ready to train
    replicated: dict[str, tuple[int, int]] = field(default_factory=dict)  # (epoch, step) by URL
    broken: list[int] = field(default_factory=list)  # epochs since the last commit that broke
    failures: deque[f.WorkerFailed] = field(default_factory=lambda: deque(maxlen=64))
    refused_s: float | None = None  # no node is up, and since when there was no capacity
    speeds: Speeds = field(default_factory=Speeds)
    losses: RecentLosses = field(default_factory=RecentLosses)
    idle_s: dict[tuple[str, str], float] = field(default_factory=dict)  # (member, GPU) -> since
    last_s: dict[str, float] = field(default_factory=dict)  # kind of fact -> when it was told last

    def apply(self, stamped: Stamped) -> None:
        t, fact = stamped.t, stamped.fact
        self.live.apply(stamped)
        self.last_s[fact.kind] = max(t, self.last_s.get(fact.kind, t))
        match fact:
            case f.RunAsked():
                self.started_s = t if self.started_s is None else min(t, self.started_s)
            case f.SessionStarted(epoch) if epoch >= self.live.epoch:
                self.session_s = t
            case f.SnapshotCommitted():
                self.commits.append((t, fact))
                self.broken.clear()
            case f.SnapshotReplicated(step, epoch, url):
                self.replicated[url] = max((epoch, step), self.replicated.get(url, (0, 0)))
            case f.EpochLeft(epoch, _, why) if why in BROKEN and epoch not in self.broken:
                self.broken.append(epoch)
            case f.WorkerFailed():
                self.failures.append(fact)
            case f.AttemptEnded(_, "no-capacity"):
                self.refused_s = t if self.refused_s is None else self.refused_s
            case f.AttemptUp() | f.AgentStarted():
                self.refused_s = None
            case f.StepDone():
                self.losses.add(fact.loss)
                started = self.live.epochs.get(fact.epoch)
                session = self.live.sessions.get(fact.epoch)
                self.speeds.add(fact, started.world if started else session.world if session else 0)
            case f.NodeMeasured():
                self._measured(t, fact)

    def _measured(self, t: float, fact: f.NodeMeasured) -> None:
        for name, value in fact.metrics.items():
            gpu, _, what = name.partition("/")
            if gpu.startswith("gpu") and what == "percent":
                if value < IDLE_BELOW:
                    self.idle_s.setdefault((fact.member, gpu), t - fact.seconds)
                else:
                    self.idle_s.pop((fact.member, gpu), None)

    # ---- questions that several rules ask --------------------------------------------------------
    @property
    def trains(self) -> bool:
        """A world is ready, and nobody has left it."""
        return bool(self.live.training()) and self.live.epoch in self.live.sessions

    @property
    def nodes_up(self) -> int:
        return sum(
            n.alive and (n.up_s is not None or bool(n.members)) for n in self.live.nodes.values()
        )

    def hours_left(self, now_s: float) -> float | None:
        """Until the last step, at the pace of the newest commits, interruptions included. None: not
        known."""
        if len(self.commits) < 2 or not self.live.total:
            return None
        (begin_s, first), step = self.commits[0], self.live.committed[0]
        done, spent_s = step - first.step, now_s - begin_s
        if done <= 0 or spent_s <= 0:
            return None
        return max(0, self.live.total - step) * spent_s / done / 3600

    def snapshot_limit_s(self) -> float:
        """An age of the newest snapshot that is not usual any more: three times the usual time
        between two of them, at least five minutes; two hours while that is not known."""
        epoch = self.live.epoch
        same = [t for t, c in self.commits if c.epoch == epoch]
        gaps = [b - a for a, b in itertools.pairwise(same) if b > a]
        return max(300.0, 3 * median(gaps[-10:])) if gaps else 7200.0

    def behind_s(self, url: str) -> float | None:
        """Since when a second bucket lacks what is committed; None: it lacks nothing."""
        there = self.replicated[url]
        return next((t for t, c in self.commits if (c.epoch, c.step) > there), None)
