"""GPU health: reports of the driver through NVML, and the reactions to them. Runs beside the node
agent.

NVML calls can hang for as long as the GPU is sick, so they are made in a process of their own
(`python -m harness.agent.gpu_health`), which writes one line of JSON per look; silence for
`silent_s` is a finding as well. `judge` is pure; `FakeNvml` is a stand-in for the library that is
driven by a file (the setting gpu_health of `harness run`), for drills and users' tests. Knows
nothing of torch, workers or the bucket.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import IO, Any

from harness.core import hardware
from harness.node.heartbeat import die_with_parent

LOOK_EVERY_S = 5.0  # ECC counters, recovery action, clocks; XIDs come as events at once
SILENT_S = 60.0  # a look that takes longer has hung in the driver
# after so many counted errors on one GPU within a day, the GPU is at fault, not the program
REPEATS, REPEAT_WITHIN_S = 3, 86400.0
SLOW_LOOKS = 24  # two minutes of a hardware slowdown are a finding

RECOVERY = {
    1: "GPU reset",
    2: "node reboot",
    3: "drain P2P",
    4: "drain and reset",
    5: "recover IMEX domain",
    6: "bus reset",
    7: "system reboot",
}
DOUBLE_BIT_EVENT, XID_EVENT = 0x2, 0x8
UNCORRECTED, VOLATILE = 1, 0  # nvmlMemoryErrorType_t, nvmlEccCounterType_t
RECOVERY_FIELD = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"
TIMEOUT, GPU_IS_LOST = 10, 15  # nvmlReturn_t
ON_THE_DIE = 0  # nvmlTemperatureSensors_t
HW_SLOWDOWN = 0x8 | 0x40 | 0x80  # nvmlClocksEventReason: hardware, thermal, power brake


class Action(IntEnum):
    """The reaction to a finding; the greatest one wins."""

    IGNORE = 0
    COUNT = 1
    SNAPSHOT = 2  # at the next step boundary: a failure may follow
    DRAIN = 3  # snapshot, leave the node, and do not come back to it
    KILL = 4  # leave at once: this GPU's memory cannot be trusted, or cannot be reached


@dataclass(frozen=True)
class GpuFinding:
    """One observation. `gpu`: UUID; "" for the driver as a whole."""

    gpu: str
    what: str  # "xid 79" | "ecc" | "recovery" | "remap" | "lost" | "slow" | "silent"
    value: int = 0
    message: str = ""


@dataclass(frozen=True)
class HealthVerdict:
    finding: GpuFinding
    action: Action
    reason: str


def xid_table() -> dict[int, tuple[Action, str]]:
    """Return XID -> (action, meaning) from package data; the file names its sources."""
    return {
        int(row["xid"]): (Action[row["action"].upper()], row["name"])
        for row in hardware.table_rows("xids.csv")
    }


@dataclass
class Judge:
    """The judge of findings. It counts repeated errors; unknown XIDs are counted, not ignored."""

    table: dict[int, tuple[Action, str]] = field(default_factory=xid_table)
    _counted: dict[str, deque[float]] = field(default_factory=dict)  # GPU -> times
    _said: set[tuple[str, str]] = field(default_factory=set)

    def judge(self, found: GpuFinding, now_s: float) -> HealthVerdict | None:
        """Return the verdict on a finding; None if it was judged before and has not changed."""
        kind = found.what.partition(" ")[0]
        if kind != "xid":
            if (found.gpu, found.what) in self._said:
                return None
            self._said.add((found.gpu, found.what))
        match kind:
            case "xid":
                action, meaning = self.table.get(found.value, (Action.COUNT, "unknown XID"))
                if action is Action.COUNT:
                    return self._count(found, meaning, now_s)
                return HealthVerdict(found, action, meaning)
            case "ecc":
                return HealthVerdict(
                    found,
                    Action.KILL,
                    "uncorrectable ECC errors since the driver was loaded have grown",
                )
            case "recovery":
                # Even a drain of peer-to-peer alone can wait for a step boundary; every recovery
                # action needs a node without our workers.
                return HealthVerdict(
                    found,
                    Action.DRAIN,
                    f"the driver asks for: {RECOVERY.get(found.value, f'action {found.value}')}",
                )
            case "remap":
                if found.value:
                    return HealthVerdict(found, Action.DRAIN, "row remapping failed")
                return HealthVerdict(found, Action.SNAPSHOT, "a row remap is pending")
            case "lost":
                return HealthVerdict(found, Action.KILL, "the GPU has fallen off the bus")
            case "slow":
                return HealthVerdict(
                    found, Action.COUNT, "clocks are held down by the hardware (thermal or power)"
                )
            case "silent":
                return HealthVerdict(found, Action.DRAIN, "the driver does not answer any more")
        return HealthVerdict(found, Action.COUNT, "unknown finding")

    def _count(self, found: GpuFinding, meaning: str, now_s: float) -> HealthVerdict:
        times = self._counted.setdefault(found.gpu, deque())
        times.append(now_s)
        while times[0] < now_s - REPEAT_WITHIN_S:
            times.popleft()
        if len(times) >= REPEATS:
            return HealthVerdict(
                found, Action.DRAIN, f"{meaning}; {len(times)} such errors on this GPU within a day"
            )
        return HealthVerdict(found, Action.COUNT, meaning)


# ---- looking (in the probe process) --------------------------------------------------------------
class NvmlReader:
    """A reader of NVML. `nvml`: the module `pynvml` or a `FakeNvml`. Raises `nvml.NVMLError` when
    there is no driver."""

    def __init__(self, nvml: Any):
        self.nvml = nvml
        nvml.nvmlInit()
        self._gpus = {
            i: nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())
        }
        self._names = {i: _text(nvml.nvmlDeviceGetUUID(h)) for i, h in self._gpus.items()}
        self._ecc: dict[int, int] = {}  # GPU -> uncorrected errors at the last look
        self._slow: dict[int, int] = {}  # GPU -> looks in a row
        self._lost: set[int] = set()
        self._events = nvml.nvmlEventSetCreate()
        for i, handle in self._gpus.items():
            self._asked(
                i, nvml.nvmlDeviceRegisterEvents, handle, XID_EVENT | DOUBLE_BIT_EVENT, self._events
            )

    @property
    def names(self) -> list[str]:
        return list(self._names.values())

    def _asked(self, gpu: int, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a call; None if this GPU or driver does not support it. Record a
        lost GPU."""
        try:
            return call(*arguments)
        except self.nvml.NVMLError as e:
            if e.value == GPU_IS_LOST:
                self._lost.add(gpu)
            return None

    def wait(self, timeout_ms: int) -> Iterator[GpuFinding]:
        """Yield events as they come; return after `timeout_ms` without one."""
        while True:
            try:
                event = self.nvml.nvmlEventSetWait_v2(self._events, timeout_ms)
            except self.nvml.NVMLError as e:
                if e.value == GPU_IS_LOST:
                    yield GpuFinding("", "lost", message=str(e))
                if e.value != TIMEOUT:  # no event support here: keep the pace all the same
                    time.sleep(timeout_ms / 1000)
                return
            name = _text(self._asked(-1, self.nvml.nvmlDeviceGetUUID, event.device) or "")
            if event.eventType & XID_EVENT:
                yield GpuFinding(name, f"xid {event.eventData}", int(event.eventData))
            elif event.eventType & DOUBLE_BIT_EVENT:
                yield GpuFinding(name, "ecc", message="double-bit ECC event")

    def look(self) -> Iterator[GpuFinding]:
        """Yield findings from the counters and states of every GPU."""
        n = self.nvml
        for i, handle in self._gpus.items():
            name = self._names[i]
            errors = self._asked(i, n.nvmlDeviceGetTotalEccErrors, handle, UNCORRECTED, VOLATILE)
            if errors is not None:
                before, self._ecc[i] = self._ecc.get(i, errors), errors
                if errors > before:
                    yield GpuFinding(name, "ecc", errors, f"{errors - before} more")
            if (field_id := getattr(n, RECOVERY_FIELD, None)) is not None:
                values = self._asked(i, n.nvmlDeviceGetFieldValues, handle, [field_id])
                if values is not None and values[0].nvmlReturn == 0 and values[0].value.uiVal != 0:
                    yield GpuFinding(
                        name, f"recovery {values[0].value.uiVal}", int(values[0].value.uiVal)
                    )
            rows = self._asked(i, n.nvmlDeviceGetRemappedRows, handle)
            if rows is not None and (rows[2] or rows[3]):
                yield GpuFinding(
                    name,
                    f"remap {int(bool(rows[3]))}",
                    int(bool(rows[3])),
                    f"pending {rows[2]}, failed {rows[3]}",
                )
            reasons = self._asked(i, n.nvmlDeviceGetCurrentClocksEventReasons, handle)
            self._slow[i] = self._slow.get(i, 0) + 1 if reasons and reasons & HW_SLOWDOWN else 0
            if self._slow[i] == SLOW_LOOKS:
                yield GpuFinding(
                    name, "slow", int(reasons), f"for {SLOW_LOOKS * LOOK_EVERY_S:.0f} s"
                )
            if i in self._lost:
                yield GpuFinding(name, "lost")

    def measure(self) -> dict[str, float]:
        """Return utilisation, memory use, temperature and power of every GPU; values that it does
        not report are left out."""
        n, found = self.nvml, dict[str, float]()
        for i, handle in self._gpus.items():
            if (used := self._asked(i, n.nvmlDeviceGetUtilizationRates, handle)) is not None:
                found[f"gpu{i}/percent"] = float(used.gpu)
            if memory := self._asked(i, n.nvmlDeviceGetMemoryInfo, handle):
                found[f"gpu{i}/memory_percent"] = 100 * memory.used / max(1, memory.total)
            celsius = self._asked(i, n.nvmlDeviceGetTemperature, handle, ON_THE_DIE)
            if celsius is not None:
                found[f"gpu{i}/celsius"] = float(celsius)
            if (milliwatts := self._asked(i, n.nvmlDeviceGetPowerUsage, handle)) is not None:
                found[f"gpu{i}/watts"] = milliwatts / 1000
        return found


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


