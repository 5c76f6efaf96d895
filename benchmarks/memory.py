"""Peak memory of each rank while a model that was built on the meta device is made, trained, saved
and restored: how far above its share of the model. No assertions.

    python benchmarks/memory.py                       # 1 B parameters, 4 ranks, about 7 GB in all
    python benchmarks/memory.py --layers 8 --dim 512 --ranks 2

Two worlds after one another on one run: the first builds, trains and saves, the second builds,
restores and trains on. MB (1e6 bytes) of the rank that took most, above what the process had before
(torch, a process group, a tiny model that was trained). The share: this rank's part of parameters
("build", "restore"), and of gradients ("train"), and what it keeps on the host of a snapshot
("save"). The block: parameters of the largest that FSDP2 gathers at a time. On a GPU (CUDA) its
peak is shown beside the host's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import harness
from harness.worker.gradients.sharding import fsdp_groups
from harness.worker.step_timing import PeakMemory

MB = 1e6


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.heads = dim // 64
        self.before, self.between = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, False), nn.Linear(dim, dim, False)
        self.up, self.down = nn.Linear(dim, 4 * dim, False), nn.Linear(4 * dim, dim, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Decoder(nn.Module):
    def __init__(self, layers: int, dim: int, words: int):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, dim), nn.Linear(dim, words, False)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


class Words(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, seq: int, words: int):
        self.seq, self.words = seq, words

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.arange(self.seq) * (i + 1) % self.words


def init(name: str, tensor: torch.Tensor) -> None:
    """Quick, since a billion draws take a processor minutes; as large as any."""
    tensor.fill_(1.0 if ".be" in name else 0.01)


def worker(flags: argparse.Namespace) -> None:
    run = harness.attach(seed=1, snapshot_every_steps=10**9)  # the last step's only
    peak = PeakMemory(run.device)
    tiny = Decoder(1, 64, 64).to(run.device, torch.bfloat16)
    harness.fsdp2(tiny, run)
    tiny(torch.zeros(1, 8, dtype=torch.int64, device=run.device)).backward()
    del tiny
    before, told = peak.now(), []

    def phase(name: str, share: float) -> None:
        host, gpu = peak.taken()
        own = {"phase": name, "share": share, "host": host - before, "gpu": gpu}
        told.append(own)
        peak.reset()

    peak.reset()
    with torch.device("meta"):
        model = Decoder(flags.layers, flags.dim, flags.words).to(torch.bfloat16)
    blocks = [*model.blocks, model.embed, model.head]
    harness.fsdp2(model, run, blocks, init=init)
    share = sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[operator]
    groups = [
        sum(h.sharded_param.numel() * h.sharded_param.element_size() for h in g.fsdp_params)
        for g in fsdp_groups(model)
    ]
    phase("build", share)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    data: Any = Words(flags.seq, flags.words)
    begun = False
    for step in run.steps(data, total=flags.total, global_batch=run.world, micro_batch=1):
        if not begun and step.number > 1:
            phase("restore", share)
        begun = True
        for tokens in step:
            step.backward(model(tokens))
        step.update()
        phase("train", 2 * share)
    phase("save", 2 * share)  # the update has let gradients go
    numel = sum(p.numel() for p in model.parameters())
    every = run._peers.gather(told)
    if run.rank == 0:
        said = {"parameters": numel, "block": max(groups), "ranks": every}
        Path(flags.out).write_text(json.dumps(said))


def measured(flags: argparse.Namespace, run: str, total: int) -> dict[str, Any]:
    """One world."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = Path(run).parent / f"{total}.json"
    argv = [sys.executable, __file__, "--total", str(total), "--out", str(out)]
    for name in ("layers", "dim", "words", "seq"):
        argv += [f"--{name}", str(getattr(flags, name))]
    usual = {"HARNESS_RUN": run, "WORLD_SIZE": str(flags.ranks), "OMP_NUM_THREADS": "1"}
    usual |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HARNESS_ON_CHANGE": "accept"}
    # glibc gives freed blocks back; else it keeps what is below 32 MB
    usual |= {"MALLOC_MMAP_THRESHOLD_": "131072"}
    ranks = []
    for rank in range(flags.ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(argv, env=os.environ | usual | own))
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        time.sleep(0.05)
    if any(codes):
        for rank in ranks:  # which wait for the one that has failed
            rank.kill()
        raise SystemExit(f"ranks failed: {codes}")
    said: dict[str, Any] = json.loads(out.read_text())
    return said


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--layers", type=int, default=80)
    p.add_argument("--dim", type=int, default=1024)
    p.add_argument("--words", type=int, default=8192)
    p.add_argument("--seq", type=int, default=8)
    p.add_argument("--ranks", type=int, default=4)
    p.add_argument("--json", action="store_true", help="the table as JSON")
    p.add_argument("--total", type=int, default=0, help=argparse.SUPPRESS)
    p.add_argument("--out", default="", help=argparse.SUPPRESS)
    flags = p.parse_args()
    if flags.out:
        worker(flags)
        return
    with tempfile.TemporaryDirectory() as folder:
        worlds = [measured(flags, f"{folder}/run", total) for total in (1, 2)]
    block, rows = worlds[0]["block"], []
    for world in worlds:
        for phases in zip(*world["ranks"], strict=True):
            most = max(phases, key=lambda each: each["host"])
            rows.append({**most, "allowed": 1.1 * most["share"] + block})
    if flags.json:
        print(json.dumps({"block": block, "rows": rows}))
        return
    print(f"{worlds[0]['parameters'] / 1e9:.3f} B parameters, {flags.ranks} ranks, ", end="")
    print(f"a block of {block / MB:.0f} MB")
    print(f"{'':8} {'share':>7} {'peak':>7} {'share + 10 % + block':>22} {'GPU':>7}")
    for row in rows:
        sizes = (row["share"], row["host"], row["allowed"], row["gpu"])
        share, host, allowed, gpu = (f"{size / MB:.0f}" for size in sizes)
        print(f"{row['phase']:8} {share:>7} {host:>7} {allowed:>22} {gpu:>7}")


if __name__ == "__main__":
    main()
