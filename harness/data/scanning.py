"""Documents of a split of a corpus: all of them one after the other, or the one around a token.

What exclusion lists leave out is here as well, since its bytes are. Holds one document and a block
of a few MiB at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from harness.core.world import BadInput
from harness.data.card import DTYPES, TOKENS, Card
from harness.data.corpus import CorpusReader
from harness.data.reading import Records
from harness.data.tokenizing import TokenIds, Tokenizer, tokenizer_of

BLOCK_NBYTES = 4 << 20  # of a scan
AROUND = 4096  # tokens that are looked at together, around one


class TokenRow:
    """The tokens of a split as one row, ends of documents among them. Raises BadInput,
    CorpusCorrupt, StoreError."""

    def __init__(self, url: str, split: str):
        self._reader = CorpusReader(url, split, TOKENS)
        self.card = self._reader.card
        self._dtype = DTYPES[self.card.dtype]
        if self.card.eos < 0:
            raise BadInput(
                f"{url}: wanted a corpus that says where its documents end, found that it does not"
            )

    def __len__(self) -> int:
        return self._reader.split.items

    def read(self, start: int, end: int) -> TokenIds:
        """The tokens [start, end)."""
        size = self._dtype.itemsize
        here = start * size, end * size
        self._reader.chunks.ahead([here])
        return np.frombuffer(self._reader.chunks.read(*here), self._dtype)

    def documents(self) -> Iterator[tuple[int, TokenIds]]:
        """(first token, ids without the end) of each, in order."""
        block, held, begin = BLOCK_NBYTES // self._dtype.itemsize, list[TokenIds](), 0
        for start in range(0, len(self), block):
            tokens, at = self.read(start, min(start + block, len(self))), 0
            for end in np.flatnonzero(tokens == self.card.eos).tolist():
                held.append(tokens[at:end])
                yield begin, np.concatenate(held)
                held, at, begin = [], end + 1, start + end + 1
            held.append(tokens[at:])
        if begin < len(self):  # files of others need not end with an end
            yield begin, np.concatenate(held)

    def around(self, token: int) -> tuple[int, int]:
        """[start, end) of the document in which this token lies; its end belongs to it. Raises
        BadInput."""
        if not 0 <= token < len(self):
            raise BadInput(f"token {token}: wanted 0 to {len(self) - 1}")
        low, start = token, 0
        while low and not start:
            before = max(0, low - AROUND)
            ends = np.flatnonzero(self.read(before, low) == self.card.eos)
            start, low = before + int(ends[-1]) + 1 if len(ends) else 0, before
        for high in range(token, len(self), AROUND):
            ends = np.flatnonzero(self.read(high, min(high + AROUND, len(self))) == self.card.eos)
            if len(ends):
                return start, high + int(ends[0])
        return start, len(self)


def tokenizer_here(card: Card, what: str) -> Tokenizer:
    """The corpus' own. Raises BadInput if it is not on this computer. `what`: who needs it."""
    found = tokenizer_of(card.tokenizer, str(card.eos))
    if found.hash != card.tokenizer_hash:
        raise BadInput(
            f"{what}: wanted the tokenizer {card.tokenizer} of the corpus "
            f"({card.tokenizer_hash}), found another of that name here ({found.hash})"
        )
    return found


def each_record(records: Records) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, fields) of each, in order; nothing must be decoded or left out of `records`."""
    size = records.block_items
    for start in range(0, len(records), size):
        here: Sequence[int] = range(start, min(start + size, len(records)))
        records.read_ahead(here)
        yield from ((i, records[i]) for i in here)
