"""Nodes read data through each other's caches before the bucket: what one has read the others need
not; what a peer says is never trusted, and a peer is never needed."""

import contextlib
import hashlib
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

import harness
from harness.bucket.archive import read_facts
from harness.core.facts import EpochStarted, StepsTimed
from harness.core.read_traffic import CACHE, PEER
from harness.look.audit.audit import audit
from harness.look.audit.audit_samples import with_contents
from harness.uploader.node_tiers import HOMES, Homes
from storage.snapshots.manifest import BLAKE3, chunk_hash
from storage.stores.store_urls import open_store
from storage.tiers.folder_tier import FolderTier
from storage.tiers.peer_transport import DATA, ChunkServer, PeerTier
from support import buckets
from support.corpora import WORDS, prepared, shards_nbytes, small_corpus
from support.worlds import history, train

SCRIPT = str(Path(__file__).parents[1] / "support" / "corpus_trainer.py")
SECRET, BOUND = "secret", 1 << 20


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def wanted(corpus):
    return read(harness.data.Tokens(corpus, 64))


@pytest.fixture
def node(tmp_path):
    """The cache of another node, which serves it."""
    held = FolderTier("data", tmp_path / "other", BOUND)
    server = ChunkServer(tuple, "127.0.0.1", SECRET, data=lambda: [held])
    with contextlib.closing(server):
        yield SimpleNamespace(held=held, folder=tmp_path / "other", at=(server.addr, server.port))


def opened(corpus, folder, *peers, secret=SECRET, once=False, **more):
    dataset = harness.data.Tokens(corpus, 64, cache=folder, **({"disk_nbytes": BOUND} | more))
    if peers:
        dataset.ask_peers(PeerTier(peers, secret, 10.0, kind=DATA), 1 + len(peers), once)
    return dataset


def read(dataset):
    return [x.tolist() for x, _ in dataset.__getitems__(range(len(dataset)))]


def warmed(dataset):
    """As what fetches ahead does it."""
    for piece in dict.fromkeys(dataset.pieces(range(len(dataset)))):
        piece.warm()
    return dataset


# ---- two nodes -----------------------------------------------------------------------------------
def test_what_one_node_has_read_another_does_not_ask_the_bucket_for(corpus, wanted, node, tmp_path):
    assert read(opened(corpus, node.folder)) == wanted
    second = opened(corpus, tmp_path / "mine", node.at)
    assert read(second) == wanted
    assert second.traffic[0].requests == 0 and second.traffic[0].nbytes == {PEER: shards_nbytes(corpus)}
    third = opened(corpus, tmp_path / "mine", node.at)  # another process of that node
    assert read(warmed(third)) == wanted and third.traffic[0].nbytes.keys() == {CACHE}


def test_what_is_fetched_ahead_is_left_for_the_other_node(corpus, wanted, node, tmp_path):
    first = warmed(opened(corpus, tmp_path / "mine", node.at))
    assert first.traffic[0].nbytes["file"] == shards_nbytes(corpus) == node.held.nbytes
    there = opened(corpus, node.folder)
    assert read(there) == wanted and there.traffic[0].requests == 0
    # what came from a peer is not sent back, nor what the own cache had
    node.held.put = None
    again = warmed(opened(corpus, tmp_path / "mine", node.at))
    third = warmed(opened(corpus, tmp_path / "third", node.at))
    assert again.traffic[0].requests == third.traffic[0].requests == 0


