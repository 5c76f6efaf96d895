"""A run that ended before its market took a node says so."""

import io

import pytest
from rich.console import Console

from harness.bucket.journal import Journal
from harness.cli.launch import LaunchFlags, _say_if_undisturbed
from harness.controller.recovery import RunOutcome
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
    console, done = Console(file=out, width=200), RunOutcome("done", "at its last step", 8)
    for flags in (LaunchFlags("t.yaml", market="calm"), LaunchFlags("t.yaml", cloud="sky")):
        _say_if_undisturbed(flags, done, store, console)
    assert not out.getvalue()
    _say_if_undisturbed(LaunchFlags("t.yaml"), done, store, console)
    assert ("No node was taken" in out.getvalue()) is said
