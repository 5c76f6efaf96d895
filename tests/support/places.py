"""A place where members of a rendezvous meet, in one process."""

import json

import pytest

from harness.bucket.layout import Member
from harness.rendezvous.peer_connections import PeerConnections
from harness.rendezvous.rendezvous import Rendezvous
from storage.stores.folder_store import MemoryStore
from support.worlds import until


class Ticks:
    """A monotonic clock that the test moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def place():
    place = Place()
    yield place
    place.close()


class Place:
    """Members on one store, with real lines between them and one clock that the test moves."""

    def __init__(self):
        self.store, self.clock, self.lines = MemoryStore("memory://rdzv", {}), Ticks(), {}

    def member(
        self, name, nproc=1, attempt=0, replica_ranks=1, worlds=(), meshes=None, halves=False
    ) -> Rendezvous:
        lines = self.lines[name] = PeerConnections(name, "127.0.0.1", pulse_s=0.2)
        me = Member(name, "ready", 0, "127.0.0.1", lines.port, 29500, nproc=nproc, attempt=attempt)
        r = Rendezvous(
            *(self.store, me, lines),
            **{"beat_s": 1.0, "dead_s": 5.0, "join_window_s": 1.0, "monotonic": self.clock},
            replica_ranks=replica_ranks,
            worlds=worlds,
            meshes=meshes,
            halves=halves,
        )
        r.say()
        return r

    def close(self):
        for lines in self.lines.values():
            lines.close()

    def resolved(self, m, members):
        """Does it know of everybody whom it follows whether they are there, and of these members
        whether they reach it?"""
        heard = {n: m.lines.heard(n) for n in m.lines.following()}
        both = {o.me.member for o in members if m.me.member in o.lines.following()}
        return all(
            h.refused or (n in m.lines.reached() if n in both else h.up) for n, h in heard.items()
        )

    def up_to_date(self, m, members):
        """Has it heard the last word of each of these whom it hears? Rounds pass faster than
        lines carry."""
        heard = [
            (m.lines.heard(o.me.member), o.me.beat)
            for o in members
            if o.me.member in m.lines.following()
        ]
        return all(
            not h.up or (h.record and json.loads(h.record)["beat"] >= beat) for h, beat in heard
        )

    def beat(self, *members, seconds=1.0):
        self.clock.now += seconds
        for m in members:
            m.say()

    def meet(self, *members):
        """Let everybody look around until lines are up and all have heard who reaches whom."""
        for _ in "lines", "who is reached":
            for m in members:
                m.look()
            until(lambda: all(self.resolved(m, members) for m in members))
            until(lambda: all(self.up_to_date(m, members) for m in members))

    def form(self, *members, max_world=None, rounds=12):
        """Let everybody look around until an epoch has been entered by all that are in it."""
        entered = {}
        for _ in range(rounds):
            self.meet(*members)
            for m in members:
                epoch = m.try_form(max_world)
                if epoch is not None:
                    m.say(state="in", epoch=epoch.epoch)
                    entered[m.me.member] = epoch
            if entered and all(n in entered for n in next(iter(entered.values())).members):
                return next(iter(entered.values()))
            self.beat(*members)
        return None
