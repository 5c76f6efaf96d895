"""Step records: the samples that every optimizer step really consumed, chained by hash. They are
the durable history of a run.

Pure. Rank 0's session makes them, a snapshot's manifest names them, `harness prove verify` and the
reports read them. A chain begins at the run's genesis (its identity), so the records of two runs
can never be mixed. The hash covers a record as it was written, including fields of a newer version,
which readers ignore.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from harness.core.decoding import Reading, built
from harness.core.facts import StepDone, is_spelled
from storage.canonical_json import BadObject, canonical, digest, parsed

SAMPLES = "samples/"  # prefix of all step records in a run's bucket
NAME = re.compile(rf"{SAMPLES}\d{{10,}}-\d{{10,}}-([0-9a-f]{{16}})\.jsonl")


@dataclass(frozen=True)
class StepRecord:
    """One optimizer update. `digest`: 64-bit sum of batch.sample_hash over the samples really
    loaded, 16 hex digits."""

    step: int
    epoch: int
    world: int  # ranks
    shares: tuple[int, ...]  # micro-batches per replica (a rank, if replicas have one)
    samples: int  # really consumed, summed over the replicas
    digest: str
    weight: Reading  # what the gradients were divided by: samples, or valid tokens
    loss: Reading  # weighted mean over the global batch
    lr: Reading
    t: float  # wall clock at its end
    dt: float  # seconds
    metrics: dict[str, Reading] = field(default_factory=dict)
    prev: str = ""
    h: str = ""
    # Like `digest`, but over (position, hash of the contents read there). Used for streams, whose
    # contents nobody can compute, and for a corpus (harness/data), whose index defines them.
    contents: str = ""
    # Position of the first sample where steps are not all alike (a foreign trainer, whose epochs
    # end with a shorter step); -1: the position follows from the batching.
    begins: int = -1
    skipped: str = ""  # why the guards have skipped the update; "": they have not
    # Samples of a micro-batch, if memory ran out with the run's; 0: it was the run's.
    micro_batch: int = 0
    # The script's training that made it (bucket/phases.py), and the first 16 digits of the hash of
    # that phase's identity; "" in the first phase, whose identity the chain begins with.
    phase: int = 1
    identity: str = ""

    @property
    def replica_ranks(self) -> int:
        """Ranks that held one copy of the model together."""
        return self.world // len(self.shares) if self.shares else 1

    def chained(self, prev: str) -> StepRecord:
        body = self._body() | {"prev": prev}
        return dataclasses.replace(self, prev=prev, h=_hash(body))

    def hash(self) -> str:
        return _hash(self._body())

    def to_line(self) -> str:
        return json.dumps(self._body(), separators=(",", ":"))

    def _body(self) -> dict[str, Any]:
        """Return the fields to write. Fields that were added after the first records are left out
        when they are empty, so that old hashes stay valid."""
        body = dict(vars(self))  # in the fields' order
        if not self.contents:
            del body["contents"]
        if self.begins < 0:
            del body["begins"]
        if not self.skipped:
            del body["skipped"]
        if not self.micro_batch:
            del body["micro_batch"]
        if self.phase == 1:
            del body["phase"], body["identity"]
        return body


def _hash(body: Mapping[str, Any]) -> str:
    """Return the hash of a record's body without its own `h`."""
    return digest(canonical({name: value for name, value in body.items() if name != "h"}))


@dataclass(frozen=True)
class RecordsRef:
    """A manifest's reference to its step records: the object, the hash of its last record, and its
    first and last step."""

    key: str
    head: str
    first: int
    last: int


class BrokenRecords(ValueError):
    """A record was changed or lost, or does not follow its predecessor; the message names the
    step."""


def what_digests_prove(identity: Mapping[str, Any]) -> str:
    """Return what the digests of the run with this run.json prove: "samples", which anybody can
    recompute; for an iterable dataset "contents" (hashes of what was read, comparable only with
    another run)."""
    return "samples" if identity.get("samples") else "contents"


