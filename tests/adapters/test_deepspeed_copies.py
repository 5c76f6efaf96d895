"""DeepSpeed under transformers' Trainer: an unchanged script on ranks that share a copy of the model
by ZeRO, and on several copies, killed and moved, does what torchrun does on one copy."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("deepspeed")

from safetensors.torch import load_file

from support.trainer_script import Script, close, proven
from support.worlds import history

TRAINER = Path(__file__).parent / "scripts/hf_trainer.py"
FLAGS = ("--epochs", 3, "--best", "--logging-steps", 2)
COPIES = ("--mesh", "dp_shard=2", "--attach", "snapshot_every_steps=4")
OWN = {  # DeepSpeed's own optimizer and scheduler
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
}
os.environ.setdefault("DS_ACCELERATOR", "cpu")


def zero(folder, stage, *flags, ranks=2, config=None, **more):
    """A script with a config as DeepSpeed's documentation has it."""
    folder.mkdir(exist_ok=True)
    path = folder / "ds_config.json"
    optimization = {
        "stage": stage,
        "stage3_param_persistence_threshold": 100,
        "stage3_gather_16bit_weights_on_model_save": True,
        **more,
    }
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    said = dict.fromkeys((*sizes, "gradient_clipping"), "auto") | (config or {})
    path.write_text(json.dumps(said | {"zero_optimization": optimization}))
    return Script(folder, TRAINER, *FLAGS, *flags, "--deepspeed", path, script_world=ranks)


def steps_of(script):
    return {key: logs for key, logs in script.logged().items() if "grad_norm" in key}


def without_operations(logs):
    """Without the operations that transformers counts from the parameters that ZeRO-3 has gathered."""
    return [(step, {k: v for k, v in said.items() if k != "total_flos"}) for step, said in logs]


def same_weights(*scripts):
    """Of the last checkpoint: which one is the best depends on how many ranks evaluate."""
    mine, theirs = (load_file(one.folder / "out/checkpoint-9/model.safetensors") for one in scripts)
    assert mine.keys() == theirs.keys()
    assert all(mine[name].sub(t).abs().max() < 1e-5 for name, t in theirs.items())


@pytest.mark.proof
@pytest.mark.parametrize("stage", [1, 3])
def test_one_copy_and_two_do_what_torchrun_does(tmp_path, stage):
    plain = zero(tmp_path / "plain", stage).sharded_plain(2)
    calm = zero(tmp_path / "calm", stage).under(2, *COPIES)
    assert without_operations(calm.logs()) == without_operations(plain.logs())  # to the bit
    assert calm.events() == plain.events()
    rough = zero(tmp_path / "rough", stage).under(4, *COPIES, die_at="5:4", DIE_EVERY="4")
    close(steps_of(rough), steps_of(plain))
    assert rough.events() == plain.events() and "resumed from step 4" in rough.output()
    same_weights(rough, plain)
    proven(calm)
    proven(rough)


@pytest.mark.proof
@pytest.mark.parametrize("stage", [2, 3])
def test_copies_of_other_sizes_with_a_scheduler_of_deepspeeds(tmp_path, stage):
    how = {"ranks": 4, "config": OWN}
    plain = zero(tmp_path / "plain", stage, "--accumulation", 2, **how).sharded_plain(4)
    moved = zero(tmp_path / "moved", stage, "--accumulation", 2, **how)
    for ranks, at in ((4, 3), (2, 7)):
        moved.noticed(ranks, "--mesh", f"dp_shard={ranks}", at=at)
    moved.under(4, "--mesh", "dp_shard=4", die_at="8:7", DIE_EVERY="20")
    assert moved.events() == plain.events()
    close(steps_of(moved), steps_of(plain))
    assert {r.replica_ranks for r in history(moved.run)} == {2, 4}
    same_weights(moved, plain)
    proven(moved)


@pytest.mark.parametrize(
    ("stage", "ranks", "mesh", "more", "says"),
    [
        (1, 1, (), {}, "`harness run --mesh dp_shard=8`"),
        (0, 2, COPIES, {}, "set zero_optimization.stage to 1, 2 or 3"),
        (2, 4, COPIES, {"offload_optimizer": {"device": "cpu"}}, "let all ranks share one copy"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, stage, ranks, mesh, more, says):
    own = {"zero_force_ds_cpu_optimizer": False}  # DeepSpeed's would be compiled
    one = zero(tmp_path / "one", stage, "--max-steps", 1, config=own, **more)
    assert one.agent(ranks, *mesh, "--script-world", "2").wait(120) != 0
    assert says in one.output()
