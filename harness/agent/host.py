"""The interface of an agent to its machine: clocks, processes, sockets, notices, and its log.

`Host` is the interface. `RealHost` is this machine; `tests/support/system/` simulates one,
so the simulated agent is the same code as the real one. The agent reaches every other file that
knows a clock, a process or a socket through this one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from harness.agent import gpu_health, node_state
from harness.agent.flight_recorder import FlightDump
from harness.agent.node_state import AgentEvent
from harness.agent.verdicts import WorkerEnd
from harness.agent.workers import AgentConfig, Workers
from harness.bucket.layout import Epoch
from harness.core.facts import Fact, NodeFound, NodeMeasured
from harness.node.heartbeat import Sign
from harness.node.marks import Want
from harness.notices.notice import NoticeSource, watch
from harness.rendezvous.membership import PeerHeartbeats
from harness.rendezvous.peer_connections import PeerConnections
from harness.rendezvous.rendezvous import Rendezvous, free_port
from harness.uploader.node_uploader import NodeUploader
from storage.stores.bounded_store import Prompt
from storage.stores.objects import ObjectStore

# Processes beside the first member of a generation (the code's `epoch`): trackers, replica, keeper,
# alerts.

MODULES = {
    "trackers": "harness.look.trackers.trackers",
    "replica": "harness.uploader.bucket_replica",
    "keeper": "harness.uploader.archiver",
    "alerts": "harness.look.alerts.alert_evaluator",
}
WRONG_INPUT = 2  # exit status of a helper that is not restarted: it would fail again
AGAIN_S, MOST_AGAIN_S = 5.0, 600.0  # backoff of a restart: first, and longest; doubled each time
TAIL_NBYTES = 4096


@dataclass
class _Helper:
    """A wanted helper. `deaths`: number of its failures; `again_s`: time of its restart
    (monotonic); None: it runs, or is not restarted."""

    process: subprocess.Popen[bytes]
    deaths: int = 0
    again_s: float | None = None
    ended: bool = False  # its end was handled


class Helpers:
    """The helpers of this node. They outlive generations; one that has failed is restarted."""

    def __init__(self, config: AgentConfig):
        self._config = config
        self._helpers: dict[str, _Helper] = {}
        self._released: list[subprocess.Popen[bytes]] = []  # asked to end

    def start(self) -> None:
        """Start the helpers that are wanted and do not run."""
        for name in self._commands():
            found = self._helpers.get(name)
            if found is None:
                self._helpers[name] = _Helper(self._spawn(name))
            elif found.process.poll() is not None and found.again_s is None:
                found.process, found.ended = self._spawn(name), False

    def _spawn(self, name: str) -> subprocess.Popen[bytes]:
        c = self._config
        env = {**os.environ}
        if c.beside.alert_rules:
            env["HARNESS_ALERT_RULES"] = c.beside.alert_rules
        if name == "alerts":  # not as an argument, which every user of this machine can read
            env["HARNESS_ALERTS"] = c.beside.alerts
        with open(c.node_dir / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", MODULES[name], *self._commands()[name]],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def look(self, now: float) -> list[tuple[str, int, str]]:
        """Return helpers that failed since the last look: name, exit status, and the reason if
        known. Restart failed helpers after a backoff. `now`: monotonic seconds."""
        found: list[tuple[str, int, str]] = []
        for name, helper in self._helpers.items():
            code = helper.process.poll()
            if code is None:
                continue
            if not helper.ended:
                helper.ended = True
                if code == 0:
                    continue
                helper.deaths += 1
                if code != WRONG_INPUT:
                    pause_s = min(MOST_AGAIN_S, AGAIN_S * 2.0 ** min(helper.deaths - 1, 10))
                    helper.again_s = now + pause_s
                found.append((name, code, self._why(name, code)))
            elif helper.again_s is not None and now >= helper.again_s:
                helper.process, helper.ended, helper.again_s = self._spawn(name), False, None
        return found

    def _why(self, name: str, code: int) -> str:
        """Return the signal, or the type of the exception at the end of the log; "" if unknown. The
        rest of a log may hold secrets."""
        if code < 0:
            known = {s.value for s in signal.Signals}
            return signal.Signals(-code).name if -code in known else f"signal {-code}"
        try:
            with open(self._config.node_dir / f"{name}.log", "rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - TAIL_NBYTES))
                tail = log.read().decode(errors="replace").strip()
        except OSError:
            return ""
        last = tail.rpartition("\n")[2]
        error = re.match(r"(?:\w+\.)*(\w*(?:Error|Exception|Unavailable))\b", last)
        return error[1] if error else "wrong input" if code == WRONG_INPUT else ""

    def _commands(self) -> dict[str, list[str]]:
        """Return the arguments of each wanted helper, by name."""
        c, beside = self._config, self._config.beside
        commands = {"keeper": [c.run]}
        if beside.trackers:
            commands["trackers"] = [c.run, "--trackers", beside.trackers]
        if beside.alerts or beside.trackers:  # trackers publish alerts that it fires
            commands["alerts"] = [c.run]
        if beside.replica:
            cap = beside.replica_cap_usd
            commands["replica"] = [
                c.run,
                beside.replica,
                *([] if cap is None else ["--cap-usd", str(cap)]),
                *(["--here", c.place] if c.place else []),
            ]
        return commands

    def release(self) -> None:
        """End replica, keeper and alerts here: another node runs them now."""
        self._released = [p for p in self._released if p.poll() is None]
        for name in ("replica", "keeper", "alerts"):
            if helper := self._helpers.pop(name, None):
                helper.process.terminate()
                self._released.append(helper.process)

    def end(self, wait_s: float) -> None:
        """End all helpers; kill those that have not ended within `wait_s`."""
        until_s = time.monotonic() + wait_s
        processes = [*(h.process for h in self._helpers.values()), *self._released]
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# Measurements of a node's hardware: CPU, memory, disks, network and GPUs, about once a minute.
#
# psutil reads the machine, in a thread beside the agent. NVML reads the GPUs, in the process of
# `gpu_health.py`, since a sick GPU's driver can hang. All values are of the whole machine,
# including other users of it.

SAMPLE_S = 5.0  # between two readings of values without a counter
# With more members each records less often: a run of a month has half a million facts, with any
# number of nodes
FEW_MEMBERS = 8
INSIDE = ("lo", "docker", "veth", "br-", "cni", "virbr")  # interfaces to no other machine


class Gauges:
    """Means of the readings since they were taken last. Thread-safe."""

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
    """Readings of this machine, by psutil. Values that a system does not have are left out.
    `folder`: on the disk whose space is measured."""

    def __init__(self, folder: Path):
        self._folder = folder
        psutil.cpu_percent()  # the next call covers the time since this one
        self._counted = self._counters()

    def gauges(self) -> dict[str, float]:
        """Return the current values, in percent."""
        found = {"memory/percent": psutil.virtual_memory().percent}
        with contextlib.suppress(OSError):
            found["disk/percent"] = psutil.disk_usage(str(self._folder)).percent
        return found

    def rates(self, seconds: float) -> dict[str, float]:
        """Return the rates since the last call, which was `seconds` ago."""
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
    """A thread that records measurements. `every_s`: seconds between two facts in a small world.
    `gauges`: other threads add to it as well; `record` must be thread-safe."""

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
        """Set the number of members in this node's world."""
        self._members = members

    def stop(self) -> None:
        """Record the remaining measurements and end the thread."""
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
                    return  # too short a time for meaningful rates
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
    """A stand-in for `HardwareWatch` that measures nothing."""

    def crowd(self, members: int) -> None: ...

    def stop(self) -> None: ...


