"""The session with real processes and a real process group: same samples, same batch, same
result on any world."""

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from harness.bucket.archive import read_facts
from harness.core.batch import Batching, expected_digest
from harness.core.facts import SnapshotFailed, StepDone, Warned
from harness.node.marks import EXIT_CODE, MarkFile, Want
from harness.worker import replica_check
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store
from storage.tensors import loading, state_tree
from storage.tensors.dcp import weighted
from storage.testing.faulty_store import corrupt
from support.worlds import TRAINER, environment, finish, free_port, history, newest, start, train

ENDS = str(Path(__file__).parents[1] / "support" / "ends.py")


def losses(run):
    return [r.loss for r in history(run)]


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """30 steps on one rank, never stopped."""
    run = tmp_path_factory.mktemp("calm") / "run"
    train(run)
    return run


def test_a_finished_run_is_recorded(calm):
    manifest, records = newest(calm), history(calm)
    assert manifest.step == 30 and manifest.data["final"] is True
    assert [r.step for r in records] == list(range(1, 31))
    batching = Batching(1000, 48, 4, seed=1)
    for r in records:
        assert r.samples == 48 and r.weight == 48.0
        assert int(r.digest, 16) == expected_digest(batching, r.step)
    assert records[9].metrics["half"] == 5.0 and records[0].loss > records[-1].loss


@pytest.mark.parametrize("world", [1, 3])
def test_stopped_and_resumed_is_bit_equal(world, tmp_path):
    train(tmp_path / "whole", world, "--augment")
    train(tmp_path / "parts", world, "--augment", "--total", 17)
    train(tmp_path / "parts", world, "--augment")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert newest(tmp_path / "parts").data["weights"] == newest(tmp_path / "whole").data["weights"]


@pytest.mark.parametrize(
    ("world", "flags"), [(2, []), (5, []), (3, ["--parallel", "fsdp2"]), (2, ["--workers", 1])]
)
def test_other_worlds_train_the_same(calm, tmp_path, world, flags):
    train(tmp_path / "run", world, *flags)
    assert [r.digest for r in history(tmp_path / "run")] == [r.digest for r in history(calm)]
    assert losses(tmp_path / "run") == pytest.approx(losses(calm), rel=1e-4)
    assert sum(history(tmp_path / "run")[0].shares) == 12


def test_the_world_may_change_on_the_way(calm, tmp_path):
    run = tmp_path / "run"
    for world, total, parallel in (
        (2, 8, "fsdp2"),
        (5, 15, "fsdp2"),
        (1, 22, "ddp"),
        (3, 30, "ddp"),
    ):
        train(run, world, "--total", total, "--parallel", parallel)
    assert [r.world for r in history(run)] == [2] * 8 + [5] * 7 + [1] * 7 + [3] * 8
    assert losses(run) == pytest.approx(losses(calm), rel=1e-3)


AVERAGES = """
import sys, torch, harness
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
run = harness.attach(snapshot_every_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
averages = {"ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)), "other": AveragedModel(model)}
run.prepare(model, torch.optim.AdamW(model.parameters()), state=averages)
run._work.training.after_update -= {"other"} if "early" not in sys.argv else set()  # as one of a class that we do not know
for step in run.steps(torch.utils.data.TensorDataset(torch.randn(64, 8)), total=6, global_batch=4, micro_batch=4):
    averages["other"].update_parameters(model)  # not where averages are updated
    for (x,) in step:
        step.backward(model(x).square().mean())
    step.update()
    averages["ema"].update_parameters(model)
print("ema", averages["ema"].module[0].weight.double().sum().item())
"""


@pytest.mark.parametrize("early", [[], ["early"]])
def test_averages_are_copied_beside_the_training_and_who_breaks_the_promise_is_told(
    tmp_path, early
):
    script = tmp_path / "script.py"
    script.write_text(AVERAGES)
    ended = train(tmp_path / "run", 1, *early, script=script)
    told = "was changed in place between two optimizer steps"
    assert ended.output.count(told) == len(early) and ("'other/" in ended.output) == bool(early)
    store = open_store(str(tmp_path / "run"))
    snapshots = Snapshots(store)
    manifest = snapshots.latest()
    snapshots.verify(manifest)
    tensors = {
        name: t
        for name, t in loading.destinations(manifest, {}).items()
        if name == "ema/module.0.weight"
    }
    loading.load(snapshots, manifest, tensors)
    assert f"ema {tensors['ema/module.0.weight'].double().sum().item()}" in ended.output
    failed = [s.fact for s in read_facts(store) if isinstance(s.fact, SnapshotFailed)]
    assert len(failed) <= len(early)


