"""Line plots of the page, as SVG with the values that its script shows at the pointer.

A plot is drawn here once and for all. What the script needs to name a value (numbers, not pictures)
stands beside it as JSON, thinned out, so a page of a long run stays small.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from storage.text import plain

WIDTH, LEFT, RIGHT = 1100.0, 58.0, 14.0  # of the charts, in SVG units
MOST_POINTS = 600  # of one trace; more are thinned out


def esc(value: object) -> str:
    """What somebody wrote, as text of the page."""
    return html.escape(plain(value, keep="\n"), quote=True)


# ---- axes ----------------------------------------------------------------------------------------
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
    if seconds >= 96 * 3600:
        unit, size = "d", 86400.0
    return [t * size for t in nice_ticks(0, seconds / size, about)], unit, size


def short(value: float) -> str:
    """A number as an axis has it: `0.25`, `1,200`, `3.1M`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# ---- what is drawn -------------------------------------------------------------------------------
@dataclass(frozen=True)
class PlotTrace:
    """One line. `tone`: a class of page.css, "t0" to "t7" or one with a meaning. `low`: the lower
    edge of a band whose upper edge is `ys`; without it a line. `holds`: a value counts until the
    next one; else only near to where it was taken. All sequences are of one length."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    tone: str = "t0"
    low: Sequence[float] | None = None
    dots: bool = False
    holds: bool = False
    unit: str = ""
    shown: Sequence[float] | None = None  # told at the pointer in the place of `ys`


@dataclass(frozen=True)
class PlotShade:
    """A part of the x axis that has a meaning. `tip`: shown with the values there."""

    begin: float
    end: float
    tip: str
    tone: str = "world"
    opacity: float = 1.0
    label: str = ""


@dataclass(frozen=True)
class PlotFrame:
    """The size and the axes of a plot. `time`: x is seconds, told in the unit that fits."""

    title: str
    x_name: str = "step"
    height: float = 220.0
    width: float = WIDTH
    left: float = LEFT
    top: float = 14.0
    zero: bool = False  # the y axis begins at 0
    most: float | None = None  # ... and goes so far at least
    time: bool = False
    x_range: tuple[float, float] | None = None


class PlotPlane:
    """Where a pair of numbers lies in a plot."""

    bottom = 34.0

    def __init__(self, frame: PlotFrame, xs: tuple[float, float], ys: tuple[float, float]):
        self.frame = frame
        self.x0, self.x1 = xs if xs[1] > xs[0] else (xs[0] - 0.5, xs[0] + 0.5)
        low, high = ys
        pad = (high - low) * 0.06 or abs(high) * 0.06 or 1.0
        self.low = 0.0 if frame.zero and low >= 0 else low - pad
        self.high = high + pad
        self.floor = frame.height - self.bottom
        self.right = frame.width - RIGHT

    def x(self, value: float) -> float:
        share = (value - self.x0) / (self.x1 - self.x0)
        return self.frame.left + share * (self.right - self.frame.left)

    def y(self, value: float) -> float:
        share = (self.high - value) / (self.high - self.low)
        return self.frame.top + share * (self.floor - self.frame.top)

    def path(self, xs: Iterable[float], ys: Iterable[float]) -> str:
        return path((self.x(x), self.y(y)) for x, y in zip(xs, ys, strict=False))


def path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def label(x: float, y: float, text: object, anchor: str = "middle", cls: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" '
        f'text-anchor="{anchor}"{f" class={cls!r}" if cls else ""}>{esc(text)}</text>'
    )


# ---- thinning ------------------------------------------------------------------------------------
def thinned_indices(ys: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """At most `most` places, with each piece's lowest and highest value, so that no spike gets
    lost."""
    if len(ys) <= most:
        return list(range(len(ys)))
    size = math.ceil(2 * len(ys) / most)
    kept: list[int] = []
    for i in range(0, len(ys), size):
        piece = range(i, min(i + size, len(ys)))
        ends = {min(piece, key=ys.__getitem__), max(piece, key=ys.__getitem__)}
        kept += sorted(ends)
    return kept


def fit(trace: PlotTrace, most: int = MOST_POINTS) -> PlotTrace:
    """The same trace without what is no number, and with few points."""
    low = trace.low if trace.low is not None else trace.ys
    good = [
        i
        for i, (x, y, z) in enumerate(zip(trace.xs, trace.ys, low, strict=True))
        if math.isfinite(x) and math.isfinite(y) and math.isfinite(z)
    ]
    kept = [good[i] for i in thinned_indices([trace.ys[i] for i in good], most)]
    return PlotTrace(
        trace.name,
        [trace.xs[i] for i in kept],
        [trace.ys[i] for i in kept],
        trace.tone,
        None if trace.low is None else [trace.low[i] for i in kept],
        trace.dots,
        trace.holds,
        trace.unit,
        None if trace.shown is None else [trace.shown[i] for i in kept],
    )


# ---- drawing -------------------------------------------------------------------------------------
def plot(
    frame: PlotFrame,
    traces: Sequence[PlotTrace],
    shades: Sequence[PlotShade] = (),
    most_points: int = MOST_POINTS,
) -> str:
    """The whole plot with its values; empty if there is nothing to draw."""
    drawn = [one for t in traces if (one := fit(t, most_points)).xs]
    if not drawn:
        return ""
    xs = frame.x_range or (min(t.xs[0] for t in drawn), max(t.xs[-1] for t in drawn))
    values = [y for t in drawn for y in (*t.ys, *(t.low or ()))]
    high = max(max(values), frame.most if frame.most is not None else -math.inf)
    plane = PlotPlane(frame, xs, (min(values), high))
    height, width = frame.height, frame.width
    parts = [
        f'<svg class=plot viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{esc(frame.title)}">',
        *(_shade(s, plane) for s in shades),
        *_axes(plane),
        *(_trace(t, plane) for t in drawn),
        f'<line class=cross y1="{frame.top:g}" y2="{plane.floor:g}" visibility="hidden"/></svg>',
        values_of(plane, drawn, shades),
    ]
    return f"<div class=scroll>{''.join(parts)}</div>"


def _axes(plane: PlotPlane) -> Iterator[str]:
    frame = plane.frame
    for value in nice_ticks(plane.low, plane.high, max(2, round(frame.height / 60))):
        y = plane.y(value)
        yield (
            f'<line class=grid x1="{frame.left:g}" x2="{plane.right:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        yield label(frame.left - 8, y + 4, short(value), "end")
    about = max(2, round(frame.width / 110))
    if frame.time:
        ticks, unit, size = time_ticks(plane.x1, about)
        for t in ticks:
            if t >= plane.x0:
                yield label(plane.x(t), plane.floor + 16, f"{t / size:g} {unit}")
    else:
        for value in nice_ticks(plane.x0, plane.x1, about):
            if value == int(value):
                yield label(plane.x(value), plane.floor + 16, short(value))
        if frame.x_name:
            middle = (frame.left + plane.right) / 2
            yield label(middle, frame.height - 3, frame.x_name)


def _shade(shade: PlotShade, plane: PlotPlane) -> str:
    a, b = plane.x(max(shade.begin, plane.x0)), plane.x(min(shade.end, plane.x1))
    if b < a:
        return ""
    top, height = plane.frame.top, plane.floor - plane.frame.top
    fits = b - a > 6.5 * len(shade.label) + 8
    text = label((a + b) / 2, top - 7, shade.label, cls="strong") if shade.label and fits else ""
    return (
        f'<rect class="{shade.tone}" x="{a:.1f}" y="{top:g}" width="{max(1.0, b - a):.1f}" '
        f'height="{height:g}" style="opacity:{shade.opacity:.2f}"/>{text}'
    )


def _trace(trace: PlotTrace, plane: PlotPlane) -> str:
    if trace.low is not None:
        there = plane.path(trace.xs, trace.ys)
        back = plane.path(list(trace.xs)[::-1], list(trace.low)[::-1])
        return f'<path class="band {trace.tone}" d="{there}L{back[1:]}Z"/>'
    line = f'<path class="line {trace.tone}" d="{plane.path(trace.xs, trace.ys)}"/>'
    if not trace.dots and len(trace.xs) > 1:
        return line
    dots = (
        f'<circle class="dot {trace.tone}" cx="{plane.x(x):.1f}" cy="{plane.y(y):.1f}" r="3.6"/>'
        for x, y in zip(trace.xs, trace.ys, strict=True)
    )
    return line + "".join(dots)


def values_of(
    plane: PlotPlane, traces: Sequence[PlotTrace], shades: Sequence[PlotShade] = ()
) -> str:
    """What the page's script shows at the pointer."""
    frame = plane.frame
    body: dict[str, Any] = {
        "x0": plane.x0,
        "x1": plane.x1,
        "left": frame.left,
        "right": plane.right,
        "width": frame.width,
        "name": frame.x_name,
        "time": frame.time,
        "traces": [_values(t) for t in traces],
        "shades": [[s.begin, s.end, plain(s.tip)] for s in shades if s.tip],
    }
    return data_block(body)


def _values(t: PlotTrace) -> dict[str, Any]:
    found: dict[str, Any] = {
        "n": plain(t.name),
        "u": t.unit,
        "x": [_brief(x, 10) for x in t.xs],
        "y": [_brief(y) for y in (t.ys if t.shown is None else t.shown)],
    }
    if t.low is not None and t.shown is None:
        found["z"] = [_brief(z) for z in t.low]
    if t.holds:
        found["h"] = 1
    return found


def _brief(value: float, digits: int = 6) -> float | int:
    found = float(f"{value:.{digits}g}")
    return int(found) if found == int(found) and abs(found) < 1e15 else found


def data_block(body: object) -> str:
    """JSON for the script. "<" is spelled so that no text in it can end the script element."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


def legend(*keys: tuple[str, str, str]) -> str:
    """(shape, tone, words): shape "line", "band", "dot" or "box"."""
    shown = "".join(f'<span><u class="k-{s} {tone}"></u>{esc(w)}</span>' for s, tone, w in keys)
    return f"<span class=legend>{shown}</span>"
