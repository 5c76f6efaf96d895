"""An interruption as a picture: a lane for each node, what its time went into, and every moment
with its number.

One SVG that stands alone, and that a page may hold as well: its colours are the page's variables
where there are any. Its names begin with `pm-`, so that they meet nobody else's. The time axis is
drawn so that moments close together stay apart: long waits are drawn shorter than they are, and
every moment's true time stands in the list below the lanes.
"""

from __future__ import annotations

import textwrap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.views.interruption import KINDS, MOMENTS, Interruption, Moment
from harness.views.painting import NANO, LabelledSpan
from harness.views.plots import esc
from harness.views.report import MEANING
from harness.views.rows import AttemptRow
from harness.views.timeline import condensed
from harness.views.words import duration, money
from storage.text import plain

WIDTH, LEFT, RIGHT = 420, 70, 14  # in SVG units; legible on a phone
BAR, LABEL, LINE = 12, 12, 16  # heights: of a lane's bar, of a row of numbers, of a line of text
EVEN = 0.45  # share of the axis that is given to the pauses between moments alike
MOST_LANES, MOST_MOMENTS = 9, 48
COLUMNS = 120  # of a lane's bar, at most
MOST_LETTERS = 48  # of a line; the rest is in its title
COLOURS = {  # a page's variable, and what stands where there is none, by bucket
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
MARKS = {  # variables of moments; others have the text's colour
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
PAINTS = {  # (variable of a page, in light, in dark), by a name of our own
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
    """Seconds from the begin of an interruption, in words: `+4.2 s`, `-0.3 s`."""
    return ("-" if seconds < 0 else "+") + duration(abs(seconds))


@dataclass(frozen=True)
class Lane:
    """A node, or (without a row) the whole world."""

    name: str
    row: AttemptRow | None
    moments: tuple[tuple[int, Moment], ...]  # with their numbers


def picture(one: Interruption, attempts: Sequence[AttemptRow]) -> str:
    """The SVG. `attempts`: the ledger's."""
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
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pm" viewBox="0 0 {WIDTH} {y + 8:.0f}" '
        f'style="min-width:0;max-width:680px;width:100%;height:auto" role="img" '
        f'aria-label="{esc(f"interruption {one.number}: {one.cause}")}">'
        f"<style>{STYLE}</style>"
        f'<rect class="pm-card" width="{WIDTH}" height="{y + 8:.0f}" rx="6"/>'
        f"<title>{esc(title)}</title>"
        f"{''.join(grid)}{''.join(out)}{''.join(rows)}</svg>"
    )


def _clean(text: str) -> str:
    return " ".join(plain(text).split())


def _cut(text: str, most: int = MOST_LETTERS) -> str:
    text = _clean(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _text(x: float, y: float, text: str, cls: str = "", anchor: str = "start") -> str:
    return (
        f'<text class="pm-text {cls}" x="{x:.1f}" y="{y:.1f}" '
        f'text-anchor="{anchor}">{esc(text)}</text>'
    )


# ---- the axis ------------------------------------------------------------------------------------
class Axis:
    """Where a time lies. Between two moments it is to scale; each pause between moments has some
    width of its own besides, so that none is too short to be seen."""

    def __init__(self, one: Interruption, moments: Sequence[Moment]):
        times = {one.begun_s, *(m.t for m in moments), *(t for t in one.stood_s if t is not None)}
        ordered = sorted(times)
        pad = max(0.5, 0.04 * (ordered[-1] - ordered[0]))
        self.times = [ordered[0] - pad, *ordered, ordered[-1] + pad]
        inner, span = WIDTH - LEFT - RIGHT, self.times[-1] - self.times[0]
        even = EVEN * inner / (len(self.times) - 1)
        self.at = [float(LEFT)]
        for a, b in zip(self.times, self.times[1:], strict=False):
            self.at.append(self.at[-1] + even + (1 - EVEN) * inner * (b - a) / span)

    def x(self, t: float) -> float:
        i = min(max(bisect_right(self.times, t) - 1, 0), len(self.times) - 2)
        a, b = self.times[i], self.times[i + 1]
        share = min(1.0, max(0.0, (t - a) / (b - a))) if b > a else 0.0
        return self.at[i] + share * (self.at[i + 1] - self.at[i])

    def time(self, x: float) -> float:
        """What lies at `x`."""
        i = min(max(bisect_right(self.at, x) - 1, 0), len(self.at) - 2)
        a, b = self.at[i], self.at[i + 1]
        share = min(1.0, max(0.0, (x - a) / (b - a))) if b > a else 0.0
        return self.times[i] + share * (self.times[i + 1] - self.times[i])

    def ticks(self, one: Interruption) -> Iterator[tuple[float, str]]:
        """The turning points, with the time that has passed; where there is room."""
        named = [one.begun_s, *(t for t in (*one.stood_s, one.caught_up_s) if t is not None)]
        free = 0.0
        for t in sorted({*named, self.times[-2]}):
            x, text = self.x(t), offset(t - one.begun_s)
            if x - 3.2 * len(text) >= free:
                free = x + 3.2 * len(text) + 4
                yield x, text


def _grid(x: float, text: str, top: float, floor: float) -> str:
    return (
        f'<line class="pm-grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6:.1f}" y2="{floor:.1f}"/>'
        f"{_text(min(x, WIDTH - 24), top - 10, text, 'pm-dim', 'middle')}"
    )


# ---- lanes ---------------------------------------------------------------------------------------
def _lanes(
    one: Interruption, moments: Sequence[Moment], attempts: Sequence[AttemptRow]
) -> list[Lane]:
    """The world first, then nodes that it is about and those that have moments, then others."""
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
    """What is drawn, and its height."""
    label = f"node {lane.name}" if lane.row else lane.name
    out = [_text(8, y + BAR - 2, _cut(label, 11), "pm-strong" if not lane.row else "")]
    if lane.row is not None:
        out[0] = f"<g><title>{esc(_place(lane.row))}</title>{out[0]}</g>"
        out += _bar(lane.row, scale, y)
    elif (standing := _standing(one, scale, y)) is not None:
        out.append(standing)
    levels: list[float] = []  # right end of the last number in each row of numbers
    for number, m in lane.moments:
        x = scale.x(m.t)
        level = next((i for i, end in enumerate(levels) if x - 7 >= end), len(levels))
        levels[level : level + 1] = [x + 7]
        out.append(_mark(one, number, m, x, y, level))
    return out, BAR + LABEL * max(1, len(levels)) + 6


def _place(row: AttemptRow) -> str:
    ended = f", {row.end}" if row.end else ""
    return f"node {row.name}: {row.offer or row.accelerator}, {money(row.usd_per_h)}/h{ended}"


def _inside(row: AttemptRow, scale: Axis) -> list[LabelledSpan]:
    """Its segments, as far as they are drawn."""
    first, last = round(scale.times[0] * NANO), round(scale.times[-1] * NANO)
    return [(max(a, first), min(b, last), c) for a, b, c in row.segments if b > first and a < last]


def _legend(lanes: Sequence[Lane], scale: Axis, y: float) -> tuple[list[str], float]:
    """What the colours mean, and its height."""
    found = {c: None for lane in lanes if lane.row for _, _, c in _inside(lane.row, scale)}
    out, x, begun = [], 12.0, y
    for bucket in found:
        if x + 20 + 6.6 * len(bucket) > WIDTH:
            x, y = 12.0, y + LINE
        out.append(
            f"<g><title>{esc(MEANING.get(bucket, bucket))}</title>"
            f'<rect x="{x:.0f}" y="{y - 9:.1f}" width="10" height="10" rx="2" '
            f'style="fill:{_paint(bucket)}"/>{_text(x + 14, y, bucket, "pm-dim")}</g>'
        )
        x += 26 + 6.6 * len(bucket)
    return out, (y - begun + LINE) if found else 0.0


def _paint(bucket: str) -> str:
    name, colour = COLOURS.get(bucket, COLOURS["other"])
    return f"var(--{name},{colour})"


def _bar(row: AttemptRow, scale: Axis, y: float) -> Iterator[str]:
    """What the node's time went into, no finer than the eye sees."""
    places = [
        (round(scale.x(a / NANO) * 100), round(scale.x(b / NANO) * 100), bucket)
        for a, b, bucket in _inside(row, scale)
    ]
    for a, b, bucket in condensed([p for p in places if p[1] > p[0]], COLUMNS):
        seconds = scale.time(b / 100) - scale.time(a / 100)
        text = f"node {row.name}: {bucket} for {duration(seconds)}"
        meaning = MEANING.get(bucket, "")
        yield (
            f'<rect x="{a / 100:.1f}" y="{y:.1f}" width="{(b - a) / 100:.1f}" height="{BAR}" '
            f'style="fill:{_paint(bucket)}">'
            f"<title>{esc(f'{text} ({meaning})' if meaning else text)}</title></rect>"
        )


def _standing(one: Interruption, scale: Axis, y: float) -> str | None:
    """When no step was done."""
    down_s, up_s = one.stood_s
    if down_s is None:
        return None
    x, end = scale.x(down_s), scale.x(scale.times[-1] if up_s is None else up_s)
    text = "no step was done" + ("" if one.gap_s is None else f" for {duration(one.gap_s)}")
    return (
        f'<rect x="{x:.1f}" y="{y + 3:.1f}" width="{max(0.4, end - x):.1f}" height="{BAR - 6}" '
        f'style="fill:{_paint("reform")}"><title>{esc(text)}</title></rect>'
    )


def _mark(one: Interruption, number: int, m: Moment, x: float, y: float, level: int) -> str:
    at = y + BAR + LABEL * (level + 1) - 3
    colour = f"var(--pm-{MARKS.get(m.what, 'ink')})"
    return (
        f"<g><title>{esc(_words(one, m))}</title>"
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 2:.1f}" y2="{y + BAR + 1:.1f}" '
        f'style="stroke:{colour}" stroke-width="1.4"/>'
        f'<text class="pm-text pm-number" x="{x:.1f}" y="{at:.1f}">{number}</text></g>'
    )


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
        yield _text(WIDTH - RIGHT, y + 4, f"and {len(left)} more nodes", "pm-dim", "end")


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
        colour = f' style="fill:var(--pm-{MARKS[m.what]})"' if m.what in MARKS else ""
        yield (
            f"<g><title>{esc(_words(one, m))}</title>"
            f'<text class="pm-text pm-strong" text-anchor="end" x="24" y="{at:.1f}"{colour}>'
            f"{i + 1}</text>"
            f"{_text(104, at, offset(m.t - one.begun_s), 'pm-dim', 'end')}"
            f"{_text(112, at, _cut(what, 47))}</g>"
        )
    if len(one.moments) > len(moments):
        more = f"and {len(one.moments) - len(moments)} more moments"
        yield _text(112, y + LINE * (len(moments) + 1), more, "pm-dim")
