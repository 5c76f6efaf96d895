"""Silence of workers is judged by their own pace; GPUs are judged by what their driver says,
even when it says nothing."""

import json
import queue
import signal

import pytest

from harness.agent import gpu_health
from harness.agent.gpu_health import Action, FakeNvml, GpuFinding, Judge, NvmlReader
from harness.core.facts import (
    AttemptEnded,
    AttemptIntended,
    AttemptUp,
    EpochLeft,
    HealthSeen,
    NodeMeasured,
    ProfileTaken,
    WorkerFailed,
    WorkerHung,
)
from harness.node.heartbeat import Limits, ProgressFile, WorkerHeartbeat, WorkerPhase
from storage.stores.store_urls import open_store
from support.worlds import history


# ---- silence -------------------------------------------------------------------------------------
@pytest.fixture
def pulse(tmp_path):
    return WorkerHeartbeat(tmp_path / "progress", Limits())


def test_a_slow_training_may_be_silent_for_longer(pulse):
    worker, now = ProgressFile(str(pulse.path)), 0.0
    for step in range(20):
        worker.tell(WorkerPhase.COMPUTE, step)
        pulse.look(now)
        now += 100.0
    assert pulse.hung(now - 100.0 + 999.0, "R") == ""
    assert "in compute after step 19, bound 1000 s (process state R)" in pulse.hung(
        now - 100.0 + 1001.0, "R"
    )


@pytest.mark.parametrize(
    ("place", "patience", "bound_s"),
    [("COMPUTE", 1.0, 300), ("COMPUTE", 4.0, 1200), ("REDUCE", 1.0, 900)],
)
def test_quick_steps_still_have_minutes_and_who_waits_for_others_has_more(
    pulse, place, patience, bound_s
):
    worker, pulse.patience = ProgressFile(str(pulse.path)), patience
    for step in range(5):
        worker.tell(WorkerPhase[place], step)
        pulse.look(float(step))
    assert pulse.hung(4.0 + bound_s - 1.0, "S") == "" and pulse.hung(4.0 + bound_s + 1.0, "S")
    assert pulse.waits("S") is (place == "REDUCE") and not pulse.waits("T")


@pytest.mark.parametrize(
    ("place", "silent_s", "hung"),
    [("START", 1700, False), ("START", 1900, True), ("SAVING", 800, False), ("SAVING", 950, True)],
)
def test_start_and_saving_have_bounds_of_their_own(pulse, place, silent_s, hung):
    ProgressFile(str(pulse.path)).tell(WorkerPhase[place], 7)
    pulse.look(0.0)
    assert bool(pulse.hung(silent_s, "S")) is hung


def test_a_stopped_process_is_hung_wherever_it_is_and_a_silent_script_never(pulse):
    assert pulse.hung(1e6, "R") == ""
    pulse.since_s = 0.0
    assert "before its session began, bound 60 s (stopped by a signal)" in pulse.hung(61.0, "T")
    ProgressFile(str(pulse.path)).tell(WorkerPhase.START)
    pulse.look(0.0)
    assert pulse.hung(61.0, "T") and not pulse.hung(61.0, "S")


def test_what_the_agent_slept_is_not_held_against_its_workers(pulse):
    ProgressFile(str(pulse.path)).tell(WorkerPhase.SAVING, 3)
    pulse.look(0.0)
    pulse.forgive(5000.0)
    assert pulse.hung(5800.0, "S") == "" and pulse.hung(5950.0, "S")


# ---- GPUs ----------------------------------------------------------------------------------------
def say(path, *lines):
    with path.open("a") as f:
        f.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "gpus"
    say(path, {"gpus": 2})
    return path


