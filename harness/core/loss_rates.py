"""The observed rate of worlds lost without a snapshot, and the snapshot interval that follows.

Pure. The observations travel in the run's own snapshots (`manifest.data["losses"]`), so every world
gets them from the snapshot that it resumes from, with or without a controller. A world ended well
if its last snapshot was made because it ended (`ORDERLY`); if the newest snapshot is any other, and
no node has kept a later state, the world was lost, and its work since then is repeated.
docs/SNAPSHOTS.md gives the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from harness.core.decoding import number, word
from storage.canonical_json import BadObject

# mean time between losses before any observation: as if one had come in the first hour
ASSUMED_S = 3600.0
LEAST_S, MOST_S = 10.0, 1800.0  # bounds of a derived interval
MEMORY_S = 86400.0  # training time after which an observation counts for 1/e of its weight
MOST_PLACES, MOST_LETTERS = 16, 200
ORDERLY = ("notice", "drain", "resize", "stop", "final")  # reasons for a world's last snapshot


def daly(cost_s: float, between_losses_s: float) -> float:
    """Return the interval that loses least time (Daly 2006). Where a snapshot costs at least twice
    the time between losses, no interval helps, and that time itself is returned."""
    ratio = cost_s / (2 * between_losses_s)
    if ratio >= 1:
        return between_losses_s
    first = math.sqrt(2 * cost_s * between_losses_s)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def cost_s(stall_s: float, slowdown: float, commit_s: float) -> float:
    """Return the training seconds that one snapshot costs: a stall, then slower steps during the
    upload. `commit_s`: from its begin to its commit; `slowdown`: 0.1 is a tenth longer."""
    stall_s = max(0.0, stall_s)
    return stall_s + max(0.0, slowdown) * max(0.0, commit_s - stall_s)


def derived_interval_s(cost_s: float, commit_s: float, between_losses_s: float) -> float:
    """Return the seconds between two snapshots, for workers and for policies that compare places:
    the interval that loses least, within bounds, and never so short that uploads overlap."""
    return min(MOST_S, max(LEAST_S, daly(cost_s, between_losses_s), 3 * commit_s))


@dataclass(frozen=True)
class LossesSeen:
    """Observations in one place: `losses` of worlds in `node_s` node-seconds of training. Both
    decay with time."""

    losses: float = 0.0
    node_s: float = 0.0

    def later(self, seconds: float, nodes: int) -> LossesSeen:
        """Return the observations after `seconds` of training on `nodes` nodes without a loss."""
        kept = math.exp(-max(0.0, seconds) / MEMORY_S)
        return LossesSeen(self.losses * kept, self.node_s * kept + nodes * MEMORY_S * (1 - kept))

    def between_s(self, nodes: int) -> float:
        """Return the mean time between losses of a world of `nodes` nodes, each of which may be
        lost."""
        return (ASSUMED_S + self.node_s / max(1, nodes)) / (1 + self.losses)


@dataclass(frozen=True)
class RunLosses:
    """A run's observations by place. `place`, `nodes`: those of the world that trains."""

    place: str = ""
    nodes: int = 1
    seen: Mapping[str, LossesSeen] = field(default_factory=dict)

    @property
    def here(self) -> LossesSeen:
        return self.seen.get(self.place, LossesSeen())

    def resumed(self, data: Any, survived: bool = False) -> RunLosses:
        """Return the observations of a new world that resumes from a snapshot. `data`: that of its
        manifest; from another version or origin it may be anything, and then nothing is known.
        `survived`: nodes of the last world have kept a later state, so a snapshot would have saved
        no work."""
        said = data.get("losses") if isinstance(data, dict) else None
        try:
            then, why, seen = _decoded(said)
        except BadObject:
            return replace(self, seen={})
        if why not in ORDERLY and not survived:
            before = seen.get(then, LossesSeen())
            seen[then] = replace(before, losses=before.losses + 1)
        return replace(self, seen=seen)

    def to_data(self, why: str, seconds: float) -> dict[str, Any]:
        """Return the data for a snapshot made because of `why`, `seconds` after this world
        began."""
        others = {p: s for p, s in self.seen.items() if p != self.place}
        kept = [*others.items()][-(MOST_PLACES - 1) :]
        kept.append((self.place, self.here.later(seconds, self.nodes)))  # the newest is the last
        return {
            "place": self.place,
            "why": why,
            "seen": {p: [round(s.losses, 6), round(s.node_s, 3)] for p, s in kept},
        }


def _decoded(said: Any) -> tuple[str, str, dict[str, LossesSeen]]:
    """Decode the result of `to_data`: the world's place, the reason, the observations by place.
    Raises BadObject."""
    seen = said.get("seen") if isinstance(said, dict) else None
    if not isinstance(seen, dict):
        raise BadObject(f"wanted losses by place, found {said!r:.60}")
    found = {}
    for place, pair in [*seen.items()][-MOST_PLACES:]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadObject(f"wanted losses and seconds of nodes, found {pair!r:.60}")
        losses, node_s = (number(value, 0.0) for value in pair)
        found[str(place)[:MOST_LETTERS]] = LossesSeen(losses, node_s)
    return word(said.get("place"), MOST_LETTERS), word(said.get("why"), MOST_LETTERS), found
