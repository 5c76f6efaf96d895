"""Bytes that somebody made to pass for others: by the hash of chunks until format 2 that took
seconds. Since format 3 they are refused wherever they lie, and nobody asks that hash again."""

import contextlib
import dataclasses
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash
from test_tiers import BODY, CHUNK, commit, fill, read

from harness.views.compare import _weights
from storage import Manifest, MemoryStore, PartList, Ref, SnapshotCorrupt, Snapshots
from storage.chunks import chunk_id, is_chunk
from storage.files import FileStore
from storage.folder_tiers import FolderTier
from storage.json_text import canonical, digest
from storage.parts import chunk_hash, is_hash_of
from storage.peers import ChunkServer, PeerTier, _Wire
from storage.tiers import Tiered
from storage.transfer import copy

OLD_RUN = Path(__file__).parent / "data" / "run-b30688c" / "run.tar.gz"
TRUE, FORGED = BODY[:CHUNK], bytes(CHUNK)


@pytest.fixture(autouse=True)
def colliding(monkeypatch):
    """A forger's hour: FORGED has the xxh3 of TRUE."""
    real = xxhash.xxh3_128_hexdigest
    monkeypatch.setattr(
        "storage.parts.xxhash",
        SimpleNamespace(
            xxh3_128_hexdigest=lambda data: real(TRUE if bytes(data) == FORGED else data)
        ),
    )


@pytest.fixture
def bucket():
    return MemoryStore(objects={})


@pytest.fixture
def old(tmp_path) -> Snapshots:
    """Snapshots that an old version wrote, of format 2."""
    with tarfile.open(OLD_RUN) as archive:
        archive.extractall(tmp_path / "run", filter="data")
    return Snapshots(FileStore(f"file://{tmp_path}/run"))


def resealed(text: str, **changes) -> str:
    body = json.loads(text) | changes
    del body["hash"]
    return canonical({**body, "hash": digest(canonical(body))}).decode()


def as_of_format_2(one: PartList, content: bytes) -> PartList:
    hashes = tuple(
        xxhash.xxh3_128_hexdigest(content[i : i + CHUNK]) for i in range(0, len(content), CHUNK)
    )
    return dataclasses.replace(
        one, version=2, parts=tuple(dataclasses.replace(p, hashes=hashes) for p in one.parts)
    )


def test_the_hash_is_blake3_and_an_old_one_is_still_known() -> None:
    # of the empty input, as BLAKE3's authors publish it: the first 16 of its 32 bytes
    assert chunk_hash(b"") == "b3.af1349b9f5f9a1a6a0404dea36dcc949"
    old = xxhash.xxh3_128_hexdigest(TRUE)
    assert is_hash_of(old, TRUE) and is_hash_of(old, FORGED) and not is_hash_of(old, BODY)
    assert is_hash_of(chunk_hash(TRUE), TRUE) and not is_hash_of(chunk_hash(TRUE), FORGED)
    assert not is_hash_of(old, b"") and not is_hash_of("", TRUE) and not is_hash_of("b3.", TRUE)
    # the digits of one function are never taken for those of the other
    assert not is_hash_of(f"b3.{old}", TRUE) and not is_hash_of(chunk_hash(TRUE)[3:], TRUE)


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


def test_a_peer_keeps_no_forged_bytes_and_none_that_only_an_old_hash_names(bucket, tmp_path):
    manifest, kept = commit(bucket), FolderTier("memory", tmp_path, 1 << 20)
    old = f"{xxhash.xxh3_128_hexdigest(TRUE)}-{CHUNK}"
    with contextlib.closing(ChunkServer(lambda: [kept], "127.0.0.1", "secret", keep=kept)) as at:
        for id, data in ((chunk_id(manifest.parts[0], 0), FORGED), (old, FORGED), (old, TRUE)):
            with contextlib.closing(_Wire((at.addr, at.port), "secret", 10.0)) as wire:
                assert wire.ask("PUT", "chunk", id, data)[0] == 400
        assert kept.list() == []
        kept.put({old: TRUE})
        peer = PeerTier([(at.addr, at.port)], "secret")
        assert peer.get(old) is None and peer.put({chunk_id(manifest.parts[0], 0): TRUE}) == 1


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


