"""What to keep."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import Keep, Ref
from storage.retention import lineage

some_refs = st.sets(st.builds(Ref, st.integers(1, 4), st.integers(1, 60)), max_size=25)


def test_the_last_ones_stay() -> None:
    refs = [Ref(1, s) for s in (10, 20, 30, 40)]
    assert Keep(last=2)(refs) == {Ref(1, 30), Ref(1, 40)}
    assert Keep(last=9)(refs) == set(refs)
    assert Keep()([]) == set()


def test_milestones_stay() -> None:
    refs = [Ref(1, s) for s in range(5, 200, 10)]
    assert {r.step for r in Keep(last=1, every=50)(refs)} == {5, 55, 105, 155, 195}


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
