"""Estimates of the cost of another snapshot interval, or of one more node standing by.

Pure. They use the measurements of this run; the assumptions are:

- A world that broke without warning lost, on average, half an interval and the time from a
  snapshot's begin to its commit; never more than it had trained. This is compared with the actual
  loss, so one interruption may look lucky or unlucky; the sum over many says more.
- A snapshot costs training its stall, and the measured slowdown of the steps beside its upload.
- The time between losses is that of this run: trained seconds per world that broke. With few losses
  it is a guess.
- Daly's interval (2006), for a snapshot's cost C and the time between losses M, is
  sqrt(2CM) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C; never shorter than three times a commit, so that
  uploads do not overlap. The harness itself obeys the same limit.
- A node standing by is paid for from the time at which training continued after the previous
  interruption. It replaces one lost node at once, and its successor is up before the next
  interruption. If the world had several nodes and all were taken, it would have been taken too.
  It saves the wait for a launch if only one node was missing, and fills one place while the world
  was smaller. More work in the same time shortens the run, which is counted in wall-clock seconds,
  not in dollars.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from harness.core.facts import AgentStarted, SnapshotCommitted
from harness.core.loss_rates import cost_s, daly
from harness.ledger.bill import NANO, EpochRow
from harness.ledger.ledger import Ledger
from harness.look.postmortems.interruption import HURTS, Alternative, Interruption
from harness.look.postmortems.world_ends import FactIndex, NodesOf, Outline, TrainedWorlds

STANDBY = "one more node standing by"


@dataclass(frozen=True)
class MeasuredRun:
    """The measured snapshots and losses of this run, in seconds. 0: not known."""

    interval_s: float  # between the begins of two snapshots, median
    cost_s: float  # training time that one snapshot costs
    commit_s: float  # from a snapshot's begin to its commit
    between_losses_s: float  # trained seconds per world that broke

    @property
    def best_s(self) -> float:
        """Daly's interval; 0: too little is known."""
        if not self.cost_s or not self.between_losses_s:
            return 0.0
        return max(daly(self.cost_s, self.between_losses_s), 3 * self.commit_s)


def measured_run(ledger: Ledger, told: FactIndex, outlines: Sequence[Outline]) -> MeasuredRun:
    commits = {e.epoch: _commits(told, e) for e in ledger.epochs}
    every = [c for found in commits.values() for c in found]
    gaps = [
        after.t_start - one.t_start
        for found in commits.values()
        for one, after in itertools.pairwise(found)
    ]
    if not gaps:  # only one snapshot per world: measure from the world's first step
        gaps = [
            commits[e.epoch][0].t_start - e.first_s
            for e in ledger.epochs
            if e.first_s is not None and commits[e.epoch]
        ]
    broke = sum(unplanned(one) for one in outlines)
    trained_s = sum(_trained_s(e) for e in ledger.epochs)
    return MeasuredRun(
        interval_s=max(0.0, median(gaps)) if gaps else 0.0,
        cost_s=median(cost_s(c.stall_s, c.slowdown, c.commit_s) for c in every) if every else 0.0,
        commit_s=median(c.commit_s for c in every) if every else 0.0,
        between_losses_s=trained_s / broke if broke else 0.0,
    )


def unplanned(one: Outline) -> bool:
    """Return whether a world that had trained broke, so that it lost its uncommitted steps."""
    return any(not b.orderly and b.epoch.first_s is not None for b in one.breaks)


def _commits(told: FactIndex, epoch: EpochRow) -> list[SnapshotCommitted]:
    found = (c for _, c in told.of_epoch(epoch.epoch, SnapshotCommitted) if c.why == "interval")
    return sorted(found, key=lambda c: c.t_start)


def _trained_s(epoch: EpochRow) -> float:
    if epoch.first_s is None or epoch.last_s is None:
        return 0.0
    return max(0.0, epoch.last_s - epoch.first_s)


