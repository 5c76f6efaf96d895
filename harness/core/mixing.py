"""Mixtures: which source each sample is of, by weights that may change with the step, and which of
the source's samples it is. Every rank asks; all get the same answer.

Pure, as batch.py is: the sample at a position is a function of (seed, position). A mixture is a
dataset of all its sources, one behind the other; its order is this:

    stretch                    steps (or a part of one) over which the weights stay the same; as
                               whole numbers, `counts`: so many of each source in a row of their sum
    row                        the sources, evenly interleaved: A B A A B A A B A A; it comes again
                               and again
    step k                     takes the next `global_batch` places of the row, so that it has its
                               share of each source to a sample or so, and so has each micro-batch
    rank of a sample           how many of its source came before: a count over whole rows, a look
                               at a table for the row begun, and what earlier stretches had
    epoch, offset = divmod(rank, samples of the source)
    index = permute(offset)    keyed by (seed, source, epoch)

With blocks (blocks.py) each micro-batch of a step is a lane: it takes the next `lane_batch` places
of the row, lane m begins m * lane_batch places further on, and each counts for itself. So a step
has the same share of each source, and the lane's i-th sample of a source is number i * lanes + m of
it, which is a position in the source's own blocks.
"""

from __future__ import annotations

import functools
import hashlib
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from harness.core.batch import MAX_SAMPLES, Batching, Int64s, combined, mixed, permute
from harness.core.blocks import Blocks
from harness.core.values import Natural, Within
from harness.core.world import BadInput

MOST_ROW = 65_536  # places of a row; a weight is known to one of so many
MOST_SOURCES, MOST_STAIRS = 256, 1024
MOST_TABLE = 1 << 24  # numbers that a mixture keeps at hand: stretches x sources x lanes
Weights: TypeAlias = tuple[Fraction, ...]  # of each source
_MIXED, _EPOCH, _TURN = 0x6D69786564, 0x65706F6368, 0x7475726E


@dataclass(frozen=True)
class MixedSource:
    """`items`: samples in it; `blocks`: None: one permutation of each of its epochs."""

    name: str
    items: Annotated[int, Within(1, 2**53)]
    blocks: Blocks | None = None


@dataclass(frozen=True)
class Stretch:
    """From `begin` on, in samples of a lane, each row has so many of each source."""

    begin: Natural
    counts: tuple[Annotated[int, Within(0, MOST_ROW)], ...]


@dataclass(frozen=True)
class MixedOrder:
    """`lanes` of `lane_batch` samples make a step: one lane, or one for each micro-batch."""

    sources: tuple[MixedSource, ...]
    stretches: tuple[Stretch, ...]
    lanes: Annotated[int, Within(1, 2**40)]
    lane_batch: Annotated[int, Within(1, 2**40)]

    def check(self, batching: Batching) -> None:
        """Raises BadInput."""
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
        """As `harness.core.batch.in_turns`."""
        blocked = any(one.blocks for one in self.sources)
        whole = 0 if batching.shuffle and not blocked else lanes * batching.micro_batch
        found = []
        for one in self.sources:
            if one.blocks is not None:
                (several,) = one.blocks.in_turns(batching, lanes)
            else:  # beside others in blocks it is permuted whole, which is little
                several = one.items if blocked else whole
            found.append(min(several, one.items))
        return tuple(found)

    def indices_at(self, batching: Batching, positions: Int64s) -> Int64s:
        """As `harness.core.batch.indices_at`."""
        lane, q = self._place(batching, positions)
        out = np.empty_like(positions)
        stretch = np.searchsorted(self._begins, q, "right") - 1
        for i in np.unique(stretch).tolist():
            here = stretch == i
            source, rank = self._drawn(i, lane[here], q[here])
            out[here] = self._index(batching, source, rank * self.lanes + lane[here])
        return out

    def _place(self, b: Batching, positions: Int64s) -> tuple[Int64s, Int64s]:
        """(lane, which of the lane's samples). With one lane a step's samples are turned by a
        random number of places, so that no micro-batch has the same sources in every step."""
        step, within = np.divmod(positions, b.global_batch)
        if self.lanes == 1:
            turn = mixed(b.seed, _TURN, step) % np.uint64(b.global_batch)
            within = (within + turn.astype(np.int64).reshape(within.shape)) % b.global_batch
        lane, j = np.divmod(within, self.lane_batch)
        return lane, step * self.lane_batch + j

    def _drawn(self, i: int, lane: Int64s, q: Int64s) -> tuple[Int64s, Int64s]:
        """(source, how many of it the lane had before) of a lane's samples in stretch i."""
        row = _row(self.stretches[i].counts)
        first = lane * self.lane_batch
        place = q - self.stretches[i].begin + first
        source = row.sources[place % row.size].astype(np.int64)
        rank = row.before(source, place) - row.before(source, first)
        return source, self._earlier[i][source, lane] + rank

    def _index(self, b: Batching, source: Int64s, number: Int64s) -> Int64s:
        """Of the `number`-th sample of each source, over its epochs."""
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
        """How many of each source each lane had before each stretch: (sources, lanes)."""
        out = [np.zeros((len(self.sources), self.lanes), np.int64)]
        for one, after in zip(self.stretches, self.stretches[1:], strict=False):
            had = _had(one.counts, after.begin - one.begin, self.lanes, self.lane_batch)
            out.append(out[-1] + had)
        return out


