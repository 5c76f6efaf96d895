"""What the facts say about attempts: the only memory of the recovery loop. Used by `recovery.py`.

A `Book` is a fold of the controller's facts, so it is the same for the controller that wrote them
and for the one that takes over.

Pure: knows facts and the nouns of `world.py`; knows no store, cloud or clock.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import InitVar, dataclass, field
from typing import Any

from harness.controller.capacity import CapacityBook, with_notices
from harness.controller.durations import Durations
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
from harness.core.known import CapacitySeen
from harness.core.values import BadObject, built, number
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
)

# a full offer is left alone for this long, doubled at every refusal up to the run's limit
BLOCK_S = 2.0
# a place that gave us an unfit node is left alone for so many times the limit for a full one
UNFIT_BLOCKS = 10.0
UNLED_S = 3600.0
# an end that turns out to be later by more than this is written down again
END_MOVES_S = 60.0
# begins `AttemptEnded.reason` of a node that beat in the bucket only
UNSHOWN = "this cloud never showed it"
# attempt numbers left out for each place where facts could not be read: a lost segment holds fewer
# intents
HIDDEN_PER_GAP = 10
# an attempt that was given up may still come up until then: nobody's launch takes longer
LOST_S = 7200.0
# a node that the cloud calls gone is listened for until then: clouds have called living ones so
DENIED_S = 1200.0


@dataclass
class Streaks:
    """What happened again and again: so many times, one after the other, and when the last one
    was over."""

    fruitless: int = 0  # attempts that ended since the last progress
    failures: int = 0  # of the script since the last progress
    failed_s: float = 0.0
    early: int = 0  # ended with exit code 0 though the run was not done
    # ... of those, the ones since the last progress: the script thinks that it is done
    idle: int = 0
    idle_s: float = 0.0
    # by the run's other nodes, since a controller took the lease: they speak another protocol
    refused: int = 0
    refused_s: float = 0.0

    def progressed(self) -> None:
        """Something new was committed."""
        self.fruitless = self.failures = self.idle = 0

    def begin_anew(self) -> None:
        """The run has ended, and may be launched again: what counts towards a limit starts anew."""
        self.progressed()
        self.early = 0

    def count(self, fact: AttemptEnded, again: bool) -> None:
        """`again`: the end of this attempt is known already. Nodes that end together count once:
        the next must have been asked for after it."""
        if fact.end == "failed" and fact.exit_code != FENCED and fact.asked_s >= self.failed_s:
            self.failures, self.failed_s = self.failures + 1, fact.gone_s
        if fact.end == "refused" and not again and fact.asked_s >= self.refused_s:
            self.refused, self.refused_s = self.refused + 1, fact.gone_s
        # the same with those that end well and have done nothing
        if fact.end == "finished" and not again and fact.asked_s >= self.idle_s:
            self.early, self.idle = self.early + 1, self.idle + 1
            self.idle_s = fact.gone_s


@dataclass
class FullOffers:
    """Offers that are left alone for a while. `limit_s`: the longest, for one that is full."""

    rng: random.Random
    limit_s: float
    refusals: dict[str, int] = field(default_factory=dict)  # in a row, by offer
    until_s: dict[str, float] = field(default_factory=dict)  # by offer

    def refused(self, name: str, t: float) -> None:
        """It had no capacity."""
        self.refusals[name] = self.refusals.get(name, 0) + 1
        wait_s = min(self.limit_s, BLOCK_S * 2.0 ** min(self.refusals[name] - 1, 16))
        self.until_s[name] = t + wait_s * self.rng.uniform(0.5, 1.0)

    def gave_unfit(self, name: str, t: float) -> None:
        """The place may give us the same broken machine again."""
        self.until_s[name] = t + UNFIT_BLOCKS * self.limit_s

    def gave(self, name: str) -> None:
        """It has capacity."""
        self.refusals.pop(name, None)
        self.until_s.pop(name, None)


@dataclass
class Tally:
    """Of attempts, kept up to date, since a run of months has many. `usd`: what those that have
    ended cost. `losses`: those that ended without being asked to. `lost`: those that ended as
    "lost". `told`: those that were up, and of whose end nobody but the cloud has told, of late.
    `highest`: no number above it is taken, known or not."""

    usd: float = 0.0
    losses: int = 0
    lost: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    highest: int = 0

    def intended(self, attempt: int) -> None:
        self.highest = max(self.highest, attempt)

    def end(self, fact: AttemptEnded, before: AttemptEnded | None) -> None:
        """`before`: what was known of its end until now."""
        if before is not None:
            self.usd -= before.usd
            self.losses -= _unasked(before)
            self.lost.discard(fact.attempt)
            self.told.discard(fact.attempt)
        self.usd += fact.usd
        self.losses += _unasked(fact)
        if fact.end == "lost":
            self.lost.add(fact.attempt)
        elif fact.up_s is not None and fact.exit_code is None:
            self.told.add(fact.attempt)
        self.highest = max(self.highest, fact.attempt)


def _unasked(end: AttemptEnded) -> bool:
    return end.end in ("preempted", "failed", "unfit", "refused") or (
        end.end == "lost" and end.up_s is not None
    )


@dataclass
class Book:
    """What happened so far, as far as the next decision depends on it."""

    rng: InitVar[random.Random]
    block_limit_s: InitVar[float] = 60.0
    started_s: float | None = None
    holder: str = ""  # of the lease, as of the last fact
    launched_by: dict[int, str] = field(default_factory=dict)  # attempts -> who held it then
    open: dict[int, Node] = field(default_factory=dict)  # intended and not ended, as last known
    ended: dict[int, AttemptEnded] = field(default_factory=dict)
    offers: dict[int, Offer] = field(default_factory=dict)  # of every attempt
    doubted: set[int] = field(default_factory=set)  # open ones that may not stay
    # open ones -> the attempt that each was launched instead of
    instead_of: dict[int, int] = field(default_factory=dict)
    full: FullOffers = field(init=False)
    tally: Tally = field(default_factory=Tally)
    seen: CapacityBook = field(default_factory=CapacityBook)
    step: int = 0  # greatest committed step ever seen
    progress_s: float = 0.0  # when that was
    streaks: Streaks = field(default_factory=Streaks)
    durations: Durations = field(default_factory=Durations)
    last_s: float = 0.0  # of the last fact
    unread: list[Unreadable] = field(default_factory=list)  # each may hide the intent of an attempt

    def __post_init__(self, rng: random.Random, block_limit_s: float) -> None:
        self.full = FullOffers(rng, block_limit_s)

    @classmethod
    def of(cls, facts: Iterable[Stamped], rng: random.Random, block_limit_s: float = 60.0) -> Book:
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
                self.streaks.refused = 0  # this one may launch another version
                self.started_s = t if self.started_s is None else self.started_s
                # nobody led the run (a laptop that was closed): that time is not held against it
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
                self.seen.up(node.offer.name, up_s)
            case AttemptDoubted(attempt, doubted):
                (self.doubted.add if doubted and attempt in self.open else self.doubted.discard)(
                    attempt
                )
            case Decided("release" | "terminate" as what, reason):
                number = reason.removeprefix("attempt ").partition(":")[0]
                if number.isdecimal() and (attempt := int(number)) in self.open:
                    self.durations.told(what, attempt, t)
            case Decided("wait", expected_s=float(until_s)):
                # nor is a wait that was chosen, for as long as it was expected to last
                self.progress_s = max(self.progress_s, until_s)
            case AttemptEnded():
                if fact.attempt in self.offers:
                    self.durations.ended(self.offers[fact.attempt].name, fact)
                self._end(fact)
            case RunEnded():
                self.started_s = None
                self.streaks.begin_anew()

    def _set_clock(self, t: float, ahead_s: float) -> None:
        """From now on times are by another controller's clock, which is ahead of the last one's by
        so much (negative: behind), as far as the run can tell."""
        self.last_s = t
        if self.started_s is not None:
            self.started_s += ahead_s
        if ahead_s < 0:  # else what lies in the future would be neither billed nor late
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
            self.seen.end(
                node.offer.name,
                fact,
                any(
                    other.offer.name == node.offer.name and other.up_s is not None
                    for other in self.open.values()
                ),
            )
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

    def progress(self, t: float, step: int) -> None:
        if step > self.step:
            self.step, self.progress_s = step, t
            self.streaks.progressed()

    @property
    def next_attempt(self) -> int:
        """A number that no attempt has, nor one whose intent could not be read."""
        return self.tally.highest + 1

    def given_up(self, now_s: float) -> set[int]:
        """Attempts that have ended as far as is known, by no word of their own: they may be there
        yet."""
        old = {n for n in self.tally.told if now_s - self.ended[n].gone_s >= DENIED_S}
        self.tally.told -= old
        lost = {n for n in self.tally.lost if now_s - self.ended[n].gone_s < LOST_S}
        return {n for n in lost | self.tally.told if n in self.offers}

    def ended_unseen(self, attempt: int) -> bool:
        """Was it given up, and is held not to have been there at all?"""
        end = self.ended.get(attempt)
        return end is not None and end.end == "lost" and end.up_s is None

    def believed(self, attempt: int, now_s: float) -> Node:
        """What is known of a node that beats though it was given up, or was never intended. Since
        when it is billed, nobody says: rather too early than too late."""
        if (end := self.ended.get(attempt)) is not None:
            up_s = end.asked_s if end.up_s is None else end.up_s
            return Node(attempt, self.offers[attempt], NodeState.UP, end.asked_s, up_s)
        return Node(
            attempt, Offer(0.0, f"unknown offer of attempt {attempt}"), NodeState.UP, now_s, now_s
        )

    def unsure(self, now_s: float, launch_s: float, leave_s: float) -> list[Node]:
        """Given up and perhaps billed: what was never seen may still be launched, and what the
        cloud called gone may still be ending. For so long as these times take, at most."""
        found = list[Node]()
        for attempt in self.given_up(now_s):
            end = self.ended[attempt]
            since_s = end.gone_s if end.up_s is not None else end.asked_s + launch_s
            if now_s - since_s < leave_s:
                state = NodeState.PENDING if end.up_s is None else NodeState.UP
                found.append(Node(attempt, self.offers[attempt], state, end.asked_s, end.up_s))
        return found

    def hidden(self, attempt: int) -> bool:
        """May it be one of ours, whose intent could not be read?"""
        return bool(self.unread) and attempt not in self.open and attempt not in self.ended

    @property
    def unproven(self) -> tuple[int, ...]:
        """Attempts that have ended as far as the bucket tells, and whose machines no cloud has
        proven to be gone."""
        return tuple(sorted(n for n in self.tally.lost if self.ended[n].reason.startswith(UNSHOWN)))

    def named(self, attempts: Iterable[int]) -> str:
        """With their places, and the controllers whose cloud, or API server, knew them."""
        return ", ".join(
            f"{n} ({self.offers[n].name}, launched by {self.launched_by.get(n) or 'nobody knows'})"
            if n in self.offers
            else f"{n} (nobody's intent)"
            for n in sorted(attempts)
        )

    @property
    def capacity(self) -> dict[str, CapacitySeen]:
        """What was seen of each offer's capacity."""
        return self.seen.capacity

    def capacity_with(
        self, announced: Collection[int], in_time: Callable[[int], bool]
    ) -> dict[str, CapacitySeen]:
        """The same with what notices tell: see `capacity.with_notices`."""
        ended, up = self.ended.values(), self.open.values()
        return with_notices(self.capacity, ended, self.offers, up, announced, in_time)

    @property
    def standing_in(self) -> dict[int, int]:
        """Open attempts -> the open attempt that each was launched instead of."""
        return {new: old for new, old in self.instead_of.items() if old in self.open}

    @property
    def losses(self) -> int:
        """Attempts that ended without being asked to."""
        return self.tally.losses

    def knows_end(self, node: Node) -> bool:
        """Of a node that is gone. A cloud that called it gone, or did not show it, while it was
        there and billed, tells later of an end that is later."""
        known = self.ended.get(node.attempt)
        if known is None:
            return False
        if node.up_s is None:
            return True
        later = node.gone_s is not None and node.gone_s > known.gone_s + END_MOVES_S
        return known.end != "lost" and not later

    def spent_usd(self, now_s: float, strays: Iterable[Node] = ()) -> float:
        """What all nodes cost until now. `strays`: nodes that are there, and that the book does not
        hold to be open: they cost more than it says."""
        of_open = bills_usd(self.open.values(), now_s)
        return self.tally.usd + of_open + sum(self._unbooked_usd(n, now_s) for n in strays)

    def _unbooked_usd(self, node: Node, now_s: float) -> float:
        booked = self.ended.get(node.attempt)
        if node.up_s is None:  # of a launch that ends badly nobody knows since when it is billed
            node = dataclasses.replace(node, up_s=node.asked_s)
        return max(0.0, bill(node, now_s)[1] - (booked.usd if booked else 0.0))


def _offer(attempt: int, body: dict[str, Any]) -> Offer:
    """What an intent says was asked for. Of an offer that cannot be read its price, which
    counts against budgets, is kept if it can be."""
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


def bill(node: Node, until_s: float) -> tuple[float, float]:
    """Billed seconds and what they cost: from up to gone."""
    seconds = (
        0.0
        if node.up_s is None
        else max(0.0, (until_s if node.gone_s is None else node.gone_s) - node.up_s)
    )
    return seconds, seconds / 3600 * node.offer.usd_per_h


def bills_usd(nodes: Iterable[Node], until_s: float) -> float:
    """What many of them cost, by `bill`: asked of a whole fleet before each decision."""
    return sum(
        [
            max(0.0, (until_s if n.gone_s is None else n.gone_s) - n.up_s)
            / 3600
            * n.offer.usd_per_h
            for n in nodes
            if n.up_s is not None
        ]
    )


def how_it_ended(node: Node) -> str:
    """`AttemptEnded.end` of a node that is gone. An exit code tells more than the cloud's
    reason, except for kills."""
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
    return "failed"
