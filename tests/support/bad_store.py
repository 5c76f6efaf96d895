"""A store over HTTP that answers some requests badly: never, at 20 B/s, by half, or twice.

`Gateway` wraps the application that `buckets.moto` serves; each bucket may have a `Misbehaviour`,
which begins when it is asked to.
"""

from __future__ import annotations

import io
import math
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
RUN = "runs/r"  # in each bucket
NODE = "node"  # the access key whose requests are answered badly
DRIP_B, DRIP_S = 2, 0.1  # 20 B/s
AGAIN_S = 1.0  # after the answer, a write is delivered again
# so many requests are answered badly; a second try is another way to the bucket
TIMES = {"hang": 1, "drip": 1, "half": 3, "twice": math.inf}
WRITES = ("PUT", "DELETE", "POST")


@dataclass(frozen=True)
class Call:
    """A kind of request. `what`: the first two folders of its key, without names of one node or
    one time. A listing is the method LIST."""

    method: str
    what: str

    def __str__(self) -> str:
        return f"{self.method} {self.what}"


def call_of(environ: dict[str, Any]) -> Call:
    path, _, query = environ["RAW_URI"].partition("?")
    prefix = urllib.parse.parse_qs(query).get("prefix")
    key = prefix[0] if prefix else urllib.parse.unquote(path).split("/", 2)[-1]
    words = key.removeprefix(RUN).strip("/").split("/")
    kinds = [re.sub(r"-[0-9a-f]+(\.\w+)?$", "", word) for word in words[:2]]
    known = [kind for kind in kinds if not re.search(r"\d{6}|m\d{4}", kind)]
    if words[-1].startswith("list-"):
        known.append("list")
    return Call("LIST" if prefix else environ["REQUEST_METHOD"], "/".join(filter(None, known)))


@dataclass
class Misbehaviour:
    """`how` requests of one kind are answered from `begin` on. `every`: all of them, whatever TIMES
    says. No call: any request."""

    how: str
    call: Call | None
    every: bool = False
    begin: threading.Event = field(default_factory=threading.Event)
    end: threading.Event = field(default_factory=threading.Event)
    met: int = 0  # requests answered badly
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def meets(self, call: Call) -> bool:
        if not self.begin.is_set() or self.call not in (None, call):
            return False
        with self._lock:
            if self.met >= TIMES[self.how] and not self.every:
                return False
            self.met += 1
        return True

    def answer(self, environ: dict[str, Any], start: Callable[..., Any], inner: App) -> Iterable[bytes]:
        if self.how == "hang":
            self.end.wait(180)
            raise ConnectionAbortedError
        sent = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, headers, body = answer_of(inner, environ, sent)
        if self.how == "twice":
            again = threading.Timer(AGAIN_S, answer_of, (inner, environ, sent))
            again.daemon = True
            again.start()
        elif self.how == "half" and environ["REQUEST_METHOD"] == "GET" and len(body) > 1:
            body = body[: len(body) // 2]  # and nothing tells that more is missing
        else:
            self._on_the_line(environ["werkzeug.socket"], as_bytes(status, headers, body))
        start(status, [*headers, ("Content-Length", str(len(body)))])
        return [body]

    def _on_the_line(self, line: socket.socket, raw: bytes) -> None:
        """Send slowly, or half of it, and close."""
        if self.how == "half":
            line.sendall(raw[: len(raw) // 2])
        else:
            for i in range(0, len(raw), DRIP_B):
                if self.end.is_set():
                    break
                line.sendall(raw[i : i + DRIP_B])
                time.sleep(DRIP_S)
        line.shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError


def answer_of(
    inner: App, environ: dict[str, Any], sent: bytes
) -> tuple[str, list[tuple[str, str]], bytes]:
    """Return the status, the headers without the length, and the body of an answer."""
    head: list[Any] = []
    fresh = {**environ, "wsgi.input": io.BytesIO(sent), "CONTENT_LENGTH": str(len(sent))}
    body = b"".join(inner(fresh, lambda status, headers, *_: head.extend((status, headers))))
    return head[0], [h for h in head[1] if h[0].lower() != "content-length"], body


def as_bytes(status: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{k}: {v}" for k, v in headers)]
    lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode() + body


class Gateway:
    """Misbehaviours by bucket, and the calls of nodes by bucket and when."""

    def __init__(self) -> None:
        self.of: dict[str, Misbehaviour] = {}
        self.seen: list[tuple[float, str, Call]] = []

    def around(self, inner: App) -> App:
        def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            bucket = environ["RAW_URI"].lstrip("/").partition("/")[0].partition("?")[0]
            if f"Credential={NODE}/" in environ.get("HTTP_AUTHORIZATION", ""):
                call = call_of(environ)
                self.seen.append((time.monotonic(), bucket, call))
                bad = self.of.get(bucket)
                if bad is not None and bad.meets(call):
                    return bad.answer(environ, start, inner)
            return inner(environ, start)

        return app
