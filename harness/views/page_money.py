"""The page's sections on time and money: where billed time went, what was paid and for what."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from harness.core.facts import NodeFound
from harness.views.page_html import PageSection, html_table, section
from harness.views.painting import BUCKETS, NANO
from harness.views.plots import PlotFrame, PlotTrace, esc, legend, plot
from harness.views.report import MEANING, money_rows
from harness.views.rows import AttemptRow
from harness.views.summary import Summary
from harness.views.words import duration, money, percent

SPEND_POINTS = 240


def goodput(s: Summary) -> PageSection | None:
    """A waterfall: from all that was billed down to the steps that count."""
    ledger = s.ledger
    if not ledger.billed_ns:
        return None
    left = 1.0
    rows = [["<b>billed</b>", _track("billed", 0.0, 1.0), "100 %", duration(ledger.billed_s)]]
    rows[0].append(esc(money(ledger.usd)))
    for bucket in [*(b for b in reversed(BUCKETS) if b != "useful"), "useful"]:
        share = ledger.ns[bucket] / ledger.billed_ns
        if not ledger.ns[bucket]:
            continue
        left -= share
        begin = 0.0 if bucket == "useful" else max(0.0, left)
        name = f"<b>{bucket}</b>" if bucket == "useful" else bucket
        rows.append(
            [
                f"{name}<small>{esc(MEANING.get(bucket, ''))}</small>",
                _track(bucket, begin, share),
                percent(share),
                duration(ledger.ns[bucket] / NANO),
                esc(money(ledger.nusd[bucket] / NANO)),
            ]
        )
    note = percent(ledger.goodput) + " of billed time went into steps that count"
    table = html_table(["", "", "share", "node time", "$"], rows, right={2, 3, 4})
    return section("Where billed time went", f"<div class=fall>{table}</div>", note)


def _track(bucket: str, begin: float, share: float) -> str:
    tip = f"{bucket}: {percent(share)}"
    return (
        f'<div class=track data-tip="{esc(tip)}"><i class="b-{bucket}" '
        f'style="margin-left:{100 * begin:.2f}%;width:{100 * share:.2f}%"></i></div>'
    )


def spent(s: Summary) -> PageSection | None:
    if not s.ledger.billed_ns:
        return None
    rows = money_rows(s)
    most = max(usd for _, usd, _ in rows) or 1.0
    bars = "".join(
        f"<div><span>{esc(name)}</span>"
        f"<div class=track><i class='{'paid' if i == 0 else 'ref'}' "
        f"style='width:{100 * usd / most:.2f}%'></i></div>"
        f"<b>{esc(money(usd))}</b><em>{esc(note)}</em></div>"
        for i, (name, usd, note) in enumerate(rows)
    )
    known = "some on-demand prices are unknown; the paid price stands for them"
    note = "" if s.ledger.cost.known else known
    body = f"<div class=money>{bars}</div>{_over_time(s)}{_places(s)}"
    return section("Money", body, note)


def spend_at(attempts: Iterable[AttemptRow], moments: np.ndarray, end_s: float) -> np.ndarray:
    """Dollars that were spent on nodes until each moment (wall clock); of a node its bill is
    spread evenly over its life."""
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
    drawn = plot(frame, [PlotTrace("paid", since, paid.tolist(), "useful", unit="$")])
    return f"<h3>Paid over time {legend(('line', 'useful', 'paid for nodes'))}</h3>{drawn}"


def _places(s: Summary) -> str:
    """Place and price of every node that was up, by place."""
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
    shown = [
        [
            esc(where),
            "spot" if spot else "on demand",
            f"{money(price)}" if price else "unknown",
            money(on_demand) if on_demand else "–",
            f"{n:,.0f}",
            duration(billed_s),
            money(usd),
        ]
        for (where, spot, price, on_demand), (n, billed_s, usd) in sorted(
            rows.items(), key=lambda row: row[1][2]
        )
    ]
    head = ["place", "", "$ per hour", "on demand", "nodes", "billed", "$"]
    return html_table(head, shown, right={2, 3, 4, 5, 6}, most=60) if shown else ""


def place_of(node: NodeFound) -> str:
    """As offers are named: cloud/region/zone/shape."""
    parts = (node.cloud, node.region, node.zone, node.instance_type)
    return "/".join(part for part in parts if part)
