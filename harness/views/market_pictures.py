"""Pictures of policies on a market: what each costs by the deadline, and one run hour by hour
beside the optimum.

Takes plain numbers, so that whatever has them may draw: replays of recorded markets, or of a
finished run's own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from harness.views.drawing import (
    Drawing,
    DrawnArea,
    DrawnBox,
    DrawnDot,
    DrawnLine,
    DrawnText,
    cut,
    text_width,
)
from harness.views.plots import nice_ticks, short, time_ticks
from harness.views.words import duration, money, percent

WIDTH, LEFT = 1100.0, 62.0
TONES = ("accent", "reform", "val", "drain", "redone", "brown", "pink", "olive", "start")
OPTIMUM_TONE, ON_DEMAND_TONE = "useful", "other"
NAMES = 190.0  # room for names at the right of a chart
LANE_NAMES = 240.0  # ... at the left of lanes
FAR_ABOVE = 1.6  # times the dearest policy: on demand is named, and not drawn
MOST_LANES = 24
MOST_STEPS = 1500  # of one lane: no more can be seen

# (hours, how many from then on)
Levels: TypeAlias = tuple[tuple[float, float], ...]


# ---- what is drawn -------------------------------------------------------------------------------
@dataclass(frozen=True)
class CostPoint:
    """All windows of one policy with one deadline. `usd`: the mean; `low` and `high`: a tenth of
    the windows cost less, and more. `missed` of `windows` missed the deadline."""

    deadline_h: float
    usd: float
    low: float
    high: float
    missed: int
    windows: int


@dataclass(frozen=True)
class CostCurve:
    """One policy, by rising deadline."""

    name: str
    points: tuple[CostPoint, ...]


@dataclass(frozen=True)
class CostChart:
    """Policies on one market. `optimum` and `on_demand`: (deadline in hours, USD), empty where
    nobody knows. `work_h`: hours that the work takes undisturbed; `note`: what the numbers are;
    `missed`: the word for being late."""

    title: str
    curves: tuple[CostCurve, ...]
    optimum: tuple[tuple[float, float], ...] = ()
    on_demand: tuple[tuple[float, float], ...] = ()
    work_h: float = 0.0
    note: str = "mean of all windows; thin: the middle 80 % of them"
    missed: str = "missed"

    @property
    def deadlines(self) -> list[float]:
        return sorted({p.deadline_h for c in self.curves for p in c.points})


@dataclass(frozen=True)
class LaneTake:
    """A node that was taken away: where it had been since when, hours."""

    begin_h: float
    end_h: float


@dataclass(frozen=True)
class MarketLane:
    """One place. `room`: how many nodes it had, empty where there is no limit (on demand); `run`
    and `optimum`: how many were there. `note`: words below its name."""

    name: str
    room: Levels
    run: Levels
    optimum: Levels = ()
    note: str = ""
    taken: tuple[LaneTake, ...] = ()


@dataclass(frozen=True)
class RunDrawn:
    """What became of a run: its name, its bill in USD at each hour, when it was done (hours;
    infinite: never)."""

    name: str
    bill: Levels
    finish_h: float

    @property
    def usd(self) -> float:
        return self.bill[-1][1] if self.bill else 0.0


@dataclass(frozen=True)
class MarketTimeline:
    """One run on a market, hour by hour. `optimum`: an omniscient planner's of the same job on the
    same market, None where there is none."""

    title: str
    lanes: tuple[MarketLane, ...]
    run: RunDrawn
    optimum: RunDrawn | None
    deadline_h: float


def hours_text(hours: float) -> str:
    """`51.3 h`; below an hour as `duration` has it."""
    return f"{hours:.3g} h" if hours >= 1 or hours == 0 else duration(hours * 3600)


# ---- cost over deadline --------------------------------------------------------------------------
def cost_drawing(chart: CostChart) -> Drawing:
    """Lines over the deadlines; with a single one, bars."""
    return _lines(chart) if len(chart.deadlines) > 1 else _bars(chart)


class _CostPlane:
    """Where deadlines and dollars lie in a chart of lines."""

    top, height = 46.0, 330.0

    def __init__(self, chart: CostChart):
        self.deadlines = chart.deadlines
        sums = [usd for _, usd in chart.optimum]
        sums += [usd for c in chart.curves for p in c.points for usd in (p.high, p.usd)]
        most = max([0.0, *filter(math.isfinite, sums)]) or 1.0
        # far above everything else it would only press the others together
        dear = max([0.0, *(usd for _, usd in chart.on_demand)])
        self.most = 1.05 * (dear if dear <= FAR_ABOVE * most else most)
        self.right, self.floor = WIDTH - NAMES, self.top + self.height

    def x(self, deadline_h: float) -> float:
        first, last = self.deadlines[0], self.deadlines[-1]
        share = (deadline_h - first) / (last - first)
        return LEFT + 40 + share * (self.right - LEFT - 70)

    def y(self, usd: float) -> float:
        return self.floor - min(1.0, usd / self.most) * self.height


def _lines(chart: CostChart) -> Drawing:
    plane = _CostPlane(chart)
    drawing = Drawing(f"{chart.title}: cost by deadline", WIDTH, plane.floor + 52)
    drawing.add(DrawnText(0, 16, chart.title, tone="ink", strong=True, size=13.5))
    drawing.add(DrawnText(0, 33, f"USD, {chart.note}"))
    _axes(drawing, chart, plane)
    labels = list[tuple[float, str, str]]()
    for name, line, tone, dash in (
        ("on demand", chart.on_demand, ON_DEMAND_TONE, 5.0),
        ("optimum", chart.optimum, OPTIMUM_TONE, 2.5),
    ):
        if line and line[-1][1] > plane.most:
            labels.append((plane.top, f"{name} {money(line[-1][1])} (above)", tone))
        elif line:
            points = tuple((plane.x(h), plane.y(usd)) for h, usd in line)
            drawing.add(DrawnLine(points, tone, 2.0, dash))
            drawing.add(
                *(
                    DrawnDot(plane.x(h), plane.y(usd), 3.0, tone, f"{name}, {h:g} h: {money(usd)}")
                    for h, usd in line
                )
            )
            labels.append((points[-1][1], name, tone))
    for i, curve in enumerate(chart.curves):
        tone = TONES[i % len(TONES)]
        _curve(drawing, chart, plane, curve, tone, 3.0 * (i - (len(chart.curves) - 1) / 2))
        labels.append((plane.y(curve.points[-1].usd), _label(chart, curve), tone))
    _name_lines(drawing, plane, labels)
    return drawing


def _label(chart: CostChart, curve: CostCurve) -> str:
    """Its name, with how far it is above the optimum over all deadlines."""
    over = over_optimum(chart, curve)
    return curve.name if over is None else f"{curve.name} {_signed(over)}"


def over_optimum(chart: CostChart, curve: CostCurve) -> float | None:
    """By which share a policy costs more than the optimum, the mean of all deadlines."""
    least = dict(chart.optimum)
    shares = [p.usd / least[p.deadline_h] - 1 for p in curve.points if least.get(p.deadline_h)]
    return sum(shares) / len(shares) if len(shares) == len(curve.points) and shares else None


def _signed(share: float) -> str:
    return f"{'+' if share >= 0 else '−'}{percent(abs(share))}"


def _axes(drawing: Drawing, chart: CostChart, plane: _CostPlane) -> None:
    for usd in nice_ticks(0.0, plane.most, 6):
        y = plane.y(usd)
        drawing.add(DrawnLine(((LEFT, y), (plane.right, y)), "grid"))
        drawing.add(DrawnText(LEFT - 8, y + 4, f"${short(usd)}", "end"))
    for h in plane.deadlines:
        times = f" = {h / chart.work_h:.3g} × work" if chart.work_h else ""
        drawing.add(DrawnText(plane.x(h), plane.floor + 18, f"{h:g} h{times}", "middle"))
    middle = (LEFT + plane.right) / 2
    drawing.add(DrawnText(middle, plane.floor + 38, "deadline", "middle"))


def _curve(
    drawing: Drawing, chart: CostChart, plane: _CostPlane, curve: CostCurve, tone: str, aside: float
) -> None:
    least = dict(chart.optimum)
    places = tuple((plane.x(p.deadline_h) + aside, plane.y(p.usd)) for p in curve.points)
    for (x, _), p in zip(places, curve.points, strict=True):
        drawing.add(DrawnLine(((x, plane.y(p.low)), (x, plane.y(p.high))), tone, 1.5, opacity=0.45))
    drawing.add(DrawnLine(places, tone, 2.0))
    for (x, y), p in zip(places, curve.points, strict=True):
        more = ""
        if least.get(p.deadline_h):
            more = f" ({_signed(p.usd / least[p.deadline_h] - 1)} beside the optimum)"
        tip = (
            f"{curve.name}, deadline {p.deadline_h:g} h: {money(p.usd)}{more}\n"
            f"8 of 10 windows: {money(p.low)} – {money(p.high)}\n{_missed(p)}"
        )
        drawing.add(DrawnDot(x, y, 4.0, tone, tip))
        if p.missed:
            drawing.add(
                DrawnDot(x, y, 6.5, "bad", tip, hollow=True), DrawnDot(x, y, 3.0, tone, tip)
            )
            drawing.add(DrawnText(x + 10, y - 8, f"{p.missed} {chart.missed}", tone="bad"))


def _missed(p: CostPoint) -> str:
    return f"{p.missed or 'none'} of {p.windows} missed the deadline"


def _name_lines(
    drawing: Drawing, plane: _CostPlane, labels: Sequence[tuple[float, str, str]]
) -> None:
    """At the ends of the lines, pushed apart where they are close together."""
    gap = 15.0
    ordered = sorted(labels)
    places = [y for y, *_ in ordered]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    if places and places[-1] > plane.floor:
        places[-1] = plane.floor
        for i in range(len(places) - 2, -1, -1):
            places[i] = min(places[i], places[i + 1] - gap)
    end = plane.x(plane.deadlines[-1])
    for at, (y, name, tone) in zip(places, ordered, strict=True):
        drawing.add(DrawnLine(((end + 14, y), (plane.right - 4, at)), tone, 1.0, opacity=0.5))
        drawing.add(DrawnBox(plane.right, at - 4, 8, 8, tone))
        drawing.add(DrawnText(plane.right + 13, at + 4, cut(name, NAMES - 14), tone="ink"))


def _bars(chart: CostChart) -> Drawing:
    """One deadline only: a bar for each policy, the cheapest first."""
    row, names, top = 30.0, 230.0, 50.0
    rows = sorted((c.points[0].usd, i, c) for i, c in enumerate(chart.curves) if c.points)
    drawing = Drawing(f"{chart.title}: cost", WIDTH, top + row * len(rows) + 34)
    at = f", deadline {hours_text(chart.deadlines[0])}" if chart.deadlines else ""
    drawing.add(DrawnText(0, 16, chart.title, tone="ink", strong=True, size=13.5))
    several = any(c.points[0].windows > 1 for _, _, c in rows)
    note = f", {chart.note}" if several else ""
    drawing.add(DrawnText(0, 33, f"USD{at}{note}"))
    lines = [(usd, OPTIMUM_TONE, "optimum") for _, usd in chart.optimum[:1]]
    lines += [(usd, ON_DEMAND_TONE, "on demand") for _, usd in chart.on_demand[:1]]
    sums = [usd for _, _, c in rows for usd in (c.points[0].usd, c.points[0].high)]
    most = 1.02 * max([0.0, *sums, *(usd for usd, *_ in lines)]) or 1.0
    scale = (WIDTH - names - 170) / most
    floor = top + row * len(rows)
    for usd in nice_ticks(0.0, most, 7):
        x = names + usd * scale
        drawing.add(DrawnLine(((x, top - 6), (x, floor)), "grid"))
        drawing.add(DrawnText(x, floor + 16, f"${short(usd)}", "middle"))
    for place, (_, i, curve) in enumerate(rows):
        _bar(drawing, chart, curve, i, (names, top + row * place), scale)
    for usd, tone, name in lines:
        x = names + usd * scale
        tip = f"{name}: {money(usd)}"
        drawing.add(DrawnLine(((x, top - 6), (x, floor)), tone, 2.0, 4.0, tip))
        drawing.add(DrawnText(x, top - 10, name, "middle", tone))
    return drawing


def _bar(
    drawing: Drawing,
    chart: CostChart,
    curve: CostCurve,
    number: int,
    at: tuple[float, float],
    scale: float,
) -> None:
    p, (x, y) = curve.points[0], at
    tone = TONES[number % len(TONES)]
    tip = f"{curve.name}: {money(p.usd)}; {_missed(p)}"
    drawing.add(DrawnText(x - 10, y + 18, cut(curve.name, x - 14), "end", "ink"))
    drawing.add(DrawnBox(x, y + 5, p.usd * scale, 18, tone, tip))
    if p.high > p.low:
        drawing.add(DrawnLine(((x + p.low * scale, y + 14), (x + p.high * scale, y + 14)), "ink"))
    over = over_optimum(chart, curve)
    words = money(p.usd) + ("" if over is None else f"  {_signed(over)}")
    end = x + max(p.usd, p.high) * scale + 8
    drawing.add(DrawnText(end, y + 18, words, tone="ink"))
    if p.missed:
        words_end = end + text_width(words) + 8
        drawing.add(DrawnText(words_end, y + 18, f"{p.missed} {chart.missed}", tone="bad"))


# ---- one run, hour by hour -----------------------------------------------------------------------
def timeline_drawing(one: MarketTimeline) -> Drawing:
    """A lane for each place: the room there was, the run's nodes above, the optimum's below; and
    both bills."""
    lanes = _shown_lanes(one)
    axis = _Hours(one)
    drawing = Drawing(one.title, WIDTH)
    drawing.add(DrawnText(0, 16, one.title, tone="ink", strong=True, size=13.5))
    _key(drawing, one)
    most = max([1.0, *(n for lane in lanes for part in (lane.run, lane.room) for _, n in part)])
    y = top = 64.0
    for lane in lanes:
        y += _lane(drawing, one, lane, axis, y, most)
    if len(lanes) < len(one.lanes):
        more = f"and {len(one.lanes) - len(lanes)} more places that nobody used"
        drawing.add(DrawnText(LANE_NAMES - 10, y + 14, more, "end"))
        y += 22
    y = _bills(drawing, one, axis, y + 12)
    for h, told in axis.ticks():
        drawing.add(DrawnText(axis.x(h), y + 16, told, "middle"))
        drawing.shapes.insert(0, DrawnLine(((axis.x(h), top), (axis.x(h), y)), "grid"))
    x = axis.x(one.deadline_h)
    drawing.add(
        DrawnLine(((x, top - 8), (x, y)), "bad", 1.5, 4.0, f"deadline {hours_text(one.deadline_h)}")
    )
    drawing.add(DrawnText(x, top - 12, "deadline", "middle", "bad"))
    drawing.height = y + 26
    return drawing


class _Hours:
    """Where hours lie."""

    def __init__(self, one: MarketTimeline):
        ends = [one.deadline_h, one.run.finish_h, one.optimum.finish_h if one.optimum else 0.0]
        ends += [lane.run[-1][0] for lane in one.lanes if lane.run]
        self.last = 1.02 * max([h for h in ends if math.isfinite(h)] or [1.0]) or 1.0

    def x(self, hours: float) -> float:
        share = min(1.0, max(0.0, hours / self.last))
        return LANE_NAMES + share * (WIDTH - LANE_NAMES - 20)

    def ticks(self) -> list[tuple[float, str]]:
        """Hours, and how they are told."""
        if self.last > 20:
            step = next((s for s in (6, 12, 24, 48, 96, 168) if self.last / s <= 14), 0)
            step = step or 168 * math.ceil(self.last / 168 / 14)
            return [(float(h), f"{h} h") for h in range(0, math.floor(self.last) + 1, step)]
        seconds, unit, size = time_ticks(self.last * 3600, 9)
        return [(t / 3600, f"{t / size:g} {unit}") for t in seconds]


def _shown_lanes(one: MarketTimeline) -> list[MarketLane]:
    """Of very many those that somebody used."""
    if len(one.lanes) <= MOST_LANES:
        return list(one.lanes)
    used = [lane for lane in one.lanes if _peak(lane.run) or _peak(lane.optimum)]
    return used[:MOST_LANES]


def _peak(levels: Levels) -> float:
    return max((n for _, n in levels), default=0.0)


def _key(drawing: Drawing, one: MarketTimeline) -> None:
    x = 0.0
    for run, tone in ((one.run, "accent"), (one.optimum, OPTIMUM_TONE)):
        if run is not None:
            done = (
                f"done after {hours_text(run.finish_h)}"
                if math.isfinite(run.finish_h)
                else "never done"
            )
            words = f"{run.name}: {money(run.usd)}, {done}"
            drawing.add(DrawnBox(x, 27, 9, 9, tone), DrawnText(x + 14, 36, words, tone="ink"))
            x += 40 + text_width(words)
    drawing.add(DrawnBox(x, 27, 9, 9, "world"), DrawnText(x + 14, 36, "spot could be had"))
    x += 40 + text_width("spot could be had")
    if any(lane.taken for lane in one.lanes):
        drawing.add(DrawnLine(((x + 4, 26), (x + 4, 38)), "bad", 2.2))
        drawing.add(DrawnText(x + 14, 36, "taken away"))


def _lane(
    drawing: Drawing, one: MarketTimeline, lane: MarketLane, axis: _Hours, y: float, most: float
) -> float:
    """Its height."""
    each = 11.0 if most <= 1 else 34.0
    height = each * (2 if one.optimum else 1) + (2 if one.optimum else 0)
    drawing.add(
        DrawnText(
            LANE_NAMES - 10, y + height / 2 + 1, cut(lane.name, LANE_NAMES - 14), "end", "ink"
        )
    )
    if lane.note and height >= 20:
        drawing.add(DrawnText(LANE_NAMES - 10, y + height / 2 + 12, lane.note, "end", size=9.5))
    end = axis.x(axis.last)
    drawing.add(DrawnLine(((LANE_NAMES, y + height), (end, y + height)), "line"))
    rows = [(lane.run, "accent", one.run.name, y)]
    if one.optimum:
        rows.append((lane.optimum, OPTIMUM_TONE, one.optimum.name, y + each + 2))
    for levels, tone, name, row_y in rows:
        _steps(drawing, lane.room, axis, (row_y, each), most, "world", "")
        _steps(drawing, levels, axis, (row_y, each), most, tone, f"{name} in {lane.name}")
    _takes(drawing, lane, axis, (y, each if most <= 1 else 6.0))
    return height + 7


def _takes(drawing: Drawing, lane: MarketLane, axis: _Hours, row: tuple[float, float]) -> None:
    """A mark for each moment at which nodes were taken away."""
    top, height = row
    together = itertools.groupby(sorted(lane.taken, key=lambda n: n.end_h), lambda n: n.end_h)
    for end_h, group in together:
        lives = sorted(end_h - node.begin_h for node in group)
        since = " – ".join(hours_text(h) for h in dict.fromkeys((lives[0], lives[-1])))
        tip = f"{len(lives)} taken away at {hours_text(end_h)}, after {since}"
        x = axis.x(end_h)
        drawing.add(DrawnLine(((x, top - 1), (x, top + height + 1)), "bad", 2.0, tip=tip))


def _steps(
    drawing: Drawing,
    levels: Levels,
    axis: _Hours,
    row: tuple[float, float],
    most: float,
    tone: str,
    name: str,
) -> None:
    """A box for each spell at one level, as high as its share of `most`. `row`: top, height."""
    top, height = row
    for (begin_h, count), end_h in spells(levels, axis.last):
        x, end = axis.x(begin_h), axis.x(end_h)
        high = height * min(1.0, count / most)
        nodes = f", {count:g} nodes" if most > 1 else ""
        tip = f"{name}: {hours_text(begin_h)} – {hours_text(end_h)}{nodes}" if name else ""
        drawing.add(DrawnBox(x, top + height - high, max(0.6, end - x), high, tone, tip))


def spells(levels: Levels, last_h: float) -> Iterator[tuple[tuple[float, float], float]]:
    """((begin, level), end) of each spell above 0, joined where nothing changes; where there are
    more than can be seen, short ones are joined with those before them."""
    joined = list[tuple[float, float]]()
    shortest = last_h / MOST_STEPS if len(levels) > MOST_STEPS else 0.0
    for hours, count in levels:
        if joined and (count == joined[-1][1] or hours - joined[-1][0] < shortest):
            continue
        joined.append((hours, count))
    for begin, (end_h, _) in itertools.pairwise([*joined, (last_h, 0.0)]):
        if begin[1] > 0 and begin[0] < last_h:
            yield begin, min(last_h, end_h)


def _bills(drawing: Drawing, one: MarketTimeline, axis: _Hours, y: float) -> float:
    """USD so far, of both; where it ends."""
    height = 84.0
    both = [(one.run, "accent")] + ([(one.optimum, OPTIMUM_TONE)] if one.optimum else [])
    most = 1.05 * max([0.0, *(usd for run, _ in both for _, usd in run.bill)]) or 1.0
    floor = y + height
    drawing.add(DrawnText(LANE_NAMES - 46, y + 12, "paid so far", "end", "ink"))
    for usd in nice_ticks(0.0, most, 3):
        at = floor - usd / most * height
        drawing.add(DrawnLine(((LANE_NAMES, at), (axis.x(axis.last), at)), "grid"))
        drawing.add(DrawnText(LANE_NAMES - 8, at + 4, f"${short(usd)}", "end"))
    for run, tone in both:
        every = max(1, len(run.bill) // 600)
        kept = [*run.bill[::every], *run.bill[-1:]]
        line = tuple((axis.x(h), floor - usd / most * height) for h, usd in kept)
        if len(line) > 1:
            below = ((line[-1][0], floor), (line[0][0], floor))
            drawing.add(DrawnArea((*line, *below), tone, opacity=0.08))
            drawing.add(DrawnLine(line, tone, 2.0, tip=f"{run.name}: {money(run.usd)}"))
        if math.isfinite(run.finish_h):
            x, end = axis.x(run.finish_h), floor - run.usd / most * height
            tip = f"{run.name}: done after {hours_text(run.finish_h)}, {money(run.usd)}"
            drawing.add(DrawnDot(x, end, 4.0, tone, tip))
    return floor
