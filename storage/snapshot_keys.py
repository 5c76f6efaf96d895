"""Where a run's snapshots lie: the keys, and which snapshot a key belongs to. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from storage.manifest import PARTS, Ref

MANIFESTS, QUARANTINE = "snapshots/manifests/", "snapshots/quarantine/"
READING = "snapshots/reading/"
# {ref}/{host}.json: what a host could not read whole, however often it looked
DOUBTS = "snapshots/doubts/"
# {ref}/{teller}.json: numbers that were told of it after its commit
MEASURED = "snapshots/measured/"
DOOM = ".doomed"  # beside the manifests, so that one listing tells of both at one moment
# beside the manifest of the snapshot that a run ended with, where that was not known when it was
# committed
ENDED = ".ended"


def list_key(ref: Ref, rank: int) -> str:
    return f"{PARTS}{ref.name}/list-r{rank:05d}.json"


def part_prefix(ref: Ref, rank: int) -> str:
    """What the keys of all parts begin with that this rank has written."""
    return f"{PARTS}{ref.name}/r{rank:05d}-"


def writer_of(key: str) -> int | None:
    """The rank that has written a part; None: it does not say."""
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
    """What the keys of all hosts' doubts of it begin with."""
    return f"{DOUBTS}{ref.name}/"


def measured_key(ref: Ref, by: str) -> str:
    return f"{MEASURED}{ref.name}/{by}.json"


def lease_key(ref: Ref, token: str) -> str:
    return f"{READING}{ref.name}/{token}"


def ref_in(key: str) -> Ref | None:
    """Foreign objects (editors' backups, directory markers) name no snapshot and are left alone."""
    try:
        return Ref.parse(key.split("/")[2].removesuffix(".json"))
    except (ValueError, IndexError):
        return None


def refs_in(keys: Iterable[str]) -> set[Ref]:
    return {ref for ref in map(ref_in, keys) if ref is not None}


def host_word(text: str) -> str:
    """A host's name, as it stands in keys."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)[:64] or "_"
