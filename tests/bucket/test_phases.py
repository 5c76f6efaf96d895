"""The phases of a run whose script trains more than once, as the bucket tells them."""

import pytest

from harness.bucket.layout import phase_key, phase_of
from harness.bucket.phases import end_of, phase_at, phases_text, read_phases
from storage.canonical_json import BadObject, canonical
from storage.errors import NotFound
from storage.stores.folder_store import MemoryStore


def bucket(*begins):
    """A run whose later phases begin behind these steps."""
    store = MemoryStore("memory://bucket/phases", {})
    store.create("run.json", canonical({"global_batch": 8, "micro_batch": 2}))
    for number, step in enumerate(begins, 2):
        said = {"phase": number, "begins": step, "global_batch": 4, "micro_batch": 4}
        store.create(phase_key(number), canonical(said))
    return store


def test_a_phase_ends_where_the_next_one_begins():
    store = bucket(10, 10, 25)
    found = read_phases(store)
    assert [(one.number, one.begins, one.ends) for one in found] == [
        (1, 0, 10), (2, 10, 10), (3, 10, 25), (4, 25, None)
    ]  # fmt: skip
    assert found[-1].ended == (10, 10, 25)
    assert [phase_at(found, step).number for step in (0, 1, 10, 11, 25, 26)] == [1, 1, 1, 3, 3, 4]
    assert [end_of(store, number) for number in (1, 2, 3, 4)] == [10, 10, 25, None]
    said = "1: steps 1 to 10, 2: no step, 3: steps 11 to 25, 4: from step 26"
    assert phases_text(found) == said and phases_text(read_phases(bucket())) == ""


def test_what_is_no_row_of_phases_is_one_error():
    with pytest.raises(BadObject, match="wanted phase 3, from step 10 or later on, found phase 3"):
        read_phases(bucket(10, 5))
    store = bucket(10, 20)
    store.delete("control/phases/000002.json")
    with pytest.raises(BadObject, match="wanted phase 2, from step 0 or later on, found phase 3"):
        read_phases(store)
    store.delete("run.json")
    with pytest.raises(NotFound):
        read_phases(store)
    assert phase_of("control/phases/000001.json") == 1 and phase_of("control/phases/2.json") == 0
