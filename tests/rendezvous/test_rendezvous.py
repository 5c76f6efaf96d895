"""The rendezvous: one epoch at a time, formed without waiting for the dead. Members here are
real objects on one store."""

import collections
import contextlib
import json
import socket
import struct
import threading
from dataclasses import asdict, replace

import pytest

from harness.agent.agent import Agent
from harness.agent.host import RealHost
from harness.agent.workers import AgentConfig, Timing
from harness.bucket.layout import NO_EPOCH, Epoch, Member, epoch_key, newest_epoch
from harness.rendezvous.membership import PeerHeartbeats
from harness.rendezvous.peer_connections import PeerConnections
from harness.rendezvous.peer_heartbeats import PeerStatus
from harness.rendezvous.rendezvous import Rendezvous
from harness.uploader.node_tiers import ChunkServers, NearbyConfig, NodeTiers
from storage.errors import StoreUnavailable
from storage.stores.folder_store import MemoryStore
from support.half_store import HalfAtFirst
from support.places import Ticks
from support.worlds import until


def test_members_that_come_together_start_together(place):
    a, b, c = (place.member(n, attempt=i) for i, n in enumerate("abc"))
    epoch = place.form(a, b, c)
    assert (epoch.epoch, epoch.members, epoch.world, epoch.reason) == (
        1,
        ("a", "b", "c"),
        3,
        "start",
    )
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


def test_who_gets_half_of_each_object_forms_nothing_until_it_gets_all(place):
    """Else it would take members that train for members without an object."""
    a, b = place.member("a"), place.member("b")
    place.form(a, b)
    halves = HalfAtFirst("rdzv", most=1 << 30)
    whole, halves._objects, place.store = place.store, place.store._objects, halves
    c = place.member("c")
    for _ in range(6):
        halves.read.clear()
        place.beat(a, b, c)
        with pytest.raises(StoreUnavailable, match="wanted"):
            c.try_form(None)
    halves.broken = False
    for _ in range(6):
        place.beat(a, b, c)
        assert c.try_form(None) is None
    assert newest_epoch(whole).members == ("a", "b")
    a.say(state="ready")
    b.say(state="ready")
    assert place.form(a, b, c).members == ("a", "b", "c")


def test_half_of_a_members_object_is_read_again(place):
    a, b = place.member("a"), place.member("b")
    place.form(a, b)
    halves = HalfAtFirst("rdzv")
    halves._objects, halves.read, place.store = place.store._objects, {epoch_key(1)}, halves
    c = place.member("c")
    with pytest.raises(StoreUnavailable, match=r"members/a\.json: wanted"):
        c.members()
    halves.broken = False
    assert {m.member for m in c.members()} == {"a", "b", "c"}


def test_a_refused_connection_is_a_death_at_once(place):
    a, b = place.member("a"), place.member("b")
    place.form(a, b)
    place.lines["b"].close()
    until(lambda: a.lines.heard("b").refused)
    a.say(state="ready", end="peer-lost")
    epoch = a.try_form(None)  # no time has passed
    assert (epoch.members, epoch.reason) == (("a",), "loss")


def test_silence_is_a_death_only_after_its_time(place):
    """b is frozen: its socket still takes connections but nothing answers."""
    a, b = place.member("a"), place.member("b")
    place.form(a, b)
    port = place.lines["b"].port
    place.lines["b"].close()
    frozen = socket.create_server(("127.0.0.1", port))
    until(lambda: not a.lines.heard("b").up and not a.lines.heard("b").refused)
    a.say(state="ready")
    for _ in range(4):
        place.beat(a)
        assert a.try_form(None) is None
    for _ in range(2):
        place.beat(a)
        a.look()
    assert a.try_form(None).members == ("a",)
    frozen.close()


def test_a_member_that_is_cut_off_lives_by_its_beats(place):
    a, b = place.member("a"), place.member("b")
    place.form(a, b)
    place.lines["b"].close()
    cut = socket.create_server(("127.0.0.1", place.lines["b"].port))
    until(lambda: not a.lines.heard("b").up)
    a.say(state="ready")
    for _ in range(20):
        place.beat(a, b)
        assert a.try_form(None) is None
    assert [m.state for m in a.watch(["b"])] == ["in", "ready"]
    cut.close()


def test_who_stood_still_itself_finds_nobody_dead_for_that(place):
    a, b = place.member("a"), place.member("b")
    place.form(a, b)
    place.lines["b"].close()
    cut = socket.create_server(("127.0.0.1", place.lines["b"].port))
    until(lambda: not a.lines.heard("b").up)
    a.watch(["b"])
    place.clock.now += 60.0
    assert [m.state for m in a.watch(["b"])] == ["in", "in"]
    cut.close()


