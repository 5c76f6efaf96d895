"""Patches that make an unchanged Lightning Fabric elastic, in `lightning.fabric` and in
`lightning_fabric`. Runs in the worker."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from harness.adapters import framework_claim
from harness.adapters.lightning.fabric_loop import FabricSteps
from harness.adapters.lightning.limits import check_strategy
from harness.adapters.lightning.parts import OneOfCopy, elastic_like, with_cluster
from harness.adapters.lightning.patch import put
from harness.worker.batches import rng_state
from harness.worker.session import Session

# functions of Fabric that are replaced, and their parameters
KNOWN = (
    ("fabric", "Fabric.setup_optimizers", ("self", "optimizers")),
    ("fabric", "Fabric.backward", ("self", "tensor", "args", "model", "kwargs")),
    ("wrappers", "_FabricOptimizer.step", ("self", "closure")),
    ("wrappers", "_FabricDataLoader.__iter__", ("self",)),
)
_driver: list[FabricSteps] = []  # of this process, once a Fabric is made


def driver() -> FabricSteps | None:
    """Return the driver of this process, or None if Fabric trains alone."""
    return _driver[0] if _driver else None


def begin(by_name: bool = False) -> FabricSteps | None:
    """Claim the training when a Fabric is made. Return None if we do not drive it. `by_name`: the
    script asks for ours. Raises BadInput."""
    if not _driver:
        with (
            rng_state.kept()
        ):  # attaching seeds the generators, which the script has already seeded
            run = framework_claim.claim("fabric", by_name)
        if run is None:
            return None
        _driver.append(FabricSteps(run))
    return _driver[0]


def patch(module: ModuleType) -> None:
    """Replace functions of this copy of Fabric. Runs once per copy."""
    root = module.__name__
    fabric = importlib.import_module(f"{root}.fabric")
    wrappers = importlib.import_module(f"{root}.wrappers")
    if hasattr(fabric.Fabric, "harness_made"):
        return
    fabric.Fabric.harness_made = True
    put(fabric._Connector, "__init__", _connector(root))
    for name, make in _FABRIC.items():
        put(fabric.Fabric, name, make)
    put(wrappers._FabricOptimizer, "step", _step)
    wrappers._FabricOptimizer.zero_grad = _zero_grad
    put(wrappers._FabricDataLoader, "__iter__", _iterate)
    put(wrappers._FabricDataLoader, "__len__", _length)


class Agreeing:
    """A mixin over a strategy of Fabric: rank 0 decides for all, and all wait for each other."""

    harness_run: Session

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.harness_run._peers.agree(lambda: obj)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.harness_run._peers.barrier()


class OneOfManyInFabric(Agreeing):
    """A mixin over Fabric's SingleDeviceStrategy: files and prints see the same ranks as with other
    strategies, but the world has one rank."""

    harness_parts = 1
    global_rank: int
    local_rank: int

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0


class OneOfCopyInFabric(OneOfCopy, Agreeing):
    """A mixin over Fabric's ModelParallelStrategy."""


def _check(root: str) -> None:
    version = importlib.import_module(root.partition(".")[0]).__version__
    for name, path, parameters in KNOWN:
        thing: Any = importlib.import_module(f"{root}.{name}")
        for part in path.split("."):
            thing = getattr(thing, part)
        framework_claim.refuse_unlike(path, thing, parameters, f"{root} {version}")


