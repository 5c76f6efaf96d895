"""Recorded markets: how many nodes could be had in each zone, tick by tick, and at what price.

Reads the public formats. Which is which is seen from the content; what cannot be seen (does 1 mean
"available" or "preempted"? which zone is it?) is said by the caller, and what looks wrong is
refused.

    {"metadata": {"gap_seconds": 600}, "data": [1, 1, 0, ...]}    nodes that could be had, each tick
    480000,add,node1                       milliseconds, add or remove, a node
    [60000, "add", {"nodes": [...]}]       the same as a JSON array in each line
    2021-12-11, 11:11:30, 55               a date, a time, nodes
    0.030,9                                hours, nodes from then on
    zone,seconds,available,usd_per_h       a table with a header; prices may be left out

Pure: takes text, not files.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from harness.core.world import BadInput

Counts: TypeAlias = NDArray[np.int64]
Prices: TypeAlias = NDArray[np.float64]

MOST_TICKS = 5_000_000
MOST_NODES = 1_000_000
LEAST_TICK_S, MOST_TICK_S = 1.0, 86_400.0
USUAL_TICK_S = 60.0  # of a log of events, which has none


@dataclass(frozen=True)
class ZoneTrace:
    """One zone. `nodes`: how many could be had at once in each tick, int64 (n,). `usd_per_h`: of
    one, float64 (n,); None: the trace has no prices. `start_s`: seconds since 1970; 0: not
    known."""

    zone: str
    tick_s: float
    nodes: Counts
    usd_per_h: Prices | None = None
    start_s: float = 0.0

    @property
    def hours(self) -> float:
        return len(self.nodes) * self.tick_s / 3600

    @property
    def availability(self) -> float:
        """Share of time in which at least one node could be had."""
        return float((self.nodes > 0).mean())


@dataclass(frozen=True)
class TraceAsked:
    """What a caller says of a trace. `polarity`: of numbers 0 and 1, "available" (1: a node can be
    had) or "preempted" (1: none can); "": as the trace itself says, else "available". `zone`: its
    name; "": the file's. `tick_s`: of logs of events."""

    polarity: str = ""
    zone: str = ""
    tick_s: float = USUAL_TICK_S


def read(text: str, name: str, asked: TraceAsked | None = None) -> list[ZoneTrace]:
    """All zones of one file. `name`: of the file, for messages and as a zone's name. Raises
    BadInput."""
    asked = asked or TraceAsked()
    if asked.polarity not in ("", "available", "preempted"):
        raise BadInput(f"polarity {asked.polarity!r}: wanted available or preempted")
    zone = asked.zone or name.rpartition("/")[2].partition(".")[0]
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if not first:
        raise BadInput(f"{name}: wanted a trace, found an empty file")
    for fits, reader in READERS:
        if fits(first):
            found = reader(text, name, zone, asked)
            break
    else:
        raise BadInput(
            f"{name}: wanted a trace in one of the formats of docs/POLICIES.md, found a first line "
            f"that is none of them: {first[:80]!r}"
        )
    for one in found:
        check(one, name)
    return found


# ---- one format each -----------------------------------------------------------------------------
def _counts(text: str, name: str, zone: str, asked: TraceAsked) -> list[ZoneTrace]:
    """{"metadata": {"gap_seconds": ...}, "data": [...]}"""
    try:
        body = json.loads(text)
        data, metadata = body["data"], body.get("metadata", {})
        tick_s = float(metadata["gap_seconds"])
    except (ValueError, KeyError, TypeError) as e:
        raise BadInput(
            f'{name}: wanted {{"metadata": {{"gap_seconds": SECONDS}}, "data": [...]}}, found '
            f"something else ({type(e).__name__}: {e})"
        ) from e
    prices: Prices | None = None
    if data and isinstance(data[0], dict):  # availability and price, tick by tick
        prices = _numbers([one.get("price", one.get("usd_per_h")) for one in data], name, "prices")
        data = [one.get("available", one.get("availability")) for one in data]
    elif "prices" in body:
        prices = _numbers(body["prices"], name, "prices")
    nodes = _numbers(data, name, "data")
    said = str(metadata.get("polarity", ""))
    polarity = asked.polarity or said or "available"
    if asked.polarity and said and asked.polarity != said:
        raise BadInput(
            f"{name}: it says that its polarity is {said!r}, and you say {asked.polarity!r}; leave "
            "--polarity out, or mend the file"
        )
    if polarity == "preempted":
        if nodes.max(initial=0) > 1:
            raise BadInput(
                f"{name}: polarity 'preempted' is of numbers 0 and 1, found {int(nodes.max())}; "
                "these are counts of nodes: --polarity available"
            )
        nodes = 1 - nodes
    start_s = _moment(metadata.get("start_time", metadata.get("start", 0)))
    zone = asked.zone or str(metadata.get("zone", "")) or zone
    return [ZoneTrace(zone, tick_s, _whole(nodes, name), prices, start_s)]


