"""A run on this computer: real agents and workers that somebody holds at a phase. Which script they
train, and what runs in their processes before it, is the caller's."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from harness.core.world import BadInput
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store

PHASES = ("start", "step", "staging", "upload", "commit", "rendezvous", "resume")
ANYBODY = ("commit", "rendezvous")  # phases that either node may reach
STEPS, EVERY = 40, 10
ROOT = Path(__file__).parents[2]  # the folder that `harness` is imported from
AGENT = shlex.split(
    "--grace-s 8 --set beat_s=0.3 --set dead_s=2 --set hang_after_s=6 --set stuck_after_s=30 "
    "--set gpu_health=off"
)
THAW_S = 5.0  # delay until stopped processes are continued: longer than dead_s
REACH_S = 90.0  # time for the processes to reach the phase


class NotReached(RuntimeError):
    """Raised when the phase was never reached, so that the cell proves nothing."""


# ---- nodes ---------------------------------------------------------------------------------------
def can_isolate() -> bool:
    """Return whether network namespaces work: Linux, root, iproute2, and a kernel that permits
    them."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"hd{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


@functools.cache
def can_mount() -> bool:
    """Return whether this process may mount a small disk: Linux and root."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory(prefix="harness-disk-") as folder:
        try:
            mount(Path(folder), 1 << 20)
        except (OSError, subprocess.SubprocessError):
            return False
        unmount(Path(folder))
        return True


def mount(folder: Path, nbytes: int) -> None:
    """Make a folder a disk of its own, in memory. Raises OSError, SubprocessError."""
    words = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", str(folder)]
    subprocess.run(words, check=True, capture_output=True, timeout=20)


def unmount(folder: Path) -> None:
    """Undo `mount`; what lies there is lost."""
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, timeout=20)


def fill(folder: Path) -> Path:
    """Fill the disk on which a folder lies. Return the file that does it."""
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as f, contextlib.suppress(OSError):
        while f.write(bytes(4096)):
            pass
    return filler


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@dataclass
class Bridge:
    """A bridge with one namespace per node. It is isolated from the outside: the bridge has no
    address."""

    name: str
    nodes: int = 0

    def __enter__(self) -> Bridge:
        ip("link", "add", f"{self.name}b", "type", "bridge")
        ip("link", "set", f"{self.name}b", "up")
        return self

    def add(self) -> tuple[list[str], str]:
        """Return the command prefix that puts a process into a new namespace, and its address
        there."""
        self.nodes += 1
        space, address = self.space(self.nodes), self.address(self.nodes)
        ip("netns", "add", space)
        ip(
            "link",
            "add",
            self.link(self.nodes),
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            space,
        )
        ip("link", "set", self.link(self.nodes), "master", f"{self.name}b", "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            ip("-n", space, *words)
        return ["ip", "netns", "exec", space], address

    def space(self, node: int) -> str:
        return f"{self.name}n{node}"

    def address(self, node: int) -> str:
        return f"10.213.0.{node}"

    def link(self, node: int) -> str:
        return f"{self.name}v{node}"

    def __exit__(self, *_: object) -> None:
        for n in range(1, self.nodes + 1):
            subprocess.run(["ip", "netns", "del", self.space(n)], capture_output=True)
            subprocess.run(["ip", "link", "del", self.link(n)], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self.name}b"], capture_output=True)


@dataclass
class Drilled:
    """One node: an agent, its workers, and the folder from which it is sabotaged."""

    number: int
    folder: Path
    process: subprocess.Popen[bytes]

    def processes(self) -> list[psutil.Process]:
        """Return everything that belongs to the node, the agent first."""
        found = []
        for p in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    p.environ().get("HARNESS_NODE_DIR") == str(self.folder)
                    and p.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(p)
        return sorted(found, key=lambda p: (p.pid != self.process.pid, p.pid))

    def workers(self) -> list[psutil.Process]:
        """Return the training processes, the one that has used the most processor time first."""
        ours = []
        for p in self.processes():
            with contextlib.suppress(psutil.Error):
                if p.name().startswith("rank-"):
                    ours.append((p.cpu_times().user, p))
        return [p for _, p in sorted(ours, key=lambda pair: -pair[0])]

    def order(self, name: str, text: str) -> None:
        temporary = self.folder / f".{name}"
        temporary.write_text(text)
        temporary.replace(self.folder / name)

    def forget(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)


@dataclass
class LocalRun:
    """A run while it goes on. `module`: the training, as `python -m` names it; `startup`: returns
    the text of the `sitecustomize.py` of a node's processes, given the node's folder."""

    folder: Path
    net: Bridge | None
    rng: random.Random
    module: str
    startup: Callable[[Path], str]
    nodes: list[Drilled] = field(default_factory=list)
    later: list[threading.Timer] = field(default_factory=list)
    victim: int = 0  # index into nodes
    reached: int = 0  # pid of the process that is held at the phase; 0: none
    notes: list[str] = field(default_factory=list)
    steps: int = STEPS
    every: int = EVERY
    disk_nbytes: int = 0  # of the disk on which each node's folder lies; 0: it has none of its own

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def node(self) -> Drilled:
        return self.nodes[self.victim]

    def launch(self, hold: Mapping[str, object] | None = None) -> Drilled:
        number = len(self.nodes) + 1
        folder = self.folder / f"node{number}"
        folder.mkdir()
        if self.disk_nbytes:
            mount(folder, self.disk_nbytes)
        (folder / "sitecustomize.py").write_text(self.startup(folder))
        if hold is not None:
            (folder / "hold.json").write_text(json.dumps(hold))
        prefix, address = self.net.add() if self.net else ([], "127.0.0.1")
        path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = plain_environment() | {
            "HARNESS_NODE_DIR": str(folder),
            "HARNESS_ATTEMPT": str(number),
            "PYTHONPATH": path,
        }
        env["HARNESS_HOST"] = f"node-{number}"
        env |= {"GLOO_SOCKET_IFNAME": "eth0" if self.net else "lo"}
        command = [
            *prefix,
            sys.executable,
            "-m",
            "harness.cli",
            "run",
            "--run",
            str(self.run),
            *AGENT,
            "--set",
            f"addr={address}",
        ]
        with open(self.folder / f"node{number}.log", "wb") as log:
            process = subprocess.Popen(
                [
                    *command,
                    "--",
                    "-m",
                    self.module,
                    "--total",
                    str(self.steps),
                    "--every",
                    str(self.every),
                ],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.nodes.append(Drilled(number, folder, process))
        return self.nodes[-1]

    def after(self, seconds: float, do: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, do)
        timer.daemon = True
        timer.start()
        self.later.append(timer)

    def final(self) -> bool:
        snapshots = Snapshots(open_store(str(self.run)))
        manifest = snapshots.latest()
        return bool(manifest and snapshots.ended(manifest))

    def close(self) -> None:
        for timer in self.later:
            timer.cancel()
        for node in self.nodes:
            for p in node.processes():
                send_signal([p], signal.SIGKILL)
            node.process.wait(20)
            if self.disk_nbytes:
                unmount(node.folder)


def plain_environment() -> dict[str, str]:
    """Return our environment without variables that would make a child act as another's node."""
    base = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("HARNESS_", "SKYPILOT_", "AWS_", "TORCHELASTIC_"))
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        base.pop(name, None)
    # whatever aborts says where
    return base | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


