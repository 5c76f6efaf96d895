"""The report as one HTML page: hand-made SVG, a little inline script for tooltips, nothing from anywhere else.

Called by `report.write_html`. Everything that users, machines or clouds wrote goes through `esc`.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence

from harness.views.ledger import BUCKETS, NANO, AttemptRow, Segment
from harness.views.report import MEANING, attempt_end, money_rows, refusals, snapshot_rows, verdict
from harness.views.summary import Point, Summary
from harness.views.words import clock, duration, money, number, percent, plural, spread, steps_text
from storage.text import plain

WIDTH, LEFT, RIGHT = 1100, 58, 14  # of the charts, in SVG units
MOST_POINTS = 1500  # more are thinned out: the page must stay small and quick
TROUBLE_SHOWN = 30

Scale = Callable[[float], float]


def esc(value: object) -> str:
    return html.escape(plain(value, keep="\n"), quote=True)


def page(s: Summary) -> str:
    """The whole document."""
    name = s.url.rstrip("/").rsplit("/", 1)[-1] or s.url
    sections = [
        _section("Loss", _loss_chart(s), _loss_legend(s)),
        _section("Nodes over time", _timeline(s), _timeline_legend()),
        _section("Where billed time went", _goodput(s), percent(s.ledger.goodput) + " of billed time went into steps that count"),
        _section("Money", _money(s), "" if s.ledger.cost.known else "some on-demand prices are unknown; the paid price stands for them"),
        _section("Attempts", _attempts(s)),
        _section("Worlds", _epochs(s), "accum: micro-batches of the busiest rank. The global batch never changes."),
        _section("Notices", _notices(s)),
        _section("Snapshots", _snapshots(s)),
        _section("Trouble", _trouble(s)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{esc(name)} – spotharness report</title><style>{CSS}</style></head><body><main>"
        f"{_header(s, name)}{_cards(s)}{''.join(sections)}"
        f"<footer>{esc(s.url)} · times are UTC · made by spotharness from the facts in the bucket</footer></main>"
        f'<div id="tip" role="tooltip" hidden></div><script>{SCRIPT}</script></body></html>\n'
    )


def _section(title: str, body: str, note: str = "") -> str:
    if not body:
        return ""
    return f"<section><h2>{title}</h2>{f'<p class=note>{note}</p>' if note else ''}{body}</section>"


def _header(s: Summary, name: str) -> str:
    tone = {"done": "good", "finished": "good", "failed": "bad", "stopped": "warn"}.get(s.state, "live")
    problems = "".join(f"<p class=problem>{esc(p)}</p>" for p in s.problems)
    what = [esc(f"{clock(s.started_s)} – {clock(s.ended_s)}")]
    if s.asked:
        what.append(esc(s.asked.task))
    if s.session:
        size = f"global batch {s.session.global_batch} in micro-batches of {s.session.micro_batch}" if s.session.micro_batch else ""
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
        cards.append((s.validation_name.replace("_", " "), number(s.validations[1]), f"from {number(s.validations[0])}"))
    cards += [
        ("wall time", duration(s.wall_s), world),
        ("goodput", percent(ledger.goodput), f"of {duration(ledger.billed_s)} billed"),
        ("paid", money(cost.spot_usd), f"{percent(cost.saved)} less than on demand" if cost.on_demand_usd else ""),
        ("nodes", str(len(up)), f"{plural(sum(bool(e.steps) for e in ledger.epochs), 'world')}, {plural(len(ledger.notices), 'notice')}"),
        ("steps redone", str(ledger.steps_lost), f"{duration(ledger.ns['redone'] / NANO)} of node time"),
    ]
    shown = (f"<div><b>{esc(a)}</b><strong>{esc(b)}</strong><i>{esc(c)}</i></div>" for a, b, c in cards)
    return f"<div class=cards>{''.join(shown)}</div>"


# ---- drawing ----------------------------------------------------------------------------------------------------
def nice_ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers in [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def time_ticks(seconds: float, about: int) -> tuple[list[float], str, float]:
    """Round times in [0, seconds], their unit, and the unit's seconds."""
    unit, size = ("s", 1.0) if seconds < 180 else ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)
    return [t * size for t in nice_ticks(0, seconds / size, about)], unit, size


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MOST_POINTS, keeping each piece's lowest and highest, so that no spike gets lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[Point] = []
    for i in range(0, len(points), size):
        piece = points[i : i + size]
        kept += sorted({min(piece, key=lambda p: p.loss), max(piece, key=lambda p: p.loss)}, key=lambda p: p.step)
    return kept