def records_contents(identity: Mapping[str, Any]) -> bool:
    """Return whether each record of the run with this run.json has a hash of contents."""
    return bool(identity.get("contents"))


def is_foreign(identity: Mapping[str, Any]) -> bool:
    """Return whether a foreign trainer makes the steps of this run (loops/own_loop.py): each
    record then has its first position in the data, and some have fewer samples than others."""
    return "adapter" in identity


def genesis(identity: Mapping[str, Any]) -> str:
    """Return the head of a run's empty chain. `identity`: the content of run.json."""
    return digest(canonical(dict(identity)))


def key(records: list[StepRecord]) -> str:
    """Return the bucket key of one snapshot's records."""
    return f"{SAMPLES}{records[0].step:010d}-{records[-1].step:010d}-{records[-1].h[:16]}.jsonl"


def heads(keys: Iterable[str]) -> dict[str, str]:
    """Return the keys of records objects by the first 16 digits of the hash of their last record.
    Other objects under `samples/` are not ours and are skipped."""
    return {found[1]: key for key in keys if (found := NAME.fullmatch(key))}


def named(data: Mapping[str, Any]) -> RecordsRef | None:
    """Return the reference to records in a manifest's data, or None if it has none. Raises
    BrokenRecords if it is malformed."""
    found = data.get("samples")
    if not found:
        return None
    try:
        return built(RecordsRef, found)
    except BadObject as e:
        raise BrokenRecords(
            f"the manifest's data: wanted the name of step records, found {found!r:.100} ({e})"
        ) from e


def encode(records: Iterable[StepRecord]) -> bytes:
    return "".join(r.to_line() + "\n" for r in records).encode()


def decode(data: bytes, where: str, exact: bool = False) -> list[StepRecord]:
    """Return the records of one object, each checked against its own hash and its predecessor's.
    `exact`: compare the spelling byte by byte as well. Raises BrokenRecords."""
    records: list[StepRecord] = []
    lines = data.decode(errors="replace").splitlines()
    spelled = not exact or "".join(line + "\n" for line in lines).encode() == data
    for number, line in enumerate(lines, 1):
        try:
            body = parsed(line)
            spelled = spelled and (not exact or is_spelled(body, line.encode()))
            record = built(StepRecord, body)
            found = digest(canonical({k: v for k, v in body.items() if k != "h"}))
        except BadObject as e:
            raise BrokenRecords(f"{where}, line {number}: not a step record ({e})") from e
        if found != record.h:
            raise BrokenRecords(
                f"{where}, step {record.step}: the record was changed (its hash does not fit)"
            )
        if records and (record.prev != records[-1].h or record.step != records[-1].step + 1):
            raise BrokenRecords(
                f"{where}, step {record.step}: does not follow step {records[-1].step}"
            )
        records.append(record)
    if exact and not (spelled and records):
        raise BrokenRecords(
            f"{where}: wanted records as they were written, found another spelling; it was changed"
        )
    return records


# Many steps as one array: the numbers that a report needs of each, in 48 bytes per step.

# `start`, `end`: wall clock, seconds; `seconds`: duration as measured by the writer; `epoch`: the
# generation
ROW = np.dtype(
    [
        ("epoch", "<i8"),
        ("step", "<i8"),
        ("loss", "<f8"),
        ("start", "<f8"),
        ("end", "<f8"),
        ("seconds", "<f8"),
    ]
)
Columns: TypeAlias = NDArray[Any]  # of ROW
NONE: Columns = np.empty(0, ROW)


@dataclass(frozen=True)
class Committed:
    """The part of a chain of step records that views need. `worlds`: (ranks, shares) by generation
    (the code's `epoch`). `metrics`: metrics by step, without the gradient norm."""

    rows: Columns
    worlds: dict[int, tuple[int, tuple[int, ...]]]
    metrics: dict[int, dict[str, float]]

    @classmethod
    def of(cls, records: Iterable[StepRecord]) -> Committed:
        found = list(records)
        return cls(
            of_records(found),
            {r.epoch: (r.world, tuple(r.shares)) for r in found},
            {r.step: named for r in found if (named := metrics_of(r))},
        )


