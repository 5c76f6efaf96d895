"""The strategy ELASTIC: the order of its tries, on SkyPilot's own base class, with launches
that a script answers."""

import asyncio
import importlib.util
from types import SimpleNamespace

import pytest

from harness.clouds.sky_plugin import ladder

needs_sky = pytest.mark.skipif(
    importlib.util.find_spec("sky") is None, reason="SkyPilot is not installed"
)
EVERYWHERE = {"east", "west"}


def test_the_ladder_takes_what_there_is_and_leaves_the_place_that_failed_first():
    assert list(ladder(3, 2, True)) == [
        (3, "elsewhere"),
        (3, "there"),
        (2, "elsewhere"),
        (2, "there"),
    ]
    assert list(ladder(2, 1, False)) == [(2, "anywhere"), (1, "anywhere")]
    assert list(ladder(1, 0, True)) == [(1, "elsewhere"), (1, "there")]


def job(answers, full=2, least=1, failed="east"):
    """An executor whose launches are answered from a list: a time (it works), "full",
    "spurious", or an error that is raised."""
    from harness.clouds.sky_plugin import base_class

    class Scripted(base_class()):
        pause_s = 0.0

        def __init__(self):
            task = SimpleNamespace(num_nodes=full, resources=EVERYWHERE)
            task.set_resources = lambda places: setattr(task, "resources", places)
            self.dag = SimpleNamespace(tasks=[task])
            self.full, self.min_nodes, self.last = full, least, failed
            self.asked, self.cleaned, self.answers = [], 0, list(answers)

        def _cleanup_cluster(self):
            self.cleaned += 1

        async def _launch(self, **_):
            task = self.dag.tasks[0]
            self.asked.append((task.num_nodes, *sorted(task.resources)))
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            self.full_house = answer == "full"
            return answer if isinstance(answer, float) else None

        @staticmethod
        def suitable(task, failed, where):
            return {place for place in EVERYWHERE if (place == failed) == (where == "there")}

    made = Scripted()
    return made, asyncio.run(made.recover())


@needs_sky
def test_a_rung_without_capacity_is_tried_once_and_a_spurious_failure_again():
    made, when_s = job(["full", "full", 7.0])
    assert when_s == 7.0 and made.asked == [(2, "west"), (2, "east"), (1, "west")]
    made, _ = job(["spurious", "full", RuntimeError("BrokenProcessPool"), 8.0])
    assert made.asked == [(2, "west"), (2, "west"), (2, "east"), (2, "east")]
    # what the user wrote is what the next recovery begins with
    assert made.dag.tasks[0].resources == EVERYWHERE


@needs_sky
def test_it_goes_round_until_there_is_something_and_never_below_the_least():
    made, _ = job(["full"] * 8 + [9.0], full=3, least=2)
    assert [n for n, *_ in made.asked] == [3, 3, 2, 2] * 2 + [3]


@needs_sky
def test_why_a_launch_failed_passes_by():
    """SkyPilot's own `_launch` swallows it: what counts is caught where it waits for the
    request."""
    from sky import exceptions
    from sky.jobs import recovery_strategy

    from harness.clouds.sky_plugin import base_class

    strategy = base_class()
    made = strategy.__new__(strategy)

    async def gone(_):
        raise exceptions.ResourcesUnavailableError("full")

    async def wait():
        with pytest.raises(exceptions.ResourcesUnavailableError):
            await made._await_launch_request("id", asyncio.ensure_future(gone(None)))

    assert callable(recovery_strategy.StrategyExecutor._await_launch_request)
    asyncio.run(wait())
    assert made.full_house
