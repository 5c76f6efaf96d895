"""The commit protocol: whatever fails, whenever, the newest snapshot is whole and nothing
committed is forgotten."""

import contextlib
import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from storage import (
    Keep,
    Manifest,
    MemoryStore,
    NotFound,
    ObjectStore,
    Ref,
    SnapshotCorrupt,
    Snapshots,
    StoreError,
    StoreUnavailable,
)
from storage.snapshots.reader_leases import Watch, reading
from storage.snapshots.snapshot_keys import DOOM, doom_key
from storage.stores.retries import Retrying
from storage.testing.faulty_store import Crash, FaultyStore, corrupt
from support.half_store import HalfAtFirst

T = TypeVar("T")
CHUNK = 64


def memory() -> MemoryStore:
    return MemoryStore(objects={})


def content(ref: Ref, rank: int) -> bytes:
    return f"{ref} of rank {rank}; ".encode() * 20


def write(snaps: Snapshots, ref: Ref, rank: int = 0, world: int = 1, token: str = "t") -> None:
    body = content(ref, rank)
    chunk = {
        "offsets": [rank * len(body)],
        "sizes": [len(body)],
        "part": "a.bin",
        "start": 0,
        "end": len(body),
    }
    tensors = {"w": {"shape": [world * len(body)], "dtype": "uint8", "chunks": [chunk]}}
    snaps.write(
        ref,
        rank,
        world,
        {"a.bin": body, "b.bin": memoryview(body)[:10]},
        tensors,
        {"step": ref.step, f"rank{rank}": token},
        token,
    )


def commit(snaps: Snapshots, ref: Ref, world: int = 1) -> Manifest:
    for rank in range(world):
        write(snaps, ref, rank, world)
    manifest = snaps.commit(ref, world)
    assert manifest is not None
    return manifest


def names_in(store: ObjectStore, prefix: str = "") -> set[str]:
    """What objects are of, but for the marks of what was pruned."""
    return {
        key.split("/")[2].removesuffix(".json")
        for key in store.list(prefix)
        if not key.endswith(DOOM)
    }


def never(ref: Ref, why: str) -> None:
    raise AssertionError(f"{ref} was called bad: {why}")


# ---- without faults ------------------------------------------------------------------------------
def test_it_exists_if_and_only_if_its_manifest_does() -> None:
    store = memory()
    snaps, ref = Snapshots(store, CHUNK), Ref(1, 10)
    assert snaps.latest() is None
    for rank in range(3):
        assert snaps.commit(ref, 3) is None
        assert snaps.refs() == []
        write(snaps, ref, rank, 3)
    assert snaps.latest() is None
    manifest = snaps.commit(ref, 3)
    assert manifest is not None
    assert snaps.refs() == [ref]
    assert snaps.latest() == snaps.load(ref) == snaps.commit(ref, 3) == manifest
    assert manifest.data == {"step": 10, "rank0": "t", "rank1": "t", "rank2": "t"}
    assert [p.key for p in manifest.parts[:2]] == [
        f"snapshots/parts/{ref}/r00000-t-a.bin",
        f"snapshots/parts/{ref}/r00000-t-b.bin",
    ]
    assert {c["part"] for c in manifest.tensors["w"]["chunks"]} <= {p.key for p in manifest.parts}
    assert sorted(k.rsplit("/", 1)[1] for k in store.list(f"snapshots/parts/{ref}/list-")) == [
        f"list-r0000{r}.json" for r in range(3)
    ]


def test_reads_are_verified_ranges() -> None:
    snaps, ref = Snapshots(memory(), CHUNK), Ref(1, 1)
    manifest = commit(snaps, ref)
    body, key = content(ref, 0), manifest.parts[0].key
    for start, end in [
        (0, len(body)),
        (0, 1),
        (63, 65),
        (64, 128),
        (100, 100),
        (len(body) - 1, len(body)),
    ]:
        assert snaps.read(manifest, key, start, end) == body[start:end]
    for start, end in [(-1, 3), (5, 4), (0, len(body) + 1)]:
        with pytest.raises(ValueError, match="has bytes"):
            snaps.read(manifest, key, start, end)
    done: list[tuple[int, int]] = []
    snaps.verify(manifest, lambda *progress: done.append(progress))
    assert done[-1] == (manifest.nbytes, manifest.nbytes)


def test_the_first_incarnation_of_a_rank_counts() -> None:
    snaps, ref = Snapshots(memory()), Ref(1, 1)
    first = snaps.write(ref, 0, 1, {"f": b"first"}, {}, {"n": 1}, "one")
    second = snaps.write(ref, 0, 1, {"f": b"second!"}, {}, {"n": 2}, "two")
    assert second == first
    manifest = snaps.commit(ref, 1)
    assert manifest is not None
    assert snaps.read(manifest, manifest.parts[0].key, 0, 5) == b"first"
    assert manifest.data == {"n": 1}


def test_the_newest_is_that_of_the_newest_epoch() -> None:
    snaps = Snapshots(memory())
    for ref in (Ref(1, 10), Ref(2, 15), Ref(1, 500)):
        commit(snaps, ref)
    assert snaps.refs() == [Ref(2, 15), Ref(1, 500), Ref(1, 10)]
    latest = snaps.latest()
    assert latest is not None
    assert latest.ref == Ref(2, 15)


