"""What training leaves alone of a model: weights under adapters, quantised bases.

Runs in the worker. What is named here need not be copied, hashed or sent again for each snapshot,
if it is found to be as it was: that is looked at each time (storage/fingerprints.py), never taken
for granted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn, optim

from harness.worker.peft_adapters import COMPILED, adapters_of
from storage.copying import version_of
from storage.names import plain_name

# a buffer of whole numbers: codes of quantised weights, not counters, which may change at any time
LARGE_NBYTES = 64 << 10


class Frozen:
    """Of one model and its optimizers."""

    def __init__(self, model: nn.Module, optimizers: list[optim.Optimizer]):
        self._model, self._optimizers = model, optimizers
        # buffers of whole numbers, as the last snapshot saw them: address, version
        self._seen: dict[str, tuple[int, int]] = {}
        self._adapters: tuple[tuple[str, ...], dict[str, Any]] = ((), {})  # of which names

    def adapters(self) -> dict[str, dict[str, Any]]:
        """See `adapters_of`; asked once for each set of adapters."""
        configs = getattr(getattr(self._model, COMPILED, self._model), "peft_config", None)
        names = tuple(configs) if isinstance(configs, dict) else ()
        if self._adapters[0] != names:
            self._adapters = names, adapters_of(self._model)
        return self._adapters[1]

    def left_alone(self, tensors: Collection[str]) -> set[str]:
        """Those of the state's tensors that are probably as they were: parameters that no gradient
        and no optimizer changes, what is stored beside one (`layer.weight.absmax` of a quantised
        weight), and large buffers of whole numbers that nobody has written to since the last
        call."""
        held = {
            id(p) for o in self._optimizers for group in o.param_groups for p in group["params"]
        }
        frozen = {
            f"model/{plain_name(name)}"
            for name, p in self._model.named_parameters(remove_duplicate=False)
            if not p.requires_grad and id(p) not in held
        }
        seen = {
            f"model/{plain_name(name)}": (buffer.data_ptr(), version_of(buffer))
            for name, buffer in self._model.named_buffers()
            if not buffer.is_floating_point() and buffer.nbytes >= LARGE_NBYTES
        }
        before, self._seen = self._seen, seen
        return {
            name
            for name in tensors
            if _is_of(name, frozen) or before.get(name, 0) == seen.get(name)
        }


def _is_of(name: str, frozen: set[str]) -> bool:
    return name in frozen or any(
        name[:at] in frozen for at, letter in enumerate(name) if letter == "."
    )
