"""Records of what runs have seen of offers, so that a run starts with what earlier ones learned.

A record is what one run saw of one offer. Of several records of the same run and offer the one that
saw longer counts; all others are kept. So histories can be merged in any order and repeatedly, with
the same result. They are bounded (the newest records of each offer, and of all), and expire.

A record is stored as a line of JSON. A line that is damaged, or was written by a newer version, is
skipped.

Pure.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Annotated

from harness.bucket.journal import Follower
from harness.core.decoding import MOST_T, Amount, Natural, Within, decoded, stamped
from harness.core.estimates import MOST_SPELLS, CapacitySeen, Spell
from harness.core.facts import AttemptIntended, PricesSeen, Stamped
from harness.ledger.attempts import AttemptHistory
from harness.ledger.world_speed import Notices
from storage.canonical_json import BadObject, canonical
from storage.stores.objects import ObjectStore, get_each

KEEP_S = 60 * 86_400.0  # older records say little about a market
FRESH_S = 3600.0  # a state seen this recently may still hold
AHEAD_S = 86_400.0  # clocks differ; a record from further in the future has a wrong clock
RUNS_OF_OFFER = 32
MOST_RECORDS = 4000
SPELLS_OF_RUN, PRICES_OF_RUN = 64, 48  # the newest ones of a record
RECORD_NBYTES = 16 << 10

WallClock = Annotated[float, Within(0, MOST_T)]


@dataclass(frozen=True)
class OfferSeen:
    """The observations of an offer by a run, until `until_s` (seconds since 1970); see
    `estimates.CapacitySeen`. `run`: a unique name that reveals nothing about the run. `usd_per_h`:
    (time, price) of each change."""

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
        """Sort key: a greater rank is newer, and kept longer."""
        return self.until_s, self.run, self.offer

    def line(self) -> str:
        return canonical(stamped(dataclasses.asdict(self))).decode()

    def counts_before(self, other: OfferSeen) -> bool:
        """Return whether this record, of the same run and offer as `other`, saw more."""
        if self.rank != other.rank:
            return self.rank > other.rank
        return self != other and self.line() > other.line()

    def spells_now(self, now_s: float) -> tuple[Spell, ...]:
        """Return all spells, with the one at the end of observation unless it may still go on."""
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
    """Records by run and offer. `unread`: lines that could not be read."""

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
        """Read lines of JSON. Never fails."""
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
        """Return the union with another history. Associative, commutative and idempotent."""
        both = (*self.records.values(), *other.records.values())
        return self.of(both, self.unread + other.unread)

    def current(self, now_s: float) -> MarketHistory:
        """Return the records that are neither too old nor from a wrong clock."""
        kept = (r for r in self.records.values() if -AHEAD_S <= now_s - r.until_s <= KEEP_S)
        return self.of(kept, self.unread)

    def without(self, run: str) -> MarketHistory:
        """Return the history without a run, for that run itself: its own facts tell what it saw."""
        return self.of((r for r in self.records.values() if r.run != run), self.unread)

    def only(self, text: str) -> MarketHistory:
        """Return the records of offers whose names contain `text`."""
        return self.of((r for r in self.records.values() if text in r.offer), self.unread)

    def by_offer(self) -> dict[str, list[OfferSeen]]:
        """Return the records of each offer, the oldest first."""
        found: defaultdict[str, list[OfferSeen]] = defaultdict(list)
        for record in sorted(self.records.values(), key=lambda r: r.rank):
            found[record.offer].append(record)
        return dict(found)

    def summaries(self, now_s: float) -> list[OfferSummary]:
        """Return a summary of each offer, the longest observed first."""
        found = [OfferSummary.of(records, now_s) for records in self.by_offer().values()]
        return sorted(found, key=lambda s: (-s.seen_h, s.offer))

    def prior(self, now_s: float) -> dict[str, CapacitySeen]:
        """Return what is known of each offer before a run begins; see `CapacitySeen.after`. The
        current state is known only where a run looked recently."""
        return {name: _pooled(found, now_s) for name, found in self.by_offer().items()}

    def prices(self) -> dict[str, tuple[tuple[float, float], ...]]:
        """Return (time, USD per hour) of each offer, the oldest first."""
        found: dict[str, tuple[tuple[float, float], ...]] = {}
        for name, records in self.by_offer().items():
            seen = {(t, usd) for r in records for t, usd in r.usd_per_h}
            if seen:
                found[name] = tuple(sorted(seen))
        return found


@dataclass(frozen=True)
class OfferSummary:
    """A summary of all records of an offer. `seen_h`: hours in which it was observed whether we
    could get a machine, `open_h` of them with one; `closings`, `openings`: observed changes.
    `usd_per_h`: the lowest, the highest and the newest price; zeros: none was seen."""

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
        """Summarize the records of one offer, given oldest first."""
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
        strikes=sum(r.losses for r in records),  # which were at once is not recorded
    )


# A run's contribution to the history of the market: its facts as records, one for each offer that
# it has tried.

CONTROLLERS = "controller-"  # prefix of the writers of facts about launches


def history_name(url: str) -> str:
    """Return a run's name in histories, which does not reveal its URL. `url`: normalised."""
    return hashlib.sha256(url.encode()).hexdigest()[:16]