@pytest.mark.parametrize(
    ("line", "what", "action"),
    [
        ({"gpu": 1, "xid": 79}, "xid 79", Action.KILL),
        ({"gpu": 1, "xid": 94}, "xid 94", Action.DRAIN),
        ({"gpu": 1, "xid": 63}, "xid 63", Action.SNAPSHOT),
        ({"gpu": 1, "xid": 13}, "xid 13", Action.COUNT),
        ({"gpu": 1, "xid": 45}, "xid 45", Action.IGNORE),
        ({"gpu": 1, "xid": 9999}, "xid 9999", Action.COUNT),
        ({"gpu": 1, "ecc": 1}, "ecc", Action.KILL),
        ({"gpu": 1, "recovery": 2}, "recovery 2", Action.DRAIN),
        ({"gpu": 1, "remap": [1, 0]}, "remap 0", Action.SNAPSHOT),
        ({"gpu": 1, "remap": [0, 1]}, "remap 1", Action.DRAIN),
        ({"gpu": 1, "lost": True}, "lost", Action.KILL),
    ],
)
def test_what_a_gpu_reports_and_what_is_done(script, line, what, action):
    probe, judge = NvmlReader(FakeNvml(script)), Judge()
    assert list(probe.wait(0)) + list(probe.look()) == []
    say(script, line)
    found = list(probe.wait(0)) + list(probe.look())
    assert [(f.gpu, f.what) for f in found] == [("GPU-fake-1", what)]
    verdict = judge.judge(found[0], 0.0)
    assert verdict.action is action and verdict.reason
    again = [v for f in probe.look() if (v := judge.judge(f, 1.0))]
    assert again == []  # a state that lasts is said once


def test_three_counted_errors_within_a_day_are_the_gpus_own_fault():
    judge, day = Judge(), 86400.0
    xid = GpuFinding("a", "xid 31", 31)
    times = [0.0, day / 2, day + 1, day + 2]
    assert [judge.judge(xid, t).action for t in times] == [
        Action.COUNT,
        Action.COUNT,
        Action.COUNT,
        Action.DRAIN,
    ]
    assert judge.judge(GpuFinding("b", "xid 31", 31), day + 3).action is Action.COUNT


def test_a_hardware_slowdown_counts_after_two_minutes(script):
    probe = NvmlReader(FakeNvml(script))
    say(script, {"gpu": 0, "clocks": 0x40})
    looks = [list(probe.look()) for _ in range(gpu_health.SLOW_LOOKS + 3)]
    assert [len(found) for found in looks] == [0] * (gpu_health.SLOW_LOOKS - 1) + [1, 0, 0, 0]


def test_the_real_library_has_what_the_probe_asks_for():
    nvml = pytest.importorskip("pynvml")
    assert (nvml.nvmlEventTypeXidCriticalError, nvml.nvmlEventTypeDoubleBitEccError) == (
        gpu_health.XID_EVENT,
        gpu_health.DOUBLE_BIT_EVENT,
    )
    assert (nvml.NVML_ERROR_TIMEOUT, nvml.NVML_ERROR_GPU_IS_LOST) == (
        gpu_health.TIMEOUT,
        gpu_health.GPU_IS_LOST,
    )
    assert (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC) == (
        gpu_health.UNCORRECTED,
        gpu_health.VOLATILE,
    )
    bits = (
        nvml.nvmlClocksEventReasonHwSlowdown
        | nvml.nvmlClocksEventReasonHwThermalSlowdown
        | nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
    )
    assert bits == gpu_health.HW_SLOWDOWN and isinstance(getattr(nvml, gpu_health.RECOVERY_FIELD), int)
    missing = [
        name for name in dir(FakeNvml) if name.startswith("nvml") and not hasattr(nvml, name)
    ]
    assert not missing
    assert (
        nvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET == 4
        and gpu_health.RECOVERY[4] == "drain and reset"
    )


def test_a_driver_that_hangs_is_a_finding_and_does_not_hang_us(script):
    said = queue.SimpleQueue()
    monitor = gpu_health.start(str(script), said.put, silent_s=1.5)
    say(script, {"gpu": 0, "xid": 62})
    assert said.get(timeout=60).finding.what == "xid 62"
    say(script, {"hang": True})
    verdict = said.get(timeout=60)
    assert verdict.finding.what == "silent" and verdict.action is Action.DRAIN
    monitor.stop()


def test_no_driver_no_monitor():
    assert isinstance(gpu_health.start("off", print), gpu_health.NoMonitor)


