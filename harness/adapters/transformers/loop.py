"""The Trainer of transformers on our steps: what each of its parts does for all ranks together.
Runs in the worker.

The Trainer sees a world of one, or of the ranks over which it splits one copy of the model, and
accumulates M micro-batches per step (`trainer_step.py`). Between one step's sums and the next step
every rank does the same: clip, step, log, evaluate, save (only rank 0 writes), and then decide
whether to go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.adapters.deepspeed_copies import EngineOfCopy
from harness.adapters.transformers import limits
from harness.adapters.transformers.data import SharedEvaluation, TrainerFeed, shares_losses, spelled
from harness.adapters.transformers.ranks_together import AllRanks, Hooks, Original
from harness.adapters.transformers.state import TrainerKept, reading_ranks
from harness.adapters.transformers.trainer_step import TrainerSteps
from harness.adapters.unused_parameters import UnusedParameters
from harness.adapters.whole_copies import copies_of
from harness.core.batch import seed_for
from harness.core.world import BadInput
from harness.loops.own_loop import OwnLoop, own_loop, script_world
from harness.worker.batches.loader import seed_everything
from harness.worker.session import Session
from harness.worker.training_state import Judged

# decisions of callbacks
FLAGS = (
    "should_training_stop",
    "should_epoch_stop",
    "should_save",
    "should_evaluate",
    "should_log",
)


def accumulate(args: Any, script_world: int, copy_ranks: int) -> None:
    """Set the accumulation so that one copy of the model, of `copy_ranks` ranks, makes the step of
    the script's own world. Raises BadInput."""
    own = vars(args).setdefault("_harness_accumulation", args.gradient_accumulation_steps)
    # with split_batches a batch spans all ranks, and so does a step
    ranks = copy_ranks if args.accelerator_config.split_batches else script_world
    args.gradient_accumulation_steps, odd = divmod(own * ranks, copy_ranks)
    if odd:
        raise BadInput(
            f"transformers: a step has {own} batches on each of {ranks} ranks, found copies of the "
            f"model of {copy_ranks} ranks, which share no whole number of them; begin the run with "
            f"whole copies, or use a gradient accumulation that {copy_ranks} divides"
        )


def has_length(loader: Any) -> bool:
    try:
        len(loader)
    # the same exceptions as in transformers
    except (TypeError, AttributeError, NotImplementedError):
        return False
    return True


@dataclass
class EpochPlan:
    """The Trainer's epochs, and the batches in each."""

    epochs: int
    batches: int
    last_step: int
    loader: Any
    sized: bool


