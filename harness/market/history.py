"""What runs have seen of offers, kept across runs: what one has learned is where the next begins.

A record is what one run saw of one offer. Of records of the same run and offer the one that saw
longer counts; all others stand side by side. So histories merge in any order and as often as one
likes, with the same result. They are bounded: the newest records of each offer, and of all; and
they age out.

As text a record is a line of JSON. A line that is damaged, or was written by a newer version, is
passed over.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from harness.core.known import MOST_SPELLS, CapacitySeen, Spell
from harness.core.values import (
    MOST_T,
    Amount,
    BadObject,
    Natural,
    Within,
    canonical,
    decoded,
    stamped,
)

KEEP_S = 60 * 86_400.0  # older records say little of a market
FRESH_S = 3600.0  # a state that was seen so long ago may still be as it was
AHEAD_S = 86_400.0  # clocks differ; what was seen later than that from now is of a wrong one
RUNS_OF_OFFER = 32
MOST_RECORDS = 4000
SPELLS_OF_RUN, PRICES_OF_RUN = 64, 48  # of one record, the newest
RECORD_NBYTES = 16 << 10

WallClock = Annotated[float, Within(0, MOST_T)]


@dataclass(frozen=True)
class OfferSeen:
    """What a run saw of an offer until `until_s` (seconds since 1970): see `known.CapacitySeen`.
    `run`: a name that no other run has, and that tells nothing of it. `usd_per_h`: (when, price)
    of each change."""

    run: str
    offer: str
    until_s: WallClock
    open: bool | None = None
    since_s: WallClock = 0.0
    spells: tuple[Spell, ...] = ()
    node_s: Amount = 0.0
    losses: Natural = 0
    unnoticed: Natural = 0
    usd_per_h: tuple[tuple[float, ...], ...] = ()
    place: str = ""
    accelerator: str = ""
    gpus: Natural = 0
    on_demand_usd_per_h: Amount = 0.0

    def __post_init__(self) -> None:
        if not self.run or not self.offer:
            raise BadObject("wanted a run and an offer, found an empty name")
        if any(len(change) != 2 or change[1] < 0 for change in self.usd_per_h):
            raise BadObject("usd_per_h: wanted pairs of a moment and a price")
        if any(spell.seconds < 0 for spell in self.spells):
            raise BadObject("spells: wanted seconds from 0 on")
        if self.unnoticed > self.losses or self.since_s > self.until_s:
            raise BadObject("wanted unnoticed <= losses and since_s <= until_s")

    @property
    def key(self) -> tuple[str, str]:
        return self.run, self.offer

    @property
    def rank(self) -> tuple[float, str, str]:
        """What is greater is newer, and kept longer."""
        return self.until_s, self.run, self.offer

    def line(self) -> str:
        return canonical(stamped(dataclasses.asdict(self))).decode()

    def counts_before(self, other: OfferSeen) -> bool:
        """Of two records of the same run and offer: did this one see more?"""
        if self.rank != other.rank:
            return self.rank > other.rank
        return self != other and self.line() > other.line()

    def spells_now(self, now_s: float) -> tuple[Spell, ...]:
        """With the one that went on when nobody looked any longer, unless it may go on still."""
        if self.open is None or self.is_fresh(now_s):
            return self.spells
        return (*self.spells, Spell(self.open, self.until_s - self.since_s, False))

    def is_fresh(self, now_s: float) -> bool:
        return self.open is not None and now_s - self.until_s <= FRESH_S

    def bounded(self) -> OfferSeen:
        return dataclasses.replace(
            self, spells=self.spells[-SPELLS_OF_RUN:], usd_per_h=self.usd_per_h[-PRICES_OF_RUN:]
        )


@dataclass(frozen=True)
class MarketHistory:
    """Records by run and offer. `unread`: lines that said nothing."""

    records: Mapping[tuple[str, str], OfferSeen] = field(default_factory=dict)
    unread: int = 0

    @classmethod
    def of(cls, records: Iterable[OfferSeen], unread: int = 0) -> MarketHistory:
        newest: dict[tuple[str, str], OfferSeen] = {}
        for record in records:
            before = newest.get(record.key)
            if before is None or record.counts_before(before):
                newest[record.key] = record
        kept = list[OfferSeen]()
        of_offer: defaultdict[str, int] = defaultdict(int)
        for record in sorted(newest.values(), key=lambda r: r.rank, reverse=True):
            of_offer[record.offer] += 1
            if of_offer[record.offer] <= RUNS_OF_OFFER and len(kept) < MOST_RECORDS:
                kept.append(record)
        return cls({record.key: record for record in reversed(kept)}, unread)

    @classmethod
    def read(cls, text: str) -> MarketHistory:
        """Of lines; never fails."""
        records, unread = list[OfferSeen](), 0
        for line in text.splitlines():
            if line.strip():
                try:
                    records.append(decoded(OfferSeen, line, most_nbytes=RECORD_NBYTES).bounded())
                except BadObject:
                    unread += 1
        return cls.of(records, unread)

    def text(self) -> str:
        return "".join(record.line() + "\n" for record in self.records.values())

    def merged(self, other: MarketHistory) -> MarketHistory:
        """With what another one knows. Associative, commutative, and the same when done again."""
        both = (*self.records.values(), *other.records.values())
        return self.of(both, self.unread + other.unread)

    def current(self, now_s: float) -> MarketHistory:
        """Without what is too old, or of a clock that is wrong."""
        kept = (r for r in self.records.values() if -AHEAD_S <= now_s - r.until_s <= KEEP_S)
        return self.of(kept, self.unread)

    def without(self, run: str) -> MarketHistory:
        """For that run itself, which knows what it saw by its own facts."""
        return self.of((r for r in self.records.values() if r.run != run), self.unread)

    def only(self, text: str) -> MarketHistory:
        """Of offers whose names contain this."""
        return self.of((r for r in self.records.values() if text in r.offer), self.unread)

    def by_offer(self) -> dict[str, list[OfferSeen]]:
        """The oldest record of each first."""
        found: defaultdict[str, list[OfferSeen]] = defaultdict(list)
        for record in sorted(self.records.values(), key=lambda r: r.rank):
            found[record.offer].append(record)
        return dict(found)

    def summaries(self, now_s: float) -> list[OfferSummary]:
        """The best known first."""
        found = [OfferSummary.of(records, now_s) for records in self.by_offer().values()]
        return sorted(found, key=lambda s: (-s.seen_h, s.offer))

    def prior(self, now_s: float) -> dict[str, CapacitySeen]:
        """What is known of each offer before a run begins: see `CapacitySeen.after`. How it is now
        is known only where somebody looked of late."""
        return {name: _pooled(found, now_s) for name, found in self.by_offer().items()}

    def prices(self) -> dict[str, tuple[tuple[float, float], ...]]:
        """(when, USD per hour) of each offer, the oldest first."""
        found: dict[str, tuple[tuple[float, float], ...]] = {}
        for name, records in self.by_offer().items():
            seen = {(t, usd) for r in records for t, usd in r.usd_per_h}
            if seen:
                found[name] = tuple(sorted(seen))
        return found


@dataclass(frozen=True)
class OfferSummary:
    """What all records of an offer say together. `seen_h`: hours of which it is known whether there
    was a machine for us, `open_h` of them with one; `closings`, `openings`: how often that was seen
    to change. `usd_per_h`: the lowest, the highest and the newest price; zeros: none was seen."""

    offer: str
    runs: int
    until_s: float
    open: bool | None  # as last seen
    seen_h: float
    open_h: float
    closings: int
    openings: int
    node_h: float
    losses: int
    unnoticed: int
    usd_per_h: tuple[float, float, float]

    @classmethod
    def of(cls, records: list[OfferSeen], now_s: float) -> OfferSummary:
        """Of one offer, the oldest first."""
        spells = [spell for r in records for spell in r.spells_now(now_s)]
        spells += [
            Spell(bool(r.open), r.until_s - r.since_s, False) for r in records if r.is_fresh(now_s)
        ]
        usd = [usd for _, usd in sorted((t, usd) for r in records for t, usd in r.usd_per_h)]
        return cls(
            offer=records[-1].offer,
            runs=len(records),
            until_s=records[-1].until_s,
            open=records[-1].open,
            seen_h=sum(s.seconds for s in spells) / 3600,
            open_h=sum(s.seconds for s in spells if s.open) / 3600,
            closings=sum(s.open and s.ended for s in spells),
            openings=sum(not s.open and s.ended for s in spells),
            node_h=sum(r.node_s for r in records) / 3600,
            losses=sum(r.losses for r in records),
            unnoticed=sum(r.unnoticed for r in records),
            usd_per_h=(min(usd), max(usd), usd[-1]) if usd else (0.0, 0.0, 0.0),
        )


def _pooled(records: list[OfferSeen], now_s: float) -> CapacitySeen:
    newest = max((r for r in records if r.is_fresh(now_s)), key=lambda r: r.rank, default=None)
    spells = [spell for r in records for spell in r.spells_now(now_s)]
    return CapacitySeen(
        open=newest.open if newest else None,
        since_s=newest.since_s if newest else 0.0,
        seen_s=newest.until_s if newest else 0.0,
        spells=tuple(spells[-MOST_SPELLS:]),
        node_s=sum(r.node_s for r in records),
        losses=sum(r.losses for r in records),
        unnoticed=sum(r.unnoticed for r in records),
    )
