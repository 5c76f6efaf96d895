"""What a fleet costs that takes as many nodes as there are: `deadline` and the published elastic
policies beside the best fixed number of nodes, chosen afterwards for each market, and beside the
optimum, on made-up markets that have room for a part of the fleet only. 48 h of work on 16 nodes, a
changeover of 10 min, nothing known at the beginning. Prints the sum of the bills as a multiple of
the optimum's, with the error of that ratio over markets, the mean hours until the work was done,
and deadlines missed. No network, no account.

With `--swing`, prices of spot wander with that standard deviation of their logarithm, change every
four hours, and are known for `--known` hours before; `deadline` is beside itself where it takes
prices as they are, whose bill is the 1 then, on fleets of four nodes.

    python benchmarks/fleets.py [--quick] [--seed N] [--work H] [--swing 0.3] [--known 480]
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics

import numpy as np
from deadlines import over, prices_stand_still

from harness.controller.deadline_policy import deadline
from harness.controller.forecast.price_process import PricePath
from harness.planner.fast_replay import play
from harness.planner.market_nodes import ReplayJob
from harness.planner.policy_table import BEST_FIXED, FIXED, run_table
from harness.planner.synthetic_market import CALM, ROUGH, MadeUpZone, make_up
from harness.planner.traces import ZoneTrace

NODES, BLOCKS, TICK_S = 16, 8, 600.0  # machines come and go in blocks of two
POLICIES = ("deadline", "uniform_progress", "greedy", BEST_FIXED)
TIMES = (1.08, 1.25, 1.5, 2.0)
# mean hours that a block is there, and away
ROOMS = {"a third of the fleet": (2.0, 4.0), "two thirds of the fleet": (4.0, 2.0)}
SPOT_USD_PER_H, ON_DEMAND_USD_PER_H = 0.9731, 3.06
# with prices that wander
FEW, PRICED_TICK_S, SAME = 4, 1800.0, 8  # ticks from one price to the next
PRICED_TIMES, PRICED_ZONES = (1.5, 2.0, 3.0), (1, 4)
PRICED_ROOMS = {"two thirds of the fleet": (4.0, 2.0), "nearly all of it": (30.0, 1.0)}


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


def priced(
    room: tuple[float, float],
    zones: int,
    hours: float,
    swing: float,
    known_h: float,
    seed: tuple[int, ...],
) -> tuple[list[ZoneTrace], dict[str, PricePath]]:
    """A market of so many zones whose prices wander, and what is known of them before."""
    rng, first = np.random.default_rng(seed), int(known_h * 3600 / PRICED_TICK_S)
    prices = {"price_swing": swing, "most_usd_per_h": ON_DEMAND_USD_PER_H}
    asked = [
        MadeUpZone(f"{at}", *room, nodes=FEW, blocks=2, usd_per_h=SPOT_USD_PER_H, **prices)
        for at in range(zones)
    ]
    weather = ROUGH if seed[-1] % 2 else CALM
    found, before = [], {}
    for zone in make_up(asked, known_h + hours, rng, tick_s=PRICED_TICK_S, weather=weather):
        assert zone.usd_per_h is not None
        usd = zone.usd_per_h[np.arange(len(zone.nodes)) // SAME * SAME]
        found.append(dataclasses.replace(zone, nodes=zone.nodes[first:], usd_per_h=usd[first:]))
        before[zone.zone] = tuple(
            (PRICED_TICK_S * (at - first), float(usd[at])) for at in range(0, first, SAME)
        )
    return found, before


def wandering(swing: float, known_h: float, work_h: float, count: int, seed: int) -> None:
    """What it is worth to a fleet that prices wander."""
    for zones in PRICED_ZONES:
        for words, room in PRICED_ROOMS.items():
            print(f"{zones} zones with room for {words}, {count} markets", flush=True)
            for times in PRICED_TIMES:
                job = ReplayJob(work_h, times * work_h, (1, FEW), 600.0, 0.0, 0.0,
                                SPOT_USD_PER_H, ON_DEMAND_USD_PER_H)  # fmt: skip
                usd, hours, missed = [], [], 0
                for at in range(count):
                    seeds = (seed, zones, round(room[0]), at)
                    market, before = priced(room, zones, job.deadline_h + 1, swing, known_h, seeds)
                    both = [
                        play(market, 0, job, policy, prices=before if known_h else None)
                        for policy in (deadline, prices_stand_still)
                    ]
                    usd.append([ended.usd for ended in both])
                    hours.append([ended.finish_h for ended in both])
                    missed += sum(ended.missed for ended in both)
                waits, still = np.array(usd).T
                drawn = np.random.default_rng(0).integers(0, count, (2000, count))
                again = waits[drawn].sum(axis=1) / still[drawn].sum(axis=1)
                done = np.mean(hours, axis=0)
                print(
                    f"  {times:.2f}x  {waits.sum() / still.sum():.3f} +- {again.std():.3f}  "
                    f"done after {done[0]:.1f} h (without waits {done[1]:.1f}), {missed} missed; "
                    f"cheaper {np.sum(waits < still - 1e-6)}, dearer "
                    f"{np.sum(waits > still + 1e-6)}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the markets")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--work", type=float, default=24.0, help="hours on all nodes")
    parser.add_argument("--swing", type=float, default=0.0, help="of prices of spot")
    parser.add_argument("--known", type=float, default=480.0, help="hours of prices before")
    asked = parser.parse_args()
    if asked.swing:
        wandering(asked.swing, asked.known, asked.work, 6 if asked.quick else 24, asked.seed)
        return
    jobs = [
        ReplayJob(
            asked.work,
            times * asked.work,
            (1, NODES),
            spot_usd_per_h=SPOT_USD_PER_H,
            on_demand_usd_per_h=ON_DEMAND_USD_PER_H,
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
