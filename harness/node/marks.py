"""Marks: how an agent, a person or a program asks something of the workers at their next step
boundary.

A mark is one small JSON file beside the agent; `touch mark` is enough for a person (an empty mark,
or one in other words, means: drain). Knows nothing of torch, clouds or the bucket.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from harness.core.world import DRAINED, RESIZE, STOPPED


class Want(IntEnum):
    """What is asked; the greatest one wins. All but SNAPSHOT end the epoch after a committed
    snapshot."""

    NOTHING = 0
    SNAPSHOT = 1
    RESIZE = 2  # everybody leaves; the agents decide who comes back
    DRAIN = 3  # everybody leaves, to be continued elsewhere
    STOP = 4  # everybody leaves, and nobody shall come back by itself


EXIT_CODE = {Want.RESIZE: RESIZE, Want.DRAIN: DRAINED, Want.STOP: STOPPED}


@dataclass(frozen=True)
class Mark:
    want: Want
    why: str
    deadline_s: float | None = None  # wall clock
    id: str = ""


def write(path: Path, want: Want, why: str, deadline_s: float | None = None) -> None:
    """Atomically; a reader never sees half a mark."""
    temporary = path.with_suffix(".tmp")
    body = {"want": int(want), "why": why, "deadline_s": deadline_s, "id": secrets.token_hex(4)}
    temporary.write_text(json.dumps(body))
    temporary.replace(path)


class MarkReader:
    """Looks for the mark between two steps; costs one stat() when nothing has changed."""

    def __init__(self, path: Path | None):
        self._path, self._stamp, self._mark = path, (0, 0), Mark(Want.NOTHING, "")
        self._answered = ""

    def read(self) -> Mark:
        if self._path is None:
            return self._mark
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            self._stamp, self._mark = (0, 0), Mark(Want.NOTHING, "")
            return self._mark
        if (found.st_mtime_ns, found.st_ino) != self._stamp:
            try:
                body: dict[str, Any] = json.loads(self._path.read_bytes())
                mark = Mark(
                    Want(body["want"]),
                    str(body["why"]),
                    body.get("deadline_s"),
                    str(body.get("id", found.st_mtime_ns)),
                )
            except (ValueError, KeyError, TypeError, RecursionError):
                # empty, or in somebody's own words
                mark = Mark(Want.DRAIN, "touched by hand", None, str(found.st_mtime_ns))
            self._mark = mark
            self._stamp = (found.st_mtime_ns, found.st_ino)
        if self._mark.want is Want.SNAPSHOT and self._mark.id == self._answered:
            return Mark(Want.NOTHING, "")
        return self._mark

    def answered(self) -> None:
        """A snapshot that was asked for has been made; do not make it again for the same mark."""
        self._answered = self._mark.id
