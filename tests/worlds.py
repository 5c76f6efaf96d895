"""Starts real worlds of real worker processes for the tests, with torchrun's environment but no agent."""

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


def newest(run):
    return Snapshots(open_store(str(run))).latest()


def history(run) -> list[records.StepRecord]:
    """The committed step records of a run."""
    store = open_store(str(run))
    manifest = Snapshots(store).latest()
    named = manifest.data["samples"]
    return read_records(store, named["key"], named["head"], records.genesis(__import__("json").loads(store.get("run.json"))))
