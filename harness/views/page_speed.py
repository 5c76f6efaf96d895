"""The page's sections on speed and hardware, from what ranks and nodes measured of themselves."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from harness.core.facts import NodeMeasured
from harness.views.charts import over_steps, shades, step_ends, windows
from harness.views.page_html import PageSection, html_table, numbers, section, stack
from harness.views.plots import PlotFrame, PlotTrace, esc, legend, plot
from harness.views.summary import Summary
from harness.views.words import nbytes, percent, plural

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
def step_time(s: Summary) -> PageSection | None:
    whole = s.speed.step_s
    if whole <= 0:
        return None
    split = {p: v for p, v in s.speed.seconds.items() if v > 0}
    bar = [(f"p-{p}", v / whole, f"{p}: {percent(v / whole)}") for p, v in split.items()]
    rows = [
        [
            f"<u class='p-{p}'></u>{p}<small>{PHASE_MEANING.get(p, '')}</small>",
            percent(v / whole),
            _ms(v),
        ]
        for p, v in split.items()
    ]
    rows.append(["<b>one step</b>", "100 %", f"<b>{_ms(whole)}</b>"])
    table = html_table(["", "share", "mean of a step"], rows, right={1, 2})
    both = f"<div class=two>{table}{numbers(_rates(s))}</div>"
    body = stack(bar) + both + _over_steps(s, list(split)) + _spreads(s)
    return section("Step time", body, "mean over steps and ranks, as the ranks measured it")


def _ms(seconds: float) -> str:
    """As finely as steps are compared."""
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
        rows.append((f"epoch {slow.epoch}: rank {slow.rank} is the slowest", f"{words} windows"))
    for one in found.profiles[-8:]:
        steps = f"rank {one.rank}, steps {one.first}–{one.last}, {nbytes(one.nbytes)}"
        rows.append(("profile", f"{steps}: {', '.join(one.keys)}"))
    return rows


def _over_steps(s: Summary, phases: Sequence[str]) -> str:
    """Phases one above the other."""
    told = windows(s)
    xs = step_ends(told)
    below, traces = [0.0] * len(xs), list[PlotTrace]()
    for p in phases:
        own = over_steps(told, lambda w, p=p: w.seconds.get(p, 0.0))  # type: ignore[misc]
        above = [b + v for b, v in zip(below, own, strict=True)]
        traces.append(PlotTrace(p, xs, above, f"p-{p}", below, unit="s", shown=own))
        below = above
    drawn = plot(PlotFrame("step time over steps", height=210, zero=True), traces)
    keys = legend(*(("box", f"p-{p}", p) for p in phases))
    return f"<h3>Over steps {keys}</h3>{drawn}" if len(told) > 1 else ""


def _spreads(s: Summary) -> str:
    """A rank's own time in a step: all but waiting for others."""
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
    keys = legend(("band", "t2", "least to most"), ("line", "t2", "median"))
    drawn = plot(frame, traces, shades(s))
    return f"<h3>A rank's own time in a step, without waiting for others {keys}</h3>{drawn}"


def scaling(s: Summary) -> PageSection | None:
    """Speed by the size of the world, against the smallest one's."""
    worlds = [w for w in s.speed.worlds if w.step_s > 0]
    if len(worlds) < 2:
        return None
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
    head = ["world", "steps", "a step", "tokens/s", "MFU", "efficiency"]
    note = f"median step of each world; efficiency: speed per rank against {least.world}"
    table = html_table(head, rows, right={1, 2, 3, 4, 5})
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
    return section(
        "Hardware", "".join(shown), f"between two measurements; beside each name its mean{more}"
    )


GROUPS = (  # title, names, unit, the axis goes so far at least
    ("GPU busy", r"gpu(\d+)/percent", "%", 100.0),
    ("GPU memory", r"gpu(\d+)/memory_percent", "%", 100.0),
    ("GPU heat", r"gpu(\d+)/celsius", "°C", 90.0),
    ("GPU power", r"gpu(\d+)/watts", "W", None),
    ("CPU, memory", r"(cpu|memory)/percent", "%", 100.0),
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
    return esc(f"{nbytes(mean)}/s" if unit == "B/s" else f"{mean:.0f} {unit}")
