"""How often worlds are lost without a snapshot, as a run has seen it, and how often to snapshot for
that.

Pure. What was seen travels in the run's own snapshots (`manifest.data["losses"]`), so every world
knows it from the snapshot that it goes on from, with or without a controller. A world ended well if
its last snapshot was made because it ended (`ORDERLY`); if the newest snapshot is any other, the
world was lost, and what it had done since is done again. docs/SNAPSHOTS.md says why it is so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from harness.core.values import BadObject, number, word

# mean time between losses while nothing was seen: as if one had come in the first hour
ASSUMED_S = 3600.0
LEAST_S, MOST_S = 10.0, 1800.0  # of a derived interval
MEMORY_S = 86400.0  # training after which what was seen counts for 1/e of what it did
MOST_PLACES, MOST_LETTERS = 16, 200
ORDERLY = ("notice", "drain", "resize", "stop", "final")  # why the last snapshot of a world is made


def daly(cost_s: float, between_losses_s: float) -> float:
    """The interval that loses least (Daly 2006). Where snapshots cost more than half of the time
    between losses, no interval helps: then that time itself."""
    ratio = cost_s / (2 * between_losses_s)
    if ratio >= 1:
        return between_losses_s
    first = math.sqrt(2 * cost_s * between_losses_s)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def cost_s(stall_s: float, slowdown: float, commit_s: float) -> float:
    """Of training, for one snapshot: it stands still, then steps beside the sending are slower.
    `commit_s`: from its begin to its commit."""
    stall_s = max(0.0, stall_s)
    return stall_s + max(0.0, slowdown) * max(0.0, commit_s - stall_s)


def derived_interval_s(cost_s: float, commit_s: float, between_losses_s: float) -> float:
    """Between two snapshots, in the worker and where a policy weighs places: the one that loses
    least, within bounds, and never so short that uploads overlap."""
    return min(MOST_S, max(LEAST_S, daly(cost_s, between_losses_s), 3 * commit_s))


@dataclass(frozen=True)
class LossesSeen:
    """In one place: `losses` of worlds, in `node_s` seconds of nodes that trained there. Both
    fade."""

    losses: float = 0.0
    node_s: float = 0.0

    def later(self, seconds: float, nodes: int) -> LossesSeen:
        """After so much training on so many nodes, without a loss."""
        kept = math.exp(-max(0.0, seconds) / MEMORY_S)
        return LossesSeen(self.losses * kept, self.node_s * kept + nodes * MEMORY_S * (1 - kept))

    def between_s(self, nodes: int) -> float:
        """Mean time between losses of a world of so many nodes: each of them may be the one that
        goes."""
        return (ASSUMED_S + self.node_s / max(1, nodes)) / (1 + self.losses)


@dataclass(frozen=True)
class RunLosses:
    """Of a run, by place. `place`, `nodes`: of the world that trains."""

    place: str = ""
    nodes: int = 1
    seen: Mapping[str, LossesSeen] = field(default_factory=dict)

    @property
    def here(self) -> LossesSeen:
        return self.seen.get(self.place, LossesSeen())

    def resumed(self, data: Any) -> RunLosses:
        """A new world goes on from a snapshot. `data`: its manifest's; of another version or
        origin it may be anything, and then nothing is known."""
        said = data.get("losses") if isinstance(data, dict) else None
        try:
            then, why, seen = _decoded(said)
        except BadObject:
            return replace(self, seen={})
        if why not in ORDERLY:
            before = seen.get(then, LossesSeen())
            seen[then] = replace(before, losses=before.losses + 1)
        return replace(self, seen=seen)

    def to_data(self, why: str, seconds: float) -> dict[str, Any]:
        """For a snapshot that is made because of `why`, `seconds` after this world began."""
        others = {p: s for p, s in self.seen.items() if p != self.place}
        kept = [*others.items()][-(MOST_PLACES - 1) :]
        kept.append((self.place, self.here.later(seconds, self.nodes)))  # the newest is the last
        return {
            "place": self.place,
            "why": why,
            "seen": {p: [round(s.losses, 6), round(s.node_s, 3)] for p, s in kept},
        }


def _decoded(said: Any) -> tuple[str, str, dict[str, LossesSeen]]:
    """What `to_data` made: the world's place, why, what was seen. Raises BadObject."""
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