def _events(text: str, name: str, zone: str, asked: TraceAsked) -> list[ZoneTrace]:
    """ms,add|remove,node"""
    changes: list[tuple[float, str, str]] = []
    for number, row in enumerate(csv.reader(io.StringIO(text)), 1):
        if not row:
            continue
        if len(row) != 3 or row[1].strip() not in ("add", "remove"):
            raise BadInput(
                f"{name}, line {number}: wanted 'ms,add|remove,node', found {','.join(row)!r:.80}"
            )
        changes.append((_number(row[0], name, number) / 1e3, row[1].strip(), row[2].strip()))
    return [_of_changes(changes, name, zone, asked.tick_s)]


def _json_lines(text: str, name: str, zone: str, asked: TraceAsked) -> list[ZoneTrace]:
    """[ms, "add" | "remove" | "no-op", {"nodes": [...]}]"""
    changes: list[tuple[float, str, str]] = []
    end_s = 0.0
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        try:
            ms, what, more = json.loads(line)
            at_s = float(ms) / 1e3
            nodes = [str(node) for node in more.get("nodes", [])]
            end_s = at_s + float(more.get("duration", 0)) / 1e3
        except (ValueError, TypeError, AttributeError) as e:
            raise BadInput(
                f'{name}, line {number}: wanted [ms, "add", {{"nodes": [...]}}], found '
                f"{line[:80]!r} ({e})"
            ) from e
        if what not in ("add", "remove", "no-op"):
            raise BadInput(f"{name}, line {number}: wanted add, remove or no-op, found {what!r}")
        changes += [(at_s, what, node) for node in nodes if what != "no-op"]
    return [_of_changes(changes, name, zone, asked.tick_s, end_s)]


def _of_changes(
    changes: list[tuple[float, str, str]], name: str, zone: str, tick_s: float, end_s: float = 0.0
) -> ZoneTrace:
    there: set[str] = set()
    levels: list[tuple[float, float]] = []
    last_s = -math.inf
    for at_s, what, node in changes:
        if at_s < last_s:
            raise BadInput(
                f"{name}: wanted times that never go back, found {at_s:g} s after {last_s:g} s"
            )
        last_s = at_s
        if (what == "add") == (node in there):
            raise BadInput(
                f"{name}: at {at_s:g} s {node!r} is {'added' if what == 'add' else 'removed'}, and "
                f"it was {'there already' if what == 'add' else 'not there'}; is it the log of "
                "another zone, or of several?"
            )
        (there.add if what == "add" else there.discard)(node)
        levels.append((at_s, float(len(there))))
    return _of_levels(levels, name, zone, tick_s, end_s)


def _clocked(text: str, name: str, zone: str, asked: TraceAsked) -> list[ZoneTrace]:
    """2021-12-11, 11:11:30, 55"""
    levels: list[tuple[float, float]] = []
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        parts = [part.strip() for part in line.split(",")]
        try:
            day, time, count = parts
            at_s = _moment(f"{day}T{time}")
        except ValueError as e:
            raise BadInput(
                f"{name}, line {number}: wanted 'date, time, nodes', found {line[:80]!r}"
            ) from e
        # such logs are written by people's scripts, whose clocks step back by a minute now and then
        levels.append((at_s, _number(count, name, number)))
    levels.sort(key=lambda level: level[0])
    return [_of_levels(levels, name, zone, asked.tick_s)]


def _curve(text: str, name: str, zone: str, asked: TraceAsked) -> list[ZoneTrace]:
    """hours,nodes"""
    levels = [
        (_number(row[0], name, number) * 3600, _number(row[1], name, number))
        for number, row in enumerate(csv.reader(io.StringIO(text)), 1)
        if len(row) == 2
    ]
    return [_of_levels(levels, name, zone, asked.tick_s)]


