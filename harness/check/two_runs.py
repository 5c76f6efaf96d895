"""The two runs of `harness check`: real agents and workers on this computer, with a folder as the
bucket. One run loses its worker without notice, the other gets a notice.

    one     a worker; a snapshot is made, some steps later the worker is killed; its agent restarts
            it, and it resumes. The same a second time after the end of the first epoch, if the time
            is enough for that
    two     two nodes of a worker each, with shares about 2:1; one gets a notice and leaves; the
            other resumes alone

Everything that is started is ended by `Course.close`, whatever happens. The result of a run is an
`Outcome`; nothing here judges it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from harness.agent.worker_stacks import parse
from harness.bucket.archive import read_facts
from harness.bucket.journal import read_records
from harness.bucket.layout import IDENTITY, MEMBERS, Identity
from harness.check.evidence import Outcome, ScriptFailure, lives_in
from harness.check.probe_hooks import ENOUGH, HERE, PLAIN, Orders, Ownership, cache_folders
from harness.core import step_records as rec
from harness.core.facts import SessionStarted, Warned, WorkerFailed
from harness.local.local_run import Drilled, plain_environment, send_signal
from harness.node.heartbeat import DUMP_SIGNAL
from harness.node.marks import MARK
from storage.errors import StoreError
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store

SNAPSHOT_AT, KILL_AT, NOTICE_AT = 3, 6, 4  # steps
AGAIN = 2  # steps from the second snapshot to the second kill, and from there to the end
PAIR_TAKES = 2.5  # times as long as one worker needs to the first kill; two have to be left so much
AGENT = shlex.split(
    "--notices none --grace-s 60 --set beat_s=0.3 --set dead_s=20 --set gpu_health=off "
    "--set measure_s=0 --set stage_gib=2"
)
WORDS_S = 3.0  # time for the other ranks to write their errors after the first has failed
DUMP_S = 1.0  # time for stacks to be written
KILL_S = 20.0  # time for killed processes to be gone
NEWLINE = "\n"
COMMIT_S = 60.0  # time for the snapshot before the kill


@dataclass(frozen=True)
class ScriptAsked:
    """The subject of a check: the script and its arguments; `flags` for `harness run`; `env` added
    to this process's environment; `cwd`: the base of its relative paths; `steps`: after which it is
    stopped; `copy_ranks`: workers that share a copy of the model, which is a node here."""

    argv: tuple[str, ...]
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path = field(default_factory=Path.cwd)
    steps: int = 12
    gpus: int = 0
    copy_ranks: int = 1

    @property
    def path(self) -> str:
        """Path of the script's file; "" for a module."""
        return "" if self.argv[0] == "-m" else str((self.cwd / self.argv[0]).resolve())

    @property
    def command(self) -> tuple[str, ...]:
        return (self.path, *self.argv[1:]) if self.path else self.argv


class Late(Exception):
    """Raised when the time is over."""


class Over(Exception):
    """Raised when the run has ended or failed before the awaited event."""


@dataclass(frozen=True)
class SecondKill:
    """The plan of the second kill. `at`: the step of the snapshot before it, 0: there is none,
    since epochs are too short or their length is not known; `until_s`: when it has to be reached,
    by the monotonic clock; `needs_s`: an estimate of how long that takes."""

    at: int = 0
    until_s: float = 0.0
    needs_s: float = 0.0
    fits: bool = False

    def orders(self, steps: int) -> dict[str, object]:
        """Return the orders for the worker that it will strike. `steps`: the run's otherwise."""
        if not self.fits:
            return {}
        kill_at = self.at + AGAIN
        return {
            "snapshot_at": self.at,
            "hold_at": kill_at,
            "stop_at": max(steps, kill_at + AGAIN),
            "quiet": (KILL_AT, self.at),
        }


