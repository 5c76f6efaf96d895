"""The contract of a cloud, as tests to inherit (`CloudContract`).

Our own clouds pass it (tests/lab/test_contracts.py): the simulated one, the local one (real
processes), and SkyPilot's, against a fake of its API server.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from harness.core.world import Cloud, CloudUnavailable, Node, NodeState, Offer
from harness.testing import WITHIN_S, until

GONE = (NodeState.GONE, NodeState.NO_CAPACITY)


@dataclass
class CloudBench:
    """A cloud without nodes, and levers for the world behind it.

    free:       an offer that has room for three nodes
    full:       an offer without room; None: all have some
    reopen:     returns the cloud as another controller of the same run sees it
    take_away:  the machine of an attempt is lost, as spot machines are; None: not possible here
    silence:    called with True: the API does not answer; with False: it does again
    sleep:      lets time pass
    """

    cloud: Cloud
    free: Offer
    full: Offer | None = None
    reopen: Callable[[], Cloud] | None = None
    take_away: Callable[[int], object] | None = None
    silence: Callable[[bool], object] | None = None
    sleep: Callable[[float], object] = time.sleep
    every_s: float = 0.05
    within_s: float = field(default=WITHIN_S)  # limit of every wait, on the clock of `sleep`

    def find(self, attempt: int, cloud: Cloud | None = None) -> Node | None:
        found = [n for n in (cloud or self.cloud).nodes() if n.attempt == attempt]
        assert len(found) <= 1, f"attempt {attempt} is shown {len(found)} times"
        return found[0] if found else None

    def wait(self, attempt: int, *states: NodeState, cloud: Cloud | None = None) -> Node:
        """Return the node once it is in one of these states."""

        def there() -> Node | None:
            node = self.find(attempt, cloud)
            return node if node is not None and node.state in states else None

        words = " or ".join(state.value for state in states)
        found = until(
            there, f"attempt {attempt} to be {words}", self.within_s, self.sleep, self.every_s
        )
        assert found is not None
        return found


class CloudContract:
    """The requirements of recovery on a cloud. A subclass, whose name begins with Test, defines the
    fixture `bench`: a CloudBench."""

    @pytest.fixture
    def bench(self) -> CloudBench:
        raise NotImplementedError(
            f"{type(self).__name__}: give it a fixture `bench`, which returns a CloudBench"
        )

    def launched(self, bench: CloudBench, *attempts: int) -> None:
        for attempt in attempts:
            bench.cloud.launch(attempt, bench.free)
        for attempt in attempts:
            bench.wait(attempt, NodeState.UP)

    def test_offers_are_named_and_priced(self, bench: CloudBench) -> None:
        offers = list(bench.cloud.offers())
        assert bench.free in offers
        names = [offer.name for offer in offers]
        assert len(set(names)) == len(names) and all(name.isprintable() and name for name in names)
        assert all(0 <= offer.usd_per_h < math.inf and offer.speed > 0 for offer in offers)

    def test_at_first_there_is_nothing(self, bench: CloudBench) -> None:
        assert list(bench.cloud.nodes()) == []

    def test_a_node_comes_up(self, bench: CloudBench) -> None:
        bench.cloud.launch(1, bench.free)
        asked = bench.wait(1, NodeState.PENDING, NodeState.UP)
        assert asked.offer == bench.free and asked.gone_s is None
        node = bench.wait(1, NodeState.UP)
        assert node.offer == bench.free
        assert node.up_s is not None and node.asked_s <= node.up_s
        assert node.gone_s is None and node.exit_code is None

    def test_launch_is_idempotent(self, bench: CloudBench) -> None:
        """Launch twice: a controller without an answer retries, and must not get a second one."""
        for _ in range(2):
            bench.cloud.launch(1, bench.free)
        self.launched(bench, 2)
        bench.wait(1, NodeState.UP)
        bench.cloud.launch(1, bench.free)
        assert sorted(node.attempt for node in bench.cloud.nodes()) == [1, 2]

    def test_terminate_ends_one_node_for_good(self, bench: CloudBench) -> None:
        self.launched(bench, 1, 2)
        bench.cloud.terminate(1)
        gone = bench.wait(1, NodeState.GONE)
        assert gone.up_s is not None and gone.gone_s is not None and gone.up_s <= gone.gone_s
        bench.cloud.terminate(1)  # again: nothing more happens
        bench.cloud.launch(1, bench.free)  # an attempt number is used only once
        for _ in range(5):
            bench.sleep(bench.every_s)
            node, other = bench.find(1), bench.find(2)
            assert node is not None and node.state is NodeState.GONE
            assert node.gone_s == gone.gone_s
            assert other is not None and other.state is NodeState.UP

    def test_terminate_of_an_unknown_attempt_does_nothing(self, bench: CloudBench) -> None:
        """Terminate an attempt that was never launched: intent is recorded before the act."""
        bench.cloud.terminate(99)
        self.launched(bench, 1)
        bench.cloud.terminate(99)
        assert [(n.attempt, n.state) for n in bench.cloud.nodes()] == [(1, NodeState.UP)]

    def test_a_node_may_be_ended_while_it_is_launched(self, bench: CloudBench) -> None:
        bench.cloud.launch(1, bench.free)
        bench.cloud.terminate(1)
        bench.wait(1, *GONE)

    def test_no_capacity_is_told_and_not_billed(self, bench: CloudBench) -> None:
        if bench.full is None:
            pytest.skip("all offers of this bench have room")
        bench.cloud.launch(1, bench.full)
        refused = bench.wait(1, NodeState.NO_CAPACITY)
        assert refused.up_s is None and refused.gone_s is not None
        self.launched(bench, 2)  # the shortage concerns that offer alone

    def test_a_machine_that_is_taken_is_gone(self, bench: CloudBench) -> None:
        if bench.take_away is None:
            pytest.skip("machines of this bench are not taken")
        self.launched(bench, 1, 2)
        bench.take_away(1)
        gone = bench.wait(1, NodeState.GONE)
        assert gone.gone_s is not None and gone.exit_code is None and gone.reason
        other = bench.find(2)
        assert other is not None and other.state is NodeState.UP

    def test_another_controller_adopts_what_there_is(self, bench: CloudBench) -> None:
        if bench.reopen is None:
            pytest.skip("this bench has one controller")
        self.launched(bench, 1, 2)
        second = bench.reopen()
        adopted = bench.wait(1, NodeState.UP, cloud=second)
        assert (adopted.offer.name, adopted.offer.usd_per_h) == (
            bench.free.name,
            bench.free.usd_per_h,
        )
        bench.wait(2, NodeState.UP, cloud=second)
        second.launch(1, bench.free)  # it is not sure whether the first one launched it
        assert sorted(node.attempt for node in second.nodes() if node.alive) == [1, 2]
        second.terminate(1)
        bench.wait(1, NodeState.GONE, cloud=second)
        bench.wait(2, NodeState.UP, cloud=second)

    def test_silence_is_told_as_such_and_nothing_is_done_twice(self, bench: CloudBench) -> None:
        """Raise CloudUnavailable only: recovery waits after that, and ends on other exceptions."""
        if bench.silence is None:
            pytest.skip("the interface of this bench always answers")
        self.launched(bench, 1)
        bench.silence(True)
        for call in (
            bench.cloud.nodes,
            lambda: bench.cloud.launch(2, bench.free),
            lambda: bench.cloud.terminate(1),
            lambda: bench.cloud.terminate(99),
        ):
            with contextlib.suppress(CloudUnavailable):
                call()
        bench.silence(False)
        bench.cloud.launch(2, bench.free)
        bench.cloud.terminate(1)
        bench.wait(2, NodeState.UP)
        bench.wait(1, NodeState.GONE)
        assert sorted(node.attempt for node in bench.cloud.nodes()) == [1, 2]