def test_news_comes_over_the_line_and_a_newcomer_knocks(place):
    """No time passes, and the bucket is not listed for it."""
    a, b = place.member("a"), place.member("b")
    place.form(a, b)
    listed = place.store.list
    b.say(state="ready", end="resize")
    until(lambda: b"resize" in a.lines.heard("b").record)
    place.store.list = None
    assert {m.member: m.state for m in a.watch(["b"])} == {"a": "in", "b": "ready"}
    place.store.list = listed
    c = place.member("c")
    c.look()
    until(lambda: all(c.lines.heard(n).up for n in "ab") and a.lines._protocol._knocks.stranger)
    place.clock.now += 1.0
    assert {m.member for m in a.look()} == {"a", "b", "c"}


def test_a_warming_member_is_not_waited_for_by_those_who_train(place):
    a, b = place.member("a"), place.member("b")
    b.say(state="warming")
    for _ in range(4):
        place.beat(a, b)
        assert a.try_form(None) is None  # nothing trains yet: its second is well spent
    b.leave(end="")
    until(lambda: b"gone" in a.lines.heard("b").record or not a.lines.heard("b").up)
    assert place.form(a).members == ("a",)
    c = place.member("c")
    c.say(state="warming")
    a.say(state="ready")
    place.beat(a, c)
    assert a.try_form(None).members == ("a",)


def test_goodbye_needs_no_waiting(place):
    a, b = place.member("a"), place.member("b")
    place.form(a, b)
    a.say(state="ready", end="resize")
    b.leave(end="drained")
    until(lambda: b"drained" in a.lines.heard("b").record)
    epoch = a.try_form(None)
    assert (epoch.members, epoch.reason) == (("a",), "shrink")


def test_what_does_not_fit_stays_a_spare(place):
    a, b, c = (place.member(n, nproc=4, attempt=i) for i, n in enumerate("abc"))
    epoch = place.form(a, b, c, max_world=9)
    assert epoch.members == ("a", "b") and epoch.world == 8
    assert c.try_form(9) is None


def test_worlds_are_of_whole_replicas_and_who_is_left_over_waits(place):
    a, b, c = (place.member(n, attempt=i, replica_ranks=2) for i, n in enumerate("abc"))
    epoch = place.form(a, b, c)
    assert (epoch.members, epoch.world, epoch.replica_ranks) == (("a", "b"), 2, 2)
    assert Epoch.decode(place.store.get(epoch_key(1))) == epoch
    alive = a.members()
    waiting = a.waiting(epoch, alive)
    assert [m.member for m in waiting] == ["c"] and c.try_form(None) is None
    assert not a.would_grow(epoch, waiting, None)  # or the two would make room for ever
    d = place.member("d", attempt=3, replica_ranks=2)
    place.beat(a, b, c, d, seconds=11.0), place.meet(a, b, c, d)
    waiting = a.waiting(epoch, a.members())
    assert len(waiting) == 2 and a.would_grow(epoch, waiting, None)
    assert not a.would_grow(epoch, waiting, 2)  # there is only work for one replica


def test_worlds_are_of_the_numbers_of_ranks_that_are_allowed(place):
    a, b, c, d = (place.member(n, attempt=i, worlds=(1, 2, 4)) for i, n in enumerate("abcd"))
    epoch = place.form(a, b, c, d, max_world=3)
    assert (epoch.members, epoch.world) == (("a", "b"), 2) and c.try_form(3) is None
    assert not a.would_grow(epoch, [c.me], None) and a.would_grow(epoch, [c.me, d.me], None)


def test_a_spare_takes_the_place_of_who_is_lost(place):
    a, b, c = (place.member(n, attempt=i, replica_ranks=2) for i, n in enumerate("abc"))
    place.form(a, b, c)
    a.say(state="ready", end="resize")
    b.leave(end="drained")
    until(lambda: b"drained" in a.lines.heard("b").record)
    epoch = place.form(a, c)
    assert (epoch.members, epoch.world, epoch.reason) == (("a", "c"), 2, "shrink")
    c.leave(end="drained")
    a.say(state="ready", end="resize")
    until(lambda: b"drained" in a.lines.heard("c").record)
    assert place.form(a, rounds=4) is None  # half a replica cannot train


