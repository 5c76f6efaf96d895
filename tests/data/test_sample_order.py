"""Blocks and mixtures: every sample exactly once in each pass, a share of the reads for each node,
a share of each step for each source, the same for any world."""

import copy
import json
from collections import OrderedDict
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.batch import (
    Batching,
    in_turns,
    indices,
    indices_at,
    mixed,
    permute,
    plan,
    positions_of,
)
from harness.core.sample_order import (
    MOST_ROW,
    Blocks,
    MixedOrder,
    batching_of,
    blocks_for,
    counts_of,
    said_of,
)
from harness.core.world import BadInput
from harness.data import Mixture
from harness.look.audit.audit_rules import RuleBroken, identity_of
from harness.loops.loop_loader import EpochOrder
from harness.worker.batches.feed import Feed
from harness.worker.batches.loader import fingerprint, has_contents
from storage.canonical_json import canonical

seeds = st.integers(0, 2**63 - 1)


def written(batching):
    """What run.json says of it."""
    sizes = {"version": 1, "samples": batching.samples, "global_batch": batching.global_batch}
    more = {"micro_batch": batching.micro_batch, "seed": batching.seed, "shuffle": batching.shuffle}
    return canonical({**sizes, **more, **said_of(batching.order)})


def batches(dataset, global_batch, micro_batch, shuffle=True, seed=7):
    """As `run.steps` makes them of a mixture."""
    order = dataset.sample_order(global_batch, micro_batch, shuffle)
    return Batching(len(dataset), global_batch, micro_batch, seed, bool(shuffle), order)


# ---- permutations of many kinds at once ----------------------------------------------------------
@settings(deadline=None)
@given(st.integers(1, 300), seeds)
def test_offsets_with_other_bits_are_permuted_in_another_way(n, key):
    at, which = np.arange(n), mixed(np.arange(3))
    found = permute(np.tile(at, 3), n, key, np.repeat(which, n)).reshape(3, n)
    for row, bits in zip(found, which, strict=True):
        assert sorted(row.tolist()) == at.tolist()
        assert row.tolist() == permute(at, n, key, np.full(n, bits)).tolist()
    if n > 100:
        assert len({tuple(row) for row in found.tolist()}) == 3


