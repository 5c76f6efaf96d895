"""The contract of a policy, as tests: inherit them (`PolicyContract`).

All of our own policies pass it (tests/test_contracts.py).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Iterator

import pytest

from harness.controller.recovery import RunSpec
from harness.core.world import Decision, Launch, Policy, Stop, Terminate, View, Wait
from harness.proof.sim import simulate
from harness.testing.situations import situations

NUMBER = re.compile(r"\d+(\.\d+)?")


class PolicyContract:
    """What recovery needs of a policy: a function of its view and nothing else, that keeps to the
    limits, and with which a run ends. A subclass, whose name begins with Test, gives the fixture
    `policy`.

    seeds:     simulated worlds in which it leads a run; every rule of the simulation must hold, and
               the run must end where it can
    may_stop:  True for a policy that may end the run by itself (a budget, a deadline)
    """

    seeds = range(8)
    may_stop = False

    @pytest.fixture
    def policy(self) -> Policy:
        raise NotImplementedError(
            f"{type(self).__name__}: give it a fixture `policy`, which returns the policy"
        )

    def most_nodes(self, view: View) -> int:
        """How many nodes it may have alive: for policies that replace or move nodes, more than
        `max_nodes`."""
        return view.max_nodes

    def views(self) -> Iterator[View]:
        """What it is asked about."""
        for seed in range(10):
            yield from situations(seed)

    def test_it_decides(self, policy: Policy) -> None:
        for view in self.views():
            check(policy(view), view)

    def test_the_same_view_is_the_same_decision(self, policy: Policy) -> None:
        """After any other views, of equal values as well; and the view is left as it was."""
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
        """A wait is recorded once for each reason: a clock in it would make a fact of every
        look."""
        for view in self.views():
            now = policy(view)
            later = policy(dataclasses.replace(view, now_s=view.now_s + 0.5))
            if isinstance(now, Wait) and isinstance(later, Wait):
                same = NUMBER.sub("#", now.reason) == NUMBER.sub("#", later.reason)
                assert now.reason == later.reason or not same, (now.reason, later.reason)

    def test_runs_end_in_simulated_worlds(self, policy: Policy) -> None:
        """The real recovery loop with this policy, under losses, silence and crashes; a broken rule
        raises Violation, with the command that shows it again."""
        run = RunSpec(
            1,
            3,
            poll_s=5.0,
            exit_grace_s=60.0,
            max_hours_without_progress=2.0,
            # a run that has limits of its own may end by them
            max_hours=1e6 if self.may_stop else None,
        )
        for seed in self.seeds:
            found = simulate(seed, policy, run)
            assert found.outcome in ("done", "stopped", "failed") and found.reason


def check(decision: Decision, view: View) -> None:
    """Is it something that recovery can do? Raises AssertionError."""
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
