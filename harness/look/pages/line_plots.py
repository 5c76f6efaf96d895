"""Line plots of the page, as SVG with the values that its script shows at the pointer.

The SVG is complete; the script only names values. The numbers that it needs stand beside the plot
as JSON, thinned out so that the page of a long run stays small.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from storage.terminal_text import plain

WIDTH, LEFT, RIGHT = 1100.0, 58.0, 14.0  # width and margins of the charts, in SVG units
MOST_POINTS = 600  # points of one trace; more are thinned out


def esc(value: object) -> str:
    """Return foreign text escaped for HTML, without control characters other than newlines."""
    return html.escape(plain(value, keep="\n"), quote=True)


# ---- axes ----------------------------------------------------------------------------------------
def nice_ticks(low: float, high: float, about: int) -> list[float]:
    """Return round numbers in [low, high], about `about` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def time_ticks(seconds: float, about: int) -> tuple[list[float], str, float]:
    """Return round times in [0, seconds], their unit, and the unit's length in seconds."""
    unit, size = (
        ("s", 1.0) if seconds < 180 else ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)
    )
    if seconds >= 96 * 3600:
        unit, size = "d", 86400.0
    return [t * size for t in nice_ticks(0, seconds / size, about)], unit, size


def short(value: float) -> str:
    """Return a number in the form used on an axis: `0.25`, `1,200`, `3.1M`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# ---- what is drawn -------------------------------------------------------------------------------
@dataclass(frozen=True)
class PlotTrace:
    """One line or band of a plot. `tone`: a class of page.css, "t0" to "t7" or one with a meaning.
    `low`: the lower edge of a band whose upper edge is `ys`; `None` draws a line. `holds`: a value
    holds until the next one, else only near its x. All sequences have the same length."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    tone: str = "t0"
    low: Sequence[float] | None = None
    dots: bool = False
    holds: bool = False
    unit: str = ""
    shown: Sequence[float] | None = None  # shown at the pointer instead of `ys`


@dataclass(frozen=True)
class PlotShade:
    """A marked interval of the x axis. `tip`: text that is shown with the values there."""

    begin: float
    end: float
    tip: str
    tone: str = "world"
    opacity: float = 1.0
    label: str = ""


@dataclass(frozen=True)
class PlotFrame:
    """The size and the axes of a plot. `time`: x is in seconds, labelled in the unit that fits."""

    title: str
    x_name: str = "step"
    height: float = 220.0
    width: float = WIDTH
    left: float = LEFT
    top: float = 14.0
    zero: bool = False  # the y axis begins at 0
    most: float | None = None  # least upper end of the y axis; None: as the values are
    time: bool = False
    x_range: tuple[float, float] | None = None


class PlotPlane:
    """The mapping from values to SVG coordinates in a plot."""

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


def element(name: str, inner: str | None = None, /, **attributes: object) -> str:
    """Return an SVG element. `inner`: SVG. An attribute's `_` is a `-` (none at the end of
    `class_`), its text is escaped, a float has one decimal; one that is "" is left out."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value != ""
    )
    return f"<{name}{shown}/>" if inner is None else f"<{name}{shown}>{inner}</{name}>"


def _value(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else esc(value)


def label(x: float, y: float, text: object, anchor: str = "middle", cls: str = "") -> str:
    return element("text", esc(text), x=float(x), y=float(y), text_anchor=anchor, class_=cls)


# ---- thinning ------------------------------------------------------------------------------------
def thinned_indices(ys: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Return at most `most` indices: those of the lowest and the highest value of each piece, so
    that no spike is lost."""
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
    """Return the trace without non-finite values, thinned out to at most `most` points."""
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
    """Return the plot and its values as HTML, or "" if there is nothing to draw."""
    drawn = [one for t in traces if (one := fit(t, most_points)).xs]
    if not drawn:
        return ""
    xs = frame.x_range or (min(t.xs[0] for t in drawn), max(t.xs[-1] for t in drawn))
    values = [y for t in drawn for y in (*t.ys, *(t.low or ()))]
    high = max(max(values), frame.most if frame.most is not None else -math.inf)
    plane = PlotPlane(frame, xs, (min(values), high))
    height, width = frame.height, frame.width
    cross = {"y1": frame.top, "y2": plane.floor, "visibility": "hidden"}
    parts = [
        *(_shade(s, plane) for s in shades),
        *_axes(plane),
        *(_trace(t, plane) for t in drawn),
        element("line", class_="cross", **cross),
    ]
    named = {"class_": "plot", "role": "img", "aria_label": frame.title}
    svg = element("svg", "".join(parts), viewBox=f"0 0 {width:g} {height:g}", **named)
    return f"<div class=scroll>{svg}{values_of(plane, drawn, shades)}</div>"


def _axes(plane: PlotPlane) -> Iterator[str]:
    frame = plane.frame
    for value in nice_ticks(plane.low, plane.high, max(2, round(frame.height / 60))):
        y = plane.y(value)
        yield element("line", class_="grid", x1=frame.left, x2=plane.right, y1=y, y2=y)
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
    style = f"opacity:{shade.opacity:.2f}"
    size = {"x": a, "y": top, "width": max(1.0, b - a), "height": height}
    return element("rect", class_=shade.tone, **size, style=style) + text


def _trace(trace: PlotTrace, plane: PlotPlane) -> str:
    if trace.low is not None:
        there = plane.path(trace.xs, trace.ys)
        back = plane.path(list(trace.xs)[::-1], list(trace.low)[::-1])
        return element("path", class_=f"band {trace.tone}", d=f"{there}L{back[1:]}Z")
    line = element("path", class_=f"line {trace.tone}", d=plane.path(trace.xs, trace.ys))
    if not trace.dots and len(trace.xs) > 1:
        return line
    dots = (
        element("circle", class_=f"dot {trace.tone}", cx=plane.x(x), cy=plane.y(y), r="3.6")
        for x, y in zip(trace.xs, trace.ys, strict=True)
    )
    return line + "".join(dots)


def values_of(
    plane: PlotPlane, traces: Sequence[PlotTrace], shades: Sequence[PlotShade] = ()
) -> str:
    """Return, as a data block, the values that the page's script shows at the pointer."""
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
    """Return JSON for the script. "<" is escaped so that no text can end the script element."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'
