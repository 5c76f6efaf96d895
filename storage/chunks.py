"""Names of chunks: by hash and length."""

from __future__ import annotations

import re

from storage.parts import Part, chunk_hash

CHUNK_ID = re.compile(r"[0-9a-f]{32}-[0-9]{1,12}")


def chunk_id(part: Part, i: int) -> str:
    """The name of chunk `i` of a part in every tier: its hash and its length in bytes."""
    return f"{part.hashes[i]}-{min(part.nbytes - i * part.chunk_nbytes, part.chunk_nbytes)}"


def is_chunk(id: str, data: bytes | memoryview) -> bool:
    return id == f"{chunk_hash(data)}-{len(data)}"
