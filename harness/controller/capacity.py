"""What the facts say about capacity: for how long each offer had machines for us, and had none.
Used by `book.py`.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from harness.core.facts import AttemptEnded
from harness.core.known import CapacitySeen, Spell
from harness.core.world import Node, Offer


@dataclass
class CapacityBook:
    """By offer. A fold of attempts: each is asked, and refused or given, lost or let go."""

    capacity: dict[str, CapacitySeen] = field(default_factory=dict)

    def up(self, name: str, t: float) -> None:
        """A machine was given."""
        self._look(name, True, t)

    def end(self, name: str, fact: AttemptEnded, others_up: bool) -> None:
        """An attempt is over. `others_up`: other nodes of the offer are still there, so it has not
        closed altogether: there was no room for one more, which says nothing of those."""
        if fact.end == "no-capacity":
            self._look(name, others_up, fact.gone_s)
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


def with_notices(
    capacity: Mapping[str, CapacitySeen],
    ended: Iterable[AttemptEnded],
    offers: Mapping[int, Offer],
    open_: Iterable[Node],
    announced: Collection[int],
    in_time: Callable[[int], bool],
) -> dict[str, CapacitySeen]:
    """What attempts alone do not tell. A node whose end was `announced` and that drained was taken
    all the same: a loss, and its offer has closed unless others are still there. A loss is
    `unnoticed` where not all was saved (`in_time`). `offers`: of attempts."""
    found = dict(capacity)
    up = {node.offer.name for node in open_ if node.up_s is not None}
    for fact in sorted(ended, key=lambda e: e.gone_s):
        offer = offers.get(fact.attempt)
        if fact.up_s is None or offer is None or (seen := found.get(offer.name)) is None:
            continue
        if fact.end == "preempted" and not in_time(fact.attempt):
            found[offer.name] = dataclasses.replace(seen, unnoticed=seen.unnoticed + 1)
        elif fact.end == "drained" and fact.attempt in announced:
            seen = dataclasses.replace(seen, losses=seen.losses + 1)
            if seen.open and seen.seen_s <= fact.gone_s and offer.name not in up:
                spell = Spell(True, max(0.0, fact.gone_s - seen.since_s), True)
                seen = seen.then(spell, open=False, since_s=fact.gone_s, seen_s=fact.gone_s)
            found[offer.name] = seen
    return found
