"""The speed of a run: the phases of its steps, straggling ranks, and scaling with the world size.

Pure: it makes a `SpeedSummary` from facts and columns of steps. docs/SPEED.md explains what the
numbers mean and how they are measured.

    speed = speed_of(facts, steps, committed)     # `look/reports/summary.py` shows how to get them
    speed.seconds["communication"] / speed.step_s     # share of a step's wall-clock time
    [(w.world, w.efficiency) for w in speed.worlds]   # the scaling curve
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from harness.bucket.layout import attempt_of
from harness.core import facts as f
from harness.core import step_records
from harness.core.estimates import StepPace
from harness.core.facts import (
    PHASES,
    EpochStarted,
    ProfileTaken,
    SessionStarted,
    Stamped,
    StepDone,
    StepsTimed,
)
from harness.core.step_records import NONE, Columns, Committed
from harness.core.world import Offer

# A run's speed, starts, snapshots and losses, learned from the facts of all seats. Used by
# `learning.py`.

WORLDS_KEPT = 64  # the newest
WINDOWS_KEPT = 64  # timings of steps: per world, and per kind of world
STEPS_KEPT = 64  # the newest steps of a world that times its steps one by one
SAMPLES_KEPT = 32  # of every other measurement
LEAST_STEPS = 5  # fewer do not show a speed
LEFT_WELL = ("finished", "drained", "stopped")  # EpochLeft.why of an end with all work committed


@dataclass(frozen=True)
class StepTiming:
    """A number of steps, and the average seconds of one, from its start to that of the next."""

    step_s: float
    steps: int


@dataclass
class WorldTimings:
    """One generation (the code's `epoch`), as far as it was recorded."""

    members: tuple[str, ...] = ()
    session: f.SessionStarted | None = None
    ready_s: float = 0.0  # when its session started (wall clock)
    windows: deque[StepTiming] = field(default_factory=lambda: deque(maxlen=WINDOWS_KEPT))
    # start times of the newest steps, by step
    begun_s: dict[int, float] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)  # member -> why
    step: int = 0  # the newest that was recorded

    @property
    def attempts(self) -> tuple[int, ...]:
        """The attempts of its members; 0 for one that no controller launched."""
        return tuple(map(attempt_of, self.members))

    @property
    def timings(self) -> Sequence[StepTiming]:
        """Timings of its steps. Windows have priority over single steps, since they include the
        time between steps."""
        if self.windows:
            return tuple(self.windows)
        steps = sorted(self.begun_s)
        if len(steps) < LEAST_STEPS:
            return ()
        first, last = steps[0], steps[-1]
        seconds = self.begun_s[last] - self.begun_s[first]
        return (StepTiming(seconds / (last - first), last - first),) if seconds > 0 else ()

    def stepped(self, fact: f.StepDone) -> None:
        self.step = max(self.step, fact.step)
        self.begun_s[fact.step] = fact.t_start
        while len(self.begun_s) > STEPS_KEPT:
            del self.begun_s[min(self.begun_s)]


@dataclass(frozen=True)
class WorldKind:
    """The traits of a world that determine its speed: its workers' accelerator ("": several kinds),
    their number, and the sum of their speeds. Workers are counted by offers, as policies do: one
    per GPU, or one for a node without GPUs."""

    accelerator: str
    workers: int
    speed: float

    @classmethod
    def of(cls, world: WorldTimings, offers: Mapping[int, Offer]) -> WorldKind | None:
        """Return the kind of a world; None if the offers of its members are unknown."""
        if not world.members or not set(world.attempts) <= offers.keys():
            return None
        found = [offers[attempt] for attempt in world.attempts]
        names = {offer.accelerator for offer in found}
        return cls(
            names.pop() if len(names) == 1 else "",
            sum(offer.workers for offer in found),
            sum(offer.speed * offer.workers for offer in found),
        )


@dataclass
class Notices:
    """Attempts with a preemption notice, and whether they saved their work."""

    kills: dict[tuple[str, str], int] = field(default_factory=dict)  # (member, id) -> attempt
    late: set[int] = field(default_factory=set)  # attempts whose grace period was too short
    saved: set[int] = field(default_factory=set)  # attempts whose workers left after a snapshot

    def in_time(self, attempt: int) -> bool:
        """Return whether all work of the attempt was committed before it ended."""
        return attempt in self.saved and attempt not in self.late

    def add(self, fact: f.Fact) -> None:
        match fact:
            case f.NoticeSeen(member, _, kind, name) if kind != "soft":
                self.kills[member, name] = attempt_of(member)
            case f.NoticeCancelled(member, name):
                self.kills.pop((member, name), None)
            case f.GraceSpent(member):
                self.late.add(attempt_of(member))
            case f.EpochLeft(_, member, why) if why in LEFT_WELL:
                self.saved.add(attempt_of(member))
            case f.EpochLeft(_, member):
                self.saved.discard(attempt_of(member))

    @property
    def announced(self) -> set[int]:
        return set(self.kills.values())


