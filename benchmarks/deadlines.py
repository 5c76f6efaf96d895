"""What keeping a deadline costs: `deadline` beside Uniform Progress, greedy and the omniscient
optimum, through the real recovery loop, on made-up markets (`market/made_up.py`, whose kinds of
spells and weather `deadline` was not chosen on). 48 h of work, a changeover of 10 min, nothing
known at the beginning. Prints the sum of the bills as a multiple of the optimum's, with the error
of that ratio over markets, and deadlines missed. No network, no account.

    python benchmarks/deadlines.py [--quick] [--seed N]
"""

from __future__ import annotations

import argparse

import numpy as np

from harness.market.made_up import CALM, ROUGH, make_up, usual_zones
from harness.market.traces import ZoneTrace
from harness.proof.market_replay import ReplayJob
from harness.proof.market_runs import run_table
from harness.proof.market_table import MarketRow

WORK_H, TICK_S = 48.0, 600.0
POLICIES = ("deadline", "uniform_progress", "greedy")
SPREADS = ((1, 48), (4, 24), (9, 16))  # zones, markets of each weather


def markets(zones: int, count: int, seed: int) -> dict[str, list[ZoneTrace]]:
    """By name; half of them rough. A zone that never opens in a window is drawn again."""
    found: dict[str, list[ZoneTrace]] = {}
    for name, weather in (("calm", CALM), ("rough", ROUGH)):
        at = 0
        while sum(one.startswith(name) for one in found) < count:
            rng = np.random.default_rng((seed, zones, at))
            at += 1
            market = make_up(
                usual_zones(zones, rng), 1.5 * WORK_H + 1, rng, tick_s=TICK_S, weather=weather
            )
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
    asked = parser.parse_args()
    jobs = [
        ReplayJob(WORK_H, times * WORK_H, spot_usd_per_h=0.9731, on_demand_usd_per_h=3.06)
        for times in (1.08, 1.25, 1.5)
    ]
    for zones, count in SPREADS:
        found = markets(zones, max(2, count // 8) if asked.quick else count, asked.seed)
        table = run_table(found, jobs, POLICIES, starts=1)
        for job in jobs:
            words = [f"{zones} zones, {len(found)} markets, {job.deadline_h / WORK_H:.2f}x:"]
            for policy in POLICIES:
                rows = [r for r in table.rows if r.policy == policy and r.job == job]
                ratio, error = over(rows)
                missed = sum(row.missed for row in rows)
                words.append(f"{policy} {ratio:.3f} +- {error:.3f} ({missed} missed)")
            print("  ".join(words), flush=True)


if __name__ == "__main__":
    main()
