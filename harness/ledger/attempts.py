"""The state of a run's attempts, the only memory of the recovery loop. Used by `recovery.py`.

A `AttemptHistory` is a fold of the controller's facts, so it is the same for the controller that
wrote them
and for its successor.

Pure: knows facts and the nouns of `world.py`; knows no store, cloud or clock.
"""

from __future__ import annotations

import dataclasses
import math
import random
import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

from harness.core.decoding import built, number
from harness.core.estimates import CapacitySeen, Spell
from harness.core.facts import (
    AttemptDoubted,
    AttemptEnded,
    AttemptIntended,
    AttemptUp,
    Decided,
    Fact,
    LeaseTaken,
    RunEnded,
    Stamped,
    Unreadable,
)
from harness.core.world import (
    DRAINED,
    FENCED,
    FINISHED,
    REFUSED,
    RESIZE,
    STOPPED,
    UNFIT,
    Node,
    NodeState,
    Offer,
    cloud_of,
)
from harness.ledger.bill import NANO, bill, ns
from storage.canonical_json import BadObject

# Capacity as the facts show it: for how long each offer had machines for us, and for how long it
# had none.


# nodes that are taken within this time count as taken at once
TOGETHER_S = 120.0
# between two observations of an offer, nobody can have missed a change of its room for long
WATCHED_S = 3600.0


@dataclass
class CapacityBook:
    """The capacity that was seen of each offer, by its name. A fold of the run's attempts."""

    capacity: dict[str, CapacitySeen] = field(default_factory=dict)
    _struck_s: dict[str, float] = field(default_factory=dict)  # when a node was taken last

    def up(self, name: str, t: float, nodes: int = 1) -> None:
        """Record that a machine of the offer came up. `nodes`: that are up with it."""
        self._look(name, True, t)
        self._count_up(name, nodes, t)

    def end(self, name: str, fact: AttemptEnded, others_up: int) -> None:
        """Record the end of an attempt. `others_up`: how many nodes of the offer are still up: if
        there are any, the offer has not closed, it only had no room for one more."""
        if fact.end == "no-capacity":
            self._look(name, others_up > 0, fact.gone_s)
            self._count(name, others_up, fact.gone_s)
            return
        if fact.up_s is None:
            return
        before = self.capacity.get(name, CapacitySeen())
        taken = fact.end == "preempted"
        struck_s = self._struck_s.get(name, -math.inf)
        if taken:
            self._struck_s[name] = fact.gone_s
        self.capacity[name] = dataclasses.replace(
            before,
            node_s=before.node_s + max(0.0, fact.gone_s - fact.up_s),
            losses=before.losses + taken,
            strikes=before.strikes + (taken and fact.gone_s - struck_s > TOGETHER_S),
        )
        self._look(name, not taken or others_up > 0, fact.gone_s)
        if taken:
            self._count(name, others_up, fact.gone_s)
        else:
            self._count_up(name, others_up + 1, fact.gone_s)

    def _count_up(self, name: str, nodes: int, t: float) -> None:
        """Record that so many nodes were up at `t`, which tells nothing of a room for more."""
        if nodes >= (self.capacity[name].room or 0):
            self._count(name, nodes, t)

    def _count(self, name: str, room: int, t: float) -> None:
        """Record the room that an offer has at `t`. What it had until then lasted for the time
        since it was last seen, if nobody can have missed a change."""
        before = self.capacity[name]
        since_s = t - before.room_s
        watched_s = since_s if before.room is not None and 0 < since_s <= WATCHED_S else 0.0
        self.capacity[name] = dataclasses.replace(
            before,
            room=room,
            room_s=max(t, before.room_s),
            room_node_s=before.room_node_s + (before.room or 0) * watched_s,
            watched_s=before.watched_s + watched_s,
        )

    def _look(self, name: str, is_open: bool, t: float) -> None:
        """Record that the offer was seen to be open, or closed, at `t`."""
        before = self.capacity.get(name, CapacitySeen())
        if before.open is is_open:
            self.capacity[name] = dataclasses.replace(before, seen_s=max(t, before.seen_s))
        elif before.open is None:
            self.capacity[name] = dataclasses.replace(before, open=is_open, since_s=t, seen_s=t)
        else:
            spell = Spell(before.open, max(0.0, t - before.since_s), True)
            self.capacity[name] = before.then(spell, open=is_open, since_s=t, seen_s=t)


