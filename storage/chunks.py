"""Names of chunks: by hash and length."""

from __future__ import annotations

import re

from storage.parts import BLAKE3, HASH, Part, is_hash_of

CHUNK_ID = re.compile(HASH + "-[0-9]{1,12}")

# what may come from a peer: others may have made other bytes with the same old hash
PEER_CHUNK_ID = re.compile(re.escape(BLAKE3) + "[0-9a-f]{32}-[0-9]{1,12}")


def chunk_id(part: Part, i: int) -> str:
    """The name of chunk `i` of a part in every tier: its hash and its length in bytes."""
    return f"{part.hashes[i]}-{min(part.nbytes - i * part.chunk_nbytes, part.chunk_nbytes)}"


def is_chunk(id: str, data: bytes | memoryview) -> bool:
    wanted, _, nbytes = id.rpartition("-")
    return nbytes == str(len(data)) and is_hash_of(wanted, data)
