"""Patches that make an unchanged Lightning Trainer elastic, in `lightning.pytorch` and in
`pytorch_lightning`. Runs in the worker.

The Trainer receives our strategy (`strategy.py`) instead of its own. All other patches
consult that strategy, and leave Lightning's behaviour alone where there is none.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from harness.adapters import framework_claim
from harness.adapters.lightning.limits import check_strategy
from harness.adapters.lightning.loop import LightningCopy, LightningSteps
from harness.adapters.lightning.parts import with_cluster
from harness.adapters.lightning.state import go_on
from harness.adapters.lightning.strategy import make_strategy
from harness.core.world import BadInput
from harness.worker.batches import rng_state

CONNECTORS = "trainer.connectors"


def patch(module: ModuleType) -> None:
    """Replace functions of this copy of Lightning. Runs once per copy."""
    copy = LightningCopy(module.__name__)
    connector = copy.part(f"{CONNECTORS}.accelerator_connector")._AcceleratorConnector
    if getattr(connector.__init__, "harness", False):
        return
    put(connector, "__init__", _connector(copy))
    connector.__init__.harness = True
    fit, epoch = copy.part("loops.fit_loop"), copy.part("loops.training_epoch_loop")
    put(fit._FitLoop, "run", _run)
    put(fit._FitLoop, "on_advance_end", _epoch_end)
    put(epoch._TrainingEpochLoop, "reset", _reset)
    put(epoch._TrainingEpochLoop, "on_advance_end", _advanced)
    automatic = copy.part("loops.optimization.automatic")
    put(automatic._AutomaticOptimization, "_make_closure", _make_closure(automatic))
    put(automatic._AutomaticOptimization, "_make_zero_grad_fn", _make_zero_grad)
    put(automatic._AutomaticOptimization, "_training_step", _training_step)
    put(copy.part("core.module").LightningModule, "_on_before_batch_transfer", _arrive)
    logger = copy.part(f"{CONNECTORS}.logger_connector.logger_connector")._LoggerConnector
    put(logger, "epoch_end_reached", _epoch_end_reached)
    put(logger, "update_eval_epoch_metrics", _evaluated)
    signals = copy.part(f"{CONNECTORS}.signal_connector")._SignalConnector
    put(signals, "register_signal_handlers", _no_handlers)
    calls = copy.part("trainer.call")
    put(calls, "_interrupt", _interrupt)
    put(calls, "_call_callback_hooks", _callback_hooks)
    put(calls, "_call_lightning_module_hook", _module_hook)
    data = copy.part(f"{CONNECTORS}.data_connector")
    put(data, "_auto_add_worker_init_fn", _same_workers)


def put(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function with one that may call it."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def steps_of(trainer: Any) -> LightningSteps | None:
    """Return the trainer's steps, or None if the trainer is not ours."""
    return getattr(trainer.strategy, "harness_steps", None)


def fitting(trainer: Any) -> LightningSteps | None:
    """Return the trainer's steps while it is fitting with them, else None."""
    steps = steps_of(trainer)
    return steps if steps is not None and steps.loop is not None else None


# ---- construction of the Trainer -----------------------------------------------------------------
def _connector(copy: LightningCopy) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        signature = inspect.signature(original)

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(self, *args, **kwargs)
            strategy = bound.arguments.get("strategy", "auto")
            if not hasattr(strategy, "harness_steps"):
                # attaching seeds the generators, which the script has already seeded
                with rng_state.kept():
                    run = framework_claim.claim("lightning")
                if run is None:
                    original(self, *args, **kwargs)
                    return
                copy.check()
                if isinstance(strategy, str) and strategy.startswith("deepspeed"):
                    strategy = copy.part("strategies").StrategyRegistry.get(strategy)
                check_strategy(strategy, run.replica_ranks)
                elastic = make_strategy(run, copy, strategy)
                _take_over(elastic, strategy)
                bound.arguments["strategy"] = elastic
            _alone(copy, bound.arguments)
            original(*bound.args, **bound.kwargs)

        return init

    return make


