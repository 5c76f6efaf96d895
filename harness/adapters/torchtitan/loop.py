"""The training steps of torchtitan, through `loops/own_loop.py`, and our snapshots as its
checkpoint manager. Runs in the worker.

torchtitan sees the real world: it lays out the run's mesh over it (without one, its FSDP2 shards
over all ranks) and sums gradients during each backward. Its loss is a sum over labels divided by
the number of labels in the global batch, so ranks may have different numbers of micro-batches that
count. They run equally many, since FSDP2 communicates in each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.dataloader import DataloaderExhaustedError

from harness.adapters import framework_claim
from harness.adapters.torchtitan.data import TitanLoader, fingerprint
from harness.adapters.torchtitan.patch import OVERRIDES, joined
from harness.core.mesh import ModelMesh
from harness.core.world import BadInput
from harness.loops.own_loop import OwnLoop, OwnStep, own_loop
from harness.worker.gradients.parallel import once as norm_once

if TYPE_CHECKING:
    from harness.worker.session import Session


class TitanSums:
    """The strategy for a model as torchtitan splits it: by the end of the last backward it has
    summed gradients over all ranks."""

    name, equal_rounds, may_repeat, sums = "torchtitan", True, False, "fast"

    def __init__(self, model: nn.Module, replica_ranks: int):
        self.replica_ranks = replica_ranks
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if dist.is_initialized() and dist.get_backend() == "gloo":
            for module in model.modules():
                if isinstance(module, FSDPModule):  # gloo has no pre-multiplied sum
                    module.set_force_sum_reduction_for_comms(True)

    def start(self, micro_batches: int) -> None:
        """Build nothing."""

    def micro(self, last: bool, filler: bool = False) -> None:
        """Change nothing: every backward communicates."""

    def micro_done(self) -> None:
        """Change nothing: no gradients are held back."""

    def again(self) -> bool:
        return False

    def reduce(self) -> None:
        """Change nothing: the backward has reduced the gradients."""

    def divide(self, weight: float | torch.Tensor) -> None:
        """Change nothing: torchtitan has divided each loss by the labels of the global batch."""

    def norm(self) -> torch.Tensor:
        """Return the norm over all ranks. Experts have a mesh of their own."""
        on: dict[Any, list[torch.Tensor]] = {}
        for p in self._parameters:
            if p.grad is not None:
                on.setdefault(getattr(p.grad, "device_mesh", None), []).append(p.grad)
        norms = []
        for grads in on.values():
            norm = torch.nn.utils.get_total_norm(grads, foreach=True)
            norm_once.note(grads, norm)
            norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def clip(self, coefficient: torch.Tensor) -> None:
        """Leave clipping to torchtitan."""

    def zero(self) -> None:
        """Leave this to torchtitan, which sets gradients to zero or None."""

    def share_found_inf(self, scaler: Any, optimizer: Any) -> None:
        """Change nothing: torchtitan has no GradScaler."""


class TitanState:
    """The data state of each rank: tokens seen, and positions of its streams."""

    def __init__(self, trainer: Any, loader: TitanLoader, counts: bool):
        """`counts`: no rank before this one has the same tokens."""
        self._trainer, self._loader, self._counts = trainer, loader, counts
        self._tokens, self._places = 0, dict[int, Any]()  # as they were loaded
        self._of_all = False  # the tokens are those of all ranks

    def state_dict(self) -> dict[str, Any]:
        tokens = self._trainer.ntokens_seen if self._counts else 0
        return {"tokens": tokens, "places": self._loader.places()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_state_dicts([state])
        self._of_all = False

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Load the states of another number of ranks."""
        self._tokens, self._places = 0, {}
        for state in states:
            self._tokens += state["tokens"]
            self._places.update(state["places"])
        self._of_all = True

    def settle(self, rank: int) -> None:
        """Continue the streams at their positions, whichever rank knows them. Collective, after
        loading. Only the sum of tokens is ever shown. Raises BadInput."""
        every: list[Any] = [self._places]
        if dist.is_initialized():
            every = every * dist.get_world_size()
            dist.all_gather_object(every, self._places)
        self._loader.go_to({n: at for places in every for n, at in places.items()})
        self._trainer.ntokens_seen = self._tokens if rank == 0 or not self._of_all else 0


