"""The parts of a model that training leaves alone, and what PEFT would save of its adapters:
tensors, names and configuration. Runs in the worker.

Snapshots record them, so that adapters can be exported without PEFT and without the model. PEFT is
not imported here: the script has imported it if its model has adapters.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from typing import Any

from torch import nn, optim

from storage.tensors.dcp import version_of
from storage.tensors.state_tree import path_name
from storage.tensors.tensor_names import plain_name

COMPILED = "_orig_mod"  # the attribute in which torch.compile keeps the model


def adapters_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return, by adapter name, its `config` as in adapter_config.json and its `tensors` (name in
    adapter_model.safetensors -> name in the snapshot). {}: the model has no PEFT adapters."""
    inner: Any = getattr(model, COMPILED, model)
    peft: Any = sys.modules.get("peft")
    configs = getattr(inner, "peft_config", None)
    if peft is None or not isinstance(configs, dict):
        return {}
    wrapped = isinstance(inner, peft.PeftModel)
    state = inner.state_dict()
    names = {id(tensor): path_name(("model", plain_name(name))) for name, tensor in state.items()}
    adapters = {}
    for adapter, config in configs.items():
        found = peft.get_peft_model_state_dict(
            inner,
            state_dict=state,
            adapter_name=adapter,
            save_embedding_layers=_trains_embeddings(inner),
        )
        # skip adapters with tensors that PEFT makes for the file only: no snapshot contains those
        if found and all(id(tensor) in names for tensor in found.values()):
            prefix = "" if wrapped else "base_model.model."  # made by transformers' add_adapter
            tensors = {f"{prefix}{name}": names[id(tensor)] for name, tensor in found.items()}
            adapters[str(adapter)] = {"config": _config(inner, config), "tensors": tensors}
    return adapters


def _trains_embeddings(model: Any) -> bool:
    """Return whether the embeddings must be in the file. PEFT itself would query the hub."""
    if not hasattr(model, "get_input_embeddings"):
        return False
    weight = getattr(model.get_input_embeddings(), "weight", None)
    return weight is not None and bool(weight.requires_grad)


def _config(model: Any, config: Any) -> dict[str, Any]:
    """Return the adapter's configuration as `PeftModel.save_pretrained` writes it."""
    body = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    body["inference_mode"] = True
    body["base_model_name_or_path"] = (
        body.get("base_model_name_or_path") or getattr(base, "name_or_path", None) or None
    )
    if body.get("task_type") is None:
        kind = type(base)
        body["auto_mapping"] = {
            "base_model_class": kind.__name__,
            "parent_library": kind.__module__,
        }
    plain: dict[str, Any] = json.loads(json.dumps(body, default=str))
    return plain


# The parts of a model that training does not change: weights under adapters, quantised bases.

# Integer buffers of at least this size hold codes of quantised weights; smaller ones may be
# counters, which can change at any time.
LARGE_NBYTES = 64 << 10


class Frozen:
    """The unchanged parts of one model, as its optimizers and its buffers' versions show them."""

    def __init__(self, model: nn.Module, optimizers: list[optim.Optimizer]):
        self._model, self._optimizers = model, optimizers
        # integer buffers at the last snapshot: name -> (address, version)
        self._seen: dict[str, tuple[int, int]] = {}
        self._adapters: tuple[tuple[str, ...], dict[str, Any]] = ((), {})  # (names, configs)

    def adapters(self) -> dict[str, dict[str, Any]]:
        """Return the result of `adapters_of`, which is called once for each set of adapters."""
        configs = getattr(getattr(self._model, COMPILED, self._model), "peft_config", None)
        names = tuple(configs) if isinstance(configs, dict) else ()
        if self._adapters[0] != names:
            self._adapters = names, adapters_of(self._model)
        return self._adapters[1]

    def left_alone(self, tensors: Collection[str]) -> set[str]:
        """Return the names of the state's tensors that are probably unchanged: parameters that need
        no gradient and belong to no optimizer, tensors stored beside them (`layer.weight.absmax` of
        a quantised weight), and large integer buffers not written to since the last call."""
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
