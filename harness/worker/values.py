"""`harness.Values`: numbers and strings of a script's own that are saved with each snapshot."""

from __future__ import annotations

from typing import Any

from harness.core.world import BadInput


class Values:
    """Attributes that are saved and resumed: `values = harness.Values(best=0.0, seen=0)`, then
    `run.prepare(model, optimizer, state={"values": values})` and `values.best = ...`.

    A value is a number, a string, a bool, None, a tensor, or a list or dict of these. It must be
    the same on all ranks, unless `prepare(per_rank=["values"])` says otherwise.
    """

    def __init__(self, **first: Any):
        vars(self).update(first)

    def __getattr__(self, name: str) -> Any:  # for a type checker, and for a better message
        raise AttributeError(f"these values are {', '.join(vars(self)) or 'none'}; found {name!r}")

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the saved values. One that the snapshot does not have keeps its first value. Raises
        BadInput for a saved one that the script no longer names."""
        if lost := sorted(state.keys() - vars(self).keys()):
            raise BadInput(
                f"harness.Values: the snapshot has {', '.join(lost)}, which this script does not "
                f"name: add {', '.join(f'{name}=...' for name in lost)}"
            )
        vars(self).update(state)
