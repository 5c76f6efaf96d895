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

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.core.batch import Batching, Plan
from harness.core.facts import SessionEnded, SessionStarted
from harness.core.world import BadInput
from harness.node.marks import Want
from harness.node.progress import Place
from harness.worker import machine
from harness.worker.feed import Feed
from harness.worker.hold import Hold
from harness.worker.loader import seed_everything
from harness.worker.machine import Do
from harness.worker.parallel import Strategy, check_unwrapped, shard
from harness.worker.peers import Peers
from harness.worker.resume import LastSeen, Resume, Unfit, look_again_s
from harness.worker.rhythm import Rhythm
from harness.worker.rounding import WORDS
from harness.worker.run import Run
from harness.worker.snapshotter import Snapshotter
from harness.worker.step import Step, Work
from harness.worker.steplog import VOTES, Rates, StepLog
from harness.worker.training import Training
from harness.worker.votes import Votes
from storage.retention import Keep


class Session:
    """See the module's docstring. Made by `attach`.

    `votes_late`: numbers and votes of a step arrive while the next one computes, as the host of a
    GPU runs ahead of it. `tokens_per_sample`, `flops_per_sample` and `peak_flops` (of this rank's
    device; None: from its name and what the model is computed in) may be set, for tokens per second
    and MFU.
    """

    def __init__(
        self,
        environ: dict[str, str],
        *,
        seed: int,
        run: str | None,
        interval: machine.Interval,
        keep: Keep,
        reduce: str,
    ):
        if reduce not in ("fast", *WORDS):
            raise BadInput(f"reduce={reduce!r} is not known; wanted 'fast', 'exact' or 'exact32'")
        self.seed, self.reduce = seed, reduce
        peers = self._peers = Peers(environ)
        # `harness replay` re-executes a part of a run
        self._until = int(environ.get("HARNESS_UNTIL_STEP", 1 << 62))
        self.votes_late = peers.device.type != "cpu"
        if peers.device.type == "cuda":
            # kernels that add in whatever order they come would undo what exact sums give
            if reduce != "fast":
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.use_deterministic_algorithms(True, warn_only=True)
            torch.cuda.set_device(peers.device)
        seed_everything(seed)
        peers.meet(environ)
        look_again_s(environ)  # refused before the bucket is opened
        joined = self._run = Run(peers, run or environ.get("HARNESS_RUN"), environ)
        mark = Path(environ["HARNESS_MARK"]) if "HARNESS_MARK" in environ else None
        votes = Votes(mark, leads=peers.rank == 0)
        votes.listen()
        seen_path = mark.with_name("seen.json") if mark else None
        last_seen = LastSeen(seen_path, joined.url, writes=peers.local_rank == 0)
        training, rates = Training(peers, reduce), Rates(peers.device)
        log, rhythm = StepLog(joined, rates), Rhythm(interval)
        hold = self._hold = Hold(peers, joined, environ.get("HARNESS_STAGE"))
        snapshotter = Snapshotter(peers, joined, training, log, hold, rhythm, last_seen, keep)
        self._resume = Resume(peers, joined, training, hold, last_seen, environ)
        feed = Feed(peers, seed, json.loads(environ.get("HARNESS_SPEEDS", "null")))
        self._work = Work(peers, joined, training, feed, log, rates, rhythm, snapshotter, votes)
        # an agent waits for the script's end, and `conclude` is called then
        self._state = machine.State(by_script=mark is not None, stored=bool(joined.url))
        # votes that have arrived but were not acted upon yet (`votes_late`)
        self._counted: torch.Tensor | None = None
        self._total = 0

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
    def device(self) -> torch.device:
        return self._peers.device

    @property
    def run_url(self) -> str | None:
        return self._run.url

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
    def tokens_per_sample(self) -> int:
        return self._work.rates.tokens_per_sample

    @tokens_per_sample.setter
    def tokens_per_sample(self, tokens: int) -> None:
        self._work.rates.tokens_per_sample = tokens

    @property
    def flops_per_sample(self) -> float:
        return self._work.rates.flops_per_sample

    @flops_per_sample.setter
    def flops_per_sample(self, flops: float) -> None:
        self._work.rates.flops_per_sample = flops

    @property
    def peak_flops(self) -> float | None:
        return self._work.rates.peak_flops

    @peak_flops.setter
    def peak_flops(self, flops: float | None) -> None:
        self._work.rates.peak_flops = flops

    # ---- what the script calls -------------------------------------------------------------------
    def print(self, *values: Any) -> None:
        self._peers.print(*values)

    def sum(self, value: float | torch.Tensor) -> float:
        """The sum over all ranks, rounded once (so it depends on the ranks' values, not on
        their order). Every rank must call it."""
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
        after_update: Collection[str] = (),
        per_rank: Collection[str] = (),
        **others: Any,
    ) -> nn.Module:
        """Say what makes up the training state: model, optimizers, scheduler, GradScaler, and
        anything with a `state_dict`.

        The model moves to this rank's device (its parameters stay the same objects); its gradients
        will be summed over ranks.
        `after_update`: those of the others (an average of the weights) whose tensors change, if at
        all, between `step.update()` and the end of the loop's body, as an `AveragedModel`'s are
        taken to: a snapshot copies them beside the next forward and backward. Others it copies
        while training stands still. Who breaks the promise loses that snapshot, is told so, and is
        not believed again.

        State must be the same on all ranks: it is compared after the first step, and what
        optimizers do not change with each snapshot. What differs is refused (BadInput, naming it)
        unless `per_rank` names it: then each rank's is stored, and given back to the same rank in a
        world of the same size. In a world of another size the object's `load_state_dicts(states)`
        gets those of all ranks, in order; without such a method resuming there is refused. Buffers
        of the model that forwards change (BatchNorm's statistics) every rank takes from rank 0
        after each step, as DistributedDataParallel does; with exact sums they must be the same.
        """
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self._work.training.prepare(
            model, optimizers, scheduler, scaler, after_update, per_rank, others
        )
        return model

    def steps(
        self,
        dataset: Any,
        *,
        total: int,
        global_batch: int,
        micro_batch: int,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Step]:
        """The steps that are still to do, after resuming from the newest valid snapshot.
        `global_batch` and `micro_batch` in samples.

        `total` counts from the run's first step. The step that reaches it is committed at once, so
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
        stream = feed.open(dataset, global_batch, micro_batch, shuffle, collate_fn)
        if stream is not None:
            training.reads(stream)
        identity = feed.identity(training.model, self.reduce)
        if self.reduce != "fast" and (what := feed.drawn_anew()):
            self._run.warn(what, 0)
        self._total = total
        total = min(total, self._until)
        self._run.identify(identity, feed.first_version)
        seed_everything(self.seed)
        self._turn(machine.Looped())
        batches = feed.batches(self.step + 1, total, num_workers)
        training.strategy.start(self.batching.micro_batches)
        training.strategy.zero()
        self._work.rates.watch(training.model)
        while self.step < total:
            step = Step(self._work, self.step + 1, batches)
            self._peers.life.tell(Place.COMPUTE, self.step)
            yield step
            if not step.updated:
                raise BadInput(
                    f"step {step.number}: step.update() was not called; it makes the optimizer step"
                )
            self._boundary()
        self._turn(machine.Reached())

    def resume(self) -> int:
        """Load the newest valid snapshot into what `prepare` was given. Returns the step it is of
        (0: a fresh start).

        `steps` calls it; call it yourself only with a loop of your own, then `safe_point` after
        each step and `finish` after the last.
        """
        t0 = time.time()
        self._turn(machine.Begun())
        self._peers.life.tell(Place.RESTORE)
        try:
            manifest = self._resume.restore()
        except Unfit as e:
            self._turn(machine.HostsUnfit(e.mine))
            raise
        self._work.snapshotter.resumed(manifest)
        if manifest is not None:
            self._run.step = manifest.step
            self.print(f"harness: resumed from step {manifest.step} (epoch {manifest.epoch})")
        self._resume.check(manifest)
        self._work.rhythm.begin()
        self._tell_start(manifest.epoch if manifest else 0, time.time() - t0)
        return self.step

    def safe_point(self, step: int) -> None:
        """For a training loop of your own: `step` optimizer steps are done. Snapshots when due;
        leaves when asked to."""
        self._run.step = step
        self._turn(machine.Begun())
        self._peers.life.tell(Place.REDUCE, step)
        wants = torch.zeros(len(Want), dtype=torch.int64)
        self._work.votes.cast(wants, self._work.snapshotter.due)
        if self._peers.control is not None:
            dist.all_reduce(wants, group=self._peers.control)
        self._peers.life.tell(Place.COMPUTE, step)
        self._count(wants)
        # what a loop of your own does next we cannot know
        self._work.snapshotter.finish_staging()

    def finish(self) -> None:
        """End the run here: commit the final snapshot and wait until it is there. Every rank must
        call it, at the same step.

        After `steps` it is needed only where no agent waits for the script's end, or to end the run
        before that; after a loop of your own it says that the loop was the whole training. Raises
        StoreError, CommitTimeout.
        """
        self._turn(machine.Finished())

    def conclude(self) -> None:
        """The script has ended with status 0, on this rank. Of a run with an agent that is the end,
        wherever the loop was left.

        Raises BadInput if it cannot be.
        """
        self._turn(machine.Ended())

    # ---- the machine's hands ---------------------------------------------------------------------
    def _turn(self, event: machine.Event) -> None:
        turn = machine.turn(self._state, event, self._seen())
        for act in turn.first:
            self._do(act)
        self._state = turn.state
        for act in turn.after:
            self._do(act)

    def _seen(self) -> machine.Seen:
        log, snapshotter = self._work.log, self._work.snapshotter
        return machine.Seen(
            step=self.step,
            total=self._total,
            until=self._until,
            saved_step=snapshotter.saved_step,
            flight_step=snapshotter.flight_step,
            pending=log.pending is not None,
            unsaved=bool(log.unsaved),
            leads=self.rank == 0,
        )

    def _do(self, act: machine.Act) -> None:
        match act:
            case machine.Snapshot(why, final):
                ended = machine.end_words(self._seen()) if final else ""
                own_loop = self._work.feed.batching is None
                self._work.snapshotter.take(why, ended, own_loop)
            case machine.Leave(why, code):
                self._leave(why)
                if code is not None:
                    sys.stdout.flush()
                    sys.exit(code)
            case machine.Refuse(what):
                raise BadInput(what)
            case Do.RESUME:
                self.resume()
            case Do.GO_ON:
                self._go_on()
            case Do.ANSWER:
                self._work.votes.answered()
            case Do.LAND:
                self._work.snapshotter.land(must=True)
            case Do.MARK_END:
                self._peers.agree(self._mark_end)
            case Do.MARK_END_ALONE:
                self._mark_end()
                self._tell_end("finished")
            case Do.TELL_END:
                self._tell_end("finished")
            case Do.COMPARE_STEPS:
                self._compare_steps()
            case Do.PART:
                self._peers.life.tell(Place.LEAVING)
                self._run.flush()
                self._peers.barrier()
                self._hang_up_at_exit()

    def _boundary(self) -> None:
        """Between two steps: agree on what to do and do it, all ranks at the same boundary.

        With `votes_late` (on a GPU) the votes of step k are counted after step k + 1, so that no
        step waits for another rank's host.
        """
        pending = self._work.log.pending
        self._peers.life.tell(Place.REDUCE)
        if not self.votes_late and pending is not None:
            self._work.log.settle()
            self._count(pending.ints[VOTES])
        elif self._counted is not None:
            self._count(self._counted)
        self._counted = pending.ints[VOTES] if pending is not None else None
        self._hold.prepare(self._work.training.state)

    def _count(self, votes: torch.Tensor) -> None:
        want = machine.winner(votes.tolist())
        if want is not Want.NOTHING:
            self._work.log.settle()
            self._turn(self._work.votes.asked(want))

    def _go_on(self) -> None:
        """`steps` once more: what the last loop left open is done, and the state is what it is."""
        if self._work.log.pending is not None:
            self._boundary()
        parent = self._work.snapshotter.parent
        self._tell_start(parent.epoch if parent else 0, 0.0)

    def _tell_start(self, resumed_epoch: int, restore_s: float) -> None:
        feed, on_gpu = self._work.feed, self.device.type == "cuda"
        batching = feed.batching
        self._run.fact(
            SessionStarted(
                epoch=self.epoch,
                world=self.world,
                resumed_step=self._work.snapshotter.resumed_step,
                resumed_epoch=resumed_epoch,
                total_steps=self._total,
                global_batch=batching.global_batch if batching else 0,
                micro_batch=batching.micro_batch if batching else 0,
                shares=feed.plan.shares if batching else (),
                reduce=self.reduce,
                parallel=self.strategy.name,
                device=torch.cuda.get_device_name(self.device) if on_gpu else "cpu",
                restore_s=restore_s,
                tier=self._resume.tier,
            )
        )

    def _compare_steps(self) -> None:
        """The script has ended here; has it on the other ranks, at the same step?"""
        self._peers.life.tell(Place.LEAVING)
        where = machine.where(self._seen())
        if self._peers.control is not None and not dist.is_initialized():
            raise BadInput(
                f"the script ended at {where} without its process group: call "
                "run.finish() before destroying that"
            )
        if what := machine.apart(self._peers.gather_steps(self.step)):
            raise BadInput(what)
        self.print(f"harness: the script ended at {where}; the run ends with it")

    def _mark_end(self) -> None:
        """Rank 0: the newest snapshot is the run's last one. Its manifest says so if that was
        known when it was committed."""
        newest, snapshots = self._work.snapshotter.parent, self._run.snapshots
        if not self._run.url or newest is None:
            return
        if not snapshots.ended(snapshots.load(newest)):
            snapshots.end(newest, machine.end_words(self._seen()))

    # ---- leaving ---------------------------------------------------------------------------------
    def _tell_end(self, why: str) -> None:
        self._run.fact(SessionEnded(self.epoch, self.step, why))

    def _leave(self, why: str) -> None:
        self._peers.life.tell(Place.LEAVING)
        self._tell_end(why)
        self._run.close()
        self._peers.barrier()
        self._hang_up_at_exit()

    def _hang_up_at_exit(self) -> None:
        atexit.unregister(self._hang_up)  # once is enough
        atexit.register(self._hang_up)

    def _hang_up(self) -> None:
        self._run.close()  # what the script logged after its last step
        if dist.is_initialized():
            dist.destroy_process_group()


def attach(
    *,
    seed: int = 0,
    run: str | None = None,
    snapshot_every_s: float | None = None,
    snapshot_every_steps: int | None = None,
    keep_snapshots: int = 3,
    keep_every_steps: int = 0,
    keep_best: str = "",
    reduce: str = "fast",
) -> Session:
    """Join the run that the environment names. `seed` decides data order and all randomness of the
    training.

    `reduce`: "fast", or "exact" or "exact32" (sums that do not depend on the world; 64 or 32 bits
    on the wire). With these a step's micro-batches come a second time when a gradient is far
    greater than those before it: then `step.attempt` is 1, buffers of the model are as they were
    before the step, and the batches are given anew. Only what the body counts or logs for itself
    has to look at `step.attempt`. With "exact" that is rare; with "exact32" it is so in the first
    step of a run.

    `run`: the run's URL, by default what the agent says. Snapshot interval: every
    `snapshot_every_steps` steps, or every `snapshot_every_s` seconds, or (neither) derived from
    what a snapshot costs. `keep_best`: keep also the best one by a metric that the script logs,
    "accuracy:max", or "loss:min". Raises BadInput, StoreError.
    """
    keep = Keep(last=keep_snapshots, every=keep_every_steps, best=keep_best)
    session = Session(
        dict(os.environ),
        seed=seed,
        run=run,
        interval=machine.Interval(snapshot_every_s, snapshot_every_steps),
        keep=keep,
        reduce=reduce,
    )
    _attached[:] = [session]
    return session


_attached: list[Session] = []  # of this process, the newest: for who sees its script end


def conclude() -> None:
    """The script has ended with status 0: `Session.conclude`. For who runs it (`worker.py`)."""
    for session in _attached:
        session.conclude()


def fsdp2(model: nn.Module, run: Session, blocks: list[nn.Module] | None = None) -> nn.Module:
    """Shard the model over all ranks (FSDP2). Call before the optimizer is made: it replaces the
    parameters.

    `blocks` (default: the members of every ModuleList) are sharded one after the other, so no
    device ever holds the whole model. A model on the meta device (`with torch.device("meta")`) gets
    its values by each module's `reset_parameters()`, from `attach`'s seed and the module's name:
    the same on any number of ranks. Raises BadInput for a module there that has none.
    """
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    shard(model, run.device, blocks, run.seed)
    return model


__all__ = ["Session", "Step", "attach", "fsdp2"]
