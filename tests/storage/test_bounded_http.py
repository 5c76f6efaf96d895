"""Servers of ours under strangers: floods, silence, drips and garbage cost few connections, little
time and no file; and chunks are served to nobody who does not prove that it knows the secret."""

import contextlib
import http.client
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from storage import http_server
from storage.http_server import BoundedHandler, BoundedHTTPServer, HTTPBounds, is_in_reserve
from storage.snapshots.manifest import chunk_hash, is_chunk
from storage.tiers.folder_tier import FolderTier
from storage.tiers.peer_transport import ChunkServer, PeerTier, _PeerStream
from support.worlds import until

BOUNDS = HTTPBounds(connections=4, head_s=0.4, proven_s=60.0, request_s=0.8)
SECRET = "a secret of the run, 32 letters.."


class Echo(BoundedHandler):
    """GET /slow never ends by itself; GET /known proves who asks; POST gives the body back."""

    def do_GET(self) -> None:
        if self.path == "/known":
            self.server.trust(self.connection)
        if self.path == "/slow":
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"." * 65536)
            return
        self._say(200, b"here")

    def do_POST(self) -> None:
        data = self.body(100)
        self._say(413 if data is None else 200, data or b"")

    def _say(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def echo() -> Iterator[BoundedHTTPServer]:
    server = BoundedHTTPServer("127.0.0.1", 0, Echo, BOUNDS)
    server.serve_in_thread("echo")
    yield server
    server.shutdown()
    server.server_close()


def call(port: int, said: bytes = b"") -> socket.socket:
    s = socket.create_connection(("127.0.0.1", port), 10.0)
    s.sendall(said)
    return s


def ask(port: int, method: str = "GET", path: str = "/", body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def ends(s: socket.socket) -> bool:
    """Has the other side hung up?"""
    with s:
        try:
            while s.recv(1 << 16):
                pass
        except ConnectionError:
            pass
        return True


# ---- time ----------------------------------------------------------------------------------------
def test_one_byte_at_a_time_is_no_way_to_stay(echo) -> None:
    """Every byte comes in time, and the head never ends."""
    s, stop = call(echo.server_port, b"GET / HTTP/1.1\r\n"), threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.05):
                s.send(b"A")

    thread = threading.Thread(target=drip)
    thread.start()
    assert ends(s)
    stop.set()
    thread.join()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",  # and no second request
        b"POST / HTTP/1.1\r\nContent-Length: 50\r\n\r\nless than it said",
        b"GET /slow HTTP/1.1\r\n\r\n",
    ],
    ids=["silent", "idle", "half a body", "an answer that nobody reads in time"],
)
def test_everybodys_time_is_over_some_day(echo, said: bytes) -> None:
    assert ends(call(echo.server_port, said))
    until(lambda: not echo._visits, "its thread to end")


# ---- room ----------------------------------------------------------------------------------------
def test_a_full_house_lets_in_who_asks(echo) -> None:
    """The oldest that says nothing makes room, and there are never more threads than places."""
    before = threading.active_count()
    silent = [call(echo.server_port) for _ in range(40)]
    for _ in range(3):
        assert ask(echo.server_port) == (200, b"here")
        assert threading.active_count() - before <= 2 * BOUNDS.connections
    for s in silent:
        s.close()


def test_who_has_proven_itself_keeps_its_place_before_strangers(echo) -> None:
    known = http.client.HTTPConnection("127.0.0.1", echo.server_port, timeout=10)
    known.request("GET", "/known")
    assert known.getresponse().read() == b"here"
    silent = [call(echo.server_port) for _ in range(20)]
    for s in silent:
        assert ends(s)  # each in its time
    known.request("GET", "/")
    assert known.getresponse().read() == b"here"
    known.close()


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"GET / HTTP/1.1\r\n" + b"A: " + b"b" * 40_000, b""),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10_000, b""),
        (b"GET /" + b"a" * 40_000, b""),
        (b"\x00" * 40_000, b""),
        (b"POST / HTTP/1.1\r\nContent-Length: 101\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfff\r\n", b"413"),
    ],
)
def test_what_is_too_long_is_not_read(echo, said: bytes, answer: bytes) -> None:
    s = socket.create_connection(("127.0.0.1", echo.server_port), 10.0)
    heard = b""
    with s, contextlib.suppress(ConnectionError):
        s.sendall(said)
        while more := s.recv(65536):
            heard += more
    assert answer in heard[:20]
    assert ask(echo.server_port, "POST", "/", b"x" * 100) == (200, b"x" * 100)


