"""A small read-only HTTP server that shows all runs of a folder in a browser: `harness runs serve`.

It listens on loopback by default, and accepts only this machine's names or addresses as the host: a
foreign page whose own name points here (DNS rebinding) gets nothing. There are no forms, no cookies
and no file paths: a requested name is looked up among the known runs. Nothing from a bucket becomes
markup: pages escape it, and their policy runs only our scripts.

    /                    the table of runs and their curves
    /run/NAME            the report of one run, kept up to date
    /run/NAME/content    only the report's content
    /run/NAME/logs       the newest lines of its nodes' logs
    /api/runs            rows of the table
    /api/curves          ?run=NAME&run=...&metric=loss
    /static/NAME         scripts and styles
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

from harness.core.world import BadInput
from harness.look.pages.html_parts import asset, render
from harness.look.pages.run_index import METRICS, RunsFolder
from storage.http_server import (
    BoundedHandler,
    BoundedHTTPServer,
    HTTPBounds,
    is_our_name,
    our_names,
)
from storage.terminal_text import plain

LOOPBACK = "127.0.0.1"
BOUNDS = HTTPBounds(connections=32)  # refused browsers retry
MOST_CURVES = 40  # per request
STATIC = {
    "page.css": "text/css", "page.js": "text/javascript",
    "serve.css": "text/css", "serve.js": "text/javascript", "serve_run.js": "text/javascript",
}  # fmt: skip
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


# ---- access --------------------------------------------------------------------------------------
def checked_host(host: str, anyone: bool) -> str:
    """Return the address to listen on. Raise BadInput if it is not loopback and not `anyone`."""
    if not (_is_loopback(host) or anyone):
        raise BadInput(
            f"--host {host}: wanted an address of loopback such as {LOOPBACK}, found another; the "
            "page has no password, so give --anyone too if whoever reaches this machine may read it"
        )
    return host


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ---- the server ----------------------------------------------------------------------------------
class RunsServer(BoundedHTTPServer):
    """An HTTP server with one thread per connection, up to a bound."""

    def __init__(self, folder: RunsFolder, host: str = LOOPBACK, port: int = 0):
        self.folder = folder
        self.names = our_names(host)
        try:
            super().__init__(host, port, RunsHandler, BOUNDS)
        except OSError as e:
            raise BadInput(
                f"port {port} of {host}: wanted to listen there, found {e.strerror}; "
                "give another --port, or 0 for any that is free"
            ) from e
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"


class RunsHandler(BoundedHandler):
    server: RunsServer
    routes: ClassVar[dict[str, str]] = {
        "/": "_index",
        "/api/runs": "_rows",
        "/api/curves": "_curves",
    }

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        self._with_body = with_body
        if not is_our_name(self.headers.get("Host", ""), self.server.names):
            self._send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", b"no name of this machine\n")
            return
        site, mode = (self.headers.get(f"Sec-Fetch-{x}", "") for x in ("Site", "Mode"))
        if site not in ("", "none", "same-origin") and mode != "navigate":  # links are allowed
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"not from another site\n")
            return
        self.server.folder.asked()
        parts = urlsplit(self.path)
        if parts.path in self.routes:
            getattr(self, self.routes[parts.path])(parse_qs(parts.query))
        elif parts.path.startswith("/static/"):
            self._static(parts.path.removeprefix("/static/"))
        elif parts.path.startswith("/run/"):
            self._run(parts.path.removeprefix("/run/"))
        else:
            self._missing()

    # -- pages --
    def _index(self, query: dict[str, list[str]]) -> None:
        self._html(index(self.server.folder.url))

    def _run(self, rest: str) -> None:
        name, _, part = rest.partition("/")
        run = self.server.folder.runs.get(unquote(name))
        if run is None or part not in ("", "content", "logs"):
            self._missing()
            return
        if part == "logs":
            found = self.server.folder.logs.of(run.url)
            status = HTTPStatus.ACCEPTED if found is None else HTTPStatus.OK
            self._json(found or {"reading": True}, status)
            return
        run.wanted_s = run.now()
        if not part:
            self._html(run_page(run.name))
        elif run.digest and run.digest.report:
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", run.digest.report.encode())
        else:
            self._json({"reading": True, "problem": run.problem}, HTTPStatus.ACCEPTED)

    def _static(self, name: str) -> None:
        if name in STATIC:
            self._send(HTTPStatus.OK, f"{STATIC[name]}; charset=utf-8", asset(name).encode())
        else:
            self._missing()

    # -- numbers --
    def _rows(self, query: dict[str, list[str]]) -> None:
        folder = self.server.folder
        rows = folder.rows()
        self._json(
            {
                "url": folder.url, "runs": rows, "left_out": folder.left_out,
                "problem": folder.problem, "found": folder.found,
            }
        )  # fmt: skip

    def _curves(self, query: dict[str, list[str]]) -> None:
        metric = query.get("metric", ["loss"])[0]
        if metric not in METRICS:
            self._missing()
            return
        runs = self.server.folder.runs
        chosen = [runs[n] for n in query.get("run", [])[:MOST_CURVES] if n in runs]
        self._json({"metric": metric, "curves": [run.curve(metric) for run in chosen]})

    # -- answers --
    def _missing(self) -> None:
        self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is no such page\n")

    def _html(self, text: str) -> None:
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", text.encode())

    def _json(self, body: object, status: HTTPStatus = HTTPStatus.OK) -> None:
        text = json.dumps(finite(body), separators=(",", ":"))
        self._send(status, "application/json", text.encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        """Send a response with an ETag; a browser that has the content gets only 304."""
        tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        same = status == HTTPStatus.OK and self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if same else status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("ETag", tag)
        if not same:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self._with_body and not same:
            self.wfile.write(body)


def finite(value: Any) -> Any:
    """Return `value` for JSON: non-finite numbers become `None`, text loses control characters."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, str):
        return plain(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- pages ---------------------------------------------------------------------------------------
def index(url: str) -> str:
    """Return the page with the table of runs, which its script fills."""
    title = "Runs – spotharness"
    return render("look/pages/served_runs.html", title=title, url=url, metrics=METRICS)


def run_page(name: str) -> str:
    """Return the page of one run; its script loads the report and keeps it up to date."""
    path = quote(name, safe="")
    return render("look/pages/served_run.html", title=f"{name} – spotharness", path=path)


def serve(
    folder: RunsFolder, host: str, port: int, told: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until interrupted. `told` is called with the URL. Raise BadInput, KeyboardInterrupt."""
    server = RunsServer(folder, host, port)
    folder.start()
    try:
        told(server.url)
        server.serve_forever(poll_interval=0.5)
    finally:
        server.server_close()
        folder.close()
