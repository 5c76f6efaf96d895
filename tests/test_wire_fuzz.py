"""Whatever comes over a wire, what reads it neither breaks, nor believes it, nor keeps all of it."""

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.agent.gossip import MOST_NAMES, Gossip
from harness.agent.lines_protocol import (
    INTRODUCTION_NBYTES,
    LONGEST_NBYTES,
    SAID_NBYTES,
    Dial,
    Door,
    LinesProtocol,
    Transmit,
    first_proof,
)
from harness.clouds.aws_imds import AwsImds
from harness.clouds.azure_events import AzureScheduledEvents
from harness.clouds.gcp_metadata import GcpMetadata
from harness.clouds.metadata_protocol import Answer
from harness.clouds.provider_api import _route
from harness.core.world import BadInput
from storage.bounded_http import BoundedHandler, BoundedHTTPServer, HTTPBounds
from storage.parts import chunk_hash
from storage.peers import PeerTier

KEY = "0123456789abcdef" * 2
FIRST = first_proof(KEY, "call", "b", "a").encode()  # as the first version of the greeting had it
ANSWER = first_proof(KEY, "answer", "c", "b").encode()
ONCE = b"0" * 32
PROVES = b"<the right proof>"
RECORD = json.dumps({"member": "c", "beat": 3, "state": "in", "key": KEY}).encode()
SAID = st.one_of(
    st.binary(max_size=600),
    st.sampled_from(
        [
            b"a\n", b"a " + FIRST + b"\n", b"a 2 " + ONCE + b"\n", b"a 2 " + ONCE[1:] + b"\n", b"\n", b" \n",
            b"c 2 " + ONCE + b"\n", b"2 " + ONCE + b"\n", b"a 3 " + ONCE + b"\n", PROVES, PROVES, ONCE * 2 + b"\n",
            b"c " + ANSWER + b"\n", b"c\n", b"c " + FIRST + b"\n", RECORD + b"\n", b"@c 9 " + RECORD + b"\n",
            b"@c x {}\n", b"?c 3 3\n", b"?b 9 3\n", b"@" * 300, b"x" * 70_000, b"[" * 5000 + b"\n",
            b"@c 9 " + b"[" * 60_000 + b"\n", b"?c " + b"9" * 5000 + b" 1\n", "\u2028\u0000é\n".encode(), b"\xff\xfe\n",
        ]
    ),
)  # fmt: skip
PLAIN: Any = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
VALUES = PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(st.text(max_size=5), PLAIN, max_size=3)


def lines(pieces: list[tuple[int, bytes]]) -> None:
    """Three callers, and one member that we follow, say anything in any order."""
    p = LinesProtocol("b", 0.5, 0.0, KEY)
    p.follow({"c": Door("h", 1, KEY)}, 0.0, passing=True)
    p.tell(b'{"member": "b", "beat": 1, "key": "' + KEY.encode() + b'"}')
    (dial,) = [a for a in p.take() if isinstance(a, Dial)]
    p.connected(dial.conn, 0.0)
    conns = [dial.conn, *(p.accepted(0.0, "h") for _ in range(3))]
    proven, asked = {dial.conn}, dict[int, bytes]()  # what a caller must say
    for who, data in pieces:
        conn = conns[who % len(conns)]
        if data == PROVES:
            data = asked.get(conn, b"?") + b"\n"
            caller = p._callers.get(conn)
            if conn in asked and caller and not caller.said:
                proven.add(conn)
        p.received(conn, data, 0.1)
        for act in p.take():
            if isinstance(act, Transmit):
                assert KEY.encode() not in act.data
                if act.conn not in proven:  # a stranger is told a number, once
                    assert re.fullmatch(rb"2 [0-9a-f]{32}\n", act.data) and act.conn not in asked
                    shaken = p._callers[act.conn].handshake
                    assert shaken is not None
                    asked[act.conn] = shaken.proof("call", "b", p._callers[act.conn].name).encode()
    for caller in p._callers.values():
        assert len(caller.said) <= max(SAID_NBYTES, INTRODUCTION_NBYTES)
    assert all(len(line.buffer) <= LONGEST_NBYTES for line in p._lines.values())
    p.tick(10.0)


def gossip(said: list[bytes]) -> None:
    g = Gossip("me")
    for i, line in enumerate(said):
        name, on = g.hear(line, float(i), False)
        assert name != "me" and on.count(b"\n") <= 1
        g.learn(name or "x", line)
    assert len(g.records) <= MOST_NAMES and len(g.doubts) <= MOST_NAMES


def provider(asked: tuple[str, str, Any]) -> None:
    """What a caller with the token may say wrong is answered, and nothing else happens."""

    class Provider:
        def __getattr__(self, name: str) -> Any:
            if name == "config":
                return type("Config", (), {"offers": ()})
            return lambda *_: {}

    with contextlib.suppress(BadInput, KeyError, TypeError, ValueError):
        _route(Provider(), *asked)  # type: ignore[arg-type]


