"""Processes of survivors go on in the next world: what a script does before its loop is done once."""

import json
import os
import random
import signal
import threading
import time

import psutil
import pytest
import torch
from torch import nn

import harness
from harness.core.facts import SessionStarted
from harness.core.world import DRAINED, RESIZE
from harness.node import next_world
from harness.worker import session
from harness.worker.process_group import Peers
from harness.worker.training_state import Training
from support.worlds import history, newest

SCRIPT = """
import hashlib, json, os, pathlib, sys, time, torch, harness
folder = pathlib.Path(sys.argv[1])
run = harness.attach(seed=1, snapshot_every_steps=1000, reduce="exact")
model = torch.nn.Sequential(
    torch.nn.Linear(16, 16),
    torch.nn.LayerNorm(16) if "compile" in sys.argv else torch.nn.BatchNorm1d(16),
    torch.nn.Dropout(0.1),
    torch.nn.Linear(16, 2),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
ema = torch.optim.swa_utils.AveragedModel(model)
run.prepare(model, optimizer, scheduler=scheduler, state={"ema": ema})
if "groups" in sys.argv:
    torch.distributed.new_group()
if "sums" in sys.argv:
    assert run.sum(1.0) == run.world
data = torch.utils.data.TensorDataset(torch.randn(320, 16, generator=torch.Generator().manual_seed(1)))
with open(folder / "begun", "a") as f:
    f.write(f"{os.getpid()}\\n")
while (folder / "wait").exists():  # it builds its model
    time.sleep(0.02)
def compiled(graph, inputs):
    with open(folder / "compiled", "a") as f:
        f.write(json.dumps([os.getpid(), run.epoch]) + "\\n")
    return graph.forward
called = torch.compile(model, backend=compiled) if "compile" in sys.argv else model
def loss(x):
    return (called(x) - 1).square().mean()
def after(step):
    ema.update_parameters(model)
    with open(folder / "steps", "a") as f:
        f.write(json.dumps([os.getpid(), run.epoch, run.world, step.number, step.updated]) + "\\n")
    time.sleep(float(sys.argv[2]))
def validate():
    model.eval()
    with torch.no_grad():
        found = run.sum(sum(float(loss(data[i][0][None])) for i in range(run.replica, 8, run.replicas)))
    model.train()
    with open(folder / "validated", "a") as f:
        f.write(f"{loader.epoch} {found:.4f}\\n")
if "loader" in sys.argv:
    how = dict(global_batch=8, micro_batch=2, shuffle=True, num_workers=1)
    each = 5 if "short" in sys.argv else 25  # steps in an epoch
    loader = run.loader(torch.utils.data.Subset(data, range(8 * each)), **how)
    by_range = ((loader.set_epoch(e), e)[1] for e in range(loader.epoch, 4))
    for epoch in by_range if "range" in sys.argv else loader.epochs(100 // each):
        for (x,) in loader:
            if loader.update(loss(x), clip_norm=1.0) or loader.step.lost:
                after(loader.step)
        validate()
else:
    for step in run.steps(data, total=100, global_batch=8, micro_batch=2):
        for (x,) in step:
            step.backward(loss(x))
        step.update(1.0)
        after(step)
if run.rank == 0:
    state = {**model.state_dict(), **{f"ema.{k}": v for k, v in ema.state_dict().items()}}
    values = b"".join(state[k].numpy().tobytes() for k in sorted(state))
    (folder / "weights").write_text(hashlib.sha256(values).hexdigest())
"""


LOOPS = {"steps": [], "compiled": ["compile"], "loader": ["loader"]}


