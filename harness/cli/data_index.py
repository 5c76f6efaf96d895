"""`harness data index`: read files of others once, so that they can be read where they lie."""

from __future__ import annotations

import os
from dataclasses import dataclass

from harness.cli.common import DONE
from harness.core.config import flag, positional
from storage.opening import normalize
from storage.text import Console

LAYOUTS = ("mds", "litdata", "megatron", "tar", "parquet", "tokens")
DTYPES = ("uint16", "uint32", "uint8", "int16", "int32", "int64")


@dataclass(frozen=True)
class IndexFlags:
    source: str = positional(
        "a folder, a glob or a file, on this computer or in a bucket: MDS, LitData, Megatron's "
        ".bin and .idx, WebDataset's tar, Parquet, nanoGPT's .bin; nothing is written there"
    )
    url: str = positional("DEST: URL of the index to make, a corpus without data of its own")
    format: str = flag("", "of the files; default: it is found out", choices=["", *LAYOUTS])
    eos: int = flag(
        -1, "id of the token that ends each document, for boundaries", metavar="ID", at_least=-1
    )
    dtype: str = flag("", "of tokens without a header; default: uint16", choices=["", *DTYPES])
    licence: str = flag("", "what the card says of the licence")
    jobs: int = flag(0, "files read at once; 0: two for each processor", at_most=1024)
    chunk_kib: int = flag(
        0, "what is read and checked at once; 0: 256, of Parquet 4096", at_most=1 << 18
    )


def index(flags: IndexFlags) -> int:
    """Make an index of files of others, to read them where they lie; goes on if interrupted."""
    from harness.cli.data import bytes_bar, print_card
    from harness.data.formats.seam import IndexSettings
    from harness.data.indexing import IndexPlan, make_index

    settings = IndexSettings(flags.format, flags.eos, flags.dtype, flags.chunk_kib << 10)
    plan, console = IndexPlan.of(flags.source, settings), Console()
    jobs = flags.jobs or 2 * (os.cpu_count() or 1)
    with bytes_bar(console) as watch:
        card = make_index(normalize(flags.url), plan, licence=flags.licence, jobs=jobs, watch=watch)
    print_card(card, normalize(flags.url), console)
    return DONE
