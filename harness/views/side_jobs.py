"""What side jobs measured of a run's snapshots, as reports tell it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from harness.core.facts import Fact, SnapshotCommitted, Stamped, Validated
from storage.manifest import Ref
from storage.retention import lineage

WRITER = "watch-"  # what the names of watchers' chains of facts begin with


@dataclass(frozen=True)
class SideJobRows:
    """One watch: its numbers by step, oldest first, without the watch's name."""

    name: str
    rows: tuple[tuple[int, dict[str, float]], ...]
    seconds: float  # median of a snapshot

    @property
    def metrics(self) -> list[str]:
        """Names of numbers, a loss first."""
        found = {name for _, metrics in self.rows for name in metrics}
        return sorted(found, key=lambda name: ("loss" not in name, name))

    def lowest(self, name: str) -> int:
        """The step with the lowest value of a loss; 0: it is none, or was never finite."""
        found = [
            (metrics[name], step)
            for step, metrics in self.rows
            if math.isfinite(metrics.get(name, math.nan))
        ]
        return min(found)[1] if "loss" in name and found else 0


def told_by_watchers(stamped: Stamped) -> bool:
    """Whoever told it may do so long after the run's end."""
    return stamped.writer.startswith(WRITER)


def side_jobs(
    facts: Iterable[Stamped], committed: Iterable[SnapshotCommitted]
) -> list[SideJobRows]:
    """Of the snapshots that led to the newest, each once, by watch."""
    refs = {Ref(one.epoch, one.step) for one in committed}
    line = set(lineage(refs))
    found: dict[str, dict[Ref, Validated]] = {}
    for fact in _of_watches(s.fact for s in facts):
        ref = Ref(fact.epoch, fact.step)
        if ref in line or ref not in refs:  # the fact of its commit was lost with its writer
            found.setdefault(fact.by, {}).setdefault(ref, fact)
    return [_rows(name, list(told.values())) for name, told in sorted(found.items())]


def _of_watches(facts: Iterable[Fact]) -> Iterable[Validated]:
    return (fact for fact in facts if isinstance(fact, Validated) and fact.by)


def _rows(name: str, told: list[Validated]) -> SideJobRows:
    seconds = sorted(fact.seconds for fact in told)
    rows = [
        (fact.step, {key.removeprefix(f"{name}/"): value for key, value in fact.metrics.items()})
        for fact in sorted(told, key=lambda fact: (fact.step, fact.epoch))
    ]
    return SideJobRows(name, tuple(rows), seconds[len(seconds) // 2])
