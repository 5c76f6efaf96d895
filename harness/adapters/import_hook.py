"""The import hook that adapts frameworks as the script imports them. Runs in the worker.

A finder at the head of sys.meta_path lets the real loader do its work, then calls the adapter's
function with the module. Modules that are already imported (in the warm process, for example) are
adapted at once. An adapter only replaces functions of the framework; whether they have an effect is
decided when the script uses them (`framework_claim.py`).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

# module of a framework -> its adapter, as "module:function"
PATCHES: dict[str, str] = {
    "accelerate.accelerator": "harness.adapters.accelerate.patch:patch",
    "accelerate.parallelism_config": "harness.adapters.whole_copies:split_on_cpu",
    "accelerate.state": "harness.adapters.whole_copies:shard_on_cpu",
    "torchtitan.trainer": "harness.adapters.torchtitan.patch:patch",
    "transformers.distributed.configuration_utils": (
        "harness.adapters.transformers.patch:patch_splitting"
    ),
    "transformers.trainer": "harness.adapters.transformers.patch:patch",
    "transformers.training_args": "harness.adapters.transformers.patch:patch_arguments",
    "lightning.pytorch": "harness.adapters.lightning.patch:patch",
    "pytorch_lightning": "harness.adapters.lightning.patch:patch",
    "lightning.fabric": "harness.adapters.lightning.fabric:patch",
    "lightning_fabric": "harness.adapters.lightning.fabric:patch",
    "composer.trainer.trainer": "harness.adapters.other_trainers:patch",
    "timm.utils.distributed": "harness.adapters.other_trainers:patch",
    "ultralytics.engine.trainer": "harness.adapters.other_trainers:patch",
}


class AdaptingLoader(importlib.abc.Loader):
    """A loader that runs the real loader and then the adapter."""

    def __init__(self, real: Any, adapt: Callable[[ModuleType], None]):
        self._real, self._adapt = real, adapt

    def create_module(self, spec: Any) -> Any:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        self._adapt(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)  # get_source, is_package, ...


class AdaptingFinder(importlib.abc.MetaPathFinder):
    """A finder for the modules that have an adapter."""

    def __init__(self, patches: Mapping[str, str]):
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._patches:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = AdaptingLoader(spec.loader, self._function(fullname))
                return spec
        return None

    def _function(self, fullname: str) -> Callable[[ModuleType], None]:
        return lambda module: adapt(self._patches[fullname], module)


def adapt(who: str, module: ModuleType) -> None:
    """Call the adapter "module:function"."""
    home, _, name = who.partition(":")
    getattr(importlib.import_module(home), name)(module)


def install(patches: Mapping[str, str] | None = None) -> None:
    """Install the finder in this process. Later calls have no effect."""
    wanted = PATCHES if patches is None else patches
    if any(isinstance(finder, AdaptingFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, AdaptingFinder(wanted))
    for name, who in wanted.items():
        if name in sys.modules:
            adapt(who, sys.modules[name])
