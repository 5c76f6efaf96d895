"""Models that are built on the meta device, computed in less precision, checkpointed, compiled,
offloaded: on real ranks, with all meshes; and how much memory a rank takes."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from harness.look.audit.audit import audit
from harness.worker.batches.feed import _model_fingerprint
from harness.worker.training_state import give_state, named_as, state_of
from storage.stores.store_urls import open_store
from storage.tensors.tensor_names import WRAPPED
from support.worlds import environment, newest, same_training, train

pytestmark = pytest.mark.mesh
ROOT = Path(__file__).parents[2]
TRAINER = ROOT / "tests" / "support" / "memory_trainer.py"
MESHES = ("ddp", "flat", "hsdp", "tp", "tp alone")
MB = 1e6


def printed(script, *flags):
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    argv = [sys.executable, ROOT / script, *map(str, flags)]
    ended = subprocess.run(
        argv, env=environment() | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=900
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@functools.cache
def ways(mesh):
    """{way: what came of it} of each rank."""
    return [rank[mesh] for rank in printed("tests/support/memory_ways.py", mesh)]


@pytest.mark.parametrize("mesh", MESHES)
def test_every_way_of_saving_memory_has_the_gradients_of_a_whole_model(mesh):
    for rank in ways(mesh):
        assert len(rank) >= 15
        for way, came in rank.items():
            if "offload" in way and "exact" in way:
                assert "found a model that FSDP2 keeps in the host's memory" in came["error"]
            elif way != "meta":
                assert came.get("norm"), (way, came)
                # eight bits of a number in bfloat16
                assert came["apart"] < (2e-2 if "bfloat16" in way else 1e-6), way


@pytest.mark.timeout(900)  # alone it makes three meshes
def test_exact_sums_do_not_depend_on_how_memory_is_saved_or_on_the_mesh():
    found = {}
    for mesh in ("ddp", "flat", "hsdp"):
        for rank in ways(mesh):
            for way, came in rank.items():
                if way.startswith("exact") and "hash" in came:
                    found.setdefault("bfloat16" in way, set()).add(came["hash"])
    assert len(found[False]) == len(found[True]) == 1 and found[False] != found[True]


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_what_a_model_from_the_meta_device_begins_with_depends_on_seed_and_names_only(mesh):
    for rank in ways(mesh):
        for way, (alone, here) in rank["meta"].items():
            assert alone == here, way
        assert rank["meta"]["reset plain"] != rank["meta"]["init plain"]


# of a snapshot from before names of wrappers were left out
OLD = ("model/0._orig_mod.weight", "model/_orig_mod.1.bias", "optimizer/0/lr")


def test_snapshots_that_name_wrappers_are_read_by_models_with_and_without():
    have = {"model/0.weight": 1, "model/1.bias": 2, "optimizer/0/lr": 3}
    old = SimpleNamespace(tensors=dict.fromkeys(OLD))
    assert named_as(old, have) == dict(zip(OLD, (1, 2, 3), strict=True))
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapped = nn.Sequential(torch.compile(nn.Linear(2, 2)), checkpoint_wrapper(nn.Linear(2, 2)))
    assert list(state_of(wrapped)) == list(state_of(plain)) == list(plain.state_dict())
    old = {name.replace("0.", "0._orig_mod."): t for name, t in plain.state_dict().items()}
    for state in (state_of(plain), old):
        give_state(wrapped, {name: t + 1 for name, t in state.items()})
        for mine, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs + 1)
    give_state(plain, {name: torch.zeros_like(t) for name, t in wrapped.state_dict().items()})
    assert not any(p.any() for p in plain.parameters())
    model = nn.Sequential(wrapped[0])
    fingerprint = _model_fingerprint(nn.Sequential(nn.Linear(2, 2)))
    assert _model_fingerprint(model) == fingerprint


# ---- runs ----------------------------------------------------------------------------------------
def trained(run, world, *flags, mesh="", **how):
    env = {"HARNESS_MESH": mesh} if mesh else {}
    out = run.parent / f"{run.name}.json"
    ended = train(run, world, *flags, "--out", out, env=env, script=TRAINER, **how)
    return ended if how else json.loads(out.read_text())


def test_any_of_them_goes_on_from_any_other(tmp_path):
    """Names of wrappers are not stored; what tensor parallelism splits begins as a whole one."""
    alone, run = tmp_path / "alone", tmp_path / "run"
    began = trained(alone, 1)["began"]
    assert trained(run, 4, "--total", 2, mesh="dp_shard=2,tp=2")["began"] == began
    trained(run, 2, "--total", 4, "--wrap", mesh="dp_shard=2")
    assert not any(word in name for name in newest(run).tensors for word in WRAPPED)
    trained(run, 1, "--total", 5, "--whole")
    trained(run, 2, "--wrap", "--offload")
    same_training(run, alone)
    assert audit(open_store(str(run))).ok


def test_exact_sums_of_a_bfloat16_model_are_the_same_for_any_number_of_ranks(tmp_path):
    flags = ("--reduce", "exact", "--bf16", "--total", 3)
    worlds = ((1, "", ()), (2, "", ("--wrap",)), (4, "dp_shard=2", ()))
    found = [
        trained(tmp_path / f"run{world}", world, *flags, *more, mesh=mesh)
        for world, mesh, more in worlds
    ]
    assert found[0] == found[1] == found[2]
    # what is compiled for a shape does not depend on those that were seen before
    assert not any(each["dynamic"] for each in found)


@pytest.mark.parametrize(
    ("mesh", "flags", "says"),
    [
        ("tp=2", ["--unsplit"], "which tensor parallelism splits some, found none split"),
        ("tp=2", ["--part", 2], "torch cannot do this with what tp splits"),
        ("", ["--offload", "--reduce", "exact"], "that FSDP2 keeps in the host's memory"),
        ("", ["--lazy"], "wanted values for all of head.weight (30, 16), found some"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, mesh, flags, says):
    ended = trained(tmp_path / "run", 2, *flags, mesh=mesh, codes=(1, -9))
    assert says in ended.output, ended.output


# ---- how much ------------------------------------------------------------------------------------
@pytest.mark.timeout(900)  # a quarter of a billion parameters, twice
def test_a_rank_holds_its_share_and_a_block_while_it_builds_trains_and_restores():
    """The whole model would be twice the share. Beside share and block: the other blocks of which
    some is whole while a backward runs, and what reads a snapshot."""
    shown = printed("benchmarks/memory.py", *("--layers", 16, "--ranks", 2, "--json"))
    rows = {row["phase"]: row for row in shown["rows"]}
    assert rows.keys() == {"build", "train", "save", "restore"}
    for phase, beside in (("build", 32 * MB), ("train", 96 * MB), ("restore", 96 * MB)):
        assert rows[phase]["share"] < rows[phase]["host"] < rows[phase]["allowed"] + beside
        assert rows[phase]["allowed"] + beside < 2 * rows[phase]["share"]
