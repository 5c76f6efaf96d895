"""The report of a run for people (`harness runs report`): tables in the terminal, one
self-contained HTML page, and JSON.

Everything is read from the bucket and nothing is written to it. Facts, step records and manifests
suffice, so the report is made in the same way for a run that goes on and for one whose machines
are all dead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.bucket.phases import phases_text
from harness.core.formatting import (
    duration,
    money,
    number_text,
    percent,
    plural,
    shares_text,
)
from harness.ledger.bill import BAD_ENDS, BUCKETS, NANO, AttemptRow
from harness.look.pages.report_page import page
from harness.look.postmortems.postmortem_text import as_json, overview
from harness.look.reports.cold_start import cold_start_rows, cold_starts
from harness.look.reports.outlook import ChosenWaits, outlook_rows
from harness.look.reports.report_rows import (
    COLOURS,
    MEANING,
    attempt_end,
    money_rows,
    refusals,
    snapshot_rows,
    steps_text,
    verdict,
)
from harness.look.reports.setup_report import setup_rows, shift_words
from harness.look.reports.summary import Summary, snapshot_costs
from storage.terminal_text import plain

T = TypeVar("T")
MOST_ROWS = 200  # rows of a table in a terminal


def headline(s: Summary) -> list[tuple[str, str]]:
    """Return the most important facts about the run as pairs of name and text."""
    ledger, low_high = s.ledger, s.worlds
    up = [a for a in ledger.attempts if a.up_s is not None]
    taken = sum(
        a.end in ("preempted", "lost")
        or any(n.member in a.members and n.kind == "kill" for n in ledger.notices)
        for a in up
    )
    rows = [
        ("state", s.state + (f": {s.reason}" if s.reason else "")),
        (
            "steps",
            f"{s.step:,} of {s.total_steps:,} committed"
            if s.total_steps
            else f"{s.step:,} committed",
        ),
    ]
    if phases := phases_text(s.phases):
        rows.append(("phases", phases))
    if s.losses and not all(map(math.isnan, s.losses)):  # all NaN: the loop reports no loss
        rows.append(("loss", f"{number_text(s.losses[0])} → {number_text(s.losses[1])}"))
    if s.validations:
        rows.append(
            (
                s.validation_name.replace("_", " "),
                f"{number_text(s.validations[0])} → {number_text(s.validations[1])}",
            )
        )
    rows += outlook_rows(s)
    away = f" (and {duration(s.away_s)} between launches)" if s.away_s >= 1 else ""
    world = f"{low_high[0]}" if low_high[0] == low_high[1] else f"{low_high[0]} to {low_high[1]}"
    rows += [
        ("wall time", duration(s.wall_s) + away),
        (
            "ranks",
            f"{world} in {plural(len([e for e in ledger.epochs if e.steps]), 'generation')}",
        ),
        (
            "nodes",
            f"{plural(len(up), 'node')} used, {taken} taken away; "
            f"{plural(ledger.steps_lost, 'step')} lost and redone",
        ),
        (
            "goodput",
            f"{percent(ledger.goodput)} of {duration(ledger.billed_s)} billed went into steps that "
            "count",
        ),
        *cold_start_rows(s),
        ("simulated cost" if s.simulated else "cost", _cost_text(s)),
    ]
    return rows


# ---- terminal ------------------------------------------------------------------------------------
def print_report(summary: Summary, console: Console) -> None:
    """Print the report as tables. Colours are left out if the output is not a terminal."""
    console.print(render(summary), highlight=False)


def render(s: Summary) -> Group:
    parts: list[Any] = [Text(""), Text(plain(s.url), style="bold"), _headline_table(s)]
    parts += [Text(f"! {plain(p)}", style="yellow") for p in s.problems]
    sections = (
        ("Attempts", _attempts_table),
        ("Generations", _epochs_table),
        ("Where billed time went", _buckets_table),
        ("Money", _money_table),
        ("Snapshots", _snapshots_table),
        ("Side jobs", _side_jobs_table),
        ("Notices", _notices_table),
        ("Interruptions", _interruptions_table),
        ("Alerts", _alerts_table),
        ("Trouble", _marks_table),
        ("Setup", _setup_table),
        ("Logbook", _logbook_lines),
    )
    for title, make in sections:
        table = make(s)
        if table is not None:
            parts += [Text(f"\n{title}", style="bold"), Padding(table, (0, 0, 0, 1))]
    return Group(*parts)


def _newest(table: Table, rows: Sequence[T]) -> Sequence[T]:
    """Return the newest `MOST_ROWS` rows; if some are left out, add a caption to `table`."""
    if len(rows) > MOST_ROWS:
        table.caption = f"the newest {MOST_ROWS} of {len(rows):,}; the page and --json have all"
    return rows[-MOST_ROWS:]


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _grid(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="dim"), Text(plain(value)))
    return table


def _headline_table(s: Summary) -> Padding:
    colour = {"done": "green", "finished": "green", "failed": "red", "stopped": "yellow"}.get(
        s.state, "cyan"
    )
    table = Table.grid(padding=(0, 2))
    for name, value in headline(s):
        table.add_row(
            Text(name, style="dim"),
            Text(plain(value), style=f"bold {colour}" if name == "state" else ""),
        )
    return Padding(table, (0, 0, 0, 1))


def _attempts_table(s: Summary) -> Any:
    used = [a for a in s.ledger.attempts if a.up_s is not None or a.end != "no-capacity"]
    refused = len(s.ledger.attempts) - len(used)
    if not used and not refused:
        return None
    table = _table(
        "#",
        "offer",
        "up",
        "why it ended",
        "billed",
        "useful",
        "$",
        right=("#", "up", "billed", "useful", "$"),
    )
    for a in _newest(table, used):
        up = "–" if a.up_s is None else f"+{duration(a.up_s - s.started_s)}"
        useful = percent(a.ns["useful"] / a.billed_ns) if a.billed_ns else "–"
        style = "red" if a.end in BAD_ENDS else ""
        table.add_row(
            Text(plain(a.name)),
            Text(plain(a.offer or a.accelerator)),
            up,
            Text(plain(attempt_end(a)), style=style),
            duration(a.billed_s),
            useful,
            money(a.usd),
        )
    return Group(table, Text(refusals(refused), style="dim")) if refused else table


def _epochs_table(s: Summary) -> Any:
    if not s.ledger.epochs:
        return None
    right = ("#", "ranks", "accum", "lost", "took")
    table = _table(
        "#",
        "ranks",
        "nodes",
        "accum",
        "shares",
        "steps",
        "why it ended",
        "lost",
        "took",
        right=right,
    )
    for e in _newest(table, s.ledger.epochs):
        table.add_row(
            str(e.epoch),
            str(e.world),
            Text(plain(" ".join(e.attempts))),
            str(e.accumulation or "–"),
            shares_text(e.shares),
            steps_text(e),
            Text(plain(e.ended) or "goes on"),
            Text(str(e.steps_lost), style="red" if e.steps_lost else "dim"),
            duration(e.lost_s),
        )
    note = (
        "shares: micro-batches of each rank, accum: of the busiest; lost: steps to redo; took: "
        "time until the next generation trained"
    )
    return Group(table, Text(note, style="dim"))


def _buckets_table(s: Summary) -> Any:
    ledger = s.ledger
    if not ledger.billed_ns:
        return None
    table = _table("", "", "share", "time", "$", "", right=("share", "time", "$"))
    for bucket in BUCKETS:
        share = ledger.ns[bucket] / ledger.billed_ns
        if ledger.ns[bucket]:
            bar = Text("█" * max(1, round(10 * share)), style=COLOURS[bucket], no_wrap=True)
            table.add_row(
                bucket,
                bar,
                percent(share),
                duration(ledger.ns[bucket] / NANO),
                money(ledger.nusd[bucket] / NANO),
                Text(MEANING[bucket], style="dim"),
            )
    table.add_row(
        "billed", "", "100 %", duration(ledger.billed_s), money(ledger.usd), "", style="bold"
    )
    table.show_header = False
    return table


def _money_table(s: Summary) -> Any:
    if not s.ledger.billed_ns:
        return None
    table = _table("", "$", "", right=("$",))
    for name, usd, note in money_rows(s):
        table.add_row(name, money(usd), Text(note, style="dim"))
    table.show_header = False
    return table


def _snapshots_table(s: Summary) -> Any:
    rows = snapshot_rows(s)
    return _grid(rows) if rows else None


def _notices_table(s: Summary) -> Any:
    if not s.ledger.notices:
        return None
    table = _table(
        "at",
        "node",
        "notice",
        "from",
        "grace",
        "committed after",
        "step",
        "",
        right=("at", "grace", "committed after", "step"),
    )
    for n in _newest(table, s.ledger.notices):
        table.add_row(
            f"+{duration(n.seen_s - s.started_s)}",
            Text(plain(n.attempt or n.member)),
            Text(plain(n.kind)),
            Text(plain(n.source)),
            duration(n.grace_s),
            duration(n.commit_s),
            str(n.step or "–"),
            Text(
                verdict(n.in_time, n.cancelled),
                style={True: "green", False: "bold red", None: "dim"}[n.in_time],
            ),
        )
    return table


def _marks_table(s: Summary) -> Any:
    if not s.marks:
        return None
    table = _table("at", "", "", right=("at",))
    for m in s.marks[-20:]:
        table.add_row(f"+{duration(m.t - s.started_s)}", m.what, Text(plain(m.text[:400])))
    table.show_header = False
    return table


def _interruptions_table(s: Summary) -> Any:
    shown = s.postmortem.interruptions
    return overview(s.postmortem, s.started_s, s.simulated) if shown else None


def _side_jobs_table(s: Summary) -> Any:
    if not s.side_jobs:
        return None
    table = _table("watch", "snapshots", "newest", "", right=("snapshots",))
    for one in s.side_jobs:
        step, metrics = one.rows[-1]
        said = [
            f"{name} {number_text(metrics[name])}" for name in one.metrics[:4] if name in metrics
        ]
        said += [
            f"lowest {name} at step {one.lowest(name):,}"
            for name in one.metrics[:1]
            if one.lowest(name)
        ]
        words = Text(plain("; ".join(said)))
        table.add_row(Text(plain(one.name)), f"{len(one.rows):,}", f"step {step:,}", words)
    return table


def _setup_table(s: Summary) -> Any:
    rows = setup_rows(s.setups)
    for shift in s.setups.shifts[-20:]:
        rows.append((f"generation {shift.epoch}, {shift.action}", shift_words(shift)))
    return _grid(rows) if rows else None


def _logbook_lines(s: Summary) -> Any:
    lines = s.logbook.lines() if s.logbook.entries else []
    return Text("\n".join(lines)) if lines else None


def _alerts_table(s: Summary) -> Any:
    if not s.alerts:
        return None
    table = _table("at", "", "", right=("at",))
    for a in s.alerts[-20:]:
        style = {"critical": "red", "warning": "yellow"}.get(a.severity, "dim")
        told = Text(plain(f"{a.title}: {a.text}")[:400])
        at = f"+{duration(max(0.0, a.t - s.started_s))}"
        table.add_row(at, Text(plain(a.severity), style=style), told)
    table.show_header = False
    return table


# ---- the page ----------------------------------------------------------------------------------
def write_html(summary: Summary, path: str | Path) -> None:
    """Write the report as one self-contained page: no network, no fonts, no libraries."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(summary), encoding="utf-8")


