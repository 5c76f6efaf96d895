"""How fast a run was: made of facts by hand, and of what real sessions tell."""

import dataclasses

import numpy as np
import pytest

from harness.core.facts import (
    PHASES,
    EpochStarted,
    ProfileTaken,
    SessionStarted,
    Stamped,
    StepDone,
    StepsTimed,
)
from harness.core.step_records import NONE, ROW
from harness.ledger.world_speed import SpeedSummary, speed_of

SPLIT = dict(zip(PHASES, (0.01, 0.2, 0.4, 0.1, 0.05, 0.02, 0.01, 0.21), strict=True))  # 1 s
SESSION = SessionStarted(1, 2, 0, 0, 100, 64, 8)


def told(t, epoch=1, first=1, last=10, seconds=None, **more):
    given = {"samples": 64, "tokens": 6400, "mfu": 0.4, "own_s": (0.8, 0.9, 1.08)}
    given |= {"own_ranks": (0, 1), "loss": (2.0, 2.5, 3.0), "loss_ranks": (1, 0), **more}
    return Stamped(t, "worker", StepsTimed(epoch, first, last, seconds or SPLIT, **given))


def steps(*rows):
    """(epoch, step, seconds)"""
    return np.array([(e, k, 1.0, k, k + s, s) for e, k, s in rows], ROW)


def test_nothing_is_known_of_a_run_that_told_nothing():
    assert speed_of([]) == SpeedSummary() and SpeedSummary().shares == {}
    assert SpeedSummary().newest is None


def test_the_split_is_a_mean_over_steps():
    slow = {p: 4 * s for p, s in SPLIT.items()}
    found = speed_of([Stamped(0.0, "w", SESSION), told(1.0, last=30), told(2.0, 1, 31, 40, slow)])
    assert found.step_s == pytest.approx((30 * 1 + 10 * 4) / 40)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.shares["backward"] == pytest.approx(0.4)
    # per second of wall clock: 40 steps took 70 s
    assert found.tokens_per_s == pytest.approx(6400 * 40 / 70)
    assert found.samples_per_s == pytest.approx(64 * 40 / 70)
    assert found.mfu == pytest.approx(0.4) and found.hfu is None
    first, last = found.windows
    assert (first.world, first.steps, first.tokens_per_s) == (2, 30, pytest.approx(6400))
    assert last == found.newest and last.own.most == 1.08 and last.own.most_rank == 1


def test_what_cannot_be_true_is_left_out():
    bad = [
        told(1.0, seconds={**SPLIT, "data": float("nan")}),
        told(2.0, seconds={**SPLIT, "data": -1.0}),
        told(3.0, first=9, last=8),
        told(4.0, seconds=dict.fromkeys(PHASES, 0.0)),
    ]
    assert speed_of(bad).windows == ()
    odd = told(5.0, mfu=1.3, hfu=float("inf"), own_s=(1.0,), loss=(1.0, float("nan"), 2.0))
    (window,) = speed_of([odd]).windows
    assert (window.mfu, window.hfu, window.own, window.loss, window.world) == (None,) * 4 + (0,)
    # a phase that an older version did not know took no time
    (window,) = speed_of([told(1.0, seconds={"forward": 2.0})]).windows
    assert window.seconds["snapshot"] == 0 and window.step_s == 2


def test_the_scaling_curve_is_of_the_worlds_that_there_were():
    facts = [
        Stamped(0.0, "w", dataclasses.replace(SESSION, epoch=1, world=2)),
        Stamped(1.0, "w", dataclasses.replace(SESSION, epoch=2, world=4)),
        Stamped(2.0, "w", EpochStarted(3, ("a",), 2)),
        Stamped(3.0, "w", EpochStarted(4, ("a", "b"), 8)),  # never made a step
        told(4.0, epoch=2),
    ]
    # the first step of a world is slow: the median does not mind
    rows = [(1, k, 5.0 if k == 1 else 1.0) for k in range(1, 6)]
    rows += [(2, k, 0.625) for k in range(6, 12)] + [(3, k, 1.0) for k in range(12, 20)]
    two, four = speed_of(facts, steps(*rows)).worlds
    assert (two.world, two.steps, two.step_s, two.efficiency) == (2, 13, 1.0, 1.0)
    assert (four.world, four.steps, four.efficiency) == (4, 6, pytest.approx(0.8))
    assert two.tokens_per_s == 6400 and four.samples_per_s == pytest.approx(64 / 0.625)
    assert two.seconds == {} and four.seconds == pytest.approx(SPLIT) and four.mfu == 0.4


def test_an_older_run_has_a_curve_without_a_split():
    live = [Stamped(k, "w", StepDone(k, 1, 1.0, float(k), 0.5, 64, 640)) for k in range(1, 5)]
    found = speed_of([Stamped(0.0, "w", SESSION), *live], NONE)
    (only,) = found.worlds
    assert (only.steps, only.tokens_per_s) == (4, 1280) and found.windows == ()


def test_a_rank_that_is_slow_again_and_again_is_named():
    slow = [told(float(k), own_s=(0.5, 0.5, 0.6 + 0.01 * k), own_ranks=(0, 3)) for k in range(5)]
    (rank,) = speed_of([*slow, told(9.0, own_s=(0.5, 0.5, 0.51), own_ranks=(0, 2))]).slowest
    assert (rank.rank, rank.windows, rank.of, rank.behind) == (3, 5, 6, pytest.approx(0.24))
    by_chance = [told(float(k), own_s=(0.5, 0.5, 0.6), own_ranks=(0, k % 4)) for k in range(8)]
    assert speed_of(by_chance).slowest == ()


def test_many_windows_are_joined():
    many = [told(float(k), 1 + (k >= 70), 10 * k + 1, 10 * k + 10) for k in range(100)]
    found = speed_of(many, most_windows=10)
    assert len(found.windows) <= 11
    assert sum(w.steps for w in found.windows) == 1000
    assert {w.epoch for w in found.windows} == {1, 2}
    assert all(w.step_s == pytest.approx(1) for w in found.windows)


def test_profiles_are_listed():
    taken = ProfileTaken(1, 0, 20, 23, ("profiles/x",), 100)
    assert speed_of([Stamped(1.0, "w", taken)]).profiles == (taken,)
