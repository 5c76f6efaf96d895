"""Low precision: float8 matrix products (`harness.float8`), and optimizer state of 8 and 4 bits as
plain tensors for a snapshot, and back. Runs in the worker.

torchao keeps such state as a tensor subclass that looks like a tensor of floats: codes, a scale for
each block of elements, and a table of the codes' values. Here these are stored by name. Codes and
scales are laid out like the parameter, so that another world can take its part of them, bitwise
equal, where its shards begin and end at block boundaries.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from harness.core.world import BadInput
from harness.worker.gradients.sharding import sharded_as
from harness.worker.optimizer_state import KIND
from storage.tensors.flat_shards import Pieces

# Float8 matrix products as a function applied to a model: `harness.float8`.

DIVISOR = 16  # must divide both dimensions of a weight, for the GPUs' float8 products
# the least compute capability of NVIDIA's GPUs with float8 products of this scaling
LEAST = {"tensorwise": (8, 9)}
LEAST_OTHERS = (9, 0)


def float8(
    model: nn.Module,
    recipe: Any = "tensorwise",
    *,
    only: Callable[[nn.Module, str], bool] | None = None,
    emulate: bool = False,
) -> nn.Module:
    """Make the model's linear layers multiply in float8, and return the model. Their weights keep
    their dtype (bf16, fp32) and names, and scales are computed from each input: a snapshot holds
    nothing more, and can be resumed with or without float8. Call it before `harness.fsdp2`, on any
    device (meta too).

    `recipe`: a recipe name of torchao ("tensorwise": fastest; "rowwise": closest to bf16;
    "rowwise_with_gw_hp"), or a config of torchao: a Float8LinearConfig, or one that its `quantize_`
    takes (MXFP8: an MXLinearConfig). `only(module, name)`: selects layers; default: all whose
    weights have dimensions that 16 divides. Leave the output layer out where its logits are small.
    `emulate`: compute a recipe's arithmetic, slowly, on hardware without it. Raises BadInput.
    """
    try:
        from torchao import float8 as ao
    except ImportError as e:
        raise BadInput(
            f"harness.float8 wants torchao ({e}); pip install torchao, or leave float8 out"
        ) from e
    config: Any = recipe
    if isinstance(recipe, str):
        try:
            config = ao.Float8LinearConfig.from_recipe_name(recipe)
        except (AssertionError, ValueError) as e:
            raise BadInput(
                f"harness.float8(recipe={recipe!r}): wanted a name that this torchao knows, or one "
                f"of its configs; it says: {e}"
            ) from e
    if not emulate:
        check_hardware(recipe if isinstance(recipe, str) else type(recipe).__name__)
    chosen = only or fits_low_precision
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    if not any(chosen(m, name) for name, m in linear.items()):
        raise BadInput(
            f"harness.float8: wanted linear layers whose dimensions {DIVISOR} divides, found none"
            f"{' that only= names' if only else ''}; leave it out"
        )
    if isinstance(config, ao.Float8LinearConfig):
        if emulate:
            config = dataclasses.replace(config, emulate=True)
        ao.convert_to_float8_training(model, module_filter_fn=chosen, config=config)
    else:
        from torchao.quantization import quantize_

        quantize_(model, config, filter_fn=lambda m, name: name in linear and chosen(m, name))
    for name, was in linear.items():
        _keep_beginning(model.get_submodule(name), was)
    return model


def _keep_beginning(now: nn.Module, was: Any) -> None:
    """Give the converted layer the `reset_parameters` and attributes of the original class, since a
    layer on the meta device is initialized later."""
    if type(now) is type(was) or type(was) is nn.Linear:
        return
    for key, value in vars(was).items():
        vars(now).setdefault(key, value)
    vars(now)["reset_parameters"] = functools.partial(type(was).reset_parameters, now)


def fits_low_precision(module: nn.Module, name: str) -> bool:
    """Return whether both dimensions of the module's weight are multiples of 16."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and all(n % DIVISOR == 0 for n in weight.shape)


