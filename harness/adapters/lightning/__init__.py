"""Lightning for scripts that ask for it by name: a strategy for its Trainer, and an elastic Fabric.
Runs in the worker.

    from harness.adapters.lightning import elastic, Fabric

    trainer = lightning.Trainer(strategy=elastic(), max_epochs=3)
    fabric = Fabric(accumulate=4)
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

from harness.adapters import framework_claim
from harness.adapters.lightning import fabric, patch
from harness.adapters.lightning.fabric_loop import FabricSteps
from harness.adapters.lightning.loop import FABRIC, LightningCopy
from harness.adapters.lightning.strategy import make_strategy
from harness.core.world import BadInput
from harness.worker.batches import rng_state


def _installed() -> str:
    """Return the copy of Lightning that the script uses, or one that is there. Raises BadInput."""
    for root in (*(name for name in FABRIC if name in sys.modules), *FABRIC):
        if importlib.util.find_spec(root.partition(".")[0]) is not None:
            return root
    raise BadInput("wanted lightning or pytorch_lightning, found neither; install one of them")


def elastic(package: str = "") -> Any:
    """Return a strategy for `Trainer(strategy=...)`. Every later world keeps the batch that the
    script had in its first one, and resumes from the run's snapshots (docs/trainers/lightning.md).
    `package`: "lightning.pytorch" or "pytorch_lightning"; "": the one that the script has imported.
    Outside a node agent's or torchrun's environment it is an ordinary single process. Raises
    BadInput for what cannot be guaranteed."""
    root = package or _installed()
    patch.patch(importlib.import_module(root))
    with rng_state.kept():  # attaching seeds the generators, which the script has already seeded
        run = framework_claim.claim("lightning", by_name=True)
    assert run is not None
    copy = LightningCopy(root)
    copy.check()
    return make_strategy(run, copy)


_fabric = importlib.import_module(FABRIC[_installed()])
fabric.patch(_fabric)


class Fabric(_fabric.Fabric):  # type: ignore[misc, name-defined]
    """Lightning's Fabric with the same arguments, and `accumulate`: iterations of the training loop
    per optimizer step. The loop calls `optimizer.step()` in each iteration; it acts in the last
    one."""

    def __init__(self, *args: Any, accumulate: int = 1, **kwargs: Any):
        if accumulate < 1:
            raise BadInput(f"Fabric(accumulate={accumulate}): wanted at least 1")
        fabric.begin(by_name=True)
        super().__init__(*args, **kwargs)
        self._steps.accumulation = accumulate

    @property
    def _steps(self) -> FabricSteps:
        steps = fabric.driver()
        assert steps is not None
        return steps

    def keep(self, **things: Any) -> None:
        """Add objects with `state_dict` and `load_state_dict`, by name, to the training's state.
        Call this before the training loop; they are loaded when that begins."""
        self._steps.parts.kept |= things

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the remaining epochs of `count`. Work that follows the training loader within an
        epoch (a validation) is not repeated after a resume."""
        steps = self._steps
        steps.resume()
        while steps.count.epoch < count:
            steps.rest()
            yield steps.count.epoch
        steps.finished()


__all__ = ["Fabric", "elastic"]
