"""A small GPT: rotary positions, RMSNorm, SwiGLU, causal SDPA. Knows nothing of data or of
training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import harness
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Everything that the parameters depend on."""

    layers: int
    dim: int
    heads: int
    vocab: int = 256  # bytes
    tied: bool = True  # the output layer is the embedding

    def __post_init__(self) -> None:
        if (
            min(self.layers, self.dim, self.heads, self.vocab) < 1
            or self.dim % self.heads
            or self.dim // self.heads % 2
        ):
            raise ValueError(
                "dim must be a multiple of heads, and dim / heads even (rotary positions turn "
                f"pairs), found dim={self.dim} "
                f"heads={self.heads} layers={self.layers} vocab={self.vocab}; e.g. dim=128 heads=4 "
                "layers=4 vocab=256"
            )

    @property
    def hidden(self) -> int:
        """Width of the MLP: SwiGLU has three matrices, so 8/3 dim costs what 4 dim costs with
        two; whole blocks of 64."""
        return max(64, round(self.dim * 8 / 3 / 64) * 64)


SIZES = {  # by parameters, with the vocabulary of 256
    "1m": Shape(layers=5, dim=128, heads=4),
    "10m": Shape(layers=6, dim=384, heads=6),
    "124m": Shape(layers=13, dim=896, heads=14),
    "350m": Shape(layers=28, dim=1024, heads=16),
    "1b": Shape(layers=22, dim=2048, heads=16),
}


def rotary(length: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin of position times frequency, each (length, head_dim / 2), float32."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + d/2]) of (..., T, d) by their position's angle, so that q @ k
    depends on distance only."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, shape: Shape, dropout: float):
        super().__init__()
        self.heads, self.dropout = shape.heads, dropout
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        # (B, heads, T, d)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, dropout_p=dropout
        )
        return self.out(seen.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_up = nn.Linear(shape.dim, 2 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, shape: Shape, dropout: float):
        super().__init__()
        self.norm_1, self.attention = nn.RMSNorm(shape.dim), Attention(shape, dropout)
        self.norm_2, self.mlp = nn.RMSNorm(shape.dim), SwiGLU(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x), cos, sin))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    """Tokens (B, T) int64 -> logits (B, T, vocab); T may be anything up to `length`."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, shape: Shape, length: int, dropout: float = 0.0, checkpointing: bool = False
    ):
        super().__init__()
        self.shape, self.length, self.checkpointing = shape, length, checkpointing
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = None if shape.tied else nn.Linear(shape.dim, shape.vocab, bias=False)
        cos, sin = rotary(length, shape.dim // shape.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._start()

    @property
    def config(self) -> harness.ModelShape:
        """What snapshots keep of it, and an export writes: Hugging Face calls it a Llama."""
        s, eps = self.shape, torch.finfo(torch.float32).eps
        head_dim = s.dim // s.heads
        sizes = s.layers, s.dim, s.heads, s.heads, head_dim, s.hidden, s.vocab, self.length
        return harness.ModelShape("llama", *sizes, s.tied, 10_000.0, eps)

    def _start(self) -> None:
        """GPT-2's beginning: normal of 0.02; what writes into the residual stream less, the
        more layers add to it."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith("out.weight")
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.shape.layers) if last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.length:
            raise ValueError(
                f"wanted at most {self.length} tokens, found {tokens.shape[1]}; build the model "
                "with a greater length"
            )
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embed(tokens)
        for block in self.blocks:
            if self.checkpointing and self.training:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embed.weight if self.head is None else self.head.weight)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, length: int) -> float:
        """Model FLOPs of one token's forward and backward, without recomputation: 6 per weight that
        multiplies, and attention as PaLM counts it (Chowdhery et al. 2022, appendix B: 12 * layers
        * dim * length, causality not discounted)."""
        weights = self.parameter_count() - (
            self.embed.weight.numel() if self.head is not None else 0
        )
        return 6.0 * weights + 12.0 * self.shape.layers * self.shape.dim * length


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay, gains do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
