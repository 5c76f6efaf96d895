"""A receiver of alerts on loopback: real HTTP, and what it was sent. For tests and drills."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from storage.bounded_http import BoundedHandler, BoundedHTTPServer

MOST_BODY_NBYTES = 1 << 20
AlertBody = dict[str, Any]


@dataclass
class AlertReceiver:
    """Use it with `with`. `url` is where it listens then, with something in it that looks like a
    secret. `answers`: statuses of the next requests; 200 after them."""

    url: str = ""
    got: list[AlertBody] = field(default_factory=list)  # bodies that were answered with 2xx
    asked: list[dict[str, str]] = field(default_factory=list)  # headers of all
    answers: list[int] = field(default_factory=list)

    def rules(self) -> Counter[str]:
        """How often each rule's alert was taken."""
        return Counter(str(body["rule"]) for body in self.got)

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """The status to answer with."""
        with self._lock:
            status = self.answers.pop(0) if self.answers else 200
            self.asked.append({**headers, "path": path})
            if status < 300:
                self.got.append(json.loads(body))
        return status

    def __enter__(self) -> AlertReceiver:
        receiver, self._lock = self, threading.Lock()

        class ReceiverHandler(BoundedHandler):
            def do_POST(self) -> None:
                body = self.body(MOST_BODY_NBYTES)
                if body is None:
                    self.send_error(413)
                    return
                status = receiver.take(self.path, dict(self.headers.items()), body)
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

        self._server = BoundedHTTPServer("127.0.0.1", 0, ReceiverHandler)
        port = self._server.server_port
        self.url = f"http://127.0.0.1:{port}/hook/T0KEN-of-mine?key=S3CRET"
        self._server.serve_in_thread("receiver")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
