"""The preparation of a newcomer: its workers run their script up to its loop while others train.

If the processes of those that train go on in the next generation (the code's `epoch`), they need
not wait for a newcomer's script to import, to read and to build its model. So the newcomer's
workers do all that first, in a world of their own, and wait at the begin of their loop. Only then
does the node say that it is ready. A script that cannot prepare without the others begins with its
generation, as before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.agent.host import WorkerPool
from harness.agent.workers import KILL_S
from harness.bucket.layout import Epoch
from harness.core.world import RESIZE


class Preparation:
    """The preparation of a node's workers, until `until_s` at most, by the monotonic clock. `say`:
    writes to the node's log."""

    def __init__(self, workers: WorkerPool, say: Callable[[str], None], until_s: float):
        self._workers, self._say, self._until_s = workers, say, until_s

    def begin(self, beside: Epoch, stage: Path) -> None:
        self._say(f"prepares beside generation {beside.epoch}, which trains")
        self._workers.prepare(beside, stage)

    def is_over(self, now: float) -> bool:
        """Return whether all workers wait for the next generation, or it is in vain."""
        workers = self._workers
        at_work = workers.at_work()
        if at_work and now < self._until_s:
            return False
        if at_work or any(worker.code != RESIZE for worker in workers.all):
            self._say("its script cannot prepare beside others; it begins with its generation")
            workers.end(KILL_S)
        return True
