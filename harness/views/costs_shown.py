"""Costs of many runs for people and programs: a table in the terminal, CSV, JSON, and one
self-contained HTML page."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.views.costs import CostRow, Costs, Spending, unpriced
from harness.views.page import document
from harness.views.page_html import asset, html_table, section, stack
from harness.views.painting import BUCKETS, NANO
from harness.views.plots import esc
from harness.views.report import MEANING
from harness.views.words import money, percent, plural
from storage.text import cell, plain

HEAD = ("runs", "paid", "hours", "saved", "wasted", "per 1k", "per 1M")
SAVED = "against the same node-hours on demand"
WASTED = "paid for all but steps that count, snapshots and what lies between steps"


def _cells(row: CostRow) -> list[str]:
    s = row.spending
    return [
        f"{row.runs:,}",
        money(s.usd),
        f"{s.hours:,.2f}",
        percent(s.saved),
        percent(s.wasted),
        _or_none(s.usd_per_1k_steps),
        _or_none(s.usd_per_1m_tokens),
    ]


def _or_none(usd: float | None) -> str:
    return "–" if usd is None else money(usd)


def _total(costs: Costs, names: Sequence[str]) -> CostRow:
    return CostRow(("all", *("" for _ in names[1:])), costs.total, len(costs.runs))


def notes(costs: Costs) -> list[str]:
    """What a reader must know besides the numbers."""
    total = costs.total
    saved = money(total.saved_usd) if total.saved_usd >= 0 else f"-{money(-total.saved_usd)}"
    found = [
        f"hours: of nodes; per 1k steps, per 1M tokens; saved: {saved} {SAVED}; wasted: "
        f"{money(total.wasted_usd)}, {WASTED}"
    ]
    if guessed := [run.name for run in costs.runs if run.whence == "path"]:
        found.append(
            f"{plural(len(guessed), 'run')} said nothing of owner, project and experiment "
            "(HARNESS_OWNER, HARNESS_PROJECT, HARNESS_EXPERIMENT): the folders stand for them"
        )
    if names := unpriced(costs.runs):
        hours = total.unpriced_ns / NANO / 3600
        found.append(
            f"nobody knows the price of {hours:,.2f} node-hours of {', '.join(names[:5])}"
            f"{' ...' if len(names) > 5 else ''}: they count $0 (docs/COSTS.md tells what to set)"
        )
    return found


# ---- terminal ------------------------------------------------------------------------------------
def print_costs(costs: Costs, names: Sequence[str], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", show_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=name == "month", min_width=7)
    for name in HEAD:
        table.add_column(name, justify="right", no_wrap=True)
    for row in costs.by(*names):
        table.add_row(*(Text(plain(key)) for key in row.keys), *_cells(row))
    total = _total(costs, names)
    table.add_section()
    table.add_row(*total.keys, *_cells(total), style="bold")
    console.print(Text(plain(costs.url), style="bold"), table, highlight=False)
    for note in notes(costs):
        console.print(Text(plain(note), style="dim"))
    for problem in costs.unread:
        console.print(Text(f"! {plain(problem)}", style="yellow"))


# ---- CSV and JSON --------------------------------------------------------------------------------
def numbers_of(s: Spending) -> dict[str, Any]:
    """For programs: dollars and hours, with the exact integers that they come from."""
    return {
        "usd": s.usd,
        "node_hours": s.hours,
        "on_demand_usd": s.on_demand_nusd / NANO,
        "saved_usd": s.saved_usd,
        "wasted_usd": s.wasted_usd,
        "steps": s.steps,
        "tokens": s.tokens,
        "usd_per_1k_steps": s.usd_per_1k_steps,
        "usd_per_1m_tokens": s.usd_per_1m_tokens,
        "unpriced_node_hours": s.unpriced_ns / NANO / 3600,
        "nusd": s.billed_nusd,
        "ns": s.billed_ns,
        **{f"{bucket}_nusd": s.nusd[bucket] for bucket in BUCKETS},
        **{f"{bucket}_ns": s.ns[bucket] for bucket in BUCKETS},
    }


def to_csv(costs: Costs, names: Sequence[str]) -> str:
    """One line for each group. Names that a spreadsheet would take for a formula get an
    apostrophe before them."""
    out = io.StringIO()
    head = [*names, "runs", *numbers_of(Spending())]
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(head)
    for row in costs.by(*names):
        said = numbers_of(row.spending).values()
        lines.writerow(
            [*map(cell, row.keys), row.runs, *("" if value is None else value for value in said)]
        )
    return out.getvalue()


def to_json(costs: Costs, names: Sequence[str]) -> dict[str, Any]:
    return {
        "url": costs.url,
        "by": list(names),
        "rows": [
            {**dict(zip(names, row.keys, strict=True)), "runs": row.runs} | numbers_of(row.spending)
            for row in costs.by(*names)
        ],
        "total": {"runs": len(costs.runs), **numbers_of(costs.total)},
        "runs": [
            {"run": r.name, "url": r.url, "state": r.state, **r.people, "said_by": r.whence}
            for r in costs.runs
        ],
        "unread": list(costs.unread),
    }


# ---- HTML ----------------------------------------------------------------------------------------
def to_html(costs: Costs, names: Sequence[str]) -> str:
    """The whole page; nothing is fetched, no script runs."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<style>{asset('page.css')}</style>"
    )
    ways = [tuple(names), *(way for way in (("month",), ("owner",), ("project",)) if way != names)]
    total, problems = costs.total, "".join(f"<li>{esc(p)}</li>" for p in costs.unread)
    parts = [
        section("Where the money went", stack(_shares(total)) + _buckets(total)),
        *(section(f"By {', '.join(way)}", _table(costs, way)) for way in dict.fromkeys(ways)),
        section("Not read in full", f"<ul>{problems}</ul>" if problems else ""),
    ]
    body = (
        f"<header><h1>{esc(costs.url)}</h1><p>{esc(plural(len(costs.runs), 'run'))}, "
        f"{esc(money(total.usd))} for {total.hours:,.1f} node-hours; saved "
        f"{esc(percent(total.saved))} {SAVED}, wasted {esc(percent(total.wasted))}</p></header>"
        + "".join(one.html() for one in parts if one)
        + "".join(f"<p class=note>{esc(note)}</p>" for note in notes(costs))
    )
    return document("What runs cost", head, f"<main>{body}</main>")


