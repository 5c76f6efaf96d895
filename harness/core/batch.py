"""The samples that a step consumes, and their assignment to ranks. Every rank computes this, and
all get the same answer.

Pure: no torch, no clock, no randomness but arithmetic on the seed. The samples of step k are a
function of (seed, k) alone, so there is no data cursor to save, and the number of ranks may change
between any two steps:

    position p = 0, 1, 2, ...          one endless stream of samples
    step k (the first is 1)            takes positions [(k-1) * G, k * G)
    micro-batch m of a step            takes its b positions from m * b on
    epoch, offset = divmod(p, N)       every sample exactly once per epoch
    index = permute(offset)            keyed by (seed, epoch); computed, never stored; an `order`
                                       has its own rule (sample_order.py)
    plan                               cuts the micro-batches 0 .. G/b - 1 into one contiguous run
                                       per replica

A replica is one copy of the model, held by `replica_ranks` ranks (R) that work on the same
micro-batches: 1 for data parallelism, more where a layer is split between ranks. Ranks are numbered
replica by replica: replica i has ranks [i * R, (i + 1) * R).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harness.core.world import BadInput

Int64s: TypeAlias = NDArray[np.int64]
Uint64s: TypeAlias = NDArray[np.uint64]

MAX_SAMPLES = 2**62  # so that the halves of the Feistel network fit 31 bits, their products 62
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
# 4 rounds pass the tests for n > 1000; small n needs 8, since each round has few bits to work with
_ROUNDS = 8
# keys that separate the uses of one seed
_ORDER, _MICRO, _SAMPLE, _DIGEST = (0x6F72646572, 0x6D6963726F, 0x73616D706C65, 0x646967657374)


class SampleOrder(Protocol):
    """A map from positions to samples that is more than a permutation of each epoch. It is a value:
    equal objects give the same order."""

    def check(self, batching: Batching) -> None:
        """Raise BadInput if this order does not fit these sizes."""

    def indices_at(self, batching: Batching, positions: Int64s) -> Int64s:
        """Implement the function `indices_at`; the result depends on (seed, position) alone."""

    def in_turns(self, batching: Batching, lanes: int) -> tuple[int, ...]:
        """Implement the function `in_turns`."""

    def encoded(self) -> dict[str, Any]:
        """Return the form that run.json stores (sample_order.py)."""


@dataclass(frozen=True)
class Batching:
    """The sizes that must not change during a run, however many ranks it has, in samples."""

    samples: int  # length of the dataset, N
    global_batch: int  # samples per step, G
    micro_batch: int  # samples per forward/backward, b
    seed: int
    shuffle: bool = True
    order: SampleOrder | None = None
    # the micro-batch that the script asks for, if memory ran out with it; 0: `micro_batch`
    asked_micro_batch: int = 0

    def __post_init__(self) -> None:
        for name, limit in (
            ("samples", MAX_SAMPLES),
            ("global_batch", 2**40),
            ("micro_batch", 2**40),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
                raise BadInput(
                    f"{name} must be a whole number from 1 to {limit}, found {value!r}; pass "
                    f"another {name}"
                )
        if (
            isinstance(self.seed, bool)
            or not isinstance(self.seed, int)
            or not 0 <= self.seed < 2**63
        ):
            raise BadInput(
                f"seed must be a whole number from 0 to 2**63 - 1, found {self.seed!r}; pass "
                "another seed"
            )
        if self.global_batch % self.micro_batch:
            down = self.global_batch - self.global_batch % self.micro_batch
            near = f"{down} or {down + self.micro_batch}" if down else f"{self.micro_batch}"
            raise BadInput(
                f"global_batch must be a multiple of micro_batch, found {self.global_batch} and "
                f"{self.micro_batch}; use global_batch={near}, or a micro_batch that divides "
                f"{self.global_batch}"
            )
        if self.samples < self.global_batch:
            raise BadInput(
                f"the dataset must hold at least one global batch, found {self.samples} samples "
                f"and global_batch={self.global_batch}; lower global_batch or add data"
            )
        if self.order is not None and not self.asked_micro_batch:
            self.order.check(self)

    def halved(self, times: int) -> Batching:
        """Return the batching with a micro-batch that was halved so often: the same samples in each
        step, in smaller parts."""
        micro_batch = halved(self.micro_batch, times)
        if micro_batch == self.micro_batch:
            return self
        return replace(self, micro_batch=micro_batch, asked_micro_batch=self.micro_batch)

    @property
    def as_asked(self) -> Batching:
        """The batching that the script asks for. Orders of samples depend on it."""
        if not self.asked_micro_batch:
            return self
        return replace(self, micro_batch=self.asked_micro_batch, asked_micro_batch=0)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step; the greatest number of replicas that can share a step."""
        return self.global_batch // self.micro_batch


