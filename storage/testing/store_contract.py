"""The contract of an object store, as tests to inherit
(`storage.testing.store_contract.StoreContract`).

All our own stores pass it (tests/storage/test_objects.py): memory, folders, and buckets of real
servers.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from storage.errors import NotFound, StoreError
from storage.snapshots.manifest import Ref
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore, folders, put_paced, read_into
from storage.stores.probe import probe

LARGE_NBYTES = (32 << 20) + 12_345  # more than one part of an upload
READ_NBYTES = (16 << 20) + 77  # more than one range of a parallel read
RANGES = [(0, 3), (3, 7), (7, 10), (0, 10), (4, None), (None, 4), (9, 10)]


class StoreContract:
    """Tests of what the commit protocol needs of a store. A subclass, whose name begins with Test,
    provides the fixture `opener`: a function that opens a store whose URL ends with its argument,
    below an empty place that belongs to this test alone.

    settles_races:  False where the server behind the store is a fake that checks and then writes.
    """

    settles_races = True

    @pytest.fixture
    def opener(self) -> Callable[[str], ObjectStore]:
        raise NotImplementedError(
            f"{type(self).__name__}: give it a fixture `opener`, which returns a function: the "
            "end of a URL -> a store"
        )

    @pytest.fixture
    def store(self, opener: Callable[[str], ObjectStore]) -> ObjectStore:
        return opener("")

    def test_it_is_an_object_store(self, store: ObjectStore) -> None:
        assert isinstance(store, ObjectStore)
        assert not store.url.endswith("/")

    def test_it_names_the_folders_below_it(self, store: ObjectStore) -> None:
        assert folders(store) == []
        for key in ("a", "b/1", "b/2/x", "c d/y"):
            store.put(key, b"x")
        assert folders(store) == ["b", "c d"]

    def test_put_get_replace_delete(self, store: ObjectStore) -> None:
        store.put("a/b", b"one")
        store.put("a/b", memoryview(b"twoo"))
        assert store.get("a/b") == b"twoo"
        assert store.size("a/b") == 4
        store.delete("a/b")
        store.delete("a/b")
        with pytest.raises(NotFound):
            store.get("a/b")

    def test_empty_and_binary_objects(self, store: ObjectStore) -> None:
        every = bytes(range(256)) * 40
        store.put("empty", b"")
        store.put("every", memoryview(every))
        assert (store.get("empty"), store.size("empty")) == (b"", 0)
        assert store.get("every") == every

    def test_what_is_written_is_a_copy(self, store: ObjectStore) -> None:
        """Check that stores copy: staging buffers are refilled while a store may still hold their
        data."""
        buffer = bytearray(b"first")
        store.put("k", memoryview(buffer))
        assert store.create("c", memoryview(buffer))
        buffer[:] = b"later"
        assert (store.get("k"), store.get("c")) == (b"first", b"first")

    @pytest.mark.parametrize("nbytes", [0, 10, (5 << 20) + 1, LARGE_NBYTES])
    def test_what_is_put_bit_by_bit_is_whole(self, store: ObjectStore, nbytes: int) -> None:
        data, asked = random.Random(1).randbytes(nbytes), list[int]()

        def gate(piece: int) -> bool:
            asked.append(piece)
            return len(asked) < 4  # at full speed from the fourth piece on

        put_paced(store, "p", memoryview(data), gate)
        assert store.get("p") == data
        # a store that was not answered sends all of it again
        assert sum(asked) <= 2 * nbytes and (asked or not nbytes)

    @pytest.mark.parametrize("before", [b"old", None])
    def test_what_is_given_up_bit_by_bit_leaves_nothing(
        self, store: ObjectStore, before: bytes | None
    ) -> None:
        if before is not None:
            store.put("p", before)
        left = LARGE_NBYTES

        def gate(piece: int) -> bool:
            nonlocal left
            left -= piece
            if left <= LARGE_NBYTES // 2:
                raise StoreError("it takes too long")
            return True

        with pytest.raises(StoreError, match="it takes too long"):
            put_paced(store, "p", bytes(LARGE_NBYTES), gate)
        assert store.list("") == ([] if before is None else ["p"])
        if before is not None:
            assert store.get("p") == before

    @pytest.mark.parametrize(("start", "end"), RANGES)
    def test_ranges(self, store: ObjectStore, start: int | None, end: int | None) -> None:
        store.put("r", b"0123456789")
        assert store.get("r", start, end) == b"0123456789"[start:end]

    def test_a_range_beyond_the_end_is_short(self, store: ObjectStore) -> None:
        """Check that a truncated object looks truncated at once, not like a store that is down."""
        store.put("r", b"0123456789")
        assert store.get("r", 8, 16) == b"89"
        assert store.get("r", 10, 16) == b""
        assert store.get("r", 16, 32) == b""

    def test_not_found(self, store: ObjectStore) -> None:
        store.put("a/b", b"")
        for missing in ("a/c", "nowhere/at/all"):
            with pytest.raises(NotFound):
                store.get(missing)
            with pytest.raises(NotFound):
                store.get(missing, 0, 4)
            with pytest.raises(NotFound):
                store.size(missing)

    def test_list_is_by_prefix_and_sorted(self, store: ObjectStore) -> None:
        keys = ["a/1", "a/2/x", "a/20", "ab", "b/a/1", "c"]
        for key in reversed(keys):
            store.put(key, b"x")
        assert store.list("") == keys
        assert store.list("a") == ["a/1", "a/2/x", "a/20", "ab"]
        assert store.list("a/") == ["a/1", "a/2/x", "a/20"]
        assert store.list("a/2") == ["a/2/x", "a/20"]
        assert store.list("a/2/") == ["a/2/x"]
        assert store.list("c/") == []
        assert store.list("none/") == []
        store.delete("a/2/x")
        assert store.list("a/2") == ["a/20"]

    def test_list_sees_what_was_just_written(self, store: ObjectStore) -> None:
        for i in range(5):
            assert len(store.list("n/")) == i
            assert store.create(f"n/{i}", b"")

    def test_create_only_once(self, store: ObjectStore) -> None:
        assert store.create("c", b"first") is True
        assert store.create("c", b"second") is False
        assert store.create("c", b"first") is False
        assert store.get("c") == b"first"
        store.delete("c")
        assert store.create("c", b"third") is True

    def test_create_race_has_exactly_one_winner(self, store: ObjectStore) -> None:
        if not self.settles_races:
            pytest.skip("the server of this test looks and then writes, without a lock")
        writers = 8
        barrier = threading.Barrier(writers)

        def race(key: str, me: int) -> bool:
            barrier.wait()
            return store.create(key, b"%d" % me * 1000)

        with ThreadPoolExecutor(writers) as pool:
            for round_ in range(4):
                key = f"race/{round_}"
                won = list(pool.map(race, [key] * writers, range(writers)))
                assert won.count(True) == 1
                assert store.get(key) == b"%d" % won.index(True) * 1000

    def test_readers_never_see_a_mixture(self, store: ObjectStore) -> None:
        values = [bytes([i]) * 50_000 for i in range(4)]
        store.put("m", values[0])
        with ThreadPoolExecutor(4) as pool:
            writes = [pool.submit(store.put, "m", v) for v in values * 3]
            reads = [pool.submit(store.get, "m") for _ in range(10)]
            assert all(r.result() in values for r in reads)
            for w in writes:
                w.result()

    def test_two_stores_of_one_url_share_objects(
        self, opener: Callable[[str], ObjectStore]
    ) -> None:
        opener("").put("k", b"v")
        assert opener("/").get("k") == b"v"
        assert opener("-other").list("") == []

    def test_large_objects_come_back_to_where_they_are_wanted(self, store: ObjectStore) -> None:
        data = memoryview(random.Random(1).randbytes(LARGE_NBYTES))
        store.put("big", data)
        assert store.size("big") == LARGE_NBYTES
        start = 3_000_001
        buffer = bytearray(b"-" * (READ_NBYTES + 10))
        found = read_into(store, "big", start, memoryview(buffer)[5 : 5 + READ_NBYTES])
        assert found == READ_NBYTES
        assert buffer[5 : 5 + READ_NBYTES] == data[start : start + READ_NBYTES]
        assert buffer[:5] == buffer[-5:] == b"-----"

    def test_read_into_says_where_the_object_ends(self, store: ObjectStore) -> None:
        store.put("r", b"0123456789")
        buffer = bytearray(b"-" * 8)
        assert read_into(store, "r", 7, memoryview(buffer)) == 3
        assert buffer == b"789-----"
        assert read_into(store, "r", 10, memoryview(buffer)) == 0
        assert read_into(store, "r", 20, memoryview(buffer)) == 0
        assert read_into(store, "r", 2, memoryview(buffer)[:0]) == 0
        long = bytearray(READ_NBYTES)
        assert read_into(store, "r", 1, memoryview(long)) == 9
        assert long.startswith(b"123456789")
        with pytest.raises(NotFound):
            read_into(store, "missing", 0, memoryview(buffer))

    def test_unusual_keys(self, opener: Callable[[str], ObjectStore]) -> None:
        store = opener("/a b/ünder")
        keys = ["a b", "per%20cent", "plus+", "tilde~", "ümlaut"]
        for key in keys:
            store.put(key, key.encode())
        assert store.list("") == keys
        assert [store.get(key).decode() for key in keys] == keys

    def test_errors_are_store_errors(self, store: ObjectStore) -> None:
        """Check the class of errors: callers handle `StoreError` and its subclasses; anything else
        ends a run."""
        for call in (store.get, store.size):
            with pytest.raises(StoreError):
                call("missing")

    def test_the_probe_finds_it_fit(self, store: ObjectStore) -> None:
        """Run the probe that `harness launch` runs on a bucket before anything is started."""
        assert probe(store).missing == []
        assert store.list("") == []

    def test_a_snapshot_is_committed_read_and_pruned(self, store: ObjectStore) -> None:
        snapshots = Snapshots(store, chunk_nbytes=1000)
        for step in (1, 2):
            files = {"0.bin": random.Random(step).randbytes(5000)}
            data: dict[str, Any] = {"step": step}
            ref = Ref(0, step)
            snapshots.write(ref, 0, 1, files, {}, data, f"t{step}")
            manifest = snapshots.commit(ref, 1)
            assert manifest is not None and manifest == snapshots.load(ref)
            snapshots.verify(manifest)
            assert (
                snapshots.read(manifest, manifest.parts[0].key, 990, 2010)
                == files["0.bin"][990:2010]
            )
        assert snapshots.prune(lambda refs: [max(refs)]) == [Ref(0, 1)]
        newest = snapshots.latest()
        assert newest is not None and newest.ref == Ref(0, 2)
