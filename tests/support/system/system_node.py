"""A simulated machine: the real agent, and hands for it that are played. Pure.

The agent runs `Agent.begin`, `turn` and `close` as they are, with the real rendezvous, machine and
journal. Its workers, uploader, lines and sidecars are of this package.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from harness.agent import node_state
from harness.agent.agent import PAUSE_S, Agent
from harness.agent.flight_recorder import FlightDump
from harness.agent.host import NoWatch
from harness.agent.verdicts import WorkerEnd
from harness.agent.workers import FORKED_WITHIN_S, AgentConfig, Fitness, Timing, Worlds
from harness.bucket.layout import NO_EPOCH, Epoch
from harness.core.facts import Fact, WorkerHung
from harness.core.world import RESIZE, Offer
from harness.node import heartbeat
from harness.node.marks import Mark, Want
from harness.node.worker_gpus import NodeHardware
from harness.notices.notice import Cancelled, Notice, Noticed
from harness.uploader.handoff import AGENT_ANSWER_S
from harness.uploader.liveness import BEAT_S, UploaderWatch
from storage.errors import StoreError
from storage.snapshots.manifest import Ref
from storage.testing.faulty_store import Crash
from support.system.system_network import SimulatedConnections
from support.system.system_uploads import Sending
from support.system.virtual_time import SimLock

if TYPE_CHECKING:
    from harness.rendezvous.rendezvous import Rendezvous
    from storage.stores.objects import ObjectStore
    from support.system.system_bucket import Access
    from support.system.system_run import WholeSystem
    from support.system.system_trackers import SimSidecars

TURN_S = 1.0  # between two turns of an agent
NEVER_S = 1e9
GRACE_S = 30.0  # of an agent that a signal ends
EPOCH_S = 1_700_000_000.0  # wall clocks begin here
IMPORT_S = (2.0, 8.0)  # for the warm process
FORK_S = (0.1, 1.0)  # for a worker to begin
PREPARE_S = (1.0, 90.0)  # for a script to come to its loop, beside others
PREPARED = (RESIZE, RESIZE, RESIZE, 1, None)  # how that ends: it waits, it fails, or it hangs
STAY = 0.5  # the share of runs whose processes go on
EXIT_S = (0.2, 2.0)  # from an agent's end until the cloud says that its command has ended
KILLED = -9
TIMING = Timing(beat_s=2.0, dead_s=8.0, tick_s=1.0, control_s=2.0, flush_s=5.0, wait_limit_s=1800.0)
LIMITS = heartbeat.Limits(
    hang_after_s=60.0, wait_s=120.0, stopped_s=40.0, start_s=120.0, save_s=120.0
)


# ---- workers -------------------------------------------------------------------------------------
class _SignFile:
    """What `progress.Pulse` reads."""

    def __init__(self) -> None:
        self.sign: heartbeat.Sign | None = None

    def read_bytes(self) -> bytes:
        if self.sign is None:
            raise FileNotFoundError
        return self.sign.packed()


@dataclass
class SimWorker:
    """One process. `ended`: its exit code; None: it is at work."""

    node: SimNode
    epoch: Epoch
    rank: int
    signs: _SignFile
    pulse: heartbeat.WorkerHeartbeat
    ended: int | None = None
    error: str = ""
    text: str = ""
    failed_s: float = float("inf")
    hung: str = ""
    guilty: bool = False
    mismatched: bool = False
    ended_by_us: bool = False
    stuck: bool = False  # it hangs
    began: bool = False  # it has a session
    ordered_s: float = 0.0  # when its fork was ordered
    forked: bool = False
    to_fail: str = ""  # the script's error, at its next step

    @property
    def code(self) -> int:
        return KILLED if self.ended is None else self.ended

    @property
    def at_work(self) -> bool:
        return self.ended is None

    def come_to(self) -> None:
        """It hangs no more."""
        self.stuck = False

    def tell(self, place: heartbeat.WorkerPhase, step: int) -> None:
        beats = self.signs.sign.beats + 1 if self.signs.sign else 1
        self.signs.sign = heartbeat.Sign(beats, step, place)

    def exit(self, code: int, error: str = "", text: str = "") -> None:
        if self.ended is None:
            self.ended, self.error, self.text = code, error, text
            self.failed_s = self.node.sim.kernel.now_s if error else float("inf")

    def seen(self) -> WorkerEnd:
        error, text = ("", "") if self.at_work and not self.hung else self._failure()
        return WorkerEnd(
            self.rank, self.code, error, text, self.failed_s, self.at_work,
            self.hung, self.guilty, self.ended_by_us,
        )  # fmt: skip

    def _failure(self) -> tuple[str, str]:
        if self.hung:
            return "Hung", self.hung
        if self.error:
            return self.error, self.text
        if self.code < 0:
            return "SIGKILL", "killed by SIGKILL"
        return "exit", f"exit code {self.code}"


class SimPool:
    """A node's workers, as `workers.Workers` has them."""

    def __init__(self, node: SimNode, record: Callable[[Fact], None]):
        self._node, self._record = node, record
        self._epoch, self.mark = NO_EPOCH, SimMark(node)
        # when the process that forks workers is warm; it may hang. inf: there is none
        self._warm_s, self.hangs = float("inf"), False
        self.all: list[SimWorker] = []

    def warm(self) -> bool:
        return self._node.sim.kernel.now_s >= self._warm_s

    def warm_up(self) -> None:
        if self._warm_s == float("inf"):
            self._warm_s = self._node.sim.kernel.now_s + self._node.rng.uniform(*IMPORT_S)
            if self._node.sim.trouble.reigns("imports-hang"):
                self.hang()

    def hang(self) -> None:
        """The process that forks workers hangs; if it was not warm it never will be."""
        self.hangs = True
        if not self.warm():
            self._warm_s = NEVER_S

    def close(self, within_s: float = 0.0) -> None:
        self._kill()

    def _kill(self) -> None:
        for worker in self.all:
            worker.ended_by_us = worker.at_work
            worker.exit(KILLED)

    def clear_signs(self) -> None:
        self._node.mark = Mark(Want.NOTHING, "")

    def start(self, epoch: Epoch, stage: Path, patience: float) -> None:
        self.warm_up()
        sim, now = self._node.sim, self._node.sim.kernel.now_s
        self._epoch, self.all = epoch, []
        for rank in epoch.ranks(self._node.member):
            signs = _SignFile()
            pulse = heartbeat.WorkerHeartbeat(signs, LIMITS, patience, since_s=now)  # type: ignore[arg-type]
            self.all.append(SimWorker(self._node, epoch, rank, signs, pulse, ordered_s=now))
        for worker in self.all:
            sim.kernel.after(
                max(0.0, self._warm_s - now) + self._node.rng.uniform(*FORK_S),
                lambda w=worker: self._fork(w),  # type: ignore[misc]
            )

    def _fork(self, worker: SimWorker) -> None:
        if not self.hangs:
            worker.forked = True
            self._node.sim.team(worker.epoch).join(worker)

    def prepare(self, beside: Epoch, stage: Path) -> None:
        sim, rng = self._node.sim, self._node.sim.random(f"beside {self._node.number}")
        takes_s, code = rng.uniform(*PREPARE_S), rng.choice(PREPARED)
        self.all = []
        for i in range(sim.setting.nproc):
            signs = _SignFile()
            pulse = heartbeat.WorkerHeartbeat(signs, LIMITS, since_s=sim.kernel.now_s)  # type: ignore[arg-type]
            worker = SimWorker(self._node, beside, beside.world + i, signs, pulse, forked=True)
            self.all.append(worker)
            if code is not None:
                sim.kernel.after(takes_s, lambda w=worker: w.exit(code))  # type: ignore[misc]

    def stay(self) -> bool:
        """Whether they do is the run's own, and the same on all its nodes."""
        return self.attached() and self._node.sim.random("stays").random() < STAY

    def seen(self) -> list[WorkerEnd]:
        return [w.seen() for w in self.all]

    def at_work(self) -> int:
        return sum(w.at_work for w in self.all)

    def unadopted(self) -> bool:
        return False

    def attached(self) -> bool:
        return any(w.began for w in self.all)

    def signs(self) -> list[heartbeat.Sign]:
        return [w.pulse.sign for w in self.all if w.pulse.sign is not None]

    def step_ends_s(self) -> float | None:
        ends = [end for w in self.all if (end := w.pulse.step_ends_s) is not None]
        return max(ends, default=None)

    def forgive(self, seconds: float) -> None:
        for worker in self.all:
            worker.pulse.forgive(seconds)

    def signal(self, name: str) -> None: ...

    def find_hung(self, now: float) -> list[SimWorker]:
        hung = []
        for worker in self.all:
            if not worker.at_work:
                continue
            worker.pulse.look(now)
            state = "T" if worker.stuck else "S"
            if what := worker.pulse.hung(now, state) or self._unforked(worker):
                worker.hung, worker.guilty = what, not worker.pulse.waits(state)
                sign = worker.pulse.sign or heartbeat.Sign(0, 0, heartbeat.WorkerPhase.START)
                self._record(
                    WorkerHung(
                        self._node.member,
                        self._epoch.epoch,
                        worker.rank,
                        sign.step,
                        sign.place.name.lower(),
                        now - worker.pulse.since_s,
                        worker.guilty,
                        what,
                    )
                )
                hung.append(worker)
        return hung

    def _unforked(self, worker: SimWorker) -> str:
        """As `workers.Workers`."""
        silent_s = self._node.sim.kernel.now_s - worker.ordered_s
        late = not worker.forked and silent_s > FORKED_WITHIN_S
        return "not forked: the warm process hangs" if late else ""

    def end(self, within_s: float) -> list[str]:
        if any(w.at_work and not w.forked for w in self.all):
            self._warm_s, self.hangs = float("inf"), False  # it is killed
        self._kill()
        for worker in self.all:
            worker.pulse.look(self._node.sim.kernel.now_s)
        return []

    def stacks(self) -> list[Fact]:
        return []

    def flights(self) -> list[FlightDump]:
        return []


