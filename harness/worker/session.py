"""The session, which scripts get from `harness.attach()`. Runs in the worker, one per GPU.

    run = harness.attach(seed=0)
    run.prepare(model, optimizer, scheduler=scheduler)
    for step in run.steps(dataset, total=1000, global_batch=64, micro_batch=8):
        for x, y in step:                                   # this rank's micro-batches
            step.backward(loss_fn(model(x), y))             # the mean over the micro-batch
        step.update(clip_norm=1.0)

It guarantees that the samples of step k and the global batch are the same on any number of ranks;
that a snapshot is committed or absent; and that all ranks act on a notice at the same step
boundary. It reads its rank from the environment that the agent (or plain torchrun) sets; without
one, it is an ordinary single process.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from harness.bucket.journal import Journal
from harness.core import extensions
from harness.core.batch import Batching, Plan, TooManyRanks
from harness.core.facts import StepDone
from harness.core.loss_rates import RunLosses
from harness.core.mesh import AskedMesh
from harness.core.sample_order import Blocks
from harness.core.world import BadInput
from harness.node.heartbeat import WorkerPhase
from harness.node.marks import Want, keep_pipe
from harness.worker import boundary, snapshot_timer
from harness.worker.batches.data_peers import DataPeers
from harness.worker.batches.feed import Feed, Shrinking, rehearse
from harness.worker.batches.loader import MicroBatch, Stream, determine, seed_everything
from harness.worker.boundary import Boundary
from harness.worker.gradients.fixed_point import WORDS
from harness.worker.gradients.parallel import Strategy
from harness.worker.gradients.sharding import check_unwrapped
from harness.worker.memory_report import memory_report
from harness.worker.process_group import Peers
from harness.worker.profiling import Profile
from harness.worker.resuming.kept_ahead import AheadKeeper
from harness.worker.resuming.kept_state import StateKeeper
from harness.worker.resuming.resume import NewestCommitted, Resume
from harness.worker.resuming.same_process import SameProcess, WorldOver, going_on
from harness.worker.run_context import SCRIPT_WORLD, Run, look_again_s
from harness.worker.setup_check import SetupCheck
from harness.worker.snapshot_timer import Rhythm
from harness.worker.snapshotter import Snapshotter, StagingBuffers
from harness.worker.step import Step, Work
from harness.worker.step_log import StepLog
from harness.worker.step_timing import PhaseTimer, Rates, marks_of
from harness.worker.training_state import Guard, Training
from harness.worker.votes import HalfSteps, Votes
from storage.snapshots.retention import AGES_H, Keep
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Options:
    """The arguments of `attach`; see there."""

    seed: int
    run: str | None
    interval: snapshot_timer.Interval
    keep: Keep
    reduce: str
    replica_ranks: int | None
    mesh: AskedMesh | None
    timeout_s: float | None
    backend: str | None
    deterministic: bool | None
    votes_late: bool | None
    peak_flops: float | None
    config: Any
    on_change: str | None
    guards: Any = None


@dataclass
class SafePoint:
    """A call of `safe_point`, or of `resume`. `end_s`: its end (perf_counter); `step_s`: the time
    since the one before, 0: not known; `parts`: calls of `half_step` since."""

    step: int
    end_s: float
    step_s: float = 0.0
    parts: int = 0


GUARDS = "HARNESS_GUARDS"
MOST_STEPS = 1000  # between two safe points; if there are more, none are recorded


class Session:
    """A script's session (see the module's docstring), made by `attach`."""

    def __init__(self, environ: dict[str, str], options: Options):
        reduce = options.reduce
        if reduce not in ("fast", *WORDS):
            raise BadInput(f"reduce={reduce!r} is not known; wanted 'fast', 'exact' or 'exact32'")
        self._options = options
        self._begin(environ)

    def _begin(self, environ: dict[str, str]) -> None:
        """Begin in the world of `environ`; a process may pass through several."""
        o, reduce = self._options, self.reduce
        peers = self._peers = Peers(environ, o.replica_ranks, o.mesh)
        # the ranks that an unchanged script is assumed to be written for; "": not said
        self.said_world = environ.get(SCRIPT_WORLD, "")
        until = int(environ.get("HARNESS_UNTIL_STEP", 1 << 62))  # of `harness runs replay`
        determine(peers.device, reduce, o.deterministic, os.environ)
        if peers.device.type == "cuda":
            torch.cuda.set_device(peers.device)
        seed_everything(o.seed)
        peers.meet(environ, o.backend, o.timeout_s)
        look_again_s(environ)  # refuses a bad value before the bucket is opened
        joined = self._run = Run(peers, o.run or environ.get("HARNESS_RUN"), environ)
        self._setup = SetupCheck(peers, joined, o.config, o.on_change, environ)
        mark = Path(environ["HARNESS_MARK"]) if "HARNESS_MARK" in environ else None
        votes = Votes(mark, leads=peers.rank == 0)
        votes.listen()
        seen_path = mark.with_name("seen.json") if mark else None
        last_seen = NewestCommitted(seen_path, joined.url, writes=peers.local_rank == 0)
        training, rates = Training(peers, reduce), Rates(peers.device, o.peak_flops)
        nodes = max(1, int(environ.get("GROUP_WORLD_SIZE", 1)))
        self._step_lines = environ.get("HARNESS_STEP_LINES", "")  # of `harness runs bisect`
        training.guard = self._guard(environ.get(GUARDS) if o.guards is None else o.guards)
        losses = RunLosses(environ.get("HARNESS_PLACE", ""), nodes)
        timer, rhythm = PhaseTimer(marks_of(peers.device)), Rhythm(o.interval, losses)
        log = StepLog(joined, rates, timer)
        hold = StagingBuffers(peers, joined, environ.get("HARNESS_STAGE"))
        snapshotter = Snapshotter(peers, joined, training, log, hold, rhythm, last_seen, o.keep)
        resume = Resume(peers, joined, training, hold, last_seen, environ)
        stage, node = environ.get("HARNESS_STAGE"), mark.parent if mark else None
        self._keeper = StateKeeper(
            *(peers, joined, training, snapshotter, Path(stage) if stage else None, node)
        )
        if node is not None:
            self._keeper.listen(keep_pipe(node, peers.local_rank))
        here, speeds = environ.get("LOCAL_WORLD_SIZE", "1"), environ.get("HARNESS_SPEEDS", "null")
        meet = DataPeers(lambda: hold.courier, joined.store, nodes).meet
        feed = Feed(peers, o.seed, json.loads(speeds), int(here), meet)
        log.times.traffic = feed.traffic
        parts = (peers, joined, training, feed, log, rates, rhythm, snapshotter, votes, timer)
        self._same = SameProcess(peers, joined, training, snapshotter, hold, self._keeper, environ)
        kept_by = (peers, joined, training, snapshotter, rhythm, hold, self._keeper)
        ahead = AheadKeeper(*kept_by) if peers.world > 1 else None
        self._work = Work(*parts, Shrinking.of(environ), self._same, ahead)
        state = boundary.SessionState(by_script=mark is not None, stored=bool(joined.url))
        late = peers.device.type != "cpu" if o.votes_late is None else o.votes_late
        self._hands = Boundary(self._work, hold, resume, state, until, late)
        self._halves = HalfSteps(self._work, self._hands.count)
        self._safe: SafePoint | None = None  # the last one; None: there was none
        self._profile = Profile(joined, peers.device, environ.get("HARNESS_PROFILE", ""))

    def _guard(self, asked: Any) -> Guard | None:
        """Return the guards that somebody asked for, or None. Raises BadInput."""
        if asked is None or asked in ("", "off"):
            return None
        made = extensions.load(extensions.GUARD, "guards=").of
        return made(asked, self._go_back, self._step_lines)  # type: ignore[no-any-return]

    def next_phase(self) -> None:
        """Begin a training, for adapters, before its `prepare`: if the script has trained before,
        a phase of this run, with a model, data and a batch of its own, that resumes by itself.
        Raises BadInput if the training before has not come to its end."""
        if self._hands.has_looped:
            self._keeper.change()
            self._hands.next_phase()
            self._halves = HalfSteps(self._work, self._hands.count)

    def _go_back(self) -> None:
        """Leave, to go on from an older snapshot, as the guards have ordered. Raises SystemExit."""
        self._hands.turn(boundary.Rewound())

    def keep_state(self) -> None:
        """Keep the state of the last whole step in this node's memory: another rank is lost."""
        self._peers.hang_up()
        self._keeper.keep()
        self._run.close_soon()

    def out_of_memory(self) -> str:
        """Return in words that memory has run out here, and what holds it."""
        batching = self._work.feed.batching
        size = f", in micro-batches of {batching.micro_batch}" if batching else ""
        held = memory_report(self._work.training, self._peers.device)
        return f"rank {self.rank} is out of memory in step {self.step + 1}{size}: {held}"

    # ---- properties for the script ---------------------------------------------------------------
    @property
    def seed(self) -> int:
        return self._options.seed

    @property
    def reduce(self) -> str:
        return self._options.reduce

    @property
    def rank(self) -> int:
        return self._peers.rank

    @property
    def local_rank(self) -> int:
        return self._peers.local_rank

    @property
    def world(self) -> int:
        return self._peers.world

    @property
    def replica_ranks(self) -> int:
        """Number of ranks of each replica. These are given the same micro-batches, and hold one
        copy of the model together."""
        return self._peers.replica_ranks

    @property
    def replica(self) -> int:
        """The replica that this rank is in: 0, 1, ... below `replicas`. Use it to distribute other
        data than the training's, such as a validation set."""
        self._same.needs_others()
        return self._peers.replica

    @property
    def replicas(self) -> int:
        self._same.needs_others()
        return self._peers.replicas

    @property
    def mesh(self) -> DeviceMesh:
        """The world as a device mesh, for models that are split between ranks. Its dimensions are
        those of `attach(mesh=...)` after "dp_replicate"; without that, "replicas" and "ranks" (of
        one replica). All ranks must first read it at the same point."""
        return self._peers.mesh

    @property
    def device(self) -> torch.device:
        return self._peers.device

    @property
    def run_url(self) -> str | None:
        return self._run.url

    @property
    def store(self) -> ObjectStore:
        return self._run.store

    @property
    def snapshots(self) -> Snapshots:
        return self._run.snapshots

    @property
    def journal(self) -> Journal | None:
        """The journal of facts on rank 0; None on the other ranks."""
        return self._run.journal

    @property
    def epoch(self) -> int:
        return self._run.epoch

    @property
    def step(self) -> int:
        """Number of optimizer updates done, in this training of the script."""
        return self._run.step - self._run.phase.begins

    @property
    def batching(self) -> Batching:
        """The batching of the newest `steps`."""
        return self._work.batching

    @property
    def plan(self) -> Plan:
        """The plan of the newest `steps`."""
        return self._work.feed.plan

    @property
    def strategy(self) -> Strategy:
        """The strategy that sums the gradients of the prepared model."""
        return self._work.training.strategy

    @property
    def stream(self) -> Stream | None:
        """The stream, for data that can only be read in order; else None."""
        return self._work.feed.stream

    @property
    def scheduler(self) -> Any:
        return self._work.training.scheduler

    @property
    def scaler(self) -> Any:
        return self._work.training.scaler

    # ---- methods for the script ------------------------------------------------------------------
    def print(self, *values: Any) -> None:
        self._peers.print(*values)

    def sum(self, value: float | torch.Tensor) -> float:
        """Return the sum of the values of each replica's first rank, rounded once, so that it does
        not depend on their order. Every rank must call it."""
        self._peers.life.tell()
        return self._peers.sum(value)

    def log(self, **metrics: float) -> None:
        """Add metrics (a validation loss, ...) to the record of the step that was just updated. All
        ranks may call it."""
        self._peers.life.tell()
        self._work.log.log({k: float(v) for k, v in metrics.items()})

    def alive(self) -> None:
        """Send a heartbeat during work between two steps that takes far longer than a step (a long
        validation); otherwise the agent takes the silence for a hang."""
        self._peers.life.tell()

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
        scheduler: Any = None,
        scaler: Any = None,
        *,
        state: Mapping[str, Any] | None = None,
        per_rank: Collection[str] = (),
        after_update: Collection[str] = (),
        strategy: Strategy | None = None,
    ) -> nn.Module:
        """Declare the training state: model, optimizers, scheduler, GradScaler, and (`state`)
        anything else with `state_dict` and `load_state_dict`, by name: {"ema": ema}. Return the
        model. Raises BadInput, naming the object that cannot be saved or trained.

        The model moves to this rank's device (its parameters stay the same objects), and its
        gradients will be summed over ranks. Optimizers must have parameters of this model only.
        `after_update`: names in `state` (an average of the weights) whose tensors change only
        between `step.update()` and the end of the loop's body. `AveragedModel`s are assumed to. A
        snapshot copies these during the next forward and backward, and all others while training
        stands still. If one changes at another time, that snapshot is dropped with a warning, and
        from then on all state is copied while training stands still.

        State must be the same on all ranks. It is compared after the first step, and the part that
        optimizers do not change again with each snapshot. Raises BadInput for state that differs,
        unless `per_rank` names it: then each rank's is stored, and loaded by the same rank in a
        world of the same size. In a world of another size, the object's `load_state_dicts(states)`
        gets the states of all ranks, in order; without this method, resuming there is refused.
        Buffers of the model that forwards change are copied from rank 0 after each step, as in
        DistributedDataParallel; with exact sums they must be the same. BatchNorm's averages are
        computed from all micro-batches of a step, in order, on any world.

        `strategy`: how gradients are summed, for a model that is split between the ranks of a
        replica (`harness.worker.gradients.parallel.Strategy`); None: plain data parallelism or
        FSDP2, depending on the model's parameters.
        """
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self._prepare_again = functools.partial(
            self.prepare, model, optimizer, scheduler, scaler,
            state=state, per_rank=per_rank, after_update=after_update, strategy=strategy,
        )  # fmt: skip
        self._keeper.change()
        self._same.enter()
        self._work.training.prepare(
            model, optimizers, scheduler, scaler, state or {}, per_rank, after_update, strategy
        )
        self._same.leave()
        return model

    def steps(
        self,
        dataset: Any,
        *,
        total: int | None = None,
        epochs: int | None = None,
        global_batch: int,
        micro_batch: int,
        shuffle: bool | str | Blocks = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        tokens_per_sample: int = 0,
        flops_per_sample: float | str = 0.0,
        guards: Any = None,
    ) -> Iterator[Step]:
        """Yield the remaining steps, after resuming from the newest valid snapshot. `global_batch`
        and `micro_batch` are in samples.

        `shuffle`: "blocks" or `Blocks(...)` keep reads sequential. `num_workers` processes, or a
        thread, read ahead (docs/DATA.md). `tokens_per_sample`, and the model's `flops_per_sample`
        (forward and backward), are only for reports: tokens per second, and the used part of the
        devices' peak (MFU). Instead of a number: "6PT" (six times parameters times tokens), or
        "counted": torch counts the first micro-batch, including recomputation (HFU). `guards`:
        those of `attach`, if they are for this loop only.

        `total` counts from the run's first step. `epochs`, instead: the number of passes over the
        data (`step.epoch`, `step.ends_epoch`). The step that reaches it is committed at once, so
        that nothing the script does afterwards (a validation, an export) can lose it. `steps` may
        be called again with a greater total, for example once per epoch. The run ends when the
        script ends with status 0. That holds after a `break` or `return` out of the loop too, which
        must happen at the same step on every rank: the training state at the script's end is
        committed as the final snapshot. A script that fails does not end the run. To end it at
        once, or without an agent (plain torchrun, a single process), call `finish` after the loop.
        """
        if (total is None) is (epochs is None):
            raise BadInput("run.steps(...): wanted either total= (optimizer steps) or epochs=")
        reports = (tokens_per_sample, flops_per_sample)
        data = (dataset, global_batch, micro_batch, shuffle, collate_fn)
        self._same.enter()
        try:
            while True:
                with going_on(self._go_on):
                    yield from self._train(data, total, epochs, num_workers, reports, guards)
                    return
        finally:
            self._same.leave()

    def _go_on(self, why: RuntimeError | SystemExit) -> None:
        """Begin in the next world, with the objects of this one. Raises `why` if none comes."""
        resumes, enough = None if self._peers.beside else why, self._work.votes.enough
        os.environ.update(environ := self._same.wait(why))
        self._hands.go_on()
        self._begin(environ)
        self._prepare_again()
        self._same.resumes, self._work.votes.enough = resumes, enough
        self._same.enter()

    def _train(
        self,
        data: tuple[Any, int, int, bool | str | Blocks, Any],
        total: int | None,
        epochs: int | None,
        num_workers: int,
        reports: tuple[int, float | str],
        guards: Any,
    ) -> Iterator[Step]:
        """Yield the remaining steps, as long as this world lasts. Raises WorldOver at its end."""
        training, feed, halvings = self._work.training, self._work.feed, self._work.shrinking.times
        self._same.begin(first=not self._hands.has_looped)
        self._check_prepared(guards)
        assert training.model is not None
        try:
            stream = feed.open(*data, halvings)
        except TooManyRanks as e:
            self._announce(feed.identity(training.model, self.reduce))
            self._shrink(e)
            raise
        if stream is not None:
            training.reads(stream)
        identity = feed.identity(training.model, self.reduce)
        self._run.warn_of(feed.drawn_anew() if self.reduce != "fast" else "")
        self._hands.total = total = feed.steps_in(epochs or 0) if total is None else total
        total = min(total, self._hands.until)
        self._announce(identity)
        self._setup.settle()
        seed_everything(self.seed)
        self._work.log.when_whole = self._keeper.note
        self._hands.turn(boundary.Looped())
        self._same.check(self.step)
        if stream is not None and not self.step:
            self._try_out(data[0])
        batches = feed.batches(self.step + 1, total, num_workers, self._run.warn_anywhere)
        training.strategy.start(self.batching.micro_batches)
        training.strategy.zero()
        self._work.rates.watch(training.model, *reports, self.replica_ranks)
        self._same.allow(streams=stream is not None)
        try:
            yield from self._loop(batches, total)
        finally:
            self._same.forbid()
            self._work.timer.rest()
            self._profile.stop()
        self._hands.turn(boundary.Reached())
        self._profile.wait()

    def _check_prepared(self, guards: Any) -> None:
        """Check that there is a model to train, and take over other guards. Raises BadInput."""
        training = self._work.training
        if training.model is None:
            raise BadInput("call run.prepare(model, optimizer) before run.steps(...)")
        check_unwrapped(training.model)
        wanted = training.guard if guards is None else self._guard(guards)
        if getattr(wanted, "guards", None) != getattr(training.guard, "guards", None):
            training.watch(wanted)

    def _try_out(self, stream: Any) -> None:
        """Test, before the first step, whether the stream can be resumed. Raises BadInput."""
        if self._run.url:
            self._run.warn_of(self._peers.agree(lambda: rehearse(stream)))
            seed_everything(self.seed)

    def _loop(self, batches: Generator[MicroBatch, None, None], total: int) -> Iterator[Step]:
        profiles = (self._profile,) if self._profile.is_asked else ()
        with closing(batches):  # ends prefetching even if the script keeps its last step
            while self.step < total and not self._hands.enough:
                for profile in profiles:
                    profile.before(self.step + 1)
                step = Step(self._work, self.step + 1, batches, self._halves)
                self._peers.life.tell(WorkerPhase.COMPUTE, self.step)
                yield step
                if step.lost is not None:
                    raise WorldOver(step.lost)
                if not step.updated:
                    raise BadInput(
                        f"step {step.number}: step.update() was not called; it steps the optimizer"
                    )
                self._close_step()
                for profile in profiles:
                    profile.after(step.number)

    def _close_step(self) -> None:
        """Run the boundary behind a step. Raises WorldOver if the world ends there and the process
        goes on."""
        try:
            self._hands.boundary()
        except (RuntimeError, SystemExit) as e:
            self._same.end(e)
        self._halves.note()
        if self._same.holds_garbage:
            self._same.collect()

    def _announce(self, identity: dict[str, Any]) -> None:
        self._setup.announce()
        self._run.identify(identity)
        self._run.warn_of(self._work.feed.shrunk())

    def _shrink(self, why: TooManyRanks) -> None:
        """Leave, so that a smaller world is formed, if that is possible. All nodes can now read in
        run.json how many ranks a step has work for. Raises SystemExit, BadInput."""
        self._peers.print(f"harness: {why}")
        self._hands.turn(boundary.Overfull(self._run.fits_in(why.room), str(why)))

    # ---- loops of the script's own ---------------------------------------------------------------
    def resume(self) -> int:
        """Load the newest valid snapshot into the objects given to `prepare`. Return its step (0:
        a fresh start).

        `steps` and `loader` call it. Call it only in a loop of your own, followed by `safe_point`
        after each step and `finish` after the last. Raises BadInput with guards, which see no
        gradients there.
        """
        if self._work.training.guard is not None:
            raise BadInput(
                "guards do not see the gradients of a loop with run.safe_point: wanted run.steps, "
                "run.loader or transformers; leave out guards= and --guards"
            )
        self._work.shrinking.refuse("run.safe_point")
        self._setup.settle()
        self._hands.resume()
        self._safe = SafePoint(self._run.step, time.perf_counter())
        return self._run.step

    def safe_point(self, step: int, loss: float | None = None, samples: int = 0) -> None:
        """Mark that `step` optimizer steps are done on every rank, in a training loop of your own
        that sums its gradients itself (torch's DistributedDataParallel). It takes a snapshot when
        one is due, and leaves when requested, on all ranks together (SystemExit). Every rank calls
        it, at the same steps. Random draws between two calls are the script's responsibility.

        `loss` (rank 0's) and `samples` (of all ranks, since the last safe point) are for reports.
        The samples that were read are not verified here; `loader` and `steps` do that.
        """
        self._tell_steps(step, math.nan if loss is None else float(loss), samples)
        self._run.step = step
        self._keeper.note()
        self._hands.turn(boundary.Begun())
        self._peers.life.tell(WorkerPhase.REDUCE, step)
        wants = torch.zeros(len(Want) + 1, dtype=torch.int64)
        self._work.vote(wants[:-1], step)
        wants[-1] = bool(self._work.votes.enough)
        if self._peers.control is not None:
            dist.all_reduce(wants, group=self._peers.control)
        self._peers.life.tell(WorkerPhase.COMPUTE, step)
        self._hands.count(wants[:-1], int(wants[-1]))
        # the loop may change the state next, so it must not be needed for the snapshot any more
        self._work.snapshotter.finish_staging()
        self._safe = self._at_safe_point(step)

    def half_step(self) -> None:
        """Agree, between two micro-batches of a step in a loop with `safe_point`, whether a notice
        leaves too little time for the rest of the step. If so, all ranks leave (SystemExit) with
        the state of the last safe point committed, so a resume does the step again. Every rank
        calls it, equally often in each step; the first step that has such calls is not dropped.
        """
        if (safe := self._safe) is not None:
            safe.parts += 1
            since_s = time.perf_counter() - safe.end_s
            self._halves.part(max(safe.step_s - since_s, since_s / safe.parts))

    def _at_safe_point(self, step: int) -> SafePoint:
        """Note the state, if the last step had parts, for the case that the next one is dropped."""
        last, now, buffers = self._safe, time.perf_counter(), self._work.training.buffers
        if last is None or not last.parts or buffers is None:
            return SafePoint(step, now)
        buffers.learn()
        buffers.note()
        self._halves.note(long=True)
        return SafePoint(step, now, now - last.end_s)

    def _tell_steps(self, step: int, loss: float, samples: int) -> None:
        """Record the steps since the last safe point, as if each took equally long."""
        now = time.time()
        if self._safe is None or not 0 < (steps := step - self._safe.step) <= MOST_STEPS:
            return
        each_s = (time.perf_counter() - self._safe.end_s) / steps
        optimizers = self._work.training.optimizers
        lr = float(optimizers[0].param_groups[0]["lr"]) if optimizers else 0.0
        for i in range(steps):
            begin_s = now - (steps - i) * each_s
            number, few = self._safe.step + i + 1, samples // steps
            self._run.fact(StepDone(number, self._run.epoch, loss, begin_s, each_s, few, lr=lr))

    def loader(
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int,
        sampler: Any = None,
        shuffle: bool = False,
        drop_last: bool = False,
        tokens_per_sample: int = 0,
        flops_per_sample: float | str = 0.0,
        **options: Any,
    ) -> Any:
        """Return a DataLoader of this rank's micro-batches, for a loop of the script's own over
        epochs (`harness/loops/loop_loader.py` shows one). `global_batch` and `micro_batch` are in
        samples; a step is one global batch, on any number of ranks. The order of all samples comes
        from `sampler`, the same on every rank (not DistributedSampler), or from `shuffle`.
        `drop_last`: leave out an incomplete global batch at the end of an epoch. `options`: those
        of torch's DataLoader (num_workers, collate_fn, ...). For `tokens_per_sample` and
        `flops_per_sample` see `steps`.

        It resumes when the script first reads its epoch or its data, so call `prepare` before
        that. Raises BadInput.
        """
        loader = extensions.load(extensions.LOADER, "run.loader")
        return loader(
            self,
            dataset,
            global_batch=global_batch,
            micro_batch=micro_batch,
            sampler=sampler,
            shuffle=shuffle,
            drop_last=drop_last,
            tokens_per_sample=tokens_per_sample,
            flops_per_sample=flops_per_sample,
            **options,
        )

    @functools.cached_property
    def files(self) -> Any:
        """The checkpoints that the script writes itself, instead of `prepare`; see
        `harness/loops/loop_files.py`."""
        self._peers.need_world()
        return extensions.load(extensions.FILES, "run.files")(self)

    def stop(self, reason: str) -> None:
        """End the run on all ranks together: no more steps are yielded, and the final snapshot
        records `reason`. A call on one rank is enough; the others may call it too. After a step's
        update, the next step is the last; between two epochs of `loader.epochs`, none follows."""
        if not reason:
            raise BadInput("run.stop(reason): wanted why the run ends, for people; found nothing")
        self._work.votes.enough = reason

    @property
    def stopped(self) -> str:
        """The reason why the run ends, once all ranks have agreed at a step boundary; "": it does
        not end. It is for loops with `safe_point`; the other loops end without it."""
        return self._hands.enough

    def finish(self) -> None:
        """End the run here: commit the final snapshot and wait until it is durable. Every rank must
        call it, at the same step.

        After `steps` it is needed only without an agent, which waits for the script's end, or to
        end the run earlier. After a loop of your own it marks the training as complete. Raises
        StoreError, CommitTimeout.
        """
        self._hands.turn(boundary.Finished())

    def conclude(self) -> None:
        """Record that the script has ended with status 0, on this rank. With an agent that ends the
        run, wherever the loop was left.

        Raises BadInput if the run cannot end here.
        """
        self._hands.turn(boundary.Ended())


