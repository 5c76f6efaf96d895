"""A model's buffers as they were before a step that may be done again. Runs in the worker."""

from __future__ import annotations

import torch
from torch import nn


class Buffers:
    """A model's buffers as they were before a step, should it be done again.

    In the first step all are copied. Later only those that have changed in a step before: others
    have not for as long as we know.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._living: set[str] | None = None  # None: not known yet
        # those that every rank takes from rank 0 after each step; None: not looked yet
        self.shared: list[str] | None = None
        self._versions: dict[str, tuple[torch.Tensor, int]] = {}
        self._copies: dict[str, torch.Tensor] = {}

    def note(self) -> None:
        """A step begins, or all of them do."""
        now = dict(self._model.named_buffers())
        self._versions = {name: (b, _version(b)) for name, b in now.items()}
        self._copies = {
            name: b.detach().clone()
            for name, b in now.items()
            if self._living is None or name in self._living
        }

    def changed(self) -> list[str]:
        """Their names: since `note`."""
        now = dict(self._model.named_buffers())
        norms = {
            id(b)
            for m in self._model.modules()
            if isinstance(m, nn.modules.batchnorm._NormBase)
            for b in m.buffers(recurse=False)
        }
        return [  # a norm's kernel changes its statistics without counting that
            name
            for name, (b, version) in self._versions.items()
            if now.get(name) is not b or _version(b) != version or id(b) in norms
        ]

    def learn(self) -> None:
        """The step has been done."""
        self._living = (self._living or set()) | set(self.changed())
        self._copies = {}

    def restore(self) -> str:
        """The step begins again. What to tell people about buffers that could not be put back."""
        lost = []
        with torch.no_grad():
            for name in self.changed():
                b, version = self._versions[name]
                if name in self._copies:
                    b.copy_(self._copies[name])
                elif _version(b) != version:
                    lost.append(name)
                owner, _, key = name.rpartition(".")
                # if another was put in its place
                self._model.get_submodule(owner)._buffers[key] = b
        if lost:
            return (
                f"the buffer {lost[0]!r} (one of {len(lost)}) changed for the first time in a step "
                "that had to be done again, so it was changed twice; change it where step.attempt "
                "is 0"
            )
        return ""


def _version(tensor: torch.Tensor) -> int:
    """How often it was changed in place; not known of what was made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
