"""The report as one HTML page: hand-made SVG, a little inline script for tooltips, nothing from
anywhere else.

Called by `report.write_html`. Everything that users, machines or clouds wrote goes through `esc`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import resources

from harness.views.charts import esc, loss_chart, loss_legend, timeline, timeline_legend
from harness.views.painting import BUCKETS, NANO
from harness.views.report import MEANING, attempt_end, money_rows, refusals, snapshot_rows, verdict
from harness.views.rows import BAD_ENDS
from harness.views.summary import Summary
from harness.views.words import clock, duration, money, number, percent, plural, spread, steps_text

TROUBLE_SHOWN = 30


def asset(name: str) -> str:
    """A file that is written into the page, which has to stand alone."""
    return resources.files("harness.views").joinpath(name).read_text()


def page(s: Summary) -> str:
    """The whole document."""
    name = s.url.rstrip("/").rsplit("/", 1)[-1] or s.url
    sections = [
        _section("Loss", loss_chart(s), loss_legend(s)),
        _section("Nodes over time", timeline(s), timeline_legend()),
        _section(
            "Where billed time went",
            _goodput(s),
            percent(s.ledger.goodput) + " of billed time went into steps that count",
        ),
        _section(
            "Money",
            _money(s),
            ""
            if s.ledger.cost.known
            else "some on-demand prices are unknown; the paid price stands for them",
        ),
        _section("Attempts", _attempts(s)),
        _section(
            "Worlds",
            _epochs(s),
            "accum: micro-batches of the busiest rank. The global batch never changes.",
        ),
        _section("Notices", _notices(s)),
        _section("Snapshots", _snapshots(s)),
        _section("Trouble", _trouble(s)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta '
        'name="color-scheme" content="light dark">'
        f"<title>{esc(name)} – spotharness "
        f"report</title><style>{asset('page.css')}</style></head><body><main>"
        f"{_header(s, name)}{_cards(s)}{''.join(sections)}"
        f"<footer>{esc(s.url)} · times are UTC · made by spotharness from the facts in the "
        "bucket</footer></main>"
        '<div id="tip" role="tooltip" '
        f"hidden></div><script>{asset('page.js')}</script></body></html>\n"
    )


def _section(title: str, body: str, note: str = "") -> str:
    if not body:
        return ""
    return f"<section><h2>{title}</h2>{f'<p class=note>{note}</p>' if note else ''}{body}</section>"


def _header(s: Summary, name: str) -> str:
    tone = {"done": "good", "finished": "good", "failed": "bad", "stopped": "warn"}.get(
        s.state, "live"
    )
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
        f"<header><h1>{esc(name)} <span class='pill {tone}'>{esc(s.state)}</span></h1>"
        f"<p class=sub>{' · '.join(what)}</p>{reason}{problems}</header>"
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
        cards.append(
            (
                s.validation_name.replace("_", " "),
                number(s.validations[1]),
                f"from {number(s.validations[0])}",
            )
        )
    cards += [
        ("wall time", duration(s.wall_s), world),
        ("goodput", percent(ledger.goodput), f"of {duration(ledger.billed_s)} billed"),
        (
            "paid",
            money(cost.spot_usd),
            f"{percent(cost.saved)} less than on demand" if cost.on_demand_usd else "",
        ),
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


def _goodput(s: Summary) -> str:
    ledger = s.ledger
    if not ledger.billed_ns:
        return ""
    shares = {b: ledger.ns[b] / ledger.billed_ns for b in BUCKETS if ledger.ns[b]}
    bar = "".join(
        f'<div class="b-{b}" style="flex:{share:.5f} 0 0" data-tip="{b}: '
        f'{percent(share)}">{percent(share) if share > 0.07 else ""}</div>'
        for b, share in shares.items()
    )
    rows = [
        [
            f"<u class='b-{b}'></u>{b}",
            f"<span class=wide>{MEANING[b]}</span>",
            percent(share),
            duration(ledger.ns[b] / NANO),
            esc(money(ledger.nusd[b] / NANO)),
        ]
        for b, share in shares.items()
    ]
    total = [
        "<b>billed</b>",
        "",
        "100 %",
        f"<b>{duration(ledger.billed_s)}</b>",
        f"<b>{esc(money(ledger.usd))}</b>",
    ]
    return f"<div class=stack>{bar}</div>" + _html_table(
        ["", "", "share", "node time", "$"], [*rows, total], right={2, 3, 4}
    )


def _money(s: Summary) -> str:
    if not s.ledger.billed_ns:
        return ""
    rows = money_rows(s)
    most = max(usd for _, usd, _ in rows) or 1.0
    return (
        "<div class=money>"
        + "".join(
            f"<div><span>{name}</span>"
            f"<div class=track><i class='{'paid' if i == 0 else 'ref'}' "
            f"style='width:{100 * usd / most:.2f}%'></i></div>"
            f"<b>{esc(money(usd))}</b><em>{esc(note)}</em></div>"
            for i, (name, usd, note) in enumerate(rows)
        )
        + "</div>"
    )


# ---- tables --------------------------------------------------------------------------------------
def _html_table(
    head: Sequence[str], rows: Sequence[Sequence[object]], right: Collection[int] = ()
) -> str:
    """Cells are HTML already."""

    def cells(row: Sequence[object], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=r' if i in right else ''}>{c}</{tag}>" for i, c in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    top = cells(head, "th")
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class=scroll>{table}</div>"


def _attempts(s: Summary) -> str:
    used = [a for a in s.ledger.attempts if a.up_s is not None or a.end != "no-capacity"]
    refused = len(s.ledger.attempts) - len(used)
    if not used:
        return f"<p>{refusals(refused)}</p>" if refused else ""
    rows = []
    for a in used:
        tone = "bad" if a.end in BAD_ENDS else "good" if a.end == "finished" else ""
        share = f"{percent(a.ns['useful'] / a.billed_ns)}" if a.billed_ns else "–"
        mini = "".join(
            f'<i class="b-{b}" style="flex:{a.ns[b]} 0 0"></i>' for b in BUCKETS if a.ns[b]
        )
        rows.append(
            [
                esc(a.name),
                f"{esc(a.offer or '–')}<small>{esc(a.accelerator)}{'' if a.spot else ' on demand'} "
                f"{money(a.usd_per_h)}/h</small>",
                "–" if a.up_s is None else "+" + duration(a.up_s - s.started_s),
                f"<span class='{tone}'>{esc(attempt_end(a))}</span>"
                + ("" if a.exit_code is None else f"<small>exit {esc(a.exit_code)}</small>"),
                duration(a.billed_s),
                f"<div class=mini>{mini}</div>",
                share,
                esc(money(a.usd)),
            ]
        )
    head = ["node", "offer", "up", "why it ended", "billed", "", "useful", "$"]
    return _html_table(head, rows, right={2, 4, 6, 7}) + (
        f"<p class=note>{refusals(refused)}</p>" if refused else ""
    )


def _epochs(s: Summary) -> str:
    rows = [
        [
            esc(e.epoch),
            esc(e.world),
            esc(" ".join(e.attempts)) or "–",
            esc(e.accumulation or "–"),
            esc(spread(e.shares)) or "–",
            esc(steps_text(e)),
            esc(e.ended) or "goes on",
            f"<span class=bad>{esc(e.steps_lost)}</span>" if e.steps_lost else "0",
            duration(e.gap_s),
            duration(e.lost_s),
        ]
        for e in s.ledger.epochs
    ]
    head = [
        "epoch",
        "ranks",
        "nodes",
        "accum",
        "micro-batches",
        "steps",
        "why it ended",
        "steps lost",
        "began after",
        "end cost",
    ]
    return _html_table(head, rows, right={0, 1, 3, 7, 8, 9}) if rows else ""


def _notices(s: Summary) -> str:
    rows = []
    for n in s.ledger.notices:
        tone = {True: "good", False: "bad", None: ""}[n.in_time]
        rows.append(
            [
                "+" + duration(n.seen_s - s.started_s),
                esc(n.attempt or n.member),
                esc(n.kind),
                esc(n.source),
                duration(n.grace_s),
                duration(n.commit_s),
                esc(n.step or "–"),
                f"<span class='{tone}'>{verdict(n.in_time, n.cancelled)}</span>",
            ]
        )
    return (
        _html_table(
            ["at", "node", "notice", "from", "grace", "committed after", "step", ""],
            rows,
            right={0, 4, 5, 6},
        )
        if rows
        else ""
    )


def _snapshots(s: Summary) -> str:
    rows = snapshot_rows(s)
    return (
        "<dl>" + "".join(f"<dt>{esc(a)}</dt><dd>{esc(b)}</dd>" for a, b in rows) + "</dl>"
        if rows
        else ""
    )


def _trouble(s: Summary) -> str:
    out = []
    for m in s.marks[-TROUBLE_SHOWN:]:
        detail = (
            f"<details><summary>last words</summary><pre>{esc(m.detail)}</pre></details>"
            if m.detail.strip()
            else ""
        )
        out.append(
            f"<li><b>+{duration(m.t - s.started_s)} {esc(m.what)}</b> {esc(m.text)}{detail}</li>"
        )
    return f"<ul class=trouble>{''.join(out)}</ul>" if out else ""


# ---- looks ---------------------------------------------------------------------------------------
