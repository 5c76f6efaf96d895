"""The rendezvous: one epoch at a time, formed without waiting for the dead. Members here are real objects on one store."""

import json
import socket
import threading

import pytest

from harness.rendezvous import NO_EPOCH, Member, ProbeServer, Rendezvous, newest_epoch
from storage.objects import MemoryStore


class Ticks:
    """A monotonic clock that the test moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def place():
    return Place()


class Place:
    def __init__(self):
        self.store, self.clock, self.probes = MemoryStore("memory://rdzv", {}), Ticks(), {}

    def member(self, name, nproc=1, attempt=0) -> Rendezvous:
        probe = self.probes[name] = ProbeServer(name, "127.0.0.1")
        me = Member(name, "ready", 0, "127.0.0.1", probe.port, 29500, nproc=nproc, attempt=attempt)
        r = Rendezvous(self.store, me, beat_s=1.0, dead_s=5.0, join_window_s=1.0, monotonic=self.clock)
        r.say()
        return r

    def beat(self, *members, seconds=1.0):
        self.clock.now += seconds
        for m in members:
            m.say()

    def form(self, *members, max_world=None, doubtful=False, rounds=12):
        """Let everybody look around until an epoch has been entered by all that are in it."""
        entered = {}
        for _ in range(rounds):
            for m in members:
                epoch = m.try_form(max_world, doubtful)
                if epoch is not None:
                    m.say(state="in", epoch=epoch.epoch)
                    entered[m.me.member] = epoch
            if entered and all(n in entered for n in next(iter(entered.values())).members):
                return next(iter(entered.values()))
            self.beat(*members)
        return None


def test_members_that_come_together_start_together(place):
    a, b, c = (place.member(n, attempt=i) for i, n in enumerate("abc"))
    epoch = place.form(a, b, c)
    assert (epoch.epoch, epoch.members, epoch.world, epoch.reason) == (1, ("a", "b", "c"), 3, "start")
    assert [epoch.ranks(n) for n in "abc"] == [range(0, 1), range(1, 2), range(2, 3)]


def test_nobody_forms_while_a_member_still_trains(place):
    a, b = place.member("a"), place.member("b")
    place.form(a, b)
    c = place.member("c")
    a.say(state="ready")
    for _ in range(6):
        place.beat(a, b, c)
        assert a.try_form(None) is None
        assert c.try_form(None) is None
    b.say(state="ready")
    epoch = place.form(a, b, c)
    assert (epoch.epoch, epoch.members, epoch.reason) == (2, ("a", "b", "c"), "grow")


def test_a_refused_connection_is_a_death_at_once(place):
    a, b = place.member("a"), place.member("b")
    place.form(a, b)
    place.probes["b"].close()
    a.say(state="ready", end="peer-lost")
    epoch = a.try_form(None, doubtful=True)  # no time has passed
    assert (epoch.members, epoch.reason) == (("a",), "loss")


def test_silence_is_a_death_only_after_its_time(place):
    """b is frozen: its socket still takes connections but nothing answers."""
    a, b = place.member("a"), place.member("b")
    place.form(a, b)
    a.look()
    place.probes["b"].close()
    frozen = socket.create_server(("127.0.0.1", place.probes["b"].port))
    a.say(state="ready")
    for _ in range(4):
        place.beat(a)
        assert a.try_form(None) is None
    for _ in range(3):
        place.beat(a)
    assert a.try_form(None).members == ("a",)
    frozen.close()


def test_goodbye_needs_no_waiting(place):
    a, b = place.member("a"), place.member("b")
    place.form(a, b)
    a.say(state="ready", end="resize")
    b.leave(end="drained")
    epoch = a.try_form(None)
    assert (epoch.members, epoch.reason) == (("a",), "shrink")


def test_what_does_not_fit_stays_a_spare(place):
    a, b, c = (place.member(n, nproc=4, attempt=i) for i, n in enumerate("abc"))
    epoch = place.form(a, b, c, max_world=9)
    assert epoch.members == ("a", "b") and epoch.world == 8
    assert c.try_form(9) is None


def test_a_stranger_from_long_ago_is_not_waited_for(place):
    ghost = place.member("ghost")
    place.probes["ghost"].close()
    del ghost
    a = place.member("a")
    assert place.form(a).members == ("a",)


def test_the_same_failure_is_counted_over_epochs(place):
    a = place.member("a")
    for n in (1, 2, 3):
        epoch = place.form(a)
        assert epoch.streak == n - 1
        a.say(state="ready", epoch=epoch.epoch, end="failed", failure="ValueError: x", failure_step=40)
    a.say(state="ready", failure="ValueError: other", failure_step=40)
    assert place.form(a).streak == 1


def test_racing_members_agree_on_every_epoch(place):
    """Real threads propose at the same time; each epoch number is one object, and whoever enters is in it."""
    members = [place.member(f"m{i}", attempt=i) for i in range(6)]
    place.clock.now += 100.0
    for m in members:
        m._settled_since = 0.0  # everybody's turn has come
    seen, lock = [], threading.Lock()

    def propose(m):
        epoch = m.try_form(None)
        with lock:
            seen.append(epoch)

    threads = [threading.Thread(target=propose, args=(m,)) for m in members]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    keys = place.store.list("rdzv/epochs/")
    assert keys == ["rdzv/epochs/000001.json"]
    only = newest_epoch(place.store)
    assert all(e is None or e == only for e in seen) and any(e is not None for e in seen)
    assert json.loads(place.store.get(keys[0]))["members"] == list(only.members)


def test_no_epoch_has_no_world():
    assert (NO_EPOCH.world == 0 and newest_epoch(MemoryStore("memory://x", {})) is NO_EPOCH) or NO_EPOCH.epoch == 0


def test_a_world_is_in_one_place_and_stays_there(place):
    """Nodes of another region cannot be reached: they wait, and take over when nobody is left here."""
    a, b, c, d = (place.member(n, attempt=i) for i, n in enumerate("abcd"))
    for m, where in ((a, "x/east"), (b, "x/east"), (c, "x/west"), (d, "x/west")):
        m.say(place=where)
    epoch = place.form(a, b, c, d)
    assert epoch.members == ("a", "b")
    assert a.waiting(epoch, a.members()) == []  # so nobody stops for them
    a.leave(end="drained")
    b.say(state="ready", end="resize")
    assert c.try_form(None) is None
    epoch = place.form(b, c, d)
    assert (epoch.members, epoch.reason) == (("b",), "shrink")
    b.leave(end="drained")
    assert place.form(c, d).members == ("c", "d")


def test_most_workers_decide_where_a_run_begins(place):
    a, b, c = place.member("a", attempt=1), place.member("b", nproc=2, attempt=2), place.member("c", attempt=3)
    a.say(place="x/east"), b.say(place="x/west"), c.say(place="x/east", state="gone")
    assert place.form(a, b).members == ("b",)
