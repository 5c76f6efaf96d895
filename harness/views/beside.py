"""What befell nodes while training went on: notices that came to nothing, nodes lost before they
trained.

Pure. They ended no world, so nothing had to be done again; a node lost before it trained has cost
its start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.core.facts import AgentStarted, NoticeSeen
from harness.views.breaks import NodesOf, Outline
from harness.views.interruption import (
    HURTS,
    Interruption,
    Losses,
    Moment,
    TouchedNode,
)
from harness.views.ledger import Ledger
from harness.views.rows import AttemptRow, NoticeRow
from harness.views.testimony import Testimony


def of_node(row: AttemptRow, losses: Losses, told: Testimony) -> Interruption:
    """A node that was up, and was taken or ended badly before it was in any world."""
    noticed = [(t, n) for m in row.members for t, n in told.notices(m)]
    moments = [Moment("notice", t, row.name, f"{n.notice} from {n.source}") for t, n in noticed]
    moments.append(Moment("asked", row.asked_s, row.name, row.offer))
    if row.up_s is not None:
        moments.append(Moment("up", row.up_s, row.name))
    started = [t for m in row.members for t, _ in told.of_member(m, AgentStarted)]
    moments += [Moment("joined", t, row.name) for t in started[:1]]
    gone_s = row.gone_s if row.gone_s is not None else row.asked_s
    moments.append(Moment("gone", gone_s, row.name, row.end))
    member = row.members[-1] if row.members else ""
    place = row.offer or row.accelerator
    return Interruption(
        number=0,
        kind="notice" if noticed else "loss",
        cause=f"node {row.name} ended before it trained: {row.reason or row.end}",
        nodes=(TouchedNode(row.name, member, place, told.gpus(row.attempt), row.end),),
        epochs=(),
        world=(0, 0),
        begun_s=min([gone_s, *(t for t, _ in noticed)]),
        stood_s=(None, None),
        caught_up_s=None,
        moments=tuple(sorted(moments, key=lambda m: m.t)),
        losses=losses,
    )


def of_notices(
    found: Sequence[Outline], ledger: Ledger, told: Testimony, nodes: NodesOf, alone: set[str]
) -> Iterator[Interruption]:
    """Notices that ended no world: taken back, or to nodes that did not train. `alone`: members
    that are told by `of_node`."""
    told_of = {m for o in found for b in o.breaks if b.kind in HURTS for m in b.members} | alone
    zero = Losses(dict.fromkeys(ledger.ns, 0), dict.fromkeys(ledger.nusd, 0))
    for notice in ledger.notices:
        if notice.kind != "soft" and notice.member not in told_of:
            yield _of_notice(notice, zero, ledger, told, nodes)


def _of_notice(
    notice: NoticeRow, zero: Losses, ledger: Ledger, told: Testimony, nodes: NodesOf
) -> Interruption:
    row, name = nodes.row(notice.member), nodes.name(notice.member)
    what = (
        "was taken back"
        if notice.cancelled
        else "ended no world"
        if notice.training
        else "came while it was not training"
    )
    moments = []
    for t, seen in told.of_member(notice.member, NoticeSeen):
        if seen.notice == notice.kind:
            moments.append(Moment("notice", t, name, f"{seen.notice} from {seen.source}"))
            cancelled_s = told.cancelled_s(notice.member, seen)
            if cancelled_s is not None:
                moments.append(Moment("cancelled", cancelled_s, name))
    if row is not None and row.gone_s is not None and not notice.cancelled:
        moments.append(Moment("gone", row.gone_s, name, row.end))
    now = [e for e in ledger.epochs if e.started_s <= notice.seen_s]
    world = now[-1].world if now else 0
    return Interruption(
        number=0,
        kind="notice",
        cause=f"{notice.kind} notice from {notice.source} to node {name} {what}",
        nodes=(
            TouchedNode(
                name,
                notice.member,
                row.offer or row.accelerator if row else "",
                told.gpus(row.attempt) if row else 1,
                row.end if row else "",
                notice.grace_s,
            ),
        ),
        epochs=(),
        world=(world, world),
        begun_s=notice.seen_s,
        stood_s=(None, None),
        caught_up_s=None,
        moments=tuple(sorted(moments, key=lambda m: m.t)),
        losses=zero,
    )