def halved(micro_batch: int, times: int) -> int:
    """Return a micro-batch after so many halvings. Each takes the greatest divisor that is at most
    the half, so that global batches stay whole numbers of micro-batches; 1 stays 1."""
    for _ in range(times):
        if micro_batch == 1:
            break
        divisors = (d for d in range(2, math.isqrt(micro_batch) + 1) if not micro_batch % d)
        micro_batch //= next(divisors, micro_batch)
    return micro_batch


@dataclass(frozen=True)
class Grouping:
    """The grouping of ranks into replicas: the `ranks` ranks of a replica get the same samples.

    They have consecutive numbers within a pipeline stage. `stages`: pipeline stages. `abreast`:
    replicas that share a copy of the model. Within a copy, stages are rows and replicas columns:
    rank 5 of `Grouping(ranks=4, stages=2, abreast=2)` belongs to replica 0, since the first stage
    of both replicas comes before the second.
    """

    ranks: int = 1
    stages: int = 1
    abreast: int = 1

    def replica(self, rank: int) -> int:
        """Return the replica that `rank` is in."""
        copy, within = divmod(rank, self.ranks * self.abreast)
        return copy * self.abreast + within // (self.ranks // self.stages) % self.abreast

    def stage(self, rank: int) -> int:
        """Return the stage that `rank` has: 0, 1, ... below `stages`."""
        return rank % (self.ranks * self.abreast) // (self.ranks // self.stages * self.abreast)

    def leads_stage(self, rank: int) -> bool:
        """Return whether `rank` is the first of its replica's ranks that have its stage."""
        return rank % (self.ranks // self.stages) == 0

    def leads(self, rank: int) -> bool:
        """Return whether `rank` is the first of its replica."""
        return self.leads_stage(rank) and self.stage(rank) == 0


@dataclass(frozen=True)
class Plan:
    """The number of micro-batches that each replica does in every step; contiguous, in the order of
    replicas. All ranks of a replica do the same ones."""

    shares: tuple[int, ...]
    grouping: Grouping = Grouping()

    @property
    def ranks(self) -> int:
        return len(self.shares) * self.grouping.ranks

    @property
    def starts(self) -> tuple[int, ...]:
        """The first micro-batch of each replica."""
        return tuple(accumulate(self.shares[:-1], initial=0))

    @property
    def rounds(self) -> int:
        """Number of forwards that every rank must do where a strategy's forward has collectives
        over replicas."""
        return max(self.shares)

    def replica(self, rank: int) -> int:
        """Return the replica that `rank` is in. Raises IndexError for a rank outside the plan."""
        if not 0 <= rank < self.ranks:
            raise IndexError(f"rank {rank} of a plan for {self.ranks} ranks")
        return self.grouping.replica(rank)

    def micros(self, rank: int) -> range:
        """Return the micro-batches of `rank`, which all ranks of its replica share."""
        replica = self.replica(rank)
        start = sum(self.shares[:replica])
        return range(start, start + self.shares[replica])

    def fillers(self, rank: int) -> int:
        """Return the number of zero-weight forwards that bring `rank` up to `rounds`."""
        return self.rounds - self.shares[self.replica(rank)]


class TooManyRanks(BadInput):
    """A step has work for at most `room` ranks."""

    def __init__(self, room: int, what: str):
        super().__init__(what)
        self.room = room


def plan(
    micro_batches: int,
    ranks: int,
    speeds: Sequence[float] | None = None,
    grouping: Grouping = Grouping(),
) -> Plan:
    """Distribute `micro_batches` over the replicas that `ranks` ranks make, at least one to each.

    Without `speeds` (samples per second of each rank, any unit) shares differ by at most one,
    larger ones first. With `speeds` the time of a step, max(share / speed), is minimal: each
    further micro-batch goes to the replica that would finish it first. A replica is as fast as its
    slowest rank. Ties go to the lower replica, so every rank computes the same plan. Raises
    TooManyRanks, BadInput.
    """
    if ranks < 1:
        raise BadInput(f"a plan needs at least 1 rank, found {ranks}; start a worker")
    replica_ranks = grouping.ranks
    replicas = replicas_of(ranks, replica_ranks)
    if replicas > micro_batches:
        what = "ranks" if replica_ranks == 1 else f"replicas of {replica_ranks} ranks"
        raise TooManyRanks(
            micro_batches * replica_ranks,
            f"a step has {micro_batches} micro-batches, found {replicas} {what}, and each needs "
            "at least one; lower micro_batch, raise global_batch, or use at most "
            f"{micro_batches * replica_ranks} ranks",
        )
    if speeds is None:
        share, larger = divmod(micro_batches, replicas)
        shares = (share + 1,) * larger + (share,) * (replicas - larger)
        return Plan(shares, grouping)
    if len(speeds) != ranks or not all(math.isfinite(s) and s > 0 for s in speeds):
        raise BadInput(
            f"speeds must be {ranks} positive finite numbers, one per rank, found {list(speeds)}; "
            "leave them out if unknown"
        )
    slowest = [math.inf] * replicas
    for rank, speed in enumerate(speeds):
        slowest[grouping.replica(rank)] = min(slowest[grouping.replica(rank)], speed)
    return Plan(_by_speed(micro_batches, slowest), grouping)


def replicas_of(ranks: int, replica_ranks: int) -> int:
    """Return the number of replicas that `ranks` ranks make. Raises BadInput if ranks are left
    over."""
    if replica_ranks < 1:
        raise BadInput(f"a replica has at least 1 rank, found {replica_ranks}")
    if ranks % replica_ranks:
        down = ranks - ranks % replica_ranks
        near = f"{down} or {down + replica_ranks}" if down else f"{replica_ranks}"
        raise BadInput(
            f"{ranks} ranks make no whole number of replicas of {replica_ranks} ranks; use {near} "
            "ranks, or replicas of another size (HARNESS_REPLICA_RANKS, harness run "
            "--replica-ranks)"
        )
    return ranks // replica_ranks


def _by_speed(micro_batches: int, speeds: Sequence[float]) -> tuple[int, ...]:
    shares = [1] * len(speeds)
    # (time at which the replica would finish one more micro-batch, replica)
    heap = [(2 / speed, replica) for replica, speed in enumerate(speeds)]
    heapq.heapify(heap)
    for _ in range(micro_batches - len(speeds)):
        replica = heap[0][1]
        shares[replica] += 1
        heapq.heapreplace(heap, ((shares[replica] + 1) / speeds[replica], replica))
    return tuple(shares)


def positions(batching: Batching, step: int, micro: int) -> Int64s:
    """Return the stream positions of one micro-batch, shape (b,)."""
    if step < 1 or not 0 <= micro < batching.micro_batches:
        raise ValueError(
            f"step {step}, micro-batch {micro}: steps begin at 1, micro-batches are "
            f"0..{batching.micro_batches - 1}"
        )
    first = (step - 1) * batching.global_batch + micro * batching.micro_batch
    return np.arange(first, first + batching.micro_batch, dtype=np.int64)


def indices(batching: Batching, step: int, micro: int) -> Int64s:
    """Return the dataset indices of one micro-batch, shape (b,)."""
    return indices_at(batching, positions(batching, step, micro))


def indices_at(batching: Batching, positions: Int64s) -> Int64s:
    """Return the dataset indices of any stream positions, same shape."""
    if batching.order is not None:
        return batching.order.indices_at(batching.as_asked, np.asarray(positions, dtype=np.int64))
    epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64), batching.samples)
    if not batching.shuffle:
        return offsets
    out = np.empty_like(offsets)
    # usually one epoch; two where the micro-batch crosses the end of one
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        out[here] = permute(
            offsets[here], batching.samples, mixed_bits(_ORDER, batching.seed, epoch)
        )
    return out


