"""The setup of a run and its changes, and its logbook, in the form that reports show."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.bucket.layout import LOGBOOK, SETUP, SMALL_NBYTES
from harness.bucket.setup_objects import of_people, people_of, places, readable
from harness.core.decoding import MOST_T, Natural, decoded
from harness.core.facts import SetupChanged, Stamped
from harness.core.formatting import clock
from harness.core.masking import masked_deep
from harness.core.setup_record import (
    LAUNCH,
    LEVELS,
    OWNER,
    PEOPLE,
    PURPOSE,
    SESSION,
    Difference,
    Setup,
)
from harness.core.world import BadInput
from storage.canonical_json import BadObject, canonical
from storage.stores.objects import ObjectStore, get_each
from storage.terminal_text import plain

# The logbook of a run: notes that people write about it.

LONGEST_NOTE = 4000  # characters
LONGEST_NAME = 100
MOST_NOTES = 1000  # newest notes that are read

_KEY = re.compile(r"logbook/(\d{14})-[0-9a-f]{8}\.json")


@dataclass(frozen=True)
class LogbookEntry:
    """One note. `text`: plain text, shown verbatim; nothing in it is markup."""

    t: float  # wall clock of the writer
    text: str
    author: str = ""
    step: Natural | None = None  # the step that it is about, if any

    @classmethod
    def decode(cls, data: bytes) -> LogbookEntry:
        """Decode a note. Raises BadObject."""
        found = decoded(cls, data, most_nbytes=SMALL_NBYTES)
        if not 0 <= found.t <= MOST_T:
            raise BadObject(f"wanted a time of the wall clock, found {found.t:g}")
        text, author = found.text[:LONGEST_NOTE], found.author[:LONGEST_NAME]
        return dataclasses.replace(found, text=text, author=author)


def write_note(store: ObjectStore, entry: LogbookEntry, token: str) -> str:
    """Write a note and return its key. `token`: eight hexadecimal digits that no other note has.
    Raises BadInput for an empty note or one that is too long; StoreError."""
    if not entry.text.strip():
        raise BadInput("wanted a note, found an empty one: -m 'why this is done'")
    if len(entry.text) > LONGEST_NOTE:
        raise BadInput(
            f"wanted a note of at most {LONGEST_NOTE} letters, found {len(entry.text)}; put the "
            "rest where it belongs, and its address here"
        )
    key = f"{LOGBOOK}{int(entry.t * 1000):014d}-{token}.json"
    store.create(key, canonical(masked_deep(dataclasses.asdict(entry))))
    return key


def read_notes(store: ObjectStore) -> tuple[list[LogbookEntry], int]:
    """Return the newest notes in order of time, and the number of notes left out: older ones, and
    unreadable ones. Raises StoreError."""
    keys = [key for key in store.list(LOGBOOK) if _KEY.fullmatch(key)]
    found: list[LogbookEntry] = []
    for _, data in get_each(store, keys[-MOST_NOTES:]):
        try:
            found.append(LogbookEntry.decode(data or b""))
        except BadObject:
            continue
    return sorted(found, key=lambda entry: entry.t), len(keys) - len(found)


# The logbook of a run in the form for people: its purpose, then their entries.


@dataclass(frozen=True)
class Logbook:
    """A logbook. `entries`: the newest, by time; `more`: the number that are not shown."""

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
        """Return plain text, one line for each entry (and for each line of it), for a terminal or
        for W&B's notes."""
        told = [f"purpose: {plain(self.purpose)}"] if self.purpose else []
        told += [f"({self.more} more are not shown)"] if self.more else []
        for entry in self.entries:
            about = f", step {entry.step}" if entry.step is not None else ""
            head = f"{clock(entry.t)} {plain(entry.author) or 'somebody'}{about}: "
            first, *rest = plain(entry.text, keep="\n").splitlines() or [""]
            told += [head + first, *(f"    {line}" for line in rest)]
        return told


def read_logbook(store: ObjectStore, people: Mapping[str, str] | None = None) -> Logbook:
    """Read the logbook. `people`: the result of `setups.people_of`, if known. Raises StoreError."""
    entries, more = read_notes(store)
    people = people_of(store) if people is None else people
    return Logbook(people.get(PURPOSE, ""), people.get(OWNER, ""), tuple(entries), more)


