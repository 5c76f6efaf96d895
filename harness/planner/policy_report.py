"""A table of policies on recorded markets as pictures and as one page: `harness market simulate
--trace FILE --plot FILE`.

Turns windows, nodes and plans into plain numbers for `market_charts.py`, and writes them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.core.formatting import money, percent
from harness.core.input_files import output_file
from harness.core.world import BadInput
from harness.look.pages.html_parts import environment
from harness.look.pages.report_page import alone_document
from harness.planner import market_nodes
from harness.planner.market_charts import (
    CostChart,
    CostCurve,
    CostPoint,
    LaneTake,
    Levels,
    MarketLane,
    MarketTimeline,
    RunDrawn,
    check_plots,
    cost_figure,
    hours_text,
    over_optimum,
    png,
    svg,
    timeline_figure,
)
from harness.planner.market_nodes import ReplayJob
from harness.planner.market_replay import ReplayResult
from harness.planner.optimum import NOWHERE, ON_DEMAND, Optimum
from harness.planner.policy_table import BEST_FIXED, FIXED, MarketRow, MarketTable, MarketWindow
from harness.planner.traces import ZoneTrace

# Policies on markets as one self-contained page, and as a PNG: charts, numbers, hourly runs.

MOST_CHARTS, MOST_TIMELINES = 24, 24  # of a page
PNG_CHARTS, PNG_TIMELINES = 4, 4  # of a PNG, which people look at as a whole


@dataclass(frozen=True)
class MarketStory:
    """The content of a page. `notes`: sentences above everything else; `unknown`: what cannot be
    known, below it."""

    title: str
    charts: tuple[CostChart, ...]
    timelines: tuple[MarketTimeline, ...] = ()
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def market_page(story: MarketStory) -> str:
    """Return the whole document; it needs no other file."""
    charts = story.charts[:MOST_CHARTS]
    return alone_document(
        "planner/market_page.html",
        title=story.title,
        notes=story.notes,
        charts=[(one.title, svg(cost_figure(one)), *_numbers(one)) for one in charts],
        charts_left_out=_left_out(story.charts, MOST_CHARTS),
        timelines=[svg(timeline_figure(one)) for one in story.timelines[:MOST_TIMELINES]],
        timelines_left_out=_left_out(story.timelines, MOST_TIMELINES),
        unknown=story.unknown,
    )


def market_png(story: MarketStory) -> bytes:
    """Return the first charts and timelines. Raises BadInput without any."""
    figures = [cost_figure(chart) for chart in story.charts[:PNG_CHARTS]]
    figures += [timeline_figure(one) for one in story.timelines[:PNG_TIMELINES]]
    if not figures:
        raise BadInput("a picture of nothing: no policy was tried")
    return png(figures)


def _left_out(found: Sequence[object], most: int) -> str:
    return f"the first {most} of {len(found)}" if len(found) > most else ""


def _numbers(chart: CostChart) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Return a chart's numbers as a table: its head; (name, costs, how often late, whether ever,
    share over the optimum; None: no such column) of each row."""
    deadlines = chart.deadlines
    head = ["policy", *map(hours_text, deadlines), "late"]
    head += ["over the optimum"] if chart.optimum else []

    def row(name: str, usd: dict[float, float], late: str, missed: int, over: str) -> Any:
        costs = [money(usd[h]) if h in usd else "–" for h in deadlines]
        return name, costs, late, missed, over if chart.optimum else None

    lines = (("optimum", chart.optimum), ("on demand", chart.on_demand))
    rows = [row(name, dict(line), "", 0, "") for name, line in lines if line]
    for curve in chart.curves:
        over = over_optimum(chart, curve)
        missed, windows = (sum(getattr(p, n) for p in curve.points) for n in ("missed", "windows"))
        usd = {p.deadline_h: p.usd for p in curve.points}
        share = "–" if over is None else percent(over)
        rows.append(row(curve.name, usd, f"{missed} of {windows}", missed, share))
    return head, rows


WRITTEN = (".html", ".png")
ALL = "all markets"
BOUGHT = "on_demand"  # the policy that buys on demand only


