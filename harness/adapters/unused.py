"""Parameters that no rank's loss depends on have no gradient, here as in the script alone: an
optimizer would let them decay for a gradient of zero. Runs in the worker."""

from __future__ import annotations

from typing import Any

import torch

from harness.worker.session import Session


class UnusedParameters:
    """Found in the first step of this process; one that is used later is seen by its gradient."""

    def __init__(self, run: Session, model: torch.nn.Module):
        self._run = run
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._touched = [False] * len(self._parameters)
        self._unused: list[torch.nn.Parameter] | None = None  # None: no step has shown it yet
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._touching(i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(self._parameters)
        ]

    def _touching(self, i: int) -> Any:
        def touch(_: torch.Tensor) -> None:
            self._touched[i] = True

        return touch

    def drop(self) -> None:
        """After gradients were added up; all ranks come here."""
        if self._unused is None:
            for hook in self._hooks:
                hook.remove()
            every = self._run._peers.gather(self._touched)
            self._unused = [
                p for p, *used in zip(self._parameters, *every, strict=True) if not any(used)
            ]
        given = [p for p in self._unused if p.grad is not None]
        if given:  # asked for all at once: an answer waits for the device
            used = torch.stack([p.grad.any() for p in given if p.grad is not None]).tolist()
            now_used = {p for p, any_used in zip(given, used, strict=True) if any_used}
            self._unused = [p for p in self._unused if p not in now_used]
        for p in self._unused:
            p.grad = None
