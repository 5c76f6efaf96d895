"""The kernel's OOM killer, by its counters: has it killed a process since the workers began?
Runs in the agent.

A worker that the kernel kills for memory ends by SIGKILL, as one that an operator kills does. Only
the kernel's counters tell them apart: `oom_kill` of the control group (v2 `memory.events`, v1
`memory.oom_control`), or that of the machine where a process is in no group. It is counted before
the signal is sent. Where no counter can be read, nothing is claimed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.core.formatting import nbytes

# (folder below /sys/fs/cgroup, file of the counter, file of the limit in bytes)
V2 = (("", "unified"), "memory.events", "memory.max")
V1 = (("memory",), "memory.oom_control", "memory.limit_in_bytes")
NO_LIMIT = 1 << 60  # v1 says "none" by a number above it


@dataclass(frozen=True)
class MemoryGroup:
    """The control group that counts and limits this process' memory. `folders`: its own folder and
    those above it, whose limits hold as well."""

    folders: tuple[Path, ...]
    counter: Path
    limit_name: str

    def limit(self) -> tuple[int, str] | None:
        """Return the least limit in bytes and its file's name; None: there is no limit."""
        found: list[int] = []
        for folder in self.folders:
            with contextlib.suppress(OSError, ValueError):  # "max", or no such file
                found.append(int((folder / self.limit_name).read_text()))
        least = min(found, default=NO_LIMIT)
        return (least, self.limit_name) if least < NO_LIMIT else None


class OomKiller:
    """The kills by the kernel's OOM killer since `begin`. `root`: where /proc and /sys are."""

    def __init__(self, root: Path = Path("/")):
        self._proc, self._groups = root / "proc", root / "sys" / "fs" / "cgroup"
        self._group = next(self._memory_groups(), None)
        self._counter = self._group.counter if self._group else self._proc / "vmstat"
        self._before: int | None = None

    def begin(self) -> None:
        """Begin to count."""
        self._before = self._kills()

    def said(self) -> str:
        """Return in words that the OOM killer has killed since `begin`; "": it has not, or that is
        not known."""
        now = self._kills()
        if self._before is None or now is None or now <= self._before:
            return ""
        return f"killed by the kernel's OOM killer: memory ran out ({self._limit()})"

    def _kills(self) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._counter.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        return None

    def _limit(self) -> str:
        if self._group is not None and (found := self._group.limit()):
            return f"the limit of its control group is {nbytes(found[0])}, {found[1]}"
        with contextlib.suppress(OSError, ValueError, IndexError):
            kilobytes = int((self._proc / "meminfo").read_text().split()[1])  # MemTotal comes first
            return f"its control group has no limit, the machine has {nbytes(1024 * kilobytes)}"
        return "its limit is not known"

    def _memory_groups(self) -> Iterator[MemoryGroup]:
        """Yield the groups that have a counter. In a container the path may be that of the host,
        and the container's own group is then the mounted folder itself."""
        with contextlib.suppress(OSError, ValueError):
            for line in (self._proc / "self" / "cgroup").read_text().splitlines():
                number, controllers, path = line.split(":", 2)
                is_v1 = "memory" in controllers.split(",")
                if not is_v1 and number != "0":
                    continue
                mounts, counter, limit = V1 if is_v1 else V2
                for mount in (self._groups / name for name in mounts):
                    own = mount / path.strip("/")
                    above = [own, *(f for f in own.parents if f == mount or mount in f.parents)]
                    if there := [f / counter for f in above if (f / counter).is_file()]:
                        yield MemoryGroup(tuple(above), there[0], limit)
