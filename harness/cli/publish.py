"""`harness snapshots watch`: run a command for each committed snapshot of a run."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from harness.cli.common import DONE, FAILED, INTERRUPTED, checked_store, existing_store
from harness.core.flags import flag, positional
from harness.core.input_files import output_file, output_folder
from harness.core.world import DRAINED, BadInput, HarnessError
from harness.look.trackers import dashboards as made
from harness.look.trackers.publisher import sync as tell
from harness.look.trackers.tracker_registry import Place, build
from harness.look.trackers.tracker_stream import newest_header
from harness.look.trackers.trackers import collect, collect_wandb
from harness.look.trackers.wandb_api import (
    Account,
    viewer_of,
    wandb_account,
    wandb_key,
    wandb_online,
)
from harness.look.trackers.wandb_run import STEP_AXIS, TIME_AXIS
from harness.look.watch.due_snapshots import DueRule
from harness.look.watch.side_command import argument_vector
from harness.look.watch.side_jobs import NAME
from harness.node.heartbeat import die_with_parent
from storage.errors import StoreError
from storage.stores.store_urls import normalize, open_store

if TYPE_CHECKING:
    from harness.clouds.sky_task import Task
    from storage.stores.objects import ObjectStore

# `harness runs sync`, `dashboards`: update trackers from the user's machine; and the publisher
# beside a controller.

FINISH_S = 60.0  # for the publisher beside a controller to finish, when the run has ended


@dataclass(frozen=True)
class SyncFlags:
    url: str = positional("URL of the run")
    to: str | None = flag(
        None,
        "trackers to bring up to date: wandb, mlflow, tensorboard, comma-separated; default: "
        "wandb. With --out: wandb, tensorboard, jsonl; default: all three",
    )
    out: str = flag(
        "",
        "instead write what they would be told into this folder (an offline run for `wandb sync`, "
        "event files, JSON lines)",
        check=output_folder,
    )
    patience_s: float = flag(600.0, "how long to try")


def sync(flags: SyncFlags) -> int:
    """Send all that is committed to W&B (or MLflow, TensorBoard); idempotent."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # wandb takes an empty variable for a wrong value; we treat it as not set
    for name in [n for n, value in os.environ.items() if n.startswith("WANDB_") and not value]:
        del os.environ[name]
    os.environ.pop("WANDB_SERVICE", None)  # a service that is not ours would outlive our teardown
    store = existing_store(flags.url)
    if flags.out:
        return _write_down(store, flags.to, Path(flags.out))

    asked = "wandb" if flags.to is None else flags.to
    places = [p for p in build(asked, os.environ) if isinstance(p, (Account, Place))]
    if len(places) != len(asked.split(",")):
        raise BadInput(f"--to {asked}: wanted wandb, mlflow or tensorboard, comma-separated")
    left = tell(store, places, os.environ, flags.patience_s)
    for place in places:
        print(f"{place.name}: {'not all is told yet' if place.name in left else 'up to date'}")
    return FAILED if left else DONE


FILES = ("wandb", "tensorboard", "jsonl")  # trackers that have files


def _write_down(store: ObjectStore, to: str | None, folder: Path) -> int:
    """Write the files of the trackers `to` (comma-separated; None: all that have files) into
    `folder`. Raises BadInput."""
    names = [name.strip() for name in to.split(",")] if to is not None else list(FILES)
    if strange := [name for name in names if name not in FILES]:
        raise BadInput(f"--to {strange[0]} --out: wanted some of {', '.join(FILES)}")
    tell(store, [], os.environ, 0.0)
    written = collect(store, folder, names)
    if "wandb" in names:
        written += collect_wandb(store, folder / "wandb", os.environ)
    for path in written:
        print(path)
    if not written:
        print(f"nothing to write: the run has published nothing for {', '.join(names)}")
    return DONE


@dataclass(frozen=True)
class DashboardsFlags:
    project: str = flag("", "project of W&B (default: WANDB_PROJECT, else spotharness)")
    entity: str = flag("", "user or team of W&B (default: WANDB_ENTITY, else the key's own)")
    out: str = flag(
        "", "write the definition as JSON into this file; asks no network", check=output_file
    )


def dashboards(flags: DashboardsFlags) -> int:
    """Create W&B's workspace and report for a project, or write their definition as JSON."""
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise BadInput(
            "dashboards: package wandb-workspaces is not installed here; `pip install "
            "wandb-workspaces`"
        )

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
    """Run W&B's publisher beside a controller while entered, if the run's nodes have a key. It
    works while no node is up, and reports how the run ended. It waits while another publisher is
    active. Without the package wandb here, only nodes publish."""

    environ = {**task.envs, **task.secrets}
    key = wandb_key({"HOME": os.devnull, **environ})
    wants = (task.envs.get("TRACKERS") or "wandb").split(",")
    online = wandb_online(key, task.envs.get("WANDB_MODE") or "") and "wandb" in wants
    if not online or importlib.util.find_spec("wandb") is None:
        yield
        return
    told = {k: v for k, v in environ.items() if "WANDB_" in k and v}  # also HARNESS_WANDB_NODES
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "harness.look.trackers.trackers", url, "--trackers", "wandb"]
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
            start_new_session=True,  # so that Ctrl-C reaches only the controller
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


WATCH = "harness snapshots watch"
TELL_S = 300.0  # timeout of the last update of trackers


def _name(text: str) -> None:
    """Check the name of a watch, or "". Raises ValueError that says what is wanted."""
    if text and not NAME.fullmatch(text):
        raise ValueError(f"wanted 1 to 40 letters, digits and ._-, found {text!r}")
    taken = {*STEP_AXIS, *TIME_AXIS, "time"} - {"val"}
    if text in taken:
        raise ValueError(f"{text!r} is a section of the run's own numbers; wanted another name")


