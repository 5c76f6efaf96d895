"""What a run adds to the history of the market: its facts as records, one for each offer that it
has tried."""

from __future__ import annotations

import hashlib
import random

from harness.bucket.journal import read_facts
from harness.controller.book import Book
from harness.core.facts import AttemptIntended
from harness.market.history import OfferSeen
from storage.objects import ObjectStore

CONTROLLERS = "controller-"  # facts of launches


def run_name(url: str) -> str:
    """A run's name in histories: tells nothing of where it lies. `url`: normalised."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]


def records_of_run(url: str, store: ObjectStore) -> list[OfferSeen]:
    """What a run has seen until now. Raises StoreError."""
    book = Book(random.Random(0))
    asked_usd: dict[str, list[tuple[float, float]]] = {}
    for stamped in read_facts(store, CONTROLLERS, steps=False):
        book.add(stamped.t, stamped.fact)
        if isinstance(stamped.fact, AttemptIntended) and stamped.fact.attempt in book.offers:
            offer = book.offers[stamped.fact.attempt]
            changes = asked_usd.setdefault(offer.name, [])
            if not changes or changes[-1][1] != offer.usd_per_h:
                changes.append((stamped.t, offer.usd_per_h))
    return _records(run_name(url), book, asked_usd)


def _records(
    run: str, book: Book, usd_per_h: dict[str, list[tuple[float, float]]]
) -> list[OfferSeen]:
    offers = {offer.name: offer for offer in book.offers.values()}
    found = list[OfferSeen]()
    for name, seen in sorted(book.capacity.items()):
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
                usd_per_h=tuple(usd_per_h.get(name, ())),
                place=offer.place,
                accelerator=offer.accelerator,
                gpus=offer.gpus,
                on_demand_usd_per_h=offer.on_demand_usd_per_h,
            ).bounded()
        )
    return found
