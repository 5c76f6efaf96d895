"""Our models in transformers, and theirs in ours: the same logits, in both directions, for every
family that the conversion tables know."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from storage.tensors import state_tree

transformers = pytest.importorskip("transformers")

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "examples")]

import gpt
import models

import harness
from harness.meshes.model_shapes import named_shape, shape_of
from storage import MemoryStore, Ref, Snapshots
from storage.export.safetensors import export
from storage.tensors import dcp

LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
SHAPES = {
    **{name: named_shape(name) for name in ("qwen2-tiny", "qwen3-tiny", "gpt2-tiny", "moe-tiny")},
    "llama-tiny": named_shape("llama-tiny"),
    "untied": named_shape("llama-tiny", tied=False, kv_heads=8, rope_theta=1e4),
    "llama 3.1": named_shape("llama-tiny", rope=tuple(sorted(LLAMA3.items()))),
    "wide heads": named_shape("moe-tiny", head_dim=32, experts=4),
}
TOKENS = torch.arange(2 * 48).reshape(2, 48) * 7 % 256


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def random(model):
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.1)
    return model.eval()


def ours(name):
    if name == "gpt":
        return random(gpt.GPT(gpt.Shape(2, 64, 4), 64))
    return random(models.Transformer(SHAPES[name], 64))


def exported(model, out, **how):
    store = MemoryStore(objects={})
    tensors, plain = state_tree.split({"model": model.state_dict()})
    saver = dcp.Saver(Snapshots(store, 4096))
    saver.plan(tensors)
    data = {"state": plain, "config": model.config.to_dict()}
    manifest = saver.write(saver.stage(tensors), Ref(1, 1), data, "t")
    return export(Snapshots(store), manifest, out, **how)


@torch.no_grad()
def logits(model):
    found = model(TOKENS)
    return getattr(found, "logits", found)


@pytest.mark.parametrize("name", [*SHAPES, "gpt"])
@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_transformers_reads_what_was_exported(tmp_path, name, dtype):
    model = ours(name)
    made = exported(model, tmp_path / "out", dtype=dtype, shard_nbytes=400_000)
    assert len(made.files) > 1 or name == "gpt"
    how = {"output_loading_info": True, "dtype": torch.float32}
    theirs, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", **how)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(theirs).__name__ == model.config.to_dict()["architectures"][0]
    assert theirs.num_parameters() == model.config.parameters
    if dtype:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.bfloat16())
    torch.testing.assert_close(logits(theirs.eval()), logits(model), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_what_transformers_saves_is_read(tmp_path, name):
    config = transformers.AutoConfig.for_model(**SHAPES[name].to_dict())
    theirs = random(transformers.AutoModelForCausalLM.from_config(config))
    theirs.save_pretrained(tmp_path, max_shard_size="400KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    told = json.loads((tmp_path / "config.json").read_text())
    assert shape_of(told) == SHAPES[name] == harness.model_shape(str(tmp_path))
    with torch.device("meta"):
        model = models.Transformer(SHAPES[name], 64)
    harness.load_pretrained(model, str(tmp_path))
    torch.testing.assert_close(logits(model.eval()), logits(theirs), atol=1e-6, rtol=1e-5)


def test_a_model_of_transformers_keeps_its_names(tmp_path):
    """It says itself what it is, so an export of its snapshot is whole, and it can be filled."""
    config = transformers.AutoConfig.for_model(**SHAPES["untied"].to_dict())
    theirs = random(transformers.AutoModelForCausalLM.from_config(config))
    exported(theirs, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again.eval()), logits(theirs))
    filled = random(transformers.AutoModelForCausalLM.from_config(config))
    harness.load_pretrained(filled, str(tmp_path / "out"))
    assert torch.equal(logits(filled), logits(theirs))


def test_what_is_read_trains_on_as_transformers_would(tmp_path):
    """The same losses, step by step."""
    config = transformers.AutoConfig.for_model(**SHAPES["llama-tiny"].to_dict())
    theirs = random(transformers.AutoModelForCausalLM.from_config(config)).train()
    theirs.save_pretrained(tmp_path)
    model = models.Transformer(SHAPES["llama-tiny"], 64)
    harness.load_pretrained(model, str(tmp_path))

    def losses(one):
        optimizer, found = torch.optim.AdamW(one.parameters(), lr=1e-3), []
        for _ in range(8):
            out = one(TOKENS[:, :-1])
            out = getattr(out, "logits", out)
            loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), TOKENS[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    alone, again = losses(theirs), losses(model)
    assert again == pytest.approx(alone, rel=1e-4) and again[-1] < 0.97 * again[0]


TITAN = """
import sys
from types import SimpleNamespace
from safetensors.torch import load_file, save_file
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
source, target, dim, *heads = sys.argv[1:]
names = ("n_heads", "n_kv_heads", "head_dim")
attention = SimpleNamespace(**dict(zip(names, map(int, heads), strict=True)))
layers = [SimpleNamespace(attention=attention)]
config = SimpleNamespace(layers=layers, dim=int(dim), enable_weight_tying=False)
found = Llama3StateDictAdapter(config, None).to_hf(load_file(source))
save_file({name: tensor.contiguous() for name, tensor in found.items()}, target)
"""


def test_torchtitans_tensors_are_converted_as_it_does_it(tmp_path):
    pytest.importorskip("torchtitan")
    shape = SHAPES["untied"]
    sizes = {
        "tok_embeddings.weight": (shape.vocab, shape.dim),
        "norm.weight": (shape.dim,),
        "lm_head.weight": (shape.vocab, shape.dim),
    }
    for i in range(shape.layers):
        heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        sizes |= {
            f"layers.{i}.attention.qkv_linear.w{name}.weight": (n * shape.head_dim, shape.dim)
            for name, n in heads.items()
        }
        sizes |= {
            f"layers.{i}.attention.wo.weight": (shape.dim, shape.heads * shape.head_dim),
            f"layers.{i}.attention_norm.weight": (shape.dim,),
            f"layers.{i}.ffn_norm.weight": (shape.dim,),
            f"layers.{i}.feed_forward.w1.weight": (shape.hidden, shape.dim),
            f"layers.{i}.feed_forward.w2.weight": (shape.dim, shape.hidden),
            f"layers.{i}.feed_forward.w3.weight": (shape.hidden, shape.dim),
        }
    state = {name: torch.randn(size) for name, size in sizes.items()}
    safetensors.torch.save_file(state, tmp_path / "titan.safetensors")
    sizes = (shape.dim, shape.heads, shape.kv_heads, shape.head_dim)
    words = [str(tmp_path / "titan.safetensors"), str(tmp_path / "wanted"), *map(str, sizes)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "titan_cpu")}  # see there
    subprocess.run([sys.executable, "-c", TITAN, *words], env=env, check=True, timeout=280)
    wanted = safetensors.torch.load_file(tmp_path / "wanted")
    exported(SimpleNamespace(state_dict=lambda: state, config=shape), tmp_path / "out")
    found = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
