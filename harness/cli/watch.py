"""`harness watch`: a command for each committed snapshot of a run."""

from __future__ import annotations

import os
import re
import secrets
import signal
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from harness.cli.common import INTERRUPTED, checked_store
from harness.core.config import flag, positional
from harness.core.world import DRAINED, BadInput, HarnessError
from storage.errors import StoreError
from storage.opening import normalize, open_store

if TYPE_CHECKING:
    from harness.views.plugins import Account, Place
    from storage.objects import ObjectStore

TELL_S = 300.0  # for trackers, when all is done


def _name(text: str) -> None:
    """The name of a watch, or none. Raises ValueError that says what is wanted."""
    from harness.bucket.side_jobs import NAME
    from harness.views.wandb_run import STEP_AXIS, TIME_AXIS

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
    from harness.node.processes import die_with_parent
    from harness.watch.command import words_of
    from harness.watch.due import DueRule
    from harness.watch.progress import WatchProgress
    from harness.watch.watcher import DONE, SnapshotWatcher, WatchConfig

    argv = words_of(flags.script)
    name = flags.name or default_name(flags.script)
    try:
        _name(name)
    except ValueError as e:
        raise BadInput(f"the name of this watch: {e}: --name eval") from None
    rule = DueRule(flags.every, flags.every_steps, flags.newest)
    url, places = normalize(flags.url), _places(flags.trackers)
    if flags.progress:
        open_store(
            flags.progress
        )  # a URL that no store can have is told before anything is written
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
    if os.environ.get("HARNESS_NODE_DIR"):  # of the local cloud: it dies as a whole
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
    """The script's, the module's or the program's."""
    word = script[1].rpartition(".")[2] if script[0] == "-m" else Path(script[0]).stem
    return re.sub(r"[^A-Za-z0-9_.\-]+", "-", word)[:40] or "watch"


def _places(said: str) -> list[Account | Place]:
    """Trackers that are told of the stream. Raises BadInput for what is not known here."""
    from harness.views.plugins import Account, Place, build

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
    """The run's own publisher ends with the run, and side jobs may end later."""
    from harness.views.publishing import sync
    from harness.views.stream import newest_header

    try:
        if places or newest_header(store) is not None:
            left = sync(store, places, os.environ, TELL_S)
            for name in left:
                _say(f"harness watch: not all is told to {name}; later: harness sync {store.url}")
    except (StoreError, HarnessError) as e:  # what was done is done
        _say(f"harness watch: trackers are not told ({e}); later: harness sync {store.url}")


def _say(words: str) -> None:
    print(words, flush=True)
