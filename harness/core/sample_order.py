"""The order of samples: blocks, and mixtures, which say the source of each sample by weights that
may change with the step, and its index within that source. Every rank computes this, and all get
the same answer.

Pure, like batch.py: the sample at a position is a function of (seed, position). A mixture is a
dataset of all its sources, concatenated; its order is this:

    stretch                    steps (or part of a step) over which the weights are constant; as
                               whole numbers, `counts`: samples of each source in one row
    row                        the sources, evenly interleaved: A B A A B A A B A A; it repeats
    step k                     takes the next `global_batch` places of the row, so that the step,
                               and each of its micro-batches, has its share of each source to
                               within about one sample
    rank of a sample           number of earlier samples of its source: a count over whole rows, a
                               table lookup for the current row, and the total of earlier stretches
    epoch, offset = divmod(rank, samples of the source)
    index = permute(offset)    keyed by (seed, source, epoch)

With blocks each micro-batch of a step is a lane: it takes the next `lane_batch`
places of the row, lane m begins m * lane_batch places further on, and each lane counts separately.
A step still has the same share of each source, and lane m's i-th sample of a source is number i *
lanes + m of that source, which is a position in the source's own blocks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from harness.core.batch import (
    MAX_SAMPLES,
    Batching,
    Int64s,
    SampleOrder,
    mixed,
    mixed_bits,
    permute,
)
from harness.core.decoding import RUN_VERSION, Natural, Within, built
from harness.core.world import BadInput
from storage.canonical_json import BadObject, canonical

# A shuffle that reads in blocks: each micro-batch of a step has its own lane, and a lane reads a
# few blocks of neighbouring samples at a time. Every rank computes this; all get the same answer.

AT_ONCE = 4  # default blocks of a group
ITEMS = 1024  # default samples of a block, for a dataset that does not give a number
GROUPS = 8  # least groups of a lane where the size of blocks is chosen here
_BLOCKS, _WITHIN, _REST, _TURN = (0x626C6F636B, 0x77697468696E, 0x72657374, 0x7475726E)


@dataclass(frozen=True)
class Blocks:
    """A shuffle in blocks. `items`: neighbouring samples that form a block; `at_once`: blocks that
    a lane mixes. Raises BadInput for values out of bounds."""

    items: Annotated[int, Within(1, 2**40)]
    at_once: Annotated[int, Within(1, 2**20)] = AT_ONCE

    def __post_init__(self) -> None:
        for name, most in (("items", 2**40), ("at_once", 2**20)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise BadInput(f"Blocks({name}={value!r}): wanted a whole number from 1 to {most}")

    def check(self, batching: Batching) -> None:
        """Raise BadInput if a lane is smaller than a group, so that no sample would be in a
        block."""
        lane = _lane_items(batching.samples, batching.global_batch, batching.micro_batch)
        if self.items * self.at_once > max(1, lane):
            raise BadInput(
                f"Blocks(items={self.items}, at_once={self.at_once}): wanted at most the {lane} "
                "samples that a micro-batch consumes in an epoch; lower items=, or say "
                'shuffle="blocks" for a size that fits'
            )

    def encoded(self) -> dict[str, Any]:
        return {"kind": "blocks", **asdict(self)}

    def in_turns(self, batching: Batching, lanes: int) -> tuple[int, ...]:
        """Implement `harness.core.batch.in_turns`."""
        return (lanes * self.items * self.at_once,)

    def indices_at(self, batching: Batching, positions: Int64s) -> Int64s:
        """Implement `harness.core.batch.indices_at`."""
        b, n, seed = batching, batching.samples, batching.seed
        epoch, (step, within) = positions // n, np.divmod(positions, b.global_batch)
        lane, j = np.divmod(within, b.micro_batch)
        begins, ends = epoch * n, (epoch + 1) * n
        before = _in_lane(b, begins, lane)
        rank = step * b.micro_batch + j - before  # index in its lane, within this epoch
        whole = ends // b.global_batch - -(-begins // b.global_batch)  # steps within the epoch
        group_items = self.items * self.at_once
        groups = np.maximum(whole, 0) * b.micro_batch // group_items
        blocked = groups * group_items  # samples of each lane that lie in blocks
        out = np.empty_like(positions)
        here = rank < blocked
        out[here] = (n - blocked * b.micro_batches)[here] + self._in_blocks(
            b, epoch[here], lane[here], rank[here], groups[here]
        )
        here = ~here
        lower = _in_lower_lanes(b, ends, lane) - _in_lower_lanes(b, begins, lane) - lane * blocked
        size = _in_lane(b, ends, lane) - before - blocked
        which = mixed(epoch[here], lane[here])
        out[here] = lower[here] + _permuted(
            (rank - blocked)[here], size[here], mixed_bits(seed, _REST), which
        )
        turn = mixed(seed, _TURN, epoch) % np.uint64(n)
        out += turn.astype(np.int64).reshape(positions.shape)
        return np.where(out < n, out, out - n)

    def _in_blocks(
        self, b: Batching, epoch: Int64s, lane: Int64s, rank: Int64s, groups: Int64s
    ) -> Int64s:
        """Return the positions of samples within the concatenated blocks of their epoch. `rank`:
        index within the lane; `groups`: groups of each lane."""
        group_items = self.items * self.at_once
        group, w = np.divmod(rank, group_items)
        w = permute(w, group_items, mixed_bits(b.seed, _WITHIN), mixed(epoch, lane, group))
        block, item = np.divmod(w, self.items)
        block += (group * b.micro_batches + lane) * self.at_once
        number = groups * (b.micro_batches * self.at_once)  # blocks in an epoch
        return (
            _permuted(block, number, mixed_bits(b.seed, _BLOCKS), mixed(epoch)) * self.items + item
        )


def blocks_for(
    shuffle: str | Blocks, items: int, samples: int, global_batch: int, micro_batch: int
) -> Blocks:
    """Return the blocks for `shuffle=`. `items`: number of samples that are stored together (0:
    unknown). "blocks" means blocks of that size, or smaller ones where a lane would otherwise have
    fewer than `GROUPS` groups. Raises BadInput.

    run.json records the choice, and a run only resumes with the same one, so the choice for given
    arguments must never change.
    """
    if isinstance(shuffle, Blocks):
        return shuffle
    if shuffle != "blocks":
        raise BadInput(
            f'shuffle={shuffle!r}: wanted True, False, "blocks" or harness.data.Blocks(...)'
        )
    lane = _lane_items(samples, global_batch, micro_batch)
    at_once = max(1, min(AT_ONCE, lane))
    return Blocks(max(1, min(items or ITEMS, lane // (GROUPS * at_once))), at_once)


def _lane_items(samples: int, global_batch: int, micro_batch: int) -> int:
    """Return the fewest samples that a lane has in whole steps of an epoch."""
    return max(0, samples // global_batch - 1) * micro_batch


def _in_lane(b: Batching, position: Int64s, lane: Int64s) -> Int64s:
    """Return how many positions of `lane` come before `position`."""
    step, within = np.divmod(position, b.global_batch)
    return step * b.micro_batch + np.clip(within - lane * b.micro_batch, 0, b.micro_batch)


def _in_lower_lanes(b: Batching, position: Int64s, lane: Int64s) -> Int64s:
    """Return how many positions of the lanes below `lane` come before `position`."""
    step, within = np.divmod(position, b.global_batch)
    return step * lane * b.micro_batch + np.minimum(within, lane * b.micro_batch)


def _permuted(offsets: Int64s, sizes: Int64s, key: int, which: Any) -> Int64s:
    """Apply `permute` where each offset has its own size; there are few distinct sizes."""
    if sizes.size and sizes.min() == sizes.max():
        return permute(offsets, int(sizes[0]), key, which)
    out, which = np.empty_like(offsets), np.broadcast_to(which, offsets.shape)
    for size in np.unique(sizes).tolist():
        here = sizes == size
        out[here] = permute(offsets[here], size, key, which[here])
    return out


MOST_ROW = 65_536  # places of a row, and so the resolution of a weight
MOST_SOURCES, MOST_STAIRS = 256, 1024
MOST_TABLE = 1 << 24  # numbers that a mixture keeps in memory: stretches x sources x lanes
Weights: TypeAlias = tuple[Fraction, ...]  # one weight for each source
_MIXED, _EPOCH, _MIX_TURN = 0x6D69786564, 0x65706F6368, 0x7475726E


@dataclass(frozen=True)
class MixedSource:
    """One source of a mixture. `items`: its samples. `blocks`: its shuffle in blocks; `None`: one
    permutation of each of its epochs."""

    name: str
    items: Annotated[int, Within(1, 2**53)]
    blocks: Blocks | None = None


@dataclass(frozen=True)
class Stretch:
    """A part of the run with constant weights. `begin`: its first sample, counted within a lane.
    `counts`: samples of each source in one row."""

    begin: Natural
    counts: tuple[Annotated[int, Within(0, MOST_ROW)], ...]


@dataclass(frozen=True)
class MixedOrder:
    """The sample order of a mixture. A step consists of `lanes` lanes of `lane_batch` samples: one
    lane, or one for each micro-batch."""

    sources: tuple[MixedSource, ...]
    stretches: tuple[Stretch, ...]
    lanes: Annotated[int, Within(1, 2**40)]
    lane_batch: Annotated[int, Within(1, 2**40)]

    def check(self, batching: Batching) -> None:
        """Raise BadInput if this order contradicts itself or `batching`."""
        begins = [one.begin for one in self.stretches]
        size, samples = self.lanes * self.lane_batch, sum(one.items for one in self.sources)
        blocked = any(one.blocks for one in self.sources)
        well = (
            begins == sorted(set(begins)) and begins[:1] == [0],
            all(len(one.counts) == len(self.sources) for one in self.stretches),
            all(0 < sum(one.counts) <= MOST_ROW for one in self.stretches),
            size == batching.global_batch and samples == batching.samples,
            self.lane_batch == (batching.micro_batch if blocked else size),
            all(one.blocks is None or one.items >= self.lanes for one in self.sources),
        )
        if not all(well):
            raise BadInput(
                f"wanted the order of a mixture of {batching.samples} samples in steps of "
                f"{batching.global_batch}, found one of {samples} in steps of {size}, or one that "
                "contradicts itself"
            )

    def encoded(self) -> dict[str, Any]:
        return {"kind": "mixture", **asdict(self)}

    def in_turns(self, batching: Batching, lanes: int) -> tuple[int, ...]:
        """Implement `harness.core.batch.in_turns`."""
        blocked = any(one.blocks for one in self.sources)
        whole = 0 if batching.shuffle and not blocked else lanes * batching.micro_batch
        found = []
        for one in self.sources:
            if one.blocks is not None:
                (several,) = one.blocks.in_turns(batching, lanes)
            else:  # a small source among others in blocks is permuted as a whole
                several = one.items if blocked else whole
            found.append(min(several, one.items))
        return tuple(found)

    def indices_at(self, batching: Batching, positions: Int64s) -> Int64s:
        """Implement `harness.core.batch.indices_at`."""
        lane, q = self._place(batching, positions)
        out = np.empty_like(positions)
        stretch = np.searchsorted(self._begins, q, "right") - 1
        for i in np.unique(stretch).tolist():
            here = stretch == i
            source, rank = self._drawn(i, lane[here], q[here])
            out[here] = self._index(batching, source, rank * self.lanes + lane[here])
        return out

    def _place(self, b: Batching, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return (lane, index within the lane) of each position. With one lane a step's samples are
        rotated by a random number of places, so that no micro-batch has the same sources in every
        step."""
        step, within = np.divmod(positions, b.global_batch)
        if self.lanes == 1:
            turn = mixed(b.seed, _MIX_TURN, step) % np.uint64(b.global_batch)
            within = (within + turn.astype(np.int64).reshape(within.shape)) % b.global_batch
        lane, j = np.divmod(within, self.lane_batch)
        return lane, step * self.lane_batch + j

    def _drawn(self, i: int, lane: Int64s, q: Int64s) -> tuple[Int64s, Int64s]:
        """Return (source, number of its samples that the lane had before) for samples of a lane in
        stretch i."""
        row = _row(self.stretches[i].counts)
        first = lane * self.lane_batch
        place = q - self.stretches[i].begin + first
        source = row.sources[place % row.size].astype(np.int64)
        rank = row.before(source, place) - row.before(source, first)
        return source, self._earlier[i][source, lane] + rank

    def _index(self, b: Batching, source: Int64s, number: Int64s) -> Int64s:
        """Return the dataset index of each source's `number`-th sample, counted over its epochs."""
        out, offset = np.empty_like(number), 0
        for s, one in enumerate(self.sources):
            here = source == s
            if here.any():
                out[here] = offset + _shuffled(one, self.lanes, b, number[here])
            offset += one.items
        return out

    @functools.cached_property
    def _begins(self) -> Int64s:
        return np.array([one.begin for one in self.stretches], np.int64)

    @functools.cached_property
    def _earlier(self) -> list[Int64s]:
        """Samples of each source that each lane had before each stretch, shape (sources, lanes)."""
        out = [np.zeros((len(self.sources), self.lanes), np.int64)]
        for one, after in zip(self.stretches, self.stretches[1:], strict=False):
            had = _had(one.counts, after.begin - one.begin, self.lanes, self.lane_batch)
            out.append(out[-1] + had)
        return out


