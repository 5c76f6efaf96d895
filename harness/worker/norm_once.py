"""The norm of all gradients, computed once: ours, which every step record holds, is the one that a
trainer clips by. Runs in the worker.

torch's own functions (`clip_grad_norm_`, `get_total_norm`) ask here first. They get what is known
where they ask for the very same gradients, and nobody has written to them since.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import utils
from torch.nn.utils import clip_grad

NAMES = ("_get_total_norm", "get_total_norm")  # of torch 2.6 and later


class NormOnce:
    """The newest 2-norm, and of which gradients it is. Keeps none of them alive."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._norm: torch.Tensor | None = None
        self._asked = False

    def install(self) -> None:
        """torch's functions ask from here on. Once."""
        if self._asked:
            return
        self._asked = True
        for module in (clip_grad, utils):
            for name in NAMES:
                if original := getattr(module, name, None):
                    setattr(module, name, self._asking(original))

    def note(self, grads: Sequence[torch.Tensor], norm: torch.Tensor) -> None:
        """It is what torch would say of these. Gradients of other types than float32 are passed
        over, since torch would round."""
        if self._asked and all(g.dtype == torch.float32 for g in grads):
            self._of = {id(g): (weakref.ref(g), g._version) for g in grads}
            self._norm = norm

    def forget(self) -> None:
        self._of, self._norm = {}, None

    def _known(self, grads: list[torch.Tensor]) -> bool:
        if len(grads) != len(self._of):
            return False
        for grad in grads:
            ref, version = self._of.get(id(grad), (None, -1))
            if ref is None or ref() is not grad or grad._version != version:
                return False
        return True

    def _asking(self, original: Any) -> Any:
        @functools.wraps(original)
        def total_norm(
            tensors: Any,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> torch.Tensor:
            grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            norm = self._norm
            if norm is None or error_if_nonfinite or norm_type != 2 or not self._known(grads):
                found: torch.Tensor = original(grads, norm_type, error_if_nonfinite, foreach)
                return found
            return norm.clone()

        return total_norm


once = NormOnce()  # of this process
