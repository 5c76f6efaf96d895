"""`harness simulate --money`: what many simulated runs cost, and whether any broke its budget"""

from __future__ import annotations

import statistics
import time

from harness.proof.invariants import Violation
from harness.proof.sim_money import Bill, spend
from harness.proof.system.command import BrokenSeed, many


def one(seed: int) -> Bill | BrokenSeed:
    """A run."""
    try:
        return spend(seed)
    except Violation as e:
        return BrokenSeed(seed, str(e))


def command(seeds: int, seed: int | None, first: int, jobs: int) -> int:
    """Prints what came of it; 1 if a run cost too much or left something behind."""
    began_s = time.perf_counter()
    asked = range(first, first + seeds) if seed is None else [seed]
    found = list(many(asked, jobs, one))
    broken = [b for b in found if isinstance(b, BrokenSeed)]
    bills = [b for b in found if isinstance(b, Bill)]
    for b in broken:
        print(f"seed {b.seed}: {b.words}", flush=True)
    orphans = sum(not b.led for b in bills)
    shares = sorted(b.usd / b.budget_usd for b in bills)
    print(
        f"{len(found)} runs, {orphans} of which nobody led to their ends: {len(broken)} broke "
        "their budgets or left something behind"
    )
    if shares:
        print(
            f"spent of the budget: median {statistics.median(shares):.1%}, most {shares[-1]:.1%}; "
            f"{sum(b.controllers for b in bills)} controllers, {sum(b.nodes for b in bills)} nodes"
        )
    print(f"on {jobs} cores, in {time.perf_counter() - began_s:.0f} s")
    return 1 if broken else 0
