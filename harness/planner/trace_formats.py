"""Readers of recorded markets in the public formats.

The content determines the format. The caller provides what the content cannot show (does 1 mean
"available" or "preempted"? are these hours or seconds? which zone is it?), and implausible input is
refused.

    {"metadata": {"gap_seconds": 600}, "data": [1, 1, 0, ...]}    nodes that could be had, each tick
    480000,add,node1                       milliseconds, add or remove, a node
    [60000, "add", {"nodes": [...]}]       the same as a JSON array in each line
    2021-12-11, 11:11:30, 55               a date, a time, nodes
    0.030,9                                a time of a unit that must be given, nodes from then on
    zone,seconds,available,usd_per_h       a table with a header; prices may be left out

Pure: takes text, not files.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from harness.core.world import BadInput
from harness.planner.traces import (
    LEAST_TICK_S,
    MOST_TICK_S,
    MOST_TICKS,
    Counts,
    Prices,
    ZoneTrace,
    aligned,
    check_trace,
    zone_names,
)

MOST_NUMBER = 1e15  # milliseconds since 1970 are 2e12
USUAL_TICK_S = 60.0  # for a log of events, which has no ticks
EPOCH_S = 1e8  # greater times are seconds since 1970, lesser ones since some beginning
MOST_STEP_BACK_S = 600.0  # clocks of machines that write logs are set back now and then
UNITS_S = {"ms": 1e-3, "seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
POLARITIES = ("available", "preempted")
USUAL_POLARITY = "available"  # of numbers 0 and 1 without a stated meaning


@dataclass(frozen=True)
class TraceAsked:
    """The caller's description of a trace. `polarity`: of numbers 0 and 1, "available" (1: a node
    can be had) or "preempted" (1: none can); "": as the trace states, else "available". `zone`: its
    name, or the wanted zone of a table; "": the file's name, all zones of the table. `tick_s`: for
    logs of events, and for tables that count ticks; 0: not given. `unit`: of the times of two
    columns without a header, one of UNITS_S."""

    polarity: str = ""
    zone: str = ""
    tick_s: float = 0.0
    unit: str = ""

    def __post_init__(self) -> None:
        if self.polarity not in ("", *POLARITIES):
            raise BadInput(f"polarity {self.polarity!r}: wanted {' or '.join(POLARITIES)}")
        if self.unit not in ("", *UNITS_S):
            raise BadInput(f"unit {self.unit!r}: wanted one of {', '.join(UNITS_S)}")
        if self.tick_s and not LEAST_TICK_S <= self.tick_s <= MOST_TICK_S:
            raise BadInput(
                f"a tick of {self.tick_s:g} s; wanted {LEAST_TICK_S:g} to {MOST_TICK_S:g} s"
            )

    @property
    def log_tick_s(self) -> float:
        return self.tick_s or USUAL_TICK_S


def read(text: str, name: str, asked: TraceAsked | None = None, zone: str = "") -> list[ZoneTrace]:
    """Read all zones of one file. `name`: of the file, for messages. `zone`: the name for its zone
    where the file states none; "": the file's. Raises BadInput."""
    asked = asked or TraceAsked()
    zone = asked.zone or zone or zone_names([name])[0]
    text = text.removeprefix("\ufeff")
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if not first:
        raise BadInput(f"{name}: wanted a trace, found an empty file")
    for fits, reader in READERS:
        if fits(first):
            try:
                found = reader(text, name, zone, asked)
            except (csv.Error, RecursionError) as e:
                raise BadInput(f"{name}: cannot be read: {e}") from e
            break
    else:
        raise BadInput(
            f"{name}: wanted a trace in a format of docs/design/MARKETS.md, found a first line "
            f"that is none of them: {first[:80]!r}"
        )
    for one in found:
        check_trace(one, name)
    return found