def check_hardware(recipe: str) -> None:
    """Raise BadInput unless this process' GPU has float8 products with the recipe's scaling."""
    wanted = LEAST.get(recipe, LEAST_OTHERS)
    if not torch.cuda.is_available():
        found = "no GPU"
    elif torch.version.hip:
        return  # torchao itself refuses what an AMD GPU lacks
    else:
        capability = torch.cuda.get_device_capability()
        if capability >= wanted:
            return
        name = torch.cuda.get_device_name()
        found = f"{name} of {capability[0]}.{capability[1]}"
    raise BadInput(
        f"harness.float8(recipe={recipe!r}): wanted a GPU of compute capability {wanted[0]}."
        f"{wanted[1]} or newer (an H100, for any recipe), found {found}; leave float8 out here, or "
        "try its arithmetic with emulate=True, slowly"
    )


HOMES = {  # the tensor subclasses that are taken apart, and the module of each
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
CONTEXT, TABLE = "context", "qmap"  # keys of what is stored of one
SHAPE = "shape"  # stands, in its context, for the shape of this rank's part


class LowBitCodec:
    """The codec of torchao's low-bit tensors; see `harness.worker.optimizer_state.StateCodec`."""

    def apart(self, value: torch.Tensor) -> dict[str, Any]:
        """Return codes, scales and table by name. Raises BadInput for a tensor that is not split by
        rows."""
        local: Any = value.to_local() if isinstance(value, DTensor) else value
        names, context = local.__tensor_flatten__()
        return {
            **{name: _laid_out(name, getattr(local, name), value) for name in names},
            CONTEXT: [SHAPE if isinstance(c, torch.Size) else c for c in context],
        }

    def together(self, stored: dict[str, Any], parameter: Any, name: str) -> torch.Tensor:
        """Return this rank's tensor. Raises BadInput for shards that do not consist of whole
        blocks."""
        return _together(stored, parameter, name)


def _laid_out(name: str, inner: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return `inner`, a component of `whole`, as a part of what all ranks hold together."""
    if not isinstance(whole, DTensor) or name == TABLE:
        return inner
    _check_rows(whole)
    local = whole.to_local()
    if inner.shape == local.shape:
        return sharded_as(whole, inner)
    each = local.numel() // inner.numel()
    return Pieces.of_flat((whole.numel() // each,), _first(whole) // each, inner)


def _together(stored: dict[str, Any], parameter: Any, name: str) -> torch.Tensor:
    kind = getattr(importlib.import_module(HOMES[stored[KIND]]), stored[KIND])
    split = isinstance(parameter, DTensor)
    if split:
        _check_rows(parameter)
    like = parameter.to_local() if split else parameter
    inner = {}
    for key, value in stored.items():
        if key not in (KIND, CONTEXT):
            part = value if key == TABLE else _part(value, parameter, like.numel(), name)
            inner[key] = part.to(like.device)
    context = [like.shape if c == SHAPE else c for c in stored[CONTEXT]]
    made: torch.Tensor = kind(*(inner[key] for key in kind.tensor_attrs), *context)
    return sharded_as(parameter, made) if split else made


def _part(value: torch.Tensor, parameter: torch.Tensor, held: int, name: str) -> torch.Tensor:
    """Return the part of a stored component that belongs to this rank's `held` elements. Raises
    BadInput if they are not whole blocks."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, Pieces):
        return next(iter(value.boxes.values()))
    if held == parameter.numel():
        return value
    each, first = parameter.numel() // value.numel(), _first(parameter)
    if first % each or held % each:
        raise BadInput(
            f"the optimizer's {name!r} of a parameter of shape {tuple(parameter.shape)} has a "
            f"scale for each {each} elements, and this rank's shard is elements {first} to "
            f"{first + held}: wanted shards of whole blocks; go on with a number of ranks that "
            "gives them, or with the number that saved it"
        )
    return value[first // each : (first + held) // each]


def _check_rows(tensor: DTensor) -> None:
    """Raise BadInput unless a rank's elements are contiguous in row-major order."""
    split = [placement for placement in tensor.placements if placement.is_shard()]
    if len(split) > 1 or any(not placement.is_shard(0) for placement in split):
        raise BadInput(
            "an optimizer that keeps its state in few bits, in blocks of a parameter's rows: "
            f"wanted parameters that are sharded by rows, once, found {tensor.placements} (tensor "
            "parallelism?); use an optimizer of 32 bits there"
        )


def _first(tensor: torch.Tensor) -> int:
    """Return the index, in row-major order, of the first element that this rank holds."""
    if not isinstance(tensor, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return int(offset[0]) * (tensor.numel() // max(1, tensor.shape[0])) if tensor.dim() else 0