@dataclass(frozen=True)
class WatchFlags:
    url: str = positional("URL of the run; it may not have begun yet")
    script: tuple[str, ...] = positional(
        "-- script.py and its arguments, -- -m module, or any other command", nargs="*"
    )
    name: str = flag(
        "",
        "of this watch: watchers of one name share the snapshots out, and its numbers are called "
        "NAME/...; default: the script's",
        check=_name,
    )
    every: int = flag(1, "every so many snapshots", at_least=1)
    every_steps: int = flag(
        0, "instead the first snapshot in every so many steps; 0: count snapshots", at_least=0
    )
    newest: bool = flag(False, "instead the newest snapshot only, whatever lies between")
    weights: str = flag(
        "",
        "export the weights as safetensors before each start, into $HARNESS_WATCH_WEIGHTS: saved "
        "(as they are), bf16, fp16, fp32",
        choices=["", "saved", "bf16", "fp16", "fp32"],
    )
    hold: int = flag(
        4, "so many snapshots that wait for their turn are kept from being pruned", at_least=1
    )
    tries: int = flag(3, "starts of the command for one snapshot, if it fails", at_least=1)
    most_failures: int = flag(3, "give up after so many failed snapshots in a row", at_least=1)
    limit_h: float = flag(6.0, "hours that one start may take", above=0)
    idle_h: float = flag(24.0, "end after so many hours without a new snapshot", above=0)
    again: bool = flag(False, "do the snapshots again that failed before")
    poll_s: float = flag(
        0.0, "how often to look for snapshots; 0: 10 s, in a folder 1 s", at_least=0
    )
    pause_s: float = flag(5.0, "before the second try; then four times as long", at_least=0)
    lease_s: float = flag(
        60.0,
        "silence after which another watcher takes a snapshot over",
        at_least=1,
        at_most=3600,
    )

    progress: str = flag(
        "",
        "URL of a run of its own that `harness launch` leads: what is done is committed there",
    )
    trackers: str = flag(
        "",
        "tell these in the end what came after the run's own publisher was gone: wandb, mlflow, "
        "tensorboard, comma-separated; default: HARNESS_TRACKERS, else wandb if WANDB_API_KEY is "
        "set",
    )


def watch(flags: WatchFlags) -> int:
    """Run a command for each committed snapshot (evaluate, export), and record its numbers."""
    from harness.look.watch.watcher import DONE, SnapshotWatcher, WatchConfig, WatchProgress

    argv = argument_vector(flags.script)
    name = flags.name or default_name(flags.script)
    try:
        _name(name)
    except ValueError as e:
        raise BadInput(f"the name of this watch: {e}: --name eval") from None
    rule = DueRule(flags.every, flags.every_steps, flags.newest)
    url, places = normalize(flags.url), _places(flags.trackers)
    if flags.progress:
        open_store(flags.progress)  # an invalid URL is reported before anything is written
    store = checked_store(url)
    poll_s = flags.poll_s or (1.0 if url.startswith("file://") else 10.0)
    config = WatchConfig(
        url, name, tuple(argv), rule, flags.hold, flags.tries, flags.most_failures,
        flags.limit_h * 3600, flags.idle_h * 3600, poll_s, flags.pause_s, flags.lease_s,
        flags.weights, flags.again,
    )  # fmt: skip
    leave, heard = threading.Event(), list[int]()

    def go(number: int, _: FrameType | None) -> None:
        heard.append(number)
        leave.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, go)
    holder = f"{name}-{secrets.token_hex(4)}"
    if os.environ.get("HARNESS_NODE_DIR"):  # nodes of the local cloud die as a whole
        die_with_parent()
    progress = (
        WatchProgress(checked_store(normalize(flags.progress)), url) if flags.progress else None
    )
    watcher = SnapshotWatcher(config, store, holder, os.environ, leave, _say, progress)
    code = watcher.run()
    if code != DRAINED:
        _tell_trackers(store, places)
    return INTERRUPTED if signal.SIGINT in heard and code != DONE else code


def default_name(script: tuple[str, ...]) -> str:
    """Return the name of the script, the module or the program."""
    word = script[1].rpartition(".")[2] if script[0] == "-m" else Path(script[0]).stem
    return re.sub(r"[^A-Za-z0-9_.\-]+", "-", word)[:40] or "watch"


def _places(said: str) -> list[Account | Place]:
    """Return the trackers that get the watch's numbers. Raises BadInput for unknown ones."""
    wanted = said or os.environ.get("HARNESS_TRACKERS", "")
    if not wanted and os.environ.get("WANDB_API_KEY"):
        wanted = "wandb"
    found = build(wanted, os.environ) if wanted else []
    if any(isinstance(one, Account) for one in found) and find_spec("wandb") is None:
        if said:
            raise BadInput("--trackers: package wandb is not installed here; `pip install wandb`")
        found = []
    online = [one for one in found if isinstance(one, Account) and one.online]
    places = [one for one in found if isinstance(one, Place)]
    return [*online, *(one for one in places if one.name == "tensorboard" or one.where)]


def _tell_trackers(store: ObjectStore, places: list[Account | Place]) -> None:
    """Update the trackers once more: the run's own publisher ends with the run, and side jobs may
    end later."""
    from harness.look.trackers.publisher import sync

    try:
        if places or newest_header(store) is not None:
            left = sync(store, places, os.environ, TELL_S)
            for name in left:
                _say(f"{WATCH}: not all is told to {name}; later: harness runs sync {store.url}")
    except (StoreError, HarnessError) as e:  # the watch itself has succeeded
        _say(f"{WATCH}: trackers are not told ({e}); later: harness runs sync {store.url}")


def _say(words: str) -> None:
    print(words, flush=True)