def _of_levels(
    levels: list[tuple[float, float]], name: str, zone: str, tick_s: float, end_s: float = 0.0
) -> ZoneTrace:
    """A step function as ticks: the level at each tick's beginning."""
    if not levels:
        raise BadInput(f"{name}: wanted at least one change, found none")
    begin_s, last_s = levels[0][0], max(end_s, levels[-1][0])
    times = np.array([at_s for at_s, _ in levels]) - begin_s
    if (np.diff(times) < 0).any():
        raise BadInput(f"{name}: wanted times that never go back")
    ticks = max(1, math.ceil((last_s - begin_s) / tick_s))
    if ticks > MOST_TICKS:
        raise BadInput(f"{name}: {ticks} ticks of {tick_s:g} s; give a longer --tick")
    at = np.searchsorted(times, np.arange(ticks) * tick_s + 1e-9, side="right") - 1
    nodes = np.array([count for _, count in levels])[np.maximum(at, 0)]
    return ZoneTrace(zone, tick_s, _whole(nodes, name), None, begin_s if begin_s > 1e8 else 0.0)


def _table(text: str, name: str, zone: str, asked: TraceAsked) -> list[ZoneTrace]:
    """A header, then a row for each zone and tick."""
    rows = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    fields = [field.strip() for field in rows.fieldnames or ()]
    at_field = next((f for f in ("seconds", "time_s", "tick", "hours") if f in fields), "")
    nodes_field = next((f for f in ("available", "nodes", "preempted") if f in fields), "")
    price_field = next((f for f in ("usd_per_h", "price") if f in fields), "")
    if not at_field or not nodes_field:
        raise BadInput(
            f"{name}: wanted columns seconds (or hours), available, and perhaps zone and "
            f"usd_per_h; found {', '.join(fields)}"
        )
    scale = {"hours": 3600.0, "tick": asked.tick_s}.get(at_field, 1.0)
    by_zone: dict[str, list[tuple[float, float, float]]] = {}
    for number, row in enumerate(rows, 2):
        count = _number(row[nodes_field], name, number)
        if nodes_field == "preempted" or asked.polarity == "preempted":
            count = 1 - count
        price = _number(row[price_field], name, number) if price_field else math.nan
        where = (row.get("zone") or zone).strip()
        by_zone.setdefault(where, []).append(
            (_number(row[at_field], name, number) * scale, count, price)
        )
    return [_of_rows(where, found, name) for where, found in sorted(by_zone.items())]


def _of_rows(zone: str, rows: list[tuple[float, float, float]], name: str) -> ZoneTrace:
    times = np.array([row[0] for row in rows])
    gaps = np.diff(times)
    if len(gaps) and ((gaps <= 0).any() or gaps.max() > 1.01 * gaps.min()):
        raise BadInput(
            f"{name}, zone {zone}: wanted ticks of one length, found gaps of {gaps.min():g} to "
            f"{gaps.max():g} s"
        )
    tick_s = float(gaps[0]) if len(gaps) else USUAL_TICK_S
    prices = np.array([row[2] for row in rows])
    nodes = _whole(np.array([row[1] for row in rows]), name)
    priced = None if np.isnan(prices).all() else prices
    return ZoneTrace(zone, tick_s, nodes, priced, float(times[0]) if times[0] > 1e8 else 0.0)


def _is_header(first: str) -> bool:
    return "," in first and any(c.isalpha() for c in first.partition(",")[0])


def _second(first: str) -> str:
    return first.split(",")[1].strip() if first.count(",") else ""


TraceReader: TypeAlias = Callable[[str, str, str, TraceAsked], list[ZoneTrace]]
READERS: Sequence[tuple[Callable[[str], bool], TraceReader]] = (
    (lambda first: first.startswith("{"), _counts),
    (lambda first: first.startswith("["), _json_lines),
    (_is_header, _table),
    (lambda first: _second(first) in ("add", "remove"), _events),
    (lambda first: first.count(",") == 2 and "-" in first and ":" in first, _clocked),
    (lambda first: first.count(",") == 1, _curve),
)


