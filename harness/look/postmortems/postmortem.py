"""One post-mortem per interruption: what happened, to which nodes, when, and what it cost.

Pure. Everything is derived from the facts, the committed steps and the ledger, so it is the same
for a run that goes on and for one whose machines are all dead. Unknown values are left out: a node
that died before it could record its last facts has fewer moments, not guessed ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.core.facts import (
    AgentStarted,
    AttemptIntended,
    DrainVerdict,
    EpochLeft,
    EpochStarted,
    GraceSpent,
    GuardTripped,
    HealthSeen,
    RunAsked,
    SnapshotCommitted,
    SnapshotFailed,
    StackSeen,
    Stamped,
    Warned,
    WorkerFailed,
    WorkerHung,
)
from harness.core.formatting import nbytes
from harness.core.step_records import NONE, Columns, Committed
from harness.ledger.bill import BAD_ENDS, AttemptRow, EpochRow
from harness.ledger.ledger import SAME_EVENT_S, Ledger
from harness.look.postmortems import attribution
from harness.look.postmortems.alternatives import Alternatives, MeasuredRun
from harness.look.postmortems.attribution import blame
from harness.look.postmortems.interruption import (
    HURTS,
    MOMENTS,
    TAKINGS,
    Alternative,
    Interruption,
    Losses,
    Moment,
    SavedWork,
    TouchedNode,
)
from harness.look.postmortems.world_ends import (
    DRAINS,
    FactIndex,
    NodesOf,
    Outline,
    Progress,
    WorldEnd,
    names,
    outlines,
)

NO_RECORDS = Committed(NONE, {}, {})


@dataclass(frozen=True)
class Postmortem:
    """All interruptions of a run, by time. Their losses and `rest` add up to the ledger."""

    interruptions: tuple[Interruption, ...]
    rest: Losses  # time and money due to no interruption, useful time included
    what_if: tuple[Alternative, ...]  # alternatives for the whole run
    measured: MeasuredRun

    def only(self, number: int) -> Postmortem:
        """Return a copy with only interruption `number` and no alternatives of the whole run."""
        return replace(
            self,
            interruptions=tuple(i for i in self.interruptions if i.number == number),
            what_if=(),
        )


def postmortem(
    facts: Iterable[Stamped],
    ledger: Ledger,
    steps: Columns = NONE,
    records: Committed = NO_RECORDS,
) -> Postmortem:
    """Return the post-mortem of the facts, steps and records that `ledger` was made from."""
    known = list(facts)
    told = FactIndex(known, steps)
    progress = Progress(ledger, told.steps, records.rows)
    found = outlines(ledger, told, progress)
    nodes = NodesOf(ledger)
    give_replacements(found, ledger, told, nodes)
    launched = {row.name for one in found for row in one.launched}
    idle = [
        row
        for row in _lost_idle(ledger, nodes)
        if not _taken_along(row, found, nodes) and row.name not in launched
    ]
    blamed = blame(ledger, told, found, progress, records, [row.name for row in idle])
    made = [
        _interruption(one, losses, told, nodes, ledger, progress)
        for one, losses in zip(found, blamed.losses, strict=False)
    ]
    asked = [s.fact.min_nodes for s in known if isinstance(s.fact, RunAsked)]
    others = Alternatives(ledger, told, found, progress.worlds, asked[-1] if asked else 1)
    made = [replace(one, what_if=others.of(i, one)) for i, one in enumerate(made)]
    whole_run = others.of_run(made)
    for row, losses in zip(idle, blamed.losses[len(found) :], strict=True):
        made.append(attribution.of_node(row, losses, told))
    alone = {m for row in idle for m in row.members}
    made += attribution.of_notices(found, ledger, told, nodes, alone)
    made.sort(key=lambda one: one.begun_s)
    numbered = tuple(replace(one, number=i) for i, one in enumerate(made, 1))
    return Postmortem(numbered, blamed.rest, whole_run, others.measured)


def interruptions(
    facts: Iterable[Stamped],
    ledger: Ledger,
    steps: Columns = NONE,
    records: Committed = NO_RECORDS,
) -> list[Interruption]:
    """Return the interruptions of `postmortem`, without resizes that the run wanted."""
    found = postmortem(facts, ledger, steps, records).interruptions
    return [one for one in found if not one.wanted]


# ---- replacements --------------------------------------------------------------------------------
def give_replacements(
    found: Sequence[Outline], ledger: Ledger, told: FactIndex, nodes: NodesOf
) -> None:
    """Assign to each interruption the launches that were requested to replace its nodes: the first
    ones after it, one per node that is gone for good, until the world is whole again. An
    interruption during which no step is done goes first, then the oldest. A launch that ended
    before it trained leaves its place open."""
    open_places: list[tuple[float, Outline]] = []  # (open since, interruption)
    for one in found:
        for row in _gone(one, nodes):
            doubted_s = told.doubted_s(row.attempt)
            since_s = one.first.begun_s if doubted_s is None else min(doubted_s, one.first.begun_s)
            open_places.append((since_s, one))
    open_places.sort(key=lambda p: p[0])
    taken = {row.name for one in found for row in _gone(one, nodes)}
    for row in sorted(ledger.attempts, key=lambda a: a.asked_s):
        since = [
            (t, one)
            for t, one in open_places
            if t <= row.asked_s and (one.whole_s is None or row.asked_s < one.whole_s)
        ]
        place = next((p for p in since if _stands(p[1], row.asked_s)), since[0] if since else None)
        if place is None:
            continue
        if row.up_s is None and row.end:
            place[1].refused.append(row)
            continue
        place[1].launched.append(row)
        if row.name in nodes.trained or row.name in taken or not row.end:
            open_places.remove(place)
    for one in found:
        for b in one.breaks:
            if b.kind == "move" and b.after is not None:
                joined = [nodes.row(m) for m in b.after.members if m not in b.epoch.members]
                one.launched += [r for r in joined if r and r not in one.launched]


def _lost_idle(ledger: Ledger, nodes: NodesOf) -> list[AttemptRow]:
    """Return the nodes that were preempted, or ended badly, before they were in any world."""
    noticed = {n.member for n in ledger.notices if n.kind != "soft" and not n.cancelled}
    return [
        a
        for a in ledger.attempts
        if a.name not in nodes.last_epoch
        and a.up_s is not None
        and (a.end in BAD_ENDS or (a.end == "drained" and noticed & set(a.members)))
    ]


def _taken_along(row: AttemptRow, found: Sequence[Outline], nodes: NodesOf) -> bool:
    """Return whether it was taken along with nodes that trained; add it to that interruption."""
    near: list[tuple[float, int]] = []
    for i, one in enumerate(found):
        gone = [r.gone_s for m in one.members if (r := nodes.row(m)) and r.gone_s is not None]
        if one.main.kind in TAKINGS and gone and row.gone_s is not None:
            near.append((min(abs(t - row.gone_s) for t in gone), i))
    apart_s, nearest = min(near, default=(SAME_EVENT_S + 1, 0))
    if apart_s <= SAME_EVENT_S:
        found[nearest].besides.append(row)
    return apart_s <= SAME_EVENT_S


def _stands(one: Outline, t: float) -> bool:
    """Return whether this interruption kept the run from doing steps at time `t`."""
    up_s = one.trained.first_s if one.trained else None
    return (one.down_s is None or one.down_s <= t) and (up_s is None or t < up_s)


def _gone(one: Outline, nodes: NodesOf) -> list[AttemptRow]:
    """Return the nodes that this interruption took for good."""
    if one.main.kind not in HURTS:
        return []
    last = one.last.epoch.epoch
    rows = (nodes.gone_since(m, last) for m in one.members)
    return list({row.name: row for row in rows if row}.values())


# ---- one interruption ----------------------------------------------------------------------------
def _interruption(
    one: Outline,
    losses: Losses,
    told: FactIndex,
    nodes: NodesOf,
    ledger: Ledger,
    progress: Progress,
) -> Interruption:
    trained = one.trained
    begun_s = min(b.begun_s for b in one.breaks)
    return Interruption(
        number=0,  # assigned by time once all are known
        kind=one.main.kind,
        cause=_cause(one),
        nodes=tuple(_touched(one, told, nodes, ledger)),
        epochs=tuple(e.epoch for e in one.epochs),
        world=(one.first.epoch.world, trained.world if trained else 0),
        begun_s=begun_s,
        stood_s=(one.down_s, trained.first_s if trained else None),
        caught_up_s=one.caught_up_s,
        moments=moments(one, begun_s, told, nodes),
        losses=losses,
        saved=_saved(one, told, nodes, progress),
    )


def _cause(one: Outline) -> str:
    text = "; then ".join(dict.fromkeys(b.cause for b in one.breaks))
    names = ", ".join(row.name for row in one.besides)
    nodes = f"node{'s' if len(one.besides) > 1 else ''} {names}"
    return f"{text}; with it {nodes} before training" if names else text


def _touched(
    one: Outline, told: FactIndex, nodes: NodesOf, ledger: Ledger
) -> Iterable[TouchedNode]:
    after = one.main.after
    for member in one.members:
        row = nodes.row(member)
        went_on = after is not None and member in after.members
        until_s = max(b.epoch.end_s or b.begun_s for b in one.breaks)
        notice = next(
            (
                n
                for n in ledger.notices
                if n.member == member and n.kind != "soft" and n.seen_s <= until_s
            ),
            None,
        )
        yield TouchedNode(
            name=nodes.name(member),
            member=member,
            place=row.offer or row.accelerator if row else "",
            gpus=told.gpus(row.attempt) if row else 1,
            end=row.end if row and not went_on else "",
            grace_s=notice.grace_s if notice else None,
            commit_s=notice.commit_s if notice else None,
            in_time=notice.in_time if notice else None,
        )
    for row in one.besides:
        place = row.offer or row.accelerator
        member = row.members[-1] if row.members else ""
        yield TouchedNode(row.name, member, place, told.gpus(row.attempt), row.end)


def _saved(one: Outline, told: FactIndex, nodes: NodesOf, progress: Progress) -> SavedWork | None:
    """Return the steps that a drain saved: the world drained on notice and the next one resumed
    from its last snapshot. `None` if that is not what happened."""
    world, trained = one.main.epoch, one.trained
    rows = progress.rows(world.epoch)
    if one.main.kind != "notice" or trained is None:
        return None
    after = one.main.after
    if after is not None and all(m in after.members for m in one.main.members):
        return None  # they stayed after all
    commits = [c for _, c in told.of_epoch(world.epoch, SnapshotCommitted)]
    drained = any(c.step == trained.resumed_step and c.why in DRAINS for c in commits)
    safe = [c.step for c in commits if c.t_start + c.commit_s <= one.main.begun_s]
    before = max([world.resumed_step, *safe])
    mine = rows[(rows["step"] > before) & (rows["step"] <= trained.resumed_step)]
    if not drained or not len(mine):
        return None
    seconds = float((mine["end"] - mine["start"]).sum())
    attempts = {row.name: row for m in world.members if (row := nodes.row(m))}
    return SavedWork(
        first_step=int(mine["step"].min()),
        last_step=int(mine["step"].max()),
        seconds=seconds,
        node_s=seconds * len(attempts),
        usd=seconds / 3600 * sum(row.usd_per_h for row in attempts.values()),
    )


# The moments of an interruption.

SMALL_WORLD = 16  # in a larger world, only departures that the break is about are shown
OMENS_S = 600.0  # reports of a GPU or a guard this long before still belong
ORDER = {what: i for i, what in enumerate(MOMENTS)}


def moments(one: Outline, begun_s: float, told: FactIndex, nodes: NodesOf) -> tuple[Moment, ...]:
    """Return the moments in the order of time; at the same time, in the order of MOMENTS."""
    teller = _Teller(one, begun_s, told, nodes)
    found = dict.fromkeys(teller.all())
    return tuple(sorted(found, key=lambda m: (m.t, ORDER[m.what], m.node)))


class _Teller:
    def __init__(self, one: Outline, begun_s: float, told: FactIndex, nodes: NodesOf):
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

    # -- causes --
    def of_notices(self, b: WorldEnd) -> Iterator[Moment]:
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

    def of_trouble(self, b: WorldEnd) -> Iterator[Moment]:
        epoch = b.epoch.epoch
        for t, hung in self.told.of_epoch(epoch, WorkerHung):
            node = self.nodes.name(hung.member)
            text = f"rank {hung.rank} silent for {hung.silent_s:.1f} s in {hung.place}"
            more = f": {hung.what}" if hung.guilty else " (waits for others)"
            yield Moment("trouble", t, node, text + more)
        for t, stack in self.told.of_epoch(epoch, StackSeen):
            where = f"rank {stack.rank} waits in {stack.collective or 'no collective'}"
            text = f"{where}: {' < '.join(stack.frames)}"
            yield Moment("stack", t, self.nodes.name(stack.member), text)
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

    # -- saved work --
    def of_snapshots(self, b: WorldEnd) -> Iterator[Moment]:
        for _, c in self.told.of_epoch(b.epoch.epoch, SnapshotCommitted):
            if c.why in DRAINS and c.t_start + c.commit_s >= self.begun_s:
                text = f"step {c.step}"
                yield Moment("staged", c.t_start + max(0.0, c.stall_s), "", text)
                yield Moment("committed", c.t_start + c.commit_s, "", f"{text} ({c.why})")
        for t, f in self.told.of_epoch(b.epoch.epoch, SnapshotFailed):
            if t >= self.begun_s:
                yield Moment("trouble", t, "", f"snapshot of step {f.step} failed: {f.why}")

    def of_verdicts(self, b: WorldEnd) -> Iterator[Moment]:
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

    # -- nodes that left, and that came --
    def of_leaving(self, b: WorldEnd) -> Iterator[Moment]:
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
            if row.gone_s is not None and row.name not in self.nodes.trained:  # it never trained
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