# ---- files ---------------------------------------------------------------------------------------
def plot_paths(path: str) -> tuple[Path, ...]:
    """Return the files that `draw` will write: a page for x.html, a PNG for x.png, both for any
    other name. Call it before long work: it raises BadInput where they cannot be written."""
    asked = Path(path)
    if asked.suffix.lower() in WRITTEN:
        found: tuple[Path, ...] = (asked,)
    else:
        found = tuple(Path(path + suffix) for suffix in WRITTEN)
    check_plots()
    environment()  # without which there is no page
    for one in found:
        try:
            output_file(str(one))
        except ValueError as e:
            raise BadInput(f"--plot {path}: {e}") from None
    return found


def draw(table: MarketTable, path: str, policy: str = "") -> tuple[Path, ...]:
    """Write the pictures of a table; return the files. `policy`: the one whose runs are drawn hour
    by hour; "" means the table's first. Raises BadInput."""
    return write(story_of(table, policy), path)


def write(story: MarketStory, path: str) -> tuple[Path, ...]:
    """Write pictures to the files that `plot_paths` returns. Raises BadInput."""
    return write_pictures(path, lambda: market_page(story), lambda: market_png(story))


def write_pictures(
    path: str, page: Callable[[], str], picture: Callable[[], bytes]
) -> tuple[Path, ...]:
    """Write a page and a PNG to the files that `plot_paths` returns; return the files. Raises
    BadInput."""
    found = plot_paths(path)
    for one in found:
        one.parent.mkdir(parents=True, exist_ok=True)
        if one.suffix.lower() == ".png":
            one.write_bytes(picture())
        else:
            one.write_text(page(), encoding="utf-8")
    return found


# ---- what is drawn -------------------------------------------------------------------------------
def story_of(table: MarketTable, policy: str = "") -> MarketStory:
    """Return the content of the pictures: cost over deadline in each market; and hour by hour, for
    each deadline, the window that is typical of a policy. Raises BadInput if the policy is not in
    the table."""
    if not table.rows:
        raise BadInput("a picture of nothing: no policy was tried on any market")
    policies = list(dict.fromkeys(row.policy for row in table.rows))
    shown = policy or policies[0]
    if shown not in policies:
        raise BadInput(f"no policy {shown!r} was tried; found {', '.join(policies)}")
    names = list(dict.fromkeys(row.market for row in table.rows))
    charts = [_chart(name, [row for row in table.rows if row.market == name]) for name in names]
    charts = [chart for chart in charts if chart.curves]
    if len(charts) > 1 and (together := _together(charts)):
        charts.insert(0, together)
    timelines = [
        timeline(table.markets[row.market], row, _typical(row))
        for row in table.rows
        if row.policy == shown and row.windows and row.market in table.markets
    ]
    jobs = {row.job.work_h for row in table.rows}
    work = f"{min(jobs):g} h" if len(jobs) == 1 else f"{min(jobs):g} – {max(jobs):g} h"
    windows = max(len(row.windows) for row in table.rows)
    note = (
        f"{work} of work, from {windows} beginnings in each market; every policy through the real "
        "recovery loop. The optimum knows the whole market in advance."
    )
    return MarketStory("Policies on markets", tuple(charts), tuple(timelines), (note,))


def _chart(name: str, rows: Sequence[MarketRow]) -> CostChart:
    fixed = [row.job.deadline_h for row in rows if row.policy.startswith(FIXED)]
    best_only = len(set(fixed)) == len(fixed)  # one number of nodes for each deadline: one curve
    by_policy = dict[str, list[MarketRow]]()
    for row in sorted(rows, key=lambda row: row.job.deadline_h):
        if row.windows and row.policy != BOUGHT:  # it has its own line
            is_best = best_only and row.policy.startswith(FIXED)
            by_policy.setdefault(BEST_FIXED if is_best else row.policy, []).append(row)
    first = {row.job.deadline_h: row for row in reversed(rows) if row.windows}
    return CostChart(
        name,
        tuple(
            CostCurve(policy, tuple(_point(row) for row in mine))
            for policy, mine in by_policy.items()
        ),
        tuple((h, usd) for h, row in sorted(first.items()) if (usd := row.optimum_usd) is not None),
        tuple((h, row.on_demand_usd) for h, row in sorted(first.items())),
        rows[0].job.work_h,
    )


def _point(row: MarketRow) -> CostPoint:
    costs = [w.result.usd for w in row.windows]
    low, high = (float(q) for q in np.quantile(costs, (0.1, 0.9)))
    return CostPoint(row.job.deadline_h, row.usd, low, high, row.missed, len(row.windows))


