"""The state of optimizers as plain tensors and values, for snapshots. Runs in the worker.

Some optimizers keep their state in tensor subclasses that look like a tensor of floats (torchao's,
of 8 and 4 bits). Codecs, found by the name of such a class (`core/extensions.py`), take these apart
into plain tensors and put them together again, on this world or another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from harness.core import extensions

KIND = "low_bit"  # the key under which the class of a tensor that was taken apart is stored


class StateCodec(Protocol):
    """The conversion of one kind of tensor subclass."""

    def apart(self, value: torch.Tensor) -> dict[str, Any]:
        """Return the tensor as plain tensors and values by name. Raises BadInput."""

    def together(self, stored: dict[str, Any], parameter: Any, name: str) -> torch.Tensor:
        """Return the tensor from what `apart` returned, for this rank's part of the parameter.
        `name`: of the state, for messages. Raises BadInput."""


def _codec(kind: str) -> StateCodec:
    found: StateCodec = extensions.load(
        extensions.STATE_CODECS[kind], f"an optimizer with state of the kind {kind}"
    )()
    return found


def taken_apart(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state_dict with tensors of known subclasses replaced by dicts of plain
    tensors. Raises BadInput for tensors that their codec cannot take apart."""
    if not isinstance(kept := state.get("state"), dict):
        return state
    return {**state, "state": {number: _each_apart(own) for number, own in kept.items()}}


def _each_apart(own: Any) -> Any:
    return {k: _apart(v) for k, v in own.items()} if isinstance(own, dict) else own


def _apart(value: Any) -> Any:
    local = value.to_local() if hasattr(value, "to_local") else value
    kind = type(local).__name__
    if kind not in extensions.STATE_CODECS:
        return value
    return {KIND: kind, **_codec(kind).apart(value)}


def load_together(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load into the optimizer a state that `taken_apart` returned, on this world or another. Raises
    BadInput for a part that its codec cannot make."""
    kept = state.get("state")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    made: dict[int, dict[str, Any]] = {}
    plain: dict[int, Any] = {}
    for number, own in kept.items() if isinstance(kept, dict) else ():
        if not isinstance(own, dict):
            continue
        if low := {k: v for k, v in own.items() if isinstance(v, dict) and KIND in v}:
            made[number] = {
                k: _codec(v[KIND]).together(v, params[number], k) for k, v in low.items()
            }
            plain[number] = {k: v for k, v in own.items() if k not in low}
    optimizer.load_state_dict({**state, "state": {**state["state"], **plain}} if made else state)
    for number, own in made.items():  # directly: torch would cast them to the parameter's dtype
        optimizer.state[params[number]].update(own)


def as_stepped(optimizer: torch.optim.Optimizer) -> Any:
    """Return an object with the `param_groups` whose layout the optimizer's state has: the
    optimizer's own, or what its method `as_stepped` returns (ZeRO-1)."""
    own = getattr(optimizer, "as_stepped", None)
    return optimizer if own is None else own()


@dataclass
class SeveralOptimizers:
    """Several optimizers as one object with a state."""

    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def state_dict(self) -> list[dict[str, Any]]:
        return [taken_apart(o.state_dict()) for o in self.optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            load_together(optimizer, state)