CERTAIN_S = 240.0  # after a signal's grace, at the latest, the agent's process ends

RecordFact = Callable[[Fact], None]
TellEvent = Callable[[AgentEvent], None]


# ---- parts of a host -----------------------------------------------------------------------------
class Flag(Protocol):
    def is_set(self) -> bool: ...
    def clear(self) -> None: ...


class PeerTransport(PeerHeartbeats, Protocol):
    """Open connections to the other members, as in `peer_connections.PeerConnections`."""

    @property
    def port(self) -> int: ...  # on which we accept callers
    @property
    def changed(self) -> Flag: ...  # set when something was received that may matter
    def close(self) -> None: ...


class MarkWriter(Protocol):
    """The agent's end of its workers' mark, as in `marks.MarkFile`. Writing it waits for nobody,
    and does not fail: what could not be written is passed on otherwise, and written again."""

    def write(self, want: Want, why: str, deadline_s: float | None) -> None: ...
    def write_again(self) -> None: ...


class WorkerPool(Protocol):
    """The workers of one generation (the code's `epoch`), as in `workers.Workers`."""

    @property
    def all(self) -> Sequence[Any]: ...  # each has its exit `code`, `guilty` and `mismatched`
    @property
    def mark(self) -> MarkWriter: ...
    def warm(self) -> bool: ...
    def warm_up(self) -> None: ...
    def close(self, within_s: float) -> None: ...
    def clear_signs(self) -> None: ...
    def start(self, epoch: Epoch, stage: Path, patience: float) -> None: ...
    def prepare(self, beside: Epoch, stage: Path) -> None: ...
    def stay(self) -> bool: ...
    def seen(self) -> list[WorkerEnd]: ...
    def at_work(self) -> int: ...
    def attached(self) -> bool: ...
    def unadopted(self) -> bool: ...
    def signs(self) -> list[Sign]: ...
    def step_ends_s(self) -> float | None: ...
    def forgive(self, seconds: float) -> None: ...
    def signal(self, name: str) -> None: ...
    def find_hung(self, now: float) -> Sequence[Any]: ...
    def stacks(self) -> Sequence[Fact]: ...
    def end(self, within_s: float) -> list[str]: ...
    def flights(self) -> list[FlightDump]: ...


