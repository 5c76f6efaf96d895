"""`harness sync`, `dashboards`: trackers from a person's machine."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.common import DONE, FAILED, existing_store
from harness.core.config import flag, positional
from harness.core.given_files import output_file, output_folder
from harness.core.world import BadInput
from harness.node.processes import die_with_parent

if TYPE_CHECKING:
    from harness.clouds.tasks import Task

FINISH_S = 60.0  # for the publisher beside a controller, when the run has ended


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
        check=output_folder,
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
        from harness.views.publishing import sync as tell
        from harness.views.trackers import collect, collect_wandb

        folder = Path(flags.out)
        tell(store, [], os.environ, 0.0)
        for path in [*collect(store, folder), *collect_wandb(store, folder / "wandb", os.environ)]:
            print(path)
        return DONE
    from harness.views.plugins import Account, Place, build
    from harness.views.publishing import sync as tell

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
    out: str = flag(
        "", "write the definition as JSON into this file; asks no network", check=output_file
    )


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


@contextmanager
def publisher_beside(url: str, task: Task, log: Path, alert_rules: str = "") -> Iterator[None]:
    """W&B's publisher beside a controller, for a run whose nodes have a key: it goes on while no
    node is up, and tells how the run ended. While another one publishes it waits. Without the
    package wandb here, nodes alone publish."""
    import importlib.util

    from harness.views.wandb_api import wandb_key, wandb_online

    environ = {**task.envs, **task.secrets}
    key = wandb_key({"HOME": os.devnull, **environ})
    wants = (task.envs.get("TRACKERS") or "wandb").split(",")
    online = wandb_online(key, task.envs.get("WANDB_MODE") or "") and "wandb" in wants
    if not online or importlib.util.find_spec("wandb") is None:
        yield
        return
    told = {k: v for k, v in environ.items() if "WANDB_" in k and v}  # also HARNESS_WANDB_NODES
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "harness.views.trackers", url, "--trackers", "wandb"]
    with open(log, "ab") as out:
        publisher = subprocess.Popen(
            words,
            env={
                **os.environ,
                **told,
                **({"HARNESS_ALERT_RULES": alert_rules} if alert_rules else {}),
                "HARNESS_BESIDE_CONTROLLER": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,  # Ctrl-C is the controller's
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
    try:
        yield
    finally:
        publisher.terminate()
        try:
            publisher.wait(FINISH_S)
        except subprocess.TimeoutExpired:
            publisher.kill()
            publisher.wait()
