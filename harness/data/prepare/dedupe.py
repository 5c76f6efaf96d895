"""Near duplicates among documents: MinHash signatures by the package datasketch, cut into bands.

    shingles     `WORDS` words in a row, of the text in lower case (ids of tokens, where a function
                 gives those)
    signature    `PERMUTATIONS` minima of their hashes; two documents agree in a place with the
                 probability of their Jaccard similarity
    bands        some places each, split as datasketch finds best for the threshold; documents that
                 agree in a whole band are near duplicates
    clusters     connected components; the first document of each is kept, in the order of the
                 sources

Each unit writes the 64-bit hashes of its documents' bands, so what is dropped follows from the
documents and the rule alone, whichever process did which unit.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from harness.core.batch import Uint64s
from harness.core.world import BadInput
from harness.data.card import Int64Array, hash_of
from harness.data.prepare.documents import Document
from harness.data.prepare.units import needed

PERMUTATIONS, WORDS = 128, 5
WEIGHTS = (0.3, 0.7)  # of false positives and of false negatives
AT_ONCE = 4096  # shingles of one batch; memory holds PERMUTATIONS numbers for each
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class NearRule:
    """The parameters of the comparison: `bands` of `rows` places each. `version`: the version of
    datasketch, which decides the hashes."""

    threshold: float
    bands: int
    rows: int
    version: str

    @property
    def words(self) -> str:
        """All that decides the result, as text for the card and the plan."""
        return (
            f"minhash, Jaccard {self.threshold:g} of {WORDS} words in a row, {PERMUTATIONS} "
            f"permutations in {self.bands} bands of {self.rows}, datasketch {self.version}"
        )

    @staticmethod
    def of(threshold: float) -> NearRule:
        """Return the rule for a threshold. Raises BadInput if datasketch is not installed."""
        package = _package()
        made = package.MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS, weights=WEIGHTS)
        return NearRule(threshold, int(made.b), int(made.r), str(package.__version__))


def _package() -> Any:
    return needed("datasketch", "datasketch", "--near-duplicates")


class Sketcher:
    """Maker of the hashes by which documents are compared."""

    def __init__(self, rule: NearRule):
        self._rule = rule
        self._empty = _package().MinHash(
            num_perm=PERMUTATIONS, seed=1, hashfunc=xxhash.xxh32_intdigest
        )

    def keys(self, document: Document) -> bytes:
        """Return the hashes of the document's bands, 8 bytes each. Raises BadInput for a record."""
        found, shingles = self._empty.copy(), _shingles(document)
        while batch := [one for _, one in zip(range(AT_ONCE), shingles, strict=False)]:
            found.update_batch(batch)
        places, rows = np.asarray(found.digest(), "<u8"), self._rule.rows
        bands = (places[i * rows : (i + 1) * rows] for i in range(self._rule.bands))
        return b"".join(hash_of(band.tobytes())[:8] for band in bands)


def _shingles(document: Document) -> Iterator[bytes]:
    """Yield the shingles of a document; one with fewer words than `WORDS` has a single shingle."""
    if isinstance(document, dict):
        raise BadInput("--near-duplicates: wanted texts, found records, which have no words")
    words: list[bytes]
    if isinstance(document, str):
        lower = document.lower()
        words = [word.encode(errors="surrogatepass") for word in _WORD.findall(lower)]
        words = words or [lower.strip().encode(errors="surrogatepass")]
    else:
        words = [str(number).encode() for number in document.tolist()]
    for i in range(max(1, len(words) - WORDS + 1)):
        yield b" ".join(words[i : i + WORDS])


def near_duplicates(
    sketches: Callable[[], Iterable[bytes]], bands: int, nbytes: int, most_nbytes: int
) -> dict[int, Int64Array]:
    """Return the documents to drop, because an earlier one of their cluster is kept: numbers within
    their units, by unit. `sketches`: returns `Sketcher.keys` of each document, unit by unit,
    `nbytes` in all; it is read once for each band, and several times where sorting one would take
    more than `most_nbytes`. Memory holds 16 bytes for each document besides."""
    if nbytes <= most_nbytes // 2:
        held = list(sketches())
        return near_duplicates_of(lambda: held, bands, 1)
    return near_duplicates_of(sketches, bands, max(1, -(-4 * nbytes // bands // most_nbytes)))


def near_duplicates_of(
    sketches: Callable[[], Iterable[bytes]], bands: int, rounds: int
) -> dict[int, Int64Array]:
    """Return the same as `near_duplicates`. `rounds`: passes over the sketches for each band."""
    starts = np.cumsum([0, *(len(data) // (8 * bands) for data in sketches())])
    first = array("q", range(int(starts[-1])))  # its cluster's first, or a link to it
    for band in range(bands):
        for bucket in range(rounds):
            for a, b in _equal(sketches(), starts, bands, band, rounds, bucket):
                low, high = sorted((_root(first, a), _root(first, b)))
                first[high] = low
    dropped = np.flatnonzero(np.array(first, np.int64) != np.arange(len(first)))
    unit = np.searchsorted(starts, dropped, "right") - 1
    return {u: dropped[unit == u] - starts[u] for u in np.unique(unit).tolist()}


def _equal(
    sketches: Iterable[bytes], starts: Int64Array, bands: int, band: int, rounds: int, bucket: int
) -> Iterator[tuple[int, int]]:
    """Yield pairs of documents that are neighbours among those with the same hash in a band."""
    keys, numbers = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for start, data in zip(starts.tolist(), sketches, strict=False):
        found: Uint64s = np.frombuffer(data, "<u8").reshape(-1, bands)[:, band]
        here = np.flatnonzero(found % np.uint64(rounds) == bucket)
        keys.append(found[here])
        numbers.append(start + here)
    key, number = np.concatenate(keys), np.concatenate(numbers)
    order = np.argsort(key, kind="stable")
    same = np.flatnonzero(key[order][1:] == key[order][:-1])
    yield from zip(number[order[same]].tolist(), number[order[same + 1]].tolist(), strict=True)


def _root(first: array[int], i: int) -> int:
    while first[i] != i:
        first[i] = first[first[i]]  # path halving for the next search
        i = first[i]
    return i
