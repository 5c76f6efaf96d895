"""Pictures of policies on a market: the cost of each by deadline, and one run hour by hour beside
the optimum. They are drawn by matplotlib (extra `plots`), in the light colours of the pages.

They take plain numbers, so that anything can draw: replays of recorded markets, or of the market of
a finished run.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from harness.core.formatting import duration, money, percent
from harness.core.world import BadInput
from harness.look.pages.html_parts import asset
from harness.look.pages.line_plots import esc

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN, DPI = 11.0, 200
MOST_PIXELS = 60_000_000  # of a PNG: 240 MB of memory during drawing
STYLE: dict[str, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "harness",  # the same drawing gives the same bytes
    "text.parse_math": False,  # a dollar is a dollar
}
TONES = ("accent", "reform", "val", "drain", "redone", "brown", "pink", "olive", "start")
OPTIMUM_TONE, ON_DEMAND_TONE = "useful", "other"
FAR_ABOVE = 1.6  # times the dearest policy: above it, on demand is named but not drawn
NAME_LETTERS = 34  # of a name beside a chart
MOST_LANES = 24
MOST_STEPS = 1500  # of one lane: more cannot be seen

# (hours, number of nodes from then on)
Levels: TypeAlias = tuple[tuple[float, float], ...]


# ---- figures -------------------------------------------------------------------------------------
def check_plots() -> None:
    """Raise BadInput if nothing can be drawn. Call it before long work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BadInput(
            "a picture needs the package matplotlib, which is not installed: "
            '`pip install "spotharness[plots]"`'
        )


@functools.cache
def light_colours() -> dict[str, str]:
    """Return page.css's light colours by name."""
    root = asset("page.css").partition("}")[0]
    return dict(re.findall(r"--([\w-]+):light-dark\((#\w+),", root))


def figure(title: str, height_in: float, draw: Callable[[Figure], None]) -> Figure:
    """Return a figure with a title, as `draw` fills it."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        made = Figure((WIDTH_IN, height_in), layout="constrained")
        made.suptitle(title, x=0.01, ha="left", weight="bold")
        draw(made)
    return made


def svg(made: Figure) -> str:
    """Return the figure as a part of a page."""
    import matplotlib

    written = io.StringIO()
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(STYLE):
        made.savefig(written, format="svg", metadata=none)
    text = written.getvalue()
    said = f'<svg role="img" aria-label="{esc(made.get_suptitle())}" '
    return said + text[text.index("<svg ") + 5 :]


def png(figures: Sequence[Figure]) -> bytes:
    """Return a PNG of the figures, one below the other. Those that no longer fit into MOST_PIXELS
    are left out."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.image import imsave

    shown, pixels = list[Any](), 0
    for made in figures:
        made.set_dpi(DPI)
        width, height = FigureCanvasAgg(made).get_width_height()
        pixels += width * height
        if shown and pixels > MOST_PIXELS:
            break
        with matplotlib.rc_context(STYLE):
            canvas = FigureCanvasAgg(made)
            canvas.draw()
        shown.append(np.asarray(canvas.buffer_rgba())[..., :3])
    written = io.BytesIO()
    imsave(written, np.concatenate(shown), format="png")
    return written.getvalue()


def shortened(name: str) -> str:
    return name if len(name) <= NAME_LETTERS else name[: NAME_LETTERS - 1] + "…"


def dollars(axis: Any) -> None:
    axis.set_major_formatter(lambda usd, _: f"${usd:g}")
    axis.grid(color=light_colours()["grid"])


# ---- the data ------------------------------------------------------------------------------------
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
    """Policies on one market. `optimum` and `on_demand`: (deadline in hours, USD), empty if
    unknown. `work_h`: hours that the work takes without interruptions; `note`: an explanation of
    the numbers; `missed`: the word for being late."""

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
    """A preempted node: its begin and end in hours."""

    begin_h: float
    end_h: float


@dataclass(frozen=True)
class MarketLane:
    """One place. `room`: how many nodes it had, empty if there is no limit (on demand); `run` and
    `optimum`: how many nodes were used. `note`: words below its name."""

    name: str
    room: Levels
    run: Levels
    optimum: Levels = ()
    note: str = ""
    taken: tuple[LaneTake, ...] = ()


@dataclass(frozen=True)
class RunDrawn:
    """A run's result: name, bill in USD by hours, and when it was done (hours; infinite: never)."""

    name: str
    bill: Levels
    finish_h: float

    @property
    def usd(self) -> float:
        return self.bill[-1][1] if self.bill else 0.0


@dataclass(frozen=True)
class MarketTimeline:
    """One run on a market, hour by hour. `optimum`: the result of an omniscient planner for the
    same job on the same market, or None."""

    title: str
    lanes: tuple[MarketLane, ...]
    run: RunDrawn
    optimum: RunDrawn | None
    deadline_h: float


def hours_text(hours: float) -> str:
    """Format hours as `51.3 h`; below an hour, as `duration` does."""
    return f"{hours:.3g} h" if hours >= 1 or hours == 0 else duration(hours * 3600)


