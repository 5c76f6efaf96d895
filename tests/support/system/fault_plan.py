"""What goes wrong in a simulated world: a list, made from the seed, from which entries can be
taken away. Pure.

Each seed has its own mixture of kinds, and some have none: faults hide in combinations, and in calm
as well. Nothing goes wrong after `Setting.calm_s`.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.core.world import Offer
from harness.worker.snapshot_timer import Interval
from storage.errors import StoreUnavailable
from storage.testing.faulty_store import Crash
from support.system.system_bucket import patience_of

if TYPE_CHECKING:
    from storage.stores.retries import Patience
    from support.system.system_node import SimNode, SimWorker
    from support.system.system_run import WholeSystem
    from support.system.virtual_time import Kernel

# Which faults a simulated run may name as the reason of a bad end. Pure.

SCRIPT = r"crash loop: .* (\d+) times .*\(after step (\d+)\): ([^.]*)\. "
HUNG = r"hung (\d+) times, the last time after step (\d+), where a node before it was worn out too"
FRUITLESS = r"(\d+) generations in a row ended without a new snapshot"
UNREADABLE = r"none of its snapshots can be used|its newest \d+ snapshots cannot be used"
WORDS = {"RuntimeError: simulated: the script raises": "fail-script", "SIGKILL": "kill-worker"}


@dataclass(frozen=True)
class InjectedFault:
    """A fault ended a worker of this epoch. `step`: the last one that it had done."""

    t: float
    kind: str
    attempt: int
    epoch: int
    step: int


@dataclass
class FaultLog:
    """`misread`: by attempt, when a node last was given damaged bytes of a snapshot; `read_s`: when
    a world restored one that was whole."""

    all: list[InjectedFault] = field(default_factory=list)
    misread: dict[int, float] = field(default_factory=dict)
    read_s: list[float] = field(default_factory=list)

    def explain(self, reason: str) -> bool:
        """Are these the reason that a run gives for its end?"""
        if found := re.search(SCRIPT, reason):
            times, step, failure = int(found[1]), int(found[2]), found[3]
            kind = WORDS.get(failure)
            return len({b.epoch for b in self.all if (b.kind, b.step) == (kind, step)}) >= times
        if found := re.search(HUNG, reason):
            return len(self._worn_out(int(found[1]), int(found[2]))) >= 2
        if re.search(UNREADABLE, reason):  # one host is not believed, nor is one that was refuted
            pairs_s = itertools.pairwise(sorted(self.misread.values()))
            return any(not any(a < t < b for t in self.read_s) for a, b in pairs_s)
        if found := re.search(FRUITLESS, reason):  # a blow in each of so many epochs in a row
            epochs = {b.epoch for b in self.all}
            last, times = max(epochs, default=0), int(found[1])
            return epochs.issuperset(range(last - times + 1, last + 1))
        return False

    def _worn_out(self, times: int, step: int) -> set[int]:
        """Return the attempts whose workers hung in so many epochs, once after this step."""
        hung = [b for b in self.all if b.kind == "hang-worker"]
        epochs = {b.attempt: {o.epoch for o in hung if o.attempt == b.attempt} for b in hung}
        return {b.attempt for b in hung if b.step == step and len(epochs[b.attempt]) >= times}

    def __str__(self) -> str:
        return "; ".join(
            f"{b.kind} at {b.t:.1f} s (attempt {b.attempt}, epoch {b.epoch}, step {b.step})"
            for b in self.all
        )


@dataclass(frozen=True)
class Kind:
    """`lasts_s`: least and most; (0, 0): an instant. `what`: for people."""

    what: str
    lasts_s: tuple[float, float] = (0.0, 0.0)


KINDS = {
    # the network between nodes
    "cut": Kind("no node is reached by this one, and it reaches none", (2, 90)),
    "one-way": Kind("what this node sends to the other is lost", (2, 90)),
    "wall": Kind("no node can make a new connection to this one; those that stand go on", (2, 90)),
    "island": Kind("neither a node nor the bucket is reached by this one, nor reaches it", (2, 90)),
    "lossy": Kind("lines of this node break again and again", (5, 120)),
    "slow-link": Kind("what this node says over its lines comes late", (5, 120)),
    # the bucket, as one actor has it
    "silent": Kind("the bucket does not answer this node; nothing is done", (0.5, 40)),
    "unheard": Kind("the bucket does what this node asks, and its answers are lost", (0.5, 15)),
    "throttled": Kind("the bucket answers this node 503 two times of three", (2, 60)),
    "expired": Kind("this node's credentials are expired: the bucket answers 403", (2, 120)),
    "damaged-reads": Kind("what this node restores is damaged on its way", (2, 60)),
    "silent-to-all": Kind("the bucket answers nobody", (0.5, 30)),
    "refused-to-all": Kind("the bucket says 403 to everybody", (2, 120)),
    "denied": Kind("the bucket says 404 of all snapshots, and lists them", (1, 40)),
    # shorter than a restore looks: the very first snapshot leaves no trace but itself
    "unseen": Kind("the bucket lists no snapshot, and says 404 of all", (1, 8)),
    "controller-silent": Kind("the bucket does not answer controllers", (1, 60)),
    # time that is lost inside a call
    "stalled": Kind("the bucket does what this node asks only later, if at all", (5, 120)),
    "unanswered": Kind("the bucket does what this node asks, and answers later", (5, 120)),
    "drips": Kind("each answer of the bucket to this node takes seconds", (5, 120)),
    "stalled-to-all": Kind("the bucket does what anybody asks only later", (5, 90)),
    "drips-to-all": Kind("each answer of the bucket takes seconds", (5, 90)),
    "controller-stalled": Kind("the bucket answers controllers only later", (5, 120)),
    "repeated": Kind("what this node puts or deletes arrives again, seconds later", (5, 120)),
    "half-reads": Kind("this node gets half of each object", (1, 15)),
    "controller-half-reads": Kind("controllers get half of each object", (1, 60)),
    "controller-expired": Kind("controllers' credentials are expired", (2, 120)),
    "rot": Kind("the newest committed snapshot is damaged in the bucket"),
    # clocks and pauses
    "jump": Kind("this node's wall clock jumps"),
    "pause-agent": Kind("this node's agent stands still at its next operation", (1, 60)),
    "pause-node": Kind("this whole node stands still", (1, 60)),
    "pause-uploader": Kind("this node's uploads stand still at their next operation", (1, 60)),
    "pause-controller": Kind("the controller stands still at its next operation", (5, 120)),
    # what neither dies nor answers
    "hang-uploader": Kind("this node's uploader hangs, for good"),
    "hang-warm": Kind("the process that forks this node's workers hangs, for good"),
    "imports-hang": Kind("what new nodes import hangs, for good", (2, 40)),
    "walled": Kind("no other node can connect to nodes that come now, for good", (2, 60)),
    "sigterm": Kind("this node's agent is told to end, by a signal"),
    # deaths
    "crash-controller": Kind("the controller dies at its next operation, before it is done"),
    "crash-controller-late": Kind("the controller dies at its next operation, when it is done"),
    "crash-agent": Kind("this node's agent dies at its next operation"),
    "kill-uploader": Kind("this node's uploader process dies"),
    "kill-worker": Kind("a worker of this node is killed: out of memory"),
    "bad-memory": Kind("what lies staged in this node's memory is damaged"),
    "hang-worker": Kind("a worker of this node hangs", (20, 400)),
    "fail-script": Kind("the script raises an error on a worker of this node"),
    "power-loss": Kind("this node is gone at once, without a word"),
    "sick-gpu": Kind("a GPU of this node reports an error that asks for another node"),
    # exhaustion
    "no-descriptors": Kind("this node can make no new connection", (5, 120)),
    "full-disk": Kind("this node can stage no snapshot", (5, 120)),
    "scratch-full": Kind("this node's agent can write no mark", (5, 200)),
    # the cloud
    "notice": Kind("this node will be taken, with a word", (5, 60)),
    "false-notice": Kind("a notice that is taken back", (3, 30)),
    "zombie": Kind("the cloud says that this node is gone; it lives on", (10, 200)),
    "unlisted": Kind("the cloud does not list this node", (2, 45)),
    "twice": Kind("the cloud lists this node twice", (2, 90)),
    "cloud-silent": Kind("the cloud does not answer, or does and its answers are lost", (1, 60)),
    "full-cloud": Kind("the cloud has no machine", (20, 200)),
    # people
    "snapshot-asked": Kind("a person asks for a snapshot"),
}
# not drawn for every world: who comes while nobody of the run lives takes it over, by design
OTHER_VERSION = Kind("a person starts a node of another version of this code in the run")
UNDRAWN = {"other-version": OTHER_VERSION}
AT_ONCE = {"island": ("cut", "stalled")}  # kinds that are several
# while which the bucket tells a node nothing
DEAF = ("silent", "unheard", "expired", "stalled", "unanswered",
        "silent-to-all", "refused-to-all", "stalled-to-all")  # fmt: skip
SPREAD = 15.0  # most faults a minute
DEATHS = ("power-loss", "crash-agent", "kill-worker")  # in a third of worlds, beside what it has
# what should keep nobody from anything: neither the node that it befalls, nor others
HARMLESS = ("scratch-full", "full-disk", "repeated", "jump", "snapshot-asked", "twice", "unlisted")
BORNE = (*HARMLESS, "hang-uploader", "imports-hang", "walled")
# how long it takes others, by design, to find what befell a node
FOUND_S = {"hang-worker": 130.0, "rot": 60.0}


@dataclass(frozen=True)
class Fault:
    """`who`, `other`: of the nodes that are up at that time, the n-th (modulo their number)."""

    at_s: float
    kind: str
    who: int = 0
    other: int = 1
    lasts_s: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        what = {**KINDS, **UNDRAWN}[self.kind].what
        return f"{self.at_s:7.1f} s  {self.kind} (node {self.who}){lasts}: {what}"


@dataclass(frozen=True)
class Setting:
    """What a world is like. Times in seconds."""

    calm_s: float = 0.0
    min_nodes: int = 1
    max_nodes: int = 2
    nproc: int = 1
    micro_batches: int = 8
    total_steps: int = 40
    step_s: float = 4.0
    interval: Interval = field(default_factory=lambda: Interval(every_steps=5))
    offers: tuple[Offer, ...] = (Offer(1.0, "aws/us-east-1a", gpus=1),)
    interleaved: float = 0.01  # chance that others are quicker at an operation
    skews_s: tuple[float, ...] = (0.0,)  # of nodes' wall clocks, in the order of their start
    # of nodes, in this order: "now", "after" (N+1: its records have a field more)
    versions: tuple[str, ...] = ("now",)
    publishes: bool = True
    protocol: int = 1  # that the run speaks; who is of another version speaks the other of 1 and 2
    meshes: str = ""  # in order of preference, as `harness run --mesh` takes them

    @classmethod
    def of(cls, seed: int) -> Setting:
        rng = random.Random(f"setting {seed}")
        most = rng.choice((1, 2, 2, 3, 4))
        skew = rng.choice((0.0, 0.0, 1.0, 60.0, 4000.0))
        offers = [
            Offer(1.0 + 0.3 * i, f"aws/us-east-1{letter}", gpus=1, speed=rng.choice((1.0, 1.2)))
            for i, letter in enumerate("ab"[: rng.randint(1, 2)])
        ]
        every = rng.choice((Interval(every_steps=rng.randint(2, 8)), Interval(every_s=15.0)))
        nproc = rng.choice((1, 1, 2))
        return cls(
            calm_s=rng.choice((0.0, 100.0, 250.0, 400.0)),
            min_nodes=rng.choice((1, 1, most)),
            max_nodes=most,
            nproc=nproc,
            # mostly room for all nodes, sometimes not: then some of them are spares
            micro_batches=rng.choice((2, 4, 8, 9, 12)),
            total_steps=rng.randint(15, 50),
            step_s=rng.choice((4.0, 8.0, 16.0)),
            interval=every,
            offers=tuple(offers),
            interleaved=rng.choice((0.0, 0.01, 0.05)),
            skews_s=tuple(rng.uniform(-skew, skew) for _ in range(7)),
            versions=rng.choice((("now",), ("now",), ("now", "after"), ("now", "after"))),
            publishes=rng.random() < 0.3,
            meshes=rng.choice(("", "", "", "", "dp_shard=4|dp_shard=2|dp_shard=1", "auto:1..4")),
        )


def faults_of(
    seed: int, setting: Setting, kinds: Sequence[str] = (), many: int = 0
) -> tuple[Fault, ...]:
    """By time. Swarm testing: few kinds of fault in one world, many in another. `kinds`, `many`:
    these and so many instead."""
    rng = random.Random(f"faults {seed}")
    if not setting.calm_s:
        return ()
    some = rng.sample(sorted(KINDS), rng.choice((1, 2, 4, 8, len(KINDS))))
    kinds = kinds or [*some, *rng.choice(((), (), DEATHS))]
    many = many or rng.randint(1, max(1, round(rng.uniform(1.0, SPREAD) * setting.calm_s / 60)))
    found = []
    for _ in range(many):
        kind = rng.choice(kinds)
        at_s, lasts_s = rng.uniform(0.0, setting.calm_s), rng.uniform(*KINDS[kind].lasts_s)
        found.append(
            Fault(
                round(at_s, 1),
                kind,
                rng.randrange(8),
                rng.randrange(8),
                round(min(lasts_s, setting.calm_s - at_s), 1),
            )
        )
    return tuple(sorted(found, key=lambda fault: (fault.at_s, fault.kind)))


# What befalls a node at once, as the list of faults says (`faults.py`). Pure.


def _pause_node(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    for actor in ("agent", "beat", "lines", "uploader", "publisher"):
        whole.kernel.pause(f"{actor}-{node.number}", fault.lasts_s)


def _jump(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    node.skew_s += whole.random(f"jump {fault.at_s}").choice((-3600.0, -30.0, 30.0, 3600.0))


def _kill_worker(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    for worker in node.pool.all[fault.other % 2 : 1 + fault.other % 2]:
        _struck(whole, "kill-worker", worker)
        worker.exit(-9)


def _struck(whole: WholeSystem, kind: str, worker: SimWorker) -> None:
    if worker.at_work:
        step = worker.signs.sign.step if worker.signs.sign else 0
        whole.struck(kind, worker.node, worker.epoch.epoch, step)


def _hang_worker(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    for worker in node.pool.all[:1]:
        _struck(whole, "hang-worker", worker)
        worker.stuck = True
        whole.kernel.after(fault.lasts_s, worker.come_to)


def _hang_uploader(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    node.uploads.hangs = node.uploads.up


def _hang_warm(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    node.pool.hang()


def _sigterm(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    node.signal()


def _bad_memory(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    for name, data in node.near.items():
        node.near[name] = bytes([data[0] ^ 1]) + data[1:]


def _fail_script(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    for worker in node.pool.all[:1]:
        worker.to_fail = "simulated: the script raises"


def _power_loss(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    whole.cloud.end(node.attempt, None, "preempted")


def _zombie(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    whole.cloud.end(node.attempt, None, "preempted", lives_on_s=fault.lasts_s)


def _notice(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    node.notice(fault.lasts_s)
    whole.kernel.after(fault.lasts_s, lambda: whole.cloud.end(node.attempt, None, "preempted"))


def _false_notice(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    node.notice(120.0, cancelled_s=fault.lasts_s)


def _arm(actor: str) -> Callable[[WholeSystem, SimNode, Fault], None]:
    return lambda whole, node, fault: whole.trouble.arm(f"{actor}-{node.number}", fault)


def _unlist(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    # once: what neither cloud nor bucket shows for `lost_after_s` is lost, rightly
    whole.cloud.unlisted.setdefault(node.attempt, whole.kernel.now_s + fault.lasts_s)


def _double(whole: WholeSystem, node: SimNode, fault: Fault) -> None:
    whole.cloud.twice[node.attempt] = whole.kernel.now_s + fault.lasts_s


STRIKES: dict[str, Callable[[WholeSystem, SimNode, Fault], None]] = {
    "pause-node": _pause_node,
    "pause-agent": _arm("agent"),
    "pause-uploader": _arm("uploader"),
    "crash-agent": _arm("agent"),
    "kill-uploader": lambda whole, node, fault: node.uploads.kill(),
    "kill-worker": _kill_worker,
    "bad-memory": _bad_memory,
    "hang-worker": _hang_worker,
    "fail-script": _fail_script,
    "hang-uploader": _hang_uploader,
    "hang-warm": _hang_warm,
    "sigterm": _sigterm,
    "power-loss": _power_loss,
    "sick-gpu": lambda whole, node, fault: node.sick(),
    "jump": _jump,
    "notice": _notice,
    "false-notice": _false_notice,
    "zombie": _zombie,
    "unlisted": _unlist,
    "twice": _double,
}


# What is wrong at this moment, for whom. Pure.

CONTROLLER = "controller"
HURRY_S = 0.3  # how much quicker others may be at an operation
CALL_S = 60.0  # the longest that a call is made again and again: `retries.RETRY_WITHIN_S`
DRIP_S = (0.2, 3.0)  # for an answer that comes slowly
AGAIN_S = (0.2, 8.0)  # until a request arrives a second time
EVERYBODY = -1


class ActiveFaults:
    """`interleaved`: chance that others are quicker at an operation."""

    def __init__(self, kernel: Kernel, interleaved: float, calm_s: float):
        self._kernel, self._interleaved, self._calm_s = kernel, interleaved, calm_s
        self._spells: dict[str, list[tuple[float, int | None, int | None]]] = {}
        self._strikes: dict[str, list[Fault]] = {}
        self.misread: dict[int, float] = {}  # by attempt: when it last was given damaged bytes
        self.overtake: Callable[[float], None] = lambda lasts_s: None
        self.last_s = 0.0  # when something last began to go wrong
        self.until_s: dict[int, float] = {}  # by node, or EVERYBODY: how long something is wrong

    def patience(self) -> Patience:
        return patience_of(self._kernel)

    @property
    def calm(self) -> bool:
        return self._kernel.now_s >= self._calm_s

    # ---- spells ----------------------------------------------------------------------------------
    def begin(self, fault: Fault, who: int | None, other: int | None = None) -> None:
        """A spell. `who`: the node's number; None: of everybody."""
        if fault.kind == "unseen" and self.reigns("unseen"):
            return  # spells that follow each other are one that is too long
        until_s = self._kernel.now_s + fault.lasts_s
        for number in {EVERYBODY} if who is None else {who, who if other is None else other}:
            self.note(number, fault)
        self._spells.setdefault(fault.kind, []).append((until_s, who, other))

    def note(self, number: int, fault: Fault) -> None:
        """Something is wrong with this node."""
        now = self._kernel.now_s
        if fault.kind not in HARMLESS:
            self.last_s = max(self.last_s, now + FOUND_S.get(fault.kind, 0.0))
        if fault.kind not in BORNE:
            self.until_s[number] = max(self.until_s.get(number, 0.0), now + fault.lasts_s)

    def reigns(
        self, kind: str, node: SimNode | None = None, other: int | None = None, later_s: float = 0.0
    ) -> bool:
        """Does a spell of this kind hold for this node now (or for everybody)?"""
        return self._kernel.now_s + later_s < self.over_s(kind, node, other)

    def over_s(self, kind: str, node: SimNode | None = None, other: int | None = None) -> float:
        """When the last spell of this kind for this node is over; 0.0: there was none."""
        spells = self._spells.get(kind)
        if not spells:
            return 0.0
        number = node.number if node is not None else None
        ends = (
            until_s
            for until_s, who, whom in spells
            if who in (None, number) and (other is None or whom == other)
        )
        return max(ends, default=0.0)

    # ---- strikes ---------------------------------------------------------------------------------
    def arm(self, actor: str, fault: Fault) -> None:
        """It befalls this actor at its next operation."""
        self._strikes.setdefault(actor, []).append(fault)

    def befall(self, actor: str, rng: random.Random) -> None:
        """An operation of this actor begins. Raises Crash."""
        if self.calm and not self._strikes:
            return
        if self._interleaved and not self.calm and rng.random() < self._interleaved:
            self._kernel.sleep(rng.uniform(0.0, HURRY_S))
        strikes = self._strikes.get(actor)
        if not strikes or strikes[0].kind.endswith("late"):
            return
        fault = strikes.pop(0)
        if fault.kind == "pause-controller":
            self.overtake(fault.lasts_s)
        elif fault.lasts_s:
            if actor.startswith("agent"):
                self._kernel.pause(actor, fault.lasts_s)
            self.last_s = max(self.last_s, self._kernel.now_s + fault.lasts_s)
            self._kernel.sleep(fault.lasts_s)
        else:
            raise Crash

    def dies_late(self, actor: str) -> bool:
        """Does it die when this operation is done?"""
        strikes = self._strikes.get(actor)
        if strikes and strikes[0].kind.endswith("late"):
            strikes.pop(0)
            return True
        return False

    # ---- what the bucket answers -----------------------------------------------------------------
    def stall(self, kind: str, node: SimNode | None, where: str, rng: random.Random) -> None:
        """Time passes in a call. Raises StoreUnavailable when it was tried for long enough."""
        if not self._spells:
            return
        slow = self.reigns("drips-to-all") or (node is not None and self.reigns("drips", node))
        if kind == "stalled" and slow:
            self._kernel.sleep(rng.uniform(*DRIP_S))
        now, ours = self._kernel.now_s, kind if node is not None else f"controller-{kind}"
        wait_s = max(self.over_s(f"{kind}-to-all"), self.over_s(ours, node)) - now
        if wait_s > 0:
            self._kernel.sleep(min(wait_s, CALL_S))
        if wait_s > CALL_S:
            raise StoreUnavailable(f"{where}: no answer for {CALL_S:.0f} s (simulated)")

    def repeat(self, node: SimNode | None, do: Callable[[], object], rng: random.Random) -> None:
        """What was done is done again."""
        if node is not None and self.reigns("repeated", node):
            self._kernel.after(rng.uniform(*AGAIN_S), lambda: (do(), None)[1])

    def answer(
        self, node: SimNode | None, kind: str, key: str, rng: random.Random, later_s: float
    ) -> str:
        """ "": as it should be."""
        if not self._spells or (self.calm and not later_s):
            return ""
        ours = "controller-" if node is None else ""
        if self.reigns("refused-to-all") or self.reigns(f"{ours}expired", node):
            return "refused"
        if self.reigns("silent-to-all") or self.reigns(f"{ours}silent", node):
            return "silent"
        if key.startswith("snapshots/") and kind in ("read", "list"):
            if self.reigns("unseen", None, None, later_s):
                return "missing"
            if kind == "read" and self.reigns("denied", None, None, later_s):
                return "missing"
        if node is not None and self.reigns("throttled", node) and rng.random() < 0.67:
            return "silent"
        if node is not None and self.reigns("unheard", node):
            return "unheard"
        return ""

    def damages_read(self, node: SimNode | None, key: str) -> bool:
        damaged = key.endswith("state.bin") and self.reigns("damaged-reads", node)
        if damaged and node is not None:
            self.misread[node.attempt] = self._kernel.now_s
        return damaged

    def halves_read(self, node: SimNode | None) -> bool:
        return self.reigns("controller-half-reads" if node is None else "half-reads", node)
