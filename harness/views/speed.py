"""How fast a run was: where its steps' time went, which rank was slow, what more ranks were worth.

Pure: facts and columns of steps in, a `SpeedSummary` out. What the numbers mean, and how they are
taken, is in docs/SPEED.md.

    speed = speed_of(facts, steps, committed)     # as `views/summary.py` has them
    speed.seconds["communication"] / speed.step_s     # share of a step's wall-clock time
    [(w.world, w.efficiency) for w in speed.worlds]   # the scaling curve
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from harness.core import columns
from harness.core.columns import NONE, Columns, Committed
from harness.core.facts import (
    PHASES,
    EpochStarted,
    ProfileTaken,
    SessionStarted,
    Stamped,
    StepDone,
    StepsTimed,
)

MOST_WINDOWS = 1000  # of a summary; neighbours are joined
MOST_SLOW = 8  # ranks that are named


@dataclass(frozen=True)
class RankSpread:
    """Of a number over the ranks: its least, median and greatest value, and whose they are."""

    least: float
    median: float
    most: float
    least_rank: int
    most_rank: int


@dataclass(frozen=True)
class SpeedWindow:
    """Some steps in a row, as rank 0 told of them: means over steps and ranks. None: not known."""

    t: float  # wall clock, when it was told
    epoch: int
    world: int  # ranks; 0: not known
    first: int
    last: int
    seconds: dict[str, float]  # of one step, by phase (facts.PHASES)
    own: RankSpread | None = None  # seconds of a rank's own in a step
    loss: RankSpread | None = None
    mfu: float | None = None
    hfu: float | None = None
    samples: int = 0  # of one step
    tokens: int = 0

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    @property
    def step_s(self) -> float:
        """From one step's begin to the next one's."""
        return sum(self.seconds.values())

    @property
    def samples_per_s(self) -> float | None:
        return self.samples / self.step_s if self.samples and self.step_s > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.step_s if self.tokens and self.step_s > 0 else None


@dataclass(frozen=True)
class WorldSpeed:
    """All that a run has done with this many ranks; None: not known."""

    world: int
    steps: int
    step_s: float  # median of the steps' own durations, without what lies between two steps
    samples_per_s: float | None  # while it made steps, all ranks together
    tokens_per_s: float | None
    efficiency: float  # speed per rank, of that in the smallest world; 1: perfect scaling
    seconds: dict[str, float]  # of one step, by phase; empty: not known
    mfu: float | None = None
    hfu: float | None = None


@dataclass(frozen=True)
class SlowRank:
    """A rank that was the slowest of its world again and again."""

    epoch: int
    rank: int
    windows: int  # in which it was the slowest
    of: int  # windows of that epoch
    behind: float  # its own time above the median rank's there, as a share: 0.2 is a fifth longer


@dataclass(frozen=True)
class SpeedSummary:
    """Empty and None where nothing was told: by an older version, or before the first window."""

    windows: tuple[SpeedWindow, ...] = ()  # by time
    worlds: tuple[WorldSpeed, ...] = ()  # by size: the scaling curve
    seconds: dict[str, float] = field(default_factory=dict)  # of one step, by phase, all the run
    mfu: float | None = None
    hfu: float | None = None
    samples_per_s: float | None = None  # wall clock from step to step
    tokens_per_s: float | None = None
    slowest: tuple[SlowRank, ...] = ()  # those most behind first
    profiles: tuple[ProfileTaken, ...] = ()

    @property
    def step_s(self) -> float:
        """Mean, from one step's begin to the next one's; 0: not known."""
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        """Of a step's wall-clock time, by phase."""
        whole = self.step_s
        return {p: s / whole for p, s in self.seconds.items()} if whole > 0 else {}

    @property
    def newest(self) -> SpeedWindow | None:
        return self.windows[-1] if self.windows else None


def speed_of(
    facts: Iterable[Stamped],
    steps: Columns = NONE,
    committed: Committed | None = None,
    most_windows: int = MOST_WINDOWS,
) -> SpeedSummary:
    """`steps`: told live and not among the facts; `committed`: the chain of records. Either may be
    missing, then the curve is made of the other."""
    found = list(facts)
    worlds = {e: w for e, (w, _) in committed.worlds.items()} if committed else {}
    per_step = (0, 0)  # samples and tokens, the same for the whole run
    live: list[StepDone] = []
    timed: list[Stamped] = []
    for s in found:
        match s.fact:
            case SessionStarted() as f:
                worlds[f.epoch] = f.world
                per_step = (f.global_batch, 0)
            case EpochStarted() as f:
                worlds.setdefault(f.epoch, f.world)
            case StepDone() as f:
                live.append(f)
            case StepsTimed():
                timed.append(s)
    windows = _windows(timed, worlds)
    if told := [w for w in windows if w.samples]:
        per_step = (told[-1].samples, told[-1].tokens)
    elif live:
        per_step = (live[-1].samples, live[-1].tokens)
    rows = [steps, columns.of_facts(live), *([committed.rows] if committed else [])]
    every = columns.newest_told(columns.joined(rows))
    return SpeedSummary(
        windows=tuple(_joined(windows, most_windows)),
        worlds=tuple(_worlds(every, worlds, per_step, windows)),
        seconds=_split(windows),
        mfu=_mean(windows, "mfu"),
        hfu=_mean(windows, "hfu"),
        samples_per_s=_rate(windows, "samples"),
        tokens_per_s=_rate(windows, "tokens"),
        slowest=tuple(_slowest(windows)),
        profiles=tuple(s.fact for s in found if isinstance(s.fact, ProfileTaken)),
    )


