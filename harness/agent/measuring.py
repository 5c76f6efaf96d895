"""What a node's hardware does: CPU, memory, disks, network and GPUs, told about once a minute.

psutil reads the machine, in a thread beside the agent. NVML reads the GPUs, in the process of
`health.py`, since a sick GPU's driver can hang. Everything is of the whole machine, whoever uses
it. Knows nothing of workers or the bucket.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from harness.core.facts import Fact, NodeMeasured

SAMPLE_S = 5.0  # between two readings of what has no counter
# With more members each tells the less often: of a run of a month that is half a million facts, of
# however many nodes
FEW_MEMBERS = 8
INSIDE = ("lo", "docker", "veth", "br-", "cni", "virbr")  # ports that lead to no other machine


class Gauges:
    """Means of what was read since they were taken last. For any thread."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def add(self, readings: Mapping[str, float]) -> None:
        with self._lock:
            for name, value in readings.items():
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, count + 1

    def take(self) -> dict[str, float]:
        with self._lock:
            found, self._sums = self._sums, {}
        return {name: total / count for name, (total, count) in found.items()}


class MachineReader:
    """This machine, by psutil. What a system does not have is left out. `folder`: on the disk
    whose space is told."""

    def __init__(self, folder: Path):
        self._folder = folder
        psutil.cpu_percent()  # the next one is of the time since
        self._counted = self._counters()

    def gauges(self) -> dict[str, float]:
        """As it is now."""
        found = {"memory/percent": psutil.virtual_memory().percent}
        with contextlib.suppress(OSError):
            found["disk/percent"] = psutil.disk_usage(str(self._folder)).percent
        return found

    def rates(self, seconds: float) -> dict[str, float]:
        """Since the last call, `seconds` ago."""
        before, self._counted = self._counted, self._counters()
        moved = {
            f"{name}_per_s": max(0.0, count - before[name]) / seconds
            for name, count in self._counted.items()
            if name in before
        }
        return {"cpu/percent": psutil.cpu_percent(), **moved}

    def _counters(self) -> dict[str, float]:
        found: dict[str, float] = {}
        with contextlib.suppress(OSError):
            ports = psutil.net_io_counters(pernic=True).items()
            wires = [n for name, n in ports if not name.startswith(INSIDE)]
            found["net/sent_bytes"] = sum(n.bytes_sent for n in wires)
            found["net/received_bytes"] = sum(n.bytes_recv for n in wires)
        with contextlib.suppress(OSError, NotImplementedError):
            if disks := psutil.disk_io_counters():
                found["disk/read_bytes"] = disks.read_bytes
                found["disk/written_bytes"] = disks.write_bytes
        return found


class HardwareWatch:
    """The thread. `every_s`: seconds between two facts in a small world. `gauges` is filled by
    others as well; `record` may be called from any thread."""

    def __init__(
        self,
        member: str,
        every_s: float,
        folder: Path,
        gauges: Gauges,
        record: Callable[[Fact], None],
    ):
        self._member, self._every_s, self._folder = member, every_s, folder
        self._gauges, self._record = gauges, record
        self._members = 1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="measuring", daemon=True)
        self._thread.start()

    def crowd(self, members: int) -> None:
        """So many members are in this node's world."""
        self._members = members

    def stop(self) -> None:
        """Tell what is left."""
        self._over.set()
        self._thread.join(SAMPLE_S)

    def _run(self) -> None:
        machine, told_s = MachineReader(self._folder), time.monotonic()
        sample_s = min(SAMPLE_S, self._every_s)
        while True:
            over = self._over.wait(sample_s)
            self._gauges.add(machine.gauges())
            seconds = time.monotonic() - told_s
            if seconds < (sample_s if over else self._due_s()):
                if over:
                    return  # too short to say anything
                continue
            told_s += seconds
            found = {**machine.rates(seconds), **self._gauges.take()}
            rounded = {name: float(f"{value:.4g}") for name, value in sorted(found.items())}
            self._record(NodeMeasured(self._member, round(seconds, 1), rounded))
            if over:
                return

    def _due_s(self) -> float:
        return self._every_s * max(1.0, self._members / FEW_MEMBERS)


class NoWatch:
    """Where nobody wants to know."""

    def crowd(self, members: int) -> None: ...

    def stop(self) -> None: ...
