"""A preemption notice, the source of notices, and how sources are polled: within limits, whatever a
metadata service answers. Runs in the agent."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Protocol, TypeAlias
from urllib.parse import urlsplit

from harness.core.world import BadInput

# Preemption notices, and the threads that poll for them.

log = logging.getLogger(__name__)

KINDS = ("kill", "soft", "maintenance")


@dataclass(frozen=True)
class Notice:
    """A cloud's notice. `deadline_s`: wall-clock UTC seconds of this machine; None: no time is
    known, so act at once."""

    source: str  # "aws", "file", ...
    # "kill": the node will be preempted | "soft": it may be, or pauses | "maintenance": it will be,
    # at a time known long before
    kind: str
    id: str  # equal for the same notice at every poll
    deadline_s: float | None
    cancellable: bool = False
    detail: str = ""
    scope: str = "self"  # "others": it names other machines besides this one
    pause: bool = False  # soft: the machine pauses for a moment, and stays
    # the notice can be acknowledged after we left, so that the cloud need not wait for the deadline
    acknowledge: bool = False


@dataclass(frozen=True)
class Noticed:
    """Event: a notice is new or has changed."""

    notice: Notice


@dataclass(frozen=True)
class Cancelled:
    """Event: a notice is no longer in force."""

    notice: Notice


TellNotice: TypeAlias = Callable[[Noticed | Cancelled], None]


class NoticeSource(Protocol):
    """A source of notices."""

    name: str
    pace_s: float  # between two polls
    errors: int  # polls, or parts of them, without an answer

    def poll(self) -> Sequence[Notice]:
        """Return the notices in force now; it may wait for news. Without an answer it repeats the
        last known notices, and never raises for that."""

    def acknowledge(self, notice: Notice) -> bool:
        """Tell the cloud that it need not wait. Return False if it did not accept that."""

    def close(self) -> None:
        """End a poll that waits; called from another thread."""


class Watcher:
    """The running threads of `watch`, one per source."""

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        threads: Sequence[threading.Thread],
        stopped: threading.Event,
    ):
        self._sources, self._threads, self._stopped = sources, threads, stopped

    def stop(self, within_s: float = 10.0) -> None:
        self._stopped.set()
        for source in self._sources:
            source.close()
        for thread in self._threads:
            thread.join(timeout=within_s)


def watch(sources: Sequence[NoticeSource], tell: TellNotice) -> Watcher:
    """Start a thread per source that tells once of each notice that appears or changes, and once
    when it vanishes."""
    stopped = threading.Event()
    threads = [
        threading.Thread(
            target=_follow, args=(s, tell, stopped), name=f"notices-{s.name}", daemon=True
        )
        for s in sources
    ]
    for thread in threads:
        thread.start()
    return Watcher(sources, threads, stopped)


def _follow(source: NoticeSource, tell: TellNotice, stopped: threading.Event) -> None:
    known: dict[str, Notice] = {}
    while not stopped.is_set():
        try:
            known = step(
                source, known, lambda new: tell(Noticed(new)), lambda old: tell(Cancelled(old))
            )
        except Exception:
            # If the watcher died unseen, the snapshot at its next notice would be lost; the trace
            # is logged.
            source.errors += 1
            log.exception("notices: %s", source.name)
        stopped.wait(source.pace_s)


def step(
    source: NoticeSource,
    known: Mapping[str, Notice],
    on_notice: Callable[[Notice], None],
    on_cancel: Callable[[Notice], None],
) -> dict[str, Notice]:
    """Poll once, call back for new, changed and vanished notices, and return those in force."""
    now = {notice.id: notice for notice in source.poll()}
    # New ones first: a notice that replaces another must not look like a cancellation meanwhile.
    for name, notice in now.items():
        if known.get(name) != notice:
            on_notice(notice)
    for name, notice in known.items():
        if name not in now:
            on_cancel(notice)
    return now


TOKEN_TTL_S = 3600
REFRESH_BEFORE_S = 15.0  # as aws-node-termination-handler does
# after a token request timed out (hop limit, in containers): how long to go on without a token
TOKENLESS_S = 60.0
MAX_ANSWER = 1 << 20
# upper limit of the backoff during an outage: the next notice may leave us only 30 s
SLOWEST_PACE_S = 5.0
SKEW_S = 2.0  # Date headers have whole seconds, so a smaller difference of clocks is ignored
# exceptions that mean no answer, or one that cannot be understood
ANSWERLESS = (
    *(OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError),
    RecursionError,  # deeply nested JSON
)
NoticeParser: TypeAlias = Callable[[str], tuple[Notice, ...]]


def _break_off(wires: list[socket.socket], late: threading.Event) -> None:
    late.set()
    for wire in wires:
        with contextlib.suppress(OSError):  # it may just have ended
            wire.shutdown(socket.SHUT_RDWR)


# ---- parts common to all services over HTTP ------------------------------------------------------
@dataclass(frozen=True)
class MetadataReply:
    status: int
    body: str
    headers: Mapping[str, str]  # names in lower case
    skew_s: float  # how far the service's clock is ahead of ours; 0.0 if the same, or unknown


class Endpoint:
    """One service over HTTP. Metadata is link-local, so no proxy is ever used; there are no
    retries, and every wait is limited."""

    def __init__(
        self, base: str, *, now: Callable[[], float] = time.time, tls: ssl.SSLContext | None = None
    ):
        self.base, self._now, self._tls = base.rstrip("/"), now, tls
        where = urlsplit(self.base)
        if where.scheme not in ("http", "https") or not where.hostname:
            raise BadInput(f"metadata endpoint {base!r}: wanted http://host or http://host:port")
        self._host, self._port, self._prefix, self._secure = (
            where.hostname,
            where.port,
            where.path,
            where.scheme == "https",
        )
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()
        self._closed = False

    def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        body: bytes | None = None,
    ) -> MetadataReply:
        """Send a request and return the reply, within `timeout_s` for the connection and as long
        again for the whole answer, however slowly it arrives. Raises OSError (TimeoutError,
        refused, ...) or http.client.HTTPException when there is no answer."""
        if self._secure:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host,
                self._port,
                timeout=timeout_s,
                context=self._tls or ssl.create_default_context(),
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("closed")
            self._connection = connection
        late, wires = threading.Event(), list[socket.socket]()
        timer = threading.Timer(2 * timeout_s, _break_off, (wires, late))
        timer.daemon = True
        try:
            timer.start()
            connection.request(method, self._prefix + path, body, dict(headers))
            wires.append(connection.sock)  # the connection drops it when the service sends "close"
            answer = connection.getresponse()
            text = answer.read(MAX_ANSWER).decode(errors="replace")
            if late.is_set():
                raise TimeoutError(f"no whole answer within {2 * timeout_s:g} s")
            said = {name.lower(): value for name, value in answer.getheaders()}
            return MetadataReply(answer.status, text, said, self._skew(said.get("date", "")))
        finally:
            timer.cancel()
            with self._lock:
                self._connection = None
            connection.close()

    def close(self) -> None:
        """Abort a request that waits, and refuse further requests."""
        with self._lock:
            self._closed = True
            wire = self._connection.sock if self._connection is not None else None
            if wire is not None:
                with contextlib.suppress(OSError):  # it may just have ended
                    wire.shutdown(socket.SHUT_RDWR)

    def _skew(self, date: str) -> float:
        try:
            skew_s = parsedate_to_datetime(date).timestamp() - self._now()
        except (ValueError, TypeError):
            return 0.0
        return skew_s if abs(skew_s) >= SKEW_S else 0.0


class Polled:
    """The base of sources that poll a service: known notices survive an outage, an outage slows the
    polling down, and deadlines are on our clock."""

    name = ""

    def __init__(self, endpoint: Endpoint, pace_s: float, timeout_s: float):
        self.pace_s, self.errors = pace_s, 0
        self._endpoint, self._usual_pace_s, self._timeout_s = endpoint, pace_s, timeout_s
        self._silent = 0  # polls in a row without an answer
        self._deadlines: dict[tuple[str, float], float] = {}

    def poll(self) -> Sequence[Notice]:
        raise NotImplementedError

    def acknowledge(self, notice: Notice) -> bool:
        return False

    def close(self) -> None:
        self._endpoint.close()

    def _heard(self) -> None:
        self._silent, self.pace_s = 0, self._usual_pace_s

    def _unheard(self, what: str, error: Exception) -> None:
        self.errors += 1
        self._silent += 1
        self.pace_s = max(
            self._usual_pace_s,
            min(SLOWEST_PACE_S, self._usual_pace_s * 2.0 ** min(self._silent - 1, 10)),
        )
        say = log.warning if self._silent == 1 else log.debug  # an outage is reported once
        say("notices: %s%s: %s: %s", self._endpoint.base, what, type(error).__name__, error)

    def _on_our_clock(self, notices: Sequence[Notice], skew_s: float) -> tuple[Notice, ...]:
        """Convert deadlines from the cloud's clock to ours. Each is converted once, so that it
        stays the same however the clocks drift."""
        return tuple(
            n
            if n.deadline_s is None
            else replace(
                n,
                deadline_s=self._deadlines.setdefault((n.id, n.deadline_s), n.deadline_s - skew_s),
            )
            for n in notices
        )


def hashed(prefix: str, body: str) -> str:
    return f"{prefix}-{hashlib.sha256(body.encode()).hexdigest()[:16]}"


def utc(text: str) -> float:
    """Return the seconds since 1970 of RFC 3339 (`2017-09-18T08:22:00Z`), RFC 1123 (`Mon, 11 Apr
    2026 22:26:58 GMT`) or EC2's `21 Jan 2019 09:00:43 GMT`. Raises ValueError."""
    if text.endswith(" GMT"):
        text = text.rpartition(", ")[2]  # the name of the day is redundant, and may be wrong
        return (
            datetime.strptime(text, "%d %b %Y %H:%M:%S GMT")
            .replace(tzinfo=timezone.utc)
            .timestamp()
        )
    at = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()