def attach(
    *,
    seed: int = 0,
    run: str | None = None,
    snapshot_every_s: float | None = None,
    snapshot_every_steps: int | None = None,
    keep_snapshots: int = 3,
    keep_every_steps: int = 0,
    keep_best: str = "",
    keep_ages_h: Sequence[float] = AGES_H,
    reduce: str = "fast",
    replica_ranks: int | None = None,
    mesh: AskedMesh | None = None,
    timeout_s: float | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
    votes_late: bool | None = None,
    peak_flops: float | None = None,
    config: Any = None,
    on_change: str | None = None,
    guards: Any = None,
) -> Session:
    """Join the run that the environment names, and return this process's session.

    `seed` determines data order and all randomness. `run`: the run's URL; None: the agent's.
    Snapshot interval: every `snapshot_every_steps` steps, or every `snapshot_every_s` seconds, or
    (neither) derived from their cost and from how often work is lost (docs/SNAPSHOTS.md). `keep_*`:
    see `storage.Keep`; its metric is logged by the script or measured by a side job: "loss:min".

    `reduce`: "fast", or "exact" or "exact32" (sums that do not depend on the world; 64 or 32 bits
    on the wire). With these, a step is repeated, which is rare, if a gradient is 2**8 ("exact") or
    4 times ("exact32") its recent size, or nonzero for the first time after step 1 ("exact32"):
    then `step.attempt` is 1, buffers are as they were before the step, and the same micro-batches
    are given again. Only counters in the loop's body need to heed this.

    `replica_ranks`: ranks that hold one copy of the model together, for `prepare(strategy=...)`;
    default HARNESS_REPLICA_RANKS (`harness run --replica-ranks`), else 1. `mesh`: how they share
    it, {"dp_shard": 8, "tp": 2}, or several to choose from (docs/MESHES.md); default HARNESS_MESH
    (`harness run --mesh`). `timeout_s`: of an exchange between ranks, in seconds; None: torch's
    default. `backend`: of the process group; None: gloo, and nccl for tensors on GPUs (gloo for
    these too if ranks share a GPU, which NCCL refuses). `deterministic`: torch uses deterministic
    kernels, and raises where it has none; None: with exact sums on GPUs; False: torch's settings
    are not changed. `votes_late`: the ranks' votes are counted one step later, so that no step
    waits for another rank's host; None: on GPUs. `peak_flops`: FLOP/s of this rank's device, for
    MFU; None: derived from its name and the model's precision. `config`: other values that the
    result depends on (a dict, dataclass, ...). `on_change`: "refuse", "warn" or "accept" another
    setup than the run's first; None: HARNESS_ON_CHANGE, else "warn" (docs/REPRODUCE.md). `guards`:
    "default", "off", a file or `harness.Guards(...)` (docs/GUARDS.md); None: HARNESS_GUARDS.

    Side effects: it seeds Python's, numpy's and torch's generators, here and before every
    micro-batch; makes this rank's GPU the current device; joins the process group if WORLD_SIZE is
    set and there is none yet; opens the run's bucket, to which rank 0 writes facts. In the main
    thread it handles SIGTERM (ignored under an agent, which notifies the workers itself; otherwise
    a snapshot, then exit with 33) and, without an agent, SIGUSR1 (a snapshot). Deterministic
    kernels set torch.use_deterministic_algorithms, torch.backends.cudnn.benchmark and, if it is not
    set, CUBLAS_WORKSPACE_CONFIG=:4096:8.

    It reads torchrun's and the agent's variables (RANK, ..., HARNESS_RUN, EPOCH, MARK, PROGRESS,
    STAGE, SPEEDS, PLACE, REPLICA, REPLICA_RANKS, MESH, MESHES, OOM, HALVINGS), users'
    (HARNESS_HOST, UNTIL_STEP, LOOK_AGAIN_S, ALLOW_REWIND, PROFILE, GUARDS, ON_CHANGE, DIFF, STAY,
    OWNER, PROJECT, EXPERIMENT, PURPOSE), the store's (docs/STORES.md). Raises BadInput, StoreError.
    """
    keep = Keep(keep_snapshots, keep_every_steps, keep_best, tuple(keep_ages_h))
    interval = snapshot_timer.Interval(snapshot_every_s, snapshot_every_steps)
    options = Options(
        seed, run, interval, keep, reduce, replica_ranks, mesh,
        timeout_s, backend, deterministic, votes_late, peak_flops, config, on_change, guards,
    )  # fmt: skip
    _attached[:] = [Session(dict(os.environ), options)]
    return _attached[0]


_attached: list[Session] = []  # the newest session of this process, for `conclude`


def is_attached() -> bool:
    """Return whether this process has a session."""
    return bool(_attached)


def out_of_memory() -> str:
    """Return `Session.out_of_memory` of this process' session; "": it has none. For
    `node/forkserver.py`, when the script has ended with such an error."""
    return _attached[-1].out_of_memory() if _attached else ""


def keep_state() -> None:
    """Call `Session.keep_state`, if this process has a session. For `node/forkserver.py`, when the
    script has ended because another rank is lost."""
    for session in _attached:
        session.keep_state()


def conclude() -> None:
    """Call `Session.conclude`, after the script has ended with status 0. For `node/forkserver.py`,
    which runs the script."""
    for session in _attached:
        session.conclude()


__all__ = ["Session", "Step", "attach"]
