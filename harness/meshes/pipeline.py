"""Pipelines as one call: `harness.pipeline`. It cuts a model into stages, of which each rank keeps
its own. Runs in the worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from harness.core.batch import seed_for
from harness.core.world import BadInput
from harness.meshes.pipeline_cut import STAGES_OF_A_RANK, cut_model, stages_of
from harness.meshes.pipeline_schedule import Stages, StageShare, Straight
from harness.worker.batches.loader import seed_everything
from harness.worker.gradients.sharding import Materials
from harness.worker.optimizer_state import load_together, taken_apart
from storage.tensors.save_ranks import gathered
from storage.tensors.tensor_names import plain_name

if TYPE_CHECKING:
    from harness.worker.session import Session
    from harness.worker.step import GivenMicro, Sums, Work

# The state of a model whose stages lie on several ranks, in the form of an undivided model's. Names
# and numbers are those of the whole model, so a run with any cut, or none, can resume from a
# snapshot.


@dataclass
class PartOptimizer:
    """An optimizer of the whole model, only some of whose parameters are on this rank."""

    param_groups: list[dict[str, Any]]


class PipelineState:
    """The whole model that the stages form; made on all ranks of a replica at the same point.

    `trained`: names of the parameters that train, in the model's order. It sets the pipeline's
    `shapes` ((name, shape, dtype) of every tensor that the model saves) and `numel` (elements of
    all parameters). `runner`: the object that runs micro-batches through the stages, once it is
    made (see `Pipeline.run_micros`)."""

    runner: Any = None

    def __init__(
        self,
        pipe: Pipeline,
        optimizers: Sequence[torch.optim.Optimizer],
        group: dist.ProcessGroup,
    ):
        """Collect names and sizes from all stages. `group`: the pipeline's ranks. Raises BadInput
        if their optimizers do not match."""
        self._pipe, self._optimizers = pipe, optimizers
        named = [(plain_name(name), p) for name, p in pipe.named_parameters()]
        name_of = {id(p): name for name, p in named}
        order = {name: i for i, name in enumerate(pipe.names)}
        self._own = [  # names of this rank's parameters, by optimizer and group
            [[name_of.get(id(p), "") for p in g["params"]] for g in o.param_groups]
            for o in optimizers
        ]
        shapes = [
            (plain_name(name), list(t.shape), str(t.dtype))
            for name, t in pipe.state_dict().items()
            if isinstance(t, torch.Tensor)
        ]
        sizes = {name: (p.numel(), p.requires_grad) for name, p in named}
        every = gathered((shapes, sizes, self._own), group)
        pipe.shapes = list({one[0]: one for said, _, _ in every for one in said}.values())
        known = {name: what for _, said, _ in every for name, what in said.items()}
        self.trained = sorted((n for n in known if known[n][1]), key=order.__getitem__)
        pipe.numel = sum(numel for numel, _ in known.values())
        kinds = {tuple(len(groups) for groups in own) for _, _, own in every}
        if len(kinds) > 1:
            raise BadInput(
                "a pipeline: wanted the same optimizers with the same numbers of groups on every "
                f"stage, found {sorted(kinds)} groups; keep groups that are empty on a stage"
            )
        self._groups = [  # names of the whole model's parameters, by optimizer and group
            [
                sorted((n for _, _, own in every for n in own[o][g]), key=order.__getitem__)
                for g in range(len(groups))
            ]
            for o, groups in enumerate(self._own)
        ]
        if [[[n for n in g if n in sizes] for g in groups] for groups in self._groups] != self._own:
            raise BadInput(
                "a pipeline: wanted each group of an optimizer's parameters in the order in which "
                "the model has them (model.named_parameters()), found another"
            )

    def _numbers(self, optimizer: int) -> dict[str, int]:
        """Return, by name, the numbers of the parameters in the whole model's optimizer."""
        names = [name for group in self._groups[optimizer] for name in group]
        return {name: i for i, name in enumerate(names)}

    # ---- as the optimizers' state ----------------------------------------------------------------
    def state_dict(self) -> list[dict[str, Any]]:
        states = []
        for o, optimizer in enumerate(self._optimizers):
            state, numbers = taken_apart(optimizer.state_dict()), self._numbers(o)
            mine = [numbers[name] for group in self._own[o] for name in group]
            groups = [
                {**group, "params": [numbers[name] for name in names]}
                for group, names in zip(state["param_groups"], self._groups[o], strict=True)
            ]
            of_parameters = {mine[i]: value for i, value in state["state"].items()}
            states.append({**state, "state": of_parameters, "param_groups": groups})
        return states

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for o, (optimizer, state) in enumerate(zip(self._optimizers, states, strict=True)):
            numbers, own = self._numbers(o), optimizer.state_dict()["param_groups"]
            mine = {
                numbers[name]: i
                for i, name in enumerate(name for group in self._own[o] for name in group)
            }
            if [len(g["params"]) for g in state["param_groups"]] != [
                len(names) for names in self._groups[o]
            ]:
                raise BadInput(
                    "the snapshot's optimizer has groups of "
                    f"{[len(g['params']) for g in state['param_groups']]} parameters, this "
                    f"script's of {[len(names) for names in self._groups[o]]}; make it as it was"
                )
            groups = [
                {**group, "params": here["params"]}
                for group, here in zip(state["param_groups"], own, strict=True)
            ]
            of_parameters = {mine[i]: v for i, v in state["state"].items() if i in mine}
            load_together(optimizer, {**state, "state": of_parameters, "param_groups": groups})

    def placeholders(self) -> list[PartOptimizer]:
        """Return the optimizers of the whole model, with None for parameters of other stages."""
        here = {plain_name(name): p for name, p in self._pipe.named_parameters()}
        return [
            PartOptimizer([{"params": [here.get(name) for name in names]} for names in groups])
            for groups in self._groups
        ]

    # ---- this rank's part of a snapshot ----------------------------------------------------------
    def wanted(self, have: dict[str, torch.Tensor]) -> Callable[[str], bool]:
        """Return a function that says whether this rank loads the saved tensor at a path. `have`:
        the tensors of this rank's present state, by path."""
        tops = {path.partition("/")[0] for path in have}
        mine = {
            f"optimizer/{o}/state/{numbers[name]}"
            for o, own in enumerate(self._own)
            for numbers in [self._numbers(o)]
            for group in own
            for name in group
        }

        def is_mine(path: str) -> bool:
            top = path.partition("/")[0]
            if top == "optimizer":
                return path in have or "/".join(path.split("/")[:4]) in mine
            return path in have or top not in tops

        return is_mine


