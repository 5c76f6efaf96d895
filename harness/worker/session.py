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
import contextlib
import functools
import json
import math
import os
import secrets
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.optim.swa_utils import AveragedModel

from harness.bucket.journal import Journal
from harness.core import records as rec
from harness.core.batch import Batching, Plan, plan
from harness.core.facts import (
    Fact,
    GuardTripped,
    SessionEnded,
    SessionStarted,
    SnapshotFailed,
    SnapshotQuarantined,
    StepDone,
    Validated,
    Warned,
    canonical,
)
from harness.core.hardware import peak_flops
from harness.core.world import RESIZE, UNFIT, BadInput, Fenced, HarnessError
from harness.node.marks import EXIT_CODE, Mark, MarkReader, Want
from harness.node.progress import Place, Progress
from harness.uploader.client import Courier, Local, courier_at, fact_of
from harness.uploader.nearby import tiers_for
from harness.worker import replicas
from harness.worker.environment import differences, environment
from harness.worker.exact import exact_strategy_for
from harness.worker.guards import NonFiniteLoss, Precision, check_finite
from harness.worker.loader import (
    Stream,
    fingerprint,
    is_map_style,
    map_style,
    read_again,
    same_when_read_again,
    seed_everything,
)
from harness.worker.parallel import (
    Strategy,
    check_real,
    check_unwrapped,
    drawn_by_shard,
    same_everywhere,
    shard,
    share,
    strategy_for,
)
from harness.worker.process import write_error
from harness.worker.rounding import WORDS
from harness.worker.step import VOTES, Buffers, Pending, Step
from storage import dcp
from storage.errors import StoreError, StoreUnavailable
from storage.files import MemoryStore
from storage.leases import reading
from storage.manifest import Manifest, Ref
from storage.objects import ObjectStore
from storage.opening import open_store
from storage.restore import PAUSES_S, Looks, Restore, Rewind, this_machine
from storage.retention import Keep
from storage.snapshots import Snapshots
from storage.staging import Beside, Segment, StageFull
from storage.tiers import Tiered
from storage.upload import Job, Outcome

COMMIT_TIMEOUT_S = 600.0  # the longest that leaving waits for its snapshot
CALM_STEPS = 5  # that say how long a step takes
# of the snapshot interval may pass until the commit, for the sake of the training's speed (a third
# would make it longer)
SENDING = 0.25
# assumed mean time between losses nobody announced, for the snapshot interval
LOSS_EVERY_S = 3600.0
# how often facts go to the bucket; elsewhere every FLUSH_REMOTE_S
FLUSH_S = {"file": 1.0, "memory": 1.0}
FLUSH_REMOTE_S = 10.0
UNKNOWN_GFLOPS = -(1 << 50)  # one rank's makes the sum of all negative
REPLICA_S = 15.0  # how long a restore waits for a silent second bucket


class CommitTimeout(HarnessError):
    """A snapshot that had to be committed was not, within its bound."""


@dataclass
class _Flight:
    """A snapshot on its way to the bucket."""

    ref: Ref
    t_start: float
    why: str
    records: list[rec.StepRecord]  # of the steps since the last snapshot
    tensors: dict[str, torch.Tensor]
    data: dict[str, Any]
    common: replicas.Held | None = None  # what must be the same on all ranks, as it was
    plain: dict[str, Any] = field(default_factory=dict)
    staged: dcp.Staged | None = None  # None: the structure is not the planned one
    segment: Segment | None = None
    # (3,) int64: is that so on any rank? The greatest and least hash of `common`. See `agreed`
    changed: torch.Tensor | None = None
    agreed: Any = None
    finished: bool = False  # training may change the state
    stall_s: float = 0.0
    within_s: float = 0.0  # see `Job`
    waiting_since_s: float | None = None
    landed: threading.Event = field(default_factory=threading.Event)
    outcome: Outcome | None = None
    error: BaseException | None = None


