"""What training leaves alone (weights under adapters, quantised bases): copied, hashed, sent and
kept once; and never believed to be the same where it is not."""

import threading

import pytest
import torch
from torch import nn

from harness.worker.frozen_weights import Frozen
from harness.worker.snapshotter import StagingBuffers
from storage import MemoryStore, Ref, Snapshots, open_store
from storage.snapshots.retention import Keep
from storage.snapshots.upload import Uploader, UploadJob
from storage.tensors import dcp, loading, state_tree
from storage.tensors.dcp import Filled
from support.worlds import newest, train, until

CHUNK = 4096
STILL = {"model/base", "model/head"}


def state():
    torch.manual_seed(0)
    return {
        "model/a": torch.randn(30, 20),
        "model/base": torch.randn(300, 200),
        "model/head": torch.randn(7, 200),
        "optimizer/a": torch.randn(30, 20),
    }


class Rank:
    """Saves as a worker does, in one buffer that is used again."""

    def __init__(self, store):
        self.tensors, self.filled, self.outcomes = state(), Filled(), []
        self.saver = dcp.Saver(Snapshots(store, CHUNK), own_memory=False)
        self.saver.plan(self.tensors, STILL)
        self.buffer = torch.zeros(self.saver.nbytes, dtype=torch.uint8)
        self.hold = StagingBuffers(None, None, None)
        self.uploader = Uploader(store)
        self.uploader.snapshots.chunk_nbytes = CHUNK
        self.uploader._hashes._chunk_nbytes = CHUNK

    def stage(self):
        staged = self.saver.begin(self.tensors, set(self.tensors), self.buffer, STILL, self.filled)
        staged.arrive()
        return staged

    def save(self, step, keep=None, poison=False):
        """`poison`: damages in the buffer what is said to be the same."""
        staged, told = self.stage(), threading.Event()
        unchanged = self.hold.since_last(staged, f"t {Ref(1, step).name}")
        for name, ranges in unchanged.files.items() if poison else ():
            for start, end in ranges:
                first = staged.layout.files[name][0]
                self.buffer[first + start : first + end] ^= 255
        job = UploadJob(
            Ref(1, step),
            0,
            1,
            "t",
            dict(staged.layout.files),
            staged.layout.index,
            {},
            weights="model/",
            unchanged=unchanged,
            keep=keep,
        )

        def done(outcome):
            self.outcomes.append(outcome)
            told.set()

        self.uploader.submit(job, self.buffer.numpy().data, done)
        assert told.wait(60)
        return self.outcomes[-1]


def read(store, manifest):
    found = loading.destinations(manifest, {})
    loading.load(Snapshots(store, CHUNK), manifest, found)
    return found


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(t, two[name]) for name, t in one.items())


def test_what_is_in_the_buffer_already_is_not_copied_and_what_changed_is():
    rank = Rank(MemoryStore(objects={}))
    first = rank.stage()
    files = first.layout.files
    assert len(files) == 2 and files["0000.bin"][1] >= (300 + 7) * 200 * 4  # one of its own
    rank.buffer[:100] = 7  # as long as nobody copies
    rank.tensors["model/a"].add_(1)
    again = rank.stage()
    assert bool((rank.buffer[:100] == 7).all()) and again.still() == first.still()
    assert again.touched() == []
    rank.tensors["model/base"].data[3, 3] = 5  # which no version counts
    changed = rank.stage()
    assert len(changed.still().items() - first.still().items()) == 1
    whole = torch.zeros_like(rank.buffer)
    rank.saver.begin(rank.tensors, (), whole).arrive()
    assert torch.equal(rank.buffer, whole)
    rank.tensors["model/head"].add_(1)
    assert changed.touched() == ["model/head"]
    # a buffer that was filled otherwise is not believed
    rank.saver.begin(rank.tensors, (), rank.buffer, STILL, rank.filled).arrive()
    assert not rank.filled.prints
    rank.saver.plan({**rank.tensors, "more": torch.zeros(3)}, STILL)
    assert rank.saver.nbytes > len(rank.buffer)


def test_what_is_the_same_is_neither_hashed_nor_sent_nor_kept_again():
    store = MemoryStore(objects={})
    rank = Rank(store)
    sizes = []
    for step in (1, 2, 3):
        for name in ("model/a", "optimizer/a"):
            rank.tensors[name].add_(1)
        # would it be read, what is read would be wrong
        outcome = rank.save(step, keep={"last": 1}, poison=step == 3)
        assert outcome.state == "committed", outcome
        manifest = Snapshots(store, CHUNK).latest()
        sizes.append(manifest.own_nbytes)
        assert same(read(store, manifest), rank.tensors)
    assert max(sizes[1:]) <= 2 * 30 * 20 * 4 + 64 < sizes[0] // 40
    until(lambda: len(Snapshots(store).refs()) == 1)  # pruned after the commit was told
    alone = MemoryStore(objects={})
    other = Rank(alone)
    other.tensors = rank.tensors
    assert other.save(3).weights == rank.outcomes[-1].weights


