"""Worlds too big for a line from each to each: the real rendezvous and the real lines of many
members under a virtual clock, and what strangers can do to the lines' port."""

import contextlib
import json
import resource
import socket
import time
from dataclasses import asdict

import pytest

from harness.bucket.layout import Member
from harness.rendezvous.gossip import Gossip, Grade
from harness.rendezvous.membership import FULL_MESH, neighbours
from harness.rendezvous.peer_connections import PeerConnections
from harness.rendezvous.peer_heartbeats import (
    STRANGERS,
    Dial,
    Door,
    HangUp,
    HeartbeatProtocol,
    Transmit,
)
from storage.tiers.peer_transport import Handshake
from support.rendezvous_crowd import Crowd
from support.worlds import until

pytestmark = pytest.mark.proof
MANY = 40


def names_of(crowd):
    return [m.name for m in crowd.living()]


def world(members, seed=1):
    """All of them in epoch 1, and calm."""
    crowd = Crowd(seed, min_members=members)
    names = [f"m{i:04d}-{crowd.scheduler.rng.getrandbits(24):06x}" for i in range(members)]
    for name in names:
        crowd.join(name)
    assert crowd.scheduler.run(lambda: crowd.trains(names), 30.0)
    for m in crowd.living():
        m.rendezvous.min_members = crowd.min_members = 1
    crowd.scheduler.run(lambda: False, crowd.scheduler.now + 3.0)
    return crowd


def recovers(crowd, within_s):
    """All that live come to train together."""
    begun_s = crowd.scheduler.now
    formed = crowd.scheduler.run(lambda: crowd.trains(names_of(crowd)), begun_s + within_s)
    assert formed, {m.name: (m.rendezvous.me.state, m.history[-3:]) for m in crowd.living()}
    numbers = [e.epoch for e in crowd.epochs()]
    assert numbers == list(range(1, len(numbers) + 1))


def nobody_was_wronged(crowd):
    for m in crowd.living():
        assert not [name for name in m.buried if crowd.members[name].life.alive], m.name


@pytest.mark.parametrize("members", [1, 2, FULL_MESH, FULL_MESH + 1, 100, 256, 1000])
def test_whom_a_member_follows(members):
    names = [f"m{i:04d}" for i in range(members)]
    follow = {n: neighbours(n, names) for n in names}
    assert all(a in follow[b] for a in names for b in follow[a])  # both ways
    assert all(len(f) <= max(FULL_MESH - 1, 12) for f in follow.values())
    reached, rounds = {names[0]}, 0
    while len(reached) < members:
        reached |= {n for r in reached for n in follow[r]}
        rounds += 1
        assert rounds <= 7


@pytest.mark.parametrize("members", [FULL_MESH, FULL_MESH + 1, MANY])
def test_an_epoch_is_formed_within_three_seconds(members):
    crowd = Crowd(3, min_members=members)
    names = [f"m{i:04d}-{crowd.scheduler.rng.getrandbits(24):06x}" for i in range(members)]
    for name in names:
        crowd.join(name)
    assert crowd.scheduler.run(lambda: crowd.trains(names), 3.0)
    assert len(crowd.epochs()) == 1
    nobody_was_wronged(crowd)


def test_the_epoch_of_256_is_formed_within_three_seconds_of_the_last():
    crowd = Crowd(5, min_members=256)
    names = [f"m{i:04d}-{crowd.scheduler.rng.getrandbits(24):06x}" for i in range(256)]
    for name in names[:-1]:
        crowd.join(name)
    crowd.scheduler.run(lambda: False, 2.0)
    crowd.join(names[-1])
    assert crowd.scheduler.run(lambda: crowd.trains(names), 5.0)
    assert len(crowd.epochs()) == 1
    assert max(len(m.protocol.wanted) for m in crowd.living()) <= 12
    # not the 255 objects of all others
    assert max(m.store.counts["get"] for m in crowd.living()) < 60
    nobody_was_wronged(crowd)


