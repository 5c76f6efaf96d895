"""Language models in all ways of saving memory, on real ranks. Forks its ranks: torch is imported
once. Prints a line of JSON: a list over ranks of {mesh: {way: what came of it}}.

`python -m support.memory_ways`: four ranks; each way's gradients are compared with those of one rank
that holds the whole model.
"""

import functools
import hashlib
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from harness.core.mesh import parse
from harness.meshes.cross_entropy import chunked_cross_entropy
from harness.worker.gradients.exact_sums import exact_strategy_for
from harness.worker.gradients.parallel import strategy_for
from harness.worker.gradients.sharding import FSDP_DIMS, Materials, ShardGroups, shard
from storage.tensors.tensor_names import plain_name

WORLD, CPU, WORDS, DIM = 4, torch.device("cpu"), 30, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 36), nn.Linear(36, DIM)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Gives its loss, a sum; `chunks`: of the head's tokens."""

    def __init__(self, chunks=0):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, DIM), nn.Linear(DIM, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.chunks = chunks

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.chunks:
            return chunked_cross_entropy(
                x, self.head.weight, targets, chunks=self.chunks, reduction="sum"
            )
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.view(-1, WORDS), targets.view(-1), reduction="sum")


def full(model):
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))


def every_second(model):
    some = set(model.blocks[::2])
    apply_activation_checkpointing(model, check_fn=some.__contains__)


def but_products(ctx, op, *args, **more):
    keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def selective(model):
    wrap = functools.partial(
        checkpoint_wrapper,
        context_fn=functools.partial(create_selective_checkpoint_contexts, but_products),
    )
    apply_activation_checkpointing(model, wrap, lambda m: isinstance(m, Block))


def compiled(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="aot_eager")


def compiled_in_place(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")


def both(model):
    full(model)
    compiled(model)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# name -> (what is done to the model before it is sharded, options of fully_shard)
WAYS = {
    "plain": (None, {}),
    "checkpointed": (full, {}),
    "every second": (every_second, {}),
    "selective": (selective, {}),
    "compiled": (compiled, {}),
    "compiled in place": (compiled_in_place, {}),
    "checkpointed, compiled": (both, {}),
    "bfloat16": (None, {"mp_policy": BF16}),
    "bfloat16, both": (both, {"mp_policy": BF16}),
    "kept": (None, {"reshard_after_forward": False}),
    "resharded": (None, {"reshard_after_forward": True}),
    "offload": (None, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}
HALVES = {"reshard_after_forward": 2}
LATE = {"checkpointed late": full, "compiled late": compiled, "both late": both}
MESHES = {"ddp": None, "flat": "", "hsdp": "dp_shard=2", "tp": "dp_shard=2,tp=2", "tp alone": "tp=4"}


@functools.cache
def device_mesh(words):
    sizes = parse(words).sizes(WORLD)
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@functools.cache
def across(words):
    return device_mesh(words)["dp_replicate", "dp_shard"]._flatten("replicas").get_group()


def split(model, mesh):
    """By tensor parallelism; the head by rows."""
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    head = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, {"head": head})


def built(words, change, how, chunks=0, meta=False, late=None):
    torch.manual_seed(3)
    with torch.device("meta" if meta else "cpu"):
        model = Net(chunks)
    if meta:
        model.head.weight = model.embed.weight if meta == "tied" else model.head.weight
    tp = bool(words) and "tp" in words
    if tp:
        split(model, device_mesh(words)["tp"])
    if change:
        change(model)
    if words is not None:
        groups = None
        if words:
            groups = ShardGroups(device_mesh(words)[FSDP_DIMS], across(words) if tp else None)
        shard(model, CPU, seed=5, groups=groups, **how)
    if late:
        late(model)
    return model


def normal(name, tensor):
    tensor.normal_(std=len(name))


def values(model):
    """A hash of them, by name."""
    state = {plain_name(name): value for name, value in model.state_dict().items()}
    whole = [v.full_tensor() if isinstance(v, DTensor) else v for _, v in sorted(state.items())]
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in whole)).hexdigest()


