"""An uploader that hangs: who waits for it, who finds it, and who does its work then."""

import contextlib
import os
import signal
import threading
import time

from harness.uploader import handoff, liveness, node_uploader
from harness.uploader.handoff import InProcessSender, UploaderClient, UploadServer
from harness.uploader.liveness import GAP_S, START_S, UploaderHeartbeat, UploaderWatch
from harness.uploader.node_tiers import NearbyConfig
from harness.uploader.node_uploader import NodeUploader
from storage import MemoryStore, Snapshots, open_store
from storage.snapshots import upload
from storage.snapshots.staging import Stage
from support import worlds
from support.uploads import R1, R2, WAIT_S, Told, job, start_uploader

MANY_NBYTES = 4 << 20  # more than a socket's buffer


def client(folder, run):
    local = InProcessSender(open_store(run), lambda job, outcome: None)
    return UploaderClient(folder, 1, 0, local)


@contextlib.contextmanager
def node(tmp_path):
    """An agent's uploader, and the run that it sends to."""
    run = f"file://{tmp_path}/run"
    made = NodeUploader(run, "m1", tmp_path, 1 << 30, tmp_path / "uploader.log", NearbyConfig())
    try:
        yield made, run
    finally:
        made.close(2.0)


def look_until_ended(uploads):
    """The looks of an agent's loop."""
    deadline_s = time.monotonic() + WAIT_S
    while not (found := uploads.look(time.monotonic())):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return found


def test_a_stopped_uploader_is_killed_and_its_jobs_are_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(liveness, "SILENT_S", 1.5)
    with node(tmp_path) as (uploads, run):
        uploads.ensure()
        remote, told = client(uploads.folder, run), Told()
        worlds.until(lambda: (uploads.folder / liveness.HEARTBEAT).exists(), within_s=WAIT_S)
        assert uploads.look(time.monotonic()) == [] and uploads.busy() == 0
        segment, first = remote.segment(4000), uploads._process
        os.kill(first.pid, signal.SIGSTOP)
        remote.send(job(), segment, told)
        began_s = time.monotonic()
        uploads.drain(None)  # a stopped process holds nobody
        assert uploads.busy() == uploads.busy() == 1
        assert time.monotonic() - began_s < 2 * node_uploader.GLANCE_S
        [(name, code, why)] = look_until_ended(uploads)
        assert (name, code) == ("uploader", -signal.SIGKILL)
        assert "no heartbeat for" in why and "process state T" in why
        assert told.wait().state == "committed"
        assert uploads.busy() == 0 and uploads.look(time.monotonic()) == []
        uploads.ensure()  # the first time at once
        worlds.until(lambda: (uploads.folder / liveness.HEARTBEAT).exists(), within_s=WAIT_S)
        again = remote.segment(4000)  # its client goes to the new one
        assert again is not segment and again.path.parent == uploads.folder
        remote.send(job(R2), again, told)
        assert told.wait(2).state == "committed" and uploads._process is not first
        assert first.wait(WAIT_S) == -signal.SIGKILL
        uploads._process.kill()  # an end by itself is told as well, and the next start waits
        assert look_until_ended(uploads)[0][:2] == ("uploader", -signal.SIGKILL)
        uploads.ensure()
        assert uploads._process is None


def test_a_job_for_a_stopped_uploader_does_not_hold_the_trainer(tmp_path):
    stage, run = Stage(tmp_path, 1 << 30), f"file://{tmp_path}/run"
    uploader = start_uploader(stage.folder, run)
    remote, told = client(stage.folder, run), Told()
    segment = remote.segment(4000)
    os.kill(uploader.pid, signal.SIGSTOP)
    before = {"samples/x": "x" * MANY_NBYTES}
    sending = threading.Thread(
        target=remote.send, args=(job(before=before), segment, told), daemon=True
    )
    sending.start()
    sending.join(10.0)
    held = sending.is_alive()
    uploader.kill()
    uploader.wait()
    assert not held
    assert told.wait().state == "committed"
    assert open_store(run).get("samples/x") == before["samples/x"].encode()
    stage.close()


def test_clients_see_that_an_uploader_is_put_away_though_it_cannot_die(tmp_path, monkeypatch):
    """One that hangs in the kernel keeps its connections: the agent takes its socket away."""
    monkeypatch.setattr(handoff, "PUT_AWAY_S", 0.1)
    stage, run = Stage(tmp_path, 1 << 30), f"file://{tmp_path}/run"
    uploader = start_uploader(stage.folder, run)
    remote, told = client(stage.folder, run), Told()
    segment = remote.segment(4000)
    os.kill(uploader.pid, signal.SIGSTOP)
    remote.send(job(before={"samples/x": "x" * MANY_NBYTES}), segment, told)
    (stage.folder / "socket").unlink()
    assert told.wait().state == "committed"
    assert Snapshots(open_store(run)).latest().ref == R1
    uploader.kill()
    uploader.wait()
    stage.close()


class Hangs(MemoryStore):
    """A store whose puts of parts hang until the end."""

    def __init__(self):
        super().__init__(objects={})
        self.end = threading.Event()

    def put(self, key, data):
        if "/parts/" in key:
            self.end.wait(WAIT_S)
        super().put(key, data)


def test_an_uploader_with_a_job_that_stands_still_stops_its_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "STANDSTILL_S", 0.5)
    monkeypatch.setattr(liveness, "BEAT_S", 0.05)
    stage, store, told = Stage(tmp_path, 1 << 20), Hangs(), Told()
    server = UploadServer(store, stage.folder, 1 << 20, "m0001-x", NearbyConfig())
    threading.Thread(target=server.serve, daemon=True).start()
    remote = UploaderClient(stage.folder, 1, 0, InProcessSender(store, lambda job, outcome: None))
    UploaderHeartbeat(stage.folder, server.works)
    file = stage.folder / liveness.HEARTBEAT

    def beats():
        before = file.read_bytes()
        time.sleep(0.3)
        return file.read_bytes() != before

    assert beats()
    remote.send(job(), remote.segment(4000), told)
    worlds.until(lambda: not beats(), within_s=WAIT_S)
    assert not server.works()
    store.end.set()
    told.wait()
    server.stop()
    stage.close()


def test_silence_counts_while_the_agent_looks(tmp_path):
    watch = UploaderWatch(tmp_path)
    assert not watch.hung(0.0, hurried=False)
    (tmp_path / liveness.HEARTBEAT).write_bytes(b"1")
    assert not watch.hung(START_S, hurried=False)  # it has beaten
    assert not watch.hung(START_S + 1000.0, hurried=True)  # the agent itself was suspended
    assert watch.hung(START_S + 1000.0 + GAP_S, hurried=True)
    assert not watch.hung(START_S + 1000.0 + GAP_S, hurried=False)
    (tmp_path / liveness.HEARTBEAT).write_bytes(b"2")
    assert not watch.hung(START_S + 1001.0 + GAP_S, hurried=True)