# ---- blocks --------------------------------------------------------------------------------------
@st.composite
def in_blocks(draw):
    micro, micros = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    size = micro * micros
    n = draw(st.integers(size, size + 400))
    lane = max(1, max(0, n // size - 1) * micro)
    items = draw(st.integers(1, lane))
    blocks = Blocks(items, draw(st.integers(1, lane // items)))
    return Batching(n, size, micro, draw(seeds), order=blocks)


@settings(deadline=None)
@given(in_blocks(), st.integers(0, 10**6))
def test_blocks_give_every_sample_exactly_once_per_epoch(b, epoch):
    at = np.arange(epoch * b.samples, (epoch + 1) * b.samples)
    found = indices_at(b, at)
    assert sorted(found.tolist()) == list(range(b.samples))
    # any position by itself, and as run.json gives it back
    one = at[len(at) // 3 :][:1]
    assert indices_at(b, one).tolist() == found[one - at[0]].tolist()
    assert batching_of(json.loads(written(b))) == b


def fetched(b, chunk_items, micros, room, steps):
    """Chunks that who does these micro-batches fetches in the first `steps`, with a cache of so
    many that were read last. As of windows of tokens: an item ends with the first token of the
    next."""
    held, fetches = OrderedDict(), 0
    every = indices_at(b, positions_of(b, 1, steps)).reshape(steps, b.micro_batches, -1)
    mine = every[:, list(micros)]
    for chunk in (np.stack([mine, mine + 1], -1) // chunk_items).ravel().tolist():
        fetches += chunk not in held
        held[chunk] = True
        held.move_to_end(chunk)
        if len(held) > room:
            held.popitem(last=False)
    return fetches


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_a_node_fetches_its_share(nodes):
    """32 chunks to a block: a block that lies across their edges has one more, an epoch's rests are
    less than a group for each lane. Its cache has room for the open blocks only."""
    chunk, blocks, micros = 4, Blocks(items=32 * 4, at_once=4), 12
    b = Batching(80_000, 48, 4, 3, order=blocks)
    steps = b.samples // b.global_batch
    for rank in (0, nodes - 1):
        mine = plan(micros, nodes).micros(rank)
        room = len(mine) * blocks.at_once * 33
        share = b.samples / chunk * len(mine) / micros
        rests = len(mine) * (blocks.at_once * 32 + 2)
        found = fetched(b, chunk, mine, room, steps)
        assert share - rests <= found <= 1.05 * share + rests, (found / share, rests / share)
    plain = Batching(80_000, 48, 4, 3)
    mine = plan(micros, nodes).micros(0)
    room = len(mine) * blocks.at_once * 33
    alone = fetched(plain, chunk, mine, room, steps // 10)
    assert alone > 2 * b.samples / 10 / chunk * len(mine) / micros  # what blocks are for


@pytest.mark.parametrize("micros", [1, 4, 8])
@pytest.mark.parametrize("shuffle", [False, Blocks(128, 4)])
@pytest.mark.parametrize("of", ["one", "mixture"])
def test_who_holds_what_is_read_in_turns_fetches_it_once(of, shuffle, micros):
    """... with one part in eight besides, and eight chunks, for edges."""
    chunk, steps = 4, 800
    if of == "mixture":
        sources = {"web": range(50_000), "code": range(30_000), "notes": range(20)}
        b = batches(Mixture(sources, {"web": 7, "code": 3, "notes": 0.01}), 32, 4, shuffle)
    else:
        b = Batching(80_000, 32, 4, 3, bool(shuffle), shuffle or None)
    held = in_turns(b, micros)
    assert len(held) == (3 if of == "mixture" else 1) and 0 not in held
    room = sum(int(1.125 * n) // chunk + 8 for n in held)
    share = steps * b.micro_batch * micros / chunk
    begun = sum(held) / chunk
    # in order a step's chunks are shared with who does the others
    at_most = share * (1.15 if shuffle else min(b.micro_batches / micros, 4)) + begun + 8
    assert fetched(b, chunk, range(micros), room, steps) <= at_most
    few = fetched(b, chunk, range(micros), max(1, room // 4), steps)
    assert not shuffle or few > 1.5 * at_most


def test_who_reads_in_no_order_reads_all_in_turns():
    sources = {"web": range(5000), "notes": range(20)}
    assert in_turns(Batching(5000, 32, 4, 3), 4) == (0,)
    assert in_turns(batches(Mixture(sources, {"web": 1, "notes": 1}), 32, 4, True), 4) == (0, 0)
    tiny = Mixture({"a": range(20), "b": range(30)}, {"a": 1, "b": 1})  # no lane has a block
    assert in_turns(batches(tiny, 32, 4, "blocks"), 4) == (0, 0)


def test_how_well_blocks_mix():
    """A step's samples come from nearly as many blocks as its lanes have open; samples that were
    neighbours are in one step seldom, and no block is where it was in the epoch before."""
    b = Batching(1_000_000, 256, 8, 5, order=Blocks(items=128, at_once=8))
    lanes, n = b.micro_batches, b.samples
    distinct = [len(set((indices_at(b, positions_of(b, k)) // 128).tolist())) for k in (50, 999)]
    assert min(distinct) > 0.6 * 256  # of 256 samples, from lanes * 8 blocks
    of_lane = indices_at(b, np.arange(8) + 256 * 70)
    assert len(set((of_lane // 128).tolist())) >= 4
    epochs = [indices_at(b, positions_of(b, 1, 3000) + e * n) for e in range(2)]
    assert np.mean(epochs[0] == epochs[1]) < 0.001
    # how far apart two samples of a step are: as of two drawn at random, n / 3 on average
    rng, step = np.random.default_rng(0), indices_at(b, positions_of(b, 1, 3000)).reshape(3000, -1)
    i, j = rng.integers(0, 256, (2, 3000))
    far = np.abs(step[np.arange(3000), i] - step[np.arange(3000), j])[i // 8 != j // 8]
    assert 0.3 < far.mean() / n < 0.37
    assert np.mean(far < 128) < 5 * 2 * 128 / n * lanes


def test_a_size_that_fits_is_chosen_and_one_that_does_not_is_refused():
    assert blocks_for("blocks", 512, 10**7, 512, 8) == Blocks(512, 4)
    assert blocks_for("blocks", 0, 10**7, 512, 8) == Blocks(1024, 4)
    small = blocks_for("blocks", 512, 10_000, 512, 8)
    assert small == Blocks(4, 4)
    for samples in (512, 600, 1024, 3000, 10_000):  # whatever there is, it fits
        Batching(samples, 512, 8, 0, order=blocks_for("blocks", 512, samples, 512, 8))
    with pytest.raises(BadInput, match="wanted at most the 144 samples that a micro-batch"):
        Batching(10_000, 512, 8, 0, order=Blocks(512))
    for wrong in ({"items": 0}, {"items": 8, "at_once": -1}, {"items": 2.0}):
        with pytest.raises(BadInput, match="wanted a whole number from 1"):
            Blocks(**wrong)
    with pytest.raises(BadInput, match="shuffle='block': wanted True, False"):
        blocks_for("block", 0, 100, 10, 5)


# ---- mixtures ------------------------------------------------------------------------------------
@st.composite
def mixtures(draw):
    names = "abcd"[: draw(st.integers(1, 4))]
    sources = {name: range(draw(st.integers(1, 200))) for name in names}
    weight = st.one_of(st.integers(0, 5), st.floats(0.01, 3))
    some = st.fixed_dictionaries(dict.fromkeys(names, weight)).filter(lambda w: any(w.values()))
    steps = draw(st.lists(st.integers(1, 60), max_size=3, unique=True).map(sorted))
    schedule = [(after, draw(some)) for after in [0, *steps]]
    ramp = draw(st.sampled_from(["", "linear"]))
    dataset = Mixture(sources, schedule=schedule, ramp=ramp, stairs=draw(st.integers(1, 5)))
    micro, micros = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    size = min(micro, len(dataset)) * max(1, min(micros, len(dataset) // micro))
    shuffle = draw(st.sampled_from([True, False, "blocks"]))
    return dataset, batches(dataset, size, min(micro, len(dataset)), shuffle, draw(seeds))


@settings(deadline=None, max_examples=60)
@given(mixtures())
def test_each_source_is_read_exactly_once_in_each_of_its_epochs(case):
    """... but for the last, in which some are left. Lanes are not in step, so with blocks an epoch
    begins in some when it has not ended in others."""
    dataset, b = case
    found = indices_at(b, positions_of(b, 1, 120))
    times = np.bincount(found, minlength=len(dataset))
    lanes, begins = b.order.lanes, np.cumsum([0, *map(len, dataset.sources.values())])
    for begin, end in pairwise(begins.tolist()):
        most = 1 if lanes == 1 else 2 + 4 * len(b.order.stretches) * lanes // (end - begin)
        assert times[begin:end].max() - times[begin:end].min() <= most
    # any step by itself, in any world, and as run.json gives it back
    assert batching_of(json.loads(written(b))) == b
    for step in (1, 60, 120):
        for micro in range(b.micro_batches):
            here = indices(b, step, micro).tolist()
            start = (step - 1) * b.global_batch + micro * b.micro_batch
            assert here == found[start : start + b.micro_batch].tolist()


@settings(deadline=None, max_examples=60)
@given(mixtures())
def test_numbers_within_a_source_go_through_all_of_its_epochs(case):
    """The exact claim: who had so many of a source before, lane by lane, gets the next; so over
    any steps no (source, epoch, sample) comes twice."""
    _, b = case
    at = positions_of(b, 1, 90)
    lane, q = b.order._place(b, at)
    stretch = np.searchsorted(b.order._begins, q, "right") - 1
    seen = {}
    for i in np.unique(stretch).tolist():
        here = stretch == i
        source, rank = b.order._drawn(i, lane[here], q[here])
        for key, n in zip(zip(source.tolist(), lane[here].tolist(), strict=True), rank, strict=True):
            seen.setdefault(key, []).append(int(n))
    for numbers in seen.values():
        assert sorted(numbers) == list(range(len(numbers)))


@pytest.mark.parametrize("shuffle", [True, "blocks"])
def test_each_step_and_micro_batch_has_its_share_of_each_source(shuffle):
    sources = {"web": range(50_000), "code": range(9_000), "books": range(3_000)}
    shares = {"web": 0.7, "code": 0.2, "books": 0.1}
    b = batches(Mixture(sources, shares), 64, 8, shuffle)
    which = np.searchsorted([50_000, 59_000], indices_at(b, positions_of(b, 1, 500)), "right")
    for s, share in enumerate(shares.values()):
        of_steps = (which == s).reshape(500, 64).sum(axis=1)
        of_micros = (which == s).reshape(-1, 8).sum(axis=1)
        assert np.abs(of_steps - 64 * share).max() <= 1.5
        assert np.abs(of_micros - 8 * share).max() <= 2.5
        assert abs((which == s).mean() - share) < 1e-3
        for micro in range(8):  # nobody has more of one source than others have
            mine = (which == s).reshape(500, 8, 8)[:, micro].mean()
            assert abs(mine - share) < 0.02


def test_a_ramp_goes_by_stairs_from_one_weight_to_the_next():
    b = batches(
        Mixture(
            {"a": range(10_000), "b": range(10_000)},
            schedule=[(0, {"a": 1}), (100, {"a": 1}), (300, {"a": 1, "b": 3}), (400, {"b": 1})],
            ramp="linear",
            stairs=10,
        ),
        40,
        4,
    )
    share = (indices_at(b, positions_of(b, 1, 600)) >= 10_000).reshape(600, 40).mean(axis=1)
    assert share[:100].max() == 0 and share[400:].min() == 1
    wanted = np.interp(np.arange(600) + 0.5, [0, 100, 300, 400], [0, 0, 0.75, 1])
    assert np.abs(share - wanted).max() < 0.75 / 20 + 2 / 40
    assert len(b.order.stretches) == 1 + 10 + 10 + 1


def test_a_source_ends_after_its_passes_and_the_others_share_its_weight():
    sources = {"web": range(5_000), "code": range(101), "chat": range(37)}
    weights = {"web": 0.5, "code": 0.3, "chat": 0.2}
    dataset = Mixture(sources, weights, epochs={"code": 4, "chat": 1})
    found = indices_at(b := batches(dataset, 20, 4), positions_of(b, 1, 300))
    times = np.bincount(found, minlength=len(dataset))
    assert times[5_000:5_101].tolist() == [4] * 101 and times[5_101:].tolist() == [1] * 37
    assert len(b.order.stretches) == 3 and (found[-2000:] < 5_000).all()
    second = found.reshape(300, 20)[11:50]  # chat is over: 5 to 3 for web
    assert abs((second < 5_000).mean() - 5 / 8) < 0.01 and second.max() < 5_101
    lanes = indices_at(b := batches(dataset, 20, 4, "blocks"), positions_of(b, 1, 300))
    times = np.bincount(lanes, minlength=len(dataset))
    assert times[5_000:5_101].max() == 4 and times[5_000:5_101].sum() >= 4 * 101 - 2 * 5
    only = Mixture({"a": range(50), "b": range(50)}, {"a": 1, "b": 1}, epochs={"a": 1, "b": 2})
    with pytest.raises(BadInput, match=r"comes to its end in step 16: all sources"):
        only.sample_order(10, 5, True)


def test_passes_without_weights_are_the_weights():
    dataset = Mixture({"web": range(600), "code": range(100)}, epochs={"web": 1, "code": 4})
    found = indices_at(b := batches(dataset, 20, 5), positions_of(b, 1, 50))
    times = np.bincount(found, minlength=700)
    assert times[:600].tolist() == [1] * 600 and times[600:].tolist() == [4] * 100
    alike = Mixture({"web": range(600), "code": range(100)})
    assert alike.sample_order(20, 5, True).stretches[0].counts == (6, 1)


def test_a_source_keeps_its_own_order_when_others_come_or_go():
    alone = batches(Mixture({"code": range(500)}, {"code": 1}), 10, 5)
    beside = batches(Mixture({"web": range(900), "code": range(500)}, {"web": 2, "code": 1}), 10, 5)

    def number(b, first, step_count):
        """Of code, in the order of the row."""
        at = positions_of(b, 1, step_count)
        _, q = b.order._place(b, at)
        found = indices_at(b, at)[np.argsort(q, kind="stable")]
        return (found[found >= first] - first).tolist()

    mine, theirs = number(alone, 0, 50), number(beside, 900, 150)
    assert mine[:400] == theirs[:400] and len(set(mine)) == 500


def test_weights_become_whole_numbers():
    def counts(*weights):
        return counts_of(tuple(Fraction(str(one)) for one in weights))

    assert counts(0.7, 0.3) == (7, 3) and counts(2, 0, 6) == (1, 0, 3)
    assert sum(found := counts(1 / 3, 2 / 3, 0.123456789)) == MOST_ROW
    shares = np.array([1 / 3, 2 / 3, 0.123456789]) / 1.123456789
    assert np.abs(np.array(found) - MOST_ROW * shares).max() < 1


AB = {"a": range(10), "b": range(20)}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (({}, {}), "wanted 1 to 256 sources"),
        (({"a": []}, {"a": 1}), "wanted map-style datasets with samples"),
        (({"a": iter([1])}, {"a": 1}), "found list_iterator as 'a'"),
        (({3: [1]}, {3: 1}), "found list as 3"),
        ((AB, {"c": 1}), r"wanted names of its sources \(a, b\), found 'c'"),
        ((AB, {"a": -1}), "'a': -1}.: wanted a number, 0 or more"),
        ((AB, {"a": float("nan")}), "wanted a number"),
        ((AB, {"a": float("inf")}), "wanted a number"),
        ((AB, {"a": True}), "wanted a number"),
        ((AB, {"a": "1"}), "wanted a number"),
        ((AB, {"a": 0, "b": 0}), "a weight above 0"),
        ((AB, {}), "a weight above 0"),
        ((AB, {"a": 1, "b": 1e-6}), "1 of 65536 samples at least, or none, found less for 'b'"),
    ],
)
def test_what_is_no_mixture_is_refused(arguments, says):
    with pytest.raises(BadInput, match=says):
        Mixture(*arguments)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"schedule": []}, "the first from 0, found"),
        ({"schedule": [(1, {"a": 1})]}, r"the first from 0, found \[1\]"),
        ({"schedule": [(0, {"a": 1}), (9, {"b": 1}), (5, {"a": 1})]}, r"found \[0, 9, 5\]"),
        ({"schedule": [(0, {"a": 1}), (0, {"b": 1})]}, r"found \[0, 0\]"),
        ({"schedule": [(0, {"a": 1}), (1.5, {"b": 1})]}, "found"),
        ({"schedule": [(0, {"a": 0})]}, "a weight above 0"),
        ({"schedule": [(0, {"a": 1})], "weights": {"a": 1}}, "weights= or schedule=, found both"),
        ({"weights": {"a": 1}, "ramp": "linear"}, 'wanted ramp="linear"'),
        ({"schedule": [(0, {"a": 1})], "ramp": "cosine"}, 'wanted ramp="linear"'),
        ({"schedule": [(0, {"a": 1})], "ramp": "linear", "stairs": 0}, "1 to 1024 stairs"),
        ({"weights": {"a": 1}, "epochs": {"a": 1.5}}, "a whole number of passes"),
        ({"weights": {"a": 1}, "epochs": {"a": 0}}, "a whole number of passes"),
        ({"epochs": {"c": 1}}, "found 'c'"),
    ],
)
def test_what_is_no_schedule_is_refused(more, says):
    with pytest.raises(BadInput, match=says):
        Mixture(AB, **more)


def test_a_mixture_in_a_mixture_is_refused():
    with pytest.raises(BadInput, match="found Mixture as 'both'"):
        Mixture({"both": Mixture(AB), "c": range(3)})


def test_sources_of_any_kind_are_one_dataset():
    """Fingerprints and contents are those of the sources, where all of them have some."""

    class Known(list):
        fingerprint = "known"
        block_items = 3

        def content_ids(self, indices, as_read=True):
            return np.array([1000 * self[i] + as_read for i in indices], np.int64)

    known = Mixture({"a": Known([5, 6]), "b": Known([7, 8, 9])})
    assert known.fingerprint == 'mixture:[["a","known"],["b","known"]]'
    assert known.__getitems__([4, 0, 2, -1]) == [9, 5, 7, 9]
    assert known.content_ids([4, 0, 2, -1], False).tolist() == [9000, 5000, 7000, 9000]
    assert [known.source_of(i) for i in (0, 1, 2, -1)] == [("a", 0), ("a", 1), ("b", 0), ("b", 2)]
    with pytest.raises(IndexError, match="item 5 of 5"):
        known[5]
    again = copy.copy(known)
    again.sources = {"a": Known([1, 2]), "b": Known([3, 4, 5])}
    assert again.content_ids([0]).tolist() == [1001]
    plain = Mixture({"a": Known([5, 6]), "b": [7, 8, 9]})
    assert has_contents(known) and not has_contents(plain)
    assert plain.fingerprint is None and fingerprint(plain).startswith("sampled:")
    assert fingerprint(plain) != fingerprint(Mixture({"a": Known([5, 6]), "b": [7, 8, 0]}))


def test_a_stream_has_no_blocks():
    with pytest.raises(BadInput, match="_Some is iterable, so it comes in an order of its own"):
        Feed(SimpleNamespace(world=1), 7, None).open(_Some(), 8, 2, "blocks", None)


class _Some:
    def __iter__(self):
        return iter(range(3))


def test_who_reads_epoch_by_epoch_refuses_orders_of_steps():
    with pytest.raises(BadInput, match="found a mixture, whose order goes by steps"):
        EpochOrder(Mixture(AB), None, True, 7)
    with pytest.raises(BadInput, match="found shuffle='blocks', whose order"):
        EpochOrder(range(100), None, "blocks", 7)


# ---- what run.json says --------------------------------------------------------------------------
def test_an_order_that_run_json_cannot_hold_is_refused():
    schedule = [(k, {"a": 1, "b": 1 + k % 2}) for k in range(0, 1800, 3)]
    order = Mixture(AB, schedule=schedule, ramp="linear", stairs=1000).sample_order(10, 5, True)
    with pytest.raises(BadInput, match=r"in 24576 bytes, found .*; use fewer stairs="):
        said_of(order)


def test_a_run_without_an_order_says_nothing_of_it():
    b = Batching(100, 10, 5, 3)
    assert b"order" not in written(b) and b'"version":1' in written(b)
    assert batching_of(json.loads(written(b))) == b
    assert b'"version":2' in written(Batching(100, 10, 5, 3, order=Blocks(2, 2)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "spiral"}, "wanted an order of blocks or mixture"),
        ({"lanes": 2}, "or one that contradicts itself"),
        ({"sources": []}, "contradicts itself"),
        ({"stretches": []}, "contradicts itself"),
        ({"stretches": [{"begin": 3, "counts": [1, 1]}]}, "contradicts itself"),
        ({"stretches": [{"begin": 0, "counts": [0, 0]}]}, "contradicts itself"),
        ({"stretches": [{"begin": 0, "counts": [1]}]}, "contradicts itself"),
        ({"stretches": [{"begin": 0, "counts": [1, -1]}]}, "as it was written"),
        ({"lane_batch": "20"}, "as it was written"),
    ],
)
def test_a_changed_order_is_found(change, says):
    b = batches(Mixture(AB), 20, 5)
    body = json.loads(written(b))
    assert identity_of("run.json", canonical(body)) == body
    assert isinstance(batching_of(body).order, MixedOrder)
    body["order"] |= change
    with pytest.raises(RuleBroken, match=f"(?s)run.json: .*{says}"):
        identity_of("run.json", canonical(body))