def in_turns(batching: Batching, lanes: int) -> tuple[int, ...]:
    """Return over how many neighbouring samples the reads of a rank that does `lanes` micro-batches
    of each step are spread at a time; one number per source of the order. 0: over all samples."""
    if batching.order is not None:
        asked = batching.as_asked
        return batching.order.in_turns(asked, -(-lanes * batching.micro_batch // asked.micro_batch))
    return (0 if batching.shuffle else lanes * batching.micro_batch,)


def permute(offsets: ArrayLike, n: int, key: int, which: Uint64s | None = None) -> Int64s:
    """Apply a keyed pseudo-random permutation of 0..n-1 to `offsets`. The result has the same
    shape; nothing of size n is allocated. `which`: well mixed bits for each offset (`mixed`);
    offsets with different bits are permuted by different permutations.

    It is a Feistel network over pairs (left, right) of an a x b rectangle, a ~ b ~ sqrt(n), the
    smallest that holds n (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Fewer
    than a of its cells lie outside 0..n-1; an offset that lands there is mapped again until it is
    inside, which keeps the map a bijection.
    """
    x = np.asarray(offsets, dtype=np.int64)
    if not 0 < n <= MAX_SAMPLES:
        raise ValueError(f"n must be from 1 to {MAX_SAMPLES}, found {n}")
    if x.size and (x.min() < 0 or x.max() >= n):
        raise ValueError(f"offsets must be in 0..{n - 1}, found {x.min()}..{x.max()}")
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    keys = [mixed_bits(key, r) for r in range(_ROUNDS)]
    tweak = np.zeros(1, np.uint64) if which is None else np.broadcast_to(which, x.shape).ravel()
    out = _feistel(np.atleast_1d(x).astype(np.uint64).ravel(), a, b, keys, tweak)
    while (outside := out >= n).any():
        own = tweak if which is None else tweak[outside]
        out[outside] = _feistel(out[outside], a, b, keys, own)
    return out.astype(np.int64).reshape(x.shape)


def sample_hash(positions: ArrayLike, indices: ArrayLike) -> Uint64s:
    """Return a 64-bit hash of each (position, index), shape (n,). For one position, different
    indices never collide (a bijection)."""
    where = _mix_array(np.asarray(positions, dtype=np.int64).astype(np.uint64) ^ np.uint64(_DIGEST))
    return _mix_array(where + np.asarray(indices, dtype=np.int64).astype(np.uint64))


def digest(hashes: Uint64s) -> int:
    """Return the sum mod 2^64: independent of order and grouping, so the sums of ranks add up."""
    return int(np.sum(hashes, dtype=np.uint64))


def positions_of(batching: Batching, first: int, steps: int = 1) -> Int64s:
    """Return the positions that `steps` steps from `first` on consume, in order."""
    size = batching.global_batch
    return np.arange((first - 1) * size, (first - 1 + steps) * size, dtype=np.int64)


def expected_digest(batching: Batching, step: int) -> int:
    """Return the digest that `step` must have, whichever ranks loaded its samples."""
    where = positions_of(batching, step)
    return digest(sample_hash(where, indices_at(batching, where)))


def expected_digests(batching: Batching, first: int, steps: int) -> Uint64s:
    """Return `expected_digest` of `steps` steps from `first` on, shape (steps,), in a tenth of the
    time."""
    where = positions_of(batching, first, steps)
    hashes = sample_hash(where, indices_at(batching, where))
    found: Uint64s = hashes.reshape(steps, batching.global_batch).sum(axis=1, dtype=np.uint64)
    return found


def seed_for(seed: int, step: int, micro: int) -> int:
    """Return a 63-bit seed for the randomness inside one micro-batch (dropout...): the same on
    every rank."""
    return mixed_bits(_MICRO, seed, step, micro) >> 1


def sample_seed(seed: int, position: int) -> int:
    """Return a 63-bit seed for the randomness of one sample (augmentation...): the same in every
    process."""
    return mixed_bits(_SAMPLE, seed, position) >> 1


def mixed(*numbers: ArrayLike) -> Uint64s:
    """Return `mixed_bits` of arrays, element by element: 64 well mixed bits of several whole
    numbers, in their order. The shape is their broadcast shape, at least (1,)."""
    out = np.zeros(1, np.uint64)
    for number in numbers:
        out = _mix_array(out ^ _mix_array(np.asarray(number).astype(np.uint64)))
    return out


def _feistel(x: Uint64s, a: int, b: int, keys: Sequence[int], tweak: Uint64s) -> Uint64s:
    """Pass once over the a x b rectangle; each round adds a hash of one half to the other, so it is
    invertible. `tweak`: changes the hashes; shape (1,) or that of x."""
    left, right = np.divmod(x, np.uint64(b))
    size, other = a, b
    for key in keys:
        # The top half of the hash, scaled to 0..size-1 by a product instead of a slow 64-bit
        # division.
        shift = (
            (_mix_array(right ^ (np.uint64(key) ^ tweak)) >> np.uint64(32)) * np.uint64(size)
        ) >> np.uint64(32)
        left = left + shift
        left = np.where(left >= size, left - np.uint64(size), left)
        left, right, size, other = right, left, other, size
    if len(keys) % 2:
        left, right = right, left
    return left * np.uint64(b) + right


def _mix(x: int) -> int:
    """Apply the finalizer of splitmix64, a bijection of 64-bit numbers (Steele, Lea and Flood
    2014)."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_array(x: Uint64s) -> Uint64s:
    """Apply `_mix` to every element."""
    x = np.atleast_1d(x) + np.uint64(_GOLDEN)  # arrays wrap silently, numpy scalars warn
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mixed_bits(*numbers: int) -> int:
    """Return 64 well mixed bits of several numbers, in their order."""
    out = 0
    for number in numbers:
        out = _mix(out ^ _mix(number & _MASK))
    return out
