"""The heartbeat of a node's uploader, and the agent's watch on it.

The uploader rewrites a few bytes in its stage, which is in memory, as long as it would answer a
request and no job of it stands still. The agent only reads them: a process that is stopped, or
hangs in the kernel, need not answer anything, and nobody waits for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HEARTBEAT = "heartbeat"  # its file in the stage
BEAT_S = 0.5
SILENT_S = 10.0  # silence after which it counts as hung
HURRIED_S = 3.0  # the same during a drain: its snapshots must be sent by others in time
START_S = 120.0  # the same before its first beat
# the most that one look adds to a silence: in a longer gap the agent itself was suspended
GAP_S = 3.0


class UploaderHeartbeat:
    """The uploader's side: a thread that beats for as long as `works` returns True. `works` may
    block, as a request that takes the same locks would."""

    def __init__(self, folder: Path, works: Callable[[], bool]):
        self._works = works
        self._fd = os.open(folder / HEARTBEAT, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        beats = 0
        while self._works():
            beats += 1
            os.pwrite(self._fd, beats.to_bytes(8, "big"), 0)
            time.sleep(BEAT_S)


@dataclass
class UploaderWatch:
    """The agent's side, for one uploader process whose stage is `folder`. Silence is counted by the
    agent's own clock, and only while the agent itself runs."""

    folder: Path
    _beat: bytes = b""
    _silent_s: float = 0.0
    _looked_s: float | None = None  # None: not yet

    def hung(self, now: float, hurried: bool) -> str:
        """Return why the uploader counts as hung, in words; "" if it does not. `now`: monotonic
        seconds; `hurried`: this node drains."""
        gap_s = 0.0 if self._looked_s is None else min(now - self._looked_s, GAP_S)
        self._looked_s, beat = now, self._read()
        self._silent_s = 0.0 if beat != self._beat else self._silent_s + gap_s
        self._beat = beat
        bound_s = START_S if not beat else HURRIED_S if hurried else SILENT_S
        if self._silent_s <= bound_s:
            return ""
        return f"no heartbeat for {self._silent_s:.0f} s, bound {bound_s:.0f} s"

    def _read(self) -> bytes:
        try:
            return (self.folder / HEARTBEAT).read_bytes()
        except FileNotFoundError:
            return b""
