"""Situations for policies: views made by hand, and many made from a seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from harness.core.world import Node, NodeState, Offer, View

CHEAP = Offer(1.0, "a", place="x")
MIDDLE = Offer(1.2, "b", place="y")
DEAR = Offer(3.0, "c", place="y", speed=1.5)
ON_DEMAND = Offer(4.0, "od", spot=False, place="x")
OFFERS = (CHEAP, MIDDLE, DEAR, ON_DEMAND)


def up(attempt: int, offer: Offer = CHEAP, since_s: float = 1.0) -> Node:
    """Return a node that is up since `since_s` on the view's clock."""
    return Node(attempt, offer, NodeState.UP, asked_s=since_s - 1.0, up_s=since_s)


def pending(attempt: int, offer: Offer = CHEAP, since_s: float = 0.0) -> Node:
    """Return a node that was requested and is not up yet."""
    return Node(attempt, offer, NodeState.PENDING, asked_s=since_s)


def situation(*alive: Node, offers: tuple[Offer, ...] = OFFERS, **changes: Any) -> View:
    """Return a view 1000 s into a run of 1 to 2 nodes. `changes`: other fields of `View`."""
    view = View(now_s=1000.0, started_s=0.0, min_nodes=1, max_nodes=2, alive=alive, offers=offers)
    return dataclasses.replace(view, **changes)


def situations(seed: int, n: int = 50) -> Iterator[View]:
    """Yield varied views, always the same for a seed: no offers, all full, all lost, doubted nodes,
    money and time nearly spent."""
    rng = random.Random(seed)
    for _ in range(n):
        least = rng.randint(1, 3)
        most = least + rng.randint(0, 3)
        offers = tuple(sorted(rng.sample(OFFERS, rng.randint(0, len(OFFERS)))))
        now_s = rng.choice((0.0, 30.0, 1000.0, 86_400.0, 1.8e9))
        alive = tuple(
            up(i, rng.choice(OFFERS), now_s * rng.random())
            if rng.random() < 0.6
            else pending(i, rng.choice(OFFERS), now_s * rng.random())
            for i in range(1, 1 + rng.randint(0, most))
        )
        blocked = {
            offer.name: now_s + rng.uniform(-60.0, 600.0) for offer in OFFERS if rng.random() < 0.4
        }
        yield View(
            now_s=now_s,
            started_s=now_s * rng.random(),
            min_nodes=least,
            max_nodes=most,
            alive=alive,
            offers=offers,
            blocked=blocked,
            committed_step=rng.choice((0, 10, 100_000)),
            last_progress_s=now_s * rng.random(),
            spent_usd=rng.choice((0.0, 1.0, 1e4)),
            attempts=len(alive) + rng.randint(0, 50),
            losses=rng.randint(0, 50),
            doubted=tuple(node.attempt for node in alive if rng.random() < 0.2),
            launch_s=rng.choice((0.0, 60.0)),
        )
