"""Open connections between agents, which carry signs of life and records without the bucket. Runs
in the node agent.

Every member listens. A follower of a member connects to it, and receives its name, its record, each
new record at once, and a pulse. A connection that closes is retried at once, and a refusal shows a
death within milliseconds; silence is left to the caller to judge. Nothing that strangers send is
trusted: a caller's name is only a reason to look into the bucket. Losing a line costs only speed:
the bucket has the same data, later. Knows sockets; nothing of generations (the code's `epoch`).

The protocol is in `peer_heartbeats.py`; this file adds sockets and one thread.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Mapping

from harness.rendezvous.gossip import GossipReport
from harness.rendezvous.peer_heartbeats import (
    LONGEST_NBYTES,
    Address,
    Dial,
    Door,
    HangUp,
    HeartbeatProtocol,
    Heed,
    LineAct,
    PeerStatus,
    Transmit,
)
from storage.http_server import DEAF_S, OUT_OF_DESCRIPTORS, is_in_reserve

CLOSE_S = 5.0  # the longest wait for the thread to end
UNSENT_NBYTES = 4 * 1024 * 1024  # a peer with more unsent data is frozen or gone


class PeerConnections:
    """The lines of one member. `port`: on which we listen. `key`: secret of callers, published in
    the member's object. `changed`: set when something was received that may matter. Close it when
    done."""

    def __init__(self, name: str, addr: str, pulse_s: float = 0.5):
        self.key = secrets.token_hex(16)
        self.changed = threading.Event()
        self._lock = threading.Lock()  # of the protocol
        self._protocol = HeartbeatProtocol(name, pulse_s, time.monotonic(), self.key)
        self._sockets: dict[int, socket.socket] = {}
        self._unsent: dict[int, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._server = socket.create_server((addr, 0), backlog=512)
        self._server.setblocking(False)
        self._deaf_until_s = 0.0  # until when no callers are accepted; 0: they are
        self.port = int(self._server.getsockname()[1])
        self._bell, self._ear = socket.socketpair()
        for s in (self._bell, self._ear):
            s.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        self._selector.register(self._ear, selectors.EVENT_READ, self._wake)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="lines", daemon=True)
        self._thread.start()

    # ---- from other threads ----------------------------------------------------------------------
    def tell(self, record: bytes) -> None:
        """Send our newest record (JSON without a newline) to all followers at once."""
        with self._lock:
            self._protocol.tell(record)
        self._ring()

    def follow(self, members: Mapping[str, Door], passing: bool = False) -> None:
        """Keep a line to each of these members, and to no others. See
        `HeartbeatProtocol.follow`."""
        with self._lock:
            self._protocol.follow(members, time.monotonic(), passing)
            something = self._protocol.has_acts()
        if something:
            self._ring()

    def renew(self) -> None:
        """Replace lines that are up by new ones. See `HeartbeatProtocol.renew`."""
        with self._lock:
            self._protocol.renew(time.monotonic())
        self._ring()

    def share(self, name: str, record: bytes) -> None:
        """Pass a member's record from the bucket on if it is news."""
        with self._lock:
            self._protocol.share(name, record, time.monotonic())
        self._ring()

    def doubt(self, name: str) -> None:
        """Report to followers that we found a member dead."""
        with self._lock:
            self._protocol.doubt(name, time.monotonic())
        self._ring()

    def overheard(self) -> GossipReport:
        """Return all hearsay; new records and callers are returned once."""
        with self._lock:
            return self._protocol.overheard()

    def following(self) -> set[str]:
        """Return the members that we follow."""
        with self._lock:
            return set(self._protocol.wanted)

    def heard(self, name: str) -> PeerStatus:
        with self._lock:
            return self._protocol.heard(name)

    def all_up(self) -> bool:
        """Return whether the lines to and from all followed members are up."""
        with self._lock:
            return self._protocol.all_up()

    def reached(self) -> frozenset[str]:
        """Return the followed members whose lines are up both ways."""
        with self._lock:
            return self._protocol.reached()

    def knocked(self) -> bool:
        """Return whether a stranger has called since the last call of this method."""
        with self._lock:
            return self._protocol.knocked()

    def close(self) -> None:
        self._closing = True
        self._ring()
        self._thread.join(CLOSE_S)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake up anyway; closed: it has ended
            self._bell.send(b"x")

    # ---- the thread ------------------------------------------------------------------------------
    def _serve(self) -> None:
        while not self._closing:
            with self._lock:
                self._protocol.tick(time.monotonic())
            self._act()
            with self._lock:
                wait_s = self._protocol.wait_s(time.monotonic())
            self._hear_again()
            for key, _ in self._selector.select(wait_s):
                if isinstance(key.data, int):
                    self._attend(key.data)
                else:
                    key.data()
                self._act()
        self._act()  # send what is left
        for s in [self._server, self._ear, self._bell, *self._sockets.values()]:
            s.close()
        self._selector.close()

    def _act(self) -> None:
        """Carry out the protocol's acts until there are none left."""
        while True:
            with self._lock:
                acts = self._protocol.take()
            if not acts:
                return
            for act in acts:
                self._do(act)

    def _do(self, act: LineAct) -> None:
        match act:
            case Dial(conn, address):
                self._dial(conn, address)
            case Transmit(conn, data):
                self._send(conn, data)
            case HangUp(conn):
                self._drop(conn)
            case Heed():
                self.changed.set()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)

    def _accept(self) -> None:
        try:
            s, address = self._server.accept()
        except OSError as e:
            if e.errno in OUT_OF_DESCRIPTORS:  # it stays readable: selecting it would spin
                self._selector.unregister(self._server)
                self._deaf_until_s = time.monotonic() + DEAF_S
            return
        if is_in_reserve(s.fileno()):
            s.close()
            return
        s.setblocking(False)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            conn = self._protocol.accepted(time.monotonic(), str(address[0]))
        self._sockets[conn] = s
        self._selector.register(s, selectors.EVENT_READ, conn)

    def _hear_again(self) -> None:
        if self._deaf_until_s and time.monotonic() >= self._deaf_until_s:
            self._selector.register(self._server, selectors.EVENT_READ, self._accept)
            self._deaf_until_s = 0.0

    def _dial(self, conn: int, address: Address) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            s = self._sockets[conn] = socket.socket(family, socket.SOCK_STREAM)
            s.setblocking(False)
            code = s.connect_ex(address)
        except (OSError, OverflowError, TypeError, ValueError):
            # a member's record may hold an invalid address; and descriptors can run out
            code = errno.EINVAL
        if code in (0, errno.EINPROGRESS):
            self._selector.register(s, selectors.EVENT_READ | selectors.EVENT_WRITE, conn)
        else:
            self._lost(conn, refused=code == errno.ECONNREFUSED)

    def _send(self, conn: int, data: bytes) -> None:
        """Send data; what cannot be sent at once is buffered."""
        if (s := self._sockets.get(conn)) is None:
            return
        waiting = conn in self._unsent
        data = self._unsent.pop(conn, b"") + data
        try:
            sent = s.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lost(conn)
            return
        if len(data) - sent > UNSENT_NBYTES:
            self._lost(conn)
        elif sent < len(data):
            self._unsent[conn] = data[sent:]
            self._selector.modify(s, selectors.EVENT_READ | selectors.EVENT_WRITE, conn)
        elif waiting:
            self._selector.modify(s, selectors.EVENT_READ, conn)

    def _drop(self, conn: int) -> None:
        self._unsent.pop(conn, None)
        if s := self._sockets.pop(conn, None):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(s)
            s.close()

    def _lost(self, conn: int, refused: bool = False) -> None:
        self._drop(conn)
        with self._lock:
            self._protocol.closed(conn, time.monotonic(), refused)

    def _attend(self, conn: int) -> None:
        if (s := self._sockets.get(conn)) is None:
            return
        if (code := s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) != 0:
            self._lost(conn, refused=code == errno.ECONNREFUSED)
            return
        if conn in self._unsent:
            self._send(conn, b"")
        elif self._selector.get_key(s).events & selectors.EVENT_WRITE:
            self._selector.modify(s, selectors.EVENT_READ, conn)
            with self._lock:
                self._protocol.connected(conn, time.monotonic())
        if conn in self._sockets:
            self._receive(conn, self._sockets[conn])

    def _receive(self, conn: int, s: socket.socket) -> None:
        try:
            said = s.recv(LONGEST_NBYTES)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._lost(conn)
            return
        with self._lock:
            self._protocol.received(conn, said, time.monotonic())
