"""Where histories lie: a folder of this computer, and a bucket that a team shares, laid out alike.

    seen/2026-11-22/4f0c9a....jsonl     what one run saw, by the day of its last look

Every run writes one object, its own; so nobody overwrites what another knows, and nothing is
locked. Readers take the newest objects, a bounded number of them. Whoever writes takes away what is
too old.

Pure: everything goes through the store that it is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timezone

from harness.market.history import KEEP_S, MarketHistory, OfferSeen
from storage.objects import ObjectStore, get_each

SEEN = "seen/"
MOST_OBJECTS = 500  # that one reading takes
MOST_NBYTES = 2 << 20  # of one object
MOST_REMOVED = 50  # in one writing
_KEY = re.compile(rf"{SEEN}(\d{{4}}-\d\d-\d\d)/([0-9a-z-]+)\.jsonl")


class HistoryShelf:
    """Histories in one store. All of its methods raise StoreError."""

    def __init__(self, store: ObjectStore):
        self.store = store

    def _keys(self) -> list[tuple[str, str, str]]:
        """(day, run, key), the newest day first."""
        found = [(m[1], m[2], key) for key in self.store.list(SEEN) if (m := _KEY.fullmatch(key))]
        return sorted(found, reverse=True)

    def read(self, now_s: float) -> MarketHistory:
        keys = [key for day, _, key in self._keys() if day >= _day(now_s - KEEP_S)]
        records, unread = list[OfferSeen](), 0
        for _, content in get_each(self.store, keys[:MOST_OBJECTS]):
            if content is None:  # its run has written anew
                continue
            found = MarketHistory.read(content[:MOST_NBYTES].decode(errors="replace"))
            records += found.records.values()
            unread += found.unread
        return MarketHistory.of(records, unread).current(now_s)

    def write(self, records: Iterable[OfferSeen], now_s: float) -> None:
        """In the place of what these runs wrote before."""
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
    """The first lines, as many as fit into one object."""
    kept, nbytes = list[bytes](), 0
    for line in lines:
        kept.append(line.encode() + b"\n")
        nbytes += len(kept[-1])
        if nbytes > MOST_NBYTES:
            return b"".join(kept[:-1])
    return b"".join(kept)


def _day(t: float) -> str:
    return f"{datetime.fromtimestamp(max(0.0, t), timezone.utc):%Y-%m-%d}"
