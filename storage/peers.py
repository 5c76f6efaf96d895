"""Chunks served to, and read from, other nodes."""

from __future__ import annotations

import hmac
import http.client
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from storage.chunks import PEER_CHUNK_ID, is_chunk

if TYPE_CHECKING:
    from storage.tiers import Tier

PEER_TIMEOUT_S = 2.0  # connect, and each read from a peer; a slower one is not asked again


# ---- peers ---------------------------------------------------------------------------------------
class ChunkServer:
    """Serves chunks that this node's tiers hold to peers that know the run's `secret`, and keeps in
    `keep` what they leave here.

    GET /chunk/<id> with `Authorization: Bearer <secret>`: 200 and the bytes, 404 if no tier has
    them, 403 without the secret. PUT: 201 filed, 400 if the bytes do not have that hash, 404 if
    nothing is kept here, 507 if there is no room. Bound to `addr` only. `tiers` is asked for each
    request, since what is staged comes and goes.
    """

    def __init__(
        self,
        tiers: Callable[[], Sequence[Tier]],
        addr: str,
        secret: str,
        keep: Tier | None = None,
        timeout_s: float = 10.0,
    ):
        if not secret:
            raise ValueError("a chunk server needs a secret; found an empty one")
        expected = f"Bearer {secret}"

        class ChunkHandler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = timeout_s  # of a silent peer

            def do_GET(self) -> None:
                id = self._id()
                found = _first(tiers(), id) if id else None
                if id is not None:
                    self._answer(404 if found is None else 200, b"" if found is None else found)

            def do_PUT(self) -> None:
                id, nbytes = self._id(), int(self.headers.get("Content-Length", "0"))
                if id is None:
                    return
                if keep is None or not id or nbytes != int(id.rpartition("-")[2]):
                    self.close_connection = True  # we do not read what we cannot use
                    self._answer(404 if keep is None else 400)
                    return
                data = self.rfile.read(nbytes)
                self._answer(
                    400 if not is_chunk(id, data) else 201 if keep.put({id: data}) else 507
                )

            def _id(self) -> str | None:
                """The chunk asked for, "" if that is none; None: refused, and told so."""
                if not hmac.compare_digest(
                    self.headers.get("Authorization", "").encode(), expected.encode()
                ):
                    self.close_connection = True
                    self._answer(403)
                    return None
                id = self.path.removeprefix("/chunk/")
                return id if PEER_CHUNK_ID.fullmatch(id) else ""

            def _answer(self, code: int, data: bytes | memoryview = b"") -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            # peers come and go; that is no news
            def log_message(self, format: str, *args: Any) -> None:
                pass

        class ChunkHTTPServer(ThreadingHTTPServer):
            daemon_threads = True

            # a peer that died in the middle
            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = ChunkHTTPServer((addr, 0), ChunkHandler)
        self.addr, self.port = addr, int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="chunk-server",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


def _first(tiers: Sequence[Tier], id: str) -> bytes | memoryview | None:
    return next((data for tier in tiers if (data := tier.get(id)) is not None), None)


class PeerTier:
    """Chunks that other nodes hold, by their `ChunkServer`s at (address, port). One that fails
    or is slow once is not asked again, and none for what has only an old hash, which proves
    nothing to strangers."""

    name = "peer"

    def __init__(
        self, peers: Sequence[tuple[str, int]], secret: str, timeout_s: float = PEER_TIMEOUT_S
    ):
        self._peers, self._headers, self._timeout_s = (
            list(peers),
            {"Authorization": f"Bearer {secret}"},
            timeout_s,
        )
        self._gone: set[tuple[str, int]] = set()
        self._local = threading.local()  # connections are kept, one per thread and peer

    def get(self, id: str) -> bytes | None:
        if not PEER_CHUNK_ID.fullmatch(id):
            return None
        for peer in self._peers:
            if (
                peer not in self._gone
                and (answer := self._ask(peer, "GET", id)) is not None
                and answer[0] == 200
            ):
                return answer[1]
        return None

    def put(self, chunks: Mapping[str, bytes | memoryview]) -> int:
        """Leave them with the first peer. Stops at the first that it does not take."""
        for done, (id, data) in enumerate(chunks.items()):
            if not self._peers or self._peers[0] in self._gone:
                return done
            answer = self._ask(self._peers[0], "PUT", id, data)
            if answer is None or answer[0] != 201:
                return done
        return len(chunks)

    def drop(self, id: str) -> None:
        """A peer that sent wrong bytes has to notice itself, when it reads them."""

    def _ask(
        self, peer: tuple[str, int], method: str, id: str, body: bytes | memoryview | None = None
    ) -> tuple[int, bytes] | None:
        """Status and content; None, and never asked again, if it is gone, slow, or of another
        run."""
        kept: dict[tuple[str, int], http.client.HTTPConnection] = self._local.__dict__.setdefault(
            "kept", {}
        )
        connection = kept.setdefault(
            peer, http.client.HTTPConnection(*peer, timeout=self._timeout_s)
        )
        # in all, since a trickle would pass each read's time-out
        deadline_s = time.monotonic() + 2 * self._timeout_s
        data = bytearray()
        try:
            connection.request(method, f"/chunk/{id}", body=body, headers=self._headers)
            response = connection.getresponse()
            while block := response.read(1 << 20):
                data += block
                if time.monotonic() > deadline_s or len(data) > int(id.rpartition("-")[2]):
                    raise TimeoutError(f"{peer} is too slow, or sends too much")
            if response.status == 403:
                raise ConnectionError(f"{peer} is of another run")
            return response.status, bytes(data)
        except (OSError, http.client.HTTPException):
            self._gone.add(peer)
            connection.close()
            kept.pop(peer, None)
            return None
