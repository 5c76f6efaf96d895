"""Exchange of chunks with other nodes that know the run's secret.

The secret is never sent. The caller sends a number that is used once and receives one; from then on
every request on that connection carries an HMAC of both numbers, of the count of requests before
it, and of what it requests, so that overheard traffic is useless. A server proves the same to its
caller before the first request.

    GET /hello/<number>     200 and `<number> <HMAC>`; no secret is needed
    GET /chunk/<id>         200 and the bytes, 404 if no tier has them
    PUT /chunk/<id>         201 filed, 400 if the bytes do not have that hash, 404 if nothing is
                            kept here, 507 if there is no room
    GET, PUT /data/<id>     the same, of chunks of data, which lie in a cache of their own
    403                     without the HMAC, and the connection is closed before a body is read
    503                     too much is on its way already

If both sides are configured as `sealed`, chunks travel encrypted; their names and sizes and the
status of answers do not. Sides with different settings do not communicate.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import http.client
import importlib.util
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.http_server import BoundedHandler, BoundedHTTPServer, HTTPBounds
from storage.snapshots.manifest import CHUNK_ID, is_chunk

if TYPE_CHECKING:
    from storage.tiers.tiers import Tier

# Proofs that both ends of a connection know a secret, which is never sent. Pure.

NUMBER = re.compile(r"[0-9a-f]{32}")


def sign(secret: str, *words: object) -> str:
    """Return the HMAC-SHA256 of these words, in hex. They are joined by spaces, so no two different
    lists of words may join to the same text."""
    text = " ".join(map(str, words)).encode(errors="replace")
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


def proofs_equal(found: str, wanted: str) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(found.encode(errors="replace"), wanted.encode())


@dataclass
class Handshake:
    """The secret and the two numbers of one connection: the caller's and the callee's."""

    secret: str
    theirs: str
    ours: str

    def proof(self, *words: object) -> str:
        """Return the proof that its sender knows the secret and means these words on this
        connection."""
        return sign(self.secret, *words, self.theirs, self.ours)


# Encryption of the traffic between two peers, under a key that both derive and neither sends.

TAG_NBYTES = 16  # bytes that sealing adds to a message


class WrongSeal(ConnectionError):
    """The message was sealed by somebody else or for something else, or was changed on its way."""


def can_seal() -> bool:
    """Return whether the package `cryptography` is installed."""
    return importlib.util.find_spec("cryptography") is not None


class Sealer:
    """Encrypts and decrypts the messages of one connection. The key follows from `secret` and from
    `numbers`, which both sides made for this connection alone, so no key is used twice."""

    def __init__(self, secret: str, *numbers: str):
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        text = " ".join(("seal", *numbers)).encode()
        self._cipher = AESGCM(hmac.new(secret.encode(), text, hashlib.sha256).digest())

    def seal(self, who: str, count: int, data: bytes | memoryview) -> bytes:
        """Return `data` encrypted. `who` ("ask" or "serve") is the sender and `count` the number of
        the request; no pair of them may be used twice."""
        return self._cipher.encrypt(_nonce(who, count), data, None)

    def open(self, who: str, count: int, data: bytes) -> bytes:
        """Return the data that was sealed with the same `who` and `count`. Raises WrongSeal."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(_nonce(who, count), data, None)
        except InvalidTag:
            raise WrongSeal(f"{len(data)} bytes have no seal of this connection's") from None


def _nonce(who: str, count: int) -> bytes:
    return who.encode()[:1] + count.to_bytes(11, "big")


PEER_TIMEOUT_S = 2.0  # seconds to connect, and for each read; a slower peer is not used again
BOUNDS = HTTPBounds(connections=128)  # neighbours of a big world, with several threads each
AT_ONCE = 16  # chunks in memory at once, on their way to or from callers
WAIT_S = 1.0  # seconds to wait for one of those places
MOST_CHUNK_NBYTES = 64 << 20  # limit for an accepted chunk; ours have 4 MiB
HELLO_NBYTES = 256  # limit for an answer to /hello
CHUNK, DATA = "chunk", "data"  # kinds of chunks: of snapshots, and of training data
PATH = re.compile(rf"/({CHUNK}|{DATA})/(.*)")


