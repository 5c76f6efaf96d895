"""Ends of worlds before the run's own end: their causes, and which belong to one interruption.

Pure. A world that ends because the run is done or was stopped is no interruption. Everything
between the last step of a world and the first step of the next belongs to one interruption; so do
nodes that are taken within SAME_EVENT_S of one another before the run has caught up.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from harness.core.decoding import amount
from harness.core.facts import (
    MEMORY_RAN_OUT,
    AttemptDoubted,
    AttemptIntended,
    Decided,
    EpochLeft,
    Fact,
    HealthSeen,
    NoticeCancelled,
    NoticeSeen,
    ProfileTaken,
    SessionEnded,
    SessionStarted,
    SnapshotCommitted,
    SnapshotQuarantined,
    StackSeen,
    Stamped,
    StepDone,
    StepsTimed,
    Validated,
    WorkerFailed,
    WorkerHung,
)
from harness.core.step_records import NONE, Columns, joined, newest_told, of_facts
from harness.ledger.bill import AttemptRow, EpochRow
from harness.ledger.ledger import GOOD_ENDS, SAME_EVENT_S, Ledger, cut_by_epoch
from harness.look.postmortems.interruption import TAKINGS

# An index of a run's facts by their subject: a world, a member, an attempt. Pure.

F = TypeVar("F", bound=Fact)
MANY = (StepDone, StepsTimed, Validated, ProfileTaken)  # not indexed: numerous


class FactIndex:
    """Facts in the order of their times. `steps`: the live steps, those among the facts and
    others."""

    def __init__(self, facts: Iterable[Stamped], steps: Columns = NONE):
        self._of_epoch: dict[int, list[Stamped]] = defaultdict(list)
        self._of_member: dict[str, list[Stamped]] = defaultdict(list)
        self._of_attempt: dict[int, list[Stamped]] = defaultdict(list)
        self.dismissed: list[tuple[float, Decided]] = []  # nodes that the controller dismissed
        # the fact names only the world that had made the snapshot, not who found it bad
        self.quarantined: list[tuple[float, SnapshotQuarantined]] = []
        live: list[StepDone] = []
        for stamped in sorted(facts, key=lambda s: s.t):
            fact = stamped.fact
            if isinstance(fact, StepDone):
                live.append(fact)
            elif isinstance(fact, Decided) and fact.decision in ("release", "terminate"):
                self.dismissed.append((stamped.t, fact))
            elif isinstance(fact, SnapshotQuarantined):
                self.quarantined.append((stamped.t, fact))
            if isinstance(fact, MANY):
                continue
            if isinstance(epoch := getattr(fact, "epoch", None), int):
                self._of_epoch[epoch].append(stamped)
            if isinstance(member := getattr(fact, "member", None), str):
                self._of_member[member].append(stamped)
            if isinstance(attempt := getattr(fact, "attempt", None), int):
                self._of_attempt[attempt].append(stamped)
        self.steps = newest_told(joined([steps, of_facts(live)]))

    def of_epoch(self, epoch: int, kind: type[F]) -> list[tuple[float, F]]:
        return _of(self._of_epoch.get(epoch, ()), kind)

    def of_member(self, member: str, kind: type[F]) -> list[tuple[float, F]]:
        return _of(self._of_member.get(member, ()), kind)

    def of_attempt(self, attempt: int, kind: type[F]) -> list[tuple[float, F]]:
        return _of(self._of_attempt.get(attempt, ()), kind)

    def notices(self, member: str) -> list[tuple[float, NoticeSeen]]:
        """Return the notices that a node must obey, which are all but soft ones."""
        return [(t, n) for t, n in self.of_member(member, NoticeSeen) if n.notice != "soft"]

    def cancelled_s(self, member: str, notice: NoticeSeen) -> float | None:
        """Return when the notice was cancelled, or `None`."""
        found = [t for t, c in self.of_member(member, NoticeCancelled) if c.id == notice.id]
        return min(found, default=None)

    def doubted_s(self, attempt: int) -> float | None:
        """Return since when a replacement was sought for its node; `None`: it was to stay."""
        since_s = None
        for t, fact in self.of_attempt(attempt, AttemptDoubted):
            since_s = (since_s or t) if fact.doubted else None
        return since_s

    def session(self, epoch: int) -> tuple[float, SessionStarted] | None:
        """Return a generation's first session; scripts may start their loop more than once."""
        return next(iter(self.of_epoch(epoch, SessionStarted)), None)

    def gpus(self, attempt: int) -> int:
        """Return the requested number of GPUs of an attempt's node; 1 if it has none or unknown."""
        asked = self.of_attempt(attempt, AttemptIntended)
        return max(1, int(amount(asked[0][1].offer.get("gpus")))) if asked else 1


