"""The nouns of recovery, and `World`: the only way in which code reaches the outside world.

Pure: no torch, no SkyPilot, no sockets, no wall clock, no global randomness. `cli/` builds the real
`World`, `lab/simulation/simulation.py` the simulated one; everything between uses the one that it
is given.

Errors:
    HarnessError
      ├─ BadInput        the user's input cannot work; the message says what to do
      ├─ NoCapacity      an offer has no machine at the moment
      ├─ Fenced          another process holds the lease, or a newer generation exists
      ├─ WrongProtocol   a run's nodes speak another protocol than this one
      └─ CloudUnavailable  the cloud's API did not answer; retry later
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeAlias

from harness.core.estimates import Estimates
from storage.stores.objects import ObjectStore

# exit codes; docs/TROUBLE.md lists which process acts on which
FINISHED, DRAINED, RESIZE, STOPPED, FENCED, UNFIT, REFUSED = 0, 33, 34, 35, 36, 37, 38

EXPECTED_S = 900.0  # a wait is reported again when its expected end has moved by more than this


class HarnessError(Exception):
    """Base of all errors that this project raises on purpose."""


class BadInput(HarnessError):
    """An error in the user's input, raised before money is spent. The message names what was
    wanted, what was found and what to do."""


class NoCapacity(HarnessError):
    """An offer has no machine at the moment."""


class Fenced(HarnessError):
    """A newer process has taken over; the process that gets this error must stop acting."""


class WrongProtocol(HarnessError):
    """A run's nodes speak another protocol than this one. The message says which and what to do."""


class CloudUnavailable(HarnessError):
    """The cloud's API did not answer; nothing is known about the outcome."""


@dataclass(frozen=True, order=True)
class Offer:
    """A kind of node that can be launched: a place, a shape and a price. `usd_per_h` is for the
    whole node; `gpus` may be 0 (a CPU node)."""

    usd_per_h: float
    name: str  # unique, stable, printable: "local/a", "aws/us-east-1/use1-az1/p5.48xlarge"
    spot: bool = True
    accelerator: str = "cpu"
    gpus: int = 0
    on_demand_usd_per_h: float = 0.0  # price of the same shape on demand; 0: unknown
    speed: float = 1.0  # relative samples per second of one worker on it
    # Nodes of one place ("aws/us-east-1") reach each other; so do all nodes whose place is "".
    place: str = ""

    @property
    def workers(self) -> int:
        """Workers of one node: one for each GPU, at least 1."""
        return max(1, self.gpus)


class NodeState(str, Enum):
    """The state of one attempt's node, as the cloud reports it."""

    PENDING = "pending"  # requested; not running yet
    UP = "up"
    NO_CAPACITY = "no-capacity"  # the cloud had no machine; nothing is billed
    GONE = "gone"  # terminated or preempted, or its command ended


@dataclass(frozen=True)
class Node:
    """One attempt as the cloud sees it. Times are seconds on the world's clock, never NaN; `None`:
    not yet."""

    attempt: int
    offer: Offer
    state: NodeState
    asked_s: float
    up_s: float | None = None
    gone_s: float | None = None
    exit_code: int | None = None  # of the node's command; None: the cloud does not know it
    reason: str = ""  # "preempted", "exited", "terminated", "killed", ... as the cloud reports it
    # start of its command, if (much) later than up_s, from which it is billed
    at_work_s: float | None = None

    def been_up_s(self, now_s: float) -> float:
        """Return for how many seconds its command has been at work; negative: not yet."""
        began_s = self.up_s if self.at_work_s is None else self.at_work_s
        return -1.0 if began_s is None else now_s - began_s

    @property
    def usd_per_h(self) -> float:
        return self.offer.usd_per_h

    @property
    def alive(self) -> bool:
        return self.state is NodeState.UP or self.state is NodeState.PENDING


class Clock(Protocol):
    """Wall-clock seconds and sleeping; simulated time in lab/simulation/simulation.py."""

    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class Cloud(Protocol):
    """The source of nodes. It is level-triggered: `launch` only makes a request, and its outcome
    appears in `nodes`.

    All nodes of the run are found by its tag, so a new controller adopts what an old one launched.
    `launch` is idempotent per attempt number; `terminate` of an unknown attempt does nothing.
    """

    def offers(self) -> Sequence[Offer]: ...
    def launch(self, attempt: int, offer: Offer) -> None: ...
    def nodes(self) -> Sequence[Node]: ...
    def terminate(self, attempt: int) -> None: ...


