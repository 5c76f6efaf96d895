"""What a budget holds back: clouds take minutes to launch and to end a node, nodes take minutes
to drain, and all of that is billed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from harness.bucket.journal import Journal
from harness.bucket.lease import Lease
from harness.controller.book import Book, bill
from harness.controller.policies import cheapest
from harness.controller.recovery import STOP_KEY, RunOutcome, RunSpec, recover
from harness.core.facts import AttemptEnded, AttemptIntended, AttemptUp, Decided, Stamped
from harness.core.world import STOPPED, Node, NodeState, Offer, World
from harness.proof.sim_world import VirtualClock
from storage.files import MemoryStore

OFFER = Offer(55.0, "aws/us-east-1/p5", accelerator="H100", gpus=8)


class SlowCloud:
    """As clouds are: a launch takes 7 to 10 minutes and is billed nearly from its beginning, which
    is told at its end; a node needs 60 to 170 s to drain; an end takes 90 to 300 s, and is billed.
    """

    def __init__(self, clock: VirtualClock, store: MemoryStore, rng: random.Random):
        self.clock, self.store, self.rng = clock, store, rng
        self.all: dict[int, Node] = {}
        self.began_s: dict[int, float] = {}
        self.ending: set[int] = set()

    def offers(self) -> Sequence[Offer]:
        return (OFFER,)

    def nodes(self) -> Sequence[Node]:
        return list(self.all.values())

    def launch(self, attempt: int, offer: Offer) -> None:
        now = self.clock.now()
        self.all[attempt], self.began_s[attempt] = (
            Node(attempt, offer, NodeState.PENDING, now),
            now + self.rng.uniform(20, 90),
        )
        self.clock.after(self.rng.uniform(420, 600), lambda: self.arrive(attempt))

    def arrive(self, attempt: int) -> None:
        if self.all[attempt].alive and attempt not in self.ending:
            self.all[attempt] = dataclasses.replace(
                self.all[attempt], state=NodeState.UP, up_s=self.began_s[attempt]
            )
            self.heed(attempt)

    def heed(self, attempt: int) -> None:
        """Its agent looks for a stop request, drains, and leaves."""
        if self.store.list(STOP_KEY):
            self.clock.after(self.rng.uniform(60, 170), lambda: self.end(attempt, STOPPED))
        else:
            self.clock.after(5.0, lambda: self.heed(attempt))

    def terminate(self, attempt: int) -> None:
        if attempt in self.all:
            self.end(attempt, None)

    def end(self, attempt: int, code: int | None) -> None:
        if attempt in self.ending:
            return
        self.ending.add(attempt)
        self.clock.after(self.rng.uniform(90, 300), lambda: self.gone(attempt, code))

    def gone(self, attempt: int, code: int | None) -> None:
        node, now = self.all[attempt], self.clock.now()
        up_s = min(self.began_s[attempt], now)
        why = "terminated" if code is None else "exited"
        end = {
            "state": NodeState.GONE,
            "up_s": up_s,
            "gone_s": now,
            "exit_code": code,
            "reason": why,
        }
        self.all[attempt] = dataclasses.replace(node, **end)  # type: ignore[arg-type]


def spend(seed: int, nodes: int, budget_usd: float) -> tuple[RunOutcome, float]:
    """A run that never ends by itself: how it ended, and what the cloud charges."""
    clock, store, rng = VirtualClock(), MemoryStore("memory://run", {}), random.Random(seed)
    clock.horizon_s = 1_000_000
    cloud = SlowCloud(clock, store, rng)
    sky = RunSpec(  # what `harness launch --cloud sky` gives
        8,
        nodes,
        poll_s=1.0,
        lost_after_s=90.0,
        block_limit_s=600.0,
        exit_grace_s=180.0,
        terminate_timeout_s=900.0,
        budget_usd=budget_usd,
    )
    world = World(clock, cloud, store, rng)
    outcome = recover(
        sky, cheapest, world, Journal(store, "controller-1", clock.now), Lease(store, clock, "me")
    )
    return outcome, sum(bill(node, clock.now())[1] for node in cloud.all.values())


@pytest.mark.parametrize(
    ("nodes", "budget_usd"), [(8, 300.0), (8, 1000.0), (16, 600.0), (16, 2000.0)]
)
def test_a_fleet_that_is_slow_to_come_and_go_stays_within_its_budget(
    nodes: int, budget_usd: float
) -> None:
    for seed in range(4):
        outcome, usd = spend(seed, nodes, budget_usd)
        assert outcome.outcome == "stopped" and "budget" in outcome.reason
        assert usd <= budget_usd, f"{usd / budget_usd - 1:.0%} over (seed {seed})"
        assert usd > 0.4 * budget_usd  # and it is not kept back for nothing


def test_the_book_knows_how_long_things_took() -> None:
    offer = dataclasses.asdict(OFFER)
    facts: list[Stamped] = []
    for n in (1, 2, 3):
        at = 1000.0 * n
        facts += [
            Stamped(at, "controller-1", AttemptIntended(n, offer)),
            Stamped(at + 400 + n, "controller-1", AttemptUp(n, at + 30)),
            Stamped(
                at + 500,
                "controller-1",
                Decided("release", f"attempt {n}: its replacement is there"),
            ),
            Stamped(at + 560, "controller-1", Decided("terminate", f"attempt {n}")),
            Stamped(
                at + 700,
                "controller-1",
                AttemptEnded(
                    n, "terminated", at, at + 30, at + 690 + n, None, "terminated", 660.0, 10.0
                ),
            ),
        ]
    two, three = Book.of(facts[:10], random.Random(0)), Book.of(facts, random.Random(0))
    # two are too few to assume less
    assert (two.launch_s(600.0), two.leave_s(180.0, 300.0)) == (600.0, 480.0)
    assert two.launch_s(300.0) == 402.0
    assert (three.launch_s(600.0), three.leave_s(180.0, 300.0)) == (403.0, 193.0)
