"""Pictures of a plan: what each way to run it may take and cost, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.proof.forecast_shown import ShownPlan, cumulated, hours_text, sentences, usd_text
from harness.proof.forecasting import HIGH, LOW, PlanForecast
from harness.proof.market_drawing import write_pictures
from harness.views.drawing import Drawing, DrawnDot, DrawnLine, DrawnText, cut, png, svg
from harness.views.page import titled
from harness.views.page_html import html_table, section
from harness.views.plots import esc, nice_ticks, short
from harness.views.words import percent

WIDTH, LEFT, RIGHT, TOP, ROW = 900.0, 230.0, 30.0, 44.0, 26.0
CURVE_HEIGHT = 220.0
BEST_TONE, TONE, RISKY_TONE, LIMIT_TONE = "useful", "accent", "redone", "warn"
TITLE = "Before the launch"


def write(plan: ShownPlan, path: str) -> tuple[Path, ...]:
    """A page for x.html, a PNG for x.png, both for any other name; returns the files. Raises
    BadInput where they cannot be written."""
    return write_pictures(path, lambda: plan_page(plan), lambda: png(drawings(plan)))


def plan_page(plan: ShownPlan) -> str:
    """The whole document; it needs nothing else."""
    figures = [f"<div class=scroll>{svg(one)}</div>" for one in drawings(plan)]
    parts = [
        section("Cost and time", "".join(figures[:2]), "10 % to 90 % of the markets; a dot: half"),
        section("How sure", "".join(figures[2:])),
        section("Numbers", _numbers(plan)),
    ]
    return titled(TITLE, sentences(plan), parts)


def drawings(plan: ShownPlan) -> list[Drawing]:
    """Cost and time of every way; of the best one the share of markets by cost and by time."""
    budget, deadline = plan.run.budget_usd, plan.run.deadline_h
    found = [
        _spans(plan, _Measure("USD", PlanForecast.usd_at, usd_text, budget, "budget")),
        _spans(plan, _Measure("hours", PlanForecast.hours_at, hours_text, deadline, "deadline")),
    ]
    best = plan.best or plan.rows[0]
    name = best.candidate.name
    found.append(_curve(f"{name}: share of the markets that cost at most so many USD", best.usd))
    found.append(_curve(f"{name}: share of the markets that are done by then, hours", best.hours))
    return found


@dataclass(frozen=True)
class _Measure:
    """What is measured of a way to run it, and the limit that it should keep."""

    name: str
    at: Callable[[PlanForecast, float], float]
    text: Callable[[float], str]
    limit: float | None
    limit_name: str


def _spans(plan: ShownPlan, measure: _Measure) -> Drawing:
    """A row for each way, from p10 to p90."""
    ends = [measure.at(row, share) for row in plan.rows for share in (0.5, HIGH)]
    dear = [row.on_demand_usd for row in plan.rows] if measure.name == "USD" else []
    known = [v for v in (*ends, *dear, measure.limit or 0.0) if math.isfinite(v)]
    scale = _Across(max(known, default=1.0) or 1.0)
    bottom = TOP + ROW * len(plan.rows)
    drawing = Drawing(f"{measure.name} of each way", WIDTH, bottom + 34)
    drawing.add(DrawnText(0, 18, measure.name, tone="ink", strong=True))
    scale.axis(drawing, TOP - 8, bottom)
    if measure.limit is not None:
        x = scale.x(measure.limit)
        drawing.add(DrawnLine(((x, TOP - 12), (x, bottom)), LIMIT_TONE, 1.5, 5))
        drawing.add(DrawnText(x, TOP - 16, measure.limit_name, "middle", LIMIT_TONE))
    for at, row in enumerate(plan.rows):
        y = TOP + ROW * (at + 0.5)
        tone = BEST_TONE if row is plan.best else TONE
        tone = RISKY_TONE if plan.is_risky(row) else tone
        low, middle, high = (measure.at(row, share) for share in (LOW, 0.5, HIGH))
        tip = f"{row.candidate.name}: {measure.text(middle)} ({measure.text(low)} .. "
        tip += f"{measure.text(high)}) {measure.name}, risk {plan.risk_text(row)}"
        name = cut(row.candidate.name, LEFT - 14)
        drawing.add(
            DrawnText(LEFT - 12, y + 4, name, "end", "ink", row is plan.best),
            DrawnLine(((scale.x(low), y), (scale.x(high), y)), tone, 6, tip=tip, opacity=0.45),
            DrawnDot(scale.x(middle), y, 5, tone, tip),
        )
        if dear and math.isfinite(row.on_demand_usd):
            words = f"on demand: {usd_text(row.on_demand_usd)} USD"
            drawing.add(DrawnDot(scale.x(row.on_demand_usd), y, 4, "other", words, hollow=True))
    if dear:
        drawing.add(DrawnText(WIDTH - RIGHT, 18, "hollow: the same on demand", "end"))
    return drawing


def _curve(title: str, values: Sequence[float]) -> Drawing:
    """The share of the markets with at most that."""
    drawing = Drawing(title, WIDTH, CURVE_HEIGHT + 34)
    drawing.add(DrawnText(0, 18, title, tone="ink", strong=True))
    points = cumulated(values)
    if not points:
        drawing.add(DrawnText(LEFT, TOP + 20, "none"))
        return drawing
    scale = _Across(1.05 * points[-1][0])
    scale.axis(drawing, TOP - 8, CURVE_HEIGHT)

    def y(share: float) -> float:
        return CURVE_HEIGHT - share * (CURVE_HEIGHT - TOP)

    for share in (0.0, LOW, 0.5, HIGH, 1.0):
        line = ((LEFT, y(share)), (WIDTH - RIGHT, y(share)))
        drawing.add(DrawnLine(line, "grid"))
        drawing.add(DrawnText(LEFT - 8, y(share) + 4, percent(share), "end"))
    steps, last = [(scale.x(0.0), y(0.0))], 0.0
    for value, share in points:
        steps += [(scale.x(value), y(last)), (scale.x(value), y(share))]
        last = share
    drawing.add(DrawnLine((*steps, (WIDTH - RIGHT, y(last))), BEST_TONE, 2))
    return drawing


@dataclass(frozen=True)
class _Across:
    """From 0 at the left to `most` at the right."""

    most: float

    def x(self, value: float) -> float:
        return LEFT + min(1.0, value / self.most) * (WIDTH - LEFT - RIGHT)

    def axis(self, drawing: Drawing, top: float, bottom: float) -> None:
        for tick in nice_ticks(0.0, self.most, 6):
            if tick <= self.most:
                drawing.add(DrawnLine(((self.x(tick), top), (self.x(tick), bottom)), "grid"))
                drawing.add(DrawnText(self.x(tick), bottom + 16, short(tick), "middle"))


def _numbers(plan: ShownPlan) -> str:
    head = ["way", "hours p10", "median", "p90", "USD p10", "median", "p90", "risk", "lost", "spot"]
    rows = [
        [
            esc(row.candidate.name),
            *(hours_text(row.hours_at(share)) for share in (LOW, 0.5, HIGH)),
            *(usd_text(row.usd_at(share)) for share in (LOW, 0.5, HIGH)),
            plan.risk_text(row),
            usd_text(row.losses),
            percent(row.spot_share),
        ]
        for row in plan.rows
    ]
    return html_table(head, rows, range(1, len(head)))