def test_an_epoch_without_whole_replicas_is_none():
    epoch = Epoch(1, ("a", "b", "c"), (1, 1, 1), (1.0,) * 3, "127.0.0.1", 29500, "start")
    for replica_ranks in (2, 0, -1):
        broken = replace(epoch, replica_ranks=replica_ranks).encode()
        with pytest.raises(ValueError):
            Epoch.decode(broken)


def test_a_stranger_from_long_ago_is_not_waited_for(place):
    place.member("ghost")
    place.lines["ghost"].close()
    a = place.member("a")
    assert place.form(a).members == ("a",)


def test_the_same_failure_is_counted_over_epochs(place):
    a = place.member("a")
    for n in (1, 2, 3):
        epoch = place.form(a)
        assert epoch.streak == n - 1
        a.say(
            state="ready", epoch=epoch.epoch, end="failed", failure="ValueError: x", failure_step=40
        )
    a.say(state="ready", failure="ValueError: other", failure_step=40)
    assert place.form(a).streak == 1


def test_each_generation_without_memory_halves_the_micro_batch_once(place):
    """However many members ran out of it. The failure is not counted: the next try is another."""
    a, b = (place.member(name, halves=True) for name in ("a", "b"))
    for n in (1, 2, 3):
        epoch = place.form(a, b)
        assert (epoch.halvings, epoch.streak) == (n - 1, int(n > 1))
        short = {"failure": "OutOfMemoryError", "failure_step": 40}
        for m in (a, b):
            m.say(state="ready", epoch=epoch.epoch, end="failed", **short)
    assert place.form(a, b).halvings == 3


def test_memory_that_ran_out_in_an_earlier_generation_halves_nothing_again(place):
    a, b = (place.member(name, halves=True, worlds=(1,)) for name in ("a", "b"))
    for n in (1, 2):
        epoch = place.form(a, b)
        assert (epoch.epoch, epoch.members, epoch.halvings) == (n, ("a",), 0)
        a.say(state="ready", epoch=epoch.epoch, end="resize")
        b.say(failure="OutOfMemoryError", failure_step=3)  # of before, and it waits for a place


def test_by_default_memory_that_runs_out_is_a_failure_like_others(place):
    a = place.member("a")
    for n in (1, 2, 3):
        epoch = place.form(a)
        assert (epoch.halvings, epoch.streak) == (0, n - 1)
        short = {"failure": "OomKilled", "failure_step": 40}
        a.say(state="ready", epoch=epoch.epoch, end="killed", **short)


def test_racing_members_agree_on_every_epoch(place):
    """Real threads propose at the same time; each epoch number is one object, and whoever
    enters is in it."""
    members = [place.member(f"m{i}", attempt=i) for i in range(6)]
    place.meet(*members)
    place.clock.now += 100.0
    for m in members:
        m._last.settled_s = 0.0  # everybody's turn has come
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


ODD = [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"beat": 3}']


def told(member: Member, /, **changes) -> bytes:
    return json.dumps({**asdict(member), **changes}).encode()


@pytest.mark.parametrize("odd", ODD)
def test_odd_objects_under_rdzv_stop_nobody(place, odd, capsys):
    """Empty, cut, of another kind, in a folder of their own: whoever wrote them, the run forms
    its epochs all the same."""
    for name in ("ghost.json", "sub/x.json", "y.json~"):
        place.store.put(f"rdzv/members/{name}", odd)
    for name in ("x.json~", "000001.json~", "000002.json"):
        place.store.put(f"rdzv/epochs/{name}", odd)
    a, b = place.member("a"), place.member("b")
    assert place.form(a, b).members == ("a", "b")
    assert a.newest().epoch == newest_epoch(place.store).epoch == 1
    a.say(state="ready"), b.say(state="ready")
    epoch = place.form(a, b)
    # the number 2 is taken by what is no epoch
    assert (epoch.epoch, epoch.members) == (3, ("a", "b"))
    assert newest_epoch(place.store) == epoch and {m.member for m in a.members()} == {"a", "b"}
    # by each of us once
    assert capsys.readouterr().out.count("rdzv/members/ghost.json is passed over") == 2


@pytest.mark.parametrize("odd", [*ODD, b"[]", b'["h"]', b'["h", 70000]', b'["h", "x"]', b'"short"'])
def test_odd_chunk_places_and_secrets_cost_only_the_peer_tier(tmp_path, odd):
    store = MemoryStore("memory://near", {})
    store.create(
        epoch_key(1), Epoch(1, ("a", "b"), (1, 1), (1.0, 1.0), "h", 1, "start").encode()
    )
    store.put("rdzv/chunks/b.json", odd)
    near = NodeTiers(
        store, "a", tmp_path / "a", NearbyConfig(peer="memory", memory_nbytes=1000), lambda: []
    )
    assert ChunkServers(store).of("b") is None and near.told()["secret"]
    near.close()
    store.put("rdzv/secret.json", odd)
    near = NodeTiers(
        store, "c", tmp_path / "c", NearbyConfig(peer="memory", memory_nbytes=1000), lambda: []
    )
    assert "secret" not in near.told() and store.list("rdzv/chunks/") == [
        "rdzv/chunks/a.json",
        "rdzv/chunks/b.json",
    ]
    near.close()


