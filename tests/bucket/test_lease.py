"""One controller at a time: taking, keeping, losing and giving back the lease."""

from __future__ import annotations

import random
import threading

import pytest

from harness.agent.run_orders import COUNTED_S, LOOK_EVERY_S, Leaderless
from harness.bucket.controller_lease import KeptLease, Lease, sign_of_life
from harness.core.world import Fenced
from harness.node import steady_clock
from storage.errors import StoreUnavailable
from storage.stores.folder_store import MemoryStore
from storage.stores.objects import ObjectStore
from storage.testing.faulty_store import FaultyStore
from support.clock import PlayedClock


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore("memory://lease", {})


@pytest.fixture
def clock() -> PlayedClock:
    return PlayedClock()


def lease(store: ObjectStore, clock: PlayedClock, holder: str, standby: bool = False) -> Lease:
    return Lease(store, clock, holder, ttl_s=5.0, standby=standby)


def keep(one: Lease, clock: PlayedClock, until_s: float) -> None:
    """`one` renews once a second, as a loop does."""

    def again() -> None:
        if clock.now() < until_s:
            one.renew()
            clock.after(1.0, again)

    clock.after(0.0, again)


def test_the_first_takes_term_1_at_once(store: MemoryStore, clock: PlayedClock) -> None:
    assert lease(store, clock, "a").acquire() == 1
    assert clock.now() == 0


def test_a_released_lease_needs_no_wait(store: MemoryStore, clock: PlayedClock) -> None:
    a = lease(store, clock, "a")
    a.acquire()
    a.release()
    assert lease(store, clock, "b").acquire() == 2
    assert clock.now() == 0
    with pytest.raises(Fenced, match="does not hold"):
        a.check()


def test_a_dead_holder_is_waited_for_one_ttl(store: MemoryStore, clock: PlayedClock) -> None:
    lease(store, clock, "a").acquire()
    clock.sleep(100)  # a challenger cannot know how old the beat is: it goes by its own clock
    assert lease(store, clock, "b").acquire() == 2
    assert 105 <= clock.now() <= 107


def test_a_holder_that_died_before_its_first_beat(store: MemoryStore, clock: PlayedClock) -> None:
    lease(store, clock, "a").acquire()
    store.delete("lease/000001.beat")
    assert lease(store, clock, "b").acquire() == 2


def test_a_living_holder_keeps_others_out(store: MemoryStore, clock: PlayedClock) -> None:
    a = lease(store, clock, "host-a:17")
    a.acquire()
    keep(a, clock, 100)
    with pytest.raises(Fenced, match=r"host-a:17 is already leading this run \(term 1\)"):
        lease(store, clock, "b").acquire()
    a.check()


def test_standby_waits_for_as_long_as_the_holder_lives(
    store: MemoryStore, clock: PlayedClock
) -> None:
    a = lease(store, clock, "a")
    a.acquire()
    keep(a, clock, 60)
    assert lease(store, clock, "b", standby=True).acquire() == 2
    assert 60 < clock.now() < 75


def test_the_overtaken_is_fenced_and_told_by_whom(store: MemoryStore, clock: PlayedClock) -> None:
    a = lease(store, clock, "a")
    a.acquire()
    lease(store, clock, "host-b:4").acquire()
    for act in (a.check, a.renew):
        with pytest.raises(Fenced, match=r"host-b:4 has taken over .*term 2, ours was 1"):
            act()


def test_two_challengers_one_winner(store: MemoryStore, clock: PlayedClock) -> None:
    lease(store, clock, "a").acquire()
    won: list[int] = []

    def rival() -> None:  # takes the same term between the other's last look and its write
        store.create("lease/000002.json", b'{"holder": "c", "ttl_s": 5.0}')
        won.append(2)

    clock.after(4.9, rival)
    b = lease(store, clock, "b")
    assert b.acquire() == 3  # c never beats, so its term passes too
    assert won == [2]


def test_an_unheard_create_costs_a_wait_but_never_two_holders(clock: PlayedClock) -> None:
    inner = MemoryStore("memory://lease", {})
    a = lease(FaultyStore(inner, random.Random(1), fail_call=3, mode="after"), clock, "a")
    with pytest.raises(StoreUnavailable):
        a.acquire()
    with pytest.raises(Fenced):
        a.check()
    assert lease(inner, clock, "a again").acquire() == 2


def test_renewing_often_costs_one_look_and_few_writes(clock: PlayedClock) -> None:
    store = FaultyStore(MemoryStore("memory://lease", {}), random.Random(0))
    a = lease(store, clock, "a")
    a.acquire()
    before = store.calls
    for _ in range(50):
        a.renew()
        clock.sleep(0.1)
    writes = sum(what == "put" for _, what, _, _ in store.log[before:])
    assert store.calls - before == 50 + writes
    assert writes == 2  # 5 s of a ttl of 5 s


