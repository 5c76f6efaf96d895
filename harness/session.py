"""The user's front door: `harness.attach()`. Runs in the worker, one per GPU.

    run = harness.attach(seed=0)
    run.prepare(model, optimizer, scheduler=scheduler)
    for step in run.steps(dataset, total=1000, global_batch=64, micro_batch=8):
        for x, y in step:                                   # this rank's micro-batches
            step.backward(loss_fn(model(x), y))             # the mean over the micro-batch
        step.update(clip_norm=1.0)

It keeps three promises: the samples of step k and the global batch are the same on any number of ranks; a snapshot is
committed or absent; all ranks act on a notice at the same step boundary. It finds its place in the environment that the
agent (or plain torchrun) sets; without any it is an ordinary single process.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
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

from harness import records as rec
from harness.batch import Batching, Plan, digest, plan, sample_hash, seed_for
from harness.exact import WORDS, differences, environment, exact_strategy_for
from harness.facts import (
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
from harness.guards import NonFiniteLoss, check_finite, peak_flops
from harness.journal import Journal
from harness.loader import MicroBatch, Stream, fingerprint, is_map_style, map_style, same_when_read_again, seed_everything, to_device
from harness.marks import EXIT_CODE, Mark, MarkReader, Want
from harness.nearby import tiers_for
from harness.parallel import Strategy, same_everywhere, shard, strategy_for
from harness.progress import Place, Progress
from harness.uploader import Courier, Local, courier_at, fact_of
from harness.worker import write_error
from harness.world import RESIZE, UNFIT, BadInput, Fenced, HarnessError
from storage import dcp
from storage.leases import reading
from storage.manifest import Manifest, Ref
from storage.objects import MemoryStore, ObjectStore, StoreError, StoreUnavailable, open_store
from storage.restore import PAUSES_S, Patience, Restore, Rewind, this_machine
from storage.retention import Keep
from storage.snapshots import Snapshots
from storage.staging import Beside, Segment, StageFull
from storage.tiers import Tiered
from storage.upload import Job, Outcome

COMMIT_TIMEOUT_S = 600.0  # the longest that leaving waits for its snapshot
CALM_STEPS = 5  # that say how long a step takes
SENDING = 0.25  # of the snapshot interval may pass until the commit, for the sake of the training's speed (a third would make it longer)
LOSS_EVERY_S = 3600.0  # assumed mean time between losses nobody announced, for the snapshot interval
FLUSH_S = {"file": 1.0, "memory": 1.0}  # how often facts go to the bucket; elsewhere every FLUSH_REMOTE_S
FLUSH_REMOTE_S = 10.0
REPLICA_S = 15.0  # how long a restore waits for a silent second bucket


class CommitTimeout(HarnessError):
    """A snapshot that had to be committed was not, within its bound."""


@dataclass
class _Pending:
    """A step whose numbers are still on their way from the other ranks."""

    record: rec.StepRecord  # digest, samples, weight, loss and h are filled in when they have arrived
    t_start: float
    floats: torch.Tensor  # (3,) float64 on the device: loss sum, weight, grad norm
    ints: torch.Tensor  # (3 + wants,) int64 on the host: digest halves, samples, one counter per Want
    work: Any = None

    def arrive(self) -> tuple[float, float, float]:
        """Wait for the other ranks. Loss over the global batch, global weight, gradient norm."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        loss_sum, weight, norm = self.floats.tolist()
        return (loss_sum / weight if weight else math.nan), weight, norm


@dataclass
class _Flight:
    """A snapshot on its way to the bucket."""

    ref: Ref
    t_start: float
    why: str
    records: list[rec.StepRecord]  # of the steps since the last snapshot
    tensors: dict[str, torch.Tensor]
    data: dict[str, Any]
    staged: dcp.Staged | None = None  # None: the structure is not the planned one
    segment: Segment | None = None
    changed: torch.Tensor | None = None  # is that so on any rank? Known when `agreed` is done
    agreed: Any = None
    finished: bool = False  # training may change the state
    stall_s: float = 0.0
    within_s: float = 0.0  # see `Job`
    waiting_since_s: float | None = None
    landed: threading.Event = field(default_factory=threading.Event)
    outcome: Outcome | None = None
    error: BaseException | None = None