def send_signal(processes: Iterable[psutil.Process], number: int) -> None:
    for p in processes:
        with contextlib.suppress(psutil.Error):
            p.send_signal(number)


def wait_until(
    condition: Callable[[], bool], limit_s: float, s: LocalRun, error: Exception
) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s or all(n.process.poll() is not None for n in s.nodes):
            raise error
        time.sleep(0.01)


def train(module: str, run: Path, steps: int, every: int, *extra: str, wanted: int = 0) -> str:
    """Train `module` undisturbed in one process; return the hash of the weights. Raises
    RuntimeError if that fails."""
    command = [
        sys.executable,
        "-m",
        module,
        "--total",
        str(steps),
        "--every",
        str(every),
        "--sleep-s",
        "0",
        *extra,
    ]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = plain_environment() | {"HARNESS_RUN": str(run), "PYTHONPATH": path}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
    if ended.returncode != wanted:
        raise RuntimeError(
            f"the calm run ended with {ended.returncode}, wanted "
            f"{wanted}:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
        )
    manifest = Snapshots(open_store(str(run))).latest()
    assert manifest is not None
    return str(manifest.data["weights"])


@contextlib.contextmanager
def kept_folder(keep: str, prefix: str) -> Iterator[Path]:
    """Yield the folder `keep`, or a temporary one that is deleted afterwards. Raises BadInput if
    `keep` is not empty."""
    if not keep:
        with tempfile.TemporaryDirectory(prefix=prefix) as made:
            yield Path(made)
        return
    folder = Path(keep)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"--keep {keep}: wanted an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
