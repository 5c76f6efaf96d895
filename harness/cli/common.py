"""What several commands need: exit statuses, the clock, the run's bucket, where state lies."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.bucket.layout import ARCHIVE, FACTS, IDENTITY
from harness.core import steady
from harness.core.given_files import yaml_given
from harness.core.mesh import ModelMesh, replica_ranks_told
from harness.core.meshes import meshes_told, parse_choice
from harness.core.world import BadInput
from storage.objects import ObjectStore
from storage.opening import open_store
from storage.retries import RETRY_WITHIN_S

if TYPE_CHECKING:
    from harness.clouds.local import LocalCloud
    from harness.clouds.sky_client import Broker
    from harness.controller.book import Book

DONE, FAILED, WRONG_INPUT, ENDED_EARLY, LEFT, INTERRUPTED = 0, 1, 2, 3, 4, 130
MOST_NODES = 10_000
PREFLIGHT_S = 10.0  # how long a bucket may be silent before a launch is refused


class RealClock:
    def now(self) -> float:
        return steady.now()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def when(text: str) -> None:
    _of_sources("moment", text)


PROMETHEUS = (
    "expose numbers for Prometheus at http://HOST:PORT/metrics: [HOST:]PORT, on loopback by default"
)


def prometheus_address(text: str) -> None:
    """Raises ValueError that says what is wanted."""
    port = text.rpartition(":")[2]
    if text and not (port.isdecimal() and len(port) <= 5 and int(port) <= 65535):
        raise ValueError(f"wanted [HOST:]PORT, such as 9100; found {text!r:.80}")


def names_of(text: str) -> list[str]:
    """Of "aws,gcp"; none of ""."""
    return [name for part in text.split(",") if (name := part.strip())]


def node_range(text: str) -> tuple[int, int]:
    """LOW:HIGH or N. Raises ValueError that says what is wanted."""
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
    _of_sources("duration", text)


def _of_sources(parser: str, text: str) -> None:
    """Raises ValueError that says what is wanted."""
    from harness.agent import sources

    try:
        if text:
            getattr(sources, parser)(text)
    except BadInput as e:
        raise ValueError(str(e)) from None


def replica_ranks(env: Mapping[str, str]) -> int:
    """Ranks that hold one copy of the model together, as HARNESS_REPLICA_RANKS says, or else
    HARNESS_MESH; 1 without them. Raises BadInput."""
    mesh = wanted_mesh(env)
    return replica_ranks_told(env) or (1 if mesh is None else mesh.replica_ranks)


def wanted_mesh(env: Mapping[str, str]) -> ModelMesh | None:
    """The first that HARNESS_MESH says; None without it. Raises BadInput."""
    meshes = meshes_told(env)
    return None if meshes is None else meshes.wanted


def mesh_text(text: str) -> None:
    """Raises ValueError that says what is wanted."""
    try:
        if text:
            parse_choice(text)
    except BadInput as e:
        raise ValueError(str(e)) from None


def worlds(text: str) -> tuple[int, ...]:
    """Numbers of ranks that may train, as people write them: "1,2,4"; (): any. Raises ValueError
    that says what is wanted."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() and len(word) <= 9 and int(word) >= 1 for word in words):
        raise ValueError(f"wanted numbers of ranks, such as 1,2,4; found {text!r:.80}")
    return tuple(sorted({int(word) for word in words}))


def cluster_of(url: str, attempt: int) -> str:
    from harness.clouds.clusters import cluster_name, tag

    return cluster_name(tag(url), attempt)


def book_of(store: ObjectStore) -> Book:
    """What the controllers of a run have written down."""
    from harness.bucket.journal import read_facts
    from harness.controller.book import Book

    return Book.of(read_facts(store, "controller-", steps=False), random.Random(0))


def sky_broker(url: str) -> Broker:
    from harness.clouds.sky_client import Broker

    return Broker(os.environ, state_dir(url, "sky-logs") / "broker.log")


def state_dir(url: str, what: str = "local-cloud") -> Path:
    """Where the controller keeps state and logs of its own: beside a run in a folder, else
    under ~/.cache, by the run's URL."""
    if url.startswith("file://"):
        return Path(url.removeprefix("file://")) / what
    return cache_dir(url, what)


def cache_dir(url: str, what: str) -> Path:
    """What this computer keeps of a run, by its URL, outside of the run."""
    import hashlib

    return (
        Path.home()
        / ".cache"
        / "spotharness"
        / what
        / hashlib.sha256(url.encode()).hexdigest()[:16]
    )


def task_resources(path: str) -> dict[str, Any]:
    """What SkyPilot needs of a task file to find offers for it. Raises BadInput."""
    documents = yaml_given(path, "a SkyPilot task YAML")
    if len(documents) != 1 or not isinstance(said := documents[0], dict):
        raise BadInput(f"{path}: wanted a SkyPilot task YAML, found {len(documents)} documents")
    return {k: said[k] for k in ("name", "resources", "num_nodes", "config") if k in said}


def html_path(url: str) -> str:
    return (
        str(Path(url.removeprefix("file://")) / "report.html") if url.startswith("file://") else ""
    )


def checked_store(url: str, retry_within_s: float = RETRY_WITHIN_S) -> ObjectStore:
    """The run's bucket, proven to be there, writable and fit before anything is launched. Raises
    StoreError.

    A person waits for this answer, so silence counts as a refusal sooner than it does once the run
    is under way.
    """
    from storage.probe import record, require

    store = open_store(url, retry_within_s=PREFLIGHT_S)
    record(store, require(store))
    return with_key(open_store(url, retry_within_s=retry_within_s, answered=True))


def with_key(store: ObjectStore) -> ObjectStore:
    """What we write is signed, if our environment has a key. Raises BadInput."""
    from harness.bucket.heads import signed

    return signed(store, os.environ, f"{socket.gethostname()}:{os.getpid()}", time.time)


def key_for_nodes(path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that has nodes sign what they write: the key in that file, else ours; {}: there
    is none. Raises BadInput."""
    from harness.core.signing import VARIABLE, key_in

    text = key_text(path) if path else environ.get(VARIABLE, "")
    key_in({VARIABLE: text})
    return {VARIABLE: text} if text else {}


def key_text(path: str) -> str:
    """What a file of a key says. Raises BadInput, also for an empty one: it must not pass for no
    key at all."""
    try:
        text = Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise BadInput(f"{path}: wanted a file with a key, found none ({e})") from None
    if not text:
        raise BadInput(f"{path}: wanted a file with a key, found an empty one")
    return text


def existing_store(url: str) -> ObjectStore:
    """The bucket of a run that must be there already. Raises BadInput."""
    store = open_store(url)
    if not any(store.list(prefix) for prefix in (IDENTITY, ARCHIVE, FACTS)):
        raise BadInput(f"{url}: there is no run here (no facts/ and no run.json); check the URL")
    return store


def is_final(store: ObjectStore) -> bool:
    from storage.snapshots import Snapshots

    snapshots = Snapshots(store)
    manifest = snapshots.latest()
    return bool(manifest and snapshots.ended(manifest))


def local_cloud(url: str) -> LocalCloud:
    """The one of this computer that led the run: to look, and to end it."""
    from harness.clouds.local import LocalCloud
    from harness.clouds.tasks import Task

    return LocalCloud(state_dir(url), Task(Path("-"), "down", "true"), run_url=url)


def is_local(url: str) -> bool:
    return (state_dir(url) / "config.json").exists()
