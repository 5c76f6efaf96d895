"""The shapes of language models, which determine their parameters: by name (`models.csv`) or from a
Hugging Face config.json.

Pure. It knows nothing of torch: `examples/models.py` builds the models described here, `harness
plan` counts their parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from harness.core import hardware
from harness.core.world import BadInput

FAMILIES = ("llama", "qwen2", "qwen3", "gpt2", "mixtral")
MOST = 1 << 31  # upper bound of every size
_AT_LEAST_ONE = ("layers", "dim", "heads", "kv_heads", "head_dim", "hidden", "vocab", "length")
ROPE_KINDS = ("default", "llama3")
# Fields of a config.json that change the model -> the values supported here; they may be missing.
AS_BUILT: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "activation_function": ("gelu_new",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "router_jitter_noise": (0.0,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
}


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model. `family`: one of Hugging Face's model types. `kv_heads`: heads of keys
    and values; each serves heads / kv_heads query heads. `hidden`: width of the MLP, or of each
    expert. `length`: most tokens of a sample. `rope`: scaling of rotary frequencies for long texts,
    (name, value) pairs of Hugging Face's `rope_scaling`; (): none. Raises BadInput for impossible
    sizes."""

    family: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    length: int
    tied: bool = False  # the output layer is the embedding
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    experts: int = 0  # 0: one MLP for all tokens
    experts_per_token: int = 0
    rope: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise BadInput(f"wanted a model of {', '.join(FAMILIES)}, found {self.family!r}")
        sizes = {name: getattr(self, name) for name in _AT_LEAST_ONE}
        if wrong := {name: size for name, size in sizes.items() if not 1 <= size <= MOST}:
            raise BadInput(f"{self.family}: wanted sizes from 1 to {MOST}, found {wrong}")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise BadInput(
                f"{self.family}: wanted heads a multiple of kv_heads, and head_dim even (rotary "
                f"positions turn pairs); found heads={self.heads} kv_heads={self.kv_heads} "
                f"head_dim={self.head_dim}"
            )
        if (self.family == "mixtral") is not (0 < self.experts_per_token <= self.experts <= MOST):
            raise BadInput(
                f"{self.family}: wanted experts for mixtral, and for nobody else; found "
                f"{self.experts}, {self.experts_per_token} of them for each token"
            )
        if self.rope and dict(self.rope).get("rope_type") not in ROPE_KINDS:
            raise BadInput(
                f"{self.family}: wanted rotary positions of {' or '.join(ROPE_KINDS)}, found "
                f"{dict(self.rope)}"
            )

    # ---- parameters ------------------------------------------------------------------------------
    @property
    def attention_parameters(self) -> int:
        """Number of parameters in the matrices of one block's attention."""
        return self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Number of parameters in the matrices of one MLP, or of one expert."""
        return (2 if self.family == "gpt2" else 3) * self.dim * self.hidden

    @property
    def router_parameters(self) -> int:
        return self.dim * self.experts

    @property
    def vector_parameters(self) -> int:
        """Number of gains and biases of one block."""
        queries = self.head_dim * (self.heads + 2 * self.kv_heads)
        match self.family:
            case "gpt2":
                return 4 * self.dim + queries + self.dim + self.hidden + self.dim
            case "qwen2":
                return 2 * self.dim + queries
            case "qwen3":
                return 2 * self.dim + 2 * self.head_dim
        return 2 * self.dim

    @property
    def block_parameters(self) -> int:
        """Number of parameters of one layer, with all experts."""
        mlps = self.mlp_parameters * max(1, self.experts) + self.router_parameters
        return self.attention_parameters + mlps + self.vector_parameters

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters in embeddings of tokens, and of positions where they are learned."""
        return self.dim * (self.vocab + (self.length if self.family == "gpt2" else 0))

    @property
    def head_parameters(self) -> int:
        """Number of parameters of the output layer and the norm before it."""
        norm = 2 * self.dim if self.family == "gpt2" else self.dim
        return norm + (0 if self.tied else self.dim * self.vocab)

    @property
    def parameters(self) -> int:
        return (
            self.layers * self.block_parameters + self.embedding_parameters + self.head_parameters
        )

    def flops_per_token(self, length: int) -> float:
        """Return the model FLOPs of one token's forward and backward, without recomputation: 6 for
        each weight that multiplies it, and attention as PaLM counts it (Chowdhery et al. 2022,
        appendix B: 12 * layers * heads * head_dim * length, causality not discounted)."""
        mlps = self.mlp_parameters * max(1, self.experts_per_token) + self.router_parameters
        weights = self.layers * (self.attention_parameters + mlps) + self.dim * self.vocab
        return 6.0 * weights + 12.0 * self.layers * self.heads * self.head_dim * length

    # ---- Hugging Face's config.json --------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """Return the content of a config.json for `transformers`."""
        common = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        if self.family == "gpt2":
            return common | {
                "n_layer": self.layers,
                "n_embd": self.dim,
                "n_head": self.heads,
                "n_inner": self.hidden,
                "n_positions": self.length,
                "layer_norm_epsilon": self.norm_eps,
                "activation_function": "gelu_new",
                **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            }
        found = common | {
            "num_hidden_layers": self.layers,
            "hidden_size": self.dim,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.hidden,
            "max_position_embeddings": self.length,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
        }
        if self.rope:
            found["rope_scaling"] = dict(self.rope)
        if self.experts:
            found["num_local_experts"] = self.experts
            found["num_experts_per_tok"] = self.experts_per_token
        return found


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
}


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape in a Hugging Face config.json. Raises BadInput for missing values, and for
    models that are not supported here."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise BadInput(
            f"config.json: wanted a model_type of {', '.join(FAMILIES)}, found {family!r}"
        )
    for name, allowed in AS_BUILT.items():
        if name in config and config[name] not in allowed:
            raise BadInput(
                f"config.json: {name} is {config[name]!r}, and only {allowed[0]!r} is built here; "
                "train that model as transformers builds it (docs/TRAINERS.md)"
            )
    # Qwen's config gives a window size, and switches it off with use_sliding_window
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        raise BadInput("config.json: wanted attention to all tokens, found a sliding_window")
    try:
        return _gpt2(config) if family == "gpt2" else _rotary(config)
    except (KeyError, TypeError, ValueError) as e:
        raise BadInput(
            f"config.json of {family}: wanted the sizes that transformers writes, found none or "
            f"another kind of value ({type(e).__name__}: {e})"
        ) from e


