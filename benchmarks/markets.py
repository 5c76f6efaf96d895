"""How fast markets are replayed: 48 hours, a month, a thousand nodes, and a decision on ten
thousand offers. Prints seconds of CPU; made-up markets, no network, no account.

    python benchmarks/markets.py [--quick]
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections.abc import Sequence

import numpy as np

from harness.controller import policies
from harness.core.estimates import Estimates
from harness.core.world import Offer, View
from harness.planner.market_nodes import ReplayJob
from harness.planner.market_replay import replay
from harness.planner.policy_table import policy_named
from harness.planner.traces import ZoneTrace

TICK_S = 600.0


def market(seed: int, hours: float, nodes: int) -> ZoneTrace:
    """A number of nodes that wanders."""
    rng, level, found = random.Random(seed), 0.8 * nodes, list[int]()
    for _ in range(int(hours * 3600 / TICK_S)):
        level = min(float(nodes), max(0.0, level + rng.gauss(0, max(0.3, nodes / 25))))
        found.append(int(level))
    return ZoneTrace("a", TICK_S, np.array(found))


def timed(what: str, job: ReplayJob, nodes: int, names: Sequence[str]) -> None:
    zone = market(2, job.limit_h, nodes)
    for name in names:
        began_s = time.process_time()
        ended = replay([zone], 0, job, policy_named(name, TICK_S))
        cpu_s = time.process_time() - began_s
        print(f"{what:28} {name:18} {cpu_s:7.2f} s  {ended.launches} launches", flush=True)


def decisions(offers: int) -> None:
    """One decision, with so many offers; the mean of ten."""
    found = tuple(sorted(Offer(1 + i % 977, f"c/r{i % 40}/z{i}", place=f"r{i % 40}")
                         for i in range(offers)))  # fmt: skip
    known = Estimates(total_steps=1000, work=48 * 3600.0, deadline_s=60 * 3600.0)
    for name in ("cheapest", "best_value", "deadline"):
        policy = policies.resolve(name)
        began_s = time.process_time()
        for at in range(10):
            policy(View(60.0 * at, 0.0, 1, 4, (), found, known=known))
        each_ms = (time.process_time() - began_s) * 100
        print(f"{f'decision on {offers} offers':28} {name:18} {each_ms:7.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast markets are replayed.")
    parser.add_argument("--quick", action="store_true", help="48 hours and decisions only")
    quick = parser.parse_args().quick
    both = ("uniform_progress", "deadline")
    timed("48 h, 1 node", ReplayJob(48, 60), 1, both)
    timed("48 h, 1 to 16 nodes", ReplayJob(48, 60, (1, 16)), 16, both)
    decisions(10_000)
    if not quick:
        timed("30 days, 1 node", ReplayJob(480, 720), 1, both)
        timed("48 h, 1 to 1000 nodes", ReplayJob(48, 60, (1, 1000)), 1000, ("cheapest", "deadline"))
        timed("72 h, 1 to 1000 nodes", ReplayJob(48, 72, (1, 1000)), 1000, ("deadline",))
        timed("30 days, 1 to 1000 nodes", ReplayJob(480, 720, (1, 1000)), 1000, ("cheapest",))
    print(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB at most")


if __name__ == "__main__":
    main()
