"""Many replays of recorded markets, on many cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence

from harness.market.traces import ZoneTrace
from harness.proof import market_table
from harness.proof.market_replay import ReplayJob
from harness.proof.market_table import MarketTable, MarketTask, TaskDone

# so many replays are over before other processes would have begun
FEW_REPLAYS = 12


def run_table(
    markets: Mapping[str, Sequence[ZoneTrace]],
    jobs: Sequence[ReplayJob],
    names: Sequence[str],
    starts: int,
    processes: int = 0,
) -> MarketTable:
    """All policies from `starts` beginnings of each market, on so many cores (0: all). Raises
    BadInput before anything is computed."""
    tasks = market_table.tasks(markets, jobs, names, starts)
    ended = _each(tasks, processes or os.cpu_count() or 1)
    return market_table.table(markets, names, zip(tasks, ended, strict=True))


def _each(tasks: Sequence[MarketTask], processes: int) -> Iterator[TaskDone]:
    """In their order."""
    processes = min(processes, len(tasks))
    if processes <= 1 or sum(len(task.policies) for task in tasks) <= FEW_REPLAYS:
        yield from map(market_table.done, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(market_table.done, tasks)
