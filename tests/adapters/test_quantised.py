"""Adapters on bases that bitsandbytes has quantised, and its optimizers of 8 bits: a script with TRL's
SFTTrainer, killed and resumed."""

import copy
import json
from pathlib import Path

import pytest

bnb = pytest.importorskip("bitsandbytes")
pytest.importorskip("trl")

import torch
from torch import nn

from harness.worker.batches.feed import shapes_of
from harness.worker.training_state import give_state, state_of
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store
from storage.tensors import loading, quantised_weights
from support.trainer_script import ENV

SCRIPT = Path(__file__).parent / "scripts" / "trl_trainer.py"
PRELOAD = "bitsandbytes,peft,trl"


@pytest.fixture
def qlora(warm, tmp_path):
    def train(run, world, *flags, reduce="exact", die_at="", codes=(0,), mesh=""):
        attach = {"seed": 1, "snapshot_every_steps": 2, "reduce": reduce}
        env = {"HARNESS_ADAPT": "auto", "HARNESS_ATTACH": json.dumps(attach), "DIE_EVERY": 2}
        env |= {"HARNESS_SCRIPT_WORLD": 2 if mesh else 1, "DIE_AT": die_at}
        env |= {"HARNESS_MESH": mesh} if mesh else {}
        words = ("--lora", "--epochs", 1, "--events", tmp_path / f"{run}.events", *flags)
        ended = warm.train(tmp_path / run, world, *words, script=SCRIPT, env=ENV | env, codes=codes)
        return ended.output

    return train


def ends_in(folder):
    """The model and the optimizer in a run's last snapshot, as bytes (codes may read as NaN), and
    what the first snapshot and this one added to the bucket."""
    snapshots = Snapshots(open_store(str(folder)))
    first, *_, last = (snapshots.load(ref) for ref in reversed(snapshots.refs()))
    found = loading.destinations(last, {})
    loading.load(snapshots, last, found)
    state = {
        name: tensor.reshape(-1).view(torch.uint8)
        for name, tensor in found.items()
        if name.startswith(("model/", "optimizer/"))
    }
    return state, first.own_nbytes, last.own_nbytes


@pytest.mark.parametrize(
    "flags",
    [
        ("--bits", 4, "--dora", "--rank", 64, "--optim", "paged_adamw_8bit"),
        ("--bits", 8, "--rank", 64, "--optim", "adamw_8bit"),
    ],
)
def test_codes_scales_and_moments_come_back_to_the_bit(qlora, tmp_path, flags):
    qlora("calm", 1, *flags)
    qlora("cut", 2, *flags, die_at="3:2", codes=(-9, 1))
    assert "resumed from step 2" in qlora("cut", 1, *flags)
    calm, whole, later = ends_in(tmp_path / "calm")
    cut = ends_in(tmp_path / "cut")[0]
    assert calm.keys() == cut.keys()
    assert not [name for name in calm if not torch.equal(calm[name], cut[name])]
    assert [name for name in cut if name.endswith("/qmap2")]
    base = [name for name in calm if "base_layer" in name]
    assert {name.rpartition(".")[2] for name in base} >= {"absmax" if 4 in flags else "SCB"}
    assert later <= whole - sum(calm[name].nbytes for name in base)  # what changes, and no base


def test_a_sharded_base_is_resumed(qlora, tmp_path):
    flags = ("--bits", 4, "--fsdp")
    how = {"reduce": "fast", "mesh": "dp_shard=2"}
    qlora("calm", 2, *flags, **how)
    qlora("cut", 2, *flags, **how, die_at="3:2", codes=(-9, 1))
    assert "resumed from step 2" in qlora("cut", 2, *flags, **how)
    (calm, *_), (cut, *_) = ends_in(tmp_path / "calm"), ends_in(tmp_path / "cut")
    assert not [name for name in calm if not torch.equal(calm[name], cut[name])]
    assert [name for name in cut if name.endswith("weight.nested_absmax")]
    said = qlora("no", 2, *flags, "--optim", "adamw_8bit", **how, codes=(1, -9))
    assert "AdamW cannot step weights that are sharded; use torch's AdamW" in said


def quantised(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(bnb.nn.Linear4bit(64, 64, quant_type="nf4"), nn.Linear(64, 8))
    return model.to("cpu")


def test_a_base_that_was_quantised_elsewhere_is_given_its_scales():
    """Its offsets are text of any length, and a model's identity does not depend on that."""
    blob = "0.weight.quant_state.bitsandbytes__nf4"
    one = quantised(0)
    other = next(
        m for m in map(quantised, range(1, 99)) if len(state_of(m)[blob]) != len(state_of(one)[blob])
    )
    assert shapes_of(one) == shapes_of(other)
    x = torch.randn(4, 64)
    for model in (other, copy.deepcopy(other)):
        give_state(model, copy.deepcopy(state_of(one)))
        assert torch.equal(model(x), one(x))
    theirs = quantised_weights.live(other)
    assert len(theirs) == 5 and all(map(torch.equal, theirs, quantised_weights.live(one)))