def _take_over(elastic: Any, strategy: Any) -> None:
    """Copy what the script has put into its own strategy."""
    for name in ("_precision_plugin", "_checkpoint_io"):
        if getattr(strategy, name, None) is not None:
            setattr(elastic, name, getattr(strategy, name))


def _alone(copy: LightningCopy, arguments: dict[str, Any]) -> None:
    """Restrict the Trainer to one device on one node, without a cluster, or with the ranks of a
    copy of the model for one. Raises BadInput."""
    device = arguments["strategy"].root_device
    if arguments.get("accelerator", "auto") == "cpu" and device.type != "cpu":
        raise BadInput(
            "Trainer(accelerator='cpu') on a machine with a GPU: wanted the device of this rank, "
            f"{device}; leave the argument out, or set CUDA_VISIBLE_DEVICES to nothing"
        )
    arguments["devices"], arguments["num_nodes"] = 1, 1
    environments = copy.fabric("plugins.environments")
    of_copy = arguments["strategy"].harness_steps.run.replica_ranks > 1
    arguments["plugins"] = with_cluster(arguments.get("plugins"), environments, of_copy)


def _no_handlers(original: Any) -> Any:
    def register_signal_handlers(self: Any) -> None:
        """Leave signals to the node agent: Lightning's handler would stop ranks one by one."""
        steps = steps_of(self.trainer)
        if steps is None:
            original(self)
        elif "SLURM_JOB_ID" in os.environ and steps.trainer.state.fn == "fit":
            steps.run.print(
                "harness: Lightning's handlers of SIGTERM and its Slurm requeue are not heeded: a "
                "notice is answered by a snapshot at the next step"
            )

    return register_signal_handlers


def _same_workers(original: Any) -> Any:
    def add(dataloader: Any, rank: int) -> None:
        """Give the workers of all copies the same seeds, because each evaluates everything."""
        run = framework_claim.enter() if framework_claim.claimed() == "lightning" else None
        original(dataloader, rank if run is None else rank % run.replica_ranks)

    return add


# ---- the loops -----------------------------------------------------------------------------------
def _run(original: Any) -> Any:
    def run(self: Any) -> None:
        original(self)
        if steps := fitting(self.trainer):
            steps.finished()

    return run


def _epoch_end(original: Any) -> Any:
    def on_advance_end(self: Any) -> None:
        original(self)
        if steps := fitting(self.trainer):
            steps.epoch_ended()

    return on_advance_end


def _reset(original: Any) -> Any:
    def reset(self: Any) -> None:
        original(self)
        steps = fitting(self.trainer)
        if steps is not None and steps.state is not None and steps.state.resumed:
            go_on(self.trainer.fit_loop)

    return reset


def _advanced(original: Any) -> Any:
    def on_advance_end(self: Any, data_fetcher: Any) -> None:
        original(self, data_fetcher)
        if steps := fitting(self.trainer):
            steps.advanced()

    return on_advance_end


def _arrive(original: Any) -> Any:
    def _on_before_batch_transfer(self: Any, batch: Any, dataloader_idx: int = 0) -> Any:
        trainer = self._trainer
        steps = fitting(trainer) if trainer is not None and trainer.training else None
        if steps is None:
            return original(self, batch, dataloader_idx)
        batch = steps.arrive(batch)
        if steps.foreign and steps.batch is not None:
            return batch
        return original(self, batch, dataloader_idx)

    return _on_before_batch_transfer


# ---- one micro-batch -----------------------------------------------------------------------------
class ForeignClosure:
    """The closure of another rank's micro-batch, without forward and backward."""

    def __init__(self, zero_grad: Any, outputs: Any, result: Any):
        self._zero_grad, self._outputs, self._result = zero_grad, outputs, result

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._zero_grad is not None:
            self._zero_grad()

    def consume_result(self) -> Any:
        before = self._outputs
        result = self._result(None, extra={} if before is None else dict(before.extra))
        result.loss = torch.tensor(torch.nan) if before is None else before.loss
        return result


