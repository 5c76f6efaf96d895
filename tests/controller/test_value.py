"""What useful work is expected to cost: where something is known, it decides; where nothing is,
prices do."""

from __future__ import annotations

import random

import pytest

from harness.controller.combinators import together
from harness.controller.offer_value import Worth
from harness.controller.policies import best_value, cheapest
from harness.core.estimates import CapacitySeen, Estimates, SnapshotPace, StepPace
from harness.core.loss_rates import LossesSeen
from harness.core.world import Launch, Node, Offer, View, Wait
from harness.testing.situations import situation, up
from harness.worker.snapshot_timer import Interval

A = Offer(1.0, "x/east/a", place="x/east")
B = Offer(1.1, "x/west/b", place="x/west")
OD = Offer(3.0, "x/east/od", spot=False, place="x/east")
H = 3600.0


def view(*alive: Node, known: Estimates, offers: tuple[Offer, ...] = (A, B, OD), **more: object) -> View:
    return situation(*alive, offers=offers, known=known, **more)


def first(policy: object, *alive: Node, **changes: object) -> str:
    decision = policy(view(*alive, **changes))  # type: ignore[operator, arg-type]
    assert isinstance(decision, Launch), decision
    return decision.offer.name


def lossy(losses: int, hours: float, unnoticed: int = 0) -> CapacitySeen:
    return CapacitySeen(True, 0.0, 0.0, (), hours * H, losses, unnoticed)


@pytest.mark.parametrize("policy", [cheapest, best_value])
def test_a_place_where_nodes_are_lost_often_is_not_cheap(policy: object) -> None:
    """Ten losses an hour at five minutes each, against none in 100 hours."""
    often, never = lossy(50, 5.0), lossy(0, 100.0)
    known = Estimates(capacity={A.name: often, B.name: never})
    assert first(policy, known=known) == B.name
    assert first(policy, known=Estimates(capacity={A.name: never, B.name: often})) == A.name
    assert first(policy, known=Estimates(capacity={})) == A.name
    quick = Estimates(changeover_s=1.0, capacity={A.name: often, B.name: never})
    assert first(policy, known=quick) == A.name  # a loss costs next to nothing


def test_losses_without_notice_take_work_along() -> None:
    known = Estimates(
        changeover_s=1.0,
        lost_s=600.0,
        capacity={A.name: lossy(20, 20.0, unnoticed=20), B.name: lossy(20, 20.0)},
    )
    assert first(cheapest, known=known) == B.name


def test_the_snapshot_interval_is_chosen_with_the_place() -> None:
    """As the worker will have it there, from the same losses: so a calm place is worth more."""
    known = Estimates(
        changeover_s=1.0,
        snapshot_cost_s=20.0,
        commit_s=30.0,
        capacity={A.name: lossy(60, 60.0, unnoticed=60), B.name: lossy(0, 60.0)},
    )
    paces = [known.snapshots(known.capacity[name], 1) for name in (A.name, B.name)]
    for pace, name in zip(paces, (A.name, B.name), strict=True):
        seen = known.capacity[name]
        here = LossesSeen(seen.unnoticed, seen.node_s)
        assert pace.interval_s == Interval().seconds(0.0, 20.0, 30.0, here.between_s(1))
        assert pace.lost_s == pace.interval_s / 2 + 30.0
        assert pace.share == 20.0 / pace.interval_s
    assert paces[0].interval_s < 0.5 * paces[1].interval_s
    found = cheapest(view(known=known))
    assert isinstance(found, Launch) and found.offer == B and f"every {paces[1].interval_s:.0f} s" in (
        found.reason
    )


def test_where_nothing_was_measured_or_the_script_says_it_the_interval_is_not_known() -> None:
    known = Estimates(lost_s=50.0)
    assert known.snapshots(lossy(3, 1.0, unnoticed=3), 4) == SnapshotPace(0.0, 50.0, 0.0)


def test_on_demand_where_spot_is_hardly_there() -> None:
    """Useful for a share of exp(-30 an hour * 5 min) of the hours that are paid."""
    known = Estimates(capacity={A.name: lossy(500, 10.0), B.name: lossy(500, 10.0)})
    assert first(cheapest, known=known) == OD.name


FAST = Offer(8.0, "x/east/fast", accelerator="H100", gpus=4, speed=1.0, place="x/east")
SLOW = Offer(3.0, "x/east/slow", accelerator="A100", gpus=4, speed=0.3, place="x/east")


def test_measured_speed_counts_more_than_what_is_said() -> None:
    offers = SLOW, FAST
    none = Estimates()
    assert first(cheapest, known=none, offers=offers) == SLOW.name
    assert first(best_value, known=none, offers=offers) == FAST.name
    # the slow ones need 1.4 times as long for a step, not 3.3 times
    timed = Estimates(paces=(StepPace("H100", 4, 1.0, 50), StepPace("A100", 4, 1.4, 50)))
    assert first(cheapest, known=timed, offers=offers) == SLOW.name
    assert first(best_value, known=timed, offers=offers) == SLOW.name
    # of a kind that was not measured, what is said counts
    half = Estimates(paces=(StepPace("H100", 4, 1.0, 50),))
    assert first(cheapest, known=half, offers=offers) == FAST.name


