"""HTTP servers that strangers cannot wear out: few connections, little time, bounded memory.

Each connection has a thread, so connections are bounded, and the oldest that waits for its caller
makes room for a new one: first of whichever address has most of them, and of those that have proven
nothing. Time is bounded in all, not for each byte: for the head of a request, and for the whole of
it. A reserve of descriptors is left to the process. Knows nothing of what is served.
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

RESERVED = 64  # descriptors that connections never take; of a low limit, a quarter
DEAF_S = 0.2  # without a free descriptor nobody is let in for so long
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
BACKLOG = 128  # callers that the kernel keeps waiting for us
ENDING_S = 0.5  # the longest wait for threads of callers that were sent away
LOOK_S = 0.1  # between two looks for whose time is over
HEAD_NBYTES = 16 << 10  # of a request's first line and headers


def is_in_reserve(fd: int) -> bool:
    """Is this new descriptor one of the last, which are for the process's own files? The lowest
    free one is always taken, so its number says how many there are."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft != resource.RLIM_INFINITY and fd >= soft - min(RESERVED, soft // 4)


@dataclass(frozen=True)
class HTTPBounds:
    """What callers may take of a server."""

    connections: int = 32  # at once
    head_s: float = 5.0  # for a request's head, in all, and between two requests
    proven_s: float = 60.0  # ... between two requests of a caller that has proven itself
    request_s: float = 30.0  # from a request's head to the end of its answer


@dataclass
class _Visit:
    """One connection. `until_s`: when its time is over; None: it was sent away."""

    host: str
    since_s: float
    until_s: float | None
    proven: bool = False
    waits: bool = True  # for its caller: for a head, or for another request


class _Head:
    """A request as it comes, whose head has a bound."""

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
    """Names by which a server that listens on `host` may be asked."""
    return frozenset({"localhost", host.lower(), socket.gethostname().lower()})


def is_our_name(header: str, names: frozenset[str]) -> bool:
    """Does a Host header name this machine: by an address, or by one of `names`? A name that
    somebody else made point here does not."""
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
    """Listens on `host` only; port 0: any that is free. Handlers inherit `BoundedHandler`."""

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
        self._visits: dict[int, tuple[socket.socket, _Visit]] = {}  # by id of the socket
        self._lock = threading.Condition(threading.Lock())  # notified when a visit is over
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def serve_in_thread(self, name: str) -> threading.Thread:
        """Serve until `shutdown`."""
        args = (LOOK_S,)
        thread = threading.Thread(target=self.serve_forever, args=args, name=name, daemon=True)
        thread.start()
        return thread

    # ---- who comes in ----------------------------------------------------------------------------
    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            caller, address = super().get_request()
        except OSError as e:
            if e.errno in OUT_OF_DESCRIPTORS:  # the caller still waits: looking again has no end
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
        """Make room for one more. Who was sent away has a thread for a moment longer: at most as
        many of those again, and the next caller waits for them."""
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
                with contextlib.suppress(OSError):  # it has just ended by itself
                    caller.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._visits.pop(id(request), None)
            self._lock.notify_all()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called now and then by the thread that lets callers in."""
        now = time.monotonic()
        with self._lock:
            for _, visit in list(self._visits.values()):
                if visit.until_s is not None and now > visit.until_s:
                    self._send_away(visit)

    # ---- what handlers say -----------------------------------------------------------------------
    def waits(self, caller: socket.socket) -> None:
        """For its next request."""
        with self._lock:
            if (visit := self._visit(caller)) is not None and not visit.waits:
                bounds = self.bounds
                pause_s = bounds.proven_s if visit.proven else bounds.head_s
                visit.waits, visit.until_s = True, time.monotonic() + pause_s

    def serves(self, caller: socket.socket) -> None:
        """The head of its request is here."""
        with self._lock:
            if (visit := self._visit(caller)) is not None:
                visit.waits, visit.since_s = False, time.monotonic()
                visit.until_s = visit.since_s + self.bounds.request_s

    def trust(self, caller: socket.socket) -> None:
        """It has proven itself: others make room before it."""
        with self._lock:
            if (visit := self._visit(caller)) is not None:
                visit.proven = True

    def _visit(self, caller: socket.socket) -> _Visit | None:
        """None: it was sent away."""
        _, visit = self._visits.get(id(caller), (None, None))
        return visit if visit is not None and visit.until_s is not None else None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away, or was sent away, is no error; what a handler raises is told."""
        if not isinstance(sys.exc_info()[1], OSError):
            sys.excepthook(*sys.exc_info())  # as this process tells errors


class BoundedHandler(BaseHTTPRequestHandler):
    """One connection's requests, each within the server's bounds."""

    server: BoundedHTTPServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "spotharness", ""

    def setup(self) -> None:
        super().setup()
        # of one read or write; the server ends the whole sooner
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
        """The request's body. None: it says that it is longer than `most_nbytes`, does not say how
        long it is, or did not come; then there is no next request."""
        said = self.headers.get("Content-Length", "0")
        nbytes = int(said) if said.isdecimal() and len(said) < 16 else -1
        if not 0 <= nbytes <= most_nbytes or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            return None
        found = self.rfile.read(nbytes) if nbytes else b""
        return found if len(found) == nbytes else None

    def log_message(self, format: str, *args: Any) -> None:
        """Callers come and go; that is no news."""
