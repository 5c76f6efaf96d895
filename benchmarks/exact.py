"""What exact sums cost beside fast ones: seconds per step, interleaved, on this machine's CPU or
GPUs. No assertions.

    python benchmarks/exact.py --ranks 1 --micro-batch 8 --parallel ddp
    python benchmarks/exact.py --ranks 2 --parallel fsdp2 --rounds 15

One step: `--micros` forwards and backwards of the examples' GPT per rank, the exchange, division,
norm, clipping and AdamW. Every round does one step in each way, in an order that rotates; the
medians and their ratios to "fast" are over rounds. Bytes are what a rank hands to the collectives
per step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from gpt import GPT, SIZES

from harness.worker.gradients.exact_sums import exact_strategy_for
from harness.worker.gradients.parallel import strategy_for
from harness.worker.gradients.sharding import shard

# plain: DistributedDataParallel or FSDP2 as torch ships them
WAYS = ("fast", "exact", "exact32", "plain")


class Way:
    """A model, its strategy and its optimizer."""

    def __init__(self, reduce: str, flags: argparse.Namespace, device: torch.device):
        torch.manual_seed(0)
        model: Any = GPT(SIZES[flags.size], flags.seq, 0.0, False).to(device)
        self.parameters = sum(p.numel() for p in model.parameters())
        if flags.parallel == "fsdp2":
            model = shard(model, device)
        self.model, self.flags, self.device = model, flags, device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda")
        self.strategy: Any = (
            strategy_for(model) if reduce == "fast" else exact_strategy_for(model, reduce)
        )
        self.strategy.start(flags.micros * flags.ranks)
        self.strategy.zero()

    def step(self, tokens: torch.Tensor) -> dict[str, float]:
        """Seconds: of forwards and backwards (with what overlaps them), and of what follows."""
        times = {}
        t = time.perf_counter()
        while True:
            for i, x in enumerate(tokens):
                self.strategy.micro(last=i == len(tokens) - 1)
                logits = self.model(x[:, :-1])
                (
                    torch.nn.functional.cross_entropy(
                        logits.float().flatten(0, 1), x[:, 1:].flatten()
                    )
                    * len(x)
                ).backward()
                self.strategy.micro_done()
            if not self.strategy.again():
                break
        self.strategy.reduce()
        times["micros"] = self._lap(t)
        t = time.perf_counter()
        self.strategy.divide(float(tokens.shape[1] * len(tokens) * self.flags.ranks))
        times["divide"] = self._lap(t)
        t = time.perf_counter()
        norm = self.strategy.norm()
        times["norm"] = self._lap(t)
        t = time.perf_counter()
        self.strategy.clip((1.0 / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        self.strategy.zero()
        times["update"] = self._lap(t)
        return times | {"step": sum(times.values())}

    def _lap(self, t: float) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - t


class Plain(Way):
    """The same step as people write it without us: torch's own exchange, mean over ranks,
    clip_grad_norm_."""

    def __init__(self, flags: argparse.Namespace, device: torch.device):
        super().__init__("fast", argparse.Namespace(**{**vars(flags), "parallel": "ddp"}), device)
        self.flags = flags
        torch.manual_seed(0)
        model: Any = GPT(SIZES[flags.size], flags.seq, 0.0, False).to(device)
        if flags.parallel == "fsdp2":
            self.model = shard(model, device)
        else:
            self.model = DistributedDataParallel(
                model, broadcast_buffers=False, gradient_as_bucket_view=True
            )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, fused=device.type == "cuda"
        )

    def step(self, tokens: torch.Tensor) -> dict[str, float]:
        times = {}
        t = time.perf_counter()
        for i, x in enumerate(tokens):
            last = i == len(tokens) - 1
            if self.flags.parallel == "fsdp2":
                self.model.set_requires_gradient_sync(last)
            with (
                contextlib.nullcontext()
                if last or self.flags.parallel == "fsdp2"
                else self.model.no_sync()
            ):
                logits = self.model(x[:, :-1])
                (
                    torch.nn.functional.cross_entropy(
                        logits.float().flatten(0, 1), x[:, 1:].flatten()
                    )
                    / len(tokens)
                ).backward()
        times["micros"] = self._lap(t)
        times["divide"] = 0.0
        t = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        times["norm"] = self._lap(t)
        t = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        times["update"] = self._lap(t)
        return times | {"step": sum(times.values())}


def rank_main(rank: int, flags: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(flags.threads)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=flags.ranks
    )
    ways = {
        name: Plain(flags, device) if name == "plain" else Way(name, flags, device) for name in WAYS
    }
    g = torch.Generator().manual_seed(rank)
    shape = (flags.micros, flags.micro_batch, flags.seq + 1)
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in WAYS}
    for k in range(flags.rounds + 2):
        tokens = torch.randint(256, shape, generator=g).to(device)
        for name in WAYS[k % len(WAYS) :] + WAYS[: k % len(WAYS)]:
            dist.barrier()
            for part, s in ways[name].step(tokens).items():
                if k >= 2:  # the first may be done twice, the second is warm
                    seconds[name].setdefault(part, []).append(s)
    if rank == 0:
        n = ways["fast"].parameters
        each = (
            f"{flags.ranks} ranks x {flags.micros} micro-batches of {flags.micro_batch} x "
            f"{flags.seq}"
        )
        print(
            f"{n / 1e6:.2f} M parameters, {flags.parallel}, {each}, {flags.rounds} rounds, torch "
            f"{torch.__version__}"
        )
        base = {part: statistics.median(s) for part, s in seconds["fast"].items()}
        print(
            f"{'':8} {'MB/step':>8} "
            + " ".join(f"{part + ' ms':>10}" for part in base)
            + "   step / fast"
        )
        for name in WAYS:
            middle = {part: statistics.median(s) for part, s in seconds[name].items()}
            ratio = statistics.median(
                a / b for a, b in zip(seconds[name]["step"], seconds["fast"]["step"], strict=True)
            )
            wire = n * (8 if name == "exact" else 4) / 1e6 if flags.ranks > 1 else 0.0
            print(
                f"{name:8} {wire:8.1f} "
                + " ".join(f"{1e3 * s:10.2f}" for s in middle.values())
                + f"   {ratio:.3f}"
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--size", default="1m", choices=sorted(SIZES))
    p.add_argument("--parallel", default="ddp", choices=["ddp", "fsdp2"])
    p.add_argument("--ranks", type=int, default=1)
    p.add_argument("--micros", type=int, default=4, help="micro-batches per rank")
    p.add_argument("--micro-batch", type=int, default=4, help="samples in each")
    p.add_argument("--seq", type=int, default=128)
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--threads", type=int, default=1)
    flags = p.parse_args()
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(rank_main, (flags, port), flags.ranks)
