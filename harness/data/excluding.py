"""What a corpus leaves out, though its bytes still lie there: numbered lists beside the card, each
with all of the one before it.

    excluded/00000001.json      create-only and never changed; the newest counts

A list has ranges [start, end) of a split's tokens, or of its records. The corpus and its digest
stay as they are, so a run goes on with a longer list; nothing else moves (reading.py says what
comes instead). Each names the hash of the one before it. Pure but for numpy and the store it is
given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from harness.core.batch import Uint64s, sample_hash
from harness.core.values import BadObject, Natural, built, canonical, digest, parsed
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
from storage.errors import NotFound
from storage.objects import ObjectStore

EXCLUDED = "excluded/"
NEWEST = -1  # instead of a list's number; 0 is the empty list, that all corpora have
TRIES = 16  # at a number that nobody else takes at the same time
_KEY = re.compile(rf"{EXCLUDED}(\d{{8}})\.json")
_NONE = np.zeros((0, 2), np.int64)


@dataclass(frozen=True)
class ExclusionList:
    """`content`: of the corpus' card. `before`: hash of the list before it. `splits`: by name,
    pairs (start, end), ascending and apart from each other."""

    number: Natural = 0
    content: str = ""
    before: str = ""
    splits: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    reason: str = ""
    format: int = FORMAT
    hash: str = ""

    def ranges(self, split: str) -> Int64Array:
        """(n, 2): what is left out of this split."""
        return np.array(self.splits.get(split, ()), np.int64).reshape(-1, 2)

    def count(self, split: str) -> int:
        """How many are left out of this split."""
        return int(np.diff(self.ranges(split)).sum())

    def sealed(self) -> ExclusionList:
        body = asdict(self)
        del body["hash"]
        return replace(self, hash=digest(canonical(body)))

    def with_more(self, more: Mapping[str, Int64Array], reason: str) -> ExclusionList:
        """The list behind this one."""
        splits = {
            name: tuple(map(tuple, joined([*self.ranges(name), *more.get(name, _NONE)]).tolist()))
            for name in sorted({*self.splits, *more})
        }
        made = replace(self, number=self.number + 1, before=self.hash, splits=splits, reason=reason)
        return made.sealed()


# ---- where they lie ------------------------------------------------------------------------------
def list_of(store: ObjectStore, card: Card, number: int = NEWEST) -> ExclusionList:
    """A list of this corpus. Raises BadInput if there is none of that number, CorpusCorrupt,
    StoreError."""
    if number == NEWEST:
        number = max(_numbers(store), default=0)
    if number == 0:
        return ExclusionList(content=card.content)
    key = list_key(number)
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
    """All lists from the empty one on; each has all of the one before. Raises CorpusCorrupt,
    StoreError."""
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
                f"{store.url}/{list_key(number)}: wanted a list that follows list "
                f"{number - 1} and has all of it, found another; restore it"
            )
    return found


def exclude(
    store: ObjectStore, card: Card, more: Mapping[str, Int64Array], reason: str = ""
) -> ExclusionList:
    """The newest list, with these ranges (n, 2) by split: a new one, unless it has them already.
    Raises BadInput if nothing would be left of a split, CorpusCorrupt, StoreError."""
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
        if store.create(list_key(made.number), canonical(asdict(made))):
            return made
    raise BadInput(f"{store.url}: others exclude documents all the time; try again later")


def list_key(number: int) -> str:
    return f"{EXCLUDED}{number:08d}.json"


def _numbers(store: ObjectStore) -> list[int]:
    return [int(found[1]) for key in store.list(EXCLUDED) if (found := _KEY.fullmatch(key))]


def _covers(here: ExclusionList, before: ExclusionList, name: str) -> bool:
    both = joined([*here.ranges(name), *before.ranges(name)])
    return bool(np.array_equal(both, here.ranges(name)))


# ---- ranges --------------------------------------------------------------------------------------
def joined(ranges: Iterable[Sequence[int] | Int64Array]) -> Int64Array:
    """(n, 2), ascending; those that overlap or touch as one, empty ones left out."""
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
    """Which of [start, end) lie in the ranges, (end - start,)."""
    out = np.zeros(end - start, np.bool_)
    first = int(np.searchsorted(ranges[:, 1], start, "right"))
    last = int(np.searchsorted(ranges[:, 0], end, "left"))
    for low, high in ranges[first:last].tolist():
        out[max(low - start, 0) : high - start] = True
    return out


def instead(items: Int64Array, void: Int64Array, count: int) -> Int64Array:
    """What each of the items 0 to `count` - 1 is, same shape: itself, or the next one that is in no
    range of `void`; behind the last comes the first."""
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
    """Hashes of windows [begin, end), (n,), where part of a window is left out: with that, so that
    each hash says what a reader got."""
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
