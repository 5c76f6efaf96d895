"""The ledger: every billed second of every node in exactly one bucket of use or loss. Used by
report and monitor.

A fold of facts and committed step records. Time is counted in integer nanoseconds and money in
integer nano-dollars, so buckets add up to the bill exactly, not nearly. Where two things happen at
once, PRECEDENCE says which bucket gets the time.

    useful     steps of the committed lineage
    straggle   in them: the typical rank waited for the slowest one
    redone     work lost with its epoch, done again
    snapshot   training stood still to copy its state
    provision  paid for, until the task's setup (or else its agent) began
    setup      the task's setup, until its agent began
    start      its agent's begin, until the first step of its first epoch
    reform     between epochs: rendezvous, restart, restore
    drain      after its last step, until its agent had ended
    drained    its agent had ended; paid for until it was gone
    idle       others trained without it
    other      in an epoch between steps: validation

A node that no controller of ours launched is billed from when it was launched, at the price that
its agent found (NodeFound), until its last sign of life; from and until when SkyPilot says, where
that was asked (NodeBilled).

Pure: no store, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.views.painting import LabelledSpan

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.core import columns
from harness.core.columns import NONE, Columns, Committed
from harness.core.facts import (
    AgentEnded,
    AgentStarted,
    AttemptEnded,
    AttemptIntended,
    AttemptUp,
    EpochLeft,
    EpochStarted,
    NodeBilled,
    NodeFound,
    NoticeCancelled,
    NoticeSeen,
    SessionEnded,
    SessionStarted,
    SnapshotCommitted,
    Stamped,
    StepDone,
    StepsTimed,
    WorkerFailed,
)
from harness.core.records import StepRecord
from harness.views.ledger_parts import (
    EpochSoFar,
    NodeSoFar,
    cut_by_epoch,
    names_of,
    part_machines,
    told_in_snapshots,
)
from harness.views.painting import BUCKETS, NANO, apportion, ns, paint, totals
from harness.views.rows import AttemptRow, Billed, Cost, EpochRow, NoticeRow
from harness.views.spans import LEVEL, Ints, Overlaps, share

SILENT_S = 120.0  # after so long a node that nobody watches is not believed to be there
SAME_EVENT_S = 60.0  # a node may be known to be gone only this long after its world was replaced


@dataclass(frozen=True)
class Ledger(Billed):
    attempts: tuple[AttemptRow, ...]
    epochs: tuple[EpochRow, ...]
    notices: tuple[NoticeRow, ...]
    cost: Cost
    ns: dict[str, int] = field(default_factory=dict)
    nusd: dict[str, int] = field(default_factory=dict)

    @property
    def goodput(self) -> float:
        """Share of the billed time that went into steps of the lineage."""
        return self.ns["useful"] / self.billed_ns if self.billed_ns else 0.0

    @property
    def steps_lost(self) -> int:
        return sum(e.steps_lost for e in self.epochs)

    @classmethod
    def of(
        cls,
        facts: Iterable[Stamped],
        records: Sequence[StepRecord] | Committed,
        now_s: float,
        steps: Columns = NONE,
    ) -> Ledger:
        """The ledger of everything up to `now_s`; `records` is the committed chain, `steps` are
        steps told live that are not among the facts."""
        if not isinstance(records, Committed):
            records = Committed.of(records)
        return _Maker(sorted(facts, key=lambda s: s.t), steps, records, now_s).ledger()


# ---- making it -----------------------------------------------------------------------------------
class _Maker:
    def __init__(self, facts: list[Stamped], told: Columns, records: Committed, now_s: float):
        self.now_s = now_s
        self.nodes: dict[str, NodeSoFar] = {}
        self.epochs: dict[int, EpochSoFar] = {}
        self.attempt_of: dict[str, int] = {}  # member -> attempt
        self.seen: dict[str, float] = {}  # member -> last sign of life, agent's end included
        self.agents: dict[str, float] = {}  # member -> start
        self.agent_ended: dict[str, tuple[float, AgentEnded]] = {}
        self.hosts: dict[str, str] = {}  # member -> name of its machine
        self.found: dict[str, NodeFound] = {}
        self.bills: dict[str, tuple[float, NodeBilled]] = {}  # by member; when it was told
        self.notices: list[tuple[float, NoticeSeen]] = []
        self.cancelled: set[tuple[str, str]] = set()
        self.snapshots_of: dict[int, list[SnapshotCommitted]] = defaultdict(list)
        self.overlaps: Overlaps = {}
        for stamped in facts:
            self.add(stamped)
        live = (s.fact for s in facts if isinstance(s.fact, StepDone))
        told = columns.newest_told(columns.joined([told, columns.of_facts(live)]))
        for number, rows in cut_by_epoch(told).items():
            self.epoch(number, float(rows["start"].min())).done = rows
        committed = columns.newest_told(records.rows)
        for number, rows in cut_by_epoch(committed).items():
            epoch = self.epoch(number, float(rows["start"].min()))
            epoch.committed = rows
            epoch.world, epoch.shares = records.worlds[number]
        if not len(committed):
            for number, rows in told_in_snapshots(told, self.snapshots_of).items():
                self.epoch(number, float(rows["start"].min())).committed = rows
        self.place_members()
        self.end_epochs()
        self.end_strangers()

    # -- reading --
    def epoch(self, number: int, t: float) -> EpochSoFar:
        found = self.epochs.setdefault(number, EpochSoFar(number, t))
        found.started_s = min(found.started_s, t)
        return found

    def node(self, attempt: int, t: float) -> NodeSoFar:
        return self.nodes.setdefault(str(attempt), NodeSoFar(str(attempt), attempt, t))

    def add(self, stamped: Stamped) -> None:
        t = stamped.t
        match stamped.fact:
            case AttemptIntended(attempt, offer):
                node = self.node(attempt, t)
                node.asked_s, node.offer = t, offer
            case AttemptUp(attempt, up_s):
                self.node(attempt, t).up_s = up_s
            case AttemptEnded() as f:
                node = self.node(f.attempt, f.asked_s)
                node.ended, node.up_s, node.gone_s = f, f.up_s, f.gone_s
            case AgentStarted(member, attempt, host):
                self.attempt_of[member], self.agents[member] = attempt, t
                self.hosts[member] = host
                self.saw(member, t)
            case NodeFound(member) as f:
                self.found[member] = f
                self.saw(member, t)
            case NodeBilled(member) as f:
                self.bills[member] = t, f
            case AgentEnded(member) as f:
                self.agent_ended[member] = (t, f)
                self.saw(member, t)
            case NoticeSeen(member) as f:
                self.notices.append((t, f))
                self.saw(member, t)
            case NoticeCancelled(member, id):
                self.cancelled.add((member, id))
                self.saw(member, t)
            case EpochStarted(number, members, world, reason):
                epoch = self.epoch(number, t)
                epoch.world, epoch.reason = epoch.world or world, reason
                epoch.members += [m for m in members if m not in epoch.members]
            case EpochLeft(number, member) as f:
                epoch = self.epoch(number, t)
                epoch.left.append((t, f))
                epoch.members += [member] if member not in epoch.members else []
                self.saw(member, t)
            case WorkerFailed() as f:
                self.epoch(f.epoch, t).failures.append(f)
                self.saw(f.member, t)
            # the same session tells it again at each loop
            case SessionStarted() as f if self.epoch(f.epoch, t).session_s is None:
                epoch = self.epoch(f.epoch, t)
                epoch.world, epoch.shares, epoch.resumed_step, epoch.session_s = (
                    f.world,
                    tuple(f.shares),
                    f.resumed_step,
                    t,
                )
            case SessionEnded() as f:
                self.epoch(f.epoch, t).session_ended = f
            case StepsTimed() as f if f.own_s:
                self.epoch(f.epoch, t).pauses.timed.append(f)
            case SnapshotCommitted() as f:
                self.snapshots_of[f.epoch].append(f)
                self.epoch(f.epoch, f.t_start).pauses.stalls.append(
                    (ns(f.t_start), ns(f.t_start + max(0.0, f.stall_s)))
                )

    def saw(self, member: str, t: float) -> None:
        self.seen[member] = max(t, self.seen.get(member, t))

    def place_members(self) -> None:
        """Give every member its attempt. One that no controller launched (`sky jobs launch`,
        plain torchrun) is its own node."""
        for member in {m for e in self.epochs.values() for m in e.members} | set(self.attempt_of):
            # An agent that died before its first flush is known by name only:
            # "m<attempt>-<random>".
            by_name = re.match(r"m0*(\d{1,9})-", member)
            attempt = self.attempt_of.setdefault(member, int(by_name[1]) if by_name else 0)
            if str(attempt) not in self.nodes:
                self.nodes[member] = NodeSoFar.launched_by_others(
                    *(member, attempt, self.agents.get(member), self.now_s),
                    *(self.found.get(member), self.bills.get(member, (0.0, None))[1]),
                    self.hosts.get(member, ""),
                )
            self.of_member(member).members.append(member)
        ended = {member: t for member, (t, _) in self.agent_ended.items()}
        for node in self.nodes.values():
            node.meet(self.agents, ended, self.found)

    def of_member(self, member: str) -> NodeSoFar:
        return self.nodes.get(member) or self.nodes[str(self.attempt_of[member])]

    def end_epochs(self) -> None:
        """Which epochs are over, and since when."""
        order = sorted(self.epochs)
        for number, after in itertools.zip_longest(order, order[1:]):
            epoch = self.epochs[number]
            since = epoch.window[1] if epoch.window else ns(epoch.session_s or epoch.started_s)
            nodes = [self.of_member(m) for m in epoch.members]
            gone = [n.gone_s for n in nodes if n.gone_s is not None]
            gone += [self.agent_ended[m][0] for m in epoch.members if m in self.agent_ended]
            ends = [t for t, _ in epoch.left] + gone
            if after is not None:
                ends.append(self.epochs[after].started_s)
            if (
                after is not None
                or bool(epoch.left)
                or epoch.session_ended is not None
                or bool(gone)
            ):
                epoch.end = max(since, ns(min(ends))) if ends else since

    def end_strangers(self) -> None:
        """A node that no controller watches is counted until its last sign of life; one whose
        world trains on is there."""
        for node in self.nodes.values():
            for member in node.members if node.stranger else ():
                signs = [self.seen.get(member, node.asked_s)]
                signs += [
                    e.window[1] / NANO
                    for e in self.epochs.values()
                    if member in e.members and e.window
                ]
                lives = any(not e.over for e in self.epochs_of(node))
                silent = self.now_s - max(signs) > SILENT_S
                if member in self.agent_ended or silent or not lives:
                    ended = member in self.agent_ended
                    node.gone_s = max(signs) if ended else min(self.now_s, max(signs))
                if member in self.bills:
                    told_s, bill = self.bills[member]
                    node.gone_s = max(told_s, *signs) if bill.gone_s is None else bill.gone_s
        part_machines(n for n in self.nodes.values() if n.stranger)

    # -- making rows --
    def ledger(self) -> Ledger:
        attempts = tuple(
            self.row(n)
            for n in sorted(self.nodes.values(), key=lambda n: (n.attempt, n.asked_s, n.name))
        )
        return Ledger(
            attempts=attempts,
            epochs=tuple(self.epoch_rows()),
            notices=tuple(self.notice_rows()),
            cost=Cost.of(attempts, self.first_size()),
            ns={b: sum(a.ns[b] for a in attempts) for b in BUCKETS},
            nusd={b: sum(a.nusd[b] for a in attempts) for b in BUCKETS},
        )

    def first_size(self) -> int:
        """Nodes of the first world that made a step."""
        return next((len(e.members) for _, e in sorted(self.epochs.items()) if e.window), 0)

    def row(self, node: NodeSoFar) -> AttemptRow:
        ended = node.ended
        price = node.number("usd_per_h")
        segments: list[LabelledSpan] = []
        if node.up_s is not None:
            start = ns(node.up_s)
            end = max(start, ns(self.now_s if node.gone_s is None else node.gone_s))
            segments = self.segments(node, start, end)
        spent = totals(segments)
        nusd = ns(ended.usd) if ended else round(sum(spent.values()) * price / 3600)
        agent = next(
            (self.agent_ended[m][1] for m in reversed(node.members) if m in self.agent_ended), None
        )
        return AttemptRow(
            name=node.name,
            attempt=node.attempt,
            members=tuple(node.members),
            offer=str(node.offer.get("name", "")),
            accelerator=str(node.offer.get("accelerator", "")),
            spot=bool(node.offer.get("spot", True)),
            usd_per_h=price,
            on_demand_usd_per_h=node.number("on_demand_usd_per_h"),
            asked_s=node.asked_s,
            up_s=node.up_s,
            gone_s=node.gone_s,
            end=ended.end if ended else agent.reason if agent else "",
            reason=ended.reason if ended else "",
            exit_code=ended.exit_code if ended else agent.exit_code if agent else None,
            segments=tuple(segments),
            ns=spent,
            nusd=apportion(nusd, spent),
        )

    def segments(self, node: NodeSoFar, start: int, end: int) -> list[LabelledSpan]:
        """What [start, end) of one node was used for."""
        mine, around = self.epochs_of(node), self.around(node, start, end)
        if any(e.large for e in mine):
            return share([e.world_time for e in mine], around, start, end, self.overlaps)
        layers = [segment for e in mine for segment in e.layers()]
        return paint([*layers, *around], start, end)

    def epochs_of(self, node: NodeSoFar) -> list[EpochSoFar]:
        numbers = {n for m in node.members for n in self.epochs_with.get(m, ())}
        return [self.epochs[n] for n in sorted(numbers)]

    @functools.cached_property
    def epochs_with(self) -> dict[str, list[int]]:
        """By member."""
        found: dict[str, list[int]] = defaultdict(list)
        for number, epoch in self.epochs.items():
            for member in epoch.members:
                found[member].append(number)
        return found

    @functools.cached_property
    def windows(self) -> tuple[Ints, Ints, Ints]:
        """Of all epochs with steps: begins, ends, numbers."""
        found = [(*e.window, n) for n, e in self.epochs.items() if e.window]
        begun, over, numbers = np.array(found, np.int64).reshape(-1, 3).T
        return begun, over, numbers

    def around(self, node: NodeSoFar, start: int, end: int) -> list[LabelledSpan]:
        """What is known of [start, end) of one node outside of its epochs' steps; `paint` settles
        what overlaps."""
        mine = self.epochs_of(node)
        numbers = {e.number for e in mine}
        begun, over, of_epoch = self.windows
        near = np.flatnonzero((begun < end) & (over > start))
        theirs = [(int(begun[i]), int(over[i])) for i in near if int(of_epoch[i]) not in numbers]
        # An epoch that this node did not live to see the first step of is no part of its life.
        windows = [e.window for e in mine if e.window and e.window[0] < end and e.window[1] > start]
        if not windows:
            return node.before(start, end)
        first, last = min(w[0] for w in windows), max(w[1] for w in windows)
        layers = node.before(start, first)
        if node.agent_gone_s is not None:
            layers.append((max(last, ns(node.agent_gone_s)), end, "drained"))
        if node.gone_s is not None:
            layers.append((last, end, "drain"))
        elif not mine[-1].over and mine[-1].window:  # in the middle of its next step
            layers.append((last, end, "other"))
        layers += [(a, b, "idle") for a, b in theirs]
        return layers

    def epoch_rows(self) -> Iterable[EpochRow]:
        order = [e for _, e in sorted(self.epochs.items())]
        previous: int | None = None  # end of the last step so far
        rows: list[EpochRow] = []
        for i, e in enumerate(order):
            steps = np.union1d(e.done["step"], e.committed["step"])
            lost = len(e.lost) if e.over else 0
            gap = None if previous is None or not e.window else max(0, e.window[0] - previous)
            after = next((x for x in order[i + 1 :] if x.window), None)
            # a world without a step lies in the gap that its predecessor has counted already
            lost_ns = 0
            if e.over and e.window:
                inside = e.world_time.spans.clipped(*e.window)
                lost_ns = int(inside.totals()[LEVEL["redone"]])
                if after and after.window:
                    lost_ns += max(0, after.window[0] - e.window[1])
                elif e.end is not None and not e.orderly:
                    lost_ns += e.end - e.window[1]
            rows.append(
                EpochRow(
                    epoch=e.number,
                    reason=e.reason,
                    members=tuple(e.members),
                    attempts=tuple(self.of_member(m).name for m in e.members),
                    world=e.world,
                    shares=e.shares,
                    resumed_step=e.resumed_step
                    if e.session_s is not None
                    else (int(steps[0]) - 1 if len(steps) else 0),
                    first_step=int(steps[0]) if len(steps) else None,
                    last_step=int(steps[-1]) if len(steps) else None,
                    steps=len(steps),
                    committed=len(e.committed),
                    steps_lost=lost,
                    started_s=e.started_s,
                    first_s=e.window[0] / NANO if e.window else None,
                    last_s=e.window[1] / NANO if e.window else None,
                    end_s=e.end / NANO if e.end is not None else None,
                    gap_s=None if gap is None else gap / NANO,
                    lost_s=lost_ns / NANO,
                    ended=self.why_ended(e, order[i + 1] if i + 1 < len(order) else None),
                )
            )
            if e.window:
                previous = max(previous or 0, e.window[1])
        return rows

    def why_ended(self, e: EpochSoFar, after: EpochSoFar | None) -> str:
        """In words, from what its members left behind."""
        if not e.over:
            return ""
        whys = {left.why for _, left in e.left}
        if (e.session_ended and e.session_ended.why == "finished") or (
            whys and whys <= {"finished"}
        ):
            return "finished"
        if (e.session_ended and e.session_ended.why == "stopped") or "stopped" in whys:
            return "stopped"
        noticed = {
            n.member
            for t, n in self.notices
            if n.notice != "soft" and (n.member, n.id) not in self.cancelled
        }
        parts: list[str] = []
        if e.orderly:
            leaving = [
                m for m in e.members if m in noticed and (after is None or m not in after.members)
            ]
            stays = after is not None and any(m in e.members for m in after.members)
            joined = [m for m in after.members if m not in e.members] if after and stays else []
            if leaving:
                parts.append(f"notice: {names_of(self.of_member(m).name for m in leaving)} left")
            if joined:
                parts.append(f"{names_of(self.of_member(m).name for m in joined)} joined")
            return ", ".join(parts) or (e.session_ended.why if e.session_ended else "resize")
        told = {left.member for _, left in e.left}
        horizon = after.started_s if after else self.now_s
        vanished = []
        for member in e.members:
            gone_s = self.of_member(member).gone_s
            absent = after is None or member not in after.members
            if (
                absent
                and member not in told
                and gone_s is not None
                and gone_s <= horizon + SAME_EVENT_S
            ):
                vanished.append(member)
        if vanished:
            warned = " in spite of a notice" if set(vanished) <= noticed else " without notice"
            parts.append(f"{names_of(self.of_member(m).name for m in vanished)} lost{warned}")
        if e.failures and not vanished:
            parts.append(f"rank {e.failures[0].rank} failed: {e.failures[0].error}")
        return ", ".join(parts) or (
            "failed" if "failed" in whys else "killed" if "killed" in whys else "broke"
        )

    def notice_rows(self) -> Iterable[NoticeRow]:
        """One row per node and kind: the second voice that tells the same (a signal after the
        cloud's notice) adds nothing."""
        grouped: dict[tuple[str, str], list[tuple[float, NoticeSeen]]] = defaultdict(list)
        for t, notice in self.notices:
            grouped[notice.member, notice.notice].append((t, notice))
        for (member, kind), group in grouped.items():
            t, first = group[0]
            deadlines = [n.deadline_s for _, n in group if n.deadline_s is not None]
            mine = [self.epochs[n] for n in self.epochs_with.get(member, ())]
            current = [e for e in mine if e.started_s <= t and (e.end is None or e.end > ns(t))]
            commits = [
                (s.t_start + s.commit_s, s.step)
                for e in current
                for s in self.snapshots_of[e.number]
                if s.t_start + s.commit_s >= t
                # Of the state at the notice or later: copied after it, or what the epoch ended
                # with.
                if s.t_start + s.stall_s >= t
                or (e.session_ended is not None and e.session_ended.step == s.step)
            ]
            at, step = min(commits, default=(None, None))
            yield NoticeRow(
                member=member,
                attempt=self.of_member(member).name if member in self.attempt_of else "",
                kind=kind,
                source=first.source,
                seen_s=t,
                deadline_s=deadlines[0] if deadlines else None,
                commit_s=None if at is None else at - t,
                step=step,
                training=bool(current),
                cancelled=all((member, n.id) in self.cancelled for _, n in group),
            )
