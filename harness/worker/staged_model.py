"""The interface of a model whose stages lie on several ranks, as `harness.pipeline` makes it. Runs
in the worker, which knows such models by this interface only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from harness.worker.step import GivenMicro, Sums, Work


class StagedState(Protocol):
    """The optimizers' state in the form of the undivided model's. `trained`: names of the
    parameters that train, in the whole model's order."""

    trained: Sequence[str]

    def state_dict(self) -> list[dict[str, Any]]: ...

    def load_state_dict(self, states: list[dict[str, Any]]) -> None: ...

    def placeholders(self) -> Sequence[Any]:
        """Return the whole model's optimizers, with None for parameters of other stages."""

    def wanted(self, have: dict[str, torch.Tensor]) -> Callable[[str], bool]:
        """Return a function that says whether this rank loads the saved tensor at a path. `have`:
        the tensors of this rank's present state, by path."""


@runtime_checkable
class StagedModel(Protocol):
    """Some stages of a model, out of `total`. `shapes`: (name, shape, dtype) of every tensor that
    the whole model saves, and `numel`: elements of all its parameters; both are set by `whole`."""

    # no submodule stands here: isinstance does not see them from Python 3.12 on
    total: int
    shapes: list[tuple[str, list[int], str]]
    numel: int

    @property
    def has_last(self) -> bool:
        """True if the last stage, which computes the loss, is one of these."""

    def any_stage(self) -> nn.Module:
        """Return one of these stages, which has the whole model's `config`."""

    def whole(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        group: Callable[[], dist.ProcessGroup],
    ) -> StagedState | None:
        """Return the state of the whole model's optimizers; None if this rank has the whole model.
        `group`: returns the ranks of the stages. All of them call it at the same point."""

    def run_micros(self, work: Work, sums: Sums, step: int, given: list[GivenMicro]) -> None:
        """Run forward and backward of these micro-batches through all stages. Raises BadInput."""
