"""The features of Lightning that are not supported: they are refused by name before the first step.
Runs in the worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import LBFGS

from harness.core.world import BadInput

# data-parallel strategies of Lightning, which our own sums may replace
REPLACED = ("auto", "ddp", "single_device")
REPLACED_CLASSES = ("DDPStrategy", "SingleDeviceStrategy")
LIMITS = (
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "val_check_interval",
)
# kinds of attributes of a callback that may be counters, histories or averages
KEPT_NOWHERE = (int, float, list, dict, set, torch.Tensor, torch.nn.Module)
CALLBACKS = {
    "GradientAccumulationScheduler": "the batch of a run is the same in all of its steps",
    "BatchSizeFinder": "the batch of a run is the same in all of its steps",
    "LearningRateFinder": "its steps are not the run's; find the rate in a script of its own",
}


def check_strategy(strategy: Any, of: str = "Trainer") -> None:
    """Raise BadInput unless the strategy is plain data parallelism."""
    if isinstance(strategy, str):
        fits = strategy.startswith(REPLACED)
    else:
        fits = strategy is None or type(strategy).__name__ in REPLACED_CLASSES
    if not fits:
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        raise BadInput(
            f"{of}(strategy={name!r}) splits the model, and communicates in every micro-batch: "
            "only data parallelism ('auto', 'ddp') can be made elastic without a change; use that, "
            "or harness.attach() with harness.fsdp2, or --adapt none"
        )


def check_callbacks(trainer: Any) -> None:
    """Raise BadInput for a callback that is not supported."""
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in CALLBACKS and "lightning" in kind.__module__:
                raise BadInput(
                    f"callback {kind.__name__}: {CALLBACKS[kind.__name__]}; leave it out"
                )


def forgotten(trainer: Any) -> Iterator[str]:
    """Yield a line for each callback of the script with values that a resumed run loses."""
    for callback in trainer.callbacks:
        kind = type(callback)
        keeps_its_own = "lightning" not in kind.state_dict.__module__
        if "lightning" in kind.__module__ or keeps_its_own:
            continue
        lost = [
            f"{name} ({type(value).__name__})"
            for name, value in vars(callback).items()
            if isinstance(value, KEPT_NOWHERE) and type(value) is not bool
        ]
        if lost:
            yield (
                f"{kind.__name__} keeps {', '.join(lost)}, which a resumed run begins anew; "
                "give the callback state_dict and load_state_dict if it counts"
            )


def check_fit(trainer: Any, micro_batches: int) -> None:
    """Raise BadInput for an unsupported fit, given data and optimizers. `micro_batches`: per
    step."""
    loop, module = trainer.fit_loop, trainer.lightning_module
    if not module.automatic_optimization and micro_batches > 1:
        raise BadInput(
            f"{type(module).__name__} optimizes by itself (automatic_optimization = False), and "
            f"the run's first world has {micro_batches} ranks: what follows an optimizer's step in "
            "training_step depends on it, so micro-batches cannot be done one after the other; "
            "begin a run with --script-world 1, or use run.steps(...) of harness.attach()"
        )
    loaders = loop._combined_loader.flattened
    if len(loaders) != 1:
        raise BadInput(
            f"wanted one train dataloader, found {len(loaders)}: which rank reads what is known "
            "for one only; put the datasets into one (torch's ConcatDataset or StackDataset)"
        )
    if type(loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
        raise BadInput(
            f"{type(module).__name__}.training_step(dataloader_iter) reads batches by itself, so "
            "nobody can share them out; take `batch` instead"
        )
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, LBFGS):
            raise BadInput(
                "LBFGS calls its closure as often as this rank's loss asks for, which differs "
                "between ranks; use another optimizer, or run.steps with harness.attach()"
            )


def scale_limits(trainer: Any, world: int) -> None:
    """Multiply limits that are numbers of batches per rank of the script's first world: here all of
    its batches come one after the other. Fractions stay the same."""
    for name in LIMITS:
        limit = getattr(trainer, name, None)
        if type(limit) is int and limit > 0:
            setattr(trainer, name, limit * world)