def _together(charts: Sequence[CostChart]) -> CostChart | None:
    """Return the mean of all markets, for the deadlines and policies that all of them have."""

    def mean(lines: Iterable[Sequence[tuple[float, float]]]) -> tuple[tuple[float, float], ...]:
        each = [dict(line) for line in lines]
        common = sorted(set.intersection(*map(set, each)))
        return tuple((h, sum(one[h] for one in each) / len(each)) for h in common)

    curves = []
    for curve in charts[0].curves:
        same = [next((c for c in chart.curves if c.name == curve.name), None) for chart in charts]
        each = [{p.deadline_h: p for p in c.points} for c in same if c is not None]
        common = sorted(set.intersection(*map(set, each)))
        if len(each) == len(charts) and common:
            points = tuple(_mean_point([one[h] for one in each]) for h in common)
            curves.append(CostCurve(curve.name, points))
    if not curves:
        return None
    title = f"{ALL} ({len(charts)})"
    optimum, dear = mean(c.optimum for c in charts), mean(c.on_demand for c in charts)
    return CostChart(title, tuple(curves), optimum, dear, charts[0].work_h)


def _mean_point(points: Sequence[CostPoint]) -> CostPoint:
    """Return the mean of several markets' points, each counted once."""

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(points)

    return CostPoint(
        points[0].deadline_h,
        mean(p.usd for p in points),
        mean(p.low for p in points),
        mean(p.high for p in points),
        sum(p.missed for p in points),
        sum(p.windows for p in points),
    )