@dataclass
class RunTimings:
    """Measurements of a run, folded from facts; see the module."""

    worlds: dict[int, WorldTimings] = field(default_factory=dict)  # by generation
    notices: Notices = field(default_factory=Notices)
    # timings of worlds that are no longer kept
    old: dict[WorldKind, deque[StepTiming]] = field(default_factory=dict)
    snapshot: tuple[tuple[int, int], f.SnapshotCommitted] | None = None  # the newest
    commits_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    changeovers_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    in_worlds: set[int] = field(default_factory=set)  # attempts that were in a world that trained
    _counted: int = 0  # the newest generation whose changeover was measured

    def add(self, t: float, fact: f.Fact) -> None:
        match fact:
            case f.EpochStarted(epoch, members):
                self._world(epoch).members = members
            case f.SessionStarted(epoch):
                world = self._world(epoch)
                if world.session is None:
                    world.ready_s = t
                world.session = fact
            case f.StepsTimed(epoch, first, last, seconds):
                whole_s = sum(seconds.values())
                if last >= first and 0 < whole_s < float("inf"):
                    self._world(epoch).windows.append(StepTiming(whole_s, last - first + 1))
            case f.StepDone():
                self._world(fact.epoch).stepped(fact)
            case f.SnapshotCommitted():
                self._committed(fact)
            case f.EpochLeft(epoch, member, why):
                self._world(epoch).left[member] = why
        self.notices.add(fact)

    def _world(self, epoch: int) -> WorldTimings:
        return self.worlds.setdefault(epoch, WorldTimings())

    def _committed(self, fact: f.SnapshotCommitted) -> None:
        key, before = (fact.epoch, fact.step), self.snapshot
        self.commits_s.append(max(0.0, fact.commit_s))
        if before is None or key > before[0]:
            if before and before[1].epoch == fact.epoch and fact.why == "interval":
                self.gaps_s.append(max(0.0, fact.t_start - before[1].t_start))
            self.snapshot = key, fact

    def settle(self, offers: Mapping[int, Offer], asked_s: Mapping[int, float]) -> None:
        """Measure changeovers of new worlds, and reduce old worlds to their timings. `offers`,
        `asked_s`: by attempt, the offer that it runs on and the time of its request."""
        for epoch in sorted(e for e in self.worlds if e > self._counted):
            world = self.worlds[epoch]
            if world.session is None or not world.members:
                if epoch == max(self.worlds):
                    break  # its facts may only be late
                continue
            new = set(world.attempts) - self.in_worlds - {0}
            # since the last launch that it waited for
            since_s = max((asked_s[n] for n in new if n in asked_s), default=None)
            if since_s is not None and world.ready_s > since_s:
                self.changeovers_s.append(world.ready_s - since_s)
            self.in_worlds |= new
            self._counted = epoch
        for epoch in sorted(self.worlds)[:-WORLDS_KEPT]:
            world = self.worlds.pop(epoch)
            self._counted = max(self._counted, epoch)
            if kind := WorldKind.of(world, offers):
                self.old.setdefault(kind, deque(maxlen=WINDOWS_KEPT)).extend(world.timings)

    # ---- what is known ---------------------------------------------------------------------------
    @property
    def session(self) -> f.SessionStarted | None:
        """The session of the newest world that had one."""
        found = (self.worlds[e].session for e in sorted(self.worlds, reverse=True))
        return next((session for session in found if session is not None), None)

    def timings(self, offers: Mapping[int, Offer]) -> dict[WorldKind, list[StepTiming]]:
        """Return timings by kind of world, the oldest first; the newest kind is the last."""
        found = {kind: list(timings) for kind, timings in self.old.items()}
        for epoch in sorted(self.worlds):
            world = self.worlds[epoch]
            if world.timings and (kind := WorldKind.of(world, offers)):
                before = found.pop(kind, [])
                found[kind] = [*before, *world.timings][-WINDOWS_KEPT:]
        return found

    def uncommitted_steps(self, committed: int, alive: Iterable[int]) -> int:
        """Return the steps of the newest world since the newest snapshot; 0 if that world is
        broken, since they are lost then."""
        world = self.worlds[max(self.worlds)] if self.worlds else WorldTimings()
        if not world.members or world.left or not set(world.attempts) <= {0, *alive}:
            return 0
        return max(0, world.step - committed)


def paces(timings: Mapping[WorldKind, Sequence[StepTiming]]) -> tuple[StepPace, ...]:
    """Return the pace of each kind of world that has a single kind of accelerator."""
    return tuple(
        StepPace(kind.accelerator, kind.workers, typical(found), sum(t.steps for t in found))
        for kind, found in timings.items()
        if kind.accelerator and found
    )


def typical(found: Sequence[StepTiming]) -> float:
    """Return the median seconds of a step, timings weighted by their steps; 0.0 without timings."""
    half, before = sum(t.steps for t in found) / 2, 0
    for timing in sorted(found, key=lambda t: t.step_s):
        before += timing.steps
        if before >= half:
            return timing.step_s
    return 0.0


def median_or(found: Sequence[float], default: float) -> float:
    return statistics.median(found) if found else default


