"""What torch.compile has made outlives a run on the node's disk, and comes from nowhere else."""

import os
import threading
import time
from pathlib import Path

import pytest

from harness.node import compile_cache as cache
from harness.node.compile_cache import FULL, VARIABLE, compile_cache, machine_kind, tidy
from support import outside

SCRIPT = """
import torch, harness
from torch._dynamo.utils import counters
torch._inductor.config.cpp_cache_precompile_headers = False  # slow to make
run = harness.attach(seed=1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.prepare(model, optimizer)
data = torch.utils.data.TensorDataset(torch.ones(64, 4))
compiled = torch.compile(lambda x: (x.sin() * x.cos() + 1).sum())
for step in run.steps(data, total=1, global_batch=8, micro_batch=8):
    for (x,) in step:
        step.backward(model(x).pow(2).mean())
        print("made", float(compiled(x)))
    step.update()
found = counters["inductor"]
print("cache:", found["fxgraph_cache_hit"], "hits", found["fxgraph_cache_miss"], "misses")
"""


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(VARIABLE, raising=False)  # torch sets it once it has compiled something
    yield tmp_path / "home"
    for thread in threading.enumerate():
        if thread.name == "compile-cache":
            thread.join(30.0)


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_later_run_on_the_same_node_compiles_nothing_again(tmp_path, home):
    """Real agents, real workers; each run has a `/tmp` of its own, where torch would look."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def ran(name: str) -> str:
        (tmp_path / f"tmp-{name}").mkdir()
        process = outside.start(
            "run", "--run", str(tmp_path / name), "--", str(script), cwd=tmp_path,
            env=outside.environment(
                HOME=str(home), TMPDIR=str(tmp_path / f"tmp-{name}"), TORCHINDUCTOR_COMPILE_THREADS="1"
            ),
        )  # fmt: skip
        said = outside.said(process, 280.0)
        assert process.returncode == 0, said
        return said

    assert "cache: 0 hits 1 misses" in ran("first")
    assert "cache: 1 hits 0 misses" in ran("second")
    (kept,) = (home / ".cache" / "spotharness" / "compiled").iterdir()
    assert kept.name.startswith("torch-") and kept.name.endswith("-1")
    assert not list(tmp_path.glob("first/**/*fxgraph*"))  # nothing of it is in the bucket


def test_each_kind_of_machine_has_a_folder_and_a_users_own_stays(home):
    one = compile_cache({}, "NVIDIA L4")[VARIABLE]
    assert Path(one).is_relative_to(home) and Path(one).stat().st_mode & 0o077 == 0
    assert compile_cache({}, "NVIDIA L4") == {VARIABLE: one}
    assert compile_cache({}, "NVIDIA H100")[VARIABLE] != one
    assert compile_cache({VARIABLE: "/data/mine"}, "NVIDIA L4") == {}


def test_another_processor_or_torch_has_another_folder(monkeypatch):
    mine = machine_kind("cpu")
    monkeypatch.setattr(cache, "_processor", lambda: ["model name: another"])
    assert (other := machine_kind("cpu")) != mine
    monkeypatch.setattr(cache.importlib.metadata, "version", lambda name: "9.9")
    assert machine_kind("cpu") != other and machine_kind("cpu").startswith("torch-9.9-")


@pytest.mark.parametrize("wrong", ["a file", "a link", "open to others"])
def test_a_folder_that_others_may_have_made_is_not_used(home, tmp_path, wrong):
    place = home / ".cache" / "spotharness" / "compiled"
    place.parent.mkdir(parents=True)
    if wrong == "a file":
        place.write_text("")
    elif wrong == "a link":
        place.symlink_to(tmp_path)
    else:
        place.mkdir()
        place.chmod(0o777)
    assert compile_cache({}, "cpu") == {}


def test_a_full_folder_is_left_and_removed_when_nobody_uses_it_any_more(home):
    first = Path(compile_cache({}, "cpu")[VARIABLE])
    (first / "fxgraph").mkdir()
    (first / "fxgraph" / "code").write_bytes(b"x" * 1000)
    other, recent = first.with_name("torch-1.0-x-1"), first.with_name("torch-1.1-x-1")
    for folder in (other, recent):
        folder.mkdir()
    os.utime(other, (0, time.time() - 1000))
    tidy(first, most_nbytes=1000, unused_s=900)
    assert not (first / FULL).exists() and not other.exists() and recent.exists()
    tidy(first, most_nbytes=999, unused_s=900)
    assert (first / FULL).exists() and (first / "fxgraph" / "code").exists()  # still in use
    second = Path(compile_cache({}, "cpu")[VARIABLE])
    assert second.name == first.name.removesuffix("1") + "2"
    os.utime(first, (0, time.time() - 1000))
    tidy(second, unused_s=900)
    assert not first.exists() and second.exists()
    assert Path(compile_cache({}, "cpu")[VARIABLE]) == first  # numbers begin anew


def test_without_a_home_workers_get_torchs_own_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/proc/none")
    assert compile_cache({}, "cpu") == {}
