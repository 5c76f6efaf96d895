"""A small sample of the matrix (`harness prove drill` is the whole of it), and the tools that it is
made with."""

import json
import subprocess
import sys
import threading
import time

import pytest

from harness.core.world import BadInput
from harness.lab.drills import drill
from harness.lab.drills.drill import FAULTS, cells
from harness.lab.drills.process_faults import Folder, SabotagedStore
from harness.local import local_run
from harness.local.local_run import PHASES
from storage.errors import StoreUnavailable
from storage.stores.folder_store import MemoryStore


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return drill.prepare(tmp_path_factory.mktemp("drill"), local_run.can_isolate())


@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        pytest.param("worker-stop", "upload", marks=pytest.mark.proof),
        pytest.param("agent-stop", "step", marks=pytest.mark.proof),
        pytest.param("wall", "step", marks=pytest.mark.proof),
        pytest.param("enospc", "step", marks=pytest.mark.proof),
        ("node-kill", "commit"),
    ],
)
def test_a_cell_ends_with_the_weights_of_a_calm_run(ground, fault, phase):
    result = drill.drill(ground, fault, phase, seed=0)
    if result.outcome == "skipped":
        pytest.skip(result.why)
    logs = (
        drill._last_words(ground.folder / f"{fault}-{phase}-0")
        if result.outcome != "passed"
        else ""
    )
    assert result.outcome == "passed", f"{result}\n{logs}"
    assert result.epochs >= 2  # the fault was felt


def test_cells_are_chosen_by_name():
    assert len(cells(())) == len(FAULTS) * len(PHASES)
    assert cells(("worker-kill:", ":step"))[:2] == [
        ("worker-kill", "start"),
        ("worker-kill", "step"),
    ]
    assert len(cells(("worker-kill:", ":step"))) == len(PHASES) + len(FAULTS) - 1
    with pytest.raises(BadInput, match="wanted FAULT:PHASE"):
        cells(("worker-kil:step",))


def test_a_sabotaged_store_is_silent_or_slow_or_held_at_a_phase(tmp_path):
    store = SabotagedStore(MemoryStore("memory://t", {}), Folder(tmp_path))
    assert store.create("a", b"1") and store.get("a") == b"1"
    (tmp_path / "outage").touch()
    with pytest.raises(StoreUnavailable):
        store.get("a")
    (tmp_path / "outage").unlink()
    (tmp_path / "hold.json").write_text(json.dumps({"phase": "commit", "after_step": 0}))
    assert store.create("snapshots/parts/x", b"1")  # another phase
    thread = threading.Thread(target=store.create, args=("snapshots/manifests/x", b"1"))
    thread.start()
    while not (tmp_path / "reached").exists():
        time.sleep(0.01)
    assert store.list("snapshots/manifests/") == []
    (tmp_path / "hold.json").unlink()
    thread.join(30)
    assert store.list("snapshots/manifests/") == ["snapshots/manifests/x"]


def test_a_node_may_have_another_clock(tmp_path):
    code = (
        f"from harness.lab.drills import process_faults as sabotage; sabotage.arm({str(tmp_path)!r})\nimport time, pathlib\nt = "
        "time.time()\n"
        f"pathlib.Path({str(tmp_path)!r}, "
        "'clock').write_text('3600')\ntime.sleep(0.2)\nprint(time.time() - t > 3599)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "True", ended.stderr


def test_what_is_delivered_twice_is_the_same(tmp_path):
    """The memory that a snapshot is sent from has another one's bytes a second later."""
    objects, memory = MemoryStore("memory://t", {}), bytearray(b"first")
    (tmp_path / "twice").touch()
    SabotagedStore(objects, Folder(tmp_path)).put("a", memoryview(memory))
    memory[:] = b"other"
    objects.delete("a")
    until_s = time.monotonic() + 20.0
    while objects.list("a") == [] and time.monotonic() < until_s:
        time.sleep(0.05)
    assert objects.get("a") == b"first"
