"""A model of Hugging Face's, made small, split by a named plan as HARNESS_MESH says; or whole."""

import argparse
import contextlib

import torch
from torch.distributed.tensor.parallel import loss_parallel
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import harness
from support.contexts_rows import WORDS, Sequences

p = argparse.ArgumentParser()
p.add_argument("kind")
p.add_argument("--whole", action="store_true")
p.add_argument("--loss-parallel", action="store_true")
a = p.parse_args()

run = harness.attach(seed=1, snapshot_every_steps=3)
sizes = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
if a.kind == "llama":
    model = LlamaForCausalLM(LlamaConfig(**sizes))
else:
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=True))
if not a.whole:
    harness.tensor_parallel(model, run, "llama", whole_logits=not a.loss_parallel)
    harness.fsdp2(model, run)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run.prepare(model, optimizer)
loss_of = loss_parallel if a.loss_parallel else contextlib.nullcontext
for step in run.steps(Sequences(24), total=6, global_batch=24, micro_batch=4):
    for x, y in step:
        with loss_of():
            logits = model(x).logits.flatten(0, 1)
            step.backward(torch.nn.functional.cross_entropy(logits, y.flatten()))
    step.update(clip_norm=1.0)