def condensed(segments: Sequence[Segment], columns: int) -> list[Segment]:
    """Segments for drawing. What is too short for the eye is drawn as its neighbour; where there are more than columns, each
    column gets what fills it most."""
    if not segments:
        return []
    start, end = segments[0][0], segments[-1][1]
    if len(segments) <= columns:
        joined: list[Segment] = []
        for a, b, bucket in segments:
            if joined and ((b - a) * columns * 2 < end - start or joined[-1][2] == bucket):
                joined[-1] = (joined[-1][0], b, joined[-1][2])
            else:
                joined.append((a, b, bucket))
        return joined
    drawn: list[Segment] = []
    i = 0
    for column in range(columns):
        a, b = start + (end - start) * column // columns, start + (end - start) * (column + 1) // columns
        amount: dict[str, int] = {}
        while i < len(segments) and segments[i][0] < b:
            amount[segments[i][2]] = amount.get(segments[i][2], 0) + min(b, segments[i][1]) - max(a, segments[i][0])
            if segments[i][1] > b:
                break
            i += 1
        bucket = max(amount, key=lambda k: amount[k])
        if drawn and drawn[-1][2] == bucket:
            drawn[-1] = (drawn[-1][0], b, bucket)
        else:
            drawn.append((a, b, bucket))
    return drawn


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _text(x: float, y: float, text: object, anchor: str = "middle", cls: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{f" class={cls!r}" if cls else ""}>{esc(text)}</text>'


def _loss_chart(s: Summary) -> str:
    curve = [p for p in s.curve if math.isfinite(p.loss)]
    lost = [p for p in s.lost if math.isfinite(p.loss)]
    validation = [(step, v) for step, v in s.validation if math.isfinite(v)]
    if not curve and not lost:
        return ""
    height, top, bottom = 330, 34, 34
    values = [p.loss for p in curve + lost] + [v for _, v in validation]
    low, high = min(values), max(values)
    pad = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high = low - pad, high + pad
    last = max([p.step for p in curve + lost] + [step for step, _ in validation])

    def x(step: float) -> float:
        return LEFT + (step - 0.5) / last * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return top + (high - value) / (high - low) * (height - top - bottom)

    out = [f'<div class=scroll><svg id="loss" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="loss over steps">']
    biggest = max([1, *(e.world for e in s.ledger.epochs)])
    for e in s.ledger.epochs:  # the lineage, by world
        mine = [p.step for p in s.curve if p.epoch == e.epoch]
        if mine:
            a, b = x(min(mine) - 0.5), x(max(mine) + 0.5)
            tip = f"epoch {e.epoch}: {plural(e.world, 'rank')} on nodes {' '.join(e.attempts)}; micro-batches {spread(e.shares)}; {e.ended}"
            out.append(
                f'<rect class=world x="{a:.1f}" y="{top}" width="{b - a:.1f}" height="{height - top - bottom}" '
                f'style="opacity:{0.35 + 0.65 * e.world / biggest:.2f}" data-tip="{esc(tip)}"/>'
                f'<line class=cut x1="{a:.1f}" x2="{a:.1f}" y1="{top}" y2="{height - bottom}"/>'
            )
            if b - a > 24:
                text = plural(e.world, "rank") if b - a > 70 else str(e.world)
                out.append(_text((a + b) / 2, top - 19, text, cls="strong"))
                if b - a > 120 and e.accumulation:
                    out.append(_text((a + b) / 2, top - 6, f"accumulation {e.accumulation}"))
    for value in nice_ticks(low, high, 5):
        out.append(f'<line class=grid x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        out.append(_text(LEFT - 8, y(value) + 4, f"{value:.4g}", "end"))
    out += [_text(x(t), height - bottom + 16, f"{t:,.0f}") for t in nice_ticks(1, last, 10) if t == int(t)]
    out.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 3, "step"))
    for epoch in sorted({p.epoch for p in s.lost}):
        mine_lost = [p for p in s.lost if p.epoch == epoch]
        a, b = x(mine_lost[0].step - 0.5), x(mine_lost[-1].step + 0.5)
        tip = f"epoch {epoch}: steps {mine_lost[0].step}–{mine_lost[-1].step} were lost and done again"
        width = max(2.0, b - a)
        out.append(
            f'<rect class=lostband x="{a:.1f}" y="{top}" width="{width:.1f}" height="{height - top - bottom}" data-tip="{esc(tip)}"/>'
            f'<rect class=losttab x="{a:.1f}" y="{height - bottom - 5}" width="{width:.1f}" height="5"/>'
        )
        drawn = [p for p in thinned(mine_lost) if math.isfinite(p.loss)]
        if drawn:
            out.append(f'<path class=lost d="{_path((x(p.step), y(p.loss)) for p in drawn)}"/>')
    if curve:
        out.append(f'<path class=curve d="{_path((x(p.step), y(p.loss)) for p in thinned(curve))}"/>')
    if validation:
        out.append(f'<path class=valline d="{_path((x(a), y(b)) for a, b in validation)}"/>')
        out += [f'<circle class=val cx="{x(a):.1f}" cy="{y(b):.1f}" r="4"/>' for a, b in validation]
    out.append(f'<line id="cross" class=cross y1="{top}" y2="{height - bottom}" visibility="hidden"/></svg></div>')
    by_step = dict(validation)
    worlds = {e.epoch: e.world for e in s.ledger.epochs}
    data = {
        "left": LEFT, "right": RIGHT, "width": WIDTH, "last": last, "val": s.validation_name,
        "rows": [
            [p.step, float(f"{p.loss:.6g}"), p.epoch, worlds.get(p.epoch, 0), round(p.seconds, 3), by_step.get(p.step)]
            for p in thinned(curve)
        ],
    }  # fmt: skip
    # "<" is spelled so that no text in the data can end the script element.
    out.append(f'<script type="application/json" id="lossdata">{json.dumps(data).replace("<", chr(92) + "u003c")}</script>')
    return "".join(out)