class HostedTrainer:
    """One `train()` of a transformers.Trainer, as a context manager with hooks in its methods.

    `extra`: further state of the script, by name.
    """

    def __init__(self, run: Session, trainer: Any, extra: dict[str, Any]):
        self._run, self._trainer, self._extra = run, trainer, extra
        self._company, self._hooks = AllRanks(run), Hooks()
        self._kept = TrainerKept(trainer, self._company)
        self._place = self._kept.place
        self._plan: EpochPlan | None = None
        self._prepared: tuple[Any, TrainerFeed] | None = None
        self._loop: OwnLoop | None = None
        self._steps: TrainerSteps | None = None
        self._evaluates_first = trainer.args.eval_on_start
        self._resumed = False  # and the epoch that it was in has not begun again yet
        self._due = False  # steps were made since the last boundary
        self._in_step = False  # the Trainer logs and evaluates for the newest of them

    def __enter__(self) -> HostedTrainer:
        """Check the Trainer and put the hooks in place. Raises BadInput."""
        limits.check(self._trainer, self._run)
        limits.tell(self._trainer, self._run)
        limits.without_jit(self._trainer)
        accumulate(self._trainer.args, script_world(self._run), self._run.replica_ranks)
        put, trainer, handler = self._hooks.put, self._trainer, self._trainer.callback_handler
        put(trainer, "set_initial_training_values", self._set_initial_training_values)
        put(trainer, "_init_training_state", self._init_training_state)
        put(trainer, "_prepare_for_training", self._prepare_for_training)
        put(trainer, "_run_epoch", self._run_epoch)
        put(trainer, "_load_rng_state", self._load_rng_state)
        put(trainer, "_maybe_log_save_evaluate", self._maybe_log_save_evaluate)
        put(trainer, "evaluation_loop", self._evaluation_loop)
        put(trainer, "_save_checkpoint", self._save_checkpoint)
        put(trainer, "_load_best_model", self._load_best_model)
        put(trainer, "_finalize_training", self._finalize_training)
        put(handler, "on_prediction_step", self._on_prediction_step)
        put(handler, "on_train_begin", self._on_train_begin)
        put(handler, "on_epoch_begin", self._on_epoch_begin)
        put(handler, "on_optimizer_step", self._on_optimizer_step)
        put(handler, "on_step_end", self._on_step_end)
        put(handler, "on_epoch_end", self._on_epoch_end)
        return self

    def __exit__(self, *why: Any) -> None:
        self._hooks.clear()
        self._trainer.args.eval_on_start = self._evaluates_first

    # ---- beginning -------------------------------------------------------------------------------
    def _set_initial_training_values(self, original: Original, args: Any, dataloader: Any) -> Any:
        found = original(args, dataloader)
        epochs, _, _, _, _, batches, last_step = found
        self._plan = EpochPlan(epochs, batches, last_step, dataloader, has_length(dataloader))
        return found

    def _init_training_state(
        self,
        original: Original,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        """Prepare early and return the place to begin at. The Trainer makes its optimizer after it
        asks for the place, which we know only with the optimizer. `_prepare_for_training` returns
        it later."""
        original(max_steps, num_update_steps_per_epoch, num_train_epochs, None, trial)
        self._begin(max_steps)
        place, plan = self._place, self._plan
        assert plan is not None
        self._resumed = self._run.step > 0
        if self._resumed:
            self._trainer.args.eval_on_start = False  # it was evaluated at the run's start
        if place.over or self._run.step >= plan.last_step:
            return plan.epochs, 0
        return place.epoch, place.batches

    def _begin(self, max_steps: int) -> None:
        trainer, plan = self._trainer, self._plan
        assert plan is not None
        accumulation = trainer.args.gradient_accumulation_steps
        seed = trainer.args.seed
        first, tell = self._company.value_of_first, self._run.print
        parts = reading_ranks(trainer)
        feed = TrainerFeed(plan.loader, accumulation, seed, first, tell, parts)
        model, _ = trainer._prepare_for_training(max_steps, plan.loader, None)
        self._prepared = model, feed
        settle = self._prepare(model, feed)
        with self._kept.loading():
            self._loop = own_loop(
                self._run,
                micro_batches=accumulation,
                micro_batch=trainer._train_batch_size * parts,
                data=spelled(trainer),
                seed=seed,
                total=max_steps,
                adapter="transformers",
                per_device=not trainer.args.accelerator_config.split_batches,
                reading_ranks=parts,
            )
        feed.share(self._loop.share, self._loop.reading.number)
        steps = self._steps = TrainerSteps(trainer, self._company, self._loop, plan.sized, settle)
        put = self._hooks.put
        put(trainer, "get_batch_samples", steps.get_batch_samples)
        put(trainer, "training_step", steps.training_step)
        put(trainer, "floating_point_ops", steps.floating_point_ops)
        put(trainer, "_track_num_input_tokens", steps.track_num_input_tokens)

    def _prepare(self, model: Any, feed: TrainerFeed) -> Callable[[Judged], None]:
        """Prepare what the Trainer trains. Return what to do with each step's sums before its
        optimizer steps."""
        trainer, run = self._trainer, self._run
        if trainer.is_deepspeed_enabled:
            engine = EngineOfCopy(run, model, "transformers")
            self._hooks.put(
                trainer.accelerator.deepspeed_engine_wrapped, "backward", engine.backward
            )
            run.prepare(
                engine.model,
                engine.optimizer,  # type: ignore[arg-type] # all that is used of one
                scheduler=engine.scheduler(trainer.lr_scheduler),
                state={**self._kept.named(engine.model), "data": feed, **self._extra},
                strategy=engine.strategy,
            )
            return engine.step
        plain = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
        run.prepare(
            plain,
            getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            scheduler=trainer.lr_scheduler,
            scaler=trainer.accelerator.scaler,
            state={**self._kept.named(trainer.model), "data": feed, **self._extra},
            strategy=copies_of(run, plain),
        )
        unused = UnusedParameters(run, plain)
        return lambda judged: unused.drop()

    def _prepare_for_training(
        self, original: Original, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> tuple[Any, Any]:
        if self._prepared is None:
            model, loader = original(max_steps, train_dataloader, None)
            return model, loader
        return self._prepared

    def _on_train_begin(
        self, original: Original, args: Any, state: Any, control: Any, **more: Any
    ) -> Any:
        self._kept.memory.give_losses()
        control = original(args, state, control, **more)
        self._kept.memory.give_callbacks()
        self._kept.tensors.give()
        self._seed_between()
        return control

    # ---- epochs ----------------------------------------------------------------------------------
    def _run_epoch(self, original: Original, **how: Any) -> None:
        """Run an epoch. The Trainer passes all arguments by name."""
        assert self._steps is not None and self._prepared is not None
        self._place.epoch, self._steps.batches = how["epoch"], 0
        if self._resumed:
            self._steps.batches = self._place.batches
            self._prepared[1].seek(self._place.epoch, self._place.batches)
            # this makes it skip batches (see `hf_trainer`) and load generators
            how["resume_from_checkpoint"] = "harness"
            self._resumed = False
        original(**how)

    def _on_epoch_begin(
        self, original: Original, args: Any, state: Any, control: Any, **more: Any
    ) -> Any:
        if self._resumed and self._place.batches:
            control.should_epoch_stop = False
            return control  # callbacks were called when the epoch began
        return original(args, state, control, **more)

    def _load_rng_state(self, original: Original, checkpoint: Any) -> None:
        """Skip loading: the generators are already as they would have been."""

    def _seed_between(self) -> None:
        """Seed the generators, so that draws between two steps do not depend on what other ranks,
        or an earlier process, did."""
        loop = self._loop
        assert loop is not None
        seed_everything(seed_for(self._trainer.args.seed, self._run.step, loop.micro_batches + 1))

    # ---- the end of steps ------------------------------------------------------------------------
    def _on_optimizer_step(
        self, original: Original, args: Any, state: Any, control: Any, **more: Any
    ) -> Any:
        assert self._steps is not None
        control = original(args, state, control, **more)
        self._steps.optimized()
        return control

    def _on_step_end(
        self, original: Original, args: Any, state: Any, control: Any, **more: Any
    ) -> Any:
        assert self._steps is not None
        self._steps.end()
        self._due = self._in_step = True
        return self._decided(original(args, state, control, **more))

    def _on_epoch_end(
        self, original: Original, args: Any, state: Any, control: Any, **more: Any
    ) -> Any:
        return self._decided(original(args, state, control, **more))

    def _decided(self, control: Any) -> Any:
        """Apply rank 0's decisions on all ranks. Callbacks may look at clocks and files."""
        if not self._company.alone:
            flags = [getattr(control, name) for name in FLAGS]
            for name, flag in zip(FLAGS, self._company.value_of_first(flags), strict=True):
                setattr(control, name, flag)
        return control

    def _maybe_log_save_evaluate(self, original: Original, *args: Any, **how: Any) -> None:
        """Close a step, and then an epoch. The last step of an epoch is over only after the second
        call: otherwise a resume would lose what the epoch's end triggers."""
        in_step, self._in_step = self._in_step, False
        control, plan, place = self._trainer.control, self._plan, self._place
        assert plan is not None and self._steps is not None
        acts = control.should_log or control.should_evaluate or control.should_save
        original(*args, **how)
        control = self._trainer.control
        if acts:
            self._decided(control)
        stops = control.should_training_stop or control.should_epoch_stop
        if in_step:
            if stops or (plan.sized and self._steps.batches >= plan.batches):
                return
            place.batches = self._steps.batches
        elif control.should_training_stop and self._steps.batches < plan.batches:
            place.batches = self._steps.batches
        else:
            place.epoch, place.batches = place.epoch + 1, 0
        # stopped by a callback: a user who asks for more steps later must get them
        place.over = control.should_training_stop and self._run.step < plan.last_step
        if self._due:
            self._boundary()

    def _boundary(self) -> None:
        assert self._loop is not None
        self._due = False
        self._loop.boundary()
        self._seed_between()

    def _finalize_training(
        self, original: Original, trial: Any, num_train_samples: Any, start_time: float
    ) -> Any:
        assert self._loop is not None
        if self._due:
            self._boundary()
        self._loop.finished()
        if self._company.writes:
            self._write_best()
        return original(trial, num_train_samples, start_time - self._kept.memory.spent.before_s)

    def _write_best(self) -> None:
        """Write the best weights, because the Trainer looks for a file that may be on another
        node."""
        trainer, best = self._trainer, self._kept.best
        folder = trainer.state.best_model_checkpoint
        if folder is None or os.path.isdir(folder):
            return
        if best is None or not best.step:
            trainer.state.best_model_checkpoint = None
            return
        best.put()
        trainer.save_model(folder, _internal_call=True)

    # ---- evaluation and files --------------------------------------------------------------------
    def _evaluation_loop(
        self,
        original: Original,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        *args: Any,
        **how: Any,
    ) -> Any:
        """Evaluate, and return rank 0's metrics on all ranks, because callbacks decide by them."""
        trainer, company, losses = self._trainer, self._company, prediction_loss_only
        if company.alone:
            return original(dataloader, description, losses, *args, **how)
        wanted = trainer.args.prediction_loss_only if losses is None else losses
        if wanted and shares_losses(trainer):
            with SharedEvaluation(trainer, company).over(dataloader) as rounds:
                output = original(rounds, description, losses, *args, **how)
        else:
            output = original(dataloader, description, losses, *args, **how)
        return output._replace(metrics=company.value_of_first(output.metrics))

    def _on_prediction_step(self, original: Original, *args: Any, **more: Any) -> Any:
        self._run.alive()  # an evaluation may take far longer than a step
        return original(*args, **more)

    def _save_checkpoint(self, original: Original, model: Any, trial: Any) -> None:
        """Save on rank 0, whose copy's ranks help it. All ranks learn which checkpoint is the
        best."""
        state = self._trainer.state
        if self._company.writes:
            original(model, trial)
        if not self._company.alone:
            state.best_model_checkpoint = self._company.value_of_first(state.best_model_checkpoint)
        best = self._kept.best
        if best is not None and state.best_global_step == state.global_step:
            best.take(state.global_step)

    def _load_best_model(self, original: Original) -> None:
        """Load from memory: the checkpoint may be on another node's disk."""
        best = self._kept.best
        if best is None or not best.step:
            original()
            return
        best.put()
