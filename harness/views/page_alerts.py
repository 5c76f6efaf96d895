"""The page's section on alerts: what was fired in the run, newest first."""

from __future__ import annotations

from harness.views.page_html import PageSection, html_table, section
from harness.views.plots import esc
from harness.views.summary import Summary
from harness.views.words import duration, plural

MOST_ALERTS = 100


def alerts(s: Summary) -> PageSection | None:
    rows = [
        [
            "+" + duration(max(0.0, a.t - s.started_s)),
            f"<span class='alert {esc(a.severity)}'>{esc(a.severity)}</span>",
            f"<b>{esc(a.title)}</b><small>{esc(a.text)}</small>",
            f"{esc(a.rule)}<small>{esc(a.help)}</small>" if a.rule else "–",
        ]
        for a in s.alerts[::-1][:MOST_ALERTS]
    ]
    if not rows:
        return None
    left_out = len(s.alerts) - len(rows)
    note = "newest first; what to do about each is in docs/RUNBOOK.md"
    note += f"; {plural(left_out, 'older alert')} left out" if left_out else ""
    body = html_table(["at", "", "what", "rule"], rows, right={0})
    return section("Alerts", f"<div class=alerts>{body}</div>", note)
