"""Lane charts, a lane per node over time: of a whole run, and of an interruption with numbered
moments.

An interruption's SVG is self-contained and can also be part of a page: its colours are the page's
CSS variables where these exist. Its names begin with `pm-` so that they do not collide with others.
Its time axis is distorted so that moments close together stay apart: long waits are drawn shorter
than they are, and every moment's true time stands in the list below the lanes.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from harness.core.formatting import duration, money, plural
from harness.ledger.bill import BAD_ENDS, NANO, AttemptRow, LabelledSpan
from harness.look.pages.line_plots import (
    RIGHT,
    WIDTH,
    element,
    esc,
    label,
    path,
    time_ticks,
)
from harness.look.postmortems.interruption import KINDS, MOMENTS, Interruption, Moment
from harness.look.reports.report_rows import (
    MEANING,
    attempt_end,
    grace_text,
    steps_text,
    verdict,
)
from harness.look.reports.summary import Point, Summary
from storage.terminal_text import plain

# The page's picture of nodes over time: their lives, worlds, notices, and steps.

MOST_ROWS = 120  # nodes that are drawn: those that were up longest
MOST_SEGMENTS = 6000  # segments of all nodes together
MOST_WORLDS = 200
MOST_POINTS = 2000  # points of steps over time, besides the end of each world
Scale = Callable[[float], float]


def condensed(segments: Sequence[LabelledSpan], columns: int) -> list[LabelledSpan]:
    """Return segments for drawing. One that is too short to see is merged with its neighbour; if
    there are more segments than columns, each column shows its largest bucket."""
    if not segments:
        return []
    start, end = segments[0][0], segments[-1][1]
    drawn: list[LabelledSpan] = []

    def draw(a: int, b: int, bucket: str, is_short: bool = False) -> None:
        if drawn and (is_short or drawn[-1][2] == bucket):
            drawn[-1] = (drawn[-1][0], b, drawn[-1][2])
        else:
            drawn.append((a, b, bucket))

    if len(segments) <= columns:
        for a, b, bucket in segments:
            draw(a, b, bucket, (b - a) * columns * 2 < end - start)
        return drawn
    i = 0
    for column in range(columns):
        a, b = (start + (end - start) * c // columns for c in (column, column + 1))
        amount: dict[str, int] = {}
        while i < len(segments) and segments[i][0] < b:
            begin, until, bucket = segments[i]
            amount[bucket] = amount.get(bucket, 0) + min(b, until) - max(a, begin)
            if until > b:
                break
            i += 1
        draw(a, b, max(amount, key=lambda k: amount[k]))
    return drawn


def by_epoch(points: Iterable[Point]) -> dict[int, list[Point]]:
    found: dict[int, list[Point]] = {}
    for p in points:
        found.setdefault(p.epoch, []).append(p)
    return found


def timeline(s: Summary) -> str:
    """Return the SVG with the lives of the nodes (the `MOST_ROWS` that were up longest)."""
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

    out = [HATCH]
    for a, b in _outages([a for a in s.ledger.attempts if a.up_s is not None], start + span):
        place = {"x": x(a), "y": top, "width": x(b) - x(a), "height": height - top - 26}
        tip = f"no node for {duration(b - a)}"
        out.append(element("rect", fill="url(#hatch)", **place, data_tip=tip))
        if x(b) - x(a) > 70:
            out.append(label((x(a) + x(b)) / 2, top + steps_height / 2, "no node", cls="strong"))
    ticks, unit, size = time_ticks(span, 9)
    for t in ticks:
        out.append(_upright("grid", x(start + t), top, height - 24))
        out.append(label(x(start + t), height - 8, f"{t / size:g} {unit}"))
    out += _progress(s, x, top, steps_height)
    out += _new_worlds(s, x, top, height)
    widths = [x(s.ended_s if a.gone_s is None else a.gone_s) - x(a.up_s or 0.0) for a in rows]
    finest = min(1.0, MOST_SEGMENTS / max(1.0, sum(widths)))  # segments per unit of width
    for i, (row, width) in enumerate(zip(rows, widths, strict=True)):
        most = max(4, math.ceil(width * finest))
        out += _attempt_bar(s, row, x, below + i * (bar + gap), bar, most)
    named = {"role": "img", "aria_label": "nodes over time"}
    svg = element("svg", "".join(out), viewBox=f"0 0 {WIDTH:g} {height}", **named)
    return f"<div class=scroll>{svg}</div>"


HATCH = (
    '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><line class="hatchline" x1="0" x2="0" y1="0" y2="7"/>'
    "</pattern></defs>"
)


def _upright(cls: str, x: float, top: float, floor: float, **more: object) -> str:
    return element("line", class_=cls, x1=x, x2=x, y1=top, y2=floor, **more)


def shown_rows(s: Summary) -> list[AttemptRow]:
    """Return the nodes that are drawn, in the order of attempts."""
    up = [a for a in s.ledger.attempts if a.up_s is not None]
    longest = sorted(up, key=lambda a: -a.billed_ns)[:MOST_ROWS]
    names = {a.name for a in longest}
    return [a for a in up if a.name in names]


def _new_worlds(s: Summary, x: Scale, top: float, height: float) -> Iterator[str]:
    trained = [(e, x(e.first_s)) for e in s.ledger.epochs if e.first_s is not None]
    trained = trained[:: len(trained) // MOST_WORLDS + 1]
    free = -1e9  # x from which on there is room for a label
    for (e, at), (_, following) in zip(trained, [*trained[1:], (None, WIDTH)], strict=False):
        tip = (
            f"generation {e.epoch} ({e.reason or 'start'}): {plural(e.world, 'rank')}, steps "
            f"{steps_text(e)}; {e.ended or 'goes on'}"
        )
        yield _upright("epoch", at, top - 4, height - 26)
        yield element("rect", class_="hit", x=at - 6, y=4, width=56, height=top - 6, data_tip=tip)
        words = (f"gen. {e.epoch} · {plural(e.world, 'rank')}", f"{e.epoch}")
        fits = next((t for t in words if following - at > 6.5 * len(t) + 4), "")
        if fits and at >= free:
            yield label(at + 2, top - 10, fits, "start", "strong")
            free = at + 6.5 * len(fits) + 4


def _outages(rows: Sequence[AttemptRow], end_s: float) -> list[tuple[float, float]]:
    """Return the intervals in which no node was up, after the first one's start."""
    spans = sorted((a.up_s or 0.0, end_s if a.gone_s is None else a.gone_s) for a in rows)
    found: list[tuple[float, float]] = []
    until = spans[0][0]
    for a, b in spans:
        if a > until + 1.0:
            found.append((until, a))
        until = max(until, b)
    return found


