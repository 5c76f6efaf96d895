"""Where the time of this rank's steps goes, by phase: marks, and what lies between them. Runs in
the worker.

A mark is a reading of a clock on a CPU. On a GPU it is an event on the device's stream, which costs
the host microseconds and makes it wait for nothing; how much time lies between two of them is asked
when the step's numbers have arrived. So a phase's time is the device's: work that was asked for in
one phase is counted there whenever the device does it, and the host's waiting counts where the
device runs dry for it. docs/SPEED.md says what each phase is.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from harness.core.facts import PHASES

DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, SNAPSHOT, HARNESS, OTHER = range(len(PHASES))
# besides: a step begins, its update is over (both: OTHER follows), nothing is timed any more
BEGIN, END, REST = range(len(PHASES), len(PHASES) + 3)


class Marks(Protocol):
    """What marks are made by."""

    def take(self) -> Any:
        """A mark: here and now."""

    def between(self, a: Any, b: Any) -> float:
        """Seconds. Both must have passed."""

    def wait(self, mark: Any) -> None:
        """Until it has passed."""

    def give_back(self, marks: list[Any]) -> None:
        """Nobody will ask for these again."""


class HostMarks:
    """Readings of the host's clock."""

    take = staticmethod(time.perf_counter)

    def between(self, a: float, b: float) -> float:
        return b - a

    def wait(self, mark: float) -> None: ...

    def give_back(self, marks: list[float]) -> None: ...


class DeviceMarks:
    """Events on the stream that this thread uses; the same few again and again."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def take(self) -> torch.cuda.Event:
        if not self._free:
            self._free.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._free.pop()
        event.record()
        return event

    def between(self, a: torch.cuda.Event, b: torch.cuda.Event) -> float:
        b.synchronize()  # at once, but for a script that uses several streams
        milliseconds: float = a.elapsed_time(b)
        return max(0.0, milliseconds / 1e3)

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def give_back(self, marks: list[torch.cuda.Event]) -> None:
        self._free += marks


def marks_of(device: torch.device) -> Marks:
    return DeviceMarks() if device.type == "cuda" else HostMarks()


class PhaseTimer:
    """`begin`, `enter` and `end` are called on the way and only take a mark. `settle` adds up what
    is known to have passed.

    `seconds`: by phase, of the `steps` that are over since they were last taken; `last`: of these.
    """

    def __init__(self, marks: Marks):
        self._marks = marks
        self._taken: list[Any] = []
        self._codes: list[int] = []  # what begins at each
        self._on = self._paused = False
        self._last: Any = None  # the newest mark that was looked at, and what began there
        self._code = REST
        self._numbers: list[int] = []  # of the steps that begin in `_codes`
        # of the step that is looked at; and the mark at which it began
        self._number, self._ended = 0, False
        self._begun: Any = None
        self._open = [0.0] * len(PHASES)
        self.seconds, self.steps, self.last = [0.0] * len(PHASES), 0, 0

    # ---- on the way ------------------------------------------------------------------------------
    def begin(self, step: int) -> None:
        """A step begins; what was since the last one's `end` was between the two."""
        self._on = not self._paused
        if self._on:
            self._numbers.append(step)
        self.enter(BEGIN)

    def enter(self, phase: int) -> None:
        if self._on:
            self._codes.append(phase)
            self._taken.append(self._marks.take())

    def end(self) -> None:
        """The step's update is over."""
        self.enter(END)

    def rest(self) -> None:
        """No step follows, or not at once."""
        self.enter(REST)
        self._on = False

    def pause(self, paused: bool) -> None:
        """Take no marks from the next step on, or do again."""
        self._paused = paused
        if paused:
            self.rest()

    # ---- afterwards ------------------------------------------------------------------------------
    def settle(self) -> float | None:
        """The oldest step whose update is over and that was not settled: seconds from its begin
        to the end of its update, which must have passed. None: it was not timed."""
        if END not in self._codes:
            return None
        self._look(self._codes.index(END) + 1)
        return self._marks.between(self._begun, self._last)

    def close(self) -> None:
        """Look at all that is left; waits until it has passed."""
        if self._taken:
            self._marks.wait(self._taken[-1])
            self._look(len(self._taken))

    def take_seconds(self) -> tuple[list[float], int, int]:
        """By phase, added up over how many steps, and the last of them; then it is forgotten."""
        told = self.seconds, self.steps, self.last
        self.seconds, self.steps = [0.0] * len(PHASES), 0
        return told

    def _look(self, count: int) -> None:
        """At the oldest marks."""
        done = []
        for code, mark in zip(self._codes[:count], self._taken[:count], strict=True):
            if self._code < REST:
                phase = self._code if self._code < BEGIN else OTHER
                self._open[phase] += self._marks.between(self._last, mark)
            if self._last is not None and self._last is not self._begun:
                done.append(self._last)
            if code in (BEGIN, REST):
                self._over()
            if code == BEGIN:
                done += [] if self._begun is None else [self._begun]
                self._number, self._begun = self._numbers.pop(0), mark
            self._ended |= code == END
            self._code, self._last = code, mark
        del self._codes[:count], self._taken[:count]
        self._marks.give_back(done)

    def _over(self) -> None:
        """The next step begins, or none. One that did not come to its end does not count."""
        if self._ended:
            self.seconds = [a + b for a, b in zip(self.seconds, self._open, strict=True)]
            self.steps, self.last = self.steps + 1, self._number
        self._open, self._ended = [0.0] * len(PHASES), False
