"""The reference trainer: a GPT on real text, from a laptop to many GPUs, through the same front
door as any user's script.

    # ~1 M parameters, the standard library's source, no download
    python examples/pretrain.py
    harness run --run s3://bucket/runs/x -- examples/pretrain.py --size 124m --dtype bf16 --data
    'corpus/*.txt'
    torchrun --nproc-per-node 8 examples/pretrain.py --model llama-1b --mesh dp_shard=4,tp=2
    python examples/pretrain.py --help

`gpt.py` and `models.py` are the models, `meshes.py` says how ranks may share them, `text.py` is the
data; what is here is the training itself. docs/MODELS.md: what goes together.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import harness
import torch
from ema import Ema
from gpt import GPT, SIZES, Shape, decay_groups
from models import PLAN, Transformer
from text import Windows, prepare, split
from torch import Tensor, nn
from torch.nn import functional as F

from meshes import check, ranks_of

LEARNING_RATES = {"1m": 3e-3, "10m": 1e-3, "124m": 6e-4, "350m": 3e-4, "1b": 2e-4}


def flag(default: Any, says: str, **how: Any) -> Any:
    """`how`: as of `add_argument`."""
    return field(default=default, metadata={"help": says, **how})


@dataclass(frozen=True)
class Flags:
    """Every field is a flag of the same name."""

    size: Literal["1m", "10m", "124m", "350m", "1b"] = flag(
        "1m", "preset of layers, dim, heads and lr"
    )
    model: str = flag(
        "", "instead of the GPT: llama-1b, moe-tiny, ..., or a folder or bucket of Hugging Face's"
    )
    layers: int | None = flag(None, "instead of the preset's")
    dim: int | None = flag(None, "instead of the preset's")
    heads: int | None = flag(None, "instead of the preset's")
    tied: bool = flag(True, "the output layer is the embedding, where the model's shape has it so")
    seq: int = flag(128, "tokens per sample")
    dropout: float = flag(0.0, "in attention and after each half of a block")
    dtype: Literal["fp32", "bf16", "fp16"] = flag(
        "fp32", "of the forward (autocast); parameters stay fp32"
    )
    checkpointing: bool = flag(
        False, "recompute activations in the backward: less memory, a third more work"
    )
    compile: bool = flag(False, "torch.compile each block")
    float8: str | None = flag(
        None,
        "matrix products of blocks in float8 (torchao; H100 or newer)",
        nargs="?",
        const="tensorwise",
        choices=["tensorwise", "rowwise"],
    )
    parallel: Literal["ddp", "fsdp2"] = flag(
        "ddp", "whole model on every rank, or sharded over ranks"
    )
    mesh: str = flag("", "how ranks share a copy of the model: dp_shard=2,tp=2 (docs/MESHES.md)")
    ema: bool = flag(
        False, "keep an exponential moving average of the weights and validate it as well"
    )
    ema_decay: float = flag(0.999, "of that average")
    data: tuple[str, ...] = flag(
        (), "files, directories, globs or URLs of text; default: the standard library's source"
    )
    cache: str = flag("~/.cache/spotharness", "where the prepared tokens are kept")
    steps: int = flag(200, "optimizer steps of the whole run")
    global_batch: int = flag(24, "samples per step, on however many ranks")
    micro_batch: int = flag(2, "samples per forward and backward")
    lr: float | None = flag(None, "highest learning rate; default: the preset's")
    warmup: int = flag(20, "steps of linear warm-up")
    weight_decay: float = flag(0.1, "of matrices")
    clip: float = flag(1.0, "greatest norm of the gradient")
    seed: int = flag(0, "of data order, initial weights and dropout")
    eval_every: int = flag(25, "steps between validations; 0: never")
    eval_windows: int = flag(64, "validation samples, the same each time")
    print_every: int = flag(10, "steps between lines of progress")
    num_workers: int = flag(0, "processes that load data, per rank")
    snapshot_every_s: float | None = flag(
        None, "seconds between snapshots; default: from what one costs"
    )
    snapshot_every_steps: int | None = flag(None, "or steps between them")
    keep_snapshots: int = flag(3, "how many to keep")
    reduce: str = flag("fast", "how gradients are summed over ranks")

    @property
    def shape(self) -> Shape:
        preset = SIZES[self.size]
        return Shape(
            self.layers or preset.layers,
            self.dim or preset.dim,
            self.heads or preset.heads,
            tied=self.tied,
        )


def parse(argv: Sequence[str] | None = None) -> Flags:
    """Flags from a command line (default: this process's)."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    hints = get_type_hints(Flags)
    for f in fields(Flags):
        hint = hints[f.name]
        how: dict[str, Any] = {"default": f.default, **f.metadata}
        if hint is bool:
            how["action"] = argparse.BooleanOptionalAction
        elif get_origin(hint) is Literal:
            how["choices"] = get_args(hint)
        elif get_origin(hint) is tuple:
            how["nargs"] = "+"
        else:
            how["type"] = next(t for t in get_args(hint) or (hint,) if t is not type(None))
        parser.add_argument("--" + f.name.replace("_", "-"), **how)
    values = vars(parser.parse_args(argv))
    return Flags(**{**values, "data": tuple(values["data"])})


def schedule(step: int, warmup: int, total: int, lowest: float = 0.1) -> float:
    """Factor of the learning rate after `step` updates: linear warm-up, then a cosine down to
    `lowest`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return lowest + (1 - lowest) * 0.5 * (1 + math.cos(math.pi * progress))


def cross_entropy(logits: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """In nats per token; logits (B, T, vocab), y (B, T) int64."""
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction=reduction)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """x, y (B, T) int64."""
    return cross_entropy(model(x), y, reduction)


@torch.no_grad()
def validate(model: nn.Module, windows: Windows, run: harness.Session, flags: Flags) -> float:
    """Mean loss over `eval_windows` windows spread over the held-out text, shared out over the
    ranks.

    Every rank does the same number of forwards (a sharded model's forward needs all of them); what
    is too much does not count.
    """
    count = min(flags.eval_windows, len(windows))
    chosen = [i * len(windows) // count for i in range(count)]
    batches = [chosen[i : i + flags.micro_batch] for i in range(0, count, flags.micro_batch)]
    total, tokens = torch.zeros((), dtype=torch.float64, device=run.device), 0
    model.eval()
    for first in range(0, len(batches), run.replicas):
        mine = first + run.replica
        x, y = (
            torch.stack(t).to(run.device)
            for t in zip(*(windows[i] for i in batches[min(mine, len(batches) - 1)]), strict=True)
        )
        loss = loss_of(model, x, y, reduction="sum")
        if mine < len(batches):
            total += loss
            tokens += y.numel()
    model.train()
    for module in model.modules():
        # FSDP2 gathers weights in a forward and keeps them for a backward that is not coming
        if hasattr(module, "reshard"):
            module.reshard()
    return run.sum(total) / run.sum(tokens)


def build(flags: Flags, run: harness.Session) -> tuple[nn.Module, int, float]:
    """The model as this rank trains it, its parameters, and FLOPs of a token."""
    ranks = ranks_of(run)
    shards, tp, pp = (ranks.get(name, 1) for name in ("dp_shard", "tp", "pp"))
    # over ranks of the mesh, or without one over all
    sharded = shards * tp > 1 or ("dp_shard" not in ranks and flags.parallel == "fsdp2")
    untied = {} if flags.tied else {"tied": False}
    shape = harness.model_shape(flags.model, **untied) if flags.model else None
    check(ranks, shape, flags.eval_every, flags.compile)
    if shape is None:
        model: nn.Module = GPT(flags.shape, flags.seq, flags.dropout, flags.checkpointing)
    else:
        if flags.dropout:
            raise harness.BadInput("--dropout: wanted none with --model, found some")
        with torch.device("meta" if sharded or pp > 1 else "cpu"):
            model = Transformer(shape, flags.seq, flags.checkpointing)
    parameters, flops = model.parameter_count(), model.flops_per_token(flags.seq)
    if flags.float8:
        harness.float8(model.blocks, flags.float8)
    if shape is not None:
        harness.tensor_parallel(model, run, PLAN)
        experts = [block.mlp.experts for block in model.blocks if shape.experts]
        harness.expert_parallel(model, run, experts)
    if flags.compile:
        for block in model.blocks:
            # in place: names in snapshots stay, so compiled and not compiled runs can resume each
            # other
            block.compile()
    if half := {"bf16": torch.bfloat16, "fp16": torch.float16}.get(flags.dtype):
        model.forward = torch.autocast(run.device.type, half)(model.forward)
    if pp > 1:
        model = harness.pipeline(model, run, cross_entropy, everywhere=["rotary"])
    if sharded:
        harness.fsdp2(model, run)
    if "/" in flags.model:
        harness.load_pretrained(model, flags.model, run)
    return model.to(run.device), parameters, flops


def main(argv: Sequence[str] | None = None) -> None:
    flags = parse(argv)
    run = harness.attach(
        seed=flags.seed,
        snapshot_every_s=flags.snapshot_every_s,
        snapshot_every_steps=flags.snapshot_every_steps,
        keep_snapshots=flags.keep_snapshots,
        reduce=flags.reduce,
        mesh=flags.mesh or None,
    )
    train, held_out = split(prepare(flags.data, Path(flags.cache).expanduser()), flags.seq)
    model, parameters, flops = build(flags, run)
    lr = flags.lr or (3e-4 if flags.model else LEARNING_RATES[flags.size])
    fused = run.device.type == "cuda"
    optimizer = torch.optim.AdamW(
        decay_groups(model, flags.weight_decay), lr=lr, betas=(0.9, 0.95), fused=fused
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: schedule(step, flags.warmup, flags.steps)
    )
    scaler = torch.amp.GradScaler(run.device.type) if flags.dtype == "fp16" else None
    ema = Ema(model, flags.ema_decay) if flags.ema else None
    run.prepare(
        model,
        optimizer,
        scheduler,
        scaler,
        state={"ema": ema} if ema else {},
        after_update=["ema"] if ema else [],
    )
    run.print(
        f"{parameters / 1e6:.2f} M parameters, {len(train)} samples of {flags.seq} bytes, "
        f"{run.world} ranks on {run.device.type}, "
        f"{flags.global_batch * flags.seq} tokens a step"
    )

    staged = ranks_of(run).get("pp", 1) > 1
    sizes = {
        "total": flags.steps,
        "global_batch": flags.global_batch,
        "micro_batch": flags.micro_batch,
        "tokens_per_sample": flags.seq,
        "flops_per_sample": flops * flags.seq,
    }
    for step in run.steps(train, **sizes, num_workers=flags.num_workers):
        if staged:
            step.pipeline()
        else:
            for x, y in step:
                step.backward(loss_of(model, x, y))
        step.update(clip_norm=flags.clip)
        if ema:
            ema.update(step.number)
        line = (
            f"step {step.number}: loss {step.loss:.4f}"
            if step.number % flags.print_every == 0
            else ""
        )
        if flags.eval_every and (step.number % flags.eval_every == 0 or step.number == flags.steps):
            metrics = {"val_loss": validate(model, held_out, run, flags)}
            if ema:
                with ema.in_place():
                    metrics["ema_val_loss"] = validate(model, held_out, run, flags)
            run.log(**metrics)
            line = f"step {step.number}: loss {step.loss:.4f} " + " ".join(
                f"{k} {v:.4f}" for k, v in metrics.items()
            )
        if line:
            run.print(line)


if __name__ == "__main__":
    main()