def with_notices(
    capacity: Mapping[str, CapacitySeen],
    ended: Iterable[AttemptEnded],
    offers: Mapping[int, Offer],
    open_: Iterable[Node],
    announced: Collection[int],
    in_time: Callable[[int], bool],
) -> dict[str, CapacitySeen]:
    """Return `capacity` corrected by preemption notices. A node that drained after a notice
    (`announced`) was preempted all the same: it counts as a loss, and its offer has closed unless
    other nodes of it are up. A loss is `unnoticed` if not all of its work was saved (`in_time`).
    `offers`: by attempt."""
    found = dict(capacity)
    up = {node.offer.name for node in open_ if node.up_s is not None}
    for fact in sorted(ended, key=lambda e: e.gone_s):
        offer = offers.get(fact.attempt)
        if fact.up_s is None or offer is None or (seen := found.get(offer.name)) is None:
            continue
        if fact.end == "preempted" and not in_time(fact.attempt):
            found[offer.name] = dataclasses.replace(seen, unnoticed=seen.unnoticed + 1)
        elif fact.end == "drained" and fact.attempt in announced:
            seen = dataclasses.replace(seen, losses=seen.losses + 1, strikes=seen.strikes + 1)
            if seen.open and seen.seen_s <= fact.gone_s and offer.name not in up:
                spell = Spell(True, max(0.0, fact.gone_s - seen.since_s), True)
                seen = seen.then(spell, open=False, since_s=fact.gone_s, seen_s=fact.gone_s)
            found[offer.name] = seen
    return found


# Durations of launches, drains and ends of nodes: measured by a run, and assumed until then.

# the assumed time weighs as much as so many measurements: a few short ones prove little, and too
# short an estimate overspends the budget
PRIOR_WEIGHT = 9.0


@dataclass(frozen=True)
class CloudTimes:
    """Assumed durations in a cloud. `launch_s`: from the request for a node until it is up.
    `end_s`: from its termination until it is not billed any more."""

    launch_s: float
    end_s: float


# Assumptions for clouds that differ from a run's settings (10 and 5 minutes: GPU nodes of the big
# clouds, by SkyPilot). Slurm: in our lab a first launch took 65 s, and ending a half-dead node
# 38 s; both are doubled. Kubernetes ends a pod within its grace period, 30 s unless configured;
# images of some GB take minutes to pull.
PRIORS = {
    "kubernetes": CloudTimes(600.0, 120.0),
    "slurm": CloudTimes(130.0, 80.0),
    "ssh": CloudTimes(130.0, 80.0),
}


@dataclass
class Longest:
    """The longest of some measured times, in seconds, and their number."""

    most_s: float = 0.0
    times: int = 0

    def add(self, seconds: float) -> None:
        self.most_s, self.times = max(self.most_s, seconds), self.times + 1

    def expected_s(self, assumed_s: float) -> float:
        """Return the expected time: between the assumed and the longest, closer to the longest the
        more were measured, and never less than the longest."""
        weight = PRIOR_WEIGHT / (PRIOR_WEIGHT + self.times)
        return self.most_s + max(0.0, assumed_s - self.most_s) * weight


@dataclass
class _Measured:
    """Measured durations of one cloud."""

    launches: Longest = field(default_factory=Longest)
    # from the request to leave until the node was gone
    leaves: Longest = field(default_factory=Longest)
    # from the termination until the node was gone
    ends: Longest = field(default_factory=Longest)