def _loss_legend(s: Summary) -> str:
    keys = ["<span><u class=k-curve></u>training loss (committed steps)</span>"]
    if s.lost:
        keys.append("<span><u class=k-lost></u>lost and redone</span>")
    if s.validation:
        keys.append(f"<span><u class=k-val></u>{esc(s.validation_name.replace('_', ' '))}</span>")
    keys.append("<span><u class=k-world></u>stronger shade: more ranks</span>")
    return f"<span class=legend>{''.join(keys)}</span>"


def _timeline(s: Summary) -> str:
    rows = [a for a in s.ledger.attempts if a.up_s is not None]
    if not rows:
        return ""
    start, span = s.started_s, max(1.0, s.ended_s - s.started_s)
    left, steps_height, top = 176, 92, 30
    bar, gap = (20, 9) if len(rows) <= 40 else (8, 3)
    below = top + steps_height + 18
    height = below + len(rows) * (bar + gap) + 26

    def x(t: float) -> float:
        return left + min(1.0, max(0.0, (t - start) / span)) * (WIDTH - left - RIGHT)

    out = [f'<div class=scroll><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="nodes over time">']
    out.append(
        '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        "<line class=hatchline x1='0' x2='0' y1='0' y2='7'/></pattern></defs>"
    )
    for a, b in _outages(rows, start + span):
        tip = f"no node for {duration(b - a)}"
        out.append(
            f'<rect fill="url(#hatch)" x="{x(a):.1f}" y="{top}" width="{x(b) - x(a):.1f}" height="{height - top - 26}" data-tip="{tip}"/>'
        )
        if x(b) - x(a) > 70:
            out.append(_text((x(a) + x(b)) / 2, top + steps_height / 2, "no node", cls="strong"))
    ticks, unit, size = time_ticks(span, 9)
    for t in ticks:
        out.append(f'<line class=grid x1="{x(start + t):.1f}" x2="{x(start + t):.1f}" y1="{top}" y2="{height - 24}"/>')
        out.append(_text(x(start + t), height - 8, f"{t / size:g} {unit}"))
    out += _progress(s, x, top, steps_height)
    trained = [(e, x(e.first_s)) for e in s.ledger.epochs if e.first_s is not None]
    free = -1e9  # right of this there is room for a label
    for (e, at), (_, following) in zip(trained, [*trained[1:], (None, float(WIDTH))], strict=False):
        tip = f"epoch {e.epoch} ({e.reason or 'start'}): {plural(e.world, 'rank')}, steps {steps_text(e)}; {e.ended or 'goes on'}"
        out.append(
            f'<line class=epoch x1="{at:.1f}" x2="{at:.1f}" y1="{top - 4}" y2="{height - 26}"/>'
            f'<rect class=hit x="{at - 6:.1f}" y="4" width="56" height="{top - 6}" data-tip="{esc(tip)}"/>'
        )
        label = next((t for t in (f"e{e.epoch} · {plural(e.world, 'rank')}", f"e{e.epoch}") if following - at > 6.5 * len(t) + 4), "")
        if label and at >= free:
            out.append(_text(at + 2, top - 10, label, "start", "strong"))
            free = at + 6.5 * len(label) + 4
    for i, row in enumerate(rows):
        out += _bar(s, row, x, below + i * (bar + gap), bar)
    out.append("</svg></div>")
    return "".join(out)