@pytest.mark.parametrize("enough", [True, False])
def test_data_that_one_node_reads_once_in_a_pass_is_left_only_if_a_whole_pass_has_room(
    corpus, node, tmp_path, enough
):
    room = -(-shards_nbytes(corpus) // 2) if enough else shards_nbytes(corpus) // 2 - 1024
    warmed(opened(corpus, tmp_path / "mine", node.at, once=True, disk_nbytes=room))
    assert bool(node.held.list()) is enough


def test_wrong_bytes_of_a_peer_are_not_taken(corpus, wanted, node, tmp_path):
    read(opened(corpus, node.folder))
    for path in (node.folder / "chunks").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    mine = opened(corpus, tmp_path / "mine", node.at)
    assert read(mine) == wanted
    assert mine.traffic[0].nbytes["file"] == shards_nbytes(corpus) and not mine.traffic[0].nbytes[PEER]
    # nor does a peer take any
    id = node.held.list()[0]
    assert PeerTier([node.at], SECRET, 10.0, kind=DATA).put({id: b"\xff" * 9}) == 0


@pytest.mark.parametrize("why", ["gone", "of another run"])
def test_a_peer_that_does_not_answer_is_not_needed(corpus, wanted, node, tmp_path, why):
    read(opened(corpus, node.folder))
    other = ("127.0.0.1", 1) if why == "gone" else node.at
    mine = opened(corpus, tmp_path / "mine", other, secret=SECRET if why == "gone" else "another")
    assert read(warmed(mine)) == wanted and not mine.traffic[0].nbytes[PEER]


def test_snapshots_and_data_are_asked_for_apart(corpus, tmp_path):
    """Who restores is not given data, nor are these kept where snapshots are."""
    held, kept = FolderTier("data", tmp_path / "d", BOUND), FolderTier("memory", tmp_path / "s", BOUND)
    server = ChunkServer(lambda: [kept], "127.0.0.1", SECRET, kept, data=lambda: [held])
    chunk = b"some bytes"
    id = f"{chunk_hash(chunk)}-{len(chunk)}"
    with contextlib.closing(server):
        at = [(server.addr, server.port)]
        data, snapshots = PeerTier(at, SECRET, 10.0, kind=DATA), PeerTier(at, SECRET, 10.0)
        assert data.put({id: chunk}) == 1 and data.get(id) == chunk
        assert held.list() == [id] and kept.list() == [] and snapshots.get(id) is None
        assert snapshots.put({id: chunk}) == 1 and kept.list() == [id]
        for kind in ("chunks", "", "data/chunk"):  # of nothing that is served
            assert PeerTier(at, SECRET, 10.0, kind=kind).get(id) is None


def test_a_node_that_keeps_no_data_says_so(corpus, wanted, tmp_path):
    with contextlib.closing(ChunkServer(tuple, "127.0.0.1", SECRET)) as server:
        mine = opened(corpus, tmp_path / "mine", (server.addr, server.port))
        assert read(warmed(mine)) == wanted and not mine.traffic[0].nbytes[PEER]


# ---- whose it is ---------------------------------------------------------------------------------
IDS = [f"{BLAKE3}{hashlib.md5(str(i).encode()).hexdigest()}-1024" for i in range(600)]
NAMES = [f"m{i:04d}" for i in range(1, 8)]


def homes(names, me=""):
    servers = SimpleNamespace(of=lambda name: (name, 1))
    ask = Homes(names, me, servers)
    return {id: [name for name, _ in ask(id)] for id in IDS}


def test_all_nodes_know_a_chunk_s_home_and_nobody_asks_itself():
    everyone = homes(NAMES)
    assert all(len(found) == HOMES for found in everyone.values())
    assert homes(NAMES[::-1]) == everyone
    for me in NAMES:
        assert homes(NAMES, me) == {
            id: [name for name in found if name != me] for id, found in everyone.items()
        }
    servers = SimpleNamespace(of=lambda name: (name, 1))
    for id, found in everyone.items():  # and only who is not its home leaves a chunk there
        assert Homes(NAMES, found[1], servers).keeper(id) == (found[0], 1)
        assert Homes(NAMES, found[0], servers).keeper(id) is None
    share = Counter(found[0] for found in everyone.values())
    assert min(share.values()) > len(IDS) / len(NAMES) / 2


def test_a_node_that_comes_or_goes_moves_its_own_chunks_only():
    before, after = homes(NAMES[:-1]), homes(NAMES)
    for id in IDS:
        if after[id][0] != before[id][0]:
            # the newcomer's; and who is asked next is who had it
            assert after[id][0] == NAMES[-1] and after[id][1] == before[id][0]


def test_a_member_that_serves_nothing_is_passed_over():
    servers = SimpleNamespace(of=lambda name: None)
    assert list(Homes(NAMES, NAMES[0], servers)(IDS[0])) == []
    assert Homes(NAMES, NAMES[0], servers).keeper(IDS[0]) is None


# ---- a world of real nodes -----------------------------------------------------------------------
@pytest.mark.proof
def test_two_nodes_fetch_a_shuffled_corpus_about_once_together(nodes, tmp_path, monkeypatch):
    """Each reads about all of it; what one has fetched the other is given. The same as one process
    that reads a folder."""
    text, rng = tmp_path / "text", random.Random(5)
    text.mkdir()
    for i in range(4):
        (text / f"{i}.txt").write_text(" ".join(rng.choices(WORDS, k=200_000)))
    flags = ["--length", 1024, "--total", 260]
    seen = []
    with buckets.moto(seen=seen) as url:
        env = {"AWS_ENDPOINT_URL": url, "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        for name, value in {**env, "AWS_ACCESS_KEY_ID": "test"}.items():
            monkeypatch.setenv(name, value)
        # moto's buckets live as long as this process
        corpus, nodes.url = (f"s3://my-bucket/{tmp_path.name}/{what}" for what in ("corpus", "run"))
        prepared(corpus, text, chunk_nbytes=16 << 10, shard_nbytes=1 << 20, unit_nbytes=1 << 20)
        for n in (1, 2):
            nodes.start(
                *(corpus, *flags),
                script=SCRIPT,
                agent=("--set", f"stage_dir={tmp_path / f'stage{n}'}", "--min-nodes", "2"),
                env={
                    **env,
                    "AWS_ACCESS_KEY_ID": f"node{n}",
                    "HARNESS_DATA_CACHE": str(tmp_path / f"cache{n}"),
                    "HARNESS_DATA_CACHE_GIB": "0.0157",  # an eighth is fetched ahead: 2 MiB
                },
            )
        assert nodes.codes() == [0, 0], nodes.logs()
        assert {e.world for e in nodes.facts(EpochStarted)} == {2}, nodes.logs()
        store, whole = open_store(nodes.url), shards_nbytes(corpus)
        told = [s.fact for s in read_facts(store) if isinstance(s.fact, StepsTimed)]
        found = sum((Counter(one.read_nbytes) for one in told), Counter())
        # each node reads nearly all of it: without peers the bucket would be asked for twice as much
        assert found[PEER] > whole / 4, found
        assert found["s3"] + found[PEER] > 1.5 * whole, found
        assert found["s3"] < 1.6 * whole, found
        assert with_contents(audit(store), store, [corpus]).ok
        prepared(tmp_path / "made", text, chunk_nbytes=16 << 10, shard_nbytes=1 << 20, unit_nbytes=1 << 20)
        train(tmp_path / "calm", 1, tmp_path / "made", *flags, script=SCRIPT)
        calm = [(r.step, r.digest, r.loss) for r in history(tmp_path / "calm")]
        assert [(r.step, r.digest, r.loss) for r in history(nodes.url)] == calm
