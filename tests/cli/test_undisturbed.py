"""A run that ended before its market took a node says so."""

import io

import pytest
from rich.console import Console

from harness.bucket.journal import Journal
from harness.cli.launch import _say_if_undisturbed
from harness.core.facts import AttemptEnded
from storage.stores.folder_store import MemoryStore


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (["finished"], True),
        (["no-capacity", "finished", "finished"], True),
        (["drained", "finished"], False),
        (["preempted", "finished"], False),
    ],
)
def test_nothing_was_survived_where_nothing_was_taken(ends: list[str], said: bool) -> None:
    store, out = MemoryStore("memory://calm", {}), io.StringIO()
    journal = Journal(store, "controller", lambda: 1.0)
    for attempt, end in enumerate(ends, 1):
        journal.record(AttemptEnded(attempt, end, 0.0, 0.0, 1.0, 0, "", 1.0, 0.0))
    journal.flush()
    _say_if_undisturbed(store, Console(file=out, width=200))
    assert ("No node was taken" in out.getvalue()) is said
