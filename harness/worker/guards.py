"""Guards: what stops a training run that has gone wrong, before its state is committed. And what a
GPU can do at most.

Runs in the worker; the controller asks for peaks, and has no torch.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from harness.core.world import HarnessError

if TYPE_CHECKING:
    from torch import nn


class NonFiniteLoss(HarnessError):
    """The loss or the gradient norm is NaN or infinite; the last committed snapshot is from
    before."""


def check_finite(step: int, loss: float, grad_norm: float | None) -> None:
    """Raises NonFiniteLoss. A GradScaler's skipped steps pass grad_norm=None: an overflow there
    is no fault."""
    for what, value in (("loss", loss), ("gradient norm", grad_norm)):
        if value is not None and not math.isfinite(value):
            raise NonFiniteLoss(
                f"step {step}: the {what} is {value}, wanted a finite number. Nothing of this step "
                "is committed; the run stays at its last snapshot. Look at the learning rate, the "
                "precision and the samples of this step."
            )


class Precision:
    """What most of a model's matrix products are computed in, seen in its first forward:
    parameters, autocast and FSDP's mixed precision all have a say in it, and what a layer gives
    back shows what came of that. Watches from when it is made until it is asked."""

    def __init__(self, model: nn.Module):
        self._seen: dict[str, int] = {}
        self._hooks = [m.register_forward_hook(self._see) for m in model.modules() if _weight(m)]

    def _see(self, module: nn.Module, _: object, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if (dtype := getattr(first, "dtype", None)) is not None:
            name = str(dtype).removeprefix("torch.")
            self._seen[name] = self._seen.get(name, 0) + _weight(module)

    @functools.cached_property
    def name(self) -> str:
        """ "bfloat16", "float16", "tf32", "float32" or another dtype's; "none" if no layer was
        seen."""
        import torch

        for hook in self._hooks:
            hook.remove()
        found = max(self._seen, key=lambda name: self._seen[name], default="none")
        return (
            "tf32"
            if found == "float32" and torch.get_float32_matmul_precision() != "highest"
            else found
        )


def _weight(module: nn.Module) -> int:
    """Elements of its own matrices, which stand for its share of the work; an embedding
    multiplies nothing."""
    if type(module).__name__.startswith("Embedding"):
        return 0
    return sum(p.numel() for p in module.parameters(recurse=False) if p.ndim >= 2)
