"""All that an agent takes from its machine: clocks, processes, sockets, notices, and words to who
reads its log.

`Host` is the door. `RealHost` is this machine; `proof/system/` plays one. So the agent that is
simulated is the agent that runs. Every other file of the agent that knows a clock, a process or a
socket is reached through here.
"""

from __future__ import annotations

import os
import queue
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from harness.agent import health, machine
from harness.agent.config import AgentConfig
from harness.agent.ends import WorkerEnd
from harness.agent.flight import FlightDump
from harness.agent.helpers import Helpers
from harness.agent.lines import Lines
from harness.agent.machine import AgentEvent
from harness.agent.measuring import Gauges, HardwareWatch, NoWatch
from harness.agent.membership import Ears
from harness.agent.notices import NoticeSource, watch
from harness.agent.rendezvous import Rendezvous, free_port
from harness.agent.workers import Workers
from harness.bucket.layout import Epoch
from harness.core.facts import Fact, NodeFound
from harness.node.marks import Want
from harness.node.progress import Sign
from harness.uploader.client import NodeUploader

RecordFact = Callable[[Fact], None]
TellEvent = Callable[[AgentEvent], None]


# ---- what a host has -----------------------------------------------------------------------------
class Flag(Protocol):
    def is_set(self) -> bool: ...
    def clear(self) -> None: ...


class PeerLines(Ears, Protocol):
    """Open connections to the other members, as `lines.Lines` has them."""

    @property
    def port(self) -> int: ...  # where others find us
    @property
    def changed(self) -> Flag: ...  # set when something was heard that may matter
    def close(self) -> None: ...


class WorkerPool(Protocol):
    """The workers of one epoch, as `workers.Workers` has them."""

    @property
    def all(self) -> Sequence[Any]: ...  # each with the exit `code` of its end, and `guilty`
    def warm(self) -> bool: ...
    def warm_up(self) -> None: ...
    def close(self) -> None: ...
    def clear_signs(self) -> None: ...
    def start(self, epoch: Epoch, stage: Path, patience: float) -> None: ...
    def seen(self) -> list[WorkerEnd]: ...
    def at_work(self) -> int: ...
    def attached(self) -> bool: ...
    def signs(self) -> list[Sign]: ...
    def forgive(self, seconds: float) -> None: ...
    def mark(self, want: Want, why: str, deadline_s: float | None) -> None: ...
    def signal(self, name: str) -> None: ...
    def find_hung(self, now: float) -> Sequence[Any]: ...
    def end(self) -> list[int]: ...
    def flights(self) -> list[FlightDump]: ...


class Sidecars(Protocol):
    """Processes beside the first member of an epoch, as `helpers.Helpers` has them."""

    def start(self) -> None: ...
    def release(self) -> None: ...
    def look(self, now: float) -> list[tuple[str, int, str]]: ...  # who died: name, status, why
    def end(self, wait_s: float) -> None: ...


class UploadService(Protocol):
    """The node's uploader, as `client.NodeUploader` holds it."""

    @property
    def folder(self) -> Path: ...  # the stage
    def ensure(self) -> None: ...
    def busy(self) -> int: ...
    def drain(self, deadline_s: float | None) -> None: ...
    def settle(self, wait_s: float, near: bool = False) -> None: ...
    def close(self) -> None: ...


class Measuring(Protocol):
    """Of the machine's hardware, as `measuring.HardwareWatch` does it."""

    def crowd(self, members: int) -> None: ...
    def stop(self) -> None: ...


class Listening(Protocol):
    """To signals, notices and GPUs."""

    def stop(self) -> None: ...


@dataclass
class Hearing:
    """What reaches a node from outside. `inbox`: what was heard and is not yet decided about;
    `listening`, `hardware`: None before they began."""

    sources: list[NoticeSource]
    inbox: queue.SimpleQueue[AgentEvent] = field(default_factory=queue.SimpleQueue)
    listening: Listening | None = None
    hardware: Measuring | None = None

    def crowd(self, members: int) -> None:
        """So many members are in this node's world."""
        if self.hardware is not None:
            self.hardware.crowd(members)

    def stop(self) -> None:
        for part in (self.listening, self.hardware):
            if part is not None:
                part.stop()


FindPlace = Callable[[Callable[[NodeFound], None]], Listening]


class Host(Protocol):
    """One machine, as its agent has it. Times are in seconds."""

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
    def lines(self, config: AgentConfig, member: str) -> PeerLines: ...
    def free_port(self, addr: str) -> int: ...
    def measure(self, config: AgentConfig, member: str, record: RecordFact) -> Measuring: ...
    def listen(
        self, config: AgentConfig, sources: list[NoticeSource], tell: TellEvent
    ) -> Listening: ...

    def start_beats(self, rendezvous: Rendezvous) -> None:
        """Have it say what it is now, and from then on beat when it is due. Raises StoreError."""


# ---- this machine --------------------------------------------------------------------------------
@dataclass
class _All:
    parts: list[Listening]

    def stop(self) -> None:
        for part in self.parts:
            part.stop()


class RealHost:
    """The machine on which this process runs. `place`: finds out where it stands and what it
    costs, and tells; None: somebody else knows."""

    def __init__(self, place: FindPlace | None = None) -> None:
        self.name, self.pid, self._place = socket.gethostname(), os.getpid(), place
        self._gauges = Gauges()

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

    def lines(self, config: AgentConfig, member: str) -> Lines:
        return Lines(member, config.addr, config.timing.beat_s / 2)

    def free_port(self, addr: str) -> int:
        return free_port(addr)

    def measure(self, config: AgentConfig, member: str, record: RecordFact) -> Measuring:
        every_s, folder = config.timing.measure_s, config.node_dir
        if not every_s:
            return NoWatch()
        return HardwareWatch(member, every_s, folder, self._gauges, record)

    def listen(
        self, config: AgentConfig, sources: list[NoticeSource], tell: TellEvent
    ) -> Listening:
        def signalled(number: int, _: object) -> None:
            tell(machine.Signalled(signal.Signals(number).name))

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signalled)
        signal.signal(signal.SIGUSR1, lambda *_: tell(machine.SnapshotAsked("snapshot")))
        watcher = watch(
            sources,
            on_notice=lambda notice: tell(machine.Noticed(notice)),
            on_cancel=lambda notice: tell(machine.Cancelled(notice)),
        )
        gpus = health.start(
            config.fitness.gpu_health,
            lambda verdict: tell(machine.GpuJudged(verdict)),
            on_measured=self._gauges.add,
        )
        place = self._place
        finding = place(lambda found: tell(machine.PlaceFound(found))) if place else None
        return _All([watcher, gpus, *([finding] if finding else [])])

    def start_beats(self, rendezvous: Rendezvous) -> None:
        rendezvous.start()