class Trained:
    """Nodes that train the script in a folder."""

    def __init__(self, nodes, *flags):
        self.nodes, self.folder, self.flags = nodes, nodes.run.parent, flags
        (self.folder / "script.py").write_text(SCRIPT)

    def start(self, sleep_s=0.1):
        return self.nodes.start(
            *(self.folder, sleep_s, *self.flags), script=self.folder / "script.py"
        )

    def lines(self):
        """[pid, epoch, world, step, updated], each."""
        file = self.folder / "steps"
        return list(map(json.loads, file.read_text().splitlines())) if file.exists() else []

    def until_world(self, world, behind=0):
        """Wait until a later generation than `behind` trains with so many ranks; return its number
        and its processes."""

        def met():
            return [e for _, e, w, *_ in self.lines() if w == world and e > behind]

        self.nodes.until(met)
        epoch = met()[0]
        self.nodes.until(lambda: len(self.pids(epoch)) == world)
        self.nodes.until(lambda: sum(e == epoch for _, e, *_ in self.lines()) >= 4 * world)
        return epoch, self.pids(epoch)

    def pids(self, epoch):
        return {pid for pid, e, *_ in self.lines() if e == epoch}

    def begun(self):
        return (self.folder / "begun").read_text().split()


def workers_of(process):
    return [p for p in psutil.Process(process.pid).children(recursive=True) if "rank" in p.name()]


def calm_weights(nodes, *flags):
    """The weights of a run that nothing disturbs. Other runs of `nodes` begin anew behind it."""
    calm = Trained(nodes, *flags)
    calm.start(0)
    assert nodes.codes() == [0], nodes.logs()
    weights = (calm.folder / "weights").read_text()
    for name in ("begun", "steps", "weights", "validated", "compiled"):
        (calm.folder / name).unlink(missing_ok=True)
    nodes.run, nodes.url, nodes.processes = nodes.run.with_name("other"), f"{nodes.url}2", []
    return weights


@pytest.mark.proof
@pytest.mark.parametrize("flags", LOOPS.values(), ids=LOOPS)
def test_a_loss_a_silent_node_and_a_newcomer_find_the_same_processes(nodes, flags):
    weights = calm_weights(nodes, *flags)
    told = Trained(nodes, *flags)
    found = [told.start() for _ in range(3)]
    first, pids = told.until_world(3)

    (worker,) = workers_of(found[1])
    worker.kill()
    second, after = told.until_world(3, first)
    assert pids - after == {worker.pid} and len(told.begun()) == 4, nodes.logs()
    assert "other software" not in nodes.logs()

    everything = [found[2].pid, *(p.pid for p in psutil.Process(found[2].pid).children(True))]
    for pid in everything:
        os.kill(pid, signal.SIGSTOP)
    third, two = told.until_world(2, second)
    assert two < after, nodes.logs()
    for pid in everything:
        os.kill(pid, signal.SIGCONT)
    _, three = told.until_world(3, third)
    assert two < three

    assert nodes.codes() == [0, 0, 0], nodes.logs()
    assert (told.folder / "weights").read_text() == weights
    assert [r.step for r in history(nodes.url)] == list(range(1, 101))
    if "compile" in flags:  # whoever was there from the first generation on, in that only
        each = set(map(tuple, map(json.loads, (told.folder / "compiled").read_text().splitlines())))
        assert {(pid, e) for pid, e in each if pid in pids} == {(pid, first) for pid in pids}
    lost = {(pid, step) for pid, _, _, step, updated in told.lines() if pid in two and not updated}
    assert lost and lost <= {(pid, step) for pid, _, _, step, updated in told.lines() if updated}
    tiers = [s.tier for s in sorted(nodes.facts(SessionStarted), key=lambda s: s.epoch)]
    assert tiers[1:3] == ["survivors", "survivors"], tiers


@pytest.mark.proof
def test_a_script_with_process_groups_of_its_own_begins_anew(nodes):
    told = Trained(nodes, "groups")
    found = [told.start() for _ in range(2)]
    first, pids = told.until_world(2)
    (worker,) = workers_of(found[1])
    worker.kill()
    _, after = told.until_world(2, first)
    assert not pids & after and len(told.begun()) == 4
    assert nodes.codes() == [0, 0], nodes.logs()


