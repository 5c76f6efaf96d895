"""Ever larger blocks of a growing log, so that a reader of a long one needs few requests.

A log is numbered volumes 0, 1, 2, ... A block of level 0 is one volume; one of level k+1 has the
content of FANOUT blocks of level k. A block is created once and never changed. The small ones are
deleted when the large one is there. So who reads the log from its beginning finds at most
FANOUT - 1 blocks of each level, whatever is merged meanwhile.

    archive/<kind>/<level>-<index>      volumes [index * FANOUT**level, (index + 1) * FANOUT**level)

Pure: knows a store's interface.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from harness.bucket.layout import ARCHIVE
from storage.errors import StoreUnavailable
from storage.objects import ObjectStore, get_each

FANOUT = 16
MOST_LEVEL = 4
LOOKS = 10  # at a log that is merged again and again while it is read


@dataclass(frozen=True)
class Block:
    """`index` of its level; `first` volume, and the one after its last."""

    level: int
    index: int

    @property
    def volumes(self) -> int:
        """How many it holds."""
        return int(FANOUT**self.level)

    @property
    def first(self) -> int:
        return self.index * self.volumes

    @property
    def end(self) -> int:
        return self.first + self.volumes

    def key(self, kind: str) -> str:
        return f"{ARCHIVE}{kind}/{self.level}-{self.index:06d}"

    def parts(self) -> list[Block]:
        """What it is merged from."""
        first = self.index * FANOUT
        return [Block(self.level - 1, i) for i in range(first, first + FANOUT)]


def blocks(store: ObjectStore, kind: str) -> set[Block]:
    """Those that are listed. What else lies there is not ours."""
    prefix = f"{ARCHIVE}{kind}/"
    named = (re.fullmatch(r"([0-4])-(\d{6,9})", key[len(prefix) :]) for key in store.list(prefix))
    return {Block(int(m[1]), int(m[2])) for m in named if m}


def read(
    store: ObjectStore, kind: str, since: int = 0, surely: bool = True
) -> list[tuple[Block, bytes]]:
    """The blocks that hold volumes from `since` on, in order; the first may begin before. Raises
    StoreError.

    Right also while others merge: a small block that is gone is in a larger one, so look again. A
    listing may be old, so (`surely`) where it ends or has a gap the objects themselves are asked
    for; who looks again soon need not.
    """
    held: dict[Block, bytes] = {}
    for _ in range(LOOKS):
        found = _once(store, kind, since, held, surely)
        if found is not None:
            return found
    raise StoreUnavailable(
        f"{store.url}/{ARCHIVE}{kind}/: wanted blocks that stay while they are read, found others "
        f"at each of {LOOKS} looks; try again"
    )


def _once(
    store: ObjectStore, kind: str, since: int, held: dict[Block, bytes], surely: bool
) -> list[tuple[Block, bytes]] | None:
    """`read`, at one look; None: a block that was listed is gone. `held`: what was read before."""
    there = blocks(store, kind)
    chosen: list[Block] = []
    at = since
    while True:
        block = _at(there, at)
        if block is None and surely:
            block = _unlisted(store, kind, _holding(at) if there else [Block(0, 0)], held)
        if block is None:
            break
        # merged meanwhile: it has what the ones before it have
        chosen = [b for b in chosen if b.end <= block.first] + [block]
        at = block.end
    missing = [b for b in chosen if b not in held]
    by_key = {b.key(kind): b for b in missing}
    for key, data in get_each(store, by_key):
        if data is not None:
            held[by_key[key]] = data
    if not all(b in held for b in chosen):
        return None
    return [(b, held[b]) for b in chosen]


def _at(there: set[Block], volume: int) -> Block | None:
    """The largest block that holds this volume."""
    return next((b for b in reversed(_holding(volume)) if b in there), None)


def _holding(volume: int) -> list[Block]:
    return [Block(level, volume // int(FANOUT**level)) for level in range(MOST_LEVEL + 1)]


def _unlisted(
    store: ObjectStore, kind: str, wanted: list[Block], held: dict[Block, bytes]
) -> Block | None:
    """The largest of these that is there, though it is not listed."""
    by_key = {b.key(kind): b for b in wanted}
    found = {by_key[key]: data for key, data in get_each(store, by_key) if data is not None}
    held.update(found)
    return max(found, key=lambda b: b.level, default=None)


def merge(store: ObjectStore, kind: str, end: int, join: Callable[[list[bytes]], bytes]) -> int:
    """Make every large block whose volumes are all below `end`, and delete what it is made of:
    how many were made. Any number of processes may do so at the same time, and die at any point.
    Raises StoreError."""
    there, made = blocks(store, kind), 0
    for level in range(1, MOST_LEVEL + 1):
        parts_there = {b.index // FANOUT for b in there if b.level == level - 1}
        for index in sorted(parts_there):
            whole = Block(level, index)
            if whole.end > end:
                continue
            parts = whole.parts()
            if whole not in there:
                found = [data for _, data in get_each(store, (b.key(kind) for b in parts))]
                contents = [data for data in found if data is not None]
                if len(contents) < len(parts):
                    continue  # another process has merged them; or a listing is old: next time
                made += store.create(whole.key(kind), join(contents))
                there.add(whole)
            for part in parts:
                if part in there:
                    store.delete(part.key(kind))
                    there.discard(part)
    return made