def over_optimum(chart: CostChart, curve: CostCurve) -> float | None:
    """Return the share of a policy's cost above the optimum, as the mean of all deadlines."""
    least = dict(chart.optimum)
    shares = [p.usd / least[p.deadline_h] - 1 for p in curve.points if least.get(p.deadline_h)]
    return sum(shares) / len(shares) if len(shares) == len(curve.points) and shares else None


def _signed(share: float) -> str:
    return f"{'+' if share >= 0 else '−'}{percent(abs(share))}"


# ---- cost over deadline --------------------------------------------------------------------------
def cost_figure(chart: CostChart) -> Figure:
    """Draw lines over the deadlines, or bars if there is only one deadline."""
    if len(chart.deadlines) > 1:
        return figure(chart.title, 4.4, functools.partial(_lines, chart))
    return figure(chart.title, 1.3 + 0.3 * len(chart.curves), functools.partial(_bars, chart))


def _lines(chart: CostChart, made: Figure) -> None:
    ax, colour = made.add_subplot(title=f"USD, {chart.note}"), light_colours()
    sums = [usd for _, usd in chart.optimum]
    sums += [usd for c in chart.curves for p in c.points for usd in (p.high, p.usd)]
    most = max([0.0, *filter(math.isfinite, sums)]) or 1.0
    for name, line, tone, dash in (
        ("on demand", chart.on_demand, ON_DEMAND_TONE, "--"),
        ("optimum", chart.optimum, OPTIMUM_TONE, ":"),
    ):
        # a line far above the others would only squeeze them together
        if line and max(usd for _, usd in line) > FAR_ABOVE * most:
            words = f"{name} {money(line[-1][1])} (above)"
            ax.plot([], [], dash, color=colour[tone], label=words)
        elif line:
            ax.plot(*zip(*line, strict=True), dash, marker=".", color=colour[tone], label=name)
    for i, curve in enumerate(chart.curves):
        tone = colour[TONES[i % len(TONES)]]
        hours, usd = [p.deadline_h for p in curve.points], [p.usd for p in curve.points]
        spread = [[p.usd - p.low for p in curve.points], [p.high - p.usd for p in curve.points]]
        over = over_optimum(chart, curve)
        name = curve.name if over is None else f"{curve.name} {_signed(over)}"
        ax.errorbar(hours, usd, spread, fmt="o-", ms=4, elinewidth=1, color=tone, label=name)
        for p in curve.points:
            if p.missed:
                said = f"{p.missed} {chart.missed}"
                _beside(ax, said, (p.deadline_h, p.usd), colour["bad"])
    ax.set_ylim(bottom=0)
    ax.set_xlabel("deadline")
    ax.set_xticks(chart.deadlines, [_deadline(chart, h) for h in chart.deadlines])
    dollars(ax.yaxis)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _deadline(chart: CostChart, hours: float) -> str:
    return f"{hours:g} h" + (f" = {hours / chart.work_h:.3g} × work" if chart.work_h else "")


def _beside(ax: Axes, words: str, at: tuple[float, float], colour: str) -> None:
    ax.annotate(words, at, (7, 0), textcoords="offset points", color=colour, va="center")


def _bars(chart: CostChart, made: Figure) -> None:
    """Draw a bar for each policy, the cheapest above, for a single deadline."""
    rows = sorted((c.points[0].usd, i, c) for i, c in enumerate(chart.curves) if c.points)
    at = f", deadline {hours_text(chart.deadlines[0])}" if chart.deadlines else ""
    note = f", {chart.note}" if any(c.points[0].windows > 1 for _, _, c in rows) else ""
    ax, colour = made.add_subplot(title=f"USD{at}{note}"), light_colours()
    for place, (usd, i, curve) in enumerate(rows):
        p, over = curve.points[0], over_optimum(chart, curve)
        ax.barh(place, usd, 0.6, color=colour[TONES[i % len(TONES)]])
        ax.plot([p.low, p.high], [place, place], color=colour["ink"], lw=1)
        words = money(usd) + ("" if over is None else f"  {_signed(over)}")
        words += f"  {p.missed} {chart.missed}" if p.missed else ""
        tone = colour["bad" if p.missed else "ink"]
        _beside(ax, words, (max(usd, p.high), place), tone)
    for line, tone, name in (
        (chart.optimum, OPTIMUM_TONE, "optimum"),
        (chart.on_demand, ON_DEMAND_TONE, "on demand"),
    ):
        for _, usd in line[:1]:
            ax.axvline(usd, color=colour[tone], ls="--", label=name)
    ax.set_yticks(range(len(rows)), [shortened(curve.name) for _, _, curve in rows])
    ax.invert_yaxis()
    ax.margins(x=0.2)
    ax.set_xlim(left=0)
    dollars(ax.xaxis)
    if chart.optimum or chart.on_demand:
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))


