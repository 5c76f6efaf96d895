"""State that optimizers keep in 8 or 4 bits, as plain tensors for a snapshot, and back. Runs in the
worker.

torchao keeps such a state as a tensor that only looks like one of floats: codes, a scale for each
block of elements, and the table of what codes mean. Here these are stored by name. Codes and scales
are laid out like the parameter, so another world takes its part of them, to the bit, where its
shards begin and end with blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from harness.core.world import BadInput
from harness.worker.sharding import sharded_as
from storage.pieces import Pieces

HOMES = {  # kinds of tensors that are taken apart, and where each is made
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
KIND, CONTEXT, TABLE = "low_bit", "context", "qmap"  # names in what is stored of one
SHAPE = "shape"  # in its context: stands for the shape that this rank holds


def taken_apart(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state_dict, with tensors of few bits as dicts of plain ones. Raises BadInput
    for what is split otherwise than by rows."""
    if not isinstance(kept := state.get("state"), dict):
        return state
    return {**state, "state": {number: _each(own, _apart) for number, own in kept.items()}}


def load_together(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load into the optimizer what `taken_apart` gave, on this world or another. Raises
    BadInput."""
    kept = state.get("state")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    made: dict[int, dict[str, Any]] = {}
    plain: dict[int, Any] = {}
    for number, own in kept.items() if isinstance(kept, dict) else ():
        if not isinstance(own, dict):
            continue
        if low := {k: v for k, v in own.items() if isinstance(v, dict) and KIND in v}:
            made[number] = {k: _together(v, params[number], k) for k, v in low.items()}
            plain[number] = {k: v for k, v in own.items() if k not in low}
    optimizer.load_state_dict({**state, "state": {**state["state"], **plain}} if made else state)
    for number, own in made.items():  # as they are: torch would cast them to the parameter's dtype
        optimizer.state[params[number]].update(own)


def _each(own: Any, change: Callable[[Any], Any]) -> Any:
    return {k: change(v) for k, v in own.items()} if isinstance(own, dict) else own


def _apart(value: Any) -> Any:
    local: Any = value.to_local() if isinstance(value, DTensor) else value
    if type(local).__name__ not in HOMES:
        return value
    names, context = local.__tensor_flatten__()
    return {
        KIND: type(local).__name__,
        **{name: _laid_out(name, getattr(local, name), value) for name in names},
        CONTEXT: [SHAPE if isinstance(c, torch.Size) else c for c in context],
    }


def _laid_out(name: str, inner: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A tensor that `whole` consists of, as a part of what all ranks hold."""
    if not isinstance(whole, DTensor) or name == TABLE:
        return inner
    _check_rows(whole)
    local = whole.to_local()
    if inner.shape == local.shape:
        return sharded_as(whole, inner)
    each = local.numel() // inner.numel()
    return Pieces.of_flat((whole.numel() // each,), _first(whole) // each, inner)


def _together(stored: dict[str, Any], parameter: Any, name: str) -> torch.Tensor:
    import importlib

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
    """Of what was stored, what belongs to the `held` elements that this rank has. Raises
    BadInput."""
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
    """Raises BadInput unless what a rank holds follows each other in row-major order."""
    split = [placement for placement in tensor.placements if placement.is_shard()]
    if len(split) > 1 or any(not placement.is_shard(0) for placement in split):
        raise BadInput(
            "an optimizer that keeps its state in few bits, in blocks of a parameter's rows: "
            f"wanted parameters that are sharded by rows, once, found {tensor.placements} (tensor "
            "parallelism?); use an optimizer of 32 bits there"
        )


def _first(tensor: torch.Tensor) -> int:
    """Of the elements in row-major order, the first that this rank holds."""
    if not isinstance(tensor, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return int(offset[0]) * (tensor.numel() // max(1, tensor.shape[0])) if tensor.dim() else 0
