"""One step of transformers' Trainer: its micro-batches on this rank, and their sums over all ranks.
Runs in the worker.

The Trainer gets an entry for each micro-batch of the step; only this rank's entries have data. The
training_step of the last entry returns with gradients, losses and counts of all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.adapters.transformers.ranks_together import AllRanks, Meters, Original
from harness.core.world import BadInput
from harness.loops.own_loop import OwnLoop, OwnStep
from harness.loops.shared_batches import Share
from harness.worker.training_state import Judged


@dataclass
class CurrentStep:
    """A step, from get_batch_samples to its end. `inputs`: data of own micro-batches; `items`: the
    number of valid labels in each; `total`: valid labels of all ranks, None if the loss is a mean
    over the micro-batch."""

    own: OwnStep
    count: int
    inputs: dict[int, Any]
    items: dict[int, float | None]
    total: float | None
    at: int = 0  # index of the next entry
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    flos: float = 0.0  # over all ranks, not yet reported to the Trainer


class TrainerSteps:
    """The steps of a Trainer. `sized`: the Trainer knows the number of batches per epoch; `settle`:
    called once gradients are summed; `batches`: batches of this epoch that are done or begun."""

    def __init__(
        self,
        trainer: Any,
        company: AllRanks,
        loop: OwnLoop,
        sized: bool,
        settle: Callable[[Judged], None],
    ):
        self._trainer, self._company, self._loop, self._sized = trainer, company, loop, sized
        self._settle = settle
        self._meters = Meters.of(trainer)
        self._flos_of, self._track = trainer.floating_point_ops, trainer._track_num_input_tokens
        self._now: CurrentStep | None = None
        self._lr = 0.0
        # guards may skip updates; a GradScaler says by itself which ones it has skipped
        self._guarded = loop.has_guards and trainer.accelerator.scaler is None
        self.batches = 0

    # ---- reading ---------------------------------------------------------------------------------
    def get_batch_samples(
        self, original: Original, epoch_iterator: Iterator[Share], num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """Replace Trainer.get_batch_samples: return the entries of all ranks, and the number of
        valid labels in them. Raises BadInput."""
        shares = list(itertools.islice(epoch_iterator, num_batches))
        self.batches += len(shares)
        if not shares or (not self._sized and len(shares) < self._loop.micro_batches):
            # With the rest of a stream the Trainer would not step, but add its gradients to those
            # of the next epoch's first step.
            return [], None
        self._check_sizes(shares)
        own = self._loop.begin(micro_batches=len(shares), samples=sum(s.count for s in shares))
        for m in own.mine:
            share = shares[m]
            said = share.contents
            own.read(m, share.keys if said is None else None, said)
        inputs = {m: shares[m].data for m in own.mine}
        items = {m: self._items(data) for m, data in inputs.items()}
        counted = [n for n in items.values() if n is not None]
        total, known = self._company.total([sum(counted), float(len(counted))])
        self._now = CurrentStep(own, len(shares), inputs, items, total if known else None)
        if self._meters is not None:
            self._meters.begin()
        # the Trainer's own count is a quotient, so a float
        labels = torch.tensor(total, dtype=torch.float32, device=device) if known else None
        return [share.data for share in shares], labels

    def _check_sizes(self, shares: list[Share]) -> None:
        size = self._loop.micro_batch
        odd = [s.count for s in shares[:-1] if s.count != size]
        odd += [s.count for s in shares[-1:] if s.count > size]
        if odd:
            raise BadInput(
                f"wanted batches of {size} samples (but for an epoch's last one), found one of "
                f"{odd[0]}: a step is {self._loop.micro_batches} batches of that size on any "
                "number of ranks; use a sampler instead of a batch sampler"
            )

    def _items(self, data: Any) -> float | None:
        """Return the number of valid labels in one micro-batch. It is counted on the host, where
        the data is."""
        # the ranks of a copy add up what they counted, on their devices
        device = self._trainer.args.device if self._company.copy_ranks > 1 else torch.device("cpu")
        found = self._trainer._get_num_items_in_batch([data], device)
        return None if found is None else float(found)

    # ---- forward and backward --------------------------------------------------------------------
    def training_step(
        self, original: Original, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Replace Trainer.training_step. Return 0 for an entry of another rank. The last entry adds
        the losses of all ranks, so the Trainer's own sum is the same everywhere."""
        now = self._now
        if now is None:
            loss: torch.Tensor = original(model, inputs, num_items_in_batch)
            return loss
        m, now.at = now.at, now.at + 1
        if m in now.own.mine:
            self._micro(original, model, m, num_items_in_batch)
        if m < now.count - 1:
            return torch.zeros((), device=self._trainer.args.device)

        def redo() -> None:
            for again in now.own.mine:
                self._micro(original, model, again, num_items_in_batch)

        now.own.sync(redo=redo)
        self._settle(now.own.judged)
        return self._add_up(now)

    def _micro(self, original: Original, model: Any, m: int, num_items: Any) -> None:
        now = self._now
        assert now is not None
        now.own.micro(m)
        loss = now.losses[m] = original(model, now.inputs[m], num_items)
        items, part = now.items[m], loss.detach().double()
        if now.total is None:  # the step's loss is a mean of means
            now.own.done(m, part * now.count, 1.0)
        else:
            now.own.done(m, part * (now.total / items) if items else part * 0.0, items or 0.0)
        if self._meters is not None:
            self._meters.take(m)

    def _add_up(self, now: CurrentStep) -> torch.Tensor:
        """Sum the Trainer's counters over all ranks. Return the loss of the last entry."""
        trainer, state = self._trainer, self._trainer.state
        seen = state.num_input_tokens_seen
        flos = 0.0
        for data in now.inputs.values():
            flos += float(self._flos_of(data))
            self._track(data)
        tokens, state.num_input_tokens_seen = state.num_input_tokens_seen - seen, seen
        losses = [0.0] * now.count
        if now.losses:
            mine = torch.stack([loss.reshape(()).double() for loss in now.losses.values()])
            for m, value in zip(now.losses, mine.tolist(), strict=True):
                losses[m] = value
        losses[:] = self._company.total([*losses, flos, float(tokens)])
        more, now.flos = losses.pop(), losses.pop()
        state.num_input_tokens_seen = seen + int(more)
        if self._meters is not None:
            self._meters.merge(self._company.gather)
        like = trainer._tr_loss
        every = torch.tensor(losses, dtype=like.dtype, device=like.device)
        for loss in every[:-1]:
            self._add(loss)
        return every[-1]

    def _add(self, loss: torch.Tensor) -> None:
        """Add a loss as the Trainer does for each entry."""
        trainer = self._trainer
        if trainer.args.logging_nan_inf_filter and not torch.isfinite(loss):
            since = 1 + trainer.state.global_step - trainer._globalstep_last_logged
            trainer._tr_loss += trainer._tr_loss / since
        else:
            trainer._tr_loss += loss

    # ---- counting --------------------------------------------------------------------------------
    def floating_point_ops(self, original: Original, inputs: Any) -> float:
        """Return the operations of all entries, with the last one."""
        now = self._now
        if now is None:
            return float(original(inputs))
        return now.flos if now.at == now.count else 0.0

    def track_num_input_tokens(self, original: Original, inputs: Any) -> None:
        """Skip counting within a step: tokens are counted with the step's sums."""
        if self._now is None:
            original(inputs)

    # ---- the end ---------------------------------------------------------------------------------
    def optimized(self) -> None:
        """Record the learning rate: the optimizer has stepped, the scheduler has not. The Trainer
        leaves its scheduler alone where Accelerate says that an update was skipped."""
        self._lr = float(self._trainer._get_learning_rate())
        if self._guarded:
            assert self._now is not None
            self._trainer.optimizer._is_overflow = self._now.own.judged.hold

    def end(self) -> None:
        """End the step: the scheduler has stepped as well."""
        assert self._now is not None
        self._now.own.end(lr=self._lr)
        self._now = None
