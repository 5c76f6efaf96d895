"""What word there is that this machine will be taken, and who listens for it. Runs in the node
agent, one per machine.

A source (`sources.py` has one per cloud) tells what is in force now; `watch` calls back when a
notice appears, when it changes, and when it vanishes, so that a cancelled one does not stay
latched. Knows no cloud, torch, storage or SkyPilot.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger(__name__)

KINDS = ("kill", "soft", "maintenance")


@dataclass(frozen=True)
class Notice:
    """A cloud's word. `deadline_s` is wall-clock UTC seconds of this machine; None means that
    no time is known: act at once."""

    source: str  # "aws", "file", ...
    # "kill": the node will be taken | "soft": it may be, or pauses | "maintenance": it will be, at
    # a time known long before
    kind: str
    id: str  # the same notice has the same id at every poll
    deadline_s: float | None
    cancellable: bool = False
    detail: str = ""
    scope: str = "self"  # "others": it names other machines besides this one
    pause: bool = False  # soft: the machine stands still for a moment, and stays
    # the cloud may be told that we have gone; it then need not wait for the deadline
    acknowledge: bool = False


class NoticeSource(Protocol):
    """One place where notices appear."""

    name: str
    pace_s: float  # between two polls
    errors: int  # polls, or parts of them, that were not answered

    def poll(self) -> Sequence[Notice]:
        """The notices in force now; may wait for news. A source that got no answer repeats what
        it knew; it never raises for that."""

    def acknowledge(self, notice: Notice) -> bool:
        """Tell the cloud that it need not wait. False: it did not hear, or has no ear for that."""

    def close(self) -> None:
        """End a poll that waits; from another thread."""


class Watcher:
    """The running threads of `watch`, one per source."""

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        threads: Sequence[threading.Thread],
        stopped: threading.Event,
    ):
        self._sources, self._threads, self._stopped = sources, threads, stopped

    def stop(self, within_s: float = 10.0) -> None:
        self._stopped.set()
        for source in self._sources:
            source.close()
        for thread in self._threads:
            thread.join(timeout=within_s)


def watch(
    sources: Sequence[NoticeSource],
    on_notice: Callable[[Notice], None],
    on_cancel: Callable[[Notice], None],
) -> Watcher:
    """Call back, from the sources' own threads, once per notice that appears or changes and
    once when it vanishes."""
    stopped = threading.Event()
    threads = [
        threading.Thread(
            target=_follow,
            args=(s, on_notice, on_cancel, stopped),
            name=f"notices-{s.name}",
            daemon=True,
        )
        for s in sources
    ]
    for thread in threads:
        thread.start()
    return Watcher(sources, threads, stopped)


def _follow(
    source: NoticeSource,
    on_notice: Callable[[Notice], None],
    on_cancel: Callable[[Notice], None],
    stopped: threading.Event,
) -> None:
    known: dict[str, Notice] = {}
    while not stopped.is_set():
        try:
            known = step(source, known, on_notice, on_cancel)
        except Exception:
            # A watcher that dies unseen costs the snapshot that its next notice would have saved;
            # the trace is kept.
            source.errors += 1
            log.exception("notices: %s", source.name)
        stopped.wait(source.pace_s)


def step(
    source: NoticeSource,
    known: Mapping[str, Notice],
    on_notice: Callable[[Notice], None],
    on_cancel: Callable[[Notice], None],
) -> dict[str, Notice]:
    """One poll: call back for what is new or different and for what has gone; returns what is
    in force."""
    now = {notice.id: notice for notice in source.poll()}
    # New ones first: a notice that replaces another must not look like a cancellation in between.
    for name, notice in now.items():
        if known.get(name) != notice:
            on_notice(notice)
    for name, notice in known.items():
        if name not in now:
            on_cancel(notice)
    return now
