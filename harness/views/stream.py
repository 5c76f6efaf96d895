"""The stream: everything that W&B, MLflow and TensorBoard are told of a run, as numbered rows in
its bucket.

    trackers/stream/{number:08d}.jsonl     create-only: one batch; a header line, then its rows

A row is a committed step with the record's values, a sample of operations (`operations.py`) at a
moment, or something that happened (`events.py`). The publisher makes batches, whoever creates
number n first owns it, and nobody changes one later. So the stream exists once, whatever is killed
or doubled, and a tracker's server is only a copy: it is asked how many rows it has, and is told the
ones behind them, now or years later.

A rewind is a batch that begins at a row which exists already: the rows from there on are void. It
happens when steps that were published are redone from an older snapshot. The batch holds the
other rows among the void ones again (`again`), since those did happen.

Knows records, snapshots and facts; knows no tracker.
"""

from __future__ import annotations

import dataclasses
import heapq
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from harness.bucket.streamed import (
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
from harness.core import records as rec
from harness.core.values import BadObject, Reading
from harness.core.world import BadInput
from harness.views.committed import committed, newest
from harness.views.events import ToldSoFar
from harness.views.operations import Operations
from harness.views.plugins import RunInfo, metrics
from storage.errors import NotFound
from storage.manifest import Ref
from storage.objects import ObjectStore

log = logging.getLogger("harness.views.trackers")

MAX_STEPS = 5_000  # per batch; bounds memory when a publisher comes late
FILL_S = 60.0  # to compute rows of operations for a time without a publisher
MOST_EVENTS = 10_000  # of one batch; the rest comes with the next one
MOST_AGAIN = 10_000  # rows of operations that a rewind tells again: evenly, if there were more


def read(store: ObjectStore, number: int) -> Batch:
    """One batch. Raises NotFound, StoreError, BadInput."""
    data = store.get(batch_key(number))
    try:
        return decode_batch(data, number)
    except BadObject as e:
        raise BadInput(
            f"{batch_key(number)}: wanted a batch of the stream, found another object ({e}); it "
            "was changed"
        ) from e


def newest_header(store: ObjectStore) -> BatchHeader | None:
    """How far the stream is. Raises StoreError, BadInput."""
    number = newest_batch(store.list(STREAM))
    return read(store, number)[0] if number >= 0 else None


def live(store: ObjectStore, number: int, down_to_row: int = 0) -> Iterator[Batch]:
    """The batches up to `number` with the rows that no later rewind made void, newest first, until
    the one that holds `down_to_row`."""
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
    """Every row that counts from `first_row` on, in order, up to batch `number`. Raises
    StoreError, BadInput."""
    # two passes over the bucket, so that no run is too long for this machine's memory
    spans = [(h.number, len(rows)) for h, rows in live(store, number, first_row)]
    for batch, count in reversed(spans):
        yield from (row for row in read(store, batch)[1][:count] if row.number >= first_row)


def whole(store: ObjectStore) -> Iterator[StreamRow]:
    """Every row that counts, in order. Raises StoreError, BadInput."""
    found = newest_header(store)
    return rows_from(store, found.number) if found else iter(())


@dataclass
class StreamWriter:
    """Brings one run's stream up to date. Any number of them may follow the same run."""

    store: ObjectStore
    info: RunInfo
    operations: Operations
    ops_every_s: float = 30.0  # between two rows of operations
    min_batch_s: float = 0.0  # between two batches, unless all is due
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.header: BatchHeader | None = None
        self._looked = False
        self._wrote_s = -math.inf

    def round(self, last: bool = False) -> bool:
        """Write what is due. `last`: all is. Is everything of a run that has ended in the
        stream? Raises StoreError, BadInput, BrokenRecords."""
        if last or self.now() - self._wrote_s >= self.min_batch_s:
            while self._one(last):
                pass
        return bool(self.header and self.header.end == "done")

    def _one(self, last: bool) -> bool:
        """One batch. True: there may be more to do at once."""
        self._catch_up()
        before = self.header
        self.operations.poll()
        if before is None:
            # a row of its own, so that a rewind of all steps has one to go back to
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
        # steps stay in their order, also where a node's clock was set back
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
        """To the newest batch, whoever wrote it."""
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
        else:  # another publisher owns this number; what it wrote is as good
            self._catch_up()

    def _steps(self, before: BatchHeader) -> tuple[list[rec.StepRecord], bool, BatchHeader | None]:
        """Committed steps that follow, whether they go to the end of a finished run, and after
        which batch they follow if steps in the stream were redone (None: they were not)."""
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
                # nothing new; or published steps were quarantined, and nobody has redone them yet
                return [], final, None
        keep = self._last_true(before)
        log.warning(
            "stream: steps from %d on were redone after they were published; the stream is rewound",
            keep.last_step + 1,
        )
        return (*committed(self.store, self.info, keep.last_step + 1, MAX_STEPS), keep)

    def _last_true(self, before: BatchHeader) -> BatchHeader:
        """The newest batch whose steps are all in the lineage of the newest snapshot; at least
        the first row of the stream stays."""
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
        """Rows of operations: now, and at what happened since the newest one, if nobody was here
        to tell it."""
        now, since = self.now(), before.ops_t or before.started_s
        due = due or now - since >= self.ops_every_s
        if not due or (over and self.operations.known == before.facts):
            return []
        moments = self.operations.moments(since, now, 2.5 * self.ops_every_s, over)
        rows: list[StreamRow] = []
        spent_s = 0.0
        for t in moments:
            # the past is filled in as far as that takes no age; the newest row is always there
            if t > since and (spent_s < FILL_S or t == moments[-1]):
                values = {**_moment(t, before.started_s), **self.operations.values(t)}
                rows.append(StreamRow(0, OPS, t, values))
                spent_s += self.operations.cost_s
        return rows

    def _events(self, before: BatchHeader, due: bool) -> tuple[list[StreamRow], ToldSoFar]:
        """What happened and is not told, each in a row at its own moment."""
        heard = ToldSoFar(before.heard, before.heard_floor_s)
        if not due:
            return [], heard
        new = self.operations.happened(heard)[:MOST_EVENTS]
        rows = [
            StreamRow(0, EVENT, one.t, {**_moment(one.t, before.started_s), **one.values}, one.step)
            for one in new
        ]
        return rows, heard.after(new)


def _moment(t: float, started_s: float) -> dict[str, Reading]:
    """The x axes that all rows share."""
    return {WALL: t - started_s, "time/unix": t}


def _step_row(r: rec.StepRecord, started_s: float) -> StreamRow:
    values = {"train/step": r.step, **_moment(r.t, started_s), "train/step_s": r.dt}
    values |= {_in_section(name): value for name, value in metrics(r).items()}
    return StreamRow(0, STEP, r.t, values, r.step)


def _in_section(name: str) -> str:
    """Sections decide the x axis, so every name has one: "val_loss" -> "val/loss"."""
    if "/" in name:
        return name if name.split("/")[0] in ("train", "val") else f"train/{name}"
    return f"val/{name[4:]}" if name.startswith("val_") and name[4:] else f"train/{name}"


def _best(
    known: dict[str, tuple[float, ...]], told: Iterable[tuple[int, Mapping[str, float]]]
) -> dict[str, tuple[float, ...]]:
    """The lowest of every validation loss, and at which step it was. `told`: by step."""
    best = dict(known)
    for step, values in told:
        for name, value in values.items():
            if "loss" in name and math.isfinite(value) and value < best.get(name, (math.inf,))[0]:
                best[name] = (value, step)
    return best
