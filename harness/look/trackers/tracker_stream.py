"""The stream: everything that is published to W&B, MLflow and TensorBoard about a run, as numbered
rows in its bucket.

    trackers/stream/{number:08d}.jsonl     create-only: one batch; a header line, then its rows

A row is a committed step with the record's values, a sample of operations, or an event
(both of `metric_rows.py`). Publishers make batches; the first one to create number n owns it, and a
batch never changes. So there is exactly one stream even if publishers are killed or run twice, and
a tracker's server is only a copy: it reports how many rows it has and gets the following ones, now
or years later.

A rewind is a batch that begins at a row that already exists: the rows from there on are void. It
happens when published steps are redone from an older snapshot. The batch repeats those void rows
that are not steps (`again`), since they did happen.

This module knows records, snapshots and facts, but no tracker.
"""

from __future__ import annotations

import dataclasses
import heapq
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from harness.core import step_records as rec
from harness.core.decoding import Reading
from harness.core.world import BadInput
from harness.look.trackers.committed_steps import committed, newest
from harness.look.trackers.metric_rows import EventWatermark, Operations
from harness.look.trackers.stream_objects import (
    EVENT,
    OPS,
    START,
    STEP,
    STREAM,
    WALL,
    Batch,
    BatchHeader,
    StreamRow,
    batch_key,
    decode_batch,
    encode_batch,
    newest_batch,
)
from harness.look.trackers.tracker_registry import RunInfo, metrics
from storage.canonical_json import BadObject
from storage.errors import NotFound
from storage.snapshots.manifest import Ref
from storage.stores.objects import ObjectStore

log = logging.getLogger("harness.look.trackers.trackers")

MAX_STEPS = 5_000  # per batch; bounds memory when a publisher starts late
FILL_S = 60.0  # most time to compute rows of operations for a period without a publisher
MOST_EVENTS = 10_000  # per batch; the rest comes with the next one
MOST_AGAIN = 10_000  # rows of operations that a rewind repeats; if there were more, evenly thinned


def read(store: ObjectStore, number: int) -> Batch:
    """Read one batch. Raise NotFound, StoreError, or BadInput if it is not a batch."""
    data = store.get(batch_key(number))
    try:
        return decode_batch(data, number)
    except BadObject as e:
        raise BadInput(
            f"{batch_key(number)}: wanted a batch of the stream, found another object ({e}); it "
            "was changed"
        ) from e


def newest_header(store: ObjectStore) -> BatchHeader | None:
    """Return the newest batch's header; `None`: no batch yet. Raise StoreError, BadInput."""
    number = newest_batch(store.list(STREAM))
    return read(store, number)[0] if number >= 0 else None


def live(store: ObjectStore, number: int, down_to_row: int = 0) -> Iterator[Batch]:
    """Yield the batches up to `number`, newest first, with the rows that no later rewind made void.
    Stop after the batch that holds `down_to_row`."""
    limit: float = math.inf
    for n in range(number, -1, -1):
        header, rows = read(store, n)
        kept = [row for row in rows if row.number < limit]
        if kept:
            yield header, kept
        limit = min(limit, header.first_row)
        if limit <= down_to_row:
            return


def rows_from(store: ObjectStore, number: int, first_row: int = 0) -> Iterator[StreamRow]:
    """Yield every valid row from `first_row` on, in order, up to batch `number`. Raise StoreError,
    BadInput."""
    # two passes over the bucket, so that memory does not grow with the run's length
    spans = [(h.number, len(rows)) for h, rows in live(store, number, first_row)]
    for batch, count in reversed(spans):
        yield from (row for row in read(store, batch)[1][:count] if row.number >= first_row)


def every_row(store: ObjectStore) -> Iterator[StreamRow]:
    """Return an iterator over every valid row, in order. Raise StoreError, BadInput."""
    found = newest_header(store)
    return rows_from(store, found.number) if found else iter(())


