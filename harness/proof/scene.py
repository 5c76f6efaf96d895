"""A drill's scene: real agents and workers on this computer, held still at the phase where a
fault is wanted."""

from __future__ import annotations

import contextlib
import json
import os
import random
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
from storage.opening import open_store
from storage.snapshots import Snapshots

PHASES = ("start", "step", "staging", "upload", "commit", "rendezvous", "resume")
ANYBODY = ("commit", "rendezvous")  # one of the nodes does it; who, is seen when it happens
STEPS, EVERY = 40, 10
AGENT = (
    "--beat-s",
    "0.3",
    "--dead-s",
    "2",
    "--hang-after-s",
    "6",
    "--stuck-after-s",
    "30",
    "--grace-s",
    "8",
    "--gpu-health",
    "off",
)
THAW_S = 5.0  # who was stopped is continued after this: longer than --dead-s
REACH_S = 90.0  # for the processes to get to the phase


class NotReached(RuntimeError):
    """The phase never came; the cell says nothing."""


# ---- nodes ---------------------------------------------------------------------------------------
def can_isolate() -> bool:
    """Network namespaces: Linux, root, iproute2, and a kernel that lets us."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"hd{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@dataclass
class Bridge:
    """A bridge, and one namespace per node on it. Nothing of it reaches outside: the bridge has
    no address."""

    name: str
    nodes: int = 0

    def __enter__(self) -> Bridge:
        ip("link", "add", f"{self.name}b", "type", "bridge")
        ip("link", "set", f"{self.name}b", "up")
        return self

    def add(self) -> tuple[list[str], str]:
        """The command prefix that puts a process into a new namespace, and its address there."""
        self.nodes += 1
        space, address = f"{self.name}n{self.nodes}", f"10.213.0.{self.nodes}"
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

    def link(self, node: int) -> str:
        return f"{self.name}v{node}"

    def __exit__(self, *_: object) -> None:
        for n in range(1, self.nodes + 1):
            subprocess.run(["ip", "netns", "del", f"{self.name}n{n}"], capture_output=True)
            subprocess.run(["ip", "link", "del", self.link(n)], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self.name}b"], capture_output=True)


@dataclass
class Drilled:
    """One node: an agent, its workers, and the folder from which it is sabotaged."""

    number: int
    folder: Path
    process: subprocess.Popen[bytes]

    def processes(self) -> list[psutil.Process]:
        """Everything that belongs to the node, the agent first."""
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
        """Those that train; the one that has used the most processor time first."""
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
class Scene:
    """One cell's run while it goes on."""

    folder: Path
    net: Bridge | None
    rng: random.Random
    nodes: list[Drilled] = field(default_factory=list)
    later: list[threading.Timer] = field(default_factory=list)
    victim: int = 0  # index into nodes
    reached: int = 0  # pid of the process that stands at the phase; 0: none
    notes: list[str] = field(default_factory=list)
    steps: int = STEPS
    every: int = EVERY

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
        (folder / "sitecustomize.py").write_text(
            f"from harness.proof import sabotage\n\nsabotage.arm({str(folder)!r})\n"
        )
        if hold is not None:
            (folder / "hold.json").write_text(json.dumps(hold))
        prefix, address = self.net.add() if self.net else ([], "127.0.0.1")
        path = os.pathsep.join(
            [str(folder), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        )
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
            "--addr",
            address,
        ]
        with open(self.folder / f"node{number}.log", "wb") as log:
            process = subprocess.Popen(
                [
                    *command,
                    "--",
                    "-m",
                    "harness.proof.exercise",
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


def plain_environment() -> dict[str, str]:
    """Ours, without what would make a child take itself for somebody else's node."""
    base = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("HARNESS_", "SKYPILOT_", "AWS_", "TORCHELASTIC_"))
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        base.pop(name, None)
    return base | {"OMP_NUM_THREADS": "1"}


def send_signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for p in processes:
        with contextlib.suppress(psutil.Error):
            p.send_signal(number)


def wait_until(condition: Callable[[], bool], limit_s: float, s: Scene, error: Exception) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s or all(n.process.poll() is not None for n in s.nodes):
            raise error
        time.sleep(0.01)


def train(run: Path, steps: int, every: int, *extra: str, wanted: int = 0) -> str:
    """Train calmly in one process; the hash of the weights. Raises RuntimeError if even that
    fails."""
    command = [
        sys.executable,
        "-m",
        "harness.proof.exercise",
        "--total",
        str(steps),
        "--every",
        str(every),
        "--sleep-s",
        "0",
        *extra,
    ]
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
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
    """The folder that a person wants kept, or one that is gone afterwards. Raises BadInput if there
    is something in it."""
    if not keep:
        with tempfile.TemporaryDirectory(prefix=prefix) as made:
            yield Path(made)
        return
    folder = Path(keep)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"--keep {keep}: wanted an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