@pytest.mark.proof
def test_an_epoch_ends_alike_wherever_a_rank_is_lost(nodes):
    """Also amid a validation with exchanges, and between it and the next epoch."""
    weights = calm_weights(nodes, "loader", "short")
    told = Trained(nodes, "loader", "short")
    found, rng = [told.start() for _ in range(3)], random.Random(5)
    epoch, before = 0, set()
    stayed = 0
    for _ in range(5):
        epoch, pids = told.until_world(3, epoch)
        stayed += len(pids & before)
        before = pids
        time.sleep(rng.random())
        rng.choice(workers_of(rng.choice(found))).kill()
    assert nodes.codes() == [0, 0, 0], nodes.logs()
    assert (told.folder / "weights").read_text() == weights
    assert [r.step for r in history(nodes.url)] == list(range(1, 101))
    said = {tuple(line.split()) for line in (told.folder / "validated").read_text().splitlines()}
    assert len({after for after, _ in said}) == len(said)  # each epoch's value is one
    assert stayed >= 4, nodes.logs()


@pytest.mark.proof
def test_a_script_whose_epochs_begin_with_an_exchange_begins_anew(nodes):
    weights = calm_weights(nodes, "loader", "range")
    told = Trained(nodes, "loader", "range")
    found = [told.start() for _ in range(2)]
    nodes.until(lambda: any(step > 26 for *_, step, _ in told.lines()))
    first, pids = told.until_world(2)
    (worker,) = workers_of(found[1])
    worker.kill()
    _, after = told.until_world(2, first)
    assert not pids & after
    assert nodes.codes() == [0, 0], nodes.logs()
    assert (told.folder / "weights").read_text() == weights


# ---- newcomers -----------------------------------------------------------------------------------
@pytest.mark.proof
@pytest.mark.parametrize("flags", LOOPS.values(), ids=LOOPS)
def test_a_newcomer_prepares_while_the_others_train(nodes, flags):
    weights = calm_weights(nodes, *flags)
    told = Trained(nodes, *flags)
    told.start()
    first, pids = told.until_world(1)
    (told.folder / "wait").touch()
    told.start()
    nodes.until(lambda: len(told.begun()) == 2)
    (newcomer,) = map(int, set(told.begun()) - set(map(str, pids)))
    before = len(told.lines())
    nodes.until(lambda: len(told.lines()) > before + 10)  # nobody waits for it
    (told.folder / "wait").unlink()
    _, both = told.until_world(2, first)
    assert both == pids | {newcomer}, nodes.logs()
    assert newest(nodes.url) is None  # and nobody has waited for the bucket
    assert nodes.codes() == [0, 0], nodes.logs()
    assert (told.folder / "weights").read_text() == weights
    assert [r.step for r in history(nodes.url)] == list(range(1, 101))
    steps = [step for *_, step, updated in told.lines() if updated]
    assert max(steps.count(step) for step in steps) == 2  # none was done again


@pytest.mark.proof
def test_a_script_that_needs_the_others_before_its_loop_begins_with_them(nodes):
    weights = calm_weights(nodes)
    told = Trained(nodes, "sums")
    told.start()
    first, pids = told.until_world(1)
    told.start()
    _, both = told.until_world(2, first)
    assert not pids & both and "prepares" not in nodes.logs()  # nor do those stay that are there
    assert nodes.codes() == [0, 0], nodes.logs()
    assert (told.folder / "weights").read_text() == weights


@pytest.mark.proof
def test_a_newcomer_that_must_leave_does_not_end_its_preparation(nodes):
    told = Trained(nodes)
    told.start()
    told.until_world(1)
    (told.folder / "wait").touch()
    second = told.start()
    nodes.until(lambda: len(told.begun()) == 2)
    second.terminate()
    assert second.wait(30) == DRAINED, nodes.logs()
    assert len({epoch for _, epoch, *_ in told.lines()}) == 1
    assert nodes.codes() == [0, DRAINED], nodes.logs()


# ---- a step that was lost ------------------------------------------------------------------------
DATA = torch.utils.data.TensorDataset(torch.ones(8, 4))


