"""Strategies: functions from what is known (`View`) to one decision. Used by `recovery.py`, once
per round.

Composition is wrapping: `within_budget(cheapest, usd=200)`. A policy of your own is a function in
your own module, named on the command line as `pkg.module:function`; options follow as
`?name=value&name=value`. Pure: a policy knows its view and nothing else, and keeps nothing between
calls. Reasons never contain changing numbers, so that a wait is recorded once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from harness.core import dotted
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

# upper limit of every wait here: prices, capacity and nodes are looked at again after it
LOOK_AGAIN_S = 10.0


# ---- what policies ask of a view -----------------------------------------------------------------
def open_offers(view: View, among: Iterable[Offer] | None = None) -> list[Offer]:
    """Offers that may have a machine, cheapest first. One that was full gets a single probe at
    a time."""
    pending = {node.offer.name for node in view.alive if node.up_s is None}
    return [
        offer
        for offer in (view.offers if among is None else among)
        if view.blocked.get(offer.name, 0.0) <= view.now_s
        and not (offer.name in view.blocked and offer.name in pending)
    ]


def until_next(view: View) -> float:
    """Seconds until a blocked offer may be asked again."""
    waits = [until - view.now_s for until in view.blocked.values() if until > view.now_s]
    return min([*waits, LOOK_AGAIN_S])


def usd_per_work(offer: Offer) -> float:
    """USD for what one worker of speed 1 does in an hour: what a step costs, up to a factor
    that all offers share."""
    return offer.usd_per_h / (offer.speed * max(1, offer.gpus))


def fill(view: View, among: Iterable[Offer], why: str) -> Decision:
    """Launch on the first open one of these offers until `max_nodes` are alive."""
    if len(view.alive) >= view.max_nodes:
        return Wait(LOOK_AGAIN_S, "all nodes are there")
    if offers := open_offers(view, among):
        return Launch(offers[0], why)
    return Wait(until_next(view), "no capacity on the offers in question")


# ---- strategies ----------------------------------------------------------------------------------
def cheapest(view: View) -> Decision:
    """Keep `max_nodes` alive, each on the cheapest offer that has capacity."""
    return fill(view, view.offers, "cheapest offer with capacity")


def best_value(view: View) -> Decision:
    """Like `cheapest`, but by the price of the work done rather than of the hour: a node with
    eight fast GPUs may be the cheapest."""
    return fill(
        view, sorted(view.offers, key=usd_per_work), "the cheapest work on an offer with capacity"
    )


def patient(view: View, *, premium: float = 1.25, patience_s: float = 1800.0) -> Decision:
    """Like `cheapest`, but pay more than `premium` times the lowest price only after
    `patience_s` without progress."""
    waited_s = view.now_s - max(view.last_progress_s, view.started_s)
    if not view.offers or waited_s >= patience_s:
        return fill(view, view.offers, "patience is over: cheapest offer with capacity")
    ceiling = premium * view.offers[0].usd_per_h
    return fill(view, [o for o in view.offers if o.usd_per_h <= ceiling], "near the lowest price")


def on_demand_fallback(view: View) -> Decision:
    """Spot where there is some; on-demand only to keep `min_nodes`, and only for as long as spot
    cannot. Coming back to spot needs room for one more node: with `min_nodes == max_nodes` an
    on-demand node stays until it ends."""
    spot = [o for o in view.offers if o.spot]
    up = sum(node.up_s is not None and node.offer.spot for node in view.alive)
    on_demand = [node for node in view.alive if not node.offer.spot]
    if on_demand and up >= view.min_nodes:
        return Terminate(on_demand[-1].attempt, "spot is back")
    if len(view.alive) < view.max_nodes and open_offers(view, spot):
        return fill(view, spot, "spot has capacity")
    if len(view.alive) < view.min_nodes:
        return fill(
            view,
            [o for o in view.offers if not o.spot],
            "no spot to be had: on-demand until it is back",
        )
    if not on_demand:
        return fill(view, spot, "")
    return Wait(until_next(view), "on-demand holds the minimum until spot is back")


def uniform_progress(
    view: View, *, deadline_h: float, work_h: float, total_steps: float, changeover_s: float = 300.0
) -> Decision:
    """Spot while on schedule, on-demand when behind it: meet a deadline at a low price (Can't Be
    Late, NSDI 2024).

    `work_h`: hours the run takes on `max_nodes` nodes without interruptions; `changeover_s`: what a
    (re)launch costs.
    """
    elapsed_s, deadline_s, work_s = view.now_s - view.started_s, deadline_h * 3600, work_h * 3600
    done_s = work_s * min(1.0, view.committed_step / total_steps)
    spot = [o for o in view.offers if o.spot]
    on_demand = [o for o in view.offers if not o.spot]
    bought = [node for node in view.alive if not node.offer.spot]
    rented = [node for node in view.alive if node.offer.spot]

    ahead_s = done_s - work_s * min(
        1.0, (elapsed_s + (2 * changeover_s if bought else 0.0)) / deadline_s
    )
    # only what is never taken away is in time now
    last_call = work_s - done_s + 2 * changeover_s >= deadline_s - elapsed_s
    if last_call and not any(node.up_s is not None for node in rented):
        return fill(view, on_demand or spot, "the deadline leaves no time for another interruption")
    if open_offers(view, spot) and len(rented) < view.max_nodes:
        if len(view.alive) < view.max_nodes:
            return fill(view, spot, "spot has capacity")
        # the paper's hysteresis: leave on-demand only when two changeovers ahead
        if ahead_s >= 0 and not last_call:
            return Terminate(bought[-1].attempt, "ahead of schedule and spot is back")
    if ahead_s < 0 and on_demand:
        return fill(view, on_demand, "behind schedule and no spot to be had")
    return Wait(until_next(view), "on schedule")


# ---- wrappers ------------------------------------------------------------------------------------
def replacing(policy: Policy, *, settle_s: float = 60.0, grace_s: float = 300.0) -> Policy:
    """Have another node beside each one that may not stay, and release that one when the other has
    been up for `settle_s`. Applied by the recovery loop to every policy; what is released has
    `grace_s` to snapshot and leave."""

    def decide(view: View) -> Decision:
        sure = [node for node in view.alive if node.attempt not in view.doubted]
        settled = sum(node.been_up_s(view.now_s) >= settle_s for node in sure)
        if view.doubted and settled >= view.max_nodes:
            return Terminate(view.doubted[0], "its replacement is there", grace_s)
        crowded = [
            n
            for n in sure
            if sum(n.offer.place == m.offer.place for m in view.alive)
            > view.max_nodes + len(view.doubted)
        ]
        if crowded:  # what was doubted stays after all
            newest = max(crowded, key=lambda node: (node.up_s is None, node.attempt))
            return Terminate(
                newest.attempt, "it is not needed any more", 0.0 if newest.up_s is None else grace_s
            )
        return policy(dataclasses.replace(view, max_nodes=view.max_nodes + len(view.doubted)))

    return decide


def reserve_usd(view: View) -> float:
    """What the nodes that are there will cost yet, if all are asked to leave now: drain and
    termination, and the launch of those that are not up (SkyPilot bills it, and tells when it is
    over)."""
    waits_s = (
        (node, view.leave_s + (view.launch_s if node.up_s is None else 0.0)) for node in view.alive
    )
    return sum(node.offer.usd_per_h * seconds / 3600 for node, seconds in waits_s)


def within_budget(policy: Policy, *, usd: float) -> Policy:
    """Stop just before `usd` are spent: what it costs to have all nodes gone is kept back
    (`reserve_usd`). Nothing is started that could not work for at least as long as it takes to
    leave."""

    def decide(view: View) -> Decision:
        bound = view.spent_usd + reserve_usd(view)
        if bound >= usd:
            return Stop(f"the budget of {usd:g} USD is spent")
        decision = policy(view)
        least_s = view.launch_s + 2 * view.leave_s
        if (
            not isinstance(decision, Launch)
            or bound + decision.offer.usd_per_h * least_s / 3600 < usd
        ):
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
        better = tuple(
            o
            for o in view.offers
            if o.place != home and usd_per_work(o) <= (1 - self.saving) * _cost(nodes)
        )
        wanted = self.policy(
            dataclasses.replace(view, alive=(), offers=tuple(open_offers(view, better)))
        )
        return wanted.offer if isinstance(wanted, Launch) else None

    def _moving(self, view: View, nodes: list[Node], away: list[Node]) -> Decision:
        """Some nodes are elsewhere already, beside the world that trains."""
        there, odd = _split(away, min(away, key=lambda n: (n.up_s is None, n.attempt)).offer.place)
        if odd or self.saving <= 0 or _cost(there) >= _cost(nodes):
            return Terminate((odd or away)[-1].attempt, "the others cannot reach it")
        settled = sum(n.been_up_s(view.now_s) >= self.settle_s for n in there)
        if settled >= len(nodes):
            first, *rest = (n.attempt for n in nodes)
            return Terminate(first, "the whole run is cheaper elsewhere", self.grace_s, tuple(rest))
        if len(there) < len(nodes):
            room = tuple(
                o
                for o in view.offers
                if o.place == there[0].offer.place and usd_per_work(o) < _cost(nodes)
            )
            if offers := open_offers(view, room):
                return Launch(min(offers, key=usd_per_work), "the whole run will be cheaper there")
            if all(n.up_s is not None for n in there):
                return Terminate(there[-1].attempt, "there is no room for the whole run")
        return Wait(LOOK_AGAIN_S, "a cheaper place is made ready")


def _split(nodes: Iterable[Node], place: str) -> tuple[list[Node], list[Node]]:
    """(those in `place`, the others)"""
    found = list(nodes)
    return [n for n in found if n.offer.place == place], [
        n for n in found if n.offer.place != place
    ]


def _cost(nodes: Iterable[Node]) -> float:
    """`usd_per_work` of a world."""
    found = list(nodes)
    return sum(n.offer.usd_per_h for n in found) / sum(
        n.offer.speed * max(1, n.offer.gpus) for n in found
    )


# ---- by name -------------------------------------------------------------------------------------
POLICIES: dict[str, Callable[..., Decision]] = {
    "cheapest": cheapest,
    "best_value": best_value,
    "patient": patient,
    "on_demand_fallback": on_demand_fallback,
    "uniform_progress": uniform_progress,
}


def resolve(name: str) -> Policy:
    """`cheapest`, `patient?premium=1.5`, `my_pkg.policies:mine?x=3` -> a policy. Raises
    BadInput that says what is known."""
    path, _, query = name.partition("?")
    function = POLICIES.get(path)
    if function is None and ":" in path:
        function = dotted.imported("policy", path)
    if not callable(function):
        raise BadInput(
            f"there is no policy {path!r}; known: {', '.join(POLICIES)}; or name your own as "
            "pkg.module:function"
        )
    return dotted.with_options("policy", path, function, query, arguments=1)


__all__ = [
    "POLICIES",
    "best_value",
    "cheapest",
    "fill",
    "on_demand_fallback",
    "open_offers",
    "patient",
    "replacing",
    "resolve",
    "together",
    "uniform_progress",
    "until_next",
    "usd_per_work",
    "within_budget",
    "within_hours",
]
