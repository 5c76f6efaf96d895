"""A plan as people read it: a table with a picture of the spread in it, JSON, and a page."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.proof import forecasting
from harness.proof.forecasting import ASSUMED, HIGH, LOW, PlanForecast, PlannedRun
from harness.views.words import percent
from storage.text import plain

STRIP = 24  # letters of a row's picture
WIDE = 110  # columns of a terminal that has room for it


@dataclass(frozen=True)
class ShownPlan:
    """`best`: None if no candidate takes so little risk. `sources`: of prices, speed and history,
    in words. `launch`: the command that does as the best one."""

    run: PlannedRun
    rows: tuple[PlanForecast, ...]  # the best first
    best: PlanForecast | None
    most_risk: float
    sources: tuple[str, ...]
    launch: tuple[str, ...] = ()
    dropped: int = 0

    def risk(self, row: PlanForecast) -> float:
        """Share of the markets in which it misses the deadline, or costs more than the budget."""
        return forecasting.risk(row, self.run)

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
            "most_risk": self.most_risk,
            "launch": list(self.launch),
            "sources": list(self.sources),
            "assumed": list(ASSUMED),
        }

    def _row_json(self, row: PlanForecast) -> dict[str, Any]:
        return {**row.to_json(), "risk": self.risk(row)}


def hours_text(hours: float) -> str:
    """Short."""
    if not math.isfinite(hours):
        return "never"
    return f"{hours:.3g}" if hours < 1000 else f"{hours:,.0f}"


def usd_text(usd: float) -> str:
    """Short, to three digits."""
    if not math.isfinite(usd):
        return "-"
    if usd >= 1000:
        rounded = round(usd, 2 - math.floor(math.log10(usd)))
        return f"{rounded:,.0f}"
    return f"{usd:.3g}"


def strip(three: Sequence[float], least: float, most: float) -> str:
    """From p10 to p90, with the median, on a line from `least` to `most`."""
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
    """The table, what is best, and what it rests on."""
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
    """What is best and why, what it rests on, and how to do it."""
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
        if plan.launch:
            found.append("launch  " + shlex.join(plan.launch))
    if plan.dropped:
        found.append(f"        {plan.dropped} more were tried in fewer markets, and were worse")
    found += [f"from    {source}" for source in plan.sources]
    found += [f"assumed {words}" for words in ASSUMED]
    return found


def _three(at: Callable[[float], float], text: Callable[[float], str]) -> str:
    low, middle, high = text(at(LOW)), text(at(0.5)), text(at(HIGH))
    return middle if low == high else f"{middle} ({low}..{high})"


def cumulated(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of the markets with at most that), of those that are finite."""
    ordered = sorted(values)
    return [(v, (at + 1) / len(ordered)) for at, v in enumerate(ordered) if math.isfinite(v)]
