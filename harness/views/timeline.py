"""The page's picture of nodes over time: lives, worlds, notices, and the steps they made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from harness.views.painting import BUCKETS, NANO, LabelledSpan
from harness.views.plots import RIGHT, WIDTH, esc, label, path, time_ticks
from harness.views.report import MEANING, attempt_end, verdict
from harness.views.rows import BAD_ENDS, AttemptRow
from harness.views.summary import Point, Summary
from harness.views.words import duration, money, plural, steps_text

MOST_ROWS = 120  # nodes that are drawn: those that were up longest
MOST_SEGMENTS = 6000  # of all of them
MOST_WORLDS = 200
MOST_POINTS = 2000  # of steps over time; and an end of each world
Scale = Callable[[float], float]


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


def by_epoch(points: Iterable[Point]) -> dict[int, list[Point]]:
    found: dict[int, list[Point]] = {}
    for p in points:
        found.setdefault(p.epoch, []).append(p)
    return found


def timeline(s: Summary) -> str:
    """Every node's life; of very many, those that were up longest."""
    rows = shown_rows(s)
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
        f'<div class=scroll><svg viewBox="0 0 {WIDTH:g} {height}" role="img" '
        'aria-label="nodes over time">',
        '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)">'
        "<line class=hatchline x1='0' x2='0' y1='0' y2='7'/></pattern></defs>",
    ]
    for a, b in _outages([a for a in s.ledger.attempts if a.up_s is not None], start + span):
        tip = f"no node for {duration(b - a)}"
        out.append(
            f'<rect fill="url(#hatch)" x="{x(a):.1f}" y="{top}" width="{x(b) - x(a):.1f}" '
            f'height="{height - top - 26}" data-tip="{tip}"/>'
        )
        if x(b) - x(a) > 70:
            out.append(label((x(a) + x(b)) / 2, top + steps_height / 2, "no node", cls="strong"))
    ticks, unit, size = time_ticks(span, 9)
    for t in ticks:
        out.append(
            f'<line class=grid x1="{x(start + t):.1f}" x2="{x(start + t):.1f}" y1="{top}" '
            f'y2="{height - 24}"/>'
        )
        out.append(label(x(start + t), height - 8, f"{t / size:g} {unit}"))
    out += _progress(s, x, top, steps_height)
    out += _new_worlds(s, x, top, height)
    widths = [x(s.ended_s if a.gone_s is None else a.gone_s) - x(a.up_s or 0.0) for a in rows]
    finest = min(1.0, MOST_SEGMENTS / max(1.0, sum(widths)))  # segments for each unit of width
    for i, (row, width) in enumerate(zip(rows, widths, strict=True)):
        most = max(4, math.ceil(width * finest))
        out += _bar(s, row, x, below + i * (bar + gap), bar, most)
    out.append("</svg></div>")
    return "".join(out)


def shown_rows(s: Summary) -> list[AttemptRow]:
    """In the order of attempts."""
    up = [a for a in s.ledger.attempts if a.up_s is not None]
    longest = sorted(up, key=lambda a: -a.billed_ns)[:MOST_ROWS]
    names = {a.name for a in longest}
    return [a for a in up if a.name in names]


def _new_worlds(s: Summary, x: Scale, top: float, height: float) -> Iterator[str]:
    trained = [(e, x(e.first_s)) for e in s.ledger.epochs if e.first_s is not None]
    trained = trained[:: len(trained) // MOST_WORLDS + 1]
    free = -1e9  # right of this there is room for a label
    for (e, at), (_, following) in zip(trained, [*trained[1:], (None, WIDTH)], strict=False):
        tip = (
            f"epoch {e.epoch} ({e.reason or 'start'}): {plural(e.world, 'rank')}, steps "
            f"{steps_text(e)}; {e.ended or 'goes on'}"
        )
        yield (
            f'<line class=epoch x1="{at:.1f}" x2="{at:.1f}" y1="{top - 4}" y2="{height - 26}"/>'
            f'<rect class=hit x="{at - 6:.1f}" y="4" width="56" height="{top - 6}" '
            f'data-tip="{esc(tip)}"/>'
        )
        words = (f"e{e.epoch} · {plural(e.world, 'rank')}", f"e{e.epoch}")
        fits = next((t for t in words if following - at > 6.5 * len(t) + 4), "")
        if fits and at >= free:
            yield label(at + 2, top - 10, fits, "start", "strong")
            free = at + 6.5 * len(fits) + 4


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
        f'<line class=base x1="{x(s.started_s):.1f}" x2="{WIDTH - RIGHT:g}" y1="{top + height}" '
        f'y2="{top + height}"/>',
        label(168, top + 8, f"{most:,}", "end"),
        label(168, top + height, "0", "end"),
        label(12, top + height / 2 + 4, "steps", "start", "strong"),
    ]
    lost = {(p.epoch, p.step) for p in s.lost}
    stride = len(points) // MOST_POINTS + 1
    for mine in by_epoch(points).values():
        good = [p for p in mine if (p.epoch, p.step) not in lost]
        if good:
            begin = (x(good[0].t - good[0].seconds), y(good[0].step - 1))
            out.append(
                f"<path class=curve "
                f'd="{path([begin, *((x(p.t), y(p.step)) for p in _every(good, stride))])}"/>'
            )
        bad = [p for p in mine if (p.epoch, p.step) in lost]
        if bad:
            out.append(
                f"<path class=lost "
                f'd="{path((x(p.t), y(p.step)) for p in [*good[-1:], *_every(bad, stride)])}"/>'
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


def _every(points: list[Point], stride: int) -> list[Point]:
    return [*points[::stride], points[-1]]


def _bar(s: Summary, a: AttemptRow, x: Scale, y: float, height: float, most: int) -> list[str]:
    """One node's life, in the colours of the ledger, in at most so many segments."""
    assert a.up_s is not None
    place = a.offer.split("/")
    short = " ".join(place[1:2] + place[-1:]) if len(place) > 2 else a.offer
    short = short if len(short) <= 22 else short[:21] + "…"
    tip = (
        f"node {a.name} on {a.offer or a.accelerator}: {attempt_end(a)}; {duration(a.billed_s)}, "
        f"{money(a.usd)}"
    )
    out = []
    if height > 10:
        name = f"<tspan class=strong>{esc(a.name[:14])}</tspan>  {esc(short)}"
        out.append(f'<text x="12" y="{y + height - 5:.1f}" data-tip="{esc(tip)}">{name}</text>')
    asked, up = x(max(a.asked_s, s.started_s)), x(a.up_s)
    if up - asked > 1:
        out.append(
            f'<line class=asked x1="{asked:.1f}" x2="{up:.1f}" y1="{y + height / 2:.1f}" '
            f'y2="{y + height / 2:.1f}"/>'
        )
    for begin, end, bucket in condensed(a.segments, most):
        at, width = x(begin / NANO), x(end / NANO) - x(begin / NANO)
        meaning = MEANING.get(bucket, "")
        tip = f"node {a.name} · {bucket}: {duration((end - begin) / NANO)} ({meaning})"
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
