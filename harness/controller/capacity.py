"""What the facts say about capacity: for how long each offer had machines for us, and had none.
Used by `book.py`.

Pure.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from harness.core.facts import AttemptEnded
from harness.core.known import CapacitySeen, Spell


@dataclass
class CapacityBook:
    """By offer. A fold of attempts: each is asked, and refused or given, lost or let go."""

    capacity: dict[str, CapacitySeen] = field(default_factory=dict)

    def up(self, name: str, t: float) -> None:
        """A machine was given."""
        self._look(name, True, t)

    def end(self, name: str, fact: AttemptEnded, others_up: bool) -> None:
        """An attempt is over. `others_up`: other nodes of the offer are still there, so it has not
        closed altogether."""
        if fact.end == "no-capacity":
            self._look(name, False, fact.gone_s)
            return
        if fact.up_s is None:
            return
        before = self.capacity.get(name, CapacitySeen())
        taken = fact.end == "preempted"
        self.capacity[name] = dataclasses.replace(
            before,
            node_s=before.node_s + max(0.0, fact.gone_s - fact.up_s),
            losses=before.losses + taken,
        )
        self._look(name, not taken or others_up, fact.gone_s)

    def _look(self, name: str, is_open: bool, t: float) -> None:
        """It was seen to be open, or not."""
        before = self.capacity.get(name, CapacitySeen())
        if before.open is is_open:
            self.capacity[name] = dataclasses.replace(before, seen_s=max(t, before.seen_s))
        elif before.open is None:
            self.capacity[name] = dataclasses.replace(before, open=is_open, since_s=t, seen_s=t)
        else:
            spell = Spell(before.open, max(0.0, t - before.since_s), True)
            self.capacity[name] = before.then(spell, open=is_open, since_s=t, seen_s=t)
