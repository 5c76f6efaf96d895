"""The page's charts, as SVG."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from harness.views.painting import BUCKETS, NANO, LabelledSpan
from harness.views.report import MEANING, attempt_end, verdict
from harness.views.rows import BAD_ENDS, AttemptRow
from harness.views.summary import Point, Summary
from harness.views.words import duration, money, plural, spread, steps_text
from storage.text import plain

WIDTH, LEFT, RIGHT = 1100, 58, 14  # of the charts, in SVG units
MOST_POINTS = 1500  # more are thinned out: the page must stay small and quick
Scale = Callable[[float], float]


def esc(value: object) -> str:
    return html.escape(plain(value, keep="\n"), quote=True)


# ---- drawing -------------------------------------------------------------------------------------
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
    unit, size = (
        ("s", 1.0) if seconds < 180 else ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)
    )
    return [t * size for t in nice_ticks(0, seconds / size, about)], unit, size


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MOST_POINTS, keeping each piece's lowest and highest, so that no spike gets lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[Point] = []
    for i in range(0, len(points), size):
        piece = points[i : i + size]
        kept += sorted(
            {min(piece, key=lambda p: p.loss), max(piece, key=lambda p: p.loss)},
            key=lambda p: p.step,
        )
    return kept


def condensed(segments: Sequence[LabelledSpan], columns: int) -> list[LabelledSpan]:
    """Segments for drawing. What is too short for the eye is drawn as its neighbour; where there
    are more than columns, each column gets what fills it most."""
    if not segments:
        return []
    start, end = segments[0][0], segments[-1][1]
    if len(segments) <= columns:
        joined: list[LabelledSpan] = []
        for a, b, bucket in segments:
            if joined and ((b - a) * columns * 2 < end - start or joined[-1][2] == bucket):
                joined[-1] = (joined[-1][0], b, joined[-1][2])
            else:
                joined.append((a, b, bucket))
        return joined
    drawn: list[LabelledSpan] = []
    i = 0
    for column in range(columns):
        a, b = (
            start + (end - start) * column // columns,
            start + (end - start) * (column + 1) // columns,
        )
        amount: dict[str, int] = {}
        while i < len(segments) and segments[i][0] < b:
            amount[segments[i][2]] = (
                amount.get(segments[i][2], 0) + min(b, segments[i][1]) - max(a, segments[i][0])
            )
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
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" '
        f'text-anchor="{anchor}"{f" class={cls!r}" if cls else ""}>{esc(text)}</text>'
    )


def _by_epoch(points: Iterable[Point]) -> dict[int, list[Point]]:
    found: dict[int, list[Point]] = {}
    for p in points:
        found.setdefault(p.epoch, []).append(p)
    return found


def loss_chart(s: Summary) -> str:
    """The loss over steps; empty if there is none."""
    curve = [p for p in s.curve if math.isfinite(p.loss)]
    lost = [p for p in s.lost if math.isfinite(p.loss)]
    validation = [(step, v) for step, v in s.validation if math.isfinite(v)]
    if not curve and not lost:
        return ""
    values = [p.loss for p in curve + lost] + [v for _, v in validation]
    last = max([p.step for p in curve + lost] + [step for step, _ in validation])
    plane = _LossPlane(min(values), max(values), last)
    return "".join(
        [
            f'<div class=scroll><svg id="loss" viewBox="0 0 {WIDTH} {plane.height}" role="img" '
            'aria-label="loss over steps">',
            *_worlds(s, plane),
            *_loss_axes(plane),
            *_lost_steps(s, plane),
            *_loss_curves(curve, validation, plane),
            f'<line id="cross" class=cross y1="{plane.top}" y2="{plane.floor}" '
            'visibility="hidden"/></svg></div>',
            _loss_data(s, curve, validation, last),
        ]
    )


class _LossPlane:
    """Where a step and a loss lie in the chart. The curve has some room above and below."""

    height, top, bottom = 330, 34, 34

    def __init__(self, low: float, high: float, last: int):
        pad = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        self.low, self.high, self.last = low - pad, high + pad, last
        self.floor, self.inner = self.height - self.bottom, self.height - self.top - self.bottom

    def x(self, step: float) -> float:
        return LEFT + (step - 0.5) / self.last * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.top + (self.high - value) / (self.high - self.low) * self.inner

    def path(self, points: Iterable[Point]) -> str:
        return _path((self.x(p.step), self.y(p.loss)) for p in points)


def _worlds(s: Summary, plane: _LossPlane) -> Iterator[str]:
    """The lineage, by world: a band for each epoch."""
    biggest = max([1, *(e.world for e in s.ledger.epochs)])
    mine_of = _by_epoch(s.curve)
    for e in s.ledger.epochs:
        mine = [p.step for p in mine_of.get(e.epoch, [])]
        if not mine:
            continue
        a, b = plane.x(min(mine) - 0.5), plane.x(max(mine) + 0.5)
        tip = (
            f"epoch {e.epoch}: {plural(e.world, 'rank')} on nodes {' '.join(e.attempts)}; "
            f"micro-batches {spread(e.shares)}; {e.ended}"
        )
        yield (
            f'<rect class=world x="{a:.1f}" y="{plane.top}" width="{b - a:.1f}" '
            f'height="{plane.inner}" '
            f'style="opacity:{0.35 + 0.65 * e.world / biggest:.2f}" data-tip="{esc(tip)}"/>'
            f'<line class=cut x1="{a:.1f}" x2="{a:.1f}" y1="{plane.top}" y2="{plane.floor}"/>'
        )
        if b - a > 24:
            text = plural(e.world, "rank") if b - a > 70 else str(e.world)
            yield _text((a + b) / 2, plane.top - 19, text, cls="strong")
            if b - a > 120 and e.accumulation:
                yield _text((a + b) / 2, plane.top - 6, f"accumulation {e.accumulation}")


def _loss_axes(plane: _LossPlane) -> Iterator[str]:
    for value in nice_ticks(plane.low, plane.high, 5):
        y = plane.y(value)
        yield f'<line class=grid x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(LEFT - 8, y + 4, f"{value:.4g}", "end")
    for step in nice_ticks(1, plane.last, 10):
        if step == int(step):
            yield _text(plane.x(step), plane.floor + 16, f"{step:,.0f}")
    yield _text((LEFT + WIDTH - RIGHT) / 2, plane.height - 3, "step")


def _lost_steps(s: Summary, plane: _LossPlane) -> Iterator[str]:
    """Steps that were done again, by the epoch that lost them."""
    for epoch, mine in sorted(_by_epoch(s.lost).items()):
        a, b = plane.x(mine[0].step - 0.5), plane.x(mine[-1].step + 0.5)
        tip = f"epoch {epoch}: steps {mine[0].step}–{mine[-1].step} were lost and done again"
        width = max(2.0, b - a)
        yield (
            f'<rect class=lostband x="{a:.1f}" y="{plane.top}" width="{width:.1f}" '
            f'height="{plane.inner}" data-tip="{esc(tip)}"/>'
            f'<rect class=losttab x="{a:.1f}" y="{plane.floor - 5}" width="{width:.1f}" '
            'height="5"/>'
        )
        drawn = [p for p in thinned(mine) if math.isfinite(p.loss)]
        if drawn:
            yield f'<path class=lost d="{plane.path(drawn)}"/>'


def _loss_curves(
    curve: list[Point], validation: list[tuple[int, float]], plane: _LossPlane
) -> Iterator[str]:
    if curve:
        yield f'<path class=curve d="{plane.path(thinned(curve))}"/>'
    if validation:
        places = [(plane.x(step), plane.y(value)) for step, value in validation]
        yield f'<path class=valline d="{_path(places)}"/>'
        for x, y in places:
            yield f'<circle class=val cx="{x:.1f}" cy="{y:.1f}" r="4"/>'


def _loss_data(
    s: Summary, curve: list[Point], validation: list[tuple[int, float]], last: int
) -> str:
    """What the page's script shows at the pointer."""
    by_step = dict(validation)
    worlds = {e.epoch: e.world for e in s.ledger.epochs}
    data = {
        "left": LEFT,
        "right": RIGHT,
        "width": WIDTH,
        "last": last,
        "val": s.validation_name,
        "rows": [
            [
                p.step,
                float(f"{p.loss:.6g}"),
                p.epoch,
                worlds.get(p.epoch, 0),
                round(p.seconds, 3),
                by_step.get(p.step),
            ]
            for p in thinned(curve)
        ],
    }
    # "<" is spelled so that no text in the data can end the script element.
    return (
        '<script type="application/json" '
        f'id="lossdata">{json.dumps(data).replace("<", chr(92) + "u003c")}</script>'
    )


