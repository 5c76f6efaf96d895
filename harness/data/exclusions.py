"""Exclusion lists: what a corpus leaves out, though its bytes remain. They are numbered objects
beside the card, and each includes all of the one before it.

    excluded/00000001.json      create-only and never changed; the newest is in force

A list has ranges [start, end) of a split's tokens, or of its records. The corpus and its digest
stay as they are, so a run continues with a longer list; nothing else moves (datasets.py says what
is read instead). Each list names the hash of the one before it. Pure except for numpy and the store
that it is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from harness.core.batch import Uint64s, sample_hash
from harness.core.decoding import Natural, built
from harness.core.world import BadInput
from harness.data.card import (
    FORMAT,
    MOST_CARD_NBYTES,
    TOKENS,
    Card,
    CorpusCorrupt,
    Int64Array,
    hash_of,
)
from storage.canonical_json import BadObject, canonical, digest, parsed
from storage.errors import NotFound
from storage.stores.objects import ObjectStore

EXCLUDED = "excluded/"
NEWEST = -1  # stands for a list's number; 0 is the empty list, which every corpus has
TRIES = 16  # attempts at a number that nobody else takes at the same time
_KEY = re.compile(rf"{EXCLUDED}(\d{{8}})\.json")
_NONE = np.zeros((0, 2), np.int64)


@dataclass(frozen=True)
class ExclusionList:
    """An exclusion list. `content`: that of the corpus' card. `before`: hash of the previous list.
    `splits`: by name, pairs (start, end), ascending and disjoint."""

    number: Natural = 0
    content: str = ""
    before: str = ""
    splits: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    reason: str = ""
    format: int = FORMAT
    hash: str = ""

    def ranges(self, split: str) -> Int64Array:
        """Return the ranges that are left out of this split, (n, 2)."""
        return np.array(self.splits.get(split, ()), np.int64).reshape(-1, 2)

    def count(self, split: str) -> int:
        """Return how many tokens or records are left out of this split."""
        return int(np.diff(self.ranges(split)).sum())

    def sealed(self) -> ExclusionList:
        body = asdict(self)
        del body["hash"]
        return replace(self, hash=digest(canonical(body)))

    def with_more(self, more: Mapping[str, Int64Array], reason: str) -> ExclusionList:
        """Return the next list: this one and more ranges."""
        splits = {
            name: tuple(
                map(tuple, merged_ranges([*self.ranges(name), *more.get(name, _NONE)]).tolist())
            )
            for name in sorted({*self.splits, *more})
        }
        made = replace(self, number=self.number + 1, before=self.hash, splits=splits, reason=reason)
        return made.sealed()


# ---- where they lie ------------------------------------------------------------------------------
def list_of(store: ObjectStore, card: Card, number: int = NEWEST) -> ExclusionList:
    """Return a list of this corpus. Raises BadInput if none has that number, CorpusCorrupt,
    StoreError."""
    if number == NEWEST:
        number = max(_numbers(store), default=0)
    if number == 0:
        return ExclusionList(content=card.content)
    key = exclusion_key(number)
    try:
        data = store.get(key)
    except NotFound:
        raise BadInput(
            f"{store.url}: wanted the exclusion list {number}, found no {key}; all that trains or "
            "proves a run must see the same corpus"
        ) from None
    try:
        found = built(ExclusionList, parsed(data, most_nbytes=MOST_CARD_NBYTES, finite=True))
        rows = np.concatenate([_NONE, *map(found.ranges, found.splits)])
    except (BadObject, TypeError, ValueError) as e:
        raise CorpusCorrupt(f"{store.url}/{key}: wanted an exclusion list, found {e}") from e
    if found.format > FORMAT:
        raise CorpusCorrupt(f"{store.url}/{key}: it is of a newer format; update the package here")
    fits = found.number == number and found.content == card.content and (rows[:, 0] >= 0).all()
    if found.sealed().hash != found.hash or not fits:
        raise CorpusCorrupt(
            f"{store.url}/{key}: wanted list {number} of the corpus {card.content}, found one that "
            "was changed or is of another corpus; restore it"
        )
    return found


def history(store: ObjectStore, card: Card) -> list[ExclusionList]:
    """Return all lists, from the empty one on; each has all of the one before. Raises
    CorpusCorrupt, StoreError."""
    found = [list_of(store, card, 0)]
    for number in range(1, max(_numbers(store), default=0) + 1):
        try:
            found.append(list_of(store, card, number))
        except BadInput as e:
            raise CorpusCorrupt(str(e)) from e
        here, before = found[-1], found[-2]
        shrunk = [name for name in before.splits if not _covers(here, before, name)]
        if here.before != before.hash or shrunk:
            raise CorpusCorrupt(
                f"{store.url}/{exclusion_key(number)}: wanted a list that follows list "
                f"{number - 1} and has all of it, found another; restore it"
            )
    return found


def exclude(
    store: ObjectStore, card: Card, more: Mapping[str, Int64Array], reason: str = ""
) -> ExclusionList:
    """Add these ranges (n, 2) by split, and return the newest list; it is a new one unless the
    ranges were excluded already. Raises BadInput if nothing would be left of a split,
    CorpusCorrupt, StoreError."""
    if card.kind == TOKENS and card.eos < 0:
        raise BadInput(
            f"{store.url}: wanted a corpus that says which token ends a document, found none; "
            "index it again with --eos"
        )
    for _ in range(TRIES):
        newest = list_of(store, card)
        made = newest.with_more(more, reason)
        if made.splits == newest.splits:
            return newest
        for name in more:
            split = card.split(name)
            gone = made.count(name)
            ends = split.documents if split is not None and card.kind == TOKENS else 0
            if split is None or gone >= split.items - ends:
                raise BadInput(
                    f"{store.url}: wanted something left of the split {name!r}, found that all of "
                    "it would be excluded; name less"
                )
        if store.create(exclusion_key(made.number), canonical(asdict(made))):
            return made
    raise BadInput(f"{store.url}: others exclude documents all the time; try again later")


def exclusion_key(number: int) -> str:
    return f"{EXCLUDED}{number:08d}.json"


def _numbers(store: ObjectStore) -> list[int]:
    return [int(found[1]) for key in store.list(EXCLUDED) if (found := _KEY.fullmatch(key))]


def _covers(here: ExclusionList, before: ExclusionList, name: str) -> bool:
    both = merged_ranges([*here.ranges(name), *before.ranges(name)])
    return bool(np.array_equal(both, here.ranges(name)))


# ---- ranges --------------------------------------------------------------------------------------
def merged_ranges(ranges: Iterable[Sequence[int] | Int64Array]) -> Int64Array:
    """Return the ranges as (n, 2), ascending; overlapping or adjacent ones merged, empty ones
    dropped."""
    rows = np.array([*ranges], np.int64).reshape(-1, 2)
    rows = rows[rows[:, 1] > rows[:, 0]]
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    if not len(rows):
        return _NONE
    reach = np.maximum.accumulate(rows[:, 1])
    first = np.append(True, rows[1:, 0] > reach[:-1])
    last = np.append(first[1:], True)
    return np.stack([rows[first, 0], reach[last]], axis=1)


def marked(ranges: Int64Array, start: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return a mask of which of [start, end) lie in the ranges, (end - start,)."""
    out = np.zeros(end - start, np.bool_)
    first = int(np.searchsorted(ranges[:, 1], start, "right"))
    last = int(np.searchsorted(ranges[:, 0], end, "left"))
    for low, high in ranges[first:last].tolist():
        out[max(low - start, 0) : high - start] = True
    return out


