"""The contract of a policy, as tests to inherit (`PolicyContract`).

All of our own policies pass it (tests/lab/test_contracts.py).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Iterator

import pytest

from harness.controller.run_limits import RunSpec
from harness.core.world import Decision, Launch, Policy, Stop, Terminate, View, Wait
from harness.lab.simulation.simulation import simulate
from harness.testing.situations import situations

NUMBER = re.compile(r"\d+(\.\d+)?")


class PolicyContract:
    """The requirements of recovery on a policy: it depends on its view alone, keeps to the limits,
    and lets a run end. A subclass, whose name begins with Test, defines the fixture `policy`.

    seeds:     simulated worlds in which it directs a run; every rule of the simulation must hold,
               and the run must end where it can
    may_stop:  True for a policy that may end the run on its own (a budget, a deadline)
    """

    seeds = range(8)
    may_stop = False

    @pytest.fixture
    def policy(self) -> Policy:
        raise NotImplementedError(
            f"{type(self).__name__}: give it a fixture `policy`, which returns the policy"
        )

    def most_nodes(self, view: View) -> int:
        """Return the most nodes that may be alive; more than `max_nodes` for policies that replace
        or move nodes."""
        return view.max_nodes

    def views(self) -> Iterator[View]:
        """Yield the views that the policy must decide on."""
        for seed in range(10):
            yield from situations(seed)

    def test_it_decides(self, policy: Policy) -> None:
        for view in self.views():
            check(policy(view), view)

    def test_the_same_view_is_the_same_decision(self, policy: Policy) -> None:
        """Decide the same after any other views, for equal views, and without changing a view."""
        views = list(self.views())
        again = copy.deepcopy(views)
        first = [policy(view) for view in views]
        assert views == again, "it changed what it was shown"
        for view, decision in reversed(list(zip(again, first, strict=True))):
            assert policy(view) == decision, view

    def test_it_keeps_to_the_number_of_nodes(self, policy: Policy) -> None:
        for view in self.views():
            if isinstance(policy(view), Launch):
                assert len(view.alive) < self.most_nodes(view), view

    def test_without_offers_it_launches_nothing(self, policy: Policy) -> None:
        for view in self.views():
            assert not isinstance(policy(dataclasses.replace(view, offers=())), Launch)

    def test_a_full_offer_is_not_asked_before_its_time(self, policy: Policy) -> None:
        for view in self.views():
            decision = policy(view)
            if isinstance(decision, Launch):
                assert view.blocked.get(decision.offer.name, -math.inf) <= view.now_s, view

    def test_reasons_hold_no_numbers_that_change(self, policy: Policy) -> None:
        """Keep numbers out of reasons: a wait is recorded once per reason, so a clock in it would
        create a fact at every look."""
        for view in self.views():
            now = policy(view)
            later = policy(dataclasses.replace(view, now_s=view.now_s + 0.5))
            if isinstance(now, Wait) and isinstance(later, Wait):
                same = NUMBER.sub("#", now.reason) == NUMBER.sub("#", later.reason)
                assert now.reason == later.reason or not same, (now.reason, later.reason)

    def test_runs_end_in_simulated_worlds(self, policy: Policy) -> None:
        """Run the real recovery loop with this policy, under losses, silence and crashes. A broken
        rule raises Violation, with the command that reproduces it."""
        run = RunSpec(
            1,
            3,
            poll_s=5.0,
            exit_grace_s=60.0,
            max_hours_without_progress=2.0,
            # a run may end by limits of its own
            max_hours=1e6 if self.may_stop else None,
        )
        for seed in self.seeds:
            found = simulate(seed, policy, run)
            assert found.outcome in ("done", "stopped", "failed") and found.reason


def check(decision: Decision, view: View) -> None:
    """Raise AssertionError unless recovery can carry out the decision."""
    assert isinstance(decision, Launch | Terminate | Wait | Stop), decision
    assert isinstance(decision.reason, str)
    match decision:
        case Launch(offer):
            assert offer in view.offers, f"{offer.name} is not offered now"
        case Terminate(attempt, reason, grace_s, also):
            alive = {node.attempt for node in view.alive}
            assert {attempt, *also} <= alive, "it ends a node that is not alive"
            assert reason and 0 <= grace_s < math.inf
        case Wait(seconds):
            assert 0 < seconds < math.inf, f"it waits {seconds} s"
        case Stop(reason):
            assert reason, "people are told why a run was stopped"
