"""Markets that are made up: the same from a seed, with the spells that were asked for, and fitted to
what was seen as well as that allows."""

from __future__ import annotations

import numpy as np
import pytest

from harness.core.world import BadInput
from harness.planner.synthetic_market import (
    ROUGH,
    MadeUpZone,
    MarketWeather,
    drawn,
    in_blocks,
    make_up,
    usual_zones,
)
from harness.planner.traces import aligned, check_trace
from support.capacity_seen import seen_in


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def spells_h(zone: MadeUpZone, kind: bool) -> list[float]:
    seen = seen_in(make_up([zone], 4000, rng(), tick_s=60)[0])
    return [spell.seconds / 3600 for spell in seen.spells[1:] if spell.open is kind]


def test_the_same_seed_makes_the_same_market_and_it_is_one_that_traces_allow():
    zones = usual_zones(3, rng(), nodes=4, usd_per_h=1.0)
    first, again = (make_up(zones, 48, rng(7), weather=ROUGH) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert (one.nodes == other.nodes).all() and (one.usd_per_h == other.usd_per_h).all()
        assert one.nodes.max() <= 4 and len(one.nodes) == 48 * 12
    if all(trace.nodes.any() for trace in first):
        for trace in aligned(first):
            check_trace(trace, "made up")


@pytest.mark.parametrize("shape", [0.7, 1.0])
def test_spells_are_as_long_and_as_rough_as_asked(shape: float):
    zone = MadeUpZone("a", open_h=4.0, closed_h=2.0, open_shape=shape, closed_shape=1.0)
    open_h = np.array(spells_h(zone, True))
    assert 3.2 < open_h.mean() < 5.0
    rough = open_h.std() / open_h.mean()
    assert rough > 1.25 if shape < 1 else 0.8 < rough < 1.2
    assert 0.6 < make_up([zone], 4000, rng())[0].availability < 0.73


def test_a_market_begins_as_it_was_last_seen():
    lasting = MadeUpZone("a", open_h=10.0, closed_h=10.0, is_open=True, age_h=5.0)
    shut = MadeUpZone("b", open_h=10.0, closed_h=10.0, is_open=False, age_h=5.0)
    for seed in range(20):
        one, other = make_up([lasting, shut], 2, rng(seed))
        assert one.nodes[0] == 1 and other.nodes[0] == 0


def test_zones_share_weather():
    """Two zones are open together more often than by chance where the weather is one for all."""
    zones = [MadeUpZone("a", closed_h=3.0), MadeUpZone("b", closed_h=3.0)]

    def alike(weather: MarketWeather) -> float:
        a, b = make_up(zones, 6000, rng(), weather=weather)
        return float(np.corrcoef(a.nodes, b.nodes)[0, 1])

    assert abs(alike(MarketWeather(sway=1.0, together=0.0))) < 0.06
    assert alike(MarketWeather(sway=1.0, together=1.0)) > 0.12


def test_blocks_of_machines_come_and_go_together():
    single = make_up([MadeUpZone("a", nodes=16)], 500, rng())[0].nodes
    blocks = make_up([MadeUpZone("a", nodes=16, blocks=2)], 500, rng())[0].nodes
    assert single.max() <= 16 and set(blocks) == {0, 8, 16}
    assert np.abs(np.diff(single)).max() < 8 and blocks.std() > single.std()


@pytest.mark.parametrize("count", [1, 4])
def test_a_zone_in_blocks_has_all_of_them_as_often_and_as_long(count: int):
    whole = MadeUpZone("a", 3.0, 2.0, 1.0, 1.0, nodes=8)
    seen = seen_in(make_up([in_blocks(whole, count)], 8000, rng(), tick_s=60)[0], nodes=8)
    open_h = [s.seconds / 3600 for s in seen.spells[1:] if s.open]
    closed_h = [s.seconds / 3600 for s in seen.spells[1:] if not s.open]
    assert 2.4 < np.mean(open_h) < 3.6 and 1.6 < np.mean(closed_h) < 2.4


def test_what_was_seen_narrows_what_is_drawn():
    truth = MadeUpZone("a", open_h=9.0, closed_h=1.5, open_shape=1.0, closed_shape=1.0)
    seen = seen_in(make_up([truth], 1000, rng(), tick_s=60)[0])
    known = np.array([drawn("a", seen, rng(s)).open_h for s in range(200)])
    guessed = np.array([drawn("a", None, rng(s)).open_h for s in range(200)])
    assert 7.0 < np.median(known) < 11.0
    assert np.log(known).std() < 0.3 < 0.7 < np.log(guessed).std() < 1.1


def test_prices_wander_around_their_mean_and_never_above_what_is_allowed():
    zone = MadeUpZone("a", usd_per_h=2.0, price_swing=0.3, most_usd_per_h=2.5)
    prices = make_up([zone], 3000, rng())[0].usd_per_h
    assert prices is not None
    assert prices.max() == 2.5 and 1.7 < prices.mean() < 2.1 and (prices > 0).all()


def test_what_no_market_can_be_is_refused():
    with pytest.raises(BadInput, match="above 0"):
        MadeUpZone("a", open_h=0.0)
    with pytest.raises(BadInput, match="wanted zones"):
        make_up([], 48, rng())
    with pytest.raises(BadInput, match="a tick of"):
        make_up([MadeUpZone("a")], 48, rng(), tick_s=0.1)
