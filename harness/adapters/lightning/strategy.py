"""The strategy of a Lightning trainer that is one of many ranks but sees a world of one, or of the
ranks of its copy of the model. Runs in the worker.

Lightning consults its strategy about everything that concerns several processes: which one writes
files, what all agree on, when gradients are complete. It derives from Lightning's own strategy for
one device, or from the script's that splits the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from harness.adapters.deepspeed_copies import EngineOfCopy
from harness.adapters.lightning.limits import ZERO
from harness.adapters.lightning.loop import LightningCopy, LightningSteps
from harness.adapters.lightning.parts import OneOfCopy, elastic_like
from harness.worker.session import Session

FITTING = "fit"
MEETING = ("pre_setup", "post_setup")  # after prepare_data, and after setup


class Fitting:
    """A mixin over a strategy, whose `harness_steps` receives the events of the training."""

    harness_steps: LightningSteps

    def harness_engine(self) -> EngineOfCopy | None:
        """Return the engine that trains the model of a fit, or None if Lightning does."""
        return None

    # ---- agreement between ranks -----------------------------------------------------------------
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank 0's object on all ranks."""
        with self.harness_steps.together():
            return self.harness_steps.run._peers.agree(lambda: obj)

    # ---- the fit ---------------------------------------------------------------------------------
    def connect(self, model: Any) -> None:
        super().connect(model)  # type: ignore[misc]
        self.harness_steps.connect(model.trainer)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)  # type: ignore[misc]
        if trainer.state.fn == FITTING:
            self.harness_steps.begin()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Wrap the train dataloader before Lightning iterates it."""
        loader = super().process_dataloader(dataloader)  # type: ignore[misc]
        trainer = self.harness_steps.trainer
        if trainer.state.fn == FITTING and trainer.training:
            return self.harness_steps.deal(loader)
        return loader

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        steps = self.harness_steps
        if not (steps.trainer.training and steps.current is not None):
            return super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]
        if not (steps.foreign and steps.batch is not None):
            batch = super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]
        return steps.transferred(batch)

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)  # type: ignore[misc]
        self.harness_steps.done(closure_loss)
        return loss

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Sum the gradients once the last own micro-batch is done, before loss scaling, hooks or
        clipping look at them."""
        steps = self.harness_steps

        def complete() -> Any:
            result = closure()
            steps.sync()
            if steps.skips(result is None):
                # as Lightning does: optimizers pass over parameters that have no gradient
                for parameter in steps.trainer.lightning_module.parameters():
                    parameter.grad = None
                return None
            if result is None and (steps.foreign or steps.automatic):
                return torch.zeros((), device=self.root_device)  # type: ignore[attr-defined]
            return result

        output = super().optimizer_step(optimizer, complete, model, **kwargs)  # type: ignore[misc]
        steps.stepped()
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.harness_steps.run.alive()
        return super().validation_step(*args, **kwargs)  # type: ignore[misc]


class OneOfMany(Fitting):
    """A mixin over SingleDeviceStrategy. Logs and files see the same ranks as with other
    strategies, but the world has one rank."""

    harness_parts = 1
    global_rank: int
    local_rank: int
    node_rank: int

    def harness_begin(self, run: Session, copy: LightningCopy) -> None:
        """Set up the strategy after its construction."""
        self.harness_steps = LightningSteps(run, copy)
        self.global_rank, self.local_rank = run.rank, run.local_rank
        self.node_rank = 0 if run.rank == 0 else 1
        # loggers, checkpoints and all printing functions use this attribute
        copy.fabric("utilities.rank_zero").rank_zero_only.rank = run.rank

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return rank 0's decision: all ranks evaluate, and may differ in the last bit."""
        return bool(self.broadcast(decision))

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, but only where one of them prepares what the others need."""
        if name in MEETING:
            with self.harness_steps.together():
                self.harness_steps.run._peers.barrier()


class OneOfTrainersCopy(OneOfCopy, Fitting):
    """A mixin over the Trainer's strategies that split a model."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return the first copy's decision."""
        with self.harness_steps.together():
            of_copy = super().reduce_boolean_decision(decision, all)  # type: ignore[misc]
        return bool(self.broadcast(of_copy))

    def barrier(self, name: str | None = None) -> None:
        """Wait for the ranks of the copy, or for all where one prepares what the others need."""
        with self.harness_steps.together():
            if name in MEETING:
                self.harness_steps.run._peers.barrier()
            else:
                super().barrier(name)  # type: ignore[misc]

    # ---- checkpoints -----------------------------------------------------------------------------
    @property
    def _in_snapshot(self) -> bool:
        state = self.harness_steps.state
        return state is not None and state.being_made

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights; for a snapshot, which stores them by itself, not gathered."""
        if self._in_snapshot:
            return dict(self.lightning_module.state_dict())  # type: ignore[attr-defined]
        return super().lightning_module_state_dict()  # type: ignore[misc, no-any-return]

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self._in_snapshot:
            return {}
        return super().optimizer_state(optimizer)  # type: ignore[misc, no-any-return]


class OneOfZeroCopy(OneOfTrainersCopy):
    """A mixin over DeepSpeedStrategy, whose engine spans the ranks of a copy of the model."""

    config: dict[str, Any]
    model: Any

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Return False: the engine is told in which micro-batch a step ends, so the last step of an
        epoch may be short."""
        return False

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        """Block nothing, since the engine reduces when it is told to."""
        return contextlib.nullcontext()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        ranks = self.harness_run.replica_ranks
        return {"num_replicas": ranks, "rank": self.harness_run.rank % ranks}

    def _configure_launcher(self) -> None:
        """Leave this copy's ranks to the node agents, which have started them."""

    def _set_node_environment_variables(self) -> None:
        """Leave the variables alone: they tell of this copy's ranks already."""

    def _format_batch_size_and_grad_accum_config(self) -> None:
        """Tell the engine the script's accumulation, by which it divides losses, instead of the
        micro-batches of a step."""
        super()._format_batch_size_and_grad_accum_config()  # type: ignore[misc]
        self.config["gradient_accumulation_steps"] = self.harness_steps.accumulation

    def harness_engine(self) -> EngineOfCopy:
        """Take over the engine, for a fit. Raises BadInput."""
        return EngineOfCopy(self.harness_run, self.model, "Trainer(strategy=DeepSpeedStrategy())")


def make_strategy(run: Session, copy: LightningCopy, theirs: Any = None) -> Any:
    """Return an elastic strategy for a Trainer of this copy of Lightning. `theirs`: the script's,
    which splits the model if ranks share a copy of it. Raises BadInput."""
    if run.replica_ranks > 1:
        zero = any(kind.__name__ == ZERO for kind in type(theirs).__mro__)
        elastic = elastic_like(theirs, OneOfZeroCopy if zero else OneOfTrainersCopy, run)
        elastic.harness_steps = LightningSteps(run, copy)
        return elastic
    base = copy.part("strategies").SingleDeviceStrategy
    strategy = type("ElasticStrategy", (OneOfMany, base), {})(device=run.device)
    strategy.harness_begin(run, copy)
    return strategy
