"""What to keep."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import Keep, Ref
from storage.snapshots.retention import TAKEN, lineage

some_refs = st.sets(st.builds(Ref, st.integers(1, 4), st.integers(1, 60)), max_size=25)


def test_the_last_ones_stay() -> None:
    refs = [Ref(1, s) for s in (10, 20, 30, 40)]
    assert Keep(last=2)(refs) == {Ref(1, 30), Ref(1, 40)}
    assert Keep(last=9)(refs) == set(refs)
    assert Keep()([]) == set()


def test_milestones_stay() -> None:
    refs = [Ref(1, s) for s in range(5, 200, 10)]
    assert {r.step for r in Keep(last=1, every=50)(refs)} == {5, 55, 105, 155, 195}


def test_steps_at_which_something_ended_stay() -> None:
    refs = [Ref(1, s) for s in (10, 20, 30, 40)]
    assert Keep(last=1, ends=(20, 25))(refs) == {Ref(1, 20), Ref(1, 40)}


def test_what_a_newer_epoch_left_behind_is_no_milestone() -> None:
    """Epoch 1 got to step 105 while nobody heard; epoch 2 went on from 45."""
    refs = [Ref(1, 5), Ref(1, 45), Ref(1, 105), Ref(2, 60), Ref(2, 150)]
    assert lineage(refs) == [Ref(2, 150), Ref(2, 60), Ref(1, 45), Ref(1, 5)]
    assert Keep(last=1, every=50)(refs) == {Ref(1, 5), Ref(2, 60), Ref(2, 150)}


@given(some_refs, st.integers(1, 5), st.integers(0, 20))
def test_the_newest_always_stays_and_nothing_is_invented(
    refs: set[Ref], last: int, every: int
) -> None:
    stay = Keep(last, every)(refs)
    assert stay <= refs
    assert set(sorted(refs)[-last:]) <= stay


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 3), st.integers(1, 25))
def test_pruning_as_we_go_keeps_the_same_milestones_as_pruning_at_the_end(
    gaps: list[int], last: int, every: int
) -> None:
    keep, step, have, everything = Keep(last, every), 0, set(), set()
    for gap in gaps:
        step += gap
        everything.add(Ref(1, step))
        have = keep(have | {Ref(1, step)})
    assert have == keep(everything)


def test_bad_numbers_are_refused() -> None:
    for bad in ({"last": 0}, {"every": -1}):
        with pytest.raises(ValueError, match="last >= 1"):
            Keep(**bad)


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=20),
    st.integers(1, 3),
    st.sampled_from(["loss:min", "loss:max"]),
)
def test_the_best_survives_pruning_as_we_go(losses: list[float], last: int, best: str) -> None:
    keep, have, data = Keep(last, best=best), set(), {}
    for i, loss in enumerate(losses):
        data[Ref(1, i)] = {"loss": loss}
        have = keep(have | {Ref(1, i)}, data)
    wanted = (min if best == "loss:min" else max)(losses)
    assert wanted in [data[ref]["loss"] for ref in have] and have == keep(set(data), data)


def test_a_bad_metric_is_refused() -> None:
    for bad in ("loss", ":min", "loss:least"):
        with pytest.raises(ValueError, match="loss:min"):
            Keep(best=bad)


AGES = st.lists(st.floats(0.01, 50), max_size=4).map(tuple)


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=60), AGES, st.integers(1, 3))
def test_there_is_one_of_each_age_as_soon_as_there_was_one(
    gaps_h: list[float], ages_h: tuple[float, ...], last: int
) -> None:
    keep, now_h, have, data = Keep(last, ages_h=ages_h), 0.0, set[Ref](), {}
    for i, gap_h in enumerate(gaps_h):
        now_h += gap_h
        data[Ref(1, i)] = {TAKEN: now_h * 3600}
        have = keep(have | {Ref(1, i)}, data)
        old_h = [now_h - data[ref][TAKEN] / 3600 for ref in have]
        assert len(have) <= last + 2 * len(ages_h)
        for age_h in ages_h:
            if now_h - gaps_h[0] >= age_h + 1e-6:  # the first snapshot is as old
                found = min((h for h in old_h if h >= age_h - 1e-6), default=None)
                assert found is not None


def test_an_hour_of_bad_weights_can_be_undone_a_day_later() -> None:
    """A snapshot a minute over three days."""
    keep, have, data = Keep(ages_h=(0.25, 2, 24)), set[Ref](), {}
    for minute in range(3 * 24 * 60):
        data[Ref(1, minute)] = {TAKEN: minute * 60.0}
        have = keep(have | {Ref(1, minute)}, data)
    ages_h = sorted((3 * 24 * 60 - 1 - ref.step) / 60 for ref in have)
    found = [min(h for h in ages_h if h >= age) for age in (0.25, 2, 24)]
    assert len(have) == 9 and found[0] < 0.5 and found[1] < 4 and found[2] < 48


def test_a_clock_that_goes_back_loses_nothing_that_is_kept_by_number() -> None:
    refs = [Ref(1, step) for step in range(10)]
    data = {ref: {TAKEN: 1e9 - 3600.0 * ref.step} for ref in refs}
    assert set(refs[-3:]) <= Keep(3, ages_h=(1,))(refs, data)
    assert Keep(3, ages_h=(1,))(refs, {}) == set(refs[-3:])


def test_bad_ages_are_refused() -> None:
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="above 0"):
            Keep(ages_h=(bad,))
