"""Dumps of NCCL's flight recorder at a hang: each rank's last collectives, requested before workers
are killed, and kept in the run's bucket. Runs in the node agent.

torch records them if its environment says so, and writes them to a file when a process writes to
a pipe that it reads, or when a collective has timed out. Nothing here reads the files;
`torchfrtrace`, which torch installs, does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from harness.bucket.layout import profile_key
from harness.core.facts import Fact, ProfileTaken
from storage.errors import StoreError
from storage.stores.objects import ObjectStore

ENTRIES = 2000  # collectives that each rank keeps
MOST_NBYTES = 32 << 20  # largest dump of a rank that is kept
ANSWER_S = 4.0  # for files to appear: torch reads its pipe once a second
CALM_S = 0.3  # a file that has not grown for so long is complete
NAME = "nccl.pickle"


@dataclass(frozen=True)
class FlightDump:
    """The dump of one rank's recorder, when the rank was at `step`."""

    rank: int
    step: int
    data: bytes


def on_gpus() -> bool:
    """Return whether this machine has NVIDIA GPUs."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def torch_version() -> tuple[int, int]:
    """Return the major and minor number of the installed torch, which is not imported here; (0, 0)
    without one."""
    with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
        major, minor, *_ = metadata.version("torch").split(".")
        return int(major), int(minor)
    return 0, 0


def recorder_environment(folder: Path, theirs: Mapping[str, str]) -> dict[str, str]:
    """Return variables for workers, except those that are set already (`theirs`)."""
    stem = str(folder / "flight-")
    size, file = "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"
    if torch_version() < (2, 9):
        size, file = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    ours = {
        size: str(ENTRIES),
        file: stem,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": stem,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    return {name: value for name, value in ours.items() if name not in theirs}


def _file(folder: Path, rank: int) -> Path:
    return folder / f"flight-{rank}"


def clear(folder: Path) -> None:
    """Remove the files of earlier generations (the code's `epoch`)."""
    for path in folder.glob("flight-*"):
        path.unlink(missing_ok=True)


def ask_ranks(folder: Path, ranks: Iterable[int]) -> list[int]:
    """Make these ranks' recorders write, without waiting. Return the ranks that read their pipe."""
    asked = []
    for rank in ranks:
        # no pipe: the rank uses no NCCL; no reader: its process is gone
        with contextlib.suppress(OSError):
            pipe = os.open(folder / f"flight-{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"1\n")
            finally:
                os.close(pipe)
            asked.append(rank)
    return asked


def wait(folder: Path, ranks: Iterable[int]) -> None:
    """Wait until these ranks' files exist and do not grow any more, for at most ANSWER_S."""
    files = [_file(folder, rank) for rank in ranks]
    until_s, calm_s, before = time.monotonic() + ANSWER_S, 0.0, [-1] * len(files)
    while files and time.monotonic() < until_s:
        now = [path.stat().st_size if path.exists() else 0 for path in files]
        calm_s = calm_s + 0.1 if all(now) and now == before else 0.0
        if calm_s >= CALM_S:
            return
        before = now
        time.sleep(0.1)


def collect(folder: Path, steps: Mapping[int, int]) -> list[FlightDump]:
    """Return and remove the dumps of these ranks, which were at these steps; drop those that are
    too large."""
    found = []
    for rank, step in steps.items():
        path = _file(folder, rank)
        with contextlib.suppress(OSError):
            if 0 < path.stat().st_size <= MOST_NBYTES:
                found.append(FlightDump(rank, step, path.read_bytes()))
            path.unlink()
    return found


def keep(
    store: ObjectStore, record: Callable[[Fact], None], epoch: int, dumps: Iterable[FlightDump]
) -> None:
    """Write dumps to the bucket, with a fact each; if the bucket does not answer, they are lost."""
    with contextlib.suppress(StoreError):
        for dump in dumps:
            key = profile_key(epoch, dump.rank, dump.step, dump.step, NAME)
            store.put(key, dump.data)
            at = (epoch, dump.rank, dump.step, dump.step)
            record(ProfileTaken(*at, (key,), len(dump.data)))
