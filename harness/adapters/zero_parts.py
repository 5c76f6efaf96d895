"""Which part of each parameter, and of its optimizer state, a rank holds under DeepSpeed's ZeRO.
Runs in the worker.

ZeRO-1 and 2 lay the parameters of a group one behind the other and cut that in as many equal parts
as there are ranks; ZeRO-3 cuts each parameter. Either way a rank holds some elements of a parameter
that follow each other, at some place of a flat tensor: `ZeroPart`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from storage.pieces import Pieces

MASTER = "master"  # the parameter as the optimizer keeps it, where the model's has less precision


@dataclass(frozen=True)
class ZeroPart:
    """Of `parameter`, of the optimizer's group `group`: elements [first, first + count), in
    row-major order, lie at `at` of `flat`, and of what the optimizer keeps for `flat`."""

    parameter: Any
    group: int
    flat: torch.Tensor
    at: int
    first: int
    count: int

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        found: torch.Size = getattr(self.parameter, "ds_shape", self.parameter.shape)
        return found

    def of(self, flat: torch.Tensor) -> Pieces:
        """`flat` is of the shape of `self.flat`."""
        part = flat.detach()[self.at : self.at + self.count]
        return Pieces.of_flat(self.shape, self.first, part)

    def own(self) -> torch.Tensor:
        """(count,): these elements of the model's own parameter."""
        p = self.parameter
        if hasattr(p, "ds_tensor"):
            flat, first = p.ds_tensor.detach(), 0
        else:
            flat, first = p.detach().reshape(-1), self.first
        found: torch.Tensor = flat[first : first + self.count]
        return found


def parts_of(zero: Any) -> list[ZeroPart]:
    """Of all parameters that train, in the order of the optimizer's groups. `zero`: DeepSpeed's
    optimizer."""
    if hasattr(zero, "fp16_groups"):
        return _of_stage_3(zero)
    found = []
    for number, group in enumerate(zero.bit16_groups):
        flat = zero.single_partition_of_fp32_groups[number]
        for p in group:
            link = p._hp_mapping  # None: all of it is with other ranks
            at, first, count = 0, 0, 0
            if link is not None:
                place, whole = link.hp_fragment_address, link.lp_fragment_address
                at, first, count = place.start, whole.start, place.numel
            found.append(ZeroPart(p, number, flat, at, first, count))
    return found


def _of_stage_3(zero: Any) -> list[ZeroPart]:
    found = []
    for number, group in enumerate(zero.fp16_groups):
        for p in group:
            _, at, _ = zero.grad_position[zero.get_param_id(p)]
            flat, of = zero.fp32_partitioned_groups_flat[number], zero.sub_group_to_group_id
            first, count = _of_rank(p)
            found.append(ZeroPart(p, int(of[number]), flat, int(at), first, count))
    return found


def _of_rank(p: Any) -> tuple[int, int]:
    """Of a parameter of ZeRO-3: this rank's first element, and how many; the rest is padding."""
    size, rank = int(p.ds_tensor.ds_numel), torch.distributed.get_rank(p.ds_process_group)
    first = min(rank * size, int(p.ds_numel))
    return first, min(size, int(p.ds_numel) - first)


def pieces_of(p: Any) -> Pieces:
    """This rank's part of a parameter that ZeRO-3 has cut, as the model holds it."""
    first, count = _of_rank(p)
    return Pieces.of_flat(p.ds_shape, first, p.ds_tensor.detach()[:count])


def state_of(parts: list[ZeroPart], optimizer: Any) -> dict[int, dict[str, Any]]:
    """As torch's optimizers give it, but as pieces: numbers of the parameters -> name -> value."""
    found: dict[int, dict[str, Any]] = {}
    for number, part in enumerate(parts):
        kept = optimizer.state.get(part.flat, {})
        own = found[number] = {
            key: part.of(value) if _is_flat(value, part.flat) else value
            for key, value in kept.items()
        }
        if part.parameter.dtype != part.flat.dtype:
            own[MASTER] = part.of(part.flat)
    return found


def take_state(parts: list[ZeroPart], optimizer: Any, state: dict[int, dict[str, Any]]) -> None:
    """The inverse of `state_of`; behind it the optimizer's copy of what the model holds is the
    model's again."""
    with torch.no_grad():
        for number, part in enumerate(parts):
            own = dict(state.get(number, {}))
            if MASTER in own:
                part.of(part.flat).copy_from(own.pop(MASTER))
            else:
                part.flat[part.at : part.at + part.count].copy_(part.own())
            if not own:
                continue
            kept = optimizer.state[part.flat]
            for key, value in own.items():
                if isinstance(value, Pieces):
                    if key not in kept:
                        kept[key] = torch.zeros_like(part.flat, dtype=value.dtype)
                    part.of(kept[key]).copy_from(value)
                else:
                    kept[key] = value


def _is_flat(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape
