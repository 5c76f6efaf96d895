"""What happened in a run, for people: tables in the terminal, one self-contained HTML page, and
JSON. `harness report` is this.

Everything is read from the bucket and nothing is written to it; facts, step records and manifests
are all that is needed, so a report of a run that is going on, or whose machines are all dead, is
made in the same way.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.views.summary import Summary

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.core.facts import NodeBilled, NodeFound, Unreadable
from harness.views.outlook import interval_words, outlook_rows
from harness.views.painting import BUCKETS, NANO
from harness.views.rows import BAD_ENDS, AttemptRow
from harness.views.setups import setup_rows, shift_words
from harness.views.snapshot_costs import SnapshotCosts, snapshot_costs
from harness.views.words import (
    cost_text,
    duration,
    money,
    nbytes,
    number,
    percent,
    plural,
    spread,
    steps_text,
)
from storage.text import plain

T = TypeVar("T")
MOST_ROWS = 200  # of a table in a terminal
COLOURS = {  # of the terminal; the page has its own, for light and dark
    "useful": "green",
    "straggle": "bright_green",
    "redone": "red",
    "snapshot": "blue",
    "provision": "bright_magenta",
    "setup": "bright_blue",
    "start": "magenta",
    "reform": "yellow",
    "drain": "cyan",
    "drained": "bright_cyan",
    "idle": "bright_black",
    "other": "white",
}
MEANING = {
    "useful": "steps of the committed lineage",
    "redone": "work lost with its world, done again",
    "straggle": "in those steps: waiting for the slowest rank",
    "snapshot": "standing still to copy the state",
    "provision": "booting, SkyPilot's runtime, copying files",
    "setup": "the task's setup: installing packages",
    "start": "its agent's begin to its first step: importing, first restore",
    "reform": "between worlds: rendezvous, restart, restore",
    "drain": "after the last step, until its agent had ended",
    "drained": "its agent had ended; paid until the node was gone",
    "idle": "up while others trained",
    "other": "between steps: validation, logging",
}


def unread_text(unread: Sequence[Unreadable]) -> str:
    return (
        f"{plural(len(unread), 'fact')} could not be read (see: harness verify), the first: "
        f"{unread[0]}"
    )


def headline(s: Summary) -> list[tuple[str, str]]:
    """What a person wants to know first."""
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
    if s.losses and not all(map(math.isnan, s.losses)):  # of a loop that tells none
        rows.append(("loss", f"{number(s.losses[0])} → {number(s.losses[1])}"))
    if s.validations:
        rows.append(
            (
                s.validation_name.replace("_", " "),
                f"{number(s.validations[0])} → {number(s.validations[1])}",
            )
        )
    rows += outlook_rows(s)
    away = f" (and {duration(s.away_s)} between launches)" if s.away_s >= 1 else ""
    world = f"{low_high[0]}" if low_high[0] == low_high[1] else f"{low_high[0]} to {low_high[1]}"
    rows += [
        ("wall time", duration(s.wall_s) + away),
        (
            "world",
            f"{world} ranks in {plural(len([e for e in ledger.epochs if e.steps]), 'epoch')}",
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
        ("cost", cost_text(s)),
    ]
    return rows


# ---- terminal ------------------------------------------------------------------------------------
def print_report(summary: Summary, console: Console) -> None:
    """The report as tables. Without a terminal: the same without colours."""
    console.print(render(summary), highlight=False)


def render(s: Summary) -> Group:
    parts: list[Any] = [Text(""), Text(plain(s.url), style="bold"), _headline_table(s)]
    parts += [Text(f"! {plain(p)}", style="yellow") for p in s.problems]
    sections = (
        ("Attempts", _attempts_table),
        ("Epochs", _epochs_table),
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
    """Those that a terminal shows; the page and --json have all."""
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


def attempt_end(a: AttemptRow) -> str:
    if not a.end and a.gone_s is not None:
        return "not heard of any more"
    if not a.end:
        return "still there" if a.up_s is not None else "not up yet"
    return a.end + (f" ({a.reason})" if a.reason and a.reason != a.end else "")


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


def refusals(n: int) -> str:
    return f"and {plural(n, 'attempt')} that found no capacity (nothing billed)"


def _epochs_table(s: Summary) -> Any:
    if not s.ledger.epochs:
        return None
    right = ("#", "world", "accum", "lost", "took")
    table = _table(
        "#",
        "world",
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
            spread(e.shares),
            steps_text(e),
            Text(plain(e.ended) or "goes on"),
            Text(str(e.steps_lost), style="red" if e.steps_lost else "dim"),
            duration(e.lost_s),
        )
    note = (
        "shares: micro-batches of each rank, accum: of the busiest; lost: steps to redo; took: "
        "time until the next world trained"
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
            bar = Text("█" * max(1, round(20 * share)), style=COLOURS[bucket], no_wrap=True)
            table.add_row(
                bucket,
                bar,
                percent(share),
                duration(ledger.ns[bucket] / NANO),
                money(ledger.nusd[bucket] / NANO),
                Text(MEANING[bucket], style="dim", no_wrap=True, overflow="ellipsis"),
            )
    table.add_row(
        "billed", "", "100 %", duration(ledger.billed_s), money(ledger.usd), "", style="bold"
    )
    table.show_header = False
    return table


def money_rows(s: Summary) -> list[tuple[str, float, str]]:
    cost = s.ledger.cost
    rates = [f"{money(1000 * cost.spot_usd / s.step)} per 1,000 steps"] if s.step else []
    rates += [] if (usd := s.usd_per_1m_tokens) is None else [f"{money(usd)} per million tokens"]
    unpriced = sum(a.billed_s for a in s.ledger.attempts if not a.usd_per_h and not a.billed_nusd)
    rates += [f"nobody knows the price of {duration(unpriced)} of nodes"] if unpriced else []
    clusters = {t.fact.member for t in s.facts if isinstance(t.fact, NodeFound) and t.fact.cluster}
    billed = {t.fact.member for t in s.facts if isinstance(t.fact, NodeBilled)}
    if any(a.name in clusters - billed for a in s.ledger.attempts):
        rates.append("without what machines cost after their agents' end (harness costs --ask-sky)")
    rows = [("paid", cost.spot_usd, ", ".join(rates))]
    if cost.on_demand_usd:
        rows += [
            ("the same node-hours on demand", cost.on_demand_usd, f"saved {percent(cost.saved)}"),
            (
                "an on-demand run that nothing disturbs",
                cost.undisturbed_usd,
                f"saved {percent(cost.saved_undisturbed)}",
            ),
        ]
    if s.store and s.store.stored_nbytes:
        note = (
            f"estimate: {nbytes(s.store.stored_nbytes)} of snapshots; "
            f"{money(s.store.month_usd)} for each month that they are kept"
        )
        rows.append(("the bucket's storage meanwhile", s.store.storage_usd, note))
    if s.store and s.store.moved:
        ways = "; ".join(f"{nbytes(m.nbytes)} {m.source} to {m.target}" for m in s.store.moved)
        rows.append(("data between places", s.store.moved_usd, f"estimate: {ways}"))
    if s.data:
        read = ", ".join(f"{nbytes(n)} from {where}" for where, n in sorted(s.data.nbytes.items()))
        note = f"estimate: {s.data.requests:,} requests; {read}"
        rows.append(("reading data", s.data.requests_usd, note))
    return rows


def _money_table(s: Summary) -> Any:
    if not s.ledger.billed_ns:
        return None
    table = _table("", "$", "", right=("$",))
    for name, usd, note in money_rows(s):
        table.add_row(name, money(usd), Text(note, style="dim"))
    table.show_header = False
    return table


def snapshot_rows(s: Summary) -> list[tuple[str, str]]:
    if not s.snapshots:
        return []
    whys: dict[str, int] = {}
    for one in s.snapshots:
        whys[one.why] = whys.get(one.why, 0) + 1
    return [
        (
            "committed",
            f"{len(s.snapshots)} ({', '.join(f'{n} {why}' for why, n in whys.items())}); {s.kept} "
            "in the bucket now",
        ),
        (
            "bytes",
            f"{nbytes(median(x.nbytes for x in s.snapshots))} each, "
            f"{nbytes(sum(x.nbytes for x in s.snapshots))} written",
        ),
        (
            "training stood still",
            f"{duration(median(x.stall_s for x in s.snapshots))} (median), "
            f"{_most(x.stall_s for x in s.snapshots)}",
        ),
        (
            "time to commit",
            f"{duration(median(x.commit_s for x in s.snapshots))} (median), "
            f"{_most(x.commit_s for x in s.snapshots)}",
        ),
        ("cost the training", _costs_text(snapshot_costs(s.snapshots, s.ledger.epochs))),
        *([("due", words)] if (words := interval_words(s.snapshots[-1])) else []),
    ]


def _costs_text(costs: SnapshotCosts) -> str:
    causes = (
        ("blocked", costs.blocked_s),
        ("slower steps beside the sending", costs.slower_s),
        ("waiting for commits", costs.waited_s),
    )
    return (
        f"{duration(costs.total_s)}, {percent(costs.share)} of it: "
        f"{', '.join(f'{what} {duration(seconds)}' for what, seconds in causes)}"
    )


def _most(values: Any) -> str:
    return f"at most {duration(max(values))}"


def _snapshots_table(s: Summary) -> Any:
    rows = snapshot_rows(s)
    return _grid(rows) if rows else None


def verdict(in_time: bool | None, cancelled: bool) -> str:
    return (
        "cancelled"
        if cancelled
        else {True: "in time", False: "TOO LATE", None: "nothing to save"}[in_time]
    )


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
    from harness.views.postmortem_text import overview  # which renders with this file's words

    return overview(s.postmortem, s.started_s) if s.postmortem.interruptions else None


def _side_jobs_table(s: Summary) -> Any:
    if not s.side_jobs:
        return None
    table = _table("watch", "snapshots", "newest", "", right=("snapshots",))
    for one in s.side_jobs:
        step, metrics = one.rows[-1]
        said = [f"{name} {number(metrics[name])}" for name in one.metrics[:4] if name in metrics]
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
        rows.append((f"epoch {shift.epoch}, {shift.action}", shift_words(shift)))
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
    """One page that needs nothing else: no network, no fonts, no libraries."""
    from harness.views.page import page

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(summary), encoding="utf-8")
