"""`harness snapshots`: `python -m storage` with what the run's facts know."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.bucket.layout import IDENTITY, SAMPLES
from harness.core.config import positional
from storage.objects import ObjectStore

if TYPE_CHECKING:
    from storage.listing import Notes


@dataclass(frozen=True)
class SnapshotsFlags:
    words: tuple[str, ...] = positional(
        "list|verify|show|prune|export|copy URL ...; `harness snapshots list --help`", nargs="..."
    )


def snapshots(flags: SnapshotsFlags) -> int:
    """List, verify, show, prune, export (safetensors) or copy a run's snapshots."""
    from storage.command import main as command

    return command(flags.words or ("--help",), "harness snapshots", _notes)


def _notes(store: ObjectStore) -> Notes:
    """What the record knows of snapshots, and what a copy of them needs to be resumed and
    audited."""
    from harness.bucket.journal import Journal, read_facts
    from harness.core.facts import SessionStarted, SnapshotCommitted, SnapshotReplicated, Warned
    from harness.uploader.client import seen_here
    from storage.listing import Note, Notes
    from storage.manifest import Ref

    of: defaultdict[Ref, Note] = defaultdict(Note)
    for stamped in read_facts(store, steps=False):
        match stamped.fact:
            case SnapshotCommitted() as f:
                ref = Ref(f.epoch, f.step)
                of[ref] = replace(of[ref], committed_at=stamped.t, commit_s=f.commit_s, why=f.why)
            case SnapshotReplicated() as f:
                ref = Ref(f.epoch, f.step)
                of[ref] = replace(of[ref], copies=(*of[ref].copies, f.url))
            case SessionStarted() as f if f.resumed_epoch and f.tier != "bucket":
                ref = Ref(f.resumed_epoch, f.resumed_step)
                of[ref] = replace(of[ref], restored=f.tier)

    def pardoned(ref: Ref, what: str) -> None:
        journal = Journal(store, f"person-{secrets.token_hex(6)}", time.time)
        journal.record(Warned(ref.step, ref.epoch, f"snapshot {ref}: {what}"))
        journal.flush()

    return Notes(of, [*store.list(IDENTITY), *store.list(SAMPLES)], seen_here(), pardoned)
