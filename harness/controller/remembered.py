"""What a run adds to the history of the market: its facts as records, one for each offer that it
has tried."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

from harness.bucket.journal import Follower
from harness.controller.book import Book
from harness.controller.learned import Notices
from harness.core.facts import AttemptIntended, PricesSeen, Stamped
from harness.core.known import CapacitySeen
from harness.market.history import PRICES_OF_RUN, OfferSeen
from storage.objects import ObjectStore

CONTROLLERS = "controller-"  # facts of launches


def run_name(url: str) -> str:
    """A run's name in histories: tells nothing of where it lies. `url`: normalised."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]


class RunMemory:
    """What a run has seen, read from its bucket; the next time only what is new. `url`:
    normalised."""

    def __init__(self, url: str, store: ObjectStore):
        self._run = run_name(url)
        self._follower = Follower(store, whole=True)
        self._book, self._notices = Book(random.Random(0)), Notices()
        self._prices = defaultdict[str, list[tuple[float, float]]](list)

    def records(self) -> list[OfferSeen]:
        """Of each offer that it has tried. Raises StoreError; what was read until then is known the
        next time."""
        for stamped in self._follower.poll():
            self._add(stamped)
        notices = self._notices
        capacity = self._book.capacity_with(notices.announced, notices.in_time)
        return _records(self._run, self._book, capacity, self._prices)

    def _add(self, stamped: Stamped) -> None:
        self._notices.add(stamped.fact)
        if not stamped.writer.startswith(CONTROLLERS):
            return
        self._book.add(stamped.t, stamped.fact)
        match stamped.fact:
            case PricesSeen(usd_per_h):
                for name, usd in usd_per_h.items():
                    self._priced(name, stamped.t, usd)
            case AttemptIntended(attempt) if attempt in self._book.offers:
                offer = self._book.offers[attempt]
                self._priced(offer.name, stamped.t, offer.usd_per_h)

    def _priced(self, name: str, t: float, usd: float) -> None:
        """Kept of each offer are some more changes than a record has."""
        seen = self._prices[name]
        if usd >= 0 and (not seen or (t >= seen[-1][0] and seen[-1][1] != usd)):
            seen.append((t, usd))
            del seen[: -2 * PRICES_OF_RUN]


def _records(
    run: str,
    book: Book,
    capacity: Mapping[str, CapacitySeen],
    prices: Mapping[str, Sequence[tuple[float, float]]],
) -> list[OfferSeen]:
    offers = {offer.name: offer for offer in book.offers.values()}
    found = list[OfferSeen]()
    for name, seen in sorted(capacity.items()):
        if seen.open is None or name not in offers:
            continue
        offer = offers[name]
        up_s = [
            node.up_s
            for node in book.open.values()
            if node.offer.name == name and node.up_s is not None
        ]
        # a node that is up shows that it is open still
        until_s = max(seen.seen_s, seen.since_s, book.last_s if up_s else 0.0)
        found.append(
            OfferSeen(
                run=run,
                offer=name,
                until_s=until_s,
                open=seen.open,
                since_s=seen.since_s,
                spells=seen.spells,
                node_s=seen.node_s + sum(until_s - t for t in up_s),
                losses=seen.losses,
                unnoticed=min(seen.unnoticed, seen.losses),
                usd_per_h=tuple(prices.get(name, ())),
                place=offer.place,
                accelerator=offer.accelerator,
                gpus=offer.gpus,
                on_demand_usd_per_h=offer.on_demand_usd_per_h,
            ).bounded()
        )
    return found
