"""The whole stream as one offline run of W&B, written by wandb's own client, for `wandb sync`.

One folder, so nothing depends on the order in which folders are synchronised. `harness sync URL`
is the better way: it asks W&B what it has.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.bucket.streamed import EVENT
from harness.core.values import canonical, digest
from harness.views.plugins import RunInfo
from harness.views.stream import newest_header, whole
from harness.views.wandb_run import EXIT_CODES, SETTINGS, define_axes, define_side_job
from storage.objects import ObjectStore


def write_offline(
    store: ObjectStore, info: RunInfo, api: Any, about: Mapping[str, Any], folder: Path
) -> list[Path]:
    """Into `folder`/offline-run-*, without the client's logs. Returns the files; none: there is
    no stream. `api`: the module wandb. Raises StoreError, BadInput."""
    newest = newest_header(store)
    if newest is None:
        return []
    with tempfile.TemporaryDirectory(
        prefix="harness-wandb-", ignore_cleanup_errors=True
    ) as temporary:
        settings = api.Settings(**SETTINGS, x_update_finish_state=bool(newest.end))
        run = api.init(
            mode="offline",
            id=digest(canonical(["rows", info.id]))[:16],
            dir=temporary,
            resume="allow",
            settings=settings,
            **about,
        )
        define_axes(run)
        for row in whole(store):
            if row.kind == EVENT:
                define_side_job(run, row)
            run.log({**row.values, "_timestamp": row.t}, step=row.number, commit=True)
        for name, (value, step) in newest.best.items():
            run.summary.update({f"best/{name}": value, f"best/{name}_step": step})
        run.finish(exit_code=EXIT_CODES.get(newest.end, 0))
        # Offline, finish() returns before the client's own process has written the file
        api.teardown()
        return _kept(Path(temporary), folder)


def _kept(temporary: Path, folder: Path) -> list[Path]:
    """The run's folder without its logs, which hold this machine's paths and settings."""
    found: list[Path] = []
    for directory in (temporary / "wandb").glob("offline-run-*"):
        for path in sorted(directory.rglob("*")):
            inside = path.relative_to(directory)
            if path.is_file() and inside.parts[0] in ("files", path.name):
                target = folder / directory.name / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
                found.append(target)
    return found
