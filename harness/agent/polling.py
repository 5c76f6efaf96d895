"""Asking a metadata service again and again, within bounds, whatever it answers.  Runs in the
agent."""

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
from typing import TypeAlias
from urllib.parse import urlsplit

from harness.agent.notices import Notice
from harness.core.world import BadInput

log = logging.getLogger(__name__)
TOKEN_TTL_S = 3600
REFRESH_BEFORE_S = 15.0  # as aws-node-termination-handler does
# after a token request timed out (hop limit, in containers): how long to go on without
TOKENLESS_S = 60.0
MAX_ANSWER = 1 << 20
# however long a service has been silent: the notice that it will give may leave us 30 s
SLOWEST_PACE_S = 5.0
SKEW_S = 2.0  # Date headers have whole seconds, so less than this is no difference of clocks
# and answers that mean nothing
ANSWERLESS = (
    *(OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError),
    RecursionError,  # of JSON without end
)
NoticeParser: TypeAlias = Callable[[str], tuple[Notice, ...]]


def _break_off(wires: list[socket.socket], late: threading.Event) -> None:
    late.set()
    for wire in wires:
        with contextlib.suppress(OSError):  # it has just ended by itself
            wire.shutdown(socket.SHUT_RDWR)


# ---- what all services over HTTP have in common --------------------------------------------------
@dataclass(frozen=True)
class MetadataReply:
    status: int
    body: str
    headers: Mapping[str, str]  # names in lower case
    skew_s: float  # how far the service's clock is ahead of ours; 0.0 if the same, or unknown


class Endpoint:
    """One service over HTTP. Metadata is link-local, so no proxy is ever asked; nothing is
    retried, and every wait has a bound."""

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
        """All of it within `timeout_s` for the connection and as long again for the answer, however
        slowly that trickles. Raises OSError (TimeoutError, refused, ...) or
        http.client.HTTPException when there is no answer."""
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
            wires.append(connection.sock)  # which it forgets when the service says "close"
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
        """Break off a request that waits, and have no more."""
        with self._lock:
            self._closed = True
            wire = self._connection.sock if self._connection is not None else None
            if wire is not None:
                with contextlib.suppress(OSError):  # it has just ended by itself
                    wire.shutdown(socket.SHUT_RDWR)

    def _skew(self, date: str) -> float:
        try:
            skew_s = parsedate_to_datetime(date).timestamp() - self._now()
        except (ValueError, TypeError):
            return 0.0
        return skew_s if abs(skew_s) >= SKEW_S else 0.0


class Polled:
    """What sources that ask a service share: what is known outlives silence, silence slows the
    asking, deadlines are on our clock."""

    name = ""

    def __init__(self, endpoint: Endpoint, pace_s: float, timeout_s: float):
        self.pace_s, self.errors = pace_s, 0
        self._endpoint, self._usual_pace_s, self._timeout_s = endpoint, pace_s, timeout_s
        self._silent = 0  # polls in a row
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
        say = log.warning if self._silent == 1 else log.debug  # an outage is told once
        say("notices: %s%s: %s: %s", self._endpoint.base, what, type(error).__name__, error)

    def _on_our_clock(self, notices: Sequence[Notice], skew_s: float) -> tuple[Notice, ...]:
        """A deadline is told by the cloud's clock. It is converted once, so that it stands
        still however the clocks wander."""
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
    """RFC 3339 (`2017-09-18T08:22:00Z`), RFC 1123 (`Mon, 11 Apr 2026 22:26:58 GMT`) or EC2's `21
    Jan 2019 09:00:43 GMT`, as seconds since 1970. Raises ValueError."""
    if text.endswith(" GMT"):
        text = text.rpartition(", ")[2]  # the name of the day says nothing new, and may be wrong
        return (
            datetime.strptime(text, "%d %b %Y %H:%M:%S GMT")
            .replace(tzinfo=timezone.utc)
            .timestamp()
        )
    at = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()
