"""A notice amid a long step, whose end would come too late: all ranks leave with the state that was
before it, and whoever resumes trains the same as if nothing had been."""

import pytest

from harness.bucket.archive import read_facts
from harness.core.facts import Warned
from harness.node.marks import MarkFile
from storage.stores.store_urls import open_store
from support.worlds import history, newest, train

LONG = """
import os, sys, time, torch, harness
from pathlib import Path
from harness.node.marks import MarkFile, Want
from harness.worker import votes
votes.VOTE_EVERY_S = 0.05  # of steps that take 0.2 s
flags, grace_s = sys.argv[1:-1], float(sys.argv[-1])
run = harness.attach(seed=1, snapshot_every_steps=1000, reduce="exact" if "exact" in flags else "fast")

class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inside", torch.zeros(8))
        self.register_buffer("replaced", torch.zeros(8))
    def forward(self, x):
        self.inside += x.detach().sum(0)
        self.replaced = self.replaced + 1
        return x

class Rows(torch.utils.data.IterableDataset):
    at = 0
    def __iter__(self):
        while True:
            self.at += 1
            yield (torch.full((8,), (self.at % 7) / 7.0),)
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]

class Seen:
    steps, micros, rows = 0, 0, torch.zeros(2)
    large = torch.zeros(300_000 if "large" in flags else 1)  # more than 1 MiB, or not
    def state_dict(self):
        return {"steps": self.steps, "micros": self.micros, "rows": self.rows, "large": self.large}
    def load_state_dict(self, state):
        vars(self).update(state)

torch.manual_seed(0)
counter = Counter() if "fast" in flags else torch.nn.Identity()  # exact sums refuse buffers that differ
model = torch.nn.Sequential(counter, torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
seen = Seen()
run.prepare(model, optimizer, state={"seen": seen}, scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
data = Rows() if "stream" in flags else torch.utils.data.TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(3)))

def forward(step, x):
    if grace_s and step.number == 5 and step._micros == 1 and run.rank == run.world - 1:
        MarkFile(Path(os.environ["HARNESS_MARK"])).write(Want.RESIZE, "notice:x", time.time() + grace_s)
    time.sleep(0.025 * run.world)
    step.backward(model(x).square().mean())
    seen.micros += 1
    seen.rows += 1
    if "large" in flags:
        seen.large += 1

def update(step):
    step.update(clip_norm=1.0)
    seen.steps += 1
    seen.rows = seen.rows + torch.rand(2)  # seeded between two steps

if "loader" in flags:
    loader = run.loader(data, global_batch=32, micro_batch=4, shuffle=True)
    for epoch in loader.epochs(4):
        for x, in loader:
            forward(loader.step, x)
            if loader.ends_step:
                update(loader.step)
else:
    for step in run.steps(data, total=7, global_batch=32, micro_batch=4):
        for x, in step:
            forward(step, x)
        update(step)
"""


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Trains a script of long steps, with a mark of its own in step 5; 0: without one."""
    folder = tmp_path_factory.mktemp("long")
    script = folder / "script.py"
    script.write_text(LONG)

    def trained(run, world, *flags, grace_s=0.0, code=0):
        mark = run.with_name(f"{run.name}.node") / "mark.json"
        mark.parent.mkdir(exist_ok=True)
        MarkFile(mark)
        env = {"HARNESS_MARK": str(mark)}
        return train(run, world, *flags, grace_s, env=env, codes=(code,), script=script)

    return trained


@pytest.mark.parametrize(
    ("world", "flags"),
    [(2, ["fast"]), (1, ["fast", "stream"]), (2, ["exact"]), (2, ["fast", "loader"])],
)
def test_a_step_that_would_end_too_late_is_dropped_and_done_again_the_same(
    tmp_path, long, world, flags
):
    """The state holds BatchNorm, buffers that each micro-batch changes and replaces, dropout, a
    place in a stream, an object that each micro-batch changes, and the units of exact sums."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    long(whole, world, *flags)
    ended = long(parts, world, *flags, grace_s=2.05, code=34)
    assert "step 5 would end too late for the notice" in ended.output
    assert newest(parts).step == 4 and len(history(parts)) == 4
    (tmp_path / "parts.node" / "mark.json").unlink()
    long(parts, world, *flags)
    assert [(r.loss, r.digest, r.contents, r.lr) for r in history(parts)] == [
        (r.loss, r.digest, r.contents, r.lr) for r in history(whole)
    ]
    assert newest(parts).data["weights"] == newest(whole).data["weights"]
    assert newest(parts).data["state"]["seen"] == newest(whole).data["state"]["seen"]


