"""Adapts frameworks as the script imports them. Runs in the worker.

A finder at the head of sys.meta_path lets the real loader do its work, then calls the adapter's
function with the module. What was imported before (the warm process may have it) is adapted at
once. An adapter only puts its functions in the place of the framework's; whether they do anything
is decided when the script uses them (`claims.py`).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

# module of a framework -> who adapts it, as "module:function"
PATCHES: dict[str, str] = {
    "accelerate.accelerator": "harness.adapters.accelerate_patch:patch",
    "torchtitan.trainer": "harness.adapters.titan:patch",
    "transformers.trainer": "harness.adapters.hf_trainer:patch",
    "transformers.training_args": "harness.adapters.hf_trainer:patch_arguments",
    "lightning.pytorch": "harness.adapters.lightning_trainer:patch",
    "pytorch_lightning": "harness.adapters.lightning_trainer:patch",
    "lightning.fabric": "harness.adapters.fabric:patch",
    "lightning_fabric": "harness.adapters.fabric:patch",
}


class AdaptingLoader(importlib.abc.Loader):
    """The real loader, and then the adapter."""

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
    """Finds the modules that adapters want to see."""

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
    """From here on. Once for each process."""
    wanted = PATCHES if patches is None else patches
    if any(isinstance(finder, AdaptingFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, AdaptingFinder(wanted))
    for name, who in wanted.items():
        if name in sys.modules:
            adapt(who, sys.modules[name])
