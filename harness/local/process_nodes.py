"""The machines of the local cloud: process trees that are found, counted and killed as a unit.

The provider (`provider.py`) uses it. Linux only: it reads /proc.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core.world import Node, NodeState, Offer
from harness.local import spot_schedule as markets
from harness.local.metadata_reply import MetadataProtocol
from harness.local.metadata_server import MetadataServer

log = logging.getLogger("harness.local.provider")
# how long processes in uninterruptible sleep may survive SIGKILL before we give up
KILL_WITHIN_S = 10.0


@dataclass(frozen=True)
class Config:
    """The configuration that `local_cloud.py` writes for the provider that it starts."""

    market: str = "demo"
    min_nodes: int = 1
    max_nodes: int = 3
    run_url: str = ""  # where progress is read from; "" or memory:// means nowhere
    name: str = "task"
    launch_s: float = 0.3  # from the launch request to a running node
    idle_exit_s: float = 30.0  # exit after this long without nodes and without calls
    gpus: tuple[str, ...] = ()  # visible devices, divided among the nodes
    offers: tuple[Offer, ...] = markets.OFFERS
    notices: str = "aws"  # the cloud whose metadata service is simulated

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Config:
        body = json.loads(text)
        return cls(
            **{
                **body,
                "gpus": tuple(body["gpus"]),
                "offers": tuple(Offer(**o) for o in body["offers"]),
            }
        )


@dataclass(frozen=True)
class NodeCommand:
    """The command of a node, with its folder and environment."""

    command: str = ""
    cwd: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass
class LiveMachine:
    """The process and metadata service of a machine while it is up."""

    process: subprocess.Popen[bytes] | None = None
    imds: MetadataProtocol | None = None
    metadata: MetadataServer | None = None


@dataclass
class LocalMachine:
    """One attempt in the provider. Only the main thread starts and ends its processes."""

    attempt: int
    offer: Offer
    asked_s: float
    state: NodeState = NodeState.PENDING
    up_s: float | None = None
    gone_s: float | None = None
    exit_code: int | None = None
    reason: str = ""
    pid: int = 0
    noticed_s: float | None = None
    # not saved: only KEPT is
    slot: int = -1
    ready_s: float = 0.0
    asked: NodeCommand = field(default_factory=NodeCommand)
    live: LiveMachine = field(default_factory=LiveMachine)
    doom: tuple[float, str] | None = None  # (when to kill it, the reason)

    KEPT = (
        "attempt",
        "offer",
        "asked_s",
        "state",
        "up_s",
        "gone_s",
        "exit_code",
        "reason",
        "pid",
        "noticed_s",
    )

    def to_json(self) -> dict[str, Any]:
        body = {name: getattr(self, name) for name in self.KEPT}
        return {**body, "offer": dataclasses.asdict(self.offer), "state": self.state.value}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> LocalMachine:
        known = {k: v for k, v in body.items() if k in cls.KEPT}
        return cls(**{**known, "offer": Offer(**body["offer"]), "state": NodeState(body["state"])})


def node_of(body: Mapping[str, Any]) -> Node:
    """Return the `Node` of a saved machine (`LocalMachine.to_json`)."""
    m = LocalMachine.from_json(body)
    return Node(m.attempt, m.offer, m.state, m.asked_s, m.up_s, m.gone_s, m.exit_code, m.reason)


# ---- processes -----------------------------------------------------------------------------------
def _processes() -> Iterator[tuple[int, int, int]]:
    """Yield (pid, parent pid, session id) of every process that is not a zombie."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path("/proc", name, "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended meanwhile
            fields = stat.rpartition(")")[2].split()  # the process name may contain anything
            if fields[0] not in "ZX":
                yield int(name), int(fields[1]), int(fields[3])


def _environ(pid: int) -> bytes:
    try:
        return b"\0" + Path("/proc", str(pid), "environ").read_bytes() + b"\0"
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""  # ended, or another user's


def belonging(marker: bytes, session: int = 0) -> set[int]:
    """Return the pids of all processes that have the marker in their environment, belong to the
    session (0: no session), or descend from such a process. Our own process is left out."""
    table = list(_processes())
    me = os.getpid()
    mine = {
        pid
        for pid, _, sid in table
        if pid != me and ((session and sid == session) or marker in _environ(pid))
    }
    grown = True
    while grown:
        more = {pid for pid, parent, _ in table if parent in mine and pid not in mine and pid != me}
        grown = bool(more)
        mine |= more
    return mine


def kill_all(marker: bytes, session: int = 0, within_s: float = KILL_WITHIN_S) -> set[int]:
    """Send SIGKILL to all processes of `belonging` until none is left. Return the pids that were
    still alive after `within_s`."""
    give_up_s = time.monotonic() + within_s
    clean = 0
    left: set[int] = set()
    while clean < 2:  # twice: a process may have forked while we were reading /proc
        left = belonging(marker, session)
        clean = 0 if left else clean + 1
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if left:
            if time.monotonic() > give_up_s:
                return left
            time.sleep(0.005)
    return left


def marker_of(name: str, value: str, whole: bool = True) -> bytes:
    return b"\0" + f"{name}={value}".encode() + (b"\0" if whole else b"")


def sweep_processes(state_dir: Path) -> set[int]:
    """Kill all remaining processes of all nodes of this STATE_DIR. Return those that survive."""
    return kill_all(marker_of("HARNESS_NODE_DIR", f"{state_dir}/nodes/", whole=False))


def start_guard(instance: str) -> tuple[int, int]:
    """Fork a guard process that kills every node when this process is gone, however it ended.
    Return (pid of the guard, pipe to hold open).

    The parent-death signal reaches a node's first process only; its children may have sessions of
    their own. Call this before any thread is started.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read)
        return pid, write
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.dup2(read, 3)
        # above all the lock and the pipe's write end, which must not outlive the provider
        os.closerange(4, 1024)
        while os.read(3, 1):
            pass
        kill_all(marker_of("HARNESS_PROVIDER", instance))
    finally:
        os._exit(0)