def test_the_price_of_a_node_counts_the_workers_that_would_be_idle() -> None:
    """Six micro-batches: two nodes of three workers leave none idle, one of four leaves a
    quarter."""
    three, four = (Offer(p, f"x/{n}", accelerator="L4", gpus=n) for n, p in ((3, 3.0), (4, 3.6)))
    known = Estimates(micro_batches=6)
    assert first(best_value, known=Estimates(), offers=(three, four)) == four.name
    assert first(best_value, known=known, offers=(three, four), max_nodes=1) == three.name


def test_a_node_that_shortens_no_step_is_not_wanted() -> None:
    eight = Offer(8.0, "x/eight", accelerator="L4", gpus=8)
    timed = Estimates(micro_batches=8, paces=(StepPace("L4", 8, 1.0, 50),))
    more = {"offers": (eight,), "max_nodes": 3}
    assert isinstance(best_value(view(up(1, eight), known=timed, **more)), Wait)  # type: ignore[arg-type]
    # below the least number of nodes, or where workers are counted otherwise, it is
    assert first(best_value, up(1, eight), known=timed, min_nodes=2, **more) == eight.name
    other = Estimates(micro_batches=8, paces=(StepPace("L4", 1, 1.0, 50),))
    assert first(best_value, up(1, eight), known=other, **more) == eight.name
    # ... and beside one that may not stay
    assert first(best_value, up(1, eight), known=timed, doubted=(1,), **more) == eight.name
    # a replica of four workers: two replicas for eight micro-batches
    whole = Estimates(micro_batches=8, replica_ranks=4, paces=(StepPace("L4", 8, 1.0, 50),))
    assert first(best_value, up(1, eight), known=whole, **more) == eight.name


def test_a_snapshot_that_must_be_moved_costs_its_egress() -> None:
    near, far = Offer(1.0, "x/far", place="aws/a"), Offer(1.2, "x/near", place="aws/b")
    here = up(1, far)
    known = Estimates(snapshot_bytes=10**12)  # 20 USD from region to region
    assert first(cheapest, here, known=Estimates(), offers=(near, far)) == near.name
    assert first(cheapest, here, known=known, offers=(near, far)) == far.name
    assert first(cheapest, here, known=Estimates(move_usd=20.0), offers=(near, far)) == far.name
    cheap = Estimates(move_usd=20.0, moves={("aws/b", "aws/a"): 0.01})
    assert first(cheapest, here, known=cheap, offers=(near, far)) == near.name
    at_home = Estimates(snapshot_bytes=10**12, home="aws/a")
    assert first(cheapest, here, known=at_home, offers=(near, far)) == near.name


def test_a_world_moves_for_what_work_will_cost_there() -> None:
    fleet = together(cheapest, saving=0.2, stay_s=600.0)
    cheap = Offer(0.7, "x/west/c", place="x/west")
    at = {"offers": (cheap, A), "now_s": 1000.0}
    here = up(1, A), up(2, A)
    assert first(fleet, *here, known=Estimates(), **at) == cheap.name
    never = Estimates(capacity={cheap.name: lossy(100, 10.0), A.name: lossy(0, 100.0)})
    assert isinstance(fleet(view(*here, known=never, **at)), Wait)  # type: ignore[arg-type]


def test_equal_offers_are_taken_in_their_order() -> None:
    same = tuple(Offer(1.0, f"x/{i:02}") for i in range(20))
    known = Estimates(capacity={"other": lossy(1, 1.0)})
    assert first(cheapest, known=known, offers=same) == "x/00"


def test_the_bound_leaves_out_no_better_offer() -> None:
    """`best` does not look at every offer; it finds what a look at all of them finds."""
    rng = random.Random(3)
    for _ in range(50):
        offers = tuple(
            sorted(
                Offer(
                    rng.uniform(1, 9),
                    f"o{i}",
                    rng.random() < 0.7,
                    rng.choice("AB"),
                    rng.choice((1, 4, 8)),
                    speed=rng.uniform(0.5, 2),
                    place=rng.choice(("aws/a", "aws/b", "gcp/c")),
                )
                for i in range(40)
            )
        )
        known = Estimates(
            micro_batches=rng.choice((0, 12, 64)),
            snapshot_bytes=10**10,
            home="aws/a",
            lost_s=300.0,
            paces=(StepPace("A", 8, 1.0, 5),) if rng.random() < 0.5 else (),
            capacity={o.name: lossy(rng.randint(0, 30), 10.0) for o in offers if rng.random() < 0.5},
        )
        worth = Worth(view(known=known, offers=offers, max_nodes=4))
        assert worth.best(offers) == min(offers, key=worth.usd_per_useful_h)
