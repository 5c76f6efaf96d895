"""A record as bytes: named fields of bytes, behind a line that says how long each is.

Pure; nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.core.values import BadObject, canonical, parsed
from harness.data.card import CorpusCorrupt
from storage.json_text import whole


def framed(record: Mapping[str, bytes]) -> bytes:
    """In the fields' order, which is kept."""
    head = canonical([[name, len(value)] for name, value in record.items()])
    return b"".join((head, b"\n", *record.values()))


def unframed(data: bytes) -> dict[str, bytes]:
    """Raises CorpusCorrupt."""
    head, _, body = data.partition(b"\n")
    try:
        rows = parsed(head)
        fields = [(str(name), whole(nbytes, 0)) for name, nbytes in rows]
        if not isinstance(rows, list):
            raise BadObject(f"wanted a list of fields, found {type(rows).__name__}")
    except (BadObject, TypeError, ValueError) as e:
        raise CorpusCorrupt(f"wanted a record as it was prepared, found {data[:40]!r}") from e
    if sum(nbytes for _, nbytes in fields) != len(body):
        raise CorpusCorrupt(f"wanted a record of {fields}, found {len(body)} bytes")
    record, at = {}, 0
    for name, nbytes in fields:
        record[name] = body[at : at + nbytes]
        at += nbytes
    return record
