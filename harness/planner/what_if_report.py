"""The what-if answers for a finished run, for people: a table in the terminal, and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.core.formatting import duration, money, percent
from harness.look.reports.summary import Summary
from harness.planner.market_charts import (
    CostChart,
    CostCurve,
    CostPoint,
    LaneTake,
    Levels,
    MarketLane,
    MarketTimeline,
    RunDrawn,
)
from harness.planner.market_replay import ReplayResult
from harness.planner.own_market import (
    REPEATS,
    OfferHistory,
    WhatIf,
    WhatIfAsked,
    WhatIfRow,
    as_json,
    what_if,
)
from harness.planner.policy_report import (
    MarketStory,
    bill_of,
    bought_levels,
    plot_paths,
    room_levels,
    span_levels,
    write,
)
from storage.terminal_text import plain

ITSELF = "the run itself"
HEADS = {
    "policy": "policies",
    "nodes": "numbers of nodes",
    "interval": "snapshot intervals",
}
NOTE = "thin: from one reading of what the run saw of its market to the other"
IF_MORE = "if more could be had"
READINGS = (
    "A choice is replayed where places had only the nodes that the run had there; and, "
    f"{IF_MORE}, where they also had room whenever the run was not refused or robbed of a node "
    "there."
)


def command(s: Summary, asked: WhatIfAsked, as_lines: bool, plot: str, console: Console) -> None:
    """Run `harness market simulate --what-if URL`. `as_lines`: one line of JSON for each
    alternative; `plot`: file for pictures, "" for none. Raises BadInput."""
    if plot:
        plot_paths(plot)
    found = what_if(s, asked)
    if as_lines:
        for line in as_json(found):
            print(json.dumps(line, allow_nan=False))
    else:
        print_what_if(found, console)
    for path in write(what_if_story(found), plot) if plot else ():
        if not as_lines:
            console.print(f"drawn: {path}", highlight=False, soft_wrap=True, markup=False)


# ---- terminal ------------------------------------------------------------------------------------
def print_what_if(found: WhatIf, console: Console) -> None:
    """Print the table, how near the replay is to what happened, and what cannot be known."""
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold", min_width=30)
    for head in ("paid", "done after", "taken", "goodput"):
        table.add_column(head, justify="right", no_wrap=True)
    own, group = found.actual, ""
    cells = [money(own.usd), duration(own.hours * 3600), str(own.taken), percent(own.goodput)]
    told = f"{plain(own.policy) or 'no policy told'}, {own.nodes[0]} to {own.nodes[1]} nodes"
    table.add_row(Text(f"{ITSELF}: {told}"), *cells, style="bold")
    for row in found.rows:
        if row.group != group:
            group = row.group
            table.add_row(Text(f"\nother {HEADS[group]}", "dim"))
        held, hoped = (_cells(result, found.market.hours) for result in (row.held, row.hoped))
        table.add_row(Text(plain(_name(row))), *held)
        if hoped != held:
            table.add_row(Text(f"  {IF_MORE}", "dim"), *(Text(cell, "dim") for cell in hoped))
    console.print(table, highlight=False)
    unknown = ("What nobody can know:", *(f"- {one}" for one in found.unknown))
    for note in (*notes(found), *unknown):
        console.print(f"  {plain(note)}", highlight=False, style="dim", markup=False)


def _name(row: WhatIfRow) -> str:
    return f"{row.name} (its own, replayed)" if row.own else row.name


def _cells(result: ReplayResult, market_h: float) -> list[str]:
    is_done = math.isfinite(result.finish_h)
    hours = result.finish_h if is_done else REPEATS * market_h
    done = duration(hours * 3600) if is_done else f"over {duration(hours * 3600)}"
    return [
        money(result.usd),
        f"late: {done}" if result.missed else done,
        str(result.losses),
        percent(result.goodput),
    ]


def notes(found: WhatIf) -> list[str]:
    """Return what a reader must know besides the numbers."""
    said = [f"{READINGS} Late: after the deadline of {duration(found.deadline_h * 3600)}."]
    own = next((row for row in found.rows if row.own), None)
    if own is not None and found.actual.usd > 0 and found.actual.hours > 0:
        usd = own.held.usd / found.actual.usd - 1
        hours = own.held.finish_h / found.actual.hours - 1
        said.append(
            f"The replay of its own policy costs {_beside(usd, 'less', 'more')} and takes "
            f"{_beside(hours, 'less', 'more')} time than what really happened: so far are "
            "the other rows off as well."
        )
    if found.actual.state != "done":
        said.append(f"The run is {found.actual.state}: the work is what it committed.")
    return said


def _beside(share: float, less: str, more: str) -> str:
    if not math.isfinite(share):
        return f"endlessly {more}"
    return f"{percent(abs(share))} {less if share < 0 else more}"


# ---- pictures ------------------------------------------------------------------------------------
def what_if_story(found: WhatIf) -> MarketStory:
    """Return the pictures: bars for each kind of alternative, and the run beside the cheapest other
    policy, hour by hour."""
    own = [row for row in found.rows if row.own]
    charts = [
        _chart(
            found,
            [*(own if group != "policy" else ()), *(r for r in found.rows if r.group == group)],
            f"other {name}",
        )
        for group, name in HEADS.items()
        if any(row.group == group for row in found.rows)
    ]
    name = found.url.rstrip("/").rpartition("/")[2] or found.url
    timelines = (_timeline(found),) if _best(found) else ()
    title = f"{name}: what if"
    return MarketStory(title, tuple(charts), timelines, tuple(notes(found)), found.unknown)


def _chart(found: WhatIf, rows: Sequence[WhatIfRow], title: str) -> CostChart:
    own = found.actual
    itself = CostPoint(found.deadline_h, own.usd, own.usd, own.usd, 0, 1)
    curves = [CostCurve(ITSELF, (itself,))]
    for row in rows:
        low, high = sorted((row.held.usd, row.hoped.usd))
        missed = row.held.missed + row.hoped.missed
        point = CostPoint(found.deadline_h, (low + high) / 2, low, high, missed, 2)
        curves.append(CostCurve(_name(row), (point,)))
    return CostChart(title, tuple(curves), note=NOTE, missed="of 2 late")


def _best(found: WhatIf) -> WhatIfRow | None:
    """Return the cheapest other policy that is done by the deadline."""
    others = [
        row for row in found.rows if row.group == "policy" and not row.own and not row.hoped.missed
    ]
    return min(others, key=lambda row: row.hoped.usd, default=None)


def _timeline(found: WhatIf) -> MarketTimeline:
    best = _best(found)
    assert best is not None
    result, market = best.hoped, found.market
    ticks = math.ceil(market.hours * 3600 / market.tick_s)
    lanes = [
        MarketLane(
            zone.zone,
            room_levels(zone, 0, ticks),
            span_levels((a / 3600, b / 3600) for a, b in history.stays),
            _levels(result, zone.zone),
            f"${history.offer.usd_per_h:.3g} an hour",
            _taken(history),
        )
        for zone, history in zip(market.hoped, market.offers, strict=True)
    ]
    dear = bought_levels(result)
    if dear:
        note = f"${market.on_demand_usd_per_h:.3g} an hour"
        lanes.append(MarketLane("on demand", (), (), dear, note))
    return MarketTimeline(
        f"The run, and {best.name} on the same market (as far as it had room)",
        tuple(lanes),
        RunDrawn(ITSELF, _own_bill(found), found.actual.hours),
        RunDrawn(best.name, bill_of(market.hoped, 0, result, best.job), result.finish_h),
        found.deadline_h,
    )


def _levels(result: ReplayResult, offer: str) -> Levels:
    return span_levels((begin, end) for name, begin, end, _ in result.spans if name == offer)


def _taken(history: OfferHistory) -> tuple[LaneTake, ...]:
    gone = {look.s for look in history.looks if look.what == "taken"}
    return tuple(LaneTake(a / 3600, b / 3600) for a, b in history.stays if b in gone)


def _own_bill(found: WhatIf) -> Levels:
    """Return the USD that the run itself had spent over time, spread evenly over each node's
    time."""
    changes = list[tuple[float, float]]()
    for history in found.market.offers:
        for begin_s, end_s in history.stays:
            usd = history.offer.usd_per_h
            changes += [(begin_s / 3600, usd), (end_s / 3600, -usd)]
    so_far, rate, at_h = 0.0, 0.0, 0.0
    bill = [(0.0, 0.0)]
    for hours, by in sorted(changes):
        so_far += rate * (hours - at_h)
        rate, at_h = rate + by, hours
        bill.append((hours, so_far))
    scale = found.actual.usd / so_far if so_far > 0 else 1.0
    return tuple((hours, usd * scale) for hours, usd in bill)
