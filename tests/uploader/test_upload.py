"""The upload engine and the uploader process, over real sockets and shared memory."""

import contextlib
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from harness.bucket.archive import read_facts
from harness.bucket.layout import Epoch, epoch_key
from harness.core.facts import DrainVerdict, SnapshotCommitted, SnapshotFailed
from harness.uploader.handoff import (
    InProcessSender,
    UploaderClient,
    UploaderConnection,
    UploadServer,
)
from harness.uploader.node_tiers import NearbyConfig
from harness.uploader.node_uploader import seen_here
from storage import MemoryStore, Snapshots, StoreError, open_store
from storage.errors import StoreUnavailable
from storage.snapshots.staging import Segment, Stage, StageFull
from storage.snapshots.upload import Unchanged, Uploader, UploadJob, UploadOutcome, forecast
from storage.stores.bounded_store import Bounded, CallWaits
from storage.stores.retries import Retrying
from storage.tiers.folder_tier import FolderTier
from storage.tiers.tiers import blocks_of_part
from support import worlds
from support.uploads import R1, R2, R3, VIEW, WAIT_S, Told, job, start_uploader

until = functools.partial(worlds.until, within_s=WAIT_S)


class Gated(MemoryStore):
    """Parts are put only while the gate is open; counts how many are at it."""

    def __init__(self):
        super().__init__(objects={})
        self.gate, self.order, self.at_once, self.most = threading.Event(), [], 0, 0
        self._counting = threading.Lock()

    def put(self, key, data):
        if "/parts/" in key:
            with self._counting:
                self.order.append(key)
                self.at_once += 1
                self.most = max(self.most, self.at_once)
            self.gate.wait(WAIT_S)
            with self._counting:
                self.at_once -= 1
        super().put(key, data)


def test_jobs_and_outcomes_go_through_json():
    same = Unchanged("t0 before", {"0001.bin": [(0, 500), (600, 1000)]})
    one = job(before={"samples/x": "text"}, keep={"last": 2}, unchanged=same)
    assert UploadJob.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    outcome = UploadOutcome(R1, 0, "committed", 5, "ab", 0.1, parts={"k": "f"}, note={"why": "x"})
    assert UploadOutcome.from_dict(json.loads(json.dumps(outcome.to_dict()))) == outcome


def test_the_last_share_commits_and_the_weights_are_summed():
    store, told = MemoryStore(objects={}), Told()
    uploader = Uploader(store)
    for rank in (1, 0):
        uploader.submit(job(rank=rank, world=2, before={"samples/a": "records"}), VIEW, told)
    told.wait(2)
    assert [o.state for o in told.outcomes] == ["committed", "committed"] and uploader.busy() == 0
    manifest = Snapshots(store).latest()
    assert manifest.data["step"] == 10 and store.get("samples/a") == b"records"
    assert {o.weights for o in told.outcomes} == {manifest.data["weights"]}
    Snapshots(store).verify(manifest)
    alone, again = MemoryStore(objects={}), Told()
    Uploader(alone).submit(job(rank=0), VIEW, again)
    assert again.wait().weights != manifest.data["weights"]
    parts = {
        key: bytes(VIEW[int(name[:4]) * 1000 : int(name[:4]) * 1000 + 1000])
        for o in told.outcomes
        for key, name in o.parts.items()
    }
    assert parts == {p.key: store.get(p.key) for p in manifest.parts}


def test_a_share_whose_world_is_not_there_waits_and_says_so():
    told = Told()
    Uploader(MemoryStore(objects={}), commit_timeout_s=0.2).submit(job(world=2), VIEW, told)
    assert told.wait().state == "waiting" and told.outcomes[0].kind == "CommitTimeout"


def test_parts_go_in_bounded_parallel_and_before_their_list():
    store, told = Gated(), Told()
    uploader = Uploader(store, lanes=3)
    uploader.submit(job(n=6), VIEW, told)
    until(lambda: store.at_once == 3)
    assert uploader.busy() == 1 and not store.list("snapshots/parts/0000000010-e000001/list")
    store.gate.set()
    assert told.wait().state == "committed" and store.most == 3


def test_errors_are_told_and_commit_nothing():
    class Full(MemoryStore):
        def put(self, key, data):
            raise StoreError("the disk is full")

    told, store = Told(), Full(objects={})
    Uploader(store).submit(job(), VIEW, told)
    assert (told.wait().state, told.outcomes[0].kind) == (
        "failed",
        "StoreError",
    ) and "full" in told.outcomes[0].error
    assert Snapshots(store).latest() is None


