"""Copies of a model that Accelerate shards by FSDP2 or DeepSpeed over two ranks each: an unchanged
script on any number of them, killed and resumed, trains as Accelerate does on the world it was
written for."""

import importlib.util
import os
import types
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

import torch
from torch.distributed.checkpoint import FileSystemReader

from harness.adapters.accelerate.sharding import check, variables_of
from harness.adapters.deepspeed_copies import config_of_copy
from harness.core.world import BadInput
from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from support.trainer_script import SHARDED
from support.worlds import history

SCRIPT = Path(__file__).parent / "scripts" / "accelerate_loop.py"
CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 100
mixed_precision: 'no'
num_machines: 1
num_processes: 8
"""
ZERO = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 2
  zero_stage: 3
mixed_precision: 'no'
num_machines: 1
num_processes: 8
"""
PRELOAD = "accelerate,deepspeed" if importlib.util.find_spec("deepspeed") else "accelerate"
os.environ.setdefault("DS_ACCELERATOR", "cpu")


def alone(warm, out, world, *flags):
    """Accelerate itself, on so many processes."""
    env = {"HARNESS_ADAPT": "none", "ACCELERATE_USE_CPU": "true"}
    warm.train(out / "run", world, SCRIPT, "--out", out, *flags, script=SHARDED, env=env)
    return out


@pytest.fixture(scope="module")
def plain(warm, tmp_path_factory):
    return alone(warm, tmp_path_factory.mktemp("plain"), 2, "--fsdp", 2, "--save-each-epoch")


def go(warm, out, world, *flags, first=2, die_at="", codes=(0,), **env):
    """Under the harness, on copies of two ranks. `first`: ranks of the first world; `die_at`: "in
    step N:after the snapshot of step S"."""
    said = {"HARNESS_ADAPT": "auto", "HARNESS_SCRIPT_WORLD": first, "HARNESS_MESH": "dp_shard=2"}
    said |= {"HARNESS_ATTACH": '{"seed": 1, "snapshot_every_steps": 3}', "DIE_AT": die_at} | env
    codes = (-9, 1) if die_at else codes
    words = (out / "run", world, "--out", out, *flags)
    return warm.train(*words, script=SCRIPT, env=said, codes=codes)


def events(out):
    return (out / "events").read_text().splitlines()


def apart(one, other):
    """The greatest difference of two runs' weights."""
    a, b = torch.load(one / "weights.pt"), torch.load(other / "weights.pt")
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def proven(out, steps):
    assert not [c for c in audit(open_store(str(out / "run"))).checks if not c.ok]
    assert len(history(out / "run")) == steps


def test_one_copy_does_what_torchrun_does(warm, plain, tmp_path):
    config = tmp_path / "fsdp.yaml"
    config.write_text(CONFIG)
    go(warm, tmp_path, 2, "--save-each-epoch", ACCELERATE_CONFIG_FILE=config)
    assert events(tmp_path) == events(plain) and apart(tmp_path, plain) == 0.0
    proven(tmp_path, 18)


def test_killed_on_two_copies_it_goes_on_on_one(warm, plain, tmp_path):
    flags = ("--fsdp", 2, "--save-each-epoch")
    go(warm, tmp_path, 4, *flags, die_at="8:6")
    assert "goes through 6 steps" in go(warm, tmp_path, 2, *flags).output
    assert set(events(tmp_path)) == set(events(plain)) and apart(tmp_path, plain) < 1e-6
    for epoch in (0, 2):  # of two copies, and of one: each part once
        parts = [
            FileSystemReader(out / f"epoch{epoch}/pytorch_model_fsdp_0").read_metadata()
            for out in (plain, tmp_path)
        ]
        assert parts[0].state_dict_metadata == parts[1].state_dict_metadata
    proven(tmp_path, 18)


