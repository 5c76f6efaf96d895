"""The runner of micro-batches through pipeline stages, by the schedules of
torch.distributed.pipelining. Runs in the worker.

Torch decides which stage computes what and when, and sends activations and their gradients. This
module does the rest: the content of a micro-batch, its seed, its loss, and the sums of gradients.
Torch is therefore given only the numbers of micro-batches, and a stage looks up what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from harness.core.batch import seed_for
from harness.core.world import BadInput
from harness.meshes.pipeline_cut import (
    GPIPE,
    IN_TWO_PARTS,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZERO_BUBBLE,
    ZERO_BUBBLE_V,
    turns,
)
from harness.worker.batches.loader import to_device
from harness.worker.gradients.parallel import Replicated
from harness.worker.gradients.sharding import is_sharded
from harness.worker.step_timing import BACKWARD, COMMUNICATION, FORWARD
from storage.tensors.save_ranks import gathered

if TYPE_CHECKING:
    from harness.meshes.pipeline import Pipeline
    from harness.worker.process_group import Peers
    from harness.worker.step import GivenMicro, Sums, Work
    from harness.worker.training_state import Training

TORCHS = {
    GPIPE: "GPipe",
    ONE_F_ONE_B: "1F1B",
    INTERLEAVED: "Interleaved1F1B",
    ZERO_BUBBLE: "InterleavedZeroBubble",
    ZERO_BUBBLE_V: "ZBVZeroBubble",
}
Activation = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of an activation


class _Forward(nn.Module):
    """The module that torch calls as a stage."""

    def __init__(self, part: nn.Module, stages: Stages, number: int):
        super().__init__()
        self.part, self._stages, self._number = part, stages, number

    def forward(self, *received: Any, micro: torch.Tensor) -> Any:
        stages = self._stages
        share, i = stages.share, int(micro)
        share.begin_forward(i, first=self._number == stages.first)
        output = self.part(*(received if self._number else share.inputs(i)))
        if not stages.is_last(self._number):
            stages.check(self._number, output)
            share.wait()
        return output


class _TorchStage(PipelineStage):
    """Torch's stage, but our strategy collects the gradients. `at`: the number of the micro-batch
    that this stage counts as 0."""

    stages: Stages
    at = 0

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        share = self.stages.share
        if full_backward:
            self._begin(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            share.end_backward()
        else:
            share.wait()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._begin(bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        # the first stage's inputs have no gradient, so autograd does its whole backward at once
        self.stages.share.end_backward(by_hand=not self.is_first)

    def _begin(self, chunk: int) -> None:
        i = self.at + chunk
        self.stages.share.begin_backward(i, self.stages.ends_with(self.stage_index))

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Skip the reduction, which our strategy has done."""


