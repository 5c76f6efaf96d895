"""The state of a model whose stages lie on several ranks, as one rank's that holds it whole: names
and numbers are those of the whole model, so any cut of it, or none, goes on from a snapshot. Runs
in the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harness.core.world import BadInput
from harness.worker.low_bit import load_together, taken_apart
from harness.worker.pipeline import Pipeline
from storage.names import plain_name
from storage.ranks import gathered
from storage.trees import TAG

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass
class PartOptimizer:
    """An optimizer of the whole model, of which only some parameters are here."""

    param_groups: list[dict[str, Any]]


class Whole:
    """What the stages make together; made on all ranks of a replica at the same point.

    `trained`: names of the parameters that train, in the model's order. It tells the pipeline
    `shapes`, (name, shape, dtype) of all that the model saves, and `numel`, elements of all
    parameters. `runner`: what puts micro-batches through the stages, once it is made (see
    `runner_of`)."""

    runner: Any = None

    def __init__(
        self,
        pipe: Pipeline,
        optimizers: Sequence[torch.optim.Optimizer],
        group: dist.ProcessGroup,
    ):
        """`group`: the ranks of the pipeline. Raises BadInput."""
        self._pipe, self._optimizers = pipe, optimizers
        named = [(plain_name(name), p) for name, p in pipe.named_parameters()]
        name_of = {id(p): name for name, p in named}
        order = {name: i for i, name in enumerate(pipe.names)}
        self._own = [  # of each optimizer, and of each of its groups: the names
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
        self._groups = [  # as they are in the whole model
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
        """By name: as the whole model's optimizer counts its parameters."""
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
        """Of the optimizers; None stands for the parameters of other stages."""
        here = {plain_name(name): p for name, p in self._pipe.named_parameters()}
        return [
            PartOptimizer([{"params": [here.get(name) for name in names]} for names in groups])
            for groups in self._groups
        ]

    # ---- what of a snapshot is this rank's -------------------------------------------------------
    def wanted(self, have: dict[str, torch.Tensor]) -> Callable[[str], bool]:
        """Of the paths of saved tensors. `have`: those of this rank's state as it is."""
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


def merged(plains: Sequence[Any]) -> Any:
    """What several ranks have beside their tensors (`storage.dcp.split`), as one: of dicts all
    keys, of other values the first's."""
    first = plains[0]
    if isinstance(first, dict) and first.get(TAG) == "dict":
        found = {key: value for plain in reversed(plains) for key, value in plain["items"]}
        return {TAG: "dict", "items": [[key, found[key]] for key in sorted(found, key=_order)]}
    if isinstance(first, dict) and TAG not in first:
        dicts = [plain for plain in plains if isinstance(plain, dict)]
        keys = dict.fromkeys(key for plain in dicts for key in plain)
        return {key: merged([plain[key] for plain in dicts if key in plain]) for key in keys}
    if isinstance(first, list) and all(len(plain) == len(first) for plain in plains):
        return [merged(some) for some in zip(*plains, strict=True)]
    return first


def _order(key: Any) -> tuple[str, Any]:
    return type(key).__name__, key


def pruned(plain: Any, wanted: Callable[[str], bool]) -> Any:
    """Without what refers to other tensors: there is None."""
    if isinstance(plain, list):
        return [pruned(one, wanted) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if plain.get(TAG) in ("tensor", "ndarray") and "name" in plain and not wanted(plain["name"]):
        return None
    return {key: pruned(value, wanted) for key, value in plain.items()}


def whole_of(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    group: Callable[[], dist.ProcessGroup],
) -> Whole | None:
    """None: this rank has the whole model."""
    if not isinstance(model, Pipeline) or model.total == 1:
        return None
    return Whole(model, optimizers, group())
