"""Formats of others, read where they lie: a small file for each, behind one seam (`seam.py`)."""

from __future__ import annotations

from harness.data.formats.litdata import LITDATA
from harness.data.formats.mds import MDS
from harness.data.formats.parquet import PARQUET
from harness.data.formats.seam import ForeignFormat
from harness.data.formats.tar import TAR
from harness.data.formats.token_files import MEGATRON, TOKEN_FILES

# in the order in which they are looked for: those that an index.json names come first
FORMATS: dict[str, ForeignFormat] = {
    one.name: one for one in (MDS, LITDATA, MEGATRON, TAR, PARQUET, TOKEN_FILES)
}