def read_market(files: Mapping[str, str], asked: TraceAsked | None = None) -> list[ZoneTrace]:
    """Read all zones of some files, given as path -> text, as one market, aligned. Zones are named
    by the files as far as these differ. Raises BadInput."""
    asked = asked or TraceAsked()
    names = zone_names(list(files))
    found = [read(files[path], path, asked, names[i]) for i, path in enumerate(files)]
    said = [zone.zone for zones in found for zone in zones]
    if len(set(said)) < len(said):  # for example one zone's shapes: the files distinguish them
        found = [
            [dataclasses.replace(zones[0], zone=name)] if len(zones) == 1 else zones
            for name, zones in zip(names, found, strict=True)
        ]
    return aligned(zone for zones in found for zone in zones)


# ---- one format each -----------------------------------------------------------------------------
def _counts(text: str, name: str, zone: str, asked: TraceAsked) -> list[ZoneTrace]:
    """Read {"metadata": {"gap_seconds": ...}, "data": [...]}."""
    try:
        body = json.loads(text)
        data, metadata = body["data"], body.get("metadata", {})
        tick_s = float(metadata["gap_seconds"])
    except (ValueError, KeyError, TypeError) as e:
        raise BadInput(
            f'{name}: wanted {{"metadata": {{"gap_seconds": SECONDS}}, "data": [...]}}, found '
            f"something else ({type(e).__name__}: {e})"
        ) from e
    if not isinstance(data, list) or not isinstance(metadata, dict):
        raise BadInput(f"{name}: wanted a list as data and an object as metadata")
    prices: Prices | None = None
    if data and isinstance(data[0], dict):  # availability and price, tick by tick
        prices = _prices([_first(one, "price", "usd_per_h") for one in data], name)
        data = [_first(one, "available", "availability") for one in data]
    elif body.get("prices"):
        prices = _prices(body["prices"], name)
    polarity = _polarity(str(metadata.get("polarity", "")), name, asked)
    nodes = _available(_numbers(data, name, "data"), polarity, name)
    start_s = _moment(metadata.get("start_time", metadata.get("start", 0)))
    zone = asked.zone or str(metadata.get("zone", "")) or zone
    return [ZoneTrace(zone, tick_s, _whole(nodes, name), prices, start_s)]


def _first(one: Any, *keys: str) -> Any:
    """Return the value of the first of these keys that an object has, else None."""
    found = one if isinstance(one, dict) else {}
    return next((found[key] for key in keys if key in found), None)


def _polarity(said: str, name: str, asked: TraceAsked) -> str:
    """Return what 1 means. `said`: the trace's own statement. Raises BadInput."""
    if said not in ("", *POLARITIES):
        raise BadInput(
            f"{name}: it says that its polarity is {said!r}; wanted {' or '.join(POLARITIES)}"
        )
    if asked.polarity and said and asked.polarity != said:
        raise BadInput(
            f"{name}: it says that its polarity is {said!r}, and you say {asked.polarity!r}; leave "
            "--polarity out, or mend the file"
        )
    return asked.polarity or said or USUAL_POLARITY


def _available(values: Prices, polarity: str, name: str) -> Prices:
    """Return the nodes that can be had. Raises BadInput."""
    if polarity == "available":
        return values
    if values.max(initial=0) > 1:
        raise BadInput(
            f"{name}: polarity 'preempted' is of numbers 0 and 1, found {values.max():g}; "
            "these are counts of nodes: --polarity available"
        )
    return 1 - values


def _events(text: str, name: str, zone: str, asked: TraceAsked) -> list[ZoneTrace]:
    """Read lines of ms,add|remove,node."""
    changes: list[tuple[float, str, str]] = []
    for number, row in enumerate(csv.reader(io.StringIO(text)), 1):
        if not row:
            continue
        if len(row) != 3 or row[1].strip() not in ("add", "remove"):
            raise BadInput(
                f"{name}, line {number}: wanted 'ms,add|remove,node', found {','.join(row)!r:.80}"
            )
        changes.append((_number(row[0], name, number) / 1e3, row[1].strip(), row[2].strip()))
    return [_of_changes(changes, name, zone, asked.log_tick_s)]