# The report of a run as plain JSON: `harness runs report --json`.


def to_json(s: Summary) -> dict[str, Any]:
    """Return the numbers as plain JSON (no NaN): seconds and dollars, and the ledger's exact
    nanoseconds and nano-dollars."""
    ledger = s.ledger

    def attempt(a: AttemptRow) -> dict[str, Any]:
        body = {f.name: getattr(a, f.name) for f in dataclasses.fields(a) if f.name != "segments"}
        return {**body, "billed_s": a.billed_s, "usd": a.usd}

    body = {
        "url": s.url,
        "state": s.state,
        "reason": s.reason,
        "step": s.step,
        "total_steps": s.total_steps,
        "phases": [{"begins": one.begins, "ends": one.ends} for one in s.phases],
        "loss": s.losses,
        "validation": {"name": s.validation_name, "points": s.validation} if s.validation else None,
        "started_s": s.started_s,
        "ended_s": s.ended_s,
        "wall_s": s.wall_s,
        "away_s": s.away_s,
        "deadline_s": s.asked.deadline_s if s.asked else None,
        "waited": dataclasses.asdict(ChosenWaits.of(s.facts, s.ended_s)),
        "worlds": s.worlds,
        "goodput": ledger.goodput,
        "steps_lost": ledger.steps_lost,
        "billed_s": ledger.billed_s,
        "buckets": {
            b: {"s": ledger.ns[b] / NANO, "ns": ledger.ns[b], "nusd": ledger.nusd[b]}
            for b in BUCKETS
        },
        "cost": {
            **dataclasses.asdict(ledger.cost),
            "saved_usd": ledger.cost.saved_usd,
            "saved": ledger.cost.saved,
            "usd_per_1k_steps": 1000 * ledger.usd / s.step if s.step else None,
            "usd_per_1m_tokens": s.usd_per_1m_tokens,
        },
        "cold_starts": [dataclasses.asdict(one) for one in cold_starts(s)],
        "attempts": [attempt(a) for a in ledger.attempts],
        "epochs": [
            {**dataclasses.asdict(e), "accumulation": e.accumulation} for e in ledger.epochs
        ],
        "notices": [
            {**dataclasses.asdict(n), "grace_s": n.grace_s, "in_time": n.in_time}
            for n in ledger.notices
        ],
        "snapshots": _snapshots(s),
        "trouble": [dataclasses.asdict(m) for m in s.marks],
        "problems": s.problems,
        "alerts": [dataclasses.asdict(a) for a in s.alerts],
        "interruptions": as_json(s.postmortem),
        "speed": {
            **dataclasses.asdict(s.speed),
            "step_s": s.speed.step_s,
            "shares": s.speed.shares,
        },
        "tokens": s.tokens or None,
        "setup": s.setups.to_json(),
        "logbook": s.logbook.to_json(),
        "side_jobs": {
            one.name: [{"step": step, "metrics": metrics} for step, metrics in one.rows]
            for one in s.side_jobs
        },
        "data": s.data and {**dataclasses.asdict(s.data), "requests_usd": s.data.requests_usd},
        "store": s.store and {**dataclasses.asdict(s.store), "moved_usd": s.store.moved_usd},
    }
    cleaned: dict[str, Any] = _finite(body)
    return cleaned


def _snapshots(s: Summary) -> dict[str, Any]:
    return {
        "kept": s.kept,
        "committed": [dataclasses.asdict(x) for x in s.snapshots],
        "cost": snapshot_costs(s.snapshots, s.ledger.epochs).to_json(),
    }


def _finite(value: Any) -> Any:
    """Return `value` with NaN and infinities, which JSON lacks, replaced by `None`."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cost_text(s: Summary) -> str:
    cost = s.ledger.cost
    if not cost.on_demand_usd:
        return money(cost.spot_usd)
    sure = "" if cost.known else " (some on-demand prices are unknown)"
    return (
        f"{money(cost.spot_usd)}; {percent(cost.saved)} less than the same node-hours on demand "
        f"({money(cost.on_demand_usd)}){sure}"
    )
