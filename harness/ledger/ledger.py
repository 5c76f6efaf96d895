"""The ledger: every billed second of every node in exactly one bucket of use or loss. The report
and the monitor use it.

It is a fold of facts and committed step records. Time is counted in integer nanoseconds and money
in integer nano-dollars, so buckets add up to the bill exactly, not nearly. If two things happen at
once, PRECEDENCE decides which bucket gets the time.

    useful     steps of the committed lineage
    straggle   within them: the typical rank waited for the slowest one
    redone     work that was lost with its generation and done again
    snapshot   training stood still to copy its state
    provision  paid for, until the task's setup (or else its agent) began
    setup      the task's setup, until its agent began
    start      from its agent's begin to the first step of its first generation
    reform     between generations (the code's `epoch`s): rendezvous, restart, restore
    drain      after its last step, until its agent ended
    drained    its agent had ended; paid for until it was gone
    idle       others trained without it
    other      in a generation between steps: validation

A node that our controller did not launch is billed from its launch, at the price that its agent
found (NodeFound), until its last sign of life; or for the time that SkyPilot reports, if it was
queried (NodeBilled).

Pure: no store, no clock.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.core import step_records
from harness.core.facts import (
    AgentEnded,
    NoticeSeen,
    Stamped,
    StepDone,
)
from harness.core.step_records import NONE, Columns, Committed, StepRecord
from harness.ledger.bill import (
    BUCKETS,
    NANO,
    PRECEDENCE,
    AttemptRow,
    Billed,
    Cost,
    EpochRow,
    LabelledSpan,
    NoticeRow,
    Span,
    apportion,
    ns,
    paint,
    totals,
)
from harness.ledger.run_state import Attempt, MemberState, RunState, TrainingWorld
from harness.ledger.time_spans import LEVEL, Ints, Overlaps, WorldSpans, painted, share_between

# Attempts and generations (`epoch`s) of a run while its ledger is being made. Pure.

LARGE = 2000  # steps; a larger generation is shared out by pieces (time_spans.py)
# facts.EpochLeft.why of workers that left with a committed snapshot
GOOD_ENDS = ("finished", "drained", "resize", "stopped")


def of_machine(member: MemberState, now_s: float) -> Attempt:
    """Return the machine of a member that no controller launched."""
    node = Attempt(member.name, member.attempt, asked_s=now_s, members={member.name: member})
    node.describe()
    node.gone_s = None  # judged by its last sign of life
    return node


def before(node: Attempt, start: int, first: int) -> list[LabelledSpan]:
    """Return the use of [start, first) (ns) of a node: until its first step, else all its life."""
    agent_s, setup_s, gone_s = node.agent_s, node.setup_s, node.agent_gone_s
    if agent_s is None and node.members:
        return [(start, first, "start")]  # its agent died before it recorded anything
    agent = first if agent_s is None else ns(agent_s)
    setup = agent if setup_s is None else min(agent, max(start, ns(setup_s)))
    gone = first if gone_s is None else ns(gone_s)
    return [
        (start, setup, "provision"),
        (setup, agent, "setup"),
        (agent, min(first, gone), "start"),
        (gone, first, "drained"),
    ]


def machine_of(node: Attempt) -> str:
    """Return the same text for all agents on one machine."""
    one = next(iter(node.members.values()))
    cluster = one.found[1].cluster if one.found else one.billed[1].cluster if one.billed else ""
    return f"{cluster} {one.started[1].host if one.started else ''} {node.asked_s:.0f}"


def part_machines(strangers: Iterable[Attempt]) -> None:
    """Split the bill of a machine between agents that followed each other on it: until the next one
    began, the machine belongs to the one before."""
    machines: dict[str, list[tuple[float, Attempt]]] = defaultdict(list)
    for node in strangers:
        if node.agent_s is not None and node.asked_s is not None and node.asked_s < node.agent_s:
            machines[machine_of(node)].append((node.agent_s, node))
    for shared in machines.values():
        shared.sort(key=lambda at: at[0])
        for (_, one), (next_s, after) in itertools.pairwise(shared):
            one.gone_s, after.asked_s, after.up_s = next_s, next_s, next_s


@dataclass
class WorldTimes(TrainingWorld):
    """A generation with its steps and its end, while a ledger is being made."""

    done: Columns = field(default_factory=lambda: NONE)  # from live facts
    committed: Columns = field(default_factory=lambda: NONE)  # from the records
    end: int | None = None  # None while it is not over

    @property
    def over(self) -> bool:
        return self.end is not None

    @functools.cached_property
    def window(self) -> Span | None:
        """The span from the begin of its first step to the end of its last (ns), or None."""
        spans = [step_spans(rows) for rows in (self.done, self.committed) if len(rows)]
        if not spans:
            return None
        return min(int(a.min()) for a, _ in spans), max(int(b.max()) for _, b in spans)

    @functools.cached_property
    def lost(self) -> Columns:
        """Steps that were done and are not committed."""
        return step_records.without(self.done, self.committed)

    @property
    def orderly(self) -> bool:
        """True if it ended with a committed snapshot."""
        return self.session_ended is not None or any(left.why in GOOD_ENDS for _, left in self.left)

    @functools.cached_property
    def world_time(self) -> WorldSpans:
        """The members' time by bucket. Steps after the newest snapshot of a living world count as
        useful so far. Read it only when all facts have been added."""
        layers = [
            (ns(s.t_start), ns(s.t_start + max(0.0, s.stall_s)), LEVEL["snapshot"])
            for s in self.snapshots
        ]
        if self.window:
            layers.append((*self.window, LEVEL["other"]))
        if self.over and self.end is not None and not self.orderly:
            # It was working when it broke; all work since its last known step is lost, recorded or
            # not.
            since = (
                self.window[1]
                if self.window
                else None
                if self.session_s is None
                else ns(self.session_s)
            )
            if since is not None:
                layers.append((since, self.end, LEVEL["redone"]))
        starts, ends, levels = np.array(layers, np.int64).reshape(-1, 3).T
        kinds = ((self.committed, "useful"), (self.lost, "redone" if self.over else "useful"))
        parts = [(*step_spans(rows), LEVEL[bucket]) for rows, bucket in kinds]
        counted = [rows for rows, bucket in kinds if bucket == "useful"]
        parts += [(*self.waited(rows), LEVEL["straggle"]) for rows in counted]
        return WorldSpans(
            painted(
                np.concatenate([starts, *(a for a, _, _ in parts)]),
                np.concatenate([ends, *(b for _, b, _ in parts)]),
                np.concatenate([levels, *(np.full(len(a), level) for a, _, level in parts)]),
            ),
            cut_at=self.window[1] if self.window else None,
        )

    def waited(self, rows: Columns) -> tuple[Ints, Ints]:
        """Return (begins, ends) of the part of each step in which the typical rank was done and
        waited for the slowest. A measurement holds until the next one, since an archive keeps only
        some of them."""
        starts, ends = step_spans(rows)
        told = np.array(sorted(self.waits, key=lambda wait: wait[0]), np.int64).reshape(-1, 2)
        at = np.searchsorted(told[:, 0], rows["step"], "right")
        return np.maximum(starts, ends - np.concatenate([[0], told[:, 1]])[at]), ends

    @property
    def large(self) -> bool:
        return len(self.done) + len(self.committed) > LARGE

    def layers(self) -> list[LabelledSpan]:
        """Return `world_time` as segments."""
        spans = self.world_time.spans
        found = zip(spans.starts.tolist(), spans.ends.tolist(), spans.levels.tolist(), strict=True)
        return [(a, b, PRECEDENCE[level]) for a, b, level in found]


def step_spans(rows: Columns) -> tuple[Ints, Ints]:
    """Return begins and ends of the steps, in nanoseconds."""
    starts = np.rint(rows["start"] * NANO).astype(np.int64)
    return starts, np.rint(rows["end"] * NANO).astype(np.int64)


def cut_by_epoch(rows: Columns) -> dict[int, Columns]:
    """Cut `rows`, which are in the order of their generations, at each generation."""
    if not len(rows):
        return {}
    cuts = np.flatnonzero(rows["epoch"][1:] != rows["epoch"][:-1]) + 1
    return {int(part["epoch"][0]): part for part in np.split(rows, cuts)}


def names_of(names: Iterable[str]) -> str:
    """Return `node 1` or `nodes 1, 2`."""
    found = list(names)
    return f"node{'s' if len(found) > 1 else ''} {', '.join(found)}"


def told_in_snapshots(told: Columns, worlds: Mapping[int, TrainingWorld]) -> dict[int, Columns]:
    """Return the kept steps by epoch for a run without records (a loop that only has safe points):
    a step counts if a snapshot of its epoch holds it and no later epoch has redone it."""
    found: dict[int, Columns] = {}
    counted = np.empty(0, told["step"].dtype)
    for number in sorted(worlds, reverse=True):
        last = max((f.step for f in worlds[number].snapshots), default=0)
        rows = told[(told["epoch"] == number) & (told["step"] <= last)]
        rows = rows[~np.isin(rows["step"], counted)]
        counted = np.concatenate([counted, rows["step"]])
        if len(rows):
            found[number] = rows
    return found


SILENT_S = 120.0  # after so long without a sign of life, an unwatched node counts as gone
SAME_EVENT_S = 60.0  # a node's end may be recorded so long after its world was replaced


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
        """Make the ledger of everything up to `now_s` (wall clock, s). `records`: the committed
        chain; `steps`: steps from facts that are not in `facts`."""
        if not isinstance(records, Committed):
            records = Committed.of(records)
        known = sorted(facts, key=lambda s: s.t)
        live = step_records.of_facts(s.fact for s in known if isinstance(s.fact, StepDone))
        told = step_records.joined([steps, live])
        return cls.from_state(RunState.of(known), records, now_s, told)

    @classmethod
    def from_state(
        cls, state: RunState, records: Committed, now_s: float, steps: Columns
    ) -> Ledger:
        """Make the ledger of a run's state up to `now_s`. `steps`: all that were told live."""
        return _Maker(state, steps, records, now_s).ledger()