def watch(nvml: Any, out: IO[str], look_every_s: float = LOOK_EVERY_S) -> None:
    """Write findings and measurements without end, and an empty line as a heartbeat after every
    round."""
    probe = NvmlReader(nvml)
    print(json.dumps({"gpus": probe.names}), file=out, flush=True)
    looked_s = -look_every_s
    while True:
        findings = list(probe.wait(int(min(1.0, look_every_s) * 1000)))
        if time.monotonic() - looked_s >= look_every_s:
            findings += probe.look()
            print(json.dumps({"measured": probe.measure()}), file=out)
            looked_s = time.monotonic()
        for found in findings:
            print(json.dumps({"found": asdict(found)}), file=out)
        print(file=out, flush=True)


# ---- the agent's side ----------------------------------------------------------------------------
class Monitor:
    """The owner of the probe process, which reads its output. `on_verdict` is called from a thread
    of its own, for every new verdict; `on_measured` too, with every look."""

    def __init__(
        self,
        words: list[str],
        on_verdict: Callable[[HealthVerdict], None],
        silent_s: float = SILENT_S,
        on_measured: Callable[[Mapping[str, float]], None] = lambda readings: None,
    ):
        self._on_verdict, self._silent_s, self._judge = on_verdict, silent_s, Judge()
        self._on_measured = on_measured
        self._heard_s, self._gpus, self._over = time.monotonic(), 0, threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.agent.gpu_health", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._threads = [
            threading.Thread(target=f, name="health", daemon=True)
            for f in (self._read, self._listen_for_silence)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard_s = time.monotonic()
            if not line.strip():
                continue
            body = json.loads(line)
            if "found" in body:
                self._tell(GpuFinding(**body["found"]))
            elif "measured" in body:
                self._on_measured(body["measured"])
            else:
                self._gpus = len(body["gpus"])

    def _listen_for_silence(self) -> None:
        while not self._over.wait(min(1.0, self._silent_s / 4)):
            if self._process.poll() is not None:
                return  # it wrote the reason to stderr; training does not depend on it
            if time.monotonic() - self._heard_s > self._silent_s:
                self._tell(
                    GpuFinding("", "silent", message=f"no answer for {self._silent_s:.0f} s")
                )
                return

    def _tell(self, found: GpuFinding) -> None:
        verdict = self._judge.judge(found, time.monotonic())
        if verdict is not None and not self._over.is_set():
            self._on_verdict(verdict)

    def stop(self) -> None:
        """Kill the probe. Wait at most 2 s, since one that hangs in the driver cannot be killed."""
        self._over.set()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)


