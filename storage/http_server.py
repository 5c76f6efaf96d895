"""HTTP servers that strangers cannot exhaust: few connections, little time, bounded memory.

Each connection has a thread, so connections are bounded. A new one displaces the oldest that waits
for its caller: first of the address that has most, and of those that have not proven themselves.
Time is bounded in total, not per byte: for the head of a request, and for the whole of it. Some
descriptors stay reserved for the process. Knows nothing of what is served.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import resource
import socket
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any

RESERVED = 64  # descriptors that connections never take; at most a quarter of a low limit
DEAF_S = 0.2  # seconds without accepting callers after descriptors ran out
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
BACKLOG = 128  # callers that the kernel keeps waiting
ENDING_S = 0.5  # longest wait for the threads of displaced callers
LOOK_S = 0.1  # seconds between two checks for connections whose time is over
HEAD_NBYTES = 16 << 10  # limit for a request's first line and headers


def is_in_reserve(fd: int) -> bool:
    """Return whether a new descriptor is one of the last, which are reserved for the process's own
    files. The lowest free number is always taken, so the number shows how many are in use."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft != resource.RLIM_INFINITY and fd >= soft - min(RESERVED, soft // 4)


@dataclass(frozen=True)
class HTTPBounds:
    """Limits for what callers may take of a server."""

    connections: int = 32  # open at once
    head_s: float = 5.0  # for a request's head, in total, and between two requests
    proven_s: float = 60.0  # between two requests of a caller that has proven itself
    request_s: float = 30.0  # from a request's head to the end of its answer


@dataclass
class _Visit:
    """One connection. `until_s`: when its time is over; None: it was displaced."""

    host: str
    since_s: float
    until_s: float | None
    proven: bool = False
    waits: bool = True  # waits for its caller: for a head, or for another request


class _Head:
    """An incoming request whose head is limited in size."""

    def __init__(self, inner: BufferedIOBase):
        self._inner, self.left = inner, HEAD_NBYTES

    def readline(self, size: int = -1) -> bytes:
        line = self._inner.readline(self.left + 1 if size < 0 else min(size, self.left + 1))
        self.left -= len(line)
        if self.left < 0:
            raise ConnectionAbortedError(f"the head of a request has at most {HEAD_NBYTES} bytes")
        return line

    def read(self, size: int) -> bytes:
        return self._inner.read(size)

    def close(self) -> None:
        self._inner.close()

    @property
    def closed(self) -> bool:
        return self._inner.closed


def our_names(host: str) -> frozenset[str]:
    """Return the names by which a server that listens on `host` may be addressed."""
    return frozenset({"localhost", host.lower(), socket.gethostname().lower()})


