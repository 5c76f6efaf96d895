"""Starts real worlds of real worker processes for the tests, with torchrun's environment but no agent."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from harness import records
from harness.journal import read_records
from storage.objects import open_store
from storage.snapshots import Snapshots

TRAINER = str(Path(__file__).parent / "trainer.py")
PRETRAIN = Path(__file__).parent.parent / "examples" / "pretrain.py"


@dataclass
class Ended:
    codes: list[int]
    output: str


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(run, world=1, *flags, env=None, script=TRAINER):
    """`world` processes of the script on `run`; returns the Popen objects."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("HARNESS_", "SKYPILOT_"))}
    base |= {"HARNESS_RUN": str(run), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    port = free_port()
    processes = []
    for rank in range(world):
        own = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
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


def finish(processes, timeout_s=120) -> Ended:
    outputs = [p.communicate(timeout=timeout_s)[0] for p in processes]
    return Ended([p.returncode for p in processes], "\n".join(outputs))


def train(run, world=1, *flags, env=None, codes=(0,)) -> Ended:
    """Run to the end; every exit code must be one of `codes`."""
    ended = finish(start(run, world, *flags, env=env))
    assert set(ended.codes) <= set(codes), ended.output
    return ended


class Nursery:
    """Many worlds, one after the other, of processes that are forked and not started: seconds cheaper per rank."""

    def __init__(self):
        script = str(Path(__file__).parent / "nursery.py")
        base = {k: v for k, v in os.environ.items() if not k.startswith(("HARNESS_", "SKYPILOT_"))}
        base |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen([sys.executable, script], env=base, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def train(self, run, world=1, *flags, env=None, codes=(0,), script=TRAINER, kill_after_s=None) -> Ended:
        """Like `train`; `kill_after_s`: SIGKILL to every rank then."""
        log = Path(f"{run}.log")
        place = {"HARNESS_RUN": str(run), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        job = {"script": str(script), "world": world, "flags": [str(f) for f in flags], "env": place | (env or {}), "log": str(log)}
        job["kill_after_s"] = kill_after_s
        print(json.dumps(job), file=self.process.stdin, flush=True)
        ended = Ended(json.loads(self.process.stdout.readline()), log.read_text())
        assert set(ended.codes) <= set(codes), ended.output
        return ended

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=10)
        self.process.stdout.close()


def newest(run):
    return Snapshots(open_store(str(run))).latest()


def history(run) -> list[records.StepRecord]:
    """The committed step records of a run."""
    store = open_store(str(run))
    manifest = Snapshots(store).latest()
    named = manifest.data["samples"]
    return read_records(store, named["key"], named["head"], records.genesis(__import__("json").loads(store.get("run.json"))))
