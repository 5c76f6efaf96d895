"""Nodes whose machine is taken, as a cloud's metadata service tells it."""

import contextlib
import time
from email.utils import formatdate

import pytest

from harness.bucket.archive import read_facts
from harness.core.facts import (
    NoticeAcknowledged,
    NoticeCancelled,
    NoticeSeen,
    SessionStarted,
    SnapshotCommitted,
)
from harness.local.azure_metadata import AzureScheduledEvents
from harness.local.metadata_server import MetadataServer, environment_of
from storage.stores.store_urls import open_store


@pytest.mark.proof
def test_a_machine_that_azure_takes(nodes):
    """A pause, an end known long before and taken back, the end: each has its own answer, and
    Azure is told when we have gone."""
    vm = AzureScheduledEvents("vm-1")
    with contextlib.closing(MetadataServer(vm)) as server:
        agent = nodes.start(
            "--total",
            100_000,
            "--every",
            50_000,
            "--sleep-s",
            0.02,
            env=environment_of("azure", server.endpoint),
        )
        nodes.until(lambda: nodes.facts(SessionStarted))
        store = open_store(str(nodes.run))
        pause = vm.notice("soft", time.time() + 900)
        nodes.until(lambda: nodes.facts(SnapshotCommitted))
        assert not store.list("control/doubt")  # it stays where it is
        vm.cancel(pause)
        move = vm.notice("maintenance", time.time() + 3600)
        nodes.until(lambda: any(f.id == move for f in nodes.facts(NoticeSeen)))
        assert not store.list("control/doubt")
        vm.change(move, NotBefore=formatdate(time.time() + 600, usegmt=True))
        nodes.until(lambda: store.list("control/doubt"))
        assert store.list("control/doubt") == ["control/doubt-000001.json"]
        vm.cancel(move)
        nodes.until(lambda: not store.list("control/doubt"))
        assert agent.poll() is None
        before = nodes.step()
        kill = vm.notice("kill", time.time() + 30)
        assert agent.wait(200) == 33, nodes.logs()
        # another node is looked for at the notice, not at the end
        assert store.list("control/doubt")
    assert vm.acknowledged == [kill]
    facts = list(read_facts(store))
    (told_s,) = [s.t for s in facts if isinstance(s.fact, NoticeAcknowledged) and s.fact.heard]
    committed = [s for s in facts if isinstance(s.fact, SnapshotCommitted)]
    assert committed[-1].fact.why == "notice" and committed[-1].fact.step == nodes.step() > before
    assert committed[-1].t <= told_s
    assert {f.id for f in nodes.facts(NoticeCancelled)} == {pause, move}
