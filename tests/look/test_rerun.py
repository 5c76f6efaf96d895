"""A run is made again from its bucket alone: code with uncommitted changes, packages, flags."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.bucket.archive import read_facts
from harness.bucket.orders import stop_order
from harness.bucket.setup_objects import newest_setup, read_diff, write_setup
from harness.core.facts import SessionStarted, SetupChanged, StepDone
from harness.core.setup_record import Setup
from harness.core.world import STOPPED
from harness.look.reports.compare import compare
from storage.stores.store_urls import open_store
from support.worlds import environment

pytestmark = pytest.mark.proof
ROOT = Path(__file__).parents[2]
SCRIPT = '''
import argparse, torch
from torch import nn
import harness

p = argparse.ArgumentParser()
p.add_argument("--total", type=int, default=3)
p.add_argument("--api-key", default="")
a = p.parse_args()
LR = 0.5
SECRET_TOKEN = "abc123def456ghi789"

class Numbers(torch.utils.data.Dataset):
    fingerprint = "numbers"
    def __len__(self):
        return 64
    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x, (x.sum() > 0).long()

run = harness.attach(seed=3, config={"lr": LR, "model": {"width": 8, "init": print, "hf_token": "x"}})
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
run.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
for step in run.steps(Numbers(), total=a.total, global_batch=8, micro_batch=4):
    for x, y in step:
        step.backward(nn.functional.cross_entropy(model(x), y))
    step.update()
run.finish()
'''


def git(folder, *words):
    me = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    subprocess.run(["git", *me, *words], cwd=folder, check=True, capture_output=True)


def repository(folder: Path) -> Path:
    """A clone whose work tree has a change that is not committed, beside a secret that is."""
    bare, work = folder / "origin.git", folder / "work"
    git(folder, "init", "--bare", "--initial-branch=main", str(bare))
    git(folder, "clone", str(bare), str(work))
    (work / "jobs").mkdir()
    (work / "jobs" / "train.py").write_text(SCRIPT)
    git(work, "add", ".")
    git(work, "commit", "-m", "first")
    git(work, "push", "origin", "HEAD:main")
    git(work, "fetch", "origin")
    text = SCRIPT.replace("LR = 0.5", "LR = 0.05")
    (work / "jobs" / "train.py").write_text(text)
    (work / "notes.txt").write_text("nobody knows me")
    return work


def commands(folder: Path) -> dict[str, str]:
    """An environment in which `harness` is this package's."""
    shim = folder / "bin" / "harness"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m harness.cli "$@"\n')
    shim.chmod(0o755)
    path = f"{shim.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**environment(), "PATH": path, "PYTHONPATH": str(ROOT)}


def said(words, **more) -> str:
    found = subprocess.run(words, capture_output=True, text=True, timeout=240, **more)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_a_run_is_made_again_from_its_bucket(tmp_path):
    work, env = repository(tmp_path), commands(tmp_path)
    url, again = f"file://{tmp_path}/runs/a", f"file://{tmp_path}/runs/b"
    script = [sys.executable, "train.py", "--total", "4", "--api-key", "k1"]
    told = {"HARNESS_RUN": url, "HARNESS_OWNER": "me", "HARNESS_PURPOSE": "to see [bold]it[/]"}
    said(script, cwd=work / "jobs", env=env | told)
    store = open_store(url)
    setup = newest_setup(store)
    assert setup.argv == ("train.py", "--total", "4", "--api-key", "***")
    assert setup.config == {"lr": 0.05, "model": {"width": 8, "init": "builtins.print", "hf_token": "***"}}
    assert (setup.git.folder, setup.git.pushed, setup.git.untracked) == ("jobs/", True, ("notes.txt",))
    diff = read_diff(store, setup)
    assert b"+LR = 0.05" in diff and b"abc123def456ghi789" not in diff
    assert setup.packages["torch"] and setup.people["owner"] == "me"

    script = said(["harness", "runs", "reproduce", url, "--to", again, "--here"], cwd=tmp_path, env=env)
    assert "notes.txt" in script and "to see" not in script
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    output = said(["bash", "-c", script], cwd=fresh, env=env | {"API_KEY": "k1"})
    assert "identical from step 1 to 4" in output, output
    found = compare(store, open_store(again))
    assert found.same(rtol=0.0) and found.same_weights
    second = newest_setup(open_store(again))
    assert (second.argv, second.config, second.git.commit) == (setup.argv, setup.config, setup.git.commit)


def test_a_run_that_was_begun_otherwise_is_refused_before_a_step(tmp_path):
    work, env = repository(tmp_path), commands(tmp_path)
    store = open_store(f"file://{tmp_path}/runs/a")
    write_setup(store, 1, Setup(argv=("train.py", "--total", "9")), b"")
    words = ["harness", "run", "--run", store.url, "--on-change", "refuse", "--", "train.py"]
    ended = subprocess.run(words, cwd=work / "jobs", env=env, capture_output=True, text=True, timeout=240)
    assert ended.returncode == STOPPED, ended.stdout + ended.stderr
    order = stop_order(store)
    assert order.failed and "--total was 9, now it is not given" in order.reason
    facts = [s.fact for s in read_facts(store)]
    assert [x.action for x in facts if isinstance(x, SetupChanged)] == ["refused"]
    assert not any(isinstance(x, (SessionStarted, StepDone)) for x in facts)
