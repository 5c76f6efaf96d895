"""The report as one HTML page: hand-made SVG, a little inline script for values at the pointer,
nothing from anywhere else.

The page is a list of sections, each a function from the summary to a section or nothing. Called by
`report.write_html` and by `serve.py`. Everything that users, machines or clouds wrote goes through
`esc`, and the page's own policy lets no other script run than the one that is written here.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable

from harness.views import (
    page_alerts,
    page_money,
    page_record,
    page_side_jobs,
    page_speed,
    page_tables,
    postmortem_page,
)
from harness.views.charts import loss_chart, loss_legend, norm_chart
from harness.views.page_html import PageSection, asset, section
from harness.views.painting import NANO
from harness.views.plots import esc
from harness.views.summary import Summary
from harness.views.timeline import MOST_ROWS, shown_rows, timeline, timeline_legend
from harness.views.words import clock, duration, money, number, percent, plural

BREAKS = 40  # interruptions that are drawn; harness postmortem has all
TONES = {"done": "good", "finished": "good", "failed": "bad", "stopped": "warn"}


# ---- sections ------------------------------------------------------------------------------------
def _loss(s: Summary) -> PageSection | None:
    return section("Loss", loss_chart(s), loss_legend(s))


def _norm(s: Summary) -> PageSection | None:
    return section("Gradient norm", norm_chart(s))


def _nodes(s: Summary) -> PageSection | None:
    up = sum(a.up_s is not None for a in s.ledger.attempts)
    shown = len(shown_rows(s))
    words = f"; the {MOST_ROWS} of {up:,} that were up longest" if shown < up else ""
    return section("Nodes over time", timeline(s), timeline_legend() + words)


def _interruptions(s: Summary) -> PageSection | None:
    attempts = s.ledger.attempts
    body = postmortem_page.interruptions_html(s.postmortem, attempts, s.started_s, most=BREAKS)
    note = "what happened, moment by moment, and what it cost; open one for its picture"
    return section("Interruptions", f"<div class=breaks>{body}</div>" if body else "", note)


SECTIONS: tuple[Callable[[Summary], PageSection | None], ...] = (
    _loss,
    _nodes,
    page_money.goodput,
    page_money.spent,
    page_speed.step_time,
    page_speed.scaling,
    _norm,
    _interruptions,
    page_alerts.alerts,
    page_record.logbook,
    page_tables.attempts,
    page_tables.worlds,
    page_tables.notices,
    page_tables.snapshots,
    page_side_jobs.side_jobs,
    page_speed.hardware,
    page_record.made,
    page_tables.trouble,
)


# ---- the document --------------------------------------------------------------------------------
def page(s: Summary) -> str:
    """The whole document."""
    return alone(f"{run_name(s.url)} – spotharness report", f"<main>{content(s)}</main>")


def alone(title: str, body: str) -> str:
    """A document that needs no other file: the style and the only script that may run are in it.
    `body` is HTML."""
    script = asset("page.js")
    policy = (
        f"default-src 'none'; script-src '{script_hash(script)}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<style>{asset('page.css')}</style>"
    )
    return document(title, head, f"{body}{TIP}<script>{script}</script>")


def titled(title: str, notes: Iterable[str], parts: Iterable[PageSection | None]) -> str:
    """A document that stands alone: a title, `notes` (plain sentences), sections."""
    said = "".join(f"<p class=note>{esc(note)}</p>" for note in notes)
    body = (
        f"<main><header><h1>{esc(title)}</h1>{THEME_BUTTON}{said}</header>"
        f"{''.join(part.html() for part in parts if part)}"
        "<footer>made by spotharness</footer></main>"
    )
    return alone(f"{title} – spotharness", body)


TIP = '<div id="tip" role="tooltip" hidden></div>'
THEME_BUTTON = '<button id="theme" type="button" hidden>dark or light</button>'


def document(title: str, head: str, body: str) -> str:
    """An HTML document; `head` and `body` are HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" '
        f'content="no-referrer"><title>{esc(title)}</title>{head}</head>'
        f"<body>{body}</body></html>\n"
    )


def script_hash(script: str) -> str:
    """As a Content-Security-Policy names an inline script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def run_name(url: str) -> str:
    return url.rstrip("/").rsplit("/", 1)[-1] or url


def content(s: Summary) -> str:
    """All that the page shows, without what it is shown in."""
    found = [one for make in SECTIONS if (one := make(s))]
    links = "".join(f'<a href="#{one.anchor}">{esc(one.title)}</a>' for one in found)
    return (
        f"{_header(s)}{_cards(s)}<nav>{links}</nav>{''.join(one.html() for one in found)}"
        f"<footer>{esc(s.url)} · times are UTC · made by spotharness from the facts in the "
        "bucket</footer>"
    )


def _header(s: Summary) -> str:
    tone = TONES.get(s.state, "live")
    problems = "".join(f"<p class=problem>{esc(p)}</p>" for p in s.problems)
    what = [esc(f"{clock(s.started_s)} – {clock(s.ended_s)}")]
    if s.asked:
        what.append(esc(s.asked.task))
    if s.session:
        size = (
            f"global batch {s.session.global_batch} in micro-batches of {s.session.micro_batch}"
            if s.session.micro_batch
            else ""
        )
        what += [esc(x) for x in (s.session.device, size) if x]
    reason = f"<p class=reason>{esc(s.reason)}</p>" if s.reason else ""
    return (
        f"<header><h1>{esc(run_name(s.url))} <span class='pill {tone}'>{esc(s.state)}</span></h1>"
        f"{THEME_BUTTON}<p class=sub>{' · '.join(what)}</p>{reason}{problems}</header>"
    )


def _cards(s: Summary) -> str:
    ledger, cost = s.ledger, s.ledger.cost
    up = [a for a in ledger.attempts if a.up_s is not None]
    low, high = s.worlds
    steps = f"of {s.total_steps:,} committed" if s.total_steps else "committed"
    world = f"on {low} to {high} ranks" if low != high else f"on {plural(high, 'rank')}"
    cards = [("steps", f"{s.step:,}", steps)]
    if s.losses:
        cards.append(("loss", number(s.losses[1]), f"from {number(s.losses[0])}"))
    if s.validations:
        before, after = s.validations
        name = s.validation_name.replace("_", " ")
        cards.append((name, number(after), f"from {number(before)}"))
    cards += [
        ("wall time", duration(s.wall_s), world),
        ("goodput", percent(ledger.goodput), f"of {duration(ledger.billed_s)} billed"),
        (
            "paid",
            money(cost.spot_usd),
            f"{percent(cost.saved)} less than on demand" if cost.on_demand_usd else "",
        ),
    ]
    if usd := s.usd_per_1m_tokens:
        cards.append(("per million tokens", money(usd), f"{s.tokens / 1e6:,.1f} million tokens"))
    cards += [
        (
            "nodes",
            str(len(up)),
            f"{plural(sum(bool(e.steps) for e in ledger.epochs), 'world')}, "
            f"{plural(len(ledger.notices), 'notice')}",
        ),
        (
            "steps redone",
            str(ledger.steps_lost),
            f"{duration(ledger.ns['redone'] / NANO)} of node time",
        ),
    ]
    shown = (
        f"<div><b>{esc(a)}</b><strong>{esc(b)}</strong><i>{esc(c)}</i></div>" for a, b, c in cards
    )
    return f"<div class=cards>{''.join(shown)}</div>"
