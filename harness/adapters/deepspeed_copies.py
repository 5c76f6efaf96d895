"""DeepSpeed engines that a foreign trainer makes over the ranks of each copy of the model. Runs in
the worker.

Within a copy the engine does everything, as in `harness.deepspeed`. The trainer's own step, which
Accelerate takes within the last backward, waits until gradients are summed over copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness.adapters.deepspeed import Zero, ZeroModel, ZeroOptimizer, check
from harness.core.world import BadInput
from harness.worker.alone import world
from harness.worker.gradients.copies import sum_over
from harness.worker.process_group import broadcast_all
from harness.worker.session import Session
from harness.worker.training_state import Judged
from storage.tensors.flat_shards import Pieces

# functions of DeepSpeed in which ZeRO-3's ranks compare what they do
COMPARING = ("assert_lst_len_same_as_other_ranks", "get_lst_from_rank0")
COPIES_USED = ("averaged_gradients", "independent_gradient_partition_epilogue")


class SummedZero(Zero):
    """The strategy of an engine that spans the ranks of a copy. `across`: the ranks that hold the
    same parts of all copies. The trainer scales its losses so that sums over copies are right."""

    equal_rounds = False

    def __init__(
        self, engine: Any, optimizer: ZeroOptimizer, ranks: int, across: dist.ProcessGroup
    ):
        super().__init__(engine, optimizer, ranks)
        self.replica_ranks, self._across = ranks, across
        self._had_backward = False

    def start(self, micro_batches: int) -> None:
        """Leave the trainer's losses as they are."""

    def micro(self, last: bool, filler: bool = False) -> None:
        super().micro(last, filler)
        self._had_backward = False

    def micro_done(self) -> None:
        self._had_backward = True

    @world.outside()
    def reduce(self) -> None:
        super().reduce()
        zero = self._engine.optimizer
        if not self._had_backward:  # a copy without a micro-batch in a short step
            self._backward_of_nothing()
        groups = sorted(zero.averaged_gradients)
        sum_over(self._across, (g for group in groups for g in zero.averaged_gradients[group]))

    def _backward_of_nothing(self) -> None:
        """Let the engine make gradients of zero, on all ranks of the copy."""
        zero = self._engine.optimizer
        if hasattr(zero, "bit16_groups"):
            trained = (p for group in zero.bit16_groups for p in group)
            self._engine.backward(sum(p.flatten()[0] * 0.0 for p in trained), scale_wrt_gas=False)
            return
        zero.independent_gradient_partition_epilogue()  # no parameter is whole in ZeRO-3
        for grads in zero.averaged_gradients.values():
            for grad in grads:
                grad.zero_()


class EngineOfCopy:
    """A trainer's engine, as the session trains and saves it."""

    def __init__(self, run: Session, engine: Any, who: str):
        """Raises BadInput for what cannot be kept; `who`: what messages begin with."""
        check(engine, run.replica_ranks, who)
        _check_copies(engine, run.replicas, who)
        peers = run._peers
        assert peers.across is not None
        self._engine = engine
        self.model, self.optimizer = ZeroModel(engine), ZeroOptimizer(engine)
        self.strategy = SummedZero(engine, self.optimizer, run.replica_ranks, peers.across)
        if run.replicas > 1:
            self._begin_alike(peers.across)

    def _begin_alike(self, across: dist.ProcessGroup) -> None:
        """Give the first copy's weights to all, as DeepSpeed gives its first rank's to a copy."""
        state = self.model.state_dict()
        with world.inside():
            broadcast_all(
                [
                    part
                    for held in state.values()
                    for part in (held.boxes.values() if isinstance(held, Pieces) else [held])
                ],
                across,
            )
        self.model.load_state_dict(state)
        self.optimizer.take_weights()

    def scheduler(self, theirs: Any) -> Any:
        """Return the scheduler that the trainer steps itself; None if the engine does."""
        return theirs if self._engine.lr_scheduler is None else None

    def backward(
        self, original: Callable[..., Any], loss: Any, sync_gradients: bool = True, **how: Any
    ) -> None:
        """Replace the backward of Accelerate's wrapper, which would also step."""
        self._engine.backward(loss, **how)

    def step(self, judged: Judged) -> None:
        """Step once gradients are summed over copies."""
        self.optimizer.step()