def _gpt2(config: Mapping[str, Any]) -> ModelShape:
    dim, heads = int(config["n_embd"]), int(config["n_head"])
    return ModelShape(
        family="gpt2",
        layers=int(config["n_layer"]),
        dim=dim,
        heads=heads,
        kv_heads=heads,
        head_dim=dim // heads,
        hidden=int(config.get("n_inner") or 4 * dim),
        vocab=int(config["vocab_size"]),
        length=int(config["n_positions"]),
        tied=bool(config.get("tie_word_embeddings", True)),
        norm_eps=float(config.get("layer_norm_epsilon", 1e-5)),
    )


def _rotary(config: Mapping[str, Any]) -> ModelShape:
    dim, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    # since transformers 5 `rope_parameters` holds both scaling and theta
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return ModelShape(
        family=str(config["model_type"]),
        layers=int(config["num_hidden_layers"]),
        dim=dim,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or dim // heads),
        hidden=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        length=int(config["max_position_embeddings"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_theta=float(theta),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        experts=int(config.get("num_local_experts") or 0),
        experts_per_token=int(config.get("num_experts_per_tok") or 0),
        rope=tuple(sorted(rope.items())) if rope["rope_type"] != "default" else (),
    )


@functools.cache
def _named() -> dict[str, ModelShape]:
    found = {}
    for row in hardware.table_rows("models.csv", "harness.meshes"):
        size = {name: int(row[name] or 0) for name in _WHOLE}
        other = {
            "family": row["family"],
            "tied": row["tied"] == "yes",
            "rope_theta": float(row["rope_theta"] or 10_000.0),
            "norm_eps": float(row["norm_eps"]),
        }
        found[row["name"]] = ModelShape(**size, **other)  # type: ignore[arg-type]
    return found


_WHOLE = [field.name for field in fields(ModelShape) if field.type == "int"]


def named_shape(name: str, **other: Any) -> ModelShape:
    """Return the shape of a model in `models.csv`. `other`: fields to replace, such as layers=2.
    Raises BadInput."""
    known = _named()
    if name not in known:
        raise BadInput(f"wanted a model of {', '.join(known)}, found {name!r:.80}")
    return replace(known[name], **other)