def _typical(row: MarketRow) -> MarketWindow:
    """Return the window whose cost relative to the optimum is the median."""

    def share(w: MarketWindow) -> float:
        return w.result.usd / w.optimum.usd if w.optimum and w.optimum.usd else w.result.usd

    return sorted(row.windows, key=share)[len(row.windows) // 2]


# ---- hour by hour --------------------------------------------------------------------------------
def timeline(zones: Sequence[ZoneTrace], row: MarketRow, window: MarketWindow) -> MarketTimeline:
    """Return one replay beside the optimum of the same window."""
    job, result = row.job, window.result
    # for many nodes the optimum is only a bill
    best = window.optimum if window.optimum is not None and window.optimum.plan else None
    tick_h = zones[0].tick_s / 3600
    ends = [job.deadline_h, *(end for _, _, end, _ in result.spans)]
    ticks = math.ceil(max(h for h in ends if math.isfinite(h)) / tick_h)
    lanes = [
        _lane(
            *(zone.zone, room_levels(zone, window.first, ticks), result, zone.zone),
            *(best, place, tick_h),
            _note(zone, window.first, ticks, job),
        )
        for place, zone in enumerate(zones)
    ]
    usd = job.on_demand(zones)
    more = f" to {max(usd):g}" if max(usd) > min(usd) else ""
    note = f"${min(usd):g}{more} an hour"
    runs, planned = bought_levels(result), _plan_levels(best, ON_DEMAND, tick_h)
    if runs or planned:
        lanes.append(MarketLane("on demand", (), runs, planned, note))
    start_h = window.first * tick_h
    return MarketTimeline(
        f"{row.market}: {row.policy}, to be done in {job.deadline_h:.4g} h, from hour "
        f"{start_h:.4g} on",
        tuple(lanes),
        RunDrawn(row.policy, bill_of(zones, window.first, result, job), result.finish_h),
        None
        if best is None
        else RunDrawn("optimum", _optimum_bill(zones, window.first, best, job), best.finish_h),
        job.deadline_h,
    )


def _lane(
    name: str,
    room: Levels,
    result: ReplayResult,
    offer: str,
    best: Optimum | None,
    place: int,
    tick_h: float,
    note: str = "",
) -> MarketLane:
    mine = [span for span in result.spans if span[0] == offer]
    taken = tuple(LaneTake(begin, end) for _, begin, end, was_taken in mine if was_taken)
    run = span_levels((begin, end) for _, begin, end, _ in mine)
    return MarketLane(name, room, run, _plan_levels(best, place, tick_h), note, taken)


def _note(zone: ZoneTrace, first: int, ticks: int, job: ReplayJob) -> str:
    part, usd = zone.cut(first, ticks), job.spot_usd_per_h
    if part.usd_per_h is not None and len(part.usd_per_h):
        usd = float(part.usd_per_h.mean())
    return f"{100 * part.availability:.0f} % of the time, ${usd:.3g} an hour"


def room_levels(zone: ZoneTrace, first: int, ticks: int) -> Levels:
    """Return the number of nodes that the zone had, over hours from tick `first` on."""
    tick_h, nodes = zone.tick_s / 3600, zone.cut(first, ticks).nodes
    changes = [0, *(np.flatnonzero(np.diff(nodes)) + 1).tolist()] if len(nodes) else []
    levels = [(i * tick_h, float(nodes[i])) for i in changes]
    return (*levels, (len(nodes) * tick_h, 0.0))


def span_levels(spans: Iterable[tuple[float, float]]) -> Levels:
    """Return the number of these (begin, end) spans over time."""
    changes = sorted((h, by) for begin, end in spans for h, by in ((begin, 1), (end, -1)))
    levels, there = list[tuple[float, float]](), 0
    for hours, group in itertools.groupby(changes, key=lambda change: change[0]):
        there += sum(by for _, by in group)
        levels.append((hours, float(there)))
    return tuple(levels)


def bought_levels(result: ReplayResult) -> Levels:
    """Return the number of nodes on demand over time, in all places."""
    return span_levels(
        (begin, end)
        for name, begin, end, _ in result.spans
        if name.endswith(market_nodes.ON_DEMAND)
    )


def _plan_levels(best: Optimum | None, place: int, tick_h: float) -> Levels:
    spans = (
        (i * tick_h, (i + count) * tick_h)
        for at, i, count in (_stays(best.plan) if best else ())
        if at == place
    )
    return span_levels(spans)


def _stays(plan: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (place, first tick, ticks) of each stay."""
    i = 0
    for at, group in itertools.groupby(plan):
        count = len(list(group))
        yield at, i, count
        i += count


# ---- bills ---------------------------------------------------------------------------------------
def bill_of(zones: Sequence[ZoneTrace], first: int, result: ReplayResult, job: ReplayJob) -> Levels:
    """Return the USD spent so far, tick by tick. The curve ends at the measured bill: what moves
    cost is spread over all of it."""
    tick_h = zones[0].tick_s / 3600
    last = max((end for _, _, end, _ in result.spans), default=0.0)
    ticks = math.ceil(last / tick_h - 1e-9)
    paid = np.zeros(ticks + 1)
    prices = {zone.zone: _prices(zone, first, ticks, job) for zone in zones}
    for zone in zones:
        dear = zone.on_demand(job.on_demand_usd_per_h)
        prices[zone.zone + market_nodes.ON_DEMAND] = np.full(ticks, dear)
    for name, begin, end, _ in result.spans:
        usd_per_h = prices[name]
        for tick in range(int(begin / tick_h + 1e-9), math.ceil(end / tick_h - 1e-9)):
            hours = min(end, (tick + 1) * tick_h) - max(begin, tick * tick_h)
            paid[tick + 1] += usd_per_h[tick] * hours
    so_far = np.cumsum(paid)
    if so_far[-1] > 0:
        so_far *= result.usd / so_far[-1]
    return tuple((min(i * tick_h, last), float(usd)) for i, usd in enumerate(so_far))


def _optimum_bill(zones: Sequence[ZoneTrace], first: int, best: Optimum, job: ReplayJob) -> Levels:
    tick_h = zones[0].tick_s / 3600
    plan, dear = best.plan, min(job.on_demand(zones))
    each = [_prices(zone, first, len(plan), job) for zone in zones]
    paid = [
        0.0
        if at == NOWHERE
        else tick_h * (dear if at == ON_DEMAND else float(each[at][tick]))
        for tick, at in enumerate(plan)
    ]
    so_far = [0.0, *itertools.accumulate(paid)]
    scale = best.usd / so_far[-1] if so_far[-1] > 0 else 1.0
    return tuple((i * tick_h, usd * scale) for i, usd in enumerate(so_far))


def _prices(zone: ZoneTrace, first: int, ticks: int, job: ReplayJob) -> np.ndarray:
    """Return USD per hour of one node in each tick; beyond the trace the last price."""
    if zone.usd_per_h is None:
        return np.full(ticks, job.spot_usd_per_h)
    places = np.minimum(first + np.arange(ticks), len(zone.usd_per_h) - 1)
    return zone.usd_per_h[places]