def test_bad_calls() -> None:
    snaps = Snapshots(memory())
    for rank, world in ((1, 1), (-1, 2)):
        with pytest.raises(ValueError, match="rank"):
            write(snaps, Ref(1, 1), rank, world)
    for token in ("", "a/b", "a b"):
        with pytest.raises(ValueError, match="token"):
            write(snaps, Ref(1, 1), token=token)
    with pytest.raises(ValueError, match="at least 1"):
        snaps.commit(Ref(1, 1), 0)
    write(snaps, Ref(1, 1), 0, 2)
    write(snaps, Ref(1, 1), 1, 2)
    with pytest.raises(SnapshotCorrupt, match="one world"):
        snaps.commit(Ref(1, 1), 1)


# ---- damage --------------------------------------------------------------------------------------
PART = f"snapshots/parts/{Ref(1, 3)}/r00000-t-a.bin"
MANIFEST = f"snapshots/manifests/{Ref(1, 3)}.json"
OLDER = f"snapshots/manifests/{Ref(1, 2)}.json"


def three() -> Snapshots:
    snaps = Snapshots(memory(), CHUNK)
    for step in (1, 2, 3):
        commit(snaps, Ref(1, step))
    return snaps


@pytest.mark.parametrize(
    ("key", "how"),
    [
        *((PART, how) for how in ("truncate", "extend", "empty", "delete")),
        *((MANIFEST, how) for how in ("flip", "truncate", "extend", "empty")),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_visible_damage_is_passed_over_and_marked_by_nobody_who_only_looks(
    key: str, how: Any, seed: int
) -> None:
    snaps = three()
    corrupt(snaps.store, key, how, random.Random(seed))
    bad: list[tuple[Ref, str]] = []
    found = snaps.latest(lambda ref, why: bad.append((ref, why)))
    assert found is not None
    assert found.ref == Ref(1, 2)
    assert [ref for ref, _ in bad] == [Ref(1, 3)]
    assert bad[0][1] != "" and snaps.quarantined() == set()
    assert snaps.refs() == [Ref(1, 3), Ref(1, 2), Ref(1, 1)]
    snaps.quarantine(Ref(1, 3), bad[0][1])
    assert snaps.why(Ref(1, 3)) == bad[0][1] and snaps.refs() == [Ref(1, 2), Ref(1, 1)]
    assert snaps.latest(never) == found


def test_swapped_manifests_are_both_bad() -> None:
    snaps = three()
    corrupt(snaps.store, MANIFEST, "swap", random.Random(0), other=OLDER)
    bad: list[Ref] = []
    found = snaps.latest(lambda ref, why: bad.append(ref))
    assert found is not None
    assert found.ref == Ref(1, 1)
    assert bad == [Ref(1, 3), Ref(1, 2)]


@pytest.mark.parametrize("how", ["flip", "swap"])
@pytest.mark.parametrize("seed", range(5))
def test_damage_that_sizes_do_not_show_is_found_by_hashes(how: Any, seed: int) -> None:
    snaps = three()
    corrupt(snaps.store, PART, how, random.Random(seed), other=PART.replace("003-e", "002-e"))
    newest = snaps.latest(never)
    assert newest is not None
    with pytest.raises(SnapshotCorrupt, match="hash differs") as e:
        snaps.verify(newest)
    with pytest.raises(SnapshotCorrupt):
        snaps.read(newest, PART, 0, newest.part(PART).nbytes)
    snaps.quarantine(newest.ref, str(e.value))
    snaps.quarantine(newest.ref, "another reason comes too late")
    assert "hash differs" in snaps.why(newest.ref)
    found = snaps.latest(never)
    assert found is not None
    assert found.ref == Ref(1, 2)
    if how == "swap":
        with pytest.raises(SnapshotCorrupt):
            snaps.verify(found)


def test_a_flip_outside_of_what_is_read_does_no_harm() -> None:
    snaps = three()
    newest = snaps.load(Ref(1, 3))
    stored = bytearray(snaps.store.get(PART))
    stored[CHUNK + 5] ^= 1
    snaps.store.put(PART, bytes(stored))
    assert snaps.read(newest, PART, 0, CHUNK) == content(Ref(1, 3), 0)[:CHUNK]
    with pytest.raises(SnapshotCorrupt, match=f"bytes from {CHUNK}:"):
        snaps.read(newest, PART, CHUNK - 1, CHUNK + 1)


def test_a_listing_that_lacks_parts_for_a_moment_takes_no_commit_back() -> None:
    """The manifest was listed a moment later, and deleted: the last snapshot was lost."""

    class Blinks(MemoryStore):
        blinks = 1

        def list(self, prefix: str) -> list[str]:
            found = super().list(prefix)
            if MANIFEST in self._objects and prefix.startswith("snapshots/parts/") and self.blinks:
                self.blinks -= 1
                return []
            return found

    snaps = Snapshots(Blinks(objects={}))
    assert commit(snaps, Ref(1, 3)).ref == Ref(1, 3)
    assert snaps.store.blinks == 0 and snaps.refs() == [Ref(1, 3)]  # type: ignore[attr-defined]


def test_a_deleted_manifest_is_a_snapshot_that_never_was() -> None:
    snaps = three()
    snaps.store.delete(MANIFEST)
    found = snaps.latest(never)
    assert found is not None
    assert found.ref == Ref(1, 2)


def test_a_damaged_part_list_is_never_committed() -> None:
    snaps = Snapshots(memory())
    write(snaps, Ref(1, 1))
    corrupt(snaps.store, f"snapshots/parts/{Ref(1, 1)}/list-r00000.json", "flip", random.Random(3))
    with pytest.raises(SnapshotCorrupt):
        snaps.commit(Ref(1, 1), 1)
    assert snaps.refs() == []


@pytest.mark.parametrize("group_ranks", [100, 1])
def test_a_part_list_that_is_read_by_half_for_a_moment_is_committed(
    group_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Snapshots, "group_ranks", group_ranks)
    snaps, ref = Snapshots(Retrying(HalfAtFirst(f"half-{group_ranks}"))), Ref(1, 10)
    for rank in range(2):
        write(snaps, ref, rank, world=2)
    assert commit(snaps, ref, world=2).world == 2


def test_a_part_that_is_gone_before_the_commit_is_never_committed() -> None:
    snaps = Snapshots(memory())
    write(snaps, Ref(1, 1))
    snaps.store.delete(f"snapshots/parts/{Ref(1, 1)}/r00000-t-a.bin")
    assert snaps.commit(Ref(1, 1), 1) is None
    assert snaps.refs() == []


def test_all_bad_is_none_and_not_a_crash_loop() -> None:
    snaps = three()
    for key in snaps.store.list("snapshots/manifests/"):
        corrupt(snaps.store, key, "empty", random.Random(0))
    bad: list[Ref] = []
    assert snaps.latest(lambda ref, why: bad.append(ref)) is None
    assert bad == [Ref(1, 3), Ref(1, 2), Ref(1, 1)]
    assert snaps.prune(Keep(1)) == []


def test_foreign_objects_are_left_alone() -> None:
    snaps = three()
    foreign = [
        "snapshots/manifests/notes.txt",
        "snapshots/manifests/.x/y",
        "snapshots/parts/readme",
        "snapshots/quarantine/z.json",
    ]
    foreign += ["samples/0000000001-0000000002-abc.jsonl", "run.json"]
    for key in foreign:
        snaps.store.put(key, b"mine")
    assert snaps.refs() == [Ref(1, 3), Ref(1, 2), Ref(1, 1)]
    snaps.prune(Keep(1))
    assert all(snaps.store.get(key) == b"mine" for key in foreign)


class Silent(MemoryStore):
    """Answers nothing about some keys."""

    def __init__(self, inner: ObjectStore, about: str, error: type[StoreError] = StoreUnavailable):
        super().__init__(objects=inner._objects)  # type: ignore[attr-defined]
        self.about, self.error = about, error

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        if self.about in key:
            raise self.error(key)
        return super().get(key, start, end)

    def size(self, key: str) -> int:
        if self.about in key:
            raise self.error(key)
        return super().size(key)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        if self.about in key:
            raise self.error(key)
        return super().create(key, data)


@pytest.mark.parametrize("about", ["manifests/0000000003", "parts/0000000003"])
def test_silence_is_not_corruption(about: str) -> None:
    inner = three().store
    with pytest.raises(StoreUnavailable):
        Snapshots(Silent(inner, about)).latest(never)
    assert Snapshots(inner).quarantined() == set()


def test_what_is_listed_and_never_found_is_no_answer() -> None:
    """Or a reader would go round for as long as the store says 404."""
    inner = three().store
    with pytest.raises(StoreUnavailable, match="contradicts itself"):
        Snapshots(Silent(inner, "manifests/0000000003", NotFound)).latest(never)


# ---- pruning -------------------------------------------------------------------------------------
def test_prune_leaves_what_is_kept_and_nothing_else() -> None:
    snaps = Snapshots(memory())
    for step in range(1, 7):
        commit(snaps, Ref(1, step), world=2)
    snaps.write(Ref(1, 6), 1, 2, {"a.bin": b"a late incarnation"}, {}, {}, "late")
    assert snaps.prune(Keep(last=2, every=4)) == [Ref(1, 3), Ref(1, 2)]
    assert snaps.refs() == [Ref(1, 6), Ref(1, 5), Ref(1, 4), Ref(1, 1)]
    for ref in snaps.refs():
        snaps.verify(snaps.load(ref))
    assert names_in(snaps.store) == {ref.name for ref in snaps.refs()}
    assert snaps.prune(Keep(last=2, every=4)) == []


def test_prune_never_deletes_the_newest_whole_one() -> None:
    snaps = three()
    corrupt(snaps.store, PART, "delete", random.Random(0))
    snaps.quarantine(Ref(1, 3), "its part is gone")
    # 3 is bad but newer: left for people to look at
    assert snaps.prune(lambda refs: []) == [Ref(1, 1)]
    found = snaps.latest(never)
    assert found is not None
    assert found.ref == Ref(1, 2)
    snaps.verify(found)
    commit(snaps, Ref(2, 3))
    assert set(snaps.prune(lambda refs: [])) == {Ref(1, 3), Ref(1, 2)}
    assert snaps.quarantined() == {Ref(1, 3)}  # the mark stays: a late writer cannot bring it back


@pytest.mark.parametrize("marked", [False, True])
def test_work_that_a_new_epoch_has_still_to_do_again_is_not_pruned(marked: bool) -> None:
    """Epoch 2 began anew, for whatever reason. What epoch 1 has done stays until epoch 2 has
    come as far."""
    snaps = Snapshots(memory())
    for step in (800, 900, 1000):
        commit(snaps, Ref(1, step))
        if marked:
            snaps.quarantine(Ref(1, step), "a bad reader said so")
    old = {Ref(1, step) for step in (800, 900, 1000)}
    for step in (30, 60, 90, 120):
        commit(snaps, Ref(2, step))
        snaps.prune(Keep(2))
        assert snaps.manifests()[0] >= old
    for ref in old:
        snaps.verify(snaps.load(ref))
    assert snaps.prune(lambda refs: []) == [Ref(2, 90)] and snaps.manifests()[0] == {
        *old,
        Ref(2, 120),
    }
    commit(snaps, Ref(2, 950))
    snaps.prune(Keep(1))
    assert snaps.manifests()[0] == {Ref(2, 950), Ref(1, 1000)}
    commit(snaps, Ref(2, 1000))
    snaps.prune(Keep(1))
    assert snaps.manifests()[0] == {Ref(2, 1000)}


@pytest.mark.parametrize("prefix", ["snapshots/manifests/", "snapshots/"])
def test_a_listing_that_turns_empty_deletes_nothing(prefix: str) -> None:
    """A store that says 404 for a while, from any of its answers on: no snapshot that stays is
    deleted for it."""

    class Spell(MemoryStore):
        left = 0

        def list(self, prefix_: str) -> list[str]:
            self.left -= 1
            return [] if self.left < 0 and prefix_.startswith(prefix) else super().list(prefix_)

        def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
            if self.left < 0 and key.startswith(prefix):
                raise NotFound(key)
            return super().get(key, start, end)

    for answers in range(12):
        snaps = three()
        base = snaps.load(Ref(1, 1))
        parts = snaps.store.get(base.parts[0].key)
        snaps.write(Ref(1, 4), 0, 1, {"a.bin": parts[:-1] + b"!"}, {}, {}, "t", base)
        assert snaps.commit(Ref(1, 4), 1) is not None
        spell = Spell(objects=snaps.store._objects)  # type: ignore[attr-defined]
        spell.left = answers
        with contextlib.suppress(StoreUnavailable):
            Snapshots(spell, CHUNK).prune(Keep(2), never)
        for ref in (Ref(1, 4), Ref(1, 3)):
            snaps.verify(snaps.load(ref))


def test_a_quarantined_snapshot_keeps_what_it_lies_in() -> None:
    """Its mark may be taken back."""
    snaps, body = Snapshots(memory(), CHUNK), random.Random(1).randbytes(8 * CHUNK)
    first = save(snaps, Ref(1, 10), body)
    second = save(snaps, Ref(1, 90), changed(body, (0, 1)), first)
    save(snaps, Ref(2, 20), b"x" * 100)
    snaps.quarantine(second.ref, "a bad reader said so")
    assert snaps.prune(Keep(1)) == [Ref(1, 10)]
    snaps.unmark(second.ref)
    snaps.verify(snaps.load(second.ref))


def test_orphans_are_collected_when_they_can_no_longer_matter() -> None:
    snaps = Snapshots(memory())
    for ref in (Ref(1, 5), Ref(1, 50), Ref(2, 10), Ref(2, 30), Ref(3, 1)):
        write(snaps, ref, 0, 2)
    assert snaps.prune(Keep(1)) == []  # nothing is committed: all of them may be in the making
    commit(snaps, Ref(2, 20))
    # ahead or not: they were never committed
    assert snaps.prune(Keep(1)) == [Ref(2, 10), Ref(1, 50), Ref(1, 5)]
    assert {key.split("/")[2] for key in snaps.store.list("snapshots/parts/")} == {
        Ref(2, 20).name,
        Ref(2, 30).name,
        Ref(3, 1).name,
    }


# ---- one call fails, every call in turn ----------------------------------------------------------
class Watched(MemoryStore):
    """After each write, looks whether everything that is listed is whole, and nothing told as
    committed is forgotten."""

    def __init__(self) -> None:
        super().__init__(objects={})
        self.told = Ref(0, 0)

    def look(self) -> None:
        snaps = Snapshots(MemoryStore(objects=self._objects), CHUNK)
        refs = snaps.refs()
        for ref in refs:
            snaps.check(snaps.load(ref))
        assert max([Ref(0, 0), *refs]) >= self.told

    def put(self, key: str, data: bytes | memoryview) -> None:
        super().put(key, data)
        self.look()

    def create(self, key: str, data: bytes | memoryview) -> bool:
        created = super().create(key, data)
        self.look()
        return created

    def delete(self, key: str) -> None:
        super().delete(key)
        self.look()


def a_life(inner: Watched, store: ObjectStore) -> None:
    """Two ranks, two epochs, prunes and readers. A failed operation is repeated; a crashed one
    by a new process (token)."""
    snaps, lives = Snapshots(store, CHUNK), 0

    def again(do: Callable[[], T]) -> T:
        nonlocal lives
        try:
            return do()
        except (StoreUnavailable, Crash) as e:
            lives += isinstance(e, Crash)
            return do()

    for ref in (Ref(1, 1), Ref(1, 2), Ref(1, 3), Ref(2, 3), Ref(2, 4)):
        for rank in range(2):
            again(lambda ref=ref, rank=rank: write(snaps, ref, rank, 2, token=f"life{lives}"))  # type: ignore[misc]
            manifest = again(lambda ref=ref: snaps.commit(ref, 2))  # type: ignore[misc]
            assert (manifest is not None) == (rank == 1)
            if manifest is not None:
                inner.told = manifest.ref
        newest = again(lambda: snaps.latest(never))
        assert newest is not None
        assert newest.ref == ref
        if ref.step % 2 == 0:
            again(lambda: snaps.prune(Keep(1)))
    again(lambda: snaps.prune(Keep(1)))


def test_a_life_without_faults() -> None:
    store = Watched()
    counting = FaultyStore(store, random.Random(0))
    a_life(store, counting)
    assert counting.calls > 100
    assert names_in(store) == {Ref(2, 4).name}


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("before", marks=pytest.mark.proof),
        pytest.param("after", marks=pytest.mark.proof),
        "crash-before",
        "crash-after",
    ],
)
def test_any_single_call_may_fail(mode: Any) -> None:
    counting = FaultyStore(Watched(), random.Random(0))
    a_life(counting.inner, counting)  # type: ignore[arg-type]
    for call in range(1, counting.calls + 1):
        store = Watched()
        a_life(store, FaultyStore(store, random.Random(0), fail_call=call, mode=mode))
        snaps = Snapshots(store, CHUNK)
        snaps.prune(Keep(1))
        assert snaps.refs() == [Ref(2, 4)], f"call {call}"
        snaps.verify(snaps.load(Ref(2, 4)))
        assert names_in(store) == {Ref(2, 4).name}, f"call {call}"