def _outages(rows: Sequence[AttemptRow], end_s: float) -> list[tuple[float, float]]:
    """When no node was up, from the first one's start on."""
    spans = sorted((a.up_s or 0.0, end_s if a.gone_s is None else a.gone_s) for a in rows)
    found: list[tuple[float, float]] = []
    until = spans[0][0]
    for a, b in spans:
        if a > until + 1.0:
            found.append((until, a))
        until = max(until, b)
    return found


def _progress(s: Summary, x: Scale, top: float, height: float) -> list[str]:
    """Steps over time: it falls back where work was lost. With a dot for each committed snapshot."""
    points = sorted([*s.curve, *s.lost], key=lambda p: p.t)
    most = max([p.step for p in points] + [s.total_steps, 1])

    def y(step: float) -> float:
        return top + height - step / most * height

    out = [
        f'<line class=base x1="{x(s.started_s):.1f}" x2="{WIDTH - RIGHT}" y1="{top + height}" y2="{top + height}"/>',
        _text(168, top + 8, f"{most:,}", "end"), _text(168, top + height, "0", "end"),
        _text(12, top + height / 2 + 4, "steps", "start", "strong"),
    ]  # fmt: skip
    by_epoch: dict[int, list[Point]] = {}
    for p in points:
        by_epoch.setdefault(p.epoch, []).append(p)
    lost = {(p.epoch, p.step) for p in s.lost}
    for mine in by_epoch.values():
        good = [p for p in mine if (p.epoch, p.step) not in lost]
        if good:
            begin = (x(good[0].t - good[0].seconds), y(good[0].step - 1))
            out.append(f'<path class=curve d="{_path([begin, *((x(p.t), y(p.step)) for p in _every(good))])}"/>')
        bad = [p for p in mine if (p.epoch, p.step) in lost]
        if bad:
            out.append(f'<path class=lost d="{_path((x(p.t), y(p.step)) for p in [*good[-1:], *_every(bad)])}"/>')
    if len(s.snapshots) <= 400:
        for c in s.snapshots:
            tip = f"snapshot of step {c.step} ({c.why}): still {duration(c.stall_s)}, committed after {duration(c.commit_s)}"
            out.append(f'<circle class=snap cx="{x(c.t_start):.1f}" cy="{y(c.step):.1f}" r="3.4" data-tip="{esc(tip)}"/>')
    return out


