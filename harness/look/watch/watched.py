"""The snapshot that a side job's command works on: `harness.watched()`. Runs in the command of
`harness snapshots watch`.

    snapshot = harness.watched()
    snapshot.restore(model)                                   # the weights of that step
    snapshot.log(loss=evaluate(model), accuracy=0.9)          # facts of that step

The watcher holds the snapshot, so it is not pruned meanwhile. Metrics are recorded when the command
has ended with status 0; those of a failed try are dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.world import BadInput
from storage.errors import NotFound
from storage.snapshots.manifest import Manifest, Ref, SnapshotCorrupt
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Watched:
    """The snapshot that this command is for. `folder`: an empty folder of this command, deleted
    when it ends. `weights`: the folder to which `harness snapshots watch --weights` exported the
    weights; None: without that flag. `final`: this is the run's last. `tried`: 1 for the first
    try."""

    run_url: str
    name: str
    step: int
    epoch: int
    folder: Path
    weights: Path | None
    final: bool
    tried: int
    metrics: Path | None  # the file that `log` writes; None for a snapshot returned by `newer`

    @property
    def manifest(self) -> Manifest:
        """The snapshot's manifest: its contents, and the run's own data about it. Raises NotFound,
        StoreError."""
        return Snapshots(open_store(self.run_url)).load(Ref(self.epoch, self.step))

    def restore(self, model: nn.Module) -> nn.Module:
        """Load the weights into `model`, in place, and return it. Every byte is verified. Raises
        StateMismatch, SnapshotCorrupt, StoreError."""
        self._load({"model": model}, ["model"])
        return model

    def load(self, only: Collection[str] | None = None) -> Any:
        """Return the training state as it was saved, as new tensors on the CPU. `only`: the parts
        to load (["model"]); None: all. Raises StateMismatch, SnapshotCorrupt, StoreError."""
        return self._load(None, only)

    def export(self, folder: Path | None = None, dtype: str = "") -> Path:
        """Write the weights as safetensors to `folder` (None: a new one in `self.folder`), and
        return it. `dtype`: "bf16", "fp16" or "fp32" for floating-point tensors; "": as saved.
        Raises ValueError, SnapshotCorrupt, StoreError."""
        from storage.export.safetensors import export

        target = self.folder / "weights" if folder is None else folder
        export(Snapshots(open_store(self.run_url)), self.manifest, target, dtype=dtype)
        return target

    def newer(self) -> Watched | None:
        """Return the run's newest snapshot if it is newer than this one, else None. For a command
        that runs long and sometimes loads the newest weights. Nobody holds it, so restore it soon;
        if it was pruned meanwhile, restoring raises NoSnapshot. Raises StoreError."""
        snapshots = Snapshots(open_store(self.run_url))
        newest = max(snapshots.refs(), default=Ref(0, 0))
        if newest <= Ref(self.epoch, self.step):
            return None
        try:
            final = bool(snapshots.ended(snapshots.load(newest)))
        except (NotFound, SnapshotCorrupt):  # pruned a moment ago, or bad
            return None
        return replace(
            self, step=newest.step, epoch=newest.epoch, final=final, weights=None, metrics=None
        )

    def log(self, **metrics: float) -> None:
        """Record metrics of this step; `loss` of the watch `eval` is recorded as `eval/loss`. The
        last value of a name counts. Raises BadInput."""
        if self.metrics is None:
            raise BadInput(
                f"log: wanted the snapshot that this command was started for, found step "
                f"{self.step}, which `newer` gave; log to what harness.watched() returns"
            )
        try:
            told = {name: float(value) for name, value in metrics.items()}
        except (TypeError, ValueError) as e:
            raise BadInput(f"log: wanted numbers by name, found {metrics!r:.200}") from e
        with open(self.metrics, "a") as out:  # one write, so that several processes may log
            out.write(json.dumps(told) + "\n")

    def _load(self, into: Any, only: Collection[str] | None) -> Any:
        from storage.save_load import load

        return load(
            self.run_url, step=self.step, epoch=self.epoch, into=into, only=only, alone=True
        )


def watched() -> Watched:
    """Return the snapshot that this process was started for. Raises BadInput outside of
    `harness snapshots watch`."""
    said = {
        name: os.environ.get(f"HARNESS_WATCH_{name}", "")
        for name in ("RUN", "NAME", "STEP", "EPOCH", "FOLDER", "METRICS", "WEIGHTS", "FINAL", "TRY")
    }
    if not said["RUN"] or not said["STEP"]:
        raise BadInput(
            "harness.watched(): wanted a command that `harness snapshots watch` started, found "
            "none of its variables; start this script with `harness snapshots watch URL -- "
            "script.py`, or load a snapshot by hand: storage.load(URL, only=['model'])"
        )
    return Watched(
        run_url=said["RUN"],
        name=said["NAME"],
        step=int(said["STEP"]),
        epoch=int(said["EPOCH"]),
        folder=Path(said["FOLDER"]),
        weights=Path(said["WEIGHTS"]) if said["WEIGHTS"] else None,
        final=bool(said["FINAL"]),
        tried=int(said["TRY"] or 1),
        metrics=Path(said["METRICS"]),
    )
