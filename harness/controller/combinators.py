"""Wrappers: policies made of other policies, `within_budget(cheapest, usd=200)`.

Pure: what a wrapper returns is a policy, which knows its view and nothing else. All raise BadInput
for options that cannot work. docs/POLICIES.md says when to use which.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from harness.controller.choosing import LOOK_AGAIN_S, open_offers
from harness.controller.value import staying
from harness.core.world import (
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
)


# ---- which offers --------------------------------------------------------------------------------
def at_most(
    policy: Policy, *, usd_per_h: float = math.inf, usd_per_gpu_h: float = math.inf
) -> Policy:
    """Only offers whose node costs no more than `usd_per_h`, and no more than `usd_per_gpu_h` for
    each of its GPUs. A node that is there stays, whatever its price becomes."""
    for name, usd in (("usd_per_h", usd_per_h), ("usd_per_gpu_h", usd_per_gpu_h)):
        if not usd > 0:
            raise BadInput(f"at_most: wanted {name} above 0, found {usd:g}")
    if math.inf == usd_per_h == usd_per_gpu_h:
        raise BadInput("at_most: wanted usd_per_h or usd_per_gpu_h, found neither")

    def cheap(offer: Offer) -> bool:
        return offer.usd_per_h <= usd_per_h and offer.usd_per_h <= usd_per_gpu_h * offer.workers

    return _only(policy, cheap, "every offer costs more than it may")


def avoid(policy: Policy, *what: str) -> Policy:
    """No offers whose name, place or accelerator is one of these: "aws", "aws/us-east-1" (and all
    that is in it), "*/p4d.*", "T4". A node that is there stays."""
    if not what or not all(isinstance(each, str) and each for each in what):
        raise BadInput(f"avoid: wanted names of places, offers or accelerators, found {what!r}")
    patterns = (p for each in what for p in (each, each.rstrip("/") + "/*"))
    pattern = re.compile("|".join(map(fnmatch.translate, patterns)))

    def wanted(offer: Offer) -> bool:
        names = offer.name, offer.place, offer.accelerator
        return not any(pattern.match(name) for name in names)

    return _only(policy, wanted, "every offer is one to be avoided")


def _only(policy: Policy, keep: Callable[[Offer], bool], why_none: str) -> Policy:
    """`policy`, which sees no other offers than those."""

    def decide(view: View) -> Decision:
        offers = tuple(offer for offer in view.offers if keep(offer))
        decision = policy(dataclasses.replace(view, offers=offers))
        short = len(view.alive) < view.max_nodes and view.offers and not offers
        return (
            Wait(decision.seconds, why_none) if short and isinstance(decision, Wait) else decision
        )

    return decide


def zone_of(offer: Offer) -> str:
    """Where it fails together with others: "aws/us-east-1/use1-az1" of
    "aws/us-east-1/use1-az1/p5.48xlarge"; its place where no zone is named."""
    head = offer.name.rpartition("/")[0]
    inside = offer.place and head.startswith(offer.place + "/")
    return head if inside else offer.place or offer.name


def spread(policy: Policy, *, zones: float = 2) -> Policy:
    """No zone has more than its share of `max_nodes` in so many zones: who loses one goes on in the
    others. Fewer nodes than `max_nodes` rather than too many in one zone; but `min_nodes` wherever
    they can be had."""
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
    """`n` of `max_nodes` are spares: nodes besides those that `policy` wants, in other zones if it
    can be. They train with the others where shares allow it; a world that may have certain sizes
    only lets them wait, and takes them in the moment that it loses one."""
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
    """Options of a command line are floats. Raises BadInput."""
    if not isinstance(value, (int, float)) or value != int(value) or value < least:
        raise BadInput(f"{who}: wanted {name}={least} or more, a whole number; found {value!r}")
    return int(value)


def replacing(policy: Policy, *, settle_s: float = 60.0, grace_s: float = 300.0) -> Policy:
    """Have another node beside each one that may not stay, and release that one when the other has
    been up for `settle_s`; likewise what a node was launched instead of (`Launch.instead_of`).
    Applied by the recovery loop to every policy; what is released has `grace_s` to snapshot and
    leave."""

    def decide(view: View) -> Decision:
        sure: Sequence[Node] = view.alive
        if view.doubted:
            sure = [node for node in view.alive if node.attempt not in view.doubted]
            settled = sum(node.been_up_s(view.now_s) >= settle_s for node in sure)
            if settled >= view.max_nodes:
                return Terminate(view.doubted[0], "its replacement is there", grace_s)
        for node in sure if view.standing_in else ():
            old = view.standing_in.get(node.attempt)
            if old is not None and node.been_up_s(view.now_s) >= settle_s:
                return Terminate(old, "its replacement is there", grace_s)
        most, crowded = view.max_nodes + len(view.doubted) + len(view.standing_in), []
        if len(view.alive) > most:
            there = Counter(node.offer.place for node in view.alive)
            crowded = [node for node in sure if there[node.offer.place] > most]
        if crowded:  # what was doubted stays after all
            newest = max(crowded, key=lambda node: (node.up_s is None, node.attempt))
            return Terminate(
                newest.attempt, "it is not needed any more", 0.0 if newest.up_s is None else grace_s
            )
        if view.doubted:
            view = dataclasses.replace(view, max_nodes=view.max_nodes + len(view.doubted))
        return policy(view)

    return decide


def reserve_usd(view: View) -> float:
    """What the nodes that are there will cost yet, if all are asked to leave now: drain and
    termination, and the launch of those that are not up (SkyPilot bills it, and tells when it is
    over), which may take longer than any before it."""

    def yet_s(node: Node) -> float:
        launch_s, leave_s = view.times_of(node.offer)
        return leave_s + (
            0.0 if node.up_s is not None else max(launch_s, view.now_s - node.asked_s)
        )

    return sum(n.offer.usd_per_h * yet_s(n) / 3600 for n in (*view.alive, *view.unsure))


def without_nodes(view: View, offers: Iterable[Offer]) -> View:
    """The view of somebody who has no nodes yet, to be asked which of these offers to take. What
    the nodes that are there will cost yet counts as spent."""
    spent_usd = view.spent_usd + reserve_usd(view)
    nothing: dict[str, Any] = {"alive": (), "unsure": (), "doubted": (), "standing_in": {}}
    return dataclasses.replace(view, **nothing, offers=tuple(offers), spent_usd=spent_usd)


def within_budget(policy: Policy, *, usd: float) -> Policy:
    """Stop just before `usd` are spent: what it costs to have all nodes gone is kept back
    (`reserve_usd`). Nothing is started that could not work for at least as long as it takes to
    leave. `policy` is told (`View.known.budget_usd`)."""

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
    """Stop `hours` after this launch of the run began."""

    def decide(view: View) -> Decision:
        if view.now_s - view.started_s >= hours * 3600:
            return Stop(f"the limit of {hours:g} h is reached")
        return policy(view)

    return decide
