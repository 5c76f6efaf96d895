"""Every sample exactly once per epoch, on any number of ranks: batch.py's arithmetic against
its definition."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.batch import (
    MAX_SAMPLES,
    Batching,
    Grouping,
    Plan,
    digest,
    expected_digest,
    halved,
    indices,
    indices_at,
    permute,
    plan,
    positions,
    sample_hash,
    sample_seed,
    seed_for,
)
from harness.core.world import BadInput, whole_replicas

seeds = st.integers(0, 2**63 - 1)


@st.composite
def batchings(draw: st.DrawFn) -> Batching:
    micro_batch, micro_batches = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    global_batch = micro_batch * micro_batches
    return Batching(
        draw(st.integers(global_batch, global_batch + 97)),
        global_batch,
        micro_batch,
        draw(seeds),
        draw(st.booleans()),
    )


# ---- what is refused -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((100, 10, 4, 0), "global_batch=8 or 12"),
        ((100, 3, 4, 0), "use global_batch=4,"),
        ((9, 10, 5, 0), "at least one global batch, found 9 samples"),
        ((0, 10, 5, 0), "samples must be a whole number"),
        ((100, 0, 5, 0), "global_batch must be"),
        ((100, 10, -5, 0), "micro_batch must be"),
        ((100, 10.0, 5, 0), "global_batch must be a whole number from 1 to .*, found 10.0"),
        ((100, 10, 5, -1), "seed must be"),
        ((100, 10, 5, 2**63), "seed must be"),
    ],
)
def test_bad_sizes_are_refused_in_words(sizes: tuple[int, int, int, int], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Batching(*sizes)


def test_ranks_that_make_no_whole_replicas_are_refused_in_words() -> None:
    with pytest.raises(
        BadInput, match="5 ranks make no whole number of replicas of 2 ranks; use 4 "
    ):
        plan(8, 5, grouping=Grouping(2))
    with pytest.raises(BadInput, match="replicas of 4 ranks; use 4 ranks"):
        plan(8, 3, grouping=Grouping(4))
    with pytest.raises(BadInput, match="at least 1 rank, found 0"):
        plan(8, 5, grouping=Grouping(0))
    with pytest.raises(BadInput, match=r"found 3 replicas of 2 ranks, .* use at most 4 ranks"):
        plan(2, 6, grouping=Grouping(2))


def test_bad_plans_are_refused_in_words() -> None:
    with pytest.raises(BadInput, match=r"4 micro-batches, found 5 ranks.*at most 4 ranks"):
        plan(4, 5)
    with pytest.raises(BadInput, match="at least 1 rank"):
        plan(4, 0)
    for speeds in ([1.0], [1.0, 0.0], [1.0, float("nan")], [1.0, float("inf")], [1.0, -2.0]):
        with pytest.raises(BadInput, match="2 positive finite numbers"):
            plan(4, 2, speeds)


def test_steps_and_ranks_that_do_not_exist() -> None:
    batching = Batching(100, 10, 5, 0)
    for step, micro in ((0, 0), (1, 2), (1, -1)):
        with pytest.raises(ValueError, match="steps begin at 1"):
            indices(batching, step, micro)
    for rank in (-1, 2):
        with pytest.raises(IndexError):
            plan(4, 2).micros(rank)
    with pytest.raises(ValueError, match=r"must be in 0\.\.9"):
        permute([10], 10, 0)


# ---- plans ---------------------------------------------------------------------------------------
@given(st.data(), st.integers(1, 300))
def test_a_plan_gives_every_micro_batch_to_exactly_one_rank(
    data: st.DataObject, micro_batches: int
) -> None:
    ranks = data.draw(st.integers(1, micro_batches))
    speeds = data.draw(st.none() | st.lists(st.floats(1e-3, 1e3), min_size=ranks, max_size=ranks))
    p = plan(micro_batches, ranks, speeds)
    assert len(p.shares) == ranks
    assert min(p.shares) >= 1
    assert [m for rank in range(ranks) for m in p.micros(rank)] == list(range(micro_batches))
    assert p.starts == tuple(p.micros(rank).start for rank in range(ranks))
    assert all(p.fillers(rank) + len(p.micros(rank)) == p.rounds for rank in range(ranks))
    if speeds is None:
        assert p.rounds - min(p.shares) <= 1
        assert all(a >= b for a, b in pairwise(p.shares))


@pytest.mark.parametrize(
    ("micro_batches", "ranks", "shares"),
    [(12, 5, (3, 3, 2, 2, 2)), (12, 12, (1,) * 12), (64, 6, (11, 11, 11, 11, 10, 10))],
)
def test_uneven_shares(micro_batches: int, ranks: int, shares: tuple[int, ...]) -> None:
    assert plan(micro_batches, ranks) == Plan(shares)
    assert plan(micro_batches, ranks, [3.5] * ranks) == Plan(shares)  # equal speeds are no speeds


@given(st.data(), st.integers(1, 40), st.integers(1, 5))
def test_a_plan_runs_over_replicas_and_all_ranks_of_one_do_the_same(
    data: st.DataObject, micro_batches: int, replica_ranks: int
) -> None:
    replicas = data.draw(st.integers(1, micro_batches))
    ranks = replicas * replica_ranks
    speeds = data.draw(st.none() | st.lists(st.floats(1e-3, 1e3), min_size=ranks, max_size=ranks))
    p = plan(micro_batches, ranks, speeds, Grouping(replica_ranks))
    slowest = None
    if speeds is not None:
        slowest = [min(speeds[i * replica_ranks :][:replica_ranks]) for i in range(replicas)]
    assert p == Plan(plan(micro_batches, replicas, slowest).shares, Grouping(replica_ranks))
    assert p.ranks == ranks
    done = [p.micros(rank) for rank in range(ranks)]
    firsts = done[::replica_ranks]
    assert [m for micros in firsts for m in micros] == list(range(micro_batches))
    assert done == [micros for micros in firsts for _ in range(replica_ranks)]
    assert all(p.fillers(r) + len(p.micros(r)) == p.rounds for r in range(ranks))
    with pytest.raises(IndexError):
        p.micros(ranks)


@given(
    st.lists(st.integers(1, 6), max_size=7),
    st.integers(1, 6),
    st.none() | st.integers(0, 20),
)
def test_a_world_is_the_largest_of_whole_replicas(
    sizes: list[int], replica_ranks: int, most: int | None
) -> None:
    chosen = whole_replicas(sizes, replica_ranks, None if most is None else most * replica_ranks)
    assert chosen == sorted(set(chosen))
    total = sum(sizes[i] for i in chosen)
    assert total % replica_ranks == 0 and (most is None or total <= most * replica_ranks)
    if most is None:
        subsets = product((0, 1), repeat=len(sizes))
        sums = [sum(s for s, take in zip(sizes, some, strict=True) if take) for some in subsets]
        assert total == max(s for s in sums if s % replica_ranks == 0)
    if replica_ranks == 1 and most is None:
        assert chosen == list(range(len(sizes)))


@pytest.mark.parametrize(
    ("sizes", "replica_ranks", "chosen"),
    [
        ([1, 1, 1], 2, [0, 1]),  # the last one is the spare
        ([8, 8, 8], 16, [0, 1]),
        ([8, 8, 8], 4, [0, 1, 2]),
        ([3, 3, 1], 2, [0, 1]),
        ([1, 3, 3], 2, [1, 2]),  # as few ranks as possible wait
        ([1], 2, []),
        ([], 2, []),
    ],
)
def test_who_waits_where_replicas_do_not_come_out_even(
    sizes: list[int], replica_ranks: int, chosen: list[int]
) -> None:
    assert whole_replicas(sizes, replica_ranks) == chosen


@given(
    st.lists(st.integers(1, 6), max_size=7),
    st.integers(1, 3),
    st.none() | st.integers(0, 20),
    st.sets(st.integers(1, 20), min_size=1),
)
def test_a_world_has_the_greatest_number_of_ranks_that_is_allowed(
    sizes: list[int], replica_ranks: int, most: int | None, worlds: set[int]
) -> None:
    chosen = whole_replicas(sizes, replica_ranks, most, worlds)
    assert chosen == sorted(set(chosen))
    sums = {
        sum(s for s, take in zip(sizes, some, strict=True) if take)
        for some in product((0, 1), repeat=len(sizes))
    }
    fit = {w for w in worlds & sums if not w % replica_ranks and (most is None or w <= most)}
    assert sum(sizes[i] for i in chosen) == max(fit, default=0)
    if len(set(sizes)) == 1:
        assert chosen == list(range(len(chosen)))  # who was there stays


@given(
    st.lists(st.integers(1, 20).map(float) | st.floats(0.1, 10), min_size=1, max_size=4),
    st.integers(0, 8),
)
def test_speeds_give_the_shortest_step(speeds: list[float], extra: int) -> None:
    ranks = len(speeds)
    micro_batches = ranks + extra
    every = (
        s for s in product(range(1, micro_batches + 1), repeat=ranks) if sum(s) == micro_batches
    )
    best = min(max(share / speed for share, speed in zip(s, speeds, strict=True)) for s in every)
    found = plan(micro_batches, ranks, speeds).shares
    assert max(share / speed for share, speed in zip(found, speeds, strict=True)) == best


# ---- the permutation -----------------------------------------------------------------------------
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_every_offset_goes_to_its_own_index(n: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


@pytest.mark.parametrize("n", [*range(1, 70), 2**16 - 1, 2**16, 2**16 + 1])
def test_sizes_around_powers_of_two(n: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, 7)), np.arange(n))


@settings(deadline=None)
@given(
    st.integers(2**30, MAX_SAMPLES),
    st.integers(0, 2**64 - 1),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=50),
)
def test_huge_sizes_stay_in_range_and_do_not_collide(n: int, key: int, where: list[float]) -> None:
    offsets = np.unique(
        np.minimum(np.array([int(w * n) for w in where] + [0, 1, n - 1], np.int64), n - 1)
    )
    found = permute(offsets, n, key)
    assert found.min() >= 0
    assert found.max() < n
    assert len(np.unique(found)) == len(offsets)


def test_shape_and_scalars() -> None:
    assert permute(np.arange(6).reshape(2, 3), 6, 1).shape == (2, 3)
    assert permute(3, 6, 1).shape == ()
    assert permute(np.array([], np.int64), 6, 1).shape == (0,)


def test_well_mixed_over_keys() -> None:
    """Each small permutation about equally often: chi-square over 24 of them, 1 in 1e6 by
    chance (23 degrees: 71)."""
    rows = [tuple(permute(np.arange(4), 4, key).tolist()) for key in range(2400)]
    _, counts = np.unique(np.array(rows), axis=0, return_counts=True)
    assert len(counts) == 24
    assert ((counts - 100.0) ** 2 / 100).sum() < 71


def test_well_mixed_over_places() -> None:
    """No order is left: cells of (place, index), steps between neighbours, and correlation of
    one key's order with the next's."""
    n, cells = 100_000, 32
    for key in range(3):
        found = permute(np.arange(n), n, key)
        table, _, _ = np.histogram2d(np.arange(n), found, bins=cells)
        expected = n / cells**2
        chi = ((table - expected) ** 2 / expected).sum()
        assert abs(chi - cells**2) < 6 * np.sqrt(2 * cells**2)  # mean and spread of chi-square
        gaps = np.abs(np.diff(found)) / n
        assert abs(gaps.mean() - 1 / 3) < 0.005  # of two independent uniform numbers
        for other in (permute(np.arange(n), n, key + 1), np.arange(n), np.roll(found, 1)):
            assert abs(np.corrcoef(found, other)[0, 1]) < 0.02


# ---- samples -------------------------------------------------------------------------------------
def test_a_halved_micro_batch_is_a_part_of_the_first() -> None:
    for micro_batch in range(1, 200):
        for times in range(9):
            less = halved(micro_batch, times)
            assert less >= 1 and micro_batch % less == 0
            assert halved(less, 1) <= max(1, less // 2)
    assert [halved(12, times) for times in range(6)] == [12, 6, 3, 1, 1, 1]
    assert halved(35, 1) == 7 and halved(2**40, 10**9) == 1


@settings(deadline=None)
@given(batchings(), st.integers(0, 4), st.integers(1, 9))
def test_halved_micro_batches_have_the_same_samples_in_each_step(
    b: Batching, times: int, step: int
) -> None:
    less = b.halved(times)
    assert less.as_asked == b and less.global_batch == b.global_batch
    mine = np.concatenate([indices(less, step, m) for m in range(less.micro_batches)])
    assert mine.tolist() == indices_at(b, np.arange(*_span(b, step))).tolist()
    assert expected_digest(less, step) == expected_digest(b, step)


def _span(b: Batching, step: int) -> tuple[int, int]:
    return (step - 1) * b.global_batch, step * b.global_batch


@settings(deadline=None)
@given(batchings(), st.integers(1, 6))
def test_every_sample_once_per_epoch_whatever_the_worlds(b: Batching, epochs: int) -> None:
    """The ranks change every step; the concatenation of what they took is whole epochs all the
    same."""
    steps = -(-epochs * b.samples // b.global_batch)
    stream: list[int] = []
    for step in range(1, steps + 1):
        p = plan(b.micro_batches, 1 + step % b.micro_batches)
        by_rank = [[indices(b, step, m) for m in p.micros(rank)] for rank in range(len(p.shares))]
        stream += np.concatenate([i for own in by_rank for i in own]).tolist()
    for epoch in range(epochs):
        part = stream[epoch * b.samples : (epoch + 1) * b.samples]
        assert sorted(part) == list(range(b.samples))
        assert b.shuffle or part == list(range(b.samples))


def test_epochs_and_seeds_have_their_own_order() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        b = Batching(50, 50, 50, seed)
        return tuple(indices(b, epoch + 1, 0).tolist())

    assert len({order(seed, epoch) for seed in range(5) for epoch in range(5)}) == 25


def test_the_order_never_changes_between_versions() -> None:
    """Runs in the wild resume by these numbers; a change here breaks their sample-exactness."""
    b = Batching(1000, 8, 4, 42)
    assert indices(b, 1, 0).tolist() == [668, 298, 312, 924]
    assert indices(b, 125, 1).tolist() == [379, 769, 595, 763]
    assert f"{expected_digest(b, 3):016x}" == "397a2abc423c8fc5"
    assert (seed_for(42, 3, 1), sample_seed(42, 17)) == (7607401358362518838, 1955918291998184183)


def test_far_along_a_huge_dataset() -> None:
    b = Batching(10**10, 4096, 8, 3)
    step = 5 * 10**6  # 2 * 10^10 samples on: the third epoch
    got = np.concatenate([indices(b, step, m) for m in range(b.micro_batches)])
    assert len(np.unique(got)) == 4096
    assert got.max() < 10**10
    assert got.max() > 9 * 10**9
    assert digest(sample_hash(np.arange((step - 1) * 4096, step * 4096), got)) == expected_digest(
        b, step
    )


# ---- digests -------------------------------------------------------------------------------------
@settings(deadline=None)
@given(batchings(), st.integers(1, 1000), st.data())
def test_the_digest_is_the_same_in_any_world_and_shows_any_change(
    b: Batching, step: int, data: st.DataObject
) -> None:
    p = plan(b.micro_batches, data.draw(st.integers(1, b.micro_batches)))
    total = 0
    for rank in reversed(range(len(p.shares))):
        for m in p.micros(rank):
            total += digest(sample_hash(positions(b, step, m), indices(b, step, m)))
    assert total % 2**64 == expected_digest(b, step)

    where = np.arange((step - 1) * b.global_batch, step * b.global_batch)
    taken = indices_at(b, where)
    victim = data.draw(st.integers(0, b.global_batch - 1))
    changed = taken.copy()
    changed[victim] = data.draw(st.integers(0, b.samples).filter(lambda i: i != taken[victim]))
    assert digest(sample_hash(where, changed)) != expected_digest(b, step)
    doubled = np.append(taken, taken[victim])  # a sample done twice
    assert digest(sample_hash(np.append(where, where[victim]), doubled)) != expected_digest(b, step)
    assert digest(
        sample_hash(np.delete(where, victim), np.delete(taken, victim))
    ) != expected_digest(b, step)


def test_swapping_two_samples_shows() -> None:
    where, taken = np.arange(8), np.arange(100, 108)
    swapped = taken[[1, 0, *range(2, 8)]]
    assert digest(sample_hash(where, taken)) != digest(sample_hash(where, swapped))


def test_hashes_do_not_collide_and_are_balanced() -> None:
    where, taken = np.divmod(np.arange(250_000), 500)
    hashes = sample_hash(where, taken)
    assert hashes.dtype == np.uint64
    assert len(np.unique(hashes)) == len(hashes)
    bits = (hashes[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.01


# ---- seeds ---------------------------------------------------------------------------------------
def test_seeds_are_63_bits_and_all_different() -> None:
    found = [
        seed_for(s, step, micro) for s in range(4) for step in range(1, 200) for micro in range(25)
    ]
    found += [sample_seed(s, position) for s in range(4) for position in range(5000)]
    assert len(set(found)) == len(found)
    assert all(0 <= f < 2**63 for f in found)
    bits = (np.array(found, np.uint64)[:, None] >> np.arange(63, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.02
