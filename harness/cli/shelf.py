"""`harness snapshots`: `python -m storage` with what the run's facts know."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.bucket.layout import IDENTITY, SAMPLES
from harness.cli.common import with_key
from harness.core.config import positional
from storage.errors import StoreError
from storage.objects import ObjectStore

if TYPE_CHECKING:
    from harness.core.facts import Fact
    from storage.export import Exported
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
    from harness.bucket.journal import read_facts
    from harness.core.facts import (
        SessionStarted,
        SnapshotCommitted,
        SnapshotExported,
        SnapshotReplicated,
        Warned,
    )
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
        _say(store, Warned(ref.step, ref.epoch, f"snapshot {ref}: {what}"))

    def exported(ref: Ref, made: Exported, dtype: str) -> None:
        said = (made.files, made.tensors, made.nbytes, dtype)
        try:
            _say(store, SnapshotExported(ref.step, ref.epoch, *said))
        except StoreError as e:
            print(f"harness: the export is whole, and not in the run's record ({e})")

    extra = [*store.list(IDENTITY), *store.list(SAMPLES)]
    return Notes(of, extra, seen_here(), pardoned, exported)


def _say(store: ObjectStore, fact: Fact) -> None:
    """Into the record, in a person's name."""
    from harness.bucket.journal import Journal

    journal = Journal(with_key(store), f"person-{secrets.token_hex(6)}", time.time)
    journal.record(fact)
    journal.flush()
