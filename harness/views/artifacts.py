"""Alerts and artifacts of a batch of the stream, as W&B is told of them.

Snapshots become reference artifacts: W&B knows of each where it lies, at which step, and from which
data it came; its bytes stay in the bucket. Aliases: `latest`, `best` (the first one after the
lowest validation loss), `step-N`. What was pruned since is not told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.bucket.alerts import CRITICAL, INFO, Alert
from harness.bucket.streamed import BatchHeader
from harness.core.values import canonical, digest
from harness.views.describe import place_of
from harness.views.plugins import RunInfo
from storage.manifest import Ref
from storage.objects import ObjectStore
from storage.snapshot_keys import manifest_key
from storage.snapshots import Snapshots

WandbAct = Callable[[Any, Any], None]  # of the module wandb, and the run


def acts_of(store: ObjectStore, info: RunInfo, header: BatchHeader) -> list[WandbAct]:
    """What is to be done for this batch, once."""
    acts: list[WandbAct] = []
    if header.number == 0:
        acts.append(_dataset(info))
    acts += [_alert(alert) for alert in header.told_alerts()]
    if header.snapshots:
        there = set(Snapshots(store).refs())
        for name in header.snapshots:
            if (ref := Ref.parse(name)) in there:
                acts.append(_snapshot(store, info, ref, name == header.best_snapshot))
    return acts


def _alert(alert: Alert) -> WandbAct:
    def alert_act(api: Any, run: Any) -> None:
        level = {INFO: "INFO", CRITICAL: "ERROR"}.get(alert.severity, "WARN")
        run.alert(title=alert.title, text=alert.text, level=level)

    return alert_act


def _dataset(info: RunInfo) -> WandbAct:
    """What the run reads: its fingerprint, not its place, which only the script knows."""

    def dataset_act(api: Any, run: Any) -> None:
        said = {k: info.identity.get(k) for k in ("data", "samples", "seed", "shuffle")}
        name = digest(canonical(said))[:16]
        artifact = api.Artifact(f"dataset-{name}", "dataset", metadata=said)
        artifact.add_reference(f"fingerprint://{name}", name="fingerprint", checksum=False)
        run.use_artifact(artifact)

    return dataset_act


def _snapshot(store: ObjectStore, info: RunInfo, ref: Ref, best: bool) -> WandbAct:
    def snapshot_act(api: Any, run: Any) -> None:
        artifact = api.Artifact(
            f"snapshot-{info.id}", "model", metadata={"step": ref.step, "epoch": ref.epoch}
        )
        where = f"{place_of(store.url)}/{manifest_key(ref)}"
        try:
            artifact.add_reference(where, name="manifest", checksum=False)
        except Exception:  # the cloud's own library is missing here: W&B shows the URL all the same
            artifact.add_reference(f"bucket+{where}", name="manifest", checksum=False)
        run.log_artifact(artifact, aliases=[f"step-{ref.step}", *(["best"] if best else [])])

    return snapshot_act
