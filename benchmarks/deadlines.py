"""What keeping a deadline costs: `deadline` beside Uniform Progress, greedy and the omniscient
optimum, through the real recovery loop, on made-up markets (`planner/synthetic_market.py`, whose
kinds of spells and weather `deadline` was not chosen on). 48 h of work, a changeover of 10 min,
nothing known at the beginning. Prints the sum of the bills as a multiple of the optimum's, with
the error of that ratio over markets, and deadlines missed. No network, no account.

With `--swing`, prices of spot wander with that standard deviation of their logarithm, and
`deadline` is beside itself where it takes prices as they are.

    python benchmarks/deadlines.py [--quick] [--seed N] [--swing 0.3]
"""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np

from harness.controller.deadline_policy import deadline
from harness.core.world import Decision, View
from harness.planner.market_nodes import ReplayJob
from harness.planner.policy_table import MarketRow, run_table
from harness.planner.synthetic_market import CALM, ROUGH, make_up, usual_zones
from harness.planner.traces import ZoneTrace

WORK_H, TICK_S = 48.0, 600.0
POLICIES = ("deadline", "uniform_progress", "greedy")
SPOT_USD_PER_H, ON_DEMAND_USD_PER_H = 0.9731, 3.06
SPREADS = ((1, 48), (4, 24), (9, 16))  # zones, markets of each weather


def prices_stand_still(view: View) -> Decision:
    """`deadline`, which takes prices as they are now."""
    known = dataclasses.replace(view.known, prices={})
    return deadline(dataclasses.replace(view, known=known))


def markets(
    zones: int, count: int, seed: int, hours: float, swing: float
) -> dict[str, list[ZoneTrace]]:
    """By name; half of them rough. A zone that never opens in a window is drawn again."""
    found: dict[str, list[ZoneTrace]] = {}
    for name, weather in (("calm", CALM), ("rough", ROUGH)):
        at = 0
        while sum(one.startswith(name) for one in found) < count:
            rng = np.random.default_rng((seed, zones, at))
            at += 1
            made = usual_zones(zones, rng, usd_per_h=SPOT_USD_PER_H if swing else None)
            if swing:
                moves = {"price_swing": swing, "most_usd_per_h": ON_DEMAND_USD_PER_H}
                made = [dataclasses.replace(zone, **moves) for zone in made]
            market = make_up(made, hours, rng, tick_s=TICK_S, weather=weather)
            if all(zone.nodes.any() for zone in market):
                found[f"{name} {at}"] = market
    return found


def over(rows: list[MarketRow]) -> tuple[float, float]:
    """Bills over optima, summed, and the standard error of that (over markets, by resampling)."""
    usd = np.array([row.usd for row in rows])
    least = np.array([row.optimum_usd for row in rows])
    drawn = np.random.default_rng(0).integers(0, len(rows), (2000, len(rows)))
    again = usd[drawn].sum(axis=1) / least[drawn].sum(axis=1)
    return float(usd.sum() / least.sum()), float(again.std())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="an eighth of the markets")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--swing", type=float, default=0.0, help="of prices of spot")
    asked = parser.parse_args()
    factors = (1.25, 1.5, 2.5) if asked.swing else (1.08, 1.25, 1.5)
    named = ("deadline", "deadlines:prices_stand_still") if asked.swing else POLICIES
    jobs = [
        ReplayJob(
            WORK_H,
            times * WORK_H,
            spot_usd_per_h=SPOT_USD_PER_H,
            on_demand_usd_per_h=ON_DEMAND_USD_PER_H,
        )
        for times in factors
    ]
    for zones, count in SPREADS:
        count = max(2, count // (8 if asked.quick else 4 if asked.swing else 1))
        found = markets(zones, count, asked.seed, max(factors) * WORK_H + 1, asked.swing)
        table = run_table(found, jobs, named, starts=1)
        for job in jobs:
            words = [f"{zones} zones, {len(found)} markets, {job.deadline_h / WORK_H:.2f}x:"]
            for policy in named:
                rows = [r for r in table.rows if r.policy == policy and r.job == job]
                ratio, error = over(rows)
                missed = sum(row.missed for row in rows)
                words.append(f"{policy} {ratio:.3f} +- {error:.3f} ({missed} missed)")
            print("  ".join(words), flush=True)


if __name__ == "__main__":
    main()
