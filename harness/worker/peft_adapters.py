"""What PEFT would save of a model's adapters: which tensors under which names, and their
configuration. Runs in the worker.

A snapshot says it, so adapters can be exported from it without PEFT and without the model. PEFT is
not imported here: a model that has its adapters was made by it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from torch import nn

from storage.names import plain_name
from storage.trees import path_name

COMPILED = "_orig_mod"  # where torch.compile keeps the model


def adapters_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """By the adapter's name: `config`, as in adapter_config.json; `tensors`: name in
    adapter_model.safetensors -> name in the snapshot. {}: the model has none that could be told."""
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
        # what PEFT makes for the file alone lies in no snapshot
        if found and all(id(tensor) in names for tensor in found.values()):
            prefix = "" if wrapped else "base_model.model."  # transformers' own add_adapter
            tensors = {f"{prefix}{name}": names[id(tensor)] for name, tensor in found.items()}
            adapters[str(adapter)] = {"config": _config(inner, config), "tensors": tensors}
    return adapters


def _trains_embeddings(model: Any) -> bool:
    """Must they be in the file? PEFT itself would ask the hub."""
    if not hasattr(model, "get_input_embeddings"):
        return False
    weight = getattr(model.get_input_embeddings(), "weight", None)
    return weight is not None and bool(weight.requires_grad)


def _config(model: Any, config: Any) -> dict[str, Any]:
    """As `PeftModel.save_pretrained` writes it."""
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
