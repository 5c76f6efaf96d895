"""A plan for people: a table, JSON, sentences, and pictures of the cost and time of each way to run
it, with their spread."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.core.formatting import percent
from harness.look.pages.report_page import alone_document
from harness.planner import forecast
from harness.planner.forecast import ASSUMED, HIGH, LOW, PLAYED_H, PlanForecast, PlannedRun
from harness.planner.market_charts import figure, light_colours, png, shortened, svg
from harness.planner.policy_report import write_pictures
from storage.terminal_text import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A plan for people: a table with a picture of the spread, JSON, and sentences.

STRIP = 24  # characters of a row's picture
WIDE = 110  # columns of a terminal from which on the picture is shown


@dataclass(frozen=True)
class ShownPlan:
    """A plan to show. `best`: None if every candidate exceeds the risk. `sources`: of prices, speed
    and history, in words. `launch`: the command for the best one. `hindsight_usd`: what somebody
    would pay for the best one's work who knew the market in advance, in the first markets."""

    run: PlannedRun
    rows: tuple[PlanForecast, ...]  # the best first
    best: PlanForecast | None
    most_risk: float
    sources: tuple[str, ...]
    launch: tuple[str, ...] = ()
    dropped: int = 0
    hindsight_usd: tuple[float, ...] = ()

    def risk(self, row: PlanForecast) -> float:
        """Return the share of the markets in which it misses the deadline, or exceeds the
        budget."""
        return forecast.risk(row, self.run)

    def risk_text(self, row: PlanForecast) -> str:
        asked = self.run.deadline_h is not None or self.run.budget_usd is not None
        return percent(self.risk(row)) if asked else "-"

    def is_risky(self, row: PlanForecast) -> bool:
        return self.risk(row) > self.most_risk + 1e-9

    def to_json(self) -> dict[str, Any]:
        return {
            "best": self._row_json(self.best) if self.best else None,
            "candidates": [self._row_json(row) for row in self.rows],
            "dropped": self.dropped,
            "deadline_hours": self.run.deadline_h,
            "budget_usd": self.run.budget_usd,
            "hindsight_usd": list(self.hindsight_usd),
            "most_risk": self.most_risk,
            "launch": list(self.launch),
            "sources": list(self.sources),
            "assumed": list(self.assumed),
        }

    @property
    def assumed(self) -> tuple[str, ...]:
        """Return the assumptions, and what is coarser in a plan of a long run."""
        if all(row.undisturbed_h <= PLAYED_H for row in self.rows):
            return ASSUMED
        coarser = (
            f"what takes over {PLAYED_H:g} h undisturbed goes on as in its first {PLAYED_H:g} h, "
            "which alone are played: chance evens out more in the whole, so that its low and high "
            "are closer than those told"
        )
        return (*ASSUMED, coarser)

    def _row_json(self, row: PlanForecast) -> dict[str, Any]:
        return {**row.to_json(), "risk": self.risk(row)}


def hours_text(hours: float) -> str:
    """Return hours to three digits, whole from 1000 on; "never" for infinity."""
    if not math.isfinite(hours):
        return "never"
    return f"{hours:.3g}" if hours < 1000 else f"{hours:,.0f}"


def usd_text(usd: float) -> str:
    """Return US dollars to three digits; "-" for infinity."""
    if not math.isfinite(usd):
        return "-"
    if usd >= 1000:
        rounded = round(usd, 2 - math.floor(math.log10(usd)))
        return f"{rounded:,.0f}"
    return f"{usd:.3g}"


def strip(three: Sequence[float], least: float, most: float) -> str:
    """Return a picture of (p10, median, p90) on a line from `least` to `most`."""
    low, middle, high = three
    span = max(1e-9, most - least)

    def at(value: float) -> int:
        share = (min(value, most) - least) / span if math.isfinite(value) else 1.0
        return min(STRIP - 1, max(0, round(share * (STRIP - 1))))

    letters = [" "] * STRIP
    for place in range(at(low), at(high) + 1):
        letters[place] = "─"
    letters[at(middle)] = "●"
    return "".join(letters)


def show(plan: ShownPlan, console: Console) -> None:
    """Print the table, the best way, and the forecast's sources."""
    wide = console.width >= WIDE
    title = f"{len(plan.rows)} ways to run it, the best first"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    more = ("lost", "USD, p10 to p90") if wide else ()
    for name in ("nodes", "policy", "hours", "USD", "risk", "on demand", *more):
        left = name in ("nodes", "policy", *more[1:])
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    ends = [row.usd_at(share) for row in plan.rows for share in (LOW, HIGH)]
    for row in plan.rows:
        style = "bold" if row is plan.best else "dim" if plan.is_risky(row) else ""
        usd = [row.usd_at(share) for share in (LOW, 0.5, HIGH)]
        cells: list[Text | str] = [
            Text(plain(f"{row.candidate.nodes} x {row.candidate.shape.name}")),
            Text(plain(row.candidate.policy.partition("?")[0])),
            _three(row.hours_at, hours_text),
            _three(row.usd_at, usd_text),
            plan.risk_text(row),
            usd_text(row.on_demand_usd),
        ]
        if wide:
            cells += [usd_text(row.losses), strip(usd, min(ends), max(ends))]
        table.add_row(*cells, style=style)
    console.print(table)
    words = "median (p10..p90); risk: of missing deadline or budget; on demand: USD without spot"
    lost = "; lost: nodes that are taken away" if wide else ""
    console.print(words + lost, highlight=False, style="dim")
    for line in sentences(plan):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def sentences(plan: ShownPlan) -> list[str]:
    """Return the best way and why, the forecast's sources and assumptions, and the launch
    command."""
    found: list[str] = []
    if plan.best is None:
        found.append(
            f"None of them keeps the risk below {percent(plan.most_risk)}: allow more time or "
            "money, more --nodes, or more --risk."
        )
    else:
        best = plan.best
        spared = 1 - best.usd_at(0.5) / best.on_demand_usd if best.on_demand_usd else 0.0
        found.append(
            f"best    {best.candidate.name}: {usd_text(best.usd_at(0.5))} USD, done after "
            f"{hours_text(best.hours_at(0.5))} h"
            + (f"; {percent(spared)} below on demand" if 0 < spared < 1 else "")
        )
        if plan.hindsight_usd:
            known = plan.hindsight_usd
            times = statistics.fmean(best.usd[: len(known)]) / statistics.fmean(known)
            found.append(f"        {times:.2f} x the bill of whoever knows the market in advance")
        if best.losses_per_h:
            each_h = hours_text(1 / best.losses_per_h)
            taken = usd_text(best.losses)
            found.append(f"        {taken} nodes are taken, one in {each_h} node-hours on spot")
        if plan.launch:
            found.append("launch  " + shlex.join(plan.launch))
    if plan.dropped:
        found.append(f"        {plan.dropped} more were tried in fewer markets, and were worse")
    found += [f"from    {source}" for source in plan.sources]
    found += [f"assumed {words}" for words in plan.assumed]
    return found