# ---- descriptors ---------------------------------------------------------------------------------
def test_the_last_descriptors_are_for_our_own_files(echo) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hold: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        while not hold or not is_in_reserve(hold[-1]):
            hold.append(os.open(os.devnull, os.O_RDONLY))
        stranger = socket.socket()  # ours is the first of the reserve, theirs would be the next
        stranger.settimeout(10.0)
        stranger.connect(("127.0.0.1", echo.server_port))
        assert ends(stranger)
        with open(os.devnull, "rb"):
            pass
    finally:
        for fd in hold:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert ask(echo.server_port) == (200, b"here")


def test_without_a_descriptor_nobody_spins(echo, monkeypatch) -> None:
    """AUDIT 18: accept fails at once, and the caller is still there."""
    failed: list[float] = []
    real = http_server.ThreadingHTTPServer.get_request

    def counted(self: BoundedHTTPServer) -> object:
        try:
            return real(self)
        except OSError:
            failed.append(time.monotonic())
            raise

    monkeypatch.setattr(http_server.ThreadingHTTPServer, "get_request", counted)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    callers, hold = [socket.socket() for _ in range(20)], []

    def deaf() -> bool:
        """What other tests left in this process may be closed meanwhile, and a caller served."""
        with contextlib.suppress(OSError):
            while True:
                hold.append(os.open(os.devnull, os.O_RDONLY))
        if len(failed) < 4 and called and time.monotonic() - called[-1] < 4 * http_server.DEAF_S:
            return False
        if len(failed) < 4 and len(called) < len(callers):
            callers[len(called)].connect(("127.0.0.1", echo.server_port))
            called.append(time.monotonic())
        return len(failed) >= 4

    called: list[float] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        until(deaf, "four looks")
        assert failed[3] - failed[0] >= 2 * http_server.DEAF_S
    finally:
        for fd in hold:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for caller in callers:
            caller.close()
    assert ask(echo.server_port) == (200, b"here")


# ---- chunks --------------------------------------------------------------------------------------
DATA = b"some bytes of a snapshot"
ID = f"{chunk_hash(DATA)}-{len(DATA)}"


@pytest.fixture
def chunks(tmp_path) -> Iterator[ChunkServer]:
    tier = FolderTier("memory", tmp_path, 1 << 20)
    tier.put({ID: DATA})
    with contextlib.closing(ChunkServer(lambda: [tier], "127.0.0.1", SECRET, keep=tier)) as server:
        yield server


