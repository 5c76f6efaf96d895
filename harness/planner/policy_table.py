"""Comparison of policies on recorded markets: many beginnings of the same job, each replayed under
every policy, beside the optimum and on-demand.

Pure values; `run_table` computes them on many cores, `cli/simulate.py` prints them, and
`policy_report.py` draws them.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.controller import policies
from harness.core.world import BadInput, Policy
from harness.planner.market_nodes import ReplayJob
from harness.planner.market_replay import ReplayResult, replay
from harness.planner.optimum import Optimum, fleet_optimum_usd, optimum
from harness.planner.published_policies import PEERS, peer
from harness.planner.traces import ZoneTrace

FIXED = "fixed_"  # prefix of policies: uniform_progress on exactly that many nodes
BEST_FIXED = "best_fixed"  # the best of those, chosen afterwards
# in the order of a table; `deadline` is our own policy, included if it exists
USUAL = ("deadline", "uniform_progress", "greedy", "on_demand")


@dataclass(frozen=True)
class MarketWindow:
    """One beginning, at tick `first` of the market. `optimum`: over the same zones and the same
    time; None if it is not known for such a job. `on_demand_usd`: the bill of on-demand alone."""

    first: int
    result: ReplayResult
    optimum: Optimum | None
    on_demand_usd: float

    @property
    def over_optimum(self) -> float:
        """The bill as a multiple of the optimum's; of on demand's where there is no optimum."""
        return self.result.usd / (self.optimum.usd if self.optimum else self.on_demand_usd)


@dataclass(frozen=True)
class MarketRow:
    """One policy with one deadline (`job.deadline_h`) in all windows of one market. Its numbers are
    means over the windows."""

    market: str  # a key of `MarketTable.markets`
    policy: str
    job: ReplayJob
    windows: tuple[MarketWindow, ...]

    def mean(self, what: str) -> float:
        """Return the mean of an attribute of `ReplayResult`."""
        return statistics.fmean(getattr(w.result, what) for w in self.windows)

    @property
    def usd(self) -> float:
        return self.mean("usd")

    @property
    def optimum_usd(self) -> float | None:
        """Mean bill of the optimum; None if there is no optimum for such a job."""
        found = [w.optimum.usd for w in self.windows if w.optimum is not None]
        return statistics.fmean(found) if len(found) == len(self.windows) else None

    @property
    def on_demand_usd(self) -> float:
        return statistics.fmean(w.on_demand_usd for w in self.windows)

    @property
    def finish_h(self) -> float:
        """Hours until the work is done; infinite if it never is in some window."""
        return self.mean("finish_h")

    @property
    def missed(self) -> int:
        """Number of windows in which the work was not done by the deadline."""
        return sum(w.result.missed for w in self.windows)

    @property
    def over_optimum(self) -> tuple[float, float] | None:
        """The bill as a multiple of the optimum's: the mean over the windows, and the worst."""
        found = [w.over_optimum for w in self.windows if w.optimum is not None]
        return (statistics.fmean(found), max(found)) if found else None


@dataclass(frozen=True)
class MarketTable:
    """The whole comparison. `markets`: the aligned zones of each market, by name."""

    rows: tuple[MarketRow, ...]
    markets: Mapping[str, tuple[ZoneTrace, ...]] = field(default_factory=dict)


# ---- tasks ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class MarketTask:
    """One window under some policies."""

    market: str
    zones: tuple[ZoneTrace, ...] = field(repr=False)  # cut to what the window may need
    first: int  # in the whole market
    job: ReplayJob
    policies: tuple[str, ...]


@dataclass(frozen=True)
class TaskDone:
    """The results by policy, in the task's order."""

    results: tuple[tuple[str, ReplayResult], ...]
    optimum: Optimum | None


def usual_policies(job: ReplayJob) -> tuple[str, ...]:
    """Return the policies that are tried by default."""
    known = {*policies.POLICIES, *PEERS}
    more = (BEST_FIXED,) if job.nodes[1] > 1 else ()
    return (*(name for name in USUAL if name in known), *more)