def _json_lines(text: str, name: str, zone: str, asked: TraceAsked) -> list[ZoneTrace]:
    """Read lines of [ms, "add" | "remove" | "no-op" | "migration", {"nodes": [...]}].

    A migration moves work between nodes that stay, so it changes nothing.
    """
    changes: list[tuple[float, str, str]] = []
    end_s = 0.0
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        try:
            ms, what, more = json.loads(line)
            at_s = _number(ms, name, number) / 1e3
            nodes = [str(node) for node in more.get("nodes", [])]
            end_s = at_s + _number(more.get("duration", 0), name, number) / 1e3
        except (ValueError, TypeError, AttributeError) as e:
            raise BadInput(
                f'{name}, line {number}: wanted [ms, "add", {{"nodes": [...]}}], found '
                f"{line[:80]!r} ({e})"
            ) from e
        if what not in ("add", "remove", "no-op", "migration"):
            raise BadInput(
                f"{name}, line {number}: wanted add, remove, migration or no-op, found {what!r}"
            )
        if what in ("add", "remove"):
            changes += [(at_s, what, node) for node in nodes]
    return [_of_changes(changes, name, zone, asked.log_tick_s, end_s)]


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
    """Read lines such as 2021-12-11, 11:11:30, 55."""
    levels: list[tuple[float, float]] = []
    last_s = 0.0
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        day, _, rest = line.partition(",")
        time, _, count = rest.partition(",")
        at_s = _moment(f"{day.strip()}T{time.strip()}")
        if not at_s:
            raise BadInput(
                f"{name}, line {number}: wanted 'date, time, nodes', found {line[:80]!r}"
            )
        if at_s < last_s - MOST_STEP_BACK_S:
            raise BadInput(
                f"{name}, line {number}: its time is {last_s - at_s:g} s before that of a line "
                "above it; are these the logs of several zones?"
            )
        last_s = max(last_s, at_s)
        levels.append((at_s, _number(count.strip(), name, number)))
    levels.sort(key=lambda level: level[0])
    return [_of_levels(levels, name, zone, asked.log_tick_s)]


def _curve(text: str, name: str, zone: str, asked: TraceAsked) -> list[ZoneTrace]:
    """Read lines of time,nodes."""
    if not asked.unit:
        raise BadInput(
            f"{name}: two columns without a header: wanted the unit of the first one, found none; "
            f"say --unit {', '.join(UNITS_S)}"
        )
    levels: list[tuple[float, float]] = []
    for number, row in enumerate(csv.reader(io.StringIO(text)), 1):
        if row and len(row) != 2:
            raise BadInput(f"{name}, line {number}: wanted 'time,nodes', found {','.join(row)!r}")
        if row:
            at_s = _number(row[0], name, number) * UNITS_S[asked.unit]
            levels.append((at_s, _number(row[1], name, number)))
    return [_of_levels(levels, name, zone, asked.log_tick_s)]


def _of_levels(
    levels: list[tuple[float, float]], name: str, zone: str, tick_s: float, end_s: float = 0.0
) -> ZoneTrace:
    """Convert a step function to ticks: the level at each tick's beginning."""
    if not levels:
        raise BadInput(f"{name}: wanted at least one change, found none")
    begin_s, last_s = levels[0][0], max(end_s, levels[-1][0])
    times = np.array([at_s for at_s, _ in levels]) - begin_s
    if (np.diff(times) < 0).any():
        raise BadInput(f"{name}: wanted times that never go back")
    covered_s = last_s - begin_s
    if covered_s < 2 * tick_s:
        raise BadInput(
            f"{name}: it covers {covered_s:g} s, less than two ticks of {tick_s:g} s; is the unit "
            "of its times another one? else give a shorter --tick"
        )
    ticks = math.ceil(covered_s / tick_s)
    if ticks > MOST_TICKS:
        raise BadInput(
            f"{name}: it covers {covered_s / 3600:.0f} h, {ticks} ticks of {tick_s:g} s; is the "
            "unit of its times another one? else give a longer --tick"
        )
    at = np.searchsorted(times, np.arange(ticks) * tick_s + 1e-9, side="right") - 1
    nodes = np.array([count for _, count in levels])[np.maximum(at, 0)]
    return ZoneTrace(zone, tick_s, _whole(nodes, name), None, begin_s if begin_s > EPOCH_S else 0.0)


