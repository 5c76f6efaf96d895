"""A node's workers: started from its warm process, read, judged by their signs of life, ended.

Knows processes, files and the environment that torchrun's scripts expect; decides nothing about
epochs.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness.agent import flight
from harness.agent.config import AgentConfig
from harness.agent.ends import WorkerEnd
from harness.agent.nursery import Forked, Nursery
from harness.bucket.layout import NO_EPOCH, Epoch
from harness.core.facts import Fact, WorkerHung
from harness.core.masking import masked_line
from harness.node import marks, progress
from harness.node.marks import Want
from harness.node.processes import DUMP_SIGNAL

TAIL_LINES = 40
# for a killed worker to be gone; after that the kernel holds it, and the node is unfit
KILL_S = 20.0
DUMP_S = 1.0  # for a hung worker to write where it hangs


@dataclass
class Worker:
    process: Forked
    error_file: Path
    rank: int
    pulse: progress.Pulse
    tail: deque[str]
    reader: threading.Thread  # of what it prints
    hung: str = ""  # in words, when it was killed for that
    guilty: bool = False  # of the hang; else it was waiting for others
    ended_by_us: bool = False  # it was still at work

    @property
    def code(self) -> int:
        """Of its end. One that even SIGKILL did not end counts as killed."""
        return -signal.SIGKILL if self.process.returncode is None else self.process.returncode

    @property
    def failed_s(self) -> float:
        """When its error was written; of use only beside those of this node's other workers."""
        with contextlib.suppress(OSError):
            return self.error_file.stat().st_mtime_ns / 1e9
        return float("inf")

    def seen(self) -> WorkerEnd:
        """Of its end, or of its being at work."""
        at_work = self.process.poll() is None
        error, text = ("", "") if at_work and not self.hung else self.failure()
        return WorkerEnd(
            self.rank,
            self.code,
            error,
            text,
            self.failed_s,
            at_work,
            self.hung,
            self.guilty,
            self.ended_by_us,
            tuple(self.tail),
        )

    def failure(self) -> tuple[str, str]:
        """Type and text of what ended it, from its error file, else from its exit code."""
        code = self.code
        if self.hung:
            return "Hung", self.hung
        with contextlib.suppress(OSError, ValueError, KeyError):
            message = json.loads(self.error_file.read_text())["message"]
            return str(message["type"]), masked_line(str(message["text"]))
        if code < 0:
            return signal.Signals(-code).name, f"killed by {signal.Signals(-code).name}"
        return "exit", f"exit code {code}"


