"""Fake metadata services of clouds on loopback. They run in the local cloud's provider, in tests,
and as `harness prove fake-metadata`.

`AwsImds`, `GcpMetadata` and `AzureScheduledEvents` are the protocols, without sockets;
`MetadataServer` serves any of them over HTTP and can be made slow, wrong, silent, or wrong about
the time. A notice is frozen: every request gets the same bytes until something changes. To add a
cloud, write a class with `answer`, `notice`, `cancel` and `release`. This module knows nothing of
nodes, markets or agents.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.utils import formatdate
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from harness.local.aws_metadata import AwsImds
from harness.local.azure_metadata import AzureScheduledEvents
from harness.local.gcp_metadata import GcpMetadata
from harness.local.metadata_reply import CONTROL_PATH, Answer, json_answer
from storage.http_server import BoundedHandler, BoundedHTTPServer, HTTPBounds

if TYPE_CHECKING:
    from harness.local.metadata_reply import MetadataProtocol

MOST_BODY_NBYTES = 64 << 10
BOUNDS = HTTPBounds(request_s=900.0)  # a GET to GCP's server may wait until something changes


# ---- by name -------------------------------------------------------------------------------------
def metadata_service(cloud: str, name: str) -> MetadataProtocol:
    """Return the metadata service of a machine of that name on "aws", "gcp" or "azure". Raises
    ValueError for another cloud."""
    match cloud:
        case "aws":
            return AwsImds(name)
        case "gcp":
            return GcpMetadata(name)
        case "azure":
            return AzureScheduledEvents(name)
    raise ValueError(f"cloud {cloud!r} is none of aws, gcp, azure")


def environment_of(cloud: str, endpoint: str) -> dict[str, str]:
    """Return the environment variables that point a process at `endpoint` (http://host:port/).
    They are the clouds' own variables where those exist."""
    host = urlsplit(endpoint).netloc
    return {
        "aws": {"AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint},
        "gcp": {"GCE_METADATA_HOST": host},
        "azure": {"HARNESS_AZURE_METADATA": endpoint},
    }[cloud]


# ---- over HTTP -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class EndpointFault:
    """A fault of the endpoint. `count`: how many requests it affects; `None` means all until the
    next `inject()`."""

    latency_s: float = 0.0
    status: int = 0  # HTTP status to answer instead; 0 means the real answer
    drop: bool = False  # close the connection without an answer
    method: str | None = None  # affect requests of this method only; `None` means all
    count: int | None = None
    every: int = 1  # affect only every n-th of all requests


class MetadataServer:
    """A server of one protocol on a loopback port (0: chosen by the system), in daemon threads.

    `clock_ahead_s`: how far the cloud's clock, as its Date headers show it, is ahead of ours. With
    `control`, a POST to /-/control is an order: `{"do": "notice", "kind": "kill", "in_s": 120}`,
    `{"do": "cancel"}`, `{"do": "fault", "latency_s": 3}`, `{"do": "well"}`.
    """

    def __init__(
        self,
        protocol: MetadataProtocol,
        port: int = 0,
        *,
        control: bool = False,
        clock_ahead_s: float = 0.0,
    ):
        self.protocol, self.clock_ahead_s = protocol, clock_ahead_s
        self.requests = 0
        self._control = control
        self._fault = EndpointFault()
        self._lock = threading.Lock()
        outer = self

        class MetadataHandler(BoundedHandler):
            def do_GET(self) -> None:
                outer._serve(self)

            do_PUT = do_POST = do_GET

            def version_string(self) -> str:
                return outer.protocol.server

            def date_time_string(self, timestamp: float | None = None) -> str:
                return formatdate(
                    time.time() + outer.clock_ahead_s if timestamp is None else timestamp,
                    usegmt=True,
                )

        self._server = BoundedHTTPServer("127.0.0.1", port, MetadataHandler, BOUNDS)
        self._thread = self._server.serve_in_thread("metadata")

    @property
    def endpoint(self) -> str:
        """URL of the server, in the form of AWS_EC2_METADATA_SERVICE_ENDPOINT."""
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
        """Make the server slow, wrong or silent from now on; without arguments, end the fault."""
        with self._lock:
            self._fault = EndpointFault(latency_s, status, drop, method, count, every)

    def order(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out an order (see the class) and return the answer. Raises ValueError, KeyError or
        TypeError if it is invalid."""
        more = {k: v for k, v in said.items() if k != "do"}
        match said.get("do"):
            case "notice":
                ahead_s = time.time() + self.clock_ahead_s
                return {
                    "id": self.protocol.notice(
                        str(more.get("kind", "kill")), ahead_s + float(more.get("in_s", 120.0))
                    )
                }
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

    def _next_fault(self, method: str) -> EndpointFault:
        with self._lock:
            self.requests += 1
            fault = self._fault
            if (
                fault.method not in (None, method)
                or fault.count == 0
                or self.requests % fault.every
            ):
                return EndpointFault()
            if fault.count is not None:
                self._fault = replace(fault, count=fault.count - 1)
            return fault

    def _serve(self, handler: BoundedHandler) -> None:
        body = handler.body(MOST_BODY_NBYTES) or b""
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
            answer = self.protocol.answer(
                handler.command,
                handler.path,
                {k.lower(): v for k, v in handler.headers.items()},
                body,
            )
        self._send(handler, answer)

    def _ordered(self, body: bytes) -> Answer:
        try:
            return json_answer(self.order(json.loads(body)))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            return Answer(
                400, json.dumps({"error": f"{type(e).__name__}: {e}"}), "application/json"
            )

    @staticmethod
    def _send(handler: BoundedHandler, answer: Answer) -> None:
        body = answer.body.encode()
        handler.send_response(answer.status)
        for name, value in {
            "Content-Type": answer.content_type,
            "Content-Length": str(len(body)),
            **answer.headers,
        }.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)
