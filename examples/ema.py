"""An exponential moving average of a model's weights. Knows nothing of harness."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn


class Ema:
    """Exponential moving average of a model's parameters; sharded like them. A part of the
    run's state."""

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        return self.average

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, mean in self.average.items():
            mean.copy_(state[name])

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After update number `step`. Early averages are short, or they would remember the
        random start."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, p in self.model.named_parameters():
            self.average[name].mul_(decay).add_(p.detach(), alpha=1 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Any:
        """The model has the averaged weights inside."""
        now = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.average[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    p.copy_(now[name])
