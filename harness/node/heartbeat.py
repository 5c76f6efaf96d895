"""A worker's heartbeat: a few bytes in a file that its session rewrites at every step, and the node
agent's watchdog on it.

The worker records its phase (`WorkerPhase`) and step; the agent, which must not rely on a hung
process to answer, only reads. It knows nothing of torch or the bucket. A script without a session
writes nothing and never counts as hung.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import signal
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from statistics import median
from typing import Any

# Conventions between the processes of one machine: death with the parent, names, signals, output.
# No torch.

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
# loaded here: a freshly forked child must not import or allocate much
LIBC = ctypes.CDLL(None, use_errno=True)
MESSAGE_NBYTES = 1 << 20
# The agent sends it to get a silent worker's stacks. Scripts use SIGUSR1 and SIGUSR2 themselves.
DUMP_SIGNAL: int = signal.SIGRTMIN + 2 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


def die_with_parent(parent: int | None = None) -> None:
    """Arrange to be killed when the parent dies, however it dies. Linux only; elsewhere there is no
    such call, and closing pipes must suffice.

    `parent`: its process id from before the fork, since it may have died before this call; then
    this process exits with 1. None: the current parent.
    """
    parent = os.getppid() if parent is None else parent
    with contextlib.suppress(OSError, AttributeError):
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """Set the name that `top` and `ps -o comm` show."""
    with contextlib.suppress(OSError, AttributeError):
        LIBC.prctl(PR_SET_NAME, name.encode()[:15])


def stacks_file(folder: Path, local_rank: int) -> Path:
    """Return the file that a worker appends its stacks to at `DUMP_SIGNAL`."""
    return folder / f"stacks-{local_rank}.txt"


class _LossyOutput(io.RawIOBase):
    """An output of this process that takes everything, and loses what `raw` does not take."""

    def __init__(self, raw: io.RawIOBase):
        self._raw = raw

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._raw.isatty()

    def fileno(self) -> int:
        return self._raw.fileno()

    def write(self, data: Any) -> int:
        try:
            return self._raw.write(data) or len(data)
        except OSError:
            return len(data)


def tolerate_full_logs() -> None:
    """Let words of this process be lost, instead of failing whoever says them, when the disk of its
    log is full or the reader of its output is gone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            raw = getattr(stream.buffer, "raw", stream.buffer)
            lossy = io.BufferedWriter(_LossyOutput(raw))
            told = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": True}
            setattr(sys, name, io.TextIOWrapper(lossy, **told))


WRITES = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
APPENDS = WRITES | os.O_APPEND
LAYOUT = struct.Struct("<qqqd")  # beats, step, place, time at which the step was recorded
REMEMBERED_STEPS = 50
FACTOR = 10.0  # a step may take this many times as long as the slowest remembered one
# a worker of which is known that it does no slow work may be silent for so many steps
SURE_STEPS, SURE_S = 3.0, 5.0  # ... and at least for so long


class WorkerPhase(IntEnum):
    """The phase of a worker's life. In those of `WAITS_FOR_OTHERS` its silence may be the fault of
    others."""

    START = 1  # until the process group is ready
    RESTORE = 2  # loading a snapshot
    COMPUTE = 3  # forward, backward, optimizer, and whatever the script does between two steps
    REDUCE = 4  # summing over ranks
    STAGING = 5  # copying the state to host memory
    SAVING = 6  # waiting for a snapshot to be committed
    LEAVING = 7
    ENDED = 8  # the script has ended with status 0 amid the training: waiting for the other ranks'


WAITS_FOR_SNAPSHOTS = (WorkerPhase.SAVING, WorkerPhase.LEAVING)
WAITS_FOR_OTHERS = (WorkerPhase.REDUCE, *WAITS_FOR_SNAPSHOTS, WorkerPhase.ENDED)


@dataclass(frozen=True)
class Sign:
    beats: int
    step: int
    place: WorkerPhase
    step_s: float = 0.0  # time at which this step was recorded, monotonic

    def packed(self) -> bytes:
        return LAYOUT.pack(self.beats, self.step, self.place, self.step_s)


class ProgressFile:
    """The worker's side of its heartbeat. `tell` costs one small write into the page cache."""

    def __init__(self, path: str | None):
        self.path = path or ""
        if path:
            clear(Path(path))
        self._fd = os.open(path, WRITES, 0o600) if path else -1
        self._beats, self._step, self._place, self._step_s = 0, 0, WorkerPhase.START, 0.0

    def tell(self, place: WorkerPhase | None = None, step: int | None = None) -> None:
        """Write a heartbeat, with the current `place` and `step` (None: unchanged)."""
        self._beats += 1
        self._place = self._place if place is None else place
        if step is not None and step != self._step:
            self._step, self._step_s = step, time.monotonic()
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # a full disk is no failure of the script
                os.pwrite(self._fd, self.sign.packed(), 0)

    @property
    def sign(self) -> Sign:
        return Sign(self._beats, self._step, self._place, self._step_s)


def clear(path: Path) -> None:
    """Make the file show no heartbeat. It keeps its space, as the disk may be full later."""
    with contextlib.suppress(OSError):
        fd = os.open(path, WRITES, 0o600)
        try:
            os.pwrite(fd, bytes(LAYOUT.size), 0)
        finally:
            os.close(fd)


def read(path: Path) -> Sign | None:
    """Return the last heartbeat in the file, or None if there is none yet."""
    try:
        beats, step, place, step_s = LAYOUT.unpack(path.read_bytes()[: LAYOUT.size])
    except (FileNotFoundError, struct.error):
        return None
    return Sign(beats, step, WorkerPhase(place), step_s) if beats else None