def metrics_of(record: StepRecord) -> dict[str, float]:
    return {name: value for name, value in record.metrics.items() if name != "grad_norm"}


def of_facts(steps: Iterable[StepDone]) -> Columns:
    """Return rows of steps as reported live, in the same order."""
    rows = [
        (s.epoch, s.step, s.loss, s.t_start, s.t_start + max(0.0, s.seconds), s.seconds)
        for s in steps
    ]
    return np.array(rows, ROW) if rows else NONE


def of_records(records: Iterable[StepRecord]) -> Columns:
    """Return rows of committed steps, in the same order."""
    rows = [(r.epoch, r.step, r.loss, r.t - r.dt, r.t, r.dt) for r in records]
    return np.array(rows, ROW) if rows else NONE


def from_bytes(data: bytes, start: int = 0) -> Columns:
    """Return the rows that `tobytes` wrote, from byte `start` on."""
    return np.frombuffer(data, ROW, offset=start) if len(data) > start else NONE


def joined(parts: Iterable[Columns]) -> Columns:
    """Concatenate all parts."""
    found = [part for part in parts if len(part)]
    if len(found) == 1:
        return found[0]
    return np.concatenate(found) if found else NONE


def newest_told(rows: Columns) -> Columns:
    """Return the rows sorted by (epoch, step) without duplicates: of several rows the one that
    began last is kept (a loop that runs again in the same session reports its steps again)."""
    if _is_ascending(rows):
        return rows
    order = np.lexsort((rows["start"], rows["step"], rows["epoch"]))
    epochs, steps = rows["epoch"][order], rows["step"][order]
    last = np.ones(len(rows), bool)
    last[:-1] = (epochs[1:] != epochs[:-1]) | (steps[1:] != steps[:-1])
    found: Columns = rows[order[last]]
    return found


def _is_ascending(rows: Columns) -> bool:
    """Return whether rows are sorted by (epoch, step) without duplicates."""
    epochs, steps = rows["epoch"], rows["step"]
    later = (epochs[1:] == epochs[:-1]) & (steps[1:] > steps[:-1])
    return bool((later | (epochs[1:] > epochs[:-1])).all())


def without(rows: Columns, others: Columns) -> Columns:
    """Return the rows whose (epoch, step) is not in `others`, in their order."""
    if not len(rows) or not len(others):
        return rows
    both = (rows, others)
    wide = any(p["epoch"].max() >= 2**23 or p["step"].max() >= 2**40 for p in both)
    mine, theirs = _names(rows, wide), _names(others, wide)
    if wide or not (theirs[1:] > theirs[:-1]).all():
        return rows[~np.isin(mine, theirs)]
    at = np.searchsorted(theirs, mine)  # `theirs` is sorted, so this is much faster than isin
    found: Columns = rows[theirs[at.clip(max=len(theirs) - 1)] != mine]
    return found


def in_both(a: Columns, b: Columns) -> tuple[Columns, Columns]:
    """Return the rows of `a` and of `b` whose (epoch, step) is in both, in order. Neither may have
    duplicates."""
    if not len(a) or not len(b):
        return NONE, NONE
    wide = any(p["epoch"].max() >= 2**23 or p["step"].max() >= 2**40 for p in (a, b))
    found = np.intersect1d(_names(a, wide), _names(b, wide), return_indices=True)
    return a[found[1]], b[found[2]]


def _names(rows: Columns, wide: bool) -> NDArray[Any]:
    """Return (epoch, step) of each row as one number, or as a pair if `wide`."""
    if not wide:
        small: NDArray[Any] = rows["epoch"] * 2**40 + rows["step"]
        return small
    found: NDArray[Any] = np.empty(len(rows), [("epoch", "<i8"), ("step", "<i8")])
    found["epoch"], found["step"] = rows["epoch"], rows["step"]
    return found
