"""The adapter of transformers and TRL. `from harness.adapters.transformers import ElasticTrainer`
gives a script that asks for it by name an elastic Trainer.

The import hook imports modules of this package while transformers itself is being imported, and for
scripts that ask for nothing, so what is asked for by name (`by_name.py`) is loaded then only.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["ElasticMixin", "ElasticTrainer", "elastic"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.by_name"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
