"""Attempts and epochs of a run while its ledger is put together.  Pure."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.core import columns
from harness.core.columns import NONE, Columns
from harness.core.facts import (
    AttemptEnded,
    EpochLeft,
    NodeBilled,
    NodeFound,
    SessionEnded,
    SnapshotCommitted,
    StepsTimed,
    WorkerFailed,
)
from harness.core.values import amount
from harness.views.painting import NANO, PRECEDENCE, LabelledSpan, Span, ns
from harness.views.spans import LEVEL, Ints, PaintedEpoch, painted

LARGE = 2000  # steps of an epoch that is shared out by pieces (spans.py)
# facts.EpochLeft.why of workers that left with a committed snapshot
GOOD_ENDS = ("finished", "drained", "resize", "stopped")


@dataclass
class NodeSoFar:
    """An attempt while it is put together."""

    name: str
    attempt: int
    asked_s: float
    offer: dict[str, object] = field(default_factory=dict)
    up_s: float | None = None
    ended: AttemptEnded | None = None
    members: list[str] = field(default_factory=list)
    gone_s: float | None = None
    stranger: bool = False  # no controller launched it
    agent_s: float | None = None  # when its first agent began
    agent_gone_s: float | None = None  # when its last agent had ended
    setup_s: float | None = None  # when the task's `setup` began, if that is known
    machine: str = ""  # of a stranger: the same for all agents that ran on it

    def number(self, key: str) -> float:
        return amount(self.offer.get(key))

    @classmethod
    def launched_by_others(
        cls,
        member: str,
        attempt: int,
        started_s: float | None,
        now_s: float,
        found: NodeFound | None,
        bill: NodeBilled | None,
        host: str,
    ) -> NodeSoFar:
        """The node of a member that no controller launched, as its agent, or SkyPilot, describes
        it. `started_s`: when its agent began."""
        node = cls(member, attempt, started_s or now_s, up_s=started_s, stranger=True)
        if found or bill:
            node.offer = offer_of(found or NodeFound(member), bill.usd_per_h if bill else None)
        launched_s = bill.launched_s if bill else found.launched_s if found else None
        if launched_s is not None and started_s is not None:
            node.asked_s = node.up_s = min(launched_s, started_s)
        cluster = found.cluster if found else bill.cluster if bill else ""
        node.machine = f"{cluster} {host} {node.asked_s:.0f}"
        return node

    def meet(
        self,
        began: Mapping[str, float],
        ended: Mapping[str, float],
        found: Mapping[str, NodeFound],
    ) -> None:
        """Take from what all members told what concerns the agents of this node."""
        self.members.sort(key=lambda m: (began.get(m, 0.0), m))
        gone = [ended[m] for m in self.members if m in ended]
        setup = (found[m].setup_s for m in self.members if m in found)
        self.agent_s = min((began[m] for m in self.members if m in began), default=None)
        self.agent_gone_s = max(gone) if len(gone) == len(self.members) > 0 else None
        self.setup_s = min((s for s in setup if s is not None), default=None)

    def before(self, start: int, first: int) -> list[LabelledSpan]:
        """What [start, first) was paid for: until its first step, or all its life if it made
        none."""
        if self.agent_s is None and self.members:
            return [(start, first, "start")]  # its agent died before it had told of itself
        agent = first if self.agent_s is None else ns(self.agent_s)
        setup = agent if self.setup_s is None else min(agent, max(start, ns(self.setup_s)))
        gone = first if self.agent_gone_s is None else ns(self.agent_gone_s)
        return [
            (start, setup, "provision"),
            (setup, agent, "setup"),
            (agent, min(first, gone), "start"),
            (gone, first, "drained"),
        ]


def part_machines(strangers: Iterable[NodeSoFar]) -> None:
    """Agents that followed each other on one machine share its bill, and do not each pay it: until
    the next one began it is the one's before."""
    machines: dict[str, list[tuple[float, NodeSoFar]]] = defaultdict(list)
    for node in strangers:
        if node.agent_s is not None and node.asked_s < node.agent_s:
            machines[node.machine].append((node.agent_s, node))
    for shared in machines.values():
        shared.sort(key=lambda at: at[0])
        for (_, one), (next_s, after) in itertools.pairwise(shared):
            one.gone_s, after.asked_s, after.up_s = next_s, next_s, next_s


def offer_of(found: NodeFound, usd_per_h: float | None) -> dict[str, object]:
    """What a node's agent found out, in the shape of an offer. `usd_per_h`: where the agent knows
    no price."""
    parts = (found.cloud, found.region, found.zone, found.instance_type or found.accelerators)
    name = "/".join(part for part in parts if part)
    return {
        "name": f"{name}/on-demand" if name and found.spot is False else name,
        "accelerator": found.accelerators.partition(":")[0],
        "place": "/".join(part for part in (found.cloud, found.region) if part),
        "spot": found.spot is not False,
        "usd_per_h": usd_per_h if found.usd_per_h is None else found.usd_per_h,
        "on_demand_usd_per_h": found.on_demand_usd_per_h,
    }


