"""Members prove that they reach each other before an epoch names them (AUDIT 2)."""

import itertools
from pathlib import Path

import pytest

from harness.bucket.archive import read_facts
from harness.bucket.layout import Member
from harness.core.facts import AgentEnded, EpochStarted, Warned
from harness.core.world import DRAINED, UNFIT
from harness.rendezvous.reach import LEAVE_S, REACH_S, Reach
from harness.rendezvous.rendezvous import AWAY_S
from storage.errors import StoreUnavailable
from storage.stores.store_urls import open_store
from support.outside import environment, said_of, seam, train_begin
from support.worlds import until


def world(names, *apart, missing=()):
    """Members that all reach each other, except for these pairs."""
    cut = {frozenset(pair) for pair in apart}
    return [
        Member(
            *(n, "ready", 1, f"10.0.0.{i}", 1, 2, 1),
            reach=tuple(o for o in names if o != n and frozenset((n, o)) not in cut),
        )
        for i, n in enumerate(names)
        if n not in missing
    ]


def kept(members, staying=(), me="a", is_big=False):
    found = Reach(me).sort_out(members, staying, 0.0, is_big=is_big)
    return "".join(m.member for m in found)


def halves(one, other):
    return itertools.product(one, other)


def test_who_is_not_reached_is_left_out_and_the_greater_half_trains():
    assert kept(world("abc")) == "abc"
    assert kept(world("abc", "ac", "bc")) == "ab"
    assert kept(world("abcde", *halves("ab", "cde"))) == "cde"
    assert kept(world("abcd", *halves("ab", "cd"))) == "ab"  # as many: the older generation's
    assert kept(world("abc", "bc")) == "ab"
    for me in "abcde":  # all come to the same
        assert kept(world("abcde", *halves("ac", "bde")), me=me) == "bde"


def test_those_that_train_are_not_left_out_for_newcomers():
    assert kept(world("abc", *halves("a", "bc")), staying="a") == "a"
    assert kept(world("abc", "ab"), staying="ab") == "abc"  # lines that are down between them
    assert kept(world("abc", "bc"), staying="ab") == "ab"


def test_a_big_world_needs_to_be_connected_only():
    ring = [Member(n, "ready", 1, "h", 1, 2, 1, reach=(o,)) for n, o in zip("abcd", "bcda", strict=True)]
    assert kept(ring, is_big=True) == "abcd"
    assert kept(world("abcde", *halves("ab", "cde")), is_big=True) == "cde"
    assert kept(world("abcde", *halves("ab", "cde")), staying="a", is_big=True) == "ab"
    assert kept([], is_big=True) == ""


def test_ones_own_lines_count_more_than_what_others_say():
    assert kept([Member("a", "ready", 1, "h", 1, 2, 1, reach=()), world("ab")[1]]) == "a"
    nothing = [Member(n, "ready", 1, "h", 1, 2, 1) for n in "abc"]
    assert kept(nothing) == "abc"  # without lines nothing can be proven


def test_lines_have_time_to_come_up_and_who_is_left_out_is_told_why():
    reach = Reach("b")
    cut = world("abc", "ab", "bc")
    reach.sort_out(cut, (), 1.0, is_big=False)
    assert not reach.is_proven(1.0 + REACH_S / 2) and not reach.left_out_s(1.0 + REACH_S / 2)
    reach.sort_out(cut, (), 2.0, is_big=False)
    assert reach.is_proven(1.0 + REACH_S) and reach.left_out_s(1.0 + LEAVE_S) == LEAVE_S
    why = reach.why("10.0.0.1")
    assert all(w in why for w in ("b at 10.0.0.1", "a at 10.0.0.0", "VNet", "security group", "NAT"))
    reach.sort_out(world("abc"), (), 3.0, is_big=False)
    assert reach.is_proven(3.0) and not reach.left_out_s(99.0)


# ---- members with real lines ---------------------------------------------------------------------
def cut_off(place, name):
    """A member at an address where nobody answers, which cannot call others either."""
    m = place.member(name)
    place.lines[name].close()
    m.lines.reached = frozenset
    m.say(addr="127.0.0.9", probe_port=1)
    return m


def test_a_node_that_is_not_reached_does_not_stop_one_that_trains(place):
    a = place.member("a")
    first = place.form(a)
    b = cut_off(place, "b")
    for _ in range(15):
        place.beat(a, b)
        assert a.waiting(first, a.members()) == [] and b.try_form(None) is None
    assert b.reach.left_out_s(place.clock.now) > REACH_S and "a at 127.0.0.1" in b.reach.why("x")
    assert a.newest().epoch == 1


def test_a_node_that_is_not_reached_costs_a_start_a_few_seconds(place):
    a, b, c = place.member("a"), place.member("c"), cut_off(place, "b")
    begun_s = place.clock.now
    epoch = None
    while epoch is None:
        place.meet(a, b)
        c.look()
        epoch = c.try_form(None) or b.try_form(None) or a.try_form(None)
        place.beat(a, b, c)
    assert epoch.members == ("a", "c") and place.clock.now - begun_s <= REACH_S + 2.0
    assert c.try_form(None) is None and c.reach.left_out_s(place.clock.now) > 0.0


