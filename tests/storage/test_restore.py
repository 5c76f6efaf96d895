"""A bad look is no proof: who is to blame when a snapshot cannot be read, and how far a restore
goes back by itself."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage import (
    MemoryStore,
    NotFound,
    ObjectStore,
    Ref,
    SnapshotCorrupt,
    Snapshots,
    StoreError,
    StoreUnavailable,
)
from storage.snapshots.restore import (
    PAUSES_S,
    ReadRetries,
    Restore,
    Rewind,
    RewindOrder,
    order_rewind,
)
from storage.snapshots.snapshot_keys import manifest_key
from storage.testing.faulty_store import corrupt

# key, what is stored, the reader's clock in seconds -> what is read; may raise
Damage = Callable[[str, bytes, float], bytes]
WAIT_S = sum(PAUSES_S)


class Eyes(MemoryStore):
    """How one host sees the bucket."""

    def __init__(self, inner: ObjectStore, damage: Damage = lambda key, data, t: data):
        super().__init__(objects=inner._objects)  # type: ignore[attr-defined]
        self.damage, self.now_s, self.handles = damage, 0.0, 1

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return self.damage(key, super().get(key), self.now_s)[start:end]

    def size(self, key: str) -> int:
        return len(self.get(key))

    def reopen(self) -> ObjectStore:
        self.handles += 1
        return self

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def bucket(
    *steps: int, epoch: int = 1, store: ObjectStore | None = None, **data: object
) -> Snapshots:
    snapshots = Snapshots(store or MemoryStore(objects={}))
    for step in steps:
        body = random.Random(step).randbytes(300)
        snapshots.write(Ref(epoch, step), 0, 1, {"a.bin": body}, {}, {"samples": None, **data}, "t")
        assert snapshots.commit(Ref(epoch, step), 1)
    return snapshots


class Unfit(Exception):
    """The host ended for good."""


def resume(snapshots: Snapshots, host: str = "a", damage: Damage = lambda key, data, t: data, told: list[str] | None = None,
           **options: object) -> Ref | None:  # fmt: skip
    """A world of one host resumes, as a session does."""
    eyes = Eyes(snapshots.store, damage)
    say = [] if told is None else told
    restore = Restore(
        Snapshots(eyes),
        host,
        ReadRetries(eyes.reopen, eyes.sleep),
        epoch=9,
        tell=lambda ref, what: say.append(what),
        on_bad=lambda ref, why: say.append(f"bad {ref}"),
        **options,  # type: ignore[arg-type]
    )
    while (ref := restore.choose()) is not None:
        why = restore.verify(ref)
        if not why:
            return ref
        if unfit := restore.blame(ref, {host: why}):
            raise Unfit(unfit[host])
    return None


def flip(key: str, data: bytes, t: float) -> bytes:
    """A reader with bad memory: parts are never right."""
    return bytes([data[0] ^ 1]) + data[1:] if key.startswith("snapshots/parts/") and data else data


def once(damage: Damage, until_s: float = 0.5) -> Damage:
    return lambda key, data, t: damage(key, data, t) if t < until_s else data


def gone(part: str) -> Damage:
    def missing(key: str, data: bytes, t: float) -> bytes:
        if part in key:
            raise NotFound(key)
        return data

    return missing


def half(key: str, data: bytes, t: float) -> bytes:
    return data[: len(data) // 2] if key.startswith("snapshots/parts/") else data


def marks(snapshots: Snapshots) -> set[int]:
    return {ref.step for ref in snapshots.quarantined()}


def rot(snapshots: Snapshots, *steps: int, epoch: int = 1) -> None:
    for step in steps:
        corrupt(
            snapshots.store,
            snapshots.load(Ref(epoch, step)).parts[0].key,
            "flip",
            random.Random(step),
        )


# ---- one bad look --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "damage",
    [flip, half, gone("snapshots/parts/"), gone("manifests/0000000030"), gone("snapshots/")],
)
@pytest.mark.parametrize("lasts_s", [0.005, WAIT_S - 0.1])
def test_what_is_whole_at_a_later_look_is_whole(damage: Damage, lasts_s: float) -> None:
    snapshots, told = bucket(10, 20, 30), list[str]()
    assert resume(snapshots, damage=once(damage, lasts_s), told=told) == Ref(1, 30)
    assert (
        marks(snapshots) == set()
        and len(told) == 1
        and "a read of it was damaged and right at look" in told[0]
    )


def test_looks_are_seconds_apart_on_new_handles() -> None:
    eyes = Eyes(bucket(10).store, flip)
    restore = Restore(Snapshots(eyes), "a", ReadRetries(eyes.reopen, eyes.sleep))
    looks: list[tuple[int, float]] = []

    def look(snapshots: Snapshots, n: int) -> None:
        looks.append((eyes.handles, eyes.now_s))
        snapshots.verify(snapshots.load(Ref(1, 10)))

    assert "hash differs" in restore.read(Ref(1, 10), look)[1]
    assert looks == [(1, 0.0), (2, 1.0), (3, 4.0), (4, 12.0)]


@pytest.mark.parametrize("damage", [gone("snapshots/parts/"), gone("manifests/0000000030")])
def test_what_is_listed_and_never_found_proves_nothing(damage: Damage) -> None:
    snapshots = bucket(10, 20, 30)
    with pytest.raises(StoreUnavailable, match="is listed, and not found"):
        resume(snapshots, damage=damage)
    assert marks(snapshots) == set() and snapshots.doubters(Ref(1, 30)) == set()


def test_a_part_that_is_really_gone_is_damage() -> None:
    snapshots = bucket(10, 20, 30)
    snapshots.store.delete(snapshots.load(Ref(1, 30)).parts[0].key)
    assert resume(snapshots) == Ref(1, 20) and marks(snapshots) == {30}


# ---- who is to blame -----------------------------------------------------------------------------
@pytest.mark.parametrize("damage", [flip, half])
def test_a_reader_that_finds_two_bad_is_bad_itself_and_leaves_the_run_as_it_was(
    damage: Damage,
) -> None:
    """Else it would mark them all, and the run would begin anew at step 1."""
    snapshots, told = bucket(10, 20, 30, 40), list[str]()
    with pytest.raises(Unfit, match="neither 0000000040-e000001 nor 0000000030-e000001"):
        resume(snapshots, "bad", damage, told)
    assert (
        marks(snapshots) == set()
        and told[0].startswith("bad 0000000040")
        and "its mark was taken back" in told[1]
    )
    assert resume(snapshots, "good") == Ref(1, 40)
    for _ in range(3):  # nor by trying again and again
        with pytest.raises(Unfit):
            resume(snapshots, "bad", damage)
        assert marks(snapshots) == set()


def test_a_bad_reader_that_is_started_again_in_between_gets_no_further() -> None:
    """It falls back by one, trains, dies; at its next start it finds the next one bad."""
    snapshots = bucket(10, 20, 30)
    only = {"0000000030"}
    damage: Damage = lambda key, data, t: (  # noqa: E731
        flip(key, data, t) if any(one in key for one in only) else data
    )
    assert resume(snapshots, "bad", damage) == Ref(1, 20) and marks(snapshots) == {30}
    only.add("0000000020")
    with pytest.raises(Unfit):
        resume(snapshots, "bad", damage)
    assert marks(snapshots) == set()
    assert resume(snapshots, "good") == Ref(1, 30)


def test_who_is_alone_with_one_of_several_is_no_witness_of_the_others() -> None:
    """An old doubt of one of them, by a host that was unfit itself, does not end the run."""
    snapshots, told = bucket(10, 20, 30), list[str]()
    snapshots.doubt(Ref(1, 20), "before", "its hash differs")
    with pytest.raises(Unfit, match="neither 0000000030-e000001 nor 0000000020-e000001"):
        resume(snapshots, "bad", flip, told)
    assert marks(snapshots) == set()
    assert resume(snapshots, "good") == Ref(1, 30)


def test_where_nobody_else_can_say_the_mark_names_who_says_so() -> None:
    snapshots = bucket(10, 20, 30)
    rot(snapshots, 30)
    assert resume(snapshots, "host 1") == Ref(1, 20)
    assert "hash differs" in snapshots.why(Ref(1, 30)) and "(says host_1)" in snapshots.why(
        Ref(1, 30)
    )
    assert snapshots.doubters(Ref(1, 30)) == {"host_1"}


def test_another_host_that_reads_it_whole_refutes() -> None:
    snapshots = bucket(10, 20)
    restore = Restore(snapshots, "a", ReadRetries(lambda: snapshots.store, lambda s: None))
    assert list(restore.blame(Ref(1, 20), {"b": "hash differs"}, refuted=True)) == ["b"]
    assert marks(snapshots) == set() and snapshots.doubters(Ref(1, 20)) == set()
    assert restore.blame(Ref(1, 20), {"b": "hash differs", "a": "too"}) == {}  # two hosts' word
    assert "(says a, b)" in snapshots.why(Ref(1, 20))


def silent(key: str, data: bytes, t: float) -> bytes:
    raise StoreUnavailable(key)


@pytest.mark.parametrize(
    ("damage", "unfit", "marked"),
    [(lambda key, data, t: data, ["a"], set()), (flip, [], {20}), (silent, [], {20})],
    ids=["whole", "bad too", "no answer"],
)
def test_another_host_looks_a_second_time_and_nobody_waits_for_ever(
    damage: Damage, unfit: list[str], marked: set[int]
) -> None:
    """Two ranks: that of host a found it bad, that of host b had read its share."""
    snapshots = bucket(10, 20)
    everyone = threading.Barrier(2)
    told: dict[int, object] = {}

    def judge(rank: int) -> list[str]:
        def gather(mine: object) -> list[object]:
            told[rank] = mine
            everyone.wait(30)
            found = [told[0], told[1]]
            everyone.wait(30)
            return found

        def first(do: Callable[[], object]) -> object:
            return gather(do() if rank == 0 else None)[0]

        eyes = Eyes(snapshots.store, damage if rank == 1 else flip)
        restore = Restore(Snapshots(eyes), "ab"[rank], ReadRetries(eyes.reopen, eyes.sleep))
        said = [("a", "hash differs", ""), ("b", "", "")]
        return list(restore.judge(Ref(1, 20), said, rank, gather, first))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(judge, (0, 1))) == [unfit, unfit]
    assert marks(snapshots) == marked


def test_a_mark_is_taken_back_by_who_reads_the_snapshot_whole() -> None:
    snapshots, told = bucket(10, 20, 30), list[str]()
    snapshots.quarantine(Ref(1, 30), "a look")
    assert resume(snapshots, told=told) == Ref(1, 30)
    assert marks(snapshots) == set() and "a has read it whole: its mark was taken back" in told[0]


def test_two_hosts_that_agree_are_not_asked_again() -> None:
    snapshots = bucket(10, 20, 30)
    rot(snapshots, 30)
    assert [resume(snapshots, host) for host in ("a", "b", "c")] == [Ref(1, 20)] * 3
    assert snapshots.doubters(Ref(1, 30)) == {"a", "b"}


def test_a_reader_without_the_right_to_mark_still_gets_the_older_one() -> None:
    snapshots = bucket(10, 20, 30)
    rot(snapshots, 30)

    class ReadOnly(Eyes):
        def create(self, key: str, data: bytes | memoryview) -> bool:
            raise StoreError("permission denied")

    eyes, told = ReadOnly(snapshots.store), list[str]()
    restore = Restore(
        Snapshots(eyes),
        "a",
        ReadRetries(eyes.reopen, eyes.sleep),
        on_bad=lambda ref, why: told.append(why),
    )
    assert (ref := restore.choose()) == Ref(1, 30) and ref is not None
    assert restore.blame(ref, {"a": restore.verify(ref)}) == {} and "could not be marked" in told[0]
    assert restore.choose() == Ref(1, 20)


# ---- how far back --------------------------------------------------------------------------------
def test_two_bad_snapshots_stop_the_run_and_not_one_node_after_the_other() -> None:
    """The first host that finds both takes itself for unfit; the second knows that it is not,
    and asks for a person."""
    snapshots = bucket(10, 20, 30, 40)
    rot(snapshots, 40, 30)
    with pytest.raises(Unfit):
        resume(snapshots, "a")
    with pytest.raises(Rewind) as e:
        resume(snapshots, "b")
    words = ("committed step 40", "from step 20", "newest 2 snapshots cannot be used", "says a, b")
    for word in (*words, "harness snapshots verify", "HARNESS_ALLOW_REWIND=1"):
        assert word in str(e.value)
    with pytest.raises(Rewind):
        resume(snapshots, "c")
    assert snapshots.manifests()[0] == {Ref(1, step) for step in (10, 20, 30, 40)}
    assert resume(snapshots, "c", allow_rewind=True) == Ref(1, 20)
    assert resume(snapshots, "d") == Ref(1, 20)  # it was allowed, also to those that come after


def test_a_run_that_was_marked_bad_as_a_whole_is_read_again_and_goes_on() -> None:
    snapshots = bucket(10, 20, 30)
    for step in (10, 20, 30):
        snapshots.quarantine(Ref(1, step), "a bad reader")
    assert resume(snapshots) == Ref(1, 30)
    rot(snapshots, 30)
    snapshots.quarantine(Ref(1, 30), "a bad reader")
    with pytest.raises(Rewind, match="none of its snapshots can be used"):
        resume(snapshots)
    assert resume(snapshots, allow_rewind=True) is None


def test_a_first_snapshot_that_is_bad_may_be_passed_over_unless_there_were_others() -> None:
    snapshots = bucket(10)
    rot(snapshots, 10)
    assert resume(snapshots) is None and marks(snapshots) == {10}
    for more in (
        f"snapshots/manifests/{Ref(1, 5)}.doomed",
        "samples/0000000021-0000000030-abc.jsonl",
    ):
        snapshots.store.put(more, b"{}")
        with pytest.raises(Rewind, match="none of its snapshots can be used"):
            resume(snapshots)
        snapshots.store.delete(more)


def test_a_fresh_run_starts_fresh() -> None:
    snapshots = bucket()
    snapshots.store.put("run.json", b"{}")
    assert resume(snapshots, must_list="run.json") is None
    # of a snapshot that was never committed
    snapshots.store.put("samples/0000000001-0000000010-abc.jsonl", b"")
    assert resume(snapshots, must_list="run.json") is None


class Blind(MemoryStore):
    """Lists nothing under a prefix, for a while."""

    def __init__(self, inner: ObjectStore, prefix: str, until_s: float):
        super().__init__(objects=inner._objects)  # type: ignore[attr-defined]
        self.prefix, self.until_s, self.now_s = prefix, until_s, 0.0

    def list(self, prefix: str) -> list[str]:
        return (
            []
            if self.now_s < self.until_s and prefix.startswith(self.prefix)
            else super().list(prefix)
        )

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def choose_blind(
    snapshots: Snapshots, prefix: str, until_s: float, **options: object
) -> Ref | None:
    eyes = Blind(snapshots.store, prefix, until_s)
    return Restore(Snapshots(eyes), "a", ReadRetries(lambda: eyes, eyes.sleep), **options).choose()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prefix", "options"),
    [
        ("", {"must_list": "run.json"}),
        ("", {"seen": Ref(1, 30)}),
        ("snapshots/", {"seen": Ref(1, 20)}),
        ("snapshots/", {}),
    ],
)
def test_an_empty_listing_does_not_mean_step_0(prefix: str, options: dict[str, object]) -> None:
    snapshots = bucket(10, 20, 30)
    snapshots.store.put("run.json", b"{}")
    for first, last in ((1, 10), (11, 20), (21, 30)):
        snapshots.store.put(f"samples/{first:010d}-{last:010d}-abc.jsonl", b"")
    assert choose_blind(snapshots, prefix, WAIT_S - 0.1, **options) == Ref(1, 30)
    with pytest.raises(StoreError, match=r"lacks|lists none of its snapshots") as e:
        choose_blind(snapshots, prefix, 1e9, **options)
    # Whoever started the worker tries again, a limited number of times.
    assert isinstance(e.value, StoreUnavailable)


def test_a_new_epoch_that_began_anew_is_refused_while_the_work_is_there() -> None:
    snapshots = bucket(99_800, 99_900, 100_000)
    bucket(30, epoch=2, store=snapshots.store)
    with pytest.raises(
        Rewind,
        match=r"committed step 100000, and would go on from step 30: a newer generation began anew",
    ):
        resume(snapshots)
    assert resume(snapshots, allow_rewind=True) == Ref(2, 30)


def test_after_guards_went_back_losing_all_is_still_refused() -> None:
    """An order of guards is no person's leave to lose more than it says."""
    snapshots = bucket(20, 40, 60)
    snapshots.store.put("samples/0000000021-0000000040-abc.jsonl", b"")
    order_rewind(snapshots.store, RewindOrder(2, 20, 60, "a spike", 41, 62))
    assert resume(snapshots) == Ref(1, 20)
    snapshots.store.delete(manifest_key(Ref(1, 20)))
    with pytest.raises(Rewind, match="would go on from step 0"):
        resume(snapshots)
    blind = bucket(20)
    order_rewind(blind.store, RewindOrder(2, 20, 60, "a spike", 41, 62))
    blind.store.put("samples/0000000021-0000000040-abc.jsonl", b"")
    assert choose_blind(blind, "snapshots/", WAIT_S - 0.1) == Ref(1, 20)
    with pytest.raises(StoreError, match=r"lacks|lists none of its snapshots"):
        choose_blind(blind, "snapshots/", 1e9)


