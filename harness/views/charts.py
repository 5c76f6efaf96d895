"""The page's charts over steps: the loss with its worlds, and the gradient's norm."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from harness.core.facts import GuardTripped, SessionStarted
from harness.views.plots import PlotFrame, PlotShade, PlotTrace, legend, plot
from harness.views.speed import SpeedWindow
from harness.views.summary import Point, Summary
from harness.views.timeline import by_epoch
from harness.views.words import plural, spread

LOSS_POINTS = 1500
MOST_SHADES = 300
NOTE_LETTERS = 200


def loss_chart(s: Summary) -> str:
    """The loss over steps, its worlds shaded; empty if there is none."""
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
    """What people wrote, at the step that it is about, or that was done last when they wrote it."""
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
        yield _trace(f"lost with epoch {epoch}", mine, "lost")


def _rank_band(s: Summary) -> Iterator[PlotTrace]:
    """Least and most of all ranks, means over some steps; of the lineage only."""
    told = [w for w in windows(s) if w.loss]
    if any(w.loss.least < w.loss.most for w in told if w.loss):
        high = over_steps(told, lambda w: w.loss.most if w.loss else math.nan)
        low = over_steps(told, lambda w: w.loss.least if w.loss else math.nan)
        yield PlotTrace("ranks", step_ends(told), high, "accent", low)


def step_ends(told: Sequence[SpeedWindow]) -> list[float]:
    """Where windows begin and end: a value of a window counts for all of its steps."""
    return [float(step) for w in told for step in (w.first, w.last)]


def over_steps(told: Sequence[SpeedWindow], value: Callable[[SpeedWindow], float]) -> list[float]:
    """A value of each window, for `step_ends`."""
    return [v for w in told for v in (value(w),) * 2]


def windows(s: Summary) -> list[SpeedWindow]:
    """Step times as they were told, by step, without those that a later world took back."""
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
    """The worlds that made the lineage, and what was lost."""
    biggest = max([1, *(e.world for e in s.ledger.epochs)])
    mine_of = by_epoch(s.curve)
    found: list[PlotShade] = []
    for e in s.ledger.epochs:
        mine = [p.step for p in mine_of.get(e.epoch, [])]
        if mine:
            accumulation = f", accumulation {e.accumulation}" if e.accumulation else ""
            micro = f"; micro-batches {spread(e.shares)}" if e.shares else ""
            tip = f"epoch {e.epoch}: {plural(e.world, 'rank')}{accumulation}{micro}"
            strength = 0.35 + 0.65 * e.world / biggest
            ranks = plural(e.world, "rank")
            found.append(PlotShade(min(mine) - 0.5, max(mine) + 0.5, tip, "world", strength, ranks))
    for epoch, lost in sorted(by_epoch(s.lost).items()):
        first, last = lost[0].step, lost[-1].step
        tip = f"epoch {epoch}: steps {first}–{last} were lost and done again"
        found.append(PlotShade(first - 0.5, last + 0.5, tip, "lostband", 0.16))
    if len(found) > MOST_SHADES:  # of very many those that an eye can see
        found = sorted(found, key=lambda s: s.begin - s.end)[:MOST_SHADES]
    return sorted(found, key=lambda s: (s.tone != "world", s.begin))


def loss_legend(s: Summary) -> str:
    keys = [("line", "accent", "training loss (committed steps)")]
    if any(w.loss for w in s.speed.windows):
        keys.append(("band", "accent", "least to most of all ranks"))
    if s.lost:
        keys.append(("line", "lost", "lost and redone"))
    if s.validation:
        keys.append(("dot", "val", s.validation_name.replace("_", " ")))
    if s.logbook.entries:
        keys.append(("box", "note-mark", "logbook"))
    return legend(*keys, ("box", "world", "stronger shade: more ranks"))


def norm_chart(s: Summary) -> str:
    """The gradient's norm, with what the guards stopped."""
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
