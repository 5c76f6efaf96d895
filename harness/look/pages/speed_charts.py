"""The page's charts over steps, and what its sections on speed and hardware show, from the
measurements of ranks and nodes."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from harness.core.facts import GuardTripped, NodeMeasured, SessionStarted
from harness.core.formatting import nbytes, percent, plural, shares_text
from harness.ledger.world_speed import SpeedWindow
from harness.look.pages.lane_chart import by_epoch
from harness.look.pages.line_plots import (
    PlotFrame,
    PlotShade,
    PlotTrace,
    plot,
    thinned_indices,
)
from harness.look.reports.summary import Point, Summary

# The page's charts over steps: the loss with its worlds, and the gradient's norm.

LOSS_POINTS = 1500
MOST_SHADES = 300
NOTE_LETTERS = 200


def loss_chart(s: Summary) -> str:
    """Return the loss over steps with its worlds shaded; empty if there is none."""
    traces = [*_rank_band(s), *_lost(s)]
    if s.curve:
        traces.append(_trace("loss", s.curve, "accent"))
    if s.validation:
        steps, values = zip(*s.validation, strict=True)
        name = s.validation_name.replace("_", " ")
        traces.append(PlotTrace(name, steps, values, "val", dots=True, holds=len(s.curve) > 0))
    last = max([p.step for p in (*s.curve, *s.lost)] + [step for step, _ in s.validation] + [1])
    frame = PlotFrame("loss over steps", height=340, top=30, x_range=(0.5, last + 0.5))
    return plot(frame, traces, [*shades(s), *_notes(s)], LOSS_POINTS)


def _notes(s: Summary) -> Iterator[PlotShade]:
    """Yield logbook entries at their step, or else at the last step done when they were written."""
    done = sorted((p.t, p.step) for p in s.curve)
    for entry in s.logbook.entries[-MOST_SHADES:]:
        step = entry.step
        if step is None and done:
            step = done[max(0, bisect_right(done, (entry.t, math.inf)) - 1)][1]
        if step is not None:
            words = f"{entry.author or 'logbook'}: {entry.text[:NOTE_LETTERS]}"
            yield PlotShade(step - 0.5, step + 0.5, words, "note-mark", 0.45)


def _trace(name: str, points: Sequence[Point], tone: str) -> PlotTrace:
    return PlotTrace(name, [p.step for p in points], [p.loss for p in points], tone)


def _lost(s: Summary) -> Iterator[PlotTrace]:
    for epoch, mine in sorted(by_epoch(s.lost).items())[-MOST_SHADES:]:
        yield _trace(f"lost with generation {epoch}", mine, "lost")


def _rank_band(s: Summary) -> Iterator[PlotTrace]:
    """Yield how far the ranks' losses lie apart, around the loss of each step. They are known as
    means over some steps: least and most are as far from the loss as from its own mean there."""
    told = [w for w in windows(s) if w.loss]
    if not any(w.loss.least < w.loss.most for w in told if w.loss):
        return
    kept = thinned_indices([p.loss for p in s.curve], LOSS_POINTS)
    points = [s.curve[i] for i in kept if math.isfinite(s.curve[i].loss)]
    steps = [p.step for p in points]
    below, above = [math.nan] * len(points), [math.nan] * len(points)
    for w in told:
        mine = range(bisect_left(steps, w.first), bisect_right(steps, w.last))
        if mine and w.loss:
            mean = sum(points[i].loss for i in mine) / len(mine)
            for i in mine:
                below[i] = points[i].loss - max(0.0, mean - w.loss.least)
                above[i] = points[i].loss + max(0.0, w.loss.most - mean)
    yield PlotTrace("ranks", steps, above, "accent", below)


def step_ends(told: Sequence[SpeedWindow]) -> list[float]:
    """Return the first and last step of each window: a window's value counts for all its steps."""
    return [float(step) for w in told for step in (w.first, w.last)]