def from_meta(words):
    """What models on the meta device begin with, and a whole one on one rank does."""
    found = {}
    for way, init in (("reset", None), ("init", normal)):
        for change in (None, both):
            with torch.device("meta"):
                alone = Net()
            Materials(alone, CPU, 5, init).fill(alone)
            torch.manual_seed(dist.get_rank())  # the script's own randomness does not matter
            model = built(words, change, {"init": init}, meta=True)
            name = f"{way} {change.__name__ if change else 'plain'}"
            found[name] = [values(alone), values(model)]
    if "tp" not in words:
        model = built(words, None, {}, meta="tied")
        found["tied"] = [id(model.head.weight), id(model.embed.weight)]
    return found


def data(words):
    """Of all micro-batches, and which are this rank's replica's."""
    made = torch.Generator().manual_seed(9)
    tokens = torch.randint(WORDS, (8, 2, 5), generator=made)
    targets = torch.randint(WORDS, (8, 2, 5), generator=made)
    targets[0, 0, :3] = -100
    inside = parse(words).replica_ranks if words else 1
    replicas = WORLD // inside
    return tokens, targets, range(dist.get_rank() // inside, 8, replicas)


def gradients(words, model, strategy, mine):
    tokens, targets, _ = data(words)
    strategy.start(8)
    strategy.zero()
    repeat = True
    while repeat:
        for i in mine:
            strategy.micro(last=i == mine[-1])
            model(tokens[i], targets[i]).backward()
            strategy.micro_done()
        repeat = strategy.again()
    strategy.reduce()
    strategy.divide(7.0)
    return [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters(model)]


def parameters(model):
    return list(model.parameters())


def alone():
    """One rank has the whole model, in float32."""
    torch.manual_seed(3)
    model = Net()
    tokens, targets, _ = data("")
    for some, wanted in zip(tokens, targets, strict=True):
        (model(some, wanted) / 7.0).backward()
    return [p.grad for p in parameters(model)]


def outcome(words, change, how, reduce="fast", **more):
    try:
        model = built(words, change, how, **more)
        mesh = device_mesh(words) if words else None
        if reduce == "fast":
            strategy = strategy_for(model, mesh=mesh)
        else:
            strategy = exact_strategy_for(model, reduce, mesh=mesh)
        found = gradients(words, model, strategy, data(words)[2])
        apart = max(
            float((a - b).norm() / b.norm()) for a, b in zip(found, alone(), strict=True)
        )
        square = torch.stack([g.float().norm() for g in found]).norm()
        same_norm = torch.allclose(strategy.norm(), square, rtol=1e-3)
        made = b"".join(g.contiguous().float().numpy().tobytes() for g in found)
        return {"apart": apart, "norm": same_norm, "hash": hashlib.sha256(made).hexdigest()}
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}


def rank_main(rank, folder, only):
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/meet", WORLD), rank=rank, world_size=WORLD
    )
    torch.set_num_threads(1)
    found = {}
    for name, words in MESHES.items():
        if only and name not in only:
            continue
        here = found[name] = {}
        for reduce in ("fast", "exact", "exact32"):
            for way, (change, how) in WAYS.items():
                if (words is not None or not how) and (reduce != "exact32" or how):
                    here[f"{reduce} {way}"] = outcome(words, change, how, reduce)
            if words is not None:
                for way, change in LATE.items():
                    if reduce != "exact32":
                        here[f"{reduce} {way}"] = outcome(words, None, {}, reduce, late=change)
                if words == "":
                    here[f"{reduce} halves"] = outcome(words, None, HALVES, reduce)
        for chunks in (1, 3):
            here[f"fast {chunks} chunks"] = outcome(words, None, {}, chunks=chunks)
        if words is not None:
            here["meta"] = from_meta(words)
        torch._dynamo.reset()
    every = [None] * WORLD
    dist.all_gather_object(every, found)
    if rank == 0:
        print(json.dumps(every), flush=True)
    dist.barrier()


if __name__ == "__main__":
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    from support import worlds

    with tempfile.TemporaryDirectory() as folder:
        worlds.fork(WORLD, functools.partial(rank_main, folder=folder, only=sys.argv[1:]))
