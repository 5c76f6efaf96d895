"""The data for trackers besides numbers: a run's description, and a batch's alerts and artifacts in
the form that W&B takes.

Snapshots become reference artifacts: W&B knows where each lies, at which step, and from which data
it came; its bytes stay in the bucket. Aliases: `latest`, `best` (the first snapshot after the
lowest validation loss), `step-N`. Snapshots that were pruned meanwhile are left out. The validation
before a snapshot becomes an artifact of type "evaluation" that names the snapshot. An export
(`harness snapshots export`) is an artifact that comes from its snapshot, through a run of its own.
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tenacity import Retrying, stop_after_attempt, wait_fixed

from harness.bucket.setup_objects import newest_setup
from harness.core import facts as f
from harness.core.facts import Stamped
from harness.core.masking import MASK
from harness.core.setup_record import PACKAGES, Setup, flags_of, script_of
from harness.look.alerts.alert_log import CRITICAL, INFO, Alert
from harness.look.reports.setup_report import read_logbook
from harness.look.trackers.stream_objects import (
    Batch,
    ExportRow,
    StreamRow,
)
from harness.look.trackers.tracker_registry import RunInfo
from storage.canonical_json import canonical, digest
from storage.snapshots.manifest import Ref
from storage.snapshots.snapshot_keys import manifest_key
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore

# The description of a run for trackers, besides its numbers: configuration, environment, tags.

MOST_NOTES = 8000  # letters


def about_setup(setup: Setup) -> dict[str, Any]:
    """Return a run's setup as configuration; "config" holds the argument of
    `attach(config=...)`."""
    git = setup.git
    about: dict[str, Any] = {
        "script": script_of(setup.argv),
        "flags": {
            name.lstrip("-"): _value(text)
            for name, text in flags_of(setup.argv).items()
            if MASK not in text
        },
        "environment": {**setup.software, **setup.hardware, **setup.environment},
        "packages": {name: setup.packages[name] for name in PACKAGES if name in setup.packages},
        **setup.people,
    }
    if git.commit:
        about["git"] = {
            "commit": git.commit,
            "branch": git.branch,
            "remote": git.remote,
            "changed": bool(git.diff),
            **({"diff_sha256": git.diff} if git.diff else {}),
        }
    return {**about, "config": setup.config}


def _value(text: str) -> int | float | str | bool:
    """Parse a flag's value; a flag without a value is True."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return (bare_url(text)[:200] if "://" in text else text[:200]) or True


def notes_of(store: ObjectStore) -> str:
    """Return the run's purpose and logbook as a tracker's notes; only the end if they are long.

    Raises StoreError.
    """
    text = "\n".join(read_logbook(store).lines())
    return text if len(text) <= MOST_NOTES else f"...{text[-MOST_NOTES:]}"


def bare_url(url: str) -> str:
    """Return a URL without parts that could be secret: no user, no query."""
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", ""))


def left_by_node(store: ObjectStore) -> dict[str, Any]:
    """Return the run's setup as configuration; {} if none was recorded. Raises StoreError."""
    setup = newest_setup(store)
    return {} if setup is None else about_setup(setup)


