"""A mixture of experts for the blocks of `gpt.py`: top-k routing that drops no token, balanced
without an auxiliary loss. Knows nothing of data, of training, or of harness.

    model = with_experts(GPT(SIZES["10m"], length=128), Mixture(experts=8))
    experts = [block.mlp.experts for block in model.blocks]    # for harness.expert_parallel

Needs torch 2.10 or newer (`grouped_mm`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from gpt import GPT
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Mixture:
    """`experts` in each layer, of which each token is given `top_k`; `hidden`: width of each, as
    the model's a multiple of 8. `gates`: what a router's logits become. `speed`: of balancing, in
    the unit of gates; 0: none."""

    experts: int = 8
    top_k: int = 2
    hidden: int = 256
    gates: Literal["sigmoid", "softmax"] = "sigmoid"
    speed: float = 1e-3

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts or self.hidden < 1 or self.hidden % 8:
            raise ValueError(
                "wanted top_k from 1 to the number of experts, and hidden a multiple of 8 (rows of "
                f"16 bytes), found {self}; e.g. experts=8 top_k=2 hidden=256"
            )


class Experts(nn.Module):
    """SwiGLU, once for each expert: all in three parameters, whose first dimension is theirs."""

    def __init__(self, dim: int, mixture: Mixture):
        super().__init__()
        up, down = (mixture.experts, mixture.hidden, dim), (mixture.experts, dim, mixture.hidden)
        self.gate, self.up = nn.Parameter(torch.empty(up)), nn.Parameter(torch.empty(up))
        self.out = nn.Parameter(torch.empty(down))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for p in self.parameters():
            nn.init.normal_(p, std=p.shape[2] ** -0.5)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """(n, dim) -> (n, dim). `rows` in the order of their experts; `counts` (experts,): how many
        each has."""
        ends = counts.cumsum(0).int()
        gate, up = (
            F.grouped_mm(rows, weight.transpose(1, 2), offs=ends) for weight in (self.gate, self.up)
        )
        return F.grouped_mm(F.silu(gate) * up, self.out.transpose(1, 2), offs=ends)


class Router(nn.Module):
    """Chooses experts by gate plus bias, and weighs them by the gate alone. The bias of an expert
    that was given too much falls after each step, that of one with too little rises (Wang et al.
    2024, "Auxiliary-loss-free load balancing strategy for mixture-of-experts")."""

    expert_bias: Tensor
    expert_load: Tensor

    def __init__(self, dim: int, mixture: Mixture):
        super().__init__()
        self.mixture = mixture
        self.weight = nn.Parameter(torch.empty(mixture.experts, dim))
        self.register_buffer("expert_bias", torch.zeros(mixture.experts))
        load = torch.zeros(mixture.experts, dtype=torch.int64)  # tokens since it was last balanced
        self.register_buffer("expert_load", load, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        self.expert_bias.zero_()
        self.expert_load.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (n, dim) -> which experts (n, top_k), their gates (n, top_k) float32, and how many
        tokens each was given (experts,)."""
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
        sigmoid = self.mixture.gates == "sigmoid"
        gates = logits.sigmoid() if sigmoid else logits.softmax(-1)
        which = (gates.detach() + self.expert_bias).topk(self.mixture.top_k).indices
        counts = torch.bincount(which.flatten(), minlength=self.mixture.experts)
        if self.training:
            self.expert_load += counts
        chosen = gates.gather(1, which)
        return which, chosen / chosen.sum(1, keepdim=True) if sigmoid else chosen, counts

    @torch.no_grad()
    def rebalance(self, load: Tensor) -> None:
        """Once per step. `load` (experts,): the tokens that each was given in it, on all ranks
        together. A script without harness gives `self.expert_load`, and zeroes that."""
        load = load.float()
        self.expert_bias += self.mixture.speed * (load.mean() - load).sign()


class MoE(nn.Module):
    def __init__(self, dim: int, mixture: Mixture):
        super().__init__()
        self.router, self.experts = Router(dim, mixture), Experts(dim, mixture)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        tokens = x.flatten(0, -2)
        which, gates, counts = self.router(tokens)
        order = which.flatten().argsort(stable=True)  # by expert, then as tokens come
        # copies first, and then a permutation, whose gradient adds nothing up: on a GPU sums of
        # rows that are chosen twice come in any order
        copies = tokens.repeat_interleave(which.shape[1], dim=0)
        rows = self.experts(copies.index_select(0, order), counts)
        back = rows.index_select(0, order.argsort()) * gates.type_as(rows).view(-1, 1)
        return back.view(*x.shape[:-1], which.shape[1], -1).sum(-2)


def with_experts(model: GPT, mixture: Mixture) -> GPT:
    """The same model with a mixture in the place of each block's MLP."""
    for block in model.blocks:
        moe = block.mlp = MoE(model.shape.dim, mixture)
        with torch.no_grad():  # what writes into the residual stream, as in `GPT`
            moe.experts.out /= math.sqrt(2 * model.shape.layers)
    return model
