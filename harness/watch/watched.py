"""What a side job's command is given: `harness.watched()`. Runs in the command of `harness watch`.

    snapshot = harness.watched()
    snapshot.restore(model)                                   # the weights of that step
    snapshot.log(loss=evaluate(model), accuracy=0.9)          # facts of that step

Its watcher holds the snapshot, so nobody prunes it meanwhile. Numbers are recorded when the command
has ended with status 0; those of a try that failed count for nothing.
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
from storage.manifest import Manifest, Ref, SnapshotCorrupt
from storage.opening import open_store
from storage.snapshots import Snapshots

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Watched:
    """The snapshot that this command is for. `folder`: empty, this command's own, and deleted at
    its end. `weights`: where `harness watch --weights` has put them; None: it was not asked to.
    `final`: the run has ended with this one. `tried`: 1 for the first time."""

    run_url: str
    name: str
    step: int
    epoch: int
    folder: Path
    weights: Path | None
    final: bool
    tried: int
    metrics: Path | None  # where `log` writes; None: of a snapshot that `newer` gave

    @property
    def manifest(self) -> Manifest:
        """What the snapshot consists of, and the run's own data about it. Raises NotFound,
        StoreError."""
        return Snapshots(open_store(self.run_url)).load(Ref(self.epoch, self.step))

    def restore(self, model: nn.Module) -> nn.Module:
        """Load its weights into `model`, in place, every byte verified. Raises StateMismatch,
        SnapshotCorrupt, StoreError."""
        self._load({"model": model}, ["model"])
        return model

    def load(self, only: Collection[str] | None = None) -> Any:
        """The whole training state as it was saved, or these parts of it (["model"]), as new
        tensors on the CPU. Raises StateMismatch, SnapshotCorrupt, StoreError."""
        return self._load(None, only)

    def export(self, folder: Path | None = None, dtype: str = "") -> Path:
        """Write its weights as safetensors; returns the folder. `dtype`: "bf16", "fp16", "fp32" for
        floating-point tensors, "": as saved. Raises ValueError, SnapshotCorrupt, StoreError."""
        from storage.export import export

        target = self.folder / "weights" if folder is None else folder
        export(Snapshots(open_store(self.run_url)), self.manifest, target, dtype=dtype)
        return target

    def newer(self) -> Watched | None:
        """The run's newest snapshot, if it is newer than this one: for a command that lives long
        and wants the newest weights now and then. Nobody holds it, so restore it soon; what was
        pruned meanwhile raises NoSnapshot there. Raises StoreError."""
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
        """Numbers of this step; `loss` of the watch `eval` is told as `eval/loss`. Of a name that
        is told again the last counts. Raises BadInput."""
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
        from storage.state import load

        return load(
            self.run_url, step=self.step, epoch=self.epoch, into=into, only=only, alone=True
        )


def watched() -> Watched:
    """The snapshot that this process is started for. Raises BadInput outside of `harness watch`."""
    said = {
        name: os.environ.get(f"HARNESS_WATCH_{name}", "")
        for name in ("RUN", "NAME", "STEP", "EPOCH", "FOLDER", "METRICS", "WEIGHTS", "FINAL", "TRY")
    }
    if not said["RUN"] or not said["STEP"]:
        raise BadInput(
            "harness.watched(): wanted a command that `harness watch` started, found none of its "
            "variables; start this script with `harness watch URL -- script.py`, or load a "
            "snapshot by hand: storage.load(URL, only=['model'])"
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
