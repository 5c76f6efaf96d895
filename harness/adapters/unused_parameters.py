"""Parameters on which no rank's loss depends. They keep no gradient, as in the script alone: for a
gradient of zero an optimizer would let them decay. Runs in the worker."""

from __future__ import annotations

from typing import Any

import torch

from harness.worker.gradients.parallel import local_part
from harness.worker.session import Session


class UnusedParameters:
    """The unused parameters, found in this process' first step. Later use shows in a gradient."""

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
        """Set the gradients of unused parameters to None, after the reduction. Collective."""
        if self._unused is None:
            for hook in self._hooks:
                hook.remove()
            every = self._run._peers.gather(self._touched)
            self._unused = [
                p for p, *used in zip(self._parameters, *every, strict=True) if not any(used)
            ]
        given = [p for p in self._unused if p.grad is not None]
        if given:  # one query for all, because each answer waits for the device
            own = torch.stack([local_part(p.grad).any() for p in given]).tolist()
            # the ranks of a copy may hold different parts of a gradient
            every = self._run._peers.gather(own) if self._run.replica_ranks > 1 else [own]
            now_used = {p for p, *used in zip(given, *every, strict=True) if any(used)}
            self._unused = [p for p in self._unused if p not in now_used]
        for p in self._unused:
            p.grad = None