def _of(stamped: Iterable[Stamped], kind: type[F]) -> list[tuple[float, F]]:
    return [(s.t, s.fact) for s in stamped if isinstance(s.fact, kind)]


ENDED_WELL = ("finished", "stopped")  # EpochRow.ended
DRAINS = ("notice", "drain", "resize")  # SnapshotCommitted.why of snapshots that end a world


@dataclass
class WorldEnd:
    """The end of one world."""

    epoch: EpochRow
    after: EpochRow | None  # the next world that was formed, whether it trained or not
    kind: str  # a key of interruption.KINDS
    cause: str
    begun_s: float
    members: list[str]  # the members that caused it or were lost
    orderly: bool = True  # it ended with a committed snapshot


@dataclass
class Outline:
    """An interruption before its moments and costs are known."""

    breaks: list[WorldEnd]
    trained: EpochRow | None = None  # the next world that made a step
    whole_s: float | None = None  # when as many ranks as before trained again
    caught_up_s: float | None = None
    launched: list[AttemptRow] = field(default_factory=list)  # replacements of lost nodes
    # launches that found no capacity
    refused: list[AttemptRow] = field(default_factory=list)
    # nodes that were lost at the same time and were in no world
    besides: list[AttemptRow] = field(default_factory=list)

    @property
    def first(self) -> WorldEnd:
        return self.breaks[0]

    @property
    def last(self) -> WorldEnd:
        return self.breaks[-1]

    @property
    def main(self) -> WorldEnd:
        """The most telling break: one that took nodes, else the first."""
        return next((b for b in self.breaks if b.kind in TAKINGS), self.first)

    @property
    def epochs(self) -> list[EpochRow]:
        return [b.epoch for b in self.breaks]

    @property
    def members(self) -> list[str]:
        return list(dict.fromkeys(m for b in self.breaks for m in b.members))

    @property
    def down_s(self) -> float | None:
        return self.first.epoch.last_s


class NodesOf:
    """The attempts of members, and their part in the run."""

    def __init__(self, ledger: Ledger):
        self._of = {m: a for a in ledger.attempts for m in a.members}
        # by name: the last world of each node; then the nodes of worlds that made a step
        self.last_epoch = {name: e.epoch for e in ledger.epochs for name in e.attempts}
        self.trained = {n for e in ledger.epochs if e.first_s is not None for n in e.attempts}

    def row(self, member: str) -> AttemptRow | None:
        return self._of.get(member)

    def name(self, member: str) -> str:
        row = self._of.get(member)
        return row.name if row else member

    def gone_since(self, member: str, epoch: int) -> AttemptRow | None:
        """Return the member's node, if it is gone and was in no world after this one."""
        row = self._of.get(member)
        if row is None or row.gone_s is None or self.last_epoch.get(row.name, 0) > epoch:
            return None
        return row

    def names(self, members: Sequence[str]) -> str:
        found = list(dict.fromkeys(map(self.name, members)))
        return f"node{'s' if len(found) > 1 else ''} {', '.join(found)}" if found else "no node"


# ---- why a world ended ---------------------------------------------------------------------------
def breaks(ledger: Ledger, told: FactIndex) -> list[WorldEnd]:
    """Return the interrupting ends of worlds, in the order of generations."""
    nodes, found = NodesOf(ledger), []
    rows = list(ledger.epochs)
    for i, row in enumerate(rows):
        if row.end_s is not None and row.ended not in ENDED_WELL:
            after = rows[i + 1] if i + 1 < len(rows) else None
            found.append(_Judge(row, after, told, nodes).verdict())
    return found