def over_steps(told: Sequence[SpeedWindow], value: Callable[[SpeedWindow], float]) -> list[float]:
    """Return each window's value twice, to match `step_ends`."""
    return [v for w in told for v in (value(w),) * 2]


def windows(s: Summary) -> list[SpeedWindow]:
    """Return step time windows by step, without the steps that a later world rolled back."""
    resumed = {x.fact.epoch: x.fact for x in s.facts if isinstance(x.fact, SessionStarted)}
    until: dict[int, float] = {}  # epoch -> the last of its steps that stayed
    limit = math.inf
    for epoch in sorted(resumed, reverse=True):
        until[epoch] = limit
        limit = min(limit, resumed[epoch].resumed_step)
    kept = [w for w in s.speed.windows if w.first <= until.get(w.epoch, math.inf)]
    cut = (replace(w, last=int(min(w.last, until.get(w.epoch, math.inf)))) for w in kept)
    return sorted(cut, key=lambda w: (w.first, w.epoch))


def shades(s: Summary) -> list[PlotShade]:
    """Return shades for the worlds that made the lineage, and for lost steps."""
    biggest = max([1, *(e.world for e in s.ledger.epochs)])
    mine_of = by_epoch(s.curve)
    found: list[PlotShade] = []
    for e in s.ledger.epochs:
        mine = [p.step for p in mine_of.get(e.epoch, [])]
        if mine:
            accumulation = f", accumulation {e.accumulation}" if e.accumulation else ""
            micro = f"; micro-batches {shares_text(e.shares)}" if e.shares else ""
            tip = f"generation {e.epoch}: {plural(e.world, 'rank')}{accumulation}{micro}"
            strength = 0.35 + 0.65 * e.world / biggest
            ranks = plural(e.world, "rank")
            found.append(PlotShade(min(mine) - 0.5, max(mine) + 0.5, tip, "world", strength, ranks))
    for epoch, lost in sorted(by_epoch(s.lost).items()):
        first, last = lost[0].step, lost[-1].step
        tip = f"generation {epoch}: steps {first}–{last} were lost and done again"
        found.append(PlotShade(first - 0.5, last + 0.5, tip, "lostband", 0.16))
    if len(found) > MOST_SHADES:  # of very many, keep those that an eye can see
        found = sorted(found, key=lambda s: s.begin - s.end)[:MOST_SHADES]
    return sorted(found, key=lambda s: (s.tone != "world", s.begin))


def loss_keys(s: Summary) -> list[tuple[str, str, str]]:
    """Return the legend of the loss chart."""
    keys = [("line", "accent", "training loss (committed steps)")]
    if any(w.loss for w in s.speed.windows):
        keys.append(("band", "accent", "spread of the ranks around it"))
    if s.lost:
        keys.append(("lost", "", "lost and redone"))
    if s.validation:
        keys.append(("dot", "val", s.validation_name.replace("_", " ")))
    if s.logbook.entries:
        keys.append(("box", "note-mark", "logbook"))
    return [*keys, ("box", "world", "stronger shade: more ranks")]


def norm_chart(s: Summary) -> str:
    """Return the chart of the gradient's norm, with the steps at which a guard tripped."""
    if not s.norms:
        return ""
    steps, values = zip(*s.norms, strict=True)
    tripped = [x.fact for x in s.facts if isinstance(x.fact, GuardTripped)][-MOST_SHADES:]
    marks = [
        PlotShade(g.step - 0.5, g.step + 0.5, f"guard: {g.what} ({g.value:g})", "guard", 0.5)
        for g in tripped
    ]
    frame = PlotFrame("gradient norm over steps", height=190, zero=True)
    return plot(frame, [PlotTrace("gradient norm", steps, values, "t1")], marks)


SMALL = 230.0  # width of a small plot
NODES_SHOWN = 24
SMALL_POINTS = 120
PHASE_MEANING = {
    "data": "waiting for micro-batches",
    "forward": "the script between a micro-batch and backward",
    "backward": "gradients",
    "communication": "waiting for other ranks",
    "optimizer": "clipping, optimizers, schedulers",
    "snapshot": "standing still to copy the state",
    "harness": "bookkeeping",
    "other": "the script between steps: validation, logging",
}


