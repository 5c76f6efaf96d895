"""The renderer of the stream to TensorBoard event files, one or two per batch, in the bucket.

    trackers/tensorboard/train/events.out.tfevents.{batch:08d}.spotharness   steps
    trackers/tensorboard/ops/events.out.tfevents.{batch:08d}.spotharness     operations, by seconds
                                                                             since the run began

TensorBoard reads files in the order of their names. Every publisher writes the same content, so a
file needs no owner. Redone steps hide their earlier values (`purge_step`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.bucket.layout import TRACKERS
from harness.look.trackers.stream_objects import STEP, WALL, StreamRow
from harness.look.trackers.tracker_stream import newest_header, read
from storage.stores.objects import ObjectStore

FOLDER = f"{TRACKERS}tensorboard/"


@dataclass
class TensorBoard:
    """The renderer of the stream's new batches."""

    store: ObjectStore
    name = "tensorboard"

    def __post_init__(self) -> None:
        self._next: int | None = None
        self._end_row = 0

    def round(self, last: bool = False) -> bool:
        """Render the new batches. Return whether the run is done and all of it is rendered. Raise
        StoreError, BadInput."""
        newest = newest_header(self.store)
        if newest is None:
            return False
        if self._next is None:
            there = [k for k in self.store.list(FOLDER) if k.endswith(".spotharness")]
            self._next = max((int(k.split(".")[-2]) for k in there), default=-1) + 1
            self._end_row = read(self.store, self._next - 1)[0].end_row if self._next else 0
        while self._next <= newest.number:
            header, rows = read(self.store, self._next)
            rewound = header.first_row < self._end_row
            steps = [row for row in rows if row.kind == STEP]
            ops = [row for row in rows if row.kind != STEP and not row.again]
            # in this order, since the newest name in either folder records the progress
            self._write("train", steps, steps[0].step if rewound and steps else None)
            self._write("ops", ops, None)
            self._next, self._end_row = self._next + 1, header.end_row
        return newest.end == "done"

    def close(self) -> None:
        """Close nothing, since nothing is open."""

    def _write(self, which: str, rows: Sequence[StreamRow], purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not rows:
            return
        with tempfile.TemporaryDirectory(prefix="harness-tracker-") as folder:
            with SummaryWriter(folder, purge_step=purge_step) as writer:
                for row in rows:
                    step = row.step or int(row.values[WALL])
                    for key, value in row.values.items():
                        if not key.startswith("time/"):
                            writer.add_scalar(key, value, step, walltime=row.t)
            (path,) = Path(folder).iterdir()
            name = f"events.out.tfevents.{self._next:08d}.spotharness"
            self.store.put(f"{FOLDER}{which}/{name}", path.read_bytes())
