"""Plain torchrun with the rendezvous in the bucket: nodes join, are killed, and finish; no
node's loss ends the run."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import fsspec
import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from harness.bucket.layout import closed_key
from harness.rendezvous.torchrun import BucketRendezvous
from storage.stores.store_urls import open_store
from support.worlds import until

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, pathlib, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world, folder = dist.get_rank(), dist.get_world_size(), pathlib.Path(sys.argv[1])
at = torch.tensor([int((folder / "step").read_text()) if (folder / "step").exists() else 0])
dist.broadcast(at, 0)
step = int(at)
while True:
    one = torch.ones(1)
    dist.all_reduce(one)
    assert int(one) == world
    step += 1
    end = torch.tensor([(folder / "end").exists()], dtype=torch.int)
    dist.broadcast(end, 0)
    if rank == 0:
        with open(folder / "steps", "a") as f:
            f.write(json.dumps([step, world, os.environ["HARNESS_EPOCH"], os.environ["HARNESS_RUN"]]) + "\\n")
        (folder / "new").write_text(str(step))
        os.replace(folder / "new", folder / "step")  # whole or not at all: we are killed at any moment, also before it
    if int(end) and step >= 5:  # all of them after the same step
        break
    time.sleep(0.05)
"""


@pytest.fixture
def torchruns(tmp_path):
    """Starts torchrun agents that find the backend by the entry point which pyproject.toml
    names."""
    (entry,) = re.findall(
        r'entry-points."torchrun.handlers"\]\n(\w+) = "(.+)"', (ROOT / "pyproject.toml").read_text()
    )
    info = tmp_path / "path" / "backend_under_test-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: backend-under-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[torchrun.handlers]\n{entry[0]} = {entry[1]}\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    base = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("HARNESS_", "TORCH", "RANK", "WORLD_SIZE"))
    }
    base |= {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path / 'path'}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    started = []

    def start():
        words = [
            "--rdzv-backend=bucket",
            f"--rdzv-endpoint=file://{tmp_path}/runs",
            "--rdzv-id=x",
            "--nnodes=1:3",
            "--max-restarts=9",
        ]
        words += [
            "--nproc-per-node=1",
            "--local-addr=127.0.0.1",
            "--shutdown-timeout=5",
            str(tmp_path / "script.py"),
            str(tmp_path),
        ]
        with open(tmp_path / f"log{len(started)}", "wb") as log:
            command = [sys.executable, "-m", "torch.distributed.run", *words]
            started.append(
                subprocess.Popen(command, env=base, stdout=log, stderr=log, start_new_session=True)
            )
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def kill_node(agent):
    """The agent and its workers, at once."""
    import psutil

    everything = [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]
    for process in everything:
        with contextlib.suppress(psutil.Error):
            process.kill()
    agent.wait()


@pytest.mark.proof
def test_nodes_join_the_one_with_rank_0_is_killed_and_the_run_finishes(torchruns, tmp_path):
    def steps():
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(x) for x in (tmp_path / "steps").read_text().splitlines()]
        return []

    def logs():
        return "\n".join(
            f"--- {p.name}\n{p.read_text()[-4000:]}" for p in sorted(tmp_path.glob("log*"))
        )

    first = torchruns()
    until(lambda: len(steps()) > 3, logs, 240)
    second = torchruns()
    until(lambda: steps()[-1][1] == 2, logs, 240)  # it has joined, and nothing has failed for it
    assert first.poll() is None
    kill_node(first)  # it hosted the store and the master port
    alone = len(steps())
    until(lambda: len(steps()) > alone + 3 and steps()[-1][1] == 1, logs, 240)
    third = torchruns()
    until(lambda: steps()[-1][1] == 2, logs, 240)
    (tmp_path / "end").touch()
    assert second.wait(240) == 0 and third.wait(240) == 0, logs()
    numbers = [s[0] for s in steps()]
    # no step was lost; one may be done again
    assert all(b - a in (0, 1) for a, b in itertools.pairwise(numbers)), numbers
    epochs = [int(s[2]) for s in steps()]
    assert epochs == sorted(epochs) and len(set(epochs)) >= 4
    assert {s[3] for s in steps()} == {f"file://{tmp_path}/runs/x"}
    assert len(open_store(f"{tmp_path}/runs/x").list("rdzv/closed/")) == 1


@pytest.fixture(params=["file", "s3"])
def bucket(request, tmp_path):
    """URL of a run, and options for its store. Handlers tell the workers of their process the run."""
    with mock.patch.dict(os.environ):
        yield from place(request, tmp_path)


