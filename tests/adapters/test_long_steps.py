"""A notice amid a long step of an unchanged trainer: all ranks leave with the state that was before
the step, and whoever resumes trains the same as if nothing had been."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("lightning")
pytest.importorskip("accelerate")

from harness.node.marks import MarkFile
from support.worlds import Nursery, history, newest

SCRIPT = Path(__file__).parent / "scripts" / "long_steps.py"
# votes come every 50 ms at most, since the steps of these tests take less than a second
PRELUDE = """
import runpy, sys
from harness.worker import votes
votes.VOTE_EVERY_S = 0.05
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def nursery():
    found = Nursery()
    yield found
    found.close()


@pytest.fixture
def go(nursery, tmp_path):
    prelude = tmp_path / "prelude.py"
    prelude.write_text(PRELUDE)

    def trained(name, world, trainer, *flags, codes=(0,)):
        node = tmp_path / f"{name}.node"
        node.mkdir(exist_ok=True)
        (node / "mark.json").unlink(missing_ok=True)
        MarkFile(node / "mark.json")
        attach = {"seed": 1, "snapshot_every_steps": 1000}
        env = {
            "HARNESS_ADAPT": "auto",
            "HARNESS_ATTACH": json.dumps(attach),
            "HARNESS_SCRIPT_WORLD": 1,
            "HARNESS_MARK": node / "mark.json",
        }
        words = (SCRIPT, trainer, "--folder", tmp_path / f"{name}.out", *flags)
        return nursery.train(tmp_path / name, world, *words, script=prelude, env=env, codes=codes)

    return trained


@pytest.mark.parametrize(
    ("trainer", "world"),
    [("transformers", 2), ("lightning", 2), ("fabric", 2), ("accelerate", 2), ("accelerate", 1)],
)
def test_a_step_that_would_end_too_late_is_dropped_and_done_again_the_same(
    tmp_path, go, trainer, world
):
    go("whole", world, trainer)
    amid_step_4 = 3 * 8 // world + 2
    flags = ("--notice-at", amid_step_4, "--grace-s", 2.05)
    ended = go("parts", world, trainer, *flags, codes=(34,))
    assert "step 4 would end too late for the notice" in ended.output
    assert newest(tmp_path / "parts").step == 3
    go("parts", world, trainer)
    whole, parts = ([*map(told, history(tmp_path / name))] for name in ("whole", "parts"))
    assert parts == whole and len(parts) == 5
    weights = [newest(tmp_path / name).data["weights"] for name in ("whole", "parts")]
    assert weights[0] == weights[1]
    said = [(tmp_path / f"{name}.out" / "told").read_text() for name in ("whole", "parts")]
    assert said[0] == said[1]


def told(record):
    return record.step, record.loss, record.digest, record.contents, record.lr
