"""Which snapshots a side job is due for. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from harness.core.world import BadInput
from storage.manifest import Ref
from storage.retention import lineage


@dataclass(frozen=True)
class DueRule:
    """Every `every`-th committed snapshot, or the first in every `every_steps` steps, or the
    newest only. The run's last one is always due."""

    every: int = 1
    every_steps: int = 0  # 0: count snapshots
    newest: bool = False

    def __post_init__(self) -> None:
        asked = [self.every != 1, self.every_steps != 0, self.newest]
        if self.every < 1 or self.every_steps < 0 or sum(asked) > 1:
            raise BadInput(
                "wanted one of --every K (snapshots), --every-steps N (steps) and --newest; found "
                f"--every {self.every}, --every-steps {self.every_steps}"
                f"{', --newest' if self.newest else ''}"
            )


def due(
    rule: DueRule, seen: Collection[Ref], settled: Collection[Ref], final: Ref | None = None
) -> list[Ref]:
    """Those of `seen` that are to be done, oldest first. `seen`: committed snapshots, and those
    that were before they were pruned; work that a newer epoch left behind does not count.
    `settled`: done or given up. `final`: the run's last snapshot."""
    line = lineage(seen)[::-1]
    found = _by_rule(rule, line, settled)
    if final in line and final not in settled and final not in found:
        found.append(final)
    return found


def _by_rule(rule: DueRule, line: list[Ref], settled: Collection[Ref]) -> list[Ref]:
    if rule.newest:
        return [ref for ref in line[-1:] if ref not in settled]
    found: list[Ref] = []
    if rule.every_steps:
        spans = {ref.step // rule.every_steps for ref in line if ref in settled}
        for ref in line:
            if ref.step // rule.every_steps not in spans:
                spans.add(ref.step // rule.every_steps)
                found.append(ref)
        return found
    since = 0
    for ref in line:
        since += 1
        if ref in settled:
            since = 0
        elif since >= rule.every:
            found.append(ref)
            since = 0
    return found
