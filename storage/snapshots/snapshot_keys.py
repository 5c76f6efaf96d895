"""Keys of a run's snapshots in the store, and the snapshot that a key belongs to. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from storage.snapshots.manifest import PARTS, Ref

MANIFESTS, QUARANTINE = "snapshots/manifests/", "snapshots/quarantine/"
READING = "snapshots/reading/"
# {ref}/{host}.json: why a host, after several attempts, could not read all of a snapshot
DOUBTS = "snapshots/doubts/"
# {ref}/{source}.json: metrics recorded for a snapshot after its commit
MEASURED = "snapshots/measured/"
DOOM = ".doomed"  # beside the manifests, so that one listing shows both at one moment
# beside the manifest of a run's last snapshot, if it was not known to be the last when it was
# committed
ENDED = ".ended"


def list_key(ref: Ref, rank: int) -> str:
    return f"{PARTS}{ref.name}/list-r{rank:05d}.json"


def part_prefix(ref: Ref, rank: int) -> str:
    """Return the common prefix of the keys of all parts that this rank wrote."""
    return f"{PARTS}{ref.name}/r{rank:05d}-"


def writer_of(key: str) -> int | None:
    """Return the rank that wrote a part, or None if the key does not name one."""
    found = re.match(r"r([0-9]{5,})-", key.rpartition("/")[2])
    return int(found[1]) if found else None


def manifest_key(ref: Ref) -> str:
    return f"{MANIFESTS}{ref.name}.json"


def doom_key(ref: Ref) -> str:
    return f"{MANIFESTS}{ref.name}{DOOM}"


def ended_key(ref: Ref) -> str:
    return f"{MANIFESTS}{ref.name}{ENDED}"


def quarantine_key(ref: Ref) -> str:
    return f"{QUARANTINE}{ref.name}.json"


def doubts_of(ref: Ref) -> str:
    """Return the common prefix of the keys of all hosts' doubts about a snapshot."""
    return f"{DOUBTS}{ref.name}/"


def measured_key(ref: Ref, by: str) -> str:
    return f"{MEASURED}{ref.name}/{by}.json"


def lease_key(ref: Ref, token: str) -> str:
    return f"{READING}{ref.name}/{token}"


def ref_in(key: str) -> Ref | None:
    """Return the snapshot that a key belongs to. Foreign objects (editors' backups, directory
    markers) give None and are left alone."""
    try:
        return Ref.parse(key.split("/")[2].removesuffix(".json"))
    except (ValueError, IndexError):
        return None


def refs_in(keys: Iterable[str]) -> set[Ref]:
    return {ref for ref in map(ref_in, keys) if ref is not None}


def host_word(text: str) -> str:
    """Return a host's name in the form that keys use."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)[:64] or "_"
