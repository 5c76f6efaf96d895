"""What a fleet sees when spot costs so much."""

import dataclasses

from harness.core.estimates import Estimates
from harness.core.world import Offer
from harness.testing.situations import situation

HOUR, NOW_H, NODES = 3600.0, 600.0, 4
SPOT, OTHER = Offer(1.0, "a", place="a"), Offer(1.0, "b", place="b")
DEAR = Offer(3.0, "a/on-demand", False, place="a")
# every four hours, for twenty days
UP_AND_DOWN = tuple(
    (4 * HOUR * at, usd) for at, usd in enumerate([1.6, 1.3, 1.0, 0.7, 0.5, 0.7, 1.0, 1.3] * 15)
)


def at_price(usd, *alive, left_h=72.0, path=UP_AND_DOWN, **more):
    """A fleet with 24 hours of work left, when spot costs that."""
    spot = dataclasses.replace(SPOT, usd_per_h=usd)
    known = Estimates(
        total_steps=1000,
        work=24 * HOUR * NODES,
        changeover_s=600.0,
        look_s=60.0,
        deadline_s=(NOW_H + left_h) * HOUR,
        prices={"a": (*path, (NOW_H * HOUR - 1, usd))} if path else {},
        **more,
    )
    here = {"now_s": NOW_H * HOUR, "started_s": (NOW_H - 1) * HOUR, "max_nodes": NODES}
    return situation(*alive, offers=(spot, DEAR), known=known, **here)
