"""Pipelines: a model cut into stages, of which this rank has some: `harness.pipeline`. Runs in the
worker.

Each stage is the model itself without the modules of the others, so that everything keeps its name:
members of lists and Sequentials are left out, other modules are None.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harness.core.batch import seed_for
from harness.core.stages import STAGES_OF_A_RANK, even, stages_of
from harness.core.world import BadInput
from harness.worker.loader import seed_everything
from harness.worker.materialize import Materials
from storage.names import plain_name

if TYPE_CHECKING:
    from harness.worker.session import Session

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Pipeline(nn.Module):
    """This rank's stages of a model. Its parameters, buffers and state have the names that they
    have in the whole model.

    `parts`: the stages, in their order; `numbers`: which they are, of `total`. `names`: of all
    parameters of the whole model, in its order; `shapes`, `numel`: see `Whole`, which says them
    when the run is prepared. `drawn`: seed of the micro-batch whose forward
    runs; None: of none.
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
        """Is the last stage, which makes the loss, one of these?"""
        return self.total - 1 in self.numbers

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
        """As of the whole model. What goes through them (parameters, buffers) has its names."""
        memo = set() if memo is None else memo
        if self not in memo:
            memo.add(self)
            yield prefix, self
            for part in self.parts:
                yield from part.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """By its name in the whole model. Raises AttributeError."""
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
        """What modules draw at random is a function of the micro-batch and of which module of the
        model it is: neither the schedule nor the cut changes it. `units`: by their number in the
        whole model."""
        for number, module in units.items():
            module.register_forward_pre_hook(functools.partial(self._seed, number))

    def _seed(self, number: int, *_: Any) -> None:
        if self.drawn is not None and not torch.compiler.is_compiling():
            seed_everything(seed_for(self.drawn, number, 0))


