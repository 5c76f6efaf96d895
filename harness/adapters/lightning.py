"""Lightning for who asks for it by name: a strategy for its Trainer, and an elastic Fabric. Runs in
the worker.

    from harness.adapters.lightning import elastic, Fabric

    trainer = lightning.Trainer(strategy=elastic(), max_epochs=3)
    fabric = Fabric(accumulate=4)
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

from harness.adapters import claims, fabric, lightning_trainer
from harness.adapters.fabric_loop import FabricSteps
from harness.adapters.lightning_copy import FABRIC, LightningCopy
from harness.adapters.lightning_strategy import make_strategy
from harness.core.world import BadInput
from harness.worker import chance


def _installed() -> str:
    """The copy that the script uses, or the one that is there. Raises BadInput."""
    for root in (*(name for name in FABRIC if name in sys.modules), *FABRIC):
        if importlib.util.find_spec(root.partition(".")[0]) is not None:
            return root
    raise BadInput("wanted lightning or pytorch_lightning, found neither; install one of them")


def elastic(package: str = "") -> Any:
    """A strategy for `Trainer(strategy=...)`: the script's batch is that of its first world on any
    later one, and it resumes from the run's snapshots (docs/trainers/lightning.md). `package`:
    "lightning.pytorch" or "pytorch_lightning"; "": the one that the script has imported. Without an
    agent's or torchrun's environment it is an ordinary single process. Raises BadInput for what
    cannot be promised."""
    root = package or _installed()
    lightning_trainer.patch(importlib.import_module(root))
    with chance.kept():  # attaching seeds; the script has seeded for itself
        run = claims.claim("lightning", by_name=True)
    assert run is not None
    copy = LightningCopy(root)
    copy.check()
    return make_strategy(run, copy)


_fabric = importlib.import_module(FABRIC[_installed()])
fabric.patch(_fabric)


class Fabric(_fabric.Fabric):  # type: ignore[misc, name-defined]
    """As Lightning's, with the same arguments, and `accumulate`: iterations of the training loop
    for each optimizer step. The loop calls `optimizer.step()` in each of them; it counts in the
    last one."""

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
        """More of the training's state, by name: objects with `state_dict` and `load_state_dict`.
        Before the training loop; they are loaded when that begins."""
        self._steps.parts.kept |= things

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are still to do, of so many. What follows the training loader within one
        (a validation) is not repeated after a resume."""
        steps = self._steps
        steps.resume()
        while steps.count.epoch < count:
            steps.rest()
            yield steps.count.epoch
        steps.finished()


__all__ = ["Fabric", "elastic"]