@pytest.mark.parametrize(
    ("how", "world", "step", "why"),
    [
        ("break", 2, 3, "ended early at step 3 of 6"),
        ("finish", 2, 3, "ended early at step 3 of 6"),
        ("own", 1, 3, "step 3 is the last"),
        ("epochs", 2, 6, "step 6 of 6 is the last"),
        ("pauses", 1, 6, "step 6 of 6 is the last"),
    ],
)
def test_a_script_that_ends_well_has_ended_the_run(tmp_path, how, world, step, why):
    train(tmp_path / "run", world, how, script=ENDS)
    store = open_store(str(tmp_path / "run"))
    manifest = Snapshots(store).latest()
    assert (
        manifest.step == step and manifest.data.get("final") and manifest.data.get("ended") == why
    )
    if how in ("epochs", "pauses"):
        train(tmp_path / "whole", world, "whole", script=ENDS)
        assert (
            losses(tmp_path / "run") == losses(tmp_path / "whole")
            and len(losses(tmp_path / "run")) == 6
        )


def test_a_script_that_fails_has_not_ended_the_run(tmp_path):
    train(tmp_path / "run", 1, "raise", script=ENDS, codes=(1,))
    assert newest(tmp_path / "run") is None
    train(tmp_path / "run", 1, "whole", script=ENDS)
    assert newest(tmp_path / "run").step == 6


def test_ranks_that_leave_at_different_steps_are_told(tmp_path):
    ended = train(tmp_path / "run", 2, "apart", script=ENDS, codes=(0, 1))
    assert (
        "different steps (3, 4)" in ended.output
        and ended.codes == [1, 1]
        and newest(tmp_path / "run") is None
    )


def test_shares_follow_speeds(calm, tmp_path):
    train(tmp_path / "run", 2, env={"HARNESS_SPEEDS": "[3.0, 1.0]"})
    assert history(tmp_path / "run")[0].shares == (9, 3)
    assert losses(tmp_path / "run") == pytest.approx(losses(calm), rel=1e-4)


def test_weights_by_valid_tokens_do_not_depend_on_the_world(tmp_path):
    for world in (1, 3):
        train(tmp_path / f"w{world}", world, "--tokens", "--total", 10)
    one, three = history(tmp_path / "w1"), history(tmp_path / "w3")
    assert [r.weight for r in one] == [r.weight for r in three] and one[0].weight != 48
    assert [r.loss for r in one] == pytest.approx([r.loss for r in three], rel=1e-4)


def test_iterable_datasets_resume(tmp_path):
    train(tmp_path / "whole", 1, "--iterable", "--total", 12)
    train(tmp_path / "parts", 2, "--iterable", "--total", 5)
    train(tmp_path / "parts", 1, "--iterable", "--total", 12)
    contents = [r.contents for r in history(tmp_path / "whole")]
    assert [r.contents for r in history(tmp_path / "parts")] == contents and len(
        set(contents)
    ) == 12
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)




def test_everything_with_a_state_resumes(tmp_path):
    train(tmp_path / "whole", 1, "--ema", "--fp16", "--total", 12, "--out", tmp_path / "whole.json")
    train(tmp_path / "parts", 1, "--ema", "--fp16", "--total", 5)
    train(tmp_path / "parts", 1, "--ema", "--fp16", "--total", 12, "--out", tmp_path / "parts.json")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert (tmp_path / "parts.json").read_text() == (tmp_path / "whole.json").read_text()


