"""BatchNorm whose running statistics do not depend on the world. Runs in the worker.

A training forward normalizes by the statistics of its own micro-batch, so it is the same on any
rank. Only the running average would depend on the world, since each rank averages over its own
micro-batches. Here each micro-batch's statistics are kept separately, gathered over all ranks after
the step's last backward, and averaged in the order of the micro-batches on every rank, as a single
rank would have done.

SyncBatchNorm is different: its forward averages over the ranks present, so its result depends on
the world.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.core.world import BadInput
from harness.worker.process_group import Peers

KEPT = ("running_mean", "running_var", "num_batches_tracked")


def has_sync_norm(model: nn.Module) -> bool:
    """Return whether the model's forward communicates with other ranks (SyncBatchNorm)."""
    return any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())


class Unwatched:
    """A stand-in for `Norms` in a model that was pickled as a whole."""

    def _begin(self, *_: Any) -> None: ...

    def _end(self, *_: Any) -> None: ...


@dataclass
class _Held:
    """A layer's own buffers and momentum, while its forward writes to other buffers."""

    buffers: dict[str, torch.Tensor | None]
    momentum: float | None


class Norms:
    """The BatchNorm layers of a model. `watches`: there are such layers. Every micro-batch of a
    step must call them in the same sequence, on all ranks."""

    def __init__(self, model: nn.Module, peers: Peers):
        self._peers = peers
        self._layers: list[Any] = [
            m
            for m in model.modules()
            if isinstance(m, nn.modules.batchnorm._BatchNorm)
            and not isinstance(m, nn.SyncBatchNorm)
            and m.track_running_stats
            and m.running_mean is not None
        ]
        self.watches = bool(self._layers)
        self._number = {id(m): i for i, m in enumerate(self._layers)}
        self._micro: int | None = None  # the micro-batch whose forward runs; None: none
        self._counts = False
        # By micro-batch: the layers' numbers in the order of their calls; and, if the micro-batch
        # counts, mean and variance of each call.
        self._calls: dict[int, list[int]] = {}
        self._found: dict[int, list[torch.Tensor]] = {}
        self._held: dict[int, _Held] = {}
        self._agreed: set[tuple[int, ...]] = set()  # sequences known to be the same on all ranks
        self._hooks = [
            hook
            for layer in self._layers
            for hook in (
                layer.register_forward_pre_hook(self._begin),
                layer.register_forward_hook(self._end, always_call=True),
            )
        ]

    def release(self) -> None:
        """Let go of the layers, which something else may watch from now on."""
        for hook in self._hooks:
            hook.remove()

    def take_up(self, micro: int, counts: bool, more: bool = False) -> None:
        """Attribute the next forwards to this micro-batch. `counts`: it is no filler. `more`: they
        add to its earlier forwards (a later pipeline stage)."""
        self._micro, self._counts = micro, counts
        if more:
            return
        self._calls[micro] = []
        if counts:
            self._found[micro] = []

    def rest(self) -> None:
        """Attribute the next forwards to no micro-batch."""
        self._micro = None

    # ---- copies and pickles of the model are not watched -----------------------------------------
    def __deepcopy__(self, memo: Any) -> Norms:
        return self

    def __reduce__(self) -> Any:
        return Unwatched, ()

    # ---- a forward -------------------------------------------------------------------------------
    def _begin(self, layer: Any, _: Any) -> None:
        if (
            self._micro is None
            or not layer.training
            or id(layer) not in self._number  # a copy of one
            or torch.compiler.is_compiling()
        ):
            return
        buffers = {name: layer._buffers.get(name) for name in KEPT}
        self._held[id(layer)] = _Held(buffers, layer.momentum)
        for name, buffer in buffers.items():
            if buffer is not None:
                layer._buffers[name] = torch.zeros_like(buffer)
        layer.momentum = 1.0  # so that the forward writes this micro-batch's statistics unmixed

    def _end(self, layer: Any, _: Any, __: Any) -> None:
        held = self._held.pop(id(layer), None)
        if held is None:
            return
        assert self._micro is not None
        if self._counts:
            found = [layer._buffers[name].detach().double() for name in KEPT[:2]]
            self._found[self._micro].append(torch.cat(found))
        for name, buffer in held.buffers.items():
            layer._buffers[name] = buffer
        layer.momentum = held.momentum
        self._calls[self._micro].append(self._number[id(layer)])

    # ---- a step ----------------------------------------------------------------------------------
    def forget(self) -> None:
        """Drop the statistics of a step whose update is skipped."""
        self.rest()
        self._calls.clear()
        self._found.clear()

    def settle(self, micro_batches: int, some_idle: bool = False, *, exact: bool) -> None:
        """Average the statistics of a step of `micro_batches` after its last one, on all ranks.
        `some_idle`: some ranks may have had no micro-batch. Raises BadInput if layers were called
        in different sequences, or if no forward was seen although sums are `exact`."""
        self.rest()
        calls = self._sequence(exact, some_idle)
        columns = [2 * self._layers[number].num_features for number in calls]
        device = self._layers[0].running_mean.device
        table = torch.zeros(micro_batches, sum(columns), dtype=torch.float64, device=device)
        for micro, found in self._found.items():
            if found:
                table[micro] = torch.cat(found)
        if self._peers.control is not None and columns:
            dist.all_reduce(table, group=self._peers.across)
        pieces: dict[int, list[torch.Tensor]] = {}
        column = 0
        for number, width in zip(calls, columns, strict=True):
            pieces.setdefault(number, []).append(table[:, column : column + width])
            column += width
        with torch.no_grad():
            for number, several in pieces.items():
                rows = torch.stack(several, 1).flatten(0, 1)  # in the order of the calls
                _average(self._layers[number], rows)
        self._calls.clear()
        self._found.clear()

    def _sequence(self, exact: bool, some_idle: bool) -> tuple[int, ...]:
        """Return the sequence in which layers were called for each micro-batch. Raises BadInput if
        micro-batches or ranks differ."""
        found = {tuple(calls) for calls in self._calls.values()}
        if len(found) > 1:
            raise BadInput(
                "wanted the model's BatchNorm layers to be called alike for every micro-batch of a "
                "step, found that some are called for some of them only; use GroupNorm or LayerNorm"
            )
        calls = found.pop() if found else ()
        if some_idle:
            calls = max(self._alike(calls), key=len)
        if exact and not calls and any(layer.training for layer in self._layers):
            raise BadInput(
                "exact sums gather the statistics of each micro-batch from the model's BatchNorm "
                "layers, found that their forwards were not seen: does torch.compile run them? "
                "Leave it out, use GroupNorm or LayerNorm, or reduce='fast'"
            )
        if calls not in self._agreed:
            if len(set(self._alike(calls))) > 1:
                raise BadInput(
                    "wanted the model's BatchNorm layers to be called alike on every rank, found "
                    "that they are not; use GroupNorm or LayerNorm"
                )
            self._agreed.add(calls)
        return calls

    def _alike(self, calls: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return `calls` of each of the ranks that have the same layers."""
        every = self._peers.by_stage(self._peers.gather(calls))
        return list(every[self._peers.grouping.stage(self._peers.rank)].values())


def _average(layer: Any, rows: torch.Tensor) -> None:
    """Update a layer's running averages by `rows` (n, 2 * features), the mean and variance of each
    call, in order."""
    n, before = len(rows), int(layer.num_batches_tracked or 0)
    if layer.momentum is None:  # the plain mean over all micro-batches so far
        old, shares = before / (before + n), [1 / (before + n)] * n
    else:
        kept = 1.0 - layer.momentum
        old, shares = kept**n, [layer.momentum * kept ** (n - 1 - k) for k in range(n)]
    weights = torch.tensor(shares, dtype=rows.dtype, device=rows.device)
    mean, variance = (weights[:, None] * rows).sum(0).view(2, -1)
    layer.running_mean.copy_(layer.running_mean.double() * old + mean)
    layer.running_var.copy_(layer.running_var.double() * old + variance)
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(n)
