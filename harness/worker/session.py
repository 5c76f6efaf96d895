"""The user's front door: `harness.attach()`. Runs in the worker, one per GPU.

    run = harness.attach(seed=0)
    run.prepare(model, optimizer, scheduler=scheduler)
    for step in run.steps(dataset, total=1000, global_batch=64, micro_batch=8):
        for x, y in step:                                   # this rank's micro-batches
            step.backward(loss_fn(model(x), y))             # the mean over the micro-batch
        step.update(clip_norm=1.0)

It keeps three promises: the samples of step k and the global batch are the same on any number of
ranks; a snapshot is committed or absent; all ranks act on a notice at the same step boundary. It
finds its place in the environment that the agent (or plain torchrun) sets; without any it is an
ordinary single process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harness.bucket.journal import Journal
from harness.core.batch import Batching, Plan, TooManyRanks
from harness.core.blocks import Blocks
from harness.core.losses import RunLosses
from harness.core.meshes import AskedMesh
from harness.core.world import BadInput
from harness.node.progress import WorkerPhase
from harness.worker import machine
from harness.worker.data_peers import DataPeers
from harness.worker.feed import Feed
from harness.worker.hands import Hands
from harness.worker.hold import Hold
from harness.worker.loader import MicroBatch, Stream, seed_everything
from harness.worker.own_loop import SCRIPT_WORLD
from harness.worker.parallel import Strategy
from harness.worker.peers import Peers
from harness.worker.plain_loops import PlainLoops
from harness.worker.profiling import Profile
from harness.worker.rates import Rates
from harness.worker.rehearsal import rehearse
from harness.worker.resume import LastSeen, Resume, look_again_s
from harness.worker.rhythm import Rhythm
from harness.worker.rounding import WORDS
from harness.worker.run import Run
from harness.worker.setup_check import SetupCheck
from harness.worker.sharding import check_unwrapped
from harness.worker.snapshotter import Snapshotter
from harness.worker.step import Work
from harness.worker.steplog import StepLog
from harness.worker.steps import Step
from harness.worker.timing import PhaseTimer, marks_of
from harness.worker.training import Training
from harness.worker.votes import Votes
from storage.objects import ObjectStore
from storage.retention import AGES_H, Keep
from storage.snapshots import Snapshots

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Options:
    """What `attach` was given; see there."""

    seed: int
    run: str | None
    interval: machine.Interval
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


class Session(PlainLoops):
    """See the module's docstring. Made by `attach`."""

    def __init__(self, environ: dict[str, str], options: Options):
        o, reduce = options, options.reduce
        if reduce not in ("fast", *WORDS):
            raise BadInput(f"reduce={reduce!r} is not known; wanted 'fast', 'exact' or 'exact32'")
        self.seed, self.reduce = o.seed, reduce
        peers = self._peers = Peers(environ, o.replica_ranks, o.mesh)
        self._said_world = environ.get(SCRIPT_WORLD, "")
        # `harness replay` re-executes a part of a run
        until = int(environ.get("HARNESS_UNTIL_STEP", 1 << 62))
        _determine(peers.device, reduce, o.deterministic)
        if peers.device.type == "cuda":
            torch.cuda.set_device(peers.device)
        seed_everything(o.seed)
        peers.meet(environ, o.backend, o.timeout_s)
        look_again_s(environ)  # refused before the bucket is opened
        joined = self._run = Run(peers, o.run or environ.get("HARNESS_RUN"), environ)
        self._setup = SetupCheck(peers, joined, o.config, o.on_change, environ)
        mark = Path(environ["HARNESS_MARK"]) if "HARNESS_MARK" in environ else None
        votes = Votes(mark, leads=peers.rank == 0)
        votes.listen()
        seen_path = mark.with_name("seen.json") if mark else None
        last_seen = LastSeen(seen_path, joined.url, writes=peers.local_rank == 0)
        training, rates = Training(peers, reduce), Rates(peers.device, o.peak_flops)
        nodes = max(1, int(environ.get("GROUP_WORLD_SIZE", 1)))
        losses = RunLosses(environ.get("HARNESS_PLACE", ""), nodes)
        timer, rhythm = PhaseTimer(marks_of(peers.device)), Rhythm(o.interval, losses)
        log = StepLog(joined, rates, timer)
        hold = Hold(peers, joined, environ.get("HARNESS_STAGE"))
        snapshotter = Snapshotter(peers, joined, training, log, hold, rhythm, last_seen, o.keep)
        resume = Resume(peers, joined, training, hold, last_seen, environ)
        here = int(environ.get("LOCAL_WORLD_SIZE", 1))
        speeds = json.loads(environ.get("HARNESS_SPEEDS", "null"))
        feed = Feed(peers, o.seed, speeds, here, DataPeers(hold, joined.store, nodes).meet)
        log.times.traffic = feed.traffic
        self._work = Work(
            peers, joined, training, feed, log, rates, rhythm, snapshotter, votes, timer
        )
        # an agent waits for the script's end, and `conclude` is called then
        state = machine.SessionState(by_script=mark is not None, stored=bool(joined.url))
        late = peers.device.type != "cpu" if o.votes_late is None else o.votes_late
        self._hands = Hands(self._work, hold, resume, state, until, late)
        self._profile = Profile(joined, peers.device, environ.get("HARNESS_PROFILE", ""))

    # ---- what the script may look at -------------------------------------------------------------
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
        """Ranks of each replica: they hold one copy of the model together, and are given the same
        micro-batches."""
        return self._peers.replica_ranks

    @property
    def replica(self) -> int:
        """The replica that this rank is in: 0, 1, ... below `replicas`. Share other data than the
        training's (a validation set) out by it."""
        return self._peers.replica

    @property
    def replicas(self) -> int:
        return self._peers.replicas

    @property
    def mesh(self) -> DeviceMesh:
        """The world as a mesh of the dimensions that `attach(mesh=...)` named, "dp_replicate"
        before them; without one of "replicas" and "ranks" (of one replica). For models that are
        split between ranks. All ranks ask for it at the same point."""
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
        """Rank 0's; None on the others."""
        return self._run.journal

    @property
    def epoch(self) -> int:
        return self._run.epoch

    @property
    def step(self) -> int:
        """Optimizer updates done."""
        return self._run.step

    @property
    def batching(self) -> Batching:
        """Of the newest `steps`."""
        return self._work.batching

    @property
    def plan(self) -> Plan:
        """Of the newest `steps`."""
        return self._work.feed.plan

    @property
    def strategy(self) -> Strategy:
        """How gradients are summed; of what was prepared."""
        return self._work.training.strategy

    @property
    def stream(self) -> Stream | None:
        """Of data that is read in order only."""
        return self._work.feed.stream

    @property
    def scheduler(self) -> Any:
        return self._work.training.scheduler

    @property
    def scaler(self) -> Any:
        return self._work.training.scaler

    # ---- what the script calls -------------------------------------------------------------------
    def print(self, *values: Any) -> None:
        self._peers.print(*values)

    def sum(self, value: float | torch.Tensor) -> float:
        """The sum over all replicas (of what the first rank of each gives), rounded once, so that
        it does not depend on their order. Every rank must call it."""
        self._peers.life.tell()
        return self._peers.sum(value)

    def log(self, **metrics: float) -> None:
        """Metrics of the step that was just updated (validation loss...); they go into its
        record. All ranks may call it."""
        self._peers.life.tell()
        self._work.log.log({k: float(v) for k, v in metrics.items()})

    def alive(self) -> None:
        """A sign of life, for work between two steps that takes far longer than a step (a long
        validation): else the agent takes the silence for a hang."""
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
        """Say what makes up the training state: model, optimizers, scheduler, GradScaler, and
        (`state`) anything else with `state_dict` and `load_state_dict`, by name: {"ema": ema}.
        Raises BadInput for what cannot be saved or trained, naming it.

        The model moves to this rank's device (its parameters stay the same objects); its gradients
        will be summed over ranks. Optimizers must be made of its parameters, and of no others.
        `after_update`: names of `state` (an average of the weights) whose tensors change, if at
        all, between `step.update()` and the end of the loop's body, as an `AveragedModel`'s are
        taken to: a snapshot copies them beside the next forward and backward. Others it copies
        while training stands still. Who breaks the promise loses that snapshot, is told so, and is
        not believed again.

        State must be the same on all ranks: it is compared after the first step, and what
        optimizers do not change with each snapshot. What differs is refused (BadInput, naming it)
        unless `per_rank` names it: then each rank's is stored, and given back to the same rank in a
        world of the same size. In a world of another size the object's `load_state_dicts(states)`
        gets those of all ranks, in order; without such a method resuming there is refused. Buffers
        of the model that forwards change every rank takes from rank 0 after each step, as
        DistributedDataParallel does; with exact sums they must be the same. BatchNorm's averages
        are made of all micro-batches of a step, in their order, on any world.

        `strategy`: how gradients are summed, for a model that is split between the ranks of a
        replica (`harness.worker.parallel.Strategy`); None: as the model's parameters ask for, plain
        data parallelism or FSDP2.
        """
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self._work.training.prepare(
            model, optimizers, scheduler, scaler, state or {}, per_rank, after_update, strategy
        )
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
    ) -> Iterator[Step]:
        """The steps that are still to do, after resuming from the newest valid snapshot.
        `global_batch` and `micro_batch` in samples.

        `shuffle`: "blocks" or `Blocks(...)` keep reads sequential; `num_workers` read ahead, or a
        thread does (docs/DATA.md). `tokens_per_sample`, and the model's `flops_per_sample` (forward
        and backward), are for reports only: tokens per second, and how much of the devices' peak is
        used (MFU). Instead of a number: "6PT" (six times parameters times tokens), or "counted":
        torch counts the first micro-batch, and what activation checkpointing computes again (HFU).

        `total` counts from the run's first step; or `epochs`: so many passes over the data
        (`step.epoch`, `step.ends_epoch`). The step that reaches it is committed at once, so
        that what the script does afterwards (a validation, an export) can lose nothing. It may be
        called again with a greater total, once per epoch for example, and goes on. The run ends
        when the script ends with status 0: also after a `break` or `return` out of the loop, which
        must happen at the same step on every rank; then the training state as it is at the script's
        end is committed as the final snapshot. A script that fails has not ended the run. To end it
        at once, or without an agent (plain torchrun, a single process), call `finish` after the
        loop.
        """
        training, feed = self._work.training, self._work.feed
        if training.model is None:
            raise BadInput("call run.prepare(model, optimizer) before run.steps(...)")
        check_unwrapped(training.model)
        if (total is None) is (epochs is None):
            raise BadInput("run.steps(...): wanted either total= (optimizer steps) or epochs=")
        try:
            stream = feed.open(dataset, global_batch, micro_batch, shuffle, collate_fn)
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
        self._hands.turn(machine.Looped())
        if stream is not None and not self.step:
            self._try_out(dataset)
        batches = feed.batches(self.step + 1, total, num_workers, self._run.warn_anywhere)
        training.strategy.start(self.batching.micro_batches)
        training.strategy.zero()
        self._work.rates.watch(
            training.model, tokens_per_sample, flops_per_sample, self.replica_ranks
        )
        try:
            yield from self._loop(batches, total)
        finally:
            self._work.timer.rest()
            self._profile.stop()
        self._hands.turn(machine.Reached())
        self._profile.wait()

    def _try_out(self, stream: Any) -> None:
        """Before the first step. Raises BadInput."""
        if self._run.url:
            self._run.warn_of(self._peers.agree(lambda: rehearse(stream)))
            seed_everything(self.seed)

    def _loop(self, batches: Generator[MicroBatch, None, None], total: int) -> Iterator[Step]:
        with closing(batches):  # what fetches ahead ends here: a script may keep its last step
            while self.step < total and not self._hands.enough:
                self._profile.before(self.step + 1)
                step = Step(self._work, self.step + 1, batches)
                self._peers.life.tell(WorkerPhase.COMPUTE, self.step)
                yield step
                if not step.updated:
                    raise BadInput(
                        f"step {step.number}: step.update() was not called; it makes the optimizer "
                        "step"
                    )
                self._hands.boundary()
                self._profile.after(step.number)

    def _announce(self, identity: dict[str, Any]) -> None:
        self._setup.announce()
        first_version = partial(self._work.feed.first_version, self._work.training.model)
        self._run.identify(identity, first_version)

    def _shrink(self, why: TooManyRanks) -> None:
        """Leave, so that a smaller world is formed, if one can be: from run.json, which is there
        now, all nodes know how many ranks a step has work for. Raises SystemExit, BadInput."""
        self._peers.print(f"harness: {why}")
        self._hands.turn(machine.Overfull(self._run.fits_in(why.room), str(why)))

    def finish(self) -> None:
        """End the run here: commit the final snapshot and wait until it is there. Every rank must
        call it, at the same step.

        After `steps` it is needed only where no agent waits for the script's end, or to end the run
        before that; after a loop of your own it says that the loop was the whole training. Raises
        StoreError, CommitTimeout.
        """
        self._hands.turn(machine.Finished())

    def conclude(self) -> None:
        """The script has ended with status 0, on this rank. Of a run with an agent that is the end,
        wherever the loop was left.

        Raises BadInput if it cannot be.
        """
        self._hands.turn(machine.Ended())


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
) -> Session:
    """Join the run that the environment names.

    `seed` decides data order and all randomness. `run`: its URL; None: what the agent says.
    Snapshot interval: every `snapshot_every_steps` steps, or every `snapshot_every_s` seconds, or
    (neither) derived from what a snapshot costs and from how often work is lost here
    (docs/SNAPSHOTS.md). `keep_*`: see `storage.Keep`; the metric is one that the script logs,
    "loss:min", or that a side job measures later, "eval/loss:min".

    `reduce`: "fast", or "exact" or "exact32" (sums that do not depend on the world; 64 or 32 bits
    on the wire). With these a step's micro-batches come a second time when a gradient is far
    greater than those before it: then `step.attempt` is 1, buffers of the model are as they were
    before the step, and the batches are given anew. Only what the body counts for itself has to
    look at it. That is rare: a gradient 2**8 times as large as it was ("exact"), or 4 times, or one
    that comes for the first time after the first step ("exact32").

    `replica_ranks`: ranks that hold one copy of the model together, for `prepare(strategy=...)`;
    default HARNESS_REPLICA_RANKS, which `harness run --replica-ranks` sets, else 1. `mesh`: how
    they share it, {"dp_shard": 8, "tp": 2} or several to choose from (docs/MESHES.md); default
    HARNESS_MESH, which `harness run --mesh` sets. `timeout_s`: of an exchange between ranks; None:
    torch's default. `backend`: of the process group; None: gloo, and nccl for what is on GPUs.
    `deterministic`: None: on GPUs, with exact sums, torch is asked for deterministic kernels, and
    warns where it has none; True: always, and torch raises there; False: torch's choice is left
    alone. `votes_late`: what the ranks want is counted one step later, so that no step waits for
    another rank's host; None: on GPUs. `peak_flops`: of this rank's device, per second, for MFU;
    None: from its name and what the model is computed in. `config`: what else the result depends on
    (a dict, dataclass, Namespace, ...), for trackers. `on_change`: "refuse", "warn", "accept" that
    a run was begun otherwise; None: HARNESS_ON_CHANGE, else "warn" (docs/REPRODUCE.md).

    What else it does to this process: it seeds Python's, numpy's and torch's generators, here and
    before every micro-batch; makes this rank's GPU the current device; joins the process group if
    WORLD_SIZE is set and there is none yet; opens the run's bucket, whose facts rank 0 sends. In
    the main thread it takes SIGTERM (ignored under an agent, which tells the workers itself; else a
    snapshot, then the end with 33) and, without an agent, SIGUSR1 (a snapshot). Deterministic
    kernels are torch.use_deterministic_algorithms, torch.backends.cudnn.benchmark and, if it is not
    set, CUBLAS_WORKSPACE_CONFIG=:4096:8.

    It reads what torchrun and the agent say (RANK, ..., HARNESS_RUN, EPOCH, MARK, PROGRESS, STAGE,
    SPEEDS, PLACE, REPLICA, REPLICA_RANKS, MESH, MESHES), and what people may set: HARNESS_HOST,
    UNTIL_STEP, LOOK_AGAIN_S, ALLOW_REWIND, PROFILE, ON_CHANGE, DIFF, OWNER, PROJECT, EXPERIMENT,
    PURPOSE, and what the bucket's client reads (docs/STORES.md). Raises BadInput, StoreError.
    """
    keep = Keep(keep_snapshots, keep_every_steps, keep_best, tuple(keep_ages_h))
    interval = machine.Interval(snapshot_every_s, snapshot_every_steps)
    options = Options(
        seed, run, interval, keep, reduce, replica_ranks, mesh,
        timeout_s, backend, deterministic, votes_late, peak_flops, config, on_change,
    )  # fmt: skip
    _attached[:] = [Session(dict(os.environ), options)]
    return _attached[0]


def _determine(device: torch.device, reduce: str, asked: bool | None) -> None:
    """Kernels that add in whatever order they come would undo what exact sums give. `asked`: see
    `attach(deterministic=...)`."""
    if asked or (asked is None and reduce != "fast" and device.type == "cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=not asked)
        if asked:
            torch.backends.cudnn.benchmark = False
    if reduce != "fast":
        # else what torch.compile makes of a shape depends on those that it has seen before, and so
        # on when a process began
        os.environ.setdefault("TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES", "0")
        if (dynamo := sys.modules.get("torch._dynamo.config")) is not None:
            dynamo.automatic_dynamic_shapes = False  # type: ignore[attr-defined]


_attached: list[Session] = []  # of this process, the newest: for who sees its script end


def is_attached() -> bool:
    """Has this process a session?"""
    return bool(_attached)


def conclude() -> None:
    """The script has ended with status 0: `Session.conclude`. For who runs it (`worker.py`)."""
    for session in _attached:
        session.conclude()


__all__ = ["Session", "Step", "attach"]
