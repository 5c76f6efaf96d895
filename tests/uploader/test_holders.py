"""Whom a restore asks for which chunk: who wrote it, its neighbour, others; the bucket at last."""

import contextlib
import random

import pytest

from harness.bucket.layout import SECRET, ChunkServerAt, Epoch, chunks_key, epoch_key
from harness.uploader.node_tiers import ASKED, ChunkOwners, ChunkServers, tiers_for
from storage import MemoryStore, Ref, Snapshots
from storage.snapshots.manifest import chunk_id
from storage.snapshots.snapshot_keys import part_prefix, writer_of
from storage.tiers.folder_tier import FolderTier
from storage.tiers.peer_transport import ChunkServer
from storage.tiers.tiers import Tiered, blocks_of_part, chunks_of

CHUNK, SECRET_WORD = 1 << 10, "secret"
BODY = [random.Random(rank).randbytes(5 * CHUNK + 7) for rank in range(4)]
REF = Ref(epoch=3, step=6)


def epoch(number, *members, nproc=1):
    each = (nproc,) * len(members)
    return Epoch(number, members, each, (1.0,) * len(members), "h", 1, "start")


@pytest.fixture
def bucket():
    """A snapshot of four ranks, two to each of the nodes a and b."""
    store = MemoryStore(objects={})
    store.create(epoch_key(3), epoch(3, "a", "b", nproc=2).encode())
    snapshots = Snapshots(store, CHUNK)
    for rank, body in enumerate(BODY):
        name = f"w{rank}"
        chunk = {"offsets": [0], "sizes": [len(body)], "part": "x", "start": 0, "end": len(body)}
        index = {name: {"shape": [len(body)], "dtype": "uint8", "chunks": [chunk]}}
        snapshots.write(REF, rank, 4, {"x": body}, index, {}, f"t{rank}")
    assert snapshots.commit(REF, 4) is not None
    return store


def ids_of(manifest, rank):
    (part,) = [p for p in manifest.parts if writer_of(p.key) == rank]
    return [chunk_id(part, i) for i in range(len(part.hashes))]


def places(bucket, *names):
    """Every member's chunk server is at a port of its own; nothing listens there."""
    for port, name in enumerate(names, 1):
        bucket.create(chunks_key(name), ChunkServerAt("127.0.0.1", port).encode())
    return {name: ("127.0.0.1", port) for port, name in enumerate(names, 1)}


def test_a_key_says_who_wrote_it():
    assert writer_of(f"{part_prefix(REF, 17)}token-0000.bin") == 17
    assert writer_of("snapshots/parts/x/list-r00017.json") is writer_of("r1-x") is None


def test_a_chunk_is_asked_of_who_wrote_it_and_who_keeps_it(bucket):
    manifest = Snapshots(bucket).load(REF)
    at = places(bucket, "a", "b", "c", "new")
    written_by = epoch(3, "a", "b", "c", nproc=2)

    def asked(id, now, me):
        return list(ChunkOwners(manifest, written_by, now, me, ChunkServers(bucket))(id))

    first = {tuple(asked(id, ["a", "b", "c", "new"], "new")[:2]) for id in chunks_of([manifest])}
    # ranks 0 and 1 are a's, which b keeps; 2 and 3 are b's, which c keeps; and they are spread
    assert first <= {(at[x], at[y]) for x, y in ("ab", "ba", "bc", "cb")}
    for id in ids_of(manifest, 0):
        assert set(asked(id, ["a", "b", "c", "new"], "new")[:2]) == {at["a"], at["b"]}
        # who does not train now may be dead: it is asked after who does
        assert asked(id, ["b", "c", "new"], "new") == [at["b"], at["a"], at["c"]]
        assert asked(id, ["b", "c", "new"], "b")[0] == at["a"]  # nobody asks itself


def test_of_a_big_world_some_are_asked(bucket):
    manifest = Snapshots(bucket).load(REF)
    names = ["a", "b", *(f"n{i}" for i in range(30))]
    places(bucket, *names)
    holders = ChunkOwners(manifest, epoch(3, "a", "b", nproc=2), names, "n7", ChunkServers(bucket))
    assert len(list(holders(ids_of(manifest, 0)[0]))) == 2 + ASKED
    assert len(list(holders("b3." + "0" * 32 + "-5"))) == ASKED  # nobody's


@pytest.mark.parametrize("lost", ["nobody", "its writer", "both", "the epoch"])
def test_shard_by_shard_from_whoever_has_it_and_the_rest_from_the_bucket(bucket, tmp_path, lost):
    manifest, servers = Snapshots(bucket).load(REF), []
    bucket.create(SECRET, b'"unused"')
    held = {name: FolderTier("memory", tmp_path / name, 1 << 20) for name in "ab"}
    for part in manifest.parts:  # both hold all, as two neighbours do
        for chunks in blocks_of_part(part, memoryview(BODY[writer_of(part.key)])):
            for tier in held.values():
                tier.put(chunks)
    for name in {"nobody": "ab", "its writer": "b", "both": "", "the epoch": "ab"}[lost]:
        server = ChunkServer(lambda name=name: [held[name]], "127.0.0.1", SECRET_WORD)
        servers.append(server)
        bucket.create(chunks_key(name), ChunkServerAt("127.0.0.1", server.port).encode())
    if lost == "the epoch":
        bucket.delete(epoch_key(3))
    said = {"member": "new", "members": ["a", "b", "new"], "secret": SECRET_WORD, "sealed": False}
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
        store = Tiered(bucket, manifest, tiers_for(manifest, said, bucket))
        for part in manifest.parts:
            found = Snapshots(store, CHUNK).read(manifest, part.key, 0, part.nbytes)
            assert found == BODY[writer_of(part.key)]
    assert dict(store.read_nbytes) == {
        "bucket" if lost == "both" else "peer": sum(map(len, BODY))
    }
