"""The knowledge that a run has gathered, for policies that forecast (`View.known`).

Pure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from harness.bucket.journal import Follower
from harness.controller.forecast.price_process import PricePath, PriceSwing, lowest_path, swing_of
from harness.core.estimates import CapacitySeen, Estimates
from harness.core.facts import Fact, PricesSeen
from harness.core.loss_rates import cost_s
from harness.core.world import Node, Offer, View, grid, usd_per_work
from harness.ledger import bill
from harness.ledger.attempts import AttemptHistory
from harness.ledger.world_speed import LEAST_STEPS, RunTimings, median_or, paces, typical
from storage.errors import StoreError
from storage.stores.objects import ObjectStore

LOOK_S = 15.0  # between two reads of new facts from the bucket
MOST_SEGMENTS = 256  # segments of facts per read
SEE_S = 10.0  # between two looks at prices
TELL_S = 600.0  # between two records of changed prices
CHANGED = 0.01  # a smaller relative change of a price is ignored
# limits of the history of prices: offers (the cheapest when first seen), and changes of each
MOST_OFFERS, MOST_CHANGES = 512, 128


class Estimator(Protocol):
    """A source of the knowledge that forecasts need (`View.known`). It is called in every round, so
    it must be quick, and it never fails: what it cannot find out now, it adds later. `offers`: the
    current ones."""

    def known(self, now_s: float, book: AttemptHistory, offers: Sequence[Offer]) -> Estimates: ...


class NoEstimates:
    """A learner for policies that only look at offers."""

    def known(self, now_s: float, book: AttemptHistory, offers: Sequence[Offer]) -> Estimates:
        return Estimates(capacity=book.capacity)


@dataclass(frozen=True)
class RunGoals:
    """The user's statements about a run. `deadline_s`: wall clock; None: no deadline. `work_s`:
    seconds that all work takes, undisturbed, on `nodes` nodes of the fastest offer; 0: to be
    measured. `changeover_s`: assumed until one was seen. `look_s`: between two decisions.
    `usd_per_hour_late`: None: the deadline is to be kept."""

    deadline_s: float | None = None
    work_s: float = 0.0
    nodes: int = 1
    changeover_s: float = 300.0
    look_s: float = 10.0
    usd_per_hour_late: float | None = None


class RunEstimator:
    """A learner that reads the facts that all seats of a run write to its bucket, and the offers
    that the loop sees. If the bucket does not answer, it keeps its knowledge and retries later.

    `record` takes facts, to keep the history of prices. `prior`, `prices`: capacity and prices of
    offers that were known before this run began, by name.
    """

    def __init__(
        self,
        store: ObjectStore,
        wanted: RunGoals = RunGoals(),
        record: Callable[[Fact], None] | None = None,
        prior: Mapping[str, CapacitySeen] | None = None,
        prices: Mapping[str, PricePath] | None = None,
    ):
        self._store, self._wanted = store, wanted
        self._follower = Follower(store, most=MOST_SEGMENTS)
        self._learned = RunTimings()
        self._prices = PriceBook(record, prices)
        self._prior = dict(prior or {})
        self._known, self._said_work = Estimates(), 0.0
        self._due_s = float("-inf")
        # (ended attempts, nodes up, looks) when losses were computed last, and the result
        self._losses: tuple[tuple[int, int, int], dict[str, CapacitySeen]] | None = None
        self._looks = 0

    def known(self, now_s: float, book: AttemptHistory, offers: Sequence[Offer]) -> Estimates:
        if now_s >= self._due_s:
            self._due_s = now_s + LOOK_S
            with contextlib.suppress(StoreError):
                self._look()
            self._known = self._digest(book, offers)
        self._prices.see(now_s, offers)
        return dataclasses.replace(
            self._known,
            uncommitted_steps=self._learned.uncommitted_steps(book.step, book.open),
            capacity=self._capacity(book),
            prices=self._prices.known,
        )

    def _look(self) -> None:
        """Read new facts. Raises StoreError; facts that were read until then are kept."""
        for stamped in self._follower.poll():
            if isinstance(stamped.fact, PricesSeen):
                self._prices.told(stamped.t, stamped.fact)
            else:
                self._learned.add(stamped.t, stamped.fact)
        self._looks += 1

    def _digest(self, book: AttemptHistory, offers: Sequence[Offer]) -> Estimates:
        """Return the knowledge that changes only with facts."""
        learned, wanted = self._learned, self._wanted
        asked_s = {n: e.asked_s for n, e in book.ended.items()}
        asked_s |= {n: node.asked_s for n, node in book.open.items()}
        learned.settle(book.offers, asked_s)
        if not self._said_work and offers:  # once: offers come and go
            fastest = max(offer.speed * offer.workers for offer in offers)
            self._said_work = wanted.work_s * wanted.nodes * fastest
        session, timings = learned.session, learned.timings(book.offers)
        batch = (session.global_batch, session.micro_batch) if session else (0, 0)
        snapshot = learned.snapshot[1] if learned.snapshot else None
        interval_s = (snapshot.interval_s if snapshot else 0.0) or median_or(learned.gaps_s, 0.0)
        nbytes, places = snapshot.nbytes if snapshot else 0, _places(book)
        commit_s = median_or(learned.commits_s, 0.0)
        derived = snapshot is not None and snapshot.between_losses_s > 0
        known = Estimates(
            total_steps=session.total_steps if session else 0,
            work=self._said_work,
            micro_batches=batch[0] // batch[1] if batch[1] else 0,
            replica_ranks=session.world // len(session.shares) if session and session.shares else 1,
            paces=paces(timings),
            changeover_s=median_or(learned.changeovers_s, wanted.changeover_s),
            look_s=wanted.look_s,
            lost_s=interval_s / 2 + commit_s,
            snapshot_cost_s=cost_s(snapshot.stall_s, snapshot.slowdown, commit_s)
            if snapshot and derived
            else 0.0,
            commit_s=commit_s,
            snapshot_bytes=nbytes,
            home=bill.beside(self._store.url, places),
            move_usd=bill.leave_usd(
                self._store.url, places, {offer.place for offer in offers}, nbytes
            ),
            deadline_s=wanted.deadline_s,
            usd_per_hour_late=wanted.usd_per_hour_late,
        )
        for kind, found in reversed(timings.items()):  # the newest with enough steps
            if known.total_steps and sum(t.steps for t in found) >= LEAST_STEPS:
                of_step = typical(found) * kind.speed * known.efficiency(kind.workers)
                return dataclasses.replace(known, work=known.total_steps * of_step, timed=True)
        return known

    def _capacity(self, book: AttemptHistory) -> Mapping[str, CapacitySeen]:
        """Return the capacity by offer, including preemption notices and prior knowledge."""
        up = sum(node.up_s is not None for node in book.open.values())
        state = (len(book.ended), up, self._looks)
        if self._losses is None or self._losses[0] != state:
            notices = self._learned.notices
            found = book.capacity_with(notices.announced, notices.in_time)
            for name, prior in self._prior.items():
                found[name] = found.get(name, CapacitySeen()).after(prior)
            self._losses = state, found
        return self._losses[1]


class PriceBook:
    """The history of prices of offers. `known`: by offer, (time, USD per hour) of each change, the
    oldest first; replaced, never mutated. `record`: takes a fact of changed prices; `before`:
    prices that were known at the beginning."""

    def __init__(
        self,
        record: Callable[[Fact], None] | None = None,
        before: Mapping[str, PricePath] | None = None,
    ):
        self.known = {name: path[-MOST_CHANGES:] for name, path in (before or {}).items()}
        self._record = record
        self._told: dict[str, float] = {}  # USD per hour, as recorded last
        self._seen_s = self._told_s = float("-inf")

    def told(self, t: float, fact: PricesSeen) -> None:
        """Add prices that this controller or one before it has recorded."""
        self._told |= fact.usd_per_h
        self._add(t, fact.usd_per_h)

    def see(self, now_s: float, offers: Sequence[Offer]) -> None:
        if now_s < self._seen_s + SEE_S:
            return
        self._seen_s = now_s
        self._add(now_s, {offer.name: offer.usd_per_h for offer in offers})
        if self._record is None or now_s < self._told_s + TELL_S:
            return
        self._told_s = now_s
        news = {
            name: changes[-1][1]
            for name, changes in self.known.items()
            if _differs(self._told.get(name), changes[-1][1])
        }
        if news:
            self._told |= news
            self._record(PricesSeen(news))

    def _add(self, t: float, usd_per_h: Mapping[str, float]) -> None:
        news: dict[str, PricePath] = {}
        for name, usd in usd_per_h.items():
            before = self.known.get(name)
            if before is None and len(self.known) + len(news) >= MOST_OFFERS:
                continue
            if before is None or (t > before[-1][0] and _differs(before[-1][1], usd)):
                news[name] = (*(before or ()), (t, usd))[-MOST_CHANGES:]
        if news:
            self.known = {**self.known, **news}


def _differs(before: float | None, usd: float) -> bool:
    return before is None or abs(usd - before) > CHANGED * max(abs(before), abs(usd))


def _places(book: AttemptHistory) -> list[str]:
    """Return the places where nodes came up, in order."""
    up = [n for n, node in book.open.items() if node.up_s is not None]
    up += [n for n, ended in book.ended.items() if ended.up_s is not None]
    return list(dict.fromkeys(book.offers[n].place for n in sorted(up) if n in book.offers))


# Prices of work on spot as a run has seen them: now, on average over the next hours, and how they
# wander. Waits for a lower price, of one node or of a fleet, are decided by them.

CHEAPER_LATER = "spot will be cheaper in time: waiting costs less"
# releasing nodes and beginning again later must save at least the cost of this many begins on
# demand
WORTH_IT = 0.1
# Tables with wandering prices are coarser, since each price level takes as long to compute as a
# whole table without. A wait for a lower price needs so many cells of work left, and of spare time.
COARSE, COARSE_WORK, LEAST_WORK, LEAST_SPARE = 120, 12, 2, 8
# rounding, so that nearly equal decisions share computed tables
PRICE_RATIO, SWING_RATIO = 1.1, 1.25


@dataclass(frozen=True)
class WorkPrices:
    """Prices in USD for the work that one worker of speed 1 does in an hour. `offered`: by name,
    the spot offers under consideration and those that nodes are on, at their current prices."""

    view: View
    offered: Mapping[str, Offer]

    @classmethod
    def of(cls, view: View, spot: Sequence[Offer], nodes: Sequence[Node]) -> WorkPrices:
        found = {offer.name: offer for offer in spot}
        for held in {node.offer.name for node in nodes} - {*found}:
            found |= {offer.name: offer for offer in view.offers if offer.name == held}
        return cls(view, found)

    def now(self, offer: Offer) -> float:
        """Return the current price; for the offer of a node, the price at which it is offered."""
        return usd_per_work(self.offered.get(offer.name, offer))

    def over(self, offer: Offer, usd: float, hours: float) -> float:
        """Return the average price there over the next `hours`, if it is `usd` now."""
        path = self._path(offer)
        return swing_of(path, self._until_h).over(usd, hours) if len(path) > 1 else usd

    def swing(self, among: Iterable[Offer]) -> PriceSwing | None:
        """Return how the price of the cheapest of `among` wanders; None if no change was seen."""
        names = {offer.name: offer for offer in among}
        found = tuple(path for offer in names.values() if (path := self._path(offer)))
        if not any(len(path) > 1 for path in found):
            return None
        swing = swing_of(lowest_path(found), self._until_h)
        return swing if swing.swing else None

    def _path(self, offer: Offer) -> PricePath:
        """Return the prices that were seen, per hour of a worker of speed 1."""
        path = self.view.known.prices.get(offer.name, ())
        of_node = offer.speed * offer.workers
        return path if of_node == 1.0 else tuple((t, usd / of_node) for t, usd in path)

    @property
    def _until_h(self) -> int:
        return math.ceil(self.view.now_s / 3600)


def as_share(swing: PriceSwing, dear_usd: float) -> PriceSwing:
    """Return `swing` with prices as shares of the on-demand price of work, rounded."""
    return PriceSwing(
        rounded(swing.usual_usd / dear_usd, PRICE_RATIO),
        rounded(swing.swing, SWING_RATIO),
        rounded(swing.pull_per_h, SWING_RATIO),
    )


def coarse_grid(
    view: View, work_h: float, time_h: float, spare_h: float
) -> tuple[float, int] | None:
    """Return the grid of a table with wandering prices (see `choosing.grid`); None if too little
    work or spare time is left to wait for a lower price."""
    cell_h, work_cells = grid(view, work_h, time_h, COARSE, COARSE_WORK)
    enough = work_h >= LEAST_WORK * cell_h and spare_h >= LEAST_SPARE * cell_h
    return (cell_h, work_cells) if enough else None


def rounded(value: float, ratio: float) -> float:
    """Return `value` rounded to a power of `ratio`; 0.0 unless it is positive."""
    return round(ratio ** round(math.log(value, ratio)), 4) if value > 0 else 0.0
