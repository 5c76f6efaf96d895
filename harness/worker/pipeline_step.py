"""A step's micro-batches on their way through this rank's stages: what comes before and behind each
forward and backward. Runs in the worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from harness.core.batch import seed_for
from harness.core.world import BadInput
from harness.worker.loader import to_device
from harness.worker.parallel import Replicated
from harness.worker.pipeline import Pipeline
from harness.worker.timing import BACKWARD, COMMUNICATION, FORWARD

if TYPE_CHECKING:
    from harness.worker.step import Sums, Work


@dataclass
class GivenMicro:
    """A micro-batch as the loader gave it. `filler`: it counts nothing."""

    micro: int
    samples: int
    filler: bool
    data: Any


class StageShare:
    """This rank's micro-batches of a step. `i` counts them from 0 on."""

    def __init__(self, work: Work, sums: Sums, step: int, given: list[GivenMicro]):
        self.given = given
        self._work, self._sums, self._step = work, sums, step
        self._pipe: Any = work.training.model
        self._device = work.peers.device
        sums.tokens_weighted = True  # how much a loss stands for is known in the last stage only

    def inputs(self, i: int, moved: bool = True) -> tuple[Any, ...]:
        """Of the first stage. `moved`: on the device; False: as the loader gave them."""
        data = self._pair(i)[0]
        if moved:
            data = to_device(data, self._device)
        return tuple(data) if isinstance(data, tuple | list) else (data,)

    def _pair(self, i: int) -> Any:
        data = self.given[i].data
        if not isinstance(data, tuple | list) or len(data) != 2:
            raise BadInput(
                "a pipeline: wanted batches (inputs, targets), found "
                f"{type(data).__name__}; give run.steps a collate_fn that makes such pairs"
            )
        return data

    def begin_forward(self, i: int, first: bool, counts: bool = True) -> None:
        """`first`: it is the first of this rank's stages; `counts`: not only shapes are looked
        for."""
        given, training = self.given[i], self._work.training
        self._work.timer.enter(FORWARD)
        counts = counts and not given.filler
        # a filler is told from the micro-batch that it repeats
        training.statistics.take_up(given.micro if counts else -1 - i, counts, more=not first)
        self._pipe.drawn = seed_for(self._work.feed.seed, self._step, given.micro)

    def loss(self, i: int, output: Any) -> torch.Tensor:
        """What the last stage goes backward from: the sum over the micro-batch, scaled."""
        given, scaler = self.given[i], self._work.training.scaler
        found = self._pipe.loss(output, to_device(self._pair(i)[1], self._device))
        mean, amount = found if isinstance(found, tuple) else (found, given.samples)
        amount = 0.0 if given.filler else float(amount)
        if not given.filler:
            self._sums.add(given.micro, mean, amount)
        scaled: torch.Tensor = mean * amount
        return scaled if scaler is None else scaler.scale(scaled)

    def begin_backward(self, i: int, last: bool) -> None:
        """`last`: gradients are exchanged during this one."""
        self._work.timer.enter(BACKWARD)
        self._work.training.strategy.micro(last=last, filler=self.given[i].filler)

    def end_backward(self, by_hand: bool = False) -> None:
        """`by_hand`: gradients were put where they are without autograd's hooks."""
        strategy = self._work.training.strategy
        if by_hand and isinstance(strategy, Replicated):
            strategy.take_up_grads()
        strategy.micro_done()
        self.wait()

    def wait(self) -> None:
        """For the other stages: what a pipeline's bubble costs is counted as communication."""
        self._work.timer.enter(COMMUNICATION)

    def end(self) -> None:
        """All have gone through."""
        self._pipe.drawn = None
        scaler = self._work.training.scaler
        if scaler is not None and not self._pipe.has_last:
            scaler.scale(torch.zeros((), device=self._device))  # so that it knows its scale here


class Straight:
    """One stage is the whole model: forward and backward of one micro-batch after the other."""

    def __init__(self, work: Work):
        self._work = work

    def run(self, share: StageShare) -> None:
        rates, model = self._work.rates, self._work.training.model
        assert model is not None
        for i, given in enumerate(share.given):
            share.begin_forward(i, first=True)
            if not given.filler:
                rates.arm()
            loss = share.loss(i, model(*share.inputs(i)))
            share.begin_backward(i, last=i == len(share.given) - 1)
            self._work.training.statistics.loads.note()
            loss.backward()  # type: ignore[no-untyped-call]
            share.end_backward()
            rates.counted(given.samples)
        share.end()


def runner_of(work: Work) -> Straight | Any:
    """What puts a share through the stages that were prepared. Raises BadInput."""
    model = work.training.model
    if not isinstance(model, Pipeline):
        raise BadInput(
            "step.pipeline(): wanted a model made by harness.pipeline(model, run, loss), found "
            f"{type(model).__name__}"
        )
    if model.total == 1:
        return Straight(work)
    whole = work.training.whole
    assert whole is not None
    if whole.runner is None:
        from harness.worker.pipeline_stages import Stages  # torch's pipelining takes a second

        whole.runner = Stages(model, work.peers, work.training)
    return whole.runner
