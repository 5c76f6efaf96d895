"""A spot market as a schedule: when capacity comes and goes, and which nodes are preempted. It
drives the local cloud.

Apart from `RunProgress` it is pure: given the time and the run's progress, it returns the events
that are due. `provider.py` carries them out. The same spec and node range always give the same
market.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeAlias

from harness.bucket.layout import FACTS
from harness.core.facts import SessionStarted, StepDone
from harness.core.facts import parse as parse_fact
from harness.core.input_files import read_trace
from harness.core.world import BadInput, Offer
from storage.errors import NotFound
from storage.snapshots.snapshot_keys import MANIFESTS, refs_in
from storage.stores.objects import ObjectStore

TRACE_FITS_S = 180.0  # a trace without a scale is compressed to this length
# grace period of nodes that a trace takes; not scaled with the trace, so that a drain stays
# possible
TRACE_GRACE_S = 5.0
RANDOM_HORIZON_S = 1800.0  # a random market has no events after this
NAMED = ("", "demo", "calm", "once")  # specs that are names; "" is the demo
DEMO_GAP_S = 3.0  # least time between two events of the demo, however fast the run is

# Invented prices, so that the ledger of a local run has something to add up. Nothing is charged.
OFFERS = (
    Offer(0.40, "local/a", accelerator="cpu", on_demand_usd_per_h=1.20),
    Offer(0.45, "local/b", accelerator="cpu", on_demand_usd_per_h=1.20),
    Offer(0.52, "local/c", accelerator="cpu", on_demand_usd_per_h=1.30),
)


# ---- events --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Capacity:
    """A change of capacity to `nodes` from now on. Nodes above that get a preemption notice with a
    grace period of `grace_s` seconds and are then killed."""

    nodes: int
    grace_s: float = TRACE_GRACE_S


@dataclass(frozen=True)
class Preempt:
    """The preemption of one node: it gets a notice and is killed after `grace_s` seconds. Capacity
    drops by one immediately."""

    grace_s: float
    victim: int = 0  # index among the nodes that are up, oldest first; -1: the newest


@dataclass(frozen=True)
class Kill:
    """The loss of one node without a notice; capacity drops by one."""

    victim: int = 0


@dataclass(frozen=True)
class Outage:
    """The loss of all nodes without a notice. There is no capacity for `seconds`; then capacity is
    what it was before."""

    seconds: float


MarketEvent: TypeAlias = Capacity | Preempt | Kill | Outage


@dataclass(frozen=True)
class Entry:
    """One entry of the schedule. It is due at a time, at a progress (fraction of all steps), or a
    number of seconds after another entry fired."""

    event: MarketEvent
    at_s: float | None = None
    at_progress: float | None = None
    # index of an earlier entry; `at_s` then counts from when that one fired
    after: int | None = None


@dataclass(frozen=True)
class MarketState:
    """The state of a market: what has happened so far. It is a value, so that it can be saved and
    restored."""

    capacity: int
    fired: tuple[tuple[int, float], ...] = ()  # (index of the entry, seconds of market time)
    outage_until_s: float = 0.0

    def available(self, now_s: float) -> int:
        return 0 if now_s < self.outage_until_s else self.capacity

    def to_json(self) -> dict[str, Any]:
        return {
            "capacity": self.capacity,
            "fired": [list(f) for f in self.fired],
            "outage_until_s": self.outage_until_s,
        }

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> MarketState:
        return cls(
            int(body["capacity"]),
            tuple((int(i), float(t)) for i, t in body["fired"]),
            float(body["outage_until_s"]),
        )


@dataclass(frozen=True)
class Market:
    spec: str
    max_nodes: int
    capacity: int  # at the beginning
    entries: tuple[Entry, ...] = ()
    gap_s: float = 0.0  # least time between two entries that are due by progress
    offers: tuple[Offer, ...] = OFFERS

    def start(self) -> MarketState:
        return MarketState(self.capacity)

    @property
    def needs_progress(self) -> bool:
        return any(e.at_progress is not None for e in self.entries)

    def due(
        self, now_s: float, progress: float, state: MarketState
    ) -> tuple[list[MarketEvent], MarketState]:
        """Return the events that are due now, in order, and the state after them. Each entry fires
        once, even if progress goes back.

        `now_s` counts from the market's beginning; `progress` is the fraction of all steps that is
        done.
        """
        events: list[MarketEvent] = []
        fired = dict(state.fired)
        for number, entry in enumerate(self.entries):
            if number in fired or not self._is_due(entry, now_s, progress, fired):
                continue
            fired[number] = now_s
            events.append(entry.event)
            state = state_after(state, entry.event, now_s)
        return events, replace(state, fired=tuple(sorted(fired.items())))

    def _is_due(self, entry: Entry, now_s: float, progress: float, fired: dict[int, float]) -> bool:
        if entry.after is not None:
            return entry.after in fired and now_s >= fired[entry.after] + (entry.at_s or 0.0)
        if entry.at_progress is None:
            return now_s >= (entry.at_s or 0.0)
        acts = [t for number, t in fired.items() if self.entries[number].at_progress is not None]
        return progress >= entry.at_progress and (not acts or now_s >= max(acts) + self.gap_s)


def state_after(state: MarketState, event: MarketEvent, now_s: float) -> MarketState:
    match event:
        case Capacity(nodes=nodes):
            return replace(state, capacity=nodes)
        case Preempt() | Kill():
            return replace(state, capacity=max(0, state.capacity - 1))
        case Outage(seconds=seconds):
            return replace(state, outage_until_s=max(state.outage_until_s, now_s + seconds))


# ---- specs ---------------------------------------------------------------------------------------
def parse(
    spec: str,
    *,
    max_nodes: int,
    min_nodes: int = 1,
    read: Callable[[str], str] = read_trace,
) -> Market:
    """Return the market of a spec: `demo`, `calm`, `once`, `seed:7`, or a trace file (`path`;
    `path@60` is 60 times faster than recorded). `read` reads a trace file; what it raises is passed
    on. Raises BadInput."""
    if not 1 <= min_nodes <= max_nodes:
        raise BadInput(
            f"market {spec!r}: wanted 1 <= min nodes <= max nodes, found {min_nodes}..{max_nodes}"
        )
    if spec in ("", "demo"):
        return _demo(min_nodes, max_nodes)
    if spec == "calm":
        return Market("calm", max_nodes, max_nodes)
    if spec == "once":
        return _once(max_nodes)
    if spec.startswith("seed:"):
        number = spec.removeprefix("seed:")
        if not number.isdigit():
            raise BadInput(
                f"market {spec!r}: wanted seed:<whole number>, such as seed:7; found {number!r}"
            )
        return _random(int(number), max_nodes)
    path, at, scale = spec.rpartition("@")
    if not at or "/" in scale:
        path, scale = spec, ""
    try:
        faster = float(scale) if scale else None
    except ValueError:
        raise BadInput(
            f"market {spec!r}: wanted PATH@SPEED with a number such as @60, found @{scale}"
        ) from None
    if faster is not None and not (faster > 0 and math.isfinite(faster)):
        raise BadInput(f"market {spec!r}: the speed after @ must be above 0, found {scale}")
    return from_trace(read(path), spec=spec, max_nodes=max_nodes, faster=faster)


def _demo(low: int, high: int) -> Market:
    """Return the demo market: each kind of event once, due by progress: late capacity, a
    preemption notice, a kill without notice, a total outage."""
    # never fewer than the run needs, or progress, and with it the schedule, would stop forever
    few = max(low, high - 1, 1)
    entries = [
        Entry(Capacity(high), at_progress=0.15),
        Entry(Preempt(8.0, victim=0), at_progress=0.35),
        Entry(Kill(victim=-1), at_progress=0.50),
        Entry(Capacity(high), after=2, at_s=6.0),
        Entry(Outage(6.0), at_progress=0.70),
        Entry(Capacity(high), after=4, at_s=6.0),
    ]
    if high - 1 < low:
        entries.append(Entry(Capacity(high), after=1, at_s=8.0 + 4.0))
    return Market("demo", high, few, tuple(entries), gap_s=DEMO_GAP_S)


def _once(high: int) -> Market:
    """Return a market that is calm but for one preemption, early in the run: a notice to the oldest
    node, and another node some seconds after that one is gone."""
    entries = (Entry(Preempt(8.0), at_progress=0.1), Entry(Capacity(high), after=0, at_s=12.0))
    return Market("once", high, high, entries)


def _random(seed: int, high: int) -> Market:
    """Return a market with losses at random times. Capacity returns within some 20 s of each."""
    rng = random.Random(f"market {seed}")
    entries: list[Entry] = []
    capacity = rng.randint(1, high)
    if capacity < high:
        entries.append(Entry(Capacity(high), at_s=rng.uniform(4.0, 12.0)))
    now = 0.0
    while (now := now + 6.0 + rng.expovariate(1 / 18.0)) < RANDOM_HORIZON_S:
        victim, dice = rng.randrange(high), rng.random()
        if dice < 0.5:
            grace = rng.uniform(3.0, 10.0)
            entries += [Entry(Preempt(grace, victim), at_s=now)]
            entries += [Entry(Capacity(high), at_s=now + grace + rng.uniform(2.0, 8.0))]
        elif dice < 0.85:
            entries += [
                Entry(Kill(victim), at_s=now),
                Entry(Capacity(high), at_s=now + rng.uniform(3.0, 12.0)),
            ]
        else:
            entries += [
                Entry(Outage(rng.uniform(3.0, 8.0)), at_s=now),
                Entry(Capacity(high), at_s=now + 8.0),
            ]
    return Market(
        f"seed:{seed}", high, capacity, tuple(sorted(entries, key=lambda e: e.at_s or 0.0))
    )


def from_trace(text: str, *, spec: str, max_nodes: int, faster: float | None = None) -> Market:
    """Return the market that a trace recorded. Node counts are scaled so that the trace's peak is
    `max_nodes`; after its end capacity is full. `faster`: speed-up; `None` picks one that fits the
    trace into TRACE_FITS_S. Raises BadInput."""
    points = _points(text, spec)
    first = points[0][0]
    points = [(t - first, n) for t, n in points]
    peak = max(n for _, n in points)
    if peak <= 0:
        raise BadInput(f"market {spec!r}: the trace never has a node; choose another trace")
    length = points[-1][0]
    faster = faster or max(1.0, length / TRACE_FITS_S)
    counts: dict[float, int] = {}
    for t, n in points:  # of several rows at one time, the last one counts
        counts[t / faster] = min(max_nodes, math.ceil(max_nodes * n / peak)) if n > 0 else 0
    entries, now = [], counts.pop(0.0)
    begin = now
    for t, n in sorted(counts.items()):
        if n != now:
            entries.append(Entry(Capacity(n), at_s=t))
            now = n
    if now != max_nodes:
        entries.append(Entry(Capacity(max_nodes), at_s=length / faster + 1.0))
    return Market(spec, max_nodes, begin, tuple(entries))


def _points(text: str, spec: str) -> list[tuple[float, int]]:
    """Return the (seconds, nodes) rows of a trace. Its format is recognized by its content. Raises
    BadInput."""
    lines = [
        line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")
    ]
    wanted = (
        "wanted rows of `ms,add|remove,node` (Bamboo, Parcae), `time,count`, `date, time, count`, "
        'or JSON lines `[ms, "add"|"remove", {"nodes": [...]}]`'
    )
    if not lines:
        raise BadInput(f"market {spec!r}: the trace is empty; {wanted}")
    reader = _json_rows if lines[0].startswith("[") else _csv_rows
    try:
        return reader(lines)
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as e:
        raise BadInput(
            f"market {spec!r}: not a trace that we can read ({e!s:.300}); {wanted}"
        ) from e


def _json_rows(lines: Sequence[str]) -> list[tuple[float, int]]:
    rows = (
        json.loads("\n".join(lines))
        if lines[0] == "[" or lines[0].startswith("[[")
        else [json.loads(line) for line in lines]
    )
    return _changes((float(row[0]), row[1], row[2]["nodes"]) for row in rows)


def _csv_rows(lines: Sequence[str]) -> list[tuple[float, int]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    if not rows[0][0][:1].isdigit():
        rows = rows[1:]  # the first row is a heading
    if len(rows[0]) == 2:
        times, scale = [float(t) for t, _ in rows], _seconds_per_unit([t for t, _ in rows])
        return sorted(
            ((t * scale, int(n)) for t, (_, n) in zip(times, rows, strict=True)),
            key=lambda point: point[0],
        )
    if len(rows[0]) == 3 and "-" in rows[0][0]:
        dated = (
            (datetime.fromisoformat(f"{day}T{clock}+00:00").timestamp(), int(n))
            for day, clock, n in rows
        )
        return sorted(dated, key=lambda point: point[0])
    if len(rows[0]) == 3:
        return _changes((float(t), what, [node]) for t, what, node in rows)
    raise ValueError(f"row {','.join(rows[0])!r} has {len(rows[0])} columns")


def _seconds_per_unit(times: Sequence[str]) -> float:
    """Return the time unit of a count trace in seconds. Published traces are in hours (fractions),
    in milliseconds (whole minutes) or in seconds."""
    if any("." in t for t in times):
        return 3600.0
    return 0.001 if all(int(t) % 60_000 == 0 for t in times) and int(times[-1]) > 0 else 1.0


def _changes(rows: Iterable[tuple[float, str, Sequence[str]]]) -> list[tuple[float, int]]:
    nodes: set[str] = set()
    points: list[tuple[float, int]] = []
    for t, what, names in rows:
        if what == "add":
            nodes |= set(names)
        elif what == "remove":
            nodes -= set(names)
        elif what not in ("no-op", "migration"):  # Parcae also records what its scheduler did
            raise ValueError(f"{what!r} is neither add nor remove")
        points.append((t / 1000.0, len(nodes)))
    return sorted(points, key=lambda point: point[0])


# ---- progress ------------------------------------------------------------------------------------
class RunProgress:
    """The progress of a run, read from its bucket: the newest reported step or the newest
    committed snapshot, as a fraction of all steps.

    Segments of facts are written once, so each is read once; a poll costs two listings and the new
    segments.
    """

    def __init__(self, store: ObjectStore):
        self._store = store
        self._read: set[str] = set()
        self._newest: tuple[float, int] = (0.0, 0)  # (seconds since 1970, step)
        self._total = 0

    def poll(self) -> float:
        for key in self._store.list(f"{FACTS}worker-"):
            if key not in self._read:
                self._take(key)
        if not self._total:
            return 0.0
        committed = (ref.step for ref in refs_in(self._store.list(MANIFESTS)))
        return min(1.0, max([self._newest[1], *committed]) / self._total)

    def _take(self, key: str) -> None:
        try:
            lines = self._store.get(key).decode().splitlines()
        except NotFound:
            return  # pruned since it was listed
        self._read.add(key)
        for line in lines:
            try:
                body = json.loads(line)
                fact = parse_fact(body)
            except (ValueError, TypeError, AttributeError):
                continue  # malformed facts are for the audit to report; the market goes on
            if isinstance(fact, StepDone):
                self._newest = max(self._newest, (float(body["t"]), fact.step))
            elif isinstance(fact, SessionStarted):
                self._total = fact.total_steps
