"""Bytes that pass for others are refused wherever they lie: near, with peers, in either bucket."""

import contextlib
import json

import pytest

from storage import Manifest, MemoryStore, PartList, SnapshotCorrupt, Snapshots
from storage.canonical_json import canonical, digest
from storage.snapshots.manifest import chunk_hash, chunk_id, is_chunk
from storage.snapshots.transfer import copy
from storage.tiers.folder_tier import FolderTier
from storage.tiers.peer_transport import ChunkServer, PeerTier, _PeerStream
from storage.tiers.tiers import Tiered
from support.chunks import BODY, CHUNK, commit, fill, read

TRUE, FORGED = BODY[:CHUNK], bytes(CHUNK)


@pytest.fixture
def bucket():
    return MemoryStore(objects={})


def resealed(text: str, **changes) -> str:
    body = json.loads(text) | changes
    del body["hash"]
    return canonical({**body, "hash": digest(canonical(body))}).decode()


def test_the_hash_is_blake3() -> None:
    # of the empty input, as BLAKE3's authors publish it: the first 16 of its 32 bytes
    assert chunk_hash(b"") == "b3.af1349b9f5f9a1a6a0404dea36dcc949"
    id = f"{chunk_hash(TRUE)}-{CHUNK}"
    assert is_chunk(id, TRUE) and not is_chunk(id, FORGED) and not is_chunk(id, TRUE[:-1])
    for wanted in ("", "b3.", chunk_hash(TRUE)[3:]):
        assert not is_chunk(f"{wanted}-{CHUNK}", TRUE)


@pytest.mark.parametrize("where", ["memory", "disk", "peer"])
def test_forged_bytes_near_are_refused_dropped_and_read_elsewhere(bucket, tmp_path, where) -> None:
    manifest, told = commit(bucket), list[str]()
    near = FolderTier(where, tmp_path, 1 << 20)
    fill([near], manifest)
    forged = chunk_id(manifest.parts[0], 0)
    (tmp_path / "chunks" / forged).write_bytes(FORGED)
    with contextlib.ExitStack() as stack:
        tier: FolderTier | PeerTier = near
        if where == "peer":
            server = stack.enter_context(
                contextlib.closing(ChunkServer(lambda: [near], "127.0.0.1", "secret"))
            )
            tier = PeerTier([(server.addr, server.port)], "secret")
        store = Tiered(bucket, manifest, [tier], lambda tier, what: told.append(tier))
        assert read(store, manifest) == BODY
        assert told == [where] and store.read_nbytes["bucket"] == CHUNK
    assert where == "peer" or is_chunk(forged, near.get(forged) or b"")  # the right ones are there


def test_a_peer_keeps_no_forged_bytes_and_none_of_another_hash(bucket, tmp_path):
    manifest, kept = commit(bucket), FolderTier("memory", tmp_path, 1 << 20)
    other = f"{chunk_hash(TRUE)[3:]}-{CHUNK}"
    with contextlib.closing(ChunkServer(lambda: [kept], "127.0.0.1", "secret", keep=kept)) as at:
        for id, data in ((chunk_id(manifest.parts[0], 0), FORGED), (other, TRUE)):
            with contextlib.closing(_PeerStream((at.addr, at.port), "secret", 10.0)) as wire:
                assert wire.ask("PUT", "chunk", id, data)[0] == 400
        assert kept.list() == []
        peer = PeerTier([(at.addr, at.port)], "secret")
        assert peer.get(other) is None and peer.put({chunk_id(manifest.parts[0], 0): TRUE}) == 1


def test_forged_bytes_in_a_bucket_are_read_from_the_other(bucket) -> None:
    manifest, second, told = commit(bucket), MemoryStore(objects={}), list[str]()
    copy(bucket, second, [manifest.ref])
    key = manifest.parts[0].key
    bucket.put(key, FORGED + BODY[CHUNK:])
    with pytest.raises(SnapshotCorrupt, match="hash differs"):
        Snapshots(bucket, CHUNK).verify(manifest)
    hear = lambda tier, what: told.append(what)  # noqa: E731
    store = Tiered(bucket, manifest, [], hear, replica=lambda: second)
    assert read(store, manifest) == BODY and store.tier == "bucket+replica"
    assert len(told) == 1 and "read from the second bucket" in told[0]
    # forged in both: an error, and never those bytes
    second.put(key, FORGED + BODY[CHUNK:])
    store = Tiered(bucket, manifest, [], replica=lambda: second)
    with pytest.raises(SnapshotCorrupt, match="hash differs"):
        read(store, manifest)


def test_a_copy_takes_no_forged_bytes_from_either_bucket(bucket) -> None:
    manifest, second = commit(bucket), MemoryStore(objects={})
    key = manifest.parts[0].key
    second.put(key, FORGED + BODY[CHUNK:])  # as if an earlier copy had ended after it
    copy(bucket, second, [manifest.ref])
    assert second.get(key) == BODY
    bucket.put(key, FORGED + BODY[CHUNK:])
    with pytest.raises(SnapshotCorrupt, match="hash differs"):
        copy(bucket, MemoryStore(objects={}), [manifest.ref])


@pytest.mark.parametrize("kind", [PartList, Manifest])
def test_no_other_hashes_and_no_older_formats_are_taken(bucket, kind) -> None:
    new = PartList.from_json(bucket_list(bucket))
    text = (new if kind is PartList else Manifest.merge([new])).to_json()
    assert kind.from_json(text).to_json() == text
    with pytest.raises(SnapshotCorrupt, match="wanted hash"):  # an edit
        kind.from_json(text.replace('"version":3', '"version":2'))
    with pytest.raises(SnapshotCorrupt, match="wanted a whole number"):  # a forger, who seals it
        kind.from_json(resealed(text, version=2))
    parts = json.loads(text)["parts"]
    for hash in ("", "b3.", "../../etc/passwd", "b3." + "g" * 32, parts[0]["hashes"][0].upper()):
        parts[0]["hashes"][0] = hash
        with pytest.raises(SnapshotCorrupt, match="wanted a list of hashes"):
            kind.from_json(resealed(text, parts=parts))


def bucket_list(bucket: MemoryStore) -> bytes:
    commit(bucket)
    return bucket.get(next(k for k in bucket.list("snapshots/parts/") if "/list-" in k))
