"""The network between simulated nodes, and the hands of the real `HeartbeatProtocol` over it. Pure.

A connection is two ends. What one sends arrives after the link's latency. While either way is shut
it waits (TCP sends little that is not acknowledged, and repeats it), and comes when both are open
again. A process that ends closes its connections; a machine without power closes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.rendezvous.gossip import GossipReport
from harness.rendezvous.membership import PeerHeartbeats
from harness.rendezvous.peer_heartbeats import (
    Address,
    Dial,
    Door,
    HangUp,
    HeartbeatProtocol,
    Heed,
    PeerStatus,
    Transmit,
)

if TYPE_CHECKING:
    from support.system.fault_plan import ActiveFaults
    from support.system.system_node import SimNode
    from support.system.virtual_time import Kernel


# What a simulated agent has of its lines: the real `HeartbeatProtocol`, at a virtual time. Pure.


class SimulatedHeartbeats(PeerHeartbeats):
    """As `lines.Lines` has them. Whoever inherits it has a clock and hands."""

    protocol: HeartbeatProtocol

    def now(self) -> float:
        raise NotImplementedError

    def act(self) -> None:
        """Carry out what the protocol says."""
        raise NotImplementedError

    def tell(self, record: bytes) -> None:
        self.protocol.tell(record)
        self.act()

    def follow(self, members: Mapping[str, Door], passing: bool = False) -> None:
        self.protocol.follow(members, self.now(), passing)
        self.act()

    def renew(self) -> None:
        self.protocol.renew(self.now())
        self.act()

    def share(self, name: str, record: bytes) -> None:
        self.protocol.share(name, record, self.now())
        self.act()

    def doubt(self, name: str) -> None:
        self.protocol.doubt(name, self.now())
        self.act()

    def overheard(self) -> GossipReport:
        return self.protocol.overheard()

    def heard(self, name: str) -> PeerStatus:
        return self.protocol.heard(name)

    def all_up(self) -> bool:
        return self.protocol.all_up()

    def reached(self) -> frozenset[str]:
        return self.protocol.reached()

    def knocked(self) -> bool:
        return self.protocol.knocked()


LATENCY_S = (0.001, 0.02)
SLOW_S = 3.0  # more, of what a slow link carries
BREAK = 0.1  # chance that a connection of a lossy node breaks when something is sent
MOST_WAITING = 50  # messages on a way that is not open; then the sender's end is closed


class SimulatedNet:
    """`nodes`: every one that ever was, by address; `ports`: who listens where."""

    def __init__(self, kernel: Kernel, trouble: ActiveFaults):
        self.kernel, self.trouble = kernel, trouble
        self.nodes: dict[str, SimNode] = {}
        self.ports: dict[Address, SimulatedConnections] = {}

    def open(self, a: SimNode, b: SimNode) -> bool:
        """Does what `a` sends reach `b`?"""
        if a is b:
            return a.alive
        t = self.trouble
        return (
            a.alive
            and b.alive
            and not t.reigns("cut", a)
            and not t.reigns("cut", b)
            and not t.reigns("one-way", a, b.number)
        )

    def connected(self, a: SimNode, b: SimNode) -> bool:
        return self.open(a, b) and self.open(b, a)

    def dials(self, a: SimNode, b: SimNode) -> bool:
        """Can `a` make a connection to `b`?"""
        open_to_new = a is b or not (b.walled or self.trouble.reigns("wall", b))
        return self.connected(a, b) and open_to_new


@dataclass
class _Flag:
    """As `threading.Event` is used."""

    up: bool = False

    def is_set(self) -> bool:
        return self.up

    def clear(self) -> None:
        self.up = False


@dataclass
class _End:
    """One end of a connection: of whom, under which number; and what waits to leave it."""

    lines: SimulatedConnections
    conn: int
    other: _End | None = None
    waiting: list[bytes | None] = field(default_factory=list)  # None: it was closed
    arrives_s: float = 0.0  # of the last that left: nothing overtakes it


@dataclass
class SimulatedConnections(SimulatedHeartbeats):
    """A node's lines, as `lines.Lines` has them."""

    name: str
    node: SimNode
    net: SimulatedNet
    port: int
    pulse_s: float
    rng: random.Random
    closed: bool = False
    changed: _Flag = field(default_factory=_Flag)
    _ends: dict[int, _End] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.actor = f"lines-{self.node.number}"
        build = self.node.sim.build
        self.key = f"{self.rng.getrandbits(128):032x}"
        self.protocol = build.lines(self.name, self.pulse_s, self.now(), self.key)
        self.net.ports[self.node.addr, self.port] = self
        self._tick()

    def now(self) -> float:
        return self.net.kernel.now_s

    # -- PeerLines
    def tell(self, record: bytes) -> None:
        super().tell(self.node.spoken(record))

    def close(self) -> None:
        """The process ends: so do its connections."""
        self.closed = True
        for conn in list(self._ends):
            self._drop(conn)

    # -- hands
    def _tick(self) -> None:
        if self.closed or not self.node.alive:
            return
        self.protocol.tick(self.now())
        self.act()
        pause_s = max(0.05, self.protocol.wait_s(self.now()))
        self.net.kernel.after(pause_s, self._tick, self.actor)

    def act(self) -> None:
        while acts := self.protocol.take():
            for act in acts:
                match act:
                    case Dial(conn, address):
                        self._dial(conn, address)
                    case Transmit(conn, data):
                        self._send(conn, data)
                    case HangUp(conn):
                        self._drop(conn)
                    case Heed():
                        self.changed.up = True

    def _dial(self, conn: int, address: Address) -> None:
        end = self._ends[conn] = _End(self, conn)
        other = self.net.nodes.get(address[0])
        if self.net.trouble.reigns("no-descriptors", self.node):
            self._later(0.0, lambda: self._lost(conn, refused=False))
        elif other is not None and self.net.dials(self.node, other):
            there = self.net.ports.get((address[0], address[1]))
            if there is None or there.closed:
                self._later(self._latency_s(), lambda: self._lost(conn, refused=True))
            else:
                there._later(self._latency_s(), lambda: there._accept(end))
        # else nobody answers; the protocol does not wait for ever

    def _accept(self, theirs: _End) -> None:
        if self.closed or not self.node.alive or theirs.conn not in theirs.lines._ends:
            return
        conn = self.protocol.accepted(self.now(), theirs.lines.node.addr)
        mine = self._ends[conn] = _End(self, conn, theirs)
        theirs.other = mine
        theirs.lines._later(self._latency_s(), lambda: theirs.lines._connected(theirs.conn))
        self.act()

    def _connected(self, conn: int) -> None:
        if conn in self._ends and not self.closed:
            self.protocol.connected(conn, self.now())
            self.act()

    def _send(self, conn: int, data: bytes | None) -> None:
        end = self._ends.get(conn)
        if end is None or end.other is None:
            return
        t, other = self.net.trouble, end.other.lines
        lossy = t.reigns("lossy", self.node) or t.reigns("lossy", other.node)
        if data is not None and lossy and self.rng.random() < BREAK:
            self._drop(conn)
            self._later(0.0, lambda: self._lost(conn, refused=False))
            return
        end.waiting.append(data)
        if not self.net.connected(self.node, other.node):
            if len(end.waiting) > MOST_WAITING:
                self._later(0.0, lambda: self._lost(conn, refused=False))
            return
        whole, end.waiting = end.waiting, []
        end.arrives_s = max(end.arrives_s, self.now() + self._latency_s())
        to, number = other, end.other.conn
        for each in whole:
            pause_s = end.arrives_s - self.now()
            to._later(pause_s, lambda d=each: to._receive(number, d, end))  # type: ignore[misc]

    def _receive(self, conn: int, data: bytes | None, sender: _End) -> None:
        if not self.node.alive:
            return
        if conn not in self._ends or self.closed:
            if data is not None and self.net.connected(self.node, sender.lines.node):
                # reset: that connection was closed here, while nobody could be told
                theirs = sender.lines
                theirs._later(self._latency_s(), lambda: theirs._lost(sender.conn, refused=False))
            return
        if data is None:
            self._lost(conn, refused=False)
            return
        self.protocol.received(conn, data, self.now())
        self.act()

    def _lost(self, conn: int, refused: bool) -> None:
        if self._ends.pop(conn, None) is not None and not self.closed:
            self.protocol.closed(conn, self.now(), refused)
            self.act()

    def _drop(self, conn: int) -> None:
        """Ours is closed; the other end hears of it, if this machine still can say so."""
        if self.node.alive:
            self._send(conn, None)
        self._ends.pop(conn, None)

    def _latency_s(self) -> float:
        slow = self.net.trouble.reigns("slow-link", self.node)
        return self.rng.uniform(*LATENCY_S) + (SLOW_S if slow else 0.0)

    def _later(self, seconds: float, happen: Callable[[], None]) -> None:
        self.net.kernel.after(seconds, happen, self.actor)