AGAIN = """
import sys, torch, harness
reduce, spike, stream = sys.argv[1], int(sys.argv[2]), "stream" in sys.argv
run = harness.attach(reduce=reduce)

class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inside", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("mask", torch.ones(8))
    def forward(self, x):
        self.inside.add_(1)
        self.replaced = self.replaced + 1
        return x * self.mask

given = []
def collate(items):
    batch = torch.stack([x for x, in items])
    given.append(batch.data_ptr())
    return batch

class Rows(torch.utils.data.IterableDataset):
    at = 0
    def __iter__(self):
        while True:
            self.at += 1
            yield (torch.full((8,), self.at / 8.0),)
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]

torch.manual_seed(0)
model = torch.nn.Sequential(Counter(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
data = Rows() if stream else torch.utils.data.TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(3)))
seen, again, copied = 0, [], 0
for step in run.steps(data, total=3, global_batch=8, micro_batch=2, collate_fn=collate):
    for x in step:
        seen += len(x)
        again += [step.number] * (step.attempt > 0)
        copied += x.data_ptr() not in given
        loss = model(x).square().mean() * (1e9 if step.number == spike else 1.0)
        x.add_(1.0)  # what we were given is ours
        step.backward(loss)
    step.update(clip_norm=1.0)
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
counted = [int(model[0].inside), int(model[0].replaced)]
print("seen", seen, "again", again, "counted", *counted, "copied", copied, weights.double().sum().item())
"""


@pytest.mark.parametrize("stream", [[], ["stream"]])
@pytest.mark.parametrize(
    ("reduce", "spike", "again"),
    [("fast", 2, []), ("exact", 0, []), ("exact", 2, [2]), ("exact32", 0, [])],
)
def test_a_step_is_done_again_only_if_it_must_and_says_so(tmp_path, reduce, spike, again, stream):
    """What the body was given, what buffers count, and what is copied; the first version did
    every first step twice."""
    script = tmp_path / "script.py"
    script.write_text(AGAIN)
    ended = train("", 1, reduce, spike, *stream, script=script)
    told = [line for line in ended.output.splitlines() if line.startswith("seen ")]
    repeats = [step for step in again for _ in range(4)]  # micro-batches
    assert told[0].startswith(
        f"seen {24 + 2 * len(repeats)} again {repeats} counted 12 12 copied 0 "
    ), ended.output
    assert ended.output.count("micro-batches are done once more") == bool(again)
    if reduce != "fast":
        fast = train("", 1, "fast", spike, *stream, script=script)
        ours, theirs = (float(e.output.split()[-1]) for e in (ended, fast))
        assert ours == pytest.approx(theirs, rel=1e-5)


OWN = """
import sys, torch, harness
flags = sys.argv[1:]
run = harness.attach(snapshot_every_steps=2)

class Loader:  # a cursor and a buffer: each rank's own, or the same everywhere
    def __init__(self):
        self.at, self.rows = 0, torch.zeros(4)
    def step(self, number):
        own = run.rank if "differ" in flags or ("later" in flags and number > 3) else 0
        self.at, self.rows = 10 * number + ("tensor" not in flags) * own, torch.full((4,), 100.0 * number + ("plain" not in flags) * own)
    def state_dict(self):
        return {"at": self.at, "rows": self.rows}
    def load_state_dict(self, state):
        self.at, self.rows = state["at"], state["rows"]
        print("loaded", run.rank, self.at, self.rows.tolist()[0], flush=True)

class Merging(Loader):
    def load_state_dicts(self, states):
        print("merged", run.rank, [state["at"] for state in states], [float(state["rows"][0]) for state in states], flush=True)

class Tail(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 1)
        self.register_buffer("sums", torch.zeros(8))
        self.register_buffer("last", torch.zeros(8))
    def forward(self, x):
        self.sums += x.detach().sum(0)
        self.last = x.detach().mean(0)
        return super().forward(x)

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), Tail())
loader = Merging() if "merging" in flags else Loader()
how = {"per_rank": ["loader"]} if "per-rank" in flags else {}
run.prepare(model, torch.optim.AdamW(model.parameters()), state={"loader": loader}, **how)
data = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(3)))
for step in run.steps(data, total=int(flags[0]), global_batch=12, micro_batch=4):
    for (x,) in step:
        step.backward(model(x).square().mean())
    step.update()
    loader.step(step.number)
print("buffers", run.rank, {name: b.tolist() for name, b in model.named_buffers()}, flush=True)
"""