class SimMark:
    """The mark of a node, as `marks.MarkFile` writes it: where it cannot, workers get a signal."""

    def __init__(self, node: SimNode):
        self._node = node
        self._unwritten: Mark | None = None

    def write(self, want: Want, why: str, deadline_s: float | None) -> None:
        self._unwritten = Mark(want, why, deadline_s, f"{self._node.rng.randrange(1 << 32):x}")
        self.write_again()

    def write_again(self) -> None:
        if (mark := self._unwritten) is None:
            return
        full = mark.want is not Want.NOTHING and self._node.sim.trouble.reigns(
            "scratch-full", self._node
        )
        if not full or self._node.pool.attached():
            self._node.mark = mark
        if not full:
            self._unwritten = None


# ---- uploads -------------------------------------------------------------------------------------
@dataclass
class _Watch(UploaderWatch):
    """The agent's watch on the heartbeat, which is not in a file."""

    beats: Callable[[], int] = lambda: 0

    def _read(self) -> bytes:
        return self.beats().to_bytes(8, "big")


class SimUploads:
    """The node's uploader process, and what it has been handed. `jobs`: on their way; `hangs`: it
    neither works nor dies."""

    def __init__(self, node: SimNode):
        self._node, self.folder = node, Path("stage")
        self.up = self.hangs = False
        self.jobs: list[Sending] = []
        self.deadline_s: float | None = None
        self._beat, self._watch = 0, _Watch(self.folder)

    def ensure(self) -> None:
        if not self.up:
            self.up, self._watch = True, _Watch(self.folder, beats=self._beats)

    def _beats(self) -> int:
        self._beat = self._beat if self.hangs else 1 + int(self._node.sim.kernel.now_s / BEAT_S)
        return self._beat

    def look(self, now: float) -> list[tuple[str, int, str]]:
        if not self.up or not (why := self._watch.hung(now, self.deadline_s is not None)):
            return []
        self.kill()
        return [("uploader", KILLED, why)]

    def busy(self) -> int:
        if self.hangs:
            return 1  # it does not answer
        return sum(not job.written for job in self.jobs) if self.up else 0

    def drain(self, deadline_s: float | None) -> None:
        self.deadline_s = deadline_s

    def settle(self, wait_s: float, near: bool = False) -> None:
        kernel = self._node.sim.kernel
        until_s = kernel.now_s + (min(wait_s, AGENT_ANSWER_S) if self.hangs else wait_s)
        while self.busy() and kernel.now_s < until_s:
            self._node.host.sleep(0.5)

    def close(self, wait_s: float) -> None:
        self.kill()

    def kill(self) -> None:
        """The process is gone: who handed it something, and lives, sends it again."""
        jobs, self.jobs, self.up, self.hangs = self.jobs, [], False, False
        for job in jobs:
            job.lose_uploader()


