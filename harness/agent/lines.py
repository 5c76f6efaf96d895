"""Open connections between agents: who lives, and what each says of itself, without asking the
bucket. Runs in the node agent.

Every member listens. Who follows a member connects to it, and hears its name, its record, each new
record at once, and a pulse. A connection that closes is tried again at once, and a refusal is a
death known within milliseconds; silence is left to whoever judges. Nothing that strangers send is
believed: a caller's name is only a reason to look into the bucket. All that is lost with a line is
speed: the bucket says the same, later. Knows sockets; nothing of epochs.

Wire: text lines. To followers: name, then records (one JSON line each) and empty lines (pulses).
From followers: their name, once.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LONGEST_NBYTES = 64 * 1024  # of a line on the wire; more is not ours
FOLLOWERS = 1024  # more than that are sent away
CONNECT_S = 1.0  # for a connection and the first word on it
SILENT_PULSES = 3.0  # so many pulses missed: the line is made anew
WAKE_S = 0.05  # the shortest time between two attempts to make a line

Address = tuple[str, int]


@dataclass(frozen=True)
class Heard:
    """What is known of one member over its line. `refused`: its machine says that nobody of
    that name is there."""

    up: bool = False
    refused: bool = False
    record: bytes = b""  # the newest it sent
    seen: bool = False  # it was up at least once


SILENCE = Heard()


@dataclass
class _Line:
    """Ours to one member that we follow."""

    name: str
    address: Address
    heard: Heard = SILENCE
    socket: socket.socket | None = None
    buffer: bytes = b""
    greeted: bool = False
    last_s: float = 0.0  # when we heard something, or began to connect
    retry_s: float = 0.0


class Lines:
    """`port`: where we listen. `changed` is set whenever something was heard that may matter.
    Close it when done."""

    def __init__(self, name: str, addr: str, pulse_s: float = 0.5):
        self._name, self._pulse_s = name, pulse_s
        self.changed = threading.Event()
        self._knocked = threading.Event()
        self._lock = threading.Lock()
        self._record = b""
        self._outbox: list[bytes] = []
        self._wanted: dict[str, Address] = {}
        self._lines: dict[str, _Line] = {}
        self._followers: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._server = socket.create_server((addr, 0), backlog=128)
        self._server.setblocking(False)
        self.port = int(self._server.getsockname()[1])
        self._bell, self._ear = socket.socketpair()
        for s in (self._bell, self._ear):
            s.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self._selector.register(self._ear, selectors.EVENT_READ, None)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="lines", daemon=True)
        self._thread.start()

    # ---- from other threads ----------------------------------------------------------------------
    def tell(self, record: bytes) -> None:
        """Our newest record (JSON without a newline), to all who follow us, at once."""
        with self._lock:
            self._record = record
            self._outbox.append(record + b"\n")
        self._ring()

    def follow(self, members: Mapping[str, Address]) -> None:
        """Keep a line to each of these, and to nobody else."""
        with self._lock:
            if self._wanted == members:
                return
            self._wanted = dict(members)
        self._ring()

    def heard(self, name: str) -> Heard:
        with self._lock:
            line = self._lines.get(name)
            return line.heard if line else SILENCE

    def all_up(self) -> bool:
        """Do we hear everybody whom we follow?"""
        with self._lock:
            return all(name in self._lines and self._lines[name].heard.up for name in self._wanted)

    def knocked(self) -> bool:
        """Has a stranger called since we were asked last?"""
        knocked = self._knocked.is_set()
        self._knocked.clear()
        return knocked

    def close(self) -> None:
        self._closing = True
        self._ring()
        self._thread.join(5.0)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake up anyway; closed: nobody to wake
            self._bell.send(b"x")

    # ---- the thread ------------------------------------------------------------------------------
    def _serve(self) -> None:
        pulse_due_s = time.monotonic() + self._pulse_s
        while not self._closing:
            self._mend(time.monotonic())
            for key, _ in self._selector.select(self._wait_s(pulse_due_s)):
                self._attend(key.fileobj, key.data)
            now = time.monotonic()
            pulse, pulse_due_s = (
                (b"\n", now + self._pulse_s) if now >= pulse_due_s else (b"", pulse_due_s)
            )
            self._tell_followers(pulse)
        self._tell_followers(b"")  # last words
        for s in [
            self._server,
            self._ear,
            self._bell,
            *self._followers,
            *(ln.socket for ln in self._lines.values() if ln.socket),
        ]:
            s.close()
        self._selector.close()

    def _tell_followers(self, pulse: bytes) -> None:
        with self._lock:
            news, self._outbox = b"".join(self._outbox) + pulse, []
        for s in list(self._followers) if news else []:
            self._send(s, news)

    def _wait_s(self, pulse_due_s: float) -> float:
        due_s = min(
            [pulse_due_s, *(ln.retry_s for ln in self._lines.values() if ln.socket is None)]
        )
        return min(max(due_s - time.monotonic(), 0.0), self._pulse_s)

    def _attend(self, s: Any, line: _Line | None) -> None:
        if line is not None:
            self._listen(line)
        elif s is self._server:
            self._accept()
        elif s is self._ear:
            with contextlib.suppress(BlockingIOError):
                self._ear.recv(4096)
        else:
            self._hear_follower(s)

    def _accept(self) -> None:
        try:
            s, _ = self._server.accept()
        except OSError:
            return
        s.setblocking(False)
        if len(self._followers) >= FOLLOWERS:
            s.close()
            return
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._followers.add(s)
        self._selector.register(s, selectors.EVENT_READ, None)
        with self._lock:
            record = self._record
        self._send(s, f"{self._name}\n".encode() + (record + b"\n" if record else b""))

    def _send(self, s: socket.socket, data: bytes) -> None:
        """Small; who does not take it is frozen or gone, and may call again."""
        try:
            sent = s.send(data)
        except OSError:
            sent = -1
        if sent != len(data):
            self._drop(s)

    def _drop(self, s: socket.socket) -> None:
        self._followers.discard(s)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(s)
        s.close()

    def _hear_follower(self, s: socket.socket) -> None:
        try:
            said = s.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._drop(s)
        elif said.strip().decode(errors="replace") not in self._lines:
            self._knocked.set()
            self.changed.set()

    # ---- ours to others --------------------------------------------------------------------------
    def _mend(self, now: float) -> None:
        """Lines as wanted: new ones begun, old ones ended, silent and broken ones made anew."""
        with self._lock:
            wanted = dict(self._wanted)
        for name in [n for n, ln in self._lines.items() if wanted.get(n) != ln.address]:
            self._hang_up(self._lines[name], now)
            with self._lock:
                del self._lines[name]
        for name, address in wanted.items():
            if name not in self._lines:
                with self._lock:
                    self._lines[name] = _Line(name, address)
        for line in self._lines.values():
            if line.socket is None:
                if now >= line.retry_s:
                    self._call(line, now)
            elif now - line.last_s > (SILENT_PULSES * self._pulse_s if line.greeted else CONNECT_S):
                self._hang_up(line, now)

    def _call(self, line: _Line, now: float) -> None:
        family = socket.AF_INET6 if ":" in line.address[0] else socket.AF_INET
        line.socket, line.buffer, line.greeted, line.last_s = (
            socket.socket(family, socket.SOCK_STREAM),
            b"",
            False,
            now,
        )
        line.socket.setblocking(False)
        try:
            code = line.socket.connect_ex(line.address)
        except (OSError, OverflowError, TypeError, ValueError):
            # what a member says of itself need not be an address
            code = errno.EINVAL
        if code in (0, errno.EINPROGRESS):
            self._selector.register(line.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, line)
        else:
            self._hang_up(line, now, refused=code == errno.ECONNREFUSED)

    def _hang_up(self, line: _Line, now: float, refused: bool = False) -> None:
        was_up = line.greeted
        if line.socket is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(line.socket)
            line.socket.close()
        line.socket, line.greeted = None, False
        # one that was up is asked at once whether it is still there
        line.retry_s = now + (WAKE_S if was_up else self._pulse_s)
        self._learn(line, Heard(False, refused, line.heard.record, line.heard.seen))

    def _learn(self, line: _Line, heard: Heard) -> None:
        if heard != line.heard:
            with self._lock:
                line.heard = heard
            self.changed.set()

    def _listen(self, line: _Line) -> None:
        now, s = time.monotonic(), line.socket
        if s is None:
            return
        if (code := s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) != 0:
            self._hang_up(line, now, refused=code == errno.ECONNREFUSED)
            return
        if self._selector.get_key(s).events & selectors.EVENT_WRITE:  # connected
            self._selector.modify(s, selectors.EVENT_READ, line)
            with contextlib.suppress(OSError):
                s.send(f"{self._name}\n".encode())
        try:
            said = s.recv(LONGEST_NBYTES)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._hang_up(line, now)
            return
        line.last_s = now
        *whole, line.buffer = (line.buffer + said).split(b"\n")
        if len(line.buffer) > LONGEST_NBYTES:
            self._hang_up(line, now)
            return
        if whole and not line.greeted:
            if whole.pop(0) != line.name.encode():  # the port is another's now
                self._hang_up(line, now, refused=True)
                return
            line.greeted = True
        if line.greeted:
            records = [w for w in whole if w]
            self._learn(
                line, Heard(True, False, records[-1] if records else line.heard.record, True)
            )
