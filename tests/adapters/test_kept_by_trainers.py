"""Scripts of trainers, unchanged, lose a worker amid a step, before any snapshot: the others keep the
state of the last step, and the run goes on from it as if nothing had happened."""

import importlib.util
from pathlib import Path

import pytest

from harness.bucket.archive import read_facts
from harness.core.facts import SessionStarted, StepDone
from storage.stores.store_urls import open_store
from support.trainer_script import EVERY_3, EXACT, Script, close, proven
from support.worlds import history

SCRIPTS = Path(__file__).parent / "scripts"
NEVER = ("--attach", "snapshot_every_steps=1000")
# package, script, what names its folder, its flags, the world that it is written for, and which
# step (or iteration) loses which rank
CASES = {
    "transformers": (
        "transformers", "hf_trainer.py", "--output-dir",
        "--epochs 3 --best --logging-steps 2 --sleep-s 0.2", 1, "8:1",
    ),
    "trl": ("trl", "trl_trainer.py", "--events", "--lora --sleep-s 0.2", 1, "5:0"),
    "accelerate": ("accelerate", "accelerate_loop.py", "--out", "--sleep-s 0.2", 2, "8:1"),
    "fabric": (
        "lightning", "fabric_plain.py", "--folder", "--elastic 3 --epochs 2 --sleep-s 0.1", 1, "1,1:1",
    ),
    "lightning": ("lightning", "lightning_plain.py", "--folder", "--epochs 3 --sleep-s 0.3", 2, "8:1"),
}  # fmt: skip


def script_of(name, folder):
    needs, script, option, flags, world, lose = CASES[name]
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    place = {"--output-dir": folder / "out", "--events": folder / "events"}.get(option, folder)
    words = (option, place, *flags.split())
    return Script(folder, SCRIPTS / script, *words, script_world=world), lose


def facts(script, kind):
    return [s.fact for s in read_facts(open_store(script.run)) if isinstance(s.fact, kind)]


@pytest.mark.parametrize("name", CASES)
def test_the_others_keep_the_state_of_the_last_step(name, tmp_path):
    calm, lose = script_of(name, tmp_path / "calm")
    calm.under(1, *EXACT, *NEVER)
    script, _ = script_of(name, tmp_path / "rough")
    script.under(3, *EXACT, *NEVER, LOSE=lose)
    assert "kept the state of step" in script.output()
    _, again = facts(script, SessionStarted)
    assert again.tier == "survivors" and again.resumed_step >= 4
    done = [fact.step for fact in facts(script, StepDone)]
    assert len(set(done)) == len(done)  # none is done again
    if not lose.endswith(":0"):  # rank 0 writes what others read
        assert len(done) == len(history(calm.run))
    assert script.events() == calm.events()
    close(script.logged(), calm.logged())
    assert [r.loss for r in history(script.run)] == [r.loss for r in history(calm.run)]
    assert [r.contents for r in history(script.run)] == [r.contents for r in history(calm.run)]
    proven(script)


def test_what_a_script_counts_on_rank_0_is_not_taken_from_another(tmp_path):
    """The script has a callback with a counter, which it may change on rank 0 only."""
    script, _ = script_of("transformers", tmp_path / "rough")
    script.under(3, *EXACT, *EVERY_3, LOSE="9:0")
    _, again = facts(script, SessionStarted)
    assert again.tier != "survivors" and again.resumed_step == 6, script.output()
    proven(script)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
def test_the_only_sharded_copy_loses_a_few_steps(tmp_path):
    """FSDP2 over both ranks: a rank's share of the state is in its node's memory."""

    def script(name):
        folder, flags = tmp_path / name, ("--fsdp", 2, "--epochs", 4, "--sleep-s", 0.4)
        loop = SCRIPTS / "accelerate_loop.py"
        return Script(folder, loop, "--out", folder, *flags, script_world=2)

    calm, rough = script("calm"), script("rough")
    calm.under(2, *NEVER, "--mesh", "dp_shard=2")
    rough.under(2, *NEVER, "--mesh", "dp_shard=2", LOSE="18:1")
    _, again = facts(rough, SessionStarted)
    assert again.resumed_epoch == 0 and again.resumed_step >= 5, rough.output()
    assert list(dict.fromkeys(rough.events())) == calm.events()  # steps done again are the same
    assert [r.loss for r in history(rough.run)] == [r.loss for r in history(calm.run)]
    assert [r.contents for r in history(rough.run)] == [r.contents for r in history(calm.run)]
    proven(rough)