def is_our_name(header: str, names: frozenset[str]) -> bool:
    """Return whether a Host header names this machine, by an address or by one of `names`. Any
    other name might be a foreign one that resolves to this machine."""
    host = header.strip().lower()
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if host.rstrip(".") in names:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class BoundedHTTPServer(ThreadingHTTPServer):
    """A server that listens on `host` only; port 0: any that is free. Handlers inherit
    `BoundedHandler`."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = BACKLOG

    def __init__(
        self,
        host: str,
        port: int,
        handler: type[BaseHTTPRequestHandler],
        bounds: HTTPBounds | None = None,
    ):
        self.bounds = bounds or HTTPBounds()
        self._visits: dict[int, tuple[socket.socket, _Visit]] = {}  # by the id() of the socket
        self._lock = threading.Condition(threading.Lock())  # notified when a connection ends
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def serve_in_thread(self, name: str) -> threading.Thread:
        """Start a thread that serves until `shutdown`, and return it."""
        args = (LOOK_S,)
        thread = threading.Thread(target=self.serve_forever, args=args, name=name, daemon=True)
        thread.start()
        return thread

    # ---- accepting -------------------------------------------------------------------------------
    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            caller, address = super().get_request()
        except OSError as e:
            # the caller stays in the backlog, so retrying at once would spin
            if e.errno in OUT_OF_DESCRIPTORS:
                time.sleep(DEAF_S)
            raise
        if is_in_reserve(caller.fileno()):
            caller.close()
            raise OSError(errno.EMFILE, "the last descriptors are for this process's own files")
        return caller, address

    def process_request(self, request: Any, client_address: Any) -> None:
        now = time.monotonic()
        with self._lock:
            if not self._has_room(now):
                super().shutdown_request(request)
                return
            visit = _Visit(str(client_address[0]), now, now + self.bounds.head_s)
            self._visits[id(request)] = request, visit
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self.shutdown_request(request)

    def _has_room(self, now: float) -> bool:
        """Make room for one more connection; return whether there is. A displaced caller keeps its
        thread for a moment, so as many again are allowed, and the next caller waits for them."""
        here = [visit for _, visit in self._visits.values() if visit.until_s is not None]
        most = 2 * self.bounds.connections
        if len(here) < self.bounds.connections:
            return self._lock.wait_for(lambda: len(self._visits) < most, ENDING_S)
        crowd = Counter(v.host for v in here if v.waits)
        tired = [v for v in here if v.waits or now - v.since_s > self.bounds.head_s]
        if not tired:
            return False
        gone = min(tired, key=lambda v: (v.proven, not v.waits, -crowd[v.host], v.since_s))
        self._send_away(gone)
        return self._lock.wait_for(lambda: len(self._visits) < most, ENDING_S)

    def _send_away(self, gone: _Visit) -> None:
        for caller, visit in self._visits.values():
            if visit is gone:
                visit.until_s = None
                with contextlib.suppress(OSError):  # it has just been closed
                    caller.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._visits.pop(id(request), None)
            self._lock.notify_all()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Displace connections whose time is over; called regularly by the accepting thread."""
        now = time.monotonic()
        with self._lock:
            for _, visit in list(self._visits.values()):
                if visit.until_s is not None and now > visit.until_s:
                    self._send_away(visit)

    # ---- called by handlers ----------------------------------------------------------------------
    def waits(self, caller: socket.socket) -> None:
        """Record that a connection waits for its caller's next request."""
        with self._lock:
            if (visit := self._visit(caller)) is not None and not visit.waits:
                bounds = self.bounds
                pause_s = bounds.proven_s if visit.proven else bounds.head_s
                visit.waits, visit.until_s = True, time.monotonic() + pause_s

    def serves(self, caller: socket.socket) -> None:
        """Record that the head of a request has arrived."""
        with self._lock:
            if (visit := self._visit(caller)) is not None:
                visit.waits, visit.since_s = False, time.monotonic()
                visit.until_s = visit.since_s + self.bounds.request_s

    def trust(self, caller: socket.socket) -> None:
        """Record that a caller has proven itself, so that others are displaced first."""
        with self._lock:
            if (visit := self._visit(caller)) is not None:
                visit.proven = True

    def _visit(self, caller: socket.socket) -> _Visit | None:
        """Return the connection, or None if it was displaced."""
        _, visit = self._visits.get(id(caller), (None, None))
        return visit if visit is not None and visit.until_s is not None else None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an exception of a handler. A caller that left, or was displaced, is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            sys.excepthook(*sys.exc_info())  # the way in which this process reports errors


class BoundedHandler(BaseHTTPRequestHandler):
    """Handles one connection's requests, each within the server's bounds."""

    server: BoundedHTTPServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "spotharness", ""

    def setup(self) -> None:
        super().setup()
        # limit for one read or write; the server ends the whole sooner
        self.connection.settimeout(self.server.bounds.request_s)
        self.rfile = _Head(self.rfile)  # type: ignore[assignment]

    def handle_one_request(self) -> None:
        self.server.waits(self.connection)
        self.rfile.left = HEAD_NBYTES  # type: ignore[attr-defined]
        super().handle_one_request()

    def parse_request(self) -> bool:
        if super().parse_request():
            self.server.serves(self.connection)
            return True
        return False

    def body(self, most_nbytes: int) -> bytes | None:
        """Return the request's body. Returns None if it is longer than `most_nbytes`, has no known
        length, or did not arrive; then there is no next request."""
        said = self.headers.get("Content-Length", "0")
        nbytes = int(said) if said.isdecimal() and len(said) < 16 else -1
        if not 0 <= nbytes <= most_nbytes or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            return None
        found = self.rfile.read(nbytes) if nbytes else b""
        return found if len(found) == nbytes else None

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests are no news."""
