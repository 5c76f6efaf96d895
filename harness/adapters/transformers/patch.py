"""An unchanged transformers.Trainer (and TRL's trainers, which are subclasses of it) on any number
of ranks. Runs in the worker; `adapters/import_hook.py` calls `patch` and `patch_arguments`.

The patches decide at first use whether they have an effect: making training arguments hides the
world, making a Trainer claims the training for this framework, and `train()` runs as
`HostedTrainer` describes.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import xxhash

from harness.adapters import framework_claim
from harness.adapters.transformers import limits
from harness.adapters.transformers.data import TrainerFeed
from harness.adapters.transformers.loop import HostedTrainer
from harness.adapters.transformers.ranks_together import AllRanks
from harness.core.world import BadInput
from harness.loops.own_loop import OwnWork
from harness.worker import alone
from harness.worker.batches.rng_state import kept
from harness.worker.session import Session

PATCHED = "_harness_patched"
# method of Trainer -> the parameters that this adapter was written for
KNOWN = {
    "train": ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "set_initial_training_values": ("self", "args", "dataloader"),
    "_init_training_state": (
        "self",
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ),
    "_prepare_for_training": ("self", "max_steps", "train_dataloader", "resume_from_checkpoint"),
    "get_batch_samples": ("self", "epoch_iterator", "num_batches", "device"),
    "_get_num_items_in_batch": ("self", "batch_samples", "device"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    "floating_point_ops": ("self", "inputs"),
    "_track_num_input_tokens": ("self", "inputs"),
    "_load_rng_state": ("self", "checkpoint"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_load_best_model": ("self",),
    "_finalize_training": ("self", "trial", "num_train_samples", "start_time"),
}


def patch(module: Any) -> None:
    """Patch `module`, which is transformers.trainer."""
    trainer = module.Trainer
    if vars(trainer).get(PATCHED):
        return
    _wrap(trainer, "__init__", _init)
    _wrap(trainer, "train", _train)
    for name in ("is_world_process_zero", "is_local_process_zero"):
        _wrap(trainer, name, _if_leading)
    skip = module.skip_first_batches

    @functools.wraps(skip)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        # `HostedTrainer` has made ours seek, so it skips without reading
        return dataloader if isinstance(dataloader, TrainerFeed) else skip(dataloader, num_batches)

    module.skip_first_batches = skip_first_batches
    setattr(trainer, PATCHED, True)


def patch_arguments(module: Any) -> None:
    """Patch `module`, which is transformers.training_args."""
    arguments = module.TrainingArguments
    if vars(arguments).get(PATCHED):
        return
    _wrap(arguments, "__post_init__", _post_init)
    for name in ("should_save", "should_log"):
        theirs = vars(arguments)[name].fget
        setattr(arguments, name, property(functools.partial(_if_leading, theirs)))
    arguments.main_process_first = _in_turns(arguments.main_process_first)
    setattr(arguments, PATCHED, True)


def _wrap(owner: type, name: str, ours: Callable[..., Any]) -> None:
    theirs = vars(owner)[name]

    @functools.wraps(theirs)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    setattr(owner, name, wrapped)


def _driven() -> Session | None:
    """Return the session whose steps transformers makes, or None."""
    return framework_claim.enter() if framework_claim.claimed() == "transformers" else None


class ThisScript:
    """The state of this process' script. `asked`: it asked for an elastic trainer by name, so no
    hook or --adapt is needed; `work`: its work outside train()."""

    asked = False
    work: OwnWork | None = None

    @classmethod
    def enter(cls) -> Session | None:
        """Join the world; see `claims.enter`."""
        return framework_claim.join() if cls.asked else framework_claim.enter()

    @classmethod
    def claim(cls) -> Session | None:
        """Claim the training; see `claims.claim`."""
        return framework_claim.claim("transformers", by_name=cls.asked)


# ---- arguments -----------------------------------------------------------------------------------
def _post_init(theirs: Callable[..., Any], arguments: Any) -> None:
    with kept():  # attaching seeds the generators, which belong to the script here
        run = ThisScript.enter()
    if run is not None:
        patch_turns()
        if ThisScript.work is None:
            ThisScript.work = OwnWork(run.alive)
            ThisScript.work.begin()
    theirs(arguments)
    if run is not None:
        limits.check_arguments(arguments, run.replica_ranks)


def patch_splitting(module: Any) -> None:
    """Patch `module`, which is transformers.distributed.configuration_utils: a model that is split
    as it is loaded must find the ranks of its copy."""
    _wrap(module.DistributedConfig, "__post_init__", _split)


def _split(theirs: Callable[..., None], config: Any) -> None:
    with kept():
        run = ThisScript.enter()
    if run is not None and run.replica_ranks == 1:
        raise BadInput(
            "transformers: distributed_config (or tp_plan) splits the model over several ranks, "
            "and here each rank is a copy of the model; say how many ranks share one, such as "
            "`harness run --mesh tp=8`, or run with --adapt none"
        )
    theirs(config)


def _if_leading(theirs: Callable[..., bool], self: Any) -> bool:
    """Return the original answer on rank 0, else False: only rank 0 may write, log and push."""
    run = _driven()
    return theirs(self) and (run is None or run.rank == 0)


def patch_turns() -> None:
    """Patch the context managers within which TRL prepares its data."""
    from accelerate.state import PartialState

    if not vars(PartialState).get(PATCHED):
        PartialState.main_process_first = _in_turns(PartialState.main_process_first, False)
        PartialState.local_main_process_first = _in_turns(PartialState.local_main_process_first)
        setattr(PartialState, PATCHED, True)


def _in_turns(theirs: Callable[..., Any], local: bool = True) -> Callable[..., Any]:
    """Return a context manager in which the first rank of each node (`local`), or of all, prepares
    data that the others then find in the cache."""

    @functools.wraps(theirs)
    @contextlib.contextmanager
    def first(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        run = ThisScript.enter() if alone.world.hidden else None
        if run is None or run.world == 1:
            with theirs(self, *args, **kwargs):
                yield
        else:
            of_each_node = kwargs.get("local", args[0] if args else local)
            with AllRanks(run).leader_first(of_each_node):
                yield

    return first


# ---- trainers ------------------------------------------------------------------------------------
def _init(theirs: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    with kept():
        run = ThisScript.claim()
    if run is not None:
        check_version(type(self))
    theirs(self, *args, **kwargs)


def check_version(kind: type) -> None:
    """Raise BadInput if this version's Trainer is not the one that the adapter knows."""
    import transformers

    version = f"transformers {transformers.__version__}"
    base = next(one for one in kind.__mro__ if vars(one).get(PATCHED))
    for name, parameters in KNOWN.items():
        method = vars(base).get(name)
        if method is None:
            raise BadInput(
                f"{version} has no Trainer.{name}, which this adapter needs; install a version "
                "that docs/trainers/transformers.md names, or run the script with --adapt none (it "
                "then keeps its own checkpoints)"
            )
        framework_claim.refuse_unlike(f"Trainer.{name}", method, parameters, version)