class _Judge:
    """The judgement why one world ended."""

    def __init__(self, row: EpochRow, after: EpochRow | None, told: FactIndex, nodes: NodesOf):
        self.row, self.after, self.told, self.nodes = row, after, told, nodes
        self.end_s = row.end_s or row.started_s
        self.left = {f.member: (t, f.why) for t, f in told.of_epoch(row.epoch, EpochLeft)}
        stays = set(after.members) if after else set()
        self.leaving = [m for m in row.members if m not in stays]
        self.orderly = bool(told.of_epoch(row.epoch, SessionEnded)) or any(
            why in GOOD_ENDS for _, why in self.left.values()
        )

    def verdict(self) -> WorldEnd:
        noticed, vanished = self.noticed(), [] if self.orderly else self.vanished()
        sick, hung = self.sick(), self.told.of_epoch(self.row.epoch, WorkerHung)
        hung = [(t, h) for t, h in hung if h.guilty] or hung
        failed = self.told.of_epoch(self.row.epoch, WorkerFailed)
        name = self.nodes.names
        if noticed:
            members = list(dict.fromkeys([*(m for m, _, _ in noticed), *vanished]))
            first = min(noticed, key=lambda n: n[1])[2]
            gone = f", {name(vanished)} gone before its workers left" if vanished else ""
            cause = f"{first.notice} notice from {first.source} to {name(members)}{gone}"
            return self.made("notice", cause, min(t for _, t, _ in noticed), members)
        if sick:
            t, health = sick[0]
            cause = f"{name([health.member])}: GPU {health.gpu}: {health.what} ({health.action})"
            members = list(dict.fromkeys([*(h.member for _, h in sick), *vanished]))
            return self.made("health", cause, t, members)
        if hung:
            t, one = hung[0]
            cause = f"rank {one.rank} on {name([one.member])} hung in {one.place}"
            stacks = self.told.of_epoch(self.row.epoch, StackSeen)
            calls = [s.collective for _, s in stacks if s.rank == one.rank and s.collective]
            cause += f", in {calls[0]}" if calls else ""
            return self.made("hang", cause, t, [one.member])
        if vanished:
            cause = f"{name(vanished)} gone without notice"
            return self.made("loss", cause, min(map(self.gone_s, vanished)), vanished)
        if not self.orderly:
            return self.broken(failed)
        return self.wanted()

    def broken(self, failed: list[tuple[float, WorkerFailed]]) -> WorldEnd:
        """Judge a world that broke although no node is known to be gone."""
        unfit = [m for m, (_, why) in self.left.items() if why == "unfit"]
        if unfit:
            return self.made("health", f"{self.nodes.names(unfit)} was unfit", self.end_s, unfit)
        if failed:
            t, one = failed[0]
            how = "ran out of memory" if one.error in MEMORY_RAN_OUT else f"failed: {one.error}"
            cause = f"rank {one.rank} on {self.nodes.names([one.member])} {how}"
            return self.made("crash", cause, t, [one.member])
        guilty = [m for m, (_, why) in self.left.items() if why in ("failed", "killed", "hung")]
        cause = f"workers of {self.nodes.names(guilty)} ended" if guilty else "its world broke"
        return self.made("crash", cause, self.end_s, guilty)

    def wanted(self) -> WorldEnd:
        """Judge a world that ended with a snapshot so that another could begin."""
        begun = [
            c.t_start
            for _, c in self.told.of_epoch(self.row.epoch, SnapshotCommitted)
            if c.why in DRAINS
        ]
        begun_s = max([t for t in begun if t <= self.end_s], default=self.end_s)
        joined = [m for m in self.after.members if m not in self.row.members] if self.after else []
        back = [m for m in self.leaving if (row := self.nodes.row(m)) and self.given_back(row)]
        if back:
            what = f"{self.nodes.names(back)} given back"
            more = f" for {self.nodes.names(joined)}" if joined else ""
            return self.made("move", what + more, begun_s, [*back, *joined])
        ended = self.told.of_epoch(self.row.epoch, SessionEnded)
        if any(one.why == "rewind" for _, one in ended):
            cause = f"guards sent the run back from step {ended[0][1].step + 1}"
            return self.made("rewind", cause, begun_s, [])
        if self.bad_snapshots():
            return self.made("quarantine", "a snapshot could not be used", begun_s, [])
        if not joined and not self.leaving and (found := self.heeded()):
            member, t, notice = found
            who = self.nodes.names([member])
            cause = f"{notice.notice} notice from {notice.source} to {who}, which stayed after all"
            return self.made("notice", cause, t, [member])
        parts = [f"{self.nodes.names(joined)} joined"] if joined else []
        parts += [f"{self.nodes.names(self.leaving)} left"] if self.leaving else []
        cause = ", ".join(parts) or "the world was formed anew"
        return self.made("resize", cause, begun_s, [*joined, *self.leaving])

    def made(self, kind: str, cause: str, begun_s: float, members: list[str]) -> WorldEnd:
        """Build the break. It begins no later than the training pause that it caused."""
        latest = self.row.last_s if self.row.last_s is not None else self.end_s
        begun_s = min(begun_s, latest)
        return WorldEnd(self.row, self.after, kind, cause, begun_s, members, self.orderly)

    # -- evidence --
    def noticed(self) -> list[tuple[str, float, NoticeSeen]]:
        """Return members that left because of a notice, with its time: it came before the workers
        had left, and was not cancelled by then."""
        found = []
        for member in self.leaving:
            until_s = self.left[member][0] if member in self.left else self.gone_s(member)
            for t, notice in self.told.notices(member):
                cancelled_s = self.told.cancelled_s(member, notice)
                if t <= until_s and (cancelled_s is None or cancelled_s > self.end_s):
                    found.append((member, t, notice))
        return found

    def heeded(self) -> tuple[str, float, NoticeSeen] | None:
        """Return a notice that came while this world trained and whose node drained and stayed: it
        was cancelled too late for the world to go on."""
        found = [
            (t, member, notice)
            for member in self.row.members
            for t, notice in self.told.notices(member)
            if self.row.started_s <= t <= self.end_s
        ]
        t, member, notice = max(found, key=lambda n: n[0], default=(0.0, "", None))
        return None if notice is None else (member, t, notice)

    def gone_s(self, member: str) -> float:
        row = self.nodes.row(member)
        return self.end_s if row is None or row.gone_s is None else row.gone_s

    def vanished(self) -> list[str]:
        """Return members whose nodes are gone without having recorded it."""
        horizon_s = (self.after.started_s if self.after else self.end_s) + SAME_EVENT_S
        rows = [(m, self.nodes.row(m)) for m in self.leaving if m not in self.left]
        return [m for m, row in rows if row and row.gone_s is not None and row.gone_s <= horizon_s]

    def sick(self) -> list[tuple[float, HealthSeen]]:
        return [
            (t, health)
            for member in self.leaving
            for t, health in self.told.of_member(member, HealthSeen)
            if health.action in ("drain", "kill") and self.row.started_s <= t <= self.gone_s(member)
        ]

    def given_back(self, row: AttemptRow) -> bool:
        if row.end == "terminated":
            return True
        asked = (t for t, d in self.told.dismissed if names(d, row))
        return any(t <= self.end_s for t in asked)

    def bad_snapshots(self) -> bool:
        """Return whether the next world found a bad snapshot when it restored."""
        if self.after is None:
            return False
        until_s = self.after.first_s or self.after.end_s or float("inf")
        return any(self.end_s <= t <= until_s for t, _ in self.told.quarantined)


