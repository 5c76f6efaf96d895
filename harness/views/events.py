"""What happens at one moment of a run, as rows of numbers: notices, losses, recoveries, and what a
node's hardware did in the minute before.

Knows facts and rows of the ledger. Pure.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from harness.core import facts as f
from harness.core.facts import Stamped
from harness.core.values import digest
from harness.views.rows import BAD_ENDS, EpochRow

MOST_HEARD = 128  # writers of which it is remembered how far they are told
OLD_S = 90.0  # what was measured so long before, and three times as long as it took, is not now
BY_NAME = re.compile(r"m0*(\d{1,9})-")  # members are named by their attempt
READING = re.compile(r"(?:gpu\d{1,3}/)?[a-z_]{1,40}(?:/[a-z_]{1,40})?")  # "gpu0/watts"
RECOVERED = "recovered"  # in the place of a writer: the ledger tells it


@dataclass(frozen=True)
class RunEvent:
    """`by`: the writer, in short. `place`: among what it tells; it grows. `step`: that a side job
    measured; 0: it is of no step."""

    by: str
    t: float
    values: dict[str, float]
    place: float
    step: int = 0


@dataclass(frozen=True)
class ToldSoFar:
    """How far events_of are told: the place, by writer. Of a writer that is not named what is
    older than `floor_s` is told, or will not be."""

    by: Mapping[str, float]
    floor_s: float = 0.0

    def misses(self, one: RunEvent) -> bool:
        return one.place > self.by.get(one.by, 0.0 if one.by == RECOVERED else self.floor_s)

    def after(self, told: Iterable[RunEvent]) -> ToldSoFar:
        """When these are told as well. The oldest are forgotten."""
        by, floor_s = dict(self.by), self.floor_s
        for one in told:
            by[one.by] = max(one.place, by.get(one.by, 0.0))
        writers = sorted(by.keys() - {RECOVERED}, key=lambda name: by[name])
        for name in writers[: max(0, len(writers) - MOST_HEARD)]:
            floor_s = max(floor_s, by.pop(name))
        return ToldSoFar(by, floor_s)


def events_of(
    facts: Sequence[Stamped], measured: Sequence[Stamped], epochs: Sequence[EpochRow]
) -> list[RunEvent]:
    """All that is known of, by time. `measured`: facts of that kind."""
    nodes, slots = nodes_of(facts), slots_of(facts)
    found: list[RunEvent] = []
    side_jobs = set[tuple[str, int, int]]()
    for s in facts:
        if values := _event(s.fact, nodes):
            found.append(RunEvent(_short(s.writer), s.t, values, s.t))
        elif isinstance(s.fact, f.Validated) and s.fact.by and s.fact.step > 0:
            one = (s.fact.by, s.fact.epoch, s.fact.step)
            if one not in side_jobs:
                values = {"train/step": s.fact.step, **s.fact.metrics}
                found.append(RunEvent(_short(s.writer), s.t, values, s.t, s.fact.step))
            side_jobs.add(one)
    for s in measured:
        if values := _readings(s.fact, nodes, slots):
            found.append(RunEvent(_short(s.writer), s.t, values, s.t))
    for epoch in epochs:
        if epoch.gap_s is not None and epoch.first_s is not None:
            values = {"event/recovered_s": epoch.gap_s}
            found.append(RunEvent(RECOVERED, epoch.first_s, values, epoch.epoch))
    return sorted(found, key=lambda one: one.t)


@functools.lru_cache(maxsize=10_000)
def _short(writer: str) -> str:
    return digest(writer.encode())[:8]


def _event(fact: f.Fact, nodes: Mapping[str, int]) -> dict[str, float]:
    """A node is shown by its number, so that a chart of events has a line for each."""
    match fact:
        case f.AttemptUp(attempt):
            return {"event/node_up": attempt}
        case f.AttemptEnded(attempt, end) as ended if ended.up_s is not None:
            return {"event/node_lost" if end in BAD_ENDS else "event/node_gone": attempt}
        case f.NoticeSeen(member):
            return {"event/notice": nodes.get(member, 0)}
        case f.WorkerFailed(member):
            return {"event/worker_failed": nodes.get(member, 0)}
        case f.WorkerHung(member) as hung if hung.guilty:
            return {"event/worker_hung": nodes.get(member, 0)}
        case f.EpochStarted() as epoch:
            return {"event/world": epoch.world}
        case f.SnapshotQuarantined(step):
            return {"event/quarantined_step": step}
        case f.GuardTripped(step):
            return {"event/guard_step": step}
    return {}


# ---- nodes ---------------------------------------------------------------------------------------
def nodes_of(facts: Iterable[Stamped]) -> dict[str, int]:
    """The attempt of each member; 0: nobody of ours launched it."""
    found: dict[str, int] = {}
    for s in facts:
        match s.fact:
            case f.AgentStarted(member, attempt):
                found[member] = attempt
            case f.NoticeSeen(member) | f.WorkerFailed(member) | f.WorkerHung(member):
                if member not in found and (named := BY_NAME.match(member)):
                    found[member] = int(named[1])
    return found


def slots_of(facts: Iterable[Stamped]) -> dict[str, int]:
    """A number from 1 on for each member: the lowest that no living node has. So a run of hundreds
    of nodes, a few at once, has a few lines in a chart."""
    slots: dict[str, int] = {}
    held: dict[str, int] = {}  # by node: its attempt, or its member
    for s in facts:
        match s.fact:
            case f.AgentStarted(member, attempt):
                node = str(attempt or member)
                free = next(n for n in range(1, len(held) + 2) if n not in held.values())
                slots[member] = held.setdefault(node, free)
            case f.AgentEnded(member) if slots.get(member) in held.values():
                held = {node: slot for node, slot in held.items() if slot != slots[member]}
            case f.AttemptEnded(attempt):
                held.pop(str(attempt), None)
    return slots


def _readings(fact: f.Fact, nodes: Mapping[str, int], slots: Mapping[str, int]) -> dict[str, float]:
    assert isinstance(fact, f.NodeMeasured)
    if (slot := slots.get(fact.member)) is None:
        return {}
    readings = {f"node/{slot}/{name}": value for name, value in _good(fact)}
    return {f"node/{slot}/number": nodes.get(fact.member, 0), **readings} if readings else {}


def _gone(facts: Iterable[Stamped]) -> set[str]:
    gone: set[str] = set()
    of_attempt: dict[int, list[str]] = {}
    for s in facts:
        match s.fact:
            case f.AgentStarted(member, attempt) if attempt:
                of_attempt.setdefault(attempt, []).append(member)
            case f.AgentEnded(member):
                gone.add(member)
            case f.AttemptEnded(attempt):
                gone.update(of_attempt.get(attempt, ()))
    return gone


def _good(fact: f.NodeMeasured) -> list[tuple[str, float]]:
    """Names become those of charts, so what is not like ours is left out."""
    return [
        (name, value)
        for name, value in fact.metrics.items()
        if READING.fullmatch(name) and math.isfinite(value)
    ]


def hardware(measured: Iterable[Stamped], facts: Iterable[Stamped], t: float) -> dict[str, float]:
    """All nodes that live at `t` and have said something lately, together. `facts`: until then."""
    newest: dict[str, f.NodeMeasured] = {}
    for s in measured:
        if isinstance(s.fact, f.NodeMeasured) and s.t <= t:
            newest[s.fact.member] = s.fact
            if t - s.t > max(OLD_S, 3 * s.fact.seconds):
                del newest[s.fact.member]
    for member in _gone(facts):
        newest.pop(member, None)
    values: dict[str, list[float]] = {}
    for fact in newest.values():
        for name, value in _good(fact):
            values.setdefault(re.sub(r"^gpu\d+/", "gpu_", name), []).append(value)
    found: dict[str, float] = {}
    for name, each in values.items():
        flat = name.replace("/", "_")
        if name == "gpu_watts" or name.endswith("_per_s"):
            found[f"hardware/{flat}"] = sum(each)
            continue
        found |= {f"hardware/{flat}": fmean(each), f"hardware/{flat}_max": max(each)}
        if name == "gpu_percent":
            found["hardware/gpu_percent_min"] = min(each)  # who is idle while others work
    return found
