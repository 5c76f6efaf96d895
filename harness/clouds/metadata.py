"""Clouds' metadata services, as their machines see them, on loopback. Runs in the local cloud's provider, in tests, and as
`harness fake-metadata`.

`AwsImds`, `GcpMetadata` and `AzureScheduledEvents` are the protocols, without sockets; `MetadataServer` carries any of them over
HTTP and can be told to be slow, wrong, silent, or of another time. What was announced is frozen: every request sees the same bytes until
something happens. Another cloud is another class with `answer`, `notice` and `cancel`. Knows nothing of nodes, markets or agents.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Protocol
from urllib.parse import parse_qs, urlsplit

TOKEN_PATH = "/latest/api/token"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
MAX_TTL_S = 21_600
MAX_HANG_S = 3600.0  # of one hanging GET
CONTROL_PATH = "/-/control"  # no cloud has such a path
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

    server: str  # what it calls itself in the Server header

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Answer: ...

    def notice(self, kind: str, deadline_s: float) -> str:
        """Announce what this cloud has of that kind ("kill", "soft" or "maintenance") for a wall-clock time; its id."""

    def cancel(self, name: str = "") -> None:
        """Take back what `notice` returned this id for; everything, without one."""

    def release(self) -> None:
        """The server ends: answer every request that hangs."""


def rfc3339(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


# ---- AWS --------------------------------------------------------------------------------------------------------
class AwsImds:
    """Instance metadata service, version 2, of one EC2 instance."""

    server = "EC2ws"

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
    def notice(self, kind: str, deadline_s: float) -> str:
        match kind:
            case "kill":
                self.announce("terminate", deadline_s)
                return "spot/instance-action"
            case "soft":
                self.rebalance(deadline_s)
                return "events/recommendations/rebalance"
            case "maintenance":
                event = f"instance-event-{secrets.token_hex(8)}"
                at = datetime.fromtimestamp(deadline_s, timezone.utc).strftime("%d %b %Y %H:%M:%S GMT")
                self.maintenance({"NotBefore": at, "Code": "system-reboot", "Description": "reboot", "EventId": event, "State": "active"})
                return event
        raise _no_kind(kind)

    def announce(self, action: str, deadline_s: float) -> None:
        """A spot interruption ("terminate", "stop" or "hibernate") at a wall-clock time."""
        at = rfc3339(deadline_s)
        with self._lock:
            self._notices["spot/instance-action"] = _json({"action": action, "time": at})
            if action == "terminate":
                self._notices["spot/termination-time"] = Answer(200, at)

    def cancel(self, name: str = "") -> None:
        """Take back what was announced (real AWS cancels scheduled events only; a test of un-latching needs more)."""
        with self._lock:
            for path in [p for p in self._notices if not name or p == name]:
                self._notices.pop(path, None)
                if path == "spot/instance-action":
                    self._notices.pop("spot/termination-time", None)
            for event in self._maintenance:
                if not name or event["EventId"] == name:
                    event["State"] = "canceled"

    def release(self) -> None:
        pass

    def rebalance(self, noticed_s: float) -> None:
        with self._lock:
            self._notices["events/recommendations/rebalance"] = _json({"noticeTime": rfc3339(noticed_s)})

    def maintenance(self, event: Mapping[str, str]) -> None:
        """Add a scheduled event, or change the one with the same EventId (State active -> completed | canceled)."""
        with self._lock:
            self._maintenance = [e for e in self._maintenance if e.get("EventId") != event.get("EventId")] + [dict(event)]

    # -- what the instance sees --
    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Answer:
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


def _no_kind(kind: str) -> ValueError:
    return ValueError(f"kind {kind!r} is none of kill, soft, maintenance")


# ---- GCP --------------------------------------------------------------------------------------------------------
PREEMPTED, MAINTENANCE_EVENT = "instance/preempted", "instance/maintenance-event"


class GcpMetadata:
    """The metadata server of one Compute Engine instance: values with ETags, and GETs that hang until one changes."""

    server = "Metadata Server for VM"
    FLAVOR: ClassVar[Mapping[str, str]] = {"Metadata-Flavor": "Google"}

    def __init__(self, name: str, *, zone: str = "local-1a", machine_type: str = "local-cpu"):
        self._changed = threading.Condition()
        self._salt = secrets.token_hex(4)  # another server's ETags are not ours
        self._released = False
        self._values = {
            PREEMPTED: "FALSE",
            MAINTENANCE_EVENT: "NONE",
            "instance/name": name,
            "instance/id": str(int(hashlib.sha256(name.encode()).hexdigest()[:15], 16)),
            "instance/zone": f"projects/0/zones/{zone}",
            "instance/machine-type": f"projects/0/machineTypes/{machine_type}",
            "instance/scheduling/preemptible": "TRUE",
        }

    # -- what happens to the instance --
    def set(self, path: str, value: str) -> None:
        with self._changed:
            self._values[path] = value
            self._changed.notify_all()

    def notice(self, kind: str, deadline_s: float) -> str:
        """GCP tells no time: an instance knows how long each kind of notice lasts."""
        match kind:
            case "kill":
                self.set(PREEMPTED, "TRUE")
                return PREEMPTED
            case "soft":
                self.set(MAINTENANCE_EVENT, "MIGRATE_ON_HOST_MAINTENANCE")
            case "maintenance":
                self.set(MAINTENANCE_EVENT, "TERMINATE_ON_HOST_MAINTENANCE")
            case _:
                raise _no_kind(kind)
        return MAINTENANCE_EVENT

    def cancel(self, name: str = "") -> None:
        if name in ("", PREEMPTED):
            self.set(PREEMPTED, "FALSE")
        if name in ("", MAINTENANCE_EVENT):
            self.set(MAINTENANCE_EVENT, "NONE")

    def release(self) -> None:
        with self._changed:
            self._released = True
            self._changed.notify_all()

    # -- what the instance sees --
    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Answer:
        asked = urlsplit(path)
        if asked.path == "/":
            return Answer(200, "computeMetadata/\n", "application/text", self.FLAVOR)
        if headers.get("x-forwarded-for") is not None:
            return Answer(403, "Your client does not have permission to get URL from this server.", "text/html", self.FLAVOR)
        if headers.get("metadata-flavor") != "Google":
            return Answer(403, "Missing Metadata-Flavor:Google header.", "text/html", self.FLAVOR)
        if method != "GET":
            return Answer(405, "Method Not Allowed", "text/html", self.FLAVOR)
        query = {k: v[-1] for k, v in parse_qs(asked.query).items()}
        try:
            hang_s = min(float(query.get("timeout_sec", MAX_HANG_S)), MAX_HANG_S)
        except ValueError:
            return Answer(400, "timeout_sec: wanted a number", "text/html", self.FLAVOR)
        name = asked.path.removeprefix("/computeMetadata/v1/").rstrip("/")
        with self._changed:
            if name not in self._values or not asked.path.startswith("/computeMetadata/v1/"):
                return Answer(404, "Not Found", "text/html", self.FLAVOR)
            if query.get("wait_for_change") == "true":
                seen = query.get("last_etag", self._etag(name))
                self._changed.wait_for(lambda: self._released or self._etag(name) != seen, timeout=hang_s)
                if self._released:
                    return Answer(503, "Service Unavailable", "text/html", self.FLAVOR)
            return Answer(200, self._values[name], "application/text", {**self.FLAVOR, "ETag": self._etag(name)})

    def _etag(self, name: str) -> str:
        return hashlib.sha256(f"{self._salt} {name} {self._values[name]}".encode()).hexdigest()[:16]


# ---- Azure ------------------------------------------------------------------------------------------------------
EVENTS_PATH, NAME_PATH = "/metadata/scheduledevents", "/metadata/instance/compute/name"


class AzureScheduledEvents:
    """Scheduled Events, and the name, of one virtual machine. An event that is over, or was cancelled, is not in the document any more."""

    server = "IMDS/150.870.65.1854"

    def __init__(self, name: str, *, clock: Callable[[], float] = time.time):
        self.name, self._clock = name, clock
        self._lock = threading.Lock()
        self._incarnation = 1
        self._events: list[dict[str, Any]] = []
        self.acknowledged: list[str] = []  # ids of events, in the order of the requests to start them

    # -- what happens to the machine --
    def schedule(self, event_type: str, not_before_s: float, resources: tuple[str, ...] = (), duration_s: int = -1) -> str:
        """Add an event of a type ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"); its id."""
        event = {
            "EventId": str(uuid.uuid4()).upper(),
            "EventType": event_type,
            "ResourceType": "VirtualMachine",
            "Resources": list(resources or (self.name,)),
            "EventStatus": "Scheduled",
            "NotBefore": formatdate(not_before_s, usegmt=True),
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": duration_s,
        }
        with self._lock:
            self._events.append(event)
            self._incarnation += 1
        return str(event["EventId"])

    def change(self, event_id: str, **fields: Any) -> None:
        with self._lock:
            for event in self._events:
                if event["EventId"] == event_id:
                    event.update(fields)
                    self._incarnation += 1

    def start(self, event_id: str) -> None:
        """It happens now: the time of it is not told any more."""
        self.change(event_id, EventStatus="Started", NotBefore="")

    def notice(self, kind: str, deadline_s: float) -> str:
        types = {"kill": "Preempt", "soft": "Freeze", "maintenance": "Redeploy"}
        if kind not in types:
            raise _no_kind(kind)
        return self.schedule(types[kind], deadline_s, duration_s=5 if kind == "soft" else -1)

    def cancel(self, name: str = "") -> None:
        with self._lock:
            left = [e for e in self._events if name and e["EventId"] != name]
            if len(left) != len(self._events):
                self._events, self._incarnation = left, self._incarnation + 1

    def release(self) -> None:
        pass

    # -- what the machine sees --
    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Answer:
        asked = urlsplit(path)
        version = parse_qs(asked.query).get("api-version", [""])[-1]
        if headers.get("metadata", "").lower() != "true":
            return _azure_error("Bad request. Required metadata header not specified")
        if headers.get("x-forwarded-for") is not None:
            return _azure_error("Bad request. X-Forwarded-For is not allowed")
        if len(version) != 10:
            return _azure_error("Bad request. api-version is invalid or was not specified in the request.")
        if asked.path == NAME_PATH and method == "GET":
            return Answer(200, self.name)
        if asked.path != EVENTS_PATH:
            return Answer(404, json.dumps({"error": "Not found"}), "application/json")
        if method == "GET":
            with self._lock:
                return _json({"DocumentIncarnation": self._incarnation, "Events": self._events})
        if method == "POST":
            return self._start_requests(body)
        return Answer(405, json.dumps({"error": "Method not allowed"}), "application/json")

    def _start_requests(self, body: bytes) -> Answer:
        """An event that somebody wants to begin, begins. Asking again is no error; a malformed request or an unknown event is."""
        try:
            wanted = [str(request["EventId"]) for request in json.loads(body)["StartRequests"]]
        except (ValueError, KeyError, TypeError):
            return _azure_error("Bad request. StartRequests is malformed")
        with self._lock:
            known = {e["EventId"] for e in self._events}
            if not set(wanted) <= known | set(self.acknowledged):
                return _azure_error("Bad request. There is no such event")
            self.acknowledged += wanted
            waiting = [e for e in self._events if e["EventId"] in wanted and e["EventStatus"] == "Scheduled"]
            for event in waiting:
                event.update(EventStatus="Started", NotBefore="")
            self._incarnation += bool(waiting)
        return Answer(200)


