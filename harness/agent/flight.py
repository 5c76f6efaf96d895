"""What NCCL's flight recorder knows of a hang: each rank's last collectives, asked for before
workers are killed, and kept in the run's bucket.

torch records them where its environment says so, and writes them to a file when somebody writes to
a pipe that it listens to, or when a collective has timed out. Nothing here reads what it wrote;
`torchfrtrace`, which torch installs, does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.bucket.layout import profile_key
from harness.core.facts import Fact, ProfileTaken
from storage.errors import StoreError
from storage.objects import ObjectStore

ENTRIES = 2000  # collectives that each rank remembers
MOST_NBYTES = 32 << 20  # of a rank's
ANSWER_S = 4.0  # for files to be there: torch looks at its pipe once a second
CALM_S = 0.3  # a file that has not grown for so long is whole
NAME = "nccl.pickle"


@dataclass(frozen=True)
class FlightDump:
    """What one rank's recorder wrote, when the rank was at `step`."""

    rank: int
    step: int
    data: bytes


def on_gpus() -> bool:
    """Does this machine have any?"""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def environment(folder: Path, theirs: Mapping[str, str]) -> dict[str, str]:
    """For workers, beside what is set already (`theirs`). Names of before torch 2.9, too."""
    stem = str(folder / "flight-")
    ours = {
        "TORCH_FR_BUFFER_SIZE": str(ENTRIES),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(ENTRIES),
        "TORCH_FR_DUMP_TEMP_FILE": stem,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": stem,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": stem,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    return {name: value for name, value in ours.items() if name not in theirs}


def _file(folder: Path, rank: int) -> Path:
    return folder / f"flight-{rank}"


def clear(folder: Path) -> None:
    """Nothing is left of an epoch before."""
    for path in folder.glob("flight-*"):
        path.unlink(missing_ok=True)


def ask(folder: Path, ranks: Iterable[int]) -> list[int]:
    """Have these ranks' recorders write; never waits. Those that listen."""
    asked = []
    for rank in ranks:
        # no pipe: it uses no NCCL; nobody reads it: its process is gone
        with contextlib.suppress(OSError):
            pipe = os.open(folder / f"flight-{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"1\n")
            finally:
                os.close(pipe)
            asked.append(rank)
    return asked


def wait(folder: Path, ranks: Iterable[int]) -> None:
    """Until these ranks' files are there and grow no more, within ANSWER_S."""
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
    """What lies there of these ranks, which were at these steps; not what is too large."""
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
    """In the bucket, with a fact each; without a bucket that answers they are lost."""
    with contextlib.suppress(StoreError):
        for dump in dumps:
            key = profile_key(epoch, dump.rank, dump.step, dump.step, NAME)
            store.put(key, dump.data)
            at = (epoch, dump.rank, dump.step, dump.step)
            record(ProfileTaken(*at, (key,), len(dump.data)))