class Course:
    """One run while it goes on. `until_s`: its end at the latest, by the monotonic clock; `all_s`:
    that of the whole check."""

    def __init__(self, folder: Path, asked: ScriptAsked, until_s: float, all_s: float):
        self.folder, self.asked, self.until_s, self.all_s = folder, asked, until_s, all_s
        self.nodes: list[Drilled] = []
        self._began_s = time.monotonic()
        (folder / "evidence").mkdir(parents=True)
        links(asked.cwd, folder / "work")
        (folder / "sitecustomize.py").write_text(
            f"from harness.check import probe_hooks\n\nprobe_hooks.arm({str(folder)!r})\n"
        )
        self.run = folder / "run"

    def order(self, **orders: object) -> None:
        asked = self.asked
        made = Orders(
            cwd=str(asked.cwd),
            folders=(str(self.folder),),
            caches=cache_folders(plain_environment() | dict(asked.env)),
            **{"stop_at": asked.steps, **orders},  # type: ignore[arg-type]
        )
        made.write(self.folder)

    def launch(self, speed: float = 1.0, gpu: str | None = None) -> Drilled:
        """Start a node. `gpu`: the numbers of the GPUs that it sees; None means all."""
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
            "HARNESS_STAY": "0",  # a process begun anew shows what a script's state lacks
            "GLOO_SOCKET_IFNAME": "lo",
            **self.asked.env,
        }
        if gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpu
        command = [sys.executable, "-m", "harness.cli", "run", "--run", str(self.run), *AGENT]
        command += ["--nproc", str(self.asked.copy_ranks), "--set", "addr=127.0.0.1"]
        command += ["--set", f"speed={speed:g}", *self.asked.flags, "--"]
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
        """Wait until `done` returns a true value. Raises Late; and Over, if `over` is set and the
        run ends or fails before."""
        while not done():
            if time.monotonic() > self.until_s:
                raise Late
            if over and (self.errors() or self.is_plain()):
                raise Over
            if over and all(n.process.poll() is not None for n in self.nodes):
                raise Over
            time.sleep(0.05)

    def is_plain(self) -> bool:
        """Return whether optimizers step in a process that has no session."""
        return (self.folder / PLAIN).exists() and not any((self.folder / "evidence").iterdir())

    def held(self) -> int:
        """Return how many workers are being held, those of a copy together."""
        return len(list(self.folder.glob("held-*"))) // self.asked.copy_ranks

    def is_alone(self) -> bool:
        """Return whether a single worker trains, since there is work for no more, and is being
        held."""
        names = sorted(path.name for path in (self.folder / "evidence").glob("*.jsonl"))
        newest = [name for name in names if name[:7] == names[-1][:7]]
        single = len(newest) == self.asked.copy_ranks
        return self.held() > 0 and single and newest[0][:7] != "e000001"

    def kill_after_commit(self, node: Drilled, step: int, **orders: object) -> None:
        """Wait for the snapshot of that step, and kill the workers that are being held. `orders`:
        for those that follow."""
        until_s = time.monotonic() + COMMIT_S
        self.wait(lambda: self.committed() >= step or time.monotonic() > until_s)
        self.order(pictures=True, **orders)
        send_signal(node.workers(), signal.SIGKILL)

    def second(self) -> SecondKill:
        """Return the plan of the second kill, by what the first life has shown."""
        first = lives_in(self.folder / "evidence", self.asked.copy_ranks)[0]
        if first.pass_steps <= SNAPSHOT_AT or len(first.steps) < 2:
            return SecondKill()
        now_s = time.monotonic()
        each_s = (first.steps[-1].t - first.steps[0].t) / (len(first.steps) - 1)
        took_s = now_s - self._began_s
        at = max(first.pass_steps, KILL_AT) + 1
        until_s = min(self.until_s, self.all_s - PAIR_TAKES * took_s)
        needs_s = (at + 2 * AGAIN - first.steps[-1].number) * each_s + 2 * took_s
        return SecondKill(at, until_s, needs_s, fits=now_s + needs_s < until_s)

    def go(self) -> None:
        (self.folder / "go").touch()

    def errors(self) -> list[Path]:
        return [path for node in self.nodes for path in node.folder.glob("error-*.json")]

    def committed(self) -> int:
        """Return the newest committed step; -1 if there is none."""
        with contextlib.suppress(StoreError):
            newest = Snapshots(open_store(str(self.run))).latest() if self.run.exists() else None
            return newest.step if newest else -1
        return -1

    def finish(self) -> str:
        """Wait for the end of all nodes, and return how the run ended. Raises Late."""
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
        """Return the places of the ranks, each FILE:LINE of the script's own code, as far as
        known."""
        files = [file for node in self.nodes for file in sorted(node.folder.glob("stacks-*"))]
        for file in files:
            os.truncate(file, 0)
        for node in self.nodes:
            send_signal(node.workers(), DUMP_SIGNAL)
        time.sleep(DUMP_S)
        own, found = self._own(), []
        for file in files:
            frames = parse(file.read_text(errors="replace")).frames
            found += [f"{f.file}:{f.line}" for f in frames if own.file(f.file)][:1]
        return tuple(dict.fromkeys(found))

    def log(self, node: Drilled) -> str:
        return (self.folder / f"node{node.number}.log").read_text(errors="replace")

    def _own(self) -> Ownership:
        return Ownership(self.asked.path, str(self.asked.cwd), [str(self.folder)])

    def close(self) -> None:
        """Kill everything that was started."""
        for node in self.nodes:
            ours = node.processes()
            send_signal(ours, signal.SIGKILL)
            psutil.wait_procs(ours, KILL_S)
            node.process.kill()
            node.process.wait(KILL_S)

    def outcome(self, name: str, ended: str, **more: object) -> Outcome:
        """Return the run's result, from the files in the folder."""
        store = open_store(str(self.run))
        told = [s.fact for s in read_facts(store, "worker-", steps=False)]
        totals = [f.total_steps for f in told if isinstance(f, SessionStarted)]
        said = dict.fromkeys(f.what for f in told if isinstance(f, Warned))
        return Outcome(
            name,
            ended,
            lives=tuple(lives_in(self.folder / "evidence", self.asked.copy_ranks)),
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
                ours = bool(frames) and os.path.dirname(frames[-1][0]) == HERE
                found.append((when, ScriptFailure(0, said["type"], said["text"], where, ours)))
        if not found:
            return self._exits()
        return [failure for _, failure in sorted(found, key=lambda pair: pair[0])]

    def _exits(self) -> list[ScriptFailure]:
        """Return the failure of a script that exited with its own status and left no exception."""
        told = [s.fact for s in read_facts(open_store(str(self.run)), "agent-", steps=False)]
        return [
            ScriptFailure(f.rank, f.error, f"{f.message}: {f.log_tail.rpartition(NEWLINE)[2]}")
            for f in told
            if isinstance(f, WorkerFailed) and f.exit_code > 0
        ][:1]


def links(cwd: Path, work: Path) -> None:
    """Make a folder with links to everything in `cwd`, so that what the script writes beside itself
    is thrown away."""
    work.mkdir()
    for entry in cwd.iterdir():
        if entry.name != ".git":
            (work / entry.name).symlink_to(entry.resolve())


# ---- the runs ------------------------------------------------------------------------------------
def one(course: Course) -> Outcome:
    """Run one worker, and kill it once or twice: see the module's docstring."""
    struck, again, ended, left = False, False, "late", None
    stands: tuple[str, ...] = ()
    second = SecondKill()
    try:
        course.order(pictures=True, snapshot_at=SNAPSHOT_AT, hold_at=KILL_AT)
        node = course.launch(gpu=_gpu(course.asked, 0))
        with contextlib.suppress(Over):
            course.wait(lambda: course.held() == 1)
            second = course.second()
            orders = second.orders(course.asked.steps)
            course.kill_after_commit(node, 1, **orders)
            struck = True
            if second.fits:
                limit_s = second.until_s
                course.wait(lambda: course.held() == 2 or time.monotonic() > limit_s)
                if course.held() == 2:
                    rest = {name: orders[name] for name in ("stop_at", "quiet")}
                    course.kill_after_commit(node, second.at, **rest)
                    again = True
                else:
                    (course.folder / ENOUGH).touch()
        course.go()
        ended, left = course.finish(), node.process.poll()
    except Late:
        stands = course.stacks()
    finally:
        course.close()
    needs_s = 0.0 if again else second.needs_s
    told = {"stands": stands, "left": left, "needs_s": needs_s}
    return course.outcome("one", ended, struck=struck, struck_again=again, **told)


def two(course: Course) -> Outcome:
    """Run two workers, and give one a notice: see the module's docstring."""
    struck, ended, left = False, "late", None
    stands: tuple[str, ...] = ()
    try:
        course.order(hold_at=NOTICE_AT)
        first = course.launch(1.0, _gpu(course.asked, 0))
        members = course.run / MEMBERS
        # so that the first world contains both
        course.wait(lambda: members.is_dir() and any(members.iterdir()))
        course.launch(2.0, _gpu(course.asked, 1))
        with contextlib.suppress(Over):
            course.wait(lambda: course.held() == 2 or course.is_alone())
            if course.held() == 2:
                first.process.terminate()
                struck = True
                course.wait(lambda: (first.folder / MARK).exists())
        course.go()
        ended = course.finish()
        left = first.process.poll()
    except Late:
        stands = course.stacks()
    finally:
        course.close()
    return course.outcome("two", ended, struck=struck, stands=stands, left=left)


def _gpu(asked: ScriptAsked, node: int) -> str | None:
    """Return the GPUs of a node as CUDA_VISIBLE_DEVICES names them; None: this machine has none."""
    if not asked.gpus:
        return None
    first = node * asked.copy_ranks
    gpus = dict.fromkeys((first + i) % asked.gpus for i in range(asked.copy_ranks))
    return ",".join(map(str, gpus))