@dataclass(frozen=True)
class World:
    """The interfaces to everything outside that recovery touches."""

    clock: Clock
    cloud: Cloud
    store: ObjectStore  # rooted at the run's URL
    rng: random.Random


@dataclass(frozen=True)
class View:
    """Everything that a policy may know: the current situation, built for every decision."""

    now_s: float
    # start of this launch of the run; survives a change of controller, reset after RunEnded
    started_s: float
    min_nodes: int
    max_nodes: int
    alive: tuple[Node, ...]  # pending or up
    offers: tuple[Offer, ...]  # cheapest first
    # Offers without capacity at the last request -> time before which a retry is pointless. An
    # offer stays in here until one of its nodes comes up.
    blocked: dict[str, float] = field(default_factory=dict)
    committed_step: int = 0
    last_progress_s: float = 0.0  # when committed_step last rose
    spent_usd: float = 0.0  # billed so far, running nodes included
    attempts: int = 0  # made so far
    losses: int = 0  # attempts that ended without a request
    # nodes outside `alive` that may still be billed: given up, or requested by no one
    unsure: tuple[Node, ...] = ()
    # alive attempts that may not stay (facts.AttemptDoubted)
    doubted: tuple[int, ...] = ()
    # alive attempt -> the alive attempt that it was launched to replace
    standing_in: dict[int, int] = field(default_factory=dict)
    # from the request for a node until it is up; clouds may bill it from the request on
    launch_s: float = 0.0
    # how long a node is billed after the request to leave: it drains, then it is terminated
    leave_s: float = 60.0
    # (launch_s, leave_s) by cloud (`cloud_of`), where they are known separately
    times: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    # what forecasts need: speed, capacity, prices, deadline; empty if unknown
    known: Estimates = field(default_factory=Estimates)

    def times_of(self, offer: Offer) -> tuple[float, float]:
        """Return (`launch_s`, `leave_s`) on that offer's cloud."""
        return self.times.get(cloud_of(offer.name), (self.launch_s, self.leave_s))


def cloud_of(offer: str) -> str:
    """Return the cloud of an offer, given its name."""
    return offer.partition("/")[0]


