"""What trackers were told, in an audit: the stream's batches, each by itself (`prove`), then its
steps against their records.

Pure but for the store it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.bucket.recorded import RecordsPart
from harness.bucket.streamed import STEP, STREAM, batch_key, decode_batch, newest_batch
from harness.bucket.volumes import sealed, unsealed
from harness.core.columns import Columns
from harness.core.values import BadObject
from harness.views.audit_rules import RuleBroken
from harness.views.proving import Prover
from storage.objects import ObjectStore

LOSS = "train/loss"
_OWN = {"loss", LOSS}  # of a script that names a number of its own so, nothing can be said
_ROW = np.dtype([("step", "<i8"), ("t", "<f8"), ("loss", "<f8")])


def prove(key: str, data: bytes, context: str) -> bytes:
    """Of one batch: where its rows begin and end, and its steps; or why it is none."""
    number = newest_batch([key])
    try:
        header, rows = decode_batch(data, number)
    except BadObject as e:
        violation = (
            f"{key}: wanted a batch of the stream, found another object ({e}); it was changed"
        )
        return sealed({"violation": violation}, (), b"")
    steps = [(r.step, r.t, r.values[LOSS]) for r in rows if r.kind == STEP and LOSS in r.values]
    head = {"violation": "", "first": header.first_row, "end": header.end_row}
    return sealed(head, (), np.array(steps, _ROW).tobytes())


def check_stream(
    store: ObjectStore, prover: Prover, parts: Sequence[RecordsPart], recorded: Columns
) -> tuple[int, str]:
    """`parts`: of the run's line, whose steps are `recorded`. Raises RuleBroken, StoreError."""
    own = [step for part in parts for step, named in part.metrics if not _OWN.isdisjoint(named)]
    count, rows = newest_batch(store.list(STREAM)) + 1, 0
    end = 0
    for key, proof in prover.each(store, map(batch_key, range(count)), prove, ""):
        if proof is None:
            raise RuleBroken(f"{key}: missing, but later batches follow from it")
        head, _, body = unsealed(proof, key)
        if head["violation"]:
            raise RuleBroken(head["violation"])
        if head["first"] > end:
            raise RuleBroken(
                f"{key}: wanted rows from {end} on, or a rewind to an earlier one; found them from "
                f"{head['first']} on"
            )
        end = head["end"]
        rows += _check_batch(key, np.frombuffer(body, _ROW), own, recorded)
    return rows, "of the stream, with the losses of their records"


def _check_batch(key: str, told: Columns, own: Sequence[int], recorded: Columns) -> int:
    """A step that was done again ended at another time."""
    steps = told["step"]
    told = told[(steps > 0) & (steps <= len(recorded)) & ~np.isin(steps, own)]
    records = recorded[told["step"] - 1]
    same = (records["end"] == told["t"]) & (records["step"] == told["step"])
    told, records = told[same], records[same]
    right = (told["loss"] == records["loss"]) | (np.isnan(told["loss"]) & np.isnan(records["loss"]))
    if not right.all():
        row, record = (each[int(np.argmin(right))] for each in (told, records))
        raise RuleBroken(
            f"{key}: wanted the loss {record['loss']} of the record of step {row['step']}, found "
            f"{row['loss']}"
        )
    return len(told)
