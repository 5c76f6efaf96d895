"""Open connections between agents: who lives, and what each says of itself, without asking the
bucket. Runs in the node agent.

Every member listens. Who follows a member connects to it, and hears its name, its record, each new
record at once, and a pulse. A connection that closes is tried again at once, and a refusal is a
death known within milliseconds; silence is left to whoever judges. Nothing that strangers send is
believed: a caller's name is only a reason to look into the bucket. All that is lost with a line is
speed: the bucket says the same, later. Knows sockets; nothing of epochs.

What is said, and what follows from it, is in `lines_protocol.py`; these are its hands: sockets and
one thread.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping

from harness.agent.gossip import Overheard
from harness.agent.lines_protocol import (
    LONGEST_NBYTES,
    Address,
    Dial,
    Door,
    HangUp,
    Heard,
    Heed,
    LineAct,
    LinesProtocol,
    Transmit,
    Warn,
)
from storage.bounded_http import DEAF_S, OUT_OF_DESCRIPTORS, is_in_reserve

CLOSE_S = 5.0  # the longest wait for the thread to end
UNSENT_NBYTES = 4 * 1024 * 1024  # who takes less than that in time is frozen or gone


def new_key() -> str:
    """What callers of a member must know; it stands in the object of the member."""
    return secrets.token_hex(16)


class Lines:
    """`port`: where we listen. `key`: what callers must know; "": nothing, as of older versions.
    `changed` is set whenever something was heard that may matter. Close it when done."""

    def __init__(self, name: str, addr: str, pulse_s: float = 0.5, key: str | None = None):
        self.key = new_key() if key is None else key
        self.changed = threading.Event()
        self._lock = threading.Lock()  # of the protocol
        self._protocol = LinesProtocol(name, pulse_s, time.monotonic(), self.key)
        self._sockets: dict[int, socket.socket] = {}
        self._unsent: dict[int, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._server = socket.create_server((addr, 0), backlog=512)
        self._server.setblocking(False)
        self._deaf_until_s = 0.0  # 0: we let callers in
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
        """Our newest record (JSON without a newline), to all who follow us, at once."""
        with self._lock:
            self._protocol.tell(record)
        self._ring()

    def follow(
        self, members: Mapping[str, Door], passing: bool = False, keyless: Collection[str] = ()
    ) -> None:
        """Keep a line to each of these, and to nobody else. See `LinesProtocol.follow`."""
        with self._lock:
            self._protocol.follow(members, time.monotonic(), passing, keyless)
            something = self._protocol.has_acts()
        if something:
            self._ring()

    def share(self, name: str, record: bytes) -> None:
        """What a member says of itself in the bucket: pass it on if it is news."""
        with self._lock:
            self._protocol.share(name, record, time.monotonic())
        self._ring()

    def doubt(self, name: str) -> None:
        """We found it dead."""
        with self._lock:
            self._protocol.doubt(name, time.monotonic())
        self._ring()

    def overheard(self) -> Overheard:
        """All hearsay; new records and callers are told once."""
        with self._lock:
            return self._protocol.overheard()

    def following(self) -> set[str]:
        """Whom we follow."""
        with self._lock:
            return set(self._protocol.wanted)

    def heard(self, name: str) -> Heard:
        with self._lock:
            return self._protocol.heard(name)

    def all_up(self) -> bool:
        """Do we hear everybody whom we follow, and have they lines to us?"""
        with self._lock:
            return self._protocol.all_up()

    def knocked(self) -> bool:
        """Has a stranger called since we were asked last?"""
        with self._lock:
            return self._protocol.knocked()

    def close(self) -> None:
        self._closing = True
        self._ring()
        self._thread.join(CLOSE_S)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake up anyway; closed: nobody to wake
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
        self._act()  # last words
        for s in [self._server, self._ear, self._bell, *self._sockets.values()]:
            s.close()
        self._selector.close()

    def _act(self) -> None:
        """Carry out what the protocol says, and what follows from that."""
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
            case Warn(words):
                print(f"harness: {words}", file=sys.stderr, flush=True)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)

    def _accept(self) -> None:
        try:
            s, address = self._server.accept()
        except OSError as e:
            if e.errno in OUT_OF_DESCRIPTORS:  # it stays readable: looking again would not end
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
            # what a member says of itself need not be an address; and descriptors can run out
            code = errno.EINVAL
        if code in (0, errno.EINPROGRESS):
            self._selector.register(s, selectors.EVENT_READ | selectors.EVENT_WRITE, conn)
        else:
            self._lost(conn, refused=code == errno.ECONNREFUSED)

    def _send(self, conn: int, data: bytes) -> None:
        """What cannot be sent at once is sent when there is room."""
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
