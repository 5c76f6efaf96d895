"""The two runs of `harness check`: real agents and workers on this computer, on a bucket that is a
folder, one of which loses its worker without notice while the other is told to go.

    one     a worker; a snapshot is made, two steps later the worker is killed; its agent starts it
            anew, and it resumes
    two     two nodes of a worker each, with shares about 2:1; one gets a notice and leaves; the
            other resumes alone

Everything that is started ends with `Course.close`, whatever happens. What came of a run is an
`Outcome`; nothing here judges it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from harness.bucket.journal import read_facts, read_records
from harness.bucket.layout import IDENTITY, MEMBERS, Identity
from harness.core import records as rec
from harness.core.facts import SessionStarted, Warned, WorkerFailed
from harness.node.processes import DUMP_SIGNAL
from harness.proof.check_evidence import Outcome, ScriptFailure, lives_in
from harness.proof.check_probe import Orders, Ownership
from harness.proof.scene import Drilled, plain_environment, send_signal
from storage.errors import StoreError
from storage.opening import open_store
from storage.snapshots import Snapshots

SNAPSHOT_AT, KILL_AT, NOTICE_AT = 3, 6, 4  # steps
AGENT: tuple[str, ...] = ("--nproc", "1", "--beat-s", "0.3", "--dead-s", "20", "--grace-s", "60")
AGENT += ("--gpu-health", "off", "--measure-s", "0", "--notices", "none", "--stage-gib", "2")
WORDS_S = 3.0  # for the others to write their errors after the first has failed
DUMP_S = 1.0  # for stacks to be written
KILL_S = 20.0  # for what was killed to be gone
NEWLINE = "\n"
COMMIT_S = 60.0  # for the snapshot before the kill


@dataclass(frozen=True)
class ScriptAsked:
    """What is checked: the script and its arguments; `flags` for `harness run`, `env` besides this
    process's; `cwd`: where its relative paths begin; `steps`: it is stopped after so many."""

    argv: tuple[str, ...]
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path = field(default_factory=Path.cwd)
    steps: int = 12
    gpus: int = 0

    @property
    def path(self) -> str:
        """Of its file; "" of a module."""
        return "" if self.argv[0] == "-m" else str((self.cwd / self.argv[0]).resolve())

    @property
    def command(self) -> tuple[str, ...]:
        return (self.path, *self.argv[1:]) if self.path else self.argv


class Late(Exception):
    """The time is over."""


class Over(Exception):
    """The run has ended, or failed, before what was waited for."""