def _number() -> str:
    return secrets.token_hex(16)


@dataclass
class _Handshake(Handshake):
    """A handshake that also counts and seals. `asked`: requests so far."""

    sealed: bool = False
    asked: int = 0

    @functools.cached_property
    def _sealer(self) -> Sealer:
        return Sealer(self.secret, self.theirs, self.ours)

    @property
    def more_nbytes(self) -> int:
        """Bytes that sealing adds to a chunk in transit."""
        return TAG_NBYTES if self.sealed else 0

    def packed(self, who: str, data: bytes | memoryview) -> bytes | memoryview:
        """Return a chunk of the newest request as it is sent; `who`: "ask" or "serve"."""
        return self._sealer.seal(who, self.asked, data) if self.sealed else data

    def unpacked(self, who: str, data: bytes) -> bytes:
        """Return the chunk that `packed` made. Raises WrongSeal."""
        return self._sealer.open(who, self.asked, data) if self.sealed else data

    def server_proof(self) -> str:
        """Return the proof that the server knows the secret and was just asked."""
        return self.proof("serve sealed" if self.sealed else "serve")

    def next_proof(self, method: str, path: str) -> str:
        """Count one more request and return the proof that covers it alone."""
        self.asked += 1
        return self.proof("ask", self.asked, method, path)


# ---- peers ---------------------------------------------------------------------------------------
class ChunkServer:
    """A server of the chunks in this node's tiers for peers that know the run's `secret`. It stores
    what they leave here in `keep`, and is bound to `addr` only.

    `tiers` is called for each request, since what is staged comes and goes; so is `data`, which
    returns tiers of chunks of data, the first of which stores new ones.
    """

    def __init__(
        self,
        tiers: Callable[[], Sequence[Tier]],
        addr: str,
        secret: str,
        keep: Tier | None = None,
        bounds: HTTPBounds = BOUNDS,
        sealed: bool = False,
        data: Callable[[], Sequence[Tier]] = tuple,
    ):
        if not secret:
            raise ValueError("a chunk server needs a secret; found an empty one")
        places = threading.BoundedSemaphore(AT_ONCE)

        class ChunkHandler(BoundedHandler):
            handshake: _Handshake | None = None

            def do_GET(self) -> None:
                if self.path.startswith("/hello/"):
                    self._greet(self.path.removeprefix("/hello/"))
                elif (asked := self._asked()) is not None:
                    kind, id = asked
                    with self._place() as there:
                        shelves = tiers if kind == CHUNK else data
                        found = _first(shelves(), id) if id and there else None
                        if there and found is None:
                            self._answer(404)
                        elif there:
                            self._answer(200, self._shaken().packed("serve", found or b""))

            def do_PUT(self) -> None:
                if (asked := self._asked()) is None:
                    return
                kind, id = asked
                shelf = keep if kind == CHUNK else next(iter(data()), None)
                nbytes = int(id.rpartition("-")[2]) if id else 0
                said = self.headers.get("Content-Length", "")
                more = self._shaken().more_nbytes
                if shelf is None or said != str(nbytes + more) or nbytes > MOST_CHUNK_NBYTES:
                    self.close_connection = True  # do not read what cannot be used
                    self._answer(404 if shelf is None else 400)
                    return
                with self._place() as there:
                    body = self._read(nbytes + more) if there else None
                    if body is not None and is_chunk(id, body):
                        self._answer(201 if shelf.put({id: body}) else 507)
                    elif there:
                        self.close_connection = True
                        self._answer(400)

            @contextlib.contextmanager
            def _place(self) -> Iterator[bool]:
                """Reserve memory for one chunk. Yields False, after a 503, if none is free."""
                if not places.acquire(timeout=WAIT_S):
                    self.close_connection = True
                    self._answer(503)
                    yield False
                    return
                try:
                    yield True
                finally:
                    places.release()

            def _read(self, nbytes: int) -> bytes | None:
                data = self.body(nbytes)
                with contextlib.suppress(WrongSeal):
                    return None if data is None else self._shaken().unpacked("ask", data)
                return None

            def _shaken(self) -> _Handshake:
                assert self.handshake is not None, "`_asked` refuses who has not greeted"
                return self.handshake

            def _greet(self, number: str) -> None:
                if not NUMBER.fullmatch(number) or self.handshake is not None:
                    self.close_connection = True
                    self._answer(403)
                    return
                self.handshake = _Handshake(secret, number, _number(), sealed)
                said = f"{self.handshake.ours} {self.handshake.server_proof()}"
                self._answer(200, said.encode())

            def _asked(self) -> tuple[str, str] | None:
                """Return kind and name of the requested chunk, "" for an invalid name; None if the
                request was refused and answered."""
                wanted = self.handshake and self.handshake.next_proof(self.command, self.path)
                said = self.headers.get("Authorization", "")
                if not wanted or not proofs_equal(said, f"HMAC {wanted}"):
                    self.close_connection = True
                    self._answer(403)
                    return None
                self.server.trust(self.connection)
                kind, id = found.groups() if (found := PATH.fullmatch(self.path)) else (CHUNK, "")
                return kind, id if CHUNK_ID.fullmatch(id) else ""

            def _answer(self, code: int, data: bytes | memoryview = b"") -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = BoundedHTTPServer(addr, 0, ChunkHandler, bounds)
        self.addr, self.port = addr, self._server.server_port
        self._thread = self._server.serve_in_thread("chunk-server")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