class TitanLoop:
    """The driver that replaces some of a Trainer's methods. `run`: attached; `micro_batches`: per
    step, over all ranks."""

    def __init__(self, trainer: Any, run: Session, loader: TitanLoader, micro_batches: int):
        self._trainer, self._run, self._loader = trainer, run, loader
        self._micro_batches = micro_batches
        self._loop: OwnLoop | None = None
        self._step: OwnStep | None = None
        self._calls, self._lr, self._stepped = 0, 0.0, False
        self._mesh = framework_claim.told_mesh() or ModelMesh()
        self._buffers: list[torch.Tensor] = []
        self._train_step = trainer.train_step
        self._forward_backward_step = trainer.forward_backward_step
        self._should_continue = trainer.should_continue_training

    def begin(self, model: nn.Module, optimizers: Any, schedulers: Any) -> int:
        """Resume, and replace the trainer's methods. Return the number of finished steps. Raises
        BadInput, StoreError, SystemExit."""
        trainer, run, loader = self._trainer, self._run, self._loader
        state = TitanState(trainer, loader, counts=run.rank % self._mesh.tp == 0)
        self._buffers = list(model.buffers())
        run.prepare(
            model,
            list(optimizers),
            schedulers,
            state={"torchtitan": state},
            per_rank=["torchtitan"],
            strategy=TitanSums(model, run.replica_ranks),
        )
        training, data = trainer.config.training, loader.config
        self._loop = own_loop(
            run,
            micro_batches=self._micro_batches,
            micro_batch=loader.micro_batch,
            data=fingerprint(data.inner, training.seq_len, data.streams),
            seed=trainer.config.debug.seed or 0,
            total=training.steps,
            adapter="torchtitan",
            alike=run.replica_ranks,
        )
        rounds = run.plan.rounds
        loader.share(self._micro_batches, self._loop.share, rounds)
        if run.step:
            state.settle(run.rank)
        trainer.step, trainer.gradient_accumulation_steps = run.step, rounds
        trainer.train_step = self.train_step
        trainer.forward_backward_step = self.forward_backward_step
        trainer.should_continue_training = self.should_continue_training
        run.print(
            f"harness: {self._micro_batches} micro-batches of {loader.micro_batch} samples a step "
            f"on {run.world} ranks, {rounds} on each"
        )
        return run.step

    # ---- replacements of the trainer's methods ---------------------------------------------------
    def train_step(self, data_iterator: Any) -> None:
        """Run one optimizer update."""
        assert self._loop is not None
        self._step, self._calls = self._loop.begin(rounds=self._loader.rounds), 0
        try:
            self._train_step(data_iterator)
        except DataloaderExhaustedError:
            self._loop.finished()
            raise
        self._step.end(self._lr)
        self._stepped = True

    def forward_backward_step(
        self, *, input_dict: Any, labels: Any, global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Run one micro-batch. After the last one gradients are those of the global batch."""
        step, current = self._step, self._loader.current
        assert step is not None
        step.round(self._calls)
        batch = current[self._calls] if self._calls < len(current) else None
        self._calls += 1
        if batch is not None:
            step.micro(batch.micro)
            step.read(batch.micro, contents=batch.contents)
        seen = self._trainer.ntokens_seen
        # routers count tokens in their forward, and a filler's do not count
        counted = [] if batch is not None else [(b, b.clone()) for b in self._buffers]
        loss: torch.Tensor = self._forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )
        if batch is not None:
            mean = local(loss.detach()) * (global_valid_tokens / max(1, batch.valid))
            # with context parallelism it is the sum over this rank's part of the labels
            step.done(batch.micro, mean * self._mesh.cp, batch.valid)
        else:
            for buffer, before in counted:
                buffer.copy_(before)
            self._trainer.ntokens_seen = seen
            self._trainer.metrics_processor.ntokens_since_last_log -= labels.numel()
        if self._calls == self._loader.rounds:
            self._lr = float(self._trainer.optimizers.optimizers[0].param_groups[0]["lr"])
            step.sync()
        return loss

    def should_continue_training(self) -> bool:
        """Return whether to go on, after a step's log, checkpoint and validation."""
        assert self._loop is not None
        if self._stepped:
            self._stepped = False
            self._loop.boundary()
        if self._should_continue():
            return True
        self._loop.finished()
        return False


def local(tensor: Any) -> Any:
    """Return this rank's part of a tensor that may be a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def name_set_timeout() -> None:
    """Define torch.distributed.set_timeout, which torchtitan 0.3.0 calls after the first step.
    torch 2.13 has it under its older name only."""
    older = getattr(c10d, "_set_pg_timeout", None)
    if older is not None and not hasattr(dist, "set_timeout"):
        dist.set_timeout = older  # type: ignore[attr-defined]


@dataclass(kw_only=True, slots=True)
class TitanSnapshotsConfig(BaseCheckpointManager.Config):  # type: ignore[misc]
    """Configuration of `TitanSnapshots`. `inner`: the configuration of the script's manager;
    `micro_batches`: per step, 0: one per rank of the run's first world."""

    inner: Any = field(default_factory=BaseCheckpointManager.Config)
    micro_batches: int = 0


class TitanSnapshots(BaseCheckpointManager):  # type: ignore[misc]
    """Our snapshots as torchtitan's checkpoint manager. What the script configured continues beside
    them: an initial checkpoint to begin with, its own checkpoints, an export at the end."""

    Config = TitanSnapshotsConfig

    def __init__(
        self,
        config: TitanSnapshotsConfig,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        **others: Any,
    ):
        self.enable, self.save_future = True, None
        self._run = joined()
        name_set_timeout()
        self._trainer = states["train_state"]
        self._parts, self._optimizers, self._schedulers = model_parts, optimizers, lr_schedulers
        if not isinstance(dataloader, TitanLoader):
            raise BadInput(
                f"{OVERRIDES}.snapshots: wanted {OVERRIDES}.data among --override.imports too, "
                f"found the loader {type(dataloader).__name__}"
            )
        if len(model_parts) != 1:
            raise BadInput("wanted a model of one part, found pipeline stages; docs/trainers/")
        self._loader = dataloader
        self._micro_batches = config.micro_batches or dataloader.config.streams
        self._inner = config.inner.build(
            dataloader=dataloader,
            model_parts=model_parts,
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            states=states,
            **others,
        )

    def _load(self, step: int = -1) -> bool:
        loop = TitanLoop(self._trainer, self._run, self._loader, self._micro_batches)
        done = loop.begin(self._parts[0], self._optimizers, self._schedulers)
        if done:
            self._run.print(f"harness: torchtitan goes on after step {done}")
            return True
        found = bool(self._inner.load(step))
        if self._trainer.step:
            raise BadInput(
                f"the run has no snapshot, but torchtitan's own checkpoint folder has step "
                f"{self._trainer.step}; to begin with its weights give --checkpoint."
                "initial_load_path, and another --dump_folder or --checkpoint.folder"
            )
        return found

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self._run.alive()
        saved = bool(self._inner.save(curr_step, last_step))
        self._run.alive()  # saving may have taken longer than a step
        return saved

    def _maybe_wait_for_staging(self) -> None:
        self._inner.maybe_wait_for_staging()

    def _wait_for_saving(self) -> None:
        self._inner.maybe_wait_for_saving()

    def maybe_wait_for_saving(self) -> None:
        """Wait for the script's own manager (BaseCheckpointManager), which saves beside
        training."""
        self._inner.maybe_wait_for_saving()

    def _close(self) -> None:
        if hasattr(self, "_inner"):
            self._inner.close()
