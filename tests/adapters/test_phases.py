"""Scripts that train more than once, unchanged: each training is a phase of one run, and a resume
goes through those that are over to the one that is open."""

import signal
from pathlib import Path

import pytest

from support.trainer_script import EXACT, Script, proven
from support.worlds import history, until

pytest.importorskip("transformers")

from harness.bucket.phases import read_phases
from harness.core.world import DRAINED
from harness.look.audit.audit import audit
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store

FOLDS = Path(__file__).parent / "scripts/hf_folds.py"
EVERY_STEP = ("--attach", "snapshot_every_steps=1")


def noticed(script, ranks, at, *options, die_at=""):
    """Run an agent that gets a notice at this place, and leaves."""
    agent = script.agent(ranks, "--script-world", "1", *options, DIE_AT=die_at, NOTICE_AT=at)
    seen = script.folder / f"noticed {at}"
    until(lambda: agent.poll() is not None or seen.exists(), f"the place {at!r}")
    agent.send_signal(signal.SIGTERM)
    agent.wait(240)
    script._ended(agent, DRAINED)


@pytest.fixture(scope="module")
def folds(tmp_path_factory):
    """One rank, exact sums, never stopped."""
    return Script(tmp_path_factory.mktemp("folds"), FOLDS).under(1, *EXACT)


def test_folds_that_are_killed_in_each_and_between_them_are_the_undisturbed_ones(folds, tmp_path):
    """On 2 ranks, then 1, then 3. The models are drawn with what a fold leaves of the
    generators; the last training has the Trainer, the model and the optimizer of the one before."""
    script, options = Script(tmp_path / "rough", FOLDS), (*EXACT, *EVERY_STEP)
    noticed(script, 2, "fold 2 step 3", *options, die_at="fold 1 step 2:1")
    noticed(script, 1, "fold 3 step 1", *options, die_at="after fold 2:9")
    script.under(3, *options, die_at="fold 3 step 3:11")
    assert script.logged() == folds.logged() and script.end() == folds.end()
    steps = [(r.phase, r.samples) for r in history(script.run)]
    assert steps == [(r.phase, r.samples) for r in history(folds.run)]
    assert steps[:4] == [(1, 12), (1, 12), (1, 8), (2, 6)]
    assert {r.world for r in history(script.run)} == {1, 2, 3}
    assert [one.ends for one in read_phases(open_store(script.run))] == [3, 9, 12, None]
    kept = {ref.step for ref in Snapshots(open_store(script.run)).refs()}
    assert {3, 9, 12} < kept
    proven(script)
    said = {one.name: one.detail for one in audit(open_store(script.run)).checks}
    assert "phase 2 from step 4 on, global batch 6" in said["identity"]
    assert "3 of phase 1, 6 of phase 2, 3 of phase 3, 3 of phase 4" in said["records"]


def test_folds_do_what_plain_transformers_does(tmp_path):
    calm = Script(tmp_path / "calm", FOLDS, "--seeded").plain()
    script = Script(tmp_path / "fast", FOLDS, "--seeded").under(1)
    # to the bit; a Trainer's second training reads in an order that the generators decide
    assert script.logs()[:-6] == calm.logs()[:-6] and script.end()[:3] == calm.end()[:3]
    assert len(script.logs()) == len(calm.logs()) and script.logs()[-7][0] == 3003


def test_a_fold_that_is_another_one_now_is_refused(tmp_path):
    script = Script(tmp_path / "other", FOLDS)
    noticed(script, 1, "fold 2 step 1")
    script.words.append("--other-data-in=2")
    agent = script.agent(1, "--script-world", "1", DIE_AT="")
    assert agent.wait(240)
    said = "holds another run: in phase 2 of the run (the script's training 2), its data is"
    assert said in script.output(), script.output()