def instead(items: Int64Array, void: Int64Array, count: int) -> Int64Array:
    """Return the item that is read for each of `items` (0 to `count` - 1), same shape: itself, or
    the next one outside the ranges of `void`; after the last comes the first."""
    if not len(void):
        return items
    at = np.searchsorted(void[:, 1], items, "right")
    inside = at < len(void)
    inside[inside] = void[at[inside], 0] <= items[inside]
    out = items.copy()
    out[inside] = void[at[inside], 1]
    first = int(void[0, 1]) if void[0, 0] == 0 else 0
    return np.where(out >= count, first, out)


def hashed_anew(
    contents: Int64Array, ranges: Int64Array, begins: Int64Array, ends: Int64Array
) -> Int64Array:
    """Return the hashes of windows [begin, end), (n,), changed where ranges leave out a part of a
    window, so that each hash covers what a reader got."""
    first = np.searchsorted(ranges[:, 1], begins, "right")
    last = np.searchsorted(ranges[:, 0], ends, "left")
    out = contents.copy()
    for i in np.flatnonzero(last > first).tolist():
        here = ranges[first[i] : last[i]]
        within = np.clip(here, begins[i], ends[i]) - begins[i]
        what = hash_of(within.astype("<i8").tobytes())[:8]
        mark: Uint64s = np.frombuffer(what, "<u8")
        out[i] = sample_hash(contents[i : i + 1], mark.view(np.int64)).view(np.int64)[0]
    return out
