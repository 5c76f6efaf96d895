"""A node's workers: started from its warm process, read, judged by their heartbeats, and ended.

Knows processes, files and the environment that torchrun's scripts expect; decides nothing about
generations (the code's `epoch`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from harness.agent import flight_recorder, worker_stacks
from harness.agent.oom_killer import OomKiller
from harness.agent.run_orders import LOOK_EVERY_S
from harness.agent.verdicts import MISMATCH, WorkerEnd
from harness.bucket.layout import NO_EPOCH, Epoch
from harness.core.facts import OOM_KILLED, Fact, StackSeen, WorkerHung
from harness.core.masking import masked_line
from harness.core.mesh import MeshChoice
from harness.node import heartbeat, marks, next_world
from harness.node.compile_cache import compile_cache
from harness.node.forkserver import CLOSE_S, Forked, ForkServerClient
from harness.node.marks import KEEP, KEEP_AND_END, Want
from harness.node.worker_gpus import NodeHardware
from harness.uploader.node_tiers import NearbyConfig

# The configuration of a node agent. `harness run` builds it from flags and environment.


@dataclass(frozen=True)
class Timing:
    """Intervals and timeouts of an agent, in seconds."""

    beat_s: float = 1.0
    dead_s: float = 5.0
    tick_s: float = 0.3
    # between two looks for requests to the run; each is a list, which object stores bill
    control_s: float = 0.3
    flush_s: float = 1.0
    measure_s: float = 0.0  # between two facts about this machine's hardware; 0: none
    wait_limit_s: float = 3600.0  # how long to wait for a place in a generation
    # how long this node goes on without a controller; 0: no limit
    leaderless_s: float = 0.0
    lease_s: float = LOOK_EVERY_S  # between two looks at the controller's lease


@dataclass(frozen=True)
class Leaving:
    """Grace periods at a preemption notice, and what is notified."""

    grace_s: float = 30.0  # grace period assumed at a SIGTERM
    drain_lead_s: float = 120.0  # we drain this long before an end that was announced early
    # and this long before it, the controller may launch a replacement
    doubt_ahead_s: float = 900.0
    acknowledge: bool = True  # acknowledge notices after we left, where the cloud supports it
    notify_signal: str = ""  # sent to scripts without a session on a notice; "": none


@dataclass(frozen=True)
class Fitness:
    """The limits at which workers count as hung, and this node as unfit."""

    hang: heartbeat.Limits = field(default_factory=heartbeat.Limits)
    hangs_allowed: int = 3  # after so many hangs of our own workers, this node is unfit
    # "auto": by NVML; "off"; or the path of a script for the fake (harness/agent/gpu_health.py)
    gpu_health: str = "off"
    flights: bool = False  # NCCL's flight recorder is on, and read when workers hang
    unfit_grace_s: float = 60.0  # how long workers on a sick GPU have to reach a step boundary


@dataclass(frozen=True)
class Uploads:
    """The stage of snapshots, and their other tiers."""

    stage_dir: Path | None = None  # a RAM disk for staged snapshots; None: /dev/shm
    stage_nbytes: int | None = None  # limit of their size there; None: half of the free space
    # tiers of snapshots besides this node's stage
    nearby: NearbyConfig = field(default_factory=NearbyConfig)
    settle_s: float = 30.0  # how long the next generation waits for uploads of a dead worker


@dataclass(frozen=True)
class HelperConfig:
    """The processes beside the first member of a generation."""

    trackers: str = ""
    replica: str = ""  # URL of a second bucket that snapshots are copied to
    replica_cap_usd: float | None = None  # None: no limit
    # receivers of alerts, in the format of HARNESS_ALERTS: it may hold secrets
    alerts: str = field(default="", repr=False)
    alert_rules: str = ""


@dataclass(frozen=True)
class Worlds:
    """The allowed compositions of a world."""

    min_members: int = 1
    # ranks that get the same samples, if there is no mesh; only whole replicas train
    replica_ranks: int = 1
    # how ranks share one copy of the model, in order of preference; only whole copies train
    meshes: MeshChoice | None = None
    ranks: tuple[int, ...] = ()  # allowed numbers of ranks; (): any number
    halves: bool = False  # where memory ran out, the next world takes half the micro-batch

    @property
    def splits(self) -> bool:
        """True if several ranks hold one copy of the model: their GPUs exchange directly."""
        return self.meshes is not None or self.replica_ranks > 1


@dataclass(frozen=True)
class AgentConfig:
    run: str
    argv: list[str]
    nproc: int
    attempt: int
    addr: str
    node_dir: Path
    hardware: NodeHardware = field(default_factory=NodeHardware)
    place: str = ""  # nodes of one place reach each other and form a world; others wait
    worlds: Worlds = field(default_factory=Worlds)
    timing: Timing = field(default_factory=Timing)
    leaving: Leaving = field(default_factory=Leaving)
    fitness: Fitness = field(default_factory=Fitness)
    uploads: Uploads = field(default_factory=Uploads)
    beside: HelperConfig = field(default_factory=HelperConfig)
    must_adopt: bool = False  # a script without a session ends the run as failed


TAIL_LINES = 40
# for killed workers to end, unless the node's grace is shorter; one that takes longer hangs in the
# kernel, and the node is unfit
KILL_S = 20.0
ANSWER_S = 0.5  # for a worker that is asked to keep its state, to begin
LOOK_S = 0.005  # between two looks whether it has
READ_S = 2.0  # for the last output of a worker that has ended
FORKED_WITHIN_S = 20.0  # a warm process that has not forked a worker by then hangs
IMPORTED_WITHIN_S = 60.0  # ... or one that has been begun anew, and still imports
# what torch's DataLoader says when one of its processes got SIGKILL
LOADER_KILLED = "is killed by signal: Killed"


@dataclass
class Output:
    """The output of a process: its reader, the newest lines, and the rank that it is printed as."""

    rank: int
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    reader: threading.Thread | None = None

    def read(self, stream: IO[bytes]) -> None:
        """Print the lines as they come, in a thread."""
        self.reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self.reader.start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                self.say(raw.decode(errors="replace").rstrip("\n"))

    def say(self, text: str) -> None:
        """Print a line as if the process had said it."""
        line = masked_line(text)
        self.tail.append(line)
        print(f"[{self.rank}] {line}", flush=True)

    def join(self, within_s: float) -> None:
        """Wait until all of it is read."""
        if self.reader is not None:
            self.reader.join(within_s)


@dataclass
class Worker:
    process: Forked
    error_file: Path
    rank: int
    pulse: heartbeat.WorkerHeartbeat
    output: Output
    ordered_s: float  # when its fork was ordered
    oom_killer: OomKiller
    folder: Path  # the node's
    stacks: Path  # it writes them there on request
    hung: str = ""  # how it hung, in words; "": it did not
    guilty: bool = False  # it caused the hang; otherwise it was waiting for others
    mismatched: bool = False  # ranks waited in different collectives, which is no fault of the node
    ended_by_us: bool = False  # we ended it while it was still at work

    @property
    def waits(self) -> int | None:
        """The exit status that it stands for while it waits for the next world; None: it does not
        wait."""
        if self.process.poll() is not None:
            return None
        return next_world.waiting(self.folder, self.process.pid)

    @property
    def at_work(self) -> bool:
        """True if it has neither ended nor waits for the next world."""
        return self.process.poll() is None and self.waits is None

    @property
    def code(self) -> int:
        """The exit code. A worker that even SIGKILL did not end counts as killed."""
        if (waits := self.waits) is not None:
            return waits
        return -signal.SIGKILL if self.process.returncode is None else self.process.returncode

    @property
    def failed_s(self) -> float:
        """The time at which its error was written; comparable only within this node."""
        with contextlib.suppress(OSError):
            return self.error_file.stat().st_mtime_ns / 1e9
        return float("inf")

    def seen(self) -> WorkerEnd:
        """Return the evidence about this worker, whether it has ended or is at work."""
        at_work = self.at_work
        error, text = ("", "") if at_work and not self.hung else self.failure()
        return WorkerEnd(
            self.rank,
            self.code,
            error,
            text,
            self.failed_s,
            at_work,
            self.hung,
            self.guilty,
            self.ended_by_us,
            tuple(self.output.tail),
            self.pulse.sign.place if self.pulse.sign else None,
        )

    def failure(self) -> tuple[str, str]:
        """Return (type, text) of its failure, from its error file, else from its exit code."""
        code = self.code
        if self.hung:
            return MISMATCH if self.mismatched else "Hung", self.hung
        with contextlib.suppress(OSError, ValueError, KeyError):
            message = json.loads(self.error_file.read_text())["message"]
            error, text = str(message["type"]), masked_line(str(message["text"]))
            if LOADER_KILLED in text and (why := self.oom_killer.said()):
                return OOM_KILLED, f"a process that read its data was {why}"
            return error, text
        if code == -signal.SIGKILL and not self.ended_by_us and (why := self.oom_killer.said()):
            return OOM_KILLED, why
        if code < 0:
            return signal.Signals(-code).name, f"killed by {signal.Signals(-code).name}"
        return "exit", f"exit code {code}"


class Workers:
    """The workers of one generation, and the warm process that they are forked from. `mark`: where
    the agent asks them for something. `record`: takes facts."""

    def __init__(self, config: AgentConfig, member: str, record: Callable[[Fact], None]):
        self._config, self._member, self._record = config, member, record
        file = config.node_dir / marks.MARK
        self.mark = marks.MarkFile(file, lambda: [w.process for w in self.all])
        self._clear_heartbeats()
        self._epoch: Epoch = NO_EPOCH
        self._warm: ForkServerClient | None = None
        self._cold_s = -float("inf")  # when it last imported still
        self._questions = worker_stacks.StackQuestions()
        self.all: list[Worker] = []
        self._oom_killer = OomKiller()

    # ---- the warm process ------------------------------------------------------------------------
    @property
    def _nursery(self) -> ForkServerClient:
        if self._warm is None:
            self._warm = self._new_nursery()
        return self._warm

    def _new_nursery(self) -> ForkServerClient:
        env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
        env |= compile_cache(env, self._config.hardware.accelerator)
        if self._config.addr.startswith("127."):
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return ForkServerClient(env)

    def warm(self) -> bool:
        """Return whether workers can be started without an import."""
        return self._nursery.warm()

    def warm_up(self) -> None:
        """Ensure that there is a warm process to fork from: the last one may have been killed."""
        if self._nursery.ended():
            self._warm = self._new_nursery()

    def close(self, within_s: float = CLOSE_S) -> None:
        """End the warm process, and with it all workers. Wait for `within_s` at most."""
        self._nursery.close(within_s)

    # ---- start -----------------------------------------------------------------------------------
    def clear_signs(self) -> None:
        """Remove the mark and the heartbeats of the last generation."""
        self.mark.write(Want.NOTHING, "", None)
        for name in (marks.ATTACHED, marks.UNADOPTED, marks.STAYS):
            (self._config.node_dir / name).unlink(missing_ok=True)
        self._clear_heartbeats()
        flight_recorder.clear(self._config.node_dir)

    def _clear_heartbeats(self) -> None:
        for local_rank in range(self._config.nproc):
            heartbeat.clear(self._sign(local_rank))

    def prepare(self, beside: Epoch, stage: Path) -> None:
        """Start workers that run the script up to its loop, while others train in `beside`, and
        wait there for the next generation. The world that they are told has them as its last
        ranks, and no address: a script that connects by itself fails, and begins with its world."""
        c = self._config
        guess = replace(
            beside,
            members=(*beside.members, self._member),
            nproc=(*beside.nproc, c.nproc),
            speeds=(*beside.speeds, c.hardware.speed),
            addr="",
        )
        self.start(guess, stage, 1.0)

    def start(self, epoch: Epoch, stage: Path, patience: float) -> None:
        """Start all of this node's workers of a generation, which has an address unless they only
        prepare for it. `patience`: see `heartbeat.WorkerHeartbeat`."""
        self.warm_up()
        self._epoch, self._questions = epoch, worker_stacks.StackQuestions()
        self._oom_killer.begin()
        usual_s = max((w.pulse.step_s for w in self.all), default=0.0)
        before = dict(enumerate(self.all))
        self.all = [
            self._start(rank, local_rank, stage, patience, usual_s, before.pop(local_rank, None))
            for local_rank, rank in enumerate(epoch.ranks(self._member))
        ]
        for worker in before.values():
            worker.process.strike()

    def _start(
        self,
        rank: int,
        local_rank: int,
        stage: Path,
        patience: float,
        usual_s: float,
        before: Worker | None,
    ) -> Worker:
        """Start a worker: the process of the last generation, if it waits, or a new one."""
        sign = self._sign(local_rank)
        error_file = self._config.node_dir / f"error-{secrets.token_hex(4)}.json"
        env = {
            **self._environment(rank, local_rank),
            "HARNESS_STAGE": stage,
            "HARNESS_PROGRESS": sign,
            "TORCHELASTIC_ERROR_FILE": error_file,
        }
        self._open_pipe(local_rank)
        process, output = self._process({k: str(v) for k, v in env.items()}, rank, before)
        limits = self._config.fitness.hang
        began_s = time.monotonic()
        pulse = heartbeat.WorkerHeartbeat(sign, limits, patience, usual_s, since_s=began_s)
        folder = self._config.node_dir
        return Worker(
            *(process, error_file, rank, pulse, output, pulse.since_s),
            *(self._oom_killer, folder, heartbeat.stacks_file(folder, local_rank)),
        )

    def _process(
        self, env: dict[str, str], rank: int, before: Worker | None
    ) -> tuple[Forked, Output]:
        """Return the process that works with `env` from now on, and its output."""
        if before is not None:
            if next_world.order(self._config.node_dir, before.process.pid, env):
                before.output.rank = rank
                before.output.tail.clear()
                return before.process, before.output
            before.process.strike()  # it gave up waiting just now, or it has ended
        process, stream = self._nursery.fork({"env": env, "argv": self._config.argv})
        output = Output(rank)
        output.read(stream)
        return process, output

    def _environment(self, rank: int, local_rank: int) -> dict[str, object]:
        """Return the variables that torchrun would set for a worker, and those of a session."""
        epoch = self._epoch
        speeds = [
            speed for speed, n in zip(epoch.speeds, epoch.nproc, strict=True) for _ in range(n)
        ]
        config = self._config
        recorder = (
            flight_recorder.recorder_environment(config.node_dir, os.environ)
            if config.fitness.flights
            else {}
        )
        return {
            **recorder,
            **config.hardware.environment(local_rank),
            "RANK": rank,
            "WORLD_SIZE": epoch.world,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self._config.nproc,
            "GROUP_RANK": epoch.members.index(self._member),
            "GROUP_WORLD_SIZE": len(epoch.members),
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": epoch.world,
            "ROLE_NAME": "default",
            "MASTER_ADDR": epoch.addr,
            "MASTER_PORT": epoch.port if epoch.addr else "",
            next_world.BESIDE: "" if epoch.addr else "1",
            "TORCHELASTIC_RUN_ID": "harness",
            "TORCHELASTIC_RESTART_COUNT": epoch.epoch - 1,
            "TORCHELASTIC_MAX_RESTARTS": 1_000_000,
            "HARNESS_RUN": self._config.run,
            "HARNESS_REPLICA": self._config.beside.replica,
            "HARNESS_REPLICA_RANKS": epoch.replica_ranks,
            "HARNESS_MESH": epoch.mesh,
            "HARNESS_MESHES": config.worlds.meshes or "",
            "HARNESS_WORLDS": ",".join(map(str, config.worlds.ranks)),
            "HARNESS_EPOCH": epoch.epoch,
            "HARNESS_MARK": self.mark.path,
            "HARNESS_SPEEDS": json.dumps(speeds),
            "HARNESS_EPOCH_REASON": epoch.reason,
            "HARNESS_PLACE": config.place,
            "HARNESS_HALVINGS": epoch.halvings,
        }

    def _open_pipe(self, local_rank: int) -> None:
        """Make the pipe by which this worker is asked to keep its state."""
        folder = self._config.node_dir
        pipe = marks.keep_pipe(folder, local_rank)
        # a new one: a process of the last worker may still hold the old one, with a request in it
        for old in (pipe, marks.keeping_file(folder, local_rank)):
            old.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the disk is full: nothing is kept
            os.mkfifo(pipe, 0o600)

    def _sign(self, local_rank: int) -> Path:
        return self._config.node_dir / f"progress-{local_rank}"

    def seen(self) -> list[WorkerEnd]:
        """Return the current evidence about all workers."""
        return [w.seen() for w in self.all]

    def at_work(self) -> int:
        """Return the number of workers that have not ended."""
        return sum(w.at_work for w in self.all)

    # ---- while they work -------------------------------------------------------------------------
    def attached(self) -> bool:
        """Return whether the script has a session."""
        return (self._config.node_dir / marks.ATTACHED).exists()

    def unadopted(self) -> bool:
        """Return whether the script surely trains without a session."""
        return (self._config.node_dir / marks.UNADOPTED).exists() and not self.attached()

    def stay(self) -> bool:
        """Return whether the workers' processes would go on in the next generation."""
        return (self._config.node_dir / marks.STAYS).exists()

    def signs(self) -> list[heartbeat.Sign]:
        """Return the last heartbeat of each worker that ever sent one."""
        return [w.pulse.sign for w in self.all if w.pulse.sign is not None]

    def step_ends_s(self) -> float | None:
        """Return when the slowest worker will end its step, by the monotonic clock; None: that is
        not known."""
        ends = [end for w in self.all if (end := w.pulse.step_ends_s) is not None]
        return max(ends, default=None)

    def forgive(self, seconds: float) -> None:
        """Extend all timeouts by `seconds`, for which the agent itself was suspended."""
        for worker in self.all:
            worker.pulse.forgive(seconds)
            worker.ordered_s += seconds

    def signal(self, name: str) -> None:
        """Send a signal such as "USR1" (or "SIGUSR1") to workers that run."""
        for worker in self.all:
            if worker.at_work:
                worker.process.send_signal(getattr(signal, f"SIG{name.removeprefix('SIG')}"))

    def find_hung(self, now: float) -> list[Worker]:
        """Return workers without a heartbeat for too long, or that wait in different collectives;
        record them, and let their stacks be logged."""
        hung: list[Worker] = []
        for worker in self.all:
            if not worker.at_work:
                continue
            worker.pulse.look(now)
            state = (
                heartbeat.process_state(worker.process.pid)
                if now - worker.pulse.since_s > worker.pulse.sure_s
                else ""
            )
            if what := worker.pulse.hung(now, state) or self._unforked(worker, now):
                worker.hung, worker.guilty = what, not worker.pulse.waits(state)
                hung.append(worker)
        still = self._questions.turn(self.all, now)
        if hung:
            self._ask_all(now)
        if (hung or still) and (found := self._mismatch()):
            hung = list(self.all)
            for worker in hung:
                worker.hung, worker.mismatched = found.what, True
                worker.guilty = worker.rank in found.odd
        for worker in hung:
            self._report_hung(worker, now)
        return hung

    def _ask_all(self, now: float) -> None:
        """Ask for all workers' stacks and last collectives, and wait for the answers, as this
        generation has ended. A stopped worker gives none."""
        at_work = [w.rank for w in self.all if w.at_work]
        asked = flight_recorder.ask_ranks(self._config.node_dir, at_work)
        self._questions.ask(self.all)
        time.sleep(worker_stacks.ANSWER_S)
        flight_recorder.wait(self._config.node_dir, asked)
        self._questions.read(self.all, now)

    def _mismatch(self) -> worker_stacks.Mismatch | None:
        """Return how ranks wait in different collectives. Only if all ranks are ours: where those
        of other nodes stand is not known here."""
        stacks = self._questions.answers.stacks
        return worker_stacks.mismatch(stacks) if len(stacks) == self._epoch.world else None

    def stacks(self) -> list[StackSeen]:
        """Return where workers stood when they were last asked, unless they went on since."""
        return self._questions.seen(self._member, self._epoch.epoch, self.all)

    def _unforked(self, worker: Worker, now: float) -> str:
        if worker.process.pid:
            return ""
        if self.warm():
            since_s, within_s = max(worker.ordered_s, self._cold_s), FORKED_WITHIN_S
        else:
            self._cold_s, since_s, within_s = now, worker.ordered_s, IMPORTED_WITHIN_S
        if now - since_s <= within_s:
            return ""
        return f"not forked for {within_s:.0f} s: the warm process hangs"

    def _report_hung(self, worker: Worker, now: float) -> None:
        """Record the hang, and say where the worker stands: all its threads' stacks."""
        sign = worker.pulse.sign or heartbeat.Sign(0, 0, heartbeat.WorkerPhase.START)
        stand = self._questions.answers.stacks.get(worker.rank)
        if stand and stand.collective and not worker.mismatched:
            worker.hung += f"; it waits in {stand.collective}"
        self._record(
            WorkerHung(
                self._member,
                self._epoch.epoch,
                worker.rank,
                sign.step,
                sign.place.name.lower(),
                now - worker.pulse.since_s,
                worker.guilty,
                worker.hung,
            )
        )
        print(f"harness run: rank {worker.rank} hangs: {worker.hung}; its stacks:", flush=True)
        for line in worker_stacks.text_of(worker).splitlines():
            worker.output.say(line)

    # ---- end -------------------------------------------------------------------------------------
    def end(self, within_s: float = KILL_S) -> list[str]:
        """Let workers that are still at work keep their state, within `within_s`, and kill them.
        Return, in words, those that have not ended `within_s` later: they hang in the kernel, where
        no signal ends them."""
        for worker in self.all:
            worker.ended_by_us = worker.at_work
        until_s = time.monotonic() + within_s
        self._let_keep(within_s / 2)
        ended = [worker for worker in self.all if worker.waits is None]
        for worker in ended:
            worker.process.strike()
        stuck: list[str] = []
        for worker in ended:
            worker.process.kill(max(0.0, until_s - time.monotonic()))
            if worker.process.returncode is None:
                stuck.append(f"rank {worker.rank} (process {worker.process.pid})")
            else:
                # read its last output; limited, since a grandchild may hold the pipe open
                worker.output.join(max(0.0, min(READ_S, until_s - time.monotonic())))
        for worker in self.all:
            worker.pulse.look(time.monotonic())  # the step that it came to
        return stuck

    def _let_keep(self, within_s: float) -> None:
        """Ask workers at work to keep their state, and wait until those that do have ended, or wait
        for the next world. Where ranks are apart, the script has to come to that place again from
        the snapshot, to be judged."""
        folder, asked = self._config.node_dir, []
        apart = any(worker.mismatched for worker in self.all)
        for local_rank, worker in enumerate(self.all):
            if (
                worker.ended_by_us
                and not apart
                and self._ask_to_keep(local_rank, KEEP_AND_END if worker.guilty else KEEP)
            ):
                asked.append((local_rank, worker))
        begun_s = time.monotonic()
        while asked and (passed_s := time.monotonic() - begun_s) < within_s:
            asked = [
                (local_rank, worker)
                for local_rank, worker in asked
                if worker.at_work
                and (passed_s < ANSWER_S or marks.keeping_file(folder, local_rank).exists())
            ]
            time.sleep(LOOK_S)

    def _ask_to_keep(self, local_rank: int, request: bytes) -> bool:
        """Return whether the worker listens; it is asked then."""
        pipe = marks.keep_pipe(self._config.node_dir, local_rank)
        with contextlib.suppress(OSError):  # nobody reads it
            fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                return os.write(fd, request) == 1
            finally:
                os.close(fd)
        return False

    def flights(self) -> list[flight_recorder.FlightDump]:
        """Return the dumps of NCCL's flight recorders, each once."""
        steps = {w.rank: w.pulse.sign.step if w.pulse.sign else 0 for w in self.all}
        return flight_recorder.collect(self._config.node_dir, steps)
