"""Who neither dies nor answers on a node: its workers, its warm process, its agent's senders."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from harness.bucket.archive import read_facts
from harness.bucket.layout import HUNG
from harness.bucket.orders import stop_order
from harness.core.facts import AgentEnded, EpochStarted, WorkerHung
from harness.core.world import DRAINED, STOPPED, UNFIT
from storage.stores.store_urls import open_store
from support.outside import environment, said_of, seam, train_begin, until

pytestmark = pytest.mark.proof
HANGS = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("hangs").touch()
time.sleep(600)
"""


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_ends_an_agent_whose_workers_hang_in_start(tmp_path: Path, signals: int):
    (tmp_path / "script.py").write_text(HANGS)
    grace_s = 8.0 if signals == 1 else 300.0
    process = train_begin(tmp_path / "run", "--grace-s", grace_s, folder=tmp_path)
    until((tmp_path / "hangs").exists, "a worker")
    began_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    if signals == 2:
        time.sleep(2.5)
        process.send_signal(signal.SIGTERM)
    code, said = said_of(process, 60)
    assert code == DRAINED, said
    assert time.monotonic() - began_s < (grace_s if signals == 1 else 30), said


# The process that traces a worker holds it in its exit, as a driver does that does not answer: from
# then on no signal ends it, SIGKILL included.
HOLDS = """
import ctypes, pathlib, sys, time
SEIZE, TRACE_EXIT = 0x4206, 1 << 6
trace = ctypes.CDLL(None, use_errno=True).ptrace
trace.argtypes = [ctypes.c_long] * 4
failed = trace(SEIZE, int(sys.argv[1]), 0, TRACE_EXIT)
pathlib.Path("held").write_text(str(ctypes.get_errno() if failed else 0))
time.sleep(600)
"""
HELD = """
import os, pathlib, signal, subprocess, sys, time
holder = subprocess.Popen(
    [sys.executable, "holds.py", str(os.getpid())], start_new_session=True,
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
pathlib.Path("pids").write_text(f"{os.getpid()} {holder.pid}")
time.sleep(600)
"""


def test_an_agent_leaves_in_time_though_its_worker_cannot_be_killed(tmp_path: Path):
    (tmp_path / "script.py").write_text(HELD)
    (tmp_path / "holds.py").write_text(HOLDS)
    process = train_begin(tmp_path / "run", "--grace-s", 10.0, folder=tmp_path)
    until(lambda: (tmp_path / "held").exists() and (tmp_path / "held").read_text(), "the holder")
    worker, holder = map(int, (tmp_path / "pids").read_text().split())
    try:
        if (tmp_path / "held").read_text() != "0":
            pytest.skip("this machine lets no process trace another")
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code, said = said_of(process, 60)
        took_s = time.monotonic() - began_s
        assert code == UNFIT, said
        assert Path(f"/proc/{worker}").exists(), said
        assert f"left behind on this node: rank 0 (process {worker})" in said
        assert took_s < 10.0, said
    finally:
        os.kill(holder, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{worker}").exists(), "the worker's end")


def test_a_node_whose_imports_hang_is_unfit(tmp_path: Path):
    slow = seam(
        tmp_path / "seam",
        """
        import sys, time
        if "harness.node.forkserver" in sys.orig_argv:
            time.sleep(600)
        elif "harness.cli" in sys.orig_argv:
            from harness.agent import node_state
            node_state.WARM_S = 2.0
        """,
    )
    process = train_begin(tmp_path / "run", folder=tmp_path, env=environment(slow))
    code, said = said_of(process)
    assert code == UNFIT, said
    ended = [s.fact for s in read_facts(open_store(str(tmp_path / "run")))]
    assert any(isinstance(fact, AgentEnded) and "it hangs" in fact.reason for fact in ended)


def test_a_worker_that_is_not_forked_is_guilty(tmp_path: Path):
    slow = seam(
        tmp_path / "seam",
        """
        import os, sys, time
        if "harness.node.forkserver" in sys.orig_argv:
            os.fork = lambda: time.sleep(600)
        elif "harness.cli" in sys.orig_argv:
            from harness.agent import workers
            workers.FORKED_WITHIN_S = 2.0
        """,
    )
    run = tmp_path / "run"
    process = train_begin(run, folder=tmp_path, env=environment(slow))
    code, said = said_of(process)
    assert code == UNFIT, said
    facts = [s.fact for s in read_facts(open_store(str(run)))]
    hung = [fact for fact in facts if isinstance(fact, WorkerHung)]
    assert len(hung) == 3 and all(h.guilty and "not forked" in h.what for h in hung)


LOOP = """\
import sys, time, torch, harness
run = harness.attach(seed=0, snapshot_every_steps=2)
model = torch.nn.Linear(4, 1)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
for step in run.steps(data, total=50, global_batch=8, micro_batch=2):
    for (x,) in step:
        step.backward(model(x).square().mean())
    step.update()
"""
APART = f"""{LOOP}
    if step.number == 3 and run.rank == 0:
        sys.exit(0)
"""


def test_a_script_that_ends_well_on_one_rank_only_stops_the_run_with_that_reason(tmp_path: Path):
    """The others hang in a sum; it was taken for a lost peer, and restarted again and again."""
    (tmp_path / "script.py").write_text(APART)
    run, limits = tmp_path / "run", ("--nproc", 2, "--set", "hang_after_s=2")
    process = train_begin(run, *limits, folder=tmp_path)
    code, said = said_of(process, 60)
    assert code == STOPPED, said
    facts = [s.fact for s in read_facts(open_store(str(run)))]
    assert sum(isinstance(fact, EpochStarted) for fact in facts) == 1
    why = "ended with status 0 on rank 0 while it went on on rank 1"
    assert any(isinstance(fact, AgentEnded) and why in fact.reason for fact in facts), said


ALONE_IN_A_SUM = f"""{LOOP}
    if step.number == 2:
        time.sleep(600)
"""


@pytest.mark.parametrize(("worn", "code"), [(2, STOPPED), (1, UNFIT)])
def test_the_second_node_that_is_worn_out_at_a_step_stops_the_run(tmp_path: Path, worn, code):
    """Such as by a collective that the script calls on one rank only: each new node would be."""
    (tmp_path / "script.py").write_text(ALONE_IN_A_SUM)
    run = tmp_path / "run"
    store = open_store(str(run))
    store.put(f"{HUNG}{worn:012d}-m0001-other.json", b"{}")
    process = train_begin(run, "--set", "hang_after_s=1", folder=tmp_path)
    found, said = said_of(process, 120)
    assert found == code, said
    order = stop_order(store)
    assert (order is not None) == (code == STOPPED)
    assert order is None or "after step 2, where a node before it was worn out too" in order.reason
    assert len(store.list(HUNG)) == 2  # it leaves word for the next
