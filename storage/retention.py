"""Which snapshots stay. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from storage.manifest import Ref


@dataclass(frozen=True)
class Keep:
    """Keep the newest `last` snapshots and, of the line of training that led to the newest, the
    first in every `every` steps and the one with the best metric.

    `last` counts spare snapshots too: with 1 there is nothing to fall back to if the newest is
    damaged. Snapshots of greater steps than the newest one's stay besides: that is work which the
    new line of training has still to do again.
    """

    last: int = 3
    every: int = 0  # steps; 0: none beyond `last`
    # "loss:min", "accuracy:max", "eval/loss:min": a number that was told of it later
    # (storage/measured.py), or in the manifest's data["metrics"] or data; "": none for its metric
    best: str = ""

    def __post_init__(self) -> None:
        if self.best and (
            not self.best.rpartition(":")[0] or self.best.rpartition(":")[2] not in ("min", "max")
        ):
            raise ValueError(
                "the best by a metric is written NAME:min or NAME:max, for example loss:min; "
                f"found {self.best!r}"
            )
        if self.last < 1 or self.every < 0:
            raise ValueError(
                f"wanted last >= 1 and every >= 0 steps (0: off); found last={self.last}, "
                f"every={self.every}"
            )

    def __call__(
        self, refs: Collection[Ref], data: Mapping[Ref, Mapping[str, Any]] | None = None
    ) -> set[Ref]:
        """The refs that stay. Repeating it on what stayed (and newer ones) never drops a milestone,
        or the best.

        `data`: of the manifests, wanted only with `best`; a snapshot without it, or without that
        number, is never the best.
        """
        ordered = sorted(refs, reverse=True)
        stay = set(ordered[: self.last]) | {ref for ref in ordered if ref.step > ordered[0].step}
        if self.every:
            first: dict[int, Ref] = {}
            # newest first, so the last one that is set is the first of its span
            for ref in lineage(ordered):
                first[ref.step // self.every] = ref
            stay.update(first.values())
        if self.best and data:
            name, _, which = self.best.rpartition(":")
            sign = 1 if which == "max" else -1
            found = [
                (sign * value, ref)
                for ref in lineage(ordered)
                if (value := metric(data.get(ref, {}), name)) is not None
            ]
            if found:
                stay.add(max(found)[1])  # of equals the newest
        return stay


def metric(data: Mapping[str, Any], name: str) -> float | None:
    """A number of a manifest's data, of its "metrics" first; None: it has none, or not a finite
    one."""
    metrics = data.get("metrics")
    value = (
        metrics.get(name) if isinstance(metrics, Mapping) and name in metrics else data.get(name)
    )
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else None
    )


def lineage(refs: Collection[Ref]) -> list[Ref]:
    """The refs that the newest grew from, newest first: an older epoch's step beyond a newer
    epoch's first was abandoned."""
    line: list[Ref] = []
    for ref in sorted(refs, reverse=True):
        if not line or ref.step < line[-1].step:
            line.append(ref)
    return line