class Sidecars(Protocol):
    """Processes beside the first member of a generation, as in `Helpers`."""

    def start(self) -> None: ...
    def release(self) -> None: ...
    def look(self, now: float) -> list[tuple[str, int, str]]: ...  # that died: name, status, why
    def end(self, wait_s: float) -> None: ...


class UploadService(Protocol):
    """The node's uploader, as in `node_uploader.NodeUploader`."""

    @property
    def folder(self) -> Path: ...  # the stage
    def ensure(self) -> None: ...
    def look(self, now: float) -> list[tuple[str, int, str]]: ...  # as of `Sidecars`
    def busy(self) -> int: ...
    def drain(self, deadline_s: float | None) -> None: ...
    def settle(self, wait_s: float, near: bool = False) -> None: ...
    def close(self, wait_s: float) -> None: ...


class Measuring(Protocol):
    """Measurements of the machine's hardware, as in `HardwareWatch`."""

    def crowd(self, members: int) -> None: ...
    def stop(self) -> None: ...


class EventSources(Protocol):
    """A listener for signals, notices or GPU health."""

    def stop(self) -> None: ...


@dataclass
class EventInbox:
    """The inputs of a node from outside. `inbox`: events that are not yet handled; `listening`,
    `hardware`: None before they began."""

    sources: list[NoticeSource]
    inbox: queue.SimpleQueue[AgentEvent] = field(default_factory=queue.SimpleQueue)
    listening: EventSources | None = None
    hardware: Measuring | None = None

    def crowd(self, members: int) -> None:
        """Set the number of members in this node's world."""
        if self.hardware is not None:
            self.hardware.crowd(members)

    def stop(self) -> None:
        for part in (self.listening, self.hardware):
            if part is not None:
                part.stop()


FindPlace = Callable[[Callable[[NodeFound], None]], EventSources]


