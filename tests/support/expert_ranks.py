"""A layer of experts shared out over four real ranks, beside the same layer whole on each. Forks
its ranks: torch is imported once. Prints a line of JSON, a list over ranks."""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from harness.meshes.expert_parallel import give_out
from support.reshard import fork, import_all

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from moe import Mixture, MoE

WORLD, DIM = 4, 8
MIXTURE = Mixture(experts=8, top_k=2, hidden=16)


class Seen(nn.Module):
    """Experts that note what they are given, and scale it by a number of their own."""

    def __init__(self, experts):
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, experts + 1).view(-1, 1))
        self.given = []

    def forward(self, rows, counts):
        self.given.append((rows.detach().tolist(), counts.tolist()))
        return rows * self.scale.repeat_interleave(counts, 0)


def moe(rank, mesh, again, dtype=torch.float32):
    """How far outputs and gradients are from those of the whole layer that all ranks' tokens went
    through."""
    torch.manual_seed(0)
    whole = MoE(DIM, MIXTURE).to(dtype)
    torch.manual_seed(0)
    mine = MoE(DIM, MIXTURE).to(dtype)
    give_out(mine.experts, mesh)
    xs = [torch.randn(2, 3 + r, DIM, dtype=dtype) for r in range(WORLD)]  # not equally many
    expected = [whole(x) for x in xs]
    torch.stack([(y.float() ** 2).sum() for y in expected]).sum().backward()
    x = xs[rank].requires_grad_()
    got = checkpoint(mine, x, use_reentrant=False) if again else mine(x)
    (got.float() ** 2).sum().backward()
    far = [float((got - expected[rank]).detach().abs().max())]
    own = MIXTURE.experts // WORLD
    for p, q in zip(mine.experts.parameters(), whole.experts.parameters(), strict=True):
        part = q.grad[rank * own : (rank + 1) * own]
        far.append(float((p.grad.to_local() - part).abs().max() / part.abs().max()))
    router = mine.router.weight.grad.float()
    dist.all_reduce(router)
    far.append(float((router - whole.router.weight.grad.float()).abs().max() / router.abs().max()))
    return max(far)


def order(rank, mesh):
    """Who sends what: expert e of eight is given e % 3 rows by rank 0, one by rank 1, none by rank
    2, and rank 3 has rows for expert 5 only. A row says whose it is: rank, expert, position."""
    counts = [[e % 3 for e in range(8)], [1] * 8, [0] * 8, [0] * 5 + [3, 0, 0]][rank]
    rows = [[float(rank), float(e), float(i)] for e, n in enumerate(counts) for i in range(n)]
    layer = Seen(8)
    give_out(layer, mesh)
    x = torch.tensor(rows).view(-1, 3).requires_grad_()
    out = layer(x, torch.tensor(counts))
    out.sum().backward()
    return {
        "given": layer.given,
        "sent": rows,
        "back": out.tolist(),
        "grad": x.grad.tolist(),
        "scale": layer.scale.grad.to_local().tolist(),
    }


def main():
    mesh, rank = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",)), dist.get_rank()
    mine = {
        "far": moe(rank, mesh, again=False),
        "far, computed again": moe(rank, mesh, again=True),
        "far, bf16": moe(rank, mesh, again=False, dtype=torch.bfloat16),
        "order": order(rank, mesh),
    }
    every = [None] * WORLD
    dist.all_gather_object(every, mine)
    if rank == 0:
        print(json.dumps(every), flush=True)


if __name__ == "__main__":
    import_all()
    with tempfile.TemporaryDirectory() as folder:
        fork(WORLD, f"{folder}/meet", main)