# ---- who only watches ----------------------------------------------------------------------------
def test_a_holder_that_was_interrupted_takes_its_next_term_at_once(
    store: MemoryStore, clock: PlayedClock
) -> None:
    one = lease(store, clock, "a")
    assert (one.acquire(), one.acquire(), clock.now()) == (1, 2, 0.0)


def test_signs_of_life_are_seen_without_a_list(store: MemoryStore, clock: PlayedClock) -> None:
    assert sign_of_life(store) == (0, b"")
    one = lease(store, clock, "a")
    one.acquire()
    assert sign_of_life(store) == (1, b"1")
    one.acquire()

    class Unlisted(MemoryStore):
        def list(self, prefix: str) -> list[str]:
            raise AssertionError("a list is dear")

    assert sign_of_life(Unlisted("memory://lease", store._objects), 1) == (2, b"1")


class Node:
    """Looks at the lease every minute; `hours` until it leaves, or None if it has not after
    `for_h`."""

    def __init__(self, store: ObjectStore, clock: PlayedClock, bound_h: float = 24.0):
        self.store, self.clock, self.judge = store, clock, Leaderless(bound_h * 3600)

    def look(self) -> str:
        return self.judge.see(self.clock.now(), *sign_of_life(self.store, self.judge.term))

    def leaves_after_h(self, for_h: float = 100.0, every_s: float = LOOK_EVERY_S) -> float | None:
        began_s = self.clock.now()
        while self.clock.now() - began_s < for_h * 3600:
            if why := self.look():
                assert "nobody leads the run" in why and "term 1" in why
                return (self.clock.now() - began_s) / 3600
            self.clock.sleep(every_s)
        return None


def test_a_node_leaves_a_day_after_its_leader_was_lost(
    store: MemoryStore, clock: PlayedClock
) -> None:
    one = lease(store, clock, "a")
    one.acquire()
    keep(one, clock, until_s=3600.0)
    found = Node(store, clock).leaves_after_h()
    assert found is not None and 25.0 <= found < 25.1


def test_a_node_stays_with_a_leader_and_without_one_that_ever_was(
    store: MemoryStore, clock: PlayedClock
) -> None:
    assert Node(store, clock).leaves_after_h() is None  # plain `sky launch`
    one = lease(store, clock, "a")
    one.acquire()
    assert Node(store, clock, bound_h=0.0).leaves_after_h() is None
    keep(one, clock, until_s=clock.now() + 30 * 3600)
    assert Node(store, clock).leaves_after_h(for_h=30.0) is None
    one.release()
    # it was given back: somebody continues the run in another way
    assert Node(store, clock).leaves_after_h() is None


def test_a_leader_that_comes_back_starts_the_day_anew(
    store: MemoryStore, clock: PlayedClock
) -> None:
    one, node = lease(store, clock, "a"), Node(store, clock)
    one.acquire()
    assert node.leaves_after_h(for_h=23.0) is None
    lease(store, clock, "b").acquire()
    assert node.leaves_after_h(for_h=23.0) is None


def test_a_machine_that_was_suspended_does_not_blame_its_leader(
    store: MemoryStore, clock: PlayedClock
) -> None:
    one, node = lease(store, clock, "a"), Node(store, clock)
    one.acquire()
    node.look()
    clock.sleep(1000 * 3600)  # both were: a laptop
    assert not node.look() and node.judge.still_s == COUNTED_S


# ---- while its holder is busy --------------------------------------------------------------------
class OwnClock:
    """Real time."""

    def now(self) -> float:
        return steady_clock.now()

    def sleep(self, seconds: float) -> None:
        threading.Event().wait(seconds)


def test_a_holder_that_is_busy_for_longer_than_its_ttl_is_not_overtaken(store: MemoryStore) -> None:
    """A launch that blocks for 3 x 60 s under a lease of 20 s; here both are a hundredth."""
    busy, other = (KeptLease(store, OwnClock(), name, ttl_s=0.3) for name in ("busy", "other"))
    busy.acquire()
    try:
        threading.Event().wait(1.5)  # its loop does not come round
        with pytest.raises(Fenced, match="already leading"):
            other.acquire()
        busy.check()
    finally:
        busy.close()


def test_a_holder_whose_loop_hangs_is_overtaken_and_so_is_one_that_has_closed(
    store: MemoryStore,
) -> None:
    hung = KeptLease(store, OwnClock(), "hung", ttl_s=0.3, busy_limit_s=0.2)
    hung.acquire()
    threading.Event().wait(0.6)
    closed = KeptLease(store, OwnClock(), "closed", ttl_s=0.3)
    assert closed.acquire() == 2
    closed.close()
    last = KeptLease(store, OwnClock(), "last", ttl_s=0.3)
    assert last.acquire() == 3
    last.release()
    assert sign_of_life(store) == (3, b"released")
    for fenced in (hung, closed):
        with pytest.raises(Fenced):
            fenced.check()


def test_a_wall_clock_that_jumps_moves_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    before = steady_clock.now()
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert 0.0 <= steady_clock.now() - before < 3600.0