class Session:
    """See the module's docstring. Made by `attach`."""

    def __init__(
        self,
        environ: dict[str, str],
        *,
        seed: int,
        run: str | None,
        snapshot_every_s: float | None,
        snapshot_every_steps: int | None,
        keep: Keep,
        reduce: str,
    ):
        if reduce not in ("fast", *WORDS):
            raise BadInput(f"reduce={reduce!r} is not known; wanted 'fast', 'exact' or 'exact32'")
        self.seed, self.reduce = seed, reduce
        self._life = Progress(environ.get("HARNESS_PROGRESS"))
        self._life.tell(Place.START)
        self.rank = int(environ.get("RANK", 0))
        self.local_rank = int(environ.get("LOCAL_RANK", 0))
        self.world = int(environ.get("WORLD_SIZE", 1))
        self.device = (
            torch.device("cuda", self.local_rank)
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        # `harness replay` re-executes a part of a run
        self._until = int(environ.get("HARNESS_UNTIL_STEP", 1 << 62))
        self.tokens_per_sample = 0
        self.flops_per_sample = 0.0
        # of this rank's device, for MFU; None: from its name and what the model is computed in
        self.peak_flops: float | None = None
        # Numbers and votes of a step arrive while the next one computes: the host of a GPU runs
        # ahead of it.
        self.votes_late = self.device.type != "cpu"
        self._precision: Precision | None = None
        self._speeds = json.loads(environ.get("HARNESS_SPEEDS", "null"))
        self._every_s, self._every_steps, self._keep = snapshot_every_s, snapshot_every_steps, keep
        if self.device.type == "cuda":
            # kernels that add in whatever order they come would undo what exact sums give
            if reduce != "fast":
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.use_deterministic_algorithms(True, warn_only=True)
            torch.cuda.set_device(self.device)
        seed_everything(seed)
        if "WORLD_SIZE" in environ and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
        self._control = (
            dist.new_group(backend="gloo") if dist.is_initialized() and self.world > 1 else None
        )
        self._marks = MarkReader(
            Path(environ["HARNESS_MARK"]) if "HARNESS_MARK" in environ else None
        )
        self._signalled = Want.NOTHING
        self._host = environ.get("HARNESS_HOST") or this_machine()
        self._look_again_s = _seconds(
            "HARNESS_LOOK_AGAIN_S", environ.get("HARNESS_LOOK_AGAIN_S", ""), PAUSES_S
        )
        self._allow_rewind = environ.get("HARNESS_ALLOW_REWIND", "") not in ("", "0")
        self._seen_path = (
            Path(environ["HARNESS_MARK"]).with_name("seen.json")
            if "HARNESS_MARK" in environ
            else None
        )
        # by hand: it may lie nowhere
        self._epoch_is_told = "HARNESS_EPOCH" in environ and "HARNESS_STAGE" not in environ
        self._open_bucket(run or environ.get("HARNESS_RUN"), environ)
        if "HARNESS_MARK" in environ:
            Path(environ["HARNESS_MARK"]).with_name("attached").touch()
            if threading.current_thread() is threading.main_thread():
                # systemd and Slurm send it to every process of a node; it is for the agent, which
                # tells us by the mark.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self._signal(Want.DRAIN))
            signal.signal(signal.SIGUSR1, lambda *_: self._signal(Want.SNAPSHOT))
        self.scaler: Any = None
        self._buffers: Buffers | None = None
        # (step, micro-batch) -> its data; of a map-style dataset
        self._read_again: Callable[[int, int], Any] | None = None
        self._saved: dict[str, Any] = {}  # name -> object with state_dict
        # names of those whose state is each rank's own
        self._per_rank: frozenset[str] = frozenset()
        # buffers that every rank takes from rank 0 after each step; None: not looked yet
        self._living: list[str] | None = None
        self._model: nn.Module | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self.stream: Stream | None = None
        self.step = 0  # optimizer updates done
        self._head = ""  # of the chain of step records
        self._unsaved: list[rec.StepRecord] = []
        self._last_record: rec.StepRecord | None = None
        self._last_samples: dict[str, Any] | None = None
        self._parent: Ref | None = None
        self._resumed_ref = ""  # the snapshot that this epoch went on from
        self._saved_step = -1  # of the newest snapshot that is surely committed
        self._resumed_step = 0
        # an agent waits for the script's end, and `conclude` is called then
        self._by_script = "HARNESS_MARK" in environ
        self._began = False  # to resume: by `steps` or in a loop of the script's own
        self._looped = False  # `steps` was called
        self._complete = False  # ... and came to its total, which is committed
        self._over = False  # finished, or left because it was asked to
        self._pending: Pending | None = None
        # votes that have arrived but were not acted upon yet (`votes_late`)
        self._counted: torch.Tensor | None = None
        self._metrics: dict[str, float] = {}
        self._last_metrics: dict[str, float] = {}  # of all names, for the manifest
        self._flight: _Flight | None = None
        self._tier = "bucket"  # where the last restore found its bytes
        self._older: list[_Flight] = []  # overtaken by a snapshot that could not wait
        # parameters and optimizer state are copied beside the next forward and backward
        self._beside = True
        self._preparing: threading.Thread | None = None
        self._courier_at = environ.get("HARNESS_STAGE")
        second = environ.get("HARNESS_REPLICA", "")
        self._replica = (
            functools.partial(open_store, second, retry_within_s=REPLICA_S) if second else None
        )
        self._last_snapshot_s = time.monotonic()
        self._calm_steps_s: deque[float] = deque(maxlen=4 * CALM_STEPS)
        self._updated_s, self._calm = 0.0, False
        self._commit_s = 0.0
        self._stall_s = 0.01
        self._total = 0

    def _open_bucket(self, run: str | None, environ: dict[str, str]) -> None:
        run = run or None  # HARNESS_RUN may be set and empty
        self.run_url = run
        self.store: ObjectStore = open_store(run) if run else MemoryStore("memory://unnamed", {})
        if run is None:
            self.print(
                "harness: no run URL (HARNESS_RUN or attach(run=...)); training without snapshots"
            )
        self.snapshots = Snapshots(self.store)
        self.epoch = self._agree(
            lambda: (
                int(environ["HARNESS_EPOCH"]) if "HARNESS_EPOCH" in environ else self._own_epoch()
            )
        )
        self._token = secrets.token_hex(4)
        writer = f"worker-e{self.epoch:06d}-{self._token}"
        self.journal = Journal(self.store, writer, time.time) if self.rank == 0 else None
        self._closing = threading.Event()
        if self.journal and run:
            flush_s = FLUSH_S.get(self.store.url.partition("://")[0], FLUSH_REMOTE_S)
            threading.Thread(
                target=self._flush_facts, args=(flush_s,), name="facts", daemon=True
            ).start()

    def _own_epoch(self) -> int:
        """Without an agent (plain torchrun, or one process) the epoch is ours to make."""
        from harness.bucket.epochs import Epoch, encode_epoch, epoch_key, epoch_numbers

        while True:
            number = max(epoch_numbers(self.store), default=0) + 1
            epoch = Epoch(number, ("torchrun",), (self.world,), (1.0,), "", 0, "start")
            if self.store.create(epoch_key(number), encode_epoch(epoch)):
                return number

    def _newest_epoch(self) -> int:
        from harness.bucket.epochs import newest_epoch

        return newest_epoch(self.store).epoch

    def _flush_facts(self, every_s: float) -> None:
        assert self.journal
        while not self._closing.wait(every_s):
            with contextlib.suppress(StoreError):  # what was not written is kept and tried again
                self.journal.flush()

    def _signal(self, want: Want) -> None:
        self._signalled = max(self._signalled, want)

    # ---- what the script calls -------------------------------------------------------------------
    def print(self, *values: Any) -> None:
        if self.rank == 0:
            print(*values, flush=True)

    def sum(self, value: float | torch.Tensor) -> float:
        """The sum over all ranks, rounded once (so it depends on the ranks' values, not on
        their order). Every rank must call it."""
        self._life.tell()
        mine = torch.as_tensor(value, dtype=torch.float64).detach().cpu().reshape(1)
        if self._control is None:
            return float(mine)
        every = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(every, mine, group=self._control)
        return math.fsum(float(v) for v in every)

    def log(self, **metrics: float) -> None:
        """Metrics of the step that was just updated (validation loss...); they go into its
        record. All ranks may call it."""
        self._life.tell()
        self._metrics.update({k: float(v) for k, v in metrics.items()})
        self._last_metrics.update(self._metrics)
        self._fact(Validated(self.step, self.epoch, {k: float(v) for k, v in metrics.items()}))

    def alive(self) -> None:
        """A sign of life, for work between two steps that takes far longer than a step (a long
        validation): else the agent takes the silence for a hang."""
        self._life.tell()

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
        for option, names in {"after_update": after_update, "per_rank": per_rank}.items():
            if unknown := sorted(set(names) - set(others)):
                raise BadInput(
                    f"prepare({option}={unknown!r}): wanted names of what else it is given, found "
                    f"only {', '.join(others) or 'none'}"
                )
        self._per_rank = frozenset(per_rank)
        check_real(model)
        model.to(self.device)
        same_everywhere(model)
        self._model = model
        self._optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        held = {
            id(p) for o in self._optimizers for group in o.param_groups for p in group["params"]
        }
        if not any(id(p) in held for p in model.parameters()):
            raise BadInput(
                "the optimizer holds none of the model's parameters; make it from "
                "model.parameters() after fsdp2(model, run), "
                "before run.prepare(model, optimizer)"
            )
        self.scheduler, self.scaler = scheduler, scaler
        self._saved = {"model": model, "optimizer": _Many(self._optimizers)}
        self.strategy: Strategy
        if self.reduce == "fast":
            self.strategy = strategy_for(model)
        else:
            self.strategy = self._saved["reduce"] = exact_strategy_for(
                model, self.reduce, self._optimizers
            )
        for name, thing in {"scheduler": scheduler, "scaler": scaler, **others}.items():
            if thing is None:
                continue
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise BadInput(
                    f"prepare({name}=...): {type(thing).__name__} has no "
                    "state_dict/load_state_dict, so it cannot be resumed"
                )
            self._saved[name] = thing
        self._after_update = {
            *after_update,
            *(name for name, thing in others.items() if isinstance(thing, AveragedModel)),
        }
        self._buffers = Buffers(model)
        self._buffers.note()
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
            if self.reduce != "fast":
                raise BadInput(
                    f"reduce={self.reduce!r} promises the same result on any number of ranks, but "
                    "the model has BatchNorm, whose running "
                    "statistics depend on which rank saw what; use GroupNorm or LayerNorm, or "
                    "reduce='fast'"
                )
            self.print(
                "harness: the model has BatchNorm: its statistics are of rank 0's micro-batches, "
                "so results will depend on the world"
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
        if self._model is None:
            raise BadInput("call run.prepare(model, optimizer) before run.steps(...)")
        check_unwrapped(self._model)
        mapped = is_map_style(dataset)
        samples = len(dataset) if mapped else 1 << 62
        self.batching = Batching(samples, global_batch, micro_batch, self.seed, shuffle and mapped)
        speeds = self._speeds if self._speeds and len(set(self._speeds)) > 1 else None
        self.plan: Plan = plan(self.batching.micro_batches, self.world, speeds)
        if not mapped and (self.stream is None or self.stream.dataset is not dataset):
            self._saved["dataset"] = self.stream = Stream(
                dataset, self.batching, self.plan, self.rank, collate_fn
            )
        identity = {
            "version": 1,
            "seed": self.seed,
            "samples": samples if mapped else 0,
            "global_batch": global_batch,
            "micro_batch": micro_batch,
            "shuffle": shuffle and mapped,
            "data": fingerprint(dataset),
            "model": _model_fingerprint(self._model),
            "reduce": self.reduce,
        }
        if not mapped:
            identity["contents"] = True
        if self.reduce != "fast" and mapped and not same_when_read_again(dataset, self.seed):
            what = (
                f"{type(dataset).__name__}[i] is another sample when it is read again: it draws "
                "from a generator that is not seeded here "
                "(torch's, numpy's and Python's global ones are), so no two runs will be the same "
                "to the bit"
            )
            self._fact(Warned(0, self.epoch, what))
            self.print(f"harness: {what}")
        self._total = total
        total = min(total, self._until)
        self._identify(identity, lambda: fingerprint(dataset, by_repr=True))
        seed_everything(self.seed)
        if self._looped:
            self._go_on()
        else:
            self.resume()
        self._looped, self._complete = True, False
        batches = iter(())
        if mapped:
            self._read_again = functools.partial(
                read_again, dataset, self.batching, collate_fn=collate_fn
            )
            pin = self.device.type == "cuda"
            batches = map_style(
                dataset,
                self.batching,
                self.plan,
                self.rank,
                self.step + 1,
                total,
                collate_fn,
                num_workers,
                pin,
            )  # type: ignore[assignment]
        self.strategy.start(self.batching.micro_batches)
        self.strategy.zero()
        self._precision = Precision(self._model) if self.flops_per_sample else None
        while self.step < total:
            step = Step(self, self.step + 1, batches)
            self._life.tell(Place.COMPUTE, self.step)
            yield step
            if not step.updated:
                raise BadInput(
                    f"step {step.number}: step.update() was not called; it makes the optimizer step"
                )
            self._boundary()
        self._reach()

    def resume(self) -> int:
        """Load the newest valid snapshot into what `prepare` was given. Returns the step it is of
        (0: a fresh start).

        `steps` calls it; call it yourself only with a loop of your own, then `safe_point` after
        each step and `finish` after the last.
        """
        t0, self._began = time.time(), True
        self._life.tell(Place.RESTORE)
        manifest = self._restore()
        if manifest is not None:
            self.step, self._parent = manifest.step, manifest.ref
            self._resumed_ref = manifest.ref.name
            self._saved_step = self._resumed_step = manifest.step
            self._last_samples = manifest.data.get("samples")
            self._head = self._last_samples["head"] if self._last_samples else self._genesis()
            self.print(f"harness: resumed from step {manifest.step} (epoch {manifest.epoch})")
            self._check_environment(manifest)
        else:
            self._head = self._genesis()
            self._check_beginning()
        self._last_snapshot_s = time.monotonic()
        self._tell_start(manifest.epoch if manifest else 0, time.time() - t0)
        return self.step

    def _tell_start(self, resumed_epoch: int, restore_s: float) -> None:
        batching: Batching | None = getattr(self, "batching", None)
        self._fact(
            SessionStarted(
                epoch=self.epoch,
                world=self.world,
                resumed_step=self._resumed_step,
                resumed_epoch=resumed_epoch,
                total_steps=self._total,
                global_batch=batching.global_batch if batching else 0,
                micro_batch=batching.micro_batch if batching else 0,
                shares=self.plan.shares if batching else (),
                reduce=self.reduce,
                parallel=self.strategy.name,
                device=torch.cuda.get_device_name(self.device)
                if self.device.type == "cuda"
                else "cpu",
                restore_s=restore_s,
                tier=self._tier,
            )
        )

    def safe_point(self, step: int) -> None:
        """For a training loop of your own: `step` optimizer steps are done. Snapshots when due;
        leaves when asked to."""
        self.step, self._began = step, True
        self._life.tell(Place.REDUCE, step)
        wants = torch.zeros(len(Want), dtype=torch.int64)
        self._vote(wants)
        if self._control is not None:
            dist.all_reduce(wants, group=self._control)
        self._life.tell(Place.COMPUTE, step)
        self._act(_winner(wants))
        self._finish_staging()  # what a loop of your own does next we cannot know

    def finish(self) -> None:
        """End the run here: commit the final snapshot and wait until it is there. Every rank must
        call it, at the same step.

        After `steps` it is needed only where no agent waits for the script's end, or to end the run
        before that; after a loop of your own it says that the loop was the whole training. Raises
        StoreError, CommitTimeout.
        """
        if self._over:
            return
        self._save_end(final=True)
        self._agree(self._mark_end)
        self._leave("finished")

    def conclude(self) -> None:
        """The script has ended with status 0, on this rank. Of a run with an agent that is the end,
        wherever the loop was left.

        Raises BadInput if it cannot be.
        """
        if self._over or not self.run_url or not (self._by_script or self._began):
            return
        if not self._began:
            raise BadInput(
                "the script ended with status 0 after harness.attach() and trained nothing: wanted "
                "run.steps(...), or run.resume() "
                "and run.finish() around a loop of its own; end with another status if that is a "
                "failure"
            )
        if self._complete:  # all of it is committed: no rank need wait for another
            if self.rank == 0 and self._by_script:
                self._mark_end()
                self._fact(SessionEnded(self.epoch, self.step, "finished"))
            self._over = True
            return
        self._life.tell(Place.LEAVING)
        if self._control is not None:
            if not dist.is_initialized():
                raise BadInput(
                    f"the script ended at {self._where()} without its process group: call "
                    "run.finish() before destroying that"
                )
            steps = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
            dist.all_gather(steps, torch.tensor([self.step]), group=self._control)
            if len(found := {int(step) for step in steps}) > 1:
                raise BadInput(
                    "the ranks left the training at different steps "
                    f"({', '.join(map(str, sorted(found)))}), so it has no final state: "
                    "decide together (run.sum) when to leave the loop, and call run.finish() there"
                )
        self.print(f"harness: the script ended at {self._where()}; the run ends with it")
        self.finish()

    def _where(self) -> str:
        return f"step {self.step} of {self._total}" if self._total else f"step {self.step}"

    def _end_words(self) -> str:
        early = self.step < min(self._total, self._until)
        return f"ended early at {self._where()}" if early else f"{self._where()} is the last"

    def _go_on(self) -> None:
        """`steps` once more: what the last loop left open is done, and the state is what it is."""
        if self._over:
            raise BadInput(
                "run.steps(...) after run.finish(): the run has ended; call finish after the last "
                "loop only"
            )
        if self._pending is not None:
            self._boundary()
        self._tell_start(self._parent.epoch if self._parent else 0, 0.0)

    def _reach(self) -> None:
        """The loop has come to its total: what was trained is safe from here on, whatever the
        script does next.

        Whether the run ends with it only the script's end tells, and who waits for that is an
        agent. Without one nobody acts on it before.
        """
        if not self._save_end(final=not self._by_script) and not self._by_script:
            self._agree(self._mark_end)
        self._complete = True
        self._life.tell(Place.LEAVING)
        if not self._by_script:
            self._fact(SessionEnded(self.epoch, self.step, "finished"))
        self._flush()
        if self._control is not None:
            dist.barrier(group=self._control)  # nobody hangs up while another still talks
        self._hang_up_at_exit()

    def _save_end(self, final: bool) -> bool:
        """See to it that the step at which we are is committed. False: it was already, and may
        not be known to be the last."""
        if (
            self._pending is None
            and self._flight is not None
            and self._flight.ref.step == self.step
        ):
            self._land(must=True)
        if self._saved_step != self.step or self._pending is not None or self._unsaved:
            self._take_snapshot("final", final=final)
            self._land(must=True)
            return True
        return False

    def _mark_end(self) -> None:
        """Rank 0: the newest snapshot is the run's last one. Its manifest says so if that was
        known when it was committed."""
        if not self.run_url or self._parent is None:
            return
        if not self.snapshots.ended(self.snapshots.load(self._parent)):
            self.snapshots.end(self._parent, self._end_words())

    # ---- one step --------------------------------------------------------------------------------
    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _update(self, step: Step, clip_norm: float | None) -> None:
        self._life.tell(Place.REDUCE)
        self.strategy.reduce()
        sums = torch.stack(
            [step._losses, torch.tensor(step._weights, dtype=torch.float64, device=self.device)]
        )
        if self._control is not None:
            dist.all_reduce(sums)  # on the device's own stream: no host waits for it
        floats = torch.cat([sums.sum(1), self._zero().view(1)])
        weight: float | torch.Tensor = (
            floats[1] if step._tokens_weighted else float(self.batching.global_batch)
        )
        self.strategy.divide(weight)
        if self.scaler is not None:
            for optimizer in self._optimizers:
                self.scaler.unscale_(optimizer)
                self.strategy.share_found_inf(self.scaler, optimizer)
        norm = self.strategy.norm()
        floats[2] = norm
        if clip_norm is not None:
            self.strategy.clip((clip_norm / (norm + 1e-6)).clamp(max=1.0))
        lr = float(self._optimizers[0].param_groups[0]["lr"])
        self._finish_staging()
        for optimizer in self._optimizers:
            if self.scaler is not None:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        self.strategy.zero()
        self._share_buffers(look=self._living is None)
        self.step += 1
        # the step before this one (on a GPU): its numbers have had a whole step to arrive
        self._settle()
        halves = [
            part
            for total in (step._hash_sum, step._contents_sum)
            for part in (total & 0xFFFFFFFF, total >> 32)
        ]
        mine = [*halves[:2], step._samples, *[0] * len(Want), *halves[2:], self._peak_gflops]
        ints = torch.tensor(mine, dtype=torch.int64)
        self._vote(ints[VOTES])
        work = (
            dist.all_reduce(ints, group=self._control, async_op=True)
            if self._control is not None
            else None
        )
        record = rec.StepRecord(
            step=self.step,
            epoch=self.epoch,
            world=self.world,
            shares=self.plan.shares,
            samples=0,
            digest="",
            weight=0.0,
            loss=math.nan,
            lr=lr,
            t=0.0,
            dt=0.0,
        )
        self._pending = Pending(record, step.t_start, time.time(), floats, ints, work)

    @functools.cached_property
    def _peak_gflops(self) -> int:
        """What this rank adds to the sum by which MFU divides; asked for after the first
        forward."""
        precision = self._precision.name if self._precision is not None else "none"
        known = (
            peak_flops(torch.cuda.get_device_name(self.device), precision)
            if self.device.type == "cuda"
            else None
        )
        peak = self.peak_flops or known
        return int(peak / 1e9) if peak else UNKNOWN_GFLOPS

    def _share_buffers(self, look: bool) -> None:
        """What forwards have changed in the model beside its parameters is rank 0's from here
        on. `look`: it may be more than before."""
        if (
            self._control is None
            or self._model is None
            or self._buffers is None
            or self.reduce != "fast"
        ):
            return  # exact sums promise more: what differs is refused
        if look:
            every: list[Any] = [None] * self.world
            dist.all_gather_object(every, self._buffers.changed(), group=self._control)
            self._living = sorted(
                {*(self._living or ()), *(name for names in every for name in names)}
            )
        if self._living:
            now = dict(self._model.named_buffers())
            with torch.no_grad():
                share([now[name] for name in self._living])

    def _vote(self, wants: torch.Tensor) -> None:
        """Say what this rank knows of: wants[w] > 0 on any rank means w is wanted."""
        mark: Mark = self._marks.read()
        wants[mark.want] += 1
        wants[self._signalled] += 1
        if self.rank == 0 and self._snapshot_due():
            wants[Want.SNAPSHOT] += 1

    def _snapshot_due(self) -> bool:
        if not self.run_url or (self._flight is not None and not self._flight.landed.is_set()):
            return False
        if self._every_steps:
            return self.step % self._every_steps == 0
        return time.monotonic() - self._last_snapshot_s >= self._interval_s()

    def _interval_s(self) -> float:
        """Between two snapshots. 0: unknown, since they are counted in steps and no step was
        measured."""
        if self._every_steps:
            return self._every_steps * self._calm_step_s
        if self._every_s is not None:
            return self._every_s
        # Young: sqrt(2 * cost * time between losses); never so often that uploads overlap
        return min(
            900.0, max(10.0, math.sqrt(2 * self._stall_s * LOSS_EVERY_S), 3 * self._commit_s)
        )

    def _time_step(self) -> None:
        """How long a step takes while no snapshot is on its way, for who sends the next one."""
        now, calm = time.perf_counter(), self._flight is None or self._flight.landed.is_set()
        if calm and self._calm:
            self._calm_steps_s.append(now - self._updated_s)
        self._updated_s, self._calm = now, calm

    @property
    def _calm_step_s(self) -> float:
        """Median; 0: too few were seen."""
        return (
            statistics.median(self._calm_steps_s) if len(self._calm_steps_s) >= CALM_STEPS else 0.0
        )

    def _settle(self) -> None:
        """Wait for the numbers of the pending step, make its record, and look at them. Raises
        NonFiniteLoss."""
        p = self._pending
        if p is None:
            return
        loss, weight, norm = p.arrive()
        self._pending = None
        low, high, samples = p.ints[:3].tolist()
        contents = ""
        if self.stream is not None and self._identity.get("contents"):
            low_c, high_c = p.ints[-3:-1].tolist()
            contents = f"{(low_c + (high_c << 32)) % 2**64:016x}"
        metrics = {"grad_norm": norm, **self._metrics}
        self._metrics = {}
        record = replace(
            p.record,
            samples=samples,
            digest=f"{(low + (high << 32)) % 2**64:016x}",
            weight=weight,
            loss=loss,
            t=p.t_end,
            dt=p.t_end - p.t_start,
            metrics=metrics,
            contents=contents,
        ).chained(self._head)
        try:
            check_finite(record.step, loss, None if self.scaler is not None else norm)
        except NonFiniteLoss:
            self._fact(
                GuardTripped(
                    record.step, self.epoch, "non-finite", loss if not math.isfinite(loss) else norm
                )
            )
            self._close()
            raise
        self._head, self._last_record = record.h, record
        self._unsaved.append(record)
        gflops = self.flops_per_sample * samples / record.dt / 1e9 if record.dt else 0.0
        peak_gflops = int(p.ints[-1])
        self._fact(
            StepDone(
                record.step,
                self.epoch,
                loss,
                p.t_start,
                record.dt,
                samples,
                samples * self.tokens_per_sample,
                record.lr,
                norm,
                gflops / peak_gflops if peak_gflops > 0 and gflops else None,
            )
        )

    def _boundary(self) -> None:
        """Between two steps: agree on what to do and do it, all ranks at the same boundary.

        With `votes_late` (on a GPU) the votes of step k are counted after step k + 1, so that no
        step waits for another rank's host.
        """
        pending = self._pending
        self._life.tell(Place.REDUCE)
        if not self.votes_late and pending is not None:
            self._settle()
            self._act(_winner(pending.ints[VOTES]))
        elif self._counted is not None:
            self._act(_winner(self._counted))
        self._counted = pending.ints[VOTES] if pending is not None else None
        self._prepare_stage()

    def _act(self, want: Want) -> None:
        if want is Want.NOTHING:
            return
        if self._pending is not None:
            self._settle()
        mark = self._marks.read()
        why = {
            Want.SNAPSHOT: "interval",
            Want.RESIZE: "resize",
            Want.DRAIN: "drain",
            Want.STOP: "stop",
        }[want]
        if mark.why.startswith(("notice", "signal")) and want is not Want.SNAPSHOT:
            why = "notice"
        elif want is Want.SNAPSHOT and (
            mark.want is Want.SNAPSHOT or self._signalled is Want.SNAPSHOT
        ):
            why = "request"
            self._marks.answered()
            self._signalled = Want.NOTHING
        done = self.step >= self._total > 0
        if not done and not (self._flight is not None and self._flight.ref.step == self.step):
            self._take_snapshot(why)
        if want is Want.SNAPSHOT or done:  # a run at its last step finishes instead of leaving
            return
        self._land(must=True)
        self._leave({Want.RESIZE: "resize", Want.DRAIN: "drained", Want.STOP: "stopped"}[want])
        sys.stdout.flush()
        sys.exit(EXIT_CODE[want])

    # ---- snapshots -------------------------------------------------------------------------------
    def _state(self) -> dict[str, Any]:
        return {self._stored(name): thing.state_dict() for name, thing in self._saved.items()}

    def _stored(self, name: str) -> str:
        return _of_rank(name, self.rank) if name in self._per_rank else name

    def _common(self, state: dict[str, Any]) -> dict[str, Any]:
        """Of tensors by path, or plain state by name: what all ranks hold."""
        return {
            path: value for path, value in state.items() if RANK_MARK not in path.partition("/")[0]
        }

    def _plan_stage(self, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
        """Agree who writes what. Raises BadInput on all ranks if they do not hold the same."""
        if self._control is not None:
            mine = replicas.held(self._common(tensors), self._common(plain))
            every: list[Any] = [None] * self.world
            dist.all_gather_object(
                every, (mine.total(), environment(self.device)), group=self._control
            )
            if len({total for total, _ in every}) > 1:
                self._refuse_differences(mine, alike=all(env == every[0][1] for _, env in every))
        self._saver.plan(tensors)

    def _refuse_differences(self, mine: replicas.Held, alike: bool = True) -> None:
        """All ranks come here. `alike`: they are of one kind; else their arithmetic may differ,
        and so may what it made."""
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, mine.leaves(), group=self._control)
        found = replicas.differing(every)
        if (
            found
            and not alike
            and all(
                path in mine.tensors and path.startswith(("model/", "optimizer/"))
                for path, _ in found
            )
        ):
            what = (
                "ranks are of different kinds (device or library), and their copies of "
                f"{found[0][0]!r} (one of {len(found)}) are "
                "no longer the same to the bit; a snapshot takes each tensor from one of them"
            )
            self._fact(Warned(self.step, self.epoch, what))
            self.print(f"harness: {what}")
            return
        raise BadInput(replicas.explain(found))

    @functools.cached_property
    def _saver(self) -> dcp.Saver:
        return dcp.Saver(self.snapshots, self._control, own_memory=False)

    @functools.cached_property
    def _sender(self) -> Beside:
        return Beside("snapshot")

    @functools.cached_property
    def _courier(self) -> Courier:
        local = Local(self.store, self._record_outcome, self._life)
        return (
            courier_at(Path(self._courier_at), self.epoch, self.local_rank, local)
            if self._courier_at
            else local
        )

    def _prepare_stage(self) -> None:
        """After the first step, when the optimizer has its state: plan, and take the memory
        before the first snapshot needs it."""
        if self.run_url and self._preparing is None:
            tensors, plain = dcp.split(self._state())
            if not self._saver.planned:
                self._plan_stage(tensors, plain)
            self._sender  # noqa: B018 - starts it
            self._preparing = threading.Thread(
                target=self._take_memory, args=(self._saver.nbytes,), name="stage", daemon=True
            )
            self._preparing.start()

    def _take_memory(self, nbytes: int) -> None:
        with contextlib.suppress(StageFull):  # said when a snapshot needs it
            segment = self._courier.segment(nbytes)
            dcp.pin(_tensor_of(segment))
            self._courier.give_back(segment)

    def _segment(self) -> Segment:
        if self._preparing is not None:
            self._preparing.join()
        try:
            segment = self._courier.segment(self._saver.nbytes)
        except StageFull:
            for flight in self._older:  # one buffer it is, then
                flight.landed.wait(COMMIT_TIMEOUT_S)
            segment = self._courier.segment(self._saver.nbytes)
        dcp.pin(_tensor_of(segment))
        return segment

    def _take_snapshot(self, why: str, final: bool = False) -> None:
        """Begin to copy the state to host memory; from there it is sent in the background.

        What only the optimizer changes is copied beside the next forward and backward;
        `_finish_staging` waits for the rest of it.
        """
        if not self.run_url:
            return
        self._life.tell(Place.STAGING, self.step)
        if self._pending is None and not hasattr(self, "batching"):
            self._share_buffers(look=True)  # a loop of one's own; our own steps have done it
        t_start, t0 = time.time(), time.perf_counter()
        if why == "notice" and self._flight is not None and not self._flight.landed.is_set():
            self._overtake()
        self._land(must=False)
        if self._pending is not None:
            self._settle()
        ref = Ref(epoch=self.epoch, step=self.step)
        tensors, plain = dcp.split(self._state())
        data: dict[str, Any] = {}
        if self.rank == 0:
            data = {
                "state": plain,
                "final": final,
                **({"ended": self._end_words()} if final else {}),
                "parent": self._parent.name if self._parent else "",
                "samples": self._last_samples,
                "metrics": dict(self._last_metrics),
                "environment": environment(self.device),
                # its line was begun under the guard of storage/restore.py
                "resumed": self._resumed_ref,
            }
        elif self._per_rank:
            data = {
                f"state{RANK_MARK}{self.rank}": {
                    self._stored(name): plain[self._stored(name)] for name in self._per_rank
                }
            }
        unsaved, self._unsaved = self._unsaved, []
        if unsaved and self.rank == 0:
            data["samples"] = {
                "key": rec.key(unsaved),
                "head": unsaved[-1].h,
                "first": unsaved[0].step,
                "last": unsaved[-1].step,
            }
            data["loss"] = unsaved[-1].loss
        if unsaved:
            self._last_samples = data.get("samples")
        flight = _Flight(ref, t_start, why, unsaved, tensors, data, plain=plain)
        if why == "interval":
            flight.within_s = SENDING * self._interval_s()
        changed = not self._saver.fits(tensors)
        between = _between_updates(
            self._model, tensors, {self._stored(name) for name in self._after_update}
        )
        if not self._saver.planned or self._control is None:
            if changed:
                self._plan_stage(tensors, plain)
        else:
            # Whether it has changed on any rank, or differs between ranks, is known when it is
            # needed: before the optimizer steps.
            flight.common = replicas.held_aside(self._common(tensors), self._common(plain), between)
            total = flight.common.total()
            flight.changed = torch.tensor([changed, total, -total], dtype=torch.int64)
            flight.agreed = dist.all_reduce(
                flight.changed, op=dist.ReduceOp.MAX, group=self._control, async_op=True
            )
        if flight.agreed is None or not changed:
            flight.segment = self._segment()
            later = between if self._beside else set()
            flight.staged = self._saver.begin(tensors, later, _tensor_of(flight.segment))
        self._parent, self._flight = ref, flight
        self._last_snapshot_s = time.monotonic()
        flight.stall_s = self._stall_s = max(time.perf_counter() - t0, 1e-4)
        self._sender.run(functools.partial(self._send, flight, flight.changed))

    def _overtake(self) -> None:
        """Time is short: the next snapshot does not wait for the one that is on its way, and
        carries its records as well."""
        self._finish_staging()
        assert self._flight is not None
        self._unsaved = self._flight.records + self._unsaved
        self._older, self._flight = [*self._older, self._flight], None

    def _finish_staging(self) -> None:
        """The state is about to change: wait for what is not copied yet. All ranks come here at
        the same point, between the same steps."""
        flight = self._flight
        if flight is None or flight.finished:
            return
        t0 = flight.waiting_since_s = time.perf_counter()
        if flight.agreed is not None:
            flight.agreed.wait()
        if _differs(flight.changed):
            assert flight.common is not None
            self._flight = None  # nobody sends it
            if flight.segment is not None and flight.staged is not None:
                flight.staged.arrive()
                self._courier.give_back(flight.segment)
            self._refuse_differences(flight.common)
        # plan anew; nothing has changed the state so far
        if flight.changed is not None and int(flight.changed[0]):
            self._plan_stage(flight.tensors, flight.plain)
            if flight.staged is not None:
                flight.staged.arrive()
            if flight.segment is not None:
                self._courier.give_back(flight.segment)
            flight.segment = self._segment()
            flight.staged = self._saver.begin(flight.tensors, (), _tensor_of(flight.segment))
            self._sender.run(functools.partial(self._send, flight, None))
        assert flight.staged is not None
        flight.staged.wait()
        flight.finished = True
        flight.stall_s += time.perf_counter() - t0
        self._stall_s = flight.stall_s
        if self._beside and (touched := flight.staged.touched()):
            self._beside = False
            what = (
                f"{touched[0]!r} (one of {len(touched)}) was changed in place between two "
                "optimizer steps; from now on snapshots are "
                "copied while training stands still"
            )
            self._fact(Warned(self.step, self.epoch, what))
            print(f"harness: {what}", flush=True)

    def _send(self, flight: _Flight, changed: torch.Tensor | None) -> None:
        """In the background: when the bytes are in host memory, hand them to whoever sends them."""
        try:
            if changed is not None:
                flight.agreed.wait()
                if int(changed[0]) or _differs(changed):
                    return  # `_finish_staging` copies again, or refuses
            staged, segment = flight.staged, flight.segment
            assert staged is not None and segment is not None
            staged.arrive()
            if self._beside and not flight.finished and (touched := staged.touched()):
                raise StoreError(
                    f"snapshot of step {flight.ref.step}: {touched[0]!r} was changed in place "
                    "while it was copied"
                )
            since_s = flight.waiting_since_s
            stall_s = flight.stall_s + (
                time.perf_counter() - since_s
                if since_s is not None and not flight.finished
                else 0.0
            )
            before = (
                {rec.key(flight.records): rec.encode(flight.records).decode()}
                if flight.records and self.rank == 0
                else {}
            )
            job = Job(
                flight.ref,
                self.rank,
                self.world,
                f"{self._token}{self.rank}",
                dict(staged.layout.files),
                staged.layout.index,
                flight.data,
                weights="model/",
                before=before,
                keep=asdict(self._keep) if self.rank == 0 else None,
                step_s=self._calm_step_s,
                within_s=flight.within_s,
                watch=self._life.path or "here",
                note={"t_start": flight.t_start, "stall_s": stall_s, "why": flight.why},
            )
            self._courier.send(job, segment, lambda outcome: self._landed(flight, outcome))
        except (StoreError, RuntimeError) as e:
            self._fact(SnapshotFailed(flight.ref.step, flight.ref.epoch, str(e)))
            if flight.segment is not None:
                self._courier.give_back(flight.segment)
            flight.error = e
            flight.landed.set()

    def _landed(self, flight: _Flight, outcome: Outcome) -> None:
        flight.outcome = outcome
        if outcome.state == "committed":
            self._note_seen(flight.ref)
            self._commit_s = time.time() - flight.t_start
        else:
            known = {"Fenced": Fenced, "CommitTimeout": CommitTimeout}
            flight.error = known.get(outcome.kind, StoreError)(outcome.error)
        flight.landed.set()

    def _record_outcome(self, job: Job, outcome: Outcome) -> None:
        """Of what was sent from this process; the uploader process records the rest."""
        self._fact(fact_of(job, outcome))
        if self.journal is not None:
            # so that who dies now has not committed in silence
            with contextlib.suppress(StoreError):
                self.journal.flush()

    def _land(self, must: bool) -> None:
        """Wait for the snapshot that is on its way. `must`: its failure is ours (we are about
        to leave)."""
        self._finish_staging()
        flight, self._flight = self._flight, None
        if flight is None:
            return
        self._life.tell(Place.SAVING)
        flight.landed.wait(COMMIT_TIMEOUT_S + 60.0)
        committed = flight.outcome is not None and flight.outcome.state == "committed"
        if not committed:
            error = flight.error or CommitTimeout(
                f"nothing was heard of the snapshot of step {flight.ref.step}"
            )
            if must:
                raise error
            # the next snapshot carries these as well
            self._unsaved = flight.records + self._unsaved
            print(
                f"harness: snapshot of step {flight.ref.step} failed, training goes on: {error}",
                flush=True,
            )
        else:
            self._saved_step = flight.ref.step

    def _check_environment(self, manifest: Manifest) -> None:
        unlike = differences(manifest.data.get("environment") or {}, environment(self.device))
        if unlike:
            what = f"from here on the run may not be the same to the bit as before: {unlike}"
            self._fact(Warned(manifest.step, self.epoch, what))
            self.print(f"harness: {what}")

    def _check_beginning(self) -> None:
        """Weights that were drawn after they were sharded depend on the world; most of the time
        that shows."""
        if (
            self._control is not None
            and self._model is not None
            and (names := drawn_by_shard(self._model, self._control))
        ):
            what = (
                f"{names[0]!r} (one of {len(names)}) begins with the same values on every rank's "
                "shard: it was drawn after it was sharded, "
                "so what the run begins with depends on the number of ranks. harness.fsdp2(model, "
                "run) takes models on the meta device "
                "and gives them values that do not"
            )
            self._fact(Warned(0, self.epoch, what))
            self.print(f"harness: {what}")

    # ---- resuming --------------------------------------------------------------------------------
    def _agree(self, value: Callable[[], Any]) -> Any:
        """Rank 0's value, on every rank; its error as well."""
        if self._control is None:
            return value()
        box: list[Any] = [None]
        error: Exception | None = None
        if self.rank == 0:
            try:
                box = [(value(), None)]
            except (HarnessError, StoreError) as e:
                error, box = e, [(None, f"{type(e).__name__}: {e}")]
        dist.broadcast_object_list(box, src=0, group=self._control)
        if error is not None:
            raise error
        result, message = box[0]
        if message is not None:
            raise HarnessError(f"rank 0 found: {message}")
        return result

    def _identify(self, identity: dict[str, Any], first_version: Callable[[], str]) -> None:
        """This run is what it was when it began, or it is refused. `first_version`: the data's
        fingerprint as that made it."""

        def check() -> dict[str, Any]:
            if self.store.create("run.json", canonical(identity)):
                return identity
            found: dict[str, Any] = json.loads(self.store.get("run.json"))
            for name in identity:
                if found.get(name) == identity[name] or (name == "contents" and name not in found):
                    continue
                if name == "data" and found.get(name) == first_version():
                    continue
                hint = f"use a new run URL, or give {name} the value that this run began with"
                raise BadInput(
                    f"{self.run_url} holds another run: its {name} is {found.get(name)!r}, this "
                    f"script's is {identity[name]!r}; {hint}"
                )
            return found

        self._identity = self._agree(check) if self.run_url else identity

    def _genesis(self) -> str:
        return rec.genesis(getattr(self, "_identity", {}))

    def _gather(self, value: Any) -> list[Any]:
        """Each rank's value, in their order. Every rank must call it."""
        self._life.tell()
        if self._control is None:
            return [value]
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, value, group=self._control)
        return every

    def _restore(self) -> Manifest | None:
        """Every rank loads the same snapshot. `storage/restore.py` says what is done about one
        that some rank cannot read."""
        if not self.run_url:
            return None
        reopen = functools.partial(open_store, self.run_url)
        seen = max((Ref.parse(name) for name in self._gather(self._seen()) if name), default=None)
        restore = Restore(
            self.snapshots,
            self._host,
            Looks(reopen, self._pause, self._look_again_s),
            epoch=self.epoch,
            seen=seen,
            must_list=self._surely_there(),
            allow_rewind=self._allow_rewind,
            tell=self._note_reading,
            on_bad=self._note_bad,
        )
        while True:
            with contextlib.ExitStack() as lease:  # nobody prunes it while we load it
                manifest, again = self._restore_newest(restore, lease)
            if not again:
                if manifest is not None:
                    self._note_seen(manifest.ref)
                return manifest

    def _restore_newest(
        self, restore: Restore, lease: contextlib.ExitStack
    ) -> tuple[Manifest | None, bool]:
        """True: it was bad, and there may be an older one."""
        newest: str | None = self._agree(functools.partial(self._newest, restore, lease))
        if newest is None:
            return None, False
        ref, manifest, why, silent = Ref.parse(newest), None, "", ""
        try:
            manifest, why = restore.read(ref, functools.partial(self._load_newest, ref))
        except StoreUnavailable as e:
            silent = str(e)
        found = self._gather((self._host, why, silent))
        if silences := [text for _, _, text in found if text]:
            raise StoreUnavailable(silences[0])
        bad = {host: text for host, text, _ in found if text}
        if not bad:
            if self.rank == 0:
                restore.done(ref)
            return manifest, False
        refuted, second = (
            False,
            next((rank for rank, (host, _, _) in enumerate(found) if host not in bad), None),
        )
        # somebody on another host has read it, or its share of it: it shall read all of it
        if second is not None:
            said = self._gather(self._second_look(restore, ref) if self.rank == second else None)[
                second
            ]
            refuted = said == ""
            if said:
                bad[found[second][0]] = said
        unfit: dict[str, str] = self._agree(lambda: restore.blame(ref, bad, refuted))
        if unfit:
            self._leave_unfit(unfit)
        return None, True

    def _load_newest(self, ref: Ref, snapshots: Snapshots, look: int) -> Manifest:
        manifest = snapshots.load(ref)
        tiers = tiers_for(manifest, self._courier.held(ref)) if look == 0 else []
        near = Tiered(snapshots.store, manifest, tiers, self._wrong_tier, replica=self._replica)
        self._load(manifest, Snapshots(near))
        self._tier = near.tier
        return manifest

    def _second_look(self, restore: Restore, ref: Ref) -> str | None:
        """Why this rank finds it bad too; "": it is whole; None: the store did not let it say."""
        try:
            return restore.verify(ref, lambda done, total: self._life.tell())
        except StoreUnavailable:
            return None

    def _leave_unfit(self, unfit: dict[str, str]) -> None:
        """Not the snapshot is bad, but some hosts. They end for good; the others form a world
        without them."""
        for host, why in unfit.items():
            what = f"host {host} is unfit to read snapshots: {why}"
            self._fact(Warned(self.step, self.epoch, what))
            if host == self._host or self.rank == 0:
                print(f"harness: {what}", flush=True)
        mine = unfit.get(self._host)
        if mine:
            write_error(HarnessError(f"this host is unfit to read snapshots: {mine}"))
        self._leave("unfit" if mine else "resize")
        sys.stdout.flush()
        sys.exit(UNFIT if mine else RESIZE)

    def _pause(self, seconds: float) -> None:
        self._life.tell()
        time.sleep(seconds)

    def _note_reading(self, ref: Ref, what: str) -> None:
        self._fact(Warned(ref.step, self.epoch, what))
        print(f"harness: {what}", flush=True)

    def _note_bad(self, ref: Ref, why: str) -> None:
        self._fact(SnapshotQuarantined(ref.step, ref.epoch, why))
        print(f"harness: {why}; falling back to the next older snapshot", flush=True)

    def _wrong_tier(self, tier: str, what: str) -> None:
        self._fact(Warned(self.step, self.epoch, what))

    def _newest(self, restore: Restore, lease: contextlib.ExitStack) -> str | None:
        found = None
        for _ in range(3):
            try:
                found = restore.choose(lambda done, total: self._life.tell())
            except Rewind as e:  # a person has to decide; agents stop the run for that
                raise BadInput(str(e)) from e
            if found is None or lease.enter_context(reading(self.snapshots, found)):
                # else it was pruned just now, and there is a newer one (or we may not write, and
                # read without a lease)
                break
        return found.name if found else None

    def _surely_there(self) -> str:
        """A key that the listing must show, if it tells the truth; "" if we know of none."""
        if hasattr(self, "_identity"):
            return "run.json"
        return "" if self._epoch_is_told else f"rdzv/epochs/{self.epoch:06d}.json"

    def _seen(self) -> str:
        """The newest snapshot that workers of this node saw committed, whatever the bucket says
        of it now; "": none."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            body = json.loads(self._seen_path.read_text()) if self._seen_path else {}
            return Ref.parse(body["ref"]).name if body["run"] == self.run_url else ""
        return ""

    def _note_seen(self, ref: Ref) -> None:
        if self._seen_path is None or self.local_rank != 0:
            return
        with contextlib.suppress(OSError, ValueError):
            if not (before := self._seen()) or Ref.parse(before) < ref:
                new = self._seen_path.with_suffix(".new")
                new.write_text(json.dumps({"run": self.run_url, "ref": ref.name}))
                new.replace(self._seen_path)

    def _load(self, manifest: Manifest, snapshots: Snapshots) -> None:
        assert self._model is not None
        have, _ = dcp.split(self._state())
        by_index = [
            [p for group in o.param_groups for p in group["params"]] for o in self._optimizers
        ]

        def like(name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
            """Optimizer state that does not exist yet is laid out like its parameter."""
            parts = name.split("/")
            if parts[0] == "optimizer" and parts[2] == "state":
                parameter = by_index[int(parts[1])][int(parts[3])]
                return parameter.detach() if tuple(parameter.shape) == shape else None
            return None

        own = self._own_of(manifest)
        mine = {key for keys in own.values() for key in keys}

        def wanted(path: str) -> bool:
            top = path.partition("/")[0]
            return RANK_MARK not in top or top in mine

        tensors = dcp.destinations(manifest, self._common(have), like, wanted)
        dcp.load(snapshots, manifest, tensors)
        state = dcp.join(
            tensors, {key: plain for key, plain in _stored_plain(manifest).items() if wanted(key)}
        )
        for name, thing in self._saved.items():
            keys = own.get(name, [name])
            if missing := [key for key in keys if key not in state]:
                found = ", ".join(state)
                raise BadInput(
                    f"snapshot {manifest.ref.name} has no state of {missing[0]!r}, only of "
                    f"{found}; it was saved by another script"
                )
            if name in own and manifest.world != self.world:
                thing.load_state_dicts([state[key] for key in keys])
            else:
                thing.load_state_dict(state[keys[0]])

    def _own_of(self, manifest: Manifest) -> dict[str, list[str]]:
        """Of what is each rank's own: the stored states that this rank needs. Raises BadInput
        if there is no way to share them out."""
        if manifest.world == self.world:
            return {name: [_of_rank(name, self.rank)] for name in self._per_rank}
        for name in sorted(self._per_rank):
            if not hasattr(self._saved[name], "load_state_dicts"):
                raise BadInput(
                    f"snapshot {manifest.ref.name} holds a state of {name!r} for each of "
                    f"{manifest.world} ranks, here are {self.world}; "
                    f"go on with {manifest.world} ranks, or give "
                    f"{type(self._saved[name]).__name__} a method load_state_dicts(states) "
                    "that takes those of all ranks, in order"
                )
        return {name: _ranks_of(name, manifest) for name in self._per_rank}

    # ---- leaving ---------------------------------------------------------------------------------
    def _fact(self, fact: Fact) -> None:
        if self.journal is not None:
            self.journal.record(fact)

    def _leave(self, why: str) -> None:
        self._over = True
        self._life.tell(Place.LEAVING)
        self._fact(SessionEnded(self.epoch, self.step, why))
        self._close()
        if self._control is not None:
            dist.barrier(group=self._control)  # nobody hangs up while another still talks
        self._hang_up_at_exit()

    def _hang_up_at_exit(self) -> None:
        atexit.unregister(self._hang_up)  # once is enough
        atexit.register(self._hang_up)

    def _hang_up(self) -> None:
        self._close()  # what the script logged after its last step
        if dist.is_initialized():
            dist.destroy_process_group()

    def _close(self) -> None:
        self._closing.set()
        self._flush()

    def _flush(self) -> None:
        if self.journal is not None and self.run_url:
            # what is not written is kept; at the end of a session its snapshot is committed
            with contextlib.suppress(StoreError):
                self.journal.flush()


@dataclass
class _Many:
    """Several optimizers as one thing with a state."""

    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def state_dict(self) -> list[dict[str, Any]]:
        return [o.state_dict() for o in self.optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def _seconds(name: str, text: str, usual: tuple[float, ...]) -> tuple[float, ...]:
    """ "1,3,8"; `usual` if there is no text. Raises BadInput."""
    try:
        found = tuple(float(word) for word in text.split(",")) if text else usual
    except ValueError:
        found = (-1.0,)
    if not all(0.0 <= each <= 600.0 for each in found):
        raise BadInput(
            f"{name}={text!r}: wanted seconds between 0 and 600, separated by commas, for example "
            "1,3,8"
        )
    return found


RANK_MARK = "@r"  # between a name and a rank; no keyword has it


def _of_rank(name: str, rank: int) -> str:
    return f"{name}{RANK_MARK}{rank}"


def _ranks_of(name: str, manifest: Manifest) -> list[str]:
    return [_of_rank(name, rank) for rank in range(manifest.world)]


def _stored_plain(manifest: Manifest) -> dict[str, Any]:
    """The plain state in a manifest: what all ranks held, and what each had for itself."""
    stored = dict(manifest.data["state"])
    for rank in range(1, manifest.world):
        stored |= manifest.data.get(f"state{RANK_MARK}{rank}", {})
    return stored


def _differs(agreed: torch.Tensor | None) -> bool:
    """Of `_Flight.changed`, when all ranks' are in it: was the hash not the same on all?"""
    return agreed is not None and int(agreed[1]) != -int(agreed[2])


def _tensor_of(segment: Segment) -> torch.Tensor:
    return torch.frombuffer(segment.view, dtype=torch.uint8)


def _between_updates(
    model: nn.Module | None, tensors: dict[str, torch.Tensor], after_update: Collection[str] = ()
) -> set[str]:
    """Names of tensors that nothing changes from the end of a step to the next optimizer's step:
    parameters, the optimizers' own state, and what is promised to change only behind it."""
    assert model is not None
    later = {f"model/{name}" for name, _ in model.named_parameters(remove_duplicate=False)}
    tops = set(after_update)
    return {
        name
        for name in tensors
        if name in later
        or (name.startswith("optimizer/") and name.split("/")[2] == "state")
        or name.partition("/")[0] in tops
    }


def _winner(wants: torch.Tensor) -> Want:
    return max((w for w in Want if wants[w] > 0), default=Want.NOTHING)


def _model_fingerprint(model: nn.Module) -> str:
    shapes = sorted(
        (name, list(t.shape), str(t.dtype))
        for name, t in model.state_dict().items()
        if isinstance(t, torch.Tensor)
    )
    return xxhash.xxh3_128(json.dumps(shapes).encode()).hexdigest()


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
        snapshot_every_s=snapshot_every_s,
        snapshot_every_steps=snapshot_every_steps,
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
