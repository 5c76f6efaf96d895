"""Data as large as a bucket: corpora that are prepared once and read by random access.

`harness data prepare SOURCES... DEST` makes one; `Tokens` and `Records` read it (docs/DATA.md).
"""

from __future__ import annotations

from harness.core.blocks import Blocks
from harness.data.by_index import ByIndex
from harness.data.card import Card, CorpusCorrupt
from harness.data.encodings import from_litdata, from_mds
from harness.data.mixture import Mixture
from harness.data.reading import Records, Tokens, packed

__all__ = [
    "Blocks",
    "ByIndex",
    "Card",
    "CorpusCorrupt",
    "Mixture",
    "Records",
    "Tokens",
    "from_litdata",
    "from_mds",
    "packed",
]
