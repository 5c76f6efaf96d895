"""The page's sections on speed and hardware, from what ranks and nodes measured of themselves."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import median

from harness.core.facts import PHASES, NodeMeasured, StepsTimed
from harness.views.charts import shades, timed
from harness.views.page_html import PageSection, html_table, numbers, section, stack
from harness.views.plots import PlotFrame, PlotTrace, esc, legend, plot
from harness.views.summary import Summary
from harness.views.words import duration, nbytes, percent, plural

SMALL = 330.0  # width of a small plot
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
def step_time(s: Summary) -> PageSection | None:
    told = [t for t in timed(s) if sum(t.seconds.values()) > 0]
    if not told:
        return None
    phases = [p for p in PHASES if any(t.seconds.get(p) for t in told)]
    count = sum(t.last - t.first + 1 for t in told)
    mean = {
        p: sum(t.seconds.get(p, 0.0) * (t.last - t.first + 1) for t in told) / count for p in phases
    }
    whole = sum(mean.values())
    bar = [(f"p-{p}", v / whole, f"{p}: {percent(v / whole)}") for p, v in mean.items() if v > 0]
    rows = [
        [f"<u class='p-{p}'></u>{p}", PHASE_MEANING[p], percent(v / whole), duration(v)]
        for p, v in mean.items()
        if v > 0
    ]
    rows.append(["<b>one step</b>", "", "100 %", f"<b>{duration(whole)}</b>"])
    table = html_table(["", "", "share", "mean of a step"], rows, right={2, 3})
    body = stack(bar) + table + _over_steps(s, told, phases) + _spreads(s, told)
    return section("Step time", body, "mean over steps and ranks, as the ranks measured it")


def _over_steps(s: Summary, told: Sequence[StepsTimed], phases: Sequence[str]) -> str:
    """Phases one above the other."""
    xs = [(t.first + t.last) / 2 for t in told]
    below, traces = [0.0] * len(told), list[PlotTrace]()
    for p in phases:
        above = [b + t.seconds.get(p, 0.0) for b, t in zip(below, told, strict=True)]
        traces.append(PlotTrace(p, xs, above, f"p-{p}", below, unit="s"))
        below = above
    drawn = plot(PlotFrame("step time over steps", height=210, zero=True), traces)
    keys = legend(*(("box", f"p-{p}", p) for p in phases))
    return f"<h3>Over steps {keys}</h3>{drawn}" if len(told) > 1 else ""


def _spreads(s: Summary, told: Sequence[StepsTimed]) -> str:
    """A rank's own time in a step: all but waiting for others."""
    spread = [t for t in told if len(t.own_s) == 3]
    if not spread:
        return ""
    xs = [(t.first + t.last) / 2 for t in spread]
    traces = [
        PlotTrace("ranks", xs, [t.own_s[2] for t in spread], "t2", [t.own_s[0] for t in spread]),
        PlotTrace("median rank", xs, [t.own_s[1] for t in spread], "t2", unit="s"),
    ]
    frame = PlotFrame("own time of ranks", height=170, zero=True)
    drawn = plot(frame, traces, shades(s)) if len(spread) > 1 else ""
    slowest = [t.own_ranks[-1] for t in spread if t.own_ranks]
    often = max(set(slowest), key=slowest.count) if slowest else None
    excess = median(t.own_s[2] / t.own_s[1] - 1 for t in spread if t.own_s[1] > 0)
    rows = [("slowest rank", f"{percent(excess)} longer than the median rank, by the median")]
    if often is not None and len(set(slowest)) > 1:
        share = slowest.count(often) / len(slowest)
        rows.append(("most often slowest", f"rank {often} ({percent(share)} of the time)"))
    keys = legend(("band", "t2", "least to most"), ("line", "t2", "median"))
    return f"<h3>A rank's own time in a step {keys}</h3>{drawn}{numbers(rows)}"