def metadata(asked: tuple[str, str, dict[str, str], bytes]) -> None:
    for service in (AwsImds("i-1"), GcpMetadata("i-1"), AzureScheduledEvents("i-1")):
        assert isinstance(service.answer(*asked), Answer)
        service.release()


PATHS = st.sampled_from(
    [
        "/", "//", "/launch", "/event", "/inject", "/terminate", "/latest/meta-data/spot/instance-action",
        "/latest/api/token", "/computeMetadata/v1/instance/?recursive=true", "/metadata/scheduledevents?api-version=x",
        "/latest/meta-data/../..", "?", "/computeMetadata/v1/instance/preempted?wait_for_change=true&timeout_sec=0",
    ]
) | st.text(max_size=40)  # fmt: skip
WORDS = st.text(st.characters(codec="ascii"), max_size=20)
HEADERS = st.dictionaries(
    st.sampled_from(
        ["x-aws-ec2-metadata-token", "x-aws-ec2-metadata-token-ttl-seconds", "metadata-flavor", "metadata"]
    ),
    WORDS | st.sampled_from(["true", "Google", "60", "-1", "9" * 400]),
)
METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE"])
WIRES: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "lines": (st.lists(st.tuples(st.integers(0, 3), SAID), max_size=8), lines),
    "gossip": (st.lists(SAID, max_size=8), gossip),
    "provider": (
        st.tuples(METHODS, PATHS, st.dictionaries(
            st.sampled_from(["attempt", "event", "offer", "command", "cwd", "env", "grace_s", "victim", "x"])
            , VALUES | st.sampled_from(["preempt", "kill", "1"]))),
        provider,
    ),
    "metadata": (st.tuples(METHODS, PATHS, HEADERS, st.binary(max_size=100)), metadata),
}  # fmt: skip


def fuzz(name: str, examples: int) -> None:
    said, check = WIRES[name]
    few = settings(
        max_examples=examples, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    few(given(said)(check))()


@pytest.mark.parametrize("name", WIRES)
def test_wires_bear_anything(name: str) -> None:
    fuzz(name, 60 if name == "provider" else 200)


# ---- over real sockets ---------------------------------------------------------------------------
class Plain(BoundedHandler):
    def do_GET(self) -> None:
        data = self.body(100) or b""
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET


HTTP = st.lists(
    st.one_of(
        st.binary(max_size=200),
        st.sampled_from(
            [
                b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\n", b"GET / HTTP/9.9\r\n", b"\r\n", b"Content-Length: 5\r\n",
                b"Content-Length: -5\r\n", b"Content-Length: 99999999999999999999\r\n", b"Expect: 100-continue\r\n",
                b"Transfer-Encoding: chunked\r\n", b"A: " + b"a" * 20_000 + b"\r\n", b"A\x00: b\r\n", b" folded\r\n",
            ]
        ),
    ),
    max_size=6,
)  # fmt: skip


def test_a_server_bears_anything() -> None:
    server = BoundedHTTPServer("127.0.0.1", 0, Plain, HTTPBounds(connections=8, head_s=1.0))
    server.serve_in_thread("plain")

    @settings(max_examples=60, derandomize=True, deadline=None, database=None)
    @given(HTTP)
    def check(pieces: list[bytes]) -> None:
        with socket.create_connection(("127.0.0.1", server.server_port), 30.0) as s, contextlib.suppress(ConnectionError):
            s.sendall(b"".join(pieces))
            s.shutdown(socket.SHUT_WR)
            while s.recv(65536):
                pass

    check()
    with socket.create_connection(("127.0.0.1", server.server_port), 30.0) as s:
        s.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert s.recv(100).startswith(b"HTTP/1.1 200")
    server.shutdown()
    server.server_close()


def test_a_peer_that_answers_anything_is_given_up() -> None:
    door = socket.create_server(("127.0.0.1", 0))
    answers: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                wire, _ = door.accept()
                with wire, contextlib.suppress(OSError):
                    wire.recv(4096)
                    wire.sendall(answers[-1])

    threading.Thread(target=serve, daemon=True).start()
    heads = st.sampled_from(
        [
            b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 403 No\r\n", b"HTTP/1.1 abc\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 97\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n" * 3,
        ]
    )  # fmt: skip

    @settings(max_examples=60, derandomize=True, deadline=None, database=None)
    @given(heads, st.binary(max_size=200))
    def check(head: bytes, body: bytes) -> None:
        answers.append(head + body)
        peer = PeerTier([door.getsockname()], "a secret", timeout_s=10.0)
        assert peer.get(f"{chunk_hash(b'x' * 100)}-100") is None and peer._gone

    check()
    door.close()
