"""What the facts of all seats say about a run's speed, its starts, its snapshots and its losses.
Used by `learning.py`.

A fold that does not care in which order facts come, for seats flush at their own pace. What it
keeps is bounded: details of the newest worlds, and of older ones only how fast they were.

Pure.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.bucket.layout import attempt_of
from harness.core import facts as f
from harness.core.known import StepPace
from harness.core.world import Offer

WORLDS_KEPT = 64  # the newest
WINDOWS_KEPT = 64  # timings of steps: of one world, and of one kind of world
STEPS_KEPT = 64  # the newest of a world that times its steps one by one
SAMPLES_KEPT = 32  # of anything else that is measured
LEAST_STEPS = 5  # fewer say nothing about a speed
LEFT_WELL = ("finished", "drained", "stopped")  # EpochLeft.why: for good, and all is committed


@dataclass(frozen=True)
class StepTiming:
    """So many steps, and the seconds that one of them took on average, from its begin to the next
    one's."""

    step_s: float
    steps: int


@dataclass
class WorldSeen:
    """One epoch, as far as was told."""

    members: tuple[str, ...] = ()
    session: f.SessionStarted | None = None
    ready_s: float = 0.0  # when its session started (wall clock)
    windows: deque[StepTiming] = field(default_factory=lambda: deque(maxlen=WINDOWS_KEPT))
    # begins of the newest steps, by step
    begun_s: dict[int, float] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)  # member -> why
    step: int = 0  # the newest that was told

    @property
    def attempts(self) -> tuple[int, ...]:
        """Of its members; 0: no controller launched it."""
        return tuple(map(attempt_of, self.members))

    @property
    def timings(self) -> Sequence[StepTiming]:
        """Of its steps. Windows say more than single steps: they count what lies between."""
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
    """What a world's speed depends on: its workers' accelerator ("": of several kinds), how many
    they are, and the sum of their speeds. Workers are counted as policies do, by what offers have:
    one for each GPU, or one of a node without."""

    accelerator: str
    workers: int
    speed: float

    @classmethod
    def of(cls, world: WorldSeen, offers: Mapping[int, Offer]) -> WorldKind | None:
        """None: it is not known where its members run."""
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
    """Whose end was announced, and what came of it."""

    kills: dict[tuple[str, str], int] = field(default_factory=dict)  # (member, id) -> attempt
    late: set[int] = field(default_factory=set)  # attempts whose time was over too soon
    saved: set[int] = field(default_factory=set)  # ... whose workers left after a snapshot

    def in_time(self, attempt: int) -> bool:
        """Was all that it had done committed before it went?"""
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
class LearnedRun:
    """See the module."""

    worlds: dict[int, WorldSeen] = field(default_factory=dict)  # by epoch
    notices: Notices = field(default_factory=Notices)
    # of worlds that are not kept any more
    old: dict[WorldKind, deque[StepTiming]] = field(default_factory=dict)
    snapshot: tuple[tuple[int, int], f.SnapshotCommitted] | None = None  # the newest
    commits_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    changeovers_s: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    in_worlds: set[int] = field(default_factory=set)  # attempts that were in one that trained
    _counted: int = 0  # the newest epoch whose changeover was looked at

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

    def _world(self, epoch: int) -> WorldSeen:
        return self.worlds.setdefault(epoch, WorldSeen())

    def _committed(self, fact: f.SnapshotCommitted) -> None:
        key, before = (fact.epoch, fact.step), self.snapshot
        self.commits_s.append(max(0.0, fact.commit_s))
        if before is None or key > before[0]:
            if before and before[1].epoch == fact.epoch and fact.why == "interval":
                self.gaps_s.append(max(0.0, fact.t_start - before[1].t_start))
            self.snapshot = key, fact

    def settle(self, offers: Mapping[int, Offer], asked_s: Mapping[int, float]) -> None:
        """Draw from what was told lately what is kept of it. `offers`, `asked_s`: of attempts,
        what they run on and when they were asked for."""
        for epoch in sorted(e for e in self.worlds if e > self._counted):
            world = self.worlds[epoch]
            if world.session is None or not world.members:
                if epoch == max(self.worlds):
                    break  # it may only be late
                continue
            new = set(world.attempts) - self.in_worlds - {0}
            # from the last launch that it waited for
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
        """Of the newest world that had one."""
        found = (self.worlds[e].session for e in sorted(self.worlds, reverse=True))
        return next((session for session in found if session is not None), None)

    def timings(self, offers: Mapping[int, Offer]) -> dict[WorldKind, list[StepTiming]]:
        """By kind of world, the oldest first; the newest kind is the last."""
        found = {kind: list(timings) for kind, timings in self.old.items()}
        for epoch in sorted(self.worlds):
            world = self.worlds[epoch]
            if world.timings and (kind := WorldKind.of(world, offers)):
                before = found.pop(kind, [])
                found[kind] = [*before, *world.timings][-WINDOWS_KEPT:]
        return found

    def uncommitted_steps(self, committed: int, alive: Iterable[int]) -> int:
        """Steps that the newest world has done since the newest snapshot; 0 if it is broken: then
        they are lost."""
        world = self.worlds[max(self.worlds)] if self.worlds else WorldSeen()
        if not world.members or world.left or not set(world.attempts) <= {0, *alive}:
            return 0
        return max(0, world.step - committed)


def paces(timings: Mapping[WorldKind, Sequence[StepTiming]]) -> tuple[StepPace, ...]:
    """Of worlds of one accelerator."""
    return tuple(
        StepPace(kind.accelerator, kind.workers, typical(found), sum(t.steps for t in found))
        for kind, found in timings.items()
        if kind.accelerator and found
    )


def typical(found: Sequence[StepTiming]) -> float:
    """Seconds of a step: the median, each timing counting for its steps. 0: nothing was timed."""
    half, before = sum(t.steps for t in found) / 2, 0
    for timing in sorted(found, key=lambda t: t.step_s):
        before += timing.steps
        if before >= half:
            return timing.step_s
    return 0.0


def median(found: Sequence[float], default: float) -> float:
    return statistics.median(found) if found else default
