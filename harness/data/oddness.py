"""How odd a sample is beside others of its corpus, by a simple score that needs no model.

Five numbers are made of a segment: how far zlib shrinks it, the share of what is neither a letter
nor a space, the share of its most frequent token, how rare its tokens are in the corpus (bits, the
mean), and its size in bytes (as a logarithm). Each is compared with its median over segments from
all over the split, in median absolute deviations; the oddness is the greatest of these distances.
Segments are of one length, so a document that fills a part of a window is seen.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.core.batch import Int64s
from harness.data.describing import decoder_of
from harness.data.reading import Records, Tokens

SEGMENT_TOKENS = 256
SEGMENT_NBYTES = 64 << 10  # of a record, from its beginning
REFERENCE = 256  # items that others are compared with, from all over the split
# of a median: what is nearly the same everywhere makes nothing odd by a hair
LEAST_SHARE, LEAST = 0.05, 0.01
NAMES = (
    "zlib leaves {:.0%} of its bytes",
    "{:.0%} of it are neither letters nor spaces",
    "{:.0%} of it are one token",
    "{:.1f} bits of rarity in a token",
    "2^{:.1f} bytes",
)


@dataclass(frozen=True)
class Oddness:
    """`score`: how many usual distances from the usual; `why`: in words; `start`, `end`: which of
    the split's tokens, or which records."""

    score: float
    why: str
    start: int
    end: int


@dataclass(frozen=True)
class _Segment:
    start: int
    end: int
    ids: NDArray[Any]
    text: str


class Oddities:
    """What is usual in a split. The dataset should leave nothing out. Raises CorpusCorrupt,
    StoreError."""

    def __init__(self, dataset: Tokens | Records):
        self._segments = (
            _of_tokens(dataset) if isinstance(dataset, Tokens) else _of_records(dataset)
        )
        count = min(REFERENCE, len(dataset))
        items = sorted({len(dataset) * k // count for k in range(count)})
        known: list[_Segment] = []
        for start in range(0, len(items), 16):
            dataset.read_ahead(items[start : start + 16])
            known += (s for i in items[start : start + 16] for s in self._segments(i))
        most = max((int(s.ids.max(initial=0)) for s in known), default=0)
        self._counts: Int64s = np.zeros(most + 2, np.int64)
        for segment in known:
            self._counts[:-1] += np.bincount(segment.ids, minlength=most + 1)
        rows = np.array([self._measured(segment) for segment in known])
        self._usual = np.median(rows, axis=0)
        far = 1.4826 * np.median(np.abs(rows - self._usual), axis=0)
        self._spread = np.maximum(far, LEAST_SHARE * np.abs(self._usual) + LEAST)

    def of(self, item: int) -> Oddness:
        """Of the oddest segment of an item."""
        return max(map(self._judged, self._segments(item)), key=lambda found: found.score)

    def _judged(self, segment: _Segment) -> Oddness:
        row = self._measured(segment)
        far = np.abs(row - self._usual) / self._spread
        worst = int(far.argmax())
        usual = NAMES[worst].format(self._usual[worst])
        why = f"{NAMES[worst].format(row[worst])}; usual: {usual}"
        return Oddness(float(far[worst]), why, segment.start, segment.end)

    def _measured(self, segment: _Segment) -> NDArray[np.float64]:
        """(5,): see the module."""
        raw, text = segment.text.encode(errors="surrogatepass"), segment.text
        strange = sum(not (letter.isalpha() or letter.isspace()) for letter in text)
        counts = np.bincount(segment.ids)
        known = self._counts[np.minimum(segment.ids, len(self._counts) - 1)]
        rare = np.log2((self._counts.sum() + len(self._counts)) / (known + 1))
        row = (
            len(zlib.compress(raw)) / max(1, len(raw)),
            strange / max(1, len(text)),
            counts.max(initial=0) / max(1, len(segment.ids)),
            rare.mean() if len(rare) else 0.0,
            math.log2(1 + len(raw)),
        )
        return np.array(row)


def _of_tokens(tokens: Tokens) -> Callable[[int], Iterator[_Segment]]:
    """Segments of a window's inputs; what is left behind the last whole one belongs to it."""
    decode = decoder_of(tokens.card)

    def segments(item: int) -> Iterator[_Segment]:
        ids = tokens[item][0]
        cuts: Sequence[int] = [*range(0, len(ids) - SEGMENT_TOKENS + 1, SEGMENT_TOKENS)] or [0]
        for cut, end in zip(cuts, [*cuts[1:], len(ids)], strict=True):
            here, start = ids[cut:end], item * tokens.length
            yield _Segment(start + cut, start + end, here, decode(here.tolist()))

    return segments


def _of_records(records: Records) -> Callable[[int], Iterator[_Segment]]:
    def segments(item: int) -> Iterator[_Segment]:
        raw = b"".join(records[item].values())[:SEGMENT_NBYTES]
        ids = np.frombuffer(raw, np.uint8).astype(np.int64)
        yield _Segment(item, item + 1, ids, raw.decode("latin-1"))

    return segments
