"""Post-mortems as text for a terminal, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.core.formatting import clock, duration, money, plural
from harness.ledger.bill import NANO, AttemptRow
from harness.look.pages.html_parts import asset, render
from harness.look.pages.lane_chart import offset, picture
from harness.look.postmortems.interruption import (
    KINDS,
    MOMENTS,
    Alternative,
    Interruption,
    Losses,
    TouchedNode,
)
from harness.look.postmortems.postmortem import Postmortem
from harness.look.reports.report_rows import COLOURS, grace_text, verdict
from storage.terminal_text import plain

COLUMNS = 60  # width of a lane
SMALLEST_USD = 5e-5  # smaller amounts are shown as 0, without a sign
LETTERS = {"stack": 3000}  # of a moment that are shown; of others: 300
STYLES = {
    "notice": "yellow",
    "trouble": "red",
    "gone": "red",
    "quarantined": "red",
    "staged": "blue",
    "committed": "blue",
    "first step": "green",
    "caught up": "green",
    "whole": "green",
}
TONES = {"loss": "red", "crash": "red", "hang": "red", "health": "red", "notice": "yellow"}


# ---- words that the page uses too ----------------------------------------------------------------
def lost_text(losses: Losses) -> str:
    """Return the losses as text: `7 steps, 24.2 s of node time, $0.011`."""
    if not losses.billed_ns and not losses.steps:
        return "nothing"
    parts = [plural(losses.steps, "step")] if losses.steps else []
    return ", ".join([*parts, f"{duration(losses.billed_s)} of node time", money(losses.usd)])


def counted(found: Sequence[Interruption]) -> str:
    """Return how many there are as text: `3 interruptions, 1 resize`; "" if there are none."""
    resizes = sum(one.wanted for one in found)
    numbers = ((len(found) - resizes, "interruption"), (resizes, "resize"))
    return ", ".join(plural(n, what) for n, what in numbers if n)


def parts_text(losses: Losses) -> str:
    """Return the lost time by bucket, the largest first: `redone 17.7 s, reform 8.1 s`."""
    spent = sorted(((n, b) for b, n in losses.ns.items() if n), reverse=True)
    return ", ".join(f"{bucket} {duration(n / NANO)}" for n, bucket in spent)


def saved_text(one: Interruption) -> str:
    """Return the steps, time and money that the notice saved, or "" if nothing is known."""
    if one.saved is None:
        return ""
    s = one.saved
    return (
        f"{plural(s.steps, 'step')} ({s.first_step}–{s.last_step}) that were in no snapshot when "
        f"the notice came: {duration(s.node_s)} of node time, {money(s.usd)}"
    )


def world_text(one: Interruption) -> str:
    before, after = one.world
    if not one.epochs:
        return f"{plural(before, 'rank')}, not disturbed" if before else ""
    return f"{plural(before, 'rank')} → " + (plural(after, "rank") if after else "none yet")


def node_text(n: TouchedNode) -> str:
    """Return an affected node as text, with its end and whether its notice was long enough."""
    grace = grace_text(n.grace_s, n.commit_s)
    late = "" if n.in_time is None else f": {verdict(n.in_time, cancelled=False)}"
    end = f", {n.end}" if n.end else ""
    return f"node {n.name} on {n.place or 'an unknown place'}{end}{grace}{late}"


def fact_rows(one: Interruption) -> list[tuple[str, str]]:
    """Return the facts of an interruption as rows of name and text."""
    rows = [
        ("what", f"{one.kind}: {KINDS[one.kind]}"),
        ("when", clock(one.begun_s) + " UTC"),
        *(("node", node_text(n)) for n in one.nodes[:8]),
        ("world", world_text(one)),
        ("stood still", duration(one.gap_s)),
        ("until caught up", duration(one.lasted_s)),
        ("lost", lost_text(one.losses)),
        ("went into", parts_text(one.losses)),
        ("the notice saved", saved_text(one)),
    ]
    return [(name, value) for name, value in rows if value]


def signed_text(a: Alternative) -> tuple[str, str, str]:
    """Return node time, dollars and wall time as text, each with its sign."""
    usd = a.usd if abs(a.usd) >= SMALLEST_USD else 0.0
    return _signed(a.node_s, duration), _signed(usd, money), _signed(a.wall_s, duration)


def _signed(value: float, words: Any) -> str:
    sign = "" if value == 0 else "-" if value < 0 else "+"
    return sign + str(words(abs(value)))


# ---- terminal ------------------------------------------------------------------------------------
def overview(pm: Postmortem, started_s: float, simulated: bool = False) -> RenderableType:
    """Return all interruptions as a table, or a sentence if there were none. `simulated`: the
    dollars are."""
    if not pm.interruptions:
        return Text("no interruptions: the run was never disturbed")
    table = _table("#", "at", "what", "ranks", "stood", "caught up", "lost", "$")
    for one in pm.interruptions:
        table.add_row(
            str(one.number),
            f"+{duration(one.begun_s - started_s)}",
            Text.assemble((one.kind, TONES.get(one.kind, "")), f": {plain(one.cause)}"),
            " → ".join(str(n or "–") for n in (one.world if one.epochs else one.world[:1])),
            duration(one.gap_s),
            duration(one.lasted_s),
            f"{one.losses.steps:,}",
            money(one.losses.usd),
        )
    made_up = ", at simulated prices" if simulated else ""
    note = (
        f"{counted(pm.interruptions)}{made_up}; stood: without a step; caught up: after so long; "
        "lost: steps"
    )
    parts: list[RenderableType] = [table, Text(note, style="dim")]
    if pm.what_if:
        parts += [Text("\nOver the whole run, this would have cost more (+) or less (-):")]
        parts += [_alternatives(pm.what_if)]
    return Group(*parts)


def details(one: Interruption, attempts: Sequence[AttemptRow]) -> RenderableType:
    """Return one interruption: its nodes over time, its moments, its cost and what was saved."""
    what = "Resize" if one.wanted else "Interruption"
    head = Text(f"\n{what} {one.number}: {plain(one.cause)}", style="bold")
    facts = Table.grid(padding=(0, 2))
    for name, value in fact_rows(one):
        facts.add_row(Text(name, style="dim"), Text(plain(value)))
    parts: list[RenderableType] = [head, Padding(facts, (0, 0, 0, 1)), _lanes(one, attempts)]
    parts.append(Padding(_moments(one), (1, 0, 0, 1)))
    if one.what_if:
        parts += [Text("\nWhat else would have cost more (+) or less (-):", style="dim")]
        parts += [Padding(_alternatives(one.what_if), (0, 0, 0, 1))]
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    for name in columns:
        right = name in ("#", "at", "stood", "caught up", "lost", "$", "node time")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table


def _moments(one: Interruption) -> Table:
    table = _table("at", "", "", "")
    table.show_header = False
    for m in one.moments:
        table.add_row(
            offset(m.t - one.begun_s),
            f"node {plain(m.node)}" if m.node else "",
            Text(MOMENTS[m.what], style=STYLES.get(m.what, "")),
            Text(plain(m.text[: LETTERS.get(m.what, 300)]), style="dim"),
        )
    return table


def _alternatives(found: Sequence[Alternative]) -> Table:
    table = _table("", "node time", "$", "wall time", "")
    for a in found:
        node, usd, wall = signed_text(a)
        table.add_row(Text(a.name), node, usd, wall, Text(plain(a.note), style="dim"))
    return table


def _lanes(one: Interruption, attempts: Sequence[AttemptRow]) -> RenderableType:
    """Return a lane per node: the use of its time during the interruption, to scale."""
    first, last = one.begun_s, one.over_s
    if one.lasted_s is not None:
        last = max(one.begun_s + one.lasted_s, *(t or 0.0 for t in one.stood_s))
    step = max(1, round((last - first) * NANO) // COLUMNS)
    start = round(first * NANO)
    grid = Table.grid(padding=(0, 1))
    for row in attempts:
        if not row.segments or row.segments[-1][1] <= start:
            continue
        if row.segments[0][0] >= start + step * COLUMNS:
            continue
        lane = Text()
        for i in range(COLUMNS):
            bucket = _bucket_at(row, start + step * i, start + step * (i + 1))
            lane.append("█" if bucket else " ", style=COLOURS.get(bucket, ""))
        grid.add_row(Text(f"node {plain(row.name)}"), lane)
    grid.add_row("", Text(f"{duration(last - first)} from left to right", style="dim"))
    return Padding(grid, (1, 0, 0, 1))


def _bucket_at(row: AttemptRow, begin: int, end: int) -> str:
    """Return the bucket of most of [begin, end) (ns), or "" if the node was not there."""
    most, found = 0, ""
    for a, b, bucket in row.segments:
        inside = min(b, end) - max(a, begin)
        if inside > most:
            most, found = inside, bucket
    return found


# ---- JSON ----------------------------------------------------------------------------------------
def as_json(pm: Postmortem) -> dict[str, Any]:
    """Return plain JSON (no NaN): seconds and dollars, with exact nanoseconds and nano-dollars."""
    body = {
        "interruptions": [
            {
                **dataclasses.asdict(one),
                "gap_s": one.gap_s,
                "lasted_s": one.lasted_s,
                "losses": _losses(one.losses),
                "what_if": [dataclasses.asdict(a) for a in one.what_if],
            }
            for one in pm.interruptions
        ],
        "rest": _losses(pm.rest),
        "what_if": [dataclasses.asdict(a) for a in pm.what_if],
        "measured": {**dataclasses.asdict(pm.measured), "best_s": pm.measured.best_s},
    }
    cleaned: dict[str, Any] = _finite(body)
    return cleaned


def _losses(losses: Losses) -> dict[str, Any]:
    return {
        "ns": losses.ns,
        "nusd": losses.nusd,
        "node_s": losses.billed_s,
        "gpu_s": losses.gpu_s,
        "usd": losses.usd,
        "steps": losses.steps,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Post-mortems as HTML: a section of the report, and a separate page.

MOST_DRAWN = 100  # interruptions with a picture; the newest


def interruptions_view(
    pm: Postmortem, attempts: Sequence[AttemptRow], started_s: float, most: int = MOST_DRAWN
) -> dict[str, Any]:
    """Return what `interruptions.html` shows: the newest `most` interruptions, and the whole run's
    alternatives."""
    shown = [
        {
            "one": one,
            "after_s": one.begun_s - started_s,
            "lost": lost_text(one.losses),
            "facts": fact_rows(one),
            "picture": picture(one, attempts),
            "what_if": _alternatives_view(one.what_if),
        }
        for one in pm.interruptions[-most:]
    ]
    what_if = _alternatives_view(pm.what_if)
    return {"shown": shown, "what_if": what_if, "counted": counted(pm.interruptions)}


def _alternatives_view(found: Sequence[Alternative]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(a.name, a.note, signed_text(a)) for a in found]


def postmortem_page(
    url: str,
    pm: Postmortem,
    attempts: Sequence[AttemptRow],
    started_s: float,
    simulated: bool = False,
) -> str:
    """Return the whole document. It is self-contained. `simulated`: the dollars are."""
    name = url.rstrip("/").rsplit("/", 1)[-1] or url
    return render(
        "look/pages/postmortem.html",
        **interruptions_view(pm, attempts, started_s),
        **{"all": pm, "name": name, "title": f"{name} – post-mortem", "url": url},
        simulated=simulated,
        lost_usd=sum(one.losses.usd for one in pm.interruptions),
        style=asset("page.css"),
    )
