"""The provider's loopback API: who may call what."""

from __future__ import annotations

import dataclasses
import hmac
import json
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from harness.clouds import market as markets
from harness.clouds.machines import log
from harness.core.world import BadInput

if TYPE_CHECKING:
    from harness.clouds.provider import Provider

MAX_BODY = 4 << 20


class Stopping(Exception):
    """Too late: the provider is ending."""


EVENTS: dict[str, type[Any]] = {
    "capacity": markets.Capacity,
    "preempt": markets.Preempt,
    "kill": markets.Kill,
    "outage": markets.Outage,
}


def _route(provider: Provider, method: str, path: str, body: Mapping[str, Any]) -> Any:
    """The answer to one call, or None if there is no such call. Raises BadInput, KeyError,
    TypeError, ValueError for bad bodies."""
    match method, path:
        case "GET", "/offers":
            return [dataclasses.asdict(o) for o in provider.config.offers]
        case "GET", "/nodes":
            return provider.nodes()
        case "GET", "/status":
            return provider.status()
        case "POST", "/launch":
            provider.launch(
                int(body["attempt"]), body["offer"], body["command"], body["cwd"], body["env"]
            )
        case "POST", "/terminate":
            provider.terminate(int(body["attempt"]))
        case "POST", "/event":
            fields = {k: v for k, v in body.items() if k not in ("event", "attempt")}
            provider.event(EVENTS[body["event"]](**fields), body.get("attempt"))
        case "POST", "/inject":
            provider.inject(int(body["attempt"]), {k: v for k, v in body.items() if k != "attempt"})
        case "POST", "/shutdown":
            provider.stop("terminated")
        case _:
            return None
    return {}


def serve(provider: Provider, token: str) -> ThreadingHTTPServer:
    class ProviderHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30.0

        def do_GET(self) -> None:
            length = self.headers.get("Content-Length", "0")
            if not length.isdigit() or int(length) > MAX_BODY:
                self.close_connection = True
                return self._answer(413, {"error": f"a body may have {MAX_BODY} bytes"})
            raw = self.rfile.read(int(length))
            if not hmac.compare_digest(
                self.headers.get("Authorization", "").encode(), f"Bearer {token}".encode()
            ):
                return self._answer(401, {"error": "wrong token; it is in provider.json"})
            provider.touch()
            try:
                found = _route(provider, self.command, self.path, json.loads(raw or b"{}"))
            except (BadInput, KeyError, TypeError, ValueError) as e:
                return self._answer(
                    400,
                    {"error": str(e) if isinstance(e, BadInput) else f"{type(e).__name__}: {e}"},
                )
            except Stopping as e:
                return self._answer(503, {"error": str(e)})
            if found is None:
                return self._answer(404, {"error": f"no call {self.command} {self.path}"})
            return self._answer(200, found)

        do_POST = do_GET

        def _answer(self, status: int, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class ProviderHTTPServer(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: object, client_address: object) -> None:
            log.info("a caller hung up: %s", sys.exc_info()[1])

    server = ProviderHTTPServer(("127.0.0.1", 0), ProviderHandler)
    threading.Thread(target=server.serve_forever, args=(0.1,), name="api", daemon=True).start()
    return server