def _table(costs: Costs, names: Sequence[str]) -> str:
    rows = [*costs.by(*names), _total(costs, names)]
    cells = [[esc(cell) for cell in (*row.keys, *_cells(row))] for row in rows]
    right = {len(names) + i for i in range(len(HEAD))}
    return html_table([esc(name) for name in (*names, *HEAD)], cells, right, most=len(cells))


def _shares(s: Spending) -> list[tuple[str, float, str]]:
    """By money, or by time where nothing has a price."""
    weights = s.nusd if s.billed_nusd else s.ns
    whole = sum(weights.values())
    shares = [(b, weights[b] / whole) for b in BUCKETS if weights[b]]
    return [(f"b-{b}", share, f"{b}: {percent(share)}") for b, share in shares]


def _buckets(s: Spending) -> str:
    rows = [
        [
            f"<u class='b-{b}'></u> {b}<small>{esc(MEANING[b])}</small>",
            f"{s.ns[b] / NANO / 3600:,.2f}",
            esc(money(s.nusd[b] / NANO)),
            esc(percent(s.nusd[b] / s.billed_nusd if s.billed_nusd else 0.0)),
        ]
        for b in BUCKETS
        if s.ns[b]
    ]
    return html_table(["", "node-hours", "$", "share"], rows, {1, 2, 3}) if rows else ""
