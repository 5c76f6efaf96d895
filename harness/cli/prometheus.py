"""`--prometheus [HOST:]PORT`: an HTTP endpoint for scrapes, on loopback unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from harness.core.exposition import CONTENT_TYPE
from harness.core.world import BadInput
from storage.bounded_http import (
    BoundedHandler,
    BoundedHTTPServer,
    HTTPBounds,
    is_our_name,
    our_names,
)

BOUNDS = HTTPBounds(connections=8, request_s=10.0)  # a scraper or two


def check_address(asked: str) -> None:
    """Before anything is launched. Raises BadInput if the address cannot be had now."""
    with exposing(asked, str):
        pass


@contextmanager
def exposing(asked: str, text: Callable[[], str]) -> Iterator[str]:
    """Answer scrapes with `text()` while entered; gives the URL. `asked`: `9100`, `0.0.0.0:9100`,
    `[::1]:9100` (`common.prometheus_address`); "": nothing. Raises BadInput if it cannot be had."""
    if not asked:
        yield ""
        return
    name, _, port = asked.rpartition(":")
    host = name.removeprefix("[").removesuffix("]") or "127.0.0.1"

    names = our_names(host)

    class Scrape(BoundedHandler):
        def do_GET(self) -> None:
            if not is_our_name(self.headers.get("Host", ""), names):  # a page that rebinds its name
                self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "ask by address or by our own name")
                return
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "wanted /metrics")
                return
            body = text().encode(errors="replace")  # names in a bucket may be broken
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    try:
        server = BoundedHTTPServer(host, int(port), Scrape, BOUNDS)
    except OSError as e:
        raise BadInput(f"--prometheus {asked}: {e.strerror}; name another address or port") from e
    server.serve_in_thread("prometheus")
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        server.server_close()