class Pipeline(nn.Module):
    """This rank's stages of a model. Its parameters, buffers and state have the names that they
    have in the whole model.

    `parts`: the stages, in order; `numbers`: their numbers, out of `total`. `names`: those of all
    parameters of the whole model, in its order; `shapes`, `numel`: set by `whole` when
    the run is prepared. `drawn`: seed of the micro-batch whose forward runs; None while none runs.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        numbers: Sequence[int],
        total: int,
        schedule: str,
        loss: Callable[..., Any],
        names: Sequence[str],
    ):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.numbers, self.total = list(numbers), total
        self.schedule, self.loss, self.names = schedule, loss, list(names)
        self.shapes: list[tuple[str, list[int], str]] = []
        self.numel = 0
        self.drawn: int | None = None
        self.register_load_state_dict_pre_hook(_to_parts)  # type: ignore[no-untyped-call]

    @property
    def has_last(self) -> bool:
        """True if the last stage, which computes the loss, is one of these."""
        return self.total - 1 in self.numbers

    def any_stage(self) -> nn.Module:
        return self.parts[0]

    def whole(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        group: Callable[[], dist.ProcessGroup],
    ) -> PipelineState | None:
        """Return the whole model's state, or None if this rank has the whole model. All ranks of a
        replica call it at the same point. `group`: returns the pipeline's ranks."""
        return None if self.total == 1 else PipelineState(self, optimizers, group())

    def run_micros(self, work: Work, sums: Sums, step: int, given: list[GivenMicro]) -> None:
        """Run forward and backward of these micro-batches through all stages. Raises BadInput."""
        whole = work.training.whole
        if whole is None:
            Straight(work).run(StageShare(work, sums, step, given))
            return
        assert isinstance(whole, PipelineState)
        if whole.runner is None:
            whole.runner = Stages(self, work.peers, work.training)
        whole.runner.run(StageShare(work, sums, step, given))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.total > 1:
            raise BadInput(
                f"this rank has stage {self.numbers[0]} of {self.total} of the model, and no "
                "forward of the whole; wanted step.pipeline()"
            )
        return self.parts[0](*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules under their names in the whole model. Parameters and buffers, which torch
        finds through this method, get those names too."""
        memo = set() if memo is None else memo
        if self not in memo:
            memo.add(self)
            yield prefix, self
            for part in self.parts:
                yield from part.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module by its name in the whole model. Raises AttributeError."""
        for part in self.parts[:-1]:
            try:
                return part.get_submodule(target)
            except AttributeError:
                continue
        return self.parts[-1].get_submodule(target)

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        for part in self.parts:
            destination = part.state_dict(
                destination=destination, prefix=prefix, keep_vars=keep_vars
            )
        found: dict[str, Any] = destination
        return found

    def draw_alike(self, units: dict[int, nn.Module]) -> None:
        """Seed the generators before each forward of the units, by micro-batch and unit number, so
        that random draws depend neither on the schedule nor on the cut. `units`: modules by their
        number in the whole model."""
        for number, module in units.items():
            module.register_forward_pre_hook(functools.partial(self._seed, number))

    def _seed(self, number: int, *_: Any) -> None:
        if self.drawn is not None and not torch.compiler.is_compiling():
            seed_everything(seed_for(self.drawn, number, 0))


def _to_parts(pipe: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the entries of `state`, before it is loaded, to the parts (`parts.0.`) that have them.
    Entries of other stages are removed."""
    own = [set(part.state_dict()) for part in pipe.parts]
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        holders = [i for i, names in enumerate(own) if name in names]
        for i in holders:
            state[f"{prefix}parts.{i}.{name}"] = state[key]
        if holders or pipe.total > 1:
            del state[key]


def pipeline(
    model: nn.Module,
    run: Session,
    loss: Callable[..., Any],
    schedule: str = "1f1b",
    cuts: Sequence[str] | None = None,
    everywhere: Collection[str] = (),
) -> Pipeline:
    """Return this rank's stages of the model, over the `pp` ranks of the run's mesh. Without `pp`,
    that is the whole model, so one script serves all meshes. A batch of `run.steps` is (inputs,
    targets): the first stage is called with inputs (one tensor, or a tuple); `loss(output,
    targets)` returns the mean over the micro-batch, or (mean, its weight in valid tokens).

    Modules run in the order in which the model defines them; members of a ModuleList, ModuleDict or
    Sequential count one by one. Stages have about equally many parameters, or begin at the modules
    that `cuts` names: ["blocks.4"]. A stage is the model without the others' modules, so the
    model's forward must skip modules that are None. `everywhere`: modules without parameters that
    every stage keeps.

    `schedule`: "gpipe", "1f1b", and with two stages on each rank "interleaved", "zero-bubble" and
    "zero-bubble-v". Call it before the optimizer is made. A model on the meta device gets its
    values here, or in `harness.fsdp2(pipe, run)` if the mesh shards it. Raises BadInput.
    """
    if schedule not in STAGES_OF_A_RANK:
        raise BadInput(
            f"pipeline(schedule={schedule!r}): wanted one of {', '.join(STAGES_OF_A_RANK)}"
        )
    mesh = run._peers.model_mesh
    ranks = 1 if mesh is None else mesh.pp
    place = run._peers.grouping.stage(run.rank) if ranks > 1 else 0
    total = ranks * STAGES_OF_A_RANK[schedule] if ranks > 1 else 1
    numbers = stages_of(schedule, ranks, place) if ranks > 1 else [0]
    names = [plain_name(name) for name, _ in model.named_parameters()]
    parts, units = cut_model(model, numbers, total, cuts, everywhere)
    pipe = Pipeline(parts, numbers, total, schedule, loss, names)
    pipe.draw_alike(units)
    if mesh is None or mesh.copy_ranks == mesh.pp:  # the mesh does not shard it
        for part in parts:
            Materials(part, run.device, run.seed).fill(part)
    return pipe