@pytest.mark.parametrize("seed", range(10))
def test_a_bad_store_never_leads_to_a_bad_snapshot(seed: int) -> None:
    store = Watched()
    snaps = Snapshots(
        FaultyStore(
            store, random.Random(seed), unavailable=0.03, unknown=0.03, full=0.02, torn=0.02
        ),
        CHUNK,
    )
    committed = 0
    for step in range(1, 30):
        with contextlib.suppress(StoreError):
            write(snaps, Ref(1, step), token=f"{step}")
            manifest = snaps.commit(Ref(1, step), 1)
            assert manifest is not None
            store.told, committed = manifest.ref, committed + 1
            snaps.prune(Keep(2), never)
    assert committed > 10


# ---- everything at once --------------------------------------------------------------------------
class Turns:
    """Runs actors as threads of which one moves at a time, from store call to store call; the
    seed says which."""

    def __init__(self, rng: random.Random, look: Callable[[], None]):
        self.rng, self.look = rng, look
        self.mine: dict[str, threading.Semaphore] = {}
        self.back = threading.Semaphore(0)
        self.dying: set[str] = set()
        self.errors: list[BaseException] = []
        self.history: list[str] = []
        self.dead: set[str] = set()

    def run(self, actors: dict[str, Callable[[], None]], crash: float) -> None:
        alive = {
            name: threading.Thread(target=self._act, args=(name, do), daemon=True)
            for name, do in actors.items()
        }
        self.mine = {name: threading.Semaphore(0) for name in alive}
        for thread in alive.values():
            thread.start()
        while alive and not self.errors:
            name = self.rng.choice(sorted(alive))
            if self.rng.random() < crash and not name.startswith("reader"):
                self.dying.add(name)
            self.history.append(name)
            self.mine[name].release()
            self.back.acquire()
            self.look()
            alive = {name: thread for name, thread in alive.items() if name not in self.dead}
        if self.errors:
            raise self.errors[0]

    def _act(self, name: str, do: Callable[[], None]) -> None:
        self.mine[name].acquire()
        try:
            do()
        except Crash:
            pass
        except BaseException as e:
            self.errors.append(e)
        self.dead.add(name)
        self.back.release()

    def pause(self, name: str) -> None:
        if name in self.dying:
            raise Crash
        self.back.release()
        self.mine[name].acquire()