MOST_TOLD = 20  # changes of one world shown in a terminal


@dataclass(frozen=True)
class SetupShift:
    """A world whose setup differs from that of the run's begin. `t`: when it was found (wall
    clock, s); `more`: the number of changes that are not listed."""

    t: float
    epoch: int
    action: str  # "warned" | "accepted" | "refused"
    changes: tuple[Difference, ...]
    more: int = 0

    @property
    def level(self) -> str:
        """The level of the most serious change."""
        return next((n for n in LEVELS if any(c.level == n for c in self.changes)), LEVELS[-1])


@dataclass(frozen=True)
class SetupSummary:
    """The setups of a run. `first`: the one with which it began; `None`: not recorded."""

    first: Setup | None = None
    asked: Setup | None = None  # by the first `harness launch`
    people: dict[str, str] = field(default_factory=dict)  # setup_record.PEOPLE
    shifts: tuple[SetupShift, ...] = ()

    def to_json(self) -> dict[str, Any]:
        setup, git = self.first, self.first.git if self.first else None
        return {
            "people": self.people,
            "argv": list(setup.argv) if setup else [],
            "config": setup.config if setup else {},
            "git": {
                "commit": git.commit,
                "branch": git.branch,
                "remote": git.remote,
                "changed": bool(git.diff),
                "kept": git.kept,
            }
            if git and git.commit
            else None,
            "software": setup.software if setup else {},
            "hardware": setup.hardware if setup else {},
            "packages": len(setup.packages) if setup else 0,
            "launch": list(self.asked.argv) if self.asked else [],
            "changes": [
                {
                    "t": shift.t,
                    "epoch": shift.epoch,
                    "action": shift.action,
                    "level": shift.level,
                    "changes": [vars(change) for change in shift.changes],
                    "more": shift.more,
                }
                for shift in self.shifts
            ],
        }


def summarize_setups(store: ObjectStore, facts: Iterable[Stamped]) -> SetupSummary:
    """Read a run's setups. Raise StoreError if the bucket fails."""
    keys = store.list(SETUP)
    sessions, launches = places(keys, SESSION), places(keys, LAUNCH)
    first, asked = readable(store, sessions[:1]), readable(store, launches[:1])
    newest = readable(store, sessions[-1:]) if len(sessions) > 1 else first
    return SetupSummary(first, asked, of_people((newest, asked)), tuple(shifts_of(facts)))


def shifts_of(facts: Iterable[Stamped]) -> list[SetupShift]:
    """Return the changes of setup in the order of `facts`."""
    return [
        SetupShift(s.t, s.fact.epoch, s.fact.action, _differences(s.fact), s.fact.more)
        for s in facts
        if isinstance(s.fact, SetupChanged)
    ]


def _differences(fact: SetupChanged) -> tuple[Difference, ...]:
    return tuple(
        Difference(*(str(row.get(name, "")) for name in ("level", "name", "was", "now")))
        for row in fact.changes
    )


def setup_rows(found: SetupSummary) -> list[tuple[str, str]]:
    """Return the most important parts of the setup as rows of a table."""
    rows = [(name, found.people[name]) for name in PEOPLE if found.people.get(name)]
    if (setup := found.first) is not None:
        rows.append(("command", " ".join(setup.argv)))
        if git := setup.git.commit:
            changed = f", {setup.git.diff_nbytes:,} bytes not committed" if setup.git.diff else ""
            rows.append(("git", f"{git[:12]} ({setup.git.branch or 'no branch'}){changed}"))
        versions = [
            f"{n} {setup.software[n]}" for n in ("python", "torch", "cuda") if setup.software.get(n)
        ]
        rows.append(("software", f"{', '.join(versions)}; {len(setup.packages)} packages"))
    return rows


def shift_words(shift: SetupShift) -> str:
    more = len(shift.changes) - MOST_TOLD + shift.more
    told = "; ".join(map(str, shift.changes[:MOST_TOLD]))
    return told + (f"; and {more} more" if more > 0 else "")
