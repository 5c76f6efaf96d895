"""An optimizer of bf16 parameters that rounds updates stochastically: `harness.StochasticRounding`.
Runs in the worker.

Rounding to the nearest value would always lose updates below half of bf16's last place. Stochastic
rounding is right in the mean, without fp32 copies of the weights. Its random bits are a hash of
seed, update, parameter and the place in it, so the weights are the same on any world, in any
sharding, and after a resume.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from harness.core.world import BadInput

AT_ONCE = 1 << 24  # elements that are updated, with a copy in fp32, at a time
LOW = 0xFFFF_FFFF


class StochasticRounding(torch.optim.Optimizer):
    """An optimizer that lets `inner` update an fp32 copy of each bf16 parameter, and rounds the
    result stochastically. Parameters of other dtypes are updated as usual.

        optimizer = harness.StochasticRounding(torch.optim.AdamW(model.parameters()), seed=1)

    The state of `inner` (moments) is fp32. It must be separate for each parameter, as in all of
    torch.optim except LBFGS. The `param_groups`, with the learning rates, are those of `inner`.
    Raises BadInput if it holds no bf16 parameter.
    """

    def __init__(self, inner: torch.optim.Optimizer, seed: int = 0):
        # Optimizer.__init__ is not called: param_groups, state and defaults are those of `inner`
        self.inner, self.seed, self.updates = inner, seed, 0
        self._check()

    def _check(self) -> None:
        if isinstance(self.inner, torch.optim.LBFGS):
            raise BadInput("StochasticRounding: wanted a state for each parameter, found LBFGS")
        dtypes = {str(p.dtype).removeprefix("torch.") for _, p in self._numbered()}
        if "bfloat16" not in dtypes:
            raise BadInput(
                f"StochasticRounding: wanted bfloat16 parameters, found {', '.join(sorted(dtypes))}"
                "; model.to(torch.bfloat16) before the optimizer is made, or leave it out"
            )

    def _numbered(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield all parameters with the numbers that `state_dict` gives them."""
        return enumerate(p for group in self.inner.param_groups for p in group["params"])

    # ---- as an optimizer -------------------------------------------------------------------------
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.updates += 1
        groups, number = self.inner.param_groups, itertools.count()
        try:
            for group in groups:
                numbered = [(next(number), p) for p in group["params"]]
                for some in _at_once([pair for pair in numbered if pair[1].grad is not None]):
                    self._update(group, some)
        finally:
            self.inner.param_groups = groups
        return loss

    def _update(self, group: dict[str, Any], some: list[tuple[int, torch.Tensor]]) -> None:
        state, stand_ins = self.inner.state, []
        for _, p in some:
            wide = p if p.dtype != torch.bfloat16 else p.detach().float()
            if wide is not p:
                assert p.grad is not None
                wide.grad = p.grad.float()
                if p in state:
                    state[wide] = state.pop(p)
            stand_ins.append(wide)
        self.inner.param_groups = [{**group, "params": stand_ins}]
        self.inner.step()
        for (number, p), wide in zip(some, stand_ins, strict=True):
            if wide is not p:
                if wide in state:  # plain SGD has no state
                    state[p] = state.pop(wide)
                round_into(p, wide, self.seed, self.updates, number)

    # ---- state -----------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        chance = {"seed": self.seed, "updates": self.updates}
        return {**self.inner.state_dict(), "chance": chance}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. torch's optimizers cast it to the parameters' dtype, so fp32 stand-ins
        without memory of their own replace the parameters meanwhile."""
        state = dict(state_dict)
        chance = state.pop("chance")
        self.seed, self.updates = chance["seed"], chance["updates"]
        before = [list(group["params"]) for group in self.inner.param_groups]
        stand_ins = {p: _wide_stand_in(p) for _, p in self._numbered()}
        for group in self.inner.param_groups:
            group["params"] = [stand_ins[p] for p in group["params"]]
        try:
            self.inner.load_state_dict(state)
        finally:
            for group, params in zip(self.inner.param_groups, before, strict=True):
                group["params"] = params
        for p, stand_in in stand_ins.items():
            if stand_in in self.inner.state:
                self.inner.state[p] = self.inner.state.pop(stand_in)


def _wide_stand_in(p: torch.Tensor) -> torch.Tensor:
    dtype = torch.float32 if p.dtype == torch.bfloat16 else p.dtype
    return torch.empty((), dtype=dtype, device=p.device).expand(p.shape)


def _at_once(numbered: list[tuple[int, torch.Tensor]]) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Yield the parameters in order, in groups of about AT_ONCE elements."""
    some: list[tuple[int, torch.Tensor]] = []
    numel = 0
    for number, p in numbered:
        held = _local(p).numel()
        if some and numel + held > AT_ONCE:
            yield some
            some, numel = [], 0
        some.append((number, p))
        numel += held
    if some:
        yield some


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def round_into(
    p: torch.Tensor, wide: torch.Tensor, seed: int, update: int, number: int = 0
) -> None:
    """Write `wide` (fp32) into `p` (bf16), rounded stochastically. Both are plain tensors, or
    DTensors of the same layout. `seed`, `update` and the parameter's `number` determine the random
    bits."""
    shape, offset = tuple(p.shape), (0,) * p.dim()
    if isinstance(p, DTensor):
        _, offset = compute_local_shape_and_global_offset(shape, p.device_mesh, p.placements)
    target, source = _local(p.detach()), _local(wide.detach())
    if target.dim() == 0:
        target, source, shape, offset = target[None], source[None], (1,), (0,)
    rows = max(1, AT_ONCE * len(target) // max(1, target.numel()))
    for first in range(0, len(target), rows):
        some = source[first : first + rows]
        at = (offset[0] + first, *offset[1:])
        words = chance(shape, at, tuple(some.shape), seed, update, number, some.device)
        target[first : first + rows].copy_(round_stochastically(some, words))


def round_stochastically(wide: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Round fp32 to one of the two neighbouring bf16 values. `words`: random int32 below 2**16, of
    the same shape; the share of them that round away from zero is in proportion to the value's
    distance from the neighbour nearer to zero."""
    bits = wide.contiguous().view(torch.int32)
    cut = ((bits + words) & -0x1_0000).view(torch.float32)
    return torch.where(wide.isfinite(), cut, wide).to(torch.bfloat16)


def chance(
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    sizes: tuple[int, ...],
    seed: int,
    update: int,
    number: int,
    device: torch.device,
) -> torch.Tensor:
    """Return 16 random bits (int32) for each element of a box of `sizes` at `offset` in a parameter
    of `shape`: a hash of its place there, and of seed, update and the parameter's number."""
    place = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        along = torch.arange(offset[dim], offset[dim] + sizes[dim], device=device) * stride
        place = place + along.view(-1, *(1,) * (len(shape) - 1 - dim))
        stride *= shape[dim]
    key = xxhash.xxh3_64_intdigest(f"{seed} {update} {number}".encode())
    x = _mixed((place & LOW) ^ (key & LOW))
    x = _mixed(x ^ (place >> 32) ^ (key >> 32))
    return (x & 0xFFFF).int()


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Permute 32-bit words (in int64) so that each bit depends on all bits. The factors are below
    2**31, so no product overflows int64."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB_352D & LOW
    x = x ^ (x >> 15)
    x = x * 0x3184_8BAB & LOW
    return x ^ (x >> 16)
