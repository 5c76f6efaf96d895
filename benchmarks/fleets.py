"""What a fleet costs that takes as many nodes as there are: `deadline` and the published elastic
policies beside the best fixed number of nodes, chosen afterwards for each market, and beside the
optimum, on made-up markets that have room for a part of the fleet only. 48 h of work on 16 nodes, a
changeover of 10 min, nothing known at the beginning. Prints the sum of the bills as a multiple of
the optimum's, with the error of that ratio over markets, the mean hours until the work was done,
and deadlines missed. No network, no account.

    python benchmarks/fleets.py [--quick] [--seed N] [--work H]
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
from deadlines import over

from harness.market.made_up import CALM, ROUGH, MadeUpZone, make_up
from harness.market.traces import ZoneTrace
from harness.proof.market_replay import ReplayJob
from harness.proof.market_runs import run_table
from harness.proof.market_table import BEST_FIXED, FIXED

NODES, BLOCKS, TICK_S = 16, 8, 600.0  # machines come and go in blocks of two
POLICIES = ("deadline", "uniform_progress", "greedy", BEST_FIXED)
TIMES = (1.08, 1.25, 1.5, 2.0)
# mean hours that a block is there, and away
ROOMS = {"a third of the fleet": (2.0, 4.0), "two thirds of the fleet": (4.0, 2.0)}


def markets(
    room: tuple[float, float], count: int, hours: float, seed: int
) -> dict[str, list[ZoneTrace]]:
    """Of one zone, by name; half of them rough."""
    found = {}
    for at in range(count):
        rng = np.random.default_rng((seed, round(10 * room[0]), at))
        zone = MadeUpZone("a", *room, nodes=NODES, blocks=BLOCKS)
        weather = ROUGH if at % 2 else CALM
        found[f"{at}"] = make_up([zone], hours, rng, tick_s=TICK_S, weather=weather)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the markets")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--work", type=float, default=24.0, help="hours on all nodes")
    asked = parser.parse_args()
    jobs = [
        ReplayJob(
            asked.work,
            times * asked.work,
            (1, NODES),
            spot_usd_per_h=0.9731,
            on_demand_usd_per_h=3.06,
        )
        for times in TIMES
    ]
    for words, room in ROOMS.items():
        count = 3 if asked.quick else 12
        found = markets(room, count, max(TIMES) * asked.work + 1, asked.seed)
        open_share = statistics.fmean(float(z.nodes.mean()) / NODES for (z,) in found.values())
        print(f"room for {words} ({open_share:.0%} on average), {count} markets", flush=True)
        table = run_table(found, jobs, POLICIES, starts=1)
        for times, job in zip(TIMES, jobs, strict=True):
            for policy in POLICIES:
                name = FIXED if policy == BEST_FIXED else policy
                rows = [r for r in table.rows if r.policy.startswith(name) and r.job == job]
                ratio, error = over(rows)
                done_h = statistics.fmean(row.finish_h for row in rows)
                missed = sum(row.missed for row in rows)
                of = ""
                if name == FIXED:
                    sizes = [int(row.policy.removeprefix(FIXED)) for row in rows]
                    of = f", {min(sizes)} to {max(sizes)} nodes"
                print(
                    f"  {times:.2f}x  {policy:17} {ratio:.3f} +- {error:.3f}  done after "
                    f"{done_h:.1f} h, {missed} missed{of}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
