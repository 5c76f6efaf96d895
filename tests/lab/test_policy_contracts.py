"""Policies of ours keep the contract that a policy of anybody must keep."""


import pytest

from harness.controller import policies
from harness.controller.deadline_policy import deadline
from harness.controller.policies import resolve
from harness.core.world import (
    Policy,
)
from harness.testing import PolicyContract
from harness.testing.situations import situations


class TestDeadline(PolicyContract):
    def most_nodes(self, view):
        return 2 * view.max_nodes  # each may be begun beside the one that it replaces

    @pytest.fixture
    def policy(self):
        return deadline


class TestDeadlineToKeep(TestDeadline):
    """It forecasts for each of these views, which takes its time: so these are fewer."""

    seeds = range(2)

    def views(self):
        return situations(3, 12)

    @pytest.fixture
    def policy(self):
        return policies.resolve("deadline?deadline_h=1.5&work_h=0.5&total_steps=300")


class TestCombinators(PolicyContract):
    seeds = range(1)

    @pytest.fixture(
        params=[
            "at_most(best_value, usd_per_h=2)",
            "at_most(warm_spare(patient), all_usd_per_h=3)",
            "avoid(cheapest, b, y)",
            "spread(cheapest, zones=2)",
            "warm_spare(best_value, n=1)",
            "by_deadline(patient, hours=1)",
            "spread(warm_spare(by_deadline(on_demand_fallback, hours=1)), zones=3)",
        ]
    )
    def policy(self, request: pytest.FixtureRequest) -> Policy:
        return resolve(request.param)


class TestLimitsWithin(PolicyContract):
    seeds = range(1)
    may_stop = True

    @pytest.fixture
    def policy(self) -> Policy:
        return resolve("spread(within_budget(within_hours(cheapest, hours=9), usd=50))")
