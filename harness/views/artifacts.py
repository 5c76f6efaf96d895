"""Alerts and artifacts of a batch of the stream, as W&B is told of them.

Snapshots become reference artifacts: W&B knows of each where it lies, at which step, and from which
data it came; its bytes stay in the bucket. Aliases: `latest`, `best` (the first one after the
lowest validation loss), `step-N`. What was pruned since is not told. What was validated by then is
an artifact of type "evaluation" that names its snapshot. An export (`harness snapshots export`) is
one that comes from its snapshot, through a run of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tenacity import Retrying, stop_after_attempt, wait_fixed

from harness.bucket.alerts import CRITICAL, INFO, Alert
from harness.bucket.streamed import Batch, ExportTold, StreamRow
from harness.core.values import canonical, digest
from harness.views.describe import place_of
from harness.views.plugins import RunInfo
from storage.manifest import Ref
from storage.objects import ObjectStore
from storage.snapshot_keys import manifest_key
from storage.snapshots import Snapshots

WandbAct = Callable[[Any, Any], None]  # of the module wandb, and the run
TRIES = 5  # to find a snapshot at W&B
Companion = Callable[[str, str], Any]  # opens a run beside it; of its job type, and a name


def acts_of(
    store: ObjectStore, info: RunInfo, batch: Batch, companion: Companion
) -> list[WandbAct]:
    """What is to be done for this batch, once."""
    header, rows = batch
    acts: list[WandbAct] = []
    if header.number == 0:
        acts.append(_dataset(info))
    acts += [_alert(alert) for alert in header.told_alerts()]
    if header.snapshots:
        there = set(Snapshots(store).refs())
        validated = [row for row in rows if any(name.startswith("val/") for name in row.values)]
        for name in header.snapshots:
            if (ref := Ref.parse(name)) in there:
                best = name == header.best_snapshot
                acts.append(_snapshot(store, info, ref, best))
                if before := [row for row in validated if row.step <= ref.step]:
                    acts.append(_evaluation(info, ref, best, before[-1]))
    acts += [_export(info, made, companion) for made in header.told_exports()]
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
        metadata = {"step": ref.step, "epoch": ref.epoch}
        artifact = api.Artifact(f"snapshot-{info.id}", "model", metadata=metadata)
        where = f"{place_of(store.url)}/{manifest_key(ref)}"
        try:
            artifact.add_reference(where, name="manifest", checksum=False)
        except Exception:  # the cloud's own library is missing here: W&B shows the URL all the same
            artifact.add_reference(f"bucket+{where}", name="manifest", checksum=False)
        run.log_artifact(artifact, aliases=_aliases(ref, best))

    return snapshot_act


def _aliases(ref: Ref, best: bool) -> list[str]:
    return [f"step-{ref.step}", *(["best"] if best else [])]


def _evaluation(info: RunInfo, ref: Ref, best: bool, row: StreamRow) -> WandbAct:
    """What was validated last before the snapshot, and at which step."""
    found = {name: v for name, v in row.values.items() if name.startswith("val/")}

    def evaluation_act(api: Any, run: Any) -> None:
        of = f"snapshot-{info.id}:step-{ref.step}"
        said = {"step": ref.step, "validated_step": row.step, "snapshot": of, **found}
        artifact = api.Artifact(f"evaluation-{info.id}", "evaluation", metadata=said)
        where = f"evaluation://{info.id}/{ref.name}/{digest(canonical(said))[:16]}"
        artifact.add_reference(where, name="metrics", checksum=False)
        run.log_artifact(artifact, aliases=_aliases(ref, best))

    return evaluation_act


def _export(info: RunInfo, made: ExportTold, companion: Companion) -> WandbAct:
    """A run of its own that used the snapshot: that is how W&B knows what came from what."""
    ref = Ref(made.epoch, made.step)

    def export_act(api: Any, run: Any) -> None:
        exporting = companion("export", f"export-{made.id}")
        try:
            name = f"{exporting.entity}/{exporting.project}/snapshot-{info.id}:step-{ref.step}"
            # by its name: one that is made again here would become the latest. It may be on its way
            retrying = Retrying(stop=stop_after_attempt(TRIES), wait=wait_fixed(2), reraise=True)
            retrying(exporting.use_artifact, name)
            said = {k: v for k, v in dataclasses.asdict(made).items() if k != "id"}
            artifact = api.Artifact(f"export-{info.id}", "model", metadata=said)
            artifact.add_reference(f"export://{made.id}", name="weights", checksum=False)
            exporting.log_artifact(artifact, aliases=[f"step-{ref.step}"])
        finally:
            exporting.finish()

    return export_act
