"""The store that fails on purpose does what it says, and nothing else."""

import contextlib
import random

import pytest

from storage import MemoryStore, NotFound, ObjectStore, Retrying, StoreError, StoreUnavailable
from storage.testing.faulty_store import Crash, FaultyStore, corrupt


def memory() -> MemoryStore:
    return MemoryStore(objects={})


def test_without_faults_it_is_the_store() -> None:
    store = FaultyStore(memory(), random.Random(0))
    assert isinstance(store, ObjectStore)
    assert store.create("a", b"1") is True
    assert store.create("a", b"2") is False
    store.put("b", b"3")
    store.delete("b")
    assert (store.get("a", 0, 1), store.list(""), store.size("a")) == (b"1", ["a"], 1)
    assert [what for _, what, _, _ in store.log] == [
        "create",
        "create",
        "put",
        "delete",
        "get",
        "list",
        "size",
    ]
    assert store.calls == 7


@pytest.mark.parametrize(
    ("mode", "error", "happened"),
    [
        ("before", StoreUnavailable, False),
        ("throttled", StoreUnavailable, False),
        ("after", StoreUnavailable, True),
        ("full", StoreError, False),
        ("crash-before", Crash, False),
        ("crash-after", Crash, True),
    ],
)
def test_one_call_fails_exactly_once(mode: str, error: type, happened: bool) -> None:
    inner = memory()
    store = FaultyStore(inner, random.Random(0), fail_call=2, mode=mode)  # type: ignore[arg-type]
    store.put("a", b"1")
    with pytest.raises(error, match=None if error is Crash else "injected"):
        store.put("b", b"2")
    assert inner.list("") == (["a", "b"] if happened else ["a"])
    store.put("b", b"3")
    assert store.log[1] == (2, "put", "b", mode)


def test_torn_reads() -> None:
    store = FaultyStore(memory(), random.Random(0), fail_call=2, mode="torn")
    store.put("a", b"0123456789")
    assert store.get("a") == b"01234"
    assert store.get("a") == b"0123456789"


def test_torn_reads_to_where_they_are_wanted() -> None:
    store = FaultyStore(memory(), random.Random(0), fail_call=2, mode="torn")
    store.put("a", b"0123456789")
    buffer = bytearray(10)
    assert store.read_into("a", 0, memoryview(buffer)) == 5
    assert store.read_into("a", 2, memoryview(buffer)) == 8
    assert buffer[:8] == b"23456789"


def test_stale_reads_show_what_was_before() -> None:
    def after(change, read):
        store = FaultyStore(memory(), random.Random(0), fail_call=4, mode="stale")
        store.put("a", b"old")
        store.put("b", b"b")
        change(store)
        try:
            return read(store), read(store)
        except NotFound:
            return NotFound, read(store)

    assert after(lambda s: s.put("a", b"newer"), lambda s: s.get("a")) == (b"old", b"newer")
    assert after(lambda s: s.put("a", b"newer"), lambda s: s.get("a", 1, 2)) == (b"l", b"e")
    assert after(lambda s: s.put("a", b"newer"), lambda s: s.size("a")) == (3, 5)
    assert after(lambda s: s.create("c", b"c"), lambda s: s.get("c")) == (NotFound, b"c")
    assert after(lambda s: s.create("c", b"c"), lambda s: s.list("")) == (
        ["a", "b"],
        ["a", "b", "c"],
    )
    # b is the last change
    assert after(lambda s: s.create("a", b"lost"), lambda s: s.get("b")) == (NotFound, b"b")
    assert after(lambda s: s.delete("a"), lambda s: s.list("")) == (["a", "b"], ["b"])


def test_throttling_comes_in_bursts_and_does_nothing() -> None:
    inner = memory()
    store = FaultyStore(inner, random.Random(3), throttled=0.1, burst=4)
    for i in range(200):
        with contextlib.suppress(StoreUnavailable):
            store.put(f"{i:03d}", b"x")
    fates = [fate for *_, fate in store.log]
    assert inner.list("") == [key for _, _, key, fate in store.log if fate == "ok"]
    runs = "".join("t" if fate == "throttled" else "." for fate in fates).strip("t").split(".")
    assert 40 < fates.count("throttled") < 120
    assert all(len(run) % 4 == 0 for run in runs)


def test_it_sees_through_retries_and_bursts() -> None:
    store = Retrying(
        FaultyStore(
            memory(), random.Random(5), throttled=0.2, unavailable=0.1, unknown=0.1, burst=2
        )
    )
    assert store.create("a", b"mine") is True
    assert store.create("a", b"other") is False
    assert store.get("a") == b"mine"


def test_a_crash_can_be_any_exception() -> None:
    class Dead(Exception):
        pass

    store = FaultyStore(memory(), random.Random(0), fail_call=1, mode="crash-before", crash=Dead)
    with pytest.raises(Dead):
        store.list("")


def test_chances_follow_from_the_seed() -> None:
    def story(seed: int) -> list[tuple[int, str, str, str]]:
        store = FaultyStore(
            memory(), random.Random(seed), unavailable=0.1, unknown=0.1, full=0.1, torn=0.1
        )
        for i in range(300):
            for call in (lambda i=i: store.put(f"{i}", b"xy"), lambda: store.get("0")):
                with contextlib.suppress(StoreError):
                    call()
        return store.log

    assert story(1) == story(1) != story(2)
    fates = [fate for *_, fate in story(1)]
    assert all(20 < fates.count(fate) < 100 for fate in ("before", "after"))
    assert all(5 < fates.count(fate) < 60 for fate in ("full", "torn"))


def test_delays_use_the_given_clock() -> None:
    waited: list[float] = []
    store = FaultyStore(memory(), random.Random(0), delay_s=2.0, sleep=waited.append)
    for _ in range(50):
        store.list("")
    assert len(waited) == 50
    assert 0 <= min(waited) < 0.5 < 1.5 < max(waited) <= 2.0


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="mode is one of"):
        FaultyStore(memory(), random.Random(0), mode="sometimes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sleep"):
        FaultyStore(memory(), random.Random(0), delay_s=1.0)
    store = memory()
    store.put("a", b"x")
    with pytest.raises(ValueError, match="damage is one of"):
        corrupt(store, "a", "bless", random.Random(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_corrupt(seed: int) -> None:
    store, rng, original = memory(), random.Random(seed), random.Random(seed).randbytes(50)
    flipped_bits = []
    for how in ("flip", "truncate", "extend", "empty"):
        store.put("a", original)
        corrupt(store, "a", how, rng)  # type: ignore[arg-type]
        found = store.get("a")
        assert found != original
        if how == "flip":
            flipped_bits = [(x ^ y).bit_count() for x, y in zip(found, original, strict=True)]
        elif how == "extend":
            assert found.startswith(original)
        else:
            assert original.startswith(found)
    assert sum(flipped_bits) == 1
    store.put("b", b"b")
    store.put("a", b"a")
    corrupt(store, "a", "swap", rng, other="b")
    assert (store.get("a"), store.get("b")) == (b"b", b"a")
    corrupt(store, "a", "delete", rng)
    with pytest.raises(NotFound):
        corrupt(store, "a", "flip", rng)
    with pytest.raises(ValueError, match="other object"):
        corrupt(store, "b", "swap", rng)
    store.put("e", b"")
    with pytest.raises(ValueError, match="no bytes"):
        corrupt(store, "e", "truncate", rng)