def _three(at: Callable[[float], float], text: Callable[[float], str]) -> str:
    low, middle, high = text(at(LOW)), text(at(0.5)), text(at(HIGH))
    return middle if low == high else f"{middle} ({low}..{high})"


def cumulated(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return (value, share of the markets with at most that) of the finite values."""
    ordered = sorted(values)
    return [(v, (at + 1) / len(ordered)) for at, v in enumerate(ordered) if math.isfinite(v)]


BEST_TONE, TONE, RISKY_TONE, LIMIT_TONE = "useful", "accent", "redone", "warn"
TITLE = "Before the launch"


def write(plan: ShownPlan, path: str) -> tuple[Path, ...]:
    """Write a page for x.html, a PNG for x.png, both for any other name; return the files. Raises
    BadInput where they cannot be written."""
    return write_pictures(path, lambda: plan_page(plan), lambda: png(figures(plan)))


def plan_page(plan: ShownPlan) -> str:
    """Return the whole self-contained document."""
    return alone_document(
        "planner/plan_page.html",
        title=TITLE,
        notes=sentences(plan),
        figures=[svg(one) for one in figures(plan)],
        rows=_rows(plan),
    )


def figures(plan: ShownPlan) -> list[Figure]:
    """Return the figures: cost and time of every way; for the best one, the share of markets by
    cost and by time."""
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
    """A quantity of each way to run the plan, and the limit that it should keep."""

    name: str
    at: Callable[[PlanForecast, float], float]
    text: Callable[[float], str]
    limit: float | None
    limit_name: str


def _spans(plan: ShownPlan, measure: _Measure) -> Figure:
    """Draw a row for each way, from p10 to p90."""

    def draw(made: Figure) -> None:
        ax, colour = made.add_subplot(), light_colours()
        for place, row in enumerate(plan.rows):
            tone = BEST_TONE if row is plan.best else TONE
            tone = colour[RISKY_TONE if plan.is_risky(row) else tone]
            low, middle, high = (measure.at(row, share) for share in (LOW, 0.5, HIGH))
            ends = [v for v in (low, high) if math.isfinite(v)]
            ax.plot(ends, [place] * len(ends), color=tone, lw=5, alpha=0.45)
            ax.plot(middle, place, "o", color=tone)
            if measure.name == "USD":
                ax.plot(row.on_demand_usd, place, "o", mfc="none", color=colour["other"])
        if measure.limit is not None:
            limit = colour[LIMIT_TONE]
            ax.axvline(measure.limit, color=limit, ls="--", label=measure.limit_name)
        if measure.name == "USD":
            said = "the same on demand"
            ax.plot([], [], "o", mfc="none", color=colour["other"], label=said)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
        names = [shortened(row.candidate.name) for row in plan.rows]
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.set_xlim(left=0)
        ax.grid(axis="x", color=colour["grid"])

    return figure(measure.name, 0.9 + 0.26 * len(plan.rows), draw)


def _curve(title: str, values: Sequence[float]) -> Figure:
    """Draw the share of the markets in which the value is at most x."""

    def draw(made: Figure) -> None:
        ax = made.add_subplot()
        if not (points := cumulated(values)):
            ax.set_title("none")
            return
        x, shares = zip((0.0, 0.0), *points, (1.05 * points[-1][0], points[-1][1]), strict=True)
        ax.step(x, shares, where="post", color=light_colours()[BEST_TONE])
        ticks = (0.0, LOW, 0.5, HIGH, 1.0)
        ax.set_yticks(ticks, list(map(percent, ticks)))
        ax.set_xlim(left=0)
        ax.grid(color=light_colours()["grid"])

    return figure(title, 2.8, draw)


def _rows(plan: ShownPlan) -> list[tuple[str, ...]]:
    return [
        (
            row.candidate.name,
            *(hours_text(row.hours_at(share)) for share in (LOW, 0.5, HIGH)),
            *(usd_text(row.usd_at(share)) for share in (LOW, 0.5, HIGH)),
            *(plan.risk_text(row), usd_text(row.losses), percent(row.spot_share)),
        )
        for row in plan.rows
    ]
