"""What a run has learned, for policies that forecast (`View.known`).

Pure.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from harness.bucket.journal import Follower
from harness.controller.book import Book
from harness.controller.learned import LEAST_STEPS, LearnedRun, median, paces, typical
from harness.core import prices
from harness.core.facts import Fact, PricesSeen
from harness.core.known import CapacitySeen, Knowledge
from harness.core.losses import cost_s
from harness.core.world import Offer
from harness.market.wandering import PricePath
from storage.errors import StoreError
from storage.objects import ObjectStore

LOOK_S = 15.0  # so often the bucket is read for what is new
MOST_SEGMENTS = 256  # of facts, that one look reads
SEE_S = 10.0  # so often prices are looked at
TELL_S = 600.0  # so often prices that have changed are written down
CHANGED = 0.01  # a smaller share is no change of a price
# of the history of prices: the offers that were cheapest when seen first, and changes of each
MOST_OFFERS, MOST_CHANGES = 512, 128


class Learner(Protocol):
    """Tells what forecasts need (`View.known`); asked in every round, so it must be quick, and it
    never fails: what it cannot find out now it tells later. `offers`: as they are now."""

    def known(self, now_s: float, book: Book, offers: Sequence[Offer]) -> Knowledge: ...


class KnowsNothing:
    """For policies that look at nothing but what is offered."""

    def known(self, now_s: float, book: Book, offers: Sequence[Offer]) -> Knowledge:
        return Knowledge(capacity=book.capacity)


@dataclass(frozen=True)
class RunGoals:
    """What the user says of a run. `deadline_s`: wall clock. `work_s`: that all of it takes,
    undisturbed, on `nodes` nodes of the fastest offer; 0: to be measured. `changeover_s`: assumed
    until one was seen. `look_s`: from one decision to the next."""

    deadline_s: float | None = None
    work_s: float = 0.0
    nodes: int = 1
    changeover_s: float = 300.0
    look_s: float = 10.0


class RunLearner:
    """Learns from the facts that all seats of a run write to its bucket, and from the offers that
    the loop sees. A bucket that does not answer is asked again later; until then it knows what it
    knew.

    `record` takes facts, to keep the history of prices. `prior`, `prices`: of offers, what was
    known of their capacity and their prices before this run began.
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
        self._learned = LearnedRun()
        self._prices = PriceBook(record, prices)
        self._prior = dict(prior or {})
        self._known, self._said_work = Knowledge(), 0.0
        self._due_s = float("-inf")
        # attempts that had ended, and are up, when losses were looked at, and what was found
        self._losses: tuple[tuple[int, int, int], dict[str, CapacitySeen]] | None = None
        self._looks = 0

    def known(self, now_s: float, book: Book, offers: Sequence[Offer]) -> Knowledge:
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
        """Raises StoreError; what was read until then is there the next time."""
        for stamped in self._follower.poll():
            if isinstance(stamped.fact, PricesSeen):
                self._prices.told(stamped.t, stamped.fact)
            else:
                self._learned.add(stamped.t, stamped.fact)
        self._looks += 1

    def _digest(self, book: Book, offers: Sequence[Offer]) -> Knowledge:
        """All that changes with facts only."""
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
        interval_s = (snapshot.interval_s if snapshot else 0.0) or median(learned.gaps_s, 0.0)
        nbytes, places = snapshot.nbytes if snapshot else 0, _places(book)
        commit_s = median(learned.commits_s, 0.0)
        derived = snapshot is not None and snapshot.between_losses_s > 0
        known = Knowledge(
            total_steps=session.total_steps if session else 0,
            work=self._said_work,
            micro_batches=batch[0] // batch[1] if batch[1] else 0,
            replica_ranks=session.world // len(session.shares) if session and session.shares else 1,
            paces=paces(timings),
            changeover_s=median(learned.changeovers_s, wanted.changeover_s),
            look_s=wanted.look_s,
            lost_s=interval_s / 2 + commit_s,
            snapshot_cost_s=cost_s(snapshot.stall_s, snapshot.slowdown, commit_s)
            if snapshot and derived
            else 0.0,
            commit_s=commit_s,
            snapshot_bytes=nbytes,
            home=prices.beside(self._store.url, places),
            move_usd=prices.leave_usd(
                self._store.url, places, {offer.place for offer in offers}, nbytes
            ),
            deadline_s=wanted.deadline_s,
        )
        for kind, found in reversed(timings.items()):  # the newest that says enough
            if known.total_steps and sum(t.steps for t in found) >= LEAST_STEPS:
                of_step = typical(found) * kind.speed * known.efficiency(kind.workers)
                return dataclasses.replace(known, work=known.total_steps * of_step)
        return known

    def _capacity(self, book: Book) -> Mapping[str, CapacitySeen]:
        """With what notices tell, and what was known before."""
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
    """Prices of offers as they were seen to change. `known`: by offer, (when, USD per hour), the
    oldest first; replaced, never changed. `record`: takes a fact of what has changed; `before`:
    what was known of them at the beginning."""

    def __init__(
        self,
        record: Callable[[Fact], None] | None = None,
        before: Mapping[str, PricePath] | None = None,
    ):
        self.known = {name: path[-MOST_CHANGES:] for name, path in (before or {}).items()}
        self._record = record
        self._told: dict[str, float] = {}  # USD per hour, as it was written down
        self._seen_s = self._told_s = float("-inf")

    def told(self, t: float, fact: PricesSeen) -> None:
        """By this controller or one before it."""
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


def _places(book: Book) -> list[str]:
    """Where nodes came up, in order."""
    up = [n for n, node in book.open.items() if node.up_s is not None]
    up += [n for n, ended in book.ended.items() if ended.up_s is not None]
    return list(dict.fromkeys(book.offers[n].place for n in sorted(up) if n in book.offers))