class Stages:
    """The runner of this rank's stages. `share`: the micro-batches of the current step; `first`:
    the number of this rank's first stage."""

    share: StageShare

    def __init__(self, pipe: Pipeline, peers: Peers, training: Training):
        self._pipe, self._peers, self._training = pipe, peers, training
        self._group = peers.mesh.get_group("pp")
        self._sharded = is_sharded(pipe)
        if self._sharded and pipe.schedule in IN_TWO_PARTS:
            raise BadInput(
                f"pipeline(schedule={pipe.schedule!r}): its backward comes in two parts, and FSDP2 "
                "shards again behind the first; use schedule='1f1b' or 'interleaved', or a mesh "
                "without dp_shard and tp"
            )
        self.first = pipe.numbers[0]
        self._kinds: list[tuple[Activation, ...]] = []  # outputs of each stage; []: not known yet
        self._inputs: Any = None  # shapes and dtypes of the first stage's inputs
        self._made: dict[tuple[str, int], tuple[Any, list[_TorchStage]]] = {}
        self._left: dict[int, int] = {}  # by stage: remaining backwards of this step

    def run(self, share: StageShare) -> None:
        """Run forward and backward of all micro-batches of a step. Raises BadInput."""
        self.share, count = share, len(share.given)
        self._check_inputs()
        if not self._kinds:
            self._kinds = self._look()
        self._left = dict.fromkeys(self._pipe.numbers, count)
        at = 0
        for name, size in turns(self._pipe.schedule, count, self._group.size()):
            schedule, stages = self._schedule(name, size)
            for stage in stages:
                stage.at = at
            numbers = torch.arange(at, at + size)
            args = (numbers,) if self.first == 0 else ()
            target = numbers if self._pipe.has_last else None
            share.wait()
            schedule.step(*args, target=target, losses=[], return_outputs=False, micro=numbers)
            at += size
        share.end()

    def is_last(self, number: int) -> bool:
        return number == self._pipe.total - 1

    def ends_with(self, number: int) -> bool:
        """Count a backward of this stage that begins, and return whether gradients are exchanged
        after it. FSDP exchanges those of each stage separately."""
        self._left[number] -= 1
        return not (self._left[number] if self._sharded else any(self._left.values()))

    def check(self, number: int, output: Any) -> None:
        """Raise BadInput if the output has another shape than the next stage expects."""
        if (found := _kinds(output)) != self._kinds[number]:
            raise BadInput(
                f"stage {number} of the pipeline gives {_shown(found)}, in the first micro-batch "
                f"it gave {_shown(self._kinds[number])}; pad the samples to one length"
            )

    def _check_inputs(self) -> None:
        """Check that all micro-batches of all steps have inputs of the same shapes. Every rank was
        given them, so every rank finds out. Raises BadInput."""
        for i in range(len(self.share.given)):
            found = _kinds(self.share.inputs(i, moved=False))
            self._inputs = self._inputs or found
            if found != self._inputs:
                raise BadInput(
                    f"a pipeline: wanted micro-batches of one shape, found inputs {_shown(found)} "
                    f"behind {_shown(self._inputs)}; pad the samples to one length (collate_fn)"
                )

    @torch.no_grad()
    def _look(self) -> list[tuple[Activation, ...]]:
        """Return the shapes and dtypes that each stage outputs, from one forward of each that is
        not counted. Collective over the ranks of a replica. Raises BadInput on all of them."""
        buffers = self._training.buffers
        found: list[tuple[Activation, ...]] = []
        if buffers is not None:
            buffers.note()
        for number in range(self._pipe.total):
            mine: Any = None
            if number in self._pipe.numbers:
                self.share.begin_forward(0, first=number == self.first, counts=False)
                part = self._pipe.parts[self._pipe.numbers.index(number)]
                args = self._zeros(found[-1]) if found else self.share.inputs(0)
                output = part(*args)
                mine = _kinds(output) or (
                    f"stage {number} of the pipeline gives {type(output).__name__}; wanted a "
                    "tensor, or a tuple of tensors, that are no DTensors (use_local_output=True)"
                )
            told = next(said for said in gathered(mine, self._group) if said is not None)
            if isinstance(told, str):
                raise BadInput(told)
            found.append(told)
        if buffers is not None:
            buffers.restore()
            buffers.note()
        return found

    def _zeros(self, kinds: tuple[Activation, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.zeros(shape, dtype=dtype, device=self._peers.device) for shape, dtype in kinds
        )

    def _schedule(self, name: str, size: int) -> tuple[Any, list[_TorchStage]]:
        if (name, size) not in self._made:
            stages = [
                self._stage(part, number)
                for part, number in zip(self._pipe.parts, self._pipe.numbers, strict=True)
            ]
            kind: Any = get_schedule_class(TORCHS[name])
            given: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
            schedule = kind(given, size, loss_fn=self._loss, scale_grads=False)
            self._made[name, size] = schedule, stages
        return self._made[name, size]

    def _loss(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        loss = self.share.loss(int(number), output)
        self.share.wait()
        return loss

    def _stage(self, part: nn.Module, number: int) -> _TorchStage:
        examples = [
            tuple(t.requires_grad_(t.is_floating_point()) for t in self._zeros(kinds))
            for kinds in self._kinds
        ]
        stage = _TorchStage(
            _Forward(part, self, number),
            number,
            self._pipe.total,
            self._peers.device,
            input_args=examples[number - 1] if number else (torch.zeros(1, dtype=torch.int64),),
            output_args=examples[number],
            group=self._group,
        )
        stage.stages = self
        return stage


def _kinds(value: Any) -> tuple[Activation, ...]:
    """Return shapes and dtypes of a tensor or a tuple of tensors; () for anything else."""
    several = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not all(isinstance(t, torch.Tensor) and not hasattr(t, "to_local") for t in several):
        return ()
    return tuple((tuple(t.shape), t.dtype) for t in several)


def _shown(kinds: tuple[Activation, ...]) -> str:
    return ", ".join(f"{dtype} {shape}".removeprefix("torch.") for shape, dtype in kinds)


# A step's micro-batches on their way through this rank's stages: the work before and after each
# forward and backward.


class StageShare:
    """This rank's micro-batches of a step. In its methods, `i` counts them from 0."""

    def __init__(self, work: Work, sums: Sums, step: int, given: list[GivenMicro]):
        self.given = given
        self._work, self._sums, self._step = work, sums, step
        self._pipe: Any = work.training.model
        self._device = work.peers.device
        sums.tokens_weighted = True  # only the last stage knows the weight of a loss

    def inputs(self, i: int, moved: bool = True) -> tuple[Any, ...]:
        """Return the inputs of the first stage. `moved`: on the device; False: as the loader gave
        them."""
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
        """Prepare a forward. `first`: it is of this rank's first stage; `counts`: False if it only
        finds out shapes."""
        given, training = self.given[i], self._work.training
        self._work.timer.enter(FORWARD)
        counts = counts and not given.filler
        # a negative number distinguishes a filler from the micro-batch that it repeats
        micro = given.micro if counts else -1 - i
        for take_up in training.hooks.before_micro:
            take_up(micro, counts, not first)
        self._pipe.drawn = seed_for(self._work.feed.seed, self._step, given.micro)

    def loss(self, i: int, output: Any) -> torch.Tensor:
        """Return the loss that the last stage's backward starts from: the sum over the micro-batch,
        scaled."""
        given, scaler = self.given[i], self._work.training.scaler
        found = self._pipe.loss(output, to_device(self._pair(i)[1], self._device))
        mean, amount = found if isinstance(found, tuple) else (found, given.samples)
        amount = 0.0 if given.filler else float(amount)
        if not given.filler:
            self._sums.add(given.micro, mean, amount)
        scaled: torch.Tensor = mean * amount
        return scaled if scaler is None else scaler.scale(scaled)

    def begin_backward(self, i: int, last: bool) -> None:
        """Prepare a backward. `last`: gradients are exchanged during this one."""
        self._work.timer.enter(BACKWARD)
        self._work.training.strategy.micro(last=last, filler=self.given[i].filler)

    def end_backward(self, by_hand: bool = False) -> None:
        """Finish a backward. `by_hand`: its gradients were stored without autograd's hooks."""
        strategy = self._work.training.strategy
        if by_hand and isinstance(strategy, Replicated):
            strategy.take_up_grads()
        strategy.micro_done()
        self.wait()

    def wait(self) -> None:
        """Begin to wait for other stages: the pipeline's bubble is counted as communication."""
        self._work.timer.enter(COMMUNICATION)

    def end(self) -> None:
        """Finish the step: all micro-batches have gone through."""
        self._pipe.drawn = None
        scaler = self._work.training.scaler
        if scaler is not None and not self._pipe.has_last:
            scaler.scale(torch.zeros((), device=self._device))  # initializes its scale here too


class Straight:
    """The runner where one stage is the whole model: forward and backward of each micro-batch in
    turn."""

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
            for note in self._work.training.hooks.before_backward:
                note()
            loss.backward()  # type: ignore[no-untyped-call]
            share.end_backward()
            rates.counted(given.samples)
        share.end()
