"""The report as one HTML page: SVG of our own and a small inline script that shows values at the
pointer. It loads nothing from elsewhere.

`report.html` is the page, section by section; this file gives it the numbers and texts that it
shows. Called by `report.write_html` and by `web_server.py`. The page's content security policy
allows only the script written here.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from harness.bucket.phases import phases_text
from harness.core.facts import NodeFound
from harness.core.formatting import clock, duration, money, number_text, percent, plural
from harness.core.setup_record import leaves_of
from harness.ledger.bill import BAD_ENDS, BUCKETS, NANO, AttemptRow
from harness.look.pages import lane_chart
from harness.look.pages.html_parts import asset, render
from harness.look.pages.line_plots import PlotFrame, PlotTrace, plot
from harness.look.pages.speed_charts import (
    hardware,
    loss_chart,
    loss_keys,
    norm_chart,
    scaling,
    step_time,
)
from harness.look.postmortems.postmortem_text import interruptions_view
from harness.look.reports.report_rows import (
    MEANING,
    attempt_end,
    money_rows,
    refusals,
    snapshot_rows,
    steps_text,
    verdict,
)
from harness.look.reports.setup_report import setup_rows, shift_words
from harness.look.reports.summary import Summary
from harness.look.watch.side_jobs import SideJobRows

MOST_ALERTS = 100  # the newest
MOST_NOTES = 100  # of the logbook, the newest
MOST_LEAVES = 400  # values of a configuration
MOST_NUMBERS = 8  # columns of a side job
MOST_TROUBLE = 30  # the newest
BREAKS = 40  # interruptions that are drawn; `harness runs postmortem` shows all
SPEND_POINTS = 240
TONES = {"done": "good", "finished": "good", "failed": "bad", "stopped": "warn"}


# ---- documents -----------------------------------------------------------------------------------
def page(s: Summary) -> str:
    """Return the whole HTML document of the report."""
    title = f"{run_name(s.url)} – spotharness report"
    return alone_document("look/pages/report_document.html", title=title, content=content(s))


def alone_document(template: str, **values: Any) -> str:
    """Return a page that needs no other file: the template extends `alone.html`."""
    script = asset("page.js")
    own = {"script": script, "script_hash": script_hash(script), "style": asset("page.css")}
    return render(template, **own, **values)


def script_hash(script: str) -> str:
    """Return the hash by which a Content-Security-Policy names an inline script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def run_name(url: str) -> str:
    return url.rstrip("/").rsplit("/", 1)[-1] or url


def content(s: Summary) -> str:
    """Return everything that the page shows, as HTML without the surrounding document."""
    return render("look/pages/report.html", **view(s))


# ---- what it shows -------------------------------------------------------------------------------
def view(s: Summary) -> dict[str, Any]:
    """Return the values of `report.html`. Those that are SVG are drawn by this package."""
    ledger = s.ledger
    used = [a for a in ledger.attempts if a.up_s is not None or a.end != "no-capacity"]
    refused = len(ledger.attempts) - len(used)
    return {
        "s": s,
        "name": run_name(s.url),
        "tone": TONES.get(s.state, "live"),
        "about": list(_about(s)),
        "cards": _cards(s),
        "buckets": BUCKETS,
        "bad_ends": BAD_ENDS,
        "meaning": MEANING,
        "most_leaves": MOST_LEAVES,
        "loss": loss_chart(s),
        "loss_keys": loss_keys(s),
        "norm": norm_chart(s),
        "timeline": lane_chart.timeline(s),
        "up_nodes": sum(a.up_s is not None for a in ledger.attempts),
        "shown_nodes": len(lane_chart.shown_rows(s)),
        "most_nodes": lane_chart.MOST_ROWS,
        "waterfall": list(_waterfall(s)) if ledger.billed_ns else [],
        "costs": money_rows(s) if ledger.billed_ns else [],
        "paid_over_time": _over_time(s),
        "places": _places(s),
        "step_time": step_time(s),
        "scaling": scaling(s),
        "breaks": interruptions_view(s.postmortem, ledger.attempts, s.started_s, BREAKS),
        "alerts": s.alerts[::-1][:MOST_ALERTS],
        "notes": s.logbook.entries[::-1][:MOST_NOTES],
        "attempts": [(a, attempt_end(a)) for a in used],
        "refused": refusals(refused) if refused else "",
        "worlds": [(e, steps_text(e)) for e in ledger.epochs],
        "notices": [(n, verdict(n.in_time, n.cancelled)) for n in ledger.notices],
        "snapshots": snapshot_rows(s),
        "side_jobs": [_side_job(one) for one in s.side_jobs],
        "hardware": hardware(s),
        "setup_rows": setup_rows(s.setups),
        "setup_leaves": dict(leaves_of(s.setups.first.config)) if s.setups.first else {},
        "shifts": [(shift, shift_words(shift)) for shift in s.setups.shifts],
        "marks": s.marks[-MOST_TROUBLE:],
    }


def _about(s: Summary) -> Iterator[str]:
    yield f"{clock(s.started_s)} – {clock(s.ended_s)}"
    if s.asked:
        yield s.asked.task
    if s.session and s.session.device:
        yield s.session.device
    if s.session and s.session.micro_batch:
        size = s.session.global_batch
        yield f"global batch {size} in micro-batches of {s.session.micro_batch}"
    if phases := phases_text(s.phases):
        yield f"phases {phases}"


