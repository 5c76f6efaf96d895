"""The nouns of recovery, and the one door through which the world comes in.

Pure: no torch, no SkyPilot, no sockets, no wall clock, no global randomness. `cli/` builds the
real `World`, `sim.py` the simulated one; everything between takes what it is given.

Errors:
    HarnessError
      ├─ BadInput        what the user gave cannot work; the message says what to do
      ├─ NoCapacity      an offer has no machine at the moment
      ├─ Fenced          somebody else holds the lease, or a newer epoch exists
      ├─ WrongProtocol   a run's nodes speak another protocol than this one
      └─ CloudUnavailable  the cloud's own interface did not answer; try again later
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeAlias

from harness.core.known import Knowledge
from storage.objects import ObjectStore

# exit codes; docs/ARCHITECTURE.md says who acts on which
FINISHED, DRAINED, RESIZE, STOPPED, FENCED, UNFIT, REFUSED = 0, 33, 34, 35, 36, 37, 38

EXPECTED_S = 900.0  # the end of a wait is told anew when it has moved by more


class HarnessError(Exception):
    """Base of all errors that this project raises on purpose."""


class BadInput(HarnessError):
    """What was wanted, what was found, what to do; raised before money is spent."""


class NoCapacity(HarnessError):
    """An offer has no machine at the moment."""


class Fenced(HarnessError):
    """Somebody newer has taken over; whoever sees this must stop acting."""


class WrongProtocol(HarnessError):
    """A run's nodes speak another protocol than this one: which, and what to do."""


class CloudUnavailable(HarnessError):
    """The cloud's interface did not answer; nothing is known about the outcome."""


@dataclass(frozen=True, order=True)
class Offer:
    """A place, a shape and a price. `usd_per_h` is for the whole node; `gpus` may be 0 (a CPU
    node)."""

    usd_per_h: float
    name: str  # unique, stable, printable: "local/a", "aws/us-east-1/use1-az1/p5.48xlarge"
    spot: bool = True
    accelerator: str = "cpu"
    gpus: int = 0
    on_demand_usd_per_h: float = 0.0  # what the same shape costs on demand; 0: unknown
    speed: float = 1.0  # relative samples per second of one worker on it
    # nodes of one place reach each other ("aws/us-east-1"); "": all that have none do
    place: str = ""

    @property
    def workers(self) -> int:
        """Of one node: one for each GPU."""
        return max(1, self.gpus)


class NodeState(str, Enum):
    """What the cloud says of one attempt's node."""

    PENDING = "pending"  # asked for; not running yet
    UP = "up"
    NO_CAPACITY = "no-capacity"  # the cloud had none; nothing is billed
    GONE = "gone"  # terminated, taken away, or its command ended


@dataclass(frozen=True)
class Node:
    """One attempt as the cloud sees it. Times are seconds on the world's clock; NaN-free: None
    is 'not yet'."""

    attempt: int
    offer: Offer
    state: NodeState
    asked_s: float
    up_s: float | None = None
    gone_s: float | None = None
    exit_code: int | None = None  # of the node's command, when the cloud knows it
    reason: str = ""  # "preempted", "exited", "terminated", "killed", ... as the cloud tells it
    # when its command began, if that was (much) later than up_s, from which it is billed
    at_work_s: float | None = None

    def been_up_s(self, now_s: float) -> float:
        """Seconds for which its command has been at work; below 0 if it is not yet."""
        began_s = self.up_s if self.at_work_s is None else self.at_work_s
        return -1.0 if began_s is None else now_s - began_s

    @property
    def alive(self) -> bool:
        return self.state is NodeState.UP or self.state is NodeState.PENDING


class Clock(Protocol):
    """Wall-clock seconds and sleeping; simulated time in sim.py."""

    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class Cloud(Protocol):
    """Where nodes come from. Level-triggered: `launch` only asks; what came of it is seen in
    `nodes`.

    All nodes of the run are found by its tag, so a new controller adopts what an old one launched.
    `launch` is idempotent per attempt number; `terminate` of an unknown attempt does nothing.
    """

    def offers(self) -> Sequence[Offer]: ...
    def launch(self, attempt: int, offer: Offer) -> None: ...
    def nodes(self) -> Sequence[Node]: ...
    def terminate(self, attempt: int) -> None: ...


@dataclass(frozen=True)
class World:
    """Everything that recovery touches."""

    clock: Clock
    cloud: Cloud
    store: ObjectStore  # rooted at the run's URL
    rng: random.Random


@dataclass(frozen=True)
class View:
    """What a policy may know: a snapshot of the situation, made anew for every decision."""

    now_s: float
    # when this launch of the run began; outlives controllers, begins anew after RunEnded
    started_s: float
    min_nodes: int
    max_nodes: int
    alive: tuple[Node, ...]  # pending or up
    offers: tuple[Offer, ...]  # cheapest first
    # Offers that were full when last asked -> until when it is pointless to ask again; in here
    # until one of them comes up.
    blocked: dict[str, float] = field(default_factory=dict)
    committed_step: int = 0
    last_progress_s: float = 0.0  # when committed_step last rose
    spent_usd: float = 0.0  # billed so far, running nodes included
    attempts: int = 0  # made so far
    losses: int = 0  # attempts that ended without being asked to
    # not of those alive: nodes that were given up, or that nobody asked for, and may be billed yet
    unsure: tuple[Node, ...] = ()
    # of those alive: attempts that may not stay (facts.AttemptDoubted)
    doubted: tuple[int, ...] = ()
    # of those alive: attempts -> the one, alive too, that each was launched instead of
    standing_in: dict[int, int] = field(default_factory=dict)
    # from asking for a node until it is up; clouds may bill it from when it was asked for
    launch_s: float = 0.0
    # for so long a node is billed after it was asked to leave: it drains, and is terminated
    leave_s: float = 60.0
    # both, by cloud (`cloud_of`), where they are known apart
    times: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    # what forecasts need: speed, capacity, prices, deadline; empty where nobody knows
    known: Knowledge = field(default_factory=Knowledge)

    def times_of(self, offer: Offer) -> tuple[float, float]:
        """`launch_s` and `leave_s` on that offer's cloud."""
        return self.times.get(cloud_of(offer.name), (self.launch_s, self.leave_s))