def _make_closure(automatic: Any) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def _make_closure(self: Any, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
            steps = fitting(self.trainer)
            if steps is None or not steps.foreign:
                return original(self, kwargs, optimizer, batch_idx)
            zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)
            return ForeignClosure(zero_grad, steps.outputs, automatic.ClosureResult)

        return _make_closure

    return make


def _make_zero_grad(original: Any) -> Any:
    def _make_zero_grad_fn(self: Any, batch_idx: int, optimizer: Any) -> Any:
        zero_grad, steps = original(self, batch_idx, optimizer), fitting(self.trainer)
        if zero_grad is None or steps is None:
            return zero_grad

        def zero() -> None:
            zero_grad()
            steps.zeroed()

        return zero

    return _make_zero_grad_fn


def _training_step(original: Any) -> Any:
    def _training_step(self: Any, kwargs: Any) -> Any:
        result, steps = original(self, kwargs), fitting(self.trainer)
        if steps is None:
            return result
        if result.closure_loss is None:
            steps.done(None)
        else:
            steps.remember(functools.partial(again, self, kwargs, steps))
        return steps.scaled(result)

    def again(self: Any, kwargs: Any, steps: LightningSteps) -> None:
        loss = steps.scaled(original(self, kwargs)).closure_loss
        if loss is None:
            steps.done(None)
        else:
            self.trainer.strategy.backward(loss, self.trainer.optimizers[0])

    return _training_step


def _callback_hooks(original: Any) -> Any:
    def call(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> None:
        if hook_name == "on_train_batch_end" and (steps := fitting(trainer)):
            steps.logged()
        if not _is_unseen(trainer, hook_name):
            original(trainer, hook_name, *args, **kwargs)
            return
        # Lightning's own callbacks may need to agree with other ranks, and look at no outputs
        every = trainer.callbacks
        trainer.callbacks = [each for each in every if "lightning" in type(each).__module__]
        try:
            original(trainer, hook_name, *args, **kwargs)
        finally:
            trainer.callbacks = every

    return call


def _module_hook(original: Any) -> Any:
    def call(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        if _is_unseen(trainer, hook_name):
            return None
        return original(trainer, hook_name, *args, **kwargs)

    return call


def _is_unseen(trainer: Any, hook_name: str) -> bool:
    if hook_name != "on_train_batch_end":
        return False
    steps = fitting(trainer)
    return steps is not None and steps.unseen


# ---- what is logged ------------------------------------------------------------------------------
def _epoch_end_reached(original: Any) -> Any:
    def epoch_end_reached(self: Any) -> None:
        steps = fitting(self.trainer) if self.trainer.training else None
        if steps is not None and steps.logs is not None:
            with steps.together():
                steps.logs.agree_on_epoch()
        original(self)

    return epoch_end_reached


def _evaluated(original: Any) -> Any:
    def update_eval_epoch_metrics(self: Any) -> Any:
        """Use the first copy's metrics: devices may differ in the last bit, but decisions must
        not."""
        said = original(self)
        steps = fitting(self.trainer)
        if steps is not None and not self.trainer.sanity_checking:
            mine = {name: float(value) for name, value in self._callback_metrics.items()}
            agreed = steps.of_first_copy(mine)
            for name, value in self._callback_metrics.items():
                self._callback_metrics[name] = torch.full_like(value, agreed[name])
        return said

    return update_eval_epoch_metrics


def _interrupt(original: Any) -> Any:
    def interrupt(trainer: Any, exception: BaseException) -> None:
        """Hide a regular departure from the script: leaving at a boundary, or the loss of another
        rank, is no error."""
        steps = steps_of(trainer)
        if steps is None or not steps.cut_off:
            original(trainer, exception)

    return interrupt