def _azure_error(text: str) -> Answer:
    return Answer(400, json.dumps({"error": text}), "application/json")


# ---- by name ----------------------------------------------------------------------------------------------------
def protocol_of(cloud: str, name: str) -> MetadataProtocol:
    """The metadata service of a machine of that name on "aws", "gcp" or "azure"."""
    match cloud:
        case "aws":
            return AwsImds(name)
        case "gcp":
            return GcpMetadata(name)
        case "azure":
            return AzureScheduledEvents(name)
    raise ValueError(f"cloud {cloud!r} is none of aws, gcp, azure")


def environment_of(cloud: str, endpoint: str) -> dict[str, str]:
    """What makes a process on this machine find `endpoint` (http://host:port/): the clouds' own variables where there are some."""
    host = urlsplit(endpoint).netloc
    return {
        "aws": {"AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint},
        "gcp": {"GCE_METADATA_HOST": host},
        "azure": {"HARNESS_AZURE_METADATA": endpoint},
    }[cloud]


# ---- over HTTP --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Fault:
    """What is wrong with the endpoint. `count` requests are hit (None: all until `inject()`)."""

    latency_s: float = 0.0
    status: int = 0  # answer this instead
    drop: bool = False  # close the connection without an answer
    method: str | None = None  # only these requests
    count: int | None = None
    every: int = 1  # of those requests, hit one in so many


class MetadataServer:
    """Serves one protocol on a loopback port (0: of the system's choice), in its own daemon threads.

    `clock_ahead_s`: how far the cloud's clock, as its Date headers show it, is ahead of ours. With `control`, a POST to /-/control is an
    order: `{"do": "notice", "kind": "kill", "in_s": 120}`, `{"do": "cancel"}`, `{"do": "fault", "latency_s": 3}`, `{"do": "well"}`.
    """

    def __init__(self, protocol: MetadataProtocol, port: int = 0, *, control: bool = False, clock_ahead_s: float = 0.0):
        self.protocol, self.clock_ahead_s = protocol, clock_ahead_s
        self.requests = 0
        self._control = control
        self._fault = Fault()
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 10.0  # an idle keep-alive connection must not hold a thread for ever

            def do_GET(self) -> None:
                outer._serve(self)

            do_PUT = do_POST = do_GET

            def version_string(self) -> str:
                return outer.protocol.server

            def date_time_string(self, timestamp: float | None = None) -> str:
                return formatdate(time.time() + outer.clock_ahead_s if timestamp is None else timestamp, usegmt=True)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that hung up is its own business

        self._server = Server(("127.0.0.1", port), Handler)
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
        every: int = 1,
    ) -> None:
        """Be slow, wrong or silent from now on; without arguments: be well again."""
        with self._lock:
            self._fault = Fault(latency_s, status, drop, method, count, every)

    def order(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """What the control asks for. Raises ValueError, KeyError or TypeError for what it cannot mean."""
        more = {k: v for k, v in said.items() if k != "do"}
        match said.get("do"):
            case "notice":
                ahead_s = time.time() + self.clock_ahead_s
                return {"id": self.protocol.notice(str(more.get("kind", "kill")), ahead_s + float(more.get("in_s", 120.0)))}
            case "cancel":
                self.protocol.cancel(str(more.get("id", "")))
            case "fault":
                self.inject(**more)
            case "well":
                self.inject()
            case other:
                raise ValueError(f"do {other!r} is none of notice, cancel, fault, well")
        return {}

    def close(self) -> None:
        self.protocol.release()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def _next_fault(self, method: str) -> Fault:
        with self._lock:
            self.requests += 1
            fault = self._fault
            if fault.method not in (None, method) or fault.count == 0 or self.requests % fault.every:
                return Fault()
            if fault.count is not None:
                self._fault = replace(fault, count=fault.count - 1)
            return fault

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        length = handler.headers.get("Content-Length", "0")
        body = b""
        if length.isdigit() and 0 < int(length) <= 65_536:
            body = handler.rfile.read(int(length))  # or it would be taken for the next request of this connection
        if self._control and handler.path == CONTROL_PATH and handler.command == "POST":
            self._send(handler, self._ordered(body))
            return
        fault = self._next_fault(handler.command)
        if fault.latency_s:
            time.sleep(fault.latency_s)
        if fault.drop:
            handler.close_connection = True
            return
        if fault.status:
            answer = Answer(fault.status, f"{fault.status} - injected")
        else:
            answer = self.protocol.answer(handler.command, handler.path, {k.lower(): v for k, v in handler.headers.items()}, body)
        self._send(handler, answer)

    def _ordered(self, body: bytes) -> Answer:
        try:
            return _json(self.order(json.loads(body)))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            return Answer(400, json.dumps({"error": f"{type(e).__name__}: {e}"}), "application/json")

    @staticmethod
    def _send(handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        body = answer.body.encode()
        handler.send_response(answer.status)
        for name, value in {"Content-Type": answer.content_type, "Content-Length": str(len(body)), **answer.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)
