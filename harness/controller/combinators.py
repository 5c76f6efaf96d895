"""Wrappers that make policies of other policies, such as `within_budget(cheapest, usd=200)`.

Pure: a wrapper returns a policy, which knows its view and nothing else. All raise BadInput for
options that cannot work. docs/POLICIES.md says when to use which.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from harness.controller.offer_value import Worth, staying
from harness.core.world import (
    LOOK_AGAIN_S,
    BadInput,
    Decision,
    Launch,
    Node,
    Offer,
    Policy,
    Stop,
    Terminate,
    View,
    Wait,
    open_offers,
)


# ---- which offers --------------------------------------------------------------------------------
def at_most(
    policy: Policy,
    *,
    usd_per_h: float = math.inf,
    usd_per_gpu_h: float = math.inf,
    all_usd_per_h: float = math.inf,
) -> Policy:
    """Return `policy` limited to offers whose node costs at most `usd_per_h`, at most
    `usd_per_gpu_h` for each of its GPUs, and with all other nodes at most `all_usd_per_h`. Nodes
    that are there stay, whatever their price becomes.

    `all_usd_per_h` counts every node that may be billed at its present price, also one that is
    about to be replaced. A move begins only if a second world fits in."""
    limits = {
        "usd_per_h": usd_per_h,
        "usd_per_gpu_h": usd_per_gpu_h,
        "all_usd_per_h": all_usd_per_h,
    }
    for name, usd in limits.items():
        if not usd > 0:
            raise BadInput(f"at_most: wanted {name} above 0, found {usd:g}")
    if all(usd == math.inf for usd in limits.values()):
        raise BadInput(f"at_most: wanted one of {', '.join(limits)}; found none")

    def cheap(offer: Offer) -> bool:
        return offer.usd_per_h <= usd_per_h and offer.usd_per_h <= usd_per_gpu_h * offer.workers

    if all_usd_per_h < math.inf:
        policy = _with_all(policy, all_usd_per_h)
    if math.inf == usd_per_h == usd_per_gpu_h:
        return policy
    return _only(policy, cheap, "every offer costs more than it may")


def _with_all(policy: Policy, usd_per_h: float) -> Policy:
    """Return `policy` with a view in which offers are full that cost too much with all other
    nodes. They are not hidden: they have room again as soon as another node is gone."""

    def decide(view: View) -> Decision:
        over = {o.name for o in view.offers if _all_usd_per_h(view, o) > usd_per_h + 1e-9}
        blocked = {**view.blocked, **dict.fromkeys(over, math.inf)}
        decision = policy(dataclasses.replace(view, blocked=blocked))
        if isinstance(decision, Launch):
            refused = decision.offer.name in over
        else:
            may = open_offers(view) if len(view.alive) < view.max_nodes else []
            refused = isinstance(decision, Wait) and bool(may) and over >= {o.name for o in may}
        why = "another node would cost more than all together may"
        return Wait(LOOK_AGAIN_S, why) if refused else decision

    return decide


def _all_usd_per_h(view: View, offer: Offer) -> float:
    """Return USD for an hour of all nodes that may be billed, and of what would be launched on
    `offer`: one node, or a second world in a place where the run has none."""
    usd = sum(node.usd_per_h for node in _billed(view))
    world = view.alive or view.unsure  # without `alive`: see `without_nodes`
    begins = len(world) if offer.place not in {node.offer.place for node in world} else 1
    return usd + max(1, begins) * offer.usd_per_h


def avoid(policy: Policy, *what: str) -> Policy:
    """Return `policy` without the offers whose name, place or accelerator matches one of these:
    "aws", "aws/us-east-1" (and everything in it), "*/p4d.*", "T4". Nodes that are there stay."""
    if not what or not all(isinstance(each, str) and each for each in what):
        raise BadInput(f"avoid: wanted names of places, offers or accelerators, found {what!r}")
    patterns = (p for each in what for p in (each, each.rstrip("/") + "/*"))
    pattern = re.compile("|".join(map(fnmatch.translate, patterns)))

    def wanted(offer: Offer) -> bool:
        names = offer.name, offer.place, offer.accelerator
        return not any(pattern.match(name) for name in names)

    return _only(policy, wanted, "every offer is one to be avoided")


def _only(policy: Policy, keep: Callable[[Offer], bool], why_none: str) -> Policy:
    """Return `policy` with a view that has only the offers that `keep` accepts."""

    def decide(view: View) -> Decision:
        offers = tuple(offer for offer in view.offers if keep(offer))
        decision = policy(dataclasses.replace(view, offers=offers))
        short = len(view.alive) < view.max_nodes and view.offers and not offers
        return (
            Wait(decision.seconds, why_none) if short and isinstance(decision, Wait) else decision
        )

    return decide


def zone_of(offer: Offer) -> str:
    """Return the zone whose nodes tend to fail together: "aws/us-east-1/use1-az1" of
    "aws/us-east-1/use1-az1/p5.48xlarge"; the offer's place if no zone is named."""
    head = offer.name.rpartition("/")[0]
    inside = offer.place and head.startswith(offer.place + "/")
    return head if inside else offer.place or offer.name