def _connector(root: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        signature = inspect.signature(original)

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            steps = begin()
            if steps is None:
                original(self, *args, **kwargs)
                return
            _check(root)
            arguments = signature.bind(self, *args, **kwargs)
            given = arguments.arguments
            strategy, run = given.get("strategy", "auto"), steps.run
            check_strategy(strategy, run.replica_ranks, "Fabric")
            elastic = make_strategy(root, run, strategy)
            steps.parts.reading = elastic.harness_parts
            given |= {"strategy": elastic, "devices": 1, "num_nodes": 1}
            if run.replica_ranks > 1:
                environments = importlib.import_module(f"{root}.plugins.environments")
                given["plugins"] = with_cluster(given.get("plugins"), environments)
            original(*arguments.args, **arguments.kwargs)

        return init

    return make


def make_strategy(root: str, run: Session, theirs: Any) -> Any:
    """Return an elastic strategy for a Fabric of this copy. `theirs`: the script's, which splits
    the model if ranks share a copy of it. Raises BadInput."""
    if run.replica_ranks > 1:
        return elastic_like(theirs, OneOfCopyInFabric, run)
    base = importlib.import_module(f"{root}.strategies").SingleDeviceStrategy
    strategy = type("ElasticFabricStrategy", (OneOfManyInFabric, base), {})(device=run.device)
    strategy.harness_run = run
    strategy.global_rank, strategy.local_rank = run.rank, run.local_rank
    importlib.import_module(f"{root}.utilities.rank_zero").rank_zero_only.rank = run.rank
    return strategy


def _setup(original: Any) -> Any:
    def setup(self: Any, module: Any, *optimizers: Any, **kwargs: Any) -> Any:
        if (steps := driver()) is not None:
            steps.parts.models.append(module)
            steps.parts.optimizers += optimizers
        return original(self, module, *optimizers, **kwargs)

    return setup


def _setup_module(original: Any) -> Any:
    def setup_module(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        if (steps := driver()) is not None:
            steps.parts.models.append(module)
        return original(self, module, *args, **kwargs)

    return setup_module


def _setup_optimizers(original: Any) -> Any:
    def setup_optimizers(self: Any, *optimizers: Any) -> Any:
        if (steps := driver()) is not None:
            steps.parts.optimizers += optimizers
        return original(self, *optimizers)

    return setup_optimizers


def _setup_dataloaders(original: Any) -> Any:
    def setup_dataloaders(self: Any, *dataloaders: Any, **kwargs: Any) -> Any:
        made = original(self, *dataloaders, **kwargs)
        if (steps := driver()) is not None:
            found = made if isinstance(made, list) else [made]
            steps.parts.loaders += [one._dataloader for one in found]
        return made

    return setup_dataloaders


def _backward(original: Any) -> Any:
    def backward(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        steps = driver()
        if steps is None:
            original(self, tensor, *args, **kwargs)
        else:
            steps.backward(tensor, lambda loss: original(self, loss, *args, **kwargs))

    return backward


def _clip(original: Any) -> Any:
    def clip_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps = driver()
        if steps is None or steps.sync():
            return original(self, *args, **kwargs)
        return None  # the gradients are not complete yet, so there is nothing to clip

    return clip_gradients


def _step(original: Any) -> Any:
    def step(self: Any, closure: Any = None) -> Any:
        steps = driver()
        if steps is None:
            return original(self, closure)
        return steps.optimize(self, lambda: original(self, closure))

    return step


def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    steps = driver()
    if steps is None:
        self.optimizer.zero_grad(set_to_none)
    else:
        steps.zero(lambda: self.optimizer.zero_grad(set_to_none))


def _iterate(original: Any) -> Any:
    def iterate(self: Any) -> Iterator[Any]:
        steps = driver()
        if steps is None or not steps.trains(self._dataloader):
            return iter(original(self))
        module = importlib.import_module(type(self).__module__)
        module._set_sampler_epoch(self._dataloader, self._num_iter_calls)
        self._num_iter_calls += 1
        place = (
            (lambda data: data)
            if self._device is None
            else (lambda data: module.move_data_to_device(data, self._device))
        )
        return steps.iterate(self._dataloader, place)

    return iterate


def _length(original: Any) -> Any:
    def length(self: Any) -> int:
        steps = driver()
        if steps is None or not steps.trains(self._dataloader):
            return int(original(self))
        return steps.length(self._dataloader)

    return length


_FABRIC: dict[str, Callable[[Any], Any]] = {
    "setup": _setup,
    "setup_module": _setup_module,
    "setup_optimizers": _setup_optimizers,
    "setup_dataloaders": _setup_dataloaders,
    "backward": _backward,
    "clip_gradients": _clip,
}