MOST_WINDOWS = 1000  # windows of a summary; if there are more, neighbours are joined
MOST_SLOW = 8  # stragglers that are named


@dataclass(frozen=True)
class RankSpread:
    """The least, median and greatest value over the ranks, and the ranks with the extremes."""

    least: float
    median: float
    most: float
    least_rank: int
    most_rank: int


@dataclass(frozen=True)
class SpeedWindow:
    """Consecutive steps as rank 0 recorded them: means over steps and ranks. `None`: not known."""

    t: float  # wall clock, when it was recorded
    epoch: int
    world: int  # ranks; 0: not known
    first: int
    last: int
    seconds: dict[str, float]  # per step, by phase (facts.PHASES)
    own: RankSpread | None = None  # a rank's own seconds per step, without waiting for others
    loss: RankSpread | None = None
    mfu: float | None = None
    hfu: float | None = None
    samples: int = 0  # per step
    tokens: int = 0

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    @property
    def step_s(self) -> float:
        """Seconds from one step's begin to the next one's."""
        return sum(self.seconds.values())

    @property
    def samples_per_s(self) -> float | None:
        return self.samples / self.step_s if self.samples and self.step_s > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.step_s if self.tokens and self.step_s > 0 else None


@dataclass(frozen=True)
class WorldSpeed:
    """The speed of a run over all its steps with this many ranks. `None`: not known."""

    world: int
    steps: int
    step_s: float  # median of the steps' own durations, without the time between steps
    samples_per_s: float | None  # during steps, all ranks together
    tokens_per_s: float | None
    efficiency: float  # speed per rank relative to the smallest world; 1: perfect scaling
    seconds: dict[str, float]  # per step, by phase; empty: not known
    mfu: float | None = None
    hfu: float | None = None


@dataclass(frozen=True)
class SlowRank:
    """A straggler: a rank that was repeatedly the slowest of its world."""

    epoch: int
    rank: int
    windows: int  # windows in which it was the slowest
    of: int  # all windows of that generation
    behind: float  # excess of its own time over the median rank's: 0.2 is a fifth longer


@dataclass(frozen=True)
class SpeedSummary:
    """The speed of a run. Fields are empty or `None` where nothing was recorded (by an older
    version, or before the first window)."""

    windows: tuple[SpeedWindow, ...] = ()  # by time
    worlds: tuple[WorldSpeed, ...] = ()  # by size: the scaling curve
    seconds: dict[str, float] = field(default_factory=dict)  # mean per step, by phase
    mfu: float | None = None
    hfu: float | None = None
    samples_per_s: float | None = None  # wall clock from step to step
    tokens_per_s: float | None = None
    slowest: tuple[SlowRank, ...] = ()  # the slowest first
    profiles: tuple[ProfileTaken, ...] = ()

    @property
    def step_s(self) -> float:
        """Mean seconds from one step's begin to the next one's; 0: not known."""
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        """Shares of a step's wall-clock time, by phase."""
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
    """Summarize a run's speed. `steps`: live steps that are not among `facts`; `committed`: the
    chain of records. If one is missing, the scaling curve is made from the other."""
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
    rows = [steps, step_records.of_facts(live), *([committed.rows] if committed else [])]
    every = step_records.newest_told(step_records.joined(rows))
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
    """Return the recorded windows by time, without impossible ones (damaged or foreign facts)."""
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
    """Return a share of a peak, or `None` if `value` is not in (0, 1]."""
    return value if value is not None and 0 < value <= 1 else None


def _good(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0


def _spread(values: Sequence[float], ranks: Sequence[int]) -> RankSpread | None:
    if len(values) != 3 or len(ranks) != 2 or not all(map(math.isfinite, values)):
        return None
    return RankSpread(values[0], values[1], values[2], ranks[0], ranks[1])


def _joined(windows: Sequence[SpeedWindow], most: int) -> Iterable[SpeedWindow]:
    """Yield at most `most` windows (plus one per generation): neighbours of one generation are
    joined and keep the spreads of the last one."""
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
    """Return the mean seconds per step by phase; empty if there are no windows."""
    steps = sum(w.steps for w in windows)
    if not steps:
        return {}
    return {p: sum(w.seconds[p] * w.steps for w in windows) / steps for p in PHASES}


def _mean(windows: Sequence[SpeedWindow], name: str) -> float | None:
    """Return the mean of MFU or HFU weighted by time, or `None` if it is not known."""
    known = [(getattr(w, name), w.step_s * w.steps) for w in windows]
    known = [(value, weight) for value, weight in known if value is not None]
    whole = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / whole if whole > 0 else None


def _rate(windows: Sequence[SpeedWindow], name: str) -> float | None:
    """Return the samples or tokens (`name`) per second of wall clock, or `None` if unknown."""
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
    rows = rows[rows["seconds"] > 0]  # sorted by generation, see `newest_told`
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
    """Return the ranks that were the slowest in more than half of a generation's windows, if this
    is unlikely to be chance: at least three windows, of at least two ranks."""
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
