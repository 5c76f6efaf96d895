"""The adapter of Accelerate. `from harness.adapters.accelerate import Accelerator` gives a script
that asks for it by name an elastic Accelerator.

The import hook imports modules of this package while Accelerate itself is being imported, so what
needs all of it (`by_name.py`) is loaded when asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Accelerator"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.by_name"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
