"""The logbook of a run, as people read it: its purpose, then what they wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.bucket.notes import LogbookEntry, read_notes
from harness.bucket.setups import people_of
from harness.core.setups import OWNER, PURPOSE
from harness.views.words import clock
from storage.objects import ObjectStore
from storage.text import plain


@dataclass(frozen=True)
class Logbook:
    """`entries`: the newest, in order of time; `more`: how many are not shown."""

    purpose: str = ""
    owner: str = ""
    entries: tuple[LogbookEntry, ...] = ()
    more: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "purpose": self.purpose,
            "owner": self.owner,
            "entries": [vars(entry) for entry in self.entries],
            "more": self.more,
        }

    def lines(self) -> list[str]:
        """Plain text, one line for each entry (and for each line of it): for a terminal, or for
        W&B's notes."""
        told = [f"purpose: {plain(self.purpose)}"] if self.purpose else []
        told += [f"({self.more} more are not shown)"] if self.more else []
        for entry in self.entries:
            about = f", step {entry.step}" if entry.step is not None else ""
            head = f"{clock(entry.t)} {plain(entry.author) or 'somebody'}{about}: "
            first, *rest = plain(entry.text, keep="\n").splitlines() or [""]
            told += [head + first, *(f"    {line}" for line in rest)]
        return told


def read_logbook(store: ObjectStore, people: Mapping[str, str] | None = None) -> Logbook:
    """`people`: as `setups.people_of` reads them, if they are known. Raises StoreError."""
    entries, more = read_notes(store)
    people = people_of(store) if people is None else people
    return Logbook(people.get(PURPOSE, ""), people.get(OWNER, ""), tuple(entries), more)