@dataclass
class StreamWriter:
    """The writer of one run's stream. Any number of writers may follow the same run."""

    store: ObjectStore
    info: RunInfo
    operations: Operations
    ops_every_s: float = 30.0  # between two rows of operations
    min_batch_s: float = 0.0  # between two batches, except the last
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.header: BatchHeader | None = None
        self._looked = False
        self._wrote_s = -math.inf

    def round(self, last: bool = False) -> bool:
        """Write the rows that are due; with `last`, all. Return whether the run is done and the
        stream has all of it. Raise StoreError, BadInput, BrokenRecords."""
        if last or self.now() - self._wrote_s >= self.min_batch_s:
            while self._one(last):
                pass
        return bool(self.header and self.header.end == "done")

    def _one(self, last: bool) -> bool:
        """Write one batch if one is due. Return whether there may be more to write at once."""
        self._catch_up()
        before = self.header
        self.operations.poll()
        if before is None:
            # a separate first row, so that a rewind of all steps has a row to go back to
            t = self.operations.started_s(self.now())
            self._create(BatchHeader(0, 0, 1, started_s=t), [StreamRow(0, START, t, _moment(t, t))])
            return True
        records, final, keep = self._steps(before)
        more = len(records) >= MAX_STEPS
        first_row = before.end_row
        again: list[StreamRow] = []
        if keep is not None:
            again = [
                dataclasses.replace(row, again=True)
                for _, rows in live(self.store, before.number, keep.end_row)
                for row in rows
                if row.kind != STEP and row.number >= keep.end_row
            ]
            again = again[:: len(again) // MOST_AGAIN + 1]
            first_row = keep.end_row
        known = keep if keep is not None else before
        started_s = before.started_s
        rows = [_step_row(r, started_s) for r in records]
        end = "" if more else self.operations.end(final)
        due = last or bool(records) or end != before.end
        alerts = self.operations.alerts(before.alerts)
        samples = self._samples(before, due and not more, bool(end))
        events, heard = self._events(before, (due and not more) or bool(samples))
        snapshots = self.operations.snapshots(before.newest)
        exports = self.operations.exports(before.exported)
        new = (rows, samples, events, again, alerts, snapshots, exports)
        if not any(new) and end == before.end:
            return False
        others = sorted([*samples, *events, *again], key=lambda row: row.t)
        # steps keep their order even if a node's clock was set back
        rows = list(heapq.merge(rows, others, key=lambda row: row.t))
        tail = records[-1] if records else None
        best, waits = _best(known.best, ((r.step, r.metrics) for r in records)), known.best_waits
        if best != known.best:
            waits = max(int(pair[1]) for name, pair in best.items() if pair != known.best.get(name))
        best = _best(best, ((row.step, row.values) for row in (*again, *events) if row.step))
        best_snapshot = next((n for n in snapshots if 0 < waits <= Ref.parse(n).step), "")
        header = BatchHeader(
            number=before.number + 1,
            first_row=first_row,
            rows=len(rows),
            last_step=tail.step if tail else known.last_step,
            head=tail.h if tail else known.head,
            epoch=tail.epoch if tail else known.epoch,
            ops_t=samples[-1].t if samples else before.ops_t,
            facts=self.operations.known if samples else before.facts,
            started_s=started_s,
            end=end,
            best=best,
            best_snapshot=best_snapshot,
            best_waits=0 if best_snapshot else waits,
            snapshots=tuple(snapshots),
            newest=snapshots[-1] if snapshots else before.newest,
            alerts=(*before.alerts, *(a.id for a in alerts))[-1000:],
            new_alerts=tuple(dataclasses.asdict(a) for a in alerts),
            exported=(*before.exported, *(e.id for e in exports))[-1000:],
            new_exports=tuple(dataclasses.asdict(e) for e in exports),
            heard=dict(heard.by),
            heard_floor_s=heard.floor_s,
        )
        self._create(header, rows)
        return more

    def _catch_up(self) -> None:
        """Read up to the newest batch, whichever publisher wrote it."""
        if not self._looked:
            self.header, self._looked = newest_header(self.store), True
        while True:
            try:
                self.header = read(self.store, self.header.number + 1 if self.header else 0)[0]
            except NotFound:
                return

    def _create(self, header: BatchHeader, rows: Iterable[StreamRow]) -> None:
        if self.store.create(batch_key(header.number), encode_batch(header, rows)):
            self.header, self._wrote_s = header, self.now()
            log.info("stream: %d rows, up to step %d", header.end_row, header.last_step)
        else:  # another publisher owns this number; its batch is just as valid
            self._catch_up()

    def _steps(self, before: BatchHeader) -> tuple[list[rec.StepRecord], bool, BatchHeader | None]:
        """Return the next committed steps, whether they reach the end of a finished run, and the
        batch that they follow if steps of the stream were redone (`None`: they were not)."""
        last = before.last_step
        records, final = committed(self.store, self.info, last + 1, MAX_STEPS)
        if not last:
            return records, final, None
        if records:
            if records[0].prev == before.head:
                return records, final, None
        else:
            found = newest(self.store)
            if found is None or found.head == before.head or found.epoch <= before.epoch:
                # nothing new, or published steps were quarantined and are not redone yet
                return [], final, None
        keep = self._last_true(before)
        log.warning(
            "stream: steps from %d on were redone after they were published; the stream is rewound",
            keep.last_step + 1,
        )
        return (*committed(self.store, self.info, keep.last_step + 1, MAX_STEPS), keep)

    def _last_true(self, before: BatchHeader) -> BatchHeader:
        """Return the header of the newest batch whose steps are all in the lineage of the newest
        snapshot. The first row of the stream is always kept."""
        for header, _ in live(self.store, before.number):
            if not header.last_step:
                return header
            there, _ = committed(self.store, self.info, header.last_step, 1)
            if there and there[0].step == header.last_step and there[0].h == header.head:
                return header
        raise BadInput(
            f"{batch_key(0)}: wanted the first row of the stream, found none; it was changed"
        )

    def _samples(self, before: BatchHeader, due: bool, over: bool) -> list[StreamRow]:
        """Return rows of operations for now and, if there was no publisher for a while, for the
        moments since the newest row."""
        now, since = self.now(), before.ops_t or before.started_s
        due = due or now - since >= self.ops_every_s
        if not due or (over and self.operations.known == before.facts):
            return []
        moments = self.operations.moments(since, now, 2.5 * self.ops_every_s, over)
        rows: list[StreamRow] = []
        spent_s = 0.0
        for t in moments:
            # the past is filled in for at most FILL_S; the newest row is always made
            if t > since and (spent_s < FILL_S or t == moments[-1]):
                values = {**_moment(t, before.started_s), **self.operations.values(t)}
                rows.append(StreamRow(0, OPS, t, values))
                spent_s += self.operations.cost_s
        return rows

    def _events(self, before: BatchHeader, due: bool) -> tuple[list[StreamRow], EventWatermark]:
        """Return a row for each event that is not in the stream yet, and the new progress."""
        heard = EventWatermark(before.heard, before.heard_floor_s)
        if not due:
            return [], heard
        new = self.operations.happened(heard)[:MOST_EVENTS]
        rows = [
            StreamRow(0, EVENT, one.t, {**_moment(one.t, before.started_s), **one.values}, one.step)
            for one in new
        ]
        return rows, heard.after(new)


def _moment(t: float, started_s: float) -> dict[str, Reading]:
    """Return the x axes that all rows share."""
    return {WALL: t - started_s, "time/unix": t}


def _step_row(r: rec.StepRecord, started_s: float) -> StreamRow:
    values = {"train/step": r.step, **_moment(r.t, started_s), "train/step_s": r.dt}
    values |= {_in_section(name): value for name, value in metrics(r).items()}
    return StreamRow(0, STEP, r.t, values, r.step)


def _in_section(name: str) -> str:
    """Return `name` with a section, which decides its x axis: "val_loss" -> "val/loss"."""
    if "/" in name:
        return name if name.split("/")[0] in ("train", "val") else f"train/{name}"
    return f"val/{name[4:]}" if name.startswith("val_") and name[4:] else f"train/{name}"


def _best(
    known: dict[str, tuple[float, ...]], told: Iterable[tuple[int, Mapping[str, float]]]
) -> dict[str, tuple[float, ...]]:
    """Return the lowest value of each loss and its step. `told`: new metrics by step."""
    best = dict(known)
    for step, values in told:
        for name, value in values.items():
            if "loss" in name and math.isfinite(value) and value < best.get(name, (math.inf,))[0]:
                best[name] = (value, step)
    return best
