"""The features of Lightning that are not supported: they are refused by name before the first step.
Runs in the worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.optim import LBFGS

from harness.core.world import BadInput

# data-parallel strategies of Lightning, which our own sums may replace
REPLACED = ("auto", "ddp", "single_device")
REPLACED_CLASSES = ("DDPStrategy", "SingleDeviceStrategy")
SPLITS = "ModelParallelStrategy"
ZERO = "DeepSpeedStrategy"
# what keeps strategies that split a model from being elastic
STRANGE = {
    "fsdp": "FSDP of version 1 keeps its shards in flat buffers",
    "deepspeed": "of Fabric, no adapter of its engine is built",
}
UNKNOWN = "nothing is known of what it communicates"
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

OF_WHOLE_MODELS = dict.fromkeys(
    ("WeightAveraging", "StochasticWeightAveraging"),
    "its average of a model that is split over ranks is not kept",
)


def check_strategy(strategy: Any, copy_ranks: int, of: str = "Trainer") -> None:
    """Raise BadInput unless the strategy is plain data parallelism, or splits the model, by DTensor
    or the Trainer's DeepSpeed, over the `copy_ranks` ranks of a copy of it."""
    if isinstance(strategy, str):
        name, plain = strategy, strategy.startswith(REPLACED)
    else:
        name = "auto" if strategy is None else type(strategy).__name__
        plain = strategy is None or name in REPLACED_CLASSES
    known = (SPLITS, ZERO) if of == "Trainer" else (SPLITS,)
    splits = any(kind.__name__ in known for kind in type(strategy).__mro__)
    if splits and copy_ranks == 1:
        raise BadInput(
            f"{of}(strategy={name}(...)) splits the model over several ranks, and here each rank "
            "is a copy of it; say how many share one: `harness run --mesh dp_shard=8`"
        )
    if plain and copy_ranks > 1:
        raise BadInput(
            f"{copy_ranks} ranks shall share a copy of the model, but {of}(strategy={name!r}) "
            f"splits none; use {' or '.join(known)}, or leave out --mesh"
        )
    if not (plain or splits):
        why = next((said for how, said in STRANGE.items() if how in name.lower()), UNKNOWN)
        where = "parallelize_fn" if of == "Fabric" else "configure_model"
        raise BadInput(
            f"{of}(strategy={name!r}): {why}; use 'ddp', or strategy={SPLITS}(...) with "
            f"fully_shard in {where} and `harness run --mesh dp_shard=8`, or run with --adapt none"
        )


def check_split(module: Any, parts: int) -> None:
    """Raise BadInput for a parameter whose gradient nobody averages over the `parts` ranks of a
    copy that read different samples."""
    units = (part for part in module.modules() if isinstance(part, FSDPModule))
    sharded = {id(p) for unit in units for p in unit.parameters()}  # type: ignore[attr-defined]
    for name, p in module.named_parameters():
        if parts > 1 and p.requires_grad and id(p) not in sharded:
            raise BadInput(
                f"parameter {name} is outside of what fully_shard was called for, so each of "
                f"{parts} ranks of a copy of the model would train one of its own; call "
                "fully_shard(model, mesh=mesh['data_parallel']) for the whole model as well"
            )


def check_callbacks(trainer: Any, copy_ranks: int) -> None:
    """Raise BadInput for a callback that is not supported, with copies of the model on so many
    ranks each."""
    refused = CALLBACKS if copy_ranks == 1 else CALLBACKS | OF_WHOLE_MODELS
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in refused and "lightning" in kind.__module__:
                raise BadInput(f"callback {kind.__name__}: {refused[kind.__name__]}; leave it out")


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
