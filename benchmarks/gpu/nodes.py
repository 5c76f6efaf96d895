"""Agents, and trainings without one, as processes; what their trainer marked."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.bench import Process, process

TRAINER = Path(__file__).with_name("trainer.py")


@dataclass(frozen=True)
class Mark:
    t: float  # time.time()
    what: str
    step: int
    world: int
    rank: int
    pid: int


@dataclass
class Nodes:
    """A run in `folder`, and the nodes that train it."""

    folder: Path
    steps: int
    every: int
    processes: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "marks").mkdir(parents=True)

    def agent(self, nproc: int, **env: object) -> Process:
        """Start a node of ours."""
        n = len(self.processes) + 1
        words = ["-m", "harness.cli", "run", "--run", str(self.folder / "run")]
        more = ["--nproc", str(nproc), "--notices", "none", "--set", "dead_s=10", "--"]
        node = {"HARNESS_NODE_DIR": self.folder / f"node{n}", "HARNESS_ATTEMPT": n}
        return self._start([*words, *more, str(TRAINER), "ours"], **node, **env)

    def plain(self, nproc: int = 1) -> Process:
        """Start the training without us: a script, or torchrun with its best settings."""
        if nproc == 1:
            return self._start([str(TRAINER), "plain"])
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=9"]
        return self._start([*torchrun, f"--nproc-per-node={nproc}", str(TRAINER), "plain"])

    def _start(self, words: list[str], **env: object) -> Process:
        log = self.folder / f"node{len(self.processes) + 1}.log"
        begun = process([*words, str(self.folder), str(self.steps), str(self.every)], log, **env)
        self.processes.append(begun)
        return begun

    def marks(self) -> list[Mark]:
        found = []
        for path in (self.folder / "marks").glob("*.log"):
            for line in path.read_text().split("\n")[:-1]:
                found.append(Mark(*json.loads(line), pid=int(path.stem)))
        return sorted(found, key=lambda mark: mark.t)

    def until(self, wanted: Callable[[Mark], bool], limit_s: float) -> Mark:
        """Return the first mark that is wanted. Raises RuntimeError, with the ends of the logs,
        after `limit_s` or when all processes have ended."""
        ends_s = time.monotonic() + limit_s
        while True:
            over = all(p.poll() is not None for p in self.processes)
            if found := next(filter(wanted, self.marks()), None):
                return found
            if over or time.monotonic() > ends_s:
                raise RuntimeError(f"waited in vain for {limit_s:.0f} s: {self.tail()}")
            time.sleep(0.02)

    def weights(self, limit_s: float) -> str:
        """Wait for the end of every process that has not been killed; return the hash of the
        weights. Raises RuntimeError if there is none, or a process failed."""
        ends_s = time.monotonic() + limit_s
        for begun in self.processes:
            try:
                code = begun.wait(max(0.1, ends_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"not at its end in {limit_s:.0f} s: {self.tail()}") from None
            if code not in (0, -9):
                raise RuntimeError(f"a node ended with {code}: {self.tail()}")
        return (self.folder / "weights").read_text()

    def tail(self) -> str:
        logs = sorted(self.folder.glob("node*.log"))
        return "\n".join(f"{p.name}: {p.read_text(errors='replace')[-1500:]}" for p in logs)

    def close(self) -> None:
        for begun in self.processes:
            begun.kill()
            begun.wait()
