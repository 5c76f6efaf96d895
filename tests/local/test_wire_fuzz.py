"""Whatever comes over a wire, what reads it neither breaks, nor believes it, nor keeps all of it."""

import contextlib
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.http_server import BoundedHandler, BoundedHTTPServer, HTTPBounds
from storage.snapshots.manifest import chunk_hash
from storage.tiers.peer_transport import PeerTier
from support.wires import WIRES, fuzz


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