@pytest.fixture
def prepared(monkeypatch):
    """A session without an agent, and its model."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(session, "_attached", [])
    run = harness.attach(seed=1)
    model = nn.Linear(4, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run, model


@pytest.fixture
def lost_step(prepared, monkeypatch):
    """The first step of a script, in whose first backward another rank is lost, and what the script
    did in it: micro-batches, and losses that this process was to survive."""
    run, model = prepared
    survived, micros = [], []

    def survives(error):
        survived.append(error)
        return True

    def lose():
        raise RuntimeError("gloo: Connection closed by peer")

    monkeypatch.setattr(run._work.same, "survives", survives)
    monkeypatch.setattr(run.strategy, "micro_done", lose)
    step = next(steps := run.steps(DATA, total=2, global_batch=4, micro_batch=1))
    for (x,) in step:
        micros.append(x)
        step.backward(model(x).mean())
    yield step, micros, survived
    steps.close()


def test_a_lost_step_gives_no_more_micro_batches_and_no_update(lost_step):
    step, micros, survived = lost_step
    assert len(micros) == len(survived) == 1
    step.update()
    assert step.lost is survived[0] and not step.updated and len(survived) == 1


@pytest.mark.parametrize("part", ["sync", "again", "done"])
def test_the_parts_of_an_update_end_with_the_loss(lost_step, part):
    step, _, survived = lost_step
    with pytest.raises(RuntimeError, match="Connection closed by peer") as found:
        getattr(step, part)()
    assert found.value is survived[0]


def test_a_wish_to_end_the_run_reaches_the_next_world(prepared, monkeypatch):
    run, model = prepared
    monkeypatch.setattr(run._same, "wait", lambda why: {})
    run.stop("the loss is small enough")
    run._go_on(RuntimeError("gloo: Connection closed by peer"))
    run._same.resumes = None  # there is nothing to resume from here
    for step in run.steps(DATA, total=2, global_batch=4, micro_batch=1):
        for (x,) in step:
            step.backward(model(x).mean())
        step.update()
    assert run.step == 1 and run.stopped == "the loss is small enough"


# ---- the order -----------------------------------------------------------------------------------
def test_an_order_reaches_the_process_that_waits(tmp_path):
    pid, found = os.getpid(), []
    assert next_world.waiting(tmp_path, pid) is None
    assert not next_world.order(tmp_path, pid, {"RANK": "1"})
    thread = threading.Thread(target=lambda: found.append(next_world.wait(tmp_path, RESIZE, 20.0)))
    thread.start()
    while (status := next_world.waiting(tmp_path, pid)) is None:
        time.sleep(0.001)
    assert status == RESIZE
    assert next_world.order(tmp_path, pid, {"RANK": "1", "WORLD_SIZE": "2"})
    thread.join(20)
    assert found == [{"RANK": "1", "WORLD_SIZE": "2"}]
    assert not list(tmp_path.iterdir()) and not next_world.order(tmp_path, pid, {})


def test_the_pipe_of_a_process_that_has_ended_is_no_process_that_waits(tmp_path):
    pid = os.getpid()
    os.mkfifo(tmp_path / f"order-{pid}-{next_world.LOST}")  # of a process with the same id
    assert next_world.waiting(tmp_path, pid) is None
    assert not next_world.order(tmp_path, pid, {"RANK": "1"})


def test_without_an_order_it_waits_no_longer_than_it_may(tmp_path):
    assert next_world.wait(tmp_path, next_world.LOST, 0.01) is None
    assert not list(tmp_path.iterdir())
    assert next_world.wait(tmp_path / "no folder", next_world.LOST, 0.01) is None


class Counts(nn.Module):
    """It has a buffer that changes in forwards."""

    def __init__(self, saved):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()), persistent=saved)

    def forward(self, x):
        self.count += 1
        return self.layer(x)


@pytest.mark.parametrize("saved", [True, False])
def test_buffers_that_change_and_are_in_no_snapshot_would_be_forgotten(saved):
    model = Counts(saved)
    training = Training(Peers({}), "fast")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training.prepare(model, [optimizer], None, None, {}, (), (), None)
    assert not training.forgets()
    model(torch.ones(1, 2))
    assert training.forgets() is not saved