# ---- step time -----------------------------------------------------------------------------------
def step_time(s: Summary) -> dict[str, Any]:
    """Return what the section on step time shows; empty if nothing was measured."""
    whole = s.speed.step_s
    if whole <= 0:
        return {}
    split = {p: v for p, v in s.speed.seconds.items() if v > 0}
    rows = [(p, PHASE_MEANING.get(p, ""), v / whole, _ms(v)) for p, v in split.items()]
    return {
        "bar": [(f"p-{p}", v / whole, f"{p}: {percent(v / whole)}") for p, v in split.items()],
        "rows": [*rows, ("", "", 1.0, _ms(whole))],
        "rates": _rates(s),
        "phases": [("box", f"p-{p}", p) for p in split],
        "over_steps": _over_steps(s, list(split)),
        "spreads": _spreads(s),
    }


def _ms(seconds: float) -> str:
    """Return a duration with three significant digits, in ms below one second."""
    return f"{1000 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _rates(s: Summary) -> list[tuple[str, str]]:
    found = s.speed
    rows = []
    if found.tokens_per_s:
        rows.append(("tokens per second", f"{found.tokens_per_s:,.0f} (wall clock)"))
    if found.samples_per_s:
        rows.append(("samples per second", f"{found.samples_per_s:,.1f}"))
    if found.mfu is not None:
        rows.append(("MFU", percent(found.mfu)))
    if found.hfu is not None:
        rows.append(("HFU, with recomputed activations", percent(found.hfu)))
    for slow in found.slowest:
        words = f"{percent(slow.behind)} behind the median rank, in {slow.windows} of {slow.of}"
        who = f"generation {slow.epoch}: rank {slow.rank} is the slowest"
        rows.append((who, f"{words} windows"))
    for one in found.profiles[-8:]:
        steps = f"rank {one.rank}, steps {one.first}–{one.last}, {nbytes(one.nbytes)}"
        rows.append(("profile", f"{steps}: {', '.join(one.keys)}"))
    return rows


def _over_steps(s: Summary, phases: Sequence[str]) -> str:
    """Plot the step time over the steps, with the phases stacked."""
    told = windows(s)
    xs = step_ends(told)
    below, traces = [0.0] * len(xs), list[PlotTrace]()
    for p in phases:
        own = over_steps(told, lambda w, p=p: w.seconds.get(p, 0.0))  # type: ignore[misc]
        above = [b + v for b, v in zip(below, own, strict=True)]
        traces.append(PlotTrace(p, xs, above, f"p-{p}", below, unit="s", shown=own))
        below = above
    frame = PlotFrame("step time over steps", height=210, zero=True)
    return plot(frame, traces) if len(told) > 1 else ""


def _spreads(s: Summary) -> str:
    """Plot the spread of the ranks' own time in a step, which excludes waiting for other ranks."""
    told = [w for w in windows(s) if w.own]
    if len(told) < 2 or all(w.own.most_rank == w.own.least_rank for w in told if w.own):
        return ""
    xs = step_ends(told)
    least, middle, most = (
        over_steps(told, lambda w, name=name: getattr(w.own, name))  # type: ignore[misc]
        for name in ("least", "median", "most")
    )
    traces = [
        PlotTrace("ranks", xs, most, "t2", least, unit="s"),
        PlotTrace("median rank", xs, middle, "t2", unit="s"),
    ]
    frame = PlotFrame("own time of ranks", height=190, top=30, zero=True)
    return plot(frame, traces, shades(s))