# ---- one run, hour by hour -----------------------------------------------------------------------
def timeline_figure(one: MarketTimeline) -> Figure:
    """Draw a lane per place (its room, the run's nodes above, the optimum's below), and both
    bills."""
    lanes = _shown_lanes(one)
    ends = [one.deadline_h, *(run.finish_h for run in (one.run, one.optimum) if run)]
    ends += [lane.run[-1][0] for lane in one.lanes if lane.run]
    last_h = 1.02 * max([h for h in ends if math.isfinite(h)] or [1.0]) or 1.0
    most = max([1.0, *(n for lane in lanes for part in (lane.run, lane.room) for _, n in part)])
    each = 0.28 if most <= 1 else 0.6

    def draw(made: Figure) -> None:
        above, below = made.subplots(
            2, sharex=True, gridspec_kw={"height_ratios": [each * (len(lanes) or 1), 1.2]}
        )
        for place, lane in enumerate(lanes):
            _lane(above, one, lane, place, last_h, most)
        _bills(below, one, last_h)
        for ax in (above, below):
            ax.axvline(
                one.deadline_h, color=light_colours()["bad"], ls="--", lw=1, label="deadline"
            )
        _key(above, one)
        names = [shortened(lane.name) + (f"\n{lane.note}" if lane.note else "") for lane in lanes]
        above.set_yticks([place + 0.5 for place in range(len(lanes))], names)
        above.set_ylim(len(lanes) or 1, 0)
        if len(lanes) < len(one.lanes):
            above.set_xlabel(f"and {len(one.lanes) - len(lanes)} more places that nobody used")
        below.set_xlim(0, last_h)
        below.xaxis.set_major_formatter(lambda h, _: hours_text(h))

    return figure(one.title, 2.4 + each * len(lanes), draw)


def _shown_lanes(one: MarketTimeline) -> list[MarketLane]:
    """Return the lanes; if there are very many, only those that were used."""
    if len(one.lanes) <= MOST_LANES:
        return list(one.lanes)
    used = [lane for lane in one.lanes if any(n for _, n in (*lane.run, *lane.optimum))]
    return used[:MOST_LANES]


def _key(ax: Axes, one: MarketTimeline) -> None:
    """Write above the lanes what the colours mean."""
    for run, tone in ((one.run, "accent"), (one.optimum, OPTIMUM_TONE)):
        if run is not None:
            ends = math.isfinite(run.finish_h)
            done = f"done after {hours_text(run.finish_h)}" if ends else "never done"
            ax.fill_between(
                [], [], color=light_colours()[tone], label=f"{run.name}: {money(run.usd)}, {done}"
            )
    ax.fill_between([], [], color=light_colours()["world"], label="spot could be had")
    if any(lane.taken for lane in one.lanes):
        ax.vlines([], 0, 0, color=light_colours()["bad"], label="taken away")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5, borderpad=0)


def _lane(
    ax: Axes, one: MarketTimeline, lane: MarketLane, place: int, last_h: float, most: float
) -> None:
    rows = [(lane.run, "accent")] + ([(lane.optimum, OPTIMUM_TONE)] if one.optimum else [])
    high = 0.9 / len(rows)
    for row, (levels, tone) in enumerate(rows):
        floor = place + high * (row + 1)
        for shown, colour in ((lane.room, "world"), (levels, tone)):
            hours, counts = zip(*thinned_levels(shown, last_h), (last_h, 0.0), strict=True)
            tops = [floor - high * 0.95 * min(1.0, n / most) for n in counts]
            ax.fill_between(hours, floor, tops, step="post", color=light_colours()[colour], lw=0)
    moments = sorted({node.end_h for node in lane.taken})
    ax.vlines(moments, place, place + 0.3, color=light_colours()["bad"])


def thinned_levels(levels: Levels, last_h: float) -> Levels:
    """Return the levels until `last_h` without those that change nothing. If there are more than
    can be seen, short ones are joined with those before them."""
    kept = list[tuple[float, float]]()
    shortest = last_h / MOST_STEPS if len(levels) > MOST_STEPS else 0.0
    for hours, count in levels:
        if kept and (count == kept[-1][1] or hours - kept[-1][0] < shortest):
            continue
        if hours < last_h:
            kept.append((hours, count))
    return tuple(kept)


def _bills(ax: Axes, one: MarketTimeline, last_h: float) -> None:
    """Draw both bills over time."""
    for run, tone in ((one.run, "accent"), (one.optimum, OPTIMUM_TONE)):
        if run is None or not run.bill:
            continue
        every, colour = max(1, len(run.bill) // 600), light_colours()[tone]
        hours, usd = zip(*run.bill[::every], *run.bill[-1:], strict=True)
        ax.plot(hours, usd, color=colour)
        ax.fill_between(hours, usd, color=colour, alpha=0.08, lw=0)
        if math.isfinite(run.finish_h):
            ax.plot([run.finish_h], [run.usd], "o", ms=4, color=colour)
    ax.set_ylabel("paid so far")
    ax.set_ylim(bottom=0)
    dollars(ax.yaxis)
