"""Step records: what every optimizer step really consumed, chained by hash. The durable history of
a run.

Pure. Rank 0's session makes them, a snapshot's manifest names them, `harness verify` and the
reports read them. A chain begins at the run's genesis (its identity), so the records of two runs
can never be mixed. The hash is of a record as it was written, so fields of a newer version are
covered by it, and ignored.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.core.fact_lines import is_spelled
from harness.core.values import BadObject, Reading, built, canonical, digest, parsed

SAMPLES = "samples/"  # in a run's bucket: all its step records
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
    # like `digest`, of (position, hash of what was read there): of streams, whose contents nobody
    # can compute, and of a corpus (harness/data), whose index says what they must be
    contents: str = ""
    # The position of its first sample, where steps are not all alike (a trainer that is not ours,
    # whose epochs end with a shorter step); -1: as the batching says
    begins: int = -1

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
        """Without what is empty since it came later than the first records, so that their
        hashes stay."""
        body = dict(vars(self))  # in the fields' order
        if not self.contents:
            del body["contents"]
        if self.begins < 0:
            del body["begins"]
        return body


def _hash(body: Mapping[str, Any]) -> str:
    """Of a record, but for its own."""
    return digest(canonical({name: value for name, value in body.items() if name != "h"}))


@dataclass(frozen=True)
class RecordsRef:
    """What a manifest calls its step records: the object, the hash of its last record, its
    first and last step."""

    key: str
    head: str
    first: int
    last: int


class BrokenRecords(ValueError):
    """A record was changed, lost or does not follow its predecessor; the message names the step."""


def what_digests_prove(identity: Mapping[str, Any]) -> str:
    """Of the run with this run.json: "samples", which anybody can compute; of an iterable dataset
    "contents" (hashes of what was read, which only another run can be compared with), or
    "positions" alone (runs that the first version began)."""
    if identity.get("samples"):
        return "samples"
    return "contents" if records_contents(identity) else "positions"


def records_contents(identity: Mapping[str, Any]) -> bool:
    """Does each record of the run with this run.json have a hash of contents?"""
    return bool(identity.get("contents"))


def is_foreign(identity: Mapping[str, Any]) -> bool:
    """The steps of this run are made by a trainer that is not ours (worker/own_loop.py): each
    record says where in the data it begins, and some have fewer samples than others."""
    return "adapter" in identity


def genesis(identity: Mapping[str, Any]) -> str:
    """The head of the empty chain of the run with this identity (the content of run.json)."""
    return digest(canonical(dict(identity)))


def key(records: list[StepRecord]) -> str:
    """Where one snapshot's records lie in the bucket."""
    return f"{SAMPLES}{records[0].step:010d}-{records[-1].step:010d}-{records[-1].h[:16]}.jsonl"


def heads(keys: Iterable[str]) -> dict[str, str]:
    """Keys of records objects by the first 16 digits of the hash they end with. What else lies
    under `samples/` is not ours."""
    return {found[1]: key for key in keys if (found := NAME.fullmatch(key))}


def named(data: Mapping[str, Any]) -> RecordsRef | None:
    """The records that a manifest's data names; None: none. Raises BrokenRecords if it is no
    name of records."""
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
    """Records of one object, each checked against its own hash and its predecessor's. `exact`: and
    to the byte. Raises BrokenRecords."""
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