# ---- the host ------------------------------------------------------------------------------------
class SimHost:
    """One machine, as its agent has it (`agent/host.py`)."""

    def __init__(self, node: SimNode):
        self._node, self.name, self.pid = node, f"node-{node.number}", 1

    def monotonic(self) -> float:
        return self._node.sim.kernel.now_s + 1000.0 * self._node.number

    def wall(self) -> float:
        return EPOCH_S + self._node.sim.kernel.now_s + self._node.skew_s

    def sleep(self, seconds: float) -> None:
        self._node.sim.kernel.sleep(seconds)
        if not self._node.runs():
            raise Crash

    def token(self) -> str:
        return f"{self._node.rng.randrange(1 << 24):06x}"

    def say(self, text: str, wrong: bool = False) -> None:
        self._node.sim.say(self._node.number, text)

    def workers(self, config: AgentConfig, member: str, record: Callable[[Fact], None]) -> SimPool:
        self._node.member = member
        self._node.pool = SimPool(self._node, record)
        return self._node.pool

    def helpers(self, config: AgentConfig) -> SimSidecars:
        return self._node.sim.sidecars(self._node)

    def prompt(self, store: ObjectStore) -> ObjectStore:
        self._prompt = cast("Access", store).prompt(self._node.sim.kernel)
        return store

    def last_words(self, seconds: float) -> None:
        self._prompt.allow(seconds)

    def uploads(self, config: AgentConfig, member: str) -> SimUploads:
        self._node.uploads = SimUploads(self._node)
        return self._node.uploads

    def lines(self, config: AgentConfig, member: str) -> SimulatedConnections:
        port = self.free_port(config.addr)
        net, pulse_s = self._node.sim.net, config.timing.beat_s / 2
        self._node.lines = SimulatedConnections(
            member, self._node, net, port, pulse_s, self._node.rng
        )
        return self._node.lines

    def free_port(self, addr: str) -> int:
        self._node.next_port += 1
        return self._node.next_port

    def measure(self, config: AgentConfig, member: str, record: Callable[[Fact], None]) -> NoWatch:
        return NoWatch()

    def listen(self, config: AgentConfig, sources: list[Any], tell: Callable[[Any], None]) -> Any:
        self._node.tell = tell
        return self

    def stop(self) -> None:
        self._node.tell = None

    def start_beats(self, rendezvous: Rendezvous) -> None:
        rendezvous._lock = SimLock(self._node.sim.kernel)  # type: ignore[assignment]
        rendezvous.say()
        self._node.beat_later(rendezvous)