def spread(policy: Policy, *, zones: float = 2) -> Policy:
    """Return `policy` spread over `zones` zones, none with more than its share of `max_nodes`, so
    that a run that loses one goes on in the others. A run prefers fewer than `max_nodes` nodes to
    too many in one zone, but takes `min_nodes` wherever there is capacity."""
    wanted = _whole("spread", "zones", zones, least=2)

    def decide(view: View) -> Decision:
        there = Counter(zone_of(node.offer) for node in staying(view))
        offered = {zone_of(offer) for offer in view.offers}
        share = -(-view.max_nodes // max(1, min(wanted, len(offered | there.keys()))))
        full = {zone for zone, nodes in there.items() if nodes >= share}
        offers = tuple(o for o in view.offers if zone_of(o) not in full) if full else view.offers
        if len(view.alive) < view.min_nodes and not open_offers(view, offers):
            return policy(view)
        decision = policy(dataclasses.replace(view, offers=offers))
        if full and isinstance(decision, Wait) and len(view.alive) < view.max_nodes:
            return Wait(decision.seconds, "zones that have their share are left alone")
        return decision

    return decide


# ---- how many nodes, and until when --------------------------------------------------------------
def warm_spare(policy: Policy, *, n: float = 1) -> Policy:
    """Return `policy` with `n` of `max_nodes` as spares: nodes besides those that `policy` wants,
    in other zones if possible. They train with the others if the shares allow it; a world that is
    limited to certain sizes lets them wait, and takes one in as soon as it loses a node."""
    wanted = _whole("warm_spare", "n", n, least=1)

    def decide(view: View) -> Decision:
        most = max(1, view.max_nodes - wanted)
        least = min(view.min_nodes, most)
        decision = policy(dataclasses.replace(view, max_nodes=most, min_nodes=least))
        if not isinstance(decision, Wait) or not most <= len(view.alive) < view.max_nodes:
            return decision
        used = {zone_of(node.offer) for node in view.alive}
        others = tuple(offer for offer in view.offers if zone_of(offer) not in used)
        for offers in (others, view.offers):
            chosen = policy(without_nodes(view, open_offers(view, offers)))
            if isinstance(chosen, Launch):
                return Launch(chosen.offer, "a warm spare")
        return decision

    return decide


def _whole(who: str, name: str, value: float, least: int) -> int:
    """Return the option `value` as an int, since options of a command line are floats. Raises
    BadInput unless it is a whole number of at least `least`."""
    if not isinstance(value, (int, float)) or value != int(value) or value < least:
        raise BadInput(f"{who}: wanted {name}={least} or more, a whole number; found {value!r}")
    return int(value)


def replacing(policy: Policy, *, settle_s: float = 60.0, grace_s: float = 300.0) -> Policy:
    """Return `policy` wrapped so that each node that may not stay gets a replacement, and is
    released when that has been up for `settle_s`; so is the node that another was launched instead
    of (`Launch.instead_of`). The recovery loop applies it to every policy. A released node has
    `grace_s` to snapshot and leave."""

    def decide(view: View) -> Decision:
        sure: Sequence[Node] = view.alive
        if view.doubted:
            sure = [node for node in view.alive if node.attempt not in view.doubted]
            settled = sum(node.been_up_s(view.now_s) >= settle_s for node in sure)
            if settled >= view.max_nodes:
                return Terminate(view.doubted[0], "its replacement is there", grace_s)
        replaced = [
            view.standing_in[node.attempt]
            for node in (sure if view.standing_in else ())
            if node.attempt in view.standing_in and node.been_up_s(view.now_s) >= settle_s
        ]
        if replaced:
            return Terminate(replaced[0], "its replacement is there", grace_s, tuple(replaced[1:]))
        most, crowded = view.max_nodes + len(view.doubted) + len(view.standing_in), []
        if len(view.alive) > most:
            there = Counter(node.offer.place for node in view.alive)
            crowded = [node for node in sure if there[node.offer.place] > most]
        if crowded:  # a node that was doubted stays after all
            newest = max(crowded, key=lambda node: (node.up_s is None, node.attempt))
            return Terminate(
                newest.attempt, "it is not needed any more", 0.0 if newest.up_s is None else grace_s
            )
        if view.doubted:
            view = dataclasses.replace(view, max_nodes=view.max_nodes + len(view.doubted))
        return policy(view)

    return decide


def reserve_usd(view: View) -> float:
    """Return what the present nodes will still cost, in USD, if all are asked to leave now: drain
    and termination, and the launch of those that are not up (SkyPilot bills it, and reports its end
    only), which may take longer than any before it."""

    def yet_s(node: Node) -> float:
        launch_s, leave_s = view.times_of(node.offer)
        return leave_s + (
            0.0 if node.up_s is not None else max(launch_s, view.now_s - node.asked_s)
        )

    return sum(n.offer.usd_per_h * yet_s(n) / 3600 for n in (*view.alive, *view.unsure))


def _billed(view: View) -> tuple[Node, ...]:
    """Return the nodes that may be billed, each on its offer at the present price, if known."""
    now = {offer.name: offer for offer in view.offers}

    def at_present(node: Node) -> Node:
        offer = now.get(node.offer.name, node.offer)
        same = offer.usd_per_h == node.usd_per_h
        return node if same else dataclasses.replace(node, offer=offer)

    return tuple(map(at_present, (*view.alive, *view.unsure)))


def without_nodes(view: View, offers: Iterable[Offer]) -> View:
    """Return the view as if there were no nodes, to ask a policy which of `offers` it would take.
    The present nodes may still be billed (`View.unsure`)."""
    nothing: dict[str, Any] = {"alive": (), "doubted": (), "standing_in": {}}
    return dataclasses.replace(view, **nothing, unsure=_billed(view), offers=tuple(offers))


def within_budget(policy: Policy, *, usd: float) -> Policy:
    """Return `policy` wrapped to stop just before `usd` are spent: the cost of ending all nodes is
    reserved (`reserve_usd`). No node is launched that could not work for at least as long as it
    takes to leave. `policy` sees the budget as `View.known.budget_usd`."""

    def decide(view: View) -> Decision:
        bound = view.spent_usd + reserve_usd(view)
        if bound >= usd:
            return Stop(f"the budget of {usd:g} USD is spent")
        least_usd = usd if view.known.budget_usd is None else min(usd, view.known.budget_usd)
        known = dataclasses.replace(view.known, budget_usd=least_usd)
        decision = policy(dataclasses.replace(view, known=known))
        if not isinstance(decision, Launch):
            return decision
        launch_s, leave_s = view.times_of(decision.offer)
        least_s = launch_s + 2 * leave_s
        if bound + decision.offer.usd_per_h * least_s / 3600 < usd:
            return decision
        if view.alive:
            return Wait(LOOK_AGAIN_S, "the rest of the budget is for the nodes that are there")
        return Stop(
            f"what is left of the budget of {usd:g} USD does not pay for {least_s:g} s of "
            f"{decision.offer.name}"
        )

    return decide


def within_hours(policy: Policy, *, hours: float) -> Policy:
    """Return `policy` wrapped to stop `hours` after this launch of the run began."""

    def decide(view: View) -> Decision:
        if view.now_s - view.started_s >= hours * 3600:
            return Stop(f"the limit of {hours:g} h is reached")
        return policy(view)

    return decide


SPARE_CHANGEOVERS = 4.0  # in which a run with a deadline may still move

# A wrapper that keeps all nodes of a run in one place, and moves them together to another.


def together(
    policy: Policy,
    *,
    move_after_s: float = 300.0,
    saving: float = 0.15,
    stay_s: float = 1800.0,
    settle_s: float = 60.0,
    grace_s: float = 300.0,
) -> Policy:
    """Return `policy` wrapped so that all nodes are in one place, where they reach each other: the
    place of the oldest node. The run leaves it when no node is left there; or when fewer than
    `min_nodes` are up there, it is full, and nothing was committed for `move_after_s`.

    The run also leaves it for a place that `policy` would take, where work is cheaper by at least
    the share `saving` (0: never), but not before all nodes have been up for `stay_s`. Then a world
    of the same size is made ready there first; when it has been up for `settle_s`, the nodes here
    have `grace_s` to snapshot and leave. Both are paid for meanwhile: minutes, which the saving
    earns back in about `stay_s`.
    """

    return _Together(policy, move_after_s, saving, stay_s, settle_s, grace_s)


@dataclasses.dataclass(frozen=True)
class _Together:
    """The policy that `together` returns and describes."""

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
        """Return whether too few nodes are up, this place is full, another is not, and nothing was
        committed for `move_after_s`."""
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
        """Return the offer that the policy would take in another place where work is cheaper by
        enough; None if there is none, or it is too early to move."""
        if (
            self.saving <= 0
            or view.doubted
            or any(n.up_s is None or view.now_s - n.up_s < self.stay_s for n in nodes)
        ):
            return None
        if _last_hours(view, self.saving):
            return None
        worth = Worth(view)
        at_most = (1 - self.saving) * worth.cost(*(n.offer for n in nodes))
        full = self._resting(view, len(nodes))
        better = tuple(
            o
            for o in view.offers
            if o.place != home
            and not (o.spot and o.place in full)
            and worth.cost(o) <= at_most
        )
        wanted = self.policy(without_nodes(view, open_offers(view, better)))
        return wanted.offer if isinstance(wanted, Launch) else None

    def _resting(self, view: View, nodes: int) -> set[str]:
        """Return the places whose spot was seen to have room for fewer nodes in the last
        `stay_s`."""
        rooms = Counter[str]()
        for offer in (o for o in view.offers if o.spot):
            seen = view.known.capacity.get(offer.name)
            known = None if seen is None or offer.name not in view.blocked else seen.room
            if known is None or seen is None or view.now_s - seen.room_s >= self.stay_s:
                known = nodes
            rooms[offer.place] += known
        return {place for place, room in rooms.items() if room < nodes}

    def _moving(self, view: View, nodes: list[Node], away: list[Node]) -> Decision:
        """Decide while some nodes (`away`) are in another place than the world that trains."""
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
            for offer in sorted(open_offers(view, room), key=worth.cost):
                if isinstance(self.policy(without_nodes(view, [offer])), Launch):
                    return Launch(offer, "the whole run will be cheaper there")
            if all(n.up_s is not None for n in there):
                return Terminate(there[-1].attempt, "there is no room for the whole run")
        return Wait(LOOK_AGAIN_S, "a cheaper place is made ready")


def _last_hours(view: View, saving: float) -> bool:
    """Return whether a deadline leaves no time for a move that goes wrong: for fewer than
    `SPARE_CHANGEOVERS` besides the work. Where lateness has a price, it may cost as much as a move
    saves, the share `saving` of the rest."""
    known, left = view.known, view.known.left(view.committed_step)
    if known.deadline_s is None or left is None:
        return False
    power = sum(n.offer.speed * n.offer.workers for n in staying(view))
    ranks = sum(n.offer.workers for n in staying(view))
    work_s = left / (power * known.efficiency(ranks)) if power else math.inf
    spare_s = known.deadline_s - view.now_s - work_s
    kept_s = SPARE_CHANGEOVERS * max(known.changeover_s, view.launch_s)
    if known.usd_per_hour_late is None or not power:
        return spare_s < kept_s
    late_s = min(kept_s, kept_s - spare_s)
    saved_usd = saving * sum(n.usd_per_h for n in staying(view)) * work_s / 3600
    return known.usd_per_hour_late * late_s / 3600 > saved_usd


def _split(nodes: Iterable[Node], place: str) -> tuple[list[Node], list[Node]]:
    """Split nodes into (those in `place`, the others)."""
    found = list(nodes)
    return [n for n in found if n.offer.place == place], [
        n for n in found if n.offer.place != place
    ]
