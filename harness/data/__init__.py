"""Data as large as a bucket: corpora that are prepared once and read by random access.

`harness data prepare SOURCES... DEST` makes one; `Tokens` and `Records` read it (docs/DATA.md).
"""

from __future__ import annotations

from harness.core.sample_order import Blocks
from harness.data.card import Card, CorpusCorrupt
from harness.data.datasets import ByIndex, Records, Tokens, packed
from harness.data.encodings import from_litdata, from_mds
from harness.data.mixture import Mixture

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
