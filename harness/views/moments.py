"""The chain of moments of one interruption, from the first sign until training is where it was.

Pure. Each is a fact's, or a row's of the ledger; a moment that nobody lived to tell is missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from harness.core.facts import (
    AgentStarted,
    AttemptIntended,
    DrainVerdict,
    EpochLeft,
    EpochStarted,
    GraceSpent,
    GuardTripped,
    HealthSeen,
    SnapshotCommitted,
    SnapshotFailed,
    Warned,
    WorkerFailed,
    WorkerHung,
)
from harness.views.breaks import DRAINS, Break, NodesOf, Outline, names
from harness.views.interruption import HURTS, MOMENTS, Moment
from harness.views.ledger import SAME_EVENT_S
from harness.views.rows import EpochRow
from harness.views.testimony import Testimony
from harness.views.words import nbytes

SMALL_WORLD = 16  # of so many nodes everyone's leaving is told; else of those that it is about
OMENS_S = 600.0  # what a GPU or a guard reported so long before may belong to it
ORDER = {what: i for i, what in enumerate(MOMENTS)}


def moments(one: Outline, begun_s: float, told: Testimony, nodes: NodesOf) -> tuple[Moment, ...]:
    """In the order of time; of the same time in the order of MOMENTS."""
    teller = _Teller(one, begun_s, told, nodes)
    found = dict.fromkeys(teller.all())
    return tuple(sorted(found, key=lambda m: (m.t, ORDER[m.what], m.node)))


class _Teller:
    def __init__(self, one: Outline, begun_s: float, told: Testimony, nodes: NodesOf):
        self.one, self.told, self.nodes = one, told, nodes
        self.begun_s, self.since_s = begun_s, begun_s - OMENS_S
        self.last = one.last.epoch.epoch
        ends = [one.caught_up_s, one.trained.first_s if one.trained else None]
        known = [t for t in ends if t is not None]
        self.over_s = max(known) if known else float("inf")

    def all(self) -> Iterator[Moment]:
        for b in self.one.breaks:
            yield from self.of_notices(b)
            yield from self.of_trouble(b)
            yield from self.of_snapshots(b)
            yield from self.of_leaving(b)
            yield from self.of_verdicts(b)
        for epoch in {b.after.epoch: b.after for b in self.one.breaks if b.after}.values():
            yield from self.of_world(epoch)
        for t, bad in self.told.quarantined:
            if self.begun_s <= t <= self.over_s:
                yield Moment("quarantined", t, "", f"step {bad.step}: {bad.why}")
        yield from self.of_nodes()
        yield from self.of_launches()
        yield from self.of_the_end()

    # -- what befell --
    def of_notices(self, b: Break) -> Iterator[Moment]:
        for member in b.members:
            node = self.nodes.name(member)
            for t, notice in self.told.notices(member):
                cancelled_s = self.told.cancelled_s(member, notice)
                if t > self.over_s or (cancelled_s is not None and cancelled_s < self.begun_s):
                    continue
                grace = (
                    ""
                    if notice.deadline_s is None
                    else f", {max(0.0, notice.deadline_s - t):.1f} s of grace"
                )
                yield Moment("notice", t, node, f"{notice.notice} from {notice.source}{grace}")
                if cancelled_s is not None and cancelled_s <= self.over_s:
                    yield Moment("cancelled", cancelled_s, node)

    def of_trouble(self, b: Break) -> Iterator[Moment]:
        epoch = b.epoch.epoch
        for t, hung in self.told.of_epoch(epoch, WorkerHung):
            node = self.nodes.name(hung.member)
            text = f"rank {hung.rank} silent for {hung.silent_s:.1f} s in {hung.place}"
            yield Moment("trouble", t, node, text + ("" if hung.guilty else " (waits for others)"))
        for t, failed in self.told.of_epoch(epoch, WorkerFailed):
            node = self.nodes.name(failed.member)
            yield Moment("trouble", t, node, f"rank {failed.rank}: {failed.error} {failed.message}")
        for t, guard in self.told.of_epoch(epoch, GuardTripped):
            if t >= self.since_s:
                yield Moment("trouble", t, "", f"step {guard.step}: {guard.what}")
        for member in b.members:
            for t, seen in self.told.of_member(member, HealthSeen):
                if seen.action != "ignore" and self.since_s <= t <= self.over_s:
                    text = f"GPU {seen.gpu}: {seen.what} {seen.message}: {seen.action}"
                    yield Moment("trouble", t, self.nodes.name(member), text)
        for epoch in (b.epoch.epoch, b.after.epoch if b.after else b.epoch.epoch):
            for t, warned in self.told.of_epoch(epoch, Warned):
                if self.begun_s <= t <= self.over_s:
                    yield Moment("warned", t, "", warned.what)

    # -- what was saved --
    def of_snapshots(self, b: Break) -> Iterator[Moment]:
        for _, c in self.told.of_epoch(b.epoch.epoch, SnapshotCommitted):
            if c.why in DRAINS and c.t_start + c.commit_s >= self.begun_s:
                text = f"step {c.step}"
                yield Moment("staged", c.t_start + max(0.0, c.stall_s), "", text)
                yield Moment("committed", c.t_start + c.commit_s, "", f"{text} ({c.why})")
        for t, f in self.told.of_epoch(b.epoch.epoch, SnapshotFailed):
            if t >= self.begun_s:
                yield Moment("trouble", t, "", f"snapshot of step {f.step} failed: {f.why}")

    def of_verdicts(self, b: Break) -> Iterator[Moment]:
        shares: dict[tuple[str, int], list[tuple[float, DrainVerdict]]] = defaultdict(list)
        for t, verdict in self.told.of_epoch(b.epoch.epoch, DrainVerdict):
            shares[verdict.member, verdict.step].append((t, verdict))
        for (member, step), group in shares.items():
            told = [v for _, v in group]
            good = sum(v.committed for v in told)
            safe = "" if good == len(told) else f"; safe is step {told[-1].last_good_step}"
            text = (
                f"step {step}: {good} of {len(told)} shares committed{safe} (forecast: "
                f"{max(v.need_s for v in told):.1f} s needed, {min(v.left_s for v in told):.1f} s "
                f"left, {'enough' if all(v.expected for v in told) else 'not surely enough'})"
            )
            yield Moment("verdict", max(t for t, _ in group), self.nodes.name(member), text)
        for t, spent in self.told.of_epoch(b.epoch.epoch, GraceSpent):
            text = spent.verdict or f"at step {spent.step}, {spent.committed_step} is committed"
            yield Moment("verdict", t, self.nodes.name(spent.member), f"time is up: {text}")

    # -- who left, and who came --
    def of_leaving(self, b: Break) -> Iterator[Moment]:
        all_of_them = len(b.epoch.members) <= SMALL_WORLD
        for t, left in self.told.of_epoch(b.epoch.epoch, EpochLeft):
            if all_of_them or left.member in b.members:
                yield Moment("left", t, self.nodes.name(left.member), left.why)

    def of_nodes(self) -> Iterator[Moment]:
        for member in self.one.members:
            if (gone := self.nodes.gone_since(member, self.last)) and gone.gone_s is not None:
                yield Moment("gone", gone.gone_s, gone.name, gone.end)
            row = self.nodes.row(member)
            doubted_s = None if row is None else self.told.doubted_s(row.attempt)
            if row is not None and doubted_s is not None and doubted_s <= self.over_s:
                yield Moment("decided", doubted_s, row.name, "another node is looked for")
        for row in self.one.besides:
            if row.gone_s is not None:
                yield Moment("gone", row.gone_s, row.name, row.end)
        touched = [row for m in self.one.members if (row := self.nodes.row(m))]
        for t, decided in self.told.dismissed:
            near = self.begun_s - SAME_EVENT_S <= t <= self.over_s
            if near and any(names(decided, row) for row in touched):
                yield Moment("decided", t, "", f"{decided.decision} {decided.reason}")

    def of_launches(self) -> Iterator[Moment]:
        if refused := self.one.refused:
            text = f"no capacity, {len(refused)} times" if len(refused) > 1 else "no capacity"
            yield Moment("asked", refused[0].asked_s, "", text)
        for row in self.one.launched:
            asked = self.told.of_attempt(row.attempt, AttemptIntended)
            reason = asked[0][1].reason if asked else ""
            yield Moment("asked", row.asked_s, row.name, f"{row.offer}: {reason}".strip(": "))
            if row.up_s is not None:
                yield Moment("up", row.up_s, row.name)
            started = [t for m in row.members for t, _ in self.told.of_member(m, AgentStarted)]
            if started:
                yield Moment("joined", min(started), row.name)
            if row.gone_s is not None and row.name not in self.nodes.trained:  # in vain
                yield Moment("gone", row.gone_s, row.name, row.end)

    # -- training again --
    def of_world(self, epoch: EpochRow) -> Iterator[Moment]:
        begun = [t for t, _ in self.told.of_epoch(epoch.epoch, EpochStarted)]
        yield Moment("formed", begun[0] if begun else epoch.started_s, "", _ranks(epoch.world))
        if session := self.told.session(epoch.epoch):
            t, s = session
            read = [f"{tier} ({nbytes(n)})" for tier, n in s.read_nbytes.items()]
            where = f"step {s.resumed_step} from {', '.join(read) or s.tier} in {s.restore_s:.1f} s"
            yield Moment("restored", t, "", where if s.resumed_step else "nothing to restore")

    def of_the_end(self) -> Iterator[Moment]:
        trained = self.one.trained
        if trained is None or trained.first_s is None:
            return
        yield Moment("first step", trained.first_s, "", f"step {trained.first_step}")
        last = max((e.last_step or 0 for e in self.one.epochs), default=0)
        if self.one.caught_up_s is not None:
            yield Moment("caught up", self.one.caught_up_s, "", f"with step {last}")
        whole = self.one.whole_s
        if self.one.main.kind in HURTS and whole is not None:
            yield Moment("whole", whole, "", _ranks(self.one.first.epoch.world))


def _ranks(world: int) -> str:
    return f"{world} rank{'' if world == 1 else 's'}"
