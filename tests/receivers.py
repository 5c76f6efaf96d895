"""A receiver of webhooks on loopback: real HTTP, and what it was sent."""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Receiver:
    url: str
    got: list[dict] = field(default_factory=list)  # bodies that were answered with 2xx
    asked: list[dict] = field(default_factory=list)  # headers of all
    answers: list[int] = field(default_factory=list)  # statuses of the next ones; then 200

    def rules(self) -> Counter[str]:
        return Counter(body["rule"] for body in self.got)


@contextmanager
def receiver():
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                status = made.answers.pop(0) if made.answers else 200
                made.asked.append({**self.headers, "path": self.path})
                if status < 300:
                    made.got.append(body)
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Receiver(f"http://127.0.0.1:{server.server_port}/hook/T0KEN-of-mine?key=S3CRET")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
