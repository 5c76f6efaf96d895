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


def environment():
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("HARNESS_", "SKYPILOT_"))}
    return mine | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}


def start(run, world=1, *flags, env=None, script=TRAINER):
    """`world` processes of the script on `run`; returns the Popen objects."""
    base, port = environment() | {"HARNESS_RUN": str(run)}, free_port()
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


class Nursery:
    """Many worlds, one after the other, of processes that are forked and not started: seconds cheaper per rank."""

    def __init__(self):
        command = [sys.executable, str(Path(__file__).parent / "nursery.py")]
        self.process = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.count = 0

    def train(self, run, world=1, *flags, env=None, codes=(0,), script=TRAINER, kill_after_s=None, timeout_s=120) -> Ended:
        """Run to the end; every exit code must be one of `codes`. `kill_after_s`: SIGKILL to every rank then."""
        self.count += 1
        log = Path(f"{run}.{self.count}.log")
        place = {"HARNESS_RUN": str(run), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env = {k: str(v) for k, v in (environment() | place | (env or {})).items()}
        job = {"script": str(script), "world": world, "flags": [str(f) for f in flags], "env": env, "log": str(log)}
        job |= {"kill_after_s": kill_after_s, "timeout_s": timeout_s}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        ended = Ended(json.loads(self.process.stdout.readline()), log.read_text())
        assert set(ended.codes) <= set(codes), ended.output
        return ended

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=10)
        self.process.stdout.close()


_nursery: list[Nursery] = []  # one for the process; it ends when its stdin does


def train(run, world=1, *flags, **kwargs) -> Ended:
    """`Nursery.train` in a nursery that all tests share."""
    if not _nursery:
        _nursery.append(Nursery())
    return _nursery[0].train(run, world, *flags, **kwargs)


def newest(run):
    return Snapshots(open_store(str(run))).latest()


def history(run) -> list[records.StepRecord]:
    """The committed step records of a run."""
    store = open_store(str(run))
    manifest = Snapshots(store).latest()
    named = manifest.data["samples"]
    return read_records(store, named["key"], named["head"], records.genesis(json.loads(store.get("run.json"))))