@pytest.mark.parametrize(
    ("changes", "there"),
    [
        ({"colour": "red", "pace": [1]}, True),  # of a newer version
        ({"speed": 2}, True),
        ({"nproc": "two"}, False),
        ({"nproc": True}, False),
        ({"speed": float("nan")}, False),
        ({"probe_port": 70_000}, False),
        ({"addr": None}, False),
        ({"member": "a"}, False),
    ],
)
def test_a_member_of_another_version_counts_if_it_makes_sense(place, changes, there):
    a, c = place.member("a"), place.member("c")
    place.store.put(
        f"rdzv/members/{c.me.member}.json", told(replace(c.me, state="ready", beat=9), **changes)
    )
    assert ([m.member for m in a.look()] == ["c", "a"]) == there


def test_a_broken_epoch_is_passed_over():
    store = MemoryStore("memory://broken", {})
    epoch = {
        "epoch": 1,
        "members": ["a"],
        "nproc": [2],
        "speeds": [1.0],
        "addr": "h",
        "port": 1,
        "reason": "start",
    }
    store.put(epoch_key(1), json.dumps({**epoch, "unheard-of": {}}).encode())
    assert newest_epoch(store) == Epoch(1, ("a",), (2,), (1.0,), "h", 1, "start")
    for broken in (
        {**epoch, "epoch": 7},
        {**epoch, "nproc": []},
        {**epoch, "members": "a"},
        {**epoch, "port": -1},
    ):
        store.put(epoch_key(2), json.dumps(broken).encode())
        assert newest_epoch(store).epoch == 1


def test_an_address_that_is_none_does_not_end_the_lines():
    lines, other = (PeerConnections(n, "127.0.0.1", pulse_s=0.1) for n in "ab")
    try:
        lines.follow(
            {
                "x": ("127.0.0.1", 70_000, "k"),
                "y": ("\0", 5, "k"),
                "z": ("no such host.", 5, "k"),
                "b": ("127.0.0.1", other.port, other.key),
            }
        )
        until(lambda: lines.heard("b").up)
    finally:
        lines.close(), other.close()


def test_no_epoch_has_no_world():
    assert (
        NO_EPOCH.world == 0 and newest_epoch(MemoryStore("memory://x", {})) is NO_EPOCH
    ) or NO_EPOCH.epoch == 0


def test_a_world_is_in_one_place_and_stays_there(place):
    """Nodes of another region cannot be reached: they wait, and take over when nobody is left
    here."""
    a, b, c, d = (place.member(n, attempt=i) for i, n in enumerate("abcd"))
    for m, where in ((a, "x/east"), (b, "x/east"), (c, "x/west"), (d, "x/west")):
        m.say(place=where)
    epoch = place.form(a, b, c, d)
    assert epoch.members == ("a", "b")
    assert a.waiting(epoch, a.members()) == []  # so nobody stops for them
    assert a.lines.following() == {"b"}  # nor waits for lines that never come up
    a.leave(end="drained")
    b.say(state="ready", end="resize")
    assert c.try_form(None) is None
    epoch = place.form(b, c, d)
    assert (epoch.members, epoch.reason) == (("b",), "shrink")
    b.leave(end="drained")
    assert place.form(c, d).members == ("c", "d")


def test_most_workers_decide_where_a_run_begins(place):
    a, b, c = (
        place.member("a", attempt=1),
        place.member("b", nproc=2, attempt=2),
        place.member("c", attempt=3),
    )
    a.say(place="x/east"), b.say(place="x/west"), c.say(place="x/east", state="gone")
    assert place.form(a, b).members == ("b",)