def test_what_a_newer_epoch_fences_is_not_committed():
    store, told = MemoryStore(objects={}), Told()
    store.create(epoch_key(2), Epoch(2, ("x",), (1,), (1.0,), "", 0, "start").encode())
    failed = []
    local = InProcessSender(store, lambda job, outcome: failed.append(outcome))
    local.send(job(), local.segment(4000), told)
    assert told.wait().kind == "Fenced" and failed[0].state == "failed"
    assert Snapshots(store).latest() is None


@pytest.mark.parametrize(
    ("remaining", "left_s", "order", "sure"),
    [
        ({R1: 100, R2: 100}, 1e9, [R1, R2], [R1, R2]),
        ({R1: 100, R2: 100}, float("inf"), [R1, R2], [R1, R2]),
        ({R1: 500, R2: 500}, 80, [R2, R1], [R2]),  # 100 s for both, 50 s for the newer one
        ({R1: 100, R2: 900}, 80, [R1, R2], [R1]),  # the newer one alone is too much
        ({R1: 900, R2: 950, R3: 990}, 50, [R1, R2, R3], []),
        ({R1: 0}, 0, [R1], [R1]),
    ],
)
def test_the_forecast_puts_the_surest_first(remaining, left_s, order, sure):
    found = forecast(remaining, 10.0, left_s)
    assert list(found.order) == order and found.sure == set(sure)
    assert found.need_s[order[-1]] == pytest.approx(sum(remaining.values()) / 10)


def test_parts_of_the_snapshot_that_comes_first_go_first():
    store, told = Gated(), Told()
    uploader = Uploader(store, lanes=1)
    uploader.submit(job(R3), VIEW, told)
    until(lambda: store.at_once == 1)
    uploader.submit(job(R1), VIEW, told)
    until(lambda: len(uploader._lanes._tasks) == 7)
    store.gate.set()
    told.wait(2)
    steps = [int(key.split("/")[2].split("-")[0]) for key in store.order]
    assert steps == [30, 10, 10, 10, 10, 30, 30, 30]


def test_out_of_time_nothing_is_committed_then_or_later():
    store, told = Gated(), Told()
    uploader = Uploader(store)
    uploader.submit(job(n=8), VIEW, told)
    until(lambda: store.at_once == 4)
    found = uploader.drain(time.monotonic() + 0.6)
    assert found is not None and found.order == (R1,)
    assert told.wait().kind == "OutOfTime" and uploader.busy() == 0
    store.gate.set()
    until(lambda: store.at_once == 0)
    assert Snapshots(store).commit(R1, 1) is None and not [
        k for k in store.list("") if "list-" in k
    ]
    uploader.drain(None)
    uploader.submit(job(R2), VIEW, told)
    assert told.wait(2).state == "committed"


# ---- the server ----------------------------------------------------------------------------------
@contextlib.contextmanager
def served(tmp_path, store, budget_nbytes=1 << 20):
    stage = Stage(tmp_path, budget_nbytes)
    server = UploadServer(store, stage.folder, budget_nbytes, "m0001-x", NearbyConfig())
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        yield stage.folder, server
    finally:
        server.stop()
        stage.close()


def test_a_segment_is_not_filled_anew_while_a_late_write_may_read_it(tmp_path):
    """A part's first write hangs, its second one commits."""
    gate, late = threading.Event(), list[str]()

    class Late(MemoryStore):
        def put(self, key, data):
            if "/parts/" in key and not late:
                late.append(key)
                assert gate.wait(WAIT_S)
            super().put(key, data)

    inner = Late(objects={})
    store = Retrying(Bounded(inner, CallWaits(inner.url, 0.2)))
    with served(tmp_path, store) as (folder, _):
        local = InProcessSender(store, lambda job, outcome: None)
        remote, told = UploaderClient(folder, 1, 0, local), Told()
        segment = remote.segment(4000)
        segment.view[:] = VIEW[:4000]
        remote.send(job(), segment, told)
        assert told.wait().state == "committed"
        other = remote.segment(4000)
        assert other.path != segment.path
        remote.give_back(other)
        content = inner.get(late[0])
        gate.set()
        until(lambda: remote.segment(4000) is segment)
        segment.view[:] = bytes(4000)
        assert inner.get(late[0]) == content != bytes(len(content))