def _cards(s: Summary) -> list[tuple[str, str, str]]:
    ledger, cost = s.ledger, s.ledger.cost
    up = sum(a.up_s is not None for a in ledger.attempts)
    low, high = s.worlds
    steps = f"of {s.total_steps:,} committed" if s.total_steps else "committed"
    world = f"on {low} to {high} ranks" if low != high else f"on {plural(high, 'rank')}"
    cards = [("steps", f"{s.step:,}", steps)]
    if s.losses:
        cards.append(("loss", number_text(s.losses[1]), f"from {number_text(s.losses[0])}"))
    if s.validations:
        before, after = s.validations
        name = s.validation_name.replace("_", " ")
        cards.append((name, number_text(after), f"from {number_text(before)}"))
    saved = f"{percent(cost.saved)} less than on demand" if cost.on_demand_usd else ""
    cards += [
        ("wall time", duration(s.wall_s), world),
        ("goodput", percent(ledger.goodput), f"of {duration(ledger.billed_s)} billed"),
        ("paid, simulated" if s.simulated else "paid", money(cost.spot_usd), saved),
    ]
    if usd := s.usd_per_1m_tokens:
        cards.append(("per million tokens", money(usd), f"{s.tokens / 1e6:,.1f} million tokens"))
    generations = plural(sum(bool(e.steps) for e in ledger.epochs), "generation")
    redone = f"{duration(ledger.ns['redone'] / NANO)} of node time"
    return [
        *cards,
        ("nodes", str(up), f"{generations}, {plural(len(ledger.notices), 'notice')}"),
        ("steps redone", str(ledger.steps_lost), redone),
    ]


def _waterfall(s: Summary) -> Iterator[tuple[str, float, float, float, float]]:
    """Yield (bucket, begin of its bar, share, seconds, dollars), from all billed time down to the
    steps that count."""
    ledger, left = s.ledger, 1.0
    yield "billed", 0.0, 1.0, ledger.billed_s, ledger.usd
    for bucket in [*(b for b in reversed(BUCKETS) if b != "useful"), "useful"]:
        if ns := ledger.ns[bucket]:
            share = ns / ledger.billed_ns
            left -= share
            begin = 0.0 if bucket == "useful" else max(0.0, left)
            yield bucket, begin, share, ns / NANO, ledger.nusd[bucket] / NANO


def spend_at(attempts: Iterable[AttemptRow], moments: np.ndarray, end_s: float) -> np.ndarray:
    """Return the dollars spent on nodes until each moment (wall clock). Each node's bill is spread
    evenly over its lifetime; `end_s` ends the lifetime of a node that is still up."""
    total = np.zeros(len(moments))
    for a in attempts:
        if a.up_s is not None and a.usd:
            until_s = max(a.up_s + 1e-6, end_s if a.gone_s is None else a.gone_s)
            total += a.usd * np.clip((moments - a.up_s) / (until_s - a.up_s), 0.0, 1.0)
    return total


def _over_time(s: Summary) -> str:
    if s.ended_s <= s.started_s or not s.ledger.usd:
        return ""
    moments = np.linspace(s.started_s, s.ended_s, SPEND_POINTS)
    paid = spend_at(s.ledger.attempts, moments, s.ended_s)
    since = (moments - s.started_s).tolist()
    frame = PlotFrame("dollars over time", "", height=170, zero=True, time=True)
    return plot(frame, [PlotTrace("paid", since, paid.tolist(), "useful", unit="$")])


def _places(s: Summary) -> list[tuple[str, ...]]:
    """Return rows of the nodes that were up, grouped by place and price."""
    found = {x.fact.member: x.fact for x in s.facts if isinstance(x.fact, NodeFound)}
    rows: dict[tuple[str, bool, float, float], list[float]] = {}
    for a in s.ledger.attempts:
        if a.up_s is None:
            continue
        told = next((found[m] for m in a.members if m in found), None)
        where = a.offer or (place_of(told) if told else "") or "unknown place"
        of = rows.setdefault((where, a.spot, a.usd_per_h, a.on_demand_usd_per_h), [0, 0.0, 0.0])
        of[0] += 1
        of[1] += a.billed_s
        of[2] += a.usd
    return [
        (
            *(where, "spot" if spot else "on demand", money(price) if price else "unknown"),
            *(money(dear) if dear else "–", f"{n:,.0f}", duration(billed_s), money(usd)),
        )
        for (where, spot, price, dear), (n, billed_s, usd) in sorted(
            rows.items(), key=lambda row: row[1][2]
        )
    ]


def place_of(node: NodeFound) -> str:
    """Return the node's place in the form of an offer's name: cloud/region/zone/shape."""
    parts = (node.cloud, node.region, node.zone, node.instance_type)
    return "/".join(part for part in parts if part)


def _side_job(one: SideJobRows) -> tuple[SideJobRows, list[str], dict[str, int]]:
    """Return a watch, the metrics that are shown, and the step of each loss's lowest value."""
    names = one.metrics[:MOST_NUMBERS]
    return one, names, {name: one.lowest(name) for name in names}
