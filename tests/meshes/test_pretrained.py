"""Snapshots in Hugging Face's names, and models filled from them: whole, in boxes, sharded, from
folders and buckets. (What transformers makes of it: tests/adapters/test_hf_models.py.)"""

import itertools
import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

import harness
from harness.meshes.model_shapes import named_shape
from storage import Ref, Snapshots, open_store
from storage.export.hf_layouts import PAIRS, layout_moves, order_of, to_ours, to_theirs
from storage.export.safetensors import SafetensorsFiles, export
from support.shelves import memory, save

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import gpt
import models

from support.exports import exported, files, random, tiny

TINY = ("llama-tiny", "qwen2-tiny", "qwen3-tiny", "gpt2-tiny", "moe-tiny")


# ---- names ---------------------------------------------------------------------------------------
def test_llama_names(tmp_path):
    model = tiny("llama-tiny")
    exported(model, tmp_path / "out")
    found, ours = files(tmp_path / "out"), model.state_dict()
    assert len(found) == len(ours) and "lm_head.weight" not in found
    q = found["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(q, ours["blocks.1.attention.q.weight"])
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "llama"


def test_fused_matrices_are_cut(tmp_path):
    model = random(gpt.GPT(gpt.Shape(2, 32, 2, tied=False), 16))
    exported(model, tmp_path / "out")
    found, fused = files(tmp_path / "out"), model.blocks[1].attention.qkv.weight
    parts = [found[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(torch.cat(parts), fused)
    gate_up = [found[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(torch.cat(gate_up), model.blocks[0].mlp.gate_up.weight)
    again = random(gpt.GPT(gpt.Shape(2, 32, 2, tied=False), 16))
    harness.load_pretrained(again, str(tmp_path / "out"))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_gpt2_is_turned_and_put_together(tmp_path):
    model = tiny("gpt2-tiny")
    exported(model, tmp_path / "out", dtype="bf16")
    found, attention = files(tmp_path / "out"), model.blocks[1].attention
    parts = (attention.q, attention.k, attention.v)
    fused = torch.cat([part.weight for part in parts]).T.bfloat16()
    assert torch.equal(found["transformer.h.1.attn.c_attn.weight"], fused)
    biases = torch.cat([part.bias for part in parts]).bfloat16()
    assert torch.equal(found["transformer.h.1.attn.c_attn.bias"], biases)
    turned = model.blocks[0].mlp.up.weight.T.bfloat16()
    assert torch.equal(found["transformer.h.0.mlp.c_fc.weight"], turned)


def test_experts_are_taken_apart(tmp_path):
    model = tiny("moe-tiny")
    made = exported(model, tmp_path / "out", shard_nbytes=200_000)
    assert len(made.files) > 3
    found, experts = files(tmp_path / "out"), model.blocks[1].mlp.experts
    for e in range(8):
        for theirs, ours in (("w1", experts.gate), ("w3", experts.up), ("w2", experts.out)):
            name = f"model.layers.1.block_sparse_moe.experts.{e}.{theirs}.weight"
            assert torch.equal(found[name], ours[e]), name


def test_metas_pairs_become_halves():
    """As transformers' own conversion of Meta's files does it."""
    heads, head = 3, 8
    ours = torch.randn(heads * head, 5)
    wanted = ours.view(heads, head // 2, 2, 5).transpose(1, 2).reshape(heads * head, 5)
    theirs = torch.empty_like(ours)
    theirs[torch.from_numpy(order_of(f"{PAIRS}:{head}", len(ours)))] = ours
    assert torch.equal(theirs, wanted)


def test_metas_names_there_and_back(tmp_path):
    shape = named_shape("llama-tiny", layers=2, tied=False)
    names = {
        "tok_embeddings.weight": (256, 128),
        "norm.weight": (128,),
        "output.weight": (256, 128),
    }
    for i in range(2):
        names |= {
            f"layers.{i}.attention.wq.weight": (128, 128),
            f"layers.{i}.attention.wk.weight": (64, 128),
            f"layers.{i}.attention.wv.weight": (64, 128),
            f"layers.{i}.attention.wo.weight": (128, 128),
            f"layers.{i}.attention_norm.weight": (128,),
            f"layers.{i}.ffn_norm.weight": (128,),
            f"layers.{i}.feed_forward.w1.weight": (384, 128),
            f"layers.{i}.feed_forward.w2.weight": (128, 384),
            f"layers.{i}.feed_forward.w3.weight": (384, 128),
        }

    class Bag(torch.nn.Module):
        config = shape

        def __init__(self):
            super().__init__()
            self.tensors = {name: torch.randn(size) for name, size in names.items()}

        def state_dict(self):
            return self.tensors

    bag, back = Bag(), Bag()
    exported(bag, tmp_path / "out")
    q = bag.tensors["layers.1.attention.wq.weight"]
    halves = q.view(8, 8, 2, 128).transpose(1, 2).reshape(128, 128)
    assert torch.equal(files(tmp_path / "out")["model.layers.1.self_attn.q_proj.weight"], halves)
    harness.load_pretrained(back, str(tmp_path / "out"))
    assert all(torch.equal(back.tensors[name], bag.tensors[name]) for name in names)


def test_names_that_are_not_ours_stay(tmp_path):
    """Of a model that is Hugging Face's own, or nobody's."""
    config = named_shape("llama-tiny").to_dict()
    assert layout_moves(config, ["model.norm.weight", "lm_head.weight"]) == ()
    assert layout_moves({"model_type": "llama"}, ["model.norm.weight"]) == ()
    with pytest.raises(ValueError, match=r"blocks.0.attention.sink: wanted tensors of a llama"):
        layout_moves(config, ["embed.weight", "norm.weight", "blocks.0.attention.sink"])
    with pytest.raises(ValueError, match="wanted a model_type of llama, qwen2"):
        layout_moves({"model_type": "bert"}, ["embed.weight"])


def test_of_an_old_snapshot_the_config_is_given(tmp_path):
    """It does not say what its model is. An average of the weights has the same names."""
    model, store = tiny("llama-tiny"), memory()
    manifest = save(store, Ref(1, 5), model.state_dict())
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    export(Snapshots(store), manifest, tmp_path / "plain")
    assert "blocks.0.attention.q.weight" in files(tmp_path / "plain")
    assert not (tmp_path / "plain/config.json").exists()
    export(Snapshots(store), manifest, tmp_path / "out", config=tmp_path / "config.json")
    assert "model.layers.0.self_attn.q_proj.weight" in files(tmp_path / "out")
    again = models.Transformer(harness.model_shape(str(tmp_path / "out")), 32)
    harness.load_pretrained(again, str(tmp_path / "out"))
    assert torch.equal(again.embed.weight, model.embed.weight)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"wanted a config.json, found list"):
        export(Snapshots(store), manifest, tmp_path / "more", config=tmp_path / "config.json")


@pytest.mark.parametrize("name", TINY)
def test_an_index_there_and_back(name):
    """Pure: boxes of any mesh, as an index in their names and in ours again."""
    model = tiny(name)
    config, at = model.config.to_dict(), 0
    index = {}
    for key, t in model.state_dict().items():
        rows = [*range(0, len(t), max(1, len(t) // 3)), len(t)]
        chunks = []
        for low, high in itertools.pairwise(rows):
            nbytes = 4 * t[low:high].numel()
            place = {"offsets": [low, *[0] * (t.dim() - 1)], "sizes": [high - low, *t.shape[1:]]}
            chunks.append({**place, "part": "p", "start": at, "end": at + nbytes})
            at += nbytes
        index[key] = {"shape": list(t.shape), "dtype": "float32", "chunks": chunks}
    moved = layout_moves(config, index)
    theirs = to_theirs(index, moved)
    assert sum(c["end"] - c["start"] for e in theirs.values() for c in e["chunks"]) == at
    plain = tuple(m for m in moved if not m.layout)  # who lays out makes one chunk of it
    back = to_ours({m.theirs: theirs[m.theirs] for m in plain}, plain)
    for key, entry in back.items():
        assert entry["shape"] == index[key]["shape"], key
        first = min(c["start"] for c in entry["chunks"])
        assert first == index[key]["chunks"][0]["start"], key


# ---- filled --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("meta", [False, True])
def test_a_model_is_filled_with_what_was_exported(tmp_path, name, meta):
    model = tiny(name)
    exported(model, tmp_path / "out", shard_nbytes=300_000)
    with torch.device("meta" if meta else "cpu"):
        again = models.Transformer(harness.model_shape(str(tmp_path / "out")), 32)
    harness.load_pretrained(again, str(tmp_path / "out"))
    x = torch.randint(256, (2, 20))
    assert torch.equal(again.eval()(x), model(x))
    assert not any(t.is_meta for t in again.state_dict().values())


def test_weights_keep_the_models_dtype_and_come_from_any_store(tmp_path):
    model = tiny("llama-tiny", tied=False)
    exported(model, tmp_path / "out", dtype="bf16")
    bucket = "memory://pretrained"
    for path in (tmp_path / "out").iterdir():
        open_store(bucket).put(path.name, path.read_bytes())
    again = models.Transformer(harness.model_shape(bucket), 32)
    harness.load_pretrained(again, bucket)
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b.bfloat16().float())


def test_a_session_shows_how_much_is_read(tmp_path, monkeypatch):
    said, alive = [], []
    peers = SimpleNamespace(across=None, copies=None)
    run = SimpleNamespace(_peers=peers, print=said.append, alive=lambda: alive.append(1))
    monkeypatch.setattr("harness.meshes.pretrained.SHOWN_S", 0.0)
    model = tiny("llama-tiny")
    exported(model, tmp_path / "out")
    again = models.Transformer(harness.model_shape(str(tmp_path / "out")), 32)
    harness.load_pretrained(again, str(tmp_path / "out"), run)
    assert len(alive) == len(said) == len(again.state_dict())
    assert "0.0 of 0.0 GB of the weights are read" in said[-1]
    x = torch.randint(256, (2, 20))
    assert torch.equal(again.eval()(x), model(x))


def test_a_tied_head_is_the_embedding(tmp_path):
    model = tiny("llama-tiny", tied=True)
    exported(model, tmp_path / "out")
    separate = models.Transformer(named_shape("llama-tiny", layers=2, tied=False), 32)
    harness.load_pretrained(separate, str(tmp_path / "out"))
    assert torch.equal(separate.head.weight, model.embed.weight)
    # and a file that has both
    both = files(tmp_path / "out") | {"lm_head.weight": model.embed.weight.detach().clone()}
    safetensors.torch.save_file(both, tmp_path / "out/model.safetensors")
    again = tiny("llama-tiny", tied=True)
    harness.load_pretrained(again, str(tmp_path / "out"))
    assert torch.equal(again.embed.weight, model.embed.weight)


def test_gpt2_as_it_was_published(tmp_path):
    """Without the prefix of the model with a head, and with buffers that nobody needs."""
    model = tiny("gpt2-tiny")
    exported(model, tmp_path / "out")
    found = {k.removeprefix("transformer."): v for k, v in files(tmp_path / "out").items()}
    found["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    safetensors.torch.save_file(found, tmp_path / "out/model.safetensors")
    again = tiny("gpt2-tiny")
    harness.load_pretrained(again, str(tmp_path / "out"))
    x = torch.randint(256, (1, 8))
    assert torch.equal(again(x), model(x))


def test_what_does_not_fit_is_refused(tmp_path):
    model = tiny("llama-tiny")
    exported(model, tmp_path / "out")
    url = str(tmp_path / "out")
    with pytest.raises(harness.BadInput, match=r"found model.layers.1.\S+ .*which the model has"):
        harness.load_pretrained(models.Transformer(named_shape("llama-tiny", layers=1), 32), url)
    with pytest.raises(harness.BadInput, match=r"found no model.layers.2.input_layernorm.weight"):
        harness.load_pretrained(models.Transformer(named_shape("llama-tiny", layers=3), 32), url)
    wide = named_shape("llama-tiny", layers=2, hidden=128)
    with pytest.raises(harness.BadInput, match=r"wanted blocks.0.mlp.gate.weight of the shape"):
        harness.load_pretrained(models.Transformer(wide, 32), url)
    with pytest.raises(harness.BadInput, match=r"a folder or bucket with a config.json"):
        harness.load_pretrained(model, str(tmp_path))
    (tmp_path / "out/model.safetensors").write_bytes(b"nothing of that kind")
    with pytest.raises(harness.BadInput, match="wanted a header of safetensors"):
        harness.load_pretrained(model, url)
    (tmp_path / "links").mkdir()
    (tmp_path / "links/config.json").symlink_to(tmp_path / "out/config.json")
    with pytest.raises(harness.BadInput, match="hf download MODEL --local-dir FOLDER"):
        harness.load_pretrained(model, str(tmp_path / "links"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data_offsets": [0, 1 << 40]}, "bytes"),
        ({"data_offsets": [-8, 8]}, "bytes"),
        ({"shape": [3, 5]}, "bytes for"),
        ({"dtype": "F4"}, "F4"),
        ({"shape": [-1, -4]}, "bytes"),
        ({"shape": None}, "wanted a header"),
    ],
)
def test_headers_are_not_believed(tmp_path, change, says):
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | change
    text = json.dumps({"w": entry}).encode()
    whole = struct.pack("<Q", len(text)) + text + bytes(16)
    (tmp_path / "model.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match=says):
        SafetensorsFiles(open_store(str(tmp_path)))
    for broken in (b"", b"\xff" * 8, struct.pack("<Q", 4) + b"null"):
        (tmp_path / "model.safetensors").write_bytes(broken)
        with pytest.raises(ValueError, match="wanted a header of safetensors"):
            SafetensorsFiles(open_store(str(tmp_path)))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(ValueError, match="wanted a weight_map"):
        SafetensorsFiles(open_store(str(tmp_path)))