def beginnings(zones: Sequence[ZoneTrace], deadline_h: float, starts: int) -> list[int]:
    """Return the ticks at which windows begin, spread evenly over the trace so that each window
    fits. Raises BadInput if none does."""
    tick_s, length = zones[0].tick_s, len(zones[0].nodes)
    last = length - math.ceil(deadline_h * 3600 / tick_s - 1e-9)
    if last < 0:
        raise BadInput(
            f"a deadline of {deadline_h:g} h does not fit into a trace of "
            f"{length * tick_s / 3600:.1f} h ({', '.join(z.zone for z in zones)}); give less "
            "--work and an earlier --deadline, or a longer trace"
        )
    count = min(starts, last + 1)
    return sorted({round(i * last / max(1, count - 1)) for i in range(count)})


def replay_tasks(
    markets: Mapping[str, Sequence[ZoneTrace]],
    jobs: Sequence[ReplayJob],
    names: Sequence[str],
    starts: int,
) -> list[MarketTask]:
    """Return a task for each market, deadline and beginning; beginnings are the same for all
    deadlines. Raises BadInput for what cannot work, before anything is computed."""
    for job in jobs:
        check_job(job)
        for name in names:
            if name != BEST_FIXED:
                policy_named(name, tick_s=60.0)
    found = list[MarketTask]()
    for market, zones in markets.items():
        begins = beginnings(zones, max(job.deadline_h for job in jobs), starts)
        for job in jobs:
            ticks = math.ceil(job.limit_h * 3600 / zones[0].tick_s) + 2
            for first in begins:
                cut = tuple(zone.cut(first, ticks) for zone in zones)
                found.append(MarketTask(market, cut, first, job, expanded(names, job)))
    return found


def check_job(job: ReplayJob) -> None:
    """Check that the work can be done in time on demand. Raises BadInput if not."""
    if not _can(job):
        least_h = job.work_h + job.changeover_s / 3600
        raise BadInput(
            f"{job.work_h:g} h of work and a begin of {job.changeover_s:g} s take {least_h:.4g} h "
            f"undisturbed; wanted a deadline after that, found {job.deadline_h:g} h"
        )


def expanded(names: Iterable[str], job: ReplayJob) -> tuple[str, ...]:
    """Replace BEST_FIXED by all numbers of nodes that can do the work in time."""
    found = list[str]()
    for name in names:
        if name != BEST_FIXED:
            found.append(name)
            continue
        counts = [n for n in range(1, job.nodes[1] + 1) if _can(fixed_job(job, n))]
        found += [f"{FIXED}{n}" for n in counts]
    return tuple(dict.fromkeys(found))


def _can(job: ReplayJob) -> bool:
    return job.work_h + job.changeover_s / 3600 <= job.deadline_h + 1e-9


def fixed_job(job: ReplayJob, nodes: int) -> ReplayJob:
    """Return the same work for a world of exactly this many nodes."""
    work_h = job.work_h * job.nodes[1] / nodes
    return dataclasses.replace(job, nodes=(nodes, nodes), work_h=work_h)


def policy_named(name: str, tick_s: float) -> Policy:
    """Return the policy as published if it is one of `published_policies.PEERS`, else as
    `harness launch` runs it. Raises BadInput."""
    if name.startswith(FIXED):
        number = name.removeprefix(FIXED)
        if not number.isdecimal() or not int(number):
            raise BadInput(f"policy {name!r}: wanted a number of nodes, such as {FIXED}4")
        name = "uniform_progress"
    if name in PEERS:
        return peer(name, tick_s)
    try:
        return policies.launched(name)
    except BadInput as e:
        raise BadInput(f"{e}; or a published one: {', '.join(PEERS)}, {BEST_FIXED}") from e