def test_a_refusal_is_no_death_of_one_that_trains_and_was_never_reached(place):
    """... for it lives in the bucket, with the long interval that it has promised there."""
    a = place.member("a")
    place.form(a)
    place.lines["a"].close()
    a.lines.all_up = lambda: True  # it is calm, and has not seen b
    place.beat(a)
    b = place.member("b")
    b.look()
    until(lambda: b.lines.heard("a").refused, within_s=5.0)
    for _ in range(9):
        place.beat(b)
        assert b.try_form(None) is None and b.newest().epoch == 1
    epoch = None
    for _ in range(5):  # its promise is broken
        place.beat(b)
        epoch = epoch or b.try_form(None)
    assert epoch is not None and epoch.members == ("b",)


def test_nobody_is_called_unreachable_for_those_that_are_dead(place):
    """... but not yet known to be: all were lost at once, and one comes anew."""
    a, b = place.member("a"), place.member("b")
    assert place.form(a, b).members == ("a", "b")
    for m in (a, b):
        m.say()
        place.lines[m.me.member].close()
    c, epoch = place.member("c", attempt=1), None
    for _ in range(30):
        place.beat(c)
        epoch = epoch or c.try_form(None)
        assert c.isolated_s() == 0.0
    assert epoch is not None and epoch.members == ("c",)


class Silent:
    """A node's way to the bucket, which can fall silent."""

    def __init__(self, store):
        self.store, self.is_silent = store, False

    def __getattr__(self, name):
        if self.is_silent and name in ("get", "put", "create", "list"):
            raise StoreUnavailable("no answer")
        return getattr(self.store, name)


def test_one_whose_bucket_falls_silent_keeps_nobody_waiting(place):
    """It is named in an epoch that it cannot read, goes away over its lines, and comes back."""
    a, bucket = place.member("a"), place.store
    place.store = silent = Silent(bucket)
    b = place.member("b", attempt=1)
    place.meet(a, b)
    assert b.try_form(None) is None
    silent.is_silent = True
    first = None
    while first is None:
        place.clock.now += 1.0
        a.say()
        b.mention()
        until(lambda: place.up_to_date(a, [b]))
        first = a.try_form(None)
    assert first.members == ("a", "b")
    a.say(state="in", epoch=1)
    assert not b.withdraw()
    place.clock.now += AWAY_S
    assert b.withdraw() and not b.withdraw()
    until(lambda: place.up_to_date(a, [b]))
    away = next(m for m in a.watch(["b"]) if m.member == "b")
    assert away.state == "away" and first.is_left_by(away)
    a.say(state="ready", end="resize")
    alone = a.try_form(None)
    assert alone is not None and alone.members == ("a",)
    a.say(state="in", epoch=2)
    silent.is_silent = False
    assert b.try_form(None) is None and b.me.state == "ready"
    place.meet(a, b)
    assert [m.member for m in a.waiting(alone, a.members())] == ["b"]
    a.say(state="ready", end="resize")
    both = place.form(a, b)
    assert (both.members, both.withdrawals) == (("a", "b"), (0, 1))


def test_reach_is_proven_again_by_new_connections(place):
    """A firewall that comes amid a run lets open connections be, and refuses new ones."""
    a, b = place.member("a"), place.member("b")
    assert place.form(a, b).members == ("a", "b")
    lines = place.lines["a"]
    lines._dial = lambda conn, address: lines._lost(conn, refused=True)
    begun_s, epoch = place.clock.now, None
    for m in (a, b):
        m.say(state="ready")
        m.lines.renew()
    until(lambda: lines.heard("b").seen and not lines.heard("b").up)
    while epoch is None and place.clock.now - begun_s < 20.0:
        place.beat(a, b)
        assert b.try_form(None) is None
        epoch = a.try_form(None)
    assert epoch.members == ("a",) and place.clock.now - begun_s <= REACH_S + 2.0
    assert {m.member for m in a.members()} == {"a", "b"}  # a refusal is no death


# ---- real agents ---------------------------------------------------------------------------------
@pytest.mark.proof
@pytest.mark.parametrize("answer", ["self._lost(conn, refused=True)", "None"])
def test_an_agent_that_is_not_reached_leaves_and_the_other_trains_on(tmp_path: Path, answer: str):
    """Behind a firewall that refuses, or drops, what it sends and what it is sent."""
    walled = seam(
        tmp_path / "seam",
        f"""
        import sys
        if "harness.cli" in sys.orig_argv:
            from harness.agent import agent
            from harness.rendezvous.peer_connections import PeerConnections
            agent.LEAVE_S = 4.0
            def dial(self, conn, address):
                {answer}
            init = PeerConnections.__init__
            def hide(self, name, addr, pulse_s=0.5):
                init(self, name, "127.0.0.9", pulse_s)
                self.port = 9
            PeerConnections._dial, PeerConnections.__init__ = dial, hide
        """,
    )
    run = tmp_path / "run"
    healthy = train_begin(run, total=1000, nap_s=0.3, folder=tmp_path)
    store = open_store(str(run))

    def told(kind):
        return [s.fact for s in read_facts(store) if isinstance(s.fact, kind)]

    until(lambda: told(EpochStarted), within_s=40.0)
    other = train_begin(run, total=1000, nap_s=0.3, folder=tmp_path, env=environment(walled))
    code, said = said_of(other, 60.0)
    assert code == UNFIT and "VNet" in said, said
    assert any("is unreachable" in fact.what for fact in told(Warned))
    healthy.terminate()
    code, said = said_of(healthy, 60.0)
    assert code == DRAINED, said
    assert [(e.epoch, len(e.members)) for e in told(EpochStarted)] == [(1, 1)]
    assert {fact.exit_code for fact in told(AgentEnded)} == {UNFIT, DRAINED}