def _train(
    theirs: Callable[..., Any],
    self: Any,
    resume_from_checkpoint: Any = None,
    trial: Any = None,
    ignore_keys_for_eval: Any = None,
) -> Any:
    run = _driven()
    if run is None:
        return theirs(self, resume_from_checkpoint, trial, ignore_keys_for_eval)
    if trial is not None or getattr(self, "hp_search_backend", None) is not None:
        raise BadInput(
            "transformers: hyperparameter_search keeps its trials outside of the run, which could "
            "not go through them again; launch a run for each trial, or run with --adapt none"
        )
    _refuse_foreign_checkpoint(resume_from_checkpoint, self.args.output_dir, run)
    _one_wandb_run(self.args, run)
    extra = self.elastic_state() if hasattr(self, "elastic_state") else {}
    work = ThisScript.work or OwnWork(run.alive)
    with HostedTrainer(run, self, extra):
        run.next_phase()  # what is refused above has trained nothing
        work.end()
        try:
            return theirs(self, None, None, ignore_keys_for_eval)
        finally:
            work.begin()


def _refuse_foreign_checkpoint(asked: Any, output_dir: str, run: Session) -> None:
    """Raise BadInput for a foreign checkpoint. The run resumes from its own snapshots."""
    if not asked:
        return
    folder = os.path.abspath(output_dir)
    if asked is True or os.path.abspath(str(asked)).startswith(folder + os.sep):
        run.print(
            "harness: resume_from_checkpoint is not needed: the run goes on from its newest "
            "snapshot, and begins where it has none"
        )
        return
    raise BadInput(
        f"transformers: resume_from_checkpoint={str(asked)!r} is not this run's: a run begins with "
        "weights and goes on from its own snapshots; load the weights with from_pretrained, and "
        "leave out resume_from_checkpoint"
    )


def _one_wandb_run(args: Any, run: Session) -> None:
    """Make all attempts write to a single W&B run."""
    if "wandb" in (args.report_to or ()) and run.run_url:
        name = f"harness-{xxhash.xxh3_64_hexdigest(run.run_url.encode())}"
        os.environ.setdefault("WANDB_RUN_ID", name)
        os.environ.setdefault("WANDB_RESUME", "allow")
