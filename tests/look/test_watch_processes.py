"""`harness snapshots watch` as real processes beside a real training: each snapshot once, whoever is killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.bucket.archive import read_facts
from harness.bucket.layout import STOP_KEY
from harness.core.facts import AttemptEnded, Validated, Warned
from harness.look.trackers.committed_steps import Lineage
from harness.look.trackers.metric_rows import Operations
from harness.look.trackers.stream_objects import EVENT
from harness.look.trackers.tracker_registry import RunInfo
from harness.look.trackers.tracker_stream import StreamWriter, every_row
from storage.snapshots.manifest import Ref
from storage.snapshots.retention import Keep, recorded_metrics
from storage.snapshots.snapshots import Snapshots
from storage.stores.folder_store import FileStore
from storage.stores.store_urls import open_store
from support.truerun import TrueRun
from support.worlds import environment, train, until

pytestmark = pytest.mark.proof
EVALUATE = """
import os, torch, harness
from torch import nn

assert "HARNESS_RUN" not in os.environ  # or harness.attach() would join the training
snapshot = harness.watched()
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
snapshot.restore(model)
x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
loss = nn.functional.cross_entropy(model.eval()(x), (x.sum(1) > 0).long())
snapshot.log(loss=loss.item(), step=snapshot.step)
(snapshot.weights / "model.safetensors").stat()
print("evaluated", snapshot.step, snapshot.final)
"""
# numbers without a framework; what is begun is seen in $SEEN, and waits for $GO
SHELL = (
    'echo "$HARNESS_WATCH_STEP $$" >> "$SEEN"; '
    'while [ -n "$GO" ] && [ ! -e "$GO" ]; do sleep 0.02; done; '
    'echo "{\\"loss\\": $HARNESS_WATCH_STEP}" >> "$HARNESS_WATCH_METRICS"'
)


TASK = Path(__file__).parents[2] / "sky_tasks" / "watch.yaml"


class Watching:
    """One `harness snapshots watch` in a process of its own."""

    def __init__(self, run, *words, command=("sh", "-c", SHELL), env=None):
        flags = ["--poll-s", "0.05", "--pause-s", "0.05", "--lease-s", "1", "--name", "eval", *words]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.cli.command", "snapshots", "watch", str(run), *flags, "--", *command],
            env={**environment(), "HARNESS_RUN": str(run), "GO": "", "SEEN": "/dev/null", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self, code=0):
        output = self.process.communicate(timeout=120)[0]
        assert self.process.returncode == code, output
        return output

    def kill(self, number=signal.SIGKILL):
        self.process.send_signal(number)


def true_run(folder, to, final=False):
    return TrueRun(FileStore(f"file://{folder}")).train(to, final=final)


def told(run):
    """(step, numbers) of what a watch measured, in order of steps."""
    facts = [s.fact for s in read_facts(open_store(str(run)))]
    found = [(f.step, f.metrics) for f in facts if isinstance(f, Validated) and f.by]
    return sorted(found, key=lambda one: one[0])


def seen(path):
    """(step, process) of every command that was begun."""
    lines = path.read_text().split("\n") if path.exists() else []
    return [tuple(map(int, line.split())) for line in lines if line]


def test_a_real_training_is_evaluated_exported_and_the_best_is_known(tmp_path):
    run, script = tmp_path / "run", tmp_path / "evaluate.py"
    script.write_text(EVALUATE)
    watching = Watching(run, "--weights", "bf16", "--every-steps", "100", command=(str(script),))
    train(run, 1, "--total", 10, "--every", 3)
    output = watching.end()
    assert "evaluated 10 True" in output and "the run has ended with step 10" in output
    numbers = dict(told(run))
    assert 10 in numbers and len(numbers) == 2  # the first that it came to see, and the last
    for step, metrics in numbers.items():
        assert metrics["eval/step"] == step and 0 < metrics["eval/loss"] < 2
    store = open_store(str(run))
    known = {ref.step: metrics for ref, metrics in recorded_metrics(store, Snapshots(store).refs()).items()}
    assert known == {step: numbers[step] for step in known} and 10 in known
    again = Watching(run, "--every-steps", "100", command=("false",)).end()
    assert "try" not in again  # all of it is done
    assert store.list("watch/eval/claims/") == [] == store.list("snapshots/reading/")


def test_a_watcher_that_is_killed_takes_its_command_along_and_another_goes_on(tmp_path):
    run, log, go = tmp_path / "run", tmp_path / "seen", tmp_path / "go"
    training = true_run(run, 15, final=True)
    store, info = training.store, RunInfo.of(training.store)
    operations = Operations(store, Lineage(store, info))
    assert StreamWriter(store, info, operations, now=lambda: training.t).round(last=True)
    env = {"SEEN": str(log), "GO": str(go)}
    first = Watching(run, env=env)
    until(lambda: seen(log), "the first command")
    ((step, pid),) = seen(log)
    beside = Watching(run, env=env)  # takes the next one meanwhile
    until(lambda: len(seen(log)) == 2, "the second command")
    first.kill()
    first.process.wait()
    until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the killed watcher's command")
    go.touch()
    beside.end()
    begun = [one for one, _ in seen(log)]
    assert step == 5 and sorted(begun) == [5, 5, 10, 15]  # and the killed one's again
    assert told(run) == [(s, {"eval/loss": s}) for s in (5, 10, 15)]
    assert sorted(row.step for row in every_row(store) if row.kind == EVENT and row.step) == [5, 10, 15]
    assert len(open_store(str(run)).list("watch/eval/done/")) == 3


def test_sigterm_gives_back_what_is_not_done_and_says_that_it_may_go_on_elsewhere(tmp_path):
    run, log, go = tmp_path / "run", tmp_path / "seen", tmp_path / "go"
    true_run(run, 5, final=True)
    watching = Watching(run, "--lease-s", "600", env={"SEEN": str(log), "GO": str(go)})
    until(lambda: seen(log), "the command")
    watching.kill(signal.SIGTERM)
    watching.end(33)
    assert told(run) == [] and not Path(f"/proc/{seen(log)[0][1]}").exists()
    store = open_store(str(run))
    assert store.list("snapshots/reading/") == []
    Watching(run, "--lease-s", "600").end()  # nobody waits for the lease
    assert told(run) == [(5, {"eval/loss": 5})]


def test_a_command_that_fails_is_tried_again_within_bounds_and_told(tmp_path):
    run, log = tmp_path / "run", tmp_path / "seen"
    true_run(run, 15, final=True)
    once = f"{SHELL}; echo reason; [ $HARNESS_WATCH_TRY = 2 ] || kill -9 $$"
    output = Watching(run, command=("sh", "-c", once), env={"SEEN": str(log)}).end()
    assert [step for step, _ in seen(log)] == [5, 5, 10, 10, 15, 15]
    assert "killed by signal 9" in output
    assert told(run) == [(step, {"eval/loss": step}) for step in (5, 10, 15)]

    other = ("--name", "other", "--tries", "2", "--most-failures", "2")
    output = Watching(run, *other, command=("sh", "-c", "echo why; exit 7")).end(1)
    assert "2 snapshots in a row failed" in output
    store = open_store(str(run))
    whys = [s.fact.what for s in read_facts(store) if isinstance(s.fact, Warned)]
    assert len(whys) == 2 and "exit status 7: why" in whys[0] and "step 5" in whys[0]
    output = Watching(run, *other, "--again").end(0)
    assert "2 snapshots that failed are done again" in output
    assert [step for step, metrics in told(run) if "other/loss" in metrics] == [5, 10, 15]


def test_numbers_that_are_none_and_a_command_that_takes_too_long_are_failures(tmp_path):
    run = tmp_path / "run"
    true_run(run, 10, final=True)
    job = '[ $HARNESS_WATCH_STEP = 5 ] || sleep 600; echo loss=1 > "$HARNESS_WATCH_METRICS"'
    flags = ("--tries", "1", "--limit-h", "0.0005")
    output = Watching(run, *flags, command=("sh", "-c", job)).end(1)
    assert "it took longer than 1.8 s (--limit-h)" in output and "failed (steps 5, 10)" in output
    whys = [s.fact.what for s in read_facts(open_store(str(run))) if isinstance(s.fact, Warned)]
    assert "wanted a JSON object of names and numbers" in whys[0] and told(run) == []


def test_what_waits_is_held_and_what_is_not_is_named(tmp_path):
    """The command of the first snapshot goes on while the training prunes behind its back."""
    run, log, go = tmp_path / "run", tmp_path / "seen", tmp_path / "go"
    training = true_run(run, 10)
    watching = Watching(run, "--hold", "2", env={"SEEN": str(log), "GO": str(go)})
    until(lambda: seen(log), "the first command")
    reading = f"{run}/snapshots/reading"

    def held():
        return {name for name in os.listdir(reading) if os.listdir(f"{reading}/{name}")}

    training.train(25, new_epoch=False)
    until(lambda: len(held()) == 3, "holds of the one that is done and two more")
    assert held() == {Ref(1, step).name for step in (5, 10, 15)}
    training.train(30, new_epoch=False)
    assert training.snapshots.prune(Keep(1)) == [Ref(1, 25), Ref(1, 20)]
    training.train(35, new_epoch=False, final=True)
    go.touch()
    output = watching.end()
    assert "2 were pruned before anybody came (steps 20, 25)" in output
    assert [step for step, _ in told(run)] == [5, 10, 15, 30, 35]
    assert training.snapshots.prune(Keep(1)) == [Ref(1, s) for s in (30, 15, 10, 5)]


def test_a_run_that_is_stopped_ends_its_watch(tmp_path):
    run = tmp_path / "run"
    training = true_run(run, 10)
    watching = Watching(run)
    until(lambda: len(told(run)) == 2, "two snapshots")
    assert watching.process.poll() is None
    training.store.put(STOP_KEY, json.dumps({"reason": "enough"}).encode())
    assert "the run was stopped: enough" in watching.end(3)


def test_a_run_that_makes_no_snapshot_is_not_watched_for_ever(tmp_path):
    run = tmp_path / "run"
    assert "no new snapshot for" in Watching(run, "--idle-h", "0.0001").end(3)
    assert told(run) == []


def test_our_own_recovery_leads_the_task_and_replaces_a_node_that_is_lost(tmp_path):
    """`harness launch sky_tasks/watch.yaml`, with a bucket of its own for what it has done."""
    run, lead = tmp_path / "run", tmp_path / "lead"
    log, go, script = tmp_path / "seen", tmp_path / "go", tmp_path / "job.sh"
    true_run(run, 15, final=True)
    script.write_text(SHELL)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "harness").symlink_to(Path(sys.executable).parent / "harness")
    own = {"WATCH": run, "VENV": tmp_path, "COMMAND": f"sh {script}"}
    own["FLAGS"] = "--lease-s 1 --poll-s 0.05"
    words = [word for name, value in own.items() for word in ("--env", f"{name}={value}")]
    leads = subprocess.Popen(
        [
            *(sys.executable, "-m", "harness.cli", "launch", str(TASK), "--cloud", "local"),
            *("--market", "calm", "--nodes", "1", "--run", str(lead), *words),
        ],
        env={**environment(), "SEEN": str(log), "GO": str(go)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until(lambda: seen(log), "the first command")
        stat = Path(f"/proc/{seen(log)[0][1]}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)  # its watcher
        until(lambda: len(seen(log)) > 1, "another node's first command")
        go.touch()
        output = leads.communicate(timeout=120)[0]
    finally:
        if leads.poll() is None:
            leads.kill()
            down = [sys.executable, "-m", "harness.cli", "down", str(lead)]
            subprocess.run(down, env=environment(), timeout=120)
    assert leads.returncode == 0, output
    assert told(run) == [(s, {"val/loss": s}) for s in (5, 10, 15)]
    attempts = [s.fact for s in read_facts(open_store(str(lead))) if isinstance(s.fact, AttemptEnded)]
    assert [one.end for one in attempts][-1] == "finished" and len(attempts) == 2
