"""Tensor parallelism with sequence parallelism, by named plans. Runs in the worker.

A plan maps patterns of module names to the way in which the ranks of `tp` share a module:

    embedding   split by words; its outputs are split by positions
    norm        works on the rank's own positions; every rank has its weights
    gathered    gets its inputs for all positions: attention, MLP
    columns     a linear layer split by outputs (heads, hidden units)
    heads       a norm of single heads, which works on the rank's own heads
    rows        a linear layer split by inputs; its outputs are summed, and split by positions
    head        columns, split by words

Between them activations are DTensors, so their shapes are those of the whole activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard, _random
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from harness.core.world import BadInput

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from harness.worker.session import Session

PLANS: dict[str, dict[str, str]] = {
    # Hugging Face's names: Llama, Mistral, Qwen2, Qwen3
    "llama": {
        "*embed_tokens": "embedding",
        "*self_attn": "gathered",
        "*self_attn.[qkv]_proj": "columns",
        "*self_attn.[qk]_norm": "heads",
        "*self_attn.o_proj": "rows",
        "*mlp": "gathered",
        "*mlp.gate_proj": "columns",
        "*mlp.up_proj": "columns",
        "*mlp.down_proj": "rows",
        "*norm": "norm",
        "*lm_head": "head",
    },
    # Meta's names, which torchtitan uses too
    "llama-meta": {
        "*tok_embeddings": "embedding",
        "*attention": "gathered",
        "*attention.w[qkv]": "columns",
        "*attention.[qk]_norm": "heads",
        "*attention.wo": "rows",
        "*feed_forward": "gathered",
        "*feed_forward.w[13]": "columns",
        "*feed_forward.w2": "rows",
        "*norm": "norm",
        "output": "head",
    },
}


def tensor_parallel(
    model: nn.Module,
    run: Session,
    plan: str | Mapping[str, str] = "llama",
    *,
    whole_logits: bool = True,
) -> nn.Module:
    """Split the model over the ranks of `run.mesh["tp"]`, in place, and return it. Call `fsdp2`
    next, on any mesh. Without `tp` it does nothing.

    `plan`: the name of a plan, or a dict from patterns of module names to words (the first pattern
    that matches counts; see this module). `whole_logits`: False leaves logits split by words; then
    compute loss and backward in `torch.distributed.tensor.parallel.loss_parallel()`. Raises
    BadInput for parameters that no pattern matches, and for sizes that `tp` does not divide.
    """
    mesh = run._peers.model_mesh
    if mesh is None or mesh.tp == 1:
        return model
    rules = _rules(plan)
    styles, found = _styles(whole_logits), _matched(model, rules)
    for name, word in found.items():
        _check_divides(name, model.get_submodule(name), word, mesh.tp)
    _keep_generators(run.seed, run.mesh["tp"])
    tied = _tied(model)
    parallelize_module(model, run.mesh["tp"], {name: styles[word] for name, word in found.items()})
    for name, same in tied.items():
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, model.get_parameter(same))
    return model


def _rules(plan: str | Mapping[str, str]) -> Mapping[str, str]:
    if not isinstance(plan, str):
        return plan
    if plan not in PLANS:
        raise BadInput(
            f"tensor_parallel(plan={plan!r}): wanted {' or '.join(map(repr, PLANS))}, or a dict of "
            "patterns of module names and what they become"
        )
    return PLANS[plan]


def _matched(model: nn.Module, rules: Mapping[str, str]) -> dict[str, str]:
    """Return the plan's word for each module name. Raises BadInput for parameters of other modules,
    whose gradients would be wrong if they work on split activations without a plan."""
    words = {*_styles(True)}
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        word = next((word for rule, word in rules.items() if fnmatchcase(name, rule)), None)
        if word is not None and word not in words:
            raise BadInput(
                f"tensor_parallel(plan=...): wanted {', '.join(sorted(words))}; found {word!r}"
            )
        if word is not None:
            found[name] = word
        elif next(module.parameters(recurse=False), None) is not None:
            raise BadInput(
                f"{name or 'the model'} ({type(module).__name__}) has parameters that the plan "
                "does not name; wanted a pattern for each: give tensor_parallel(plan={...}) one"
            )
    return found


def _check_divides(name: str, module: Any, word: str, ranks: int) -> None:
    sizes = {"columns": "out_features", "rows": "in_features"}
    for size in [getattr(module, sizes[word])] if word in sizes else []:
        if size % ranks:
            raise BadInput(
                f"{name}: wanted {sizes[word]} that tp={ranks} divides, found {size}; use another "
                "tp"
            )
    heads = getattr(getattr(module, "config", None), "num_key_value_heads", None)
    if word == "gathered" and heads and heads % ranks:
        raise BadInput(
            f"{name}: wanted heads of keys and values that tp={ranks} divides, found {heads}; use "
            "another tp"
        )


def _keep_generators(seed: int, mesh: DeviceMesh) -> None:
    """Initialize DTensor's random state now. Otherwise the first random operation on a DTensor
    would set every rank's generator to rank 0's, in the middle of a micro-batch. This concerns
    GPUs; on a CPU, DTensor does not touch generators."""
    if mesh.device_type != "cpu" and _random.is_rng_supported_mesh(mesh):
        _random.manual_seed(seed, mesh)


def _tied(model: nn.Module) -> dict[str, str]:
    """Return, for each name of a tied parameter but its first, the first name."""
    first: dict[int, str] = {}
    tied = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(p), name) != name:
            tied[name] = first[id(p)]
    return tied


def _styles(whole_logits: bool) -> dict[str, Any]:
    class Gathered(ParallelStyle):
        """A style that gathers all inputs of a module, whatever their names."""

        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            def whole(value: Any) -> Any:
                is_split = hasattr(value, "redistribute")
                return value.redistribute(placements=[Replicate()]) if is_split else value

            def gather(_: nn.Module, args: Any, kwargs: Any) -> Any:
                return tuple(map(whole, args)), {k: whole(v) for k, v in kwargs.items()}

            module.register_forward_pre_hook(gather, with_kwargs=True)
            return module

    positions: Any = Shard(1)
    logits: Any = Replicate() if whole_logits else Shard(-1)
    return {
        "embedding": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=positions, use_local_output=False
        ),
        "norm": SequenceParallel(),
        "gathered": Gathered(),
        "columns": ColwiseParallel(),
        "heads": SequenceParallel(sequence_dim=2, use_local_output=True),
        "rows": RowwiseParallel(output_layouts=positions, use_local_output=False),
        "head": ColwiseParallel(
            input_layouts=positions, output_layouts=logits, use_local_output=whole_logits
        ),
    }
