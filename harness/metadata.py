"""A node's metadata endpoint, as its cloud serves it, on loopback. Runs in the local cloud's provider and in tests.

`AwsImds` is the protocol (EC2 instance metadata service, version 2), without sockets; `MetadataServer` carries any
such protocol over HTTP and can be told to be slow, wrong or silent. Another cloud is another class with `answer`.
Knows nothing of nodes, markets or agents.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

TOKEN_PATH = "/latest/api/token"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
MAX_TTL_S = 21_600
NOT_FOUND = (
    '<?xml version="1.0" encoding="iso-8859-1"?>\n<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0 Transitional//EN"\n'
    '\t"http://www.w3.org/TR/xhtml1/DTD/xhtml1-transitional.dtd">\n<html xmlns="http://www.w3.org/1999/xhtml">\n'
    " <head>\n  <title>404 - Not Found</title>\n </head>\n <body>\n  <h1>404 - Not Found</h1>\n </body>\n</html>\n"
)


@dataclass(frozen=True)
class Answer:
    status: int
    body: str = ""
    content_type: str = "text/plain"
    headers: Mapping[str, str] = field(default_factory=dict)


class MetadataProtocol(Protocol):
    """One cloud's metadata service: a request in (header names in lower case), an answer out."""

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Answer: ...


