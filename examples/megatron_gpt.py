"""A GPT of Megatron-Core on spot GPUs: its tensor and pipeline parallelism, its optimizer and its
schedule; our notices, order of the data and storage.

    # worlds of whole replicas: 8 GPUs hold a copy of the model
    harness run --run s3://bucket/runs/x --replica-ranks 8 -- examples/megatron_gpt.py
    --tensor 4 --pipeline 2 --layers 24 --dim 2048 --heads 16 --dtype bf16
    python examples/megatron_gpt.py --help

The loop needs GPUs, as Megatron's training does, and was not run on any here. Its tests run it on
CPUs with stand-ins for what Megatron asks of CUDA, which says nothing of NCCL, bf16 or speed.
docs/trainers/megatron.md says what holds and what does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.adapters import megatron
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from text import Windows, prepare, split
from torch import Tensor

VOCABULARY = 256  # bytes


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--tensor", type=int, default=1, help="GPUs that share each layer")
    p.add_argument("--pipeline", type=int, default=1, help="stages of layers")
    p.add_argument("--layers", type=int, default=4, help="of all stages")
    p.add_argument("--dim", type=int, default=256, help="width of the model")
    p.add_argument("--heads", type=int, default=4, help="of attention")
    p.add_argument("--seq", type=int, default=128, help="tokens per sample")
    p.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of weights")
    p.add_argument("--data", nargs="+", default=[], help="text; default: the standard library's")
    p.add_argument("--cache", default="~/.cache/spotharness", help="where its tokens are kept")
    p.add_argument("--steps", type=int, default=200, help="optimizer steps of the whole run")
    p.add_argument("--global-batch", type=int, default=24, help="samples per step, on any world")
    p.add_argument("--micro-batch", type=int, default=2, help="samples per forward and backward")
    p.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    p.add_argument("--clip", type=float, default=1.0, help="greatest norm of the gradient")
    p.add_argument("--seed", type=int, default=0, help="of data order and initial weights")
    p.add_argument("--out", default="out", help="folder for what Megatron calls common")
    p.add_argument("--snapshot-every-s", type=float, default=600.0, help="seconds between saves")
    return p.parse_args(argv)


def build(a: argparse.Namespace, device: torch.device) -> tuple[GPTModel, Any, Any]:
    """This rank's part of the model; the same as it is trained; its optimizer."""
    bf16 = a.dtype == "bf16"
    config = TransformerConfig(
        num_layers=a.layers,
        hidden_size=a.dim,
        num_attention_heads=a.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=a.tensor,
        pipeline_model_parallel_size=a.pipeline,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_cpu_initialization=device.type == "cpu",
        calculate_per_token_loss=True,  # so shares of replicas may be uneven
        finalize_model_grads_func=finalize_model_grads,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=a.seq,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).to(device)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        Float16Module(config, gpt) if bf16 else gpt,
    )
    config.no_sync_func = model.no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=a.lr, bf16=bf16, params_dtype=config.params_dtype, clip_grad=a.clip),
        [model],
    )
    config.grad_scale_func = optimizer.scale_loss
    return gpt, model, optimizer


def sharded(gpt: GPTModel, optimizer: Any, loading: bool = False) -> dict[str, Any]:
    """The state in Megatron's terms: where each tensor lies in the whole."""
    of_model = gpt.sharded_state_dict()
    of_optimizer = optimizer.sharded_state_dict(of_model, is_loading=loading)
    return {"model": of_model, "optimizer": of_optimizer}


def forward_step(rows: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """As Megatron's schedules call it: the output, and what makes a loss of it."""
    x, y = next(rows)
    places = torch.arange(x.shape[1], device=x.device).expand_as(x)
    return model(x, places, None, labels=y), partial(loss_of, y.numel())


def loss_of(tokens: int, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the loss, tokens, and what is collected; output: loss of each token."""
    total = output.float().sum()
    count = torch.tensor(tokens, dtype=torch.int, device=output.device)
    return total, count, total.detach()


def train_step(
    model: Any, optimizer: Any, data: Windows, samples: list[list[int]], a: argparse.Namespace
) -> Tensor:
    """One update. The sum of the loss over this replica's tokens, the same on all its ranks."""
    device = next(model.parameters()).device
    rows = (
        tuple(torch.stack(t).to(device) for t in zip(*(data[i] for i in micro), strict=True))
        for micro in samples
    )
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=rows,
        model=[model],
        num_microbatches=len(samples),
        seq_length=a.seq,
        micro_batch_size=a.micro_batch,
        forward_only=False,
    )
    optimizer.step()
    loss = torch.stack(losses).sum() if losses else torch.zeros((), device=device)
    dist.broadcast(  # only the last stage has seen it
        loss,
        parallel_state.get_pipeline_model_parallel_last_rank(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    return loss


def main(argv: Sequence[str] | None = None) -> None:
    a = parse(argv)
    run = harness.attach(
        replica_ranks=a.tensor * a.pipeline, seed=a.seed, snapshot_every_s=a.snapshot_every_s
    )
    if not run.run_url or not dist.is_initialized():
        raise harness.BadInput("wanted a run and its ranks, found none; start it by harness run")
    # a replica's ranks beside each other, as the harness counts them
    parallel_state.initialize_model_parallel(a.tensor, a.pipeline, order="tp-cp-ep-pp-dp")
    torch.manual_seed(a.seed)
    if run.device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(a.seed)
    data, _ = split(prepare(a.data, Path(a.cache).expanduser()), a.seq)
    gpt, model, optimizer = build(a, run.device)
    begin, url = run.files.restore(a.out), f"{run.run_url}/megatron"
    if begin:
        state = dist_checkpointing.load(
            sharded(gpt, optimizer, loading=True),
            a.out,
            sharded_strategy=megatron.LoadSharded(url, begin),
        )
        gpt.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    Path(a.out).mkdir(exist_ok=True)
    for step in range(begin + 1, a.steps + 1):
        mine = megatron.own_samples(len(data), a.global_batch, a.micro_batch, step, a.seed)
        loss = train_step(model, optimizer, data, mine, a)
        run.print(f"step {step}: loss {run.sum(loss) / (a.global_batch * a.seq):.4f}")
        leaving = run.files.leaving()
        if leaving or run.files.due or step == a.steps:
            dist_checkpointing.save(
                sharded(gpt, optimizer), a.out, sharded_strategy=megatron.SaveSharded(url, step)
            )
            run.files.save(a.out, step)
        if leaving:
            run.files.leave()


if __name__ == "__main__":
    main()