@pytest.mark.proof
def test_copies_with_nothing_to_do_and_with_twice_as_much(warm, tmp_path):
    flags = ("--fsdp", 2, "--epochs", 1, "--own-hands")
    outs = [tmp_path / name for name in ("plain", "three", "one")]
    for out in outs:
        out.mkdir()
    alone(warm, outs[0], 4, *flags)
    for out, world in zip(outs[1:], (6, 2), strict=True):
        go(warm, out, world, *flags, first=4)
        assert events(out) == events(outs[0]) and apart(out, outs[0]) < 1e-6
        proven(out, 3)


@pytest.mark.proof
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_killed_on_one_copy_and_on_two(warm, tmp_path, stage):
    pytest.importorskip("deepspeed")
    plain, calm, rough = (tmp_path / name for name in ("plain", "calm", "rough"))
    for out in (plain, calm, rough):
        out.mkdir()
    flags = ("--zero", stage, "--epochs", 2, "--save-each-epoch")
    alone(warm, plain, 2, *flags)
    go(warm, calm, 2, *flags)
    assert events(calm) == events(plain) and apart(calm, plain) == 0.0
    for world, die_at in ((2, "5:3"), (4, "8:6"), (2, "")):
        go(warm, rough, world, *flags, die_at=die_at)
        (rough / "died").unlink(missing_ok=True)
    assert set(events(rough)) == set(events(plain)) and apart(rough, plain) < 1e-6
    proven(calm, 12)
    proven(rough, 12)


@pytest.mark.proof
def test_deepspeed_with_nothing_to_do_and_with_twice_as_much(warm, tmp_path):
    pytest.importorskip("deepspeed")
    flags = ("--zero", 3, "--epochs", 1)
    outs = [tmp_path / name for name in ("plain", "six", "one")]
    for out in outs:
        out.mkdir()
    alone(warm, outs[0], 4, *flags)
    for out, world, mesh in zip(outs[1:], (6, 4), (2, 4), strict=True):
        go(warm, out, world, *flags, first=4, HARNESS_MESH=f"dp_shard={mesh}")
        assert events(out) == events(outs[0]) and apart(out, outs[0]) < 1e-6
        proven(out, 3)


@pytest.mark.parametrize(
    ("kind", "fsdp2", "layout", "ranks", "wanted"),
    [
        ("FSDP", False, None, 2, "fsdp_version=2"),
        ("FSDP", True, None, 1, "--mesh dp_shard=8"),
        ("MULTI_CPU", False, None, 2, "leave out --mesh"),
        ("DEEPSPEED", False, None, 1, "--mesh dp_shard=8"),
        ("MEGATRON_LM", False, None, 2, "FullyShardedDataParallelPlugin"),
        ("FSDP", True, object(), 2, "parallelism_config"),
    ],
)
def test_refused(kind, fsdp2, layout, ranks, wanted):
    accelerator = types.SimpleNamespace(
        distributed_type=types.SimpleNamespace(name=kind),
        is_fsdp2=fsdp2,
        parallelism_config=layout,
    )
    with pytest.raises(BadInput, match=wanted):
        check(accelerator, types.SimpleNamespace(replica_ranks=ranks))


def test_a_config_file_of_version_1_says_so(tmp_path):
    config = tmp_path / "fsdp.yaml"
    config.write_text(CONFIG.replace("fsdp_version: 2", "fsdp_version: 1"))
    said = variables_of(str(config))
    assert (said["ACCELERATE_USE_FSDP"], said["FSDP_VERSION"]) == ("true", "1")
    assert not [name for name in said if name in ("WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS")]


def test_a_config_file_of_deepspeed_says_so(tmp_path):
    config = tmp_path / "zero.yaml"
    config.write_text(ZERO)
    said = variables_of(str(config))
    assert said["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert said["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"


@pytest.mark.parametrize("total", ["auto", None, 32])
def test_a_batch_of_deepspeed_is_that_of_the_first_world(total):
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    of_copy = config_of_copy({"train_batch_size": total, **sizes}, first_ranks=4, copy_ranks=2)
    assert of_copy == {"train_batch_size": 16 if total == 32 else total, **sizes}
    with pytest.raises(BadInput, match="train_batch_size=32"):
        config_of_copy({"train_batch_size": 24, **sizes}, first_ranks=4, copy_ranks=2)
