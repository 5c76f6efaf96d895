"""Clouds' metadata services, as their machines see them, on loopback. Runs in the local cloud's
provider, in tests, and as `harness fake-metadata`.

`AwsImds`, `GcpMetadata` and `AzureScheduledEvents` are the protocols, without sockets;
`MetadataServer` carries any of them over HTTP and can be told to be slow, wrong, silent, or of
another time. What was announced is frozen: every request sees the same bytes until something
happens. Another cloud is another class with `answer`, `notice` and `cancel`. Knows nothing of
nodes, markets or agents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.clouds.metadata_protocol import MetadataProtocol

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.utils import formatdate
from typing import Any
from urllib.parse import urlsplit

from harness.clouds.aws_imds import AwsImds
from harness.clouds.azure_events import AzureScheduledEvents
from harness.clouds.gcp_metadata import GcpMetadata
from harness.clouds.metadata_protocol import CONTROL_PATH, Answer, json_answer
from storage.bounded_http import BoundedHandler, BoundedHTTPServer, HTTPBounds

MOST_BODY_NBYTES = 64 << 10
BOUNDS = HTTPBounds(request_s=900.0)  # GCP's answer may wait until something changes


# ---- by name -------------------------------------------------------------------------------------
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
    """What makes a process on this machine find `endpoint` (http://host:port/): the clouds' own
    variables where there are some."""
    host = urlsplit(endpoint).netloc
    return {
        "aws": {"AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint},
        "gcp": {"GCE_METADATA_HOST": host},
        "azure": {"HARNESS_AZURE_METADATA": endpoint},
    }[cloud]


# ---- over HTTP -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class EndpointFault:
    """What is wrong with the endpoint. `count` requests are hit (None: all until `inject()`)."""

    latency_s: float = 0.0
    status: int = 0  # answer this instead
    drop: bool = False  # close the connection without an answer
    method: str | None = None  # only these requests
    count: int | None = None
    every: int = 1  # of those requests, hit one in so many


class MetadataServer:
    """Serves one protocol on a loopback port (0: of the system's choice), in its own daemon
    threads.

    `clock_ahead_s`: how far the cloud's clock, as its Date headers show it, is ahead of ours. With
    `control`, a POST to /-/control is an
    order: `{"do": "notice", "kind": "kill", "in_s": 120}`, `{"do": "cancel"}`, `{"do": "fault",
    "latency_s": 3}`, `{"do": "well"}`.
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
            self._fault = EndpointFault(latency_s, status, drop, method, count, every)

    def order(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """What the control asks for. Raises ValueError, KeyError or TypeError for what it
        cannot mean."""
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