def loss_legend(s: Summary) -> str:
    keys = ["<span><u class=k-curve></u>training loss (committed steps)</span>"]
    if s.lost:
        keys.append("<span><u class=k-lost></u>lost and redone</span>")
    if s.validation:
        keys.append(f"<span><u class=k-val></u>{esc(s.validation_name.replace('_', ' '))}</span>")
    keys.append("<span><u class=k-world></u>stronger shade: more ranks</span>")
    return f"<span class=legend>{''.join(keys)}</span>"


def timeline(s: Summary) -> str:
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

    out = [
        f'<div class=scroll><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="nodes over '
        'time">'
    ]
    out.append(
        '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)">'
        "<line class=hatchline x1='0' x2='0' y1='0' y2='7'/></pattern></defs>"
    )
    for a, b in _outages(rows, start + span):
        tip = f"no node for {duration(b - a)}"
        out.append(
            f'<rect fill="url(#hatch)" x="{x(a):.1f}" y="{top}" width="{x(b) - x(a):.1f}" '
            f'height="{height - top - 26}" data-tip="{tip}"/>'
        )
        if x(b) - x(a) > 70:
            out.append(_text((x(a) + x(b)) / 2, top + steps_height / 2, "no node", cls="strong"))
    ticks, unit, size = time_ticks(span, 9)
    for t in ticks:
        out.append(
            f'<line class=grid x1="{x(start + t):.1f}" x2="{x(start + t):.1f}" y1="{top}" '
            f'y2="{height - 24}"/>'
        )
        out.append(_text(x(start + t), height - 8, f"{t / size:g} {unit}"))
    out += _progress(s, x, top, steps_height)
    trained = [(e, x(e.first_s)) for e in s.ledger.epochs if e.first_s is not None]
    free = -1e9  # right of this there is room for a label
    for (e, at), (_, following) in zip(trained, [*trained[1:], (None, float(WIDTH))], strict=False):
        tip = (
            f"epoch {e.epoch} ({e.reason or 'start'}): {plural(e.world, 'rank')}, steps "
            f"{steps_text(e)}; {e.ended or 'goes on'}"
        )
        out.append(
            f'<line class=epoch x1="{at:.1f}" x2="{at:.1f}" y1="{top - 4}" y2="{height - 26}"/>'
            f'<rect class=hit x="{at - 6:.1f}" y="4" width="56" height="{top - 6}" '
            f'data-tip="{esc(tip)}"/>'
        )
        label = next(
            (
                t
                for t in (f"e{e.epoch} · {plural(e.world, 'rank')}", f"e{e.epoch}")
                if following - at > 6.5 * len(t) + 4
            ),
            "",
        )
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
    """Steps over time: it falls back where work was lost. With a dot for each committed
    snapshot."""
    points = sorted([*s.curve, *s.lost], key=lambda p: p.t)
    most = max([p.step for p in points] + [s.total_steps, 1])

    def y(step: float) -> float:
        return top + height - step / most * height

    out = [
        f'<line class=base x1="{x(s.started_s):.1f}" x2="{WIDTH - RIGHT}" y1="{top + height}" '
        f'y2="{top + height}"/>',
        _text(168, top + 8, f"{most:,}", "end"),
        _text(168, top + height, "0", "end"),
        _text(12, top + height / 2 + 4, "steps", "start", "strong"),
    ]
    lost = {(p.epoch, p.step) for p in s.lost}
    for mine in _by_epoch(points).values():
        good = [p for p in mine if (p.epoch, p.step) not in lost]
        if good:
            begin = (x(good[0].t - good[0].seconds), y(good[0].step - 1))
            out.append(
                f"<path class=curve "
                f'd="{_path([begin, *((x(p.t), y(p.step)) for p in _every(good))])}"/>'
            )
        bad = [p for p in mine if (p.epoch, p.step) in lost]
        if bad:
            out.append(
                f"<path class=lost "
                f'd="{_path((x(p.t), y(p.step)) for p in [*good[-1:], *_every(bad)])}"/>'
            )
    if len(s.snapshots) <= 400:
        for c in s.snapshots:
            tip = (
                f"snapshot of step {c.step} ({c.why}): still {duration(c.stall_s)}, committed "
                f"after {duration(c.commit_s)}"
            )
            out.append(
                f'<circle class=snap cx="{x(c.t_start):.1f}" cy="{y(c.step):.1f}" r="3.4" '
                f'data-tip="{esc(tip)}"/>'
            )
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
    tip = (
        f"node {a.name} on {a.offer or a.accelerator}: {attempt_end(a)}; {duration(a.billed_s)}, "
        f"{money(a.usd)}"
    )
    out = []
    most = WIDTH - LEFT
    if height <= 10:  # there are many: none is drawn finer than the eye sees
        end_s = s.ended_s if a.gone_s is None else a.gone_s
        most = min(most, max(1, math.ceil(x(end_s) - x(a.up_s))))
    if height > 10:
        label = f"<tspan class=strong>{esc(a.name[:14])}</tspan>  {esc(short)}"
        out.append(f'<text x="12" y="{y + height - 5:.1f}" data-tip="{esc(tip)}">{label}</text>')
    asked, up = x(max(a.asked_s, s.started_s)), x(a.up_s)
    if up - asked > 1:
        out.append(
            f'<line class=asked x1="{asked:.1f}" x2="{up:.1f}" y1="{y + height / 2:.1f}" '
            f'y2="{y + height / 2:.1f}"/>'
        )
    for begin, end, bucket in condensed(a.segments, most):
        at, width = x(begin / NANO), x(end / NANO) - x(begin / NANO)
        tip = f"node {a.name} · {bucket}: {duration((end - begin) / NANO)} ({MEANING[bucket]})"
        out.append(
            f'<rect class="b-{bucket}" x="{at:.2f}" y="{y:.1f}" width="{max(0.3, width):.2f}" '
            f'height="{height}" data-tip="{esc(tip)}"/>'
        )
    for n in s.ledger.notices:
        if n.member in a.members:
            at = x(n.seen_s)
            grace = "" if n.grace_s is None else f", {duration(n.grace_s)} of grace"
            commit = "" if n.commit_s is None else f", committed after {duration(n.commit_s)}"
            tip = (
                f"{n.kind} notice from {n.source}{grace}{commit}: {verdict(n.in_time, n.cancelled)}"
            )
            d = f"M{at - 6:.1f} {y - 7:.1f}h12l-6 10z"
            out.append(f'<path class=notice d="{d}" data-tip="{esc(tip)}"/>')
    if a.gone_s is not None and a.end in BAD_ENDS:
        at, mid, r = x(a.gone_s) + 8, y + height / 2, 4.5
        d = (
            f"M{at - r:.1f} {mid - r:.1f}l{2 * r} {2 * r}M{at + r:.1f} {mid - r:.1f}l{-2 * r} "
            f"{2 * r}"
        )
        out.append(
            f'<path class=kill d="{d}" data-tip="{esc(f"node {a.name}: {attempt_end(a)}")}"/>'
        )
    return out


def timeline_legend() -> str:
    keys = "".join(f"<span><u class='b-{b}'></u>{b}</span>" for b in BUCKETS)
    marks = (
        "<span><svg width=14 height=12 viewBox='-7 -2 14 12'><path class=notice d='M-6 0h12l-6 "
        "9z'/></svg>notice</span>"
        "<span><svg width=14 height=12 viewBox='-7 -6 14 12'><path class=kill d='M-4 -4l8 8M4 "
        "-4l-8 8'/></svg>taken or failed</span>"
        "<span><svg width=12 height=12 viewBox='-6 -6 12 12'><circle class=snap r=3.6 "
        "/></svg>snapshot</span>"
        "<span><svg width=12 height=12 viewBox='-6 -6 12 12'><line class=epoch y1=-6 y2=6 "
        "/></svg>a new world trains</span>"
    )
    return f"<span class=legend>{keys}{marks}</span>"
