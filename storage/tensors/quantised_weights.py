"""The scales and tables beside the codes of bitsandbytes' weights.

Its modules add these to their `state_dict`, but 4-bit ones cannot load them again, and FSDP2 hides
them. bitsandbytes is not imported here: the script has imported it if its model has such weights.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from storage.tensors.tensor_names import plain_name


def _states(model: nn.Module) -> dict[str, Any]:
    """Return the `QuantState` of each 4-bit weight by the weight's plain name."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules() if "bitsandbytes" in sys.modules else ():
        # by the module's own parameters: a layer of PEFT shows the weight of the one within it
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        # a weight that FSDP2 has sharded has no state, only its module has one
        state = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)
        if weight is not None and hasattr(state, "as_dict"):
            found[plain_name(f"{name}.weight" if name else "weight")] = state
    return found


def stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors beside 4-bit weights by the names in the `state_dict` of a model that is
    not sharded."""
    return {
        f"{weight}.{key}": value
        for weight, state in _states(model).items()
        for key, value in state.as_dict(packed=True).items()
    }


def load(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Give the model's 4-bit weights what `stored` has returned. Return the rest of the state."""
    rest = dict(state)
    for weight, own in _states(model).items():
        prefix = f"{weight}."
        found = {
            name.removeprefix(prefix): rest.pop(name) for name in state if name.startswith(prefix)
        }
        # in place, because the weight and its module hold the same object
        vars(own).update(vars(type(own).from_dict(found, own.absmax.device)))
    return rest


def live(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors with which the model's codes are decoded, in an order that all ranks
    share."""
    states = [s for own in _states(model).values() for s in (own, own.state2) if s is not None]
    return [t for s in states for t in (s.absmax, s.code, s.offset) if t is not None]
