"""A training script of a Llama-like model on a mesh, split by a named plan, as HARNESS_MESH says; or
whole on one rank."""

import argparse
import contextlib
import hashlib
import json
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

import harness
from support.contexts_rows import WORDS, Sequences, rotated

LENGTH, SIZE, HEADS = 24, 16, 4

p = argparse.ArgumentParser()
p.add_argument("--total", type=int, default=8)
p.add_argument("--whole", action="store_true")
p.add_argument("--reduce", default="fast")
p.add_argument("--loss-parallel", action="store_true")
p.add_argument("--tied", action="store_true")
p.add_argument("--dropout", type=float, default=0.0)
p.add_argument("--bad", default="", help="what cannot be")
p.add_argument("--out", default="")
a = p.parse_args()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        size = SIZE // HEADS
        heads = 3 if a.bad == "heads" else HEADS
        self.q_proj = nn.Linear(SIZE, heads * size, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(SIZE, heads * size // 2) for _ in range(2))
        self.o_proj = nn.Linear(heads * size, SIZE, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(size), nn.RMSNorm(size)

    def forward(self, hidden_states, positions):
        shape = (*hidden_states.shape[:2], -1, SIZE // HEADS)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        with harness.own_randomness(run):
            v = nn.functional.dropout(v, a.dropout, self.training)
        q, k = rotated(q, positions), rotated(k, positions)
        seen = harness.attention(q, k, v, run, enable_gqa=True)
        return self.o_proj(seen.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(SIZE, 40, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(40, SIZE, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)
        self.self_attn, self.mlp = Attention(), Mlp()

    def forward(self, x, positions):
        x = x + self.self_attn(hidden_states=self.input_layernorm(x), positions=positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, SIZE)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(SIZE), nn.Linear(SIZE, WORDS, bias=False)
        if a.tied:
            self.lm_head.weight = self.embed_tokens.weight
        if a.bad == "unknown":
            self.adapter = nn.Linear(SIZE, SIZE)

    def forward(self, x, positions):
        x = self.embed_tokens(x)
        for layer in self.layers:
            x = layer(x, positions)
        return self.lm_head(self.norm(x))


run = harness.attach(seed=1, snapshot_every_steps=3, reduce=a.reduce)
model = Llama()
if not a.whole:
    harness.tensor_parallel(model, run, whole_logits=not a.loss_parallel)
    harness.fsdp2(model, run)
assert (model.lm_head.weight is model.embed_tokens.weight) == a.tied
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run.prepare(model, optimizer)
drawn = {}  # first sample of a micro-batch -> what is drawn beside it
loss_of = loss_parallel if a.loss_parallel and not a.whole else contextlib.nullcontext
for step in run.steps(Sequences(LENGTH), total=a.total, global_batch=24, micro_batch=4):
    for x, y in step:
        name, alike = str(x[0].tolist()), float(torch.rand(()))
        with harness.own_randomness(run):
            drawn[name] = [alike, float(torch.rand(())), float(torch.rand(()))]
        drawn[name].append(float(torch.rand(())))
        x, y, positions = harness.split_context(run, x, y, torch.arange(LENGTH)[None])
        with loss_of():
            logits = model(x, positions).flatten(0, 1)
            step.backward(nn.functional.cross_entropy(logits, y.flatten()))
    step.update(clip_norm=0.5)
state = model.state_dict().values()
whole = [v.full_tensor() if isinstance(v, DTensor) else v for v in state]
local = [v.to_local() if isinstance(v, DTensor) else v for v in state]
said = {
    "weights": hashlib.sha256(b"".join(v.numpy().tobytes() for v in whole)).hexdigest(),
    "held": sum(v.numel() for v in local) / sum(v.numel() for v in whole),
    "drawn": drawn,
}
if a.out:
    Path(f"{a.out}.{run.rank}").write_text(json.dumps(said))
