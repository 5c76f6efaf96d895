"""Marks: requests of a node agent, a person or a program to the workers, handled at their next step
boundary. Both ends: the agent writes, each worker reads.

A mark is one small JSON file beside the agent, so no signal handler is needed; `touch mark.json` is
enough for a person (an empty or malformed mark means: drain). It is allocated beforehand, as the
disk may be full by then; where even that fails, workers get a signal. It knows nothing of torch,
clouds or the bucket.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

from harness.core.world import DRAINED, RESIZE, STOPPED
from harness.node.heartbeat import handles


class Want(IntEnum):
    """The request of a mark; the greatest one wins. From GROW on, they end the generation after a
    committed snapshot; GROW, where that is possible, with a state that the nodes keep instead."""

    NOTHING = 0
    KEEP_AHEAD = 1  # of workers only: the nodes keep the state in memory, and training goes on
    SNAPSHOT = 2
    GROW = 3  # all workers leave, and come back with newcomers
    RESIZE = 4  # all workers leave; the agents decide which come back
    DRAIN = 5  # all workers leave, to be continued elsewhere
    STOP = 6  # all workers leave, and none comes back automatically


# in the node's folder: the mark, the file by which a worker shows that it reads it, and the one
# that shows that optimizers step in a worker without a session
MARK, ATTACHED, UNADOPTED = "mark.json", "attached", "unadopted"
STAYS = "stays"  # the file by which workers show that their processes go on in the next world
MARK_NBYTES = 4096  # of a mark's file, padded with spaces: one block of a disk
MOST_WHY = 400  # characters of a reason, so that a mark fits
WAITING = (Want.SNAPSHOT, Want.GROW)  # while a snapshot is in flight, these wait
EXIT_CODE = {Want.GROW: RESIZE, Want.RESIZE: RESIZE, Want.DRAIN: DRAINED, Want.STOP: STOPPED}


# what the agent writes there: after KEEP a worker may wait for the next world, instead of ending
KEEP, KEEP_AND_END = b"k", b"e"


def keep_pipe(folder: Path, local_rank: int) -> Path:
    """Return the pipe in the node's folder through which the agent asks a worker to keep its
    state."""
    return folder / f"keep-{local_rank}"


# in the stage: the states that a node keeps (worker/resuming/kept_state.py), one for each place in
# a copy of the model
KEPT = "kept-{}.json"


def kept_step(stage: Path) -> int:
    """Return the newest step of which this node keeps a state; -1: it keeps none."""
    steps = [-1]
    for path in stage.glob(KEPT.format("*")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            steps.append(int(json.loads(path.read_text())["step"]))
    return max(steps)


def keeping_file(folder: Path, local_rank: int) -> Path:
    """Return the file by which a worker shows that it is keeping its state."""
    return folder / f"keeping-{local_rank}"


# The signal by which a worker that handles it gets a request that cannot be written. Real-time
# signals, which scripts, libraries and batch systems leave alone.
SIGNALS: dict[Want, int] = (
    {want: signal.SIGRTMIN + 8 + want for want in Want if want}
    if hasattr(signal, "SIGRTMIN")
    else {}
)


@dataclass(frozen=True)
class Mark:
    want: Want
    why: str
    deadline_s: float | None = None  # wall clock
    id: str = ""


class MarkedProcess(Protocol):
    """A worker that reads the mark."""

    pid: int

    def send_signal(self, number: int) -> None: ...


class MarkFile:
    """The agent's end of the mark, which needs no space on the disk when it is needed.

    Spare files of one block are allocated beforehand; a mark is a spare that was written in place
    and renamed, so a reader never sees half a mark. What cannot be written all the same reaches
    the workers by signal, and is tried again by `write_again`. `processes`: those that read it.
    """

    def __init__(self, path: Path, processes: Callable[[], Iterable[MarkedProcess]] = tuple):
        self.path, self._processes = path, processes
        self._signalled: set[tuple[str, int]] = set()  # marks and the processes that got them
        self._spares = [path.with_suffix(f".spare{i}") for i in (1, 2)]
        self._unwritten: Mark | None = None
        self._allocate()

    def write(self, want: Want, why: str, deadline_s: float | None) -> None:
        """Write the mark; NOTHING: remove it."""
        self._unwritten = Mark(want, why[:MOST_WHY], deadline_s, secrets.token_hex(4))
        self.write_again()

    def write_again(self) -> None:
        """Write the last mark if it could not be written yet."""
        if (mark := self._unwritten) is None:
            return
        try:
            if mark.want is Want.NOTHING:
                self._remove()
            else:
                self._press(json.dumps(asdict(mark)).encode().ljust(MARK_NBYTES))
            self._unwritten = None
        except OSError as e:
            self._signal(mark, e)

    def _signal(self, mark: Mark, error: OSError) -> None:
        """Send the request, once, to each process that handles its signal."""
        if (mark.id, 0) not in self._signalled:
            self._signalled.add((mark.id, 0))
            print(
                f"harness run: {self.path} cannot be written ({error.strerror}): workers get the "
                f"request ({mark.want.name.lower()}) by signal; make room there",
                flush=True,
            )
        number = SIGNALS.get(mark.want, 0)
        for process in self._processes():
            told = (mark.id, process.pid)
            if number and told not in self._signalled and handles(process.pid, number):
                self._signalled.add(told)
                process.send_signal(number)

    def _press(self, body: bytes) -> None:
        if not any(spare.exists() for spare in self._spares):
            self._allocate()
        spare, other = sorted(self._spares, key=lambda path: not path.exists())
        with open(spare, "r+b") as f:
            f.write(body)
        if not other.exists():  # the mark that this one replaces is the next spare
            with contextlib.suppress(FileNotFoundError):
                os.link(self.path, other)
        spare.replace(self.path)

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            missing = [spare for spare in self._spares if not spare.exists()]
            self.path.replace(missing[0]) if missing else self.path.unlink()
        self._allocate()

    def _allocate(self) -> None:
        """Make every spare whole, as far as the disk has space."""
        with contextlib.suppress(OSError):
            for spare in self._spares:
                if not spare.exists() or spare.stat().st_size != MARK_NBYTES:
                    spare.write_bytes(bytes(MARK_NBYTES))


class MarkReader:
    """A worker's end: reads the mark between two steps, and costs one stat() when nothing has
    changed."""

    def __init__(self, path: Path | None):
        self._path, self._stamp, self._mark = path, (0, 0), Mark(Want.NOTHING, "")
        self._answered = ""

    def read(self) -> Mark:
        if self._path is None:
            return self._mark
        with contextlib.suppress(OSError):  # what the disk does not tell has not changed
            try:
                self._look(self._path)
            except FileNotFoundError:
                self._stamp, self._mark = (0, 0), Mark(Want.NOTHING, "")
        if self._mark.want is Want.SNAPSHOT and self._mark.id == self._answered:
            return Mark(Want.NOTHING, "")
        return self._mark

    def _look(self, path: Path) -> None:
        found = os.stat(path)
        if (stamp := (found.st_mtime_ns, found.st_ino)) == self._stamp:
            return
        data = path.read_bytes()
        try:
            body: dict[str, Any] = json.loads(data)
            self._mark = Mark(
                Want(body["want"]),
                str(body["why"]),
                None if (by_s := body.get("deadline_s")) is None else float(by_s),
                str(body.get("id", found.st_mtime_ns)),
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            # empty or malformed, as written by hand
            self._mark = Mark(Want.DRAIN, "touched by hand", None, str(found.st_mtime_ns))
        self._stamp = stamp

    def answered(self) -> None:
        """Record that the requested snapshot was made, so that the same mark asks for no other."""
        self._answered = self._mark.id
