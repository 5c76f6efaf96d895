"""The logbook of a run: what people write about it, beside what happens in it.

Pure. Create-only, one object for each note; the key is the time of the writer's clock:

    logbook/{milliseconds:014d}-{token}.json
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from harness.bucket.layout import LOGBOOK, SMALL_NBYTES
from harness.core.masking import masked_deep
from harness.core.values import MOST_T, BadObject, Natural, canonical, decoded
from harness.core.world import BadInput
from storage.objects import ObjectStore, get_each

LONGEST_NOTE = 4000  # letters
LONGEST_NAME = 100
MOST_NOTES = 1000  # that are read, the newest

_KEY = re.compile(r"logbook/(\d{14})-[0-9a-f]{8}\.json")


@dataclass(frozen=True)
class LogbookEntry:
    """What somebody wrote. `text`: plain, and shown as it stands; nothing in it is markup."""

    t: float  # wall clock of the writer
    text: str
    author: str = ""
    step: Natural | None = None  # that it is about

    @classmethod
    def decode(cls, data: bytes) -> LogbookEntry:
        """Raises BadObject."""
        found = decoded(cls, data, most_nbytes=SMALL_NBYTES)
        if not 0 <= found.t <= MOST_T:
            raise BadObject(f"wanted a time of the wall clock, found {found.t:g}")
        text, author = found.text[:LONGEST_NOTE], found.author[:LONGEST_NAME]
        return dataclasses.replace(found, text=text, author=author)


def write_note(store: ObjectStore, entry: LogbookEntry, token: str) -> str:
    """Its key. `token`: eight hexadecimal digits that no other note has. Raises BadInput for what
    is no note, StoreError."""
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
    """The newest notes in order of time, and how many there are that are not among them: older
    ones, and what cannot be read. Raises StoreError."""
    keys = [key for key in store.list(LOGBOOK) if _KEY.fullmatch(key)]
    found: list[LogbookEntry] = []
    for _, data in get_each(store, keys[-MOST_NOTES:]):
        try:
            found.append(LogbookEntry.decode(data or b""))
        except BadObject:
            continue
    return sorted(found, key=lambda entry: entry.t), len(keys) - len(found)
