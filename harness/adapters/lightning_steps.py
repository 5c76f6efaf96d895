"""The steps of a Lightning trainer, told to the harness. Runs in the worker.

One object for each trainer, asked where `lightning_trainer.py` has put itself into Lightning's
loops.

Lightning believes that it is alone, and accumulates M micro-batches a step. This rank does those of
its share. For each of the others' Lightning goes through its loop with a stand-in, this rank's
newest batch, so that counters, hooks and callbacks are where they are on every rank; forward and
backward are left out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from harness.adapters.lightning_copy import LightningCopy
from harness.adapters.lightning_data import Dealt, TrainLoader
from harness.adapters.lightning_limits import check_callbacks, check_fit, scale_limits
from harness.adapters.lightning_logs import StepLogs
from harness.adapters.lightning_state import LightningState
from harness.adapters.unused import UnusedParameters
from harness.core.world import BadInput
from harness.worker.loader import fingerprint
from harness.worker.own_loop import OwnLoop, OwnStep
from harness.worker.session import Session
from harness.worker.shares import SharedLoader


class LightningSteps:
    """`loop`: None before the fit has begun; `step`: the one that is being made; `current`: the
    micro-batch that Lightning is at; `batch`, `outputs` (a ClosureResult): what hooks are shown of
    others'; `cut_off`: this rank leaves, or another one has gone."""

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
        # own micro-batches of this step, should it have to be done again (exact sums)
        self._repeat: list[tuple[Dealt, Callable[[], None]]] = []
        self.state: LightningState | None = None
        self.logs: StepLogs | None = None

    # ---- before the first step -------------------------------------------------------------------
    def connect(self, trainer: Any) -> None:
        """The trainer's limits are for one rank of the script's first world; this one sees all of
        its micro-batches. Raises BadInput."""
        if self.trainer is trainer:
            return
        self.trainer = trainer
        self.accumulation = trainer.accumulate_grad_batches
        check_callbacks(trainer)
        scale_limits(trainer, self.first_world)
        self.state = LightningState(trainer, self.run)
        if trainer.state.fn == "fit":
            self.state.go_on_logging()

    def accumulate(self) -> None:
        """Of the fit that begins."""
        if self.loop is not None:
            raise BadInput(
                "trainer.fit was called a second time in this script: a run is one training; give "
                "the second one a script (and a run) of its own, or --adapt none"
            )
        if self.trainer.lightning_module.automatic_optimization:
            self.trainer.accumulate_grad_batches = self.micro_batches

    @functools.cached_property
    def first_world(self) -> int:
        """Whose batch is kept."""
        return self.run.script_world()

    @property
    def micro_batches(self) -> int:
        """Of a full step."""
        return self.accumulation * self.first_world

    def deal(self, loader: Any) -> TrainLoader:
        """In the place of the script's train dataloader."""
        fit_loop = self.trainer.fit_loop
        self.loader = TrainLoader(loader, lambda: float(fit_loop.max_batches))
        if self.loop is not None:  # loaded anew for this epoch
            self.loader.share_out(self._shared(), self.micro_batches)
        assert self.state is not None
        self.state.loader = self.loader
        return self.loader

    def begin(self) -> None:
        """Model and optimizers are made: resume. Raises BadInput, StoreError, SystemExit."""
        trainer, fit_loop = self.trainer, self.trainer.fit_loop
        fit_loop.setup_data()
        if fit_loop._combined_loader is None or not fit_loop.max_batches:
            return  # nothing will be trained
        check_fit(trainer, self.micro_batches)
        assert self.loader is not None and self.state is not None
        module = trainer.lightning_module
        self._unused = UnusedParameters(self.run, module)
        self.logs = StepLogs(trainer, self.run, self.accumulation, self.first_world)
        self.run.prepare(
            module,
            list(trainer.optimizers),
            scaler=None,
            state={"lightning": self.state, "metrics": self.logs},
            per_rank={"metrics"},
        )
        with self.together():
            self.loop = self.run.own_loop(
                micro_batches=self.micro_batches,
                micro_batch=batch_size(self.loader),
                data=fingerprint(self.loader.dataset),
                seed=self.run.seed,
                total=max(0, trainer.max_steps),
                adapter="lightning",
            )
        begins = self.state.take_up()
        self.logs.take_up()
        shared = self._shared()
        if self.state.resumed:
            trainer.num_sanity_val_steps = 0  # it would be the second one
            shared.load_state_dict(self.state.place)
            shared.resume_at(trainer.current_epoch, begins)
        self.loader.share_out(shared, self.micro_batches, begins)
        iter(fit_loop._data_fetcher)
        self._say()

    def _shared(self) -> SharedLoader:
        assert self.loader is not None and self.loop is not None
        return SharedLoader(
            self.loader.loader,
            micro_batches=self.micro_batches,
            mine=self.loop.share,
            seed=self.run.seed,
            agree=lambda value: self.run._peers.agree(lambda: value),
            tell=self.run.print,
        )

    def _say(self) -> None:
        self.run.print(
            f"harness: {self.copy.version}: {self.micro_batches} micro-batches a step "
            f"(accumulate_grad_batches {self.accumulation} x the first world's "
            f"{self.first_world}), on {self.run.world} ranks now"
        )

    # ---- one micro-batch -------------------------------------------------------------------------
    @property
    def foreign(self) -> bool:
        """Is this micro-batch another rank's?"""
        return self.current is not None and not self.current.own

    @property
    def unseen(self) -> bool:
        """Is this micro-batch another rank's, before this rank had any that its outputs could be
        taken from? The step's last one is left out: callbacks act then."""
        now = self.current
        return self.foreign and self.outputs is None and now is not None and now.m + 1 < now.count

    def arrive(self, batch: Any) -> Any:
        """A batch of the train dataloader comes to the loop. What the loop goes on with."""
        assert self.loader is not None and self.loop is not None
        self.current = now = self.loader.dealt.popleft()
        if now.m == 0:
            self.step = self.loop.begin(micro_batches=now.count)
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
            self.step.micro(now.m)
            return batch
        if self.batch is not None:
            return self.batch
        return self.trainer.precision_plugin.convert_input(self.loader.sample)

    def transferred(self, batch: Any) -> Any:
        """The batch is on its device."""
        if not self.foreign or self.batch is None:
            self.batch = batch
        return batch

    def scaled(self, result: Any) -> Any:
        """A ClosureResult whose loss was divided by all micro-batches of a full step, made right
        for the last ones of an epoch; hooks see it as the first world's would."""
        now = self.current
        if now is None or result.closure_loss is None:
            return result
        if self.first_world > 1:
            result.loss = result.loss * self.first_world
        divisor = self.accumulation * self._beside(now)
        if divisor != self.micro_batches:
            result.closure_loss = result.closure_loss * (self.micro_batches / divisor)
        self.outputs = result
        return result

    def _beside(self, now: Dealt) -> int:
        """How many ranks of the first world would have had a micro-batch when this one's turn had
        come: their mean is what Lightning takes."""
        round_begins = now.m - now.m % self.first_world
        return min(self.first_world, now.count - round_begins)

    def done(self, loss: torch.Tensor | None) -> None:
        """After this micro-batch's backward. `loss`: as it was scaled; None: the script left it
        out."""
        now = self.current
        if now is None or not now.own or self.step is None:
            return
        if loss is None:
            self.step.done(now.m, 0.0, 0.0)
            return
        whole = loss.detach() * (self.accumulation * self._beside(now))
        self.step.done(now.m, whole, now.share.count)

    def zeroed(self) -> None:
        """The script has set gradients to zero, or to None; ours are parts of larger buffers."""
        if self.step is not None:
            self.run.strategy.zero()

    # ---- the step's end --------------------------------------------------------------------------
    def sync(self) -> None:
        """All own micro-batches are done: gradients are sums over all ranks from here on."""
        if self.step is not None:
            assert self.current is not None
            self.step.samples = self.current.samples
            with self.together():
                self.step.sync(redo=self._again)
                if self._unused is not None:
                    self._unused.drop()

    def remember(self, again: Callable[[], None]) -> None:
        """What does this own micro-batch's forward and backward once more."""
        if self.current is not None and self.run.reduce != "fast":
            self._repeat.append((self.current, again))

    def _again(self) -> None:
        """All own micro-batches of this step; what the script logs meanwhile it has logged."""
        assert self.step is not None and self.logs is not None
        now = self.current
        with self.logs.set_aside():
            for dealt, again in self._repeat:
                self.current = dealt
                self.step.micro(dealt.m)
                again()
        self.current = now

    def stepped(self) -> None:
        """The optimizer has stepped."""
        if self.step is not None:
            with self.together():
                self.step.end(lr=float(self.trainer.optimizers[0].param_groups[0]["lr"]))
            self.step = None

    def logged(self) -> None:
        """Before anybody looks at what was logged for this micro-batch."""
        now = self.current
        if now is None or self.logs is None:
            return
        if now.own:
            self.logs.note(now.m, now.count)
        if now.m + 1 == now.count:
            with self.together():
                self.logs.agree_on_step()

    def advanced(self) -> None:
        """Lightning is through with this micro-batch, and with the validation after it."""
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
        if not epoch_loop.done:  # else the epoch's end follows, which belongs to this step
            self.boundary()

    def epoch_ended(self) -> None:
        """... and with its hooks, callbacks and schedulers."""
        self.current = self.step = None  # a step that was left open is no step
        if not is_over(self.trainer.fit_loop):  # else the training's end follows
            self.boundary()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Ranks talk with each other within. That one of them is gone, or that all leave, is no
        error of the script."""
        try:
            yield
        except (RuntimeError, SystemExit):  # the first is torch.distributed's
            self.cut_off = True
            raise

    def boundary(self) -> None:
        """May leave, by SystemExit."""
        if self.loop is not None:
            with self.together():
                self.loop.boundary()

    def finished(self) -> None:
        """The fit is over."""
        if self.loop is not None:
            self.loop.finished()


def is_over(fit_loop: Any) -> bool:
    """As its `done`, which says so each time that it is asked."""
    limits = (
        (fit_loop.epoch_loop.global_step, fit_loop.max_steps),
        (fit_loop.epoch_progress.current.processed, fit_loop.max_epochs),
    )
    if any(most != -1 and now >= most for now, most in limits):
        return True
    return bool(fit_loop.trainer.should_stop and fit_loop._can_stop_early)


def batch_size(loader: Any) -> int:
    """Samples of a full micro-batch."""
    sizes = (getattr(part, "batch_size", None) for part in (loader, loader.batch_sampler))
    return next((int(size) for size in sizes if size), 1)