def _progress(s: Summary, x: Scale, top: float, height: float) -> list[str]:
    """Draw steps over time, which fall back where work was lost, and a dot per committed
    snapshot."""
    points = sorted([*s.curve, *s.lost], key=lambda p: p.t)
    most = max([p.step for p in points] + [s.total_steps, 1])

    def y(step: float) -> float:
        return top + height - step / most * height

    floor = top + height
    out = [
        element("line", class_="base", x1=x(s.started_s), x2=WIDTH - RIGHT, y1=floor, y2=floor),
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
            done = [begin, *((x(p.t), y(p.step)) for p in _every(good, stride))]
            out.append(element("path", class_="curve", d=path(done)))
        bad = [p for p in mine if (p.epoch, p.step) in lost]
        if bad:
            undone = ((x(p.t), y(p.step)) for p in [*good[-1:], *_every(bad, stride)])
            out.append(element("path", class_="lost", d=path(undone)))
    if len(s.snapshots) <= 400:
        for c in s.snapshots:
            tip = (
                f"snapshot of step {c.step} ({c.why}): still {duration(c.stall_s)}, committed "
                f"after {duration(c.commit_s)}"
            )
            place = {"cx": x(c.t_start), "cy": y(c.step), "r": 3.4}
            out.append(element("circle", class_="snap", **place, data_tip=tip))
    return out


def _every(points: list[Point], stride: int) -> list[Point]:
    return [*points[::stride], points[-1]]


def _attempt_bar(
    s: Summary, a: AttemptRow, x: Scale, y: float, height: float, most: int
) -> list[str]:
    """Draw one node's life in the colours of the ledger, in at most `most` segments."""
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
        name = f"{element('tspan', esc(a.name[:14]), class_='strong')}  {esc(short)}"
        out.append(element("text", name, x=12, y=float(y + height - 5), data_tip=tip))
    asked, up, middle = x(max(a.asked_s, s.started_s)), x(a.up_s), y + height / 2
    if up - asked > 1:
        out.append(element("line", class_="asked", x1=asked, x2=up, y1=middle, y2=middle))
    for begin, end, bucket in condensed(a.segments, most):
        at, width = x(begin / NANO), x(end / NANO) - x(begin / NANO)
        meaning = MEANING.get(bucket, "")
        tip = f"node {a.name} · {bucket}: {duration((end - begin) / NANO)} ({meaning})"
        box = {"x": f"{at:.2f}", "width": f"{max(0.3, width):.2f}", "y": float(y)}
        out.append(element("rect", class_=f"b-{bucket}", **box, height=height, data_tip=tip))
    for n in s.ledger.notices:
        if n.member in a.members:
            at = x(n.seen_s)
            grace = grace_text(n.grace_s, n.commit_s)
            tip = f"{n.kind} notice from {n.source}{grace}: {verdict(n.in_time, n.cancelled)}"
            d = f"M{at - 6:.1f} {y - 7:.1f}h12l-6 10z"
            out.append(element("path", class_="notice", d=d, data_tip=tip))
    if a.gone_s is not None and a.end in BAD_ENDS:
        at, r = x(a.gone_s) + 8, 4.5
        d = (
            f"M{at - r:.1f} {middle - r:.1f}l{2 * r} {2 * r}"
            f"M{at + r:.1f} {middle - r:.1f}l{-2 * r} {2 * r}"
        )
        out.append(element("path", class_="kill", d=d, data_tip=f"node {a.name}: {attempt_end(a)}"))
    return out


LANE_WIDTH, LANE_LEFT, LANE_RIGHT = 420, 70, 14  # in SVG units; legible on a phone
BAR, LABEL, LINE = 12, 12, 16  # heights of a lane's bar, a row of numbers, a line of text
EVEN = 0.45  # share of the axis that is divided equally among the pauses between moments
MOST_LANES, MOST_MOMENTS = 9, 48
COLUMNS = 120  # most columns of a lane's bar
MOST_LETTERS = 48  # letters of a line; its title has the full text
COLOURS = {  # by bucket: a page's CSS variable, and the colour where it is not defined
    "useful": ("useful", "#2e9f6b"),
    "straggle": ("brown", "#a3734c"),
    "redone": ("redone", "#e5484d"),
    "snapshot": ("snapshot", "#2f7de1"),
    "provision": ("pink", "#db5f9f"),
    "setup": ("val", "#9333ea"),
    "start": ("start", "#a78bfa"),
    "reform": ("reform", "#f0a429"),
    "drain": ("drain", "#22b8c8"),
    "drained": ("olive", "#84952b"),
    "idle": ("idle", "#c3cad6"),
    "other": ("other", "#8a94a6"),
}
MARKS = {  # CSS variables by kind of moment; other kinds have the text's colour
    "notice": "warn",
    "trouble": "bad",
    "gone": "bad",
    "quarantined": "bad",
    "committed": "saved",
    "staged": "saved",
    "first step": "good",
    "caught up": "good",
    "whole": "good",
}
PAINTS = {  # by our own name: (a page's CSS variable, light colour, dark colour)
    "card": ("card", "#fff", "#161c25"),
    "ink": ("ink", "#1a2230", "#e7ecf3"),
    "dim": ("dim", "#667085", "#94a0b3"),
    "grid": ("grid", "#dfe5ee", "#2a3443"),
    "warn": ("warn", "#b45309", "#fbbf24"),
    "bad": ("bad", "#d92d20", "#ff7a73"),
    "good": ("good", "#15803d", "#4ade80"),
    "saved": ("snapshot", "#2f7de1", "#4f97f5"),
}


def _paints(dark: bool) -> str:
    found = ((name, (theirs, ours[dark])) for name, (theirs, *ours) in PAINTS.items())
    return "".join(f"--pm-{name}:var(--{theirs},{colour});" for name, (theirs, colour) in found)


STYLE = (
    f".pm{{{_paints(False)}}}@media(prefers-color-scheme:dark){{.pm{{{_paints(True)}}}}}"
    ".pm-card{fill:var(--pm-card)}.pm-text{fill:var(--pm-ink);font:12px system-ui,-apple-system,"
    "'Segoe UI',Roboto,Arial,sans-serif;font-variant-numeric:tabular-nums}"
    ".pm-dim{fill:var(--pm-dim)}.pm-strong{font-weight:600}.pm-grid{stroke:var(--pm-grid)}"
    ".pm-number{font-size:9.5px;text-anchor:middle}"
)


def offset(seconds: float) -> str:
    """Return seconds since the begin of an interruption as text: `+4.2 s`, `-0.3 s`."""
    return ("-" if seconds < 0 else "+") + duration(abs(seconds))


@dataclass(frozen=True)
class Lane:
    """The lane of a node, or of the whole world (`row` is `None`)."""

    name: str
    row: AttemptRow | None
    moments: tuple[tuple[int, Moment], ...]  # with their numbers


def picture(one: Interruption, attempts: Sequence[AttemptRow]) -> str:
    """Return the SVG of an interruption. `attempts` are the ledger's."""
    shown = one.moments[:MOST_MOMENTS]
    scale = Axis(one, shown)
    lanes = _lanes(one, shown, attempts)
    head = textwrap.wrap(f"{one.number}  {one.kind}: {_clean(one.cause)}", 54)[:3]
    out = [_text(12, 18 + LINE * i, line, "pm-strong") for i, line in enumerate(head)]
    top = y = 44.0 + LINE * (len(head) - 1)
    for lane in lanes:
        drawn, height = _lane(one, lane, scale, y)
        out += drawn
        y += height
    out += _rest_of_nodes(one, lanes, attempts, y)
    grid = [_grid(x, text, top, y) for x, text in scale.ticks(one)]
    legend, height = _legend(lanes, scale, y + 16)
    out += legend
    y += 14 + height
    rows = list(_list(one, shown, y))
    y += LINE * len(rows)
    title = f"{KINDS[one.kind]}: {one.cause}"
    height = round(y + 8)
    card = element("rect", class_="pm-card", width=LANE_WIDTH, height=height, rx=6)
    return element(
        "svg",
        "".join((f"<style>{STYLE}</style>", card, _title(title), *grid, *out, *rows)),
        xmlns="http://www.w3.org/2000/svg",
        class_="pm",
        viewBox=f"0 0 {LANE_WIDTH} {height}",
        style="min-width:0;max-width:680px;width:100%;height:auto",
        role="img",
        aria_label=f"interruption {one.number}: {one.cause}",
    )


def _clean(text: str) -> str:
    return " ".join(plain(text).split())


def _cut(text: str, most: int = MOST_LETTERS) -> str:
    text = _clean(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _text(x: float, y: float, text: str, cls: str = "", anchor: str = "start") -> str:
    return label(x, y, text, anchor, f"pm-text {cls}")


def _title(text: str) -> str:
    return element("title", esc(text))


def _titled(text: str, *parts: str) -> str:
    return element("g", _title(text) + "".join(parts))


# ---- the axis ------------------------------------------------------------------------------------
class Axis:
    """The mapping from time to x. It is to scale between two moments; each pause between moments
    also gets a fixed width, so that none is too short to be seen."""

    def __init__(self, one: Interruption, moments: Sequence[Moment]):
        times = {one.begun_s, *(m.t for m in moments), *(t for t in one.stood_s if t is not None)}
        ordered = sorted(times)
        pad = max(0.5, 0.04 * (ordered[-1] - ordered[0]))
        self.times = [ordered[0] - pad, *ordered, ordered[-1] + pad]
        inner, span = LANE_WIDTH - LANE_LEFT - LANE_RIGHT, self.times[-1] - self.times[0]
        even = EVEN * inner / (len(self.times) - 1)
        self.at = [float(LANE_LEFT)]
        for a, b in zip(self.times, self.times[1:], strict=False):
            self.at.append(self.at[-1] + even + (1 - EVEN) * inner * (b - a) / span)

    def x(self, t: float) -> float:
        return float(np.interp(t, self.times, self.at))

    def time(self, x: float) -> float:
        """Return the time at coordinate `x`."""
        return float(np.interp(x, self.at, self.times))

    def ticks(self, one: Interruption) -> Iterator[tuple[float, str]]:
        """Yield (x, elapsed time as text) for the turning points that fit on the axis."""
        named = [one.begun_s, *(t for t in (*one.stood_s, one.caught_up_s) if t is not None)]
        free = 0.0
        for t in sorted({*named, self.times[-2]}):
            x, text = self.x(t), offset(t - one.begun_s)
            if x - 3.2 * len(text) >= free:
                free = x + 3.2 * len(text) + 4
                yield x, text


def _grid(x: float, text: str, top: float, floor: float) -> str:
    middle = min(x, LANE_WIDTH - 4 - 3.6 * len(text))  # it ends within the picture
    said = _text(middle, top - 10, text, "pm-dim", "middle")
    return _upright("pm-grid", x, top - 6, floor) + said


# ---- lanes ---------------------------------------------------------------------------------------
def _lanes(
    one: Interruption, moments: Sequence[Moment], attempts: Sequence[AttemptRow]
) -> list[Lane]:
    """Return the lanes: the world, the nodes that the interruption is about, other nodes with
    moments, then the remaining nodes, `MOST_LANES` at most."""
    numbered = list(enumerate(moments, 1))
    rows = {a.name: a for a in attempts}
    touched = [n.name for n in one.nodes]
    named = dict.fromkeys([*touched, *(m.node for m in moments if m.node)])
    first, last = _span(one)
    others = [a.name for a in attempts if a.name not in named and _lives(a, first, last)]
    lanes = [Lane("world", None, tuple((i, m) for i, m in numbered if not m.node))]
    for name in [*named, *others][: MOST_LANES - 1]:
        mine = tuple((i, m) for i, m in numbered if m.node == name)
        lanes.append(Lane(name, rows.get(name), mine))
    return lanes


def _span(one: Interruption) -> tuple[float, float]:
    times = [one.begun_s, *(m.t for m in one.moments)]
    return min(times), max(times)


def _lives(row: AttemptRow, first: float, last: float) -> bool:
    return bool(row.segments) and (
        row.segments[0][0] / NANO < last and row.segments[-1][1] / NANO > first
    )


def _lane(one: Interruption, lane: Lane, scale: Axis, y: float) -> tuple[list[str], float]:
    """Return the lane's SVG elements and its height."""
    label = f"node {lane.name}" if lane.row else lane.name
    out = [_text(8, y + BAR - 2, _cut(label, 11), "pm-strong" if not lane.row else "")]
    if lane.row is not None:
        out[0] = _titled(_place(lane.row), out[0])
        out += _bar(lane.row, scale, y)
    elif (standing := _standing(one, scale, y)) is not None:
        out.append(standing)
    levels: list[float] = []  # x of the right end of each row of numbers
    for number, m in lane.moments:
        x = scale.x(m.t)
        level = next((i for i, end in enumerate(levels) if x - 7 >= end), len(levels))
        levels[level : level + 1] = [x + 7]
        out.append(_mark(one, number, m, x, y, level))
    return out, BAR + LABEL * max(1, len(levels)) + 6


def _place(row: AttemptRow) -> str:
    return f"node {row.name}: {row.offer or row.accelerator}, {money(row.usd_per_h)}/h"


def _inside(row: AttemptRow, scale: Axis) -> list[LabelledSpan]:
    """Return the node's segments, clipped to the drawn time."""
    first, last = round(scale.times[0] * NANO), round(scale.times[-1] * NANO)
    return [(max(a, first), min(b, last), c) for a, b, c in row.segments if b > first and a < last]


def _legend(lanes: Sequence[Lane], scale: Axis, y: float) -> tuple[list[str], float]:
    """Return the SVG elements of the colour legend and its height."""
    found = {c: None for lane in lanes if lane.row for _, _, c in _inside(lane.row, scale)}
    out, x, begun = [], 12.0, y
    for bucket in found:
        if x + 20 + 6.6 * len(bucket) > LANE_WIDTH:
            x, y = 12.0, y + LINE
        place = {"x": round(x), "y": y - 9, "width": 10, "height": 10, "rx": 2}
        box = element("rect", **place, style=f"fill:{_paint(bucket)}")
        said = _text(x + 14, y, bucket, "pm-dim")
        out.append(_titled(MEANING.get(bucket, bucket), box, said))
        x += 26 + 6.6 * len(bucket)
    return out, (y - begun + LINE) if found else 0.0


def _paint(bucket: str) -> str:
    name, colour = COLOURS.get(bucket, COLOURS["other"])
    return f"var(--{name},{colour})"


def _bar(row: AttemptRow, scale: Axis, y: float) -> Iterator[str]:
    """Yield the rectangles of the node's bar, condensed to at most `COLUMNS`."""
    places = [
        (round(scale.x(a / NANO) * 100), round(scale.x(b / NANO) * 100), bucket)
        for a, b, bucket in _inside(row, scale)
    ]
    for a, b, bucket in condensed([p for p in places if p[1] > p[0]], COLUMNS):
        seconds = scale.time(b / 100) - scale.time(a / 100)
        text = f"node {row.name}: {bucket} for {duration(seconds)}"
        meaning = MEANING.get(bucket, "")
        said = f"{text} ({meaning})" if meaning else text
        yield _box(a / 100, y, (b - a) / 100, BAR, bucket, said)


def _box(x: float, y: float, width: float, height: int, bucket: str, text: str) -> str:
    place = {"x": x, "y": y, "width": width, "height": height}
    return element("rect", _title(text), **place, style=f"fill:{_paint(bucket)}")


def _standing(one: Interruption, scale: Axis, y: float) -> str | None:
    """Return a bar over the time in which no step was done; `None` if steps never stopped."""
    down_s, up_s = one.stood_s
    if down_s is None:
        return None
    x, end = scale.x(down_s), scale.x(scale.times[-1] if up_s is None else up_s)
    text = "no step was done" + ("" if one.gap_s is None else f" for {duration(one.gap_s)}")
    return _box(x, y + 3, max(0.4, end - x), BAR - 6, "reform", text)


def _mark(one: Interruption, number: int, m: Moment, x: float, y: float, level: int) -> str:
    at = y + BAR + LABEL * (level + 1) - 3
    style = f"stroke:var(--pm-{MARKS.get(m.what, 'ink')})"
    line = _upright("", x, y - 2, y + BAR + 1, style=style, stroke_width=1.4)
    return _titled(_words(one, m), line, label(x, at, number, "", "pm-text pm-number"))


def _rest_of_nodes(
    one: Interruption, lanes: Sequence[Lane], attempts: Sequence[AttemptRow], y: float
) -> Iterator[str]:
    drawn = {lane.name for lane in lanes}
    first, last = _span(one)
    about = {n.name for n in one.nodes}
    left = [
        a for a in attempts if a.name not in drawn and (a.name in about or _lives(a, first, last))
    ]
    if left:
        yield _text(LANE_WIDTH - LANE_RIGHT, y + 4, f"and {len(left)} more nodes", "pm-dim", "end")


# ---- the list ------------------------------------------------------------------------------------
def _words(one: Interruption, m: Moment) -> str:
    who = f"node {m.node}: " if m.node else ""
    more = f" ({m.text})" if m.text else ""
    return f"{offset(m.t - one.begun_s)}  {who}{MOMENTS[m.what]}{more}"


def _list(one: Interruption, moments: Sequence[Moment], y: float) -> Iterator[str]:
    for i, m in enumerate(moments):
        at = y + LINE * (i + 1)
        who = f"node {m.node}: " if m.node else ""
        what = f"{who}{MOMENTS[m.what]}" + (f" – {m.text}" if m.text else "")
        style = f"fill:var(--pm-{MARKS[m.what]})" if m.what in MARKS else ""
        place = {"text_anchor": "end", "x": 24, "y": at, "style": style}
        yield _titled(
            _words(one, m),
            element("text", str(i + 1), class_="pm-text pm-strong", **place),
            _text(104, at, offset(m.t - one.begun_s), "pm-dim", "end"),
            _text(112, at, _cut(what, 47)),
        )
    if len(one.moments) > len(moments):
        more = f"and {len(one.moments) - len(moments)} more moments"
        yield _text(112, y + LINE * (len(moments) + 1), more, "pm-dim")
