"""Language models in the families that Hugging Face calls llama, qwen2, qwen3, gpt2 and mixtral,
as plain modules. Knows nothing of data or of training; `gpt.py` is the smallest of this kind.

    model = Transformer(harness.model_shape("llama-tiny"), length=128)

They may be built on the meta device: each module's `reset_parameters()` gives its values. Their
tensors are named so that `harness snapshots export` and `harness.load_pretrained` know them.
"""

from __future__ import annotations

import math

import harness
import torch
from gpt import rotate
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

STD = 0.02  # of fresh weights, as GPT-2 has it

# For harness.tensor_parallel: what becomes of modules over the ranks of tp. Not of experts.
PLAN = {
    "embed": "embedding",
    "positions": "embedding",
    "*attention": "gathered",
    "*attention.[qkv]": "columns",
    "*attention.[qk]_norm": "heads",
    "*attention.out": "rows",
    "*mlp": "gathered",
    "*mlp.gate": "columns",
    "*mlp.up": "columns",
    "*mlp.out": "rows",
    "*norm*": "norm",
    "head": "head",
}


class Linear(nn.Linear):
    """`fan`: layers that add to the residual stream, if this one does: it begins smaller."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False, fan: int = 0):
        self.std = STD / math.sqrt(2 * fan) if fan else STD
        super().__init__(inputs, outputs, bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=STD)


def norm(shape: harness.ModelShape, dim: int = 0) -> nn.Module:
    kind = nn.LayerNorm if shape.family == "gpt2" else nn.RMSNorm
    return kind(dim or shape.dim, eps=shape.norm_eps)


class Rotary(nn.Module):
    """cos and sin of position times frequency, each (length, head_dim / 2), float32."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: harness.ModelShape, length: int):
        super().__init__()
        self.shape, self.length = shape, length
        for name in ("cos", "sin"):
            empty = torch.empty(length, shape.head_dim // 2)
            self.register_buffer(name, empty, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.cos.is_meta:
            return
        d = self.shape.head_dim
        device = self.cos.device
        powers = torch.arange(0, d, 2, dtype=torch.float32, device=device) / d
        frequencies = self._stretched(self.shape.rope_theta**-powers)
        angles = torch.outer(torch.arange(self.length, dtype=torch.float32).to(device), frequencies)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def _stretched(self, frequencies: Tensor) -> Tensor:
        """Llama 3.1's way to longer texts: slow waves are slowed by `factor`, fast ones stay, and
        those between are mixed."""
        rope = dict(self.shape.rope)
        if not rope:
            return frequencies
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        stays = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (stays + (1 - stays) / rope["factor"])


class Attention(nn.Module):
    def __init__(self, shape: harness.ModelShape):
        super().__init__()
        self.head_dim, gpt2 = shape.head_dim, shape.family == "gpt2"
        bias, d = gpt2 or shape.family == "qwen2", shape.head_dim
        self.q = Linear(shape.dim, shape.heads * d, bias)
        self.k = Linear(shape.dim, shape.kv_heads * d, bias)
        self.v = Linear(shape.dim, shape.kv_heads * d, bias)
        self.out = Linear(shape.heads * d, shape.dim, gpt2, fan=shape.layers)
        self.q_norm = norm(shape, d) if shape.family == "qwen3" else None
        self.k_norm = norm(shape, d) if shape.family == "qwen3" else None

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """(B, T, dim) -> (B, T, dim). Of a rank that shares the product with others (tp) the heads
        are its own."""
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )  # (B, heads, T, d)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = q.shape[1] != k.shape[1]
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(seen.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU; GPT-2's has no gate, and biases."""

    def __init__(self, shape: harness.ModelShape):
        super().__init__()
        gpt2 = shape.family == "gpt2"
        self.gate = None if gpt2 else Linear(shape.dim, shape.hidden)
        self.up = Linear(shape.dim, shape.hidden, gpt2)
        self.out = Linear(shape.hidden, shape.dim, gpt2, fan=shape.layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.out(F.gelu(self.up(x), approximate="tanh"))
        return self.out(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """SwiGLU, once for each expert: all in three parameters, whose first dimension is theirs."""

    def __init__(self, shape: harness.ModelShape):
        super().__init__()
        self.layers = shape.layers
        e, f, d = shape.experts, shape.hidden, shape.dim
        self.gate, self.up = (nn.Parameter(torch.empty(e, f, d)) for _ in "gu")
        self.out = nn.Parameter(torch.empty(e, d, f))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate, std=STD)
        nn.init.normal_(self.up, std=STD)
        nn.init.normal_(self.out, std=STD / math.sqrt(2 * self.layers))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """(n, dim) -> (n, dim). `rows` in the order of their experts; `counts` (experts,): how many
        each has."""
        weights = zip(self.gate, self.up, self.out, strict=True)
        return torch.cat(
            [
                F.linear(F.silu(F.linear(mine, gate)) * F.linear(mine, up), out)
                for mine, (gate, up, out) in zip(rows.split(counts.tolist()), weights, strict=True)
            ]
        )


class Mixture(nn.Module):
    """Each token goes through those of the experts that the router likes best, and takes them in by
    how much (Mixtral)."""

    def __init__(self, shape: harness.ModelShape):
        super().__init__()
        self.each = shape.experts_per_token
        self.router, self.experts = Linear(shape.dim, shape.experts), Experts(shape)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        likes, chosen = logits.float().softmax(-1).topk(self.each)  # (n, each)
        likes = (likes / likes.sum(-1, keepdim=True)).type_as(x)
        counts = torch.bincount(chosen.flatten(), minlength=logits.shape[1])
        order = chosen.flatten().argsort(stable=True)  # by expert, then as tokens come
        rows = tokens.repeat_interleave(self.each, dim=0)[order]
        back = self.experts(rows, counts)[order.argsort()].unflatten(0, chosen.shape)
        return (back * likes.unsqueeze(-1)).sum(1).view_as(x)


class Block(nn.Module):
    def __init__(self, shape: harness.ModelShape):
        super().__init__()
        self.norm_1, self.attention = norm(shape), Attention(shape)
        self.norm_2 = norm(shape)
        self.mlp = Mixture(shape) if shape.experts else Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm_1(x), cos, sin)
        return x + self.mlp(self.norm_2(x))


def product(x: Tensor, weight: Tensor) -> Tensor:
    """(B, T, dim) times (vocab, dim) -> (B, T, vocab), whole, also where tp splits x by positions
    and the weight by words."""
    if not isinstance(weight, DTensor):
        return F.linear(x, weight)
    return F.linear(x.redistribute(placements=[Replicate()]), weight).full_tensor()


class Transformer(nn.Module):
    """Tokens (B, T) int64 -> logits (B, T, vocab); T may be anything up to `length`, by default
    what the shape says. `config` is what snapshots keep of it, and an export writes.

    A stage of `harness.pipeline` has None where modules are another's; it is given and gives
    (B, T, dim) between them. `rotary` has to be everywhere."""

    def __init__(
        self, shape: harness.ModelShape, length: int = 0, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.config, self.checkpointing = shape, checkpointing
        self.length = length or shape.length
        self.embed = Embedding(shape.vocab, shape.dim)
        gpt2 = shape.family == "gpt2"
        self.positions = Embedding(shape.length, shape.dim) if gpt2 else None
        self.rotary = None if gpt2 else Rotary(shape, self.length)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = norm(shape)
        self.head = None if shape.tied else Linear(shape.dim, shape.vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.length:
            raise ValueError(
                f"wanted at most {self.length} tokens, found {length}; build the model with a "
                "greater length"
            )
        x, angles = tokens if self.embed is None else self.embed(tokens), (None, None)
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=x.device)[None])
        if self.rotary is not None:
            angles = self.rotary.cos[:length], self.rotary.sin[:length]
        for block in self.blocks:
            if self.checkpointing and self.training:
                x = checkpoint(block, x, *angles, use_reentrant=False)
            else:
                x = block(x, *angles)
        x = x if self.norm is None else self.norm(x)
        if self.config.tied:
            return product(x, self.embed.weight)
        return x if self.head is None else self.head(x)

    def parameter_count(self) -> int:
        return self.config.parameters

    def flops_per_token(self, length: int) -> float:
        return self.config.flops_per_token(length)
