"""How prices wander is learned from what was seen of them."""

import math

import numpy as np
import pytest

from harness.controller.forecast.price_process import (
    LEVELS,
    USUAL_PULL_PER_H,
    PriceSwing,
    chances,
    hours_until,
    hours_until_one,
    level_after,
    level_factors,
    level_rates,
    lowest_path,
    swing_of,
)

HOUR = 3600.0


def wandered(seed, hours, swing=0.3, half_h=24.0, usd=2.0):
    rng, keep = np.random.default_rng(seed), 0.5 ** (1 / half_h)
    at, found = swing * rng.standard_normal(), []
    for hour in range(hours):
        found.append((hour * HOUR, usd * math.exp(at)))
        at = keep * at + swing * math.sqrt(1 - keep * keep) * rng.standard_normal()
    return tuple(found)


def test_a_price_that_was_not_seen_to_move_stands_still():
    assert swing_of((), 5) == PriceSwing(0.0)
    assert swing_of(((0.0, 2.0),), 500) == PriceSwing(2.0)
    assert swing_of(((0.0, 2.0), (50 * HOUR, 2.03)), 500) == PriceSwing(2.03)
    assert PriceSwing(2.0).over(3.0, 10.0) == 3.0 and PriceSwing(2.0).level(3.0) == 0.0


@pytest.mark.parametrize("half_h", [8.0, 24.0])
def test_it_is_learned_how_far_and_how_fast_it_wanders(half_h):
    found = [swing_of(wandered(seed, 400, half_h=half_h), 400) for seed in range(12)]
    assert np.mean([one.swing for one in found]) == pytest.approx(0.3, abs=0.06)
    assert np.median([one.pull_per_h for one in found]) == pytest.approx(
        math.log(2) / half_h, rel=0.5
    )
    assert np.exp(np.mean(np.log([one.usual_usd for one in found]))) == pytest.approx(2.0, abs=0.2)


def test_little_is_made_of_what_was_seen_for_an_hour():
    """Of a market like the others, what was seen for long is nearer to the truth."""
    few = [swing_of(wandered(seed, 3), 3).swing for seed in range(40)]
    many = [swing_of(wandered(seed, 100), 100).swing for seed in range(40)]
    assert np.mean(few) < 0.75 * np.mean(many) and max(few) < 0.35


def test_what_a_price_comes_back_to():
    one = PriceSwing(2.0, 0.3, USUAL_PULL_PER_H)
    assert one.over(4.0, 0.1) == pytest.approx(4.0, rel=0.01)
    assert 2.0 < one.over(4.0, 200.0) < one.over(4.0, 24.0) < 4.0
    assert one.over(1.0, 24.0) == pytest.approx(4.0 / one.over(4.0, 24.0))
    assert [one.level(2.0 * factor) for factor in level_factors(0.3)] == pytest.approx(range(LEVELS))
    assert one.level(50.0) == LEVELS - 1 and one.level(0.01) == 0


@pytest.mark.parametrize("hours", [0.01, 1.0, 60.0])
def test_levels_have_the_deviation_and_the_memory_of_the_price(hours):
    moved = chances(level_rates(0.1), hours)
    assert moved.sum(axis=1) == pytest.approx(1.0) and moved.min() >= 0
    at = np.log(level_factors(0.3))
    # what is expected of a level is nearer to the mean by what was forgotten
    assert moved @ at == pytest.approx(at * math.exp(-0.1 * hours), abs=0.01)
    usual = np.array([1, 4, 6, 4, 1]) / 16
    assert usual @ moved == pytest.approx(usual, abs=1e-6)
    assert math.sqrt(usual @ at**2) == pytest.approx(0.3)


def test_how_long_it_takes_until_a_level_is_reached():
    rates = level_rates(0.1)
    assert hours_until(rates, [True] * LEVELS).tolist() == [0.0] * LEVELS
    assert all(map(math.isinf, hours_until(rates, [False] * LEVELS)))
    found = hours_until(rates, [True, True, False, False, False])
    assert found[0] == found[1] == 0 < found[2] < found[3] < found[4]
    assert hours_until(level_rates(0.0), [True]).tolist() == [0.0]


def test_where_a_price_is_after_a_while():
    assert level_after(0.05, 1.25, 0.0) == pytest.approx([0.0, 0.75, 0.25, 0.0, 0.0])
    for level in (0.0, 1.25, LEVELS - 1.0):
        soon, late = level_after(0.05, level, 1.0), level_after(0.05, level, 500.0)
        assert soon.sum() == pytest.approx(1.0) and soon @ range(LEVELS) == pytest.approx(
            2 + (level - 2) * math.exp(-0.05), abs=0.01
        )
        assert late == pytest.approx([1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16], abs=1e-3)
    wanted = [True, True, False, False, False]
    assert hours_until_one(0.05, 0.5, wanted, 99.0) == 0
    assert 0 < hours_until_one(0.05, 1.5, wanted, 99.0) < hours_until_one(0.05, 2.0, wanted, 99.0)
    assert hours_until_one(0.05, 4.0, wanted, 3.0) == 3.0


def test_the_cheapest_of_some_prices_since_all_are_known():
    first = ((0.0, 3.0), (10.0, 1.0), (30.0, 5.0))
    second = ((5.0, 2.0), (20.0, 4.0))
    assert lowest_path((first,)) == first
    assert lowest_path((first, second)) == ((5.0, 2.0), (10.0, 1.0), (30.0, 4.0))