# ---- sharing the bills out -----------------------------------------------------------------------
class _Maker:
    """The state is left as it is: whatever the ledger judges, it writes into copies."""

    def __init__(self, state: RunState, told: Columns, records: Committed, now_s: float):
        self.state, self.now_s = state, now_s
        self.nodes = {
            name: dataclasses.replace(node, members={})
            for name, node in state.nodes.items()
            if node.told
        }
        self.node_of: dict[str, Attempt] = {}  # by member
        self.worlds = {n: WorldTimes(**vars(world)) for n, world in state.worlds.items()}
        self.notices = sorted(state.notices, key=lambda told: told[0])
        self.overlaps: Overlaps = {}
        told = step_records.newest_told(told)
        for number, rows in cut_by_epoch(told).items():
            self.world_of(number, rows).done = rows
        committed = step_records.newest_told(records.rows)
        for number, rows in cut_by_epoch(committed).items():
            world = self.world_of(number, rows)
            world.committed = rows
            world.world, world.shares = records.worlds[number]
        if not len(committed):
            for number, rows in told_in_snapshots(told, self.worlds).items():
                self.world_of(number, rows).committed = rows
        self.place_members()
        self.end_epochs()
        self.end_strangers()

    # -- reading --
    def world_of(self, number: int, rows: Columns) -> WorldTimes:
        began_s = float(rows["start"].min())
        found = self.worlds.setdefault(number, WorldTimes(number, began_s))
        found.started_s = min(found.started_s, began_s)
        return found

    def place_members(self) -> None:
        """Give every member its attempt. A member that no controller launched (`sky jobs launch`,
        plain torchrun) is its own node."""
        known = self.state.members
        names = {m for e in self.worlds.values() for m in e.members}
        names |= {name for name, one in known.items() if one.started}
        members = [known.get(name) or MemberState(name) for name in names]
        for one in sorted(members, key=lambda m: (m.started[0] if m.started else 0.0, m.name)):
            node = self.nodes.get(str(one.attempt))
            if node is None:
                node = self.nodes[one.name] = of_machine(one, self.now_s)
            node.members[one.name] = one
            self.node_of[one.name] = node

    def end_epochs(self) -> None:
        """Set the end (ns) of the generations that are over."""
        order = sorted(self.worlds)
        for number, after in itertools.zip_longest(order, order[1:]):
            epoch = self.worlds[number]
            since = epoch.window[1] if epoch.window else ns(epoch.session_s or epoch.started_s)
            nodes = [self.node_of[m] for m in epoch.members]
            gone = [n.gone_s for n in nodes if n.gone_s is not None]
            gone += [ended[0] for m in epoch.members if (ended := self.ended_of(m))]
            ends = [t for t, _ in epoch.left] + gone
            if after is not None:
                ends.append(self.worlds[after].started_s)
            if (
                after is not None
                or bool(epoch.left)
                or epoch.session_ended is not None
                or bool(gone)
            ):
                epoch.end = max(since, ns(min(ends))) if ends else since

    def ended_of(self, member: str) -> tuple[float, AgentEnded] | None:
        return self.node_of[member].members[member].ended

    def end_strangers(self) -> None:
        """End nodes that no controller watches at their last sign of life; a node whose world still
        trains is alive."""
        strangers = [node for node in self.nodes.values() if not node.told]
        for node in strangers:
            (one,) = node.members.values()
            signs = [one.seen_s if one.seen_s > -math.inf else node.asked_s or self.now_s]
            signs += [e.window[1] / NANO for e in self.epochs_of(node) if e.window]
            lives = any(not e.over for e in self.epochs_of(node))
            if one.ended or self.now_s - max(signs) > SILENT_S or not lives:
                node.gone_s = max(signs) if one.ended else min(self.now_s, max(signs))
            if one.billed:
                told_s, billed = one.billed
                node.gone_s = max(told_s, *signs) if billed.gone_s is None else billed.gone_s
        part_machines(strangers)

    # -- making rows --
    def ledger(self) -> Ledger:
        nodes = sorted(self.nodes.values(), key=lambda n: (n.attempt, n.asked_s or 0.0, n.name))
        attempts = tuple(map(self.row, nodes))
        return Ledger(
            attempts=attempts,
            epochs=tuple(self.epoch_rows()),
            notices=tuple(self.notice_rows()),
            cost=Cost.of(attempts, self.first_size()),
            ns={b: sum(a.ns[b] for a in attempts) for b in BUCKETS},
            nusd={b: sum(a.nusd[b] for a in attempts) for b in BUCKETS},
        )

    def first_size(self) -> int:
        """Return the number of nodes of the first world that made a step."""
        return next((len(e.members) for _, e in sorted(self.worlds.items()) if e.window), 0)

    def row(self, node: Attempt) -> AttemptRow:
        ended = node.ended
        billed = node.bill(self.now_s)
        segments: list[LabelledSpan] = []
        if node.up_s is not None:
            segments = self.segments(node, billed.begin_ns, billed.end_ns)
        spent = totals(segments)
        agent = next((m.ended[1] for m in reversed(node.members.values()) if m.ended), None)
        return AttemptRow(
            name=node.name,
            attempt=node.attempt,
            members=tuple(node.members),
            offer=node.place,
            accelerator=str(node.offer.get("accelerator", "")),
            spot=bool(node.offer.get("spot", True)),
            usd_per_h=node.usd_per_h,
            on_demand_usd_per_h=node.on_demand_usd_per_h,
            asked_s=node.asked_s or 0.0,
            up_s=node.up_s,
            gone_s=node.gone_s,
            end=ended.end if ended else agent.reason if agent else "",
            reason=ended.reason if ended else "",
            exit_code=ended.exit_code if ended else agent.exit_code if agent else None,
            segments=tuple(segments),
            ns=spent,
            nusd=apportion(billed.nusd, spent),
        )

    def segments(self, node: Attempt, start: int, end: int) -> list[LabelledSpan]:
        """Return the use of [start, end) (ns) of one node."""
        mine, around = self.epochs_of(node), self.around(node, start, end)
        if any(e.large for e in mine):
            return share_between([e.world_time for e in mine], around, start, end, self.overlaps)
        layers = [segment for e in mine for segment in e.layers()]
        return paint([*layers, *around], start, end)

    def epochs_of(self, node: Attempt) -> list[WorldTimes]:
        numbers = {n for m in node.members for n in self.epochs_with.get(m, ())}
        return [self.worlds[n] for n in sorted(numbers)]

    @functools.cached_property
    def epochs_with(self) -> dict[str, list[int]]:
        """The numbers of each member's generations."""
        found: dict[str, list[int]] = defaultdict(list)
        for number, epoch in self.worlds.items():
            for member in epoch.members:
                found[member].append(number)
        return found

    @functools.cached_property
    def windows(self) -> tuple[Ints, Ints, Ints]:
        """Begins, ends (ns) and numbers of all generations with steps."""
        found = [(*e.window, n) for n, e in self.worlds.items() if e.window]
        begun, over, numbers = np.array(found, np.int64).reshape(-1, 3).T
        return begun, over, numbers

    def around(self, node: Attempt, start: int, end: int) -> list[LabelledSpan]:
        """Return the known use of [start, end) (ns) of one node outside its generations' steps;
        `paint` resolves overlaps."""
        mine = self.epochs_of(node)
        numbers = {e.number for e in mine}
        begun, over, of_epoch = self.windows
        near = np.flatnonzero((begun < end) & (over > start))
        theirs = [(int(begun[i]), int(over[i])) for i in near if int(of_epoch[i]) not in numbers]
        # A generation whose first step this node did not live to see is no part of its life.
        windows = [e.window for e in mine if e.window and e.window[0] < end and e.window[1] > start]
        if not windows:
            return before(node, start, end)
        first, last = min(w[0] for w in windows), max(w[1] for w in windows)
        layers = before(node, start, first)
        if node.agent_gone_s is not None:
            layers.append((max(last, ns(node.agent_gone_s)), end, "drained"))
        if node.gone_s is not None:
            layers.append((last, end, "drain"))
        elif not mine[-1].over and mine[-1].window:  # in the middle of its next step
            layers.append((last, end, "other"))
        layers += [(a, b, "idle") for a, b in theirs]
        return layers

    def epoch_rows(self) -> Iterable[EpochRow]:
        order = [e for _, e in sorted(self.worlds.items())]
        previous: int | None = None  # end of the last step so far
        rows: list[EpochRow] = []
        for i, e in enumerate(order):
            steps = np.union1d(e.done["step"], e.committed["step"])
            lost = len(e.lost) if e.over else 0
            gap = None if previous is None or not e.window else max(0, e.window[0] - previous)
            after = next((x for x in order[i + 1 :] if x.window), None)
            # a world without a step lies in the gap that is already counted for its predecessor
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
                    reason=e.begun.reason if e.begun else "",
                    members=tuple(e.members),
                    attempts=tuple(self.node_of[m].name for m in e.members),
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

    def why_ended(self, e: WorldTimes, after: WorldTimes | None) -> str:
        """Return the reason in words, from the facts of its members."""
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
            if n.notice != "soft" and (n.member, n.id) not in self.state.cancelled
        }
        parts: list[str] = []
        if e.orderly:
            leaving = [
                m for m in e.members if m in noticed and (after is None or m not in after.members)
            ]
            stays = after is not None and any(m in e.members for m in after.members)
            joined = [m for m in after.members if m not in e.members] if after and stays else []
            if leaving:
                parts.append(f"notice: {names_of(self.node_of[m].name for m in leaving)} left")
            if joined:
                parts.append(f"{names_of(self.node_of[m].name for m in joined)} joined")
            return ", ".join(parts) or (e.session_ended.why if e.session_ended else "resize")
        told = {left.member for _, left in e.left}
        horizon = after.started_s if after else self.now_s
        vanished = []
        for member in e.members:
            gone_s = self.node_of[member].gone_s
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
            parts.append(f"{names_of(self.node_of[m].name for m in vanished)} lost{warned}")
        if e.failures and not vanished:
            parts.append(f"rank {e.failures[0].rank} failed: {e.failures[0].error}")
        return ", ".join(parts) or (
            "failed" if "failed" in whys else "killed" if "killed" in whys else "broke"
        )

    def notice_rows(self) -> Iterable[NoticeRow]:
        """Return one row per node and kind: a second source of the same notice (a signal after the
        cloud's notice) adds nothing."""
        grouped: dict[tuple[str, str], list[tuple[float, NoticeSeen]]] = defaultdict(list)
        for t, notice in self.notices:
            grouped[notice.member, notice.notice].append((t, notice))
        for (member, kind), group in grouped.items():
            t, first = group[0]
            deadlines = [n.deadline_s for _, n in group if n.deadline_s is not None]
            mine = [self.worlds[n] for n in self.epochs_with.get(member, ())]
            current = [e for e in mine if e.started_s <= t and (e.end is None or e.end > ns(t))]
            commits = [
                (s.t_start + s.commit_s, s.step)
                for e in current
                for s in e.snapshots
                if s.t_start + s.commit_s >= t
                # a state of the time of the notice or newer: copied after it, or the world's last
                if s.t_start + s.stall_s >= t
                or (e.session_ended is not None and e.session_ended.step == s.step)
            ]
            at, step = min(commits, default=(None, None))
            yield NoticeRow(
                member=member,
                attempt=self.node_of[member].name if member in self.node_of else "",
                kind=kind,
                source=first.source,
                seen_s=t,
                deadline_s=deadlines[0] if deadlines else None,
                commit_s=None if at is None else at - t,
                step=step,
                training=bool(current),
                cancelled=all((member, n.id) in self.state.cancelled for _, n in group),
            )