def test_a_place_that_gave_an_unfit_node_is_left_alone():
    import random

    from harness.core.world import UNFIT, Node, NodeState, Offer
    from harness.ledger.attempts import AttemptHistory

    book, offer = AttemptHistory(random.Random(0), block_limit_s=6.0), Offer(1.0, "local/a")
    book.add(0.0, AttemptIntended(1, offer.__dict__))
    book.add(1.0, AttemptUp(1, 1.0))
    from harness.ledger.attempts import how_it_ended

    end = how_it_ended(Node(1, offer, NodeState.GONE, 0.0, 1.0, 50.0, UNFIT, "exited"))
    book.add(50.0, AttemptEnded(1, end, 0.0, 1.0, 50.0, UNFIT, "exited", 49.0, 0.1, 0))
    assert end == "unfit" and book.full.until_s == {"local/a": 110.0} and book.losses == 1


# ---- with real workers ---------------------------------------------------------------------------
SLOW = ("--total", 60, "--every", 10, "--sleep-s", 0.02)


@pytest.mark.proof
def test_a_stopped_worker_is_named_and_replaced_and_a_sick_gpu_is_left(nodes, script):
    """One agent: its worker is stopped by a signal; later its GPU reports an error that no node
    should be kept for."""
    import psutil

    agent = nodes.start(
        *(*SLOW[:1], 100000, *SLOW[2:]),
        agent=("--set", "hang_after_s=4", "--set", f"gpu_health={script}", "--set", "measure_s=1"),
    )
    nodes.until(lambda: nodes.step() >= 10)
    next(
        p
        for p in psutil.Process(agent.pid).children(recursive=True)
        if p.name().startswith("rank-")
    ).send_signal(signal.SIGSTOP)
    nodes.until(lambda: nodes.facts(WorkerHung))
    stood = nodes.step()
    nodes.until(lambda: nodes.step() > stood)
    say(script, {"gpu": 0, "xid": 46})
    assert agent.wait(120) == 37, nodes.logs()
    assert [e.why for e in nodes.facts(EpochLeft)] == ["hung", "drained"]
    hung, failed = nodes.facts(WorkerHung)[0], nodes.facts(WorkerFailed)[0]
    assert hung.guilty and "stopped by a signal" in hung.what and failed.error == "Hung"
    assert nodes.facts(HealthSeen)[0].action == "drain"
    measured = [name for m in nodes.facts(NodeMeasured) for name in m.metrics]
    assert {"cpu/percent", "memory/percent", "gpu0/watts", "gpu1/percent"} <= set(measured)
    assert [r.step for r in history(nodes.run)] == list(range(1, nodes.step() + 1))


# as torch.distributed does it: a pipe, which a thread looks at, and a file when it was written to
RECORDER = """
import os, threading, time
assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000" and os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + os.environ["RANK"] + ".pipe"
os.mkfifo(pipe)
listening = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
def record():
    while not os.read(listening, 100):
        time.sleep(0.2)
    with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + os.environ["RANK"], "wb") as f:
        f.write(b"its last collectives")
threading.Thread(target=record, daemon=True).start()
"""


@pytest.mark.proof
def test_a_worker_that_hangs_writes_where(nodes, tmp_path):
    """A deadlock in the script: the stacks are in the record, what NCCL's recorder knows is in the
    bucket, and a node on which it goes on happening is left."""
    script = tmp_path / "stuck.py"
    script.write_text(
        RECORDER + "import threading, torch, harness\n"
        "run = harness.attach()\nmodel = torch.nn.Linear(1, 1)\nrun.prepare(model, "
        "torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "data = torch.utils.data.TensorDataset(torch.zeros(8, 1))\n"
        "def where_it_hangs(): threading.Lock().acquire(); lock = threading.Lock(); "
        "lock.acquire(); lock.acquire()\n"
        "for step in run.steps(data, total=9, global_batch=4, micro_batch=4):\n"
        "    for (x,) in step: step.backward(model(x).sum())\n"
        "    step.update()\n"
        "    if step.number == 3: where_it_hangs()\n"
    )
    agent = nodes.start(script=script, agent=("--set", "hang_after_s=1", "--set", "flight_recorder=on"))
    assert agent.wait(270) == 37, nodes.logs()
    failures = nodes.facts(WorkerFailed)
    assert len(failures) == 3 and all("where_it_hangs" in f.log_tail for f in failures)
    taken = nodes.facts(ProfileTaken)
    assert [(f.epoch, f.rank, f.last, f.nbytes) for f in taken] == [(e, 0, 3, 20) for e in (1, 2, 3)]
    assert open_store(nodes.url).get(taken[-1].keys[0]) == b"its last collectives"