class Host(Protocol):
    """One machine, as its agent sees it. Times are in seconds."""

    name: str  # of the machine
    pid: int

    def monotonic(self) -> float: ...
    def wall(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...
    def token(self) -> str: ...  # six random hex digits
    def say(self, text: str, wrong: bool = False) -> None: ...
    def workers(self, config: AgentConfig, member: str, record: RecordFact) -> WorkerPool: ...
    def helpers(self, config: AgentConfig) -> Sidecars: ...
    def uploads(self, config: AgentConfig, member: str) -> UploadService: ...
    def prompt(self, store: ObjectStore) -> ObjectStore:
        """Return a store that never lets the agent's loop wait for long."""

    def last_words(self, seconds: float) -> None:
        """Let that store's calls wait until `seconds` from now, as the loop is over."""

    def lines(self, config: AgentConfig, member: str) -> PeerTransport: ...
    def free_port(self, addr: str) -> int: ...
    def measure(self, config: AgentConfig, member: str, record: RecordFact) -> Measuring: ...
    def listen(
        self, config: AgentConfig, sources: list[NoticeSource], tell: TellEvent
    ) -> EventSources: ...

    def start_beats(self, rendezvous: Rendezvous) -> None:
        """Make the rendezvous write its member now, and send heartbeats from then on. Raises
        StoreError."""


# ---- this machine --------------------------------------------------------------------------------
@dataclass
class _All:
    parts: list[EventSources]

    def stop(self) -> None:
        for part in self.parts:
            part.stop()


class RealHost:
    """The machine on which this process runs. `place`: starts to find out its location and price,
    and reports them; None: they are known elsewhere."""

    def __init__(self, place: FindPlace | None = None) -> None:
        self.name, self.pid, self._place = socket.gethostname(), os.getpid(), place
        self._gauges = Gauges()
        self._store: Prompt | None = None

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def token(self) -> str:
        return secrets.token_hex(3)

    def say(self, text: str, wrong: bool = False) -> None:
        print(f"harness run: {text}", file=sys.stderr if wrong else sys.stdout, flush=True)

    def workers(self, config: AgentConfig, member: str, record: RecordFact) -> Workers:
        config.node_dir.mkdir(parents=True, exist_ok=True)
        return Workers(config, member, record)

    def helpers(self, config: AgentConfig) -> Helpers:
        return Helpers(config)

    def uploads(self, config: AgentConfig, member: str) -> NodeUploader:
        up = config.uploads
        nearby = replace(up.nearby, addr=config.addr, share=config.nproc > 1)
        log = config.node_dir / "uploader.log"
        return NodeUploader(config.run, member, up.stage_dir, up.stage_nbytes, log, nearby)

    def prompt(self, store: ObjectStore) -> ObjectStore:
        self._store = Prompt(store)
        return self._store

    def last_words(self, seconds: float) -> None:
        if self._store is not None:
            self._store.allow(seconds)

    def lines(self, config: AgentConfig, member: str) -> PeerConnections:
        return PeerConnections(member, config.addr, config.timing.beat_s / 2)

    def free_port(self, addr: str) -> int:
        return free_port(addr)

    def measure(self, config: AgentConfig, member: str, record: RecordFact) -> Measuring:
        every_s, folder = config.timing.measure_s, config.node_dir
        if not every_s:
            return NoWatch()
        return HardwareWatch(member, every_s, folder, self._gauges, record)

    def listen(
        self, config: AgentConfig, sources: list[NoticeSource], tell: TellEvent
    ) -> EventSources:
        certain = False

        def signalled(number: int, _: object) -> None:
            nonlocal certain
            if not certain:  # whatever hangs then, even the loop, says where, and the agent ends
                faulthandler.dump_traceback_later(config.leaving.grace_s + CERTAIN_S, exit=True)
                certain = True
            tell(node_state.Signalled(signal.Signals(number).name))

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signalled)
        signal.signal(signal.SIGUSR1, lambda *_: tell(node_state.SnapshotAsked("snapshot")))
        watcher = watch(sources, tell)
        gpus = gpu_health.start(
            config.fitness.gpu_health,
            lambda verdict: tell(node_state.GpuJudged(verdict)),
            on_measured=self._gauges.add,
        )
        place = self._place
        finding = place(lambda found: tell(node_state.PlaceFound(found))) if place else None
        return _All([watcher, gpus, *([finding] if finding else [])])

    def start_beats(self, rendezvous: Rendezvous) -> None:
        rendezvous.start()