def scaling(s: Summary) -> dict[str, Any]:
    """Return the speed by world size, relative to the smallest world's; empty for one world."""
    worlds = [w for w in s.speed.worlds if w.step_s > 0]
    if len(worlds) < 2:
        return {}
    xs = [w.world for w in worlds]
    least = worlds[0]
    tokens = all(w.tokens_per_s for w in worlds)
    unit = "tokens/s" if tokens else "steps/s"
    speeds = [(w.tokens_per_s or 0.0) if tokens else 1 / w.step_s for w in worlds]
    frame = PlotFrame("speed by ranks", "ranks", height=230, width=560, zero=True)
    ideal = [speeds[0] * w / least.world for w in xs]
    traces = [
        PlotTrace("in proportion", xs, ideal, "dim", unit=unit),
        PlotTrace("measured", xs, speeds, "t0", dots=True, unit=unit),
    ]
    rows = [
        [
            plural(w.world, "rank"),
            f"{w.steps:,}",
            _ms(w.step_s),
            f"{w.tokens_per_s:,.0f}" if w.tokens_per_s else "–",
            percent(w.mfu) if w.mfu is not None else "–",
            percent(w.efficiency),
        ]
        for w in worlds
    ]
    return {"least": least.world, "chart": plot(frame, traces), "rows": rows}


# ---- hardware ------------------------------------------------------------------------------------
def hardware(s: Summary) -> dict[str, Any]:
    """Return small plots per node, all with the same time axis: (name, plots) of each node."""
    measured: dict[str, list[tuple[float, NodeMeasured]]] = {}
    for x in s.facts:
        if isinstance(x.fact, NodeMeasured):
            measured.setdefault(x.fact.member, []).append((x.t - s.started_s, x.fact))
    name_of = {m: a.name for a in s.ledger.attempts for m in a.members}
    busiest = sorted(measured, key=lambda m: -len(measured[m]))[:NODES_SHOWN]
    span = (0.0, max(1.0, s.ended_s - s.started_s))
    nodes = [
        (name_of.get(member, member), _node_plots(measured[member], span))
        for member in sorted(busiest, key=lambda m: measured[m][0][0])
    ]
    return {"nodes": nodes, "left_out": len(measured) - len(busiest)}


GROUPS = (  # title, pattern of metric names, unit, least upper end of the axis
    ("GPU busy", r"gpu(\d+)/percent", "%", 100.0),
    ("GPU memory", r"gpu(\d+)/memory_percent", "%", 100.0),
    ("GPU heat", r"gpu(\d+)/celsius", "°C", 90.0),
    ("GPU power", r"gpu(\d+)/watts", "W", None),
    ("CPU, memory", r"(cpu|memory)/percent", "%", 100.0),
    ("network", r"net/(\w+)_bytes_per_s", "B/s", None),
)


def _node_plots(
    told: Sequence[tuple[float, NodeMeasured]], span: tuple[float, float]
) -> list[tuple[str, str, str]]:
    """Return (title, mean, SVG) of each plot."""
    names = sorted({name for _, one in told for name in one.metrics})
    found = []
    for title, pattern, unit, most in GROUPS:
        mine = [(n, m[1]) for n in names if (m := re.fullmatch(pattern, n))][:16]
        traces = [
            PlotTrace(
                f"{title.split()[0]} {word}" if word.isdigit() else word,
                [t for t, one in told if name in one.metrics],
                [one.metrics[name] for _, one in told if name in one.metrics],
                f"t{i % 8}",
                unit=unit,
            )
            for i, (name, word) in enumerate(mine)
        ]
        frame = PlotFrame(
            title, "", height=130, width=SMALL, left=44, time=True, zero=True, most=most,
            x_range=span,
        )  # fmt: skip
        if drawn := plot(frame, traces, most_points=SMALL_POINTS):
            found.append((title, _mean_text(traces, unit), drawn))
    return found


def _mean_text(traces: Sequence[PlotTrace], unit: str) -> str:
    """Return the mean of all measured values with its unit, or ""."""
    values = [y for t in traces for y in t.ys if math.isfinite(y)]
    if not values:
        return ""
    mean = sum(values) / len(values)
    return f"{nbytes(mean)}/s" if unit == "B/s" else f"{mean:.0f} {unit}"
