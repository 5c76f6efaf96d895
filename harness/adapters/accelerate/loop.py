"""The steps of an Accelerate script's own training loop, on any world. Runs in the worker.

Accelerate itself is unchanged, with one process per rank: the main process, trackers, barriers,
gathered metrics and evaluation shared over ranks work as usual. Only training is ours: the loader
gives one item per iteration of the first world (rounds.py), the model is not wrapped in
DistributedDataParallel, and gradients are summed when the script clips them or lets its optimizer
step. `accelerator.num_processes` reports the first world's size, W0.

A resumed script replays what it has done without work: loaders repeat one batch, models repeat
their outputs, nothing steps, nothing is saved or logged. After evaluations and epochs it takes the
same decisions (script_state.py). Its own variables are restored at the end
(script_state.py).
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import io
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.adapters.accelerate import data as feeds
from harness.adapters.accelerate.forward_replay import Answers, Tape
from harness.adapters.accelerate.rounds import (
    Body,
    FirstStep,
    GoingThrough,
    Round,
    StepNow,
    Window,
    deal,
    rounds_of,
    samples_of_step,
    share_of_round,
)
from harness.adapters.accelerate.script_state import Decisions, ScriptVariables, is_script
from harness.adapters.framework_claim import second_training
from harness.adapters.unsaved_state import bits_of
from harness.adapters.unused_parameters import UnusedParameters
from harness.adapters.whole_copies import copies_of, reshard
from harness.core.world import BadInput
from harness.loops.own_loop import OwnLoop, ReadingRanks, gradients_kept, own_loop, script_world
from harness.loops.shared_batches import Share
from harness.worker.session import Session

# Suppression of all output (saved files, logs, prints) while a resumed script replays what it has
# already done.

# (module, object in it or "", function): functions that write, where the script imported them
WRITERS = (
    ("torch", "", "save"),
    ("safetensors.torch", "", "save_file"),
    ("safetensors.torch", "", "save_model"),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"),
    ("transformers.modeling_utils", "PreTrainedModel", "push_to_hub"),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", "save_pretrained"),
    ("diffusers.models.modeling_utils", "ModelMixin", "save_pretrained"),
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "save_pretrained"),
    ("peft.peft_model", "PeftModel", "save_pretrained"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "save_checkpoint"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "save_16bit_model"),
    ("huggingface_hub.hf_api", "HfApi", "upload_folder"),
    ("huggingface_hub.hf_api", "HfApi", "upload_file"),
    ("huggingface_hub", "", "upload_folder"),
    ("wandb", "", "log"),
    ("shutil", "", "rmtree"),
)
RECORDS = ("add_", "log", "track")  # how a tracker's methods begin that record something
# methods of registered objects (weight averages, counters) that advance once per step
ADVANCES = ("step", "update", "update_parameters")


class Silence(io.TextIOBase):
    """A text stream that accepts everything and keeps nothing."""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


class Swallow:
    """An object that takes every attribute, call and loop, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *why: Any) -> None: ...

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True


