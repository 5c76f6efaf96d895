"""A copy of Lightning: it is published as `lightning.pytorch` and as `pytorch_lightning`, which
share no class. Runs in the worker."""

from __future__ import annotations

import importlib
from typing import Any

from harness.adapters.claims import refuse_unlike

FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
# what is put in the place of Lightning's own, or called: module, function, its parameters
KNOWN = (
    ("trainer.call", "_interrupt", ("trainer", "exception")),
    ("loops.fit_loop", "_FitLoop.run", ("self",)),
    ("loops.fit_loop", "_FitLoop.setup_data", ("self",)),
    ("loops.fit_loop", "_FitLoop.on_advance_end", ("self",)),
    ("loops.training_epoch_loop", "_TrainingEpochLoop.reset", ("self",)),
    ("loops.training_epoch_loop", "_TrainingEpochLoop.on_advance_end", ("self", "data_fetcher")),
    ("loops.training_epoch_loop", "_TrainingEpochLoop._should_accumulate", ("self",)),
    (
        "loops.optimization.automatic",
        "_AutomaticOptimization._make_closure",
        ("self", "kwargs", "optimizer", "batch_idx"),
    ),
    (
        "loops.optimization.automatic",
        "_AutomaticOptimization._make_zero_grad_fn",
        ("self", "batch_idx", "optimizer"),
    ),
    ("loops.optimization.automatic", "_AutomaticOptimization._training_step", ("self", "kwargs")),
    ("loops.optimization.manual", "_ManualOptimization.advance", ("self", "kwargs")),
    (
        "core.module",
        "LightningModule._on_before_batch_transfer",
        ("self", "batch", "dataloader_idx"),
    ),
    (
        "trainer.connectors.signal_connector",
        "_SignalConnector.register_signal_handlers",
        ("self",),
    ),
    (
        "trainer.connectors.checkpoint_connector",
        "_CheckpointConnector.dump_checkpoint",
        ("self", "weights_only"),
    ),
    (
        "trainer.connectors.logger_connector.logger_connector",
        "_LoggerConnector.epoch_end_reached",
        ("self",),
    ),
    (
        "trainer.connectors.logger_connector.logger_connector",
        "_LoggerConnector.update_eval_epoch_metrics",
        ("self",),
    ),
)


class LightningCopy:
    """`root`: "lightning.pytorch" or "pytorch_lightning"."""

    def __init__(self, root: str):
        self.root = root

    def part(self, name: str) -> Any:
        """A module of it, such as "loops.fit_loop"."""
        return importlib.import_module(f"{self.root}.{name}")

    def fabric(self, name: str) -> Any:
        """A module of the Fabric that belongs to it."""
        return importlib.import_module(f"{FABRIC[self.root]}.{name}")

    def found(self, module: str, name: str) -> Any:
        """A function, or a method as "Class.method"."""
        thing = self.part(module)
        for part in name.split("."):
            thing = getattr(thing, part, None)
        return thing

    @property
    def version(self) -> str:
        return f"{self.root} {importlib.import_module(self.root).__version__}"

    def check(self) -> None:
        """Raises BadInput unless this version is one that the adapter knows."""
        for module, name, parameters in KNOWN:
            refuse_unlike(name, self.found(module, name), parameters, self.version)