def process_state(pid: int) -> str:
    """Return the kernel's letter for the process: R, S, D, T (stopped), Z...; "" where /proc does
    not show it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def cpu_s(pid: int) -> float:
    """Return the CPU time that all threads of the process have used; 0.0 where /proc does not show
    it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0


def handles(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal, which else would kill it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.M)
    return bool(caught and int(caught[1], 16) >> (number - 1) & 1)


@dataclass(frozen=True)
class Limits:
    """Timeouts of a worker's heartbeat. `hang_after_s` None: ten times the slowest of the last
    steps, and at least `floor_s`, since a validation between two steps is silent as well; for a
    worker that waits for others at least `wait_s`, so that their agents can act first. Where slow
    work cannot be the reason: `stopped_s`, or less once steps' times are known."""

    hang_after_s: float | None = None
    floor_s: float = 300.0
    wait_s: float = 900.0
    stopped_s: float = 60.0  # stopped by a signal, or in a collective that others did not enter
    start_s: float = 1800.0  # start, resuming and the first two steps (which may compile)
    save_s: float = 900.0  # staging, waiting for a commit, leaving; a commit has its own timeout


@dataclass
class WorkerHeartbeat:
    """The node agent's view of one worker. All times are on the agent's monotonic clock.
    `patience`: factor on `floor_s` while the worker computes; the agent doubles it for each hang
    that it found before, so that slow work is not taken for a hang repeatedly. `usual_s`: how long
    steps took in the node's last generation (0: not known), until this one knows better."""

    path: Path
    limits: Limits
    patience: float = 1.0
    usual_s: float = 0.0
    sign: Sign | None = None
    since_s: float = 0.0  # when the sign last changed
    _step_s: float | None = None  # when the step last changed
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))

    def look(self, now: float) -> None:
        found = read(self.path)
        if found is None or found == self.sign:
            return
        if self.sign is not None and found.step != self.sign.step:
            if self._step_s is not None:
                self._steps.append((now - self._step_s) / max(1, found.step - self.sign.step))
            self._step_s = now
        self.sign, self.since_s = found, now

    def forgive(self, seconds: float) -> None:
        """Exclude `seconds` in which the agent itself was suspended from the worker's silence."""
        self.since_s += seconds
        if self._step_s is not None:
            self._step_s += seconds

    @property
    def step_ends_s(self) -> float | None:
        """The time at which the step under way ends, if it takes as long as the last one. None: no
        step's time is known."""
        return self._step_s + self._steps[-1] if self._steps and self._step_s is not None else None

    @property
    def step_s(self) -> float:
        """The usual time of a step in seconds; 0.0: not known."""
        return median(self._steps) if len(self._steps) > 1 else self.usual_s

    @property
    def sure_s(self) -> float:
        """The timeout of a silence in seconds where slow work cannot be the reason."""
        if self.limits.hang_after_s is not None:
            return self.limits.hang_after_s
        step_s = self.step_s
        known_s = max(SURE_S, SURE_STEPS * step_s) if step_s else self.limits.stopped_s
        return min(self.limits.stopped_s, known_s)

    def bound_s(self, stopped: bool = False) -> float:
        """Return the timeout of the current silence in seconds. `stopped`: the worker is stopped by
        a signal, so slow work cannot be the reason."""
        known = self.limits.hang_after_s
        if stopped:
            return self.sure_s
        if self.sign is None or self.sign.place in (WorkerPhase.START, WorkerPhase.RESTORE):
            return self.limits.start_s
        if self.sign.place in (WorkerPhase.STAGING, *WAITS_FOR_SNAPSHOTS, WorkerPhase.ENDED):
            return self.limits.save_s
        if known is not None:
            return known
        if len(self._steps) < 2:
            return self.limits.start_s
        floor_s = (
            self.limits.wait_s
            if self.sign.place in WAITS_FOR_OTHERS
            else self.limits.floor_s * self.patience
        )
        return max(floor_s, FACTOR * max(self._steps))

    def hung(self, now: float, state: str) -> str:
        """Return why the worker counts as hung, in words, or "" if it does not. A worker that never
        wrote a heartbeat only counts as hung when stopped. `state`: see `process_state`."""
        stopped = state == "T"
        if self.sign is None:
            if not stopped:
                self.since_s = now
                return ""
            where = "before its session began"
        else:
            where = f"in {self.sign.place.name.lower()} after step {self.sign.step}"
        silent_s, bound_s = now - self.since_s, self.bound_s(stopped)
        if silent_s <= bound_s:
            return ""
        how = " (stopped by a signal)" if stopped else f" (process state {state})" if state else ""
        return f"no sign of life for {silent_s:.0f} s {where}, bound {bound_s:.0f} s{how}"

    def awaited_s(self, now: float) -> float:
        """Return for how many seconds the worker has waited for ranks of other nodes, without a
        sign of life; 0.0: it does something else."""
        waits = self.sign is not None and self.sign.place in (WorkerPhase.START, WorkerPhase.REDUCE)
        return now - self.since_s if waits else 0.0

    def waits(self, state: str) -> bool:
        """Return whether a hung worker is in a phase in which it waits for others. `state`: see
        `process_state`."""
        return (
            state not in ("T", "D")
            and self.sign is not None
            and self.sign.place in WAITS_FOR_OTHERS
        )