def _check_copies(engine: Any, copies: int, who: str) -> None:
    zero = engine.optimizer
    if engine.fp16_enabled():
        raise BadInput(
            f"{who}: wanted a run without a loss scale of DeepSpeed's, found fp16; use bf16 "
            '({"bf16": {"enabled": true}})'
        )
    if copies == 1:
        return
    if getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
        raise BadInput(
            f"{who}: wanted gradients on the devices to sum them over {copies} copies of the "
            "model, found offload_optimizer; leave it out of the config, or let all ranks share "
            "one copy (--mesh dp_shard=...)"
        )
    if missing := [name for name in COPIES_USED if not hasattr(zero, name)]:
        raise BadInput(
            f"{who}: {type(zero).__name__} has no {', '.join(missing)}; use deepspeed 0.19, which "
            "this was written for, or let all ranks share one copy of the model"
        )


# DeepSpeed in a script that sees the whole world, such as one of Accelerate, and gives it a config
# for the first world.


class RanksOfCopy:
    """The answers to what DeepSpeed asks an `mpu`: an engine spans the ranks of a copy of the
    model, and nothing else is parallel."""

    def __init__(self, run: Session):
        assert run._peers.within is not None
        self._within = run._peers.within
        own = [dist.get_rank()]
        self._alone: dist.ProcessGroup = dist.new_group(own, use_local_synchronization=True)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._within

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._within)

    def get_data_parallel_world_size(self) -> int:
        return self._within.size()

    def get_data_parallel_rank(self) -> int:
        return self._within.rank()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._alone

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


def within_copies(run: Session, first_ranks: int) -> None:
    """Let the engines that the script makes from now on, and models that ZeRO-3 cuts as they are
    made, span the ranks of a copy of the model. `first_ranks`: the ranks of the first world."""
    import deepspeed.runtime.zero.utils

    ranks, initialize, cut = RanksOfCopy(run), deepspeed.initialize, deepspeed.zero.Init.__init__
    _compare_within(deepspeed.runtime.zero.utils, ranks, run.device)
    copy_ranks, writes = run.replica_ranks, run._peers.replica == 0

    @functools.wraps(initialize)
    def of_copy(*args: Any, config_params: Any = None, **how: Any) -> Any:
        if isinstance(config_params, dict):
            config_params = config_of_copy(config_params, first_ranks, copy_ranks)
        made = initialize(*args, config_params=config_params, **{"mpu": ranks, **how})
        if not writes:  # the first copy's checkpoint is that of all
            made[0].checkpoint_engine.save = _nothing
        return made

    @functools.wraps(cut)
    def cut_over_copy(self: Any, *args: Any, **how: Any) -> None:
        if len(args) < 2:  # module, data_parallel_group
            how = {"data_parallel_group": ranks.get_data_parallel_group(), **how}
        cut(self, *args, **how)

    deepspeed.initialize, deepspeed.zero.Init.__init__ = of_copy, cut_over_copy


def _compare_within(module: Any, ranks: RanksOfCopy, device: torch.device) -> None:
    """Let ZeRO-3 compare the order of its modules within a copy: others may have no micro-batch
    then. `module`: deepspeed.runtime.zero.utils."""
    if missing := [name for name in COMPARING if not hasattr(module, name)]:
        raise BadInput(
            f"{module.__name__} has no {', '.join(missing)}; use deepspeed 0.19, which this was "
            "written for"
        )

    group, first = ranks.get_data_parallel_group(), ranks.get_data_parallel_group_ranks()[0]

    def of_first(ints: list[int]) -> list[int]:
        said = torch.tensor(ints, device=device)
        dist.broadcast(said, first, group)
        return said.tolist()

    def same_length(ints: list[int]) -> None:
        if of_first([len(ints)]) != [len(ints)]:
            raise RuntimeError("the ranks of a copy of the model call different modules of it")

    for name, function in zip(COMPARING, (same_length, of_first), strict=True):
        setattr(module, name, function)


def _nothing(*args: Any, **how: Any) -> None: ...


def config_of_copy(config: dict[str, Any], first_ranks: int, copy_ranks: int) -> dict[str, Any]:
    """Return a DeepSpeed config that was made for `first_ranks` for the engine of a copy of the
    model. Raises BadInput."""
    total = config.get("train_batch_size")
    if not isinstance(total, int):
        return config
    rounds = config.get("gradient_accumulation_steps", 1)
    each = config.get("train_micro_batch_size_per_gpu") or total // (rounds * first_ranks)
    if total != each * rounds * first_ranks:
        raise BadInput(
            f"DeepSpeed's config: wanted train_batch_size={each * rounds * first_ranks} ({each} "
            f"samples, {rounds} times, on each of {first_ranks} ranks), found {total}; write "
            '"train_batch_size": "auto"'
        )
    return {**config, "train_batch_size": each * rounds * copy_ranks}