def _first(tiers: Sequence[Tier], id: str) -> bytes | memoryview | None:
    return next((data for tier in tiers if (data := tier.get(id)) is not None), None)


class _PeerStream:
    """A connection to a peer that has proven that it knows the secret."""

    def __init__(self, peer: tuple[str, int], secret: str, timeout_s: float, sealed: bool = False):
        """Connect and shake hands. Raises OSError, http.client.HTTPException."""
        self._peer, self._timeout_s = peer, timeout_s
        self._connection = http.client.HTTPConnection(*peer, timeout=timeout_s)
        self.used = 0  # answered requests
        mine = _number()
        # a response head that trickles in would never time out
        late = threading.Timer(2 * timeout_s, self._break_off)
        late.daemon = True
        late.start()
        try:
            status, said = self._request("GET", f"/hello/{mine}", HELLO_NBYTES)
            number, _, proof = said.decode("latin-1").partition(" ")
            self._handshake = _Handshake(secret, mine, number, sealed)
            if status != 200 or not proofs_equal(proof, self._handshake.server_proof()):
                raise ConnectionError(
                    f"{peer} is of another run, or was not told the same of encryption"
                )
        except BaseException:
            self.close()
            raise
        finally:
            late.cancel()

    def _break_off(self) -> None:
        if (wire := self._connection.sock) is not None:
            with contextlib.suppress(OSError):  # it has just been closed
                wire.shutdown(socket.SHUT_RDWR)

    def ask(
        self, method: str, kind: str, id: str, body: bytes | memoryview | None
    ) -> tuple[int, bytes]:
        """Send a request; return status and content. Raises OSError, http.client.HTTPException."""
        path = f"/{kind}/{id}"
        headers = {"Authorization": f"HMAC {self._handshake.next_proof(method, path)}"}
        most = int(id.rpartition("-")[2]) + self._handshake.more_nbytes
        packed = None if body is None else self._handshake.packed("ask", body)
        status, found = self._request(method, path, most, packed, headers)
        if status == 403:
            raise ConnectionError(f"{self._peer} is of another run")
        if status == 200:
            found = self._handshake.unpacked("serve", found)
        self.used += 1
        return status, found

    def _request(
        self,
        method: str,
        path: str,
        most_nbytes: int,
        body: bytes | memoryview | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        # deadline for the whole answer, since a trickle would pass the timeout of each read
        deadline_s = time.monotonic() + 2 * self._timeout_s
        data = bytearray()
        self._connection.request(method, path, body=body, headers=dict(headers or {}))
        response = self._connection.getresponse()
        while block := response.read1(1 << 20):
            data += block
            if time.monotonic() > deadline_s or len(data) > most_nbytes:
                raise TimeoutError(f"{self._peer} is too slow, or sends too much")
        response.read()  # returns nothing, but makes the connection ready for the next request
        return response.status, bytes(data)

    def close(self) -> None:
        self._connection.close()


class PeerTier:
    """Chunks that other nodes hold, read from their `ChunkServer`s at (address, port). A peer that
    fails or is slow once is not used again. Chunks with an old hash, which proves nothing about
    bytes from others, are not requested."""

    name = "peer"

    def __init__(
        self,
        peers: Sequence[tuple[str, int]],
        secret: str,
        timeout_s: float = PEER_TIMEOUT_S,
        sealed: bool = False,
        holders: Callable[[str], Iterable[tuple[str, int]]] | None = None,
        keeper: Callable[[str], tuple[str, int] | None] | None = None,
        kind: str = CHUNK,
    ):
        """Configure the peers. `holders`: the peers to ask for a chunk, in order; None: all of
        `peers`. `keeper`: the peer to leave a chunk with; None: the first of `peers`. `kind`: CHUNK
        or DATA."""
        self._peers, self._secret, self._timeout_s = list(peers), secret, timeout_s
        self._sealed, self._holders = sealed, holders or (lambda id: self._peers)
        self._keeper, self._kind = keeper or (lambda id: next(iter(self._peers), None)), kind
        self._gone: set[tuple[str, int]] = set()
        self._local = threading.local()  # open connections, one per thread and peer

    def get(self, id: str) -> bytes | None:
        if not CHUNK_ID.fullmatch(id):
            return None
        for peer in self._holders(id):
            if (
                peer not in self._gone
                and (answer := self._ask(peer, "GET", id)) is not None
                and answer[0] == 200
            ):
                return answer[1]
        return None

    def put(self, chunks: Mapping[str, bytes | memoryview]) -> int:
        """Leave each chunk with its keeper. Stops at the first that is not accepted."""
        for done, (id, data) in enumerate(chunks.items()):
            keeper = self._keeper(id)
            if keeper is None or keeper in self._gone:
                return done
            answer = self._ask(keeper, "PUT", id, data)
            if answer is None or answer[0] != 201:
                return done
        return len(chunks)

    def drop(self, id: str) -> None:
        """Ignore the call: a peer that sent wrong bytes notices when it reads them itself."""

    def _ask(
        self, peer: tuple[str, int], method: str, id: str, body: bytes | memoryview | None = None
    ) -> tuple[int, bytes] | None:
        """Return status and content. Returns None, and never uses the peer again, if it is gone,
        slow, or of another run. A kept connection may have been closed meanwhile; then a new one is
        tried."""
        kept: dict[tuple[str, int], _PeerStream] = self._local.__dict__.setdefault("kept", {})
        while True:
            wire = kept.pop(peer, None)
            is_old = wire is not None and wire.used > 0
            try:
                wire = wire or _PeerStream(peer, self._secret, self._timeout_s, self._sealed)
                answer = wire.ask(method, self._kind, id, body)
            except TimeoutError:
                is_old = False
            except (OSError, http.client.HTTPException):
                pass
            else:
                kept[peer] = wire
                return answer
            if wire is not None:
                wire.close()
            if not is_old:
                self._gone.add(peer)
                return None
