"""Helpers that several commands share: exit statuses, clock, the run's bucket, state folders."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.bucket.archive import read_facts
from harness.bucket.layout import ARCHIVE, FACTS, IDENTITY
from harness.bucket.signed_heads import signed
from harness.core.flags import flag
from harness.core.input_files import yaml_given
from harness.core.mesh import ModelMesh, meshes_told, parse_choice, replica_ranks_told
from harness.core.signing import VARIABLE, key_in
from harness.core.world import BadInput
from harness.node import steady_clock
from harness.notices import sources
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore
from storage.stores.probe import record, require
from storage.stores.retries import RETRY_WITHIN_S
from storage.stores.store_urls import open_store

if TYPE_CHECKING:
    from harness.clouds.sky_broker import Broker
    from harness.ledger.attempts import AttemptHistory
    from harness.local.local_cloud import LocalCloud

DONE, FAILED, WRONG_INPUT, ENDED_EARLY, LEFT, INTERRUPTED = 0, 1, 2, 3, 4, 130
MOST_NODES = 10_000
PREFLIGHT_S = 10.0  # how long a bucket may be silent before a launch is refused


@dataclass(frozen=True, kw_only=True)
class AlertFlags:
    """The flags of all commands that send alerts."""

    alert: tuple[str, ...] = flag(
        (),
        "send alerts to https://..., command:'PROGRAM ARGUMENTS' or slack://... "
        "(docs/ALERTS.md); repeat for more; also HARNESS_ALERTS (nodes of a launch get all but "
        "commands)",
        metavar="RECEIVER",
    )
    alert_rules: str = flag(
        "",
        "rules of alerts besides those that ship\nfiles, package.module:function, "
        "comma-separated; default: HARNESS_ALERT_RULES",
    )


class RealClock:
    def now(self) -> float:
        return steady_clock.now()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def when(text: str) -> None:
    _check(sources.moment, text)


PROMETHEUS = (
    "expose numbers for Prometheus at http://HOST:PORT/metrics: [HOST:]PORT, on loopback by default"
)


def prometheus_address(text: str) -> None:
    """Check a [HOST:]PORT, or "". Raises ValueError that says what is wanted."""
    port = text.rpartition(":")[2]
    if text and not (port.isdecimal() and len(port) <= 5 and int(port) <= 65535):
        raise ValueError(f"wanted [HOST:]PORT, such as 9100; found {text!r:.80}")


def names_of(text: str) -> list[str]:
    """Return the names of a comma-separated list such as "aws,gcp"; of "" there are none."""
    return [name for part in text.split(",") if (name := part.strip())]


def node_range(text: str) -> tuple[int, int]:
    """Parse LOW:HIGH or N. Raises ValueError that says what is wanted."""
    low, _, high = text.partition(":")
    are_numbers = len(text) <= 20 and low.isdecimal() and (high or low).isdecimal()
    if not are_numbers or not 1 <= int(low) <= int(high or low):
        raise ValueError(
            f"wanted LOW:HIGH or N with 1 <= LOW <= HIGH, for example 1:4; found {text!r:.80}"
        )
    if int(high or low) > MOST_NODES:
        raise ValueError(f"wanted at most {MOST_NODES} nodes, found {text!r}")
    return int(low), int(high or low)


def duration_text(text: str) -> None:
    _check(sources.parse_duration, text)


def _check(parse: Callable[[str], object], text: str) -> None:
    """Raise ValueError, with what is wrong, unless the text is empty or `parse` reads it."""
    try:
        if text:
            parse(text)
    except BadInput as e:
        raise ValueError(str(e)) from None


def replica_ranks(env: Mapping[str, str]) -> int:
    """Return the number of ranks that hold one copy of the model together: HARNESS_REPLICA_RANKS,
    else the mesh of HARNESS_MESH, else 1. Raises BadInput."""
    mesh = wanted_mesh(env)
    return replica_ranks_told(env) or (1 if mesh is None else mesh.replica_ranks)


def wanted_mesh(env: Mapping[str, str]) -> ModelMesh | None:
    """Return the first mesh of HARNESS_MESH; `None` without it. Raises BadInput."""
    meshes = meshes_told(env)
    return None if meshes is None else meshes.wanted


def mesh_text(text: str) -> None:
    """Check a mesh, or "". Raises ValueError that says what is wanted."""
    try:
        if text:
            parse_choice(text)
    except BadInput as e:
        raise ValueError(str(e)) from None


def worlds(text: str) -> tuple[int, ...]:
    """Parse the numbers of ranks that may train, such as "1,2,4"; () means any number. Raises
    ValueError that says what is wanted."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() and len(word) <= 9 and int(word) >= 1 for word in words):
        raise ValueError(f"wanted numbers of ranks, such as 1,2,4; found {text!r:.80}")
    return tuple(sorted({int(word) for word in words}))