def test_lines_tell_living_dead_silent_and_strangers_apart():
    a, b = (PeerConnections(n, "127.0.0.1", pulse_s=0.2) for n in "ab")
    try:
        b.tell(b'{"n": 1}')
        # another member had this port once
        a.follow(dict.fromkeys(("b", "other"), ("127.0.0.1", b.port, b.key)))
        until(lambda: a.heard("b") == PeerStatus(True, False, b'{"n": 1}', True))
        until(b.knocked)
        assert a.heard("other") == PeerStatus()
        with (
            socket.create_connection(("127.0.0.1", b.port)) as stranger,
            socket.create_connection(("127.0.0.1", b.port)) as rude,
        ):
            stranger.sendall(b"\xff\x00" * 3000)
            # ends with a reset
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            rude.sendall(b"x")
        b.tell(b'{"n": 2}')
        until(lambda: a.heard("b").record == b'{"n": 2}')
        a.follow({"b": ("127.0.0.1", b.port, b.key)})
        until(lambda: a.heard("b").up)
        b.close()
        until(lambda: a.heard("b") == PeerStatus(False, True, b'{"n": 2}', True))
        chatter = socket.create_server(("127.0.0.1", 0))
        a.follow({"endless": (*chatter.getsockname(), "k")})
        talk, _ = chatter.accept()
        talk.sendall(b"endless\n")
        with contextlib.suppress(OSError):  # hung up
            while True:
                talk.sendall(b"x" * 100_000)
        assert not a.heard("endless").record
        talk.close()
        chatter.close()
    finally:
        a.close()


class Counting(MemoryStore):
    """Counts requests by what object stores bill: writes and lists, and reads."""

    def __init__(self):
        super().__init__("memory://counted", {})
        self.counts = collections.Counter()

    def __getattribute__(self, name):
        if name in ("get", "put", "create", "list", "delete", "size"):
            self.counts[name] += 1
        return super().__getattribute__(name)


class Hears(PeerHeartbeats):
    """Lines on which everybody is heard."""

    def __init__(self):
        self.up, self.changed = True, threading.Event()

    def follow(self, members, passing=False):
        pass

    def heard(self, name):
        return PeerStatus(up=self.up, seen=True)

    def all_up(self):
        return self.up

    def knocked(self):
        return False

    def tell(self, record):
        pass


def minutes10(tmp_path, members, first, up):
    """Requests of one node in ten minutes of calm training, by the agent's own loop at its own
    pace (its heartbeat's are added)."""
    clock, store, ears = Ticks(), Counting(), Hears()
    names = tuple(f"m{i}" for i in range(members))
    for name in names:
        store.put(
            f"rdzv/members/{name}.json",
            json.dumps(asdict(Member(name, "in", 1, "127.0.0.1", 1, 1, 1, 0))).encode(),
        )
    agent = Agent(
        AgentConfig(
            "memory://counted", [], 1, 1, "127.0.0.1", tmp_path, timing=Timing(control_s=5.0)
        ),
        store,
        [],
        RealHost(),
    )
    agent.name, agent._lines = names[0 if first else 1], ears
    agent._stay.epoch = Epoch(1, names, (1,) * members, (1.0,) * members, "", 0, "start")
    store.create(epoch_key(1), agent._stay.epoch.encode())
    store.create("run.json", json.dumps({"global_batch": 64, "micro_batch": 4}).encode())
    me = Member(agent.name, "in", 1, "127.0.0.1", 1, 1, 1, 0)
    agent.rendezvous = Rendezvous(store, me, ears, beat_s=1.0, dead_s=5.0, monotonic=clock)
    agent._watch_peers(0.0)
    ears.up = up
    store.counts.clear()
    beats = 0
    while clock.now < 600:
        clock.now += 0.3
        agent._watch_peers(clock.now)
        beats += agent.rendezvous.beat_if_due()
        if not up:  # the others beat too, then
            for name in names:
                r = agent.rendezvous.others.seen.get(name)
                if r:
                    r.sign_s = clock.now
    assert beats > 0
    return store.counts


@pytest.mark.parametrize("members", [1, 8])
def test_what_calm_training_costs_is_bounded_and_does_not_grow_with_the_world(tmp_path, members):
    """docs/design/RENDEZVOUS.md names these numbers."""
    first = minutes10(tmp_path, members, True, up=True)
    print(first)
    assert (
        first["put"] <= 60
        and first["list"] <= 120 + 60
        and first["get"] <= 300
        and set(first) == {"put", "list", "get"}
    )
    if members > 1:
        other = minutes10(tmp_path, members, False, up=True)
        print(other)
        assert other["put"] <= 60 and other["list"] <= 120 and other["get"] <= 300


def test_what_training_without_lines_costs_is_bounded_too(tmp_path):
    """Every peer is read once per beat then, and the next epoch looked for at every tick."""
    counts = minutes10(tmp_path, 4, True, up=False)
    print(counts)
    assert counts["list"] <= 120 + 60 and counts["put"] <= 600 and counts["get"] <= 3 * 600 + 2000
