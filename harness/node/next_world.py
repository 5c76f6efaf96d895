"""The order by which a worker goes on in the next world, instead of ending. Both ends: the worker
waits for it, and its agent writes it.

The worker shows that it waits by a pipe in the node's folder, whose name has its process id and the
exit status that it would otherwise have ended with. The agent writes the environment of the next
world, as a newly forked worker would get it, into a file, and then a byte into the pipe. It knows
nothing of torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Mapping
from pathlib import Path

from harness.core.world import RESIZE

LOST, PARTED = 1, RESIZE  # the exit statuses that a waiting worker stands for
WAIT_S = 1800.0  # for the next world: some runs wait so long for nodes
# in the environment: "1" for a worker that prepares beside a world that trains, for the next one
BESIDE = "HARNESS_BESIDE"


def _pipe(folder: Path, pid: int, status: int) -> Path:
    return folder / f"order-{pid}-{status}"


def _file(folder: Path, pid: int) -> Path:
    return folder / f"order-{pid}.json"


def wait(folder: Path, status: int, within_s: float = WAIT_S) -> dict[str, str] | None:
    """Wait for the agent's order. Return the environment of the next world; None: none came, or the
    disk is full. `status`: the exit status that this process stands for meanwhile."""
    pid = os.getpid()
    pipe = _pipe(folder, pid, status)
    try:
        new = pipe.with_suffix(".new")
        os.mkfifo(new, 0o600)
        fd = os.open(new, os.O_RDWR)
        new.replace(pipe)  # the agent sees it only once there is a reader
    except OSError:
        return None
    try:
        if not select.select([fd], [], [], within_s)[0]:
            return None
        return {str(k): str(v) for k, v in json.loads(_file(folder, pid).read_text()).items()}
    except (OSError, ValueError):
        return None
    finally:
        for file in (pipe, _file(folder, pid)):
            file.unlink(missing_ok=True)
        os.close(fd)


def _reached(folder: Path, pid: int) -> tuple[int, int] | None:
    """Open the pipe of a process that waits. Return its file descriptor, and the exit status that
    the process stands for; None: nobody waits, though a process that was killed has left a pipe."""
    for status in (LOST, PARTED):
        with contextlib.suppress(OSError):
            return os.open(_pipe(folder, pid, status), os.O_WRONLY | os.O_NONBLOCK), status
    return None


def waiting(folder: Path, pid: int) -> int | None:
    """Return the exit status that a process which waits stands for; None: it does not wait."""
    if (reached := _reached(folder, pid)) is None:
        return None
    os.close(reached[0])
    return reached[1]


def order(folder: Path, pid: int, environment: Mapping[str, str]) -> bool:
    """Order a process to go on in the world of `environment`. Return whether it was waiting."""
    if (reached := _reached(folder, pid)) is None:
        return False
    fd, status = reached
    with contextlib.suppress(OSError), os.fdopen(fd, "wb", buffering=0) as pipe:
        file = os.open(_file(folder, pid), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(file, "w") as f:
            json.dump(dict(environment), f)
        _pipe(folder, pid, status).unlink()  # it does not wait any more
        return pipe.write(b"g") == 1
    return False  # it has ended meanwhile, or the disk is full
