"""Recorded markets: how many nodes could be had in each zone, tick by tick, and at what price.

Pure: it knows no files; `trace_formats.py` reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from harness.core.world import BadInput

Counts: TypeAlias = NDArray[np.int64]
Prices: TypeAlias = NDArray[np.float64]

MOST_TICKS = 5_000_000
MOST_NODES = 1_000_000
MOST_USD_PER_H = 10_000.0  # of one node
LEAST_TICK_S, MOST_TICK_S = 1.0, 86_400.0


@dataclass(frozen=True)
class ZoneTrace:
    """The trace of one zone. `nodes`: how many could be had at once in each tick, int64 (n,).
    `usd_per_h`: of one, float64 (n,); None: the trace has no prices. `start_s`: seconds since 1970;
    0: unknown. `on_demand_usd_per_h`: of a node on demand there; None: the job's price."""

    zone: str
    tick_s: float
    nodes: Counts
    usd_per_h: Prices | None = None
    start_s: float = 0.0
    on_demand_usd_per_h: float | None = None

    @property
    def hours(self) -> float:
        return len(self.nodes) * self.tick_s / 3600

    @property
    def availability(self) -> float:
        """Share of time in which at least one node could be had."""
        return float((self.nodes > 0).mean()) if len(self.nodes) else 0.0

    def on_demand(self, otherwise: float) -> float:
        """Return USD per hour of a node on demand there. `otherwise`: where it has no own price."""
        return otherwise if self.on_demand_usd_per_h is None else self.on_demand_usd_per_h

    def cut(self, first: int, ticks: int) -> ZoneTrace:
        """Return `ticks` ticks from `first` on, or fewer at the trace's end."""
        there, prices = slice(first, first + ticks), self.usd_per_h
        return dataclasses.replace(
            self, nodes=self.nodes[there], usd_per_h=None if prices is None else prices[there]
        )


def check_trace(trace: ZoneTrace, name: str) -> None:
    """Raise BadInput for a trace that no market can have."""
    where, n = f"{name}, zone {trace.zone}", len(trace.nodes)
    if not LEAST_TICK_S <= trace.tick_s <= MOST_TICK_S:
        raise BadInput(
            f"{where}: a tick of {trace.tick_s:g} s; wanted {LEAST_TICK_S:g} to {MOST_TICK_S:g} s "
            "(gap_seconds is in seconds, not in minutes or milliseconds)"
        )
    if not 1 <= n <= MOST_TICKS:
        raise BadInput(f"{where}: wanted 1 to {MOST_TICKS} ticks, found {n}")
    if trace.nodes.min() < 0 or trace.nodes.max() > MOST_NODES:
        raise BadInput(
            f"{where}: wanted 0 to {MOST_NODES} nodes in each tick, found {trace.nodes.min()} to "
            f"{trace.nodes.max()}"
        )
    if trace.usd_per_h is not None:
        if len(trace.usd_per_h) != n:
            raise BadInput(f"{where}: {n} ticks, but {len(trace.usd_per_h)} prices")
        low, high = trace.usd_per_h.min(), trace.usd_per_h.max()
        if not 0 < low <= high <= MOST_USD_PER_H:
            raise BadInput(
                f"{where}: wanted prices above 0 to {MOST_USD_PER_H:g} USD per hour, found "
                f"{low:g} to {high:g}"
            )


def zone_names(files: Sequence[str]) -> list[str]:
    """Return a name for the zone of each file, as short as unambiguous: the file's name, else with
    the folders above it that also differ ("us-east-1a" of "us-east-1a/0.json")."""
    parts = [file.strip("/").split("/") for file in files]
    stems = [[*folders, last.partition(".")[0]] for *folders, last in parts]
    # a part that all paths share, at one place counted from the end, distinguishes nothing
    depth = min(map(len, stems), default=0)
    differ = [i for i in range(1, depth + 1) if len({stem[-i] for stem in stems}) > 1]
    for many in range(1, len(differ) + 1):
        found = ["/".join(stem[-i] for i in reversed(differ[:many])) for stem in stems]
        if len(set(found)) == len(found):
            return found
    return [stem[-1] for stem in stems]


def aligned(traces: Iterable[ZoneTrace]) -> list[ZoneTrace]:
    """Return the zones of one market over the time that all of them cover, with one tick. Zones
    without a start time are assumed to start together. Raises BadInput."""
    found = list(traces)
    if not found:
        raise BadInput("wanted at least one trace")
    if len({t.zone for t in found}) < len(found):
        names = sorted(t.zone for t in found)
        raise BadInput(f"wanted a name for each zone, found {', '.join(names)}; use --zone")
    _check_ticks(found)
    tick_s = max(t.tick_s for t in found)
    known = [t.start_s for t in found if t.start_s]
    begin_s = max(known, default=0.0)
    if known and len(known) < len(found):
        raise BadInput(
            "some of these traces say when they begin, and some do not; wanted all or none"
        )
    ends_s = [(t.start_s or 0.0) + len(t.nodes) * t.tick_s for t in found]
    ticks = int((min(ends_s) - begin_s) / tick_s + 1e-6)
    if ticks < 1:
        raise BadInput(
            "these traces have no time in common: "
            + ", ".join(f"{t.zone} from {_date(t.start_s)} for {t.hours:.1f} h" for t in found)
        )
    cut = [_cut(t, begin_s, tick_s, ticks) for t in found]
    if not any(t.nodes.any() for t in cut):
        raise BadInput(
            f"{', '.join(t.zone for t in found)}: no node can be had at any time; is the polarity "
            "the other one? (--polarity preempted: 1 means that none can)"
        )
    return cut


def _check_ticks(traces: list[ZoneTrace]) -> None:
    """Raise BadInput for equally many ticks of different lengths: one of the lengths is wrong."""
    least, most = (pick(traces, key=lambda t: t.tick_s) for pick in (min, max))
    fewer, more = sorted((len(least.nodes), len(most.nodes)))
    if most.tick_s > 1.5 * least.tick_s and more <= 1.05 * fewer and fewer > 20:
        raise BadInput(
            f"{least.zone} has {len(least.nodes)} ticks of {least.tick_s:g} s, and {most.zone} has "
            f"{len(most.nodes)} of {most.tick_s:g} s: as many, but of another length; mend the "
            "tick (gap_seconds) of one of them"
        )


def _date(moment_s: float) -> str:
    if not moment_s:
        return "an unknown begin"
    return f"{datetime.fromtimestamp(moment_s, timezone.utc):%Y-%m-%d %H:%M}"


def _cut(t: ZoneTrace, begin_s: float, tick_s: float, ticks: int) -> ZoneTrace:
    first = (begin_s - t.start_s) if t.start_s else 0.0
    at = np.minimum(
        ((first + np.arange(ticks) * tick_s) / t.tick_s + 1e-9).astype(np.int64), len(t.nodes) - 1
    )
    prices = None if t.usd_per_h is None else t.usd_per_h[at]
    return ZoneTrace(t.zone, tick_s, t.nodes[at], prices, begin_s)