# ---- windows -------------------------------------------------------------------------------------
def _windows(timed: Sequence[Stamped], worlds: Mapping[int, int]) -> list[SpeedWindow]:
    """What cannot be true is left out: it was damaged, or written by a stranger."""
    found = []
    for s in sorted(timed, key=lambda s: s.t):
        f = s.fact
        assert isinstance(f, StepsTimed)
        seconds = {p: v for p in PHASES if _good(v := f.seconds.get(p, 0.0))}
        if len(seconds) < len(PHASES) or f.last < f.first or sum(seconds.values()) <= 0:
            continue
        found.append(
            SpeedWindow(
                *(s.t, f.epoch, worlds.get(f.epoch, 0), f.first, f.last, seconds),
                own=_spread(f.own_s, f.own_ranks),
                loss=_spread(f.loss, f.loss_ranks),
                mfu=utilisation(f.mfu),
                hfu=utilisation(f.hfu),
                samples=max(0, f.samples),
                tokens=max(0, f.tokens),
            )
        )
    return found


def utilisation(value: float | None) -> float | None:
    """A share of a peak; None for what cannot be one."""
    return value if value is not None and 0 < value <= 1 else None


def _good(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0


def _spread(values: Sequence[float], ranks: Sequence[int]) -> RankSpread | None:
    if len(values) != 3 or len(ranks) != 2 or not all(map(math.isfinite, values)):
        return None
    return RankSpread(values[0], values[1], values[2], ranks[0], ranks[1])


def _joined(windows: Sequence[SpeedWindow], most: int) -> Iterable[SpeedWindow]:
    """At most so many (and one more for each epoch): neighbours of one epoch become one, with the
    spreads of its last."""
    each = -(-len(windows) // most)
    group: list[SpeedWindow] = []
    for w in windows:
        if group and (len(group) >= each or group[-1].epoch != w.epoch):
            yield _as_one(group)
            group = []
        group.append(w)
    if group:
        yield _as_one(group)


def _as_one(group: Sequence[SpeedWindow]) -> SpeedWindow:
    last = group[-1]
    if len(group) == 1:
        return last
    return SpeedWindow(
        *(last.t, last.epoch, last.world, group[0].first, last.last, _split(group)),
        own=last.own,
        loss=last.loss,
        mfu=_mean(group, "mfu"),
        hfu=_mean(group, "hfu"),
        samples=last.samples,
        tokens=last.tokens,
    )


# ---- means ---------------------------------------------------------------------------------------
def _split(windows: Sequence[SpeedWindow]) -> dict[str, float]:
    """Of one step, by phase."""
    steps = sum(w.steps for w in windows)
    if not steps:
        return {}
    return {p: sum(w.seconds[p] * w.steps for w in windows) / steps for p in PHASES}


def _mean(windows: Sequence[SpeedWindow], name: str) -> float | None:
    """Of MFU or HFU, over time."""
    known = [(getattr(w, name), w.step_s * w.steps) for w in windows]
    known = [(value, weight) for value, weight in known if value is not None]
    whole = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / whole if whole > 0 else None


def _rate(windows: Sequence[SpeedWindow], name: str) -> float | None:
    """Per second of wall clock."""
    known = [w for w in windows if getattr(w, name)]
    spent_s = sum(w.step_s * w.steps for w in known)
    return sum(getattr(w, name) * w.steps for w in known) / spent_s if spent_s > 0 else None


# ---- worlds and ranks ----------------------------------------------------------------------------
def _worlds(
    rows: Columns,
    worlds: Mapping[int, int],
    per_step: tuple[int, int],
    windows: Sequence[SpeedWindow],
) -> Iterable[WorldSpeed]:
    taken: dict[int, list[Columns]] = defaultdict(list)
    rows = rows[rows["seconds"] > 0]  # by epoch, as `newest_told` leaves them
    for part in np.split(rows, np.flatnonzero(np.diff(rows["epoch"])) + 1):
        epoch = int(part["epoch"][0]) if len(part) else 0
        if worlds.get(epoch):
            taken[worlds[epoch]].append(part["seconds"])
    alone_s = 0.0  # seconds of one rank for a step, in the smallest world
    for world in sorted(taken):
        seconds = np.concatenate(taken[world])
        step_s = float(np.median(seconds))
        alone_s = alone_s or step_s * world
        samples, tokens = per_step
        mine = [w for w in windows if w.world == world]
        yield WorldSpeed(
            *(world, len(seconds), step_s),
            samples_per_s=samples / step_s if samples else None,
            tokens_per_s=tokens / step_s if tokens else None,
            efficiency=alone_s / (step_s * world),
            seconds=_split(mine),
            mfu=_mean(mine, "mfu"),
            hfu=_mean(mine, "hfu"),
        )


def _slowest(windows: Sequence[SpeedWindow]) -> Iterable[SlowRank]:
    """Ranks that were the slowest in more than half of an epoch's windows, where that is more than
    chance: three windows at least, of two ranks or more."""
    by_epoch: dict[int, list[RankSpread]] = defaultdict(list)
    for w in windows:
        if w.own is not None and w.own.median > 0 and w.own.least_rank != w.own.most_rank:
            by_epoch[w.epoch].append(w.own)
    found = []
    for epoch, spreads in by_epoch.items():
        ((rank, times),) = Counter(s.most_rank for s in spreads).most_common(1)
        if times >= 3 and times * 2 > len(spreads):
            behind = median(s.most / s.median - 1 for s in spreads if s.most_rank == rank)
            found.append(SlowRank(epoch, rank, times, len(spreads), behind))
    return sorted(found, key=lambda s: -s.behind)[:MOST_SLOW]
