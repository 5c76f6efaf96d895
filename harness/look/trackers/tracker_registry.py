"""Trackers by name: W&B, TensorBoard, MLflow, JSON lines, or any function."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.bucket.layout import IDENTITY, Identity
from harness.core import step_records as rec
from harness.core.user_functions import imported
from harness.core.world import BadInput
from harness.look.trackers.wandb_api import Account, wandb_account, wandb_key, wandb_online
from storage.canonical_json import BadObject, canonical, digest
from storage.stores.objects import ObjectStore


@dataclass(frozen=True)
class RunInfo:
    """The facts about the run that a tracker may know. `id` is the same for every attempt,
    publisher and machine."""

    name: str
    id: str
    identity: dict[str, Any]

    @classmethod
    def of(cls, store: ObjectStore) -> RunInfo:
        """Read it from the bucket. Raise NotFound while the run has not begun, BadInput if its
        identity cannot be read."""
        try:
            identity = Identity.decode(store.get(IDENTITY)).body
        except BadObject as e:
            raise BadInput(
                f"{store.url}/run.json: wanted the run's identity as JSON, found something else "
                f"({e})"
            ) from e
        # No URL leaves this machine, since some carry credentials. A hash of it distinguishes two
        # runs of the same identity.
        return cls(
            store.url.rpartition("/")[2] or "run",
            digest(canonical([store.url, rec.genesis(identity)]))[:16],
            identity,
        )


__all__ = ["Account", "Place", "build", "metrics", "wandb_key", "wandb_online"]

KNOWN = "wandb, tensorboard, mlflow, jsonl or package.module:function"
StepRecords = Sequence[rec.StepRecord]
PlugIn = Callable[[StepRecords, RunInfo], None]


class Tracker(Protocol):
    """A tracker publishes one batch of steps, either all of it or it raises."""

    @property
    def name(self) -> str: ...

    @property
    def outside(self) -> bool:
        """True if it acts outside of the bucket, so that only one publisher may use it at once."""

    def publish(self, records: StepRecords, info: RunInfo, folder: Path) -> None:
        """Publish the records. `folder` is empty and private; the files left in it are stored in
        the bucket with the batch."""


@dataclass(frozen=True)
class Place:
    """A tracker that renders the stream: "tensorboard" (event files in the bucket) or "mlflow"
    (`where`: its tracking URI; "" means none: the stream is kept for `harness runs sync`)."""

    name: str
    where: str = ""


# ---- what is published ---------------------------------------------------------------------------
def metrics(r: rec.StepRecord) -> dict[str, float]:
    """Return the numbers of one step under the names that all trackers use."""
    others = {k: v for k, v in r.metrics.items() if k != "grad_norm"}
    norm = {"train/grad_norm": r.metrics["grad_norm"]} if "grad_norm" in r.metrics else {}
    return {
        "train/loss": r.loss,
        "train/lr": r.lr,
        **norm,
        "world": r.world,
        "accumulation": max(r.shares, default=0),
        "epoch": r.epoch,
        "samples_per_s": r.samples / r.dt if r.dt > 0 else 0.0,
        **({"phase": r.phase} if r.phase > 1 else {}),  # of the script's trainings
        **others,
    }


class Jsonl:
    """A tracker that writes one line of JSON per step."""

    name, outside = "jsonl", False

    def publish(self, records: StepRecords, info: RunInfo, folder: Path) -> None:
        lines = (json.dumps({"step": r.step, "t": r.t, **metrics(r)}) + "\n" for r in records)
        (folder / "metrics.jsonl").write_text("".join(lines))


@dataclass(frozen=True)
class Function:
    """A tracker that calls a user's `callable(records, run_info)`. After a crash it may get steps
    again; `run_info.id` and `step` together are the dedupe key."""

    name: str
    call: PlugIn
    outside: bool = True

    def publish(self, records: StepRecords, info: RunInfo, folder: Path) -> None:
        self.call(records, info)


def build(spec: str, environ: Mapping[str, str]) -> list[Tracker | Account | Place]:
    """Return the trackers that `spec` names ("wandb,jsonl,pkg.mod:function"). Raise BadInput if
    one is unknown or cannot work here."""
    names = [name.strip() for name in spec.split(",") if name.strip()]
    if not names:
        raise BadInput(f"no tracker: wanted {KNOWN}, comma-separated")
    return [_one(name, environ) for name in dict.fromkeys(names)]


def _one(name: str, environ: Mapping[str, str]) -> Tracker | Account | Place:
    if name == "jsonl":
        return Jsonl()
    if name == "tensorboard":
        _installed(name, "tensorboard", "torch")
        return Place(name)
    if name == "mlflow":
        _installed(name, "mlflow", package="mlflow-skinny")
        where = environ.get("MLFLOW_TRACKING_URI") or ""
        if where.startswith("file:") or (where and "://" not in where):
            raise BadInput(
                f"tracker mlflow: MLFLOW_TRACKING_URI is {where}; MLflow keeps no runs in folders "
                "any more: wanted sqlite:///FILE or a server's URL"
            )
        return Place(name, where)
    if name == "wandb":
        return wandb_account(environ)
    if ":" in name:
        call = imported("the tracker", name)
        if not callable(call):
            raise BadInput(
                f"tracker {name}: wanted a function of (records, run_info), found "
                f"{type(call).__name__}"
            )
        return Function(re.sub(r"[^A-Za-z0-9_.\-]", "-", name), call)
    raise BadInput(f"tracker {name!r} is not known; wanted {KNOWN}")


def _installed(name: str, *modules: str, package: str = "") -> None:
    if any(importlib.util.find_spec(module) is None for module in modules):
        raise BadInput(
            f"tracker {name}: package {' (and '.join(modules)}{')' * (len(modules) - 1)} is not "
            f"installed here; `pip install {package or modules[0]}`"
        )