LOOP = """
import torch, harness
run = harness.attach(snapshot_every_steps=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)))
optimizer = torch.optim.AdamW(model.parameters())
run.prepare(model, optimizer)
for step in range(run.resume() + 1, 6):
    optimizer.zero_grad()
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + run.rank))).square().mean().backward()
    optimizer.step()
    run.safe_point(step)
run.finish()
"""


def test_a_loop_of_ones_own_may_have_ddp(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LOOP)
    train(tmp_path / "run", 2, script=script)
    manifest = newest(tmp_path / "run")
    assert manifest.step == 5 and manifest.data["final"]
    Snapshots(open_store(str(tmp_path / "run"))).verify(manifest)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Trains a script whose ranks may hold states of their own."""
    script = tmp_path_factory.mktemp("own") / "script.py"
    script.write_text(OWN)
    return lambda run, world, *flags, codes=(0,): train(
        run, world, *flags, codes=codes, script=script
    )


def test_any_changed_byte_is_another_state():
    """Also where a GPU would hash."""
    tensors, plain = state_tree.split(
        {"a": torch.arange(9.0), "b": torch.zeros(3, dtype=torch.bool), "c": [1, {"d": "x"}]}
    )
    one = replica_check.held(tensors, plain)
    assert one.total() == replica_check.held(tensors, plain).total() < 2**62
    raw = torch.arange(1003, dtype=torch.int64).to(torch.uint8)
    hashes = {int(weighted(raw))}
    for i in range(len(raw)):
        raw[i] ^= 1
        hashes.add(int(weighted(raw)))
        raw[i] ^= 1
    assert len(hashes) == len(raw) + 1 and int(weighted(raw)) in hashes
    tensors["b"][1] = True
    other = replica_check.held(tensors, {**plain, "c": [1, {"d": "y"}]})
    assert [path for path, _ in replica_check.differing([one.leaves(), other.leaves()])] == [
        "c/1/d",
        "b",
    ]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("differ", "plain"), "loader/at is 10 on rank 0, 11 on rank 1"),
        (("differ", "tensor"), r"loader/rows is torch.float32 \(4,\) \w+ on rank 0, "),
        # with the next snapshot from step 4 on
        (("later",), r"loader/at is .0 on rank 0, .1 on rank 1"),
    ],
)
def test_state_that_differs_between_ranks_is_never_mixed(own, tmp_path, flags, says):
    """Told after the first step, or with the first snapshot in which it differs."""
    ended = own(tmp_path / "run", 2, 8, *flags, codes=(1,))
    assert "BadInput: the state of 'loader' is not the same on all ranks" in ended.output
    assert re.search(says, ended.output) and "per_rank=['loader']" in ended.output
    found = newest(tmp_path / "run")
    assert found is None or (found.step == 2 and "later" in flags)


def test_state_of_each_rank_goes_back_to_it(own, tmp_path):
    run = tmp_path / "run"
    own(run, 3, 4, "differ", "per-rank")
    again = own(run, 3, 6, "differ", "per-rank")
    for rank in range(3):
        assert f"loaded {rank} {40 + rank} {400.0 + rank}" in again.output
    refused = own(run, 2, 8, "differ", "per-rank", codes=(1,))
    assert (
        "holds a state of 'loader' for each of 3 ranks, here are 2; go on with 3 ranks, or give "
        "Loader a method" in refused.output
    )
    merged = own(run, 2, 8, "differ", "per-rank", "merging")
    assert all(
        f"merged {rank} [60, 61, 62] [600.0, 601.0, 602.0]" in merged.output for rank in range(2)
    )


def test_buffers_that_forwards_change_are_of_one_rank(own, tmp_path):
    """Shares of 2 and 1 micro-batches, so the ranks' own would differ; what is stored is what
    all go on with. Averages of BatchNorm are of all micro-batches."""
    ended = own(tmp_path / "run", 2, 4)
    said = [
        line.split(maxsplit=2)[1:]
        for line in ended.output.splitlines()
        if line.startswith("buffers ")
    ]
    manifest = newest(tmp_path / "run")
    names = ["1.running_mean", "1.running_var", "1.num_batches_tracked", "2.sums", "2.last"]
    tensors = {
        name: t
        for name, t in loading.destinations(manifest, {}).items()
        if name.removeprefix("model/") in names
    }
    loading.load(Snapshots(open_store(str(tmp_path / "run"))), manifest, tensors)
    stored = {name: tensors[f"model/{name}"].tolist() for name in names}
    assert (
        sorted(said) == [["0", str(stored)], ["1", str(stored)]]
        and stored["1.num_batches_tracked"] == 12
    )


def steps_reached(run):
    store = open_store(str(run))
    return sum(
        '"fact":"StepDone"' in line
        for k in store.list("facts/worker")
        for line in store.get(k).decode().splitlines()
    )


def wait_for(condition, timeout_s=240):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_a_mark_is_heeded_by_all_ranks_at_the_same_step(tmp_path):
    run = tmp_path / "run"
    marks = [tmp_path / f"n{rank}" / "mark.json" for rank in range(2)]
    for mark in marks:
        mark.parent.mkdir()
    flags = ("--total", 2000, "--every", 5000, "--sleep-s", 0.02)
    processes = start(run, 2, *flags, env={"HARNESS_MARK": str(marks[0]), "HARNESS_EPOCH": "7"})
    wait_for(lambda: steps_reached(run) > 3)
    MarkFile(marks[0]).write(Want.SNAPSHOT, "asked", None)
    wait_for(lambda: newest(run) is not None)
    assert all(p.poll() is None for p in processes)
    first = newest(run).step
    MarkFile(marks[0]).write(Want.RESIZE, "notice:x", None)
    ended = finish(processes)
    assert ended.codes == [34, 34], ended.output
    manifest = newest(run)
    assert manifest.epoch == 7 and manifest.step > first and manifest.world == 2
    assert len(history(run)) == manifest.step  # no step was lost, none is recorded beyond


def test_sigterm_without_an_agent_drains(tmp_path):
    flags = ("--signal-at", 4, "--every", 5000)
    ended = train(tmp_path / "run", 2, *flags, codes=(33,))
    assert ended.codes == [33, 33], ended.output
    assert newest(tmp_path / "run").step == 4


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--seed", 2], "its seed is 1, this script's is 2"),
        (["--global-batch", 24], "its global_batch is 48, this script's is 24"),
        (["--samples", 999], "its samples is 1000"),
        (["--hidden", 32], "its model is"),
    ],
)
def test_another_run_is_refused(calm, flags, says):
    before = newest(calm).ref
    ended = train(calm, 1, *flags, "--total", 40, codes=(1,))
    assert says in ended.output and "use a new run URL" in ended.output
    assert newest(calm).ref == before


@pytest.mark.parametrize(
    ("world", "flags", "says"),
    [
        (1, ["--global-batch", 46], "multiple"),
        (1, ["--samples", 20], "48"),
        (3, ["--global-batch", 8], "micro"),
        (1, ["--skip-update"], "step.update() was not called"),
    ],
)
def test_impossible_batches_are_refused(tmp_path, world, flags, says):
    ended = train(tmp_path / "run", world, *flags, codes=(1,))
    assert "BadInput" in ended.output and says in ended.output
    assert newest(tmp_path / "run") is None


def test_a_loss_that_is_not_finite_is_never_committed(tmp_path):
    ended = train(tmp_path / "run", 2, "--nan-at", 12, "--patient", codes=(1,))
    assert "NonFiniteLoss" in ended.output and "step 12" in ended.output
    assert newest(tmp_path / "run").step == 10


# ---- damaged snapshots, and damaged readers ------------------------------------------------------
@pytest.fixture(scope="module")
def half_way(tmp_path_factory):
    """Snapshots of steps 5, 10 and 15."""
    run = tmp_path_factory.mktemp("half") / "run"
    train(run, 1, "--total", 15, "--every", 5, "--patient")  # else one may be left out
    assert [ref.step for ref in Snapshots(open_store(str(run))).refs()] == [15, 10, 5]
    return run


def rot(run, *steps):
    snapshots = Snapshots(open_store(str(run)))
    for ref in (r for r in snapshots.refs() if r.step in steps):
        corrupt(snapshots.store, snapshots.load(ref).parts[0].key, "flip", random.Random(1))


def marks(run):
    return {ref.step for ref in Snapshots(open_store(str(run))).quarantined()}


def sabotaged(folder, run, world=1, *flags, **bad):
    """A world of `world` hosts; the last one reads as `bad` says (harness/lab/drills/process_faults.py)."""
    port, processes = free_port(), []
    for rank in range(world):
        node = folder / f"node-{rank}"
        node.mkdir(parents=True)
        (node / "sitecustomize.py").write_text(
            f"from harness.lab.drills import process_faults as sabotage\nsabotage.arm({str(node)!r})\n"
        )
        if rank == world - 1:
            (node / "damage.json").write_text(json.dumps(bad))
        path = os.pathsep.join([str(node), *sys.path])
        own = {
            "RANK": rank,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        own |= {"HARNESS_HOST": f"host-{rank}", "HARNESS_RUN": run, "PYTHONPATH": path}
        processes.append(
            subprocess.Popen(
                [sys.executable, TRAINER, "--every", "5", *map(str, flags)],
                env=environment() | {k: str(v) for k, v in own.items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return finish(processes)


def test_a_bad_snapshot_is_quarantined_and_the_older_one_used(tmp_path, calm, half_way):
    run = tmp_path / "run"
    shutil.copytree(half_way, run)
    rot(run, 15)
    ended = train(run, 2)
    assert (
        "falling back" in ended.output
        and "resumed from step 10" in ended.output
        and marks(run) == {15}
    )
    assert losses(run) == pytest.approx(losses(calm), rel=1e-4)


def test_two_bad_snapshots_are_a_bad_reader_until_a_second_host_says_so_and_then_a_persons_business(
    tmp_path, half_way
):
    run = tmp_path / "run"
    shutil.copytree(half_way, run)
    rot(run, 10, 15)
    ended = train(run, 1, env={"HARNESS_HOST": "one"}, codes=(37,))
    assert "unfit to read snapshots: it can read neither" in ended.output and marks(run) == set()
    ended = train(run, 1, env={"HARNESS_HOST": "two"}, codes=(1,))
    assert (
        "BadInput" in ended.output
        and "would go on from step 5" in ended.output
        and "--set allow_rewind=true" in ended.output
    )
    assert (
        "resumed from step 5"
        in train(
            run, 1, "--total", 7, env={"HARNESS_HOST": "two", "HARNESS_ALLOW_REWIND": "1"}
        ).output
    )
    # what is ahead stays
    assert {ref.step for ref in Snapshots(open_store(str(run))).manifests()[0]} == {5, 7, 10, 15}
    # it was allowed once and for all
    assert "resumed from step 7" in train(run, 1, "--total", 8).output


def test_one_damaged_read_changes_nothing(tmp_path, half_way):
    run = tmp_path / "run"
    shutil.copytree(half_way, run)
    ended = sabotaged(
        tmp_path, run, 1, "--total", 16, how="flip", prefix="snapshots/parts/", reads=1
    )
    assert ended.codes == [0] and "resumed from step 15" in ended.output and marks(run) == set(), (
        ended.output
    )
    told = [s.fact.what for s in read_facts(open_store(str(run))) if isinstance(s.fact, Warned)]
    assert len(told) == 1 and "a read of it was damaged and right at look 2" in told[0]


@pytest.mark.proof
def test_a_host_whose_reads_are_always_damaged_ends_and_the_others_go_on(tmp_path, half_way):
    """Else it would quarantine every snapshot, and the run would begin anew."""
    run = tmp_path / "run"
    shutil.copytree(half_way, run)
    ended = sabotaged(tmp_path, run, 2, how="flip", prefix="snapshots/parts/", reads=-1)
    assert ended.codes == [34, 37] and "which another host reads whole" in ended.output, (
        ended.output
    )
    assert marks(run) == set()
    assert "resumed from step 15" in train(run, 1, "--total", 16).output


def test_without_a_run_it_is_an_ordinary_script(tmp_path):
    ended = finish(start("", 1, "--total", 5, "--out", tmp_path / "out.json"))
    assert ended.codes == [0] and "without snapshots" in ended.output
    assert json.loads((tmp_path / "out.json").read_text())["step"] == 5


def test_what_cannot_be_exact_is_named(tmp_path):
    ended = train(tmp_path / "unseeded", 1, "--unseeded", "--reduce", "exact", "--total", 3)
    assert "Numbers[i] is another sample when it is read again" in ended.output
    script = tmp_path / "sync.py"
    script.write_text(
        "import harness, torch\nrun = harness.attach(reduce='exact')\n"
        "model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))\n"
        "run.prepare(model, torch.optim.SGD(model.parameters()))\n"
    )
    ended = train(tmp_path / "norm", 1, script=script, codes=(1,))
    assert "the model has SyncBatchNorm" in ended.output and newest(tmp_path / "norm") is None
    assert (
        "another sample"
        not in train(tmp_path / "augment", 1, "--augment", "--reduce", "exact", "--total", 3).output
    )


# ---- the numbers of a step -----------------------------------------------------------------------
NUMBERS = """
import os, time, torch, harness
peaks = PEAKS  # votes that come late: as on a GPU
run = harness.attach(snapshot_every_steps=5, votes_late=LATE, peak_flops=peaks[int(os.environ["RANK"])])
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
began = time.time()
for step in run.steps(torch.utils.data.TensorDataset(torch.randn(64, 8)), total=12, global_batch=4, micro_batch=2, flops_per_sample=2e9):
    for (x,) in step:
        step.backward(model(x).square().mean())
        time.sleep(0.01)
    step.update()
    if step.number == 6:
        time.sleep(0.2)  # between two steps: a validation
