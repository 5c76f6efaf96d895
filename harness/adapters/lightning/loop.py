"""The steps of a Lightning trainer, reported to the harness. Runs in the worker.

There is one object per trainer; the functions that `patch.py` puts into Lightning's
loops call it.

Lightning sees a world of one, and accumulates M micro-batches per step. This rank does those of its
share. For each of the others Lightning runs its loop with a placeholder, this rank's newest batch,
so that counters, hooks and callbacks advance equally on every rank; forward and backward are
skipped.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from harness.adapters.framework_claim import refuse_unlike
from harness.adapters.lightning.data import Dealt, TrainLoader
from harness.adapters.lightning.limits import (
    check_callbacks,
    check_fit,
    check_split,
    forgotten,
    scale_limits,
)
from harness.adapters.lightning.metrics import StepLogs
from harness.adapters.lightning.parts import batch_size, first_copies
from harness.adapters.lightning.state import LightningState
from harness.adapters.unused_parameters import UnusedParameters
from harness.adapters.whole_copies import copies_of, own_parts
from harness.core.world import BadInput
from harness.loops.own_loop import OwnLoop, OwnStep, own_loop
from harness.loops.shared_batches import SharedLoader
from harness.worker.batches.loader import fingerprint
from harness.worker.session import Session

# A copy of Lightning: it is published as `lightning.pytorch` and as `pytorch_lightning`, which
# share no class.

FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
# functions of Lightning that are replaced or called: module, function, its parameters
KNOWN = (
    ("trainer.call", "_interrupt", ("trainer", "exception")),
    ("loops.fit_loop", "_FitLoop.run", ("self",)),
    ("loops.fit_loop", "_FitLoop.setup_data", ("self",)),
    ("loops.fit_loop", "_FitLoop.on_advance_end", ("self",)),
    ("loops.training_epoch_loop", "_TrainingEpochLoop.reset", ("self",)),
    ("loops.training_epoch_loop", "_TrainingEpochLoop.on_advance_end", ("self", "data_fetcher")),
    ("loops.training_epoch_loop", "_TrainingEpochLoop._should_accumulate", ("self",)),
    (
        "loops.optimization.automatic",
        "_AutomaticOptimization._make_closure",
        ("self", "kwargs", "optimizer", "batch_idx"),
    ),
    (
        "loops.optimization.automatic",
        "_AutomaticOptimization._make_zero_grad_fn",
        ("self", "batch_idx", "optimizer"),
    ),
    ("loops.optimization.automatic", "_AutomaticOptimization._training_step", ("self", "kwargs")),
    ("loops.optimization.manual", "_ManualOptimization.advance", ("self", "kwargs")),
    (
        "core.module",
        "LightningModule._on_before_batch_transfer",
        ("self", "batch", "dataloader_idx"),
    ),
    (
        "trainer.connectors.signal_connector",
        "_SignalConnector.register_signal_handlers",
        ("self",),
    ),
    (
        "trainer.connectors.checkpoint_connector",
        "_CheckpointConnector.dump_checkpoint",
        ("self", "weights_only"),
    ),
    (
        "trainer.connectors.logger_connector.logger_connector",
        "_LoggerConnector.epoch_end_reached",
        ("self",),
    ),
    (
        "trainer.connectors.logger_connector.logger_connector",
        "_LoggerConnector.update_eval_epoch_metrics",
        ("self",),
    ),
)


class LightningCopy:
    """One copy of Lightning. `root`: "lightning.pytorch" or "pytorch_lightning"."""

    def __init__(self, root: str):
        self.root = root

    def part(self, name: str) -> Any:
        """Return a module of the copy, such as "loops.fit_loop"."""
        return importlib.import_module(f"{self.root}.{name}")

    def fabric(self, name: str) -> Any:
        """Return a module of the Fabric that belongs to the copy."""
        return importlib.import_module(f"{FABRIC[self.root]}.{name}")

    def found(self, module: str, name: str) -> Any:
        """Return a function, or a method given as "Class.method", or None."""
        thing = self.part(module)
        for part in name.split("."):
            thing = getattr(thing, part, None)
        return thing

    @property
    def version(self) -> str:
        return f"{self.root} {importlib.import_module(self.root).__version__}"

    def check(self) -> None:
        """Raise BadInput unless the adapter knows this version."""
        for module, name, parameters in KNOWN:
            refuse_unlike(name, self.found(module, name), parameters, self.version)


class LightningSteps:
    """The training driver of one trainer. `loop`: None before the fit has begun; `step`: the one in
    progress; `current`: Lightning's current micro-batch; `batch`, `outputs` (a ClosureResult): what
    hooks see for foreign micro-batches; `cut_off`: this rank leaves, or another one is gone."""

    def __init__(self, run: Session, copy: LightningCopy):
        self.run, self.copy = run, copy
        self.trainer: Any = None
        self.accumulation = 1
        self.loader: TrainLoader | None = None
        self.loop: OwnLoop | None = None
        self.step: OwnStep | None = None
        self.current: Dealt | None = None
        self.batch: Any = None
        self.outputs: Any = None
        self.cut_off = False
        self._unused: UnusedParameters | None = None
        # own micro-batches of this step, in case it must be repeated (exact sums)
        self._repeat: list[tuple[Dealt, Callable[[], None]]] = []
        self.state: LightningState | None = None
        self.logs: StepLogs | None = None

    def __deepcopy__(self, memo: Any) -> LightningSteps:
        """Return itself: a script may copy what leads to a trainer, and there is one training."""
        return self

    # ---- before the first step -------------------------------------------------------------------
    def connect(self, trainer: Any) -> None:
        """Connect to the trainer and scale its limits: they are for one rank of the script's first
        world, while this one sees all of its micro-batches. Raises BadInput."""
        if self.trainer is not trainer:
            self.trainer = trainer
            self.accumulation = trainer.accumulate_grad_batches
            check_callbacks(trainer, self.run.replica_ranks)
            scale_limits(trainer, self.first_copies)
        if trainer.state.fn == "fit":
            self._begin_fit()

    def _begin_fit(self) -> None:
        """Begin a fit, which is not this trainer's first one perhaps. Raises BadInput."""
        self.run.next_phase()
        self.loader = self.loop = self.step = self.current = self.batch = self.outputs = None
        if self.state is not None:
            self.trainer.num_sanity_val_steps = self.state.sanity_steps
        self.state = LightningState(self.trainer, self.run)
        self.state.go_on_logging()
        if self.automatic:
            self.trainer.accumulate_grad_batches = self.micro_batches

    @functools.cached_property
    def first_copies(self) -> int:
        """Copies of the model in the world whose batch is kept."""
        return first_copies(self.run)

    @property
    def _parts(self) -> int:
        """The ranks of a copy of the model that read different parts of a micro-batch."""
        return int(self.trainer.strategy.harness_parts)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a full step."""
        return self.accumulation * self.first_copies

    def deal(self, loader: Any) -> TrainLoader:
        """Return the loader that replaces the script's train dataloader."""
        fit_loop = self.trainer.fit_loop
        self.loader = TrainLoader(loader, lambda: float(fit_loop.max_batches), self._parts)
        if self.loop is not None:  # loaded again for this epoch
            self.loader.share_out(self._shared(), self.micro_batches)
        assert self.state is not None
        self.state.loader = self.loader
        return self.loader

    def begin(self) -> None:
        """Resume, once model and optimizers exist. Raises BadInput, StoreError, SystemExit."""
        trainer, fit_loop = self.trainer, self.trainer.fit_loop
        fit_loop.setup_data()
        if fit_loop._combined_loader is None or not fit_loop.max_batches:
            return  # nothing will be trained
        check_fit(trainer, self.micro_batches)
        assert self.loader is not None and self.state is not None
        self.logs = StepLogs(trainer, self.run, self.accumulation, self.first_copies)
        self._prepare({"lightning": self.state, "metrics": self.logs})
        with self.together():
            self.loop = own_loop(
                self.run,
                micro_batches=self.micro_batches,
                micro_batch=batch_size(self.loader) * self._parts,
                data=fingerprint(self.loader.dataset),
                seed=self.run.seed,
                # a trainer counts the steps of all its fits
                total=max(0, trainer.max_steps - trainer.global_step),
                adapter="lightning",
                reading_ranks=self._parts,
            )
        begins = self.state.take_up()
        self.logs.take_up()
        shared = self._shared()
        if self.state.resumed:
            trainer.num_sanity_val_steps = 0  # it has run before
            shared.load_state_dict(self.state.place)
            shared.resume_at(trainer.current_epoch, begins * self._parts)
        self.loader.share_out(shared, self.micro_batches, begins)
        iter(fit_loop._data_fetcher)
        self._say()

    def _prepare(self, state: dict[str, Any]) -> None:
        """Prepare what the trainer trains. Raises BadInput."""
        trainer, model = self.trainer, self.trainer.lightning_module
        optimizers, engine = list(trainer.optimizers), trainer.strategy.harness_engine()
        if engine is None:
            check_split(model, self._parts)
            self._unused = UnusedParameters(self.run, model)
            strategy = copies_of(self.run, model, deferred=False)
        else:
            self._unused = None
            model, optimizers, strategy = engine.model, engine.optimizer, engine.strategy
        self.run.prepare(model, optimizers, state=state, per_rank={"metrics"}, strategy=strategy)

    def _shared(self) -> SharedLoader:
        assert self.loader is not None and self.loop is not None
        parts, part = self._parts, self.loop.reading.number
        return SharedLoader(
            self.loader.loader,
            micro_batches=self.micro_batches * parts,
            mine=own_parts(self.loop.share, parts, part),
            seed=self.run.seed,
            agree=lambda value: self.run._peers.agree(lambda: value),
            tell=self.run.print,
        )

    def _say(self) -> None:
        self.run.print(
            f"harness: {self.copy.version}: {self.micro_batches} micro-batches a step "
            f"(accumulate_grad_batches {self.accumulation} x the first world's "
            f"{self.first_copies}), on {self.run.world} ranks now"
        )
        for line in forgotten(self.trainer):
            self.run.print(f"harness: {line}")

    # ---- one micro-batch -------------------------------------------------------------------------
    @property
    def foreign(self) -> bool:
        """True if the current micro-batch belongs to another rank."""
        return self.current is not None and not self.current.own

    @property
    def unseen(self) -> bool:
        """True if the micro-batch is another rank's and this rank has no outputs to show for it
        yet. The step's last micro-batch is excluded, because callbacks act then."""
        now = self.current
        return self.foreign and self.outputs is None and now is not None and now.m + 1 < now.count

    def arrive(self, batch: Any) -> Any:
        """Handle a batch that reaches the loop. Return the batch that the loop continues with."""
        assert self.loader is not None and self.loop is not None
        self.current = now = self.loader.dealt.popleft()
        if now.m == 0:
            # ranks compare a stream's samples where it is read, which may be ahead of the loop
            apart = self.loader.shared is not None and self.loader.shared.is_stream
            self.step = self.loop.begin(now.count, rounds=0 if apart else None)
            self._repeat.clear()
        if self.step is None:
            raise BadInput(
                f"micro-batch {now.m} came before the first of its step: the epoch was entered at "
                "another place; give fit a checkpoint that was saved at the end of an epoch, or "
                "none"
            )
        if now.own:
            if batch is None:
                raise BadInput("the train dataloader gave None for a batch; wanted a batch")
            contents = now.share.contents
            self.step.read(now.m, now.share.keys if contents is None else None, contents)
            with self.together():
                self.step.micro(now.m)
            return batch
        if self.batch is not None:
            return self.batch
        return self.trainer.precision_plugin.convert_input(self.loader.sample)

    def transferred(self, batch: Any) -> Any:
        """Record a batch that was moved to its device."""
        if not self.foreign or self.batch is None:
            self.batch = batch
        return batch

    def scaled(self, result: Any) -> Any:
        """Correct a ClosureResult whose loss was divided by all micro-batches of a full step, for
        the last ones of an epoch. Hooks see the loss of the first world."""
        now = self.current
        if now is None or result.closure_loss is None:
            return result
        if self.first_copies > 1:
            result.loss = result.loss * self.first_copies
        divisor = self.accumulation * self._beside(now)
        if divisor != self.micro_batches:
            result.closure_loss = result.closure_loss * (self.micro_batches / divisor)
        self.outputs = result
        return result

    def _beside(self, now: Dealt) -> int:
        """Return how many ranks of the first world would have had a micro-batch in this one's
        round. Lightning takes the mean over them."""
        round_begins = now.m - now.m % self.first_copies
        return min(self.first_copies, now.count - round_begins)

    def done(self, loss: torch.Tensor | None) -> None:
        """Finish this micro-batch after its backward. `loss` is scaled; None: the script skipped
        it."""
        now = self.current
        if now is None or not now.own or self.step is None:
            return
        if loss is None:
            self.step.done(now.m, 0.0, 0.0)
            return
        whole = loss.detach() * (self.accumulation * self._beside(now))
        self.step.done(now.m, whole, now.share.count)

    def zeroed(self) -> None:
        """Zero our gradient buffers: the script has set gradients, which are views, to zero or
        None."""
        if self.step is not None:
            self.run.strategy.zero()

    # ---- the step's end --------------------------------------------------------------------------
    def sync(self) -> None:
        """Sum the gradients over all ranks. All own micro-batches are done."""
        if self.step is not None:
            assert self.current is not None
            self.step.samples = self.current.samples
            with self.together():
                self.step.sync(redo=self._again)
                if self._unused is not None:
                    self._unused.drop()

    @property
    def automatic(self) -> bool:
        """Return whether Lightning, not the script, calls backward and the optimizers."""
        return bool(self.trainer.lightning_module.automatic_optimization)

    def skips(self, nothing: bool) -> bool:
        """Return whether training_step returned None for all of the step, on all ranks. `nothing`:
        it did so for this rank's last micro-batch. By hand (manual optimization) it always does."""
        if not self.automatic:
            return False
        if self.step is None:
            return nothing and not self.foreign
        if self.run._peers.replicas == 1 and not nothing:
            return False
        return self.step.weight == 0.0

    def remember(self, again: Callable[[], None]) -> None:
        """Keep a function that repeats this own micro-batch's forward and backward."""
        if self.current is not None and self.run.reduce != "fast":
            self._repeat.append((self.current, again))

    def _again(self) -> None:
        """Repeat all own micro-batches of this step, discarding what the script logs meanwhile."""
        assert self.step is not None and self.logs is not None
        now = self.current
        with self.logs.set_aside():
            for dealt, again in self._repeat:
                self.current = dealt
                self.step.micro(dealt.m)
                again()
        self.current = now

    def stepped(self) -> None:
        """End the step: the optimizer has stepped."""
        if self.step is not None:
            with self.together():
                self.step.end(lr=float(self.trainer.optimizers[0].param_groups[0]["lr"]))
            self.step = None

    def logged(self) -> None:
        """Record the logged values of this micro-batch before anything reads them."""
        now = self.current
        if now is None or self.logs is None:
            return
        if now.own:
            self.logs.note(now.m, now.count)
        if now.m + 1 == now.count:
            with self.together():
                self.logs.agree_on_step()

    def advanced(self) -> None:
        """Finish a micro-batch, including the validation after it. Raises BadInput."""
        now, epoch_loop = self.current, self.trainer.fit_loop.epoch_loop
        if now is None or now.m + 1 < now.count:
            return
        if self.step is not None:
            module = self.trainer.lightning_module
            which = (
                "optimizer_step(...) did not call optimizer.step(closure=optimizer_closure)"
                if module.automatic_optimization
                else "training_step(...), which optimizes by itself, called no optimizer's step()"
            )
            raise BadInput(
                f"step {self.step.number} ended without an optimizer step: {which} of "
                f"{type(module).__name__}; it must, each time"
            )
        self.current = None
        if not epoch_loop.done:  # otherwise the epoch's end follows, which belongs to this step
            self.boundary()

    def epoch_ended(self) -> None:
        """Finish an epoch, including its hooks, callbacks and schedulers."""
        self.current = self.step = None  # a step that was left open does not count
        if not is_over(self.trainer.fit_loop):  # otherwise the training's end follows
            self.boundary()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Mark communication between ranks. If one of them is gone, or all leave, that is no error
        of the script."""
        try:
            yield
        except (RuntimeError, SystemExit):  # RuntimeError is torch.distributed's
            self.cut_off = True
            raise

    def of_first_copy(self, value: Any) -> Any:
        """Return the value of the first copy's rank that is at this one's place. Collective."""
        peers = self.run._peers
        with self.together():
            return peers.gather(value)[peers.rank % peers.replica_ranks]

    def boundary(self) -> None:
        """Pass a boundary between steps. Raises SystemExit to leave."""
        if self.loop is not None:
            with self.together():
                self.loop.boundary()

    def finished(self) -> None:
        """Finish the run after the fit."""
        if self.loop is not None:
            self.loop.finished()


def is_over(fit_loop: Any) -> bool:
    """Return the loop's `done` without the message that it prints each time."""
    limits = (
        (fit_loop.epoch_loop.global_step, fit_loop.max_steps),
        (fit_loop.epoch_progress.current.processed, fit_loop.max_epochs),
    )
    if any(most != -1 and now >= most for now, most in limits):
        return True
    return bool(fit_loop.trainer.should_stop and fit_loop._can_stop_early)
