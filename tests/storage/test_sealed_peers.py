"""Encryption of the peer tier: what somebody between two nodes sees and can change, on real
connections through a relay that listens."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from harness.core.world import BadInput
from harness.uploader import node_tiers
from harness.uploader.node_tiers import NearbyConfig
from storage import MemoryStore
from storage.snapshots.manifest import chunk_id
from storage.tiers.folder_tier import FolderTier
from storage.tiers.peer_transport import ChunkServer, PeerTier, Sealer, WrongSeal
from storage.tiers.tiers import Tiered
from support.chunks import BODY, CHUNK, commit, fill, read

pytest.importorskip("cryptography")
SECRET, CHUNKS = "secret", [BODY[i : i + CHUNK] for i in range(0, len(BODY), CHUNK)]


class Relay:
    """Between a caller and a server: hears all, and may change what goes "up" or "down"."""

    def __init__(self, port: int, change: Callable[[str, bytes], bytes] = lambda way, data: data):
        self.heard = {"up": b"", "down": b""}
        self._change, self._to = change, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.at = ("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                for way, one, other in (("up", caller, server), ("down", server, caller)):
                    threading.Thread(target=self._pump, args=(way, one, other), daemon=True).start()

    def _pump(self, way: str, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError), one, other:
            while data := one.recv(1 << 16):
                self.heard[way] += data
                other.sendall(self._change(way, data))

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def bucket():
    return MemoryStore(objects={})


@contextlib.contextmanager
def between(
    tmp_path, sealed: bool, change: Callable[[str, bytes], bytes] = lambda way, data: data
) -> Iterator[tuple[FolderTier, Relay]]:
    held = FolderTier("memory", tmp_path / "held", 1 << 20)
    with (
        contextlib.closing(
            ChunkServer(lambda: [held], "127.0.0.1", SECRET, keep=held, sealed=sealed)
        ) as server,
        contextlib.closing(Relay(server.port, change)) as relay,
    ):
        yield held, relay


@pytest.mark.parametrize("sealed", [True, False])
def test_who_listens_sees_no_byte_of_a_chunk(bucket, tmp_path, sealed) -> None:
    manifest = commit(bucket)
    ids = [chunk_id(manifest.parts[0], i) for i in range(len(CHUNKS))]
    with between(tmp_path, sealed) as (held, relay):
        peer = PeerTier([relay.at], SECRET, 10.0, sealed)
        assert peer.put(dict(zip(ids, CHUNKS, strict=True))) == len(ids) == len(held.list())
        store = Tiered(bucket, manifest, [peer])
        assert read(store, manifest) == BODY and store.tier == "peer"
        assert peer.get(ids[0]) == peer.get(ids[0]) == CHUNKS[0]
    for heard in relay.heard.values():
        assert sealed != any(chunk[16:48] in heard for chunk in CHUNKS)
        assert SECRET.encode() not in heard
    # the same chunk, three times on one connection: never the same bytes
    down = relay.heard["down"]
    bodies = [down[at : at + CHUNK] for at in _starts(down, CHUNK + 16)]
    assert not sealed or (len(bodies) >= 3 and len(set(bodies)) == len(bodies))


def _starts(heard: bytes, nbytes: int) -> Iterator[int]:
    """Of bodies that are so long."""
    head, at = b"Content-Length: %d\r\n\r\n" % nbytes, 0
    while (found := heard.find(head, at)) >= 0:
        at = found + len(head)
        yield at


@pytest.mark.parametrize("way", ["up", "down"])
def test_what_is_changed_on_its_way_is_a_miss(bucket, tmp_path, way) -> None:
    manifest, on = commit(bucket), threading.Event()

    def flip(which: str, data: bytes) -> bytes:
        if not on.is_set() or which != way or len(data) < CHUNK // 2:  # a head
            return data
        return data[:-1] + bytes([data[-1] ^ 1])

    id = chunk_id(manifest.parts[0], 0)
    with between(tmp_path, True, flip) as (held, relay):
        peer = PeerTier([relay.at], SECRET, 10.0, sealed=True)
        if way == "down":
            fill([held], manifest)
        assert peer.get(chunk_id(manifest.parts[0], 1)) == (CHUNKS[1] if way == "down" else None)
        on.set()
        found = peer.get(id) if way == "down" else peer.put({id: CHUNKS[0]})
        assert not found and (way == "down" or held.list() == [])


@pytest.mark.parametrize(("server", "caller"), [(True, False), (False, True)])
def test_sides_that_are_told_differently_do_not_speak(bucket, tmp_path, server, caller) -> None:
    manifest = commit(bucket)
    with between(tmp_path, server) as (held, relay):
        fill([held], manifest)
        store = Tiered(bucket, manifest, [PeerTier([relay.at], SECRET, 10.0, sealed=caller)])
        assert read(store, manifest) == BODY and store.tier == "bucket"
    assert not any(chunk[16:48] in relay.heard["down"] for chunk in CHUNKS)


def test_a_seal_is_of_one_connection_one_side_and_one_request() -> None:
    sealed = Sealer(SECRET, "a", "b").seal("ask", 1, b"x" * 99)
    assert Sealer(SECRET, "a", "b").open("ask", 1, sealed) == b"x" * 99
    for other, who, count, data in (
        (Sealer("guess", "a", "b"), "ask", 1, sealed),
        (Sealer(SECRET, "a", "c"), "ask", 1, sealed),
        (Sealer(SECRET, "a", "b"), "serve", 1, sealed),
        (Sealer(SECRET, "a", "b"), "ask", 2, sealed),
        (Sealer(SECRET, "a", "b"), "ask", 1, sealed[:-1]),
        (Sealer(SECRET, "a", "b"), "ask", 1, b""),
    ):
        with pytest.raises(WrongSeal):
            other.open(who, count, data)


def test_encryption_that_cannot_be_is_refused_at_once(monkeypatch) -> None:
    assert NearbyConfig(peer="memory", encrypt=True).checked().to_dict()["encrypt"]
    with pytest.raises(BadInput, match="--set peer_tier as well"):
        NearbyConfig(encrypt=True).checked()
    monkeypatch.setattr(node_tiers, "can_seal", lambda: False)
    with pytest.raises(BadInput, match="pip install cryptography"):
        NearbyConfig(peer="memory", encrypt=True).checked()