# ---- another interval ----------------------------------------------------------------------------
def intervals(found: MeasuredRun) -> list[tuple[str, float]]:
    """Return the names and seconds of the intervals that are compared with the run's own."""
    if not found.interval_s or not found.cost_s:
        return []
    named = [
        ("half the snapshot interval", found.interval_s / 2),
        ("twice the snapshot interval", found.interval_s * 2),
    ]
    return [*named, ("the best interval by Daly", found.best_s)] if found.best_s else named


class Alternatives:
    """The alternatives of a run: per interruption, and for the whole run."""

    def __init__(
        self,
        ledger: Ledger,
        told: FactIndex,
        outlines: Sequence[Outline],
        worlds: TrainedWorlds,
        min_nodes: int,
    ):
        self.told, self.outlines, self.worlds = told, outlines, worlds
        self.min_nodes = min_nodes
        self.nodes, self.measured = NodesOf(ledger), measured_run(ledger, told, outlines)
        self.price = {a.name: a.usd_per_h for a in ledger.attempts}
        up = [a.usd_per_h for a in ledger.attempts if a.up_s is not None]
        self.typical_price = median(up) if up else 0.0
        ends = [a.segments[-1][1] / NANO for a in ledger.attempts if a.segments]
        self.ended_s = max(ends, default=0.0)

    def of(self, index: int, found: Interruption) -> tuple[Alternative, ...]:
        """Return the alternatives of one interruption: the extra cost (or saving) of other choices
        from the previous interruption until this one was over."""
        one = self.outlines[index]
        made = [self.interval(name, s, one, found, self.before(index)) for name, s in self.asked()]
        if spare := self.spare(index, one):
            made.append(spare)
        return tuple(made)

    def of_run(self, each: Sequence[Interruption]) -> tuple[Alternative, ...]:
        """Return the alternatives of the whole run: the sums over the interruptions, and the time
        after the last one."""
        rest = self.before(len(self.outlines))
        found = []
        for name, seconds in self.asked():
            node_s, usd = self.snapshots(seconds, rest)
            tail = Alternative(name, node_s, usd, node_s / max(1, _most(rest)))
            found.append(_sum(tail, each))
        if any(a.name == STANDBY for i in each for a in i.what_if):
            node_s, usd = self.standing_by(len(self.outlines), self.ended_s)
            found.append(_sum(Alternative(STANDBY, node_s, usd), each))
        return tuple(found)

    def asked(self) -> list[tuple[str, float]]:
        return intervals(self.measured)

    def before(self, index: int) -> list[EpochRow]:
        """Return the worlds that trained since the previous interruption, up to this one."""
        after = self.outlines[index - 1].last.epoch.epoch if index else -1
        until = self.outlines[index].last.epoch.epoch if index < len(self.outlines) else math.inf
        return self.worlds.between(after, until)

    def usd(self, epoch: EpochRow, seconds: float) -> float:
        return sum(self.price.get(name, 0.0) for name in set(epoch.attempts)) * seconds / 3600

    def snapshots(self, every_s: float, worlds: Iterable[EpochRow]) -> tuple[float, float]:
        """Return the extra node-seconds and dollars of snapshots at this interval, compared with
        the run's own."""
        node_s = usd = 0.0
        for epoch in worlds:
            more = _trained_s(epoch) * (1 / every_s - 1 / self.measured.interval_s)
            node_s += more * self.measured.cost_s * len(set(epoch.attempts))
            usd += self.usd(epoch, more * self.measured.cost_s)
        return node_s, usd

    def interval(
        self, name: str, every_s: float, one: Outline, found: Interruption, worlds: list[EpochRow]
    ) -> Alternative:
        node_s, usd = self.snapshots(every_s, worlds)
        wall_s = node_s / max(1, _most(worlds))
        broken = [b.epoch for b in one.breaks if not b.orderly and b.epoch.first_s is not None]
        for epoch in broken:
            lost_s = min(_trained_s(epoch), every_s / 2 + self.measured.commit_s)
            node_s += lost_s * len(set(epoch.attempts))
            usd += self.usd(epoch, lost_s)
            wall_s += lost_s
        if broken:
            redone = found.losses.ns.get("redone", 0) / NANO
            node_s -= redone
            usd -= found.losses.nusd.get("redone", 0) / NANO
            wall_s -= redone / max(1, len(set(broken[0].attempts)))
        return Alternative(name, node_s, usd, wall_s, f"every {every_s:.1f} s")

    # -- a node standing by --
    def standing_by(self, index: int, until_s: float) -> tuple[float, float]:
        """Return the seconds and dollars of a node that stands by from the time at which training
        continued after the previous interruption, until `until_s`."""
        first = next((e.first_s for e in self.worlds.all), None)
        before = self.outlines[index - 1].trained if index else None
        since_s = before.first_s if before else first if not index else None
        if since_s is None:
            return 0.0, 0.0
        seconds = max(0.0, until_s - since_s)
        return seconds, seconds / 3600 * self.typical_price

    def spare(self, index: int, one: Outline) -> Alternative | None:
        """Return the alternative of a node standing by, or `None` if it does not apply."""
        begun_s = min(b.begun_s for b in one.breaks)
        node_s, usd = self.standing_by(index, begun_s)
        gone = [m for m in one.members if (r := self.nodes.row(m)) and r.gone_s is not None]
        world = one.first.epoch
        if one.main.kind not in HURTS or not gone or one.trained is None:
            if not one.trained or not node_s:
                return None
            return Alternative(STANDBY, node_s, usd, 0.0, "it would not have been needed")
        stay = [m for m in world.members if m not in gone]
        if not stay and len(gone) + len(one.besides) > 1:
            return Alternative(STANDBY, node_s, usd, 0.0, "it would have been taken too")
        wait_s = self.waited(one, len(stay), max(begun_s, one.down_s or begun_s))
        up_s = one.trained.first_s or begun_s
        until_s = max(up_s, self.smaller_until(index, up_s))
        filled_s = (until_s - up_s) / max(1, len(world.members))
        saved_usd = sum(self.price.get(self.nodes.name(m), 0.0) for m in stay) * wait_s / 3600
        note = f"{wait_s:.1f} s less of waiting, one place filled for {until_s - up_s:.1f} s"
        return Alternative(
            STANDBY,
            node_s - len(stay) * wait_s,
            usd - saved_usd,
            -(wait_s + filled_s),
            note,
        )

    def waited(self, one: Outline, stay: int, since_s: float) -> float:
        """Return the seconds without a step during which exactly one node was missing to the least
        number that the run trains on."""
        trained = one.trained
        if trained is None or not (stay < self.min_nodes <= stay + 1):
            return 0.0
        ready = [
            t
            for row in one.launched
            if row.name in trained.attempts
            for m in row.members[:1]
            for t, _ in self.told.of_member(m, AgentStarted)
        ]
        return max(0.0, min(ready) - since_s) if ready else 0.0

    def smaller_until(self, index: int, up_s: float) -> float:
        """Return when the world was as large as before, was interrupted again, or ended."""
        one = self.outlines[index]
        size, last = len(one.first.epoch.members), one.last.epoch.epoch
        again = (o for o in self.outlines[index + 1 :] if o.main.kind != "resize")
        until = next((o.last.epoch.epoch for o in again), math.inf)
        later = self.worlds.between(last, until)
        whole = [e.first_s for e in later if e.first_s is not None and len(e.members) >= size]
        ends = [e.last_s for e in later if e.last_s is not None]
        return min(whole, default=max(ends, default=up_s))


def _most(worlds: Iterable[EpochRow]) -> int:
    """Return the number of nodes of the largest world."""
    return max((len(set(e.attempts)) for e in worlds), default=1)


def _sum(tail: Alternative, each: Sequence[Interruption]) -> Alternative:
    same = [a for i in each for a in i.what_if if a.name == tail.name]
    return replace(
        tail,
        node_s=tail.node_s + sum(a.node_s for a in same),
        usd=tail.usd + sum(a.usd for a in same),
        wall_s=tail.wall_s + sum(a.wall_s for a in same),
        note=next((a.note for a in same if a.name != STANDBY), ""),
    )