class Course:
    """One run while it goes on. `until_s`: by the monotonic clock, when it must be over."""

    def __init__(self, folder: Path, asked: ScriptAsked, until_s: float):
        self.folder, self.asked, self.until_s = folder, asked, until_s
        self.nodes: list[Drilled] = []
        self._began_s = time.monotonic()
        (folder / "evidence").mkdir(parents=True)
        links(asked.cwd, folder / "work")
        (folder / "sitecustomize.py").write_text(
            f"from harness.proof import check_probe\n\ncheck_probe.arm({str(folder)!r})\n"
        )
        self.run = folder / "run"

    def order(self, **orders: object) -> None:
        asked = self.asked
        made = Orders(
            stop_at=asked.steps,
            cwd=str(asked.cwd),
            folders=(str(self.folder),),
            **orders,  # type: ignore[arg-type]
        )
        made.write(self.folder)

    def launch(self, speed: float = 1.0, gpu: str | None = None) -> Drilled:
        """A node. `gpu`: which of them it sees; None: all."""
        number = len(self.nodes) + 1
        folder = self.folder / f"node{number}"
        folder.mkdir()
        base = plain_environment()
        base.pop("WANDB_API_KEY", None)
        before = [str(Path(p).resolve()) for p in base.get("PYTHONPATH", "").split(os.pathsep) if p]
        package = str(Path(__file__).resolve().parents[2])
        env = base | {
            "WANDB_MODE": "disabled",
            "PYTHONPATH": os.pathsep.join([str(self.folder), *before, package]),
            "HARNESS_NODE_DIR": str(folder),
            "HARNESS_ATTEMPT": str(number),
            "HARNESS_HOST": f"node-{number}",
            "GLOO_SOCKET_IFNAME": "lo",
            **self.asked.env,
        }
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpu
        command = [sys.executable, "-m", "harness.cli", "run", "--run", str(self.run), *AGENT]
        command += ["--addr", "127.0.0.1", "--speed", f"{speed:g}", *self.asked.flags, "--"]
        with open(self.folder / f"node{number}.log", "wb") as log:
            process = subprocess.Popen(
                [*command, *self.asked.command],
                cwd=self.folder / "work",
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.nodes.append(Drilled(number, folder, process))
        return self.nodes[-1]

    # ---- waiting ---------------------------------------------------------------------------------
    def wait(self, done: Callable[[], object], over: bool = True) -> None:
        """Until `done`. Raises Late; and Over, if `over`, when the run has come to its end before,
        or has failed."""
        while not done():
            if time.monotonic() > self.until_s:
                raise Late
            if over and (self.errors() or all(n.process.poll() is not None for n in self.nodes)):
                raise Over
            time.sleep(0.05)

    def held(self) -> int:
        """How many workers stand still."""
        return len(list(self.folder.glob("held-*")))

    def is_alone(self) -> bool:
        """A single worker trains, since there is work for no more, and stands still now."""
        names = sorted(path.name for path in (self.folder / "evidence").glob("*.jsonl"))
        newest = [name for name in names if name[:7] == names[-1][:7]]
        return self.held() > 0 and len(newest) == 1 and newest[0][:7] != "e000001"

    def go(self) -> None:
        (self.folder / "go").touch()

    def errors(self) -> list[Path]:
        return [path for node in self.nodes for path in node.folder.glob("error-*.json")]

    def committed(self) -> int:
        """The newest committed step; -1: none."""
        with contextlib.suppress(StoreError):
            newest = Snapshots(open_store(str(self.run))).latest() if self.run.exists() else None
            return newest.step if newest else -1
        return -1

    def finish(self) -> str:
        """Wait for the end of all nodes; how it ended. Raises Late."""
        with contextlib.suppress(Over):
            self.wait(lambda: all(n.process.poll() is not None for n in self.nodes))
        if self.errors():
            time.sleep(WORDS_S)
            return "failed"
        manifest = Snapshots(open_store(str(self.run))).latest() if self.run.exists() else None
        if manifest and Snapshots(open_store(str(self.run))).ended(manifest):
            return "finished"
        return "stopped"

    # ---- the end ---------------------------------------------------------------------------------
    def stacks(self) -> tuple[str, ...]:
        """Where the ranks stand, each FILE:LINE of the script's own code, as far as it is
        known."""
        before = {node.number: len(self.log(node)) for node in self.nodes}
        for node in self.nodes:
            send_signal(node.workers(), DUMP_SIGNAL)
        time.sleep(DUMP_S)
        own = self._own()
        found: dict[int, str] = {}
        for node in self.nodes:
            said = self.log(node)[before[node.number] :]
            for rank, file, line in re.findall(r'\[(\d+)\]\s+File "([^"]+)", line (\d+) in', said):
                if own.file(file):
                    found.setdefault(int(rank), f"{file}:{line}")
        return tuple(dict.fromkeys(found[rank] for rank in sorted(found)))

    def log(self, node: Drilled) -> str:
        return (self.folder / f"node{node.number}.log").read_text(errors="replace")

    def _own(self) -> Ownership:
        return Ownership(self.asked.path, str(self.asked.cwd), [str(self.folder)])

    def close(self) -> None:
        """End all that was started."""
        for node in self.nodes:
            ours = node.processes()
            send_signal(ours, signal.SIGKILL)
            psutil.wait_procs(ours, KILL_S)
            node.process.kill()
            node.process.wait(KILL_S)

    def outcome(self, name: str, ended: str, **more: object) -> Outcome:
        """From what lies in the folder."""
        store = open_store(str(self.run))
        told = [s.fact for s in read_facts(store, "worker-", steps=False)]
        totals = [f.total_steps for f in told if isinstance(f, SessionStarted)]
        said = dict.fromkeys(f.what for f in told if isinstance(f, Warned))
        return Outcome(
            name,
            ended,
            lives=tuple(lives_in(self.folder / "evidence")),
            records=self._records(),
            committed=self.committed(),
            total=max(totals, default=0),
            failures=tuple(self._failures()),
            warnings=tuple(said),
            seconds=time.monotonic() - self._began_s,
            tail="\n".join(self.log(n)[-1500:] for n in self.nodes[:1]),
            **more,  # type: ignore[arg-type]
        )

    def _records(self) -> tuple[rec.StepRecord, ...]:
        store = open_store(str(self.run))
        with contextlib.suppress(StoreError, rec.BrokenRecords, KeyError):
            manifest = Snapshots(store).latest()
            if manifest and (ref := rec.named(manifest.data)):
                genesis = rec.genesis(Identity.decode(store.get(IDENTITY)).body)
                return tuple(read_records(store, ref.key, ref.head, genesis))
        return ()

    def _failures(self) -> list[ScriptFailure]:
        own, found = self._own(), []
        for path in self.errors():
            with contextlib.suppress(OSError, ValueError, KeyError):
                said = json.loads(path.read_text())["message"]
                frames = re.findall(
                    r'File "([^"]+)", line (\d+)', said["extraInfo"]["py_callstack"]
                )
                lines = [f"{file}:{line}" for file, line in frames if own.file(file)]
                where = lines[-1] if lines else ""
                when = int(said["extraInfo"]["timestamp"])
                found.append((when, ScriptFailure(0, said["type"], said["text"], where)))
        if not found:
            return self._exits()
        return [failure for _, failure in sorted(found, key=lambda pair: pair[0])]

    def _exits(self) -> list[ScriptFailure]:
        """Of scripts that ended with a status of their own, and left no exception."""
        told = [s.fact for s in read_facts(open_store(str(self.run)), "agent-", steps=False)]
        return [
            ScriptFailure(f.rank, f.error, f"{f.message}: {f.log_tail.rpartition(NEWLINE)[2]}")
            for f in told
            if isinstance(f, WorkerFailed) and f.exit_code > 0
        ][:1]


def links(cwd: Path, work: Path) -> None:
    """A folder in which everything of `cwd` is found, and where what the script writes beside it
    is thrown away."""
    work.mkdir()
    for entry in cwd.iterdir():
        if entry.name != ".git":
            (work / entry.name).symlink_to(entry.resolve())


# ---- the runs ------------------------------------------------------------------------------------
def one(course: Course) -> Outcome:
    """See the module."""
    struck, ended, left = False, "late", None
    stands: tuple[str, ...] = ()
    try:
        course.order(pictures=True, snapshot_at=SNAPSHOT_AT, hold_at=KILL_AT)
        node = course.launch(gpu=_gpu(course.asked, 0))
        with contextlib.suppress(Over):
            course.wait(lambda: course.held() == 1)
            until_s = time.monotonic() + COMMIT_S
            course.wait(lambda: course.committed() >= 1 or time.monotonic() > until_s)
            course.order(pictures=True)
            send_signal(node.workers(), signal.SIGKILL)
            struck = True
        course.go()
        ended, left = course.finish(), node.process.poll()
    except Late:
        stands = course.stacks()
    finally:
        course.close()
    return course.outcome("one", ended, struck=struck, stands=stands, left=left)


def two(course: Course) -> Outcome:
    """See the module."""
    struck, ended, left = False, "late", None
    stands: tuple[str, ...] = ()
    shared = course.asked.gpus == 1
    try:
        course.order(hold_at=NOTICE_AT, gloo=shared)
        first = course.launch(1.0, _gpu(course.asked, 0))
        members = course.run / MEMBERS
        # so that the first world is of both
        course.wait(lambda: members.is_dir() and any(members.iterdir()))
        course.launch(2.0, _gpu(course.asked, 1))
        with contextlib.suppress(Over):
            course.wait(lambda: course.held() == 2 or course.is_alone())
            if course.held() == 2:
                first.process.terminate()
                struck = True
                course.wait(lambda: (first.folder / "mark.json").exists())
        course.go()
        ended = course.finish()
        left = first.process.poll()
    except Late:
        stands = course.stacks()
    finally:
        course.close()
    return course.outcome("two", ended, struck=struck, stands=stands, left=left)


def _gpu(asked: ScriptAsked, node: int) -> str | None:
    return str(node % asked.gpus) if asked.gpus else None
