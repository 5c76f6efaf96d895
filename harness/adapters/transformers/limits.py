"""Requests of a Trainer that cannot be fulfilled here: they are refused, or reported at start, by
name. Runs in the worker."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from harness.adapters.transformers.data import shares_losses
from harness.adapters.transformers.state import is_counter
from harness.core.world import BadInput
from harness.worker.session import Session

# these step inside backward, before gradients are summed
STEP_IN_BACKWARD = ("lomo", "adalomo", "layerwise")
# trainers of TRL that generate their training samples, for all ranks' prompts together
GENERATING = {
    "GRPOTrainer",
    "RLOOTrainer",
    "OnlineDPOTrainer",
    "NashMDTrainer",
    "XPOTrainer",
    "PPOTrainer",
    "GKDTrainer",
    "DistillationTrainer",
}
# trackers that continue one run over all attempts
ONE_RUN = {"wandb", "tensorboard"}
# kinds of attributes that are kept, or need not be
HELD = (nn.Module, type(None), str, bytes, type)


def check(trainer: Any, run: Session) -> None:
    """Raise BadInput for the first setting that would change the training."""
    for what, do in _refusals(trainer, run.device.type, run.replica_ranks):
        raise BadInput(f"transformers: {what}; {do}")


def check_arguments(args: Any, copy_ranks: int) -> None:
    """Raise BadInput for arguments with which no Trainer could be made."""
    zero = getattr(args, "deepspeed_plugin", None) is not None
    if (args.fsdp or zero) and copy_ranks == 1:
        what = "deepspeed" if zero else "fsdp"
        raise BadInput(
            f"transformers: {what} shards the model over several ranks, and here each rank is a "
            "copy of the model; say how many ranks share one: `harness run --mesh dp_shard=8`"
        )


def tell(trainer: Any, run: Session) -> None:
    """Report, on rank 0, settings whose effect differs from what the script's author may expect."""
    for line in _cautions(trainer, run.world):
        run.print(f"harness: {line}")


def _refusals(trainer: Any, device: str, copy_ranks: int) -> Iterator[tuple[str, str]]:
    args, kind = trainer.args, type(trainer)
    if args.device.type != device:
        yield (
            f"the Trainer trains on {args.device}, this worker on its {device}",
            "leave out use_cpu, or hide the GPUs: CUDA_VISIBLE_DEVICES=''",
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size=True would change the batch of a step in the middle of the run",
            "set it to False and choose per_device_train_batch_size",
        )
    yield from _of_copies(trainer, copy_ranks)
    if getattr(args, "parallelism_config", None) is not None:
        yield (
            "parallelism_config splits sequences and models in ways that were never tried here",
            "load the model with distributed_config, or run with --adapt none",
        )
    if args.n_gpu > 1 or trainer.is_model_parallel:
        yield (
            "the model or its batch is spread over several GPUs of one process",
            "load the model without device_map, and let this worker see one GPU",
        )
    name = str(getattr(args.optim, "value", args.optim))
    if any(part in name for part in STEP_IN_BACKWARD):
        yield (
            f"optim={name!r} steps inside backward, before gradients are summed over ranks",
            "use another optimizer",
        )
    if found := GENERATING & {one.__name__ for one in kind.__mro__}:
        yield (
            f"{sorted(found)[0]} generates samples for the prompts of all ranks together, and "
            "keeps them between steps",
            "run it with --adapt none; `harness snapshots watch` can fetch weights for rollouts "
            "elsewhere",
        )
    if inspect.getmodule(kind.get_batch_samples).__name__ != "transformers.trainer":  # type: ignore[union-attr]
        yield (
            f"{kind.__name__}.get_batch_samples is not Trainer's, and would be passed over",
            "do its work in the collator or in training_step",
        )
    if args.train_sampling_strategy == "batch_rebalance":
        yield (
            "train_sampling_strategy='batch_rebalance' makes batches for a number of ranks",
            "use another one",
        )


def _of_copies(trainer: Any, copy_ranks: int) -> Iterator[tuple[str, str]]:
    """Yield what does not fit to copies of the model on so many ranks each."""
    if copy_ranks == 1:
        return
    args, loaded = trainer.args, getattr(trainer, "is_distributed_loading_by_transformers", False)
    sharded = trainer.is_fsdp_enabled or args.fsdp
    if not (sharded or loaded or trainer.is_deepspeed_enabled):
        yield (
            f"{copy_ranks} ranks shall share a copy of the model, but the Trainer splits none",
            "set fsdp=True or deepspeed in its arguments, load the model with distributed_config, "
            "or leave out --mesh",
        )
    if sharded and not trainer.accelerator.is_fsdp2:
        yield (
            "FSDP of version 1 keeps its shards in flat buffers",
            "leave version out of fsdp_config, which means 2",
        )
    if not args.average_tokens_across_devices:
        yield (
            "average_tokens_across_devices=False weighs each rank's loss by its own labels",
            "leave it out",
        )


def _cautions(trainer: Any, world: int) -> Iterator[str]:
    args = trainer.args
    evaluates = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
    if world > 1 and evaluates and not shares_losses(trainer):
        yield (
            "every rank evaluates the whole evaluation set, since more than its losses is wanted; "
            "the numbers of rank 0 hold"
        )
    if args.enable_jit_checkpoint:
        yield "enable_jit_checkpoint is off: a notice is answered by a snapshot at the next step"
    if args.ignore_data_skip:
        yield "ignore_data_skip=True is not heeded: a resumed run goes on behind what it has read"
    if not args.average_tokens_across_devices:
        yield "average_tokens_across_devices=False is not heeded: labels of all ranks are counted"
    if args.save_on_each_node:
        yield "save_on_each_node=True is not heeded: rank 0 alone writes"
    for name in sorted(set(args.report_to or ()) - ONE_RUN - {"none"}):
        yield f"report_to={name!r} begins a run of its own in each attempt"
    if "KTOTrainer" in {one.__name__ for one in type(trainer).__mro__}:
        yield "KTO's KL is of each micro-batch, not of those of all ranks"
    sized = hasattr(trainer.train_dataset, "__len__")
    if not sized and args.gradient_accumulation_steps > 1:
        yield "micro-batches that a stream has left at its end, too few for a step, are not used"
    yield from _forgotten(trainer)


def _forgotten(trainer: Any) -> Iterator[str]:
    """Yield a line for each callback of the script with attributes that a resumed run loses."""
    for callback in trainer.callback_handler.callbacks:
        module = type(callback).__module__.partition(".")[0]
        if module in ("transformers", "trl") or hasattr(callback, "state_dict"):
            continue
        lost = [
            f"{name} ({type(value).__name__})"
            for name, value in vars(callback).items()
            if not is_counter(value)
            and not isinstance(value, HELD)
            and value is not trainer
            and value is not trainer.args
            and not callable(value)
            and not hasattr(value, "shape")
        ]
        if lost:
            yield (
                f"{type(callback).__name__} keeps {', '.join(lost)}, which a resumed run begins "
                "anew; give the callback state_dict and load_state_dict if it counts"
            )


def without_jit(trainer: Any) -> None:
    """Remove the callback whose SIGTERM handler saves within a step, on any rank that gets it."""
    handler = trainer.callback_handler
    handler.callbacks[:] = [
        one for one in handler.callbacks if type(one).__name__ != "JITCheckpointCallback"
    ]
