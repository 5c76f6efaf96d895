"""The newest lines of the logs of a run's nodes, for pages of `harness runs serve`.

One thread reads them, of runs whose logs somebody has open only: a cloud that hangs holds up no
request. What a page gets is bounded, and secrets are masked.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.core.masking import masked_text

# called with a run's URL: the newest lines by attempt, and what is missing, in words
ReadLogs = Callable[[str], tuple[Mapping[int, str], str]]

MOST_NODES, MOST_LINES, MOST_LETTERS = 20, 40, 400  # of a line; of many nodes, the newest
EVERY_S, DUTY = 3.0, 4.0  # least pause between two looks; as a multiple of a look's time
WANTED_S = 15.0  # after this time without a request for them, logs are no longer read
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass
class _Followed:
    """The logs of one run. `told`: what a page gets; `None`: not read yet."""

    wanted_s: float
    after_s: float = -math.inf
    told: dict[str, Any] | None = None


@dataclass
class RunLogs:
    """`read` is called in the background only; `now` is a clock in seconds."""

    read: ReadLogs
    now: Callable[[], float]
    _of: dict[str, _Followed] = field(default_factory=dict)  # by the run's URL
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, url: str) -> dict[str, Any] | None:
        """Return what is known of the run's logs, and keep reading them for a while; `None`: they
        are being read."""
        with self._lock:
            one = self._of.setdefault(url, _Followed(self.now()))
            one.wanted_s = self.now()
            return one.told

    def look(self) -> None:
        """Read the logs that are due, and forget those that nobody wants any more."""
        with self._lock:
            now = self.now()
            self._of = {u: one for u, one in self._of.items() if now - one.wanted_s < WANTED_S}
            due = [(u, one) for u, one in self._of.items() if one.after_s <= now]
        for url, one in due:
            began_s = self.now()
            try:
                one.told = shown(*self.read(url))
            except Exception as e:  # of a cloud, a disk, or ours: other logs are still shown
                one.told = shown({}, f"{type(e).__name__}: {e}")
            ended_s = self.now()
            one.after_s = ended_s + max(EVERY_S, DUTY * (ended_s - began_s))


def shown(found: Mapping[int, str], problem: str) -> dict[str, Any]:
    """Return what a page gets of these logs: the newest lines of the newest nodes, within bounds.
    `left_out`: the number of other nodes."""
    newest = sorted(found, reverse=True)
    return {
        "problem": problem[:300],
        "left_out": len(newest[MOST_NODES:]),
        "nodes": [{"attempt": n, "lines": _lines(found[n])} for n in newest[:MOST_NODES]],
    }


def _lines(text: str) -> list[str]:
    lines = masked_text(COLOUR.sub("", text)).splitlines()[-MOST_LINES:]
    return [line[:MOST_LETTERS] for line in lines]