class Wiretap:
    """Between a peer and a server: hears every byte."""

    def __init__(self, port: int):
        self.heard = {"asked": b"", "answered": b""}
        self._door, self._port = socket.create_server(("127.0.0.1", 0)), port
        self.at = self._door.getsockname()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._door.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                for kind, a, b in (("asked", near, far), ("answered", far, near)):
                    threading.Thread(target=self._copy, args=(kind, a, b), daemon=True).start()

    def _copy(self, kind: str, a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(65536):
                self.heard[kind] += data
                b.sendall(data)
        for s in (a, b):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._door.close()


def test_the_secret_never_travels_and_what_was_overheard_opens_nothing(chunks) -> None:
    with contextlib.closing(Wiretap(chunks.port)) as tap:
        tier = PeerTier([tap.at], SECRET, timeout_s=30.0)
        assert tier.get(ID) == DATA and tier.put({ID: DATA}) == 1
        heard = b"".join(tap.heard.values())
        assert DATA in heard and SECRET.encode() not in heard and b"HMAC " in heard
        requests = tap.heard["asked"]
    hello = requests.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    for said in (requests, hello + requests, requests.removeprefix(hello)):
        with call(chunks.port, said) as again:
            answers = b""
            with contextlib.suppress(ConnectionError):
                while more := again.recv(65536):
                    answers += more
        assert DATA not in answers and b"403" in answers


def test_each_request_is_proven_by_itself(chunks) -> None:
    wire = _PeerStream(("127.0.0.1", chunks.port), SECRET, 5.0)
    path = f"/chunk/{ID}"
    right = {"Authorization": f"HMAC {wire._handshake.next_proof('GET', path)}"}
    assert wire._request("GET", path, 1000, None, right) == (200, DATA)
    with contextlib.suppress(ConnectionError, http.client.HTTPException):
        assert wire._request("GET", path, 1000, None, right)[0] == 403  # the same once more
    wire.close()


@pytest.mark.parametrize("word", ["", "Bearer " + SECRET, "HMAC ", "HMAC " + "0" * 64, "HMAC é", "x" * 5000])
def test_without_a_proof_no_body_is_read(chunks, word: str) -> None:
    """However much of it is announced."""
    said = f"PUT /chunk/{ID} HTTP/1.1\r\nContent-Length: 9999999999\r\nAuthorization: {word}\r\n\r\n"
    with call(chunks.port, said.encode("latin-1")) as s:
        assert b" 403 " in s.recv(100)


@pytest.mark.parametrize("number", ["", "x", "0" * 31, "0" * 33, "g" * 32, "../../" + "0" * 26, "0" * 5000])
def test_a_greeting_without_a_number_is_none(chunks, number: str) -> None:
    assert ask(chunks.port, path=f"/hello/{number}")[0] == 403


def test_a_server_that_does_not_know_the_secret_is_told_nothing(tmp_path) -> None:
    tier = FolderTier("memory", tmp_path, 1 << 20)
    with (
        contextlib.closing(ChunkServer(lambda: [tier], "127.0.0.1", "another", keep=tier)) as other,
        contextlib.closing(Wiretap(other.port)) as tap,
    ):
        peer = PeerTier([tap.at], SECRET, timeout_s=30.0)
        assert peer.put({ID: DATA}) == 0 and peer._gone == {tap.at}
        assert DATA not in tap.heard["asked"]
    assert not tier.list()


def test_a_kept_connection_that_was_closed_is_made_again(chunks) -> None:
    peer = PeerTier([("127.0.0.1", chunks.port)], SECRET, timeout_s=30.0)
    assert peer.get(ID) == DATA
    with chunks._server._lock:
        for _, visit in list(chunks._server._visits.values()):
            chunks._server._send_away(visit)
    until(lambda: not chunks._server._visits, "its thread to end")
    assert peer.get(ID) == DATA and not peer._gone


def test_a_peer_whose_greeting_trickles_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        stop = threading.Event()

        def answer() -> None:
            wire, _ = door.accept()
            with wire, contextlib.suppress(OSError):
                wire.sendall(b"HTTP/1.1 200 OK\r\nA: ")
                while not stop.wait(0.05):
                    wire.sendall(b"b")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert PeerTier([door.getsockname()], SECRET, timeout_s=0.3).get(ID) is None
        stop.set()
        thread.join()


def test_many_peers_at_once_are_all_served(chunks) -> None:
    """AUDIT 18: with a backlog of 5, 57 of 64 waited for more than a second."""
    found: list[bool] = []

    def peer() -> None:
        data = PeerTier([("127.0.0.1", chunks.port)], SECRET, timeout_s=10.0).get(ID)
        found.append(data is not None and is_chunk(ID, data))

    peers = [threading.Thread(target=peer) for _ in range(64)]
    for one in peers:
        one.start()
    for one in peers:
        one.join()
    assert found == [True] * 64


def test_a_chunk_that_nobody_can_hold_is_not_read(chunks) -> None:
    wire = _PeerStream(("127.0.0.1", chunks.port), SECRET, 5.0)
    huge = f"{'0' * 32}-{1 << 39}"
    path = f"/chunk/{huge}"
    said = f"PUT {path} HTTP/1.1\r\nContent-Length: {1 << 39}\r\nAuthorization: HMAC {wire._handshake.next_proof('PUT', path)}\r\n\r\n"
    assert wire._connection.sock is not None
    wire._connection.sock.sendall(said.encode())
    assert b" 400 " in wire._connection.sock.recv(100)
    wire.close()