def test_an_uploader_that_does_not_know_the_last_one_hashes_all():
    store = MemoryStore(objects={})
    rank = Rank(store)
    rank.save(1)
    fresh = Rank(store)
    fresh.tensors, fresh.hold, fresh.buffer, fresh.filled = (
        rank.tensors,
        rank.hold,
        rank.buffer,
        rank.filled,
    )
    fresh.saver = rank.saver
    fresh.save(2)
    assert same(read(store, Snapshots(store, CHUNK).latest()), rank.tensors)
    rank.tensors["model/base"].mul_(2)
    rank.save(3)  # of the second it knows nothing
    assert same(read(store, Snapshots(store, CHUNK).latest()), rank.tensors)


def test_without_the_snapshot_that_has_it_all_is_sent_again():
    store = MemoryStore(objects={})
    rank = Rank(store)
    rank.save(1)
    for ref in Snapshots(store).refs():
        Snapshots(store).quarantine(ref, "damaged")
    rank.tensors["model/a"].add_(1)
    rank.save(2)
    manifest = Snapshots(store, CHUNK).latest()
    assert not manifest.refers and same(read(store, manifest), rank.tensors)
    Snapshots(store).prune(Keep(1))
    rank.save(3)
    assert same(read(store, Snapshots(store, CHUNK).latest()), rank.tensors)


class Quantised(nn.Module):
    """Stores more than its weight, as bitsandbytes' do."""

    def __init__(self):
        super().__init__()
        codes = torch.randint(0, 255, (64, 32), dtype=torch.uint8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scales", torch.ones(64))
        self.register_buffer("zeros", torch.zeros(64, 256, dtype=torch.int32))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(8)


def test_what_is_left_alone():
    model = nn.ModuleDict({"q": Quantised(), "a": nn.Linear(4, 4), "f": nn.Linear(4, 4)})
    model["f"].requires_grad_(False)
    model["a"].bias.requires_grad_(False)  # but an optimizer holds it
    optimizer = torch.optim.SGD(model["a"].parameters(), 0.1)
    tensors, _ = state_tree.split({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    frozen = Frozen(model, [optimizer])
    parameters = {"model/f.weight", "model/f.bias", "model/q.weight", "model/q.weight.absmax"}
    assert frozen.left_alone(tensors) == parameters  # of buffers nobody knows yet
    assert frozen.left_alone(tensors) == parameters | {"model/q.zeros"}
    model["q"].zeros.add_(1)
    assert frozen.left_alone(tensors) == parameters


LORA = """
import sys, torch, harness
run = harness.attach(snapshot_every_steps=2)
torch.manual_seed(0)
class LoRA(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(2000, 2000)
        self.base.requires_grad_(False)
        self.a, self.b = torch.nn.Linear(2000, 4, bias=False), torch.nn.Linear(4, 2000, bias=False)
    def forward(self, x):
        return self.base(x) + self.b(self.a(x))
model = LoRA()
run.prepare(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
data = torch.utils.data.TensorDataset(torch.randn(64, 2000))
for step in run.steps(data, total=int(sys.argv[1]), global_batch=4, micro_batch=2):
    for (x,) in step:
        step.backward(model(x).square().mean())
    step.update()
    if str(step.number) in sys.argv[2:]:
        model.base.weight.data[7, 7] = 5.0
print("base", model.base.weight.double().sum().item())
"""


def test_a_run_with_adapters_sends_them_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LORA)
    train(tmp_path / "run", 2, 4, script=script)
    snapshots = Snapshots(open_store(str(tmp_path / "run")))
    first, second = (snapshots.load(ref) for ref in reversed(snapshots.refs()))
    trained = 2 * 4 * 2000 * 4 * 3 + 1000
    assert (first.step, second.step) == (2, 4) and second.own_nbytes < trained
    assert 2000 * 2000 * 4 < first.own_nbytes == first.nbytes == second.nbytes
    ended = train(tmp_path / "run", 1, 6, 5, script=script)
    last = newest(tmp_path / "run")
    snapshots.verify(last)
    # on another world; and a chunk of 4 MiB that was changed without anybody being told
    assert last.step == 6 and 4 << 20 < last.own_nbytes < (4 << 20) + trained
    tensors = {"model/base.weight": torch.empty(2000, 2000)}
    loading.load(snapshots, last, tensors)
    said = float(ended.output.partition("base ")[2].split()[0])
    assert said == pytest.approx(tensors["model/base.weight"].double().sum().item(), rel=1e-12)