@dataclass
class Durations:
    """Measured durations by cloud, with assumptions where nothing was measured."""

    _by_cloud: dict[str, _Measured] = field(default_factory=dict)
    # ("release" | "terminate", attempt) -> time of the first such request
    _told_s: dict[tuple[str, int], float] = field(default_factory=dict)

    def launched(self, offer: str, seconds: float) -> None:
        """Record that a node of this offer came up `seconds` after its request."""
        self._of(offer).launches.add(max(0.0, seconds))

    def told(self, what: str, attempt: int, t: float) -> None:
        """Record the request to leave ("release") or the termination ("terminate") of a node."""
        self._told_s.setdefault((what, attempt), t)

    def ended(self, offer: str, fact: AttemptEnded) -> None:
        """Record how long a node took from its release or termination until it was gone."""
        released_s, ended_s = (
            self._told_s.pop((what, fact.attempt), None) for what in ("release", "terminate")
        )
        if fact.up_s is None or fact.end == "lost":
            return
        seen = self._of(offer)
        if released_s is not None:
            seen.leaves.add(max(0.0, fact.gone_s - released_s))
        if ended_s is not None:
            seen.ends.add(max(0.0, fact.gone_s - ended_s))

    def launch_s(self, offer: str, usual_s: float) -> float:
        """Return the seconds from the request for a node of this offer until it is up. `usual_s`:
        assumed for clouds that `PRIORS` does not name."""
        prior = PRIORS.get(cloud_of(offer))
        return self._of(offer).launches.expected_s(prior.launch_s if prior else usual_s)

    def end_s(self, offer: str, usual_s: float) -> float:
        """Return the seconds from termination until a node is not billed. `usual_s`: as above."""
        prior = PRIORS.get(cloud_of(offer))
        return self._of(offer).ends.expected_s(prior.end_s if prior else usual_s)

    def leave_s(self, offer: str, drain_s: float, usual_s: float) -> float:
        """Return the seconds that a node is billed after a request to leave: it drains, for at most
        `drain_s`, then the cloud ends it."""
        return self._of(offer).leaves.expected_s(drain_s + self.end_s(offer, usual_s))

    def _of(self, offer: str) -> _Measured:
        cloud = cloud_of(offer)
        if (found := self._by_cloud.get(cloud)) is None:
            found = self._by_cloud[cloud] = _Measured()
        return found


# first backoff of a full offer; doubled at every refusal up to the run's limit
BLOCK_S = 2.0
# an offer that gave us an unfit node is blocked for so many times the limit for a full one
UNFIT_BLOCKS = 10.0
# a longer gap between two facts means that the run had no controller
UNLED_S = 3600.0
# an end that turns out to be later by more than this is recorded again
END_MOVES_S = 60.0
# start of `AttemptEnded.reason` of a node that is known only by its heartbeats in the bucket
UNSHOWN = "this cloud never showed it"
# attempt numbers skipped for each gap in the facts: a lost segment holds fewer intents
HIDDEN_PER_GAP = 10
# a lost attempt may still come up within this time: no launch takes longer
LOST_S = 7200.0
# heartbeats of a node that the cloud reports as gone are checked for this long, since clouds have
# reported living nodes as gone
DENIED_S = 1200.0


@dataclass
class FailureStreaks:
    """Numbers of bad ends in a row, and when the last one of each kind was over."""

    fruitless: int = 0  # attempts that ended since the last progress
    failures: int = 0  # of the script since the last progress
    failed_s: float = 0.0
    early: int = 0  # ended with exit code 0 though the run was not done
    # ... of those, the ones since the last progress: the script thinks that it is done
    idle: int = 0
    idle_s: float = 0.0
    # refused by the run's other nodes, which speak another protocol; since the lease was taken
    refused: int = 0
    refused_s: float = 0.0

    def progressed(self) -> None:
        """Record that something new was committed."""
        self.fruitless = self.failures = self.idle = 0

    def begin_anew(self) -> None:
        """Reset the counts at the end of the run, since it may be launched again."""
        self.progressed()
        self.early = 0

    def count(self, fact: AttemptEnded, again: bool) -> None:
        """Count the end of an attempt. `again`: its end was recorded before. Nodes that end
        together count once: the next one must have been requested after that end."""
        if fact.end == "failed" and fact.exit_code != FENCED and fact.asked_s >= self.failed_s:
            self.failures, self.failed_s = self.failures + 1, fact.gone_s
        if fact.end == "refused" and not again and fact.asked_s >= self.refused_s:
            self.refused, self.refused_s = self.refused + 1, fact.gone_s
        # an end with exit code 0 before the run was done
        if fact.end == "finished" and not again and fact.asked_s >= self.idle_s:
            self.early, self.idle = self.early + 1, self.idle + 1
            self.idle_s = fact.gone_s