def test_guards_that_found_no_snapshot_begin_anew() -> None:
    snapshots = bucket(40, 60)
    order_rewind(snapshots.store, RewindOrder(2, 0, 60, "a spike", 1, 62))
    assert resume(snapshots) is None
    bucket(30, epoch=2, store=snapshots.store)
    assert resume(snapshots) == Ref(2, 30)


def test_what_writers_of_an_older_epoch_leave_ahead_is_no_rewind() -> None:
    snapshots = bucket(20, 40, 60)
    bucket(30, epoch=2, store=snapshots.store, resumed="0000000020-e000001")
    assert resume(snapshots) == Ref(2, 30)
    snapshots = bucket(40, 60)
    bucket(30, epoch=2, store=snapshots.store)
    assert resume(snapshots) == Ref(2, 30)


def test_a_look_that_only_looks_marks_nothing() -> None:
    snapshots = bucket(10, 20)
    rot(snapshots, 20)
    corrupt(snapshots.store, snapshots.load(Ref(1, 10)).parts[0].key, "truncate", random.Random(0))
    snapshots.latest()
    snapshots.prune(lambda refs: [])
    assert marks(snapshots) == set()
    with pytest.raises(SnapshotCorrupt):
        snapshots.verify(snapshots.load(Ref(1, 20)))


def test_a_step_that_is_wanted_is_chosen_before_newer_ones() -> None:
    """... in any number; where there is none of it, the usual holds."""
    snapshots = bucket(10, 20, 30, 40, 50)
    looks = ReadRetries(lambda: snapshots.store, lambda s: None)
    assert Restore(snapshots, "a", looks, ends_at=20).choose() == Ref(1, 20)
    assert Restore(snapshots, "a", looks, ends_at=25).choose() == Ref(1, 50)
