"""A disk of the node that is full: its scratch folder, or that of its log."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.bucket.archive import read_facts
from harness.core.facts import EpochLeft
from harness.core.world import DRAINED, FINISHED
from harness.node.marks import SIGNALS, MarkFile, MarkReader, Want
from storage.stores.store_urls import open_store
from support.outside import SCRIPT, environment, train_begin, until
from support.worlds import newest

IN_ITS_OWN = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is a disk of 256 KiB for the processes that `train_begin` starts."""
    if subprocess.run([*IN_ITS_OWN, "true"], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = f'mount -t tmpfs -o size=256k none {folder} && exec "$@"'
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda words, **more: real([*IN_ITS_OWN, "sh", "-c", mounted, "sh", *words], **more),
    )
    return folder


def seen_by(process: subprocess.Popen[str], folder: Path) -> Path:
    return Path(f"/proc/{process.pid}/root{folder}")


def fill(folder: Path) -> None:
    with open(folder / "filler", "ab", buffering=0) as f, contextlib.suppress(OSError):
        while f.write(bytes(4096)):
            pass
    with pytest.raises(OSError), open(folder / "one-more", "wb", buffering=0) as f:
        f.write(b"x")


@pytest.mark.proof
@pytest.mark.parametrize("how", ["by the mark", "by signal"])
def test_a_notice_is_answered_though_the_scratch_disk_is_full(
    tmp_path: Path, small_disk: Path, how: str
):
    run = tmp_path / "run"
    process = train_begin(
        run,
        total=100_000,
        nap_s=0.05,
        folder=tmp_path,
        env=environment(HARNESS_NODE_DIR=str(small_disk)),
    )
    until(lambda: newest(str(run)), "a snapshot")
    disk = seen_by(process, small_disk)
    if how == "by signal":
        for spare in disk.glob("mark.spare*"):
            spare.unlink()
    fill(disk)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    left = [s.fact for s in read_facts(open_store(str(run))) if isinstance(s.fact, EpochLeft)]
    assert (process.returncode, [fact.why for fact in left]) == (DRAINED, ["drained"]), said
    assert ("cannot be written (No space left on device)" in said) == (how == "by signal")


def test_marks_follow_each_other_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Nothing is allocated once the file's owner began, however many marks there are."""
    file = MarkFile(tmp_path / "mark.json")
    reader = MarkReader(file.path)

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    inodes = {path.stat().st_ino for path in tmp_path.iterdir()}
    for want in (Want.SNAPSHOT, Want.RESIZE, Want.NOTHING, Want.STOP, Want.SNAPSHOT, Want.RESIZE):
        file.write(want, "why " * 1000, None)
        assert reader.read().want is want
    assert {path.stat().st_ino for path in tmp_path.iterdir()} == inodes
    assert not capsys.readouterr().out
    file.path.unlink()
    for spare in tmp_path.iterdir():
        spare.unlink()
    file.write(Want.STOP, "why", None)
    assert reader.read().want is Want.NOTHING
    monkeypatch.undo()
    file.write_again()
    file.write_again()
    assert reader.read().want is Want.STOP
    assert capsys.readouterr().out.count("by signal") == 1
    assert set(SIGNALS) == set(Want) - {Want.NOTHING} and len(set(SIGNALS.values())) == len(SIGNALS)
    assert os.stat(file.path).st_size == 4096


@pytest.mark.proof
def test_a_script_goes_on_printing_though_the_log_disk_is_full(tmp_path: Path):
    run = tmp_path / "run"
    script = SCRIPT.replace("    step.update()", "    step.update()\n    print('step')")
    (tmp_path / "script.py").write_text(script)
    with open("/dev/full", "w") as full:
        process = train_begin(run, total=12, nap_s=0.05, folder=tmp_path, stdout=full)
        assert process.wait(60) == FINISHED
    found = newest(str(run))
    assert found is not None and found.step == 12


FULL_LOG = """
import sys, threading
from harness.node.heartbeat import tolerate_full_logs
from storage.terminal_text import Console
tolerate_full_logs()
console, said = Console(), []
def say():
    for word in ("view", "alert"):
        console.print(word)
        print(word, flush=True)
        said.append(word)
thread = threading.Thread(target=say)
thread.start()
thread.join()
sys.exit(7 if said == ["view", "alert"] else 1)
"""


def test_a_controllers_view_and_exit_status_outlive_a_full_log():
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-c", FULL_LOG]
        code = subprocess.run(words, env=environment(), stdout=full, stderr=full).returncode
    assert code == 7