def meeting_place(found: Sequence[tuple[str, int, bool]]) -> str:
    """Return the place where members that want to train together meet. `found`: for each member
    its place, its number of workers, and whether it was in the last world.

    This is the place of the last world while one of its members is there, otherwise the place with
    the most workers; ties go to the first in `found`.
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
    """Choose the members of the next world: only whole replicas can train, and a member takes part
    with all of its ranks or not at all.

    `sizes`: ranks of each member, in order of preference. A member that would exceed `max_ranks`
    (None: no limit) is left out. Then as few ranks as possible are left out so that the rest is a
    multiple of `replica_ranks`, of the last members if there is a choice. `worlds`: the only world
    sizes allowed (empty: any); the greatest one that can be made is taken. Returns indices into
    `sizes`, ascending; empty: no world can be made.
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
    # remainder of the left-out ranks -> (their number, their members): the fewest, first found wins
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
    """Return indices into `sizes` whose sum is the first of `totals` (descending) that can be made;
    the first indices if there is a choice."""
    if len(set(sizes)) <= 1:
        total = next((t for t in totals if not t % sizes[0]), 0)
        return list(range(total // sizes[0])) if total else []
    # sum -> (the last member in it, the sum without that member); the first found wins
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
    # The attempt to replace: it is released when this one is at work, so there may be one node more
    # than `max_nodes` in between.
    instead_of: int | None = None


@dataclass(frozen=True)
class Terminate:
    attempt: int
    reason: str
    grace_s: float = 0.0  # grace period: from the request to leave to the forced end
    also: tuple[int, ...] = ()  # attempts to terminate at the same moment


@dataclass(frozen=True)
class Wait:
    """A decision to look again after `seconds`. For a wait that is chosen, for better prices or
    capacity: `expected_s` is its probable end (the run's clock), `saving_usd` what it should
    save."""

    seconds: float
    reason: str = ""
    expected_s: float | None = None
    saving_usd: float | None = None

    def is_news(self, before: Wait | None) -> bool:
        """Return whether this is another wait, or its expected end moved by over EXPECTED_S."""
        if before is None or before.reason != self.reason:
            return True
        if before.expected_s is None or self.expected_s is None:
            return before.expected_s is not self.expected_s
        return abs(self.expected_s - before.expected_s) > EXPECTED_S


@dataclass(frozen=True)
class Stop:
    reason: str  # shown to the user verbatim


Decision: TypeAlias = Launch | Terminate | Wait | Stop


class Policy(Protocol):
    """A strategy, which is a function; policies compose by wrapping
    (`within_budget(cheapest, usd=200)`)."""

    def __call__(self, view: View) -> Decision: ...


# Questions that every policy asks of a view: offers that may have capacity, the cost of work
# there, and the next launch.

# longest wait here: prices, capacity and nodes are looked at again after it
LOOK_AGAIN_S = 10.0
MOST_PLACES = 2  # places in which a run may have nodes at the same time (`Loop.room`)
# cell lengths of tables are rounded to powers of this, so that decisions share tables
CELL_RATIO = 2**0.25


def open_offers(view: View, among: Iterable[Offer] | None = None) -> list[Offer]:
    """Return the offers that may have capacity, cheapest first. An offer that was full gets a
    single probe at a time. Nodes are in at most two places (a move needs two): the loop allows no
    third."""
    pending = {node.offer.name for node in view.alive if node.up_s is None}
    places = {node.offer.place for node in view.alive}
    return [
        offer
        for offer in (view.offers if among is None else among)
        if view.blocked.get(offer.name, 0.0) <= view.now_s
        and not (offer.name in view.blocked and offer.name in pending)
        and (len(places) < MOST_PLACES or offer.place in places)
    ]


def until_next(view: View) -> float:
    """Return the seconds until a blocked offer may be tried again, at most `LOOK_AGAIN_S`."""
    waits = [until - view.now_s for until in view.blocked.values() if until > view.now_s]
    return min([*waits, LOOK_AGAIN_S])


def usd_per_work(offer: Offer) -> float:
    """Return USD for the work that one worker of speed 1 does in an hour: the cost of a step, up
    to a factor that all offers share."""
    return offer.usd_per_h / (offer.speed * offer.workers)


def every(interval_s: float) -> str:
    """Return the words that name the snapshot interval in the reason of a launch; "" for 0."""
    return f", with a snapshot every {interval_s:.0f} s" if interval_s else ""


def at_work(view: View, node: Node) -> bool:
    """Return whether `node` must be training by now: it is up, and the time that a changeover
    usually takes has passed since it was requested."""
    asked_s = view.now_s - node.asked_s
    return node.been_up_s(view.now_s) >= 0 and asked_s >= view.known.changeover_s - 1e-3


def began_s(nodes: Iterable[Node]) -> list[float | None]:
    """Return when each node's command began (as `Node.been_up_s`), for many nodes at once."""
    return [n.up_s if n.at_work_s is None else n.at_work_s for n in nodes]


def not_at_work(view: View, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that are not `at_work`, for many nodes at once."""
    now_s, least_s = view.now_s, view.known.changeover_s - 1e-3
    return [
        node
        for node, at_s in zip(nodes, began_s(nodes), strict=True)
        if now_s - node.asked_s < least_s or at_s is None or at_s > now_s
    ]


def grid(view: View, work_h: float, time_h: float, cells: int, step: int) -> tuple[float, int]:
    """Return (hours of a cell, number of work cells) for a table of what the rest of a run costs.

    `cells` cells cover the time from the run's start to its deadline; the number of cells for all
    of its work is a multiple of `step`. `work_h`, `time_h`: hours of both that are left."""
    known = view.known
    left = known.left(view.committed_step) or 1.0
    whole_h = work_h * max(1.0, known.work / left)
    span_h = ((known.deadline_s or 0.0) - view.started_s) / 3600
    span_h = min(max(span_h, time_h), 3 * whole_h + 24)
    cell_h = CELL_RATIO ** math.ceil(math.log(span_h / cells, CELL_RATIO))
    return cell_h, -(-math.ceil(whole_h / cell_h + 1) // step) * step


def fill(view: View, among: Iterable[Offer], why: str) -> Decision:
    """Launch on the first open offer of `among` until `max_nodes` are alive, else wait."""
    if len(view.alive) >= view.max_nodes:
        return Wait(LOOK_AGAIN_S, "all nodes are there")
    if offers := open_offers(view, among):
        return Launch(offers[0], why)
    return Wait(until_next(view), "no capacity on the offers in question")
