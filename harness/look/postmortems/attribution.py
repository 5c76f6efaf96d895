"""The assignment of every nanosecond of the ledger to the interruption that caused it.

Pure. Each piece of each node's billed time goes to one interruption or to none, so the losses of
all interruptions and the rest add up to the ledger exactly. The rules for a piece of a node's time:

- `useful` goes to none.
- Work done again: the first interruption after it whose next world resumed before that step.
- Before the node's first step: the interruption whose lost node it replaces, or that took it before
  it trained; else none (the run's own start, and growth).
- After the node's last step, until it was gone: the interruption that ended its last world.
- While no node trained: the interruption that began the pause.
- While others trained without it: the interruption that removed it.
- Standing still for the snapshot that ended a world: the interruption. Other pauses between steps
  (snapshots at their interval, validation) go to none.

Dollars follow a node's time bucket by bucket, in whole nano-dollars.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.core.facts import AgentStarted, NoticeSeen, SnapshotCommitted
from harness.core.step_records import Columns, Committed, without
from harness.ledger.bill import AttemptRow, EpochRow, NoticeRow, Span, apportion, ns
from harness.ledger.ledger import Ledger
from harness.look.postmortems.interruption import HURTS, Interruption, Losses, Moment, TouchedNode
from harness.look.postmortems.world_ends import DRAINS, FactIndex, NodesOf, Outline, Progress

# Interruptions of nodes while training went on: notices without effect, nodes lost before they
# trained.


def of_node(row: AttemptRow, losses: Losses, told: FactIndex) -> Interruption:
    """Describe the loss of a node that was up, and was taken or ended badly before any world."""
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
    found: Sequence[Outline], ledger: Ledger, told: FactIndex, nodes: NodesOf, alone: set[str]
) -> Iterator[Interruption]:
    """Yield notices that ended no world: cancelled, or to nodes that did not train. `alone`:
    members that `of_node` describes."""
    told_of = {m for o in found for b in o.breaks if b.kind in HURTS for m in b.members} | alone
    zero = Losses(dict.fromkeys(ledger.ns, 0), dict.fromkeys(ledger.nusd, 0))
    for notice in ledger.notices:
        if notice.kind != "soft" and notice.member not in told_of:
            yield _of_notice(notice, zero, ledger, told, nodes)


def _of_notice(
    notice: NoticeRow, zero: Losses, ledger: Ledger, told: FactIndex, nodes: NodesOf
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


NOBODY = -1  # instead of an interruption's index
SNAP_NS = 1000  # times in seconds are good to a microsecond; segments have whole nanoseconds
BlameSums = defaultdict[tuple[int, str], int]  # (interruption, bucket) -> units


@dataclass(frozen=True)
class Blame:
    """The shares. `losses`: one per interruption, in order; `rest`: all else, useful time too."""

    losses: tuple[Losses, ...]
    rest: Losses


@dataclass
class _Worked:
    """The time in which a world made steps (ns)."""

    epoch: EpochRow
    first: int
    last: int
    broke: int  # index of the interruption that ended it, or NOBODY
    drains: list[Span]  # pauses of training for the snapshot that ended the world


@dataclass
class _Totals:
    ns: BlameSums = field(default_factory=lambda: defaultdict(int))
    nusd: BlameSums = field(default_factory=lambda: defaultdict(int))
    gpu_ns: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    steps: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def losses(self, index: int, buckets: Sequence[str]) -> Losses:
        return Losses(
            {b: self.ns[index, b] for b in buckets},
            {b: self.nusd[index, b] for b in buckets},
            self.gpu_ns[index],
            self.steps[index],
        )


def blame(
    ledger: Ledger,
    told: FactIndex,
    outlines: Sequence[Outline],
    progress: Progress,
    committed: Committed,
    besides: Sequence[str] = (),
) -> Blame:
    """Share out `ledger`. `besides`: names of nodes that were lost before they trained and replaced
    no other node; each is an interruption of its own, numbered after `outlines`."""
    maker = _Blamer(ledger, told, outlines, progress)
    maker.replaces |= {name: len(outlines) + i for i, name in enumerate(besides)}
    for row in ledger.attempts:
        maker.add(row)
    # sort once: a long run has a million rows and a thousand generations
    order = np.argsort(committed.rows["epoch"], kind="stable")
    epochs = committed.rows["epoch"][order]
    for epoch in ledger.epochs:
        if epoch.steps_lost:
            begin, end = np.searchsorted(epochs, [epoch.epoch, epoch.epoch + 1])
            maker.add_steps(epoch, committed.rows[order[begin:end]])
    buckets = list(ledger.ns)
    return Blame(
        tuple(maker.totals.losses(i, buckets) for i in range(len(outlines) + len(besides))),
        maker.totals.losses(NOBODY, buckets),
    )


class _Blamer:
    def __init__(
        self, ledger: Ledger, told: FactIndex, outlines: Sequence[Outline], progress: Progress
    ):
        self.told, self.outlines, self.progress = told, outlines, progress
        self.totals = _Totals()
        self.bounds = sorted(
            {t for a in ledger.attempts for begin, end, _ in a.segments for t in (begin, end)}
        )
        broke = {e.epoch: i for i, o in enumerate(outlines) for e in o.epochs}
        self.replaces = {a.name: i for i, o in enumerate(outlines) for a in o.besides}
        self.replaces |= {a.name: i for i, o in enumerate(outlines) for a in o.launched}
        self.windows = [
            _Worked(
                e, self.at(e.first_s), self.at(e.last_s), broke.get(e.epoch, NOBODY), self.drains(e)
            )
            for e in progress.worlds.all
        ]
        for one, after in zip(self.windows, self.windows[1:], strict=False):
            one.last = min(one.last, after.first)  # an old world may not know that it was replaced
        self.window_of = {w.epoch.epoch: w for w in self.windows}
        self.windows_of: dict[str, list[_Worked]] = defaultdict(list)
        for window in self.windows:
            for name in dict.fromkeys(window.epoch.attempts):
                self.windows_of[name].append(window)
        self.firsts = [w.first for w in self.windows]
        self.redone = {w.epoch.epoch: self.causes(w) for w in self.windows}
        self.cuts = sorted(
            {t for w in self.windows for t in (w.first, w.last)}
            | {t for causes in self.redone.values() for t, _ in causes}
        )

    def at(self, t: float | None) -> int:
        """Return `t` in nanoseconds, moved to a segment's bound if one is within SNAP_NS."""
        exact = ns(t or 0.0)
        i = bisect_left(self.bounds, exact - SNAP_NS)
        near = [b for b in self.bounds[i : i + 2] if abs(b - exact) <= SNAP_NS]
        return min(near, key=lambda b: abs(b - exact), default=exact)

    def drains(self, epoch: EpochRow) -> list[Span]:
        return [
            (self.at(c.t_start), self.at(c.t_start + max(0.0, c.stall_s)))
            for _, c in self.told.of_epoch(epoch.epoch, SnapshotCommitted)
            if c.why in DRAINS
        ]

    def causes(self, window: _Worked) -> list[tuple[int, int]]:
        """Return (nanoseconds, index): from when on a world's steps were lost to which
        interruption; the earliest interruption comes last."""
        if window.broke == NOBODY:
            return []
        rows = self.progress.rows(window.epoch.epoch)
        found: list[tuple[int, int]] = []
        before = math.inf  # later steps are lost already
        for index in range(window.broke, len(self.outlines)):
            trained = self.outlines[index].trained
            if trained is None or trained.resumed_step >= before:
                continue
            before = trained.resumed_step
            if (window.epoch.last_step or 0) > before:
                begin_s = float(rows["start"][rows["step"] > before].min())
                found.insert(0, (self.at(begin_s), index))
        return found

    def cause_of_redone(self, window: _Worked, t: int) -> int:
        """Return the interruption to which work of this world at `t` was lost."""
        causes = self.redone[window.epoch.epoch]
        i = bisect_right([begin for begin, _ in causes], t) - 1
        # lost work without a known step was lost when its world broke
        return causes[i][1] if i >= 0 else window.broke

    # -- time and money of one node --
    def add(self, row: AttemptRow) -> None:
        spent: BlameSums = defaultdict(int)
        own = self.own(row) if row.segments else []
        for begin, end, bucket, window in self.pieces(row):
            spent[self.cause(row, own, begin, bucket, window), bucket] += end - begin
        self.blame_drains(row, own, spent)
        gpus = self.told.gpus(row.attempt)
        for (index, bucket), nanoseconds in spent.items():
            self.totals.ns[index, bucket] += nanoseconds
            if bucket != "useful":
                self.totals.gpu_ns[index] += nanoseconds * gpus
        for bucket, nusd in row.nusd.items():
            weights = {str(i): n for (i, b), n in spent.items() if b == bucket and n}
            if not weights:
                self.totals.nusd[NOBODY, bucket] += nusd
                continue
            for name, part in apportion(nusd, weights).items():
                self.totals.nusd[int(name), bucket] += part

    def pieces(self, row: AttemptRow) -> Iterator[tuple[int, int, str, _Worked | None]]:
        """Yield the node's segments, cut where a world's steps begin or end, as (from, to, bucket,
        the last world that had begun)."""
        for begin, end, bucket in row.segments:
            inside = self.cuts[bisect_right(self.cuts, begin) : bisect_left(self.cuts, end)]
            for a, b in zip([begin, *inside], [*inside, end], strict=True):
                i = bisect_right(self.firsts, a) - 1
                yield a, b, bucket, self.windows[i] if i >= 0 else None

    def own(self, row: AttemptRow) -> list[_Worked]:
        """Return the worlds whose steps this node was up for."""
        begin, end = row.segments[0][0], row.segments[-1][1]
        mine = self.windows_of.get(row.name, ())
        return [w for w in mine if w.first < end and w.last > begin]

    def cause(
        self, row: AttemptRow, own: list[_Worked], t: int, bucket: str, window: _Worked | None
    ) -> int:
        if bucket == "useful":
            return NOBODY
        if not own or t < own[0].first:
            return self.replaces.get(row.name, NOBODY)
        mine = own[bisect_right(own, t, key=lambda w: w.first) - 1]
        if bucket == "redone":
            return self.cause_of_redone(mine, t)
        if t >= own[-1].last:
            return own[-1].broke
        assert window is not None  # one of its own worlds has begun
        if t >= window.last:
            return window.broke
        return NOBODY if window is mine else mine.broke

    def blame_drains(self, row: AttemptRow, own: list[_Worked], spent: BlameSums) -> None:
        """Move the time of snapshots that ended worlds to the interruption, where training stood
        still before the world's last step was over."""
        for window in own:
            if window.broke == NOBODY:
                continue
            inside = sum(
                max(0, min(b, window.last, row.segments[-1][1]) - max(a, window.first))
                for a, b in window.drains
            )
            moved = min(inside, spent[NOBODY, "snapshot"])
            spent[NOBODY, "snapshot"] -= moved
            spent[window.broke, "snapshot"] += moved

    # -- steps --
    def add_steps(self, epoch: EpochRow, committed: Columns) -> None:
        """Count lost steps by interruption. `committed`: of this generation."""
        window = self.window_of.get(epoch.epoch)
        rows = self.progress.rows(epoch.epoch)
        if window is None:
            self.totals.steps[NOBODY] += epoch.steps_lost
            return
        lost = without(rows, committed)
        by_cause: Mapping[int, int] = self.count(window, lost)
        for index, count in by_cause.items():
            self.totals.steps[index] += count
        self.totals.steps[NOBODY] += epoch.steps_lost - sum(by_cause.values())

    def count(self, window: _Worked, lost: Columns) -> dict[int, int]:
        found: dict[int, int] = defaultdict(int)
        begins = np.rint(lost["start"] * 1e9).astype(np.int64)
        for begin in begins.tolist():
            found[self.cause_of_redone(window, self.at(begin / 1e9))] += 1
        return found
