"""An elastic Accelerator, for scripts that ask for it by name. Runs in the worker.

from harness.adapters.accelerate import Accelerator     # not: from accelerate import ...
"""

from __future__ import annotations

import sys
from typing import Any

import accelerate as _accelerate

from harness.adapters.accelerate import patch

patch.patch(sys.modules["accelerate.accelerator"])


class Accelerator(_accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's class with the same arguments, made elastic. Every later world keeps the batch
    that the training loop had in the first world, and resumes from the run's snapshots
    (docs/trainers/accelerate.md). Outside a node agent's or torchrun's environment it is an
    ordinary single process. Raises BadInput for what cannot be guaranteed."""

    def __init__(self, *args: Any, **kwargs: Any):
        patch.begin(by_name=True)
        super().__init__(*args, **kwargs)


__all__ = ["Accelerator"]
