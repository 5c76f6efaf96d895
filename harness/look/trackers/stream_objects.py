"""The data for trackers and their progress: the objects under `trackers/` besides plain batches.

Pure. A batch of the stream (`tracker_stream.py`) is a header and its rows, a line of JSON each. The
rules of decoding are in `core/decoding.py`; batches and claims of other trackers are in
`layout.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

from harness.bucket.layout import SMALL_NBYTES, TRACKERS
from harness.core.decoding import Count, Natural, Reading, Within, built, decoded
from harness.look.alerts.alert_log import Alert
from storage.canonical_json import MOST_INT, BadObject, canonical, parsed
from storage.snapshots.manifest import Ref

STREAM = f"{TRACKERS}stream/"
BATCH_NBYTES = 256 << 20  # thousands of rows; a line has the bound of all objects, 1 MiB
STEP, OPS, EVENT, START = "step", "ops", "event", "start"
WALL = "time/wall_s"  # in every row: seconds since the run began

_BATCH = re.compile(r"trackers/stream/(\d{8,12})\.jsonl")
OrNone = Annotated[int, Within(-1, MOST_INT)]  # a number of a batch; -1: none


# ---- keys ----------------------------------------------------------------------------------------
def batch_key(number: int) -> str:
    return f"{STREAM}{number:08d}.jsonl"


def newest_batch(keys: Iterable[str]) -> int:
    """Return the newest batch number among the keys under `trackers/stream/`; -1 if there is
    none."""
    return max((int(found[1]) for key in keys if (found := _BATCH.fullmatch(key))), default=-1)


# ---- the stream ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class StreamRow:
    """One row. `number`: its place in the stream. `step`: the committed step, or 0 for none."""

    number: Natural
    kind: str
    t: float  # wall clock
    values: dict[str, Reading]
    step: Natural = 0
    again: bool = False  # repeated: it was in a batch that a rewind made void


@dataclass(frozen=True)
class ExportRow:
    """An export of a snapshot's weights, as in `facts.SnapshotExported`."""

    id: str
    step: Natural
    epoch: Natural
    files: tuple[str, ...] = ()
    tensors: Natural = 0
    nbytes: Natural = 0
    dtype: str = ""


@dataclass(frozen=True)
class BatchHeader:
    """The header of a batch, with the stream's state after it: the newest header is all that a
    publisher needs. `best`: metric -> (value, step); for losses the lowest."""

    number: Natural
    first_row: Natural
    rows: Natural
    last_step: Natural = 0  # newest committed step in the stream; 0: none
    head: str = ""  # hash of that step's record
    epoch: Natural = 0  # generation of that record
    ops_t: float = 0.0  # time of the newest row of operations
    facts: Natural = 0  # number of facts that this row is based on
    started_s: float = 0.0  # start of the run, wall clock: `time/wall_s` counts from here
    end: str = ""  # "done" | "failed" | "stopped": the run has ended, and the stream is complete
    best: dict[str, tuple[float, ...]] = field(default_factory=dict)
    snapshots: tuple[str, ...] = ()  # newly committed ones: "0000000012-e000002"
    newest: str = ""  # newest snapshot in the stream
    best_snapshot: str = ""  # in this batch: the first snapshot after the lowest validation loss
    best_waits: Natural = 0  # step of the lowest validation loss, while no snapshot holds it
    alerts: tuple[str, ...] = ()  # ids of the newest thousand alerts in the stream
    new_alerts: tuple[dict[str, Any], ...] = ()
    exported: tuple[str, ...] = ()  # ids of the newest thousand exports in the stream
    new_exports: tuple[dict[str, Any], ...] = ()
    # time watermark of published events by writer (shortened); `heard_floor_s` for other writers
    heard: dict[str, float] = field(default_factory=dict)
    heard_floor_s: float = 0.0
    version: Count = 1

    @property
    def end_row(self) -> int:
        """Number of the row after the batch's last."""
        return self.first_row + self.rows

    def told_alerts(self) -> list[Alert]:
        """Build `new_alerts`. Raises BadObject, but never for a decoded header."""
        return [built(Alert, body) for body in self.new_alerts]

    def told_exports(self) -> list[ExportRow]:
        """Build `new_exports`. Raises BadObject, but never for a decoded header."""
        return [built(ExportRow, body) for body in self.new_exports]

    @classmethod
    def decode(cls, line: bytes, number: int) -> BatchHeader:
        """Decode the header of batch `number`. Raises BadObject."""
        found = decoded(cls, line)
        if found.number != number:
            raise BadObject(f"wanted batch {number}, found batch {found.number}")
        if any(len(pair) != 2 for pair in found.best.values()):
            raise BadObject("best: wanted a value and a step each")
        found.told_alerts(), found.told_exports()
        try:
            for name in (*found.snapshots, found.newest, found.best_snapshot):
                if name:
                    Ref.parse(name)
        except ValueError as e:
            raise BadObject(f"wanted names of snapshots: {e}") from None
        return found


