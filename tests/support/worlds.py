"""Starts real worlds of real worker processes for the tests, with torchrun's environment but no
agent."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.bucket.journal import read_records
from harness.core import step_records
from harness.node import forkserver
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store

TRAINER = str(Path(__file__).parent / "trainer.py")
PRETRAIN = Path(__file__).parents[2] / "examples" / "pretrain.py"


@dataclass
class Ended:
    codes: list[int]
    output: str


def until(condition, what="a condition", within_s=120.0, every_s=0.01):
    """What `condition` says, when that is true. `what`: for whoever reads why it failed; text,
    or what makes it."""
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, (
            f"waited {within_s} s for {what() if callable(what) else what}"
        )
        time.sleep(every_s)
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def fork(world, work, what=""):
    """`work(rank)` in so many processes, forked from this one; every one must end well.
    `what`: for whoever reads that one did not."""
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work(rank)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * world, (what, codes)


def environment():
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("HARNESS_", "SKYPILOT_"))}
    return mine | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a worker that aborts says where
        "HARNESS_LOOK_AGAIN_S": "0,0",
    }


def start(run, world=1, *flags, env=None, script=TRAINER):
    """`world` processes of the script on `run`; returns the Popen objects."""
    base, port = environment() | {"HARNESS_RUN": str(run)}, free_port()
    processes = []
    for rank in range(world):
        own = {
            "RANK": rank,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, script, *map(str, flags)],
                env=base | {k: str(v) for k, v in own.items()} | (env or {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return processes


def newer(run, step, processes):
    """The first snapshot behind `step` of a run that these processes train. Fails, with what they
    said, if one of them has ended badly before."""

    def found():
        if (snapshot := newest(run)) and snapshot.step > step:
            return snapshot
        codes = [p.poll() for p in processes]
        assert not any(codes), (codes, [p.communicate(timeout=60)[0] for p in processes if p.poll()])
        return None

    return until(found, f"a snapshot behind step {step}")


def finish(processes, timeout_s=240) -> Ended:
    outputs = [p.communicate(timeout=timeout_s)[0] for p in processes]
    return Ended([p.returncode for p in processes], "\n".join(outputs))


class Nursery:
    """Many worlds, one after the other, of processes that are forked as an agent forks them:
    seconds cheaper per rank."""

    def __init__(self):
        self._warm = forkserver.ForkServerClient(environment())

    def train(
        self,
        run,
        world=1,
        *flags,
        env=None,
        codes=(0,),
        script=TRAINER,
        kill_after_s=None,
        timeout_s=240,
    ) -> Ended:
        """Run to the end; every exit code must be one of `codes`. `kill_after_s`: SIGKILL to
        every rank then."""
        base = environment() | {
            "HARNESS_RUN": str(run),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        base |= {"LOCAL_RANK": "0", "WORLD_SIZE": str(world)} | {
            k: str(v) for k, v in (env or {}).items()
        }
        argv = [str(script), *map(str, flags)]
        ranks, streams = zip(
            *(
                self._warm.fork({"env": base | {"RANK": str(rank)}, "argv": argv})
                for rank in range(world)
            ),
            strict=True,
        )
        with ThreadPoolExecutor(world) as threads:
            outputs = threads.map(lambda stream: stream.read().decode(), streams)
            kill_at_s = time.monotonic() + (timeout_s if kill_after_s is None else kill_after_s)
            for rank in ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.wait(max(0.0, kill_at_s - time.monotonic()))
            for rank in ranks:
                rank.send_signal(signal.SIGKILL)  # all at once: none fails for another's end
            for rank in ranks:
                rank.kill(10)
            ended = Ended([rank.returncode for rank in ranks], "\n".join(outputs))
        for stream in streams:
            stream.close()
        assert set(ended.codes) <= set(codes), ended.output
        return ended

    def close(self):
        self._warm.close()


_nursery: list[Nursery] = []  # one for the process, and it dies with it


def train(run, world=1, *flags, **kwargs) -> Ended:
    """`ForkServerClient.train` in a nursery that all tests share."""
    if not _nursery:
        _nursery.append(Nursery())
    return _nursery[0].train(run, world, *flags, **kwargs)


def newest(run):
    return Snapshots(open_store(str(run))).latest()


def history(run) -> list[step_records.StepRecord]:
    """The committed step records of a run."""
    store = open_store(str(run))
    manifest = Snapshots(store).latest()
    named = manifest.data["samples"]
    return read_records(
        store, named["key"], named["head"], step_records.genesis(json.loads(store.get("run.json")))
    )


def same_training(run, other):
    """Samples to the bit, losses and norms closely."""
    mine, theirs = history(run), history(other)
    assert [r.digest for r in mine] == [r.digest for r in theirs]
    assert [r.samples for r in mine] == [r.samples for r in theirs]
    assert [r.weight for r in mine] == [r.weight for r in theirs]
    assert [r.loss for r in mine] == pytest.approx([r.loss for r in theirs], rel=1e-4)
    assert [r.metrics["grad_norm"] for r in mine] == pytest.approx(
        [r.metrics["grad_norm"] for r in theirs], rel=1e-3
    )