class Quiet:
    """The patches that are in force between `begin` and `end`. Exceptions still reach the user."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def begin(self, accelerators: list[Any], registered: list[Any]) -> None:
        for module, inner, name in WRITERS:
            home = sys.modules.get(module)
            owner = getattr(home, inner, None) if inner else home
            if owner is not None and hasattr(owner, name):
                self._set(owner, name, _nothing)
        for thing in registered:
            for name in ADVANCES:
                if callable(getattr(thing, name, None)):
                    self._set(thing, name, _nothing)
        for accelerator in accelerators:
            for tracker in accelerator.trackers:
                self._silence(getattr(tracker, "tracker", None))
            self._set(accelerator, "trackers", [])
        self._set(sys, "stdout", Silence())
        self._set(builtins, "open", _opener(open))
        for name in ("open", "write_text", "write_bytes"):
            self._set(pathlib.Path, name, _elsewhere(getattr(pathlib.Path, name), name != "open"))
        before = logging.root.manager.disable
        logging.disable(logging.ERROR)
        self._undo.append(lambda: logging.disable(before))

    def _silence(self, writer: Any) -> None:
        """Silence what a tracker wraps: the script may have asked for it before its loop."""
        for name in dir(type(writer)):
            if name.startswith(RECORDS) and callable(getattr(type(writer), name, None)):
                with contextlib.suppress(AttributeError, TypeError):  # it takes no attributes
                    self._set(writer, name, _nothing)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        own = vars(owner)
        if name in own:
            before = own[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def end(self) -> None:
        while self._undo:
            self._undo.pop()()


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _by_script() -> bool:
    frame = sys._getframe(2)
    return is_script(frame.f_code.co_filename, frame.f_globals)


def _writes(mode: str) -> bool:
    return any(sign in mode for sign in "wax+")


def _opener(real: Any) -> Any:
    """Return an `open` that discards what the script writes. Files of libraries are not
    affected."""

    def quiet_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if _writes(mode) and _by_script():
            file, mode = os.devnull, mode.replace("x", "w")
        return real(file, mode, *args, **kwargs)

    return quiet_open


def _elsewhere(real: Any, always: bool) -> Any:
    """Return a method of Path that discards the script's writes. `always`: it writes in any
    mode."""

    def quiet_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode = "w" if always else str(args[0] if args else kwargs.get("mode", "r"))
        if _writes(mode) and _by_script():
            self = pathlib.Path(os.devnull)
            args = (mode.replace("x", "w"), *args[1:]) if args and not always else args
        return real(self, *args, **kwargs)

    return quiet_method


ONE_LOSS = (
    "wanted one accelerator.backward(loss) in each iteration, found two; add the losses up, or "
    "start the run with --script-world 1 and as many times the gradient accumulation"
)


class Driver:
    """The training driver of this process. `ranks`: W0."""

    def __init__(self, run: Session):
        self.run, self.ranks = run, script_world(run)
        self.prepared = feeds.PreparedThings()
        self.feed: feeds.TrainingFeed | None = None
        self.loop: OwnLoop | None = None
        self._open: StepNow | None = None
        self._body: Body | None = None
        self._replay: GoingThrough | None = None
        self._evaluating = 0
        self._one_loss: bool | None = None  # None: no step has shown it yet
        self._answers, self._tape = Answers(), Tape(run.device.type)
        self._variables, self._quiet = ScriptVariables(keeps=run.rank == 0), Quiet()
        self._decisions = Decisions(self.first, keeps=run.rank == 0)

    @property
    def copies(self) -> int:
        """Copies of the model in the first world."""
        return self.ranks // self.run.replica_ranks

    @property
    def replaying(self) -> bool:
        return self._replay is not None

    @property
    def training(self) -> bool:
        """True while the training loop's body runs."""
        return self._body is not None and not self._evaluating

    def first(self, value: Any) -> Any:
        """Return rank 0's value, on all ranks."""
        return self.run._peers.agree(lambda: value)

    def has_snapshot(self) -> bool:
        """Return whether training will resume from a snapshot."""
        run, phase = self.run, self.run._run.phase

        def look() -> bool:
            refs = run.snapshots.refs() if run.run_url else []
            return any(phase.number == 1 or ref.step > phase.begins for ref in refs)

        return self.loop is None and bool(run._peers.agree(look))

    def trains(self, loader: Any) -> bool:
        """Return whether `loader` is the training loader."""
        return self.prepared.trains(loader, self.feed)

    def rounds(self, loader: Any) -> int:
        """Return `len` of the training loader. Raises TypeError if it is unknown."""
        return self.prepared.rounds(loader, self.ranks, self.feed)

    # ---- the beginning ---------------------------------------------------------------------------
    def _begin(self, loader: Any, frame: FrameType | None) -> feeds.TrainingFeed:
        """Begin training, or resume it. Raises BadInput, SystemExit."""
        if self.feed is not None:
            return self.feed
        models, optimizers = (
            list(dict.fromkeys(self.prepared.all("_models"))),
            self.prepared.all("_optimizers"),
        )
        if not (models and optimizers):
            raise BadInput(
                "wanted a model and an optimizer that accelerator.prepare(...) was given before "
                f"the training loop, found {len(models)} models and {len(optimizers)} optimizers"
            )
        for one in models:
            reshard(one)  # after an evaluation
        peers = self.run._peers
        feed = feeds.make_feed(
            *(loader, self.prepared.accelerators[0], self.ranks, samples_of_step(self.run)),
            *(self.run.seed, self.first, self.run.print),
            ReadingRanks.of(peers, peers.replica_ranks),
        )
        raw = [one.optimizer for one in optimizers]
        prepared = [one.scheduler for one in self.prepared.all("_schedulers")]
        schedulers = feeds.schedulers_of(raw, prepared)
        custom = self.prepared.all("_custom_objects")
        self.prepared.begin()
        self._variables.begin(frame, known=self._prepared_or_registered)
        self._decisions.begin(frame)
        own = {"batches": feed.shared, "epochs": feed.lengths, "script": self._variables}
        own["decisions"] = self._decisions
        state = {**{f"custom{i}": one for i, one in enumerate(custom)}, **own}
        self._prepare(models, raw, feeds.Schedules(schedulers) if schedulers else None, state)
        self.feed = feed
        if feed.known or self.run.reduce != "fast":
            self._join(feed)
        else:
            feed.share(feed.most, self._of_round())
        if self.run.step:
            self._go_through([*schedulers, *custom], raw, custom, frame)
        return feed

    def _prepare(
        self, models: list[Any], optimizers: list[Any], schedules: Any, state: dict[str, Any]
    ) -> None:
        """Give the session what the script trains."""
        run, prepared = self.run, self.prepared
        if engine := prepared.take_engine(run, models):
            run.prepare(
                engine.model,
                engine.optimizer,  # type: ignore[arg-type] # all that is used of one
                engine.scheduler(schedules),
                state=state,
                per_rank=["script"],
                strategy=engine.strategy,
            )
            return
        model = models[0] if len(models) == 1 else nn.ModuleList(models)
        run.prepare(
            model,
            optimizers,
            schedules,
            prepared.accelerators[0].scaler,
            state=state,
            per_rank=["script"],
            strategy=copies_of(run, model),
        )
        prepared.unused = UnusedParameters(run, model)

    def _prepared_or_registered(self) -> list[Any]:
        """Return the script's objects whose state the run has, or that have none."""
        found = [one for name in feeds.PREPARED for one in self.prepared.all(name)]
        inner = [getattr(one, "optimizer", getattr(one, "scheduler", one)) for one in found]
        scalers = [one.scaler for one in self.prepared.accelerators]
        return [*found, *inner, *self.prepared.accelerators, *scalers]

    def _join(self, feed: feeds.TrainingFeed) -> OwnLoop:
        """Begin the run's steps, each with as many rounds as are known."""
        self.loop = own_loop(
            self.run,
            micro_batches=feed.most,
            micro_batch=feed.size,
            data=feed.data(),
            seed=self.run.seed,
            adapter="accelerate",
            reading_ranks=feed.reading.count,
        )
        feed.share(feed.most, self.loop.share)
        return self.loop

    # ---- iterations ------------------------------------------------------------------------------
    def iterate(self, loader: Any) -> Iterator[Any]:
        """Yield the training loader's items."""
        feed = self._begin(loader, sys._getframe(1))
        at = int(getattr(loader, "harness_skip", 0))  # rounds of the epoch so far
        if at % feed.accumulation:
            raise BadInput(
                f"skip_first_batches(loader, {at}): wanted a multiple of the gradient "
                f"accumulation, {feed.accumulation}, so that steps begin where they began"
            )
        loader.begin()
        loader.set_epoch(loader.iteration)
        epoch, feed.epochs = feed.epochs, feed.epochs + 1
        window: Window | None = None
        left: list[tuple[int, ...]] = []  # this rank's work in the step's remaining rounds
        ends = False
        while not ends:
            self._fetch(sys._getframe(1))
            if self._replay is not None:
                left = left or [()] * feed.rounds_at(epoch, at, self.copies)
                if not left:
                    break
                left.pop()
                item = feed.template
                self._body = Body(Round((), last=not left))
                ends = not left and not feed.rounds_at(epoch, at + 1, self.copies)
            else:
                if window is None or feed.seek == "own":
                    window = feed.read_from(epoch, at, self.copies)
                left = left or self._begin_step(feed, window)
                if not left:
                    break
                item = self._next(feed, window, left.pop(), last=not left)
                ends = not left and window.ends
            at += 1
            loader.end_of_dataloader = ends
            yield item
        self._leave_body()
        if feed.batches is None:
            feed.lengths.rounds[epoch:] = [at]
        loader.iteration += 1
        loader.end()
        self._decide(sys._getframe(1))

    def _begin_step(self, feed: feeds.TrainingFeed, window: Window) -> list[tuple[int, ...]]:
        """Return this rank's work in each round, the last round first; [] if the epoch is over."""
        if self.loop is None:
            return self._begin_round(feed, window)
        count = window.step(feed.most)
        if not count:
            return []
        samples = None if feed.varies or not window.ends else window.samples()
        rounds = rounds_of(count, self.copies)
        # a stream of known length is read, and compared between ranks, within its rounds
        apart = feed.shared.is_stream and feed.batches is not None
        step = self.loop.begin(count, samples, rounds=0 if apart else rounds)
        whole = feed.accumulation * feed.reading.count
        together = count == feed.most and min(self.run.plan.shares) >= whole
        self._open = StepNow(step, rounds / count, together)
        return deal(step.mine, rounds)[::-1]

    def _begin_round(self, feed: feeds.TrainingFeed, window: Window) -> list[tuple[int, ...]]:
        """Begin one round of the first step, whose length is not known yet; see `_begin_step`."""
        count = window.step(self.copies)
        if not count:
            return []
        if self._open is None:
            self._open = StepNow(FirstStep(self.run), 1 / self.copies, together=False)
        assert isinstance(self._open.step, FirstStep)
        self._open.step.rounds += 1
        own = self._of_round()
        return [tuple(range(own.start, min(own.stop, count)))]

    def _of_round(self) -> range:
        """Return this rank's micro-batches in a round of such a step."""
        peers = self.run._peers
        return share_of_round(self.copies, peers.replicas, peers.replica)

    def _learn(self, now: StepNow) -> None:
        """Begin the real first step, whose length is now known, with what was already done."""
        feed, first = self.feed, now.step
        assert feed is not None and isinstance(first, FirstStep)
        feed.accumulation, feed.most, feed.known = first.rounds, first.rounds * self.copies, True
        if feed.batches is not None and feed.most > feed.batches:
            raise BadInput(self._own_hands("an epoch that is shorter than a step", 1))
        with gradients_kept(self.run):
            now.step = self._join(feed).begin()
        first.tell(now.step)
        feed.seek = "own"

    def _next(
        self, feed: feeds.TrainingFeed, window: Window, own: tuple[int, ...], last: bool
    ) -> Any:
        """Return the item of a round, and set up this rank's work in it."""
        now = self._open
        assert now is not None
        now.step.round(now.begun)
        now.begun += 1
        body = self._body = Body(Round(own, last), window.take(own))
        if last:
            window.rest()
        if isinstance(now.step, FirstStep):
            before = (now.step.rounds - 1) * self.copies
            body.shares = [replace(share, micro=before + share.micro) for share in body.shares]
        if body.idle:
            now.step.idle()
            # the ranks of a copy must call the model with the same shapes, where none has any
            alike = feed.reading.count > 1 and not now.step.mine
            if feed.template is None or alike:
                feed.template = feed.place(feeds.sample_batch(feed.shared.loader))
            return feed.template
        for share in body.shares:
            now.step.read(share.micro, *feed.said_of(share))
        feed.template = feed.place(body.shares[0].data)
        self._begin_micro(now, body.shares[0])
        if len(body.shares) > 1:
            self._tape.begin(feed.template)
        return feed.template

    def _begin_micro(self, now: StepNow, share: Share) -> None:
        now.step.micro(share.micro)
        # Sums that begin within a backward must begin at the same point of the script on all ranks:
        # between the same of its own exchanges, and after the last backward of an iteration.
        if not (now.together and self._one_loss):
            now.step.hold()

    def _leave_body(self) -> None:
        self._tape.end()
        if self._body is not None:
            self._body.pending = False

    def _fetch(self, frame: FrameType | None) -> None:
        """Close the body, and perhaps the step, when the script requests the next item."""
        self._decisions.settle()
        self._leave_body()
        body = self._body
        if body is None:
            return
        if self._replay is not None:
            if self._replay.done == self._replay.target:
                self._arrive(self._replay, frame)
            return
        if not body.round.last:
            self._finish_micros(body)
            return
        if self._open is not None and isinstance(self._open.step, FirstStep):
            self._finish_micros(body)
            return
        if self._open is not None:
            if not self._open.synced:
                raise BadInput(self._own_hands("none", self._open.step.number))
            self._end_step(self._open)
        assert self.loop is not None
        self._body = None
        if self.run.replica_ranks > 1:  # in each step, so not where there is nothing to do
            for model in self.prepared.all("_models"):
                reshard(model)  # after an evaluation
        self._variables.look(frame)
        try:
            self.loop.boundary()
        finally:
            self._variables.leave()

    def _own_hands(self, found: str, step: int) -> str:
        rounds = self.feed.accumulation if self.feed is not None else 1
        return (
            f"step {step}: wanted optimizer.step() once, in the last of {rounds} iterations, found "
            f"{found}; where the script accumulates gradients by itself, say how many iterations "
            f"make a step: {feeds.ACCUMULATION}=N, or "
            "Accelerator(gradient_accumulation_steps=N) with accumulate(model)"
        )

    def evaluate(self, loader: Any, go: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield another loader's items. `go` is Accelerate's own function."""
        self._decisions.close()
        self._evaluating += 1
        try:
            if self._replay is None:
                yield from go()
            else:
                assert self.feed is not None
                yield from feeds.without_reading(loader, self.feed)
        finally:
            self._evaluating -= 1
            self._decide(sys._getframe().f_back)

    def _decide(self, frame: FrameType | None) -> None:
        """Open a decision point: the script has computed the values that it may decide by."""
        if self.feed is not None and not self._evaluating:
            replay, now = self._replay, self._open
            done = self.run.step + int(now is not None and now.synced)
            self._decisions.open(done if replay is None else replay.done, frame, replay is not None)

    # ---- what the script calls -------------------------------------------------------------------
    def forward(self, model: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Handle the call of a prepared model."""
        if self._replay is not None:
            return self._answers.any(model, function, args, kwargs)
        body = self._body
        if body is None or not body.pending or self._evaluating:
            return function(*args, **kwargs)
        if body.idle and model.training and torch.is_grad_enabled():
            return self._answers.last(model, function, args, kwargs)
        result = self._tape.model(function, args, kwargs)
        now = self._open
        if (
            now is not None
            and not now.together
            and body.round.own[-1:] == tuple(now.step.mine[-1:])
        ):
            self._answers.remember(model, result)  # the step's other rounds may be idle
        return result

    def backward(self, loss: torch.Tensor, go: Callable[[torch.Tensor], None]) -> None:
        """Handle `accelerator.backward(loss)`. `go` is Accelerate's own function."""
        body, now = self._body, self._open
        if body is None or self._evaluating:
            raise BadInput(self._outside())
        self._tape.end()
        if self._replay is not None or body.idle:
            return
        if now is None:
            raise BadInput(ONE_LOSS)
        assert self.feed is not None
        body.backwards += 1
        now.backwards = max(now.backwards, body.backwards)
        if body.backwards > 1 and (len(body.shares) > 1 or (self._one_loss and now.together)):
            raise BadInput(ONE_LOSS)
        self._back(body, now, loss, go)
        for share in body.shares[1:]:
            self._finish_micro(body, now)
            self._begin_micro(now, share)
            self._back(body, now, self._tape.again(self.feed.place(share.data), loss), go)
        self._tape.clear()

    def engine_steps(self) -> None:
        """Let DeepSpeed's engine step, as Accelerate does behind the last backward of a step."""
        engine = self.prepared.engine
        assert engine is not None
        self.optimize(self.prepared.all("_optimizers")[0], engine.optimizer.step)

    def _outside(self) -> str:
        """Return the message for a backward that is not in the training loader's loop."""
        if self.feed is not None and (self._evaluating or self.feed.epochs):
            return second_training(
                "accelerator.backward(loss) in a loop over another loader, which was prepared with "
                "the first one"
            )
        if not self.prepared.all("_optimizers"):
            return (
                "wanted an optimizer that accelerator.prepare(...) was given before "
                "accelerator.backward(loss), found none"
            )
        return (
            "wanted accelerator.backward(loss) in a loop over the training loader, found it "
            "outside; the training loader is the first prepared one that shuffles"
        )

    def _back(
        self, body: Body, now: StepNow, loss: torch.Tensor, go: Callable[[torch.Tensor], None]
    ) -> None:
        now.step.backward_begins()
        go(loss if now.scale == 1.0 else loss * now.scale)
        body.loss = loss.detach() if body.loss is None else body.loss + loss.detach()

    def _finish_micro(self, body: Body, now: StepNow) -> None:
        if body.loss is not None:
            share = body.shares[body.done]
            weight = 1 if self.feed is not None and self.feed.varies else share.count
            now.step.done(share.micro, body.loss, weight)
            body.loss, body.done = None, body.done + 1

    def _finish_micros(self, body: Body) -> None:
        if body.idle or self._open is None:
            return
        self._finish_micro(body, self._open)
        if body.done < len(body.shares):
            raise BadInput(
                "wanted accelerator.backward(loss) in each iteration, found one without: what "
                "trains only sometimes cannot be shared out; give such iterations a loss of 0"
            )

    def sync(self) -> bool:
        """Sum the gradients over ranks if they are needed now. Return False if they are not."""
        body, now = self._body, self._open
        if not self.training or body is None or now is None or self._replay is not None:
            return False
        if not now.synced:
            if not body.round.last:
                return False
            self._finish_micros(body)
            self._answers.forget()
            if isinstance(now.step, FirstStep):
                self._learn(now)
            assert not isinstance(now.step, FirstStep)
            now.step.sync()
            if self.prepared.unused is not None:
                self.prepared.unused.drop()
            now.synced = True
        return True

    def optimize(self, optimizer: Any, go: Callable[[], Any]) -> Any:
        """Handle the step of a prepared optimizer. `go` is Accelerate's own function."""
        body, now = self._body, self._open
        if not self.training or body is None:
            return go()
        if not body.round.last:
            raise BadInput(self._own_hands("it earlier", self.run.step + 1))
        if self._replay is not None:
            self._replay.done += not body.stepped
            body.stepped = True
            return None
        if now is None:
            raise BadInput(self._own_hands("it twice", self.run.step))
        self.sync()
        rate = float(optimizer.param_groups[0]["lr"])
        result = go()
        now.rate = now.rate if now.stepped else rate
        now.stepped.add(id(optimizer))
        if len(now.stepped) == len(self.prepared.all("_optimizers")):
            self._end_step(now)
        return result

    def _end_step(self, now: StepNow) -> None:
        self._open = None
        self._one_loss = now.backwards <= 1 and self._one_loss is not False
        assert not isinstance(now.step, FirstStep)
        now.step.end(now.rate)

    def zero(self, go: Callable[[], None]) -> None:
        """Handle a request to zero the gradients. `go` is Accelerate's own function."""
        body, now = self._body, self._open
        if not self.training or body is None or (now is not None and now.synced):
            go()
        elif now is not None and self._replay is None and now.backwards:
            raise BadInput(
                "wanted optimizer.zero_grad() after optimizer.step(), found it between a backward "
                "and the step, which would lose gradients"
            )

    def next_phase(self, frame: FrameType | None) -> Driver:
        """Return the driver of the training that the script prepares, after its loop has begun.
        Until then it is this one. Raises BadInput if this training cannot end here, SystemExit,
        StoreError."""
        if self.feed is None or self.loop is None:
            return self
        self.ended(frame)
        self._decisions.settle()
        self._variables.look(frame)
        try:
            self.loop.finished()
        finally:
            self._variables.leave()
        self.run.next_phase()
        following = Driver(self.run)
        following.prepared = feeds.PreparedThings(self.prepared)
        return following

    def ended(self, frame: FrameType | None = None) -> None:
        """Handle the end of the script, or of its training. Raises BadInput."""
        self._decisions.close()
        if self._replay is not None:
            if self._replay.done < self._replay.target:
                raise BadInput(
                    f"the script, resumed at step {self._replay.target}, left its loop at step "
                    f"{self._replay.done} while it went through what it had done: it stops by a "
                    "value that is not there while nothing is computed (in the middle of an epoch, "
                    "or in an object of a library); let it stop by a number of steps or epochs, or "
                    "by variables of its own after an evaluation or an epoch"
                )
            self._arrive(self._replay, frame)
        if self._open is not None and self._open.synced:
            self._end_step(self._open)

    def share_model(self) -> None:
        """Give all ranks the model of rank 0, whose script may have put an average of the weights,
        or another precision, into it when its loop was over. Collective."""
        if self.loop is None or self.run.world == 1 or self.run.replica_ranks > 1:
            return  # nobody changes a sharded model alone
        models = dict.fromkeys(self.prepared.all("_models"))
        tensors = [t for one in models for t in (*one.parameters(), *one.buffers())]
        sums = [int(bits_of(t)) for t in tensors]
        own = [(str(t.dtype), tuple(t.shape), at) for t, at in zip(tensors, sums, strict=True)]
        theirs, *others = self.run._peers.gather(own)
        if all(one == theirs for one in others):
            return
        if any([s for _, s, _ in one] != [s for _, s, _ in theirs] for one in others):
            return  # the snapshot refuses it, and names what differs
        for tensor, (dtype, _, _) in zip(tensors, theirs, strict=True):
            tensor.data = tensor.data.to(getattr(torch, dtype.removeprefix("torch.")))
            dist.broadcast(tensor.data, 0)

    # ---- resuming --------------------------------------------------------------------------------
    def _go_through(
        self,
        things: list[Any],
        optimizers: list[Any],
        custom: list[Any],
        frame: FrameType | None,
    ) -> None:
        """Begin the replay that brings the script to where it was."""
        assert self.feed is not None
        replay = self._replay = GoingThrough(self.run.step)
        self.feed.seek, self.feed.resumed = "resumed", True
        for thing in things:
            replay.kept.append((thing.load_state_dict, copy.deepcopy(thing.state_dict())))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                plain = {key: value for key, value in group.items() if key != "params"}
                replay.kept.append((group.update, copy.deepcopy(plain)))
        variables = self._variables
        variables.objects = self.first(variables.objects)
        missed = variables.missed(frame)
        self.run.print(
            f"harness: the script goes through {self.run.step} steps that are done, without work; "
            "what it writes by itself meanwhile it writes again"
            + (f". Not restored: parts of {', '.join(missed)}" if missed else "")
        )
        self.feed.template = self.feed.place(feeds.sample_batch(self.feed.shared.loader))
        self._quiet.begin(self.prepared.accelerators, [*custom, *variables.restored(frame)])

    def _arrive(self, replay: GoingThrough, frame: FrameType | None) -> None:
        """End the replay: the script is where it was."""
        assert self.loop is not None
        self._replay = self._body = None
        self._quiet.end()
        for put, value in replay.kept:
            put(value)
        if lost := self._variables.restore(frame):
            self.run.print(f"harness: not restored, since it is not there: {', '.join(lost)}")
        self._answers = Answers()
        self.loop.seed_between()