@dataclass
class OfferBackoff:
    """Offers that are blocked for a while. `limit_s`: upper limit of the backoff of a full one."""

    rng: random.Random
    limit_s: float
    refusals: dict[str, int] = field(default_factory=dict)  # in a row, by offer
    until_s: dict[str, float] = field(default_factory=dict)  # by offer

    def refused(self, name: str, t: float) -> None:
        """Record that the offer had no capacity at `t`, and block it with backoff."""
        self.refusals[name] = self.refusals.get(name, 0) + 1
        wait_s = min(self.limit_s, BLOCK_S * 2.0 ** min(self.refusals[name] - 1, 16))
        self.until_s[name] = t + wait_s * self.rng.uniform(0.5, 1.0)

    def gave_unfit(self, name: str, t: float) -> None:
        """Block an offer that gave an unfit node: it may give the same broken machine again."""
        self.until_s[name] = t + UNFIT_BLOCKS * self.limit_s

    def gave(self, name: str) -> None:
        """Record that the offer has capacity, and unblock it."""
        self.refusals.pop(name, None)
        self.until_s.pop(name, None)


@dataclass
class AttemptTotals:
    """Totals over attempts, updated incrementally, since a run of months has many. `nusd`: the cost
    of ended attempts in nano-dollars. `losses`: number that ended without a request. `lost`: those
    that ended as "lost". `told`: recent ones that were up and whose end only the cloud reported (no
    exit code). `highest`: the highest attempt number that may be taken, known or not."""

    nusd: int = 0
    losses: int = 0
    lost: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    highest: int = 0

    def intended(self, attempt: int) -> None:
        self.highest = max(self.highest, attempt)

    def end(self, fact: AttemptEnded, before: AttemptEnded | None) -> None:
        """Add an end. `before`: the end that was recorded of this attempt until now, if any."""
        if before is not None:
            self.nusd -= ns(before.usd)
            self.losses -= _unasked(before)
            self.lost.discard(fact.attempt)
            self.told.discard(fact.attempt)
        self.nusd += ns(fact.usd)
        self.losses += _unasked(fact)
        if fact.end == "lost":
            self.lost.add(fact.attempt)
        elif fact.up_s is not None and fact.exit_code is None:
            self.told.add(fact.attempt)
        self.highest = max(self.highest, fact.attempt)


def _unasked(end: AttemptEnded) -> bool:
    return end.end in ("preempted", "failed", "killed", "unfit", "refused") or (
        end.end == "lost" and end.up_s is not None
    )


