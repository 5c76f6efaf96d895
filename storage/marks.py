"""Marks beside snapshots: why a run ended with one, why one is not used, who doubts one.

Pure. A mark's key says all that decides anything; what lies in it is for people. So a mark that is
empty, damaged or somebody else's is a mark all the same, and decoding never fails.
"""

from __future__ import annotations

from typing import Any

from storage.json_text import BadObject, canonical, parsed
from storage.parts import Ref

LONGEST = 4000  # letters of a reason
MOST_NBYTES = 64 << 10


def mark(ref: Ref, why: str, **more: Any) -> bytes:
    """As it lies in the bucket."""
    return canonical({"ref": ref.name, **more, "why": why[:LONGEST]})


def why_of(data: bytes, unsaid: str) -> str:
    """The reason that a mark gives; `unsaid`: what is told of one that gives none."""
    try:
        body = parsed(data, most_nbytes=MOST_NBYTES)
    except BadObject:
        return unsaid
    why = body.get("why") if isinstance(body, dict) else None
    return why[:LONGEST] if isinstance(why, str) and why.strip() else unsaid
