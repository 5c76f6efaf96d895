"""Policies on markets as one page that stands alone, and as a PNG: charts, numbers, and runs hour
by hour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.core.world import BadInput
from harness.views.drawing import Drawing, png, svg
from harness.views.market_pictures import (
    CostChart,
    CostPoint,
    MarketTimeline,
    cost_drawing,
    hours_text,
    over_optimum,
    timeline_drawing,
)
from harness.views.page import titled
from harness.views.page_html import html_table, section
from harness.views.plots import esc
from harness.views.words import money, percent

MOST_CHARTS, MOST_TIMELINES = 24, 24  # of a page
PNG_CHARTS, PNG_TIMELINES = 4, 4  # of a PNG, which is to be looked at as a whole


@dataclass(frozen=True)
class MarketStory:
    """All that is told. `notes`: sentences, shown above everything else; `unknown`: what nobody can
    know, below it."""

    title: str
    charts: tuple[CostChart, ...]
    timelines: tuple[MarketTimeline, ...] = ()
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def market_page(story: MarketStory) -> str:
    """The whole document; it needs nothing else."""
    charts = "".join(
        f"{_figure(cost_drawing(chart))}{_numbers(chart)}" for chart in story.charts[:MOST_CHARTS]
    )
    timelines = "".join(_figure(timeline_drawing(one)) for one in story.timelines[:MOST_TIMELINES])
    unknown = "".join(f"<li>{esc(one)}</li>" for one in story.unknown)
    parts = [
        section("Cost", charts, _left_out(story.charts, MOST_CHARTS)),
        section("Hour by hour", timelines, _left_out(story.timelines, MOST_TIMELINES)),
        section("What nobody can know", f"<ul class=trouble>{unknown}</ul>" if unknown else ""),
    ]
    return titled(story.title, story.notes, parts)


def market_png(story: MarketStory) -> bytes:
    """The first charts and timelines. Raises BadInput without Pillow."""
    drawings = [cost_drawing(chart) for chart in story.charts[:PNG_CHARTS]]
    drawings += [timeline_drawing(one) for one in story.timelines[:PNG_TIMELINES]]
    if not drawings:
        raise BadInput("a picture of nothing: no policy was tried")
    return png(drawings)


def _figure(drawing: Drawing) -> str:
    return f'<div class=scroll style="margin-top:22px">{svg(drawing)}</div>'


def _left_out(found: Sequence[object], most: int) -> str:
    return f"the first {most} of {len(found)}" if len(found) > most else ""


def _numbers(chart: CostChart) -> str:
    """A chart as a table, for who wants the numbers."""
    deadlines = chart.deadlines
    head = ["policy", *map(hours_text, deadlines), "late", "over the optimum"]
    rows = [
        [name, *(money(dict(line)[h]) if h in dict(line) else "–" for h in deadlines), "", ""]
        for name, line in (("optimum", chart.optimum), ("on demand", chart.on_demand))
        if line
    ]
    for curve in chart.curves:
        at = {p.deadline_h: p for p in curve.points}
        over = over_optimum(chart, curve)
        rows.append(
            [
                esc(curve.name),
                *(money(at[h].usd) if h in at else "–" for h in deadlines),
                _missed(curve.points),
                "–" if over is None else percent(over),
            ]
        )
    if not chart.optimum:
        head, rows = head[:-1], [row[:-1] for row in rows]
    table = html_table(head, rows, range(1, len(head)))
    return f"<details><summary>{esc(chart.title)}: the numbers</summary>{table}</details>"


def _missed(points: Sequence[CostPoint]) -> str:
    """Of all windows."""
    missed, windows = sum(p.missed for p in points), sum(p.windows for p in points)
    words = f"{missed} of {windows}"
    return f"<span class=bad>{words}</span>" if missed else words