# names of the columns of tables, by content; times by their unit
TIME_COLUMNS = {
    **dict.fromkeys(("seconds", "time_s", "t_s"), "seconds"),
    **dict.fromkeys(("ms", "time_ms"), "ms"),
    **dict.fromkeys(("minutes", "time_min"), "minutes"),
    **dict.fromkeys(("hours", "time_h"), "hours"),
    **dict.fromkeys(("timestamp", "datetime", "time"), "moment"),  # or seconds
    "tick": "tick",
}
NODES_COLUMNS = ("available", "availability", "nodes", "count", "preempted")
PRICE_COLUMNS = ("usd_per_h", "price", "spot_price")
ZONE_COLUMNS = ("zone", "availability_zone", "az")


def _table(text: str, name: str, zone: str, asked: TraceAsked) -> list[ZoneTrace]:
    """Read a table: a header, then a row for each zone and tick."""
    rows = csv.reader(io.StringIO(text), skipinitialspace=True)
    fields = [field.strip().lower() for field in next(rows)]
    at, nodes, price, where = (
        next((fields.index(one) for one in names if one in fields), -1)
        for names in (TIME_COLUMNS, NODES_COLUMNS, PRICE_COLUMNS, ZONE_COLUMNS)
    )
    if at < 0 or nodes < 0:
        raise BadInput(
            f"{name}: wanted columns seconds (or hours, tick, timestamp), available, and perhaps "
            f"zone and usd_per_h; found {', '.join(fields)}"
        )
    unit = TIME_COLUMNS[fields[at]]
    if unit == "tick" and not asked.tick_s:
        raise BadInput(f"{name}: its times are numbers of ticks: wanted --tick, found none")
    polarity = _polarity(
        "preempted" if fields[nodes] == "preempted" else "",
        f"{name}, column {fields[nodes]}",
        asked,
    )
    scale = {**UNITS_S, "tick": asked.tick_s}.get(unit)
    by_zone: dict[str, list[tuple[float, float, float]]] = {}
    for number, row in enumerate(rows, 2):
        if not row:
            continue
        if len(row) != len(fields):
            raise BadInput(f"{name}, line {number}: {len(fields)} columns, but {len(row)} values")
        at_s = _moment(row[at]) if not scale else 0.0
        if not at_s:
            at_s = _number(row[at], name, number) * (scale or 1.0)
        usd = _number(row[price], name, number) if price >= 0 and row[price].strip() else math.nan
        by_zone.setdefault(row[where].strip() if where >= 0 else zone, []).append(
            (at_s, _number(row[nodes], name, number), usd)
        )
    if not by_zone:
        raise BadInput(f"{name}: wanted a row for each zone and tick, found a header only")
    if where >= 0 and asked.zone:
        if asked.zone not in by_zone:
            raise BadInput(f"{name}: no zone {asked.zone!r}; there are {', '.join(by_zone)}")
        by_zone = {asked.zone: by_zone[asked.zone]}
    return _of_rows(by_zone, polarity, name)