class Step:
    """One optimizer update. Iterate it for this rank's micro-batches, call `backward` for each, then `update`."""

    def __init__(self, session: Session, number: int, batches: Iterator[MicroBatch]):
        self.number, self._session, self._batches = number, session, batches
        self._hash_sum, self._samples = 0, 0
        # One place per micro-batch of the step, filled by who does it: their sum over ranks, in this order, is the same on any world.
        self._losses = torch.zeros(session.batching.micro_batches, dtype=torch.float64, device=session.device)
        self._weights = [0.0] * session.batching.micro_batches
        self._tokens_weighted = False
        self._current: MicroBatch | None = None
        self._filler = False
        self._backwards = 0
        self.updated = False
        self.t_start = time.time()

    def __iter__(self) -> Iterator[Any]:
        s = self._session
        micros = list(s.plan.micros(s.rank))
        rounds = s.plan.rounds if s.strategy.equal_rounds else len(micros)
        if s.stream is not None:
            self._batches = s.stream.step(self.number)
        kept: list[MicroBatch] = []  # in case all must be done again
        repeat, first = True, True
        while repeat:
            for i in range(rounds):
                self._filler = i >= len(micros)
                s.strategy.micro(last=i == rounds - 1, filler=self._filler)
                if not self._filler:
                    if first and s.strategy.may_repeat:
                        kept.append(self._read())
                    self._current = copy.deepcopy(kept[i]) if kept else self._read()  # the script may change what it is given
                self._micro = micros[min(i, len(micros) - 1)]
                seed_everything(seed_for(s.seed, self.number, self._micro))
                before = self._backwards
                assert self._current is not None
                yield to_device(self._current.data, s.device)
                if (times := self._backwards - before) != 1:
                    raise BadInput(f"step {self.number}: step.backward(loss) was called {times} times for one micro-batch, wanted once")
            repeat, first = s.strategy.again(), False
        if s.stream is not None:
            for _ in self._batches:  # read on to the end of the global batch
                raise AssertionError("a micro-batch of ours came after our last one")

    def _read(self) -> MicroBatch:
        batch = next(self._batches)
        self._hash_sum += digest(sample_hash(batch.positions, batch.samples))
        self._samples += len(batch.samples)
        return batch

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Add this micro-batch's gradients. `loss`: mean over the micro-batch, 0-d. `weight`: how much the mean stands for; by
        default its samples; the number of valid tokens when those differ."""
        assert self._current is not None
        amount = float(len(self._current.samples)) if weight is None else float(weight)
        if self._filler:
            amount = 0.0
        scaled = loss * amount
        if self._session.scaler is not None:
            scaled = self._session.scaler.scale(scaled)
        scaled.backward()  # type: ignore[no-untyped-call]
        self._session.strategy.micro_done()
        if not self._filler:
            self._losses[self._micro] = loss.detach().double() * amount
            self._weights[self._micro] = amount
        self._tokens_weighted |= weight is not None
        self._backwards += 1

    def update(self, clip_norm: float | None = None) -> None:
        """Sum over all ranks, divide by the global weight, clip, and let optimizers and schedulers step."""
        self._session._update(self, clip_norm)
        self._session._time_step()
        self._session._life.tell(Place.COMPUTE, self._session.step)
        self.updated = True

    @property
    def loss(self) -> float:
        """The loss over the global batch; waits for the other ranks (and the GPU), so ask only when you need it."""
        s = self._session
        if s._pending is not None and s._pending.record.step == self.number:
            return s._pending.arrive()[0]
        return s._last_record.loss if s._last_record else math.nan


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
        self.device = torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")
        self._until = int(environ.get("HARNESS_UNTIL_STEP", 1 << 62))  # `harness replay` re-executes a part of a run
        self.tokens_per_sample = 0
        self.flops_per_sample = 0.0
        self._speeds = json.loads(environ.get("HARNESS_SPEEDS", "null"))
        self._every_s, self._every_steps, self._keep = snapshot_every_s, snapshot_every_steps, keep
        if self.device.type == "cuda":
            if reduce != "fast":  # kernels that add in whatever order they come would undo what exact sums give
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.use_deterministic_algorithms(True, warn_only=True)
            torch.cuda.set_device(self.device)
        seed_everything(seed)
        if "WORLD_SIZE" in environ and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
        self._control = dist.new_group(backend="gloo") if dist.is_initialized() and self.world > 1 else None
        self._marks = MarkReader(Path(environ["HARNESS_MARK"]) if "HARNESS_MARK" in environ else None)
        self._signalled = Want.NOTHING
        self._host = environ.get("HARNESS_HOST") or this_machine()
        self._look_again_s = _seconds("HARNESS_LOOK_AGAIN_S", environ.get("HARNESS_LOOK_AGAIN_S", ""), PAUSES_S)
        self._allow_rewind = environ.get("HARNESS_ALLOW_REWIND", "") not in ("", "0")
        self._seen_path = Path(environ["HARNESS_MARK"]).with_name("seen.json") if "HARNESS_MARK" in environ else None
        self._epoch_is_told = "HARNESS_EPOCH" in environ and "HARNESS_STAGE" not in environ  # by hand: it may lie nowhere
        self._open_bucket(run or environ.get("HARNESS_RUN"), environ)
        if "HARNESS_MARK" in environ:
            Path(environ["HARNESS_MARK"]).with_name("attached").touch()
            if threading.current_thread() is threading.main_thread():
                # systemd and Slurm send it to every process of a node; it is for the agent, which tells us by the mark.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self._signal(Want.DRAIN))
            signal.signal(signal.SIGUSR1, lambda *_: self._signal(Want.SNAPSHOT))
        self.scaler: Any = None
        self._saved: dict[str, Any] = {}  # name -> object with state_dict
        self._model: nn.Module | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self.stream: Stream | None = None
        self.step = 0  # optimizer updates done
        self._head = ""  # of the chain of step records
        self._unsaved: list[rec.StepRecord] = []
        self._last_record: rec.StepRecord | None = None
        self._last_samples: dict[str, Any] | None = None
        self._parent: Ref | None = None
        self._resumed_final = False
        self._resumed_ref = ""  # the snapshot that this epoch went on from
        self._pending: _Pending | None = None
        self._counted: torch.Tensor | None = None  # votes that have arrived but were not acted upon yet (on a GPU)
        self._metrics: dict[str, float] = {}
        self._last_metrics: dict[str, float] = {}  # of all names, for the manifest
        self._flight: _Flight | None = None
        self._tier = "bucket"  # where the last restore found its bytes
        self._older: list[_Flight] = []  # overtaken by a snapshot that could not wait
        self._beside = True  # parameters and optimizer state are copied beside the next forward and backward
        self._preparing: threading.Thread | None = None
        self._courier_at = environ.get("HARNESS_STAGE")
        second = environ.get("HARNESS_REPLICA", "")
        self._replica = functools.partial(open_store, second, retry_within_s=REPLICA_S) if second else None
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
            self.print("harness: no run URL (HARNESS_RUN or attach(run=...)); training without snapshots")
        self.snapshots = Snapshots(self.store)
        self.epoch = self._agree(lambda: int(environ["HARNESS_EPOCH"]) if "HARNESS_EPOCH" in environ else self._own_epoch())
        self._token = secrets.token_hex(4)
        writer = f"worker-e{self.epoch:06d}-{self._token}"
        self.journal = Journal(self.store, writer, time.time) if self.rank == 0 else None
        self._closing = threading.Event()
        if self.journal and run:
            flush_s = FLUSH_S.get(self.store.url.partition("://")[0], FLUSH_REMOTE_S)
            threading.Thread(target=self._flush_facts, args=(flush_s,), name="facts", daemon=True).start()

    def _own_epoch(self) -> int:
        """Without an agent (plain torchrun, or one process) the epoch is ours to make."""
        from harness.rendezvous import Epoch, encode_epoch, epoch_key, newest_epoch

        while True:
            number = newest_epoch(self.store).epoch + 1
            epoch = Epoch(number, ("torchrun",), (self.world,), (1.0,), "", 0, "start")
            if self.store.create(epoch_key(number), encode_epoch(epoch)):
                return number

    def _newest_epoch(self) -> int:
        from harness.rendezvous import newest_epoch

        return newest_epoch(self.store).epoch

    def _flush_facts(self, every_s: float) -> None:
        assert self.journal
        while not self._closing.wait(every_s):
            with contextlib.suppress(StoreError):  # what was not written is kept and tried again
                self.journal.flush()

    def _signal(self, want: Want) -> None:
        self._signalled = max(self._signalled, want)

    # ---- what the script calls ---------------------------------------------------------------------------------
    def print(self, *values: Any) -> None:
        if self.rank == 0:
            print(*values, flush=True)

    def sum(self, value: float | torch.Tensor) -> float:
        """The sum over all ranks, rounded once (so it depends on the ranks' values, not on their order). Every rank must call it."""
        self._life.tell()
        mine = torch.as_tensor(value, dtype=torch.float64).detach().cpu().reshape(1)
        if self._control is None:
            return float(mine)
        every = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(every, mine, group=self._control)
        return math.fsum(float(v) for v in every)

    def log(self, **metrics: float) -> None:
        """Metrics of the step that was just updated (validation loss...); they go into its record. All ranks may call it."""
        self._life.tell()
        self._metrics.update({k: float(v) for k, v in metrics.items()})
        self._last_metrics.update(self._metrics)
        self._fact(Validated(self.step, self.epoch, {k: float(v) for k, v in metrics.items()}))

    def alive(self) -> None:
        """A sign of life, for work between two steps that takes far longer than a step (a long validation): else the agent
        takes the silence for a hang."""
        self._life.tell()

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
        scheduler: Any = None,
        scaler: Any = None,
        after_update: Collection[str] = (),
        **others: Any,
    ) -> nn.Module:
        """Say what makes up the training state: model, optimizers, scheduler, GradScaler, and anything with a `state_dict`.

        The model moves to this rank's device (its parameters stay the same objects); its gradients will be summed over ranks.
        `after_update`: those of the others (an average of the weights) whose tensors change, if at all, between `step.update()` and the
        end of the loop's body, as an `AveragedModel`'s are taken to: a snapshot copies them beside the next forward and backward. Others
        it copies while training stands still. Who breaks the promise loses that snapshot, is told so, and is not believed again.
        """
        if unknown := sorted(set(after_update) - set(others)):
            raise BadInput(
                f"prepare(after_update={unknown!r}): wanted names of what else it is given, found only {', '.join(others) or 'none'}"
            )
        model.to(self.device)
        same_everywhere(model)
        self._model = model
        self._optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        held = {id(p) for o in self._optimizers for group in o.param_groups for p in group["params"]}
        if not any(id(p) in held for p in model.parameters()):
            raise BadInput(
                "the optimizer holds none of the model's parameters; make it from model.parameters() after fsdp2(model, run), "
                "before run.prepare(model, optimizer)"
            )
        self.scheduler, self.scaler = scheduler, scaler
        self._saved = {"model": model, "optimizer": _Many(self._optimizers)}
        self.strategy: Strategy
        if self.reduce == "fast":
            self.strategy = strategy_for(model)
        else:
            self.strategy = self._saved["reduce"] = exact_strategy_for(model, self.reduce, self._optimizers)
        for name, thing in {"scheduler": scheduler, "scaler": scaler, **others}.items():
            if thing is None:
                continue
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise BadInput(f"prepare({name}=...): {type(thing).__name__} has no state_dict/load_state_dict, so it cannot be resumed")
            self._saved[name] = thing
        self._after_update = {*after_update, *(name for name, thing in others.items() if isinstance(thing, AveragedModel))}
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
            if self.reduce != "fast":
                raise BadInput(
                    f"reduce={self.reduce!r} promises the same result on any number of ranks, but the model has BatchNorm, whose running "
                    "statistics depend on which rank saw what; use GroupNorm or LayerNorm, or reduce='fast'"
                )
            self.print(
                "harness: the model has BatchNorm: its statistics depend on micro-batches per rank, so results will depend on the world"
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
        """The steps that are still to do, after resuming from the newest valid snapshot. `global_batch` and `micro_batch` in samples."""
        if self._model is None:
            raise BadInput("call run.prepare(model, optimizer) before run.steps(...)")
        mapped = is_map_style(dataset)
        samples = len(dataset) if mapped else 1 << 62
        self.batching = Batching(samples, global_batch, micro_batch, self.seed, shuffle and mapped)
        speeds = self._speeds if self._speeds and len(set(self._speeds)) > 1 else None
        self.plan: Plan = plan(self.batching.micro_batches, self.world, speeds)
        if not mapped:
            self.stream = Stream(dataset, self.batching, self.plan, self.rank, collate_fn)
            self._saved["dataset"] = dataset
        identity = {
            "version": 1, "seed": self.seed, "samples": samples if mapped else 0, "global_batch": global_batch, "micro_batch": micro_batch,
            "shuffle": shuffle and mapped, "data": fingerprint(dataset), "model": _model_fingerprint(self._model), "reduce": self.reduce,
        }  # fmt: skip
        if self.reduce != "fast" and mapped and not same_when_read_again(dataset, self.seed):
            what = (
                f"{type(dataset).__name__}[i] is another sample when it is read again: it draws from a generator that is not seeded here "
                "(torch's, numpy's and Python's global ones are), so no two runs will be the same to the bit"
            )
            self._fact(Warned(0, self.epoch, what))
            self.print(f"harness: {what}")
        seed_everything(self.seed)
        self._total = total
        total = min(total, self._until)
        self._identify(identity)
        self.resume()
        batches = iter(())
        if mapped:
            pin = self.device.type == "cuda"
            batches = map_style(dataset, self.batching, self.plan, self.rank, self.step + 1, total, collate_fn, num_workers, pin)  # type: ignore[assignment]
        self.strategy.start(self.batching.micro_batches)
        self.strategy.zero()
        while self.step < total:
            step = Step(self, self.step + 1, batches)
            self._life.tell(Place.COMPUTE, self.step)
            yield step
            if not step.updated:
                raise BadInput(f"step {step.number}: step.update() was not called; it makes the optimizer step")
            self._boundary()
        self.finish()

    def resume(self) -> int:
        """Load the newest valid snapshot into what `prepare` was given. Returns the step it is of (0: a fresh start).

        `steps` calls it; call it yourself only with a loop of your own (then also `safe_point` after each step).
        """
        t0 = time.time()
        self._life.tell(Place.RESTORE)
        manifest = self._restore()
        if manifest is not None:
            self.step, self._parent = manifest.step, manifest.ref
            self._resumed_ref = manifest.ref.name
            self._resumed_final = bool(manifest.data.get("final"))
            self._last_samples = manifest.data.get("samples")
            self._head = self._last_samples["head"] if self._last_samples else self._genesis()
            self.print(f"harness: resumed from step {manifest.step} (epoch {manifest.epoch})")
            self._check_environment(manifest)
        else:
            self._head = self._genesis()
        self._last_snapshot_s = time.monotonic()
        batching: Batching | None = getattr(self, "batching", None)
        self._fact(
            SessionStarted(
                epoch=self.epoch,
                world=self.world,
                resumed_step=self.step,
                resumed_epoch=manifest.epoch if manifest else 0,
                total_steps=self._total,
                global_batch=batching.global_batch if batching else 0,
                micro_batch=batching.micro_batch if batching else 0,
                shares=self.plan.shares if batching else (),
                reduce=self.reduce,
                parallel=self.strategy.name,
                device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
                restore_s=time.time() - t0,
                tier=self._tier,
            )
        )
        return self.step

    def safe_point(self, step: int) -> None:
        """For a training loop of your own: `step` optimizer steps are done. Snapshots when due; leaves when asked to."""
        self.step = step
        self._life.tell(Place.REDUCE, step)
        wants = torch.zeros(len(Want), dtype=torch.int64)
        self._vote(wants)
        if self._control is not None:
            dist.all_reduce(wants, group=self._control)
        self._life.tell(Place.COMPUTE, step)
        self._act(_winner(wants))
        self._finish_staging()  # what a loop of your own does next we cannot know

    def finish(self) -> None:
        """Commit the final snapshot and wait until it is there."""
        if not self._resumed_final or self._unsaved or self._pending is not None:
            self._take_snapshot("final", final=True)
        self._land(must=True)
        self._leave("finished")

    # ---- one step ----------------------------------------------------------------------------------------------
    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _update(self, step: Step, clip_norm: float | None) -> None:
        self._life.tell(Place.REDUCE)
        self.strategy.reduce()
        sums = torch.stack([step._losses, torch.tensor(step._weights, dtype=torch.float64, device=self.device)])
        if self._control is not None:
            dist.all_reduce(sums)  # on the device's own stream: no host waits for it
        floats = torch.cat([sums.sum(1), self._zero().view(1)])
        weight: float | torch.Tensor = floats[1] if step._tokens_weighted else float(self.batching.global_batch)
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
        self.step += 1
        self._settle()  # the step before this one (on a GPU): its numbers have had a whole step to arrive
        ints = torch.tensor([step._hash_sum & 0xFFFFFFFF, step._hash_sum >> 32, step._samples] + [0] * len(Want), dtype=torch.int64)
        self._vote(ints[3:])
        work = dist.all_reduce(ints, group=self._control, async_op=True) if self._control is not None else None
        record = rec.StepRecord(
            step=self.step, epoch=self.epoch, world=self.world, shares=self.plan.shares, samples=0, digest="", weight=0.0, loss=math.nan,
            lr=lr, t=0.0, dt=0.0,
        )  # fmt: skip
        self._pending = _Pending(record, step.t_start, floats, ints, work)

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
        """Between two snapshots. 0: unknown, since they are counted in steps and no step was measured."""
        if self._every_steps:
            return self._every_steps * self._calm_step_s
        if self._every_s is not None:
            return self._every_s
        # Young: sqrt(2 * cost * time between losses); never so often that uploads overlap
        return min(900.0, max(10.0, math.sqrt(2 * self._stall_s * LOSS_EVERY_S), 3 * self._commit_s))

    def _time_step(self) -> None:
        """How long a step takes while no snapshot is on its way, for who sends the next one."""
        now, calm = time.perf_counter(), self._flight is None or self._flight.landed.is_set()
        if calm and self._calm:
            self._calm_steps_s.append(now - self._updated_s)
        self._updated_s, self._calm = now, calm

    @property
    def _calm_step_s(self) -> float:
        """Median; 0: too few were seen."""
        return statistics.median(self._calm_steps_s) if len(self._calm_steps_s) >= CALM_STEPS else 0.0

    def _settle(self) -> None:
        """Wait for the numbers of the pending step, make its record, and look at them. Raises NonFiniteLoss."""
        p = self._pending
        if p is None:
            return
        loss, weight, norm = p.arrive()
        self._pending = None
        low, high, samples = p.ints[:3].tolist()
        metrics = {"grad_norm": norm, **self._metrics}
        self._metrics = {}
        t = time.time()
        record = replace(
            p.record, samples=samples, digest=f"{(low + (high << 32)) % 2**64:016x}", weight=weight, loss=loss, t=t, dt=t - p.t_start,
            metrics=metrics,
        ).chained(self._head)  # fmt: skip
        try:
            check_finite(record.step, loss, None if self.scaler is not None else norm)
        except NonFiniteLoss:
            self._fact(GuardTripped(record.step, self.epoch, "non-finite", loss if not math.isfinite(loss) else norm))
            self._close()
            raise
        self._head, self._last_record = record.h, record
        self._unsaved.append(record)
        flops = self.flops_per_sample * samples / record.dt if record.dt else 0.0
        peak = peak_flops(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
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
                flops / (peak * self.world) if peak and flops else None,
            )
        )

    def _boundary(self) -> None:
        """Between two steps: agree on what to do and do it, all ranks at the same boundary.

        On a GPU the votes of step k are counted after step k + 1, so that no step waits for another rank's host.
        """
        pending = self._pending
        self._life.tell(Place.REDUCE)
        if self.device.type == "cpu" and pending is not None:
            self._settle()
            self._act(_winner(pending.ints[3:]))
        elif self._counted is not None:
            self._act(_winner(self._counted))
        self._counted = pending.ints[3:] if pending is not None else None
        self._prepare_stage()

    def _act(self, want: Want) -> None:
        if want is Want.NOTHING:
            return
        if self._pending is not None:
            self._settle()
        mark = self._marks.read()
        why = {Want.SNAPSHOT: "interval", Want.RESIZE: "resize", Want.DRAIN: "drain", Want.STOP: "stop"}[want]
        if mark.why.startswith(("notice", "signal")) and want is not Want.SNAPSHOT:
            why = "notice"
        elif want is Want.SNAPSHOT and (mark.want is Want.SNAPSHOT or self._signalled is Want.SNAPSHOT):
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

    # ---- snapshots ---------------------------------------------------------------------------------------------
    def _state(self) -> dict[str, Any]:
        return {name: thing.state_dict() for name, thing in self._saved.items()}

    @functools.cached_property
    def _saver(self) -> dcp.Saver:
        return dcp.Saver(self.snapshots, self._control, own_memory=False)

    @functools.cached_property
    def _sender(self) -> Beside:
        return Beside("snapshot")

    @functools.cached_property
    def _courier(self) -> Courier:
        local = Local(self.store, self._record_outcome, self._life)
        return courier_at(Path(self._courier_at), self.epoch, self.local_rank, local) if self._courier_at else local

    def _prepare_stage(self) -> None:
        """After the first step, when the optimizer has its state: plan, and take the memory before the first snapshot needs it."""
        if self.run_url and self._preparing is None:
            tensors, _ = dcp.split(self._state())
            if not self._saver.planned:
                self._saver.plan(tensors)
            self._sender  # noqa: B018 - starts it
            self._preparing = threading.Thread(target=self._take_memory, args=(self._saver.nbytes,), name="stage", daemon=True)
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

        What only the optimizer changes is copied beside the next forward and backward; `_finish_staging` waits for the rest of it.
        """
        if not self.run_url:
            return
        self._life.tell(Place.STAGING, self.step)
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
                "parent": self._parent.name if self._parent else "",
                "samples": self._last_samples,
                "metrics": dict(self._last_metrics),
                "environment": environment(self.device),
                "resumed": self._resumed_ref,  # its line was begun under the guard of storage/restore.py
            }
        unsaved, self._unsaved = self._unsaved, []
        if unsaved and self.rank == 0:
            data["samples"] = {"key": rec.key(unsaved), "head": unsaved[-1].h, "first": unsaved[0].step, "last": unsaved[-1].step}
            data["loss"] = unsaved[-1].loss
        if unsaved:
            self._last_samples = data.get("samples")
        flight = _Flight(ref, t_start, why, unsaved, tensors, data)
        if why == "interval":
            flight.within_s = SENDING * self._interval_s()
        changed = not self._saver.fits(tensors)
        if not self._saver.planned or self._control is None:
            if changed:
                self._saver.plan(tensors)
        else:
            # Whether it has changed on any rank is known when it is needed: before the optimizer steps.
            flight.changed = torch.tensor([changed], dtype=torch.int64)
            flight.agreed = dist.all_reduce(flight.changed, group=self._control, async_op=True)
        if flight.agreed is None or not changed:
            flight.segment = self._segment()
            later = _between_updates(self._model, tensors, self._after_update) if self._beside else set()
            flight.staged = self._saver.begin(tensors, later, _tensor_of(flight.segment))
        self._parent, self._flight = ref, flight
        self._last_snapshot_s = time.monotonic()
        flight.stall_s = self._stall_s = max(time.perf_counter() - t0, 1e-4)
        self._sender.run(functools.partial(self._send, flight, flight.changed))

    def _overtake(self) -> None:
        """Time is short: the next snapshot does not wait for the one that is on its way, and carries its records as well."""
        self._finish_staging()
        assert self._flight is not None
        self._unsaved = self._flight.records + self._unsaved
        self._older, self._flight = [*self._older, self._flight], None

    def _finish_staging(self) -> None:
        """The state is about to change: wait for what is not copied yet. All ranks come here at the same point, between the same steps."""
        flight = self._flight
        if flight is None or flight.finished:
            return
        t0 = flight.waiting_since_s = time.perf_counter()
        if flight.agreed is not None:
            flight.agreed.wait()
        if flight.changed is not None and int(flight.changed):  # plan anew; nothing has changed the state so far
            self._saver.plan(flight.tensors)
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
                f"{touched[0]!r} (one of {len(touched)}) was changed in place between two optimizer steps; from now on snapshots are "
                "copied while training stands still"
            )
            self._fact(Warned(self.step, self.epoch, what))
            print(f"harness: {what}", flush=True)

    def _send(self, flight: _Flight, changed: torch.Tensor | None) -> None:
        """In the background: when the bytes are in host memory, hand them to whoever sends them."""
        try:
            if changed is not None:
                flight.agreed.wait()
                if int(changed):
                    return  # `_finish_staging` copies again
            staged, segment = flight.staged, flight.segment
            assert staged is not None and segment is not None
            staged.arrive()
            if self._beside and not flight.finished and (touched := staged.touched()):
                raise StoreError(f"snapshot of step {flight.ref.step}: {touched[0]!r} was changed in place while it was copied")
            since_s = flight.waiting_since_s
            stall_s = flight.stall_s + (time.perf_counter() - since_s if since_s is not None and not flight.finished else 0.0)
            before = {rec.key(flight.records): rec.encode(flight.records).decode()} if flight.records and self.rank == 0 else {}
            job = Job(
                flight.ref, self.rank, self.world, f"{self._token}{self.rank}", dict(staged.layout.files), staged.layout.index, flight.data,
                weights="model/", before=before, keep=asdict(self._keep) if self.rank == 0 else None, step_s=self._calm_step_s,
                within_s=flight.within_s, watch=self._life.path or "here",
                note={"t_start": flight.t_start, "stall_s": stall_s, "why": flight.why},
            )  # fmt: skip
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
            with contextlib.suppress(StoreError):  # so that who dies now has not committed in silence
                self.journal.flush()

    def _land(self, must: bool) -> None:
        """Wait for the snapshot that is on its way. `must`: its failure is ours (we are about to leave)."""
        self._finish_staging()
        flight, self._flight = self._flight, None
        if flight is None:
            return
        self._life.tell(Place.SAVING)
        flight.landed.wait(COMMIT_TIMEOUT_S + 60.0)
        committed = flight.outcome is not None and flight.outcome.state == "committed"
        if not committed:
            error = flight.error or CommitTimeout(f"nothing was heard of the snapshot of step {flight.ref.step}")
            if must:
                raise error
            self._unsaved = flight.records + self._unsaved  # the next snapshot carries these as well
            print(f"harness: snapshot of step {flight.ref.step} failed, training goes on: {error}", flush=True)

    def _check_environment(self, manifest: Manifest) -> None:
        unlike = differences(manifest.data.get("environment") or {}, environment(self.device))
        if unlike:
            what = f"from here on the run may not be the same to the bit as before: {unlike}"
            self._fact(Warned(manifest.step, self.epoch, what))
            self.print(f"harness: {what}")

    # ---- resuming ----------------------------------------------------------------------------------------------
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

    def _identify(self, identity: dict[str, Any]) -> None:
        """This run is what it was when it began, or it is refused."""
        self._identity = identity

        def check() -> None:
            if self.store.create("run.json", canonical(identity)):
                return
            found = json.loads(self.store.get("run.json"))
            for name in identity:
                if found.get(name) != identity[name]:
                    hint = f"use a new run URL, or give {name} the value that this run began with"
                    raise BadInput(
                        f"{self.run_url} holds another run: its {name} is {found.get(name)!r}, this script's is {identity[name]!r}; {hint}"
                    )

        if self.run_url:
            self._agree(check)

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
        """Every rank loads the same snapshot. `storage/restore.py` says what is done about one that some rank cannot read."""
        if not self.run_url:
            return None
        reopen = functools.partial(open_store, self.run_url)
        seen = max((Ref.parse(name) for name in self._gather(self._seen()) if name), default=None)
        restore = Restore(
            self.snapshots,
            self._host,
            Patience(reopen, self._pause, self._look_again_s),
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

    def _restore_newest(self, restore: Restore, lease: contextlib.ExitStack) -> tuple[Manifest | None, bool]:
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
        refuted, second = False, next((rank for rank, (host, _, _) in enumerate(found) if host not in bad), None)
        if second is not None:  # somebody on another host has read it, or its share of it: it shall read all of it
            said = self._gather(self._second_look(restore, ref) if self.rank == second else None)[second]
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
        """Not the snapshot is bad, but some hosts. They end for good; the others form a world without them."""
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
                break  # else it was pruned just now, and there is a newer one (or we may not write, and read without a lease)
        return found.name if found else None

    def _surely_there(self) -> str:
        """A key that the listing must show, if it tells the truth; "" if we know of none."""
        if hasattr(self, "_identity"):
            return "run.json"
        return "" if self._epoch_is_told else f"rdzv/epochs/{self.epoch:06d}.json"

    def _seen(self) -> str:
        """The newest snapshot that workers of this node saw committed, whatever the bucket says of it now; "": none."""
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
        by_index = [[p for group in o.param_groups for p in group["params"]] for o in self._optimizers]

        def like(name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
            """Optimizer state that does not exist yet is laid out like its parameter."""
            parts = name.split("/")
            if parts[0] == "optimizer" and parts[2] == "state":
                parameter = by_index[int(parts[1])][int(parts[3])]
                return parameter.detach() if tuple(parameter.shape) == shape else None
            return None

        tensors = dcp.destinations(manifest, have, like)
        dcp.load(snapshots, manifest, tensors)
        state = dcp.join(tensors, manifest.data["state"])
        for name, thing in self._saved.items():
            if name not in state:
                found = ", ".join(state)
                raise BadInput(f"snapshot {manifest.ref.name} has no state of {name!r}, only of {found}; it was saved by another script")
            thing.load_state_dict(state[name])

    # ---- leaving -----------------------------------------------------------------------------------------------
    def _fact(self, fact: Fact) -> None:
        if self.journal is not None:
            self.journal.record(fact)

    def _leave(self, why: str) -> None:
        self._life.tell(Place.LEAVING)
        self._fact(SessionEnded(self.epoch, self.step, why))
        self._close()
        if self._control is not None:
            dist.barrier(group=self._control)  # nobody hangs up while another still talks
        atexit.register(self._hang_up)

    def _hang_up(self) -> None:
        self._close()  # what the script logged after its last step
        if dist.is_initialized():
            dist.destroy_process_group()

    def _close(self) -> None:
        self._closing.set()
        if self.journal is not None and self.run_url:
            with contextlib.suppress(StoreError):  # the last words of a session; its snapshot is committed
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
        raise BadInput(f"{name}={text!r}: wanted seconds between 0 and 600, separated by commas, for example 1,3,8")
    return found


def _tensor_of(segment: Segment) -> torch.Tensor:
    return torch.frombuffer(segment.view, dtype=torch.uint8)


def _between_updates(model: nn.Module | None, tensors: dict[str, torch.Tensor], after_update: Collection[str] = ()) -> set[str]:
    """Names of tensors that nothing changes from the end of a step to the next optimizer's step: parameters, the optimizers' own
    state, and what is promised to change only behind it."""
    assert model is not None
    later = {f"model/{name}" for name, _ in model.named_parameters(remove_duplicate=False)}
    tops = set(after_update)
    return {
        name
        for name in tensors
        if name in later or (name.startswith("optimizer/") and name.split("/")[2] == "state") or name.partition("/")[0] in tops
    }


def _winner(wants: torch.Tensor) -> Want:
    return max((w for w in Want if wants[w] > 0), default=Want.NOTHING)


def _model_fingerprint(model: nn.Module) -> str:
    shapes = sorted((name, list(t.shape), str(t.dtype)) for name, t in model.state_dict().items() if isinstance(t, torch.Tensor))
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
    """Join the run that the environment names. `seed` decides data order and all randomness of the training.

    `run`: the run's URL, by default what the agent says. Snapshot interval: every `snapshot_every_steps` steps, or
    every `snapshot_every_s` seconds, or (neither) derived from what a snapshot costs. `keep_best`: keep also the best one by a
    metric that the script logs, "accuracy:max", or "loss:min". Raises BadInput, StoreError.
    """
    keep = Keep(last=keep_snapshots, every=keep_every_steps, best=keep_best)
    return Session(
        dict(os.environ),
        seed=seed,
        run=run,
        snapshot_every_s=snapshot_every_s,
        snapshot_every_steps=snapshot_every_steps,
        keep=keep,
        reduce=reduce,
    )


def fsdp2(model: nn.Module, run: Session, blocks: list[nn.Module] | None = None) -> nn.Module:
    """Shard the model over all ranks (FSDP2). Call before the optimizer is made: it replaces the parameters."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    same_everywhere(model.to(run.device))
    return shard(model, run.device, blocks)


__all__ = ["Session", "Step", "attach", "fsdp2"]
