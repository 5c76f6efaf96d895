"""A plan's p10 and p90 hold: over 200 true markets, of which it knows no more than their history,
cost and time lie between them in 75 to 85 % of the cases. Several nodes by `deadline` are dear to
play: 40 markets, and more room for chance. `make proofs` runs it (minutes)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from harness.core.world import Offer, View, fill
from harness.planner import forecast as forecasting
from harness.planner.fast_replay import play
from harness.planner.forecast import (
    BLOCKS,
    HIGH,
    LOW,
    PlanCandidate,
    PlannedRun,
    as_of,
    forecast,
    shapes,
)
from harness.planner.synthetic_market import ROUGH, MadeUpZone, drawn, in_blocks, make_up
from support.capacity_seen import seen_in

pytestmark = pytest.mark.proof
MARKETS = 9  # the least of which p10 and p90 hold eight tenths exactly
SPOT = f"{__name__}:spot_only"


def spot_only(view: View):
    return fill(view, [o for o in view.offers if o.spot], "spot")


@dataclasses.dataclass(frozen=True)
class Case:
    policy: str
    zones: int
    nodes: int
    work_h: float
    deadline_h: float | None
    history_h: float
    truths: int = 200
    least: float = 0.75  # share that must lie inside
    most: float = 0.85


def shape_of(zones: int) -> forecasting.NodeShape:
    spot = [
        Offer(1 + z / 10, f"aws/r{z}/z{z}/t", True, "X", 1, 3.0, 1.0, f"aws/r{z}")
        for z in range(zones)
    ]
    dear = Offer(3.0, "aws/r0/t/on-demand", False, "X", 1, 3.0, 1.0, "aws/r0")
    return shapes([*spot, dear])[0]


def truth_of(offer: Offer, nodes: int, rng: np.random.Generator) -> MadeUpZone:
    zone = in_blocks(drawn(offer.name, None, rng, nodes=nodes), BLOCKS)
    return dataclasses.replace(
        zone,
        usd_per_h=offer.usd_per_h,
        price_swing=forecasting.PRICE_SWING,
        most_usd_per_h=offer.on_demand_usd_per_h,
    )


def calibrated(case: Case) -> tuple[float, float]:
    """Shares of the true markets whose cost, and whose time, lies between p10 and p90."""
    shape, run = shape_of(case.zones), PlannedRun(
        case.work_h * 3600 * case.nodes, deadline_h=case.deadline_h
    )
    candidate = PlanCandidate(shape, case.nodes, case.policy)
    job = forecasting.job_of(candidate, run)
    tick_s = forecasting.tick_of(job)
    first = round(case.history_h * 3600 / tick_s)
    places = {offer.name: offer.place for offer in shape.spot}
    inside = np.zeros(2)
    for at in range(case.truths):
        rng = np.random.default_rng((at, 1))
        truth = [truth_of(offer, case.nodes, rng) for offer in shape.spot]
        hours = case.history_h + 1.2 * job.deadline_h + 12
        whole = make_up(truth, hours, rng, tick_s=tick_s, weather=ROUGH)
        seen = {z.zone: as_of(seen_in(z, first, case.nodes), first * tick_s) for z in whole}
        seen = seen if first else {}
        told = forecast(candidate, run, MARKETS, at, seen)
        real = play(
            whole,
            first,
            job,
            forecasting.policy_of(candidate, run),
            seen=seen,
            places=places,
            on_demand=forecasting.buys_on_demand(case.policy),
        )
        inside += (
            told.usd_at(LOW) <= real.usd <= told.usd_at(HIGH),
            told.hours_at(LOW) <= real.finish_h <= told.hours_at(HIGH),
        )
    usd, hours_share = inside / case.truths
    return float(usd), float(hours_share)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "case",
    [
        Case(SPOT, 1, 1, 24, None, 96),
        Case("deadline", 2, 2, 24, 40, 96, truths=40, least=0.65, most=0.95),
    ],
    ids=lambda case: f"{case.nodes} nodes",
)
def test_what_happens_lies_between_p10_and_p90_as_often_as_it_should(case: Case):
    usd, hours = calibrated(case)
    shares = {"cost": usd, "time": hours}
    assert all(case.least <= share <= case.most for share in shares.values()), shares

