"""What policies ask of a view: which offers may have a machine, what work costs there, whom to
launch next. Used by every policy.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from harness.core.world import Decision, Launch, Node, Offer, View, Wait

# upper limit of every wait here: prices, capacity and nodes are looked at again after it
LOOK_AGAIN_S = 10.0
MOST_PLACES = 2  # that a run may have nodes in at a time (`Loop.room`)
# lengths of cells of tables are rounded to powers of this, so that decisions share tables
CELL_RATIO = 2**0.25


def open_offers(view: View, among: Iterable[Offer] | None = None) -> list[Offer]:
    """Offers that may have a machine, cheapest first. One that was full gets a single probe at
    a time. Nodes are in two places at most, which a move takes: the loop lets none into a third."""
    pending = {node.offer.name for node in view.alive if node.up_s is None}
    places = {node.offer.place for node in view.alive}
    return [
        offer
        for offer in (view.offers if among is None else among)
        if view.blocked.get(offer.name, 0.0) <= view.now_s
        and not (offer.name in view.blocked and offer.name in pending)
        and (len(places) < MOST_PLACES or offer.place in places)
    ]


def until_next(view: View) -> float:
    """Seconds until a blocked offer may be asked again."""
    waits = [until - view.now_s for until in view.blocked.values() if until > view.now_s]
    return min([*waits, LOOK_AGAIN_S])


def usd_per_work(offer: Offer) -> float:
    """USD for what one worker of speed 1 does in an hour: what a step costs, up to a factor
    that all offers share."""
    return offer.usd_per_h / (offer.speed * offer.workers)


def every(interval_s: float) -> str:
    """For the reason of a choice: how often a world snapshots in the place that was chosen."""
    return f", with a snapshot every {interval_s:.0f} s" if interval_s else ""


def at_work(view: View, node: Node) -> bool:
    """Does it train, as far as time tells?"""
    asked_s = view.now_s - node.asked_s
    return node.been_up_s(view.now_s) >= 0 and asked_s >= view.known.changeover_s - 1e-3


def began_s(nodes: Iterable[Node]) -> list[float | None]:
    """When each one's command began (`Node.been_up_s`), of many at once."""
    return [n.up_s if n.at_work_s is None else n.at_work_s for n in nodes]


def not_at_work(view: View, nodes: Sequence[Node]) -> list[Node]:
    """Those of many that are not (`at_work`)."""
    now_s, least_s = view.now_s, view.known.changeover_s - 1e-3
    return [
        node
        for node, at_s in zip(nodes, began_s(nodes), strict=True)
        if now_s - node.asked_s < least_s or at_s is None or at_s > now_s
    ]


def grid(view: View, work_h: float, time_h: float, cells: int, step: int) -> tuple[float, int]:
    """Of a table that says what the rest of a run costs: hours of a cell, of which `cells` cover
    the time from the run's beginning to its deadline, and how many of them all of its work takes,
    a multiple of `step`. `work_h`, `time_h`: what is left of both."""
    known = view.known
    left = known.left(view.committed_step) or 1.0
    whole_h = work_h * max(1.0, known.work / left)
    span_h = ((known.deadline_s or 0.0) - view.started_s) / 3600
    span_h = min(max(span_h, time_h), 3 * whole_h + 24)
    cell_h = CELL_RATIO ** math.ceil(math.log(span_h / cells, CELL_RATIO))
    return cell_h, -(-math.ceil(whole_h / cell_h + 1) // step) * step


def fill(view: View, among: Iterable[Offer], why: str) -> Decision:
    """Launch on the first open one of these offers until `max_nodes` are alive."""
    if len(view.alive) >= view.max_nodes:
        return Wait(LOOK_AGAIN_S, "all nodes are there")
    if offers := open_offers(view, among):
        return Launch(offers[0], why)
    return Wait(until_next(view), "no capacity on the offers in question")