# ---- the machine ---------------------------------------------------------------------------------
@dataclass
class SimNode:
    """`alive`: it has power. `code`: its agent's exit code, once that has ended. `member`: what its
    agent is called."""

    sim: WholeSystem
    number: int
    attempt: int
    offer: Offer
    rng: random.Random
    alive: bool = True
    code: int | None = None
    member: str = ""
    skew_s: float = 0.0
    version: str = "now"
    mark: Mark = field(default_factory=lambda: Mark(Want.NOTHING, ""))
    answered: str = ""  # the mark that a snapshot was made for
    seen: Ref | None = None  # the newest snapshot that was seen committed here
    near: dict[str, bytes] = field(default_factory=dict)  # chunks that lie staged here
    next_port: int = 20_000
    tell: Callable[[Any], None] | None = None  # of its agent, while that listens
    walled: bool = False  # no other node can connect to it
    up_s: float = 0.0  # since when its agent runs
    _turns: int = 0

    def __post_init__(self) -> None:
        self.addr = f"10.0.0.{self.number}"
        self.actor = f"agent-{self.number}"
        self.host = SimHost(self)
        self.pool: SimPool
        self.uploads: SimUploads
        self.lines: SimulatedConnections

    # ---- life ------------------------------------------------------------------------------------
    def boot(self) -> None:
        config = AgentConfig(
            run=self.sim.bucket.url,
            argv=[],
            nproc=self.sim.setting.nproc,
            attempt=self.attempt,
            addr=self.addr,
            node_dir=Path("node"),
            hardware=NodeHardware(self.offer.name, self.offer.speed),
            place=self.offer.place,
            worlds=Worlds(self.sim.setting.min_nodes, meshes=self.sim.meshes),
            timing=TIMING,
            fitness=Fitness(hang=LIMITS, unfit_grace_s=20.0),
        )
        self.sim.net.nodes[self.addr] = self
        try:
            self.agent: Agent = self.sim.build.agent(config, self.access(self.actor), [], self.host)
            self.agent.begin()
        except Crash:
            self._die()
            return
        self.up_s = self.sim.kernel.now_s
        self._turn_later(0.0)

    def _turn_later(self, seconds: float) -> None:
        self._turns += 1
        self.sim.kernel.after(seconds, lambda n=self._turns: self._turn(n), self.actor)  # type: ignore[misc]

    def _turn_now(self) -> None:
        """As soon as what it is in the middle of is done."""
        self._turn(self._turns)

    def _turn(self, number: int) -> None:
        if not self.runs() or number != self._turns:
            return
        try:
            code = self.agent.turn()
            if code is None:
                self._turn_later(TURN_S)
                return
            self.agent.close(code)
        except Crash:
            self._die()
            return
        self._end(code)

    def beat_later(self, rendezvous: Rendezvous) -> None:
        self.sim.kernel.after(
            TIMING.beat_s / 2, lambda: self._beat(rendezvous), f"beat-{self.number}"
        )

    def _beat(self, rendezvous: Rendezvous) -> None:
        if not self.runs() or rendezvous.me.state == "gone":
            return
        try:
            rendezvous.beat_if_due()
        except StoreError:
            pass  # a missed beat is what silence means
        except Crash:
            return
        self.beat_later(rendezvous)

    def _die(self) -> None:
        """The agent's process is gone, and with it all that die with their parent."""
        if self.code is None and self.alive:
            self._end(KILLED)

    def _end(self, code: int) -> None:
        self.code = code
        self.sim.say(self.number, f"agent ended with {code}")
        self._stop()
        if self.attempt:  # else no cloud knows of it
            self.sim.kernel.after(
                self.rng.uniform(*EXIT_S), lambda: self.sim.cloud.exited(self.attempt, code)
            )

    def _stop(self) -> None:
        if hasattr(self, "lines"):
            self.lines.close()
            self.uploads.kill()
            self.pool.close()

    def power_off(self) -> None:
        self.alive = False
        self._stop()

    def runs(self) -> bool:
        return self.alive and self.code is None

    def workers(self) -> list[SimWorker]:
        return self.pool.all if hasattr(self, "pool") else []

    def frozen(self) -> bool:
        return self.sim.kernel.paused(self.actor)

    # ---- what happens to it ----------------------------------------------------------------------
    def access(
        self, actor: str, reads: bool = False, lives: Callable[[], bool] | None = None
    ) -> Access:
        return self.sim.access(actor, self, reads, lives or self.runs)

    def spoken(self, record: bytes) -> bytes:
        return self.access(self.actor).spoken(record)

    def notice(self, grace_s: float, cancelled_s: float | None = None) -> None:
        found = Notice(
            "sim", "kill", f"n{self.rng.randrange(1 << 16)}", self.host.wall() + grace_s, True
        )
        self.hear(Noticed(found))
        if cancelled_s is not None:
            self.sim.kernel.after(cancelled_s, lambda: self.hear(Cancelled(found)))

    def signal(self) -> None:
        self.hear(node_state.Signalled("SIGTERM"))
        self.sim.alive.told_to_end(self, GRACE_S)

    def hear(self, event: Any) -> None:
        """The agent's loop is told, and shall heed it soon."""
        if self.tell is not None:
            self.tell(event)
            self.sim.alive.told(self)
            self.sim.kernel.after(PAUSE_S, self._turn_now, self.actor)

    def sick(self) -> None:
        from harness.agent.gpu_health import Action, GpuFinding, HealthVerdict

        self.hear(
            node_state.GpuJudged(
                HealthVerdict(
                    GpuFinding("GPU-0", "xid 48", 48, "simulated"), Action.DRAIN, "it is worn"
                )
            )
        )

    def read_mark(self) -> Mark:
        """As `marks.MarkReader`: a snapshot that was made is not asked for again."""
        if self.mark.want is Want.SNAPSHOT and self.mark.id == self.answered:
            return Mark(Want.NOTHING, "")
        return self.mark
