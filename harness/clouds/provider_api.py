"""The provider's loopback API: who may call what."""

from __future__ import annotations

import dataclasses
import hmac
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.clouds import market as markets
from harness.core.world import BadInput
from storage.bounded_http import BoundedHandler, BoundedHTTPServer

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


def serve(provider: Provider, token: str) -> BoundedHTTPServer:
    """On loopback, for callers that know the token; others are told so before a body is read."""

    class ProviderHandler(BoundedHandler):
        def do_GET(self) -> None:
            if not hmac.compare_digest(
                self.headers.get("Authorization", "").encode("latin-1", "replace"),
                f"Bearer {token}".encode(),
            ):
                self.close_connection = True
                return self._answer(401, {"error": "wrong token; it is in provider.json"})
            self.server.trust(self.connection)
            if (raw := self.body(MAX_BODY)) is None:
                return self._answer(413, {"error": f"a body may have {MAX_BODY} bytes"})
            provider.touch()
            try:
                found = _route(provider, self.command, self.path, json.loads(raw or b"{}"))
            except (BadInput, KeyError, TypeError, ValueError, RecursionError) as e:
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

    server = BoundedHTTPServer("127.0.0.1", 0, ProviderHandler)
    server.serve_in_thread("api")
    return server
