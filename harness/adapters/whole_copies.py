"""Copies of a model that its trainer splits over several ranks, such as by FSDP2. Runs in the
worker.

The world consists of whole copies. The trainer of each sees the ranks of its copy as its world: it
shards the model, deals out each micro-batch and gathers what it logs among them. We deal out the
micro-batches of a step among copies, and add up their gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import nn
from torch.distributed.fsdp import FSDPModule

from harness.core.world import BadInput
from harness.loops.shared_batches import Share
from harness.worker.gradients.copies import SummedCopies
from harness.worker.gradients.parallel import Strategy
from harness.worker.session import Session


def shard_on_cpu(module: Any) -> None:
    """Patch `module`, which is accelerate.state, to shard by FSDP2 or DeepSpeed on CPUs too when
    asked, for trials without a GPU; Accelerate's own look is at accelerators only."""
    state, kinds = module.AcceleratorState, module.DistributedType
    original = state.__init__

    def init(
        self: Any,
        *args: Any,
        fsdp_plugin: Any = None,
        deepspeed_plugin: Any = None,
        **kwargs: Any,
    ) -> None:
        plugins = {"fsdp_plugin": fsdp_plugin, "deepspeed_plugin": deepspeed_plugin}
        original(self, *args, **plugins, **kwargs)
        if self.distributed_type.name != "MULTI_CPU":
            return
        if deepspeed_plugin is not None:
            deepspeed_plugin.set_mixed_precision(self._mixed_precision)
            deepspeed_plugin.select(_from_accelerator_state=True)
            self.deepspeed_plugins, self._mixed_precision = deepspeed_plugin, "no"
            self.distributed_type = kinds.DEEPSPEED
        elif fsdp_plugin is not None:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin, self.distributed_type = fsdp_plugin, kinds.FSDP
        module.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.__init__ = init


def split_on_cpu(module: Any) -> None:
    """Patch `module`, which is accelerate.parallelism_config, for the same trials: it refuses a
    model that tensor parallelism has split over CPUs."""
    config = module.ParallelismConfig
    original = config._validate_accelerator

    def validate(self: Any, accelerator: Any) -> None:
        if accelerator.distributed_type.name != "MULTI_CPU":
            original(self, accelerator)

    config._validate_accelerator = validate


def reshard(model: nn.Module) -> None:
    """Let the parameters be the shards again that FSDP2 has left gathered after an evaluation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def copies_of(run: Session, model: nn.Module, deferred: bool = True) -> Strategy | None:
    """Return the strategy for a model that is split over the ranks of a copy; None: each rank holds
    a copy. `deferred`: see `SummedCopies`. Raises BadInput."""
    peers = run._peers
    if peers.within is None or peers.across is None:
        return None
    if run.reduce != "fast":
        raise BadInput(
            f"reduce={run.reduce!r}: the gradients of a model that its trainer shards are its own "
            "means within a copy; use reduce='fast'"
        )
    return SummedCopies(model, peers.across, peers.within, deferred)


def own_parts(mine: range, parts: int, part: int) -> range:
    """Return the batches of a step that a rank reads, of those of all `parts` of its micro-batches.
    `mine`: its copy's micro-batches."""
    return range(mine.start * parts + part, mine.stop * parts, parts)


def whole_shares(shares: Iterable[Share], parts: int) -> Iterator[Share]:
    """Yield a share for each micro-batch, with this rank's part of the data, from those of its
    `parts`."""
    if parts == 1:
        yield from shares
        return
    several = iter(shares)
    while together := list(itertools.islice(several, parts)):
        own = next((one for one in together if one.mine), together[0])
        keys, count = np.concatenate([one.keys for one in together]), sum(o.count for o in together)
        index, micro = own.index // parts, own.micro // parts
        yield Share(index, micro, own.mine, own.data, keys, None, count)
