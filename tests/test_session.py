"""The session with real processes and a real process group: same samples, same batch, same result on any world."""

import json
import time

import pytest
from worlds import finish, history, newest, start, train

from harness.audit import audit
from harness.batch import Batching, expected_digest
from harness.facts import SnapshotFailed
from harness.journal import read_facts
from harness.marks import Want, write
from storage import dcp
from storage.objects import open_store
from storage.snapshots import Snapshots


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


@pytest.mark.parametrize(("world", "flags"), [(2, []), (5, []), (3, ["--parallel", "fsdp2"]), (2, ["--workers", 1])])
def test_other_worlds_train_the_same(calm, tmp_path, world, flags):
    train(tmp_path / "run", world, *flags)
    assert [r.digest for r in history(tmp_path / "run")] == [r.digest for r in history(calm)]
    assert losses(tmp_path / "run") == pytest.approx(losses(calm), rel=1e-4)
    assert sum(history(tmp_path / "run")[0].shares) == 12


def test_the_world_may_change_on_the_way(calm, tmp_path):
    run = tmp_path / "run"
    for world, total, parallel in ((2, 8, "fsdp2"), (5, 15, "fsdp2"), (1, 22, "ddp"), (3, 30, "ddp")):
        train(run, world, "--total", total, "--parallel", parallel)
    assert [r.world for r in history(run)] == [2] * 8 + [5] * 7 + [1] * 7 + [3] * 8
    assert losses(run) == pytest.approx(losses(calm), rel=1e-3)


AVERAGES = """
import sys, torch, harness
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
run = harness.attach(snapshot_every_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
averages = {"ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)), "other": AveragedModel(model)}
run.prepare(model, torch.optim.AdamW(model.parameters()), **averages)
run._after_update -= {"other"} if "early" not in sys.argv else set()  # as one of a class that we do not know
for step in run.steps(torch.utils.data.TensorDataset(torch.randn(64, 8)), total=6, global_batch=4, micro_batch=4):
    averages["other"].update_parameters(model)  # not where averages are updated
    for (x,) in step:
        step.backward(model(x).square().mean())
    step.update()
    averages["ema"].update_parameters(model)
print("ema", averages["ema"].module[0].weight.double().sum().item())
"""


@pytest.mark.parametrize("early", [[], ["early"]])
def test_averages_are_copied_beside_the_training_and_who_breaks_the_promise_is_told(tmp_path, early):
    script = tmp_path / "script.py"
    script.write_text(AVERAGES)
    ended = finish(start(tmp_path / "run", 1, *early, script=script))
    assert ended.codes == [0], ended.output
    told = "was changed in place between two optimizer steps"
    assert ended.output.count(told) == len(early) and ("'other/" in ended.output) == bool(early)
    store = open_store(str(tmp_path / "run"))
    snapshots = Snapshots(store)
    manifest = snapshots.latest()
    snapshots.verify(manifest)
    tensors = {name: t for name, t in dcp.destinations(manifest, {}).items() if name == "ema/module.0.weight"}
    dcp.load(snapshots, manifest, tensors)
    assert f"ema {tensors['ema/module.0.weight'].double().sum().item()}" in ended.output
    failed = [s.fact for s in read_facts(store) if isinstance(s.fact, SnapshotFailed)]
    assert len(failed) <= len(early)


