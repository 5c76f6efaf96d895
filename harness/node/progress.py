"""A worker's sign of life: a few bytes in a file that its session rewrites at every step, and how
its agent judges their silence.

The worker says where it is (`WorkerPhase`) and at which step; the agent, which must not trust a
hung process to answer, only reads. Knows nothing of torch or the bucket. A script without a session
says nothing and is never judged.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

LAYOUT = struct.Struct("<qqqd")  # beats, step, place, when the step was told
REMEMBERED_STEPS = 50
FACTOR = 10.0  # a step may take this many times as long as the slowest of the remembered ones


class WorkerPhase(IntEnum):
    """Where in its life a worker is. In REDUCE, SAVING and LEAVING it waits for others: its
    silence may be their fault."""

    START = 1  # until the process group stands
    RESTORE = 2  # loading a snapshot
    COMPUTE = 3  # forward, backward, optimizer, and whatever the script does between two steps
    REDUCE = 4  # summing over ranks
    STAGING = 5  # copying the state to host memory
    SAVING = 6  # waiting for a snapshot to be committed
    LEAVING = 7


WAITS_FOR_OTHERS = (WorkerPhase.REDUCE, WorkerPhase.SAVING, WorkerPhase.LEAVING)
WAITS_FOR_SNAPSHOTS = (WorkerPhase.SAVING, WorkerPhase.LEAVING)


@dataclass(frozen=True)
class Sign:
    beats: int
    step: int
    place: WorkerPhase
    step_s: float = 0.0  # when this step was told, monotonic

    def packed(self) -> bytes:
        return LAYOUT.pack(self.beats, self.step, self.place, self.step_s)


class ProgressFile:
    """The worker's side. `tell` costs one small write into the page cache."""

    def __init__(self, path: str | None):
        self.path = path or ""
        self._fd = (
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            if path
            else -1
        )
        self._beats, self._step, self._place, self._step_s = 0, 0, WorkerPhase.START, 0.0

    def tell(self, place: WorkerPhase | None = None, step: int | None = None) -> None:
        """Still alive; now at `place` and `step` (default: as before)."""
        self._beats += 1
        self._place = self._place if place is None else place
        if step is not None and step != self._step:
            self._step, self._step_s = step, time.monotonic()
        if self._fd >= 0:
            os.pwrite(self._fd, self.sign.packed(), 0)

    @property
    def sign(self) -> Sign:
        return Sign(self._beats, self._step, self._place, self._step_s)


def read(path: Path) -> Sign | None:
    """None: nothing was ever said there."""
    try:
        beats, step, place, step_s = LAYOUT.unpack(path.read_bytes()[: LAYOUT.size])
    except (FileNotFoundError, struct.error):
        return None
    return Sign(beats, step, WorkerPhase(place), step_s)


def state_of(pid: int) -> str:
    """The kernel's letter for the process: R, S, D, T (stopped), Z...; "" where /proc does not
    tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


@dataclass(frozen=True)
class Limits:
    """How long silence may last. `hang_after_s` None: ten times the slowest of the last steps, and
    at least `floor_s`, since a validation between two steps is silent as well. Who waits for others
    has `wait_s`: it is for their agents to act first."""

    hang_after_s: float | None = None
    floor_s: float = 300.0
    wait_s: float = 900.0
    stopped_s: float = 60.0  # by a signal: nothing slow can be the reason
    start_s: float = 1800.0  # start, resuming and the first two steps (compilers work there)
    save_s: float = 900.0  # staging, waiting for a commit, leaving; a commit has a bound of its own


@dataclass
class Pulse:
    """The agent's view of one worker. All times by the agent's monotonic clock. `patience`: times
    the bound while it computes; an agent that has found hangs before doubles it, lest slow work is
    taken for a hang again and again."""

    path: Path
    limits: Limits
    patience: float = 1.0
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
        """The agent itself stood still for so long; that is nobody's silence."""
        self.since_s += seconds
        if self._step_s is not None:
            self._step_s += seconds

    def bound_s(self, stopped: bool = False) -> float:
        """How long the present silence may last. `stopped`: by a signal, so nothing slow can be
        the reason."""
        known = self.limits.hang_after_s
        if stopped:
            return self.limits.stopped_s if known is None else known
        if self.sign is None or self.sign.place in (WorkerPhase.START, WorkerPhase.RESTORE):
            return self.limits.start_s
        if self.sign.place in (WorkerPhase.STAGING, WorkerPhase.SAVING, WorkerPhase.LEAVING):
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
        """In words, why it counts as hung; "" if it does not. A worker that never said anything
        is not judged unless stopped."""
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

    def waits(self, state: str) -> bool:
        """It hangs, but in a place where it waits for others."""
        return (
            state not in ("T", "D")
            and self.sign is not None
            and self.sign.place in WAITS_FOR_OTHERS
        )