def rfc3339(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class AwsImds:
    """IMDSv2 of one instance. What was announced is frozen: every request sees the same bytes until `cancel`."""

    def __init__(
        self,
        instance_id: str,
        *,
        zone: str = "local-1a",
        instance_type: str = "local.cpu",
        tokens_required: bool = True,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self._monotonic, self._tokens_required = monotonic, tokens_required
        self._lock = threading.Lock()
        self._tokens: dict[str, float] = {}  # token -> when it expires
        region = zone[:-1] if zone[-1:].isalpha() else zone
        self._fixed = {
            "instance-id": instance_id,
            "instance-type": instance_type,
            "instance-life-cycle": "spot",
            "local-ipv4": "127.0.0.1",
            "local-hostname": "localhost",
            "placement/availability-zone": zone,
            "placement/region": region,
        }
        self._identity = {"instanceId": instance_id, "instanceType": instance_type, "region": region, "availabilityZone": zone}
        self._notices: dict[str, Answer] = {}
        self._maintenance: list[dict[str, str]] = []

    # -- what happens to the instance --
    def announce(self, action: str, deadline_s: float) -> None:
        """A spot interruption ("terminate", "stop" or "hibernate") at a wall-clock time."""
        at = rfc3339(deadline_s)
        with self._lock:
            self._notices["spot/instance-action"] = _json({"action": action, "time": at})
            if action == "terminate":
                self._notices["spot/termination-time"] = Answer(200, at)

    def cancel(self) -> None:
        """Take an announced interruption back (real AWS does not; a test of un-latching needs it)."""
        with self._lock:
            self._notices.pop("spot/instance-action", None)
            self._notices.pop("spot/termination-time", None)

    def rebalance(self, noticed_s: float) -> None:
        with self._lock:
            self._notices["events/recommendations/rebalance"] = _json({"noticeTime": rfc3339(noticed_s)})

    def maintenance(self, event: Mapping[str, str]) -> None:
        """Add a scheduled event, or change the one with the same EventId (State active -> completed | canceled)."""
        with self._lock:
            self._maintenance = [e for e in self._maintenance if e.get("EventId") != event.get("EventId")] + [dict(event)]

    # -- what the instance sees --
    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        path = path.partition("?")[0].rstrip("/") or "/"
        with self._lock:
            if path == TOKEN_PATH:
                return self._token(headers) if method == "PUT" else Answer(405, "405 - Method Not Allowed")
            if method != "GET":
                return Answer(405, "405 - Method Not Allowed")
            echo: dict[str, str] = {}
            token = headers.get(TOKEN_HEADER.lower())
            if token is not None or self._tokens_required:
                left_s = self._tokens.get(token or "", 0.0) - self._monotonic()
                if left_s <= 0:
                    return Answer(401, "401 - Unauthorized")
                echo[TTL_HEADER] = str(int(left_s))
            found = self._get(path)
        return Answer(found.status, found.body, found.content_type, echo)

    def _token(self, headers: Mapping[str, str]) -> Answer:
        if headers.get("x-forwarded-for") is not None:
            return Answer(403, "403 - Forbidden")
        ttl = headers.get(TTL_HEADER.lower()) or ""
        if not (ttl.isascii() and ttl.isdigit()) or not 1 <= int(ttl) <= MAX_TTL_S:
            return Answer(400, "400 - Bad Request")
        now = self._monotonic()
        self._tokens = {t: until for t, until in self._tokens.items() if until > now}  # bounded by what is alive
        token = secrets.token_urlsafe(42)
        self._tokens[token] = now + int(ttl)
        return Answer(200, token, headers={TTL_HEADER: ttl})

    def _get(self, path: str) -> Answer:
        if path == "/latest/dynamic/instance-identity/document":
            return _json(self._identity)
        if path == "/latest/meta-data":
            return Answer(200, "\n".join(sorted({*(k.partition("/")[0] for k in self._fixed), "events/", "spot/"})))
        name = path.removeprefix("/latest/meta-data/")
        if name == "events/maintenance/scheduled":
            return _json(self._maintenance)  # an empty list, not 404, when nothing is planned
        if name in self._fixed:
            return Answer(200, self._fixed[name])
        return self._notices.get(name, Answer(404, NOT_FOUND, "text/html"))


def _json(value: Any) -> Answer:
    return Answer(200, json.dumps(value), "application/json")


@dataclass(frozen=True)
class Fault:
    """What is wrong with the endpoint. `count` requests are hit (None: all until `inject()`)."""

    latency_s: float = 0.0
    status: int = 0  # answer this instead
    drop: bool = False  # close the connection without an answer
    method: str | None = None  # only these requests
    count: int | None = None


class MetadataServer:
    """Serves one protocol on a loopback port of the system's choice, in its own daemon threads."""

    def __init__(self, protocol: MetadataProtocol):
        self.protocol = protocol
        self.requests = 0
        self._fault = Fault()
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            server_version, sys_version = "EC2ws", ""
            timeout = 10.0  # an idle keep-alive connection must not hold a thread for ever

            def do_GET(self) -> None:
                outer._serve(self)

            do_PUT = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that hung up is its own business

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="metadata", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """In the spelling of AWS_EC2_METADATA_SERVICE_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def inject(
        self,
        *,
        latency_s: float = 0.0,
        status: int = 0,
        drop: bool = False,
        method: str | None = None,
        count: int | None = None,
    ) -> None:
        """Be slow, wrong or silent from now on; without arguments: be well again."""
        with self._lock:
            self._fault = Fault(latency_s, status, drop, method, count)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def _next_fault(self, method: str) -> Fault:
        with self._lock:
            self.requests += 1
            fault = self._fault
            if fault.method not in (None, method) or fault.count == 0:
                return Fault()
            if fault.count is not None:
                self._fault = Fault(fault.latency_s, fault.status, fault.drop, fault.method, fault.count - 1)
            return fault

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        fault = self._next_fault(handler.command)
        length = handler.headers.get("Content-Length", "0")
        if length.isdigit() and 0 < int(length) <= 65_536:
            handler.rfile.read(int(length))  # or it would be taken for the next request of this connection
        if fault.latency_s:
            time.sleep(fault.latency_s)
        if fault.drop:
            handler.close_connection = True
            return
        if fault.status:
            answer = Answer(fault.status, f"{fault.status} - injected")
        else:
            answer = self.protocol.answer(handler.command, handler.path, {k.lower(): v for k, v in handler.headers.items()})
        body = answer.body.encode()
        handler.send_response(answer.status)
        for name, value in {"Content-Type": answer.content_type, "Content-Length": str(len(body)), **answer.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)
