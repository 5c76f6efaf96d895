"""Which layers of a model each stage of a pipeline has, and how many micro-batches go through it at
once.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.world import BadInput

GPIPE, ONE_F_ONE_B, INTERLEAVED = "gpipe", "1f1b", "interleaved"
ZERO_BUBBLE, ZERO_BUBBLE_V = "zero-bubble", "zero-bubble-v"
# schedule: stages of each rank
STAGES_OF_A_RANK = {GPIPE: 1, ONE_F_ONE_B: 1, INTERLEAVED: 2, ZERO_BUBBLE: 2, ZERO_BUBBLE_V: 2}
# their backward makes the gradients of weights apart from those of activations, and later
IN_TWO_PARTS = (ZERO_BUBBLE, ZERO_BUBBLE_V)


def even(sizes: Sequence[int], stages: int) -> list[int]:
    """Cut modules of these sizes (elements of parameters) into so many runs, the greatest as small
    as can be: the first of each run. What has no parameters stays with what is before it. Raises
    BadInput if there are fewer modules than stages."""
    there = [i for i, size in enumerate(sizes) if size]
    if len(there) < stages:
        raise BadInput(
            f"a pipeline of {stages} stages: wanted a model of as many modules with parameters at "
            f"least, found {len(there)}; use fewer stages (pp), or a model whose layers are in a "
            "ModuleList, ModuleDict or Sequential"
        )
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_cut(sizes, middle, stages)) <= stages:
            high = middle
        else:
            low = middle + 1
    return _cut(sizes, low, stages)


def _cut(sizes: Sequence[int], most: int, stages: int) -> list[int]:
    """Runs of `most` elements, none without parameters; as many as `stages`, if not more."""
    firsts, size = [0], 0
    left = sum(1 for one in sizes if one)
    for i, one in enumerate(sizes):
        if one and size and (size + one > most or left == stages - len(firsts)):
            firsts.append(i)
            size = 0
        size += one
        left -= bool(one)
    return firsts


def stages_of(schedule: str, ranks: int, rank: int) -> list[int]:
    """Those that one of the `ranks` of a pipeline has."""
    if schedule == ZERO_BUBBLE_V:  # down and up again: the first rank has the last stage as well
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * turn for turn in range(STAGES_OF_A_RANK[schedule])]


def turns(schedule: str, micro_batches: int, ranks: int) -> list[tuple[str, int]]:
    """Which schedule takes how many of a replica's micro-batches, one turn after the other: torch's
    schedules do not take every number, and shares change with the world."""
    if schedule == ONE_F_ONE_B and micro_batches < ranks:
        return [(GPIPE, micro_batches)]  # keeps no more activations than the other would
    rest = micro_batches % ranks
    rounds = max(1, micro_batches // ranks)
    if schedule in (INTERLEAVED, ZERO_BUBBLE) and micro_batches % rounds:
        return [(schedule, micro_batches - rest), (schedule, rest)]
    return [(schedule, micro_batches)]
