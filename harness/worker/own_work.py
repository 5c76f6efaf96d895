"""Signs of life while a script does work of its own that is no step: it prepares data, evaluates,
merges and pushes what it has trained. Runs in the worker.

Such work may take hours, in which an agent would take the silence for a hang. A thread speaks for
it, for so long and no longer; while steps are made, and while ranks wait for each other, it is
silent, so that a hang there is found as ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BEAT_S = 20.0
OWN_MOST_S = 6 * 3600.0  # of one piece of work


class OwnWork:
    """`alive`: gives a sign of life."""

    def __init__(self, alive: Callable[[], None]):
        self._alive = alive
        self._since_s: float | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """From here on it is the script's own."""
        self._since_s = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="own-work", daemon=True)
            self._thread.start()

    def end(self) -> None:
        self._since_s = None

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            since_s = self._since_s
            if since_s is not None and time.monotonic() - since_s < OWN_MOST_S:
                self._alive()
