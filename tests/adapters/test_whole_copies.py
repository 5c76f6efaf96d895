"""Copies of a model that its trainer shards over two ranks: an unchanged script on one copy and on
two, killed and moved, does what torchrun does on one copy."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from support.trainer_script import Script, close, proven
from support.worlds import history

TRAINER = Path(__file__).parent / "scripts/hf_trainer.py"
TRL = Path(__file__).parent / "scripts/trl_trainer.py"
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
FLAGS = ("--epochs", 3, "--best", "--logging-steps", 2, "--fsdp")
COPIES = ("--mesh", "dp_shard=2", "--attach", "snapshot_every_steps=4")


def steps_of(script):
    return {key: logs for key, logs in script.logged().items() if "grad_norm" in key}


def script(folder):
    return Script(folder, TRAINER, *FLAGS, script_world=2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return script(tmp_path_factory.mktemp("plain")).sharded_plain(2)


def test_one_copy_does_what_torchrun_does(plain, tmp_path):
    calm = script(tmp_path / "calm").under(2, *COPIES)
    assert calm.logs() == plain.logs() and calm.end() == plain.end()  # to the bit
    assert calm.events() == plain.events()
    proven(calm)


def test_two_copies_and_a_kill_make_the_same_steps(plain, tmp_path):
    rough = script(tmp_path / "rough").under(4, *COPIES, die_at="5:4", DIE_EVERY="4")
    assert rough.events() == plain.events()
    close(rough.logged(), plain.logged())
    assert "resumed from step 4" in rough.output()
    assert {r.world for r in history(rough.run)} == {4}
    proven(rough)


def test_a_notice_and_copies_of_another_size(tmp_path):
    flags = (*FLAGS, "--accumulation", 4)
    plain = Script(tmp_path / "plain", TRAINER, *flags, script_world=2).sharded_plain(2)
    moved = Script(tmp_path / "moved", TRAINER, *flags, script_world=2)
    moved.noticed(4, *COPIES, at=7)
    moved.under(4, "--mesh", "dp_shard=4", "--attach", "snapshot_every_steps=4")
    assert moved.events() == plain.events()
    # The Trainer's evaluation and train_loss are of what the ranks of a copy read.
    close(steps_of(moved), steps_of(plain))
    records = history(moved.run)
    assert {r.samples for r in records} == {32} and {r.replica_ranks for r in records} == {2, 4}
    assert (moved.folder / "out/checkpoint-5/model.safetensors").exists()
    proven(moved)


@pytest.mark.parametrize("flags", [("--lora",), ("--kind", "dpo")])
def test_trl_with_and_without_adapters(tmp_path, flags):
    pytest.importorskip("trl")
    calm = Script(tmp_path / "calm", TRL, "--fsdp", *flags, script_world=2).sharded_plain(2)
    rough = Script(tmp_path / "rough", TRL, "--fsdp", *flags, script_world=2)
    rough.under(4, *COPIES, die_at="5:4", DIE_EVERY="4")
    close(rough.logged(), calm.logged())
    assert rough.events() == calm.events()
    proven(rough)


@pytest.mark.parametrize(
    ("mesh", "split", "worlds"),
    [
        ("tp=2", '{"tp_size": 2, "tp_plan": "auto"}', (4, 2)),
        ("dp_shard=2,tp=2", '{"fsdp_size": 2, "tp_size": 2, "tp_plan": "auto"}', (4, 4)),
    ],
)
def test_a_model_that_transformers_splits_as_it_loads_it(tmp_path, mesh, split, worlds):
    """transformers itself cannot resume such a training."""
    ranks, weights = worlds[1], tmp_path / "weights"
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(weights)
    flags = ("--epochs", 2, "--logging-steps", 2, "--split", split, "--weights", weights)
    plain = Script(tmp_path / "plain", TRAINER, *flags, script_world=ranks).sharded_plain(ranks)
    moved = Script(tmp_path / "moved", TRAINER, *flags, script_world=ranks)
    copies = ("--mesh", mesh, "--attach", "snapshot_every_steps=2")
    moved.noticed(worlds[0], *copies, at=5)
    moved.under(worlds[1], *copies, die_at="6:4", DIE_EVERY="2")
    close(moved.logged(), plain.logged())
    assert moved.end()[0].split()[1] == plain.end()[0].split()[1]  # the last step
    proven(moved)


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    flags = ("--max-steps", 1)
    for name, more, mesh, said in (
        ("whole", (), ("--mesh", "dp_shard=2"), "but the Trainer splits none"),
        ("unsaid", ("--fsdp",), (), "`harness run --mesh dp_shard=8`"),
        ("split", ("--split", '{"tp_size": 2}'), (), "`harness run --mesh tp=8`"),
    ):
        one = Script(tmp_path / name, TRAINER, *flags, *more, script_world=2)
        assert one.agent(2, *mesh, "--script-world", "2").wait(120) != 0
        assert said in one.output(), name
