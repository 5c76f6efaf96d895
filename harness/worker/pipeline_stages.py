"""Micro-batches through the stages of a pipeline, by the schedules of torch.distributed.pipelining.
Runs in the worker.

Torch decides who computes what when, and sends activations and their gradients. All else is ours:
what a micro-batch is, its seed, its loss, and the sums of gradients. So torch is given numbers of
micro-batches only, and a stage looks up what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from harness.core.stages import (
    GPIPE,
    IN_TWO_PARTS,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZERO_BUBBLE,
    ZERO_BUBBLE_V,
    turns,
)
from harness.core.world import BadInput
from harness.worker.pipeline import Pipeline
from harness.worker.sharding import is_sharded
from storage.ranks import gathered

if TYPE_CHECKING:
    from harness.worker.peers import Peers
    from harness.worker.pipeline_step import StageShare
    from harness.worker.training import Training

TORCHS = {
    GPIPE: "GPipe",
    ONE_F_ONE_B: "1F1B",
    INTERLEAVED: "Interleaved1F1B",
    ZERO_BUBBLE: "InterleavedZeroBubble",
    ZERO_BUBBLE_V: "ZBVZeroBubble",
}
Activation = tuple[tuple[int, ...], torch.dtype]  # of an activation


class _Forward(nn.Module):
    """What torch calls as a stage."""

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
    """Torch's, but gradients are taken up by our strategy. `at`: the first of the micro-batches
    that it counts from 0 on."""

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
        # the first stage's inputs have no gradient, so autograd does all of it at once there
        self.stages.share.end_backward(by_hand=not self.is_first)

    def _begin(self, chunk: int) -> None:
        i = self.at + chunk
        self.stages.share.begin_backward(i, self.stages.ends_with(self.stage_index))

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Ours has done so."""


class Stages:
    """`share`: what goes through them now; `first`: the first stage of this rank."""

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
        self._kinds: list[tuple[Activation, ...]] = []  # what each stage gives; (): not known yet
        self._inputs: Any = None  # what the first stage was given: shapes and dtypes
        self._made: dict[tuple[str, int], tuple[Any, list[_TorchStage]]] = {}
        self._left: dict[int, int] = {}  # by stage: backwards of this step that are still to come

    def run(self, share: StageShare) -> None:
        """All micro-batches of a step, forward and backward. Raises BadInput."""
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
        """A backward of this stage begins: are gradients exchanged behind it? FSDP exchanges those
        of each stage by itself."""
        self._left[number] -= 1
        return not (self._left[number] if self._sharded else any(self._left.values()))

    def check(self, number: int, output: Any) -> None:
        """Raises BadInput for another shape than the next stage waits for."""
        if (found := _kinds(output)) != self._kinds[number]:
            raise BadInput(
                f"stage {number} of the pipeline gives {_shown(found)}, in the first micro-batch "
                f"it gave {_shown(self._kinds[number])}; pad the samples to one length"
            )

    def _check_inputs(self) -> None:
        """All micro-batches of all steps have the same shapes, on all ranks: these know it from
        what they were given. Raises BadInput."""
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
        """What each stage gives, by one forward of each that counts nothing. Collective, over the
        ranks of a replica. Raises BadInput on all of them."""
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
    """Of a tensor or a tuple of them; (): it is something else."""
    several = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not all(isinstance(t, torch.Tensor) and not hasattr(t, "to_local") for t in several):
        return ()
    return tuple((tuple(t.shape), t.dtype) for t in several)


def _shown(kinds: tuple[Activation, ...]) -> str:
    return ", ".join(f"{dtype} {shape}".removeprefix("torch.") for shape, dtype in kinds)
