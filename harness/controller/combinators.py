"""Wrappers: policies made of other policies, `within_budget(cheapest, usd=200)`.

Pure: what a wrapper returns is a policy, which knows its view and nothing else.
"""

from __future__ import annotations

import dataclasses

from harness.controller.choosing import LOOK_AGAIN_S
from harness.core.world import Decision, Launch, Policy, Stop, Terminate, View, Wait


def replacing(policy: Policy, *, settle_s: float = 60.0, grace_s: float = 300.0) -> Policy:
    """Have another node beside each one that may not stay, and release that one when the other has
    been up for `settle_s`; likewise what a node was launched instead of (`Launch.instead_of`).
    Applied by the recovery loop to every policy; what is released has `grace_s` to snapshot and
    leave."""

    def decide(view: View) -> Decision:
        sure = [node for node in view.alive if node.attempt not in view.doubted]
        settled = sum(node.been_up_s(view.now_s) >= settle_s for node in sure)
        if view.doubted and settled >= view.max_nodes:
            return Terminate(view.doubted[0], "its replacement is there", grace_s)
        for node in sure:
            old = view.standing_in.get(node.attempt)
            if old is not None and node.been_up_s(view.now_s) >= settle_s:
                return Terminate(old, "its replacement is there", grace_s)
        crowded = [
            n
            for n in sure
            if sum(n.offer.place == m.offer.place for m in view.alive)
            > view.max_nodes + len(view.doubted) + len(view.standing_in)
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
