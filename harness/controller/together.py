"""All nodes of a run in one place, where they reach each other; and when it moves to another.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from harness.controller.choosing import LOOK_AGAIN_S, open_offers
from harness.controller.combinators import without_nodes
from harness.controller.value import Worth
from harness.core.world import Decision, Launch, Node, Offer, Policy, Terminate, View, Wait


def together(
    policy: Policy,
    *,
    move_after_s: float = 300.0,
    saving: float = 0.15,
    stay_s: float = 1800.0,
    settle_s: float = 60.0,
    grace_s: float = 300.0,
) -> Policy:
    """All nodes in one place, where they reach each other: the place of the node that is there
    longest. It is left when nobody is there any more; or when fewer than `min_nodes` are up there,
    it is full, and nothing was committed for `move_after_s`.

    It is also left for a place that `policy` would take, where work is cheaper by at least the
    share `saving` (0: never), but not before all nodes have been up for `stay_s`. Then a world as
    large is made ready there first; when it has been up for `settle_s` the nodes here have
    `grace_s` to snapshot and leave. Both are paid for meanwhile: minutes, which the saving brings
    back in `stay_s` or so.
    """

    return _Together(policy, move_after_s, saving, stay_s, settle_s, grace_s)


@dataclasses.dataclass(frozen=True)
class _Together:
    """What `together` returns, and describes."""

    policy: Policy
    move_after_s: float
    saving: float
    stay_s: float
    settle_s: float
    grace_s: float

    def __call__(self, view: View) -> Decision:
        if not view.alive:
            return self.policy(view)
        home = min(view.alive, key=lambda n: (n.up_s is None, n.attempt)).offer.place
        nodes, away = _split(view.alive, home)
        if away:
            return self._moving(view, nodes, away)
        here = tuple(o for o in view.offers if o.place == home)
        if self._stuck(view, here):
            return Terminate(
                view.alive[-1].attempt, "too few nodes can be had here: the whole run moves"
            )
        if (cheaper := self._cheaper(view, home, nodes)) is not None:
            return Launch(cheaper, "the whole run will be cheaper there")
        return self.policy(dataclasses.replace(view, offers=here))

    def _stuck(self, view: View, here: tuple[Offer, ...]) -> bool:
        """Too few are up, this place is full, another is not, and nothing was committed for
        long."""
        up = sum(node.up_s is not None for node in view.alive)
        stuck_s = view.now_s - max(
            view.last_progress_s, view.started_s, *(node.asked_s for node in view.alive)
        )
        return (
            up < view.min_nodes
            and stuck_s >= self.move_after_s
            and not open_offers(view, here)
            and bool(open_offers(view))
        )

    def _cheaper(self, view: View, home: str, nodes: list[Node]) -> Offer | None:
        """What the policy would take elsewhere, where work is cheaper by enough."""
        if (
            self.saving <= 0
            or view.doubted
            or any(n.up_s is None or view.now_s - n.up_s < self.stay_s for n in nodes)
        ):
            return None
        worth = Worth(view)
        at_most = (1 - self.saving) * worth.cost(*(n.offer for n in nodes))
        better = tuple(o for o in view.offers if o.place != home and worth.cost(o) <= at_most)
        wanted = self.policy(without_nodes(view, open_offers(view, better)))
        return wanted.offer if isinstance(wanted, Launch) else None

    def _moving(self, view: View, nodes: list[Node], away: list[Node]) -> Decision:
        """Some nodes are elsewhere already, beside the world that trains."""
        there, odd = _split(away, min(away, key=lambda n: (n.up_s is None, n.attempt)).offer.place)
        worth = Worth(view)
        here_costs, there_costs = (worth.cost(*(n.offer for n in some)) for some in (nodes, there))
        if odd or self.saving <= 0 or there_costs >= here_costs:
            return Terminate((odd or away)[-1].attempt, "the others cannot reach it")
        settled = sum(n.been_up_s(view.now_s) >= self.settle_s for n in there)
        if settled >= len(nodes):
            first, *rest = (n.attempt for n in nodes)
            return Terminate(first, "the whole run is cheaper elsewhere", self.grace_s, tuple(rest))
        if len(there) < len(nodes):
            room = tuple(
                o
                for o in view.offers
                if o.place == there[0].offer.place and worth.cost(o) < here_costs
            )
            if offers := open_offers(view, room):
                return Launch(min(offers, key=worth.cost), "the whole run will be cheaper there")
            if all(n.up_s is not None for n in there):
                return Terminate(there[-1].attempt, "there is no room for the whole run")
        return Wait(LOOK_AGAIN_S, "a cheaper place is made ready")


def _split(nodes: Iterable[Node], place: str) -> tuple[list[Node], list[Node]]:
    """(those in `place`, the others)"""
    found = list(nodes)
    return [n for n in found if n.offer.place == place], [
        n for n in found if n.offer.place != place
    ]