class Workers:
    """Those of one epoch, and the warm process that they are forked from. `record`: takes facts."""

    def __init__(self, config: AgentConfig, member: str, record: Callable[[Fact], None]):
        self._config, self._member, self._record = config, member, record
        self._mark_path = config.node_dir / "mark.json"
        self._epoch: Epoch = NO_EPOCH
        self._warm: Nursery | None = None
        self.all: list[Worker] = []

    # ---- the warm process ------------------------------------------------------------------------
    @property
    def _nursery(self) -> Nursery:
        if self._warm is None:
            self._warm = self._new_nursery()
        return self._warm

    def _new_nursery(self) -> Nursery:
        env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
        if self._config.addr.startswith("127."):
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return Nursery(env)

    def warm(self) -> bool:
        """Can they be started without an import?"""
        return self._nursery.warm()

    def warm_up(self) -> None:
        """See to it that there is a warm process to fork from: the last one may have been
        killed."""
        if self._nursery.ended():
            self._warm = self._new_nursery()

    def close(self) -> None:
        """End the warm process, and with it all workers."""
        self._nursery.close()

    # ---- start -----------------------------------------------------------------------------------
    def clear_signs(self) -> None:
        """Nothing is left of the last epoch's mark and signs of life."""
        signs = [self._sign(i) for i in range(self._config.nproc)]
        for path in (self._mark_path, self._attached_path, *signs):
            path.unlink(missing_ok=True)
        flight.clear(self._config.node_dir)

    def start(self, epoch: Epoch, stage: Path, patience: float) -> None:
        """All of this node's in `epoch`. `patience`: see `progress.Pulse`."""
        self.warm_up()
        self._epoch = epoch
        self.all = [
            self._start(rank, local_rank, stage, patience)
            for local_rank, rank in enumerate(epoch.ranks(self._member))
        ]

    def _start(self, rank: int, local_rank: int, stage: Path, patience: float) -> Worker:
        sign = self._sign(local_rank)
        error_file = self._config.node_dir / f"error-{secrets.token_hex(4)}.json"
        env = {
            **self._environment(rank, local_rank),
            "HARNESS_STAGE": stage,
            "HARNESS_PROGRESS": sign,
            "TORCHELASTIC_ERROR_FILE": error_file,
        }
        process, out = self._nursery.fork(
            {"env": {k: str(v) for k, v in env.items()}, "argv": self._config.argv}
        )
        limits = self._config.fitness.hang
        pulse = progress.Pulse(sign, limits, patience, since_s=time.monotonic())
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        reader = threading.Thread(target=_read, args=(rank, out, tail), daemon=True)
        reader.start()
        return Worker(process, error_file, rank, pulse, tail, reader)

    def _environment(self, rank: int, local_rank: int) -> dict[str, object]:
        """What torchrun would tell it, and what a session asks for."""
        epoch = self._epoch
        speeds = [
            speed for speed, n in zip(epoch.speeds, epoch.nproc, strict=True) for _ in range(n)
        ]
        config = self._config
        recorder = flight.environment(config.node_dir, os.environ) if config.fitness.flights else {}
        return {
            **recorder,
            "RANK": rank,
            "WORLD_SIZE": epoch.world,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self._config.nproc,
            "GROUP_RANK": epoch.members.index(self._member),
            "GROUP_WORLD_SIZE": len(epoch.members),
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": epoch.world,
            "ROLE_NAME": "default",
            "MASTER_ADDR": epoch.addr,
            "MASTER_PORT": epoch.port,
            "TORCHELASTIC_RUN_ID": "harness",
            "TORCHELASTIC_RESTART_COUNT": epoch.epoch - 1,
            "TORCHELASTIC_MAX_RESTARTS": 1_000_000,
            "HARNESS_RUN": self._config.run,
            "HARNESS_REPLICA": self._config.beside.replica,
            "HARNESS_REPLICA_RANKS": epoch.replica_ranks,
            "HARNESS_MESH": epoch.mesh,
            "HARNESS_MESHES": config.worlds.meshes or "",
            "HARNESS_WORLDS": ",".join(map(str, config.worlds.ranks)),
            "HARNESS_EPOCH": epoch.epoch,
            "HARNESS_MARK": self._mark_path,
            "HARNESS_SPEEDS": json.dumps(speeds),
            "HARNESS_EPOCH_REASON": epoch.reason,
            "HARNESS_PLACE": config.place,
        }

    def _sign(self, local_rank: int) -> Path:
        return self._config.node_dir / f"progress-{local_rank}"

    @property
    def _attached_path(self) -> Path:
        return self._mark_path.with_name("attached")

    def seen(self) -> list[WorkerEnd]:
        """All of them, as they are now."""
        return [w.seen() for w in self.all]

    def at_work(self) -> int:
        """How many of them are."""
        return sum(w.process.poll() is None for w in self.all)

    # ---- what they say ---------------------------------------------------------------------------
    def attached(self) -> bool:
        """Has the script a session?"""
        return self._attached_path.exists()

    def signs(self) -> list[progress.Sign]:
        """The last ones, of those that ever gave one."""
        return [w.pulse.sign for w in self.all if w.pulse.sign is not None]

    def forgive(self, seconds: float) -> None:
        """The agent itself stood still for so long."""
        for worker in self.all:
            worker.pulse.forgive(seconds)

    def mark(self, want: Want, why: str, deadline_s: float | None) -> None:
        """Leave a mark; NOTHING: take it away. It is a file: any person or program may leave
        one, and no signal handler is needed."""
        if want is Want.NOTHING:
            self._mark_path.unlink(missing_ok=True)
        else:
            marks.write(self._mark_path, want, why, deadline_s)

    def signal(self, name: str) -> None:
        """Send "USR1" (or "SIGUSR1") to those that run."""
        for worker in self.all:
            if worker.process.poll() is None:
                worker.process.send_signal(getattr(signal, f"SIG{name.removeprefix('SIG')}"))

    def find_hung(self, now: float) -> list[Worker]:
        """Name workers that give no sign of life, and have them write down where they hang."""
        hung: list[Worker] = []
        for worker in self.all:
            if worker.process.poll() is not None:
                continue
            worker.pulse.look(now)
            state = (
                progress.state_of(worker.process.pid)
                if now - worker.pulse.since_s > worker.pulse.bound_s(stopped=True)
                else ""
            )
            if what := worker.pulse.hung(now, state):
                worker.hung = what
                hung.append(worker)
                self._report_hung(worker, now, state)
        if hung:
            folder = self._config.node_dir
            asked = flight.ask(folder, [w.rank for w in self.all if w.process.poll() is None])
            deadline_s = time.monotonic() + DUMP_S
            # a stopped one writes nothing; the bound is for that
            while time.monotonic() < deadline_s:
                time.sleep(0.1)
            flight.wait(folder, asked)
        return hung

    def _report_hung(self, worker: Worker, now: float, state: str) -> None:
        pulse = worker.pulse
        sign = pulse.sign or progress.Sign(0, 0, progress.WorkerPhase.START)
        worker.guilty = not pulse.waits(state)
        self._record(
            WorkerHung(
                self._member,
                self._epoch.epoch,
                worker.rank,
                sign.step,
                sign.place.name.lower(),
                now - pulse.since_s,
                worker.guilty,
                worker.hung,
            )
        )
        print(
            f"harness run: rank {worker.rank} hangs: {worker.hung}; it is asked for its stacks, "
            "then ended",
            flush=True,
        )
        if state != "T":
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(DUMP_SIGNAL)

    # ---- end -------------------------------------------------------------------------------------
    def end(self) -> list[int]:
        """Kill those that are still at work. Ranks that even this does not end, within bounds."""
        for worker in self.all:
            worker.ended_by_us = worker.process.poll() is None
            worker.process.kill(KILL_S)
            # let its last words through; bounded, as a grandchild may hold the pipe open
            worker.reader.join(2.0)
        return [w.rank for w in self.all if w.process.returncode is None]

    def flights(self) -> list[flight.FlightDump]:
        """What NCCL's flight recorders have written, each once."""
        steps = {w.rank: w.pulse.sign.step if w.pulse.sign else 0 for w in self.all}
        return flight.collect(self._config.node_dir, steps)


def _read(rank: int, stream: IO[bytes], tail: deque[str]) -> None:
    with stream:
        for raw in stream:
            line = masked_line(raw.decode(errors="replace").rstrip("\n"))
            tail.append(line)
            print(f"[{rank}] {line}", flush=True)