Batch = tuple[BatchHeader, list[StreamRow]]


def decode_batch(data: bytes, number: int) -> Batch:
    """Decode batch `number`, and number its rows. Raises BadObject."""
    if len(data) > BATCH_NBYTES:
        raise BadObject(f"wanted at most {BATCH_NBYTES} bytes, found {len(data)}")
    first, *lines = data.split(b"\n") if data else [b""]
    header = BatchHeader.decode(first, number)
    if lines and not lines[-1]:
        del lines[-1]
    if len(lines) != header.rows:
        raise BadObject(f"wanted {header.rows} rows, found {len(lines)}")
    return header, [_row(line, header.first_row + i) for i, line in enumerate(lines)]


def _row(line: bytes, number: int) -> StreamRow:
    body = parsed(line)
    row = built(StreamRow, {**body, "number": number} if isinstance(body, dict) else body)
    if not math.isfinite(row.values.get(WALL, math.nan)):
        raise BadObject(f"row {number}: wanted {WALL} as a finite number")
    return row


def encode_batch(header: BatchHeader, rows: Iterable[StreamRow]) -> bytes:
    lines = [json.dumps(dataclasses.asdict(header))]
    for row in rows:
        usual = {"step": row.step, "again": row.again}
        body = {"kind": row.kind, "t": row.t, **{k: v for k, v in usual.items() if v}}
        lines.append(json.dumps({**body, "values": row.values}))
    return ("\n".join(lines) + "\n").encode()


# ---- progress of trackers ------------------------------------------------------------------------
@dataclass(frozen=True)
class WandbWatermark:
    """The known progress of W&B: it has all rows up to the end of `batch`, `rows` in number.
    `again`: W&B runs that were abandoned before this one. `ended`: the batch that ended it; -1: it
    goes on. `rewound`: W&B has applied the stream's rewinds up to this batch."""

    batch: OrNone = -1
    rows: Natural = 0
    again: Natural = 0
    ended: OrNone = -1
    rewound: OrNone = -1

    @classmethod
    def decode(cls, data: bytes) -> WandbWatermark:
        """Decode the progress. Raises BadObject."""
        return decoded(cls, data, most_nbytes=SMALL_NBYTES)

    def encode(self, project: str, run_id: str) -> bytes:
        """Encode the progress. `project` and `run_id` are for people."""
        said = {"version": 1, "project": project, "run_id": run_id}
        return canonical({**said, **dataclasses.asdict(self)})


@dataclass(frozen=True)
class WandbNodesWatermark:
    """The known progress of W&B's runs of nodes: all up to `batch`. `rows`: number of rows by node.
    `ended`: exit codes of the nodes that are gone."""

    batch: OrNone = -1
    rows: dict[str, Natural] = field(default_factory=dict)
    ended: dict[str, Natural] = field(default_factory=dict)

    @classmethod
    def decode(cls, data: bytes) -> WandbNodesWatermark:
        """Decode the progress. Raises BadObject."""
        return decoded(cls, data)

    def encode(self) -> bytes:
        return canonical({"version": 1, **dataclasses.asdict(self)})


def mlflow_run_of(data: bytes) -> str:
    """Return the id of the MLflow run of a generation of the stream. Raises BadObject."""
    found = parsed(data, most_nbytes=SMALL_NBYTES)
    run_id = found.get("run_id") if isinstance(found, dict) else None
    if not isinstance(run_id, str) or not re.fullmatch(r"[\w-]{1,64}", run_id, re.ASCII):
        raise BadObject(f"wanted the id of an MLflow run, found {run_id!r:.40}")
    return run_id
