"""Tiers: a read takes the nearest bytes that hash right, whatever lies in the tiers and whoever
dies; only the bucket can fail it."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import tracemalloc

import pytest

from storage import FileStore, MemoryStore, Ref, SnapshotCorrupt, Snapshots
from storage.snapshots.manifest import chunk_id
from storage.snapshots.staging import Segment
from storage.testing.faulty_store import corrupt
from storage.tiers.folder_tier import FolderTier, OwnedFolder
from storage.tiers.peer_transport import ChunkServer, PeerTier, _PeerStream
from storage.tiers.tiers import SegmentTier, Tiered, blocks_of_part, chunks_of
from support.chunks import BODY, CHUNK, commit, fill, read


@pytest.fixture
def tiers(tmp_path):
    return [
        FolderTier("memory", tmp_path / "shm", 1 << 20),
        FolderTier("disk", tmp_path / "disk", 1 << 20),
    ]


@pytest.fixture
def bucket():
    return MemoryStore(objects={})


def test_the_nearest_tier_is_read_and_what_comes_from_afar_is_left_there(bucket, tiers):
    manifest = commit(bucket)
    assert Tiered(bucket, manifest, tiers).tier == "bucket"
    first = Tiered(bucket, manifest, tiers)
    assert read(first, manifest) == BODY and first.tier == "bucket"
    again = Tiered(bucket, manifest, tiers)
    assert (
        read(again, manifest) == BODY
        and again.tier == "memory"
        and again.read_nbytes["memory"] == len(BODY)
    )
    tiers[0].drop(chunk_id(manifest.parts[0], 3))
    third = Tiered(bucket, manifest, tiers)
    assert (
        read(third, manifest) == BODY
        and third.tier == "memory+disk"
        and third.read_nbytes["disk"] == CHUNK
    )


def test_what_lies_in_an_older_snapshots_object_comes_from_near_as_well(bucket, tiers):
    first = commit(bucket)
    body = BODY[: 4 * CHUNK] + random.Random(8).randbytes(CHUNK) + BODY[5 * CHUNK :]
    snapshots, ref = Snapshots(bucket, CHUNK), Ref(1, 6)
    snapshots.write(ref, 0, 1, {"a.bin": body}, {}, {}, "t", first)
    second = snapshots.commit(ref, 1)
    assert second is not None and second.own_nbytes == CHUNK
    fill(tiers, first)
    store = Tiered(bucket, second, tiers)
    assert read(store, second) == body
    assert dict(store.read_nbytes) == {"memory": len(BODY) - CHUNK, "bucket": CHUNK}
    assert read(store, second, 3 * CHUNK + 5, 6 * CHUNK) == body[3 * CHUNK + 5 : 6 * CHUNK]


def test_every_range_is_what_the_bucket_has(bucket, tiers):
    manifest, rng = commit(bucket), random.Random(3)
    store = Tiered(bucket, manifest, tiers)
    for _ in range(60):
        start = rng.randrange(len(BODY) + 1)
        end = rng.randrange(start, len(BODY) + 1)
        assert read(store, manifest, start, end) == BODY[start:end]
        assert store.get(manifest.parts[0].key, start, end) == BODY[start:end]
    assert read(store, manifest) == BODY == store.get(manifest.parts[0].key)
    assert store.read_nbytes["bucket"] == len(BODY)  # each chunk once
    assert store.list("snapshots/") == bucket.list("snapshots/") and store.size(
        manifest.parts[0].key
    ) == len(BODY)


def test_a_read_takes_no_memory_beside_what_the_caller_gave(tmp_path):
    """Who restores has room for the state, and for little beside it."""
    body = random.Random(4).randbytes(1 << 20)
    store = FileStore(f"file://{tmp_path}/bucket")
    manifest, buffer = commit(store, body=body), memoryview(bytearray(len(body)))
    snapshots = Snapshots(Tiered(store, manifest, []), CHUNK)
    tracemalloc.start()
    try:
        found = snapshots.read_into(manifest, manifest.parts[0].key, 0, len(body), lambda nbytes: buffer)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == body and peak < len(body) // 2


def test_a_part_that_ends_early_is_told(bucket):
    manifest = commit(bucket)
    bucket.put(manifest.parts[0].key, BODY[: 9 * CHUNK + 1])
    with pytest.raises(SnapshotCorrupt, match=f"found {9 * CHUNK + 1} of them"):
        read(Tiered(bucket, manifest, []), manifest)


def test_what_is_staged_is_read_where_it_lies_and_believed_only_if_its_hash_is_right(
    bucket, tmp_path
):
    manifest = commit(bucket)
    key = manifest.parts[0].key
    segment = Segment.create(tmp_path / "s", 40_000)
    segment.view[100 : 100 + len(BODY)] = BODY
    places = {key: (str(tmp_path / "s"), 100, 100 + len(BODY))}
    corrupt(bucket, key, "flip", random.Random(1))
    near = Tiered(bucket, manifest, [SegmentTier(manifest.parts, places)])
    assert read(near, manifest, 10, 4000) == BODY[10:4000] and near.tier == "memory"
    bucket.put(key, BODY)
    segment.view[100 + CHUNK] ^= 1
    told = []
    near = Tiered(
        bucket, manifest, [SegmentTier(manifest.parts, places)], lambda tier, what: told.append(tier)
    )
    assert (
        read(near, manifest, 0, 3 * CHUNK) == BODY[: 3 * CHUNK]
        and near.tier == "memory+bucket"
        and told == ["memory"]
    )
    for wrong in (
        {key: (str(tmp_path / "nothing"), 0, len(BODY))},
        {key: (str(tmp_path / "s"), 0, 10)},
        {},
    ):
        gone = Tiered(bucket, manifest, [SegmentTier(manifest.parts, wrong)])
        assert read(gone, manifest) == BODY and gone.tier == "bucket"


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "other", "gone"])
def test_wrong_bytes_near_are_dropped_told_and_read_elsewhere(bucket, tiers, tmp_path, damage):
    told: list[tuple[str, str]] = []
    manifest = commit(bucket)
    fill(tiers, manifest)
    store = Tiered(bucket, manifest, tiers, lambda tier, what: told.append((tier, what)))
    ids = [chunk_id(manifest.parts[0], i) for i in (2, 21)]
    for folder in ("shm", "disk"):
        for id in ids:
            path = tmp_path / folder / "chunks" / id
            good = path.read_bytes()
            bad = {
                "flip": bytes([good[0] ^ 1]) + good[1:],
                "truncate": good[:-1],
                "empty": b"",
                "other": BODY[:CHUNK],
                "gone": None,
            }[damage]
            path.unlink() if bad is None else path.write_bytes(bad)
    assert read(store, manifest) == BODY
    assert store.tier == "memory+bucket" and store.read_nbytes["bucket"] == CHUNK + 77
    assert [tier for tier, _ in told] == ([] if damage == "gone" else ["memory", "disk"] * 2)
    again = Tiered(bucket, manifest, tiers)
    assert read(again, manifest) == BODY and again.tier == "memory"  # healed


def test_only_a_bad_bucket_is_an_error(bucket, tiers):
    manifest = commit(bucket)
    fill(tiers, manifest)
    corrupt(bucket, manifest.parts[0].key, "flip", random.Random(1))
    assert read(Tiered(bucket, manifest, tiers), manifest) == BODY
    for tier in tiers:
        for id in tier.list():
            tier.drop(id)
    with pytest.raises(SnapshotCorrupt):
        read(Tiered(bucket, manifest, tiers), manifest)
    # the bad chunk is not passed on
    assert len(tiers[0].list()) == len(manifest.parts[0].hashes) - 1
    with pytest.raises(SnapshotCorrupt):
        read(bucket, manifest)


def test_a_folder_keeps_its_budget_and_drops_the_least_recently_used(tmp_path):
    tier = FolderTier("disk", tmp_path, 3 * CHUNK)
    ids = [f"b3.{i:032x}-{CHUNK}" for i in range(4)]
    for age, id in enumerate(ids[:3]):
        assert tier.put({id: bytes(CHUNK)}) == 1
        os.utime(tmp_path / "chunks" / id, ns=(age, age))
    assert tier.get(ids[0]) == bytes(CHUNK)  # used now
    tier.put({ids[3]: bytes(CHUNK)})
    assert set(tier.list()) == {ids[0], ids[2], ids[3]} and tier.nbytes == 3 * CHUNK
    assert tier.put({f"b3.{9:032x}-{4 * CHUNK}": bytes(4 * CHUNK)}) == 0 and tier.nbytes == 3 * CHUNK
    with pytest.raises(ValueError, match="at least 0"):
        FolderTier("disk", tmp_path, -1)


class Listed(FolderTier):
    """Counts how often its folder is listed."""

    times = 0

    def _entries(self):
        self.times += 1
        return super()._entries()


def test_a_folder_is_not_listed_for_every_block(tmp_path):
    # of another process
    tier, other = Listed("disk", tmp_path, 64 * 100), Listed("disk", tmp_path, 64 * 100)
    for i in range(500):
        assert (tier if i % 2 else other).put({f"b3.{i:032x}-100": bytes(100)}) == 1
        os.utime(tmp_path / "chunks" / f"b3.{i:032x}-100", (i, i))  # clocks are coarse
    assert tier.times + other.times <= 500 // 16
    newest = tier.list()
    assert 60 <= len(newest) <= 64 and newest == [
        f"b3.{i:032x}-100" for i in range(500 - len(newest), 500)
    ]
    assert tier.nbytes <= tier.budget_nbytes
    for id in newest[:30]:
        tier.drop(id)
    tier.times = 0
    # seems full, and is not
    assert tier.put({f"b3.{1000 + i:032x}-100": bytes(100) for i in range(8)}) == 8 and tier.times == 1
    assert set(newest[30:]) < set(tier.list())
    for content in (b"", b"no number"):  # of a dead writer
        (tmp_path / "used").write_bytes(content)
        assert tier.put({f"b3.{2000:032x}-100": bytes(100)}) == 1
        tier.drop(f"b3.{2000:032x}-100")


def test_what_is_dropped_is_written_over(tmp_path):
    tier = FolderTier("data", tmp_path, 3 * CHUNK, over=True)
    folder = tmp_path / "chunks"
    ids = [f"b3.{i:032x}-{CHUNK}" for i in range(5)]
    for age, id in enumerate(ids[:3]):
        assert tier.put({id: bytes([age]) * CHUNK}) == 1
        os.utime(folder / id, ns=(age, age))
    first, second = ((folder / id).stat().st_ino for id in ids[:2])
    assert tier.put({ids[3]: b"d" * CHUNK}) == 1
    assert (folder / ids[3]).stat().st_ino == first and tier.get(ids[3]) == b"d" * CHUNK
    short = f"b3.{9:032x}-7"
    assert tier.put({short: b"shorter"}) == 1  # than what was there
    assert (folder / short).stat().st_ino == second and tier.get(short) == b"shorter"
    assert tier.put({ids[4]: b"e" * CHUNK}) == 1 and tier.get(ids[2]) is None
    assert tier.nbytes == 2 * CHUNK + 7 and tier.filed_nbytes >= tier.nbytes
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_near_tiers_keep_the_last_snapshots(bucket, tiers):
    bodies = BODY[: 4 * CHUNK], BODY[3 * CHUNK : 8 * CHUNK]
    old, new = commit(bucket, Ref(1, 1), bodies[0]), commit(bucket, Ref(1, 2), bodies[1])
    fill(tiers, old, bodies[0])
    fill(tiers, new, bodies[1])
    tiers[0].keep([])  # nothing is newer than nothing: all stay
    assert len(tiers[0].list()) == 8
    for tier in tiers:
        tier.keep(chunks_of([new]))
    assert set(tiers[0].list()) == chunks_of([new]) == set(tiers[1].list())
    store = Tiered(bucket, old, tiers)
    # from the bucket, but for the chunk they share
    assert read(store, old, 0, 4 * CHUNK) == bodies[0]
    assert store.read_nbytes == {"memory": CHUNK, "bucket": 3 * CHUNK}


def test_a_lost_folder_costs_nothing_but_time(bucket, tiers, tmp_path):
    manifest = commit(bucket)
    fill(tiers, manifest)
    for name in ("shm", "disk"):
        (tmp_path / name).rename(tmp_path / f"{name}-lost")
    store = Tiered(bucket, manifest, tiers)
    assert read(store, manifest) == BODY and store.tier == "bucket"
    fill(tiers, manifest)
    assert tiers[0].list() == []


class Counting(MemoryStore):
    """Counts the bytes of parts that are read, and lets all readers begin at once."""

    def __init__(self, objects: dict[str, bytes]):
        super().__init__(objects=objects)
        self.read_nbytes, self._lock = 0, threading.Lock()

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        data = super().get(key, start, end)
        if "/parts/" in key:
            with self._lock:
                self.read_nbytes += len(data)
        return data


def test_a_node_fetches_each_byte_once(tmp_path):
    objects: dict[str, bytes] = {}
    manifest = commit(MemoryStore(objects=objects))
    store, start, found = Counting(objects), threading.Barrier(4), []

    def rank() -> None:
        mine = Tiered(store, manifest, [FolderTier("memory", tmp_path, 1 << 20)])
        start.wait(30)
        found.append(read(mine, manifest))

    ranks = [threading.Thread(target=rank) for _ in range(4)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(60)
    assert found == [BODY] * 4 and store.read_nbytes == len(BODY)


# ---- peers ---------------------------------------------------------------------------------------
def test_a_peer_gives_what_it_holds_to_those_who_know_the_secret(bucket, tmp_path):
    theirs = FolderTier("memory", tmp_path / "a", 1 << 20)
    manifest = commit(bucket)
    fill([theirs], manifest)
    with contextlib.closing(ChunkServer(lambda: [theirs], "127.0.0.1", "secret")) as server:
        mine = [
            FolderTier("memory", tmp_path / "b", 1 << 20),
            PeerTier([(server.addr, server.port)], "secret"),
        ]
        store = Tiered(bucket, manifest, mine)
        assert read(store, manifest) == BODY and store.tier == "peer"
        assert len(mine[0].list()) == 22  # it lies here now
        id = chunk_id(manifest.parts[0], 0)
        assert PeerTier([(server.addr, server.port)], "guess").get(id) is None
        wire = _PeerStream((server.addr, server.port), "secret", 10)
        for name, code in ((id, 200), ("../owner-1", 404), ("0" * 32 + "-5", 404), ("-1", 404)):
            assert wire.ask("GET", "chunk", name, None)[0] == code
        wire.close()
        path = tmp_path / "a" / "chunks" / id
        path.write_bytes(bytes(CHUNK))  # a peer's bad memory
        told: list[str] = []
        far = Tiered(bucket, manifest, mine[1:], lambda tier, what: told.append(tier))
        assert read(far, manifest) == BODY and told == ["peer"] and far.tier == "peer+bucket"
    with pytest.raises(ValueError, match="secret"):
        ChunkServer(lambda: [theirs], "127.0.0.1", "")


def test_a_peer_keeps_what_is_left_with_it_if_it_is_what_it_says(bucket, tmp_path):
    manifest, kept = commit(bucket), FolderTier("memory", tmp_path, 10 * CHUNK)
    with contextlib.closing(
        ChunkServer(lambda: [kept], "127.0.0.1", "secret", keep=kept)
    ) as server:
        at = (server.addr, server.port)
        peer = PeerTier([at], "secret")
        chunks = [
            one for block in blocks_of_part(manifest.parts[0], memoryview(BODY)) for one in block.items()
        ]
        assert peer.put(dict(chunks[:10])) == 10 and set(kept.list()) == {
            id for id, _ in chunks[:10]
        }
        assert peer.put(dict(chunks[10:12])) == 2 and kept.nbytes == 10 * CHUNK  # within its budget
        assert (
            PeerTier([at], "secret").put({chunks[12][0]: bytes(CHUNK)}) == 0
            and chunks[12][0] not in kept.list()
        )
        assert PeerTier([at], "secret").put({chunks[12][0]: bytes(5)}) == 0
        assert PeerTier([at], "guess").put(dict(chunks[12:13])) == 0
        assert PeerTier([at], "secret").get(chunks[11][0]) == chunks[11][1]
    assert (
        PeerTier([at], "secret").put(dict(chunks[:1]))
        == 0
        == PeerTier([], "secret").put(dict(chunks[:1]))
    )
    # one that only gives
    with contextlib.closing(ChunkServer(lambda: [kept], "127.0.0.1", "secret")) as server:
        assert PeerTier([(server.addr, server.port)], "secret").put(dict(chunks[12:13])) == 0


def test_peers_that_are_gone_silent_or_killed_cost_one_try(bucket, tmp_path):
    manifest = commit(bucket)
    silent = socket.create_server(("127.0.0.1", 0))  # accepts, never answers
    gone = socket.create_server(("127.0.0.1", 0))
    gone_port = gone.getsockname()[1]
    gone.close()
    theirs = FolderTier("memory", tmp_path / "a", 1 << 20)
    fill([theirs], manifest)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom storage.tiers.peer_transport import ChunkServer\n"
        "from storage.tiers.folder_tier import FolderTier\n"
        "mine = FolderTier('memory', Path(sys.argv[1]), 1 << 20)\ns = ChunkServer(lambda: [mine], "
        "'127.0.0.1', 'secret')\n"
        "print(s.port, flush=True)\ntime.sleep(600)"
    )
    node = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert node.stdout is not None
        alive = ("127.0.0.1", int(node.stdout.readline()))
        peers = PeerTier(
            [("127.0.0.1", gone_port), silent.getsockname(), alive], "secret", timeout_s=5.0
        )
        store = Tiered(bucket, manifest, [peers])
        assert read(store, manifest, 0, CHUNK) == BODY[:CHUNK] and store.tier == "peer"
        assert peers._gone == {("127.0.0.1", gone_port), silent.getsockname()}
        node.send_signal(signal.SIGKILL)
        node.wait(30)
        assert read(store, manifest) == BODY and store.tier == "peer+bucket"
        assert alive in peers._gone
    finally:
        node.kill()
        node.wait(30)
        silent.close()


# ---- who owns a folder ---------------------------------------------------------------------------
def test_folders_of_dead_owners_are_removed_and_those_of_living_ones_are_not(tmp_path):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom storage.tiers.folder_tier import FolderTier, "
        "OwnedFolder\n"
        "f = OwnedFolder(Path(sys.argv[1]), sys.argv[2])\nFolderTier('disk', f.path, 1 << "
        "20).put({'b3.' + '0' * 32 + '-4': b'abcd'})\n"
        "print(f.path, flush=True)\ntime.sleep(600)"
    )
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), n], stdout=subprocess.PIPE, text=True
        )
        for n in ("one", "two")
    ]
    try:
        paths = [o.stdout.readline().strip() for o in owners if o.stdout is not None]
        mine = OwnedFolder(tmp_path, "mine")
        assert all(map(os.path.exists, paths))
        owners[0].kill()
        owners[0].wait(30)
        # the same run on the same node finds what its dead agent left
        again = OwnedFolder(tmp_path, "one")
        assert str(again.path) == paths[0] and FolderTier("disk", again.path, 1 << 20).list() == [
            "b3." + "0" * 32 + "-4"
        ]
        again.close()
        owners[1].kill()
        owners[1].wait(30)
        OwnedFolder(tmp_path, "mine").close()
        assert mine.path.exists() and not any(map(os.path.exists, paths))
        mine.close()
    finally:
        for o in owners:
            o.kill()
            o.wait(30)


def test_a_killed_process_leaves_no_lock_and_no_half_chunk(bucket, tmp_path):
    manifest = commit(bucket)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom storage.tiers.folder_tier import FolderTier\n"
        "t = FolderTier('memory', Path(sys.argv[1]), 1 << 20)\n"
        "import contextlib\nwith contextlib.ExitStack() as s:\n"
        "    [s.enter_context(t.locked(f'{i:02x}', 5)) for i in range(256)]; "
        "s.enter_context(t.locked('put', 5))\n"
        "    (Path(sys.argv[1]) / 'chunks' / '.half').write_bytes(b'x' * 99)\n    print('held', "
        "flush=True)\n    time.sleep(600)"
    )
    folder = OwnedFolder(tmp_path, "run")
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(folder.path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        tier = FolderTier("memory", folder.path, 1 << 20)
        impatient = Tiered(bucket, manifest, [tier], node_wait_s=0.05)
        with tier.locked("put", 0.0) as mine:
            assert not mine
        assert tier.get("0" * 32 + "-1") is None
        holder.kill()
        holder.wait(30)
        assert read(impatient, manifest) == BODY and impatient.tier == "bucket"
        assert len(tier.list()) == 22
        folder.close()
        OwnedFolder(tmp_path, "run").close()
        assert not list(folder.path.glob("chunks/.*"))
    finally:
        holder.kill()
        holder.wait(30)
