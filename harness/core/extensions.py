"""Names of satellites that the spine loads when somebody asks for them. Every room may use it.

The spine imports no satellite, so that it can be read, tested and installed alone. Where a script
or a command asks for a thing of one, `load` imports it by name. If the satellite is not installed,
the error says which extra to install: a satellite's extra has the name of its room.
"""

from __future__ import annotations

import importlib
from typing import Any

from harness.core.world import BadInput

# What changes scripts of other trainers while they are imported.
IMPORT_HOOK = "harness.adapters.import_hook"
# What a session gives to loops of the script's own.
LOADER = "harness.loops.loop_loader:MicroLoader"
FILES = "harness.loops.loop_files:OwnFiles"
# The guards of a session: `attach(guards=...)`.
GUARD = "harness.guards.step_guard:StepGuard"
GUARD_RULES = "harness.guards.guard_rules:guards_of"
# Codecs of optimizer state that is kept in tensor subclasses, by the name of the class. A codec has
# `apart(value)`, which returns a dict of plain tensors, and `together(stored, parameter, name)`.
STATE_CODECS = {
    "OptimState8bit": "harness.meshes.low_precision:LowBitCodec",
    "OptimState4bit": "harness.meshes.low_precision:LowBitCodec",
    "OptimStateFp8": "harness.meshes.low_precision:LowBitCodec",
}


def load(where: str, what: str) -> Any:
    """Return `name` of `where`, "module:name"; without a name, the module. `what`: stands in the
    message for what somebody asked for. Raises BadInput if the satellite is not installed."""
    module, _, name = where.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if not is_absent(module, e):
            raise
        extra = extra_of(module)
        raise BadInput(
            f'{what}: this needs "spotharness[{extra}]"; pip install "spotharness[{extra}]"'
        ) from e
    return getattr(found, name) if name else found


def is_absent(module: str, error: ModuleNotFoundError) -> bool:
    """Return whether `error` says that the module, or its room, is not there; False: it is there,
    and something that it imports is not."""
    missing = error.name or ""
    return missing == module or module.startswith(f"{missing}.")


def extra_of(module: str) -> str:
    """Return the extra that installs a module of a satellite: the name of its room."""
    return [*module.split("."), "", ""][1]