@dataclass
class AttemptHistory:
    """The history of the run, as far as the next decision depends on it."""

    rng: InitVar[random.Random]
    block_limit_s: InitVar[float] = 60.0
    started_s: float | None = None
    holder: str = ""  # of the lease, as of the last fact
    launched_by: dict[int, str] = field(default_factory=dict)  # attempt -> lease holder then
    open: dict[int, Node] = field(default_factory=dict)  # intended and not ended, as last known
    ended: dict[int, AttemptEnded] = field(default_factory=dict)
    offers: dict[int, Offer] = field(default_factory=dict)  # of every attempt
    doubted: set[int] = field(default_factory=set)  # open attempts that may not stay
    # open attempts -> the attempt that each was launched instead of
    instead_of: dict[int, int] = field(default_factory=dict)
    full: OfferBackoff = field(init=False)
    tally: AttemptTotals = field(default_factory=AttemptTotals)
    seen: CapacityBook = field(default_factory=CapacityBook)
    step: int = 0  # greatest committed step ever seen
    progress_s: float = 0.0  # when that step was first seen
    streaks: FailureStreaks = field(default_factory=FailureStreaks)
    durations: Durations = field(default_factory=Durations)
    last_s: float = 0.0  # time of the last fact
    unread: list[Unreadable] = field(default_factory=list)  # each may hide the intent of an attempt

    def __post_init__(self, rng: random.Random, block_limit_s: float) -> None:
        self.full = OfferBackoff(rng, block_limit_s)

    @classmethod
    def of(
        cls, facts: Iterable[Stamped], rng: random.Random, block_limit_s: float = 60.0
    ) -> AttemptHistory:
        book = cls(rng, block_limit_s)
        for stamped in facts:
            book.add(stamped.t, stamped.fact)
        if book.unread:
            book.tally.highest += HIDDEN_PER_GAP * len(book.unread)
        return book

    def add(self, t: float, fact: Fact) -> None:
        if isinstance(fact, Unreadable):
            self.unread.append(fact)
            return
        silent_s, self.last_s = t - self.last_s, max(t, self.last_s)
        match fact:
            case LeaseTaken(_, holder, counted_s):
                self.holder = holder
                if counted_s is not None and self.started_s is not None:
                    self._set_clock(t, silent_s - counted_s)
                self.streaks.refused = 0  # the new controller may launch another version
                self.started_s = t if self.started_s is None else self.started_s
                # time without a controller (a closed laptop) does not count as without progress
                if silent_s > UNLED_S:
                    self.progress_s = max(self.progress_s, t)
            case AttemptIntended(attempt, offer, _, instead_of) if attempt not in self.ended:
                self.tally.intended(attempt)
                self.launched_by[attempt] = self.holder
                if instead_of is not None:
                    self.instead_of[attempt] = instead_of
                self.offers[attempt] = _offer(attempt, offer)
                self.open[attempt] = Node(
                    attempt, self.offers[attempt], NodeState.PENDING, asked_s=t
                )
            case AttemptUp(attempt, up_s) if attempt in self.open:
                asked_s, name = self.open[attempt].asked_s, self.open[attempt].offer.name
                self.durations.launched(name, t - asked_s)
                node = self.open[attempt] = dataclasses.replace(
                    self.open[attempt], state=NodeState.UP, up_s=up_s
                )
                self.full.gave(node.offer.name)
                self.seen.up(name, up_s, self._up_of(name))
            case AttemptDoubted(attempt, doubted):
                (self.doubted.add if doubted and attempt in self.open else self.doubted.discard)(
                    attempt
                )
            case Decided("release" | "terminate" as what, reason):
                number = reason.removeprefix("attempt ").partition(":")[0]
                if number.isdecimal() and (attempt := int(number)) in self.open:
                    self.durations.told(what, attempt, t)
            case Decided("wait", expected_s=float(until_s)):
                # nor does a chosen wait, for as long as it was expected to last
                self.progress_s = max(self.progress_s, until_s)
            case AttemptEnded():
                if fact.attempt in self.offers:
                    self.durations.ended(self.offers[fact.attempt].name, fact)
                self._end(fact)
            case RunEnded():
                self.started_s = None
                self.streaks.begin_anew()

    def _set_clock(self, t: float, ahead_s: float) -> None:
        """Shift recorded times to another controller's clock, which is ahead of the last one's by
        `ahead_s` seconds (negative: behind), as far as the run can tell."""
        self.last_s = t
        if self.started_s is not None:
            self.started_s += ahead_s
        if ahead_s < 0:  # else times in the future would be neither billed nor late
            self.progress_s += ahead_s
            self.open = {
                attempt: dataclasses.replace(
                    node,
                    asked_s=node.asked_s + ahead_s,
                    up_s=None if node.up_s is None else node.up_s + ahead_s,
                )
                for attempt, node in self.open.items()
            }

    def _end(self, fact: AttemptEnded) -> None:
        node = self.open.pop(fact.attempt, None)
        self.doubted.discard(fact.attempt)
        self.instead_of.pop(fact.attempt, None)
        again = fact.attempt in self.ended
        self.tally.end(fact, self.ended.get(fact.attempt))
        self.ended[fact.attempt] = fact
        if node and not again:
            self.seen.end(node.offer.name, fact, self._up_of(node.offer.name))
        self.progress(fact.gone_s, fact.committed_step)
        if fact.end == "no-capacity" and node:
            self.full.refused(node.offer.name, fact.gone_s)
        elif fact.end == "unfit" and node and not again:
            self.streaks.fruitless += 1
            self.full.gave_unfit(node.offer.name, fact.gone_s)
        elif (
            not again
            and fact.end != "terminated"
            and not (fact.end == "lost" and fact.up_s is None)
        ):
            self.streaks.fruitless += 1
        self.streaks.count(fact, again)

    def _up_of(self, name: str) -> int:
        """Return the number of nodes of an offer that are up."""
        return sum(n.offer.name == name and n.up_s is not None for n in self.open.values())

    def progress(self, t: float, step: int) -> None:
        if step > self.step:
            self.step, self.progress_s = step, t
            self.streaks.progressed()

    @property
    def next_attempt(self) -> int:
        """A number that no attempt has, not even one whose intent could not be read."""
        return self.tally.highest + 1

    def given_up(self, now_s: float) -> set[int]:
        """Return recently ended attempts whose end they did not confirm (no exit code): their
        nodes may still be alive."""
        old = {n for n in self.tally.told if now_s - self.ended[n].gone_s >= DENIED_S}
        self.tally.told -= old
        lost = {n for n in self.tally.lost if now_s - self.ended[n].gone_s < LOST_S}
        return {n for n in lost | self.tally.told if n in self.offers}

    def ended_unseen(self, attempt: int) -> bool:
        """Return whether the attempt was recorded as lost without ever having been up."""
        end = self.ended.get(attempt)
        return end is not None and end.end == "lost" and end.up_s is None

    def believed(self, attempt: int, now_s: float) -> Node:
        """Return a node for an attempt that sends heartbeats though it was given up or never
        intended. An intended attempt is billed from the earliest possible time."""
        if (end := self.ended.get(attempt)) is not None:
            up_s = end.asked_s if end.up_s is None else end.up_s
            return Node(attempt, self.offers[attempt], NodeState.UP, end.asked_s, up_s)
        return Node(
            attempt, Offer(0.0, f"unknown offer of attempt {attempt}"), NodeState.UP, now_s, now_s
        )

    def unsure(self, now_s: float, launch_s: float, leave_s: float) -> list[Node]:
        """Return nodes that were given up and may still be billed: one never seen may still come up
        (within `launch_s`), and one that is gone by the cloud may still be ending (`leave_s`)."""
        found = list[Node]()
        for attempt in self.given_up(now_s):
            end = self.ended[attempt]
            since_s = end.gone_s if end.up_s is not None else end.asked_s + launch_s
            if now_s - since_s < leave_s:
                state = NodeState.PENDING if end.up_s is None else NodeState.UP
                found.append(Node(attempt, self.offers[attempt], state, end.asked_s, end.up_s))
        return found

    def hidden(self, attempt: int) -> bool:
        """Return whether the attempt may be one of ours whose intent could not be read."""
        return bool(self.unread) and attempt not in self.open and attempt not in self.ended

    @property
    def unproven(self) -> tuple[int, ...]:
        """Attempts that have ended by the bucket, and whose machines no cloud has proven gone."""
        return tuple(sorted(n for n in self.tally.lost if self.ended[n].reason.startswith(UNSHOWN)))

    def named(self, attempts: Iterable[int]) -> str:
        """Return a text that names attempts with their offers and the controllers that launched
        them, whose cloud or API server knew them."""
        return ", ".join(
            f"{n} ({self.offers[n].name}, launched by {self.launched_by.get(n) or 'nobody knows'})"
            if n in self.offers
            else f"{n} (nobody's intent)"
            for n in sorted(attempts)
        )

    @property
    def capacity(self) -> dict[str, CapacitySeen]:
        """The capacity that was seen of each offer, by name."""
        return self.seen.capacity

    def capacity_with(
        self, announced: Collection[int], in_time: Callable[[int], bool]
    ) -> dict[str, CapacitySeen]:
        """Return `capacity` corrected by preemption notices: see `capacity.with_notices`."""
        ended, up = self.ended.values(), self.open.values()
        return with_notices(self.capacity, ended, self.offers, up, announced, in_time)

    @property
    def standing_in(self) -> dict[int, int]:
        """Open attempts -> the open attempt that each was launched instead of."""
        return {new: old for new, old in self.instead_of.items() if old in self.open}

    @property
    def losses(self) -> int:
        """The number of attempts that ended without a request."""
        return self.tally.losses

    def knows_end(self, node: Node) -> bool:
        """Return whether the end of a gone node is recorded. It is not if the cloud now reports a
        later end: it had reported the node as gone, or not shown it, while it was still billed."""
        known = self.ended.get(node.attempt)
        if known is None:
            return False
        if node.up_s is None:
            return True
        later = node.gone_s is not None and node.gone_s > known.gone_s + END_MOVES_S
        return known.end != "lost" and not later

    def spent_usd(self, now_s: float, strays: Iterable[Node] = ()) -> float:
        """Return the cost of all nodes until now, in USD. `strays`: nodes that are there but not
        open in the book: they cost more than it has recorded."""
        of_open = sum([bill(node, now_s).nusd for node in self.open.values()])
        return (self.tally.nusd + of_open + sum(self._unbooked(n, now_s) for n in strays)) / NANO

    def _unbooked(self, node: Node, now_s: float) -> int:
        booked = self.ended.get(node.attempt)
        if node.up_s is None:  # the start of billing of a launch that fails is unknown
            node = dataclasses.replace(node, up_s=node.asked_s)
        return max(0, bill(node, now_s).nusd - (ns(booked.usd) if booked else 0))


