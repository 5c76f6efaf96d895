"""What this rank knows to be wanted: the node's mark, and signals. Runs in the worker."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from harness.node.marks import MarkReader, Want
from harness.worker.machine import Asked


class Votes:
    """`mark`: the file; None without an agent."""

    def __init__(self, mark: Path | None, leads: bool):
        self._mark, self._leads = mark, leads
        self._reader = MarkReader(mark)
        self._signalled = Want.NOTHING
        self.enough = ""  # why the script on this rank wants the run to end; "": it does not

    def listen(self) -> None:
        """To signals, and tell the agent that this rank looks at its mark."""
        in_main = threading.current_thread() is threading.main_thread()
        if self._mark is not None:
            self._mark.with_name("attached").touch()
            if in_main:
                # systemd and Slurm send it to every process of a node; it is for the agent, which
                # tells us by the mark.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif in_main:
            signal.signal(signal.SIGTERM, lambda *_: self._signal(Want.DRAIN))
            signal.signal(signal.SIGUSR1, lambda *_: self._signal(Want.SNAPSHOT))

    def _signal(self, want: Want) -> None:
        self._signalled = max(self._signalled, want)

    def cast(self, wants: torch.Tensor, due: Callable[[], bool]) -> None:
        """Say what this rank knows of: wants[w] > 0 on any rank means w is wanted. `due`: rank 0
        asks it for a snapshot."""
        wants[self._reader.read().want] += 1
        wants[self._signalled] += 1
        if self._leads and due():
            wants[Want.SNAPSHOT] += 1

    def asked(self, want: Want) -> Asked:
        """The ranks want it; with what this one knows of why."""
        return Asked(want, self._reader.read(), self._signalled)

    def answered(self) -> None:
        """A snapshot that was asked for is made now."""
        self._reader.answered()
        self._signalled = Want.NOTHING
