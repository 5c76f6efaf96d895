"""The controller's own end: signals, a closed terminal, trouble of its own, nobody leading.
Real processes; nodes are none the worse."""

import fcntl
import json
import os
import pty
import random
import signal
import subprocess
import sys
import termios
import time

import pytest

from harness.core.facts import AgentEnded, AttemptEnded, NoticeSeen, RunEnded
from storage.canonical_json import canonical, digest
from storage.stores.store_urls import open_store
from support.campaign import Campaign
from support.worlds import until

LONG = "--total 100000 --every 10 --sleep-s 0.04"


@pytest.fixture
def campaign(tmp_path):
    made = []

    def make(agent="", **settings):
        c = Campaign(tmp_path, **{"nodes": "1", "flags": LONG, **settings})
        c.task.write_text(c.task.read_text().replace("harness run", f"harness run {agent}"))
        made.append(c)
        return c

    yield make
    for c in made:
        c.close()


def harness(*words):
    return subprocess.run(
        [sys.executable, "-m", "harness.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=240,
    )


def drained(c: Campaign) -> bool:
    """The run was stopped on purpose, nothing was lost by it, and nothing is left."""
    (end,) = c.facts(RunEnded)
    assert end.outcome == "stopped" and end.committed_step == c.step()
    assert {(a.end, a.exit_code) for a in c.facts(AttemptEnded)} == {("terminated", 35)}
    until(lambda: c.nothing_left(), c.logs, 120)
    return True


@pytest.mark.proof
def test_a_closed_terminal_drains(campaign):
    """`harness launch` in a terminal that is closed: its words go to a file then."""
    c = campaign()
    c.launches += 1
    master, slave = pty.openpty()

    def begin():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # who runs the tests may be under nohup
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    environ = {
        k: v for k, v in os.environ.items() if not k.startswith(("HARNESS_", "SKYPILOT_", "AWS_"))
    }
    c.log.write_text("")
    c.process = subprocess.Popen(
        c.command, stdin=slave, stdout=slave, stderr=slave, env=environ, preexec_fn=begin
    )
    os.close(slave)
    os.set_blocking(master, False)

    def shown():
        try:
            while os.read(master, 1 << 16):
                pass
        except BlockingIOError:
            return c.step() >= 10

    c.until(shown)
    os.close(master)
    assert c.wait(200) == 3, c.logs()
    assert drained(c)
    said = (c.run / "controller" / "log").read_text()
    assert "SIGHUP" in said and "Draining" in said and "resumes it from there" in said


@pytest.mark.proof
def test_a_second_signal_kills(campaign):
    c = campaign(flags=f"{LONG} --sleep-s 20")  # so slow that it cannot drain meanwhile
    c.launch()
    c.until(lambda: c.processes("worker") and list((c.run / "rdzv" / "epochs").glob("*")))
    c.process.send_signal(signal.SIGTERM)
    c.process.send_signal(signal.SIGHUP)  # as service managers do: both are one
    c.until((c.run / "control" / "stop.json").exists)
    assert "told to end by SIG" in (c.run / "control" / "stop.json").read_text()
    time.sleep(3.2)  # what comes within three seconds is one
    c.until(lambda: c.processes("worker"))
    c.process.send_signal(signal.SIGTERM)
    assert c.wait(200) == 130, c.logs()
    assert "Killed" in c.output()
    until(lambda: c.nothing_left(), c.logs, 120)


@pytest.mark.proof
def test_trouble_of_the_controller_leaves_the_nodes_training_and_down_ends_them(campaign):
    """A newer version of the code has committed a snapshot that this controller cannot read."""
    c = campaign(flags="--total 100000 --every 1000 --sleep-s 0.04")
    c.launch()
    c.until(lambda: c.processes("worker") and list((c.run / "facts").glob("worker-*")))
    assert harness("snapshots", "take", c.run).returncode == 0
    c.until(lambda: c.step() > 0)
    store, newer = open_store(str(c.run)), "snapshots/manifests/0000900000-e000001.json"
    body = {
        k: v
        for k, v in json.loads(store.get(store.list("snapshots/manifests/")[-1])).items()
        if k != "hash"
    }
    body |= {"version": 999, "ref": "0000900000-e000001"}
    store.put(newer, canonical({**body, "hash": digest(canonical(body))}))
    assert c.wait(200) == 4, c.logs()
    assert (
        "go on training" in c.output()
        and "update the package" in c.output()
        and f"harness down file://{c.run}" in c.output()
    )
    worker = c.processes("worker")
    assert worker and c.processes("agent") and c.processes("provider")
    seen = sum(f.stat().st_size for f in (c.run / "facts").glob("worker-*/*"))
    until(
        lambda: sum(f.stat().st_size for f in (c.run / "facts").glob("worker-*/*")) > seen,
        c.logs,
        30,
    )
    again = c.launch()
    assert again.wait(200) == 4, c.output()  # the same for one that cannot even begin
    assert c.processes("worker") == worker
    store.delete(newer)
    # it says no goodbye, and nobody writes down that it has ended: stop and down see it all the
    # same
    c.kill("agent", random.Random(0))
    for words, says in (
        (("stop", "--wait-s", 200), "Stopped at step"),  # or it has waited in vain
        (("down", "--grace-s", 600), "Nothing of this run is left."),  # more than it has here
    ):
        ended = harness(*words, c.run)
        assert ended.returncode == 0 and says in ended.stdout, ended.stdout + ended.stderr
    assert c.nothing_left()


@pytest.mark.proof
def test_nodes_without_a_leader_train_on_and_then_drain(campaign):
    # 7.2 s, in which it trains on: quickly
    c = campaign(agent="--set leaderless_hours=0.002", flags=f"{LONG} --sleep-s 0.01")
    c.launch()
    c.until(lambda: c.step() >= 10)
    c.kill("controller", random.Random(0))
    c.process.wait(60)
    seen = c.step()
    until(lambda: c.step() > seen + 10, c.logs, 120)
    until(lambda: c.facts(AgentEnded), c.logs, 120)
    (end,), (notice,) = c.facts(AgentEnded), c.facts(NoticeSeen)
    assert end.exit_code == 33 and notice.source == "lease"
    assert "nobody leads the run" in notice.id and "has stood still for 0.002 h" in notice.id