def cluster_of(url: str, attempt: int) -> str:
    from harness.clouds.sky_clusters import cluster_name, tag

    return cluster_name(tag(url), attempt)


def book_of(store: ObjectStore) -> AttemptHistory:
    """Return the book of a run: the facts that its controllers have recorded."""
    from harness.ledger.attempts import AttemptHistory

    return AttemptHistory.of(read_facts(store, "controller-", steps=False), random.Random(0))


def sky_broker(url: str) -> Broker:
    from harness.clouds.sky_broker import Broker

    return Broker(os.environ, state_dir(url, "sky-logs") / "broker.log")


@contextlib.contextmanager
def done_beside(
    name: str,
    do: Callable[[], object],
    *,
    every_s: float,
    end_within_s: float,
    at_once: bool = False,
    at_end: bool = True,
) -> Iterator[None]:
    """Call `do`, which raises nothing, from time to time while entered, in a thread of that `name`:
    also `at_once` and `at_end`, if asked. A call that takes longer than `end_within_s` at the end
    is left alone."""
    over = threading.Event()

    def from_time_to_time() -> None:
        if at_once:
            do()
        while not over.wait(every_s):
            do()
        if at_end:
            do()

    thread = threading.Thread(target=from_time_to_time, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(end_within_s)


def state_dir(url: str, what: str = "local-cloud") -> Path:
    """Return the folder of the controller's own state and logs: in the run's folder if it has one,
    else below ~/.cache, by the run's URL."""
    if url.startswith("file://"):
        return Path(url.removeprefix("file://")) / what
    return cache_dir(url, what)


def cache_dir(url: str, what: str) -> Path:
    """Return the folder below ~/.cache where this computer keeps things about a run, by its URL."""
    return (
        Path.home()
        / ".cache"
        / "spotharness"
        / what
        / hashlib.sha256(url.encode()).hexdigest()[:16]
    )


def task_resources(path: str) -> dict[str, Any]:
    """Read the part of a task file that SkyPilot needs to find offers for it. Raises BadInput."""
    documents = yaml_given(path, "a SkyPilot task YAML")
    if len(documents) != 1 or not isinstance(said := documents[0], dict):
        raise BadInput(f"{path}: wanted a SkyPilot task YAML, found {len(documents)} documents")
    return {k: said[k] for k in ("name", "resources", "num_nodes", "config") if k in said}


def html_path(url: str) -> str:
    """Return where a report's page belongs: in the run's folder. Return "" if the run has none, or
    without Jinja2, which makes pages."""
    if not url.startswith("file://") or importlib.util.find_spec("jinja2") is None:
        return ""
    return str(Path(url.removeprefix("file://")) / "report.html")


def checked_store(url: str, retry_within_s: float = RETRY_WITHIN_S) -> ObjectStore:
    """Open the run's bucket, after proving that it exists, is writable and behaves as needed.
    Raises StoreError.

    A person waits for this answer, so silence counts as a refusal sooner than it does during the
    run.
    """
    store = open_store(url, retry_within_s=PREFLIGHT_S)
    record(store, require(store))
    return with_key(open_store(url, retry_within_s=retry_within_s, answered=True))


def with_key(store: ObjectStore) -> ObjectStore:
    """Return the store with its writes signed, if our environment has a key. Raises BadInput."""
    return signed(store, os.environ, f"{socket.gethostname()}:{os.getpid()}", time.time)


def key_for_nodes(path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with the key that nodes sign with: the key in that file, else ours; {}
    without a key. Raises BadInput."""
    text = key_text(path) if path else environ.get(VARIABLE, "")
    key_in({VARIABLE: text})
    return {VARIABLE: text} if text else {}


def key_text(path: str) -> str:
    """Read the text of a key file. Raises BadInput, also for an empty file: it must not be taken
    for having no key."""
    try:
        text = Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise BadInput(f"{path}: wanted a file with a key, found none ({e})") from None
    if not text:
        raise BadInput(f"{path}: wanted a file with a key, found an empty one")
    return text


def existing_store(url: str) -> ObjectStore:
    """Open the bucket of a run that exists already. Raises BadInput if there is none."""
    store = open_store(url)
    if not any(store.list(prefix) for prefix in (IDENTITY, ARCHIVE, FACTS)):
        raise BadInput(f"{url}: there is no run here (no facts/ and no run.json); check the URL")
    return store


def is_final(store: ObjectStore) -> bool:
    snapshots = Snapshots(store)
    manifest = snapshots.latest()
    return bool(manifest and snapshots.ended(manifest))


def local_cloud(url: str) -> LocalCloud:
    """Return the local cloud of a run led on this computer, for looking at it and ending it."""
    from harness.clouds.sky_task import Task
    from harness.local.local_cloud import LocalCloud

    return LocalCloud(state_dir(url), Task(Path("-"), "down", "true"), run_url=url)


def is_local(url: str) -> bool:
    return (state_dir(url) / "config.json").exists()
