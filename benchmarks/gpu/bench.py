"""What a part is given, and the rows that it writes as it goes."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Row:
    """A line of the table.

    `ok`: of a check, whether it holds; None: a figure, or something that cannot be had here
    (`missing` says why). `ratio`: the value over the peer's.
    """

    part: str
    what: str
    ok: bool | None = None
    value: float | None = None
    unit: str = ""
    peer: str = ""
    peer_value: float | None = None
    missing: str = ""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.value is None or not self.peer_value else self.value / self.peer_value


@dataclass
class Bench:
    """`tiny`: there is no GPU, so that the part runs in miniature on the CPU. `folder`: a place of
    the part's own in memory (/dev/shm where there is one); it is removed afterwards."""

    part: str
    rows: Path
    folder: Path
    tiny: bool
    began_s: float  # time.monotonic() of whoever started it
    limit_s: float

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.tiny else "cuda:0")

    @property
    def left_s(self) -> float:
        """Seconds until the part is ended."""
        return self.began_s + self.limit_s - time.monotonic()

    def checked(self, what: str, ok: bool, note: str = "") -> None:
        """Write whether something holds that must hold."""
        self._write(Row(self.part, what, ok=bool(ok), note=note))

    def measured(
        self,
        what: str,
        value: float,
        unit: str,
        peer: str = "",
        peer_value: float | None = None,
        note: str = "",
    ) -> None:
        """Write a figure, with that of the named `peer` in the same process run."""
        self._write(
            Row(
                self.part,
                what,
                value=float(value),
                unit=unit,
                peer=peer,
                peer_value=None if peer_value is None else float(peer_value),
                note=note,
            )
        )

    def missing(self, what: str, why: str) -> None:
        """Write that something cannot be had on this machine, and why."""
        self._write(Row(self.part, what, missing=why))

    @contextlib.contextmanager
    def going_on(self, what: str) -> Iterator[None]:
        """Write an error of the body as a check that does not hold, and go on."""
        try:
            yield
        except Exception as e:
            traceback.print_exc()
            last = (str(e).strip().splitlines() or [""])[-1]
            self.checked(what, False, f"{type(e).__name__}: {last}"[:300])

    def attempt(self, what: str, do: Callable[[Bench], None], wanted_s: float = 0.0) -> None:
        """Run some checks, if `wanted_s` seconds are left; an error is one that does not hold."""
        if self.left_s < wanted_s:
            self.missing(what, f"{self.left_s:.0f} s were left")
            return
        with self.going_on(what):
            do(self)

    def _write(self, row: Row) -> None:
        with open(self.rows, "a") as f:  # one write of less than a page: whole, whoever else writes
            f.write(json.dumps(asdict(row)) + "\n")
        print(row.part, "|", row.what, "|", row.ok, row.value, row.unit, row.missing, row.note)
        sys.stdout.flush()

    def settle(self) -> None:
        """Wait until the device has done all that it was told."""
        if not self.tiny:
            torch.cuda.synchronize()

    def seconds(self, do: Callable[[], Any]) -> float:
        """Return what `do` takes, with its work on the device."""
        self.settle()
        t0 = time.perf_counter()
        do()
        self.settle()
        return time.perf_counter() - t0

    def in_turns(
        self, ways: dict[str, Callable[[], Any]], rounds: int, warm: int = 1
    ) -> dict[str, float]:
        """Return the median seconds of each way; every round takes each once, in an order that
        rotates, and the first `warm` rounds are not counted."""
        taken: dict[str, list[float]] = {name: [] for name in ways}
        names = list(ways)
        for i in range(warm + rounds):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                s = self.seconds(ways[name])
                if i >= warm:
                    taken[name].append(s)
        return {name: statistics.median(found) for name, found in taken.items()}


def process(words: list[str], log: Path, cwd: Path | None = None, **env: object) -> Process:
    """Start this Python with `words`, one thread for each rank; it writes into `log`."""
    usual = {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"}
    with open(log, "wb") as out:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=cwd,
            env=environment(**usual, **env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def read(rows: Path) -> list[Row]:
    """Return the whole lines of the file; the last may be half written."""
    if not rows.exists():
        return []
    found = rows.read_text().split("\n")[:-1]
    return [Row(**json.loads(line)) for line in found]


def environment(**more: object) -> dict[str, str]:
    """Return the variables of a process that uses the packages of this checkout."""
    path = os.pathsep.join(
        [str(ROOT), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return {**os.environ, "PYTHONPATH": path, **{name: str(value) for name, value in more.items()}}
