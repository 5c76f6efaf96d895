"""`harness sync`, `dashboards`: trackers from a person's machine."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.cli.common import DONE, FAILED, existing_store
from harness.core.config import flag, positional
from harness.core.world import BadInput


@dataclass(frozen=True)
class SyncFlags:
    url: str = positional("URL of the run")
    to: str = flag(
        "wandb", "trackers to bring up to date: wandb, mlflow, tensorboard, comma-separated"
    )
    out: str = flag(
        "",
        "instead write what they would be told into this folder (an offline run for `wandb sync`, "
        "event files, JSON lines)",
    )
    patience_s: float = flag(600.0, "how long to try")


def sync(flags: SyncFlags) -> int:
    """Tell W&B (or MLflow, TensorBoard) all that is committed; again and again without doubling."""
    import logging

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # a variable that is set to nothing is not set; to wandb it is a value, and a wrong one
    for name in [n for n, value in os.environ.items() if n.startswith("WANDB_") and not value]:
        del os.environ[name]
    os.environ.pop("WANDB_SERVICE", None)  # it would not end with our teardown
    store = existing_store(flags.url)
    if flags.out:
        from harness.views.telling import sync as tell
        from harness.views.trackers import collect, collect_wandb

        folder = Path(flags.out)
        tell(store, [], os.environ, 0.0)
        for path in [*collect(store, folder), *collect_wandb(store, folder / "wandb", os.environ)]:
            print(path)
        return DONE
    from harness.views.plugins import Account, Place, build
    from harness.views.telling import sync as tell

    places = [p for p in build(flags.to, os.environ) if isinstance(p, (Account, Place))]
    if len(places) != len(flags.to.split(",")):
        raise BadInput(f"--to {flags.to}: wanted wandb, mlflow or tensorboard, comma-separated")
    left = tell(store, places, os.environ, flags.patience_s)
    for place in places:
        print(f"{place.name}: {'not all is told yet' if place.name in left else 'up to date'}")
    return FAILED if left else DONE


@dataclass(frozen=True)
class DashboardsFlags:
    project: str = flag("", "project of W&B (default: WANDB_PROJECT, else spotharness)")
    entity: str = flag("", "user or team of W&B (default: WANDB_ENTITY, else the key's own)")
    out: str = flag("", "write the definition as JSON into this file; asks no network")


def dashboards(flags: DashboardsFlags) -> int:
    """Make W&B's workspace and report for a project, or write their definition as JSON."""
    import importlib.util

    if importlib.util.find_spec("wandb_workspaces") is None:
        raise BadInput(
            "dashboards: package wandb-workspaces is not installed here; `pip install "
            "wandb-workspaces`"
        )
    from harness.views import dashboards as made
    from harness.views.wandb_api import viewer_of, wandb_account

    project = flags.project or os.environ.get("WANDB_PROJECT") or "spotharness"
    entity = flags.entity or os.environ.get("WANDB_ENTITY") or ""
    if flags.out:
        text = json.dumps(made.definition(project, entity), indent=1, sort_keys=True)
        Path(flags.out).write_text(text + "\n")
        print(flags.out)
        return DONE
    account = wandb_account({**os.environ, "WANDB_PROJECT": project, "WANDB_ENTITY": entity})
    if not account.online:
        raise BadInput(
            "dashboards: wanted a key of W&B, found none, or WANDB_MODE=offline; set "
            "WANDB_API_KEY, or name --out FILE"
        )
    for url in made.save(account, entity or viewer_of(account)):
        print(url)
    return DONE