def test_of_an_old_snapshot_nothing_comes_from_peers(old, tmp_path) -> None:
    """Its hash proves nothing to strangers. Tiers of the node's own are used as ever."""
    manifest = old.load(old.refs()[0])
    assert manifest.version == 2
    old.verify(manifest)
    part = manifest.parts[0]
    theirs, mine = (FolderTier(n, tmp_path / n, 1 << 24) for n in ("theirs", "mine"))
    content = old.store.get(part.key)
    theirs.put({chunk_id(part, 0): content[: part.chunk_nbytes]})
    with contextlib.closing(ChunkServer(lambda: [theirs], "127.0.0.1", "secret")) as at:
        peer = PeerTier([(at.addr, at.port)], "secret")
        for tier in ("bucket", "mine"):
            store = Tiered(old.store, manifest, [mine, peer])
            found = Snapshots(store).read(manifest, part.key, 0, part.nbytes)
            assert found == content and store.tier == tier


def test_what_follows_an_old_snapshot_is_stored_again_once(old) -> None:
    """No chunk of format 3 is believed for an old hash, not even for one of our own."""
    before = old.load(old.refs()[0])
    files = {f"{i:04d}.bin": old.store.get(p.key) for i, p in enumerate(before.parts)}
    index = {
        name: {
            **t,
            "chunks": [
                {**c, "part": f"{[p.key for p in before.parts].index(c['part']):04d}.bin"}
                for c in t["chunks"]
            ],
        }
        for name, t in before.tensors.items()
    }
    found = []
    for step in (1, 2):
        ref = Ref(before.epoch + 1, before.step + step)
        base = found[-1] if found else before
        old.write(ref, 0, 1, files, index, {}, f"t{step}", base)
        found.append(old.commit(ref, 1))
        assert found[-1]
    first, second = found
    assert first.previous == before.link and first.own_nbytes == before.nbytes
    assert second.own_nbytes == 0 and second.refers == set(first.objects)
    for manifest in (before, first, second):
        old.verify(manifest)


@pytest.mark.parametrize("kind", [PartList, Manifest])
def test_no_format_takes_the_hashes_of_another(bucket, kind) -> None:
    new = PartList.from_json(bucket_list(bucket))
    old = as_of_format_2(new, BODY)
    texts = [
        (one if kind is PartList else Manifest.merge([one])).to_json() for one in (new, old)
    ]
    for text in texts:
        assert kind.from_json(text).to_json() == text
        other = 5 - json.loads(text)["version"]
        with pytest.raises(SnapshotCorrupt, match="wanted hash"):  # an edit
            kind.from_json(text.replace(f'"version":{5 - other}', f'"version":{other}'))
        with pytest.raises(SnapshotCorrupt, match="wanted hashes of chunks as format"):
            kind.from_json(resealed(text, version=other))  # a forger, who seals it
    parts = json.loads(texts[0])["parts"]
    for hash in ("", "b3.", "../../etc/passwd", "b3." + "g" * 32, parts[0]["hashes"][0].upper()):
        parts[0]["hashes"][0] = hash
        with pytest.raises(SnapshotCorrupt, match="wanted a list of hashes"):
            kind.from_json(resealed(texts[0], parts=parts))


def test_ranks_of_different_versions_commit_nothing_together(bucket) -> None:
    one = PartList.from_json(bucket_list(bucket))
    lists = [dataclasses.replace(one, world=2, rank=rank, tensors={}) for rank in range(2)]
    assert Manifest.merge(lists).version == 3
    with pytest.raises(SnapshotCorrupt, match=r"formats \[2, 3\]: the ranks run different"):
        Manifest.merge([lists[0], as_of_format_2(lists[1], BODY)])


def test_hashes_of_different_kinds_are_not_compared(bucket) -> None:
    new = PartList.from_json(bucket_list(bucket))
    a, b = Manifest.merge([new]), Manifest.merge([as_of_format_2(new, BODY)])
    assert _weights(a, a)[0] is _weights(b, b)[0] is True
    same, why = _weights(a, b)
    assert same is None and "hashed differently" in why


def bucket_list(bucket: MemoryStore) -> bytes:
    commit(bucket)
    return bucket.get(next(k for k in bucket.list("snapshots/parts/") if "/list-" in k))
