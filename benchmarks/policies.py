"""How long a policy takes for one decision on 10,000 offers, with the wrappers of the recovery
loop: milliseconds of one core, the best of fifteen. `python benchmarks/policies.py [POLICY ...]`"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time

from harness.controller import combinators, policies
from harness.core.estimates import CapacitySeen, Estimates, Spell, StepPace
from harness.core.world import Offer, Policy, View
from harness.testing import situation, up

OFFERS, SEEN, NODES = 10_000, 1_000, 16
POLICIES = (
    "cheapest",
    "best_value",
    "spread(at_most(best_value, usd_per_h=30), zones=2)",
    "avoid(best_value, aws/r3, T4)",
    "deadline",
)


def market(rng: random.Random) -> tuple[Offer, ...]:
    """Of 40 regions with three zones each."""
    return tuple(
        sorted(
            Offer(
                rng.uniform(1, 50),
                f"aws/r{i % 40}/z{i % 120}/t{i}",
                rng.random() < 0.7,
                rng.choice(("H100", "A100", "L4")),
                rng.choice((1, 4, 8)),
                speed=rng.uniform(0.2, 2),
                place=f"aws/r{i % 40}",
            )
            for i in range(OFFERS)
        )
    )


def learned(offers: tuple[Offer, ...], rng: random.Random) -> Estimates:
    """Much: a tenth of the offers has a history."""
    spells = tuple(Spell(bool(n % 2), 3600.0, True) for n in range(64))
    return Estimates(
        total_steps=1000,
        work=1e6,
        micro_batches=64,
        paces=(StepPace("H100", 8, 1.0, 50),),
        capacity={
            offer.name: CapacitySeen(True, 0, 100, spells, 3600 * 100, rng.randint(0, 30), 3)
            for offer in rng.sample(offers, SEEN)
        },
        snapshot_bytes=10**11,
        lost_s=100,
        home="aws/r1",
        deadline_s=90_000.0,
    )


def milliseconds(policy: Policy, view: View) -> float:
    policy(view)
    found = []
    for _ in range(15):
        anew = dataclasses.replace(view)
        began = time.process_time()
        policy(anew)
        found.append(time.process_time() - began)
    return 1e3 * min(found)


def main(names: list[str]) -> None:
    rng = random.Random(1)
    offers = market(rng)
    blocked = {o.name: rng.choice((10.0, 1e6)) for o in rng.sample(offers, 3000)}
    there = tuple(up(n, next(o for o in offers[::-1] if o.gpus == 8)) for n in range(1, NODES))
    at = {"offers": offers, "blocked": blocked, "max_nodes": NODES, "now_s": 5e3}
    views = [situation(known=known, **at) for known in (Estimates(), learned(offers, rng))]
    rows: dict[str, Policy] = {name: policies.resolve(name) for name in names or POLICIES}
    rows["together(best_value)"] = combinators.together(policies.best_value)
    print(f"{'':52} nothing known      learned")
    for name, inner in rows.items():
        policy = combinators.within_budget(combinators.replacing(inner), usd=1e9)
        policy = combinators.within_hours(policy, hours=1e6)
        worst = [
            max(milliseconds(policy, dataclasses.replace(v, alive=some)) for some in ((), there))
            for v in views
        ]
        print(f"{name:52} {worst[0]:10.1f} ms {worst[1]:9.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What a decision costs.")
    parser.add_argument("names", nargs="*", help="policies; default: all")
    main(parser.parse_args().names)
