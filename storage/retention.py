"""Which snapshots stay. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage.manifest import Ref

TAKEN = "taken_at"  # in a manifest's data: when its state was, Unix seconds by its node's clock
AGES_H = (0.25, 2.0, 24.0)


@dataclass(frozen=True)
class Keep:
    """Keep the newest `last` snapshots and, of the line of training that led to the newest, the
    first in every `every` steps, the one with the best metric, and for each of `ages_h` one that is
    at least so old, as soon as there was one. A run whose weights have been going bad for an hour
    has something to go back to then; frequent snapshots alone would all be younger.

    Ages are reckoned between snapshots, so a run that stood still loses none. The one that an age
    finds is at most about twice as old. With n ages at most 2 n snapshots stay for them: between
    two ages the newest, and the oldest, which is on its way to the next.

    `last` counts spare snapshots too: with 1 there is nothing to fall back to if the newest is
    damaged. Snapshots of greater steps than the newest one's stay besides: that is work which the
    new line of training has still to do again.
    """

    last: int = 3
    every: int = 0  # steps; 0: none beyond `last`
    # "loss:min", "accuracy:max", "eval/loss:min": a number that was told of it later
    # (storage/measured.py), or in the manifest's data["metrics"] or data; "": none for its metric
    best: str = ""
    ages_h: tuple[float, ...] = ()  # hours

    def __post_init__(self) -> None:
        object.__setattr__(self, "ages_h", tuple(sorted(self.ages_h)))
        if not all(math.isfinite(h) and h > 0 for h in self.ages_h):
            raise ValueError(f"wanted ages in hours, each above 0; found {self.ages_h}")
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

        `data`: of the manifests, wanted only with `best` or `ages_h`; a snapshot without it, or
        without that number, is never the best, and of no age.
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
        if self.ages_h and data:
            stay |= _of_each_age(lineage(ordered), data, self.ages_h)
        return stay

    @property
    def asks_manifests(self) -> bool:
        """Does it look at what manifests say?"""
        return bool(self.best or self.ages_h)


def _of_each_age(
    line: Sequence[Ref], data: Mapping[Ref, Mapping[str, Any]], ages_h: Sequence[float]
) -> set[Ref]:
    """`line`: newest first. The newest and the oldest between two ages; of those below the first
    age the oldest, of those beyond the last the newest."""
    found: dict[int, list[Ref]] = {}
    newest_s: float | None = None
    age_s = 0.0
    for ref in line:
        taken = data.get(ref, {}).get(TAKEN)
        if not isinstance(taken, int | float) or not math.isfinite(taken):
            continue
        newest_s = taken if newest_s is None else newest_s
        age_s = max(age_s, newest_s - taken)  # clocks of nodes differ: the older is never younger
        found.setdefault(bisect.bisect_right(ages_h, age_s / 3600), []).append(ref)
    last = len(ages_h)
    return {refs[0] for i, refs in found.items() if i > 0} | {
        refs[-1] for i, refs in found.items() if i < last
    }


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
