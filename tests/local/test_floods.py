"""Floods, silence, drips and garbage at every port of a run that trains: no step is lost, and what
strangers take of each process is bounded.

Real processes all of them: `harness launch` on the local cloud, two nodes that leave chunks with
each other, `harness runs serve`, Prometheus endpoints; nodes have 256 descriptors each. What cannot be
defended here (TCPStore and gloo of torch, docs/SECURITY.md) is left out. How much slower steps are
is printed by `benchmarks/floods.py`.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from harness.core.facts import EpochStarted
from storage.http_server import RESERVED
from support.campaign import Campaign
from support.whole_runs import assert_whole
from support.wires import WIRES, fuzz
from support.worlds import newest, train, until

pytestmark = pytest.mark.proof
TOTAL = 160
SIEGE_S = 12.0
FLAGS = f"--total {TOTAL} --every 20 --sleep-s 0.06 --reduce exact"
DESCRIPTORS = 256  # that a node may have


@pytest.fixture
def campaign(tmp_path):
    c = Campaign(
        tmp_path,
        nodes="2:2",
        flags=f"{FLAGS} --go {tmp_path / 'go'}",
        run_flags="--set peer_tier=memory --prometheus 127.0.0.1:0",
        extra=["--prometheus", "127.0.0.1:0"],
    )
    c.task.write_text(c.task.read_text().replace("  exec", f"  ulimit -n {DESCRIPTORS}\n  exec"))
    yield c
    c.close()


def ours(c: Campaign) -> dict[psutil.Process, str]:
    """Processes that listen, but for the script's own, where torch does."""
    found = {p: kind for kind in ("controller", "provider", "agent") for p in c.processes(kind)}
    for agent in [p for p, kind in found.items() if kind == "agent"]:
        with contextlib.suppress(psutil.Error):
            for child in agent.children(recursive=True):
                if "harness.uploader.handoff" in " ".join(child.cmdline()):
                    found[child] = "uploader"
    return found


def listening(processes) -> list[str]:
    found = []
    for p in processes:
        with contextlib.suppress(psutil.Error):  # a child that only looked something up
            found += [at.laddr for at in p.net_connections("tcp") if at.status == psutil.CONN_LISTEN]
    return sorted(f"{at.ip}:{at.port}" for at in found)


class Gauge(threading.Thread):
    """The most descriptors and threads that each process ever had."""

    def __init__(self, processes):
        super().__init__(daemon=True)
        self.processes, self.stop = processes, threading.Event()
        self.most: dict[str, tuple[int, int]] = {}

    def run(self):
        while not self.stop.wait(0.2):
            for p, kind in self.processes.items():
                try:
                    fds, threads = p.num_fds(), p.num_threads()
                except psutil.Error:
                    continue
                before = self.most.get(f"{kind} {p.pid}", (0, 0))
                self.most[f"{kind} {p.pid}"] = max(before[0], fds), max(before[1], threads)


@pytest.mark.parametrize("name", WIRES)
def test_wires_with_far_more_seeds(name):
    """`tests/local/test_wire_fuzz.py` has a few hundred of each."""
    fuzz(name, 500)


def test_a_run_under_siege_loses_nothing(campaign, tmp_path):
    c = campaign
    pages = subprocess.Popen(
        [sys.executable, "-m", "harness.cli", "runs", "serve", str(tmp_path), "--port", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    strangers = None
    try:
        pages_too = {psutil.Process(pages.pid): "serve"}
        until(lambda: listening(pages_too), "the pages")
        c.launch()
        c.until(lambda: c.step() >= 20)
        # lines, Prometheus and chunks of two nodes; the provider and its two metadata services; the
        # controller's Prometheus; the pages
        c.until(lambda: len(listening(ours(c) | pages_too)) >= 11)
        processes = ours(c) | pages_too
        ports = listening(processes)
        gauge = Gauge(processes)
        gauge.start()
        begun = c.step()
        strangers = subprocess.Popen(
            [
                *(sys.executable, "-m", "support.port_floods", *ports),
                *("--rate", "8", "--hold", "80", "--seconds", "600"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        time.sleep(SIEGE_S)
        (tmp_path / "go").touch()
        assert c.wait() == 0, c.logs()
        gauge.stop.set()
        gauge.join()
        strangers.send_signal(signal.SIGINT)
        done = json.loads(strangers.communicate(timeout=60)[0])
    finally:
        for p in filter(None, (strangers, pages)):
            p.kill()
            p.wait()
    print(f"{len(ports)} ports from step {begun} on: {done}; most descriptors, threads: {gauge.most}")
    assert begun < TOTAL and done["drip: sent away"] > 0 and done["flood"] > 100
    assert_whole(c, TOTAL)
    assert [e.reason for e in c.facts(EpochStarted)] == ["start"]  # nobody was taken for dead
    for kind, (fds, threads) in gauge.most.items():
        assert threads <= 300, kind
        # the provider has three ports; a node never comes near its last descriptors
        assert fds <= (400 if kind.startswith("provider") else DESCRIPTORS - RESERVED), kind
    train(tmp_path / "calm", 1, "--total", TOTAL, "--every", 40, "--reduce", "exact")
    assert newest(c.run).data["weights"] == newest(tmp_path / "calm").data["weights"]
