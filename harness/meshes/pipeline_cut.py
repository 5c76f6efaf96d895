"""The cut of a model into the stages of a pipeline. Runs in the worker.

Each stage is the model itself without the modules of the other stages, so that everything keeps its
name: members of lists and Sequentials are left out, other modules are None.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence

from torch import nn

from harness.core.world import BadInput

# The layers of each pipeline stage, and the number of micro-batches that pass through a pipeline
# at once.

GPIPE, ONE_F_ONE_B, INTERLEAVED = "gpipe", "1f1b", "interleaved"
ZERO_BUBBLE, ZERO_BUBBLE_V = "zero-bubble", "zero-bubble-v"
# schedule -> stages of each rank
STAGES_OF_A_RANK = {GPIPE: 1, ONE_F_ONE_B: 1, INTERLEAVED: 2, ZERO_BUBBLE: 2, ZERO_BUBBLE_V: 2}
# schedules whose backward computes the gradients of weights later than those of activations
IN_TWO_PARTS = (ZERO_BUBBLE, ZERO_BUBBLE_V)


def even(sizes: Sequence[int], stages: int) -> list[int]:
    """Cut modules into `stages` contiguous runs whose largest is as small as possible. `sizes`:
    parameter elements of each module. Return the first index of each run. A module without
    parameters stays with the one before it. Raises BadInput if there are too few modules."""
    there = [i for i, size in enumerate(sizes) if size]
    if len(there) < stages:
        raise BadInput(
            f"a pipeline of {stages} stages: wanted a model of as many modules with parameters at "
            f"least, found {len(there)}; use fewer stages (pp), or a model whose layers are in a "
            "ModuleList, ModuleDict or Sequential"
        )
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_cut(sizes, middle, stages)) <= stages:
            high = middle
        else:
            low = middle + 1
    return _cut(sizes, low, stages)


def _cut(sizes: Sequence[int], most: int, stages: int) -> list[int]:
    """Return the first index of each run of at most `most` elements. No run is without parameters,
    and there are at least `stages` runs."""
    firsts, size = [0], 0
    left = sum(1 for one in sizes if one)
    for i, one in enumerate(sizes):
        if one and size and (size + one > most or left == stages - len(firsts)):
            firsts.append(i)
            size = 0
        size += one
        left -= bool(one)
    return firsts


def stages_of(schedule: str, ranks: int, rank: int) -> list[int]:
    """Return the stages that `rank` has in a pipeline of `ranks` ranks."""
    if schedule == ZERO_BUBBLE_V:  # a V shape: the first rank has the last stage as well
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * turn for turn in range(STAGES_OF_A_RANK[schedule])]


def turns(schedule: str, micro_batches: int, ranks: int) -> list[tuple[str, int]]:
    """Return (schedule, micro-batches) for each consecutive turn over a replica's micro-batches:
    torch's schedules do not accept every number, and shares change with the world."""
    if schedule == ONE_F_ONE_B and micro_batches < ranks:
        return [(GPIPE, micro_batches)]  # keeps no more activations than 1F1B would
    rest = micro_batches % ranks
    rounds = max(1, micro_batches // ranks)
    if schedule in (INTERLEAVED, ZERO_BUBBLE) and micro_batches % rounds:
        return [(schedule, micro_batches - rest), (schedule, rest)]
    return [(schedule, micro_batches)]


LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def cut_model(
    model: nn.Module,
    numbers: Sequence[int],
    total: int,
    cuts: Sequence[str] | None = None,
    everywhere: Collection[str] = (),
) -> tuple[list[nn.Module], dict[int, nn.Module]]:
    """Return stages `numbers` of `total`, and their units by number in the whole model. See
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
    """Yield the units that cuts may separate, with their names, in the order of definition. A
    module that contains a list is opened, unless it is itself a member of a ModuleList."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        holds = isinstance(child, LISTS) or any(isinstance(m, LISTS[:2]) for m in child.children())
        if holds and not isinstance(module, nn.ModuleList):
            yield from _units(child, f"{path}.")
        else:
            yield path, child


def _firsts(units: dict[str, nn.Module], cuts: Sequence[str] | None, total: int) -> list[int]:
    """Return the index of the first unit of each stage. Raises BadInput."""
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
    """Raise BadInput for parameters that would belong to no stage, or to every stage."""
    inside = {id(p) for m in units.values() for p in m.parameters()}
    if others := [name for name, p in model.named_parameters() if id(p) not in inside]:
        what = "of a module that every stage keeps" if everywhere else "of no module that is cut"
        raise BadInput(
            f"a pipeline: wanted every parameter in one of the modules that are shared out, found "
            f"{others[0]} ({what}), which several stages would train apart; put it into a module "
            "of its own"
        )


def _check_untied(units: dict[str, nn.Module], stage_of: dict[str, int]) -> None:
    """Raise BadInput for a parameter that two stages share."""
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
    """Return the model without the units `others`. `in_place`: change the model; else copy the
    modules that contain units."""
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