def _offer(attempt: int, body: dict[str, Any]) -> Offer:
    """Return the offer of an intent. If it cannot be read, keep its price where possible, since
    that counts against budgets."""
    try:
        offer = built(Offer, body)
        number(offer.usd_per_h, 0.0)
        return offer
    except BadObject:
        try:
            usd_per_h = number(body.get("usd_per_h"), 0.0)
        except BadObject:
            usd_per_h = 0.0
        return Offer(usd_per_h, f"unreadable offer of attempt {attempt}")


def how_it_ended(node: Node) -> str:
    """Return `AttemptEnded.end` of a node that is gone. An exit code is more reliable than the
    cloud's reason, except for kills."""
    if node.state is NodeState.NO_CAPACITY:
        return "no-capacity"
    by_code = {
        FINISHED: "finished",
        DRAINED: "drained",
        RESIZE: "drained",
        STOPPED: "terminated",
        UNFIT: "unfit",
        REFUSED: "refused",
    }
    if node.exit_code in by_code:
        return by_code[node.exit_code]
    if node.reason == "terminated":
        return "terminated"
    if node.exit_code is None or node.reason in ("preempted", "killed"):
        return "preempted"
    return "killed" if killed_by(node.exit_code) else "failed"


def killed_by(exit_code: int | None) -> str:
    """Return in words which signal ended a node's command, such as the kernel's when memory runs
    out; "" if it ended by itself. `exit_code`: as Python tells it (-9), or a shell (137)."""
    number = 0 if exit_code is None else -exit_code if exit_code < 0 else exit_code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return ""
    memory = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
    return f"its command was killed by {name}{memory}"