class RunMemory:
    """A run's observations of the market, read from its bucket incrementally. `url`: normalised."""

    def __init__(self, url: str, store: ObjectStore):
        self._run = history_name(url)
        self._follower = Follower(store, whole=True)
        self._book, self._notices = AttemptHistory(random.Random(0)), Notices()
        self._prices = defaultdict[str, list[tuple[float, float]]](list)

    def records(self) -> list[OfferSeen]:
        """Return a record for each offer that the run has tried. Raises StoreError; what was read
        until then is kept for the next call."""
        for one in self._follower.poll():
            self._add(one)
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
        """Record a price if it has changed. Some more changes are kept than a record has."""
        seen = self._prices[name]
        if usd >= 0 and (not seen or (t >= seen[-1][0] and seen[-1][1] != usd)):
            seen.append((t, usd))
            del seen[: -2 * PRICES_OF_RUN]


def _records(
    run: str,
    book: AttemptHistory,
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
        # a node that is up shows that the offer is still open
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


# The storage of histories: a folder of this computer, or a bucket that a team shares, in one
# layout.

SEEN = "seen/"
MOST_OBJECTS = 500  # read at once
MOST_NBYTES = 2 << 20  # of one object
MOST_REMOVED = 50  # per write
_KEY = re.compile(rf"{SEEN}(\d{{4}}-\d\d-\d\d)/([0-9a-z-]+)\.jsonl")


class HistoryShelf:
    """The histories in one store. All methods raise StoreError."""

    def __init__(self, store: ObjectStore):
        self.store = store

    def _keys(self) -> list[tuple[str, str, str]]:
        """Return (day, run, key), the newest day first."""
        found = [(m[1], m[2], key) for key in self.store.list(SEEN) if (m := _KEY.fullmatch(key))]
        return sorted(found, reverse=True)

    def read(self, now_s: float) -> MarketHistory:
        keys = [key for day, _, key in self._keys() if day >= _day(now_s - KEEP_S)]
        records, unread = list[OfferSeen](), 0
        for _, content in get_each(self.store, keys[:MOST_OBJECTS]):
            if content is None:  # its run has replaced it
                continue
            found = MarketHistory.read(content[:MOST_NBYTES].decode(errors="replace"))
            records += found.records.values()
            unread += found.unread
        return MarketHistory.of(records, unread).current(now_s)

    def write(self, records: Iterable[OfferSeen], now_s: float) -> None:
        """Write the records, replacing what these runs wrote before."""
        history = MarketHistory.of(record.bounded() for record in records)
        by_run: dict[str, list[OfferSeen]] = {}
        for record in history.records.values():
            by_run.setdefault(record.run, []).append(record)
        written = set[str]()
        for run, found in by_run.items():
            key = f"{SEEN}{_day(max(r.until_s for r in found))}/{run}.jsonl"
            self.store.put(key, _bounded(record.line() for record in reversed(found)))
            written.add(key)
        old = [
            key
            for day, run, key in reversed(self._keys())
            if key not in written and (run in by_run or day < _day(now_s - KEEP_S))
        ]
        for key in old[:MOST_REMOVED]:
            self.store.delete(key)


def _bounded(lines: Iterable[str]) -> bytes:
    """Join the first lines, as many as fit into one object."""
    kept, nbytes = list[bytes](), 0
    for line in lines:
        kept.append(line.encode() + b"\n")
        nbytes += len(kept[-1])
        if nbytes > MOST_NBYTES:
            return b"".join(kept[:-1])
    return b"".join(kept)


def _day(t: float) -> str:
    return f"{datetime.fromtimestamp(max(0.0, t), timezone.utc):%Y-%m-%d}"
