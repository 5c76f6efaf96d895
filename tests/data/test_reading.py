"""Micro-batches that a thread reads are those that processes read; it leaves the training's
generators alone, reads so far ahead and no further, and ends with who reads."""

import os
import random
import threading
import time
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import harness
from harness.core.batch import Batching, plan
from harness.core.sample_order import Blocks
from harness.data import Mixture, Tokens, packed
from harness.data.chunk_reader import CACHE_NBYTES
from harness.worker.batches.loader import MicroReader, map_style, may_be_thread, read_ahead, stacked
from support import buckets
from support.corpora import files, prepared, shards_nbytes, small_corpus
from support.worlds import history, train, until

WITHIN_S = 60.0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("corpus"))


def readers():
    return [t for t in threading.enumerate() if t.name == "reading"]


def forked(kind):
    """Of the same samples, but read by processes."""
    return type("Forked", (kind,), {"by_thread": None})


def batches(dataset, workers, collate=None, pin=False, order=None, shuffle=False):
    batching = Batching(len(dataset), 8, 4, 5, shuffle or isinstance(order, Blocks), order)
    return map_style(
        dataset, batching, plan(2, 1), 0, 2, 9, collate, workers, pin, tell=pytest.fail
    )


def said(batches):
    out = []
    for micro in batches:
        data = micro.data.items() if isinstance(micro.data, dict) else enumerate(micro.data)
        spelled = [
            (name, x.dtype, x.tolist()) if isinstance(x, torch.Tensor) else (name, x)
            for name, x in data
        ]
        kept = [micro.positions.tolist(), micro.samples.tolist(), micro.contents.tolist()]
        out.append((kept, type(micro.data), spelled))
    return out


# ---- the same micro-batches ----------------------------------------------------------------------
@pytest.mark.parametrize("boundaries", ["", "documents", "cu_seqlens"])
@pytest.mark.parametrize("order", [None, Blocks(16, 2)])
def test_a_thread_reads_what_processes_read(corpus, boundaries, order):
    collate = packed if boundaries == "cu_seqlens" else None
    light = Tokens(corpus, 64, boundaries=boundaries)
    heavy = forked(Tokens)(corpus, 64, boundaries=boundaries)
    assert may_be_thread(light, collate, [8]) and not may_be_thread(heavy, collate, [8])
    wanted = said(batches(heavy, 2, collate, order=order))
    assert len(wanted) == 16
    for workers in (0, 1, 2):
        read = batches(light, workers, collate, order=order)
        first = next(read)
        assert len(readers()) == bool(workers)
        assert said(chain([first], read)) == wanted
        assert said(batches(heavy, workers, collate, order=order)) == wanted
    until(lambda: not readers(), within_s=WITHIN_S)


@pytest.mark.parametrize("shuffle", [False, Blocks(16, 2)])
def test_a_thread_reads_of_a_mixture_what_processes_read(corpus, shuffle):
    def mixed(kind):
        sources = {"a": kind(corpus, 64), "b": kind(corpus, 64)}
        return Mixture(sources, {"a": 3, "b": 1})

    light, heavy = mixed(Tokens), mixed(forked(Tokens))
    order = light.sample_order(8, 4, shuffle)
    assert order == heavy.sample_order(8, 4, shuffle)
    read = batches(light, 2, order=order, shuffle=bool(shuffle))
    first = next(read)
    assert len(readers()) == 1
    wanted = said(batches(heavy, 2, order=order, shuffle=bool(shuffle)))
    assert said(chain([first], read)) == wanted
    until(lambda: not readers(), within_s=WITHIN_S)


