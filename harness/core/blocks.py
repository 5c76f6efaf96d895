"""A shuffle that reads in blocks: a step's micro-batches come from lanes of their own, and a lane
reads a few blocks of neighbouring samples at a time. Every rank asks; all get the same answer.

Pure, as batch.py is: the sample at a position is a function of (seed, position), in closed form.

    lane m                     consumes what micro-batch m of every step does, so whoever does
                               micro-batches [m, n) reads the blocks of these lanes and no others
    an epoch of N samples      is turned by a random number of places, then cut:
                                 | rest of lane 0 | rest of lane 1 | ... | block | block | ... |
    group g of lane m          is `at_once` blocks, which a permutation of all blocks of the epoch
                               gives it; the samples of a group are permuted among themselves
    rest of a lane             fewer samples than another group has, next to one another, permuted;
                               they come last

Epochs begin and end in the middle of a step, so lanes have up to a micro-batch more or less; that
is part of their rests.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np

from harness.core.batch import Batching, Int64s, combined, mixed, permute
from harness.core.values import Within
from harness.core.world import BadInput

AT_ONCE = 4  # blocks of a group, unless it is said
ITEMS = 1024  # of a block, of a dataset that does not say how many lie together
GROUPS = 8  # a lane has at least so many where the blocks' size is ours to choose
_BLOCKS, _WITHIN, _REST, _TURN = (0x626C6F636B, 0x77697468696E, 0x72657374, 0x7475726E)


@dataclass(frozen=True)
class Blocks:
    """`items`: neighbouring samples that make a block; `at_once`: blocks that a lane mixes."""

    items: Annotated[int, Within(1, 2**40)]
    at_once: Annotated[int, Within(1, 2**20)] = AT_ONCE

    def __post_init__(self) -> None:
        for name, most in (("items", 2**40), ("at_once", 2**20)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise BadInput(f"Blocks({name}={value!r}): wanted a whole number from 1 to {most}")

    def check(self, batching: Batching) -> None:
        """Raises BadInput if a lane has less than a group, so that nothing would be in blocks."""
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
        """As `harness.core.batch.in_turns`."""
        return (lanes * self.items * self.at_once,)

    def indices_at(self, batching: Batching, positions: Int64s) -> Int64s:
        """As `harness.core.batch.indices_at`."""
        b, n, seed = batching, batching.samples, batching.seed
        epoch, (step, within) = positions // n, np.divmod(positions, b.global_batch)
        lane, j = np.divmod(within, b.micro_batch)
        begins, ends = epoch * n, (epoch + 1) * n
        before = _in_lane(b, begins, lane)
        rank = step * b.micro_batch + j - before  # in its lane, of this epoch
        whole = ends // b.global_batch - -(-begins // b.global_batch)  # steps within the epoch
        group_items = self.items * self.at_once
        groups = np.maximum(whole, 0) * b.micro_batch // group_items
        blocked = groups * group_items  # of each lane
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
            (rank - blocked)[here], size[here], combined(seed, _REST), which
        )
        turn = mixed(seed, _TURN, epoch) % np.uint64(n)
        out += turn.astype(np.int64).reshape(positions.shape)
        return np.where(out < n, out, out - n)

    def _in_blocks(
        self, b: Batching, epoch: Int64s, lane: Int64s, rank: Int64s, groups: Int64s
    ) -> Int64s:
        """Where in the row of the epoch's blocks these of its samples are."""
        group_items = self.items * self.at_once
        group, w = np.divmod(rank, group_items)
        w = permute(w, group_items, combined(b.seed, _WITHIN), mixed(epoch, lane, group))
        block, item = np.divmod(w, self.items)
        block += (group * b.micro_batches + lane) * self.at_once
        number = groups * (b.micro_batches * self.at_once)  # of blocks, in an epoch
        return _permuted(block, number, combined(b.seed, _BLOCKS), mixed(epoch)) * self.items + item


def blocks_for(
    shuffle: str | Blocks, items: int, samples: int, global_batch: int, micro_batch: int
) -> Blocks:
    """What `shuffle=` asks for. `items`: how many samples lie together (0: not known). "blocks":
    blocks of that size, smaller ones where a lane would have fewer than `GROUPS` groups. Raises
    BadInput.

    run.json says what was chosen, and a run only goes on with the same, so what is chosen must
    never change.
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
    """The fewest samples that a lane has in whole steps of an epoch."""
    return max(0, samples // global_batch - 1) * micro_batch


def _in_lane(b: Batching, position: Int64s, lane: Int64s) -> Int64s:
    """How many positions of this lane come before these."""
    step, within = np.divmod(position, b.global_batch)
    return step * b.micro_batch + np.clip(within - lane * b.micro_batch, 0, b.micro_batch)


def _in_lower_lanes(b: Batching, position: Int64s, lane: Int64s) -> Int64s:
    """How many positions of lanes below come before these."""
    step, within = np.divmod(position, b.global_batch)
    return step * lane * b.micro_batch + np.minimum(within, lane * b.micro_batch)


def _permuted(offsets: Int64s, sizes: Int64s, key: int, which: Any) -> Int64s:
    """`permute` where each offset has a size of its own; there are few different ones."""
    if sizes.size and sizes.min() == sizes.max():
        return permute(offsets, int(sizes[0]), key, which)
    out, which = np.empty_like(offsets), np.broadcast_to(which, offsets.shape)
    for size in np.unique(sizes).tolist():
        here = sizes == size
        out[here] = permute(offsets[here], size, key, which[here])
    return out
