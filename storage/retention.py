"""Which snapshots stay. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from storage.manifest import Ref


@dataclass(frozen=True)
class Keep:
    """Keep the newest `last` snapshots and, of the line of training that led to the newest, the first in every `every` steps.

    `last` counts spare snapshots too: with 1 there is nothing to fall back to if the newest is damaged.
    """

    last: int = 3
    every: int = 0  # steps; 0: none beyond `last`

    def __post_init__(self) -> None:
        if self.last < 1 or self.every < 0:
            raise ValueError(f"wanted last >= 1 and every >= 0 steps (0: off); found last={self.last}, every={self.every}")

    def __call__(self, refs: Collection[Ref]) -> set[Ref]:
        """The refs that stay. Repeating it on what stayed (and newer ones) never drops a milestone."""
        ordered = sorted(refs, reverse=True)
        stay = set(ordered[: self.last])
        if self.every:
            first: dict[int, Ref] = {}
            for ref in lineage(ordered):  # newest first, so the last one that is set is the first of its span
                first[ref.step // self.every] = ref
            stay.update(first.values())
        return stay


def lineage(refs: Collection[Ref]) -> list[Ref]:
    """The refs that the newest grew from, newest first: an older epoch's step beyond a newer epoch's first was abandoned."""
    line: list[Ref] = []
    for ref in sorted(refs, reverse=True):
        if not line or ref.step < line[-1].step:
            line.append(ref)
    return line