def cloud_of(offer: str) -> str:
    """The cloud that an offer of this name is of."""
    return offer.partition("/")[0]


def meeting_place(found: Sequence[tuple[str, int, bool]]) -> str:
    """Where those that want to train together meet. found: of each, its place, its number of
    workers, whether it was in the last world.

    Where the last world was, for as long as somebody of it is there; else where most workers are,
    then the first that is named.
    """
    candidates = [f for f in found if f[2]] or list(found)
    workers: dict[str, int] = {}
    for place, count, _ in candidates:
        workers[place] = workers.get(place, 0) + count
    return max(workers, key=lambda place: workers[place], default="")


def whole_replicas(
    sizes: Sequence[int],
    replica_ranks: int = 1,
    max_ranks: int | None = None,
    worlds: Collection[int] = (),
) -> list[int]:
    """Which members form the next world: only whole replicas can train, and a member takes part
    with all of its ranks or not at all.

    `sizes`: ranks of each member, in the order in which they are wanted. A member that does not fit
    below `max_ranks` is left out; then, until the ranks that remain are a multiple of
    `replica_ranks`, as few ranks as possible, of the last members if there is a choice.
    `worlds`: the only numbers of ranks that may train; then the greatest of them that can be made.
    Returns places in `sizes`, ascending; empty: no world can be made.
    """
    if worlds:
        most = sum(sizes) if max_ranks is None else min(max_ranks, sum(sizes))
        fit = {w for w in worlds if 0 < w <= most and not w % replica_ranks}
        return _members_of(sizes, sorted(fit, reverse=True))
    chosen: list[int] = []
    total = 0
    for i, size in enumerate(sizes):
        if max_ranks is None or total + size <= max_ranks:
            chosen.append(i)
            total += size
    if not total % replica_ranks:
        return chosen
    # remainder of the ranks that are left out -> (how many, who): the fewest; the first found wins
    without: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for i in reversed(chosen):
        for ranks, who in list(without.values()):
            more = ranks + sizes[i]
            found = without.get(more % replica_ranks)
            if found is None or more < found[0]:
                without[more % replica_ranks] = (more, (*who, i))
    _, out = without[total % replica_ranks]
    return [i for i in chosen if i not in out]


def _members_of(sizes: Sequence[int], totals: Sequence[int]) -> list[int]:
    """Places in `sizes` that add up to the first of `totals` that can be made (they fall), the
    first places if there is a choice."""
    if len(set(sizes)) <= 1:
        total = next((t for t in totals if not t % sizes[0]), 0)
        return list(range(total // sizes[0])) if total else []
    # sum -> the last member in it, and the sum without it; the first found wins
    made: dict[int, tuple[int, int]] = {0: (-1, 0)}
    for i, size in enumerate(sizes):
        for before in sorted(made, reverse=True):
            if before + size not in made and totals and before + size <= totals[0]:
                made[before + size] = (i, before)
        if totals and totals[0] in made:
            break
    total = next((t for t in totals if t in made), 0)
    places = []
    while total:
        i, total = made[total]
        places.append(i)
    return places[::-1]


@dataclass(frozen=True)
class Launch:
    offer: Offer
    reason: str = ""
    # beside that one, which is released when this one is at work: there may be one more than
    # `max_nodes` meanwhile
    instead_of: int | None = None


@dataclass(frozen=True)
class Terminate:
    attempt: int
    reason: str
    grace_s: float = 0.0  # first asked to leave, and ended if it is still there after this
    also: tuple[int, ...] = ()  # these too, at the same moment


@dataclass(frozen=True)
class Wait:
    """Look again after so many `seconds`. Of a wait that is chosen, for better prices or capacity:
    when it will probably be over (`expected_s`, the run's clock), and what it is expected to
    save."""

    seconds: float
    reason: str = ""
    expected_s: float | None = None
    saving_usd: float | None = None

    def is_news(self, before: Wait | None) -> bool:
        """Is it another wait, or expected to end at quite another time?"""
        if before is None or before.reason != self.reason:
            return True
        if before.expected_s is None or self.expected_s is None:
            return before.expected_s is not self.expected_s
        return abs(self.expected_s - before.expected_s) > EXPECTED_S


@dataclass(frozen=True)
class Stop:
    reason: str  # told to the user as it stands


Decision: TypeAlias = Launch | Terminate | Wait | Stop


class Policy(Protocol):
    """A strategy is a function; composition is wrapping (`within_budget(cheapest, usd=200)`)."""

    def __call__(self, view: View) -> Decision: ...