def _to_parts(pipe: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state is loaded: each part finds its own, whose names begin with where it lies."""
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
    """This rank's stages of the model, over the ranks of `pp` in the run's mesh; on other meshes
    the whole model, so that one script serves all. A batch of `run.steps` is (inputs, targets):
    inputs (one tensor, or a tuple) are what the first stage is called with; `loss(output, targets)`
    is the mean over the micro-batch, or the mean and how much it stands for (valid tokens).

    Modules run in the order in which the model defines them; members of a ModuleList, ModuleDict or
    Sequential count one by one. Stages have about equally many parameters, or begin where `cuts`
    says, by name: ["blocks.4"]. A stage is the model without the others' modules, so its forward
    has to pass over what is None. `everywhere`: modules without parameters that every stage keeps.

    `schedule`: "gpipe", "1f1b", and with two stages on each rank "interleaved", "zero-bubble" and
    "zero-bubble-v". Call before the optimizer is made. A model on the meta device gets its values
    here, or in `harness.fsdp2(pipe, run)` where the mesh shards it. Raises BadInput.
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
    parts, units = cut(model, numbers, total, cuts, everywhere)
    pipe = Pipeline(parts, numbers, total, schedule, loss, names)
    pipe.draw_alike(units)
    if mesh is None or mesh.copy_ranks == mesh.pp:  # nobody shards it
        for part in parts:
            Materials(part, run.device, run.seed).fill(part)
    return pipe


def cut(
    model: nn.Module,
    numbers: Sequence[int],
    total: int,
    cuts: Sequence[str] | None = None,
    everywhere: Collection[str] = (),
) -> tuple[list[nn.Module], dict[int, nn.Module]]:
    """Stages `numbers` of `total`, and what they consist of, by its number in the whole model. See
    `pipeline`; raises BadInput."""
    units = {name: m for name, m in _units(model) if name not in everywhere}
    _check(model, units, everywhere)
    firsts = _firsts(units, cuts, total)
    stage_of = {name: sum(first <= i for first in firsts) - 1 for i, name in enumerate(units)}
    _check_untied(units, stage_of)
    parts = [
        _without(
            model,
            {name for name, stage in stage_of.items() if stage != number},
            in_place=len(numbers) == 1,
        )
        for number in numbers
    ]
    mine = {i: units[name] for i, (name, at) in enumerate(stage_of.items()) if at in numbers}
    return parts, mine


def _units(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """What is cut between: by name, in the order of definition. What holds a list is opened, as far
    as it is not a member of a ModuleList itself."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        holds = isinstance(child, LISTS) or any(isinstance(m, LISTS[:2]) for m in child.children())
        if holds and not isinstance(module, nn.ModuleList):
            yield from _units(child, f"{path}.")
        else:
            yield path, child


def _firsts(units: dict[str, nn.Module], cuts: Sequence[str] | None, total: int) -> list[int]:
    """Of each stage. Raises BadInput."""
    order = list(units)
    sizes = [sum(p.numel() for p in m.parameters()) for m in units.values()]
    if cuts is None or total == 1:
        return even(sizes, total)
    if unknown := [name for name in cuts if name not in units]:
        raise BadInput(
            f"pipeline(cuts={list(cuts)}): wanted names of modules to cut before, found "
            f"{unknown[0]!r}; there are {', '.join(order[:6])}, ... {order[-1]}"
        )
    firsts = [0, *(order.index(name) for name in cuts)]
    if len(firsts) != total or firsts != sorted(set(firsts)):
        raise BadInput(
            f"pipeline(cuts={list(cuts)}): wanted {total - 1} names in the model's order, one for "
            f"each stage but the first (pp x stages of a rank = {total}); leave them out to cut "
            "evenly"
        )
    if empty := [i for i, j in zip(firsts, [*firsts[1:], len(order)], strict=True)
                 if not sum(sizes[i:j])]:  # fmt: skip
        raise BadInput(f"pipeline(cuts=...): the stage that begins with {order[empty[0]]!r} has "
                       "no parameters; cut elsewhere")  # fmt: skip
    return firsts


def _check(model: nn.Module, units: dict[str, nn.Module], everywhere: Collection[str]) -> None:
    """Raises BadInput for parameters that would be nobody's, or everybody's."""
    inside = {id(p) for m in units.values() for p in m.parameters()}
    if others := [name for name, p in model.named_parameters() if id(p) not in inside]:
        what = "of a module that every stage keeps" if everywhere else "of no module that is cut"
        raise BadInput(
            f"a pipeline: wanted every parameter in one of the modules that are shared out, found "
            f"{others[0]} ({what}), which several stages would train apart; put it into a module "
            "of its own"
        )


def _check_untied(units: dict[str, nn.Module], stage_of: dict[str, int]) -> None:
    """Raises BadInput for a parameter of two stages."""
    seen: dict[int, tuple[str, int]] = {}
    for name, module in units.items():
        for key, p in module.named_parameters():
            other, stage = seen.setdefault(id(p), (f"{name}.{key}", stage_of[name]))
            if stage != stage_of[name]:
                raise BadInput(
                    f"{name}.{key} is {other}: tied weights of stages {stage} and "
                    f"{stage_of[name]} would be trained apart; untie them, or choose cuts= so that "
                    "one stage has both"
                )


def _without(module: nn.Module, others: set[str], in_place: bool, prefix: str = "") -> nn.Module:
    """The model without these units. `in_place`: it is changed; else what is above units is
    copied."""
    if not any(name.startswith(prefix) for name in others):
        return module
    if not in_place:
        twin = copy.copy(module)
        for key, value in vars(module).items():
            twin.__dict__[key] = copy.copy(value) if isinstance(value, dict) else value
        module = twin
    for name, child in list(module._modules.items()):
        path = f"{prefix}{name}"
        if path not in others and child is not None:
            module._modules[name] = _without(child, others, in_place, f"{path}.")
        elif path in others and isinstance(module, LISTS):
            del module._modules[name]
        elif path in others:
            module._modules[name] = None
    return module