ENDS = """
import sys, torch, harness
how = sys.argv[1]
run = harness.attach(snapshot_every_steps=100)
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
run.prepare(model, torch.optim.AdamW(model.parameters()))
data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))

def loop(total, leave_at=0):
    for step in run.steps(data, total=total, global_batch=8, micro_batch=4):
        for (x,) in step:
            step.backward(model(x).square().mean())
        step.update()
        if step.number == leave_at:
            if how == "raise":
                raise ValueError("planned")
            return

if how in ("own", "apart"):
    run.resume()
    for k in range(1, 4):
        run.safe_point(k + (run.rank if how == "apart" else 0))
elif how == "epochs":
    for total in (2, 4, 6):
        loop(total)
        run.log(half=run.sum(1.0))
elif how == "pauses":
    for at in (2, 4, 0):
        loop(6, at)
elif how == "finish":
    loop(6, 3)
    run.finish()
    run.finish()
else:
    loop(6, 0 if how == "whole" else 3)
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    script = tmp_path_factory.mktemp("ends") / "ends.py"
    script.write_text(ENDS)
    return script


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
def test_a_script_that_ends_well_has_ended_the_run(tmp_path, ends, how, world, step, why):
    train(tmp_path / "run", world, how, script=ends)
    store = open_store(str(tmp_path / "run"))
    manifest = Snapshots(store).latest()
    assert manifest.step == step and manifest.data.get("final") and manifest.data.get("ended") == why
    if how in ("epochs", "pauses"):
        train(tmp_path / "whole", world, "whole", script=ends)
        assert losses(tmp_path / "run") == losses(tmp_path / "whole") and len(losses(tmp_path / "run")) == 6
    assert how == "own" or audit(store).ok


def test_a_script_that_fails_has_not_ended_the_run(tmp_path, ends):
    train(tmp_path / "run", 1, "raise", script=ends, codes=(1,))
    assert newest(tmp_path / "run") is None
    train(tmp_path / "run", 1, "whole", script=ends)
    assert newest(tmp_path / "run").step == 6


def test_ranks_that_leave_at_different_steps_are_told(tmp_path, ends):
    ended = train(tmp_path / "run", 2, "apart", script=ends, codes=(0, 1))
    assert "different steps (3, 4)" in ended.output and ended.codes == [1, 1] and newest(tmp_path / "run") is None


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
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_everything_with_a_state_resumes(tmp_path):
    train(tmp_path / "whole", 1, "--ema", "--fp16", "--total", 12, "--out", tmp_path / "whole.json")
    train(tmp_path / "parts", 1, "--ema", "--fp16", "--total", 5)
    train(tmp_path / "parts", 1, "--ema", "--fp16", "--total", 12, "--out", tmp_path / "parts.json")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert (tmp_path / "parts.json").read_text() == (tmp_path / "whole.json").read_text()


def steps_reached(run):
    store = open_store(str(run))
    return sum('"fact":"StepDone"' in line for k in store.list("facts/worker") for line in store.get(k).decode().splitlines())


def wait_for(condition, timeout_s=60):
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
    write(marks[0], Want.SNAPSHOT, "asked")
    wait_for(lambda: newest(run) is not None)
    assert all(p.poll() is None for p in processes)
    first = newest(run).step
    write(marks[0], Want.RESIZE, "notice:x")
    ended = finish(processes)
    assert ended.codes == [34, 34], ended.output
    manifest = newest(run)
    assert manifest.epoch == 7 and manifest.step > first and manifest.world == 2
    assert len(history(run)) == manifest.step  # no step was lost, none is recorded beyond


def test_sigterm_without_an_agent_drains(tmp_path):
    ended = finish(start(tmp_path / "run", 2, "--signal-at", 4, "--every", 5000))
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
    ended = train(tmp_path / "run", 2, "--nan-at", 12, codes=(1,))
    assert "NonFiniteLoss" in ended.output and "step 12" in ended.output
    assert newest(tmp_path / "run").step == 10


def test_a_bad_snapshot_is_quarantined_and_the_older_one_used(tmp_path, calm):
    run = tmp_path / "run"
    train(run, 1, "--total", 25)
    store = open_store(str(run))
    bad = Snapshots(store).latest()
    key = bad.parts[0].key
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))
    ended = train(run, 2)
    assert "falling back" in ended.output and "resumed from step 20" in ended.output
    assert json.loads(store.get(f"snapshots/quarantine/{bad.ref.name}.json"))
    assert losses(run) == pytest.approx(losses(calm), rel=1e-4)


def test_without_a_run_it_is_an_ordinary_script(tmp_path):
    ended = finish(start("", 1, "--total", 5, "--out", tmp_path / "out.json"))
    assert ended.codes == [0] and "without snapshots" in ended.output
    assert json.loads((tmp_path / "out.json").read_text())["step"] == 5


def test_what_cannot_be_exact_is_named(tmp_path):
    ended = train(tmp_path / "unseeded", 1, "--unseeded", "--reduce", "exact", "--total", 3)
    assert "Numbers[i] is another sample when it is read again" in ended.output
    ended = train(tmp_path / "norm", 1, "--norm", "--reduce", "exact", "--total", 3, codes=(1,))
    assert "the model has BatchNorm" in ended.output and newest(tmp_path / "norm") is None
    assert "another sample" not in train(tmp_path / "augment", 1, "--augment", "--reduce", "exact", "--total", 3).output