def place(request, tmp_path):
    if request.param == "file":
        yield f"{tmp_path}/runs/x", {}
        return
    server = pytest.importorskip("moto.server").ThreadedMotoServer(
        ip_address="127.0.0.1", port=0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "test", "secret": "test", "endpoint_url": f"http://{host}:{port}"}
    with contextlib.suppress(FileExistsError):  # moto's servers of one process share their buckets
        fsspec.filesystem("s3", skip_instance_cache=True, **options).mkdir("my-bucket")
    yield "s3://my-bucket/runs/x", options
    server.stop()


class Agents:
    """Handlers as torch's agents use them, a thread each."""

    def __init__(self, url, options):
        self.url, self.options, self.made = url, options, []

    def make(self, **options):
        options = {"max_nodes": 4, "beat_s": 0.3, "dead_s": 3.0, "join_timeout_s": 60.0, **options}
        self.made.append(
            BucketRendezvous(open_store(self.url, **self.options), "x", "127.0.0.1", **options)
        )
        return self.made[-1]

    def meet(self, *handlers):
        """All of them ask for the next epoch; what each gets."""
        got = [None] * len(handlers)

        def ask(i, handler):
            try:
                info = handler.next_rendezvous()
                info.store.set(f"rank{info.rank}", str(i))
                got[i] = (
                    info.rank,
                    info.world_size,
                    info.bootstrap_store_info.master_port,
                    info.store,
                )
            except Exception as e:
                got[i] = e

        threads = [threading.Thread(target=ask, args=(i, h)) for i, h in enumerate(handlers)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(90)
        return got


def test_handlers_meet_in_a_store_of_each_epochs_own(bucket):
    agents = Agents(*bucket)
    a, b = agents.make(), agents.make()
    got = agents.meet(a, b)
    assert (
        sorted(g[0] for g in got) == [0, 1]
        and {g[1] for g in got} == {2}
        and len({g[2] for g in got}) == 1
    ), got
    assert a.num_nodes_waiting() == b.num_nodes_waiting() == 0
    c = agents.make()
    waits = threading.Thread(target=lambda: agents.meet(c))
    waits.start()
    until(
        lambda: a.num_nodes_waiting() == 1 and b.num_nodes_waiting() == 1,
        "both to see who waits",
        60,
    )
    again = agents.meet(a, b)
    waits.join(60)
    assert {g[1] for g in again} == {3}
    for _, _, _, store in again:
        assert store.check(["rank0"])  # said again in this epoch
    first = a if again[0][0] == 0 else b
    other = b if first is a else a
    first._lines.close()  # it hosts the store; to the others it is dead
    first._rendezvous._stop.set()
    first._stop.set()
    until(lambda: other.num_nodes_waiting() > 0 and c.num_nodes_waiting() > 0, "both to notice", 60)
    assert {g[1] for g in agents.meet(other, c)} == {2}
    assert not c.is_closed()
    other.shutdown()
    assert c.is_closed() and c.num_nodes_waiting() == 0
    assert isinstance(agents.meet(c)[0], RendezvousClosedError)
    c.shutdown()
    assert open_store(agents.url, **agents.options).list("rdzv/closed/") == [closed_key(3)]
    later = agents.make()  # the same command again: a new life, not a closed door
    assert agents.meet(later)[0][:2] == (0, 1)
    later.shutdown()


def test_an_agent_waits_for_a_slow_bucket_without_spinning(tmp_path):
    agents = Agents(f"{tmp_path}/runs/x", {})
    handler = agents.make(join_timeout_s=1.0)
    looks, asked, answered = itertools.count(), threading.Event(), threading.Event()

    class Changed(threading.Event):
        def wait(self, timeout=None):
            next(looks)
            return super().wait(timeout)

    def get(key, *rest, _get=handler._store.get):
        asked.set()
        answered.wait(60)
        return _get(key, *rest)

    handler._lines.changed = Changed()
    handler._store.get = get
    got = []
    asks = threading.Thread(target=lambda: got.extend(agents.meet(handler)), daemon=True)
    asks.start()
    assert asked.wait(60)
    # somebody's word, which `next_rendezvous` will hear when the bucket has answered
    handler._lines.changed.set()
    time.sleep(1.0)
    seen = next(looks)
    answered.set()
    asks.join(60)
    handler.shutdown()
    assert got and seen < 50
