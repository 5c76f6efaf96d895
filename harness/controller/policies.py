"""Strategies: functions from a `View` to one decision. `recovery.py` calls one once per round.

Policies are composed by wrapping: `within_budget(cheapest, usd=200)`. A custom policy is a function
in your own module, named on the command line as `pkg.module:function`; options follow as
`?name=value&name=value`. Pure: a policy knows its view and nothing else, and keeps nothing between
calls. Reasons never contain changing numbers, so that a wait is recorded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from harness.controller.combinators import (
    at_most,
    avoid,
    replacing,
    spread,
    together,
    warm_spare,
    within_budget,
    within_hours,
)
from harness.controller.deadline_policy import by_deadline, deadline
from harness.controller.offer_value import Worth
from harness.core import user_functions
from harness.core.user_functions import WrittenCall
from harness.core.world import (
    LOOK_AGAIN_S,
    BadInput,
    Decision,
    Launch,
    Policy,
    Terminate,
    View,
    Wait,
    every,
    fill,
    open_offers,
    until_next,
    usd_per_work,
)


# ---- strategies ----------------------------------------------------------------------------------
def cheapest(view: View) -> Decision:
    """Keep `max_nodes` alive, each on the cheapest offer that has capacity; once steps were timed,
    losses were seen or a move costs egress, on the one where a useful step is expected to cost
    least."""
    return _by_worth(view, False, "cheapest offer with capacity")


def best_value(view: View) -> Decision:
    """Decide like `cheapest`, but from the beginning by the price of work, with the stated speed of
    offers: a node with eight fast GPUs may be the cheapest."""
    return _by_worth(view, True, "the cheapest work on an offer with capacity")


def _by_worth(view: View, per_work: bool, why: str) -> Decision:
    if len(view.alive) >= view.max_nodes:
        return Wait(LOOK_AGAIN_S, "all nodes are there")
    offers = open_offers(view)
    if not offers:
        return Wait(until_next(view), "no capacity on the offers in question")
    worth = Worth(view, per_work)
    if (offer := worth.best(offers)) is None:
        return Wait(LOOK_AGAIN_S, "the micro-batches are shared out: more nodes would be idle")
    if not worth.nothing_known:
        why = "a useful step is expected to cost least"
    return Launch(offer, why + every(worth.interval_s(offer)))


def patient(view: View, *, premium: float = 1.25, patience_s: float = 1800.0) -> Decision:
    """Decide like `cheapest`, but pay more than `premium` times the lowest price only after
    `patience_s` without progress."""
    waited_s = view.now_s - max(view.last_progress_s, view.started_s)
    if not view.offers or waited_s >= patience_s:
        return fill(view, view.offers, "patience is over: cheapest offer with capacity")
    ceiling = premium * view.offers[0].usd_per_h
    return fill(view, [o for o in view.offers if o.usd_per_h <= ceiling], "near the lowest price")


def on_demand_fallback(view: View) -> Decision:
    """Use spot where it has capacity, and on-demand only to keep `min_nodes` while spot cannot.
    Returning to spot needs room for one more node: with `min_nodes == max_nodes` an on-demand node
    stays until it ends."""
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
    """Use spot while on schedule and on-demand when behind it, to meet a deadline at a low price
    (Can't Be Late, NSDI 2024).

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
    # only nodes that cannot be preempted are in time now
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


COMBINATORS: dict[str, Callable[..., Policy]] = {
    "at_most": at_most,
    "avoid": avoid,
    "by_deadline": by_deadline,
    "spread": spread,
    "warm_spare": warm_spare,
    "within_budget": within_budget,
    "within_hours": within_hours,
}
# policies that may launch on-demand nodes, so that on-demand offers are needed
_ON_DEMAND = {"by_deadline", "deadline", "on_demand_fallback", "uniform_progress"}


def resolve(name: str) -> Policy:
    """Return the policy of a name: `cheapest`, `patient?premium=1.5`, `patient(premium=1.5)`,
    `my_pkg.policies:mine?x=3`, `at_most(best_value, usd_per_h=2)`. Raises BadInput that lists the
    known names."""
    return _made(_call_of(name), name)


def uses_on_demand(name: str) -> bool:
    """Return whether a policy of that name may launch on-demand nodes. Raises BadInput if the name
    cannot be parsed."""
    return any(each.partition("?")[0] in _ON_DEMAND for each in _call_of(name).names())


def launched(name: str, *, saving: float = 0.15, stay_s: float = 1800.0) -> Policy:
    """Return the policy of that name as `harness launch` runs it on clouds whose places do not
    reach each other, and as all forecasts play it. `deadline` chooses places itself. Any other is
    kept `together`; so is one that is not to move (`saving=0`), and one that `spread` shows only a
    part of a place. Raises BadInput."""
    policy = resolve(name)
    names = {each.partition("?")[0] for each in _call_of(name).names()}
    if saving > 0 and "deadline" in names and "spread" not in names:
        return policy
    return together(policy, saving=saving, stay_s=stay_s)


def _call_of(name: str) -> WrittenCall:
    plain = "(" not in name.partition("?")[0]
    return WrittenCall(name) if plain else user_functions.parse("policy", name)


def _made(call: WrittenCall, name: str) -> Policy:
    """Return the policy of one call within `name`. Raises BadInput."""
    path, _, query = call.name.partition("?")
    function: Any = COMBINATORS.get(path) or POLICIES.get(path)
    if function is None and ":" in path:
        function = user_functions.imported("policy", path)
    if not callable(function):
        raise BadInput(
            f"there is no policy {path!r}; known: {', '.join(POLICIES)}; around another one: "
            f"{', '.join(COMBINATORS)}; or name your own as pkg.module:function"
        )
    if not call.called and path not in COMBINATORS:
        return user_functions.with_options("policy", path, function, query, arguments=1)
    given = {key: user_functions.value_of("policy", value) for key, value in call.options.items()}
    options = {**user_functions.options_of("policy", query), **given}
    where, written = f"policy {name!r}", f"options are written {path}(..., name=value)"
    if path in COMBINATORS or call.arguments:
        return _wrapped(call, name, function, options, (where, path, written))
    user_functions.check_call(where, path, function, [None], options, written)
    return functools.partial(function, **options) if options else function


def _wrapped(
    call: WrittenCall,
    name: str,
    function: Callable[..., Any],
    options: Mapping[str, float | str],
    said: tuple[str, str, str],
) -> Policy:
    """Return a policy that wraps the one in the first argument of the call. Raises BadInput."""
    where, path, written = said
    if path in POLICIES or not call.arguments:
        raise BadInput(
            f"{where}: {path} "
            + (
                "takes options, and no policy"
                if path in POLICIES
                else f"goes around a policy; write for example {path}(best_value, ...)"
            )
        )
    inner, *words = call.arguments
    if any(word.called for word in words):
        raise BadInput(f"{where}: {path} goes around one policy, the first; found more")
    arguments = [_made(inner, name), *(word.name for word in words)]
    user_functions.check_call(where, path, function, arguments, options, written)
    made = function(*arguments, **options)
    if not callable(made):
        raise BadInput(f"{where}: {path} returned {made!r}; wanted a policy, a function of a View")
    return made  # type: ignore[no-any-return]


__all__ = [
    "COMBINATORS",
    "POLICIES",
    "at_most",
    "avoid",
    "best_value",
    "by_deadline",
    "cheapest",
    "deadline",
    "fill",
    "on_demand_fallback",
    "open_offers",
    "patient",
    "replacing",
    "resolve",
    "spread",
    "together",
    "uniform_progress",
    "until_next",
    "usd_per_work",
    "uses_on_demand",
    "warm_spare",
    "within_budget",
    "within_hours",
]
