"""A provider's files: whole or not at all, and one provider at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """0600: readers see the old or the new file, and nobody else sees any."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
        f.write(text)
    os.replace(temporary, path)


def lock(state_dir: Path, within_s: float = 0.0) -> int | None:
    """The provider's lock as an open file, or None if another process holds it."""
    handle = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    give_up_s = time.monotonic() + within_s
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        if time.monotonic() >= give_up_s:
            os.close(handle)
            return None
        time.sleep(0.02)