def test_a_session_hands_over_and_reads_its_parts_back(tmp_path):
    store = MemoryStore(objects={})
    with served(tmp_path, store) as (folder, _):
        remote = UploaderClient(folder, 1, 0, InProcessSender(store, lambda job, outcome: None))
        told = Told()
        segment = remote.segment(4000)
        segment.view[:] = VIEW[:4000]
        remote.send(job(keep={"last": 1, "every": 0}), segment, told)
        assert told.wait().state == "committed"
        places = remote.held(R1)["parts"]
        content = {p.key: store.get(p.key) for p in Snapshots(store).latest().parts}
        assert {
            key: bytes(Segment.open(path, writable=False).view[a:b])
            for key, (path, a, b) in places.items()
        } == content
        assert remote.held(R2)["parts"] == {}
        # one is being filled: another
        assert remote.segment(4000) is segment and remote.segment(4000).path != segment.path
        remote.give_back(segment)
        newer = UploaderClient(folder, 2, 0, InProcessSender(store, lambda job, outcome: None))
        assert newer.held(R1)["parts"] == places
        newer.segment(5000)
        assert newer.held(R1)["parts"] == {}  # who reserves has restored
        facts = [s.fact for s in read_facts(store, "uploader-m0001-x")]
        assert [f.kind for f in facts] == ["SnapshotCommitted"] and facts[
            0
        ].weights == told.outcomes[0].weights


def test_what_a_node_has_of_a_snapshot_can_be_seen(tmp_path):
    store, told = MemoryStore(objects={}), Told()
    nobody = seen_here(tmp_path)
    with served(tmp_path, store) as (folder, server):
        remote = UploaderClient(folder, 1, 0, InProcessSender(store, lambda job, outcome: None))
        for rank, view in ((0, remote.segment(4000)), (1, Segment.anonymous(4000))):
            view.view[:] = VIEW[4000 * rank : 4000 * rank + 4000]
            remote.send(job(rank=rank, world=2), view, told)
        told.wait(2)
        manifest = Snapshots(store).latest()
        near = seen_here(tmp_path)
        assert nobody(manifest) == {}
        assert near(manifest) == {"memory": 0.5}  # the other half is another node's
        disk = FolderTier("disk", tmp_path / "disk", 1 << 20)
        disk.put(next(blocks_of_part(manifest.parts[-1], VIEW[7000:8000])))
        server.nearby._folders.append(disk)
        assert near(manifest) == {"memory": 0.5, "disk": 0.125}
        told = Told()
        remote.send(job(R2), Segment.anonymous(4000), told)
        told.wait()
        assert near(Snapshots(store).latest()) == {}


def test_short_memory_means_the_trainers_own(tmp_path, capsys):
    store = MemoryStore(objects={})
    with served(tmp_path, store, budget_nbytes=5000) as (folder, _):
        remote = UploaderClient(folder, 1, 0, InProcessSender(store, lambda job, outcome: None))
        first = remote.segment(4000)
        with pytest.raises(StageFull, match="--set stage_gib"):  # one buffer: wait for it
            remote.segment(4000)
        remote.give_back(first)
        assert (
            remote.segment(6000).path is None and "trainer's own memory" in capsys.readouterr().out
        )


@pytest.mark.parametrize("enough", [True, False])
def test_the_verdict_of_a_drain_is_said_and_true(tmp_path, enough):
    store, told = Gated(), Told()
    with served(tmp_path, store) as (folder, _):
        agent, remote = UploaderConnection(folder), UploaderClient(folder, 1, 0, InProcessSender(store, lambda job, outcome: None))
        if enough:
            store.gate.set()
        agent.ask("drain", deadline_s=time.time() + (WAIT_S if enough else 0.7))
        remote.send(job(), remote.segment(4000), told)
        assert told.wait().state == ("committed" if enough else "failed")
        until(lambda: any(isinstance(s.fact, DrainVerdict) for s in read_facts(store, "uploader-")))
        facts = [s.fact for s in read_facts(store, "uploader-")]
        verdict = next(f for f in facts if isinstance(f, DrainVerdict))
        assert verdict.committed is enough and verdict.last_good_step == (10 if enough else 0)
        assert any(isinstance(f, SnapshotCommitted if enough else SnapshotFailed) for f in facts)
        assert agent.ask("busy")["busy"] == 0
        store.gate.set()
        until(lambda: store.at_once == 0)
        assert (Snapshots(store).latest() is not None) is enough
        agent.close()