def scaling(s: Summary) -> PageSection | None:
    """Steps per second by the size of the world, against the smallest one's."""
    by_world: dict[int, list[float]] = {}
    worlds = {e.epoch: e.world for e in s.ledger.epochs}
    for p in s.curve:
        if p.seconds > 0 and worlds.get(p.epoch):
            by_world.setdefault(worlds[p.epoch], []).append(p.seconds)
    if len(by_world) < 2:
        return None
    speed = {world: 1.0 / median(found) for world, found in sorted(by_world.items())}
    least = min(speed)
    ideal = {world: speed[least] * world / least for world in speed}
    xs = list(speed)
    frame = PlotFrame("speed by ranks", "ranks", height=210, width=620.0, zero=True)
    traces = [
        PlotTrace("in proportion", xs, [ideal[w] for w in xs], "dim", unit="steps/s"),
        PlotTrace("measured", xs, [speed[w] for w in xs], "t0", dots=True, unit="steps/s"),
    ]
    rows = [
        [
            plural(w, "rank"),
            f"{len(by_world[w]):,}",
            f"{speed[w]:.3g}",
            f"{speed[w] * s.tokens_per_step:,.0f}" if s.tokens_per_step else "–",
            percent(speed[w] / ideal[w]),
        ]
        for w in xs
    ]
    head = ["world", "steps", "steps/s", "tokens/s", "efficiency"]
    note = f"median step of each world; efficiency against {plural(least, 'rank')}"
    table = html_table(head, rows, right={1, 2, 3, 4})
    return section("Scaling", f"<div class=two>{plot(frame, traces)}{table}</div>", note)


# ---- hardware ------------------------------------------------------------------------------------
def hardware(s: Summary) -> PageSection | None:
    """Small plots of every node, all with the same axis of time."""
    measured: dict[str, list[tuple[float, NodeMeasured]]] = {}
    for x in s.facts:
        if isinstance(x.fact, NodeMeasured):
            measured.setdefault(x.fact.member, []).append((x.t - s.started_s, x.fact))
    if not measured:
        return None
    name_of = {m: a.name for a in s.ledger.attempts for m in a.members}
    busiest = sorted(measured, key=lambda m: -len(measured[m]))[:NODES_SHOWN]
    span = (0.0, max(1.0, s.ended_s - s.started_s))
    shown = []
    for member in sorted(busiest, key=lambda m: measured[m][0][0]):
        plots = _node_plots(measured[member], span)
        name = esc(f"node {name_of.get(member, member)}")
        shown.append(f"<h3>{name}</h3><div class=smalls>{''.join(plots)}</div>")
    left_out = len(measured) - len(busiest)
    more = f"; {plural(left_out, 'node')} with fewer measurements left out" if left_out else ""
    return section("Hardware", "".join(shown), f"means between two measurements{more}")


GROUPS = (  # title, names, unit, the axis goes so far at least
    ("GPU busy", r"gpu(\d+)/percent", "%", 100.0),
    ("GPU memory", r"gpu(\d+)/memory_percent", "%", 100.0),
    ("GPU temperature", r"gpu(\d+)/celsius", "°C", 90.0),
    ("GPU power", r"gpu(\d+)/watts", "W", None),
    ("CPU and memory", r"(cpu|memory)/percent", "%", 100.0),
    ("network", r"net/(\w+)_bytes_per_s", "B/s", None),
)


def _node_plots(told: Sequence[tuple[float, NodeMeasured]], span: tuple[float, float]) -> list[str]:
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
            last = _last_words(traces, unit)
            found.append(f"<figure><figcaption>{title} <i>{last}</i></figcaption>{drawn}</figure>")
    return found


def _last_words(traces: Sequence[PlotTrace], unit: str) -> str:
    """The mean over all that was measured."""
    values = [y for t in traces for y in t.ys if math.isfinite(y)]
    if not values:
        return ""
    mean = sum(values) / len(values)
    return esc(f"mean {nbytes(mean)}/s" if unit == "B/s" else f"mean {mean:.0f} {unit}")