# ---- which sample of a source --------------------------------------------------------------------
def _shuffled(source: MixedSource, lanes: int, b: Batching, number: Int64s) -> Int64s:
    seed = _seed_of(b.seed, source.name)
    if source.blocks is not None:
        return source.blocks.indices_at(Batching(source.items, lanes, 1, seed), number)
    epoch, offset = np.divmod(number, source.items)
    if not b.shuffle:
        return offset
    return permute(offset, source.items, seed, mixed(_EPOCH, epoch))


def _seed_of(seed: int, name: str) -> int:
    """By its name: what else is in the mixture does not change a source's order."""
    own = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return combined(seed, _MIXED, own) >> 1


# ---- rows ----------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class _Row:
    """`sources`: at each place, (size,); `upto`: how many of each come before a place, (sources,
    size + 1)."""

    sources: NDArray[np.int16]
    upto: NDArray[np.int32]

    @property
    def size(self) -> int:
        return len(self.sources)

    def before(self, source: Int64s, place: Int64s) -> Int64s:
        """How many of each `source` come before each `place`, in row after row."""
        rows, within = np.divmod(place, self.size)
        found: Int64s = rows * self.upto[source, -1] + self.upto[source, within]
        return found


@functools.lru_cache(maxsize=16)
def _row(counts: tuple[int, ...]) -> _Row:
    """Evenly interleaved: the j-th of n comes (2 j + 1) / 2 n through the row."""
    source = np.repeat(np.arange(len(counts)), counts)
    number = np.concatenate([np.arange(count) for count in counts])
    when = (2 * number + 1) * 2**40 // np.array(counts)[source]
    which = source[np.argsort(when, kind="stable")].astype(np.int16)
    upto = np.zeros((len(counts), len(which) + 1), np.int32)
    for s in range(len(counts)):
        np.cumsum(which == s, out=upto[s, 1:])
    return _Row(which, upto)


def _had(counts: tuple[int, ...], samples: int, lanes: int, lane_batch: int) -> Int64s:
    """Of each source in the first `samples` of a stretch, by lane: (sources, lanes)."""
    row, first = _row(counts), np.arange(lanes) * lane_batch
    which = np.arange(len(counts))[:, None]
    return row.before(which, first + samples) - row.before(which, first)


def counts_of(weights: Weights) -> tuple[int, ...]:
    """Whole numbers in these proportions: exactly where their sum is at most `MOST_ROW`, else the
    nearest with that sum, by largest remainder."""
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
    """The weights, of sum 1, once `after` steps are done. `stairs`: so many, up or down to those of
    the next phase; 0: they stay."""

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
    """`most_epochs`: a source ends with its last sample of so many (of lanes that differ, before
    the first would go further), and the others share its weight. Raises BadInput."""
    names = [one.name for one in sources]
    # of each lane: numbers i * lanes + lane below that of the samples in so many epochs
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
    """(steps done, weights of what follows). A stair has the weights of its middle."""
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
    """The most samples of each lane before source `s` has no `room` left in one of them."""
    row, first = _row(counts), np.arange(lanes) * lane_batch

    def beyond(samples: int) -> bool:
        which = np.full(1, s)
        used = row.before(which, first + samples) - row.before(which, first)
        return bool((used > room).any())

    most = (int(room.min()) // counts[s] + 2) * row.size
    return bisect_right(range(min(most, MAX_SAMPLES)), False, key=beyond) - 1
