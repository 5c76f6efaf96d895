"""Copies of a model that Accelerate shards by FSDP2 over two ranks each: an unchanged script on any
number of them, killed and resumed, trains as Accelerate does on the world it was written for."""

import types
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

import torch
from torch.distributed.checkpoint import FileSystemReader

from harness.adapters.accelerate.sharding import check, variables_of
from harness.core.world import BadInput
from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from support.trainer_script import SHARDED
from support.worlds import Nursery, history

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


@pytest.fixture(scope="module")
def nursery():
    return Nursery()


def alone(nursery, out, world, *flags):
    """Accelerate itself, on so many processes."""
    env = {"HARNESS_ADAPT": "none", "ACCELERATE_USE_CPU": "true"}
    nursery.train(out / "run", world, SCRIPT, "--out", out, *flags, script=SHARDED, env=env)
    return out


@pytest.fixture(scope="module")
def plain(nursery, tmp_path_factory):
    return alone(nursery, tmp_path_factory.mktemp("plain"), 2, "--fsdp", 2, "--save-each-epoch")


def go(nursery, out, world, *flags, first=2, die_at="", codes=(0,), **env):
    """Under the harness, on copies of two ranks. `first`: ranks of the first world; `die_at`: "in
    step N:after the snapshot of step S"."""
    said = {"HARNESS_ADAPT": "auto", "HARNESS_SCRIPT_WORLD": first, "HARNESS_MESH": "dp_shard=2"}
    said |= {"HARNESS_ATTACH": '{"seed": 1, "snapshot_every_steps": 3}', "DIE_AT": die_at} | env
    codes = (-9, 1) if die_at else codes
    words = (out / "run", world, "--out", out, *flags)
    return nursery.train(*words, script=SCRIPT, env=said, codes=codes)


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


def test_one_copy_does_what_torchrun_does(nursery, plain, tmp_path):
    config = tmp_path / "fsdp.yaml"
    config.write_text(CONFIG)
    go(nursery, tmp_path, 2, "--save-each-epoch", ACCELERATE_CONFIG_FILE=config)
    assert events(tmp_path) == events(plain) and apart(tmp_path, plain) == 0.0
    proven(tmp_path, 18)


def test_killed_on_two_copies_it_goes_on_on_one(nursery, plain, tmp_path):
    flags = ("--fsdp", 2, "--save-each-epoch")
    go(nursery, tmp_path, 4, *flags, die_at="8:6")
    assert "goes through 6 steps" in go(nursery, tmp_path, 2, *flags).output
    assert set(events(tmp_path)) == set(events(plain)) and apart(tmp_path, plain) < 1e-6
    for epoch in (0, 2):  # of two copies, and of one: each part once
        parts = [
            FileSystemReader(out / f"epoch{epoch}/pytorch_model_fsdp_0").read_metadata()
            for out in (plain, tmp_path)
        ]
        assert parts[0].state_dict_metadata == parts[1].state_dict_metadata
    proven(tmp_path, 18)


@pytest.mark.proof
def test_copies_with_nothing_to_do_and_with_twice_as_much(nursery, tmp_path):
    flags = ("--fsdp", 2, "--epochs", 1, "--own-hands")
    outs = [tmp_path / name for name in ("plain", "three", "one")]
    for out in outs:
        out.mkdir()
    alone(nursery, outs[0], 4, *flags)
    for out, world in zip(outs[1:], (6, 2), strict=True):
        go(nursery, out, world, *flags, first=4)
        assert events(out) == events(outs[0]) and apart(out, outs[0]) < 1e-6
        proven(out, 3)


@pytest.mark.parametrize(
    ("kind", "fsdp2", "layout", "ranks", "wanted"),
    [
        ("FSDP", False, None, 2, "fsdp_version=2"),
        ("FSDP", True, None, 1, "--mesh dp_shard=8"),
        ("MULTI_CPU", False, None, 2, "leave out --mesh"),
        ("DEEPSPEED", False, None, 1, "FullyShardedDataParallelPlugin"),
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