class TurnStore(MemoryStore):
    """Gives the turn away before each call; a dying actor dies after a call took effect or
    before the next."""

    def __init__(self, turns: Turns, name: str, objects: dict[str, bytes]):
        super().__init__(objects=objects)
        self.turns, self.name = turns, name

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        self.turns.pause(self.name)
        return super().get(key, start, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.turns.pause(self.name)
        super().put(key, data)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        self.turns.pause(self.name)
        return super().create(key, data)

    def list(self, prefix: str) -> list[str]:
        self.turns.pause(self.name)
        return super().list(prefix)

    def delete(self, key: str) -> None:
        self.turns.pause(self.name)
        super().delete(key)

    def size(self, key: str) -> int:
        self.turns.pause(self.name)
        return super().size(key)


def everything_at_once(seed: int, crash: float) -> tuple[list[str], list[Ref]]:
    rng = random.Random(seed)
    objects: dict[str, bytes] = {}
    told: list[Ref] = [Ref(0, 0)]
    raw = Snapshots(MemoryStore(objects=objects), CHUNK)

    def look() -> None:
        refs = raw.refs()
        if refs:
            raw.verify(raw.load(refs[0]))  # the newest is whole at every instant
        assert max([Ref(0, 0), *refs]) >= max(told)
        assert raw.quarantined() == set()  # concurrency is never taken for damage

    turns = Turns(rng, look)

    def snaps(name: str) -> Snapshots:
        return Snapshots(TurnStore(turns, name, objects), CHUNK)

    def rank(
        name: str, epoch: int, rank: int, world: int, steps: range
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        def act() -> None:
            mine = snaps(name)
            for step in steps:
                ref = Ref(epoch, step)
                write(mine, ref, rank, world, token=name)
                if mine.commit(ref, world) is not None:
                    told.append(ref)

        yield name, act

    def prune(name: str) -> Iterator[tuple[str, Callable[[], None]]]:
        def act() -> None:
            for _ in range(3):
                snaps(name).prune(Keep(last=1 + seed % 2, every=seed % 3), never)

        yield name, act

    def read(name: str) -> Iterator[tuple[str, Callable[[], None]]]:
        def act() -> None:
            mine = snaps(name)
            for _ in range(4):
                before = max(told)
                found = mine.latest(never)
                assert (found.ref if found else Ref(0, 0)) >= before
                if found is not None:
                    try:
                        mine.verify(found)
                    except SnapshotCorrupt:  # only if it was pruned while we read it
                        assert found.ref not in raw.refs()

        yield name, act

    actors = dict(
        one
        for group in (
            # a world that does not know that it is over
            *(rank(f"old{r}", 1, r, 2, range(1, 6)) for r in range(2)),
            *(rank(f"new{r}", 2, r, 3, range(2, 5)) for r in range(3)),
            rank("new1again", 2, 1, 3, range(3, 5)),  # a second incarnation of the same rank
            prune("prune1"),
            prune("prune2"),
            read("reader"),
        )
        for one in group
    )
    turns.run(actors, crash)
    refs = raw.refs()
    raw.prune(Keep(1), never)
    # one quiet prune and the bucket holds one whole snapshot, and what may still become a newer one
    if refs:
        ahead = {ref for ref in refs if ref.step > refs[0].step}
        assert raw.refs() == [ref for ref in refs if ref in {refs[0], *ahead}]
        raw.verify(raw.load(refs[0]))
        assert min(set(map(Ref.parse, names_in(raw.store))) - ahead) == refs[0]
    return turns.history, refs


@pytest.mark.parametrize("crash", [0.0, 0.01])
def test_ranks_zombies_pruners_and_readers_in_any_order(crash: float) -> None:
    newest = set()
    for seed in range(60):
        try:
            _, refs = everything_at_once(seed, crash)
        except BaseException as e:
            raise AssertionError(f"everything_at_once(seed={seed}, crash={crash})") from e
        newest.add(refs[0] if refs else None)
        if crash == 0.0:
            assert refs[0] == Ref(2, 4)
    assert len(newest) > (1 if crash else 0)


def test_the_order_follows_from_the_seed() -> None:
    assert everything_at_once(3, 0.01) == everything_at_once(3, 0.01)


def test_a_late_commit_does_not_bring_a_pruned_snapshot_back() -> None:
    """The narrow race by hand: the lists are read, everything is pruned, then the manifest is
    written."""

    class Late(MemoryStore):
        def create(self, key: str, data: bytes | memoryview) -> bool:
            if key.endswith(f"{Ref(1, 1)}.json"):
                commit(Snapshots(MemoryStore(objects=self._objects)), Ref(1, 2))
                assert Snapshots(MemoryStore(objects=self._objects)).prune(Keep(1)) == [Ref(1, 1)]
            return super().create(key, data)

    store = memory()
    write(Snapshots(store), Ref(1, 1))
    assert Snapshots(Late(objects=store._objects)).commit(Ref(1, 1), 1) is None
    assert Snapshots(store).refs() == [Ref(1, 2)]


def test_a_late_commit_beside_a_pruner_that_died_half_way() -> None:
    """Lists and manifest are deleted, the parts are still there, and then the late manifest
    comes."""

    class Late(MemoryStore):
        def create(self, key: str, data: bytes | memoryview) -> bool:
            if key.endswith(f"{Ref(1, 1)}.json"):
                others = MemoryStore(objects=self._objects)
                commit(Snapshots(others), Ref(1, 2))
                counting = FaultyStore(others, random.Random(0))
                Snapshots(counting).latest()
                # three listings, its doom, who reads, the list of rank 0, the manifest
                dies_at = counting.calls + 3 + 2 + 2
                with pytest.raises(Crash):
                    Snapshots(
                        FaultyStore(others, random.Random(0), fail_call=dies_at, mode="crash-after")
                    ).prune(Keep(1))
                assert [
                    k.rsplit("-", 1)[1] for k in others.list(f"snapshots/parts/{Ref(1, 1)}/")
                ] == ["a.bin", "b.bin"]
            return super().create(key, data)

    store = memory()
    write(Snapshots(store), Ref(1, 1))
    assert Snapshots(Late(objects=store._objects)).commit(Ref(1, 1), 1) is None
    assert Snapshots(store).refs() == [Ref(1, 2)]
    assert Snapshots(store).prune(Keep(1)) == [Ref(1, 1)]


def test_commits_between_the_deletes_of_a_prune() -> None:
    class Busy(MemoryStore):
        """After each delete, every rank of the world that is being pruned tries to commit once
        more."""

        def delete(self, key: str) -> None:
            super().delete(key)
            others = Snapshots(MemoryStore(objects=self._objects), CHUNK)
            for step in (1, 2):
                others.commit(Ref(1, step), 1)
            for ref in others.refs():
                others.check(others.load(ref))

    store = three().store
    assert Snapshots(Busy(objects=store._objects)).prune(Keep(1)) == [Ref(1, 2), Ref(1, 1)]  # type: ignore[attr-defined]
    assert Snapshots(store).refs() == [Ref(1, 3)]


@pytest.mark.parametrize("before", [MANIFEST, PART])
def test_latest_looks_again_if_what_it_saw_was_pruned(before: str) -> None:
    class Slow(MemoryStore):
        """Between our listing and our first look, or our look at the manifest and that at its
        parts, others commit and prune."""

        def others(self, key: str) -> None:
            if key == before and MANIFEST in self._objects:
                others = Snapshots(MemoryStore(objects=self._objects))
                commit(others, Ref(1, 4))
                others.prune(Keep(1))

        def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
            self.others(key)
            return super().get(key, start, end)

        def size(self, key: str) -> int:
            self.others(key)
            return super().size(key)

    found = Snapshots(Slow(objects=three().store._objects)).latest(never)  # type: ignore[attr-defined]
    assert found is not None
    assert found.ref == Ref(1, 4)


def test_what_is_stored_is_plain_json_and_the_bytes_that_were_given() -> None:
    snaps = three()
    for key in snaps.store.list(""):
        stored = snaps.store.get(key)
        if key.endswith(".json"):
            assert isinstance(json.loads(stored), dict)
        else:
            assert content(Ref(1, int(key.split("/")[2][:10])), 0).startswith(stored)
    with pytest.raises(NotFound):
        snaps.why(Ref(1, 3))


# ---- references to older snapshots ---------------------------------------------------------------
def save(
    snaps: Snapshots, ref: Ref, body: bytes, base: Manifest | None = None, **data: Any
) -> Manifest:
    chunk = {"offsets": [0], "sizes": [len(body)], "part": "a.bin", "start": 0, "end": len(body)}
    snaps.write(
        ref,
        0,
        1,
        {"a.bin": body},
        {"w": {"shape": [len(body)], "dtype": "uint8", "chunks": [chunk]}},
        data,
        "t",
        base,
    )
    manifest = snaps.commit(ref, 1)
    assert manifest is not None
    return manifest


def whole(snaps: Snapshots, manifest: Manifest) -> bytes:
    return b"".join(snaps.read(manifest, p.key, 0, p.nbytes) for p in manifest.parts)


def changed(body: bytes, *places: tuple[int, int]) -> bytes:
    found = bytearray(body)
    for start, end in places:
        found[start:end] = random.Random(start).randbytes(end - start)
    return bytes(found)


def test_only_changed_chunks_are_stored_again_and_their_objects_outlive_their_snapshot() -> None:
    store = memory()
    snaps = Snapshots(store, CHUNK)
    bodies = [random.Random(1).randbytes(40 * CHUNK + 7)]
    bodies.append(changed(bodies[0], (10 * CHUNK + 3, 12 * CHUNK), (30 * CHUNK, 30 * CHUNK + 1)))
    # the first and the last, short chunk
    bodies.append(changed(bodies[1], (0, 5), (40 * CHUNK, 40 * CHUNK + 7)))
    base, kept = None, []
    for i, body in enumerate(bodies):
        base = save(snaps, Ref(1, i + 1), body, base)
        kept.append(base)
        assert base.nbytes == len(body)
    assert [m.own_nbytes for m in kept] == [40 * CHUNK + 7, 3 * CHUNK, CHUNK + 7]
    assert kept[2].bases == (Ref(1, 2),) and kept[2].previous == kept[1].link
    for manifest, body in zip(kept, bodies, strict=True):
        snaps.verify(manifest)
        assert whole(snaps, snaps.load(manifest.ref)) == body
        for start, end in [
            (3, 11 * CHUNK),
            (29 * CHUNK + 1, 31 * CHUNK + 1),
            (40 * CHUNK - 1, 40 * CHUNK + 7),
        ]:
            assert snaps.read(manifest, manifest.parts[0].key, start, end) == body[start:end]
    assert snaps.prune(Keep(1)) == [Ref(1, 2), Ref(1, 1)]
    assert snaps.refs() == [Ref(1, 3)] and snaps.prune(Keep(1)) == []
    snaps.verify(kept[2])
    assert whole(Snapshots(store), snaps.load(Ref(1, 3))) == bodies[2]
    last = save(snaps, Ref(1, 4), random.Random(9).randbytes(1000), kept[2])
    assert not last.refers and last.bases == ()
    snaps.prune(Keep(1))
    assert names_in(store) == {Ref(1, 4).name}  # nobody refers to them any more


def test_little_that_is_unchanged_keeps_no_old_object_alive() -> None:
    snaps = Snapshots(memory(), CHUNK)
    first = save(snaps, Ref(1, 1), random.Random(1).randbytes(20 * CHUNK))
    second = save(snaps, Ref(1, 2), changed(whole(snaps, first), (0, 11 * CHUNK)), first)
    assert second.own_nbytes == 20 * CHUNK and not second.refers


def test_a_base_that_was_pruned_or_found_bad_is_no_base() -> None:
    snaps, body = Snapshots(memory(), CHUNK), random.Random(1).randbytes(8 * CHUNK)
    first = save(snaps, Ref(1, 1), body)
    save(snaps, Ref(1, 2), random.Random(2).randbytes(8 * CHUNK))
    files = {"a.bin": body}
    snaps.write(Ref(1, 3), 0, 1, files, {}, {}, "t", first)
    assert not snaps.hopeless(Ref(1, 3), first.ref)
    snaps.prune(lambda refs: [])
    assert snaps.commit(Ref(1, 3), 1) is None and snaps.hopeless(Ref(1, 3), first.ref)
    second = save(snaps, Ref(1, 5), random.Random(3).randbytes(8 * CHUNK))
    snaps.quarantine(second.ref, "for the test")
    snaps.write(
        Ref(1, 6), 0, 1, {"a.bin": random.Random(3).randbytes(8 * CHUNK)}, {}, {}, "t", second
    )
    assert snaps.commit(Ref(1, 6), 1) is None


@pytest.mark.parametrize("how", ["flip", "truncate", "delete", "empty", "extend"])
def test_damage_of_an_object_that_two_snapshots_lie_in_spoils_both_and_no_third(how: Any) -> None:
    snaps, body = Snapshots(memory(), CHUNK), random.Random(1).randbytes(8 * CHUNK)
    third = save(snaps, Ref(1, 1), random.Random(2).randbytes(100))
    first = save(snaps, Ref(1, 2), body)
    save(snaps, Ref(1, 3), changed(body, (0, 1)), first)
    corrupt(snaps.store, first.parts[0].key, how, random.Random(4))
    bad = []
    while (found := snaps.latest(lambda ref, why: bad.append(ref))) is not None:
        try:
            snaps.verify(found)
            break
        except SnapshotCorrupt as e:
            snaps.quarantine(found.ref, str(e))
    assert found == third


def test_another_runs_manifest_in_the_chain_is_found() -> None:
    snaps, other = Snapshots(memory(), CHUNK), Snapshots(memory(), CHUNK)
    first = save(snaps, Ref(1, 1), b"one" * 100)
    second = save(snaps, Ref(1, 2), b"two" * 100, first)
    snaps.verify(second)
    wrong = save(other, Ref(1, 1), b"eins" * 100)
    for key in (*wrong.objects, f"snapshots/manifests/{wrong.ref}.json"):
        snaps.store.put(key, other.store.get(key))
    snaps.verify(snaps.load(Ref(1, 1)))  # whole in itself
    with pytest.raises(SnapshotCorrupt, match="follows"):
        snaps.verify(second)


def test_the_best_by_a_metric_stays() -> None:
    snaps = Snapshots(memory())
    for step, loss in enumerate([3.0, 1.0, float("nan"), 2.0, 5.0], 1):
        save(snaps, Ref(1, step), b"x", loss=loss, metrics={"accuracy": -loss} if step != 4 else {})
    assert snaps.prune(Keep(1, best="accuracy:max")) == [Ref(1, 4), Ref(1, 3), Ref(1, 1)]
    assert snaps.refs() == [Ref(1, 5), Ref(1, 2)]
    assert snaps.prune(Keep(1, best="loss:max")) == [Ref(1, 2)]


def test_what_is_read_stays_until_its_reader_is_done_or_dead() -> None:
    snaps, now_s = three(), [0.0]
    watch = Watch(60.0, lambda: now_s[0])
    with reading(snaps, Ref(1, 1)) as ours:
        assert ours
        assert snaps.prune(Keep(1), expired=watch) == [Ref(1, 2)]
        assert snaps.refs() == [Ref(1, 3), Ref(1, 1)]  # it may yet turn out to be the best
        snaps.verify(snaps.load(Ref(1, 1)))
    assert snaps.prune(Keep(1), expired=watch) == [Ref(1, 1)]

    snaps = three()
    snaps.store.create(doom_key(Ref(1, 1)), b"{}")
    with reading(snaps, Ref(1, 1)) as too_late:
        assert not too_late

    snaps = three()
    assert snaps.begin_reading(Ref(1, 1), "dies")
    for beat, t_s in enumerate([0.0, 59.0, 118.0], 1):
        now_s[0] = t_s
        snaps.still_reading(Ref(1, 1), "dies", beat)
        assert Ref(1, 1) not in snaps.prune(Keep(1), expired=watch)
    now_s[0] = 177.0
    assert snaps.prune(Keep(1), expired=watch) == [] and snaps.being_read() == {Ref(1, 1)}
    now_s[0] = 178.0
    assert snaps.prune(Keep(1), expired=watch) == [Ref(1, 1)] and snaps.being_read() == set()