TRAINER = """
import os, signal, sys, threading
from pathlib import Path
from support.uploads import job
from harness.uploader.handoff import InProcessSender as Local, UploaderClient as Remote
from storage import open_store
remote = Remote(Path(sys.argv[1]), 1, 0, Local(open_store(sys.argv[2]), lambda job, outcome: None))
segment = remote.segment(4 << 20)
segment.view[:] = os.urandom(1 << 20) * 4
remote.send(job(nbytes=1 << 20), segment, lambda outcome: None)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_that_dies_after_handing_over_costs_no_upload(tmp_path):
    stage, run = Stage(tmp_path, 1 << 30), f"file://{tmp_path}/run"
    uploader = start_uploader(stage.folder, run)
    worker = subprocess.run([sys.executable, "-c", TRAINER, str(stage.folder), run])
    assert worker.returncode == -signal.SIGKILL
    snapshots = Snapshots(open_store(run))
    until(lambda: snapshots.latest() is not None and read_facts(open_store(run), "uploader-"))
    snapshots.verify(snapshots.latest())
    uploader.stdin.close()
    assert uploader.wait(WAIT_S) == 0
    stage.close()


def test_when_the_uploader_dies_the_trainer_sends_for_itself(tmp_path):
    stage, run = Stage(tmp_path, 1 << 30), f"file://{tmp_path}/run"
    uploader = start_uploader(stage.folder, run)
    remote, told = (
        UploaderClient(stage.folder, 1, 0, InProcessSender(open_store(run), lambda job, outcome: None)),
        Told(),
    )
    segment = remote.segment(4000)
    os.kill(uploader.pid, signal.SIGSTOP)  # it will never get to the job
    remote.send(job(), segment, told)
    uploader.kill()
    uploader.wait()
    assert told.wait().state == "committed"
    assert remote.segment(4000) is segment  # still mapped, free again
    remote.send(job(R2), segment, told)
    assert told.wait(2).state == "committed" and remote.held(R2) == {}
    assert Snapshots(open_store(run)).latest().step == 20
    uploader.stdin.close()
    stage.close()


class SilentFor(MemoryStore):
    """Does not answer so many puts of parts, and all is well afterwards."""

    def __init__(self, puts):
        super().__init__(objects={})
        self.puts = puts

    def put(self, key, data):
        if self.puts > 0:
            self.puts -= 1
            raise StoreUnavailable(f"put {key}: no answer")
        super().put(key, data)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_what_a_silent_store_did_not_take_is_sent_again_for_the_other_ranks(ranks):
    """Else they wait for this share until the time of a commit is over, and nothing is committed
    meanwhile."""
    store, told = SilentFor(puts=2), Told()
    for rank in ranks:  # two nodes
        Uploader(store, commit_timeout_s=60.0).submit(job(rank=rank, world=2), VIEW, told)
    told.wait(2)
    assert {o.state for o in told.outcomes} == {"committed"}
    manifest = Snapshots(store).latest()
    Snapshots(store).verify(manifest)
    assert manifest.ref == R1 and store.puts == 0


def test_what_nobody_else_waits_for_is_not_sent_again():
    """The next snapshot carries its records."""
    told = Told()
    Uploader(SilentFor(puts=1)).submit(job(), VIEW, told)
    assert told.wait().state == "failed"


def refused(ref):
    raise StoreError("a newer generation exists")


@pytest.mark.parametrize(
    ("state", "world", "check"),
    [("committed", 1, lambda ref: None), ("waiting", 2, lambda ref: None), ("failed", 1, refused)],
)
def test_the_memory_of_a_segment_is_free_when_its_upload_is_over(tmp_path, state, world, check):
    """Found by a soak: dropped segments stayed mapped until Python looked for garbage."""
    gc.collect()
    gc.disable()
    try:
        segment = Segment.create(tmp_path / "a.segment", 4000)
        memory, told = weakref.ref(segment.view.obj), Told()
        Uploader(MemoryStore(objects={}), check, commit_timeout_s=0.2).submit(
            job(world=world), segment.view, told
        )
        assert told.wait().state == state
        del segment
        until(lambda: memory() is None, "free memory")
    finally:
        gc.enable()