@dataclass
class Pauses:
    """When a world stood still: for snapshots; and in its steps, most of it for its slowest
    rank."""

    stalls: list[Span] = field(default_factory=list)
    timed: list[StepsTimed] = field(default_factory=list)

    def waits(self, rows: Columns) -> tuple[Ints, Ints]:
        """The end of each step in which the typical rank (the median of them) had done its part
        and waited for the slowest one. What was told last stands until it is told again: an
        archive keeps some of it only."""
        starts, ends = step_spans(rows)
        told = sorted((t for t in self.timed if len(t.own_s) == 3), key=lambda t: t.first)
        waits = [ns(max(0.0, amount(t.own_s[2]) - amount(t.own_s[1]))) for t in told]
        at = np.searchsorted(np.array([t.first for t in told], np.int64), rows["step"], "right")
        waited = np.array([0, *waits], np.int64)[at]
        return np.maximum(starts, ends - waited), ends


@dataclass
class EpochSoFar:
    number: int
    started_s: float
    reason: str = ""
    members: list[str] = field(default_factory=list)
    world: int = 0
    shares: tuple[int, ...] = ()
    resumed_step: int = 0
    session_s: float | None = None  # workers were ready to train
    session_ended: SessionEnded | None = None
    left: list[tuple[float, EpochLeft]] = field(default_factory=list)
    failures: list[WorkerFailed] = field(default_factory=list)
    done: Columns = field(default_factory=lambda: NONE)  # as told live
    committed: Columns = field(default_factory=lambda: NONE)  # by the records
    pauses: Pauses = field(default_factory=lambda: Pauses())
    end: int | None = None  # None: it is not over

    @property
    def over(self) -> bool:
        return self.end is not None

    @functools.cached_property
    def window(self) -> Span | None:
        """From the begin of its first step to the end of its last."""
        spans = [step_spans(rows) for rows in (self.done, self.committed) if len(rows)]
        if not spans:
            return None
        return min(int(a.min()) for a, _ in spans), max(int(b.max()) for _, b in spans)

    @functools.cached_property
    def lost(self) -> Columns:
        """Steps that were done and are not committed."""
        return columns.without(self.done, self.committed)

    @property
    def orderly(self) -> bool:
        """It ended with a committed snapshot."""
        return self.session_ended is not None or any(left.why in GOOD_ENDS for _, left in self.left)

    @functools.cached_property
    def world_time(self) -> PaintedEpoch:
        """What its members did, by bucket. Steps after the newest snapshot of a world that lives
        are useful so far. Only when all is known of it."""
        layers = [(a, b, LEVEL["snapshot"]) for a, b in self.pauses.stalls]
        if self.window:
            layers.append((*self.window, LEVEL["other"]))
        if self.over and self.end is not None and not self.orderly:
            # It was working when it broke; what it did since its last known step is lost, told to
            # the bucket or not.
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
        parts += [(*self.pauses.waits(rows), LEVEL["straggle"]) for rows in counted]
        return PaintedEpoch(
            painted(
                np.concatenate([starts, *(a for a, _, _ in parts)]),
                np.concatenate([ends, *(b for _, b, _ in parts)]),
                np.concatenate([levels, *(np.full(len(a), level) for a, _, level in parts)]),
            ),
            cut_at=self.window[1] if self.window else None,
        )

    @property
    def large(self) -> bool:
        return len(self.done) + len(self.committed) > LARGE

    def layers(self) -> list[LabelledSpan]:
        """`world_time` as segments."""
        spans = self.world_time.spans
        found = zip(spans.starts.tolist(), spans.ends.tolist(), spans.levels.tolist(), strict=True)
        return [(a, b, PRECEDENCE[level]) for a, b, level in found]


def step_spans(rows: Columns) -> tuple[Ints, Ints]:
    """When each step was done, in nanoseconds."""
    starts = np.rint(rows["start"] * NANO).astype(np.int64)
    return starts, np.rint(rows["end"] * NANO).astype(np.int64)


def cut_by_epoch(rows: Columns) -> dict[int, Columns]:
    """`rows`, in the order of their epochs, cut at each."""
    if not len(rows):
        return {}
    cuts = np.flatnonzero(rows["epoch"][1:] != rows["epoch"][:-1]) + 1
    return {int(part["epoch"][0]): part for part in np.split(rows, cuts)}


def names_of(names: Iterable[str]) -> str:
    """`node 1` or `nodes 1, 2`."""
    found = list(names)
    return f"node{'s' if len(found) > 1 else ''} {', '.join(found)}"


def told_in_snapshots(
    told: Columns, snapshots_of: Mapping[int, Sequence[SnapshotCommitted]]
) -> dict[int, Columns]:
    """By epoch, of a run without records (a loop that only has safe points): a step that was told
    counts if a snapshot of its epoch holds it, and no later epoch has done it again."""
    found: dict[int, Columns] = {}
    counted = np.empty(0, told["step"].dtype)
    for number in sorted(snapshots_of, reverse=True):
        last = max((f.step for f in snapshots_of[number]), default=0)
        rows = told[(told["epoch"] == number) & (told["step"] <= last)]
        rows = rows[~np.isin(rows["step"], counted)]
        counted = np.concatenate([counted, rows["step"]])
        if len(rows):
            found[number] = rows
    return found
