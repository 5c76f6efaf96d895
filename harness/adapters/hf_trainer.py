"""transformers.Trainer (and TRL's trainers, which are subclasses of it), as it is, on any number of
ranks. Runs in the worker; `hook.py` calls `patch` and `patch_arguments`.

What is patched here decides at first use whether it does anything: when training arguments are
made the world is hidden, when a Trainer is made this framework is the one that drives, and
`train()` runs as `HostedTrainer` says.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import xxhash

from harness.adapters import claims
from harness.adapters.hf_company import Company
from harness.adapters.hf_data import TrainerFeed
from harness.adapters.hf_loop import HostedTrainer
from harness.core.world import BadInput
from harness.worker import hidden
from harness.worker.chance import kept
from harness.worker.own_work import OwnWork
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
    """`module`: transformers.trainer."""
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
        # ours was told to (`HostedTrainer`), and does it without reading
        return dataloader if isinstance(dataloader, TrainerFeed) else skip(dataloader, num_batches)

    module.skip_first_batches = skip_first_batches
    setattr(trainer, PATCHED, True)


def patch_arguments(module: Any) -> None:
    """`module`: transformers.training_args."""
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
    """The session whose steps are made by transformers."""
    return claims.enter() if claims.claimed() == "transformers" else None


class ThisScript:
    """Of this process. `asked`: it has asked for an elastic trainer itself, so no hook and no
    --adapt need be there. `trained`: it has called train(). `work`: what it does besides."""

    asked = trained = False
    work: OwnWork | None = None

    @classmethod
    def enter(cls) -> Session | None:
        """See `claims.enter`."""
        return claims.join() if cls.asked else claims.enter()

    @classmethod
    def claim(cls) -> Session | None:
        """See `claims.claim`."""
        return claims.claim("transformers", by_name=cls.asked)


# ---- arguments -----------------------------------------------------------------------------------
def _post_init(theirs: Callable[..., Any], arguments: Any) -> None:
    with kept():  # attaching seeds generators that are the script's here
        run = ThisScript.enter()
    if run is not None:
        patch_turns()
        if ThisScript.work is None:
            ThisScript.work = OwnWork(run.alive)
            ThisScript.work.begin()
    theirs(arguments)


def _if_leading(theirs: Callable[..., bool], self: Any) -> bool:
    """Others than rank 0 write, log and push nothing, though each believes that it is alone."""
    run = _driven()
    return theirs(self) and (run is None or run.rank == 0)


def patch_turns() -> None:
    """TRL prepares its data within these."""
    from accelerate.state import PartialState

    if not vars(PartialState).get(PATCHED):
        PartialState.main_process_first = _in_turns(PartialState.main_process_first, False)
        PartialState.local_main_process_first = _in_turns(PartialState.local_main_process_first)
        setattr(PartialState, PATCHED, True)


def _in_turns(theirs: Callable[..., Any], local: bool = True) -> Callable[..., Any]:
    """The first rank of each node (`local`), or of all, prepares data, and the others find it in
    the cache."""

    @functools.wraps(theirs)
    @contextlib.contextmanager
    def first(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        run = ThisScript.enter() if hidden.world.hidden else None
        if run is None or run.world == 1:
            with theirs(self, *args, **kwargs):
                yield
        else:
            of_each_node = kwargs.get("local", args[0] if args else local)
            with Company(run).leader_first(of_each_node):
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
    """Raises BadInput for a version whose Trainer is another one."""
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
        claims.refuse_unlike(f"Trainer.{name}", method, parameters, version)


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
            "transformers: hyperparameter_search makes many trainings in one script; one run is "
            "one training: launch one for each trial, or run with --adapt none"
        )
    if ThisScript.trained:
        raise BadInput(
            "transformers: this script calls train() a second time; one run is one training: make "
            "the second a script and a run of its own, which begins with the weights of the first"
        )
    _refuse_foreign_checkpoint(resume_from_checkpoint, self.args.output_dir, run)
    _one_wandb_run(self.args, run)
    extra = self.elastic_state() if hasattr(self, "elastic_state") else {}
    work = ThisScript.work or OwnWork(run.alive)
    with HostedTrainer(run, self, extra):
        ThisScript.trained = True
        work.end()
        try:
            return theirs(self, None, None, ignore_keys_for_eval)
        finally:
            work.begin()


def _refuse_foreign_checkpoint(asked: Any, output_dir: str, run: Session) -> None:
    """The run itself knows where it was. Raises BadInput."""
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
    """All attempts write to one run of W&B."""
    if "wandb" in (args.report_to or ()) and run.run_url:
        name = f"harness-{xxhash.xxh3_64_hexdigest(run.run_url.encode())}"
        os.environ.setdefault("WANDB_RUN_ID", name)
        os.environ.setdefault("WANDB_RESUME", "allow")