def _of_rows(
    by_zone: dict[str, list[tuple[float, float, float]]], polarity: str, name: str
) -> list[ZoneTrace]:
    """Return the zones over the time that all of them cover."""
    begin_s = max(rows[0][0] for rows in by_zone.values())
    end_s = min(rows[-1][0] for rows in by_zone.values())
    found = list[ZoneTrace]()
    for zone, all_rows in sorted(by_zone.items()):
        tick_s = _tick_of([row[0] for row in all_rows], f"{name}, zone {zone}")
        near_s = tick_s / 2
        rows = [row for row in all_rows if begin_s - near_s <= row[0] <= end_s + near_s]
        if not rows:
            raise BadInput(f"{name}: its zones have no time in common")
        nodes = _available(np.array([row[1] for row in rows]), polarity, f"{name}, zone {zone}")
        prices = _prices([row[2] for row in rows], name)
        start_s = rows[0][0] if rows[0][0] > EPOCH_S else 0.0
        found.append(ZoneTrace(zone, tick_s, _whole(nodes, name), prices, start_s))
    return found


def as_table(zones: Sequence[ZoneTrace]) -> str:
    """Return a table with a header, which `read` reads as the same zones."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(("zone", "seconds", "available", "usd_per_h"))
    for zone in zones:
        prices = [""] * len(zone.nodes)
        if zone.usd_per_h is not None:
            prices = [f"{usd:.6g}" for usd in zone.usd_per_h]
        for tick, (nodes, usd) in enumerate(zip(zone.nodes.tolist(), prices, strict=True)):
            rows.writerow((zone.zone, f"{zone.start_s + tick * zone.tick_s:.12g}", nodes, usd))
    return out.getvalue()


def _tick_of(times_s: list[float], where: str) -> float:
    """Return the tick of rows that are one tick apart, up to rounding. Raises BadInput."""
    if len(times_s) < 2:
        raise BadInput(f"{where}: wanted at least two rows, found {len(times_s)}")
    gaps = np.diff(np.array(times_s))
    tick_s = round(float(times_s[-1] - times_s[0]) / len(gaps), 3)
    if (gaps < 0.5 * tick_s).any() or (gaps > 1.5 * tick_s).any() or tick_s <= 0:
        raise BadInput(
            f"{where}: wanted rows in order and one tick apart, found gaps of {gaps.min():g} to "
            f"{gaps.max():g} s"
        )
    return tick_s


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
    if not abs(found) <= MOST_NUMBER:
        raise BadInput(f"{name}, line {line}: wanted a number, found {text!r:.40}")
    return found


def _numbers(values: Any, name: str, what: str) -> Prices:
    try:
        found = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as e:
        raise BadInput(f"{name}: {what}: wanted numbers ({e})") from e
    if found.ndim != 1 or not (np.abs(found) <= MOST_NUMBER).all():
        raise BadInput(f"{name}: {what}: wanted a list of finite numbers")
    return found


def _prices(values: Any, name: str) -> Prices | None:
    """Return USD per hour in each tick. A missing price (null, NaN, 0) is replaced by the last
    known one, as on a market. Return None if there is none at all."""
    try:
        found = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as e:
        raise BadInput(f"{name}: prices: wanted numbers ({e})") from e
    known = np.flatnonzero(np.isfinite(found) & (found != 0))
    if found.ndim != 1:
        raise BadInput(f"{name}: prices: wanted a list of numbers")
    if not len(known):
        return None
    last = np.searchsorted(known, np.arange(len(found)), side="right") - 1
    return found[known[np.maximum(last, 0)]]


def _whole(nodes: NDArray[Any], name: str) -> Counts:
    whole: Counts = np.rint(nodes).astype(np.int64)
    if len(whole) and (np.abs(nodes - whole).max() > 1e-9):
        raise BadInput(
            f"{name}: wanted whole numbers of nodes, found {nodes[np.abs(nodes - whole) > 1e-9][0]}"
        )
    return whole


def _moment(value: Any) -> float:
    """Return seconds since 1970; 0 if unknown."""
    if isinstance(value, (int, float)):
        return float(value) if value > EPOCH_S else 0.0
    try:
        at = datetime.fromisoformat(str(value).strip().replace("Z", "+00:00"))
    except ValueError:
        return 0.0
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()