# ---- samples of a source -------------------------------------------------------------------------
def _shuffled(source: MixedSource, lanes: int, b: Batching, number: Int64s) -> Int64s:
    seed = _seed_of(b.seed, source.name)
    if source.blocks is not None:
        return source.blocks.indices_at(Batching(source.items, lanes, 1, seed), number)
    epoch, offset = np.divmod(number, source.items)
    if not b.shuffle:
        return offset
    return permute(offset, source.items, seed, mixed(_EPOCH, epoch))


def _seed_of(seed: int, name: str) -> int:
    """Return a source's own seed. It depends on the source's name, so the other sources of the
    mixture do not change its order."""
    own = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return mixed_bits(seed, _MIXED, own) >> 1


# ---- rows ----------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class _Row:
    """A row of places. `sources`: the source of each place, shape (size,). `upto`: samples of each
    source before each place, shape (sources, size + 1)."""

    sources: NDArray[np.int16]
    upto: NDArray[np.int32]

    @property
    def size(self) -> int:
        return len(self.sources)

    def before(self, source: Int64s, place: Int64s) -> Int64s:
        """Return how many samples of each `source` precede each `place`, as the row repeats."""
        rows, within = np.divmod(place, self.size)
        found: Int64s = rows * self.upto[source, -1] + self.upto[source, within]
        return found