def _every(points: list[Point]) -> list[Point]:
    stride = max(1, len(points) // 400)
    return [*points[::stride], points[-1]]


def _bar(s: Summary, a: AttemptRow, x: Scale, y: float, height: float) -> list[str]:
    """One node's life, in the colours of the ledger."""
    assert a.up_s is not None
    place = a.offer.split("/")
    short = " ".join(place[1:2] + place[-1:]) if len(place) > 2 else a.offer
    short = short if len(short) <= 22 else short[:21] + "…"
    tip = f"node {a.name} on {a.offer or a.accelerator}: {attempt_end(a)}; {duration(a.billed_s)}, {money(a.usd)}"
    out = []
    if height > 10:
        label = f"<tspan class=strong>{esc(a.name[:14])}</tspan>  {esc(short)}"
        out.append(f'<text x="12" y="{y + height - 5:.1f}" data-tip="{esc(tip)}">{label}</text>')
    asked, up = x(max(a.asked_s, s.started_s)), x(a.up_s)
    if up - asked > 1:
        out.append(f'<line class=asked x1="{asked:.1f}" x2="{up:.1f}" y1="{y + height / 2:.1f}" y2="{y + height / 2:.1f}"/>')
    for begin, end, bucket in condensed(a.segments, WIDTH - LEFT):
        at, width = x(begin / NANO), x(end / NANO) - x(begin / NANO)
        tip = f"node {a.name} · {bucket}: {duration((end - begin) / NANO)} ({MEANING[bucket]})"
        out.append(
            f'<rect class="b-{bucket}" x="{at:.2f}" y="{y:.1f}" width="{max(0.3, width):.2f}" height="{height}" data-tip="{esc(tip)}"/>'
        )
    for n in s.ledger.notices:
        if n.member in a.members:
            at = x(n.seen_s)
            grace = "" if n.grace_s is None else f", {duration(n.grace_s)} of grace"
            commit = "" if n.commit_s is None else f", committed after {duration(n.commit_s)}"
            tip = f"{n.kind} notice from {n.source}{grace}{commit}: {verdict(n.in_time, n.cancelled)}"
            d = f"M{at - 6:.1f} {y - 7:.1f}h12l-6 10z"
            out.append(f'<path class=notice d="{d}" data-tip="{esc(tip)}"/>')
    if a.gone_s is not None and a.end in ("preempted", "lost", "failed", "unfit"):
        at, mid, r = x(a.gone_s) + 8, y + height / 2, 4.5
        d = f"M{at - r:.1f} {mid - r:.1f}l{2 * r} {2 * r}M{at + r:.1f} {mid - r:.1f}l{-2 * r} {2 * r}"
        out.append(f'<path class=kill d="{d}" data-tip="{esc(f"node {a.name}: {attempt_end(a)}")}"/>')
    return out


def _timeline_legend() -> str:
    keys = "".join(f"<span><u class='b-{b}'></u>{b}</span>" for b in BUCKETS)
    marks = (
        "<span><svg width=14 height=12 viewBox='-7 -2 14 12'><path class=notice d='M-6 0h12l-6 9z'/></svg>notice</span>"
        "<span><svg width=14 height=12 viewBox='-7 -6 14 12'><path class=kill d='M-4 -4l8 8M4 -4l-8 8'/></svg>taken or failed</span>"
        "<span><svg width=12 height=12 viewBox='-6 -6 12 12'><circle class=snap r=3.6 /></svg>snapshot</span>"
        "<span><svg width=12 height=12 viewBox='-6 -6 12 12'><line class=epoch y1=-6 y2=6 /></svg>a new world trains</span>"
    )
    return f"<span class=legend>{keys}{marks}</span>"


def _goodput(s: Summary) -> str:
    ledger = s.ledger
    if not ledger.billed_ns:
        return ""
    shares = {b: ledger.ns[b] / ledger.billed_ns for b in BUCKETS if ledger.ns[b]}
    bar = "".join(
        f'<div class="b-{b}" style="flex:{share:.5f} 0 0" data-tip="{b}: {percent(share)}">{percent(share) if share > 0.07 else ""}</div>'
        for b, share in shares.items()
    )
    rows = [
        [
            f"<u class='b-{b}'></u>{b}", f"<span class=wide>{MEANING[b]}</span>", percent(share), duration(ledger.ns[b] / NANO),
            esc(money(ledger.nusd[b] / NANO)),
        ]
        for b, share in shares.items()
    ]  # fmt: skip
    total = ["<b>billed</b>", "", "100 %", f"<b>{duration(ledger.billed_s)}</b>", f"<b>{esc(money(ledger.usd))}</b>"]
    return f"<div class=stack>{bar}</div>" + _html_table(["", "", "share", "node time", "$"], [*rows, total], right={2, 3, 4})


def _money(s: Summary) -> str:
    if not s.ledger.billed_ns:
        return ""
    rows = money_rows(s)
    most = max(usd for _, usd, _ in rows) or 1.0
    return "<div class=money>" + "".join(
        f"<div><span>{name}</span>"
        f"<div class=track><i class='{'paid' if i == 0 else 'ref'}' style='width:{100 * usd / most:.2f}%'></i></div>"
        f"<b>{esc(money(usd))}</b><em>{esc(note)}</em></div>"
        for i, (name, usd, note) in enumerate(rows)
    ) + "</div>"  # fmt: skip


# ---- tables -----------------------------------------------------------------------------------------------------
def _html_table(head: Sequence[str], rows: Sequence[Sequence[object]], right: Collection[int] = ()) -> str:
    """Cells are HTML already."""

    def cells(row: Sequence[object], tag: str) -> str:
        return "".join(f"<{tag}{' class=r' if i in right else ''}>{c}</{tag}>" for i, c in enumerate(row))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table></div>"


def _attempts(s: Summary) -> str:
    used = [a for a in s.ledger.attempts if a.up_s is not None or a.end != "no-capacity"]
    refused = len(s.ledger.attempts) - len(used)
    if not used:
        return f"<p>{refusals(refused)}</p>" if refused else ""
    rows = []
    for a in used:
        tone = "bad" if a.end in ("failed", "preempted", "lost", "unfit") else "good" if a.end == "finished" else ""
        share = f"{percent(a.ns['useful'] / a.billed_ns)}" if a.billed_ns else "–"
        mini = "".join(f'<i class="b-{b}" style="flex:{a.ns[b]} 0 0"></i>' for b in BUCKETS if a.ns[b])
        rows.append(
            [
                esc(a.name),
                f"{esc(a.offer or '–')}<small>{esc(a.accelerator)}{'' if a.spot else ' on demand'} {money(a.usd_per_h)}/h</small>",
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
    return _html_table(head, rows, right={2, 4, 6, 7}) + (f"<p class=note>{refusals(refused)}</p>" if refused else "")


def _epochs(s: Summary) -> str:
    rows = [
        [
            esc(e.epoch), esc(e.world), esc(" ".join(e.attempts)) or "–", esc(e.accumulation or "–"), esc(spread(e.shares)) or "–",
            esc(steps_text(e)), esc(e.ended) or "goes on", f"<span class=bad>{esc(e.steps_lost)}</span>" if e.steps_lost else "0",
            duration(e.gap_s),
            duration(e.lost_s),
        ]
        for e in s.ledger.epochs
    ]  # fmt: skip
    head = ["epoch", "ranks", "nodes", "accum", "micro-batches", "steps", "why it ended", "steps lost", "began after", "end cost"]
    return _html_table(head, rows, right={0, 1, 3, 7, 8, 9}) if rows else ""


def _notices(s: Summary) -> str:
    rows = []
    for n in s.ledger.notices:
        tone = {True: "good", False: "bad", None: ""}[n.in_time]
        rows.append(
            [
                "+" + duration(n.seen_s - s.started_s), esc(n.attempt or n.member), esc(n.kind), esc(n.source), duration(n.grace_s),
                duration(n.commit_s), esc(n.step or "–"), f"<span class='{tone}'>{verdict(n.in_time, n.cancelled)}</span>",
            ]
        )  # fmt: skip
    return _html_table(["at", "node", "notice", "from", "grace", "committed after", "step", ""], rows, right={0, 4, 5, 6}) if rows else ""


def _snapshots(s: Summary) -> str:
    rows = snapshot_rows(s)
    return "<dl>" + "".join(f"<dt>{esc(a)}</dt><dd>{esc(b)}</dd>" for a, b in rows) + "</dl>" if rows else ""


def _trouble(s: Summary) -> str:
    out = []
    for m in s.marks[-TROUBLE_SHOWN:]:
        detail = f"<details><summary>last words</summary><pre>{esc(m.detail)}</pre></details>" if m.detail.strip() else ""
        out.append(f"<li><b>+{duration(m.t - s.started_s)} {esc(m.what)}</b> {esc(m.text)}{detail}</li>")
    return f"<ul class=trouble>{''.join(out)}</ul>" if out else ""


# ---- looks ------------------------------------------------------------------------------------------------------
CSS = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#1a2230;--dim:#667085;--line:#e3e7ee;--grid:#dfe5ee;--accent:#2563eb;--world:#dbe7fb;
--good:#15803d;--bad:#d92d20;--warn:#b45309;--val:#9333ea;
--useful:#2e9f6b;--redone:#e5484d;--snapshot:#2f7de1;--start:#a78bfa;--reform:#f0a429;--drain:#22b8c8;--idle:#c3cad6;
--other:#8a94a6}
@media(prefers-color-scheme:dark){:root{--bg:#0e1218;--card:#161c25;--ink:#e7ecf3;--dim:#94a0b3;--line:#27303d;--grid:#2a3443;
--accent:#6ea8fe;--world:#20304b;--good:#4ade80;--bad:#ff7a73;--warn:#fbbf24;--val:#c792ff;
--useful:#38b27c;--redone:#f0625f;--snapshot:#4f97f5;--start:#9d86ee;--reform:#eba937;--drain:#2fb9c7;--idle:#465062;
--other:#76839a}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1180px;margin:0 auto;padding:28px 20px 40px}h1{font-size:26px;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:16px;margin:0 0 4px}header{margin-bottom:18px}.sub,.note,.reason{color:var(--dim);margin:4px 0 0}
.reason{color:var(--ink)}
.note{font-size:13px;margin:0 0 10px}.problem{border-left:4px solid var(--warn);padding:6px 12px;background:var(--card);
margin:10px 0 0}
.pill{display:inline-block;vertical-align:3px;font-size:13px;font-weight:600;padding:1px 10px;border-radius:99px;
color:var(--card);background:var(--accent)}
.pill.good{background:var(--good)}.pill.bad{background:var(--bad)}.pill.warn{background:var(--warn)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(124px,1fr));gap:10px;margin-bottom:14px}
.cards div,section{background:var(--card);border:1px solid var(--line);border-radius:12px}
.cards div{padding:11px 12px;display:flex;flex-direction:column;min-width:0}.cards b{font-weight:500;font-size:12.5px;
color:var(--dim)}
.cards strong{font-size:18.5px;line-height:1.45;font-variant-numeric:tabular-nums;white-space:nowrap}
.cards i{font-style:normal;font-size:12.5px;color:var(--dim)}
section{padding:16px 18px 14px;margin-top:14px}.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch}
svg{display:block;width:100%;min-width:700px;height:auto}.legend svg{display:inline-block;width:auto;min-width:0;
vertical-align:-2px;margin-right:3px}
svg text{font-size:11.5px;fill:var(--dim);font-variant-numeric:tabular-nums}svg .strong{fill:var(--ink);font-weight:600}
.grid{stroke:var(--grid)}.base{stroke:var(--line)}.cut{stroke:var(--card)}.world{fill:var(--world)}
.curve,.lost,.valline{fill:none;stroke-width:1.8;stroke-linejoin:round}.curve{stroke:var(--accent)}
.lost{stroke:var(--redone);stroke-dasharray:4 3}.valline{stroke:var(--val);stroke-width:1;opacity:.55}.val{fill:var(--card);
stroke:var(--val);stroke-width:2}
.lostband{fill:var(--redone);opacity:.13}.losttab{fill:var(--redone);pointer-events:none}.cross{stroke:var(--dim);
stroke-dasharray:2 3;pointer-events:none}
.epoch{stroke:var(--ink);opacity:.38;stroke-dasharray:3 3;pointer-events:none}.hit{fill:transparent}.asked{stroke:var(--dim);
stroke-dasharray:2 3}
.hatchline{stroke:var(--line);stroke-width:5}.notice{fill:var(--warn);stroke:var(--card)}.kill{stroke:var(--bad);
stroke-width:2.6;fill:none;stroke-linecap:round}
.snap{fill:var(--card);stroke:var(--snapshot);stroke-width:2}
.b-useful{fill:var(--useful);background:var(--useful)}.b-redone{fill:var(--redone);background:var(--redone)}
.b-snapshot{fill:var(--snapshot);background:var(--snapshot)}.b-start{fill:var(--start);background:var(--start)}
.b-reform{fill:var(--reform);background:var(--reform)}.b-drain{fill:var(--drain);background:var(--drain)}
.b-idle{fill:var(--idle);background:var(--idle)}.b-other{fill:var(--other);background:var(--other)}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:center}
u{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;text-decoration:none;vertical-align:-1px}
.k-curve{height:3px;width:18px;vertical-align:3px;background:var(--accent)}.k-lost{height:3px;width:18px;vertical-align:3px;
background:var(--redone)}
.k-val{border-radius:50%;border:2px solid var(--val)}.k-world{background:var(--world);border:1px solid var(--line)}
.stack{display:flex;height:34px;border-radius:8px;overflow:hidden;margin:4px 0 12px;gap:1px}
.stack div{min-width:2px;color:#fff;font-size:12px;font-weight:600;display:flex;align-items:center;justify-content:center;
overflow:hidden;white-space:nowrap}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{font-weight:500;color:var(--dim);font-size:12.5px;text-align:left;white-space:nowrap}th,td{padding:6px 12px 6px 0;
border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}.r{text-align:right}td.r{white-space:nowrap}td small{display:block;color:var(--dim);
font-size:12px}
td .good{color:var(--good)}td .bad{color:var(--bad);font-weight:600}
.mini{display:flex;width:110px;height:9px;border-radius:4px;overflow:hidden;margin-top:6px}.mini i{min-width:0}
.money{display:grid;gap:9px}.money>div{display:grid;grid-template-columns:minmax(150px,270px) 1fr 84px minmax(110px,190px);
gap:12px;align-items:center}
.money b{text-align:right;font-variant-numeric:tabular-nums}.money em{font-style:normal;color:var(--dim);font-size:13px}
.track i{display:block;height:18px;border-radius:5px;min-width:2px}.paid{background:var(--useful)}.ref{background:var(--idle)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 20px;margin:6px 0 0}dt{color:var(--dim)}dd{margin:0}
.trouble{margin:6px 0 0;padding-left:18px;overflow-wrap:anywhere}pre{overflow-x:auto;font-size:12px;background:var(--bg);
padding:10px;border-radius:8px}
summary{cursor:pointer;color:var(--dim)}footer{color:var(--dim);font-size:12.5px;margin-top:18px;overflow-wrap:anywhere}
#tip{position:fixed;z-index:9;pointer-events:none;max-width:320px;background:var(--ink);color:var(--bg);font-size:12.5px;
line-height:1.4;
padding:6px 10px;border-radius:7px;white-space:pre-line;box-shadow:0 3px 14px #0004}#tip[hidden]{display:none}
@media(max-width:640px){main{padding:18px 12px 30px}section{padding:13px 13px 11px}.cards{grid-template-columns:repeat(2,1fr)}
.money>div{grid-template-columns:1fr auto;gap:2px 10px}.money .track{grid-column:1/-1;grid-row:2}.money b{grid-row:1;
grid-column:2}
.money em{grid-column:1/-1;grid-row:3}dl{grid-template-columns:1fr}dt{margin-top:4px}th,td{padding-right:14px}.wide{display:none}
table{width:max-content;min-width:100%}td{max-width:250px}td:first-child{white-space:nowrap}}
@media print{body{background:#fff}section,.cards div{break-inside:avoid}}
"""

SCRIPT = """
(function(){var tip=document.getElementById('tip');
function show(text,e){tip.textContent=text;tip.hidden=false;var w=tip.offsetWidth,h=tip.offsetHeight;
tip.style.left=Math.max(4,Math.min(e.clientX+14,innerWidth-w-6))+'px';
tip.style.top=(e.clientY+18+h>innerHeight?e.clientY-h-10:e.clientY+18)+'px';}
function hide(){tip.hidden=true;}
document.addEventListener('pointermove',function(e){if(e.target.closest('#loss'))return;var t=e.target.closest('[data-tip]');
if(t)show(t.getAttribute('data-tip'),e);else hide();});
document.addEventListener('pointerdown',function(e){var t=e.target.closest('[data-tip]');
if(t&&!e.target.closest('#loss'))show(t.getAttribute('data-tip'),e);});
var svg=document.getElementById('loss'),data=document.getElementById('lossdata');if(!svg||!data)return;
var d=JSON.parse(data.textContent),cross=document.getElementById('cross'),inner=d.width-d.left-d.right;
function over(e){var box=svg.getBoundingClientRect(),u=(e.clientX-box.left)/box.width*d.width,step=(u-d.left)/inner*d.last+.5,best=null;
d.rows.forEach(function(r){if(!best||Math.abs(r[0]-step)<Math.abs(best[0]-step))best=r;});if(!best)return;
var x=d.left+(best[0]-.5)/d.last*inner;cross.setAttribute('x1',x);cross.setAttribute('x2',x);
cross.setAttribute('visibility','visible');
var val=best[5]==null?'':'\\n'+d.val+' '+(+best[5].toPrecision(6));
var t='step '+best[0]+'\\nloss '+best[1]+val+'\\nepoch '+best[2]+', '+best[3]+' ranks\\n'+best[4]+' s';
var own=e.target.getAttribute&&e.target.getAttribute('class')==='lostband'?e.target.getAttribute('data-tip'):null;
show(own?t+'\\n'+own:t,e);}
svg.addEventListener('pointermove',over);svg.addEventListener('pointerdown',over);
svg.addEventListener('pointerleave',function(){cross.setAttribute('visibility','hidden');hide();});})();
"""
