"""`harness check` with real agents and workers, on a script with many faults at once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.worlds import environment, until

pytestmark = pytest.mark.proof
ROOT = Path(__file__).parents[2]
FORGETFUL = Path(__file__).parents[1] / "support" / "forgetful.py"


def command(*words):
    return [sys.executable, "-m", "harness.cli", "check", *words]


def surroundings(tmp_path):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return environment() | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": path}


def left_over(tmp_path):
    """Processes that were started there and live still."""
    found = []
    for p in psutil.process_iter():
        try:
            if p.environ().get("TMPDIR") == str(tmp_path / "tmp") and p.pid != os.getpid():
                found.append(p)
        except psutil.Error:
            continue
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def place(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "cwd").mkdir()
    return tmp_path


def test_every_fault_of_a_forgetful_script_is_named(place):
    ended = subprocess.run(
        command("--json", "--within-s", "900", "--", str(FORGETFUL)),
        cwd=place / "cwd",
        env=surroundings(place),
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert 50e6 < report["host_nbytes"] < 50e9 and report["gpu_nbytes"] >= 0
    lines = FORGETFUL.read_text().splitlines()
    found = {}
    for r in report["rulings"]:
        line = int(r["where"].rpartition(":")[2]) if r["where"] else 0
        text = lines[line - 1].strip() if line else ""
        found.setdefault(r["promise"], {})[r["what"].partition(" ")[0]] = (r["state"], text)
    prepare = "run.prepare(model, optimizer)"
    made = "seen, heads, losses = 0, 0, []"
    assert found["saves all state"] == {
        "average": ("fails", prepare),
        "coin": ("fails", prepare),
        "seen": ("fails", made),
        "heads": ("fails", made),
        "losses": ("note", made),
    }
    backward = "step.backward(loss / share)"
    assert list(found["the same loss and gradients on any world"].values()) == [("fails", backward)]
    assert list(found["one rank writes the script's files"].values()) == [
        ("fails", 'torch.save(model.state_dict(), "newest.pt")')
    ]
    for promise in (
        "resumes after a kill",
        "reads the same data again",
        "runs on two workers",
        "the same samples on any world",
        "the same statistics on any world",
        "heeds a notice",
        "ends as it would have",
    ):
        assert {state for state, _ in found[promise].values()} == {"holds"}, promise
    assert not left_over(place)
    assert not list((place / "cwd").iterdir()) and not list((place / "tmp").glob("harness-*"))


def test_who_ends_the_check_leaves_nothing_behind(place):
    with subprocess.Popen(
        command("--", str(FORGETFUL)),
        cwd=place / "cwd",
        env=surroundings(place),
        stdout=subprocess.DEVNULL,
    ) as process:
        until(lambda: list((place / "tmp").glob("harness-check-*/one/node1.log")), "an agent")
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    assert not left_over(place)
    assert not list((place / "tmp").glob("harness-*"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "no script"),
        (("--", "nowhere.py"), "nowhere.py: no such file"),
        (("--steps", "2", "--", "x.py"), "wanted a whole number of at least 8"),
    ],
)
def test_what_cannot_be_tried_is_refused_at_once(words, says, capsys):
    from harness.cli.command import main

    with pytest.raises(SystemExit) as ended:
        main(["check", *words])
    assert ended.value.code == 2 and says in capsys.readouterr().err
