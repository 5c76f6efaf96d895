"""`make gpu` on a machine without a GPU: all parts run in miniature, so that none is broken when a
GPU comes, and a part that fails, hangs or is wrong leaves the others and the table as they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import bench, table

ROOT = Path(__file__).parents[2]


def run_parts(out, monkeypatch, *names, limit_s=600.0):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setattr(gpu, "bench", bench, raising=False)
    monkeypatch.setattr(gpu, "table", table, raising=False)
    monkeypatch.setattr(gpu, "psutil", psutil, raising=False)
    parts = [
        # what hangs is cut soon; whatever else runs here may slow the others down
        gpu.Part(n, f"it {n}", 2.0 if n == "hangs" else 60.0, False, "support.gpu_parts")
        for n in names
    ]
    good = gpu.Run(out, True, limit_s, parts).go()
    return good, json.loads((out / "gpu.json").read_text()), (out / "gpu.md").read_text()


@pytest.mark.proof
def test_what_becomes_of_a_part_is_told_and_the_rest_goes_on(tmp_path, monkeypatch):
    good, found, page = run_parts(tmp_path, monkeypatch, "fails", "hangs", "wrong", "works")
    assert not good
    assert [p["state"] for p in found["parts"]] == ["failed", "cut", "done", "done"]
    assert found["parts"][0]["why"] == "RuntimeError: the device is gone"
    assert [r["part"] for r in found["rows"] if r["what"] == "what it wrote before"] == [
        "fails", "hangs", "wrong", "works",
    ]  # fmt: skip
    assert "| wrong | that two and two are five | **does not hold** |" in page
    assert "In miniature" in page and "RuntimeError: the device is gone" in page
    left = []
    for process in psutil.process_iter():
        try:
            left += [process] * (process.environ().get("HARNESS_BENCH_PART") in ("fails", "hangs"))
        except psutil.Error:
            continue
    assert left == []


def test_parts_without_time_are_not_reached(tmp_path, monkeypatch):
    good, found, page = run_parts(tmp_path, monkeypatch, "works", limit_s=1.0)
    assert not good and found["parts"][0]["state"] == "not reached" and "not reached" in page


def test_what_works_is_good(tmp_path, monkeypatch):
    assert run_parts(tmp_path, monkeypatch, "works")[0]


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(gpu, "PACKAGES", {"nowhere_to_be_found": "its-package"})
    with pytest.raises(SystemExit, match=r"wanted the packages its-package in .*WHEELS=folder"):
        gpu.installed("")


@pytest.mark.proof
@pytest.mark.timeout(1300)  # two and a half minutes where nothing else runs
def test_all_parts_in_miniature(tmp_path):
    said = subprocess.run(
        ["make", "gpu", f"OUT={tmp_path}", "ARGS=--tiny", "LIMIT_S=1200"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("HARNESS_")}
        | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=1250,
    )
    found = json.loads((tmp_path / "gpu.json").read_text())
    wrong = [r for r in found["rows"] if r["ok"] is False]
    states = {p["name"]: p["state"] for p in found["parts"]}
    assert wrong == [] and set(states.values()) == {"done"}, (states, said.stdout[-8000:])
    assert said.returncode == 0, said.stdout[-3000:] + said.stderr
    assert set(states) == {p.name for p in gpu.PARTS}
    assert {r["part"] for r in found["rows"]} == set(states)