@pytest.mark.parametrize("which", ["one", "first", "scattered", "in a row", "half"])
def test_lost_processes_are_known_at_once(which):
    crowd = world(MANY)
    names = names_of(crowd)
    lost = {
        "one": names[7:8],
        "first": names[:1],
        "scattered": crowd.scheduler.rng.sample(names, 8),
        "in a row": names[5:15],
        "half": names[: MANY // 2],
    }[which]
    for name in lost:
        crowd.kill(name)
    recovers(crowd, 3.0)
    assert len(crowd.epochs()) == 2
    nobody_was_wronged(crowd)


@pytest.mark.parametrize("lost", [1, 8])
def test_machines_that_vanish_are_known_after_their_time(lost):
    crowd = world(MANY)
    begun_s = crowd.scheduler.now
    for name in names_of(crowd)[10 : 10 + lost]:
        crowd.kill(name, host=True)
    recovers(crowd, 12.0)
    assert crowd.scheduler.now - begun_s >= 5.0
    nobody_was_wronged(crowd)


def test_newcomers_are_let_in():
    crowd = world(MANY)
    crowd.join("m9000-aaaaaa")
    recovers(crowd, 5.0)
    for i in range(5):
        crowd.join(f"m90{i + 1:02d}-bbbbbb", ready_after_s=0.2 * i)
    recovers(crowd, 8.0)
    nobody_was_wronged(crowd)


@pytest.mark.parametrize("seed", range(4))
def test_who_is_cut_off_from_some_but_reaches_the_bucket_lives(seed):
    """One-way and both ways, between few and between halves: lines fall, beats go on."""
    crowd = world(24, seed)
    rng, names = crowd.scheduler.rng, names_of(crowd)
    half = names[:12]
    if seed == 0:
        crowd.cut = {(a, b) for a in half for b in names if b not in half}
    elif seed == 1:
        crowd.cut = {(names[5], b) for b in names}  # nobody hears it
    else:
        crowd.cut = {(rng.choice(names), rng.choice(names)) for _ in range(30)}
    crowd.scheduler.run(lambda: False, crowd.scheduler.now + 30.0)
    nobody_was_wronged(crowd)
    assert len(crowd.epochs()) == 1
    crowd.cut = set()
    crowd.scheduler.run(lambda: False, crowd.scheduler.now + 5.0)
    crowd.kill(names[3])
    recovers(crowd, 5.0)


def test_what_calm_training_costs_does_not_grow_with_the_world():
    """Per node and second, over half a minute."""
    crowd = world(MANY)
    before, begun = crowd.requests(), crowd.scheduler.now
    crowd.scheduler.run(lambda: False, begun + 30.0)
    spent = crowd.requests()
    spent.subtract(before)
    print(spent)
    assert spent["put"] <= MANY * 4 and spent["list"] <= 4 and spent["get"] <= MANY


# ---- hearsay -------------------------------------------------------------------------------------
def record(name, beat, state="in"):
    return json.dumps(asdict(Member(name, state, 1, "h", 1, 1, 1, beat=beat))).encode()


def test_hearsay_is_believed_only_if_it_is_newer_and_about_its_owner():
    g = Gossip("me")
    assert g.learn("a", record("a", 3)) and not g.learn("a", record("a", 3))
    assert not g.learn("a", record("a", 2)) and not g.learn("a", record("b", 9))
    assert not g.learn("me", record("me", 9))
    assert not g.learn("a", record("a", 4))  # a beat that says nothing new goes no further
    assert g.records["a"].beat == 4
    assert g.learn("a", record("a", 5, "ready"))
    for odd in (b"@", b"@a", b"@a x {}", b"@a 9 [", b"@../x 9 {}", b"?a 1 7", b"?a -1", b"?a 9 x"):
        assert g.hear(odd, 0.0, False) == ("", b"")
    assert g.hear(b"?a 9 " + b"1" * 5000, 0.0, False) == ("", b"")  # int() would refuse it


def test_doubts_are_passed_on_once_and_end_with_a_newer_beat():
    g = Gossip("me")
    g.learn("a", record("a", 3))
    assert g.hear(b"?a 3 1", 0.0, False) == ("a", b"?a 3 1\n")
    assert g.hear(b"?a 3 1", 0.1, False) == ("", b"")
    assert g.hear(b"?a 3 2", 0.1, False)[0] == "a" and g.doubts["a"].grade is Grade.REFUSED
    assert g.hear(b"?a 2 3", 0.2, False) == ("", b"")  # it was heard since
    g.learn("a", record("a", 4))
    assert not g.doubts
    assert g.hear(b"?a 4 3", 0.3, True) == ("", b"")  # we hear it ourselves


# ---- who calls -----------------------------------------------------------------------------------
def asked(p, name, key, conn=None):
    """`name` calls, and is asked for its proof: its connection, and what both have said."""
    conn, number = p.accepted(0.0, "h") if conn is None else conn, "f" * 32
    p.received(conn, f"{name} 2 {number}\n".encode(), 0.0)
    (said,) = [a.data for a in p.take() if isinstance(a, Transmit)]
    version, ours = said.decode().split()
    assert version == "2"
    return conn, Handshake(key, number, ours)


def test_nothing_is_said_to_who_does_not_know_the_key():
    p = HeartbeatProtocol("b", 0.5, 0.0, key="secret")
    p.tell(record("b", 1))
    p.take()

    def call(words):
        conn = p.accepted(0.0, "h")
        p.received(conn, words, 0.0)
        return p.take()

    conn, shaken = asked(p, "a", "secret")
    p.received(conn, f"{shaken.proof('call', 'b', 'a')}\n".encode(), 0.0)
    (said,) = [a for a in p.take() if isinstance(a, Transmit)]
    assert said.data.startswith(f"b {shaken.proof('answer', 'b', 'a')}\n".encode())
    other, again = asked(p, "a", "secret")  # what was overheard, on another connection
    assert again.ours != shaken.ours
    p.received(other, f"{shaken.proof('call', 'b', 'a')}\n".encode(), 0.0)
    assert p.take() == [HangUp(other)]
    number = "0" * 32
    for words in ("a x\n", "\xff\n", "x" * 300, "GET / HTTP/1.1\r\n\r\n", f"a 3 {number}\n", f"a 2 {number}0\n"):
        assert not [a for a in call(words.encode("latin-1")) if isinstance(a, Transmit)], words
    assert not [a for a in call(b"old\n") if isinstance(a, Transmit)]  # says no number


def test_one_that_we_call_must_prove_it_with_our_number():
    overheard: list[bytes] = []
    for answers in ("now", "as it did before"):
        p = HeartbeatProtocol("b", 0.5, 0.0, key="our key" + answers)
        p.follow({"d": Door("h", 1, "their key")}, 0.0)
        conn = next(a.conn for a in p.take() if isinstance(a, Dial))
        p.connected(conn, 0.0)
        number = p.take()[0].data.split()[2].decode()
        shaken = Handshake("their key", number, "1" * 32)
        p.received(conn, b"2 " + b"1" * 32 + b"\n", 0.0)
        (said,) = p.take()
        assert said.data == f"{shaken.proof('call', 'd', 'b')}\n".encode()
        if answers == "now":
            overheard.append(f"d {shaken.proof('answer', 'd', 'b')}\n".encode())
        p.received(conn, overheard[0] + record("d", 1) + b"\n", 0.0)
        assert p.heard("d").up == (answers == "now")


def test_keys_never_travel():
    """Neither ours nor those of whom we pass something on, whoever told us."""
    spoken = json.dumps({**json.loads(record("c", 3)), "key": "its key"}).encode()
    p = HeartbeatProtocol("b", 0.5, 0.0, key="our key")
    p.follow({"d": Door("h", 1, "their key")}, 0.0, passing=True)
    p.tell(spoken.replace(b'"c"', b'"b"').replace(b"its key", b"our key"))
    p.share("c", spoken, 0.0)
    dial = next(a for a in p.take() if isinstance(a, Dial))
    conn, shaken = asked(p, "a", "our key")
    p.received(conn, f"{shaken.proof('call', 'b', 'a')}\n".encode(), 0.0)
    p.connected(dial.conn, 0.0)
    greeting = next(a.data for a in p.take() if isinstance(a, Transmit) and a.conn == dial.conn)
    theirs = Handshake("their key", greeting.split()[2].decode(), "1" * 32)
    p.received(dial.conn, b"2 " + b"1" * 32 + b"\n", 0.0)
    p.received(dial.conn, f"d {theirs.proof('answer', 'd', 'b')}\n".encode(), 0.0)
    newer = {**json.loads(record("c", 9, "ready")), "key": "its key"}
    p.received(dial.conn, b"@c 9 " + json.dumps(newer).encode() + b"\n", 0.0)
    p.tell(spoken.replace(b'"c"', b'"b"').replace(b"its key", b"our key"))
    p.tick(1.0)
    said = b"".join(a.data for a in p.take() if isinstance(a, Transmit))
    assert b'"member": "b"' in said and b"@c 9 " in said and b"key" not in said


def test_strangers_have_few_places_and_little_time():
    p = HeartbeatProtocol("b", 0.5, 0.0, key="secret")
    conns = [p.accepted(0.0, f"h{i % 9}") for i in range(1000)]
    assert sum(isinstance(a, HangUp) for a in p.take()) == 1000 - STRANGERS
    _, shaken = asked(p, "a", "secret", conns[-1])
    p.received(conns[-1], f"{shaken.proof('call', 'b', 'a')}\n".encode(), 1.0)
    assert isinstance(p.take()[0], Transmit)
    p.tick(3.0)
    gone = [a for a in p.take() if isinstance(a, HangUp)]
    assert len(gone) == STRANGERS - 1


def test_a_thousand_silent_connections_cost_nobody_its_lines():
    """AUDIT 18: they took every place and every descriptor, and the agent spun."""
    a, b = PeerConnections("a", "127.0.0.1", 0.2), PeerConnections("b", "127.0.0.1", 0.2)
    callers = []
    try:
        for _ in range(600):
            s = socket.socket()
            s.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                s.connect(("127.0.0.1", b.port))
            callers.append(s)
        until(lambda: len(b._sockets) <= STRANGERS)
        b.tell(b'{"n": 7}')
        a.follow({"b": Door("127.0.0.1", b.port, b.key)})
        until(lambda: a.heard("b").record == b'{"n": 7}')
    finally:
        for s in callers:
            s.close()
        a.close(), b.close()


def test_without_descriptors_the_thread_waits():
    """... and does not spin, and lets callers in when there are some again."""
    lines = PeerConnections("b", "127.0.0.1", 0.2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    turns = []
    real = lines._hear_again
    lines._hear_again = lambda: (turns.append(0), real())
    hold = []
    try:
        caller = socket.socket()
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        with contextlib.suppress(OSError):
            while True:
                hold.append(socket.socket())
        caller.connect(("127.0.0.1", lines.port))
        until(lambda: lines._deaf_until_s > 0)
        turns.clear()
        begun_s = time.monotonic()
        time.sleep(1.0)
        assert len(turns) < 50 * (time.monotonic() - begun_s)
        for s in hold:
            s.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        until(lambda: lines._sockets)
        caller.close()
    finally:
        for s in hold:
            s.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        lines.close()
