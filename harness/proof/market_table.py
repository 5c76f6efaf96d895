"""Policies against each other on recorded markets: many beginnings of the same job, each replayed
under every policy, beside the optimum and on-demand.

Pure values; `cli/simulate.py` prints them, and pictures are drawn of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.market.optimum import Optimum
from harness.market.traces import ZoneTrace
from harness.proof.market_replay import ReplayJob, ReplayResult


@dataclass(frozen=True)
class MarketWindow:
    """One beginning: at tick `first` of the market. `optimum`: over the same zones and the same
    time; None: there is none of this kind of job. `on_demand_usd`: the bill of on-demand alone."""

    first: int
    result: ReplayResult
    optimum: Optimum | None
    on_demand_usd: float


@dataclass(frozen=True)
class MarketRow:
    """One policy with one deadline (`job.deadline_h`) in all windows of one market. What it tells
    are means over the windows."""

    market: str  # a key of `MarketTable.markets`
    policy: str
    job: ReplayJob
    windows: tuple[MarketWindow, ...]

    @property
    def usd(self) -> float:
        return statistics.fmean(w.result.usd for w in self.windows)

    @property
    def optimum_usd(self) -> float | None:
        """None: there is no optimum of this kind of job."""
        found = [w.optimum.usd for w in self.windows if w.optimum is not None]
        return statistics.fmean(found) if len(found) == len(self.windows) else None

    @property
    def on_demand_usd(self) -> float:
        return statistics.fmean(w.on_demand_usd for w in self.windows)

    @property
    def finish_h(self) -> float:
        """Hours until the work is done; infinite if it never is in some window."""
        return statistics.fmean(w.result.finish_h for w in self.windows)

    @property
    def missed(self) -> int:
        """Windows in which the work was not done by the deadline."""
        return sum(w.result.missed for w in self.windows)


@dataclass(frozen=True)
class MarketTable:
    """All of it. `markets`: the aligned zones of each market, by name."""

    rows: tuple[MarketRow, ...]
    markets: Mapping[str, tuple[ZoneTrace, ...]] = field(default_factory=dict)
