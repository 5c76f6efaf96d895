"""The uploader of a node is stopped for good: the node goes on to commit, says so, and leaves
within its grace at a notice that comes meanwhile."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from harness.bucket.archive import read_facts
from harness.core.facts import HelperEnded
from harness.core.world import DRAINED
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store
from support.outside import said_of, train_begin, until

pytestmark = pytest.mark.proof
GRACE_S = 30.0


def uploader_of(agent: int) -> int:
    def words(process: psutil.Process) -> list[str]:
        try:
            return process.cmdline()
        except psutil.Error:  # it has just ended
            return []

    def found() -> list[int]:
        children = psutil.Process(agent).children()
        return [p.pid for p in children if "harness.uploader.handoff" in words(p)]

    [one] = until(found, "an uploader")  # one that has ended has a successor soon
    return one


@pytest.mark.parametrize("noticed", [False, True], ids=["training", "notice"])
def test_a_stopped_uploader_ends_no_commits(tmp_path: Path, noticed: bool):
    run = tmp_path / "run"
    agent = train_begin(run, total=100_000, nap_s=0.05, folder=tmp_path)
    store = open_store(f"file://{run}")
    try:
        until(lambda: Snapshots(store).latest(), "a first snapshot", of=agent)
        os.kill(uploader_of(agent.pid), signal.SIGSTOP)
        stopped_at = Snapshots(store).latest().step
        if not noticed:
            until(lambda: Snapshots(store).latest().step >= stopped_at + 40, "snapshots", 40.0)
            uploader_of(agent.pid)  # another has started
        began_s = time.monotonic()
        agent.send_signal(signal.SIGTERM)
        code, text = said_of(agent, GRACE_S + 30.0)
        took_s = time.monotonic() - began_s
    finally:
        agent.kill()
    assert code == DRAINED, text
    assert took_s < GRACE_S / 2, text
    assert Snapshots(store).latest().step > stopped_at
    [ended] = [s.fact for s in read_facts(store) if isinstance(s.fact, HelperEnded)]
    assert (ended.helper, ended.exit_code) == ("uploader", -signal.SIGKILL)
    assert "no heartbeat" in ended.why and "the uploader ended" in text