print("took", time.time() - began, flush=True)
"""


def numbers(tmp_path, world, late, peaks):
    script = tmp_path / "numbers.py"
    script.write_text(NUMBERS.replace("LATE", str(late)).replace("PEAKS", repr(peaks)))
    output = train(tmp_path / "run", world, script=script).output
    facts = [
        s.fact
        for s in read_facts(open_store(str(tmp_path / "run")))
        if isinstance(s.fact, StepDone)
    ]
    return history(tmp_path / "run"), facts, float(output.rpartition("took ")[2].split()[0])


@pytest.mark.parametrize(("world", "late"), [(1, True), (2, True), (2, False)])
def test_steps_do_not_overlap_however_late_their_numbers_come(tmp_path, world, late):
    records, facts, took_s = numbers(tmp_path, world, late, [1e12, 3e12])
    assert [r.step for r in records] == [f.step for f in facts] == list(range(1, 13))
    for before, after in itertools.pairwise(records):
        assert after.t - after.dt >= before.t - 1e-6, (before, after)
    assert all(r.dt >= 0.01 for r in records)
    # what lies between two steps is none of theirs
    assert sum(r.dt for r in records) <= took_s - 0.2
    for r, f in zip(records, facts, strict=True):
        assert f.seconds == r.dt
        # of all ranks' GPUs, which may differ
        assert f.mfu == pytest.approx(2e9 * 4 / r.dt / (1e12 if world == 1 else 4e12))


def test_mfu_is_unknown_where_one_peak_is(tmp_path):
    _, facts, _ = numbers(tmp_path, 2, False, [1e12, None])
    assert {f.mfu for f in facts} == {None}


def test_votes_that_come_late_are_heeded(calm, tmp_path):
    """A drain is voted for in step 5, counted after step 6, and the rest is trained as if
    nothing had been."""
    run = tmp_path / "run"
    late = (
        Path(TRAINER)
        .read_text()
        .replace("reduce=a.reduce)", "reduce=a.reduce, votes_late=True)", 1)
    )
    script = tmp_path / "late.py"
    script.write_text(late)
    train(run, 2, "--signal-at", 5, script=script, codes=(EXIT_CODE[Want.DRAIN],))
    assert newest(run).step == 6
    train(run, 2, script=script)
    assert losses(run) == pytest.approx(losses(calm), rel=1e-4)
    assert [r.digest for r in history(run)] == [r.digest for r in history(calm)]