# ---- one window ----------------------------------------------------------------------------------
def done(task: MarketTask) -> TaskDone:
    """Replay a task under all its policies, and compute the optimum."""
    results = tuple((name, _replayed(task, name)) for name in task.policies)
    return TaskDone(results, optimum_of(task.zones, 0, task.job))


def _replayed(task: MarketTask, name: str) -> ReplayResult:
    job = task.job
    if name.startswith(FIXED):
        job = fixed_job(job, int(name.removeprefix(FIXED)))
    policy = policy_named(name, task.zones[0].tick_s)
    return replay(task.zones, 0, job, policy)


def optimum_of(zones: Sequence[ZoneTrace], first: int, job: ReplayJob) -> Optimum | None:
    """Return the optimum. A job of many nodes has no plan; with several zones its least bill is a
    lower bound (`optimum.py`)."""
    nodes, work = job.nodes[1], job.to_do(zones)
    if nodes == 1:
        return optimum(zones, first, work)
    usd = fleet_optimum_usd(zones, first, work, nodes, job.one_place)
    return Optimum(usd, (), math.nan)


def on_demand_usd(zones: Sequence[ZoneTrace], job: ReplayJob) -> float:
    """Return the bill of all nodes on demand where that is cheapest, undisturbed."""
    return job.undisturbed_usd(min(job.on_demand(zones)))


# ---- all of them ---------------------------------------------------------------------------------
def table(
    markets: Mapping[str, Sequence[ZoneTrace]],
    names: Sequence[str],
    found: Iterable[tuple[MarketTask, TaskDone]],
) -> MarketTable:
    """Return the table, with rows in the order of markets, deadlines and policies."""
    windows: dict[tuple[str, ReplayJob, str], list[MarketWindow]] = {}
    for task, ended in found:
        dear = on_demand_usd(task.zones, task.job)
        for name, result in ended.results:
            window = MarketWindow(task.first, result, ended.optimum, dear)
            windows.setdefault((task.market, task.job, name), []).append(window)
    rows = [MarketRow(m, name, job, tuple(w)) for (m, job, name), w in windows.items()]
    if BEST_FIXED in names:
        rows = _with_best_fixed(rows, {n for n in names if n != BEST_FIXED})
    return MarketTable(tuple(rows), {name: tuple(zones) for name, zones in markets.items()})


def _with_best_fixed(rows: Sequence[MarketRow], asked: set[str]) -> list[MarketRow]:
    """Replace the rows of fixed numbers of nodes by the best of each market and deadline: the one
    that misses the fewest deadlines, then costs the least."""
    best: dict[tuple[str, ReplayJob], MarketRow] = {}
    for row in rows:
        if row.policy.startswith(FIXED):
            kept = best.setdefault((row.market, row.job), row)
            if (row.missed, row.usd) < (kept.missed, kept.usd):
                best[row.market, row.job] = row
    return [
        row
        for row in rows
        if not row.policy.startswith(FIXED)
        or row.policy in asked
        or best[row.market, row.job] is row
    ]


# Many replays of recorded markets, on many cores.

# with so few replays, starting other processes takes longer
FEW_REPLAYS = 12


def run_table(
    markets: Mapping[str, Sequence[ZoneTrace]],
    jobs: Sequence[ReplayJob],
    names: Sequence[str],
    starts: int,
    processes: int = 0,
) -> MarketTable:
    """Run all policies from `starts` beginnings of each market, on `processes` cores (0 means all).
    Raises BadInput before anything is computed."""
    tasks = replay_tasks(markets, jobs, names, starts)
    ended = _each(tasks, processes or os.cpu_count() or 1)
    return table(markets, names, zip(tasks, ended, strict=True))


def _each(tasks: Sequence[MarketTask], processes: int) -> Iterator[TaskDone]:
    """Yield the results in the order of the tasks."""
    processes = min(processes, len(tasks))
    if processes <= 1 or sum(len(task.policies) for task in tasks) <= FEW_REPLAYS:
        yield from map(done, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(done, tasks)
