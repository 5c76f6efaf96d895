"""All runs of a folder in a browser: `harness serve`. A small HTTP server that only reads.

It listens on loopback unless it is asked to do otherwise, and answers only to names of this machine
or addresses: a page from elsewhere that makes its own name point here (DNS rebinding) gets nothing.
There is no form, no cookie, no path to a file: what a request names is looked up among what is
there. Nothing from a bucket is markup: pages escape it, and their policy runs no script but ours.

    /                    the table of runs and their curves
    /run/NAME            one run: `harness report`, kept up to date
    /run/NAME/content    its content alone
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
from harness.views.page import THEME_BUTTON, TIP, document
from harness.views.page_html import asset
from harness.views.plots import esc
from harness.views.serve_runs import METRICS, RunsFolder
from storage.bounded_http import (
    BoundedHandler,
    BoundedHTTPServer,
    HTTPBounds,
    is_our_name,
    our_names,
)
from storage.text import plain

LOOPBACK = "127.0.0.1"
BOUNDS = HTTPBounds(connections=32)  # browsers that are left out try again
MOST_CURVES = 40  # in one request
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


# ---- who may ask ---------------------------------------------------------------------------------
def checked_host(host: str, anyone: bool) -> str:
    """The address to listen on. Raises BadInput unless it is this machine's own, or `anyone`."""
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
    """One thread for each connection, up to a bound."""

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
        if site not in ("", "none", "same-origin") and mode != "navigate":  # links may lead here
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
        if run is None or part not in ("", "content"):
            self._missing()
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
        """With a tag, so that a browser that has it already is told so in a few bytes."""
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
    """JSON has no NaN and no infinity; and what others wrote is told without control characters."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, str):
        return plain(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- pages ---------------------------------------------------------------------------------------
def _styles(*names: str) -> str:
    return "".join(f'<link rel="stylesheet" href="/static/{name}">' for name in names)


def _scripts(*names: str) -> str:
    return "".join(f'<script src="/static/{name}" defer></script>' for name in names)


def index(url: str) -> str:
    """The table of runs; the script fills it."""
    metrics = "".join(f"<option>{esc(m)}</option>" for m in METRICS)
    axes = "".join(f"<option>{a}</option>" for a in ("step", "tokens", "hours", "dollars"))
    body = (
        f"<main class=wide><header><h1>Runs</h1>{THEME_BUTTON}<p class=sub>{esc(url)}</p>"
        '<p id="problem" class=problem hidden></p></header>'
        '<section id="curves" hidden><h2>Curves</h2><div class=choices>'
        f'<label>y <select id="metric">{metrics}</select></label>'
        f'<label>x <select id="axis">{axes}</select></label>'
        '<label><input type="checkbox" id="log"> log y</label>'
        '<label>smooth <input type="range" id="smooth" min="0" max="100" value="0"></label></div>'
        '<div id="chart"></div><div id="keys" class=legend></div></section>'
        '<section><div class=choices><label>find <input id="find" type="search" '
        'autocomplete="off"></label><span id="count" class=note></span></div>'
        '<div class=scroll><table id="runs"><thead></thead><tbody></tbody></table></div></section>'
        f"<footer>read only · read from the buckets as they are</footer></main>{TIP}"
    )
    head = _styles("page.css", "serve.css") + _scripts("page.js", "serve.js")
    return document("Runs – spotharness", head, body)


def run_page(name: str) -> str:
    """One run; the script puts the report there and keeps it up to date."""
    body = (
        '<div class=back><a href="/">← all runs</a><span id="live"></span></div>'
        f'<main id="report" data-run="{esc(quote(name, safe=""))}"><p class=note>reading the run …'
        f"</p></main>{TIP}"
    )
    head = _styles("page.css", "serve.css") + _scripts("page.js", "serve_run.js")
    return document(f"{name} – spotharness", head, body)


def serve(
    folder: RunsFolder, host: str, port: int, told: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until interrupted. `told` gets the page's URL. Raises BadInput, KeyboardInterrupt."""
    server = RunsServer(folder, host, port)
    folder.start()
    try:
        told(server.url)
        server.serve_forever(poll_interval=0.5)
    finally:
        server.server_close()
        folder.close()
