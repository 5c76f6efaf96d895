"""Strategies: functions from what is known (`View`) to one decision. Used by `recovery.py`, once
per round.

Composition is wrapping: `within_budget(cheapest, usd=200)`. A policy of your own is a function in
your own module, named on the command line as `pkg.module:function`; options follow as
`?name=value&name=value`. Pure: a policy knows its view and nothing else, and keeps nothing between
calls. Reasons never contain changing numbers, so that a wait is recorded once.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.controller.choosing import (
    LOOK_AGAIN_S,
    fill,
    open_offers,
    until_next,
    usd_per_work,
)
from harness.controller.combinators import replacing, within_budget, within_hours
from harness.controller.deadline import deadline
from harness.controller.together import together
from harness.controller.value import Worth
from harness.core import dotted
from harness.core.world import BadInput, Decision, Launch, Policy, Terminate, View, Wait


# ---- strategies ----------------------------------------------------------------------------------
def cheapest(view: View) -> Decision:
    """Keep `max_nodes` alive, each on the cheapest offer that has capacity. When steps were timed,
    losses were seen or a move costs egress: on the one where a useful step is expected to cost
    least."""
    return _by_worth(view, Worth(view, per_work=False), "cheapest offer with capacity")


def best_value(view: View) -> Decision:
    """Like `cheapest`, but by the price of the work done from the beginning, by what is said of the
    speed of offers: a node with eight fast GPUs may be the cheapest."""
    return _by_worth(view, Worth(view), "the cheapest work on an offer with capacity")


def _by_worth(view: View, worth: Worth, why: str) -> Decision:
    if len(view.alive) >= view.max_nodes:
        return Wait(LOOK_AGAIN_S, "all nodes are there")
    offers = open_offers(view)
    if not offers:
        return Wait(until_next(view), "no capacity on the offers in question")
    if (offer := worth.best(offers)) is None:
        return Wait(LOOK_AGAIN_S, "the micro-batches are shared out: more nodes would be idle")
    return Launch(offer, why if worth.nothing_known else "a useful step is expected to cost least")


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


# ---- by name -------------------------------------------------------------------------------------
POLICIES: dict[str, Callable[..., Decision]] = {
    "cheapest": cheapest,
    "best_value": best_value,
    "patient": patient,
    "on_demand_fallback": on_demand_fallback,
    "uniform_progress": uniform_progress,
    "deadline": deadline,
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
    "deadline",
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
