"""What goes wrong in a simulated world: a list, made from the seed, from which entries can be
taken away. Pure.

Each seed has its own mixture of kinds, and some have none: faults hide in combinations, and in calm
as well. Nothing goes wrong after `Setting.calm_s`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.core.world import Offer
from harness.worker.machine import Interval


@dataclass(frozen=True)
class Kind:
    """`lasts_s`: least and most; (0, 0): an instant. `what`: for people."""

    what: str
    lasts_s: tuple[float, float] = (0.0, 0.0)


KINDS = {
    # the network between nodes
    "cut": Kind("no node is reached by this one, and it reaches none", (2, 90)),
    "one-way": Kind("what this node sends to the other is lost", (2, 90)),
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
    "controller-silent": Kind("the bucket does not answer controllers", (1, 60)),
    "controller-expired": Kind("controllers' credentials are expired", (2, 120)),
    "rot": Kind("the newest committed snapshot is damaged in the bucket"),
    # clocks and pauses
    "jump": Kind("this node's wall clock jumps"),
    "pause-agent": Kind("this node's agent stands still at its next operation", (1, 60)),
    "pause-node": Kind("this whole node stands still", (1, 60)),
    "pause-uploader": Kind("this node's uploads stand still at their next operation", (1, 60)),
    "pause-controller": Kind("the controller stands still at its next operation", (5, 120)),
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
SPREAD = 12.0  # most faults a minute


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
        what = KINDS.get(self.kind, OTHER_VERSION).what
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
    # of nodes, in this order: "now", "before" (N-1: its records lack newer fields), "after" (N+1)
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
            versions=rng.choice((("now",), ("now",), ("now", "before"), ("now", "after"))),
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
    kinds = kinds or rng.sample(sorted(KINDS), rng.choice((1, 2, 4, 8, len(KINDS))))
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
