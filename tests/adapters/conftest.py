"""Scripts of frameworks under the harness, forked of a process that has imported them."""

import json

import pytest

from harness.node import forkserver
from support.worlds import Nursery, environment


class Warm(Nursery):
    def __init__(self, preload):
        self._warm = forkserver.ForkServerClient(environment() | {"HARNESS_PRELOAD": preload})


@pytest.fixture(scope="module")
def warm(request):
    """A module names in PRELOAD what its scripts import."""
    nursery = Warm(request.module.PRELOAD)
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def of_two(warm, request, tmp_path_factory):
    """Run the module's SCRIPT by itself on two ranks, as torchrun does. Return its folder."""

    def run(*flags):
        folder = tmp_path_factory.mktemp("two")
        env = {"HARNESS_ADAPT": "none", "TORCHELASTIC_RUN_ID": "two", "DIE_AT": ":"}
        words = (folder / "no-run", 2, "--folder", folder, *flags)
        warm.train(*words, script=request.module.SCRIPT, env=env)
        return folder

    return run


@pytest.fixture
def go(warm, tmp_path, request):
    """Run the module's SCRIPT under the harness. `die_at`: where in the script every rank is
    killed, once the snapshot of which step is there; `mesh`: of a copy of the model."""

    def run(world, *flags, first_world=1, die_at=("", 0), reduce="fast", codes=(0,), mesh=""):
        attach = {"seed": 1, "snapshot_every_steps": 3, "reduce": reduce}
        env = {
            "HARNESS_ADAPT": "auto",
            "HARNESS_ATTACH": json.dumps(attach),
            "HARNESS_SCRIPT_WORLD": first_world,
            "HARNESS_ON_CHANGE": "accept",
            "DIE_AT": "{}:{}".format(*die_at),
            **({"HARNESS_MESH": mesh} if mesh else {}),
        }
        words = (tmp_path / "run", world, "--folder", run.folder, *flags)
        return warm.train(*words, script=request.module.SCRIPT, env=env, codes=codes)

    run.folder, run.url = tmp_path / "files", tmp_path / "run"
    return run
