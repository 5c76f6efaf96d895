"""Marks: requests of a node agent, a person or a program to the workers, handled at their next step
boundary. Both ends: the agent writes, each worker reads.

A mark is one small JSON file beside the agent, so no signal handler is needed; `touch mark.json` is
enough for a person (an empty or malformed mark means: drain). It knows nothing of torch, clouds or
the bucket.
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
    """The request of a mark; the greatest one wins. All but SNAPSHOT end the generation after a
    committed snapshot."""

    NOTHING = 0
    SNAPSHOT = 1
    RESIZE = 2  # all workers leave; the agents decide which come back
    DRAIN = 3  # all workers leave, to be continued elsewhere
    STOP = 4  # all workers leave, and none comes back automatically


# in the node's folder: the mark, and the file by which a worker shows that it reads it
MARK, ATTACHED = "mark.json", "attached"
EXIT_CODE = {Want.RESIZE: RESIZE, Want.DRAIN: DRAINED, Want.STOP: STOPPED}


@dataclass(frozen=True)
class Mark:
    want: Want
    why: str
    deadline_s: float | None = None  # wall clock
    id: str = ""


def write(path: Path, want: Want, why: str, deadline_s: float | None = None) -> None:
    """Write a mark atomically: a reader never sees half a mark."""
    temporary = path.with_suffix(".tmp")
    body = {"want": int(want), "why": why, "deadline_s": deadline_s, "id": secrets.token_hex(4)}
    temporary.write_text(json.dumps(body))
    temporary.replace(path)


class MarkFile:
    """The agent's end of the mark."""

    def __init__(self, path: Path):
        self.path = path

    def write(self, want: Want, why: str, deadline_s: float | None) -> None:
        """Write the mark; NOTHING: remove it."""
        if want is Want.NOTHING:
            self.path.unlink(missing_ok=True)
        else:
            write(self.path, want, why, deadline_s)


class MarkReader:
    """A worker's end: reads the mark between two steps, and costs one stat() when nothing has
    changed."""

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
                # empty or malformed, as written by hand
                mark = Mark(Want.DRAIN, "touched by hand", None, str(found.st_mtime_ns))
            self._mark = mark
            self._stamp = (found.st_mtime_ns, found.st_ino)
        if self._mark.want is Want.SNAPSHOT and self._mark.id == self._answered:
            return Mark(Want.NOTHING, "")
        return self._mark

    def answered(self) -> None:
        """Record that the requested snapshot was made, so that the same mark asks for no other."""
        self._answered = self._mark.id
