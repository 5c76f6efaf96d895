"""One optimizer update as the script sees it: its micro-batches, backward, update. Runs in the
worker."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harness.core import records as rec
from harness.core.batch import digest, sample_hash, seed_for
from harness.core.facts import Warned
from harness.core.world import BadInput
from harness.node.marks import Want
from harness.node.progress import Place
from harness.worker.loader import MicroBatch, seed_everything, to_device

if TYPE_CHECKING:
    from harness.worker.session import Session

VOTES = slice(3, 3 + len(Want))  # of `Pending.ints`


@dataclass
class Pending:
    """A step whose numbers are still on their way from the other ranks."""

    # digest, samples, weight, loss and h are filled in when they have arrived
    record: rec.StepRecord
    t_start: float
    # `update` was over: when the numbers arrive, and what the script does until the next step, is
    # none of its time
    t_end: float
    floats: torch.Tensor  # (3,) float64 on the device: loss sum, weight, grad norm
    # (6 + wants,) int64, host: digest halves, samples, `VOTES`, contents halves, GFLOP/s
    ints: torch.Tensor
    work: Any = None

    def arrive(self) -> tuple[float, float, float]:
        """Wait for the other ranks. Loss over the global batch, global weight, gradient norm."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        loss_sum, weight, norm = self.floats.tolist()
        return (loss_sum / weight if weight else math.nan), weight, norm


class Step:
    """One optimizer update. Iterate it for this rank's micro-batches, call `backward` for each,
    then `update`.

    `number`: 1, 2, ... `attempt`: 0; with exact sums 1, 2, ... while the same micro-batches come
    again because a gradient did not fit: count and log what the body does only at 0 (see `attach`).
    """

    def __init__(self, session: Session, number: int, batches: Iterator[MicroBatch]):
        self.number, self._session, self._batches = number, session, batches
        self._hash_sum, self._contents_sum, self._samples = 0, 0, 0
        # One place per micro-batch of the step, filled by who does it: their sum over ranks, in
        # this order, is the same on any world.
        self._losses = torch.zeros(
            session.batching.micro_batches, dtype=torch.float64, device=session.device
        )
        self._weights = [0.0] * session.batching.micro_batches
        self._tokens_weighted = False
        self._current: MicroBatch | None = None
        self._filler = False
        self._backwards = 0
        self.attempt = 0
        self.updated = False
        self.t_start = time.time()

    def __iter__(self) -> Iterator[Any]:
        s = self._session
        micros = list(s.plan.micros(s.rank))
        rounds = s.plan.rounds if s.strategy.equal_rounds else len(micros)
        if s.stream is not None:
            self._batches = s.stream.step(self.number)
        read: list[MicroBatch] = []  # of a stream, which cannot be read again
        buffers = s._buffers if s.strategy.may_repeat else None
        if buffers is not None:
            buffers.note()
        repeat = True
        while repeat:
            for i in range(rounds):
                self._filler = i >= len(micros)
                self._micro = micros[min(i, len(micros) - 1)]
                s.strategy.micro(last=i == rounds - 1, filler=self._filler)
                if not self._filler:
                    if not self.attempt:
                        self._current = self._read()
                        if s.stream is not None and s.strategy.may_repeat:
                            read.append(self._current)
                    else:
                        self._current = self._again(read[i] if read else None)
                seed_everything(seed_for(s.seed, self.number, self._micro))
                before = self._backwards
                assert self._current is not None
                yield to_device(self._current.data, s.device)
                if (times := self._backwards - before) != 1:
                    raise BadInput(
                        f"step {self.number}: step.backward(loss) was called {times} times for one "
                        "micro-batch, wanted once"
                    )
            repeat = s.strategy.again()
            if repeat:
                self.attempt += 1
                if buffers is not None and (lost := buffers.restore()):
                    s._fact(Warned(self.number, s.epoch, lost))
                    s.print(f"harness: {lost}")
        if buffers is not None:
            buffers.learn()
        if s.stream is not None:
            for _ in self._batches:  # read on to the end of the global batch
                raise AssertionError("a micro-batch of ours came after our last one")

    def _again(self, read: MicroBatch | None) -> MicroBatch:
        """What `_micro` was given before, from the dataset or from the items that the stream
        gave: the script may have changed the rest."""
        s = self._session
        if read is not None:
            assert s.stream is not None
            return replace(read, data=s.stream.collated_again(read))
        assert s._read_again is not None and self._current is not None
        return replace(
            self._current,
            data=s._read_again(self.number, self._micro),
            samples=self._current.samples,
        )

    def _read(self) -> MicroBatch:
        batch = next(self._batches)
        self._hash_sum += digest(sample_hash(batch.positions, batch.samples))
        if batch.contents is not None:
            self._contents_sum += digest(sample_hash(batch.positions, batch.contents))
        self._samples += len(batch.samples)
        return batch

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Add this micro-batch's gradients. `loss`: mean over the micro-batch, 0-d. `weight`: how
        much the mean stands for; by default its samples; the number of valid tokens when those
        differ."""
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
        """Sum over all ranks, divide by the global weight, clip, and let optimizers and
        schedulers step."""
        self._session._update(self, clip_norm)
        self._session._time_step()
        self._session._life.tell(Place.COMPUTE, self._session.step)
        self.updated = True

    @property
    def loss(self) -> float:
        """The loss over the global batch; waits for the other ranks (and the GPU), so ask only
        when you need it."""
        s = self._session
        if s._pending is not None and s._pending.record.step == self.number:
            return s._pending.arrive()[0]
        return s._last_record.loss if s._last_record else math.nan


class Buffers:
    """A model's buffers as they were before a step, should it be done again.

    In the first step all are copied. Later only those that have changed in a step before: others
    have not for as long as we know.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._living: set[str] | None = None  # None: not known yet
        self._versions: dict[str, tuple[torch.Tensor, int]] = {}
        self._copies: dict[str, torch.Tensor] = {}

    def note(self) -> None:
        """A step begins, or all of them do."""
        now = dict(self._model.named_buffers())
        self._versions = {name: (b, _version(b)) for name, b in now.items()}
        self._copies = {
            name: b.detach().clone()
            for name, b in now.items()
            if self._living is None or name in self._living
        }

    def changed(self) -> list[str]:
        """Their names: since `note`."""
        now = dict(self._model.named_buffers())
        norms = {
            id(b)
            for m in self._model.modules()
            if isinstance(m, nn.modules.batchnorm._NormBase)
            for b in m.buffers(recurse=False)
        }
        return [  # a norm's kernel changes its statistics without counting that
            name
            for name, (b, version) in self._versions.items()
            if now.get(name) is not b or _version(b) != version or id(b) in norms
        ]

    def learn(self) -> None:
        """The step has been done."""
        self._living = (self._living or set()) | set(self.changed())
        self._copies = {}

    def restore(self) -> str:
        """The step begins again. What to tell people about buffers that could not be put back."""
        lost = []
        with torch.no_grad():
            for name in self.changed():
                b, version = self._versions[name]
                if name in self._copies:
                    b.copy_(self._copies[name])
                elif _version(b) != version:
                    lost.append(name)
                owner, _, key = name.rpartition(".")
                # if another was put in its place
                self._model.get_submodule(owner)._buffers[key] = b
        if lost:
            return (
                f"the buffer {lost[0]!r} (one of {len(lost)}) changed for the first time in a step "
                "that had to be done again, so it was "
                "changed twice; change it where step.attempt is 0"
            )
        return ""


def _version(tensor: torch.Tensor) -> int:
    """How often it was changed in place; not known of what was made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
