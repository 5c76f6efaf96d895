"""A launch that starts while its bucket contradicts itself asks again, for a while."""

import pytest
from tenacity import stop_after_attempt, wait_none

from harness.cli import launch
from storage.errors import NotFound, StoreUnavailable
from storage.snapshots.snapshot_keys import MANIFESTS
from storage.stores.folder_store import MemoryStore


class Forgetful(MemoryStore):
    """Lists a snapshot that it does not find, so many times."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def list(self, prefix):
        gone = self.times > 0 and prefix.startswith(MANIFESTS)
        return [f"{MANIFESTS}0000000004-e000001.json"] if gone else super().list(prefix)

    def get(self, key, start=None, end=None):
        if key.startswith(MANIFESTS):
            self.times -= 1
            raise NotFound(key)
        return super().get(key, start, end)


@pytest.fixture
def looked(monkeypatch):
    """`_how_it_stands`, with no time between its tries."""
    looks = launch._how_it_stands
    monkeypatch.setattr(looks.retry, "wait", wait_none())
    monkeypatch.setattr(looks.retry, "stop", stop_after_attempt(20))
    return looks


def test_a_spell_in_which_objects_are_not_found_is_waited_out(looked):
    book, over = looked(Forgetful(times=12))
    assert not book.open and not over


def test_a_store_that_goes_on_contradicting_itself_is_told(looked):
    with pytest.raises(StoreUnavailable, match="is listed, and not found"):
        looked(Forgetful(times=10_000))
