"""An elastic Accelerator, for scripts that ask for it by name. Runs in the worker.

from harness.adapters.accelerate import Accelerator     # not: from accelerate import ...
"""

from __future__ import annotations

import sys
from typing import Any

import accelerate as _accelerate

from harness.adapters import accelerate_patch

accelerate_patch.patch(sys.modules["accelerate.accelerator"])


class Accelerator(_accelerate.Accelerator):  # type: ignore[misc]
    """As Accelerate's, with the same arguments. The training loop's batch is that of the first
    world on any later one, and it resumes from the run's snapshots (docs/trainers/accelerate.md).
    Without an agent's or torchrun's environment it is an ordinary single process. Raises BadInput
    for what cannot be promised."""

    def __init__(self, *args: Any, **kwargs: Any):
        accelerate_patch.begin(by_name=True)
        super().__init__(*args, **kwargs)


__all__ = ["Accelerator"]
