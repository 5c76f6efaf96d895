"""Loops that sum their gradients by themselves: `resume`, `safe_point`, `finish`."""

import math

import pytest

from harness.bucket.archive import read_facts
from harness.core.facts import StepDone
from harness.look.audit.audit import audit
from harness.look.reports.summary import summarize
from storage.stores.store_urls import open_store
from support.worlds import newest, train

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import harness
from storage.stores.store_urls import open_store
from storage.snapshots.snapshots import Snapshots

total, die_at, stop_at, every = map(int, sys.argv[1:])
run = harness.attach(snapshot_every_steps=2)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
by_step = torch.optim.lr_scheduler.StepLR(optimizer, 2)
run.prepare(model, optimizer, by_step)
begin = run.resume()
print("begins", begin, flush=True)
for step in range(begin + 1, total + 1):
    whole = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    mine = whole[run.rank :: run.world]
    loss = model(mine).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    by_step.step()
    shown = loss.detach().clone()
    dist.all_reduce(shown)  # a call of the script's own
    if step == die_at:  # steps are so short that the first snapshot may be on its way
        snapshots, until_s = Snapshots(open_store(os.environ["HARNESS_RUN"])), time.monotonic() + 60
        while snapshots.latest() is None and time.monotonic() < until_s:
            time.sleep(0.01)
        os._exit(9)
    if step == stop_at and run.rank == run.world - 1:
        run.stop("it is enough")
    if step % every == 0:
        run.safe_point(step, loss=float(shown) / run.world, samples=12 * every)
    if run.stopped:
        break
if run.rank == 0:
    print("weights", [round(v, 5) for v in model.module.weight.flatten().tolist()])
run.finish()
"""


@pytest.fixture
def loop(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def start(run, world, *flags, codes=(0,)):
        return train(tmp_path / run, world, *flags, script=script, codes=codes).output

    return start


def weights(output):
    return next(line for line in output.splitlines() if "weights" in line)


def test_it_goes_on_where_it_was_and_is_told_of(loop, tmp_path):
    alone = loop("alone", 2, 9, 0, 0, 1)
    loop("run", 3, 9, 6, 0, 1, codes=(9, 1, -9))
    begun = newest(tmp_path / "run").step
    assert begun in (2, 4), "step 4 was taken, and may not have been durable yet"
    resumed = loop("run", 2, 9, 0, 0, 1)
    assert f"begins {begun}" in resumed and weights(resumed) == weights(alone)
    store = open_store(str(tmp_path / "run"))
    told = [s.fact for s in read_facts(store) if isinstance(s.fact, StepDone)]
    assert [f.step for f in told if f.epoch == 2] == list(range(begun + 1, 10))
    assert all(f.samples == 12 and f.seconds > 0 and math.isfinite(f.loss) for f in told)
    for fact in told:  # of the scheduler, which has made its step; epoch 1 may have told nothing
        assert fact.lr == pytest.approx(0.01 * 0.1 ** (fact.step // 2))
    report = audit(store)
    assert report.ok, report.first_violation
    found = summarize(store)
    assert found.step == 9
    # what a world that was killed told last may be lost
    assert [row.committed for row in found.ledger.epochs][-1] == 9 - begun


def test_one_rank_may_end_it_and_several_steps_lie_between_two_points(loop, tmp_path):
    loop("run", 2, 20, 0, 4, 2)
    manifest = newest(tmp_path / "run")
    assert manifest.step == 4 and "it is enough" in manifest.data["ended"]
    store = open_store(str(tmp_path / "run"))
    told = [s.fact for s in read_facts(store) if isinstance(s.fact, StepDone)]
    assert [f.step for f in told] == [1, 2, 3, 4] and {f.samples for f in told} == {12}
