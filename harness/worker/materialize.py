"""Values for models that were built on the meta device. Runs in the worker.

What a tensor begins with is a function of the run's seed and of names, drawn as for a whole model
on one rank and cut afterwards: neither the world, nor the mesh, nor the order of blocks matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash
from torch import nn

from harness.core.world import BadInput
from harness.worker.loader import seed_everything
from storage.names import plain_name

# a tensor's name in the model, and the tensor, whole; gives it its values, in place
Init = Callable[[str, torch.Tensor], None]


class Materials:
    """What of a model is on the meta device, and how it gets its values, a part of the model at a
    time: by `init`, or without one by the `reset_parameters()` of the module that holds it."""

    def __init__(self, model: nn.Module, device: torch.device, seed: int, init: Init | None = None):
        self._device, self._seed, self._init = device, seed, init
        self._modules = {id(m): plain_name(name) for name, m in model.named_modules()}
        named = [*model.named_parameters(), *model.named_buffers()]
        self._tensors = {id(t): (plain_name(name), t) for name, t in named if t.is_meta}
        self._given: set[int] = set()
        # of the newest part: where a tensor is that tensor parallelism splits, and as what
        self._whole: list[tuple[dict[str, Any], str, Any]] = []

    def fill(self, part: nn.Module) -> None:
        """Give `part` what it lacks, whole. Raises BadInput for modules without
        `reset_parameters`; one that resets its children's parameters as well must not have blocks
        among them."""
        made: dict[int, torch.Tensor] = {}  # by the meta tensor's id, so that tied ones stay tied
        for module in dict.fromkeys(_children_first(part)):
            found = False
            kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for kind in kinds:
                for name, t in kind.items():
                    if t is None or not t.is_meta:
                        continue
                    if id(t) not in made:
                        made[id(t)], found = self._empty(t), True
                    if hasattr(t, "placements"):
                        self._whole.append((kind, name, t))
                    kind[name] = made[id(t)]
            if found and self._init is None:
                self._reset(module)
        if self._init is not None:
            for i, tensor in made.items():
                self._draw(self._init, self._tensors[i][0], tensor)

    def split(self) -> None:
        """Of the part that was filled last: cut again what tensor parallelism splits."""
        from torch.distributed.tensor import distribute_tensor

        cut: dict[int, Any] = {}
        for kind, name, t in self._whole:
            if id(t) not in cut:
                mine = distribute_tensor(
                    kind[name].detach(), t.device_mesh, t.placements, src_data_rank=None
                )
                cut[id(t)] = nn.Parameter(mine, t.requires_grad)
            kind[name] = cut[id(t)]
        self._whole.clear()

    def _empty(self, t: torch.Tensor) -> torch.Tensor:
        if id(t) in self._given:
            raise BadInput(
                f"{self._tensors[id(t)][0]}: wanted a tensor of one block, found it in another one "
                "as well (tied weights): give harness.fsdp2 blocks=[...] that leave both of their "
                "modules to the root"
            )
        self._given.add(id(t))
        empty = torch.empty(t.shape, dtype=t.dtype, device=self._device)
        if not isinstance(t, nn.Parameter):
            return empty
        made = nn.Parameter(empty, t.requires_grad)
        made.__dict__.update(t.__dict__)
        return made

    def _reset(self, module: nn.Module) -> None:
        reset = getattr(module, "reset_parameters", None) or getattr(
            module, "_reset_parameters", None
        )
        where = self._modules.get(id(module), "") or "the model itself"
        if reset is None:
            raise BadInput(
                f"{where} ({type(module).__name__}) has parameters or buffers on the meta device "
                "and no reset_parameters() to give them values; wanted one (it sets what the "
                "module itself holds), harness.fsdp2(..., init=fn) with a function of name and "
                "tensor, or a model built on the CPU"
            )
        self._seeded(where, reset)

    def _draw(self, init: Init, name: str, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point():
            tensor.data.fill_(torch.nan)
        self._seeded(name, lambda: init(name, tensor))
        if tensor.is_floating_point() and tensor.numel() and bool(tensor.detach().amin().isnan()):
            raise BadInput(
                f"harness.fsdp2(init=...): wanted values for all of {name} {tuple(tensor.shape)}, "
                "found some that were left out, or NaN; set them in place, such as "
                "tensor.normal_(std=0.02)"
            )

    def _seeded(self, name: str, draw: Callable[[], None]) -> None:
        seed_everything(xxhash.xxh3_64_intdigest(f"{self._seed} {name}".encode()) >> 1)
        with torch.no_grad():
            draw()
        # and what the script draws next does not depend on what was drawn last
        seed_everything(self._seed)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """As constructors run."""
    for child in module.children():
        yield from _children_first(child)
    yield module