def names(decided: Decided, row: AttemptRow) -> bool:
    """Return whether the decision is about this node."""
    return decided.reason.partition(":")[0] == f"attempt {row.attempt}"


# ---- one interruption from several breaks --------------------------------------------------------
class TrainedWorlds:
    """The worlds that made a step, by number."""

    def __init__(self, ledger: Ledger):
        self.all = [e for e in ledger.epochs if e.first_s is not None]
        self._numbers = [e.epoch for e in self.all]

    def after(self, epoch: int) -> Iterator[EpochRow]:
        """Yield the worlds after `epoch`, in order."""
        return itertools.islice(self.all, bisect_right(self._numbers, epoch), None)

    def between(self, after: float, until: float) -> list[EpochRow]:
        """Return the worlds with numbers above `after`, up to and including `until`."""
        low, high = bisect_right(self._numbers, after), bisect_right(self._numbers, until)
        return self.all[low:high]


class Progress:
    """All steps that were done, by generation (the code's `epoch`)."""

    def __init__(self, ledger: Ledger, told: Columns, committed: Columns):
        self.worlds = TrainedWorlds(ledger)
        self._parts = (cut_by_epoch(told), cut_by_epoch(newest_told(committed)))
        self._rows: dict[int, Columns] = {}

    def rows(self, epoch: int) -> Columns:
        """Return the steps of one world, each once."""
        if epoch not in self._rows:
            found = joined(part[epoch] for part in self._parts if epoch in part)
            self._rows[epoch] = newest_told(found)
        return self._rows[epoch]

    def caught_up_s(self, epochs: Sequence[EpochRow], trained: EpochRow | None) -> float | None:
        """Return when a world redid the last step that `epochs` had done, or, if that step was not
        lost, began the next one. None: not yet."""
        last = max((e.last_step for e in epochs if e.last_step is not None), default=0)
        if trained is None:
            return None
        if trained.resumed_step >= last:
            return trained.first_s
        for later in self.worlds.after(trained.epoch - 1):
            if (later.last_step or 0) >= last:
                rows = self.rows(later.epoch)
                return float(rows["end"][rows["step"] >= last].min())
        return None


def outlines(ledger: Ledger, told: FactIndex, progress: Progress) -> list[Outline]:
    """Return the interruptions in the order of time."""
    found: list[Outline] = []
    for one in breaks(ledger, told):
        last = found[-1] if found else None
        if last is None or not _belongs(last, one):
            found.append(last := Outline([]))
        last.breaks.append(one)
        last.trained = next(progress.worlds.after(one.epoch.epoch), None)
        following = progress.worlds.after(one.epoch.epoch)
        whole = (e.first_s for e in following if e.world >= last.first.epoch.world)
        last.whole_s = next(whole, None)
        last.caught_up_s = progress.caught_up_s(last.epochs, last.trained)
    return found


def _belongs(last: Outline, one: WorldEnd) -> bool:
    if one.epoch.first_s is None:  # it made no step: the earlier interruption goes on
        return True
    taken = one.kind in TAKINGS and last.main.kind in TAKINGS
    at_once = one.begun_s - last.first.begun_s <= SAME_EVENT_S
    return taken and at_once and (last.caught_up_s is None or one.begun_s < last.caught_up_s)
