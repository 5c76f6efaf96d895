"""What is alive in an account: whose it is, what it costs, what is forgotten; and its end."""

from __future__ import annotations

import pytest

from harness.clouds.account import Alive, alive, end
from support.account import LIVE, OVER, account
from support.fakesky import FakeSky


@pytest.fixture
def sky() -> FakeSky:
    return account()


def found_in(sky: FakeSky) -> dict[str, Alive]:
    return {one.name: one for one in alive(sky, {OVER: True, LIVE: False}.get, sky.now)}


def test_each_cluster_has_an_owner_a_price_a_lease_and_a_verdict(sky):
    found = found_in(sky)
    trains, over = found["gpt-abcdefghi-0001"], found["gpt-abcdefghi-0002"]
    assert (trains.forgotten, trains.job, trains.lease_min) == (False, "RUNNING", 10)
    assert (trains.owner, trains.usd, trains.usd_per_h) == ("ada", 1.0, 3600.0)
    assert over.forgotten and over.over and not over.idle
    assert found["mine"].idle == "its last job is over" and found["mine"].lease_min is None
    assert found["notebook"].idle == "it has no job"
    # what is not known is not called forgotten
    assert not found["half"].forgotten and "unknown" in found["half"].job


def test_what_is_ended_is_gone(sky):
    assert end(sky, ["mine", "was-never-there"], 5.0) == ["mine"]
    assert "mine" not in found_in(sky) and "notebook" in found_in(sky)