class NoMonitor:
    """A stand-in for `Monitor` without an NVIDIA GPU, or if monitoring is off."""

    def stop(self) -> None: ...


def start(
    what: str,
    on_verdict: Callable[[HealthVerdict], None],
    silent_s: float = SILENT_S,
    on_measured: Callable[[Mapping[str, float]], None] = lambda readings: None,
) -> Monitor | NoMonitor:
    """Start the monitor. `what`: "off"; "auto": by NVML if there is a driver; else the path of a
    FakeNvml's file."""
    if what == "off" or (what == "auto" and not Path("/proc/driver/nvidia/version").exists()):
        return NoMonitor()
    words = [] if what == "auto" else ["--fake", what]
    return Monitor(words, on_verdict, silent_s, on_measured)


# ---- the fake ------------------------------------------------------------------------------------
class FakeNvmlError(Exception):
    def __init__(self, value: int):
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class _Event:
    device: int
    eventType: int
    eventData: int


@dataclass
class _Value:
    uiVal: int


@dataclass
class _FieldValue:
    nvmlReturn: int
    value: _Value


@dataclass
class _Utilization:
    gpu: int


@dataclass
class _Memory:
    used: int
    total: int = 1000


class FakeNvml:
    """The part of `pynvml` that the probe uses, controlled by the lines of a file, which may grow
    at any time:

    {"gpus": 8}   {"gpu": 0, "xid": 79}   {"gpu": 0, "ecc": 1}   {"gpu": 0, "recovery": 2}   {"gpu":
                  0, "remap": [1, 0]}
    {"gpu": 0, "lost": true}   {"gpu": 0, "clocks": 64}   {"hang": true}
    {"gpu": 0, "percent": 90, "memory_percent": 50, "celsius": 65, "watts": 400}
    """

    NVMLError = FakeNvmlError
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 1

    def __init__(self, path: Path):
        self._path, self._read_lines = path, 0
        self._events: deque[_Event] = deque()
        self._count = 1
        self._state: dict[int, dict[str, Any]] = {}
        self._hangs = False

    def _refresh(self) -> None:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        for line in lines[self._read_lines :]:
            body = json.loads(line)
            self._count = body.get("gpus", self._count)
            self._hangs = body.get("hang", self._hangs)
            if "xid" in body:
                self._events.append(_Event(body["gpu"], XID_EVENT, body["xid"]))
            elif "gpu" in body:
                self._state.setdefault(body["gpu"], {}).update(body)
        self._read_lines = len(lines)
        while self._hangs:
            time.sleep(3600.0)

    def _of(self, gpu: int, name: str, default: Any) -> Any:
        self._refresh()
        state = self._state.get(gpu, {})
        if state.get("lost"):
            raise FakeNvmlError(GPU_IS_LOST)
        return state.get(name, default)

    def nvmlInit(self) -> None:
        self._refresh()

    def nvmlDeviceGetCount(self) -> int:
        return self._count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-fake-{handle}"

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:
        self._of(handle, "events", None)

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> _Event:
        deadline_s = time.monotonic() + timeout_ms / 1000
        while True:
            self._refresh()
            if self._events:
                return self._events.popleft()
            if time.monotonic() >= deadline_s:
                raise FakeNvmlError(TIMEOUT)
            time.sleep(0.02)

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return int(self._of(handle, "ecc", 0))

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[_FieldValue]:
        return [_FieldValue(0, _Value(self._of(handle, "recovery", 0)))]

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        pending, failed = self._of(handle, "remap", (0, 0))
        return 0, 0, pending, failed

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return int(self._of(handle, "clocks", 0))

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> _Utilization:
        return _Utilization(int(self._of(handle, "percent", 0)))

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> _Memory:
        return _Memory(int(10 * self._of(handle, "memory_percent", 0)))

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return int(self._of(handle, "celsius", 30))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return int(1000 * self._of(handle, "watts", 50))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m harness.agent.gpu_health")
    parser.add_argument("--fake", default="", help="path of a FakeNvml's file")
    parser.add_argument("--look-every-s", type=float, default=LOOK_EVERY_S)
    flags = parser.parse_args()
    die_with_parent()
    if flags.fake:
        nvml: Any = FakeNvml(Path(flags.fake))
    else:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            sys.exit("harness: GPU health is not watched: pip install nvidia-ml-py")
    try:
        watch(nvml, sys.stdout, flags.look_every_s)
    except nvml.NVMLError as e:
        sys.exit(f"harness: GPU health is not watched: {e}")


if __name__ == "__main__":
    main()
