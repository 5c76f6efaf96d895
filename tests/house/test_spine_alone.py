"""The spine alone trains: a copy of it without any satellite runs `harness run` through a kill, and
says what to install where somebody asks for more."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store
from support.rooms import ROOT, SATELLITES, SPINE, STORAGE_SATELLITES
from support.worlds import until

pytestmark = pytest.mark.proof
# of harness/cli: what `harness run` needs
COMMAND = ("__init__", "__main__", "command", "common", "node", "run_record")
# an editable installation would find the satellites where they are developed
ALONE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
"""
ELASTIC = (ROOT / "examples" / "elastic.py").read_text()


@pytest.fixture(scope="module")
def spine(tmp_path_factory) -> Path:
    """A folder with the spine's files only."""
    folder = tmp_path_factory.mktemp("spine")
    hide = shutil.ignore_patterns("__pycache__")
    (folder / "harness" / "cli").mkdir(parents=True)
    shutil.copy(ROOT / "harness" / "__init__.py", folder / "harness")
    for room in SPINE:
        shutil.copytree(ROOT / "harness" / room, folder / "harness" / room, ignore=hide)
    for name in COMMAND:
        shutil.copy(ROOT / "harness" / "cli" / f"{name}.py", folder / "harness" / "cli")
    gone = shutil.ignore_patterns("__pycache__", *STORAGE_SATELLITES)
    shutil.copytree(ROOT / "storage", folder / "storage", ignore=gone)
    assert not [room for room in SATELLITES if (folder / "harness" / room).exists()]
    (folder / "sitecustomize.py").write_text(ALONE)
    # the steps are slowed, so that a kill finds the training on its way
    slowed = ELASTIC.replace("        step.update(", "        __import__('time').sleep(0.1)\n        step.update(")
    assert slowed != ELASTIC
    (folder / "elastic.py").write_text(slowed)
    return folder


def environment(spine: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HARNESS_", "AWS_", "WANDB_"))}
    return kept | {"PYTHONPATH": str(spine), "OMP_NUM_THREADS": "1"}


def python(spine: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=spine, env=environment(spine), capture_output=True, text=True, timeout=240
    )


def agent(spine: Path, run: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "harness.cli", "run", "--run", str(run), "--set", "gpu_health=off"]
    command += ["--attach", "snapshot_every_steps=20", "--set", "addr=127.0.0.1", "--", "elastic.py"]
    with open(log, "ab") as out:
        return subprocess.Popen(command, cwd=spine, env=environment(spine), stdout=out, stderr=out)


def newest(run: Path):
    return Snapshots(open_store(str(run))).latest() if run.exists() else None


def test_it_trains_through_a_notice(spine, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    first = agent(spine, run, log)
    try:
        until(lambda: newest(run), log.read_text, 240)
        first.send_signal(signal.SIGTERM)  # a notice: snapshot, leave
        assert first.wait(120) != 0, log.read_text()
        begun = newest(run).step
        assert 0 < begun < 128, log.read_text()
        second = agent(spine, run, log)
        assert second.wait(240) == 0, log.read_text()
    finally:
        first.kill()
    last = newest(run)
    assert last.step == 128 and Snapshots(open_store(str(run))).ended(last)
    assert f"resumed from step {begun}" in log.read_text() and "test accuracy" in log.read_text()


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("-m", "harness.cli", "runs", "report", "x"), "look"),
        (("-m", "harness.cli", "plan", "x"), "planner"),
        (("-m", "harness.cli", "data", "show", "x"), "data"),
        (("-m", "storage", "export", "mem", "out"), "export"),
        (("-c", "import harness; harness.fsdp2"), "meshes"),
        (("-c", "import harness; harness.attach().files"), "loops"),
        (("-c", "import harness; harness.attach(guards='default')"), "guards"),
        (("-c", "from harness import data"), "data"),
    ],
)
def test_what_is_absent_says_what_to_install(spine, words, extra):
    ended = python(spine, *words)
    assert ended.returncode in (1, 2), ended.stdout
    assert f'this needs "spotharness[{extra}]"' in ended.stderr, ended.stderr