def test_a_step_that_ends_in_time_is_not_dropped(tmp_path, long):
    ended = long(tmp_path / "run", 2, "fast", grace_s=60.0, code=34)
    assert newest(tmp_path / "run").step == 5 and "too late" not in ended.output


def test_a_step_whose_state_cannot_be_put_back_is_done_to_its_end(tmp_path, long):
    run = tmp_path / "run"
    long(run, 2, "fast", "large", grace_s=2.05, code=34)
    assert newest(run).step == 5
    told = [s.fact.what for s in read_facts(open_store(str(run))) if isinstance(s.fact, Warned)]
    assert any("step 5" in what and "'seen/large' has changed" in what for what in told), told


OWN = """
import os, sys, time, torch, harness
import torch.distributed as dist
from pathlib import Path
from harness.node.marks import MarkFile, Want
grace_s = float(sys.argv[-1])
run = harness.attach(seed=1, snapshot_every_steps=1000)

class Seen:
    def __init__(self):
        self.steps, self.micros, self.loss = 0, 0, torch.zeros(1)
    def state_dict(self):
        return vars(self)
    def load_state_dict(self, state):
        vars(self).update(state)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
seen = Seen()
run.prepare(model, optimizer, state={"seen": seen})
for step in range(run.resume() + 1, 8):
    for micro in range(4):
        if micro:
            run.half_step()
        if grace_s and step == 5 and micro == 1 and run.rank == run.world - 1:
            MarkFile(Path(os.environ["HARNESS_MARK"])).write(Want.RESIZE, "notice:x", time.time() + grace_s)
        time.sleep(0.2)
        torch.manual_seed(1000 * step + micro)  # the same on each rank
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        seen.micros += 1
        seen.loss += loss.detach()
    if run.world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= run.world
    optimizer.step()
    optimizer.zero_grad()
    seen.steps += 1
    run.safe_point(step)
run.finish()
"""


@pytest.mark.proof
@pytest.mark.parametrize("world", [1, 2])
def test_a_loop_with_safe_points_drops_a_step_in_which_it_says_where_it_may(tmp_path, world):
    script = tmp_path / "own.py"
    script.write_text(OWN)

    def trained(name, grace_s=0.0, code=0):
        mark = tmp_path / f"{name}.node" / "mark.json"
        mark.parent.mkdir(exist_ok=True)
        mark.unlink(missing_ok=True)
        MarkFile(mark)
        env, run = {"HARNESS_MARK": str(mark)}, tmp_path / name
        return train(run, world, grace_s, env=env, codes=(code,), script=script)

    trained("whole")
    ended = trained("parts", grace_s=2.2, code=34)
    assert "step 5 would end too late for the notice, so it is dropped between two" in ended.output
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert newest(parts).step == 4
    trained("parts")
    assert newest(parts).step == newest(whole).step == 7
    assert newest(parts).data["weights"] == newest(whole).data["weights"]
    assert newest(parts).data["state"]["seen"] == newest(whole).data["state"]["seen"]


def test_a_step_that_ends_in_time_is_done_in_a_loop_with_safe_points(tmp_path):
    script, mark = tmp_path / "own.py", tmp_path / "run.node" / "mark.json"
    script.write_text(OWN)
    mark.parent.mkdir()
    MarkFile(mark)
    env = {"HARNESS_MARK": str(mark)}
    train(tmp_path / "run", 1, 60.0, env=env, codes=(34,), script=script)
    assert newest(tmp_path / "run").step == 5
