"""The most memory that this process has held, on the host and on its GPU. Runs in the worker.

The host's is the resident set as Linux counts it (VmHWM), the code of libraries among it; nothing
is sampled, so no peak is too short to be seen.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Since the process began, or since `reset`. Bytes."""

    def __init__(self, device: torch.device):
        self._gpu = device if device.type == "cuda" else None

    def now(self) -> int:
        """What the host's resident set is."""
        return _status("VmRSS:") or _most()

    def taken(self) -> tuple[int, int]:
        """The host's and the GPU's (torch's allocator; 0: there is no GPU)."""
        gpu = 0 if self._gpu is None else torch.cuda.max_memory_allocated(self._gpu)
        return _status("VmHWM:") or _most(), gpu

    def reset(self) -> None:
        """Count from here on; the host's only where Linux lets us."""
        with contextlib.suppress(OSError):
            CLEAR.write_text("5")
        if self._gpu is not None:
            torch.cuda.reset_peak_memory_stats(self._gpu)


def _status(key: str) -> int:
    """0: this system does not say."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def _most() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