@functools.lru_cache(maxsize=16)
def _row(counts: tuple[int, ...]) -> _Row:
    """Return the evenly interleaved row: the j-th of n samples lies at fraction (2 j + 1) / 2 n."""
    source = np.repeat(np.arange(len(counts)), counts)
    number = np.concatenate([np.arange(count) for count in counts])
    when = (2 * number + 1) * 2**40 // np.array(counts)[source]
    which = source[np.argsort(when, kind="stable")].astype(np.int16)
    upto = np.zeros((len(counts), len(which) + 1), np.int32)
    for s in range(len(counts)):
        np.cumsum(which == s, out=upto[s, 1:])
    return _Row(which, upto)


def _had(counts: tuple[int, ...], samples: int, lanes: int, lane_batch: int) -> Int64s:
    """Return the number of samples of each source among the first `samples` of a stretch, by lane:
    shape (sources, lanes)."""
    row, first = _row(counts), np.arange(lanes) * lane_batch
    which = np.arange(len(counts))[:, None]
    return row.before(which, first + samples) - row.before(which, first)


def counts_of(weights: Weights) -> tuple[int, ...]:
    """Return whole numbers in the proportions of `weights`: exact if their sum is at most
    `MOST_ROW`, otherwise the nearest with that sum, by largest remainder."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    size = math.lcm(*(share.denominator for share in shares))
    if size <= MOST_ROW:
        return tuple(int(share * size) for share in shares)
    counts = [int(share * MOST_ROW) for share in shares]
    left = sorted(range(len(shares)), key=lambda s: (counts[s] - shares[s] * MOST_ROW, s))
    for s in left[: MOST_ROW - sum(counts)]:
        counts[s] += 1
    return tuple(counts)


# ---- from weights and steps to stretches ---------------------------------------------------------
@dataclass(frozen=True)
class WeightPhase:
    """The weights, which sum to 1, from the moment that `after` steps are done. `stairs`: number of
    stairs by which they change to those of the next phase; 0: they stay constant."""

    after: int
    weights: Weights
    stairs: int = 0


def stretches_of(
    phases: Sequence[WeightPhase],
    sources: Sequence[MixedSource],
    most_epochs: Mapping[str, int],
    lanes: int,
    lane_batch: int,
) -> tuple[Stretch, ...]:
    """Return the stretches that follow from weights and steps. `most_epochs`: epochs after which a
    source ends (where lanes differ, before the first lane would exceed them); the others then share
    its weight. Raises BadInput."""
    names = [one.name for one in sources]
    # for each lane: numbers i * lanes + lane below the number of samples in the allowed epochs
    most = np.full((len(sources), lanes), MAX_SAMPLES)
    for s, one in enumerate(sources):
        if one.name in most_epochs:
            most[s] = -(-(most_epochs[one.name] * one.items - np.arange(lanes)) // lanes)
    had, over = np.zeros_like(most), set[int]()
    out: list[Stretch] = []
    stairs = _stairs(phases)
    for i, (after, weights) in enumerate(stairs):
        begin = after * lane_batch
        end = stairs[i + 1][0] * lane_batch if i + 1 < len(stairs) else None
        while end is None or begin < end:
            left = tuple(Fraction(0) if s in over else w for s, w in enumerate(weights))
            if not any(left):
                raise BadInput(
                    f"the mixture comes to its end in step {begin // lane_batch + 1}: all sources "
                    "that have a weight there have been read as often as epochs= allows; give one "
                    "without a limit a weight"
                )
            counts = counts_of(left)
            room = (most - had).clip(0)
            ends = {
                s: _lasts(counts, s, room[s], lanes, lane_batch)
                for s in range(len(sources))
                if counts[s] and names[s] in most_epochs
            }
            lasts = min(ends.values(), default=None)
            if lasts is None or (end is not None and begin + lasts >= end):
                lasts = None if end is None else end - begin
            else:
                over |= {s for s, found in ends.items() if found == lasts}
            if lasts != 0:
                out.append(Stretch(begin, counts))
            if lasts is None:
                break
            had += _had(counts, lasts, lanes, lane_batch)
            begin += lasts
    if len(out) * len(sources) * lanes > MOST_TABLE:
        raise BadInput(
            f"a mixture of {len(sources)} sources with {len(out)} changes of its weights over "
            f"{lanes} micro-batches: wanted a product of at most {MOST_TABLE}; use fewer stairs="
        )
    return tuple(out)


def _stairs(phases: Sequence[WeightPhase]) -> list[tuple[int, Weights]]:
    """Return (steps done, weights that follow) for each stair. A stair has the weights of its
    middle."""
    out: list[tuple[int, Weights]] = []
    for i, phase in enumerate(phases):
        after = phases[i + 1] if i + 1 < len(phases) else phase
        number = min(phase.stairs, after.after - phase.after)
        if not number or after.weights == phase.weights:
            out.append((phase.after, phase.weights))
            continue
        for k in range(number):
            t = Fraction(2 * k + 1, 2 * number)
            between = zip(phase.weights, after.weights, strict=True)
            begin = phase.after + (after.after - phase.after) * k // number
            out.append((begin, tuple((1 - t) * a + t * b for a, b in between)))
    return out


def _lasts(counts: tuple[int, ...], s: int, room: Int64s, lanes: int, lane_batch: int) -> int:
    """Return the most samples of each lane that fit before source `s` has no `room` left in one of
    the lanes."""
    row, first = _row(counts), np.arange(lanes) * lane_batch

    def beyond(samples: int) -> bool:
        which = np.full(1, s)
        used = row.before(which, first + samples) - row.before(which, first)
        return bool((used > room).any())

    most = (int(room.min()) // counts[s] + 2) * row.size
    return bisect_right(range(min(most, MAX_SAMPLES)), False, key=beyond) - 1


# The samples of a run in run.json: their number, batches and order. Workers write it; audits and
# `harness data show` read it. Pure.

MOST_ORDER_NBYTES = 24 << 10  # at most half of the bound of run.json
_KINDS: dict[str, type[Blocks | MixedOrder]] = {"blocks": Blocks, "mixture": MixedOrder}


def batching_of(identity: Mapping[str, Any]) -> Batching:
    """Return the batching, which determines the samples of every step. An iterable dataset (0
    samples) is one endless stream in its own order. Raises BadInput for an order that is unknown
    here or damaged."""
    return Batching(
        samples=identity["samples"] or MAX_SAMPLES,
        global_batch=identity["global_batch"],
        micro_batch=identity["micro_batch"],
        seed=identity["seed"],
        shuffle=identity["shuffle"] and identity["samples"] > 0,
        order=_order_of(canonical(identity["order"])) if "order" in identity else None,
    )


def said_of(order: SampleOrder | None) -> dict[str, Any]:
    """Return the fields of run.json for an order; none if samples are only permuted in each epoch,
    or not at all. Raises BadInput if they take too many bytes."""
    if order is None:
        return {}
    said = canonical(order.encoded())
    if len(said) > MOST_ORDER_NBYTES:
        raise BadInput(
            f"wanted an order that run.json says in {MOST_ORDER_NBYTES} bytes, found {len(said)}; "
            "use fewer stairs=, phases or sources"
        )
    return {"version": RUN_VERSION, "order": json.loads(said)}


@functools.lru_cache(maxsize=16)
def _order_of(said: bytes) -> SampleOrder:
    """Decode an order. It is cached, so that a mixture computes its tables once per run."""
    body = json.loads(said)
    kind = _KINDS.get(str(body.get("kind"))) if isinstance(body, dict) else None
    if kind is None:
        raise BadInput(
            f"run.json: wanted an order of {' or '.join(_KINDS)}, found {str(body)[:200]}; update "
            "the package here, or put back what run.json was"
        )
    try:
        return built(kind, body)
    except BadObject as e:
        raise BadInput(f"run.json: wanted an order as it was written: {e}") from e
