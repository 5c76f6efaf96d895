"""Post-mortems as HTML: a section of the report, and a page of their own."""

from __future__ import annotations

from collections.abc import Sequence

from harness.views.interruption import KINDS, Alternative, Interruption
from harness.views.page_html import asset
from harness.views.plots import esc
from harness.views.postmortem import Postmortem
from harness.views.postmortem_svg import picture
from harness.views.postmortem_text import (
    lost_text,
    node_text,
    parts_text,
    saved_text,
    signed,
    world_text,
)
from harness.views.rows import AttemptRow
from harness.views.words import clock, duration, money, plural

MOST_DRAWN = 100  # interruptions with a picture; the newest


def interruptions_html(
    pm: Postmortem,
    attempts: Sequence[AttemptRow],
    started_s: float,
    shown_open: bool = False,
    most: int = MOST_DRAWN,
) -> str:
    """The body of a section: what it cost in sum, then each interruption, its picture folded away
    unless `shown_open`. "" where there was none."""
    if not pm.interruptions:
        return ""
    left = len(pm.interruptions) - most
    note = f"<p class=note>the newest {most} of {len(pm.interruptions):,}</p>" if left > 0 else ""
    each = "".join(
        f"<details{' open' if shown_open else ''}><summary>{_summary(one, started_s)}</summary>"
        f"{interruption_html(one, attempts)}</details>"
        for one in pm.interruptions[-most:]
    )
    whole = _alternatives(pm.what_if)
    what_if = f"<p class=note>{_NOTE} Over the whole run:</p>{whole}" if whole else ""
    return note + each + what_if


_NOTE = (
    "What another choice would have cost more (+) or less (-), by what was measured in this run; "
    "docs/POSTMORTEM.md has the assumptions."
)


def _summary(one: Interruption, started_s: float) -> str:
    return (
        f"<b>{one.number}</b> +{duration(one.begun_s - started_s)} <b>{esc(one.kind)}</b> "
        f"{esc(one.cause)} – stood still {duration(one.gap_s)}, lost {esc(lost_text(one.losses))}"
    )


def interruption_html(one: Interruption, attempts: Sequence[AttemptRow]) -> str:
    """The picture of one, what it cost, and what else would have."""
    rows = [
        ("what", f"{one.kind}: {KINDS[one.kind]}"),
        ("when", f"{clock(one.begun_s)} UTC"),
        *(("node", node_text(n)) for n in one.nodes[:8]),
        ("world", world_text(one)),
        ("stood still", duration(one.gap_s)),
        ("until caught up", duration(one.lasted_s)),
        ("lost", lost_text(one.losses)),
        ("went into", parts_text(one.losses)),
        ("the notice saved", saved_text(one)),
    ]
    facts = "".join(f"<dt>{esc(a)}</dt><dd>{esc(b)}</dd>" for a, b in rows if b)
    return f"<dl>{facts}</dl>{picture(one, attempts)}{_alternatives(one.what_if)}"


def _alternatives(found: Sequence[Alternative]) -> str:
    if not found:
        return ""
    head = (
        "<tr><th></th><th class=r>node time</th><th class=r>$</th><th class=r>wall time</th></tr>"
    )
    body = "".join(
        f"<tr><td>{esc(a.name)}<small>{esc(a.note)}</small></td>"
        + "".join(f"<td class=r>{esc(cell)}</td>" for cell in signed(a))
        + "</tr>"
        for a in found
    )
    table = f"<thead>{head}</thead><tbody>{body}</tbody>"
    return f"<div class=scroll><table>{table}</table></div>"


def postmortem_page(
    url: str, pm: Postmortem, attempts: Sequence[AttemptRow], started_s: float
) -> str:
    """The whole document; it needs nothing else."""
    name = url.rstrip("/").rsplit("/", 1)[-1] or url
    body = interruptions_html(pm, attempts, started_s, shown_open=True)
    lost = sum(one.losses.usd for one in pm.interruptions)
    sub = f"{plural(len(pm.interruptions), 'interruption')}, {money(lost)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{esc(name)} – post-mortem</title><style>{asset('page.css')}</style></head>"
        f"<body><main><header><h1>{esc(name)}</h1><p class=sub>{esc(sub)}</p></header>"
        f"<section>{body or '<p>no interruptions: the run was never disturbed</p>'}</section>"
        f"<footer>{esc(url)} · times are UTC · made by spotharness from the facts in the "
        "bucket</footer></main></body></html>\n"
    )