def config_of(
    info: RunInfo, facts: Sequence[Stamped], machine: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the configuration: flat where users filter by it, nested where they look it up. Values
    from `attach(config=...)` are flat; those that would hide one of ours stay under "config"."""
    session = _last(facts, f.SessionStarted)
    asked = _last(facts, f.RunAsked)
    found: dict[str, Any] = dict(info.identity)
    if session:
        found |= {
            "total_steps": session.total_steps,
            "parallel": session.parallel,
            "device": session.device,
            "reduce": session.reduce,
        }
    if asked:
        found["launch"] = {
            "task": asked.task,
            "min_nodes": asked.min_nodes,
            "max_nodes": asked.max_nodes,
            "policy": asked.policy,
            "market": asked.market,
            "budget_usd": asked.budget_usd,
        }
    agents = [s.fact for s in facts if isinstance(s.fact, f.AgentStarted)]
    found["hardware"] = sorted({a.accelerator for a in agents if a.accelerator})
    found = dict(machine) | found
    mine = found.pop("config", None)
    given: dict[str, Any] = mine if isinstance(mine, dict) else {}
    hidden = {name: value for name, value in given.items() if found.get(name, value) != value}
    return {**given, **found, **({"config": hidden} if hidden else {})}


def tags_of(facts: Sequence[Stamped]) -> list[str]:
    """Return "spot" or "on-demand", and the clouds of the run's nodes."""
    offers = [s.fact.offer for s in facts if isinstance(s.fact, f.AttemptIntended)]
    clouds = {str(o.get("name", "")).partition("/")[0] for o in offers} - {""}
    kinds = {"spot" if o.get("spot", True) else "on-demand" for o in offers}
    return sorted(kinds) + sorted(clouds)


def _last(facts: Sequence[Stamped], kind: type[Any]) -> Any:
    return next((s.fact for s in reversed(facts) if isinstance(s.fact, kind)), None)


WandbAct = Callable[[Any, Any], None]  # arguments: the module wandb, and the run
TRIES = 5  # to find a snapshot at W&B
Companion = Callable[[str, str], Any]  # opens a second run, given its job type and a name


def acts_of(
    store: ObjectStore, info: RunInfo, batch: Batch, companion: Companion
) -> list[WandbAct]:
    """Return the calls to make for this batch, once each."""
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
    """Declare the run's input: a fingerprint of the data, whose place only the script knows."""

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
        where = f"{bare_url(store.url)}/{manifest_key(ref)}"
        try:
            artifact.add_reference(where, name="manifest", checksum=False)
        except Exception:  # the cloud's own library is missing: W&B shows the URL nevertheless
            artifact.add_reference(f"bucket+{where}", name="manifest", checksum=False)
        run.log_artifact(artifact, aliases=_aliases(ref, best))

    return snapshot_act


def _aliases(ref: Ref, best: bool) -> list[str]:
    return [f"step-{ref.step}", *(["best"] if best else [])]


def _evaluation(info: RunInfo, ref: Ref, best: bool, row: StreamRow) -> WandbAct:
    """Publish the last validation before the snapshot, with its step."""
    found = {name: v for name, v in row.values.items() if name.startswith("val/")}

    def evaluation_act(api: Any, run: Any) -> None:
        of = f"snapshot-{info.id}:step-{ref.step}"
        said = {"step": ref.step, "validated_step": row.step, "snapshot": of, **found}
        artifact = api.Artifact(f"evaluation-{info.id}", "evaluation", metadata=said)
        where = f"evaluation://{info.id}/{ref.name}/{digest(canonical(said))[:16]}"
        artifact.add_reference(where, name="metrics", checksum=False)
        run.log_artifact(artifact, aliases=_aliases(ref, best))

    return evaluation_act


def _export(info: RunInfo, made: ExportRow, companion: Companion) -> WandbAct:
    """Publish an export through a run that used the snapshot; W&B derives lineage from that."""
    ref = Ref(made.epoch, made.step)

    def export_act(api: Any, run: Any) -> None:
        exporting = companion("export", f"export-{made.id}")
        try:
            name = f"{exporting.entity}/{exporting.project}/snapshot-{info.id}:step-{ref.step}"
            # use the name: making the artifact again would move `latest`. It may still be uploading
            retrying = Retrying(stop=stop_after_attempt(TRIES), wait=wait_fixed(2), reraise=True)
            retrying(exporting.use_artifact, name)
            said = {k: v for k, v in dataclasses.asdict(made).items() if k != "id"}
            artifact = api.Artifact(f"export-{info.id}", "model", metadata=said)
            artifact.add_reference(f"export://{made.id}", name="weights", checksum=False)
            exporting.log_artifact(artifact, aliases=[f"step-{ref.step}"])
        finally:
            exporting.finish()

    return export_act
