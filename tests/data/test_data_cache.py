"""The cache of a node is shared, bounded, never trusted and never needed; data is fetched ahead in
the order of the plan, and what was read is counted."""

import contextlib
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import harness
from harness.bucket.archive import read_facts
from harness.core.batch import Batching, plan, sample_seed
from harness.core.facts import StepsTimed
from harness.core.read_traffic import CACHE, Traffic
from harness.core.world import BadInput
from harness.data import card
from harness.data.card import CorpusCorrupt
from harness.data.chunk_cache import opened
from harness.data.corpus import CorpusReader, from_store
from harness.loops.shared_batches import SharedLoader
from harness.worker.batches.loader import map_style
from harness.worker.batches.prefetch import Prefetch, ReadsAhead
from storage.errors import StoreError
from storage.stores.store_urls import open_store
from storage.testing.faulty_store import corrupt
from support import buckets
from support.corpora import files, prepared, shards_nbytes, small_corpus
from support.worlds import train

SCRIPT = str(Path(__file__).parents[1] / "support" / "corpus_trainer.py")
WITHIN_S = 60.0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def tokens(corpus):
    return [x.tolist() for x, _ in whole(harness.data.Tokens(corpus, 64))]


def whole(dataset, seed=None):
    order = list(range(len(dataset)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    found = dict(zip(order, dataset.__getitems__(order), strict=True))
    return [found[i] for i in range(len(dataset))]


def read(url, cache, **more):
    dataset = harness.data.Tokens(url, 64, cache=cache, **({"disk_nbytes": 1 << 20} | more))
    return dataset, [x.tolist() for x, _ in whole(dataset, more.get("seed"))]


def cached(folder):
    return [p for p in (folder / "chunks").iterdir() if not p.name.startswith(".")]


def forked(do):
    """A process that does it, and then ends at once."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    with contextlib.suppress(BaseException):
        do()
        status = 0
    os._exit(status)


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---- the cache -----------------------------------------------------------------------------------
def test_what_one_has_read_others_find(corpus, tokens, tmp_path):
    first, found = read(corpus, tmp_path / "node")
    assert found == tokens and first.traffic[0].nbytes["file"] == shards_nbytes(corpus)
    again, found = read(corpus, tmp_path / "node")
    assert found == tokens and again.traffic[0].requests == 0
    assert (tmp_path / "node").stat().st_mode & 0o077 == 0
    # by content: another corpus with the same tokens has the same chunks
    prepared(tmp_path / "twin", files(tmp_path / "text", 120), seed=5)
    twin, found = read(str(tmp_path / "twin"), tmp_path / "node")
    assert found == tokens and twin.traffic[0].requests == 0


def test_a_large_index_is_fetched_once_for_a_node(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(card, "KEPT_NBYTES", 0)
    url = prepared_twin(tmp_path)
    _, found = read(url, tmp_path / "node")
    assert found == tokens
    for path in (tmp_path / "twin" / "index").iterdir():  # of the same size: nobody reads it
        path.write_bytes(bytes(path.stat().st_size))
    again, found = read(url, tmp_path / "node")
    assert found == tokens and again.traffic[0].requests == 0
    for path in cached(tmp_path / "node"):  # a damaged disk: it is fetched again, and is wrong
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(CorpusCorrupt, match="wanted the index that the card names"):
        read(url, tmp_path / "node")


def prepared_twin(tmp_path):
    prepared(tmp_path / "twin", files(tmp_path / "text", 120))
    return str(tmp_path / "twin")


def test_two_processes_that_fill_one_cache_fetch_each_chunk_once(corpus, tokens, tmp_path):
    log = tmp_path / "asked"

    def noting(store, size):
        fetch = from_store(store, size)

        def get(shard, chunk):
            with open(log, "a") as out:
                out.write(f"{shard} {chunk}\n")
            time.sleep(0.002)  # so that the other one comes meanwhile
            return fetch(shard, chunk)

        return get

    def fill():
        assert read(corpus, tmp_path / "node", fetch=noting)[1] == tokens

    pids = [forked(fill) for _ in range(3)]
    assert [ended(pid) for pid in pids] == [0, 0, 0]
    asked = Counter(log.read_text().splitlines())
    assert len(asked) == len(cached(tmp_path / "node")) > 20 and set(asked.values()) == {1}


def test_killed_while_filling_nothing_wrong_is_read(corpus, tokens, tmp_path):
    rng, node = random.Random(6), tmp_path / "node"
    budget = shards_nbytes(corpus) // 3

    def fill():
        for seed in range(1000):
            dataset = harness.data.Tokens(corpus, 64, cache=node, disk_nbytes=budget)
            whole(dataset, seed)

    for _ in range(16):
        pids = [forked(fill) for _ in range(2)]
        time.sleep(rng.uniform(0.0, 0.04))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            assert ended(pid) == -signal.SIGKILL
    assert read(corpus, node, disk_nbytes=budget)[1] == tokens
    there = sum(p.stat().st_size for p in (node / "chunks").iterdir())
    assert 0 < there <= budget  # with what was left half written


def test_the_bound_holds_while_several_fill(corpus, tokens, tmp_path):
    node, budget = tmp_path / "node", 16 << 10

    def fill():
        for seed in range(3):
            dataset = harness.data.Tokens(corpus, 64, cache=node, disk_nbytes=budget)
            assert [x.tolist() for x, _ in whole(dataset, seed)] == tokens

    pids, most = [forked(fill) for _ in range(3)], 0
    while pids:
        with contextlib.suppress(FileNotFoundError):
            most = max(most, sum(p.stat().st_size for p in (node / "chunks").iterdir()))
        pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG) == (0, 0)]
    assert budget // 2 < most <= budget


def test_a_damaged_file_is_fetched_again_and_replaced(corpus, tokens, tmp_path):
    read(corpus, tmp_path / "node")
    there = sorted(cached(tmp_path / "node"))
    rng = random.Random(7)
    for i, path in enumerate(there):
        data = bytearray(path.read_bytes())
        match i % 4:
            case 0:
                data[rng.randrange(len(data))] ^= 4
            case 1:
                del data[rng.randrange(len(data)) :]
            case 2:
                data += b"x"
        path.write_bytes(data)
    dataset, found = read(corpus, tmp_path / "node")
    assert found == tokens
    assert dataset.traffic[0].requests == len(there) - len(there[3::4])
    assert read(corpus, tmp_path / "node")[0].traffic[0].requests == 0


def test_a_damaged_shard_does_not_come_into_the_cache(corpus, tokens, tmp_path):
    prepared(tmp_path / "made", files(tmp_path / "text", 120))
    url = str(tmp_path / "made")
    store = open_store(url)
    corrupt(store, store.list("shards/")[2], "flip", random.Random(1))
    dataset = harness.data.Tokens(url, 64, cache=tmp_path / "node", disk_nbytes=1 << 20)
    batching = Batching(len(dataset), 4, 4, 1, False)
    with pytest.raises(CorpusCorrupt, match=r"shards/\w{32}.bin: wanted"):
        list(map_style(dataset, batching, plan(1, 1), 0, 1, len(dataset) // 4, None, 0, False))
    dataset, found = read(corpus, tmp_path / "node")
    assert found == tokens and dataset.traffic[0].requests >= 1


@pytest.mark.parametrize("trouble", ["full", "a file", "others may write", "read only"])
def test_a_cache_that_cannot_be_used_is_told_of_once_and_gone_without(corpus, tokens, tmp_path, trouble):
    node = tmp_path / "node"
    match trouble:
        case "a file":
            node.write_text("")
        case "others may write":
            node.mkdir()
            node.chmod(0o777)

    def fill():
        if trouble == "full":  # writes of files fail from here on, as on a disk without room
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        if trouble == "read only":
            (tmp_path / "node").mkdir(mode=0o700)
            (tmp_path / "node" / "chunks").write_text("")
        with pytest.warns(RuntimeWarning, match=r"data are read without it") as said:
            assert read(corpus, node)[1] == tokens
        assert len(said) == 1

    assert ended(forked(fill)) == 0


def test_where_the_cache_is_and_what_bounds_it(tmp_path):
    asked = {"HARNESS_DATA_CACHE": str(tmp_path / "told"), "HARNESS_DATA_CACHE_GIB": "0.5"}
    found = opened("s3://b/c", environ=asked)
    assert (found.folder, found.nbytes) == (tmp_path / "told", 1 << 29)
    found = opened("s3://b/c", tmp_path / "own", 1 << 20, asked)
    assert (found.folder, found.nbytes) == (tmp_path / "own", 1 << 20)
    found = opened("s3://b/c", environ={"XDG_CACHE_HOME": str(tmp_path)})
    assert found.folder == tmp_path / "spotharness" / "data"
    assert 0 < found.nbytes <= os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize // 5
    assert opened("file:///corpus", environ={"XDG_CACHE_HOME": str(tmp_path)}) is None
    assert opened("file:///corpus", environ=asked) is not None
    for none in ({"cache": None}, {"cache": "off"}, {"disk_nbytes": 0}):
        assert opened("s3://b/c", **none, environ=asked) is None
    assert opened("s3://b/c", environ={"HARNESS_DATA_CACHE": "off"}) is None
    for wrong in ("x", "-1", "nan"):
        with pytest.raises(BadInput, match="wanted GiB"):
            opened("s3://b/c", environ={"HARNESS_DATA_CACHE_GIB": wrong})
    with pytest.raises(BadInput, match="wanted bytes"):
        opened("s3://b/c", disk_nbytes=-1, environ=asked)


# ---- fetching ahead ------------------------------------------------------------------------------
class Shelf:
    """A dataset of 64 pieces of 100 bytes, two samples in each; `gate`: nothing is fetched until it
    is open."""

    def __init__(self, most=1000, gate=None):
        self.most, self.gate, self.warmed = most, gate, []
        self.traffic = [Traffic("shelf")]

    def pieces(self, indices):
        return [Book(self, i // 2) for i in dict.fromkeys(indices)]

    def ahead_nbytes(self, processes):
        return self.most // processes


class Book:
    nbytes = 100

    def __init__(self, shelf, number):
        self.shelf, self.number = shelf, number

    def __hash__(self):
        return self.number

    def __eq__(self, other):
        return self.number == other.number

    def joined(self, other):
        return None

    def warm(self):
        self.shelf.traffic[0].coming[f"book {self.number}"] = time.monotonic()
        if self.shelf.gate is not None:
            assert self.shelf.gate.wait(WITHIN_S)
        self.shelf.warmed.append(self.number)
        self.shelf.traffic[0].coming.clear()


class ShelfOfItems(Shelf):
    def __len__(self):
        return 128

    def __getitem__(self, i):
        return i


def test_a_mixture_fetches_ahead_where_it_serves_somebody():
    near, far, tight = ShelfOfItems(0), ShelfOfItems(1000), ShelfOfItems(400)
    mixture = harness.data.Mixture({"near": near, "far": far, "tight": tight})
    assert isinstance(mixture, ReadsAhead)
    assert mixture.ahead_nbytes(2) == 200  # it is all of one source's, perhaps
    assert [piece.shelf for piece in mixture.pieces([0, 130, 260, 1])] == [far, tight]
    assert harness.data.Mixture({"near": near}).ahead_nbytes(1) == 0


def until(true):
    deadline_s = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_what_comes_first_is_fetched_first_and_no_more_than_may_be_ahead():
    shelf = Shelf(most=1000)
    order = [[4 * i, 4 * i + 2] for i in range(32)]  # two books each
    prefetch = Prefetch(shelf, order, 1, print)
    assert isinstance(shelf, ReadsAhead)
    try:
        until(lambda: len(shelf.warmed) == 10)
        assert sorted(shelf.warmed) == list(range(10)) and prefetch.ahead_nbytes == 1000
        for taken in range(1, 31):
            prefetch.taken()
            assert prefetch.ahead_nbytes <= 1000
            until(lambda taken=taken: len(shelf.warmed) >= min(64, 2 * taken + 8))
            assert max(shelf.warmed) <= 2 * taken + 10
        until(lambda: len(shelf.warmed) == 64)
        assert sorted(shelf.warmed) == list(range(64))  # each once
    finally:
        prefetch.close()


def test_a_piece_counts_once_and_a_large_micro_batch_passes_alone():
    shelf = Shelf(most=300)
    prefetch = Prefetch(shelf, [[0, 1], [1, 2], [0, 2], list(range(4, 40)), [50]], 1, print)
    try:
        until(lambda: len(shelf.warmed) == 2)
        assert prefetch.ahead_nbytes == 200  # the large one waits until it is alone
        for _ in range(3):
            prefetch.taken()
        until(lambda: len(shelf.warmed) == 20)
        assert prefetch.ahead_nbytes == 1800
        prefetch.taken()
        until(lambda: len(shelf.warmed) == 21)
    finally:
        prefetch.close()


def test_lanes_that_are_read_in_turn_are_fetched_once():
    """Each has its own pieces, for many of its micro-batches, and all together are more than may be
    ahead; then all go on to others."""
    shelf, lanes = Shelf(most=250), 4
    turns = [[4 * lane, 4 * lane + 2] for lane in range(lanes)]  # two books each
    order = turns * 20 + [[16 + i for i in turn] for turn in turns] * 20
    prefetch = Prefetch(shelf, order, 1, print)
    try:
        for taken in range(lanes):
            until(lambda taken=taken: len(shelf.warmed) >= 2 * taken + 2)
            prefetch.taken()
        # what is in use is near: so the next books of all lanes may be ahead, though they are more
        until(lambda: len(shelf.warmed) == 16)
        assert sorted(shelf.warmed) == list(range(16)) and prefetch.ahead_nbytes == 800
        for _ in range(len(order) - lanes):
            prefetch.taken()
        until(lambda: not prefetch.ahead_nbytes)
        assert len(shelf.warmed) == 16
    finally:
        prefetch.close()


def test_what_is_open_does_not_hinder_what_comes_next():
    """As blocks are read: the same pieces for many micro-batches, and then others at once."""
    shelf = Shelf(most=400)
    order = [[0, 2, 4, 6]] * 20 + [[8, 10, 12, 14]] * 20
    prefetch = Prefetch(shelf, order, 1, print)
    try:
        until(lambda: len(shelf.warmed) == 4)
        prefetch.taken()  # the first four are in use, and needed for long
        until(lambda: len(shelf.warmed) == 8)
        assert sorted(shelf.warmed) == list(range(8)) and prefetch.ahead_nbytes == 400
    finally:
        prefetch.close()


def test_who_leaves_stops_what_is_ahead():
    gate = threading.Event()
    shelf = Shelf(most=6400, gate=gate)
    before = threading.active_count()
    given = Prefetch(shelf, [[2 * i] for i in range(64)], 1, print).over(iter("abc"))
    assert next(given) == "a"
    given.close()
    gate.set()
    until(lambda: threading.active_count() <= before)
    assert len(shelf.warmed) < 64


def test_a_store_that_is_slow_is_named():
    gate, told = threading.Event(), []

    def tell(what):
        told.append(what)
        gate.set()

    shelf = Shelf(gate=gate)

    def batches():
        assert gate.wait(WITHIN_S)
        yield "late"

    assert list(Prefetch(shelf, [[0]], 1, tell, late_s=0.05).over(batches())) == ["late"]
    assert len(told) == 1 and "book 0 has been on its way for" in told[0]
    assert "its store is slow" in told[0]


def steps(dataset, ranks, rank, first, last, workers=0, seed=3, shuffle=True):
    """What `rank` reads of steps first..last, by positions."""
    batching = Batching(len(dataset), 8, 2, seed, shuffle)
    found = {}
    for micro in map_style(dataset, batching, plan(4, ranks), rank, first, last, None, workers, False):
        found |= dict(zip(micro.positions.tolist(), micro.data[0].tolist(), strict=True))
    return found


def test_a_resize_reads_the_same_through_the_same_cache(corpus, tmp_path):
    more = {"cache": tmp_path / "node", "disk_nbytes": 1 << 20}
    wanted = steps(harness.data.Tokens(corpus, 64, cache=None), 1, 0, 1, 12)
    two = [harness.data.Tokens(corpus, 64, **more) for _ in range(2)]
    found = {}
    for rank, dataset in enumerate(two):
        found |= steps(dataset, 2, rank, 1, 6)
    alone = harness.data.Tokens(corpus, 64, **more)
    found |= steps(alone, 1, 0, 7, 12)
    assert found == wanted
    read_nbytes = sum(one.traffic[0].nbytes["file"] for one in (*two, alone))
    assert read_nbytes == sum(p.stat().st_size for p in cached(tmp_path / "node"))
    assert two[1].traffic[0].nbytes[CACHE] + alone.traffic[0].nbytes[CACHE] > 0


def test_nothing_is_fetched_ahead_for_processes_that_read_by_themselves(corpus):
    dataset = harness.data.Tokens(corpus, 64)
    assert dataset.ahead_nbytes(1) == 0 and len(steps(dataset, 1, 0, 1, 4, workers=1)) == 32
    assert dataset.traffic[0].requests == 0


# ---- micro-batches -------------------------------------------------------------------------------
class Noted(harness.data.Tokens):
    """A script's own: it draws."""

    def __getitem__(self, i):
        return (*super().__getitem__(i), random.random(), torch.rand(1).item())


def masked(items):
    """A collate function that draws."""
    return [[x.tolist() for x in item] for item in items], torch.rand(2).tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_whole_micro_batches_are_what_samples_one_by_one_are(corpus, workers):
    plain, noted = harness.data.Tokens(corpus, 64), Noted(corpus, 64)
    assert not plain.draws and noted.draws
    assert not harness.data.Mixture({"a": plain}, weights={"a": 1}).draws
    assert harness.data.Mixture({"a": plain, "b": noted}, weights={"a": 1, "b": 1}).draws

    def batches(dataset, collate):
        batching = Batching(len(dataset), 8, 4, 5, True)
        own = plan(batching.micro_batches, 1)
        return [(m.positions.tolist(), m.data) for m in
                map_style(dataset, batching, own, 0, 2, 5, collate, workers, False)]

    class OneByOne(harness.data.Tokens):
        draws = True

    wanted = batches(OneByOne(corpus, 64), masked)
    assert batches(plain, masked) == wanted
    for positions, drawn in batches(noted, list):
        for position, item in zip(positions, drawn, strict=True):
            seed = sample_seed(5, position)
            torch.manual_seed(seed)
            assert item[2:] == (random.Random(seed).random(), torch.rand(1).item())


def test_items_of_a_mixture_come_where_they_were_asked(corpus):
    a, b = harness.data.Tokens(corpus, 64), harness.data.Tokens(corpus, 32)
    mixture = harness.data.Mixture({"a": a, "b": b}, weights={"a": 1, "b": 1})
    asked = [3, len(a) + 1, 0, len(a), 3, len(mixture) - 1]
    found = [x.tolist() for x, _ in mixture.__getitems__(asked)]
    assert found == [mixture[i][0].tolist() for i in asked] and not mixture.draws


# ---- a bucket ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    seen = []
    with buckets.moto(seen=seen) as url, pytest.MonkeyPatch.context() as patched:
        said = {"ENDPOINT_URL": url, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "us-east-1"}
        for name, value in said.items():
            patched.setenv(f"AWS_{name}", value)
        root = tmp_path_factory.mktemp("texts")
        prepared("s3://my-bucket/corpus", files(root / "text", 120))
        yield "s3://my-bucket/corpus", seen


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("workers", "shuffle"), [(0, True), (2, True), (2, False)])
def test_bytes_are_counted_as_the_server_counts_them(bucket, corpus, tmp_path, cached, workers, shuffle):
    """Also where a DataLoader forks its processes, in which a bucket's client does not live on, and
    where a thread reads in order."""
    url, seen = bucket
    wanted = steps(harness.data.Tokens(corpus, 64, cache=None), 1, 0, 1, 20, shuffle=shuffle)
    dataset = harness.data.Tokens(url, 64, cache=tmp_path / "node" if cached else None)
    del seen[:]
    assert steps(dataset, 1, 0, 1, 20, workers, shuffle=shuffle) == wanted
    asked = [path for _, method, path, _ in seen if "/shards/" in path and method == "GET"]
    (traffic,) = dataset.traffic
    # neighbours come by one request
    assert traffic.requests == len(asked) > (10 if shuffle else 1) and not traffic.coming
    if cached:
        assert traffic.nbytes["s3"] == sum(p.stat().st_size for p in (tmp_path / "node/chunks").iterdir())
        del seen[:]
        again = harness.data.Tokens(url, 64, cache=tmp_path / "node")
        assert steps(again, 1, 0, 1, 20, workers, shuffle=shuffle) == wanted
        assert not [path for _, _, path, _ in seen if "/shards/" in path]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_process_and_a_thread_hear_what_is_wrong(bucket, tmp_path, shuffle):
    url = f"s3://my-bucket/other-{shuffle}"
    prepared(url, files(tmp_path / "text", 60))
    store = open_store(url)
    store.delete(store.list("shards/")[1])
    dataset = harness.data.Tokens(url, 64, cache=None, within_s=5)
    with pytest.raises(CorpusCorrupt, match="wanted a shard that the corpus consists of, found none"):
        steps(dataset, 1, 0, 1, len(dataset) // 8, workers=1, shuffle=shuffle)


def test_whose_parent_has_gone_does_not_wait_for_ever(bucket):
    reader = CorpusReader(bucket[0], "train", "tokens", cache=None)

    def orphan():
        reader._parent._name += "gone"  # nobody listens there
        with pytest.raises(StoreError, match="does not answer"):
            reader.chunks.read(0, 10)

    assert ended(forked(orphan)) == 0


def test_a_run_tells_what_it_read(corpus, tmp_path):
    env = {"HARNESS_DATA_CACHE": tmp_path / "node", "LOCAL_WORLD_SIZE": 2}
    train(tmp_path / "run", 2, corpus, env=env, script=SCRIPT)
    told = [s.fact for s in read_facts(open_store(str(tmp_path / "run"))) if isinstance(s.fact, StepsTimed)]
    nbytes = sum(sum(one.read_nbytes.values()) for one in told)
    far = sum(one.read_nbytes.get("file", 0) for one in told)
    there = sum(p.stat().st_size for p in cached(tmp_path / "node"))
    assert far == there <= nbytes and sum(one.read_requests for one in told) > 0


# ---- loops of the script's own -------------------------------------------------------------------
class Watched(harness.data.Tokens):
    """Tells which samples it was asked to have near, and which it gave."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.near, self.given = [], []

    def pieces(self, indices):
        self.near += list(indices)
        return super().pieces(indices)

    def __getitem__(self, i):
        self.given.append(i)
        return super().__getitem__(i)

    __getitems__ = None


@pytest.mark.parametrize("micros", [1, 2])
def test_a_loader_of_the_script_s_own_fetches_ahead_what_its_sampler_has_said(
    corpus, tmp_path, micros
):
    """Of the micro-batches of this rank only, which does one of so many."""
    dataset = Watched(corpus, 64, cache=tmp_path / "node", disk_nbytes=1 << 20)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, drop_last=True)
    shared, own = SharedLoader(loader, micro_batches=micros, mine=range(1), seed=7), []
    for share in shared:
        if share.mine:
            own += share.keys.tolist()
    assert dataset.given == own and len(own) >= len(dataset) // micros - 8
    near = dataset.near  # but for what was read before its turn came
    assert len(near) > 40 and near == own[: len(near)]
    until(lambda: not any(t.name == "prefetch" for t in threading.enumerate()))


OWN_LOOP = """
import sys, torch, harness
from harness.data import Tokens

class Watched(Tokens):
    near = []
    def pieces(self, indices):
        self.near += list(indices)
        return super().pieces(indices)

run = harness.attach(seed=7)
model = torch.nn.Linear(64, 1)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
data = Watched(sys.argv[1], 64, cache=sys.argv[2], disk_nbytes=1 << 20)
loader, seen = run.loader(data, global_batch=8, micro_batch=4, shuffle=True, num_workers=int(sys.argv[3])), []
for epoch in loader.epochs(2):
    for x, y in loader:
        loader.update(model(x.float()).square().mean())
once = data.near[: len(data)]
print("near", len(once) > 40 and len(set(once)) == len(once), "of", len(data))
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_run_loader_fetches_its_epochs_ahead_and_tells_what_it_read(corpus, tmp_path, workers):
    script, run = tmp_path / "loop.py", tmp_path / "run"
    script.write_text(OWN_LOOP)
    found = train(run, 1, corpus, tmp_path / "node", workers, script=script)
    assert "near True of" in found.output, found.output
    told = [s.fact for s in read_facts(open_store(str(run))) if isinstance(s.fact, StepsTimed)]
    read = sum((Counter(one.read_nbytes) for one in told), Counter())
    whole = shards_nbytes(corpus)
    # processes of a DataLoader count what they read of a folder for themselves
    assert read["file"] >= whole * (0.1 if workers else 0.9)
    assert sum(p.stat().st_size for p in cached(tmp_path / "node")) >= whole * 0.9
