"""What a budget holds back: clouds take minutes to launch and to end a node, nodes take minutes
to drain, and all of that is billed."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence

import pytest

from harness.bucket.controller_lease import Lease
from harness.bucket.journal import Journal
from harness.bucket.layout import STOP_KEY
from harness.controller.policies import cheapest
from harness.controller.recovery import RunOutcome, recover
from harness.controller.run_limits import RunSpec
from harness.core.decoding import built
from harness.core.facts import AttemptEnded, AttemptIntended, AttemptUp, Decided, Stamped
from harness.core.world import STOPPED, BadInput, CloudUnavailable, Node, NodeState, Offer, World
from harness.ledger.attempts import PRIORS, AttemptHistory
from harness.ledger.bill import bill
from storage.canonical_json import BadObject
from storage.stores.folder_store import MemoryStore
from support.clock import PlayedClock

pytestmark = pytest.mark.proof
OFFER = Offer(55.0, "aws/us-east-1/p5", accelerator="H100", gpus=8)
AT_SKY = RunSpec(  # what `harness launch --cloud sky` gives
    poll_s=1.0,
    lost_after_s=90.0,
    block_limit_s=600.0,
    exit_grace_s=180.0,
    terminate_timeout_s=900.0,
)


class SlowCloud:
    """As clouds are: a launch takes 7 to 10 minutes and is billed nearly from its beginning, which
    is told at its end; a node needs 60 to 170 s to drain; an end takes 90 to 300 s, and is billed.
    """

    def __init__(self, clock: PlayedClock, store: MemoryStore, rng: random.Random):
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
    clock, store, rng = PlayedClock(), MemoryStore("memory://run", {}), random.Random(seed)
    clock.horizon_s = 1_000_000
    cloud = SlowCloud(clock, store, rng)
    sky = dataclasses.replace(AT_SKY, min_nodes=8, max_nodes=nodes, budget_usd=budget_usd)
    world = World(clock, cloud, store, rng)
    outcome = recover(
        sky, cheapest, world, Journal(store, "controller-1", clock.now), Lease(store, clock, "me")
    )
    return outcome, sum(bill(node, clock.now()).usd for node in cloud.all.values())


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


class LyingCloud(SlowCloud):
    """Besides, it takes nodes away, is silent for up to 20 minutes, leaves nodes out of its lists,
    calls some gone that run on, and forgets every third word to end one."""

    def __init__(self, clock: PlayedClock, store: MemoryStore, rng: random.Random):
        super().__init__(clock, store, rng)
        self.silent_s, self.hidden_s, self.dead_s = 0.0, dict[int, float](), dict[int, float]()
        self.denied_usd = 0.0  # what nodes cost while it denies to have them
        self.denied = set[int]()
        self.begin_to_lie()
        self.deny()

    def begin_to_lie(self) -> None:
        """Again and again: a spell of one lie."""
        now, alive = self.clock.now(), [n.attempt for n in self.all.values() if n.alive]
        match self.rng.choice(("silent", "hide", "dead", "take", "honest")), alive:
            case "silent", _:
                self.silent_s = now + self.rng.uniform(10, 1200)
            case "hide", [first, *_]:
                self.hidden_s[first] = now + self.rng.uniform(10, 600)
            case "dead", [*_, last]:
                self.dead_s[last] = now + self.rng.uniform(10, 600)
            case "take", [*_]:
                for attempt in alive[:: self.rng.randint(1, 3)]:
                    self.end(attempt, None)
        self.clock.after(self.rng.expovariate(1 / 900), self.begin_to_lie)

    def deny(self) -> None:
        """Who was denied is so until an answer says otherwise."""
        now = self.clock.now()
        denied = {a for lies in (self.hidden_s, self.dead_s) for a, s in lies.items() if now < s}
        self.denied = denied | (self.denied if now < self.silent_s else set())
        self.denied_usd += 5.0 / 3600 * OFFER.usd_per_h * len(self.denied)
        self.clock.after(5.0, self.deny)

    def answer(self) -> float:
        if self.clock.now() < self.silent_s:
            raise CloudUnavailable("no answer (test)")
        return self.clock.now()

    def offers(self) -> Sequence[Offer]:
        self.answer()
        return super().offers()

    def nodes(self) -> Sequence[Node]:
        now = self.answer()
        shown = (n for n in self.all.values() if self.hidden_s.get(n.attempt, 0.0) <= now)
        dead = {"state": NodeState.GONE, "gone_s": now, "reason": "preempted"}
        return [
            dataclasses.replace(n, **dead)  # type: ignore[arg-type]
            if n.up_s is not None and self.dead_s.get(n.attempt, 0.0) > now and n.alive
            else n
            for n in shown
        ]

    def launch(self, attempt: int, offer: Offer) -> None:
        self.answer()
        super().launch(attempt, offer)

    def terminate(self, attempt: int) -> None:
        self.answer()
        if self.rng.random() < 0.67:
            super().terminate(attempt)

    def truth_usd(self) -> float:
        """What is billed until now, whatever it shows."""
        now = self.clock.now()
        until_s = {n.attempt: now if n.gone_s is None else n.gone_s for n in self.all.values()}
        billed_s = sum(max(0.0, until_s[n] - began_s) for n, began_s in self.began_s.items())
        return billed_s / 3600 * OFFER.usd_per_h


class StopWatch(MemoryStore):
    """Tells when the run was asked to stop."""

    stopped: Callable[[], None]

    def create(self, key: str, data: bytes | memoryview) -> bool:
        if key == STOP_KEY and not self.list(key):
            self.stopped()
        return super().create(key, data)

    def put(self, key: str, data: bytes | memoryview) -> None:
        if key == STOP_KEY and not self.list(key):
            self.stopped()
        super().put(key, data)


def lied_to(
    seed: int, nodes: int, budget_usd: float
) -> tuple[RunOutcome | None, float, float, float]:
    """How it ended; what was spent when it was asked to stop, of that by nodes that were denied,
    and in the end."""
    clock, store, rng = PlayedClock(), StopWatch("memory://run", {}), random.Random(seed)
    clock.horizon_s = 1_000_000
    cloud, at_stop = LyingCloud(clock, store, rng), list[float]()
    store.stopped = lambda: at_stop.extend((cloud.truth_usd(), cloud.denied_usd))
    world, journal = World(clock, cloud, store, rng), Journal(store, "controller-1", clock.now)
    run = dataclasses.replace(
        AT_SKY, min_nodes=1, max_nodes=nodes, budget_usd=budget_usd, poll_s=5.0
    )
    outcome = None
    with contextlib.suppress(CloudUnavailable):
        outcome = recover(run, cheapest, world, journal, Lease(store, clock, "me"))
    clock.sleep(7200.0)  # whatever still ends by itself
    stop_usd, denied_usd = at_stop or (0.0, 0.0)
    return outcome, stop_usd, denied_usd, cloud.truth_usd()


@pytest.mark.parametrize(("nodes", "budget_usd"), [(2, 150.0), (8, 700.0)])
def test_a_cloud_that_lies_does_not_take_more_than_the_budget(
    nodes: int, budget_usd: float
) -> None:
    """But what nodes cost that it denies to have, while they are taken down."""
    for seed in range(4):
        outcome, at_stop, denied, usd = lied_to(seed, nodes, budget_usd)
        assert outcome is not None and outcome.outcome == "stopped", outcome
        assert 0 < at_stop <= budget_usd + denied, seed
        assert usd <= at_stop + nodes * OFFER.usd_per_h * 0.5


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
    none, three = AttemptHistory.of([], random.Random(0)).durations, AttemptHistory.of(facts, random.Random(0)).durations
    assert (none.launch_s("aws/x", 600.0), none.leave_s("aws/x", 180.0, 300.0)) == (600.0, 480.0)
    # three are too few to believe that none takes longer, and never less than the longest
    assert three.launch_s("aws/y", 600.0) == 403.0 + (600.0 - 403.0) * 9 / 12
    assert three.launch_s("aws/y", 300.0) == 403.0
    end_s = 133.0 + (300.0 - 133.0) * 9 / 12
    assert three.end_s("aws/y", 300.0) == end_s
    assert three.leave_s("aws/y", 180.0, 300.0) == 193.0 + (180.0 + end_s - 193.0) * 9 / 12
    # what one cloud takes says nothing of another
    assert three.launch_s("gcp/y", 600.0) == 600.0
    assert three.launch_s("slurm/y", 600.0) == PRIORS["slurm"].launch_s


@pytest.mark.parametrize("name", ["budget_usd", "max_hours", "exit_grace_s", "launch_s"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -5.0, 1e300])
def test_limits_that_are_none_are_refused(name: str, value: float) -> None:
    with pytest.raises(BadInput, match=name):
        RunSpec(**{name: value})


def test_a_fact_with_a_negative_bill_pays_for_nothing() -> None:
    offer = dataclasses.asdict(OFFER) | {"usd_per_h": -1000.0}
    book = AttemptHistory.of([Stamped(0.0, "controller-1", AttemptIntended(1, offer))], random.Random(0))
    assert book.offers[1].usd_per_h == 0.0
    fact = AttemptEnded(1, "failed", 0.0, 1.0, 2.0, 1, "", 1.0, -500.0)
    with pytest.raises(BadObject, match="usd"):
        built(AttemptEnded, dataclasses.asdict(fact))