def test_only_where_neighbours_are_read_in_turns(corpus):
    """Else each sample takes a chunk to be hashed, which is for several processes."""
    tokens = Tokens(corpus, 64)
    assert may_be_thread(tokens, None, [1])
    assert not may_be_thread(tokens, None, [0]) and not may_be_thread(tokens, None, [])
    shuffled = map_style(
        tokens, Batching(len(tokens), 8, 4, 5, True), plan(2, 1), 0, 1, 9, None, 2, False
    )
    next(shuffled)
    assert not readers()
    mixture = Mixture({"a": tokens, "b": tokens}, {"a": 2, "b": 1})
    assert may_be_thread(mixture, None, [8, 4])
    assert not may_be_thread(mixture, None, [8, 0]) and not may_be_thread(mixture, None, [8])
    assert not may_be_thread(mixture, None, [8, 1 << 30])
    mixture.hold(8, (100 << 20) // (64 * 2))
    assert tokens._reader.chunks.room * tokens.card.chunk_nbytes >= 100 << 20


def test_what_is_read_in_turns_is_held(corpus):
    def room(**more):
        tokens = Tokens(corpus, 64, **more)
        if by_thread := tokens.by_thread(in_turns):
            tokens.hold(in_turns)
        return by_thread, tokens._reader.chunks.room * tokens.card.chunk_nbytes

    in_turns = (100 << 20) // (64 * 2)  # of 128 bytes each
    assert room()[0] and room()[1] >= 100 << 20
    in_turns = 1
    assert room() == (True, CACHE_NBYTES)
    in_turns = (256 << 20) // (64 * 2)
    assert room() == (False, CACHE_NBYTES)
    in_turns = 20
    assert room(cache_nbytes=16 << 10) == (True, 16 << 10)  # who has said how much
    assert room(cache_nbytes=8 << 10) == (False, 8 << 10)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    with buckets.moto() as url, pytest.MonkeyPatch.context() as patched:
        said = {"ENDPOINT_URL": url, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
        for name, value in (said | {"REGION": "us-east-1"}).items():
            patched.setenv(f"AWS_{name}", value)
        prepared("s3://my-bucket/scattered", files(tmp_path_factory.mktemp("texts") / "text", 120))
        yield "s3://my-bucket/scattered"


def test_who_reads_a_bucket_in_no_order_is_told_what_it_costs(bucket, corpus, tmp_path):
    whole = shards_nbytes(corpus)
    few = Tokens(bucket, 64, cache=tmp_path / "node", disk_nbytes=whole // 2)
    found = few.scattered(1)
    assert "up to 8 times the bytes" in found and 'shuffle="blocks"' in found
    assert bucket in found
    assert few.scattered(1) == Mixture({"a": few}, {"a": 1}).scattered(1)
    assert not few.scattered(3)  # whose caches hold it together
    assert not Tokens(bucket, 64, cache=tmp_path / "node", disk_nbytes=2 * whole).scattered(1)
    assert not Tokens(bucket, 1024, cache=None, cache_nbytes=1).scattered(1)  # nothing to spare
    assert Tokens(bucket, 64, cache=None, cache_nbytes=1).scattered(1)
    assert not Tokens(corpus, 64, cache=None, cache_nbytes=1).scattered(9)  # on this disk


def test_a_run_says_so_once(bucket, tmp_path):
    script, told = tmp_path / "short.py", {}
    script.write_text(SHORT)
    for how in ("yes", "blocks", "", "mixture", "mixture-yes", "loader", "loader-yes", "sampler"):
        run = tmp_path / f"by-{how}"
        found = train(run, 2, bucket, how, tmp_path / "node", script=script)
        if said := found.output.count("up to 8 times the bytes"):
            told[how] = said
    assert told == {"yes": 1, "mixture-yes": 1, "loader-yes": 1}


SHORT = """
import sys, torch, harness
run = harness.attach(seed=7)
model = torch.nn.Linear(64, 1)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
data = harness.data.Tokens(sys.argv[1], 64, cache=sys.argv[3], disk_nbytes=20_000)
how = sys.argv[2]
if "mixture" in how:
    data = harness.data.Mixture({"a": data}, {"a": 1})
more = {"shuffle": how.endswith("yes") or how == "blocks" and how}
if how == "sampler":
    more = {"sampler": torch.utils.data.SequentialSampler(data)}
if "loader" in how or how == "sampler":
    loader = run.loader(data, global_batch=8, micro_batch=4, **more)
    for epoch in loader.epochs(2):
        for x, y in loader:
            loader.update(model(x.float()).square().mean())
else:
    for step in run.steps(data, total=3, global_batch=8, micro_batch=4, **more):
        for x, y in step:
            step.backward(model(x.float()).square().mean())
        step.update()
    run.finish()
"""


def test_what_may_draw_is_left_to_processes(corpus):
    class Noted(Tokens):
        def __getitem__(self, i):
            return (*super().__getitem__(i), os.getpid())

    class Pixels:
        """Says that nothing of it draws, and not that it is light."""

        draws = False

        def __len__(self):
            return 64

        def __getitem__(self, i):
            return i, os.getpid()

        def __getitems__(self, indices):
            return [self[i] for i in indices]

    tokens, pixels = Tokens(corpus, 64), Pixels()
    assert may_be_thread(tokens, None, [8]) and may_be_thread(tokens, packed, [8])
    assert not may_be_thread(tokens, lambda samples: samples, [8])
    assert not may_be_thread(Noted(corpus, 64), None, [8])
    assert not may_be_thread(pixels, None, [8])
    mixture = Mixture({"a": tokens, "b": pixels}, {"a": 2, "b": 1})
    assert not may_be_thread(mixture, None, [8, 8])
    for dataset in (Noted(corpus, 64), pixels):
        pids = {int(pid) for micro in batches(dataset, 2) for pid in micro.data[-1]}
        assert len(pids) == 2 and os.getpid() not in pids


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.float32, np.float64, np.bool_])
def test_stacked_is_what_torch_makes_of_it(dtype):
    rng = np.random.default_rng(1)
    rows = [tuple(rng.integers(0, 9, 5).astype(dtype) for _ in range(3)) for _ in range(4)]
    wanted, found = default_collate(rows), stacked(rows)
    assert type(found) is type(wanted) is list
    for a, b in zip(wanted, found, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b) and b.is_contiguous()
    found[0][:] = 1  # its own, not what was read
    assert all(np.array_equal(row[0], a) for row, a in zip(rows, wanted[0].numpy(), strict=True))


def test_stacked_leaves_all_else_to_torch():
    plain = [{"x": np.arange(3), "y": 1}, {"x": np.arange(3), "y": 2}]
    assert stacked(plain)["y"].tolist() == [1, 2]
    ragged = [(np.arange(3),), (np.arange(4),)]
    with pytest.raises(RuntimeError) as wanted:
        default_collate(ragged)
    with pytest.raises(RuntimeError) as found:
        stacked(ragged)
    assert str(found.value) == str(wanted.value)
    with pytest.raises(TypeError, match="default_collate"):
        stacked([(np.array(["a"]),), (np.array(["b"]),)])


# ---- beside the training -------------------------------------------------------------------------
def drawn():
    return random.random(), np.random.random(), torch.rand(1).item()


def test_the_training_s_generators_are_its_own(corpus):
    def numbers(batches):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        out = []
        for _ in batches:
            out.append(drawn())
            time.sleep(0.002)  # the thread reads meanwhile
        return out

    read = batches(Tokens(corpus, 64), 2)
    next(read)  # torch draws a seed of its own where a loader begins
    found = numbers(read)
    assert len(found) == 15 and found == numbers(range(15))


def test_so_far_ahead_and_no_further():
    given = []

    def counted():
        for i in range(100):
            given.append(i)
            yield i

    read = read_ahead(counted(), 3)
    assert next(read) == 0
    until(lambda: len(given) >= 5, within_s=WITHIN_S)  # three are ready, and one waits for room
    time.sleep(0.1)
    assert len(given) == 5 and [next(read) for _ in range(2)] == [1, 2]
    read.close()
    until(lambda: not readers(), within_s=WITHIN_S)
    assert len(given) <= 8


def test_it_ends_with_who_reads_though_its_store_is_silent():
    """Nobody waits for it."""
    silent = threading.Event()

    def stuck():
        yield 1
        assert silent.wait(WITHIN_S)
        yield 2

    read = read_ahead(stuck(), 2)
    assert next(read) == 1
    (reader,) = readers()
    read.close()
    assert reader.is_alive() and reader.daemon
    silent.set()
    reader.join(WITHIN_S)
    assert not reader.is_alive()


def test_what_is_wrong_is_heard_in_its_place():
    class Broken:
        draws = False

        def by_thread(self, in_turns):
            return True

        def __len__(self):
            return 64

        def __getitems__(self, indices):
            if 40 in indices:
                raise OSError("a bad disk")
            return [(np.array([i]),) for i in indices]

    batching, heard = Batching(64, 8, 4, 5, shuffle=False), []
    read = map_style(Broken(), batching, plan(2, 1), 0, 1, 8, None, 2, False)
    with pytest.raises(OSError, match="a bad disk") as e:
        heard.extend(i for micro in read for i in micro.samples.tolist())
    assert heard == list(range(40)) and "__getitems__" in str(e.traceback[-1])
    assert not readers()


def test_options_of_processes_are_for_processes_only():
    more = {"num_workers": 3, "persistent_workers": True, "timeout": 9.0, "in_order": True}
    keyed = [(i, i) for i in range(8)]
    for options, ahead in (({}, 6), ({"prefetch_factor": 5}, 15)):
        reader = MicroReader(keyed, [[0, 1], [2]], list, True, **more, **options)
        assert reader.ahead == ahead and list(reader) == [[(0, 0), (1, 1)], [(2, 2)]]
    assert not MicroReader(keyed, [[0]], list, False, num_workers=1).ahead
    assert not MicroReader(keyed, [[0]], list, True).ahead
    # who wants something done in each process wants processes
    assert not MicroReader(keyed, [[0]], list, True, num_workers=1, worker_init_fn=print).ahead


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")
def test_what_a_thread_reads_is_pinned(corpus):
    device = torch.cuda.device_count() - 1
    with torch.cuda.device(device):
        micro = next(batches(Tokens(corpus, 64), 2, pin=True))
        assert all(x.is_pinned() for x in micro.data)


# ---- a loop of the script's own ------------------------------------------------------------------
LOOP = """
import sys, torch, harness
run = harness.attach(seed=7)
model = torch.nn.Linear(64, 1)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
data = harness.data.Tokens(sys.argv[1], 64)
more = {"prefetch_factor": 4} if int(sys.argv[2]) else {}
loader = run.loader(data, global_batch=8, micro_batch=4, num_workers=int(sys.argv[2]), **more)
for epoch in loader.epochs(3):
    for x, y in loader:
        loader.update(model(x.float()).square().mean())
        if epoch == 1 and loader.ends_step and loader.step.number % 5 == 0:
            break  # in the middle of an epoch, while the reader is ahead
print("epochs done")
"""


def test_run_loader_may_be_left_in_the_middle_of_an_epoch(corpus, tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    for workers in (0, 2):
        found = train(tmp_path / f"by{workers}", 1, corpus, workers, script=script)
        assert "epochs done" in found.output, found.output
    inline, ahead = (
        [(r.step, r.digest, r.contents, r.loss) for r in history(tmp_path / f"by{workers}")]
        for workers in (0, 2)
    )
    assert inline == ahead and len(inline) > 2 * (len(harness.data.Tokens(corpus, 64)) // 8)
