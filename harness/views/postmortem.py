"""A post-mortem per interruption: what happened, to whom, moment by moment, and what it cost.

Pure. Everything follows from the facts, the committed steps and the ledger, so it is the same for a
run that goes on and for one whose machines are all dead. What is not known is left out: a node that
died before it could tell its last facts has fewer moments, not guessed ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from harness.core.columns import NONE, Columns, Committed
from harness.core.facts import RunAsked, SnapshotCommitted, Stamped
from harness.views import beside
from harness.views.blame import blame
from harness.views.breaks import DRAINS, NodesOf, Outline, Progress, outlines
from harness.views.interruption import (
    HURTS,
    TAKINGS,
    Alternative,
    Interruption,
    Losses,
    SavedWork,
    TouchedNode,
)
from harness.views.ledger import SAME_EVENT_S, Ledger
from harness.views.moments import moments
from harness.views.rows import BAD_ENDS, AttemptRow
from harness.views.testimony import Testimony
from harness.views.what_if import Alternatives, MeasuredRun

NO_RECORDS = Committed(NONE, {}, {})


@dataclass(frozen=True)
class Postmortem:
    """All interruptions of a run, by time. What they lost and `rest` add up to the ledger."""

    interruptions: tuple[Interruption, ...]
    rest: Losses  # what no interruption is to blame for, useful time included
    what_if: tuple[Alternative, ...]  # of the whole run
    measured: MeasuredRun

    def only(self, number: int) -> Postmortem:
        """With one interruption; what the run lost besides stays out."""
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
    """Of the same facts, steps and records that `ledger` was made of (`Ledger.of`)."""
    known = list(facts)
    told = Testimony(known, steps)
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
        made.append(beside.of_node(row, losses, told))
    alone = {m for row in idle for m in row.members}
    made += beside.of_notices(found, ledger, told, nodes, alone)
    made.sort(key=lambda one: one.begun_s)
    numbered = tuple(replace(one, number=i) for i, one in enumerate(made, 1))
    return Postmortem(numbered, blamed.rest, whole_run, others.measured)


def interruptions(
    facts: Iterable[Stamped],
    ledger: Ledger,
    steps: Columns = NONE,
    records: Committed = NO_RECORDS,
) -> list[Interruption]:
    """`postmortem`, without the rest."""
    return list(postmortem(facts, ledger, steps, records).interruptions)


# ---- who replaces whom ---------------------------------------------------------------------------
def give_replacements(
    found: Sequence[Outline], ledger: Ledger, told: Testimony, nodes: NodesOf
) -> None:
    """Which launches were asked for because an interruption had taken a node: the first after it,
    one for each node that is gone for good, until the world is whole again. An interruption that
    keeps the run standing goes first, then the oldest. A launch that ended before it trained leaves
    its place open."""
    open_places: list[tuple[float, Outline]] = []  # (since when, whose)
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
    """Nodes that were taken, or ended badly, before they were in any world."""
    noticed = {n.member for n in ledger.notices if n.kind != "soft" and not n.cancelled}
    return [
        a
        for a in ledger.attempts
        if a.name not in nodes.last_epoch
        and a.up_s is not None
        and (a.end in BAD_ENDS or (a.end == "drained" and noticed & set(a.members)))
    ]


def _taken_along(row: AttemptRow, found: Sequence[Outline], nodes: NodesOf) -> bool:
    """Was it taken with nodes that trained? Then it belongs to the interruption that is nearest."""
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
    """Was there no step at `t` because of it?"""
    up_s = one.trained.first_s if one.trained else None
    return (one.down_s is None or one.down_s <= t) and (up_s is None or t < up_s)


def _gone(one: Outline, nodes: NodesOf) -> list[AttemptRow]:
    """Nodes that it took for good."""
    if one.main.kind not in HURTS:
        return []
    last = one.last.epoch.epoch
    rows = (nodes.gone_since(m, last) for m in one.members)
    return list({row.name: row for row in rows if row}.values())


# ---- one interruption ----------------------------------------------------------------------------
def _interruption(
    one: Outline,
    losses: Losses,
    told: Testimony,
    nodes: NodesOf,
    ledger: Ledger,
    progress: Progress,
) -> Interruption:
    trained = one.trained
    begun_s = min(b.begun_s for b in one.breaks)
    return Interruption(
        number=0,  # by time, when all are known
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
    one: Outline, told: Testimony, nodes: NodesOf, ledger: Ledger
) -> Iterable[TouchedNode]:
    for member in one.members:
        row = nodes.row(member)
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
            end=row.end if row else "",
            grace_s=notice.grace_s if notice else None,
            commit_s=notice.commit_s if notice else None,
            in_time=notice.in_time if notice else None,
        )
    for row in one.besides:
        place = row.offer or row.accelerator
        member = row.members[-1] if row.members else ""
        yield TouchedNode(row.name, member, place, told.gpus(row.attempt), row.end)


def _saved(one: Outline, told: Testimony, nodes: NodesOf, progress: Progress) -> SavedWork | None:
    """Of a world that drained on notice and whose last snapshot the next one resumed from."""
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