# ---- values --------------------------------------------------------------------------------------
def _number(text: Any, name: str, line: int) -> float:
    try:
        found = float(text)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise BadInput(f"{name}, line {line}: wanted a number, found {text!r:.40}")
    return found


def _numbers(values: Any, name: str, what: str) -> Prices:
    try:
        found = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as e:
        raise BadInput(f"{name}: {what}: wanted numbers ({e})") from e
    if found.ndim != 1 or not np.isfinite(found).all():
        raise BadInput(f"{name}: {what}: wanted a list of finite numbers")
    return found


def _whole(nodes: NDArray[Any], name: str) -> Counts:
    whole: Counts = np.rint(nodes).astype(np.int64)
    if len(whole) and (np.abs(nodes - whole).max() > 1e-9):
        raise BadInput(
            f"{name}: wanted whole numbers of nodes, found {nodes[np.abs(nodes - whole) > 1e-9][0]}"
        )
    return whole


def _moment(value: Any) -> float:
    """Seconds since 1970; 0: not known."""
    if isinstance(value, (int, float)):
        return float(value) if value > 1e8 else 0.0
    try:
        at = datetime.fromisoformat(str(value).strip().replace("Z", "+00:00"))
    except ValueError:
        return 0.0
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()


def check(trace: ZoneTrace, name: str) -> None:
    """Raises BadInput for what no market can be."""
    where, n = f"{name}, zone {trace.zone}", len(trace.nodes)
    if not LEAST_TICK_S <= trace.tick_s <= MOST_TICK_S:
        raise BadInput(
            f"{where}: a tick of {trace.tick_s:g} s; wanted {LEAST_TICK_S:g} to {MOST_TICK_S:g} s "
            "(gap_seconds is in seconds, not in minutes or milliseconds)"
        )
    if not 1 <= n <= MOST_TICKS:
        raise BadInput(f"{where}: wanted 1 to {MOST_TICKS} ticks, found {n}")
    if trace.nodes.min() < 0 or trace.nodes.max() > MOST_NODES:
        raise BadInput(
            f"{where}: wanted 0 to {MOST_NODES} nodes in each tick, found {trace.nodes.min()} to "
            f"{trace.nodes.max()}"
        )
    if not trace.nodes.any():
        raise BadInput(
            f"{where}: no node can be had at any time; is its polarity the other one? "
            "(--polarity preempted: 1 means that none can)"
        )
    if trace.usd_per_h is not None:
        if len(trace.usd_per_h) != n:
            raise BadInput(f"{where}: {n} ticks, but {len(trace.usd_per_h)} prices")
        if not (trace.usd_per_h > 0).all():
            raise BadInput(f"{where}: wanted prices above 0, found {trace.usd_per_h.min():g}")


def aligned(traces: Iterable[ZoneTrace]) -> list[ZoneTrace]:
    """Zones of one market over the time that all of them cover, with one tick. Those whose begin
    is not known are taken to begin together. Raises BadInput."""
    found = list(traces)
    if not found:
        raise BadInput("wanted at least one trace")
    if len({t.zone for t in found}) < len(found):
        names = sorted(t.zone for t in found)
        raise BadInput(f"wanted a name for each zone, found {', '.join(names)}; use --zone")
    tick_s = max(t.tick_s for t in found)
    known = [t.start_s for t in found if t.start_s]
    begin_s = max(known, default=0.0)
    if known and len(known) < len(found):
        raise BadInput(
            "some of these traces say when they begin, and some do not; wanted all or none"
        )
    ends_s = [(t.start_s or 0.0) + len(t.nodes) * t.tick_s for t in found]
    ticks = int((min(ends_s) - begin_s) // tick_s)
    if ticks < 1:
        raise BadInput("these traces have no time in common")
    return [_cut(t, begin_s, tick_s, ticks) for t in found]


def _cut(t: ZoneTrace, begin_s: float, tick_s: float, ticks: int) -> ZoneTrace:
    first = (begin_s - t.start_s) if t.start_s else 0.0
    at = np.minimum(
        ((first + np.arange(ticks) * tick_s) / t.tick_s + 1e-9).astype(np.int64), len(t.nodes) - 1
    )
    prices = None if t.usd_per_h is None else t.usd_per_h[at]
    return ZoneTrace(t.zone, tick_s, t.nodes[at], prices, begin_s)
