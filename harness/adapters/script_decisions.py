"""What a script's variables were, line by line, while it made up its mind after an evaluation or an
epoch; a resumed script that goes through the same lines decides as it did. Runs in the worker.

A script that goes through what it has done computes nothing, so its metrics are not those that it
had, and what it decides by them (early stopping) would differ. So from the end of an evaluation, or
of an epoch's training, to the next training batch, we look at each line of the script before it
runs, and keep what the line before it changed. Later the same is put back at the same lines.

Where a debugger or a coverage tool traces the process, nothing is kept and nothing put back.
"""

from __future__ import annotations

import base64
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from harness.adapters.script_variables import (
    NOTHING,
    is_script,
    names_of,
    put,
    script_frames,
    variables_of,
    written,
)

MOST_LINES = 5_000  # of one stretch that are looked at; the others are not
MOST_CALLS = 200_000  # of libraries' functions meanwhile: being told of them takes time
MOST_KEPT = 50_000  # lines that changed something, of all stretches; beyond, the oldest go
MOST_VALUES = 64  # numbers and words in one variable
MOST_NBYTES = 256 << 20  # of all of it as JSON: what a snapshot claims to hold is not believed

Changes = dict[str, Any]  # variable -> written down
# What had changed when a line was about to run, by "function line number-of-times". Not all ranks
# come by all lines (`if accelerator.is_main_process:`).
Kept = dict[str, Changes]


class Decisions:
    """A stretch lasts from `open` to `close`. It is kept for ever, since a resumed script begins at
    its first line. All ranks go on with what rank 0 kept. `first`: its value, on all ranks;
    `keeps`: this is it."""

    def __init__(self, first: Callable[[Any], Any], keeps: bool) -> None:
        self._first, self._keeps = first, keeps
        self._kept: dict[str, Kept] = {}  # by "step number"
        self._new: dict[str, Kept] = {}  # since `settle`
        self._at = (-1, 0)  # the step whose stretch it is, and its number among them
        self._opened = False  # ... since `settle`
        self._stretch: Kept | None = None
        self._following: Kept = {}
        self._lines: Counter[str] = Counter()
        self._looked = 0  # at so many lines, all of `_lines`
        self._calls = 0
        self._last: dict[FrameType, Changes] = {}  # what a function's variables were
        self._script: dict[CodeType, bool] = {}
        self._begun: dict[str, Changes] = {}

    def begin(self, frame: FrameType | None) -> None:
        """The training loop begins: what it will not change is left alone."""
        self._begun = written(script_frames(frame), MOST_VALUES)

    def state_dict(self) -> dict[str, Any]:
        packed = zlib.compress(json.dumps(self._kept).encode())
        return {"steps": base64.b85encode(packed).decode()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        packed = base64.b85decode(state["steps"])
        self._kept = json.loads(zlib.decompressobj().decompress(packed, MOST_NBYTES))

    def settle(self) -> None:
        """The script trains again; all ranks come here."""
        self.close()
        if not self._opened:
            return
        self._opened, mine, self._new = False, self._new, {}
        self._kept |= self._first(mine)
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]

    # ---- a stretch -------------------------------------------------------------------------------
    def open(self, step: int, frame: FrameType | None, follow: bool) -> None:
        """The script decides now. `step`: those that are done; `frame`: the script's; `follow`:
        as it did, instead of keeping what it does."""
        self.close()
        self._at = (step, self._at[1] + 1 if step == self._at[0] else 0)
        self._opened |= not follow
        frames = script_frames(frame)
        if sys.gettrace() is not None or not (frames and (follow or self._keeps)):
            return
        self._stretch = None if follow else {}
        if follow:
            self._following = self._kept.get("{} {}".format(*self._at), {})
        for name, one in zip(names_of(frames), frames, strict=True):
            self._look(one, self._begun.get(name, {}))
            one.f_trace = self._on_line
        sys.settrace(self._on_call)

    def close(self) -> None:
        """It does not decide any more. Harmless when nothing is open."""
        if sys.gettrace() == self._on_call:
            sys.settrace(None)
            for one in self._last:
                if one.f_trace == self._on_line:
                    del one.f_trace
        self._last, self._following, self._lines = {}, {}, Counter()
        self._looked = self._calls = 0
        if self._stretch is not None:
            self._new["{} {}".format(*self._at)] = self._stretch
            self._stretch = None

    # ---- lines -----------------------------------------------------------------------------------
    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if code not in self._script:
            inside = code.co_name.startswith("<")  # of one line, like a list comprehension
            self._script[code] = not inside and is_script(code.co_filename, frame.f_globals)
        if self._script[code]:
            return self._on_line
        self._calls += 1
        if self._calls >= MOST_CALLS:
            self.close()
        return None

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if event == "return":
            self._last.pop(frame, None)
        if event != "line":
            return self._on_line
        if self._looked >= MOST_LINES:
            self.close()
            return None
        self._look(frame, self._last.get(frame, {}))
        return self._on_line

    def _look(self, frame: FrameType, before: Changes) -> None:
        """Keep what has changed since `before`, or put back what had."""
        now = variables_of(frame, MOST_VALUES)
        line = f"{frame.f_code.co_name} {frame.f_lineno}"
        self._lines[line] += 1
        self._looked += 1
        key = f"{line} {self._lines[line]}"
        if self._stretch is not None:
            if changes := {k: v for k, v in now.items() if before.get(k, NOTHING) != v}:
                self._stretch[key] = changes
        elif known := self._following.get(key):
            put(frame, {k: v for k, v in known.items() if now.get(k, NOTHING) != v})
            now |= known
        self._last[frame] = now
