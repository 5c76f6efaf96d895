"""Carries staged snapshots to the bucket, outside of the trainer: hashing, parts in bounded
parallel, part list, commit, prune. No torch.

An `Uploader` takes `UploadJob`s whose bytes lie in host memory (`staging.Segment`) and reports an
`UploadOutcome` of each, once. It may run in the trainer's process or, better, in one of its own
that outlives the trainer. Parts of older snapshots go first. When a deadline is set (`drain`), what
is surest goes first, and what is not written when time is up is given up, so that the last word
said of it is true. Without one it watches the training's steps, where it is told how, and sends no
faster than they allow (`pacing.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tenacity import (
    RetryCallState,
    retry,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential,
)

from storage.errors import StoreError, StoreUnavailable
from storage.lanes import Ahead, Lanes, Running
from storage.last_in_line import LastInLine
from storage.leases import Watch
from storage.manifest import Manifest, Ref
from storage.objects import ObjectStore
from storage.pacing import Pacer, TrainingWatch
from storage.parts import chunk_hash
from storage.retention import Keep
from storage.snapshots import Snapshots
from storage.throttle import LEAST_STEPS, slowdown
from storage.upload_job import Forecast, UploadJob, UploadOutcome, forecast
from storage.weights import combined, weights_sum

LANES = 4  # parts on their way at once
SEEN_STEPS = 8  # of the training, the newest beside any sending
COMMIT_TIMEOUT_S = 600.0  # the longest wait for the other ranks' shares
POLITE_S = 10.0  # of a world of many ranks, so long the first rank of each group merges it
GIVE_UP_BEFORE_S = 0.5  # the deadline: time to say so

CommitCheck = Callable[[Ref], None]  # raises when a snapshot may no longer be committed


class OutOfTime(StoreError):
    """A drain's deadline came first."""


class Uploader:
    """Threads of one process. `check(ref)` raises when a snapshot may not be committed (a newer
    epoch exists).

    `on_outcome(job, outcome)` is told from a thread of ours, before `done` of `submit` is, and
    before old snapshots are pruned.
    """

    def __init__(
        self,
        store: ObjectStore,
        check: CommitCheck = lambda ref: None,
        on_outcome: Callable[[UploadJob, UploadOutcome], None] = lambda job, outcome: None,
        lanes: int = LANES,
        line: LastInLine | None = None,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
        watch: TrainingWatch = lambda where: None,
    ):
        self.store, self.snapshots, self._check, self._on_outcome = (
            store,
            Snapshots(store),
            check,
            on_outcome,
        )
        self._commit_timeout_s, line = commit_timeout_s, line or LastInLine()
        self._lock = threading.Lock()
        self._running: dict[int, Running] = {}
        self._numbers = itertools.count()
        self._lanes = Lanes(lanes, line)
        self._pacer = Pacer(self._lanes, self._sending, watch, line)
        # of the training beside us, over undisturbed ones: a sending may see too few to tell
        self._steps_x: deque[float] = deque(maxlen=SEEN_STEPS)
        self._deadline_s: float | None = None  # monotonic
        self._base, self._hashes = _Base(self.snapshots), _Hashes(self.snapshots)
        self._leases = Watch()

    def submit(
        self,
        job: UploadJob,
        view: memoryview,
        done: Callable[[UploadOutcome], None],
        expect: Callable[[Forecast | None], None] = lambda forecast: None,
    ) -> None:
        """Returns at once. `view`: the segment's bytes, which must not change until `done` is told.
        `done` is called exactly once. `expect` is told what to expect before anything is sent."""
        with self._lock:
            one = Running(job, view, done, next(self._numbers), job.nbytes, time.monotonic())
            self._running[one.number] = one
        expect(self._plan())
        self._pacer.begin(one)
        threading.Thread(
            target=self._run, args=(one,), name=f"upload-{job.ref}", daemon=True
        ).start()

    def busy(self) -> int:
        """Shares that are not yet written, or whose commit may still be ours."""
        return len(self._sending())

    def _sending(self) -> list[Running]:
        with self._lock:
            return [one for one in self._running.values() if not one.written]

    def drain(self, deadline_s: float | None) -> Forecast | None:
        """Be done by `deadline_s` (monotonic clock; None: no hurry). Holds also for what is
        submitted later. Returns what to expect."""
        self._deadline_s, self._pacer.draining = deadline_s, deadline_s is not None
        self._pacer.set()
        return self._plan()

    @property
    def nbytes_per_s(self) -> float:
        """At full speed: measured while something was on its way; a cautious guess before that."""
        return max(self._lanes.nbytes_per_s, self._pacer.surely)

    # ---- one job ---------------------------------------------------------------------------------
    def _run(self, one: Running) -> None:
        with self._lanes.line.member():
            self._carry(one)

    def _carry(self, one: Running) -> None:
        job = one.job
        try:
            manifest, parts = self._send_for_others(one)
            state = "committed" if manifest is not None else "waiting"
            error = (
                ""
                if manifest is not None
                else (
                    f"not whole after {self._commit_timeout_s:.0f} s: a rank did not write its "
                    "share"
                )
            )
            outcome = UploadOutcome(
                job.ref,
                job.rank,
                state,
                manifest.nbytes if manifest else 0,
                str((manifest and manifest.data.get("weights")) or ""),
                time.monotonic() - one.t_start,
                f"snapshot of step {job.ref.step} is {error}" if error else "",
                "CommitTimeout" if error else "",
                parts,
                job.note,
                self._slowdown(one),
                self._pacer.search.rate,
            )
        except Exception as e:  # whatever it is, the one who waits for us must hear of it
            outcome = UploadOutcome(
                job.ref,
                job.rank,
                "failed",
                error=str(e) or repr(e),
                kind=type(e).__name__,
                note=job.note,
            )
        with self._lock:
            del self._running[one.number]
        try:
            self._on_outcome(job, outcome)
        finally:
            one.done(outcome)
        if outcome.state == "committed" and job.keep is not None and self._deadline_s is None:
            keep = Keep(**job.keep)
            if self.busy():  # whose base may be the one before this
                keep = replace(keep, last=max(2, keep.last))
            self._prune(keep)

    def _slowdown(self, one: Running) -> float:
        """Of the training's steps beside this sending; of too few, of those beside the ones before
        as well."""
        base_s = one.job.beside.step_s
        own = [s / base_s for s in one.steps_s] if base_s > 0 else []
        with self._lock:
            self._steps_x.extend(own)
            newest = list(self._steps_x)
        return slowdown(own if len(own) >= LEAST_STEPS else newest, 1.0) if own else 0.0

    def _prune(self, keep: Keep) -> None:
        try:
            self.snapshots.prune(keep, expired=self._leases)
        except StoreError:  # the next commit prunes what this one did not
            pass
        except RuntimeError:  # so does Python say that it ends, to who starts a thread
            if threading.main_thread().is_alive():
                raise

    def _send_for_others(self, one: Running) -> tuple[Manifest | None, dict[str, str]]:
        """As `_send`. The other ranks wait for this share, so a store that is silent is tried again
        for as long as they do; and so do they, for ours."""

        def begin(_: RetryCallState) -> None:
            one.left = one.job.nbytes  # what is there already is written over, by the same bytes

        in_vain = stop_after_delay(self._commit_timeout_s)

        def nobody_waits(state: RetryCallState) -> bool:
            in_a_hurry = self._deadline_s is not None
            return one.job.world == 1 or in_a_hurry or self._is_old(one) or in_vain(state)

        again = retry(
            retry=retry_if_exception_type(StoreUnavailable),
            stop=nobody_waits,
            wait=wait_exponential(max=10.0),
            before=begin,
            reraise=True,
        )
        return again(self._send)(one)

    def _send(self, one: Running) -> tuple[Manifest | None, dict[str, str]]:
        job = one.job
        for key, text in job.before.items():
            self.store.create(key, text.encode())
        self._check(job.ref)
        files = {name: one.view[start:end] for name, (start, end) in job.files.items()}

        known = self._hashes.of(job, files, self._pacer.hashing)

        def data() -> dict[str, Any]:  # made while the lanes send
            if not job.weights:
                return job.data
            total = weights_sum(
                job.tensors, files, job.weights, known.sums, known.made, self._pacer.hashing
            )
            return {**job.data, "weights": combined([f"{total:x}"])}

        snapshots = Snapshots(
            Ahead(self.store, self._lanes, one, self._left_s, self._pacer.gate),
            self.snapshots.chunk_nbytes,
        )
        base = self._base.newest()
        mine = snapshots.write(
            job.ref, job.rank, job.world, files, job.tensors, data, job.token, base, known.chunks
        )
        self._hashes.keep(job, known)
        self._check(job.ref)  # sending may have taken long
        manifest = self.snapshots.commit(job.ref, job.world, job.rank)
        one.written = True
        deadline_s, pause_s = time.monotonic() + self._commit_timeout_s, 0.02
        while manifest is None and time.monotonic() < deadline_s and not self._is_old(one):
            time.sleep(pause_s)  # other ranks are still writing
            pause_s = min(2 * pause_s, 1.0)
            self._check(job.ref)
            waited_s = time.monotonic() - (deadline_s - self._commit_timeout_s)
            # who should merge may be gone; not all others at once
            polite = waited_s < POLITE_S * (1.0 + job.rank / job.world)
            manifest = self.snapshots.commit(job.ref, job.world, job.rank if polite else None)
            if (
                manifest is None
                and pause_s == 1.0
                and self.snapshots.hopeless(job.ref, base.ref if base and mine.refers else None)
            ):
                raise StoreError(
                    f"snapshot of step {job.ref.step}: it, or the one that has its unchanged "
                    "chunks, was pruned meanwhile"
                )
        if manifest is not None:
            self._base.committed(manifest)
        names = {f"{job.token}-{name}": name for name in job.files}
        own = {
            p.key: names[tail]
            for p in mine.parts
            if (tail := p.key.rpartition("/")[2].partition("-")[2]) in names
        }
        return manifest, own

    def _is_old(self, one: Running) -> bool:
        """A later snapshot of the same rank is written: nobody needs this one any more."""
        with self._lock:
            return any(
                o.written and o.job.rank == one.job.rank and o.job.ref > one.job.ref
                for o in self._running.values()
            )

    def _left_s(self, one: Running) -> float | None:
        """Seconds until we must have given up; None: no hurry. Raises OutOfTime."""
        if self._deadline_s is None:
            return None
        left_s = self._deadline_s - GIVE_UP_BEFORE_S - time.monotonic()
        if left_s <= 0:
            raise OutOfTime(
                f"snapshot of step {one.job.ref.step}: {one.left >> 20} of {one.job.nbytes >> 20} "
                "MiB were not sent when the time that was "
                f"left ran out ({self.nbytes_per_s / 2**20:.0f} MiB/s)"
            )
        return left_s

    # ---- order -----------------------------------------------------------------------------------
    def _plan(self) -> Forecast | None:
        """Which refs' parts go first."""
        with self._lock:
            remaining: dict[Ref, int] = {}
            for one in self._running.values():
                if not one.written:
                    remaining[one.job.ref] = remaining.get(one.job.ref, 0) + one.left
        if not remaining:
            self._lanes.order = {}
            return None
        left_s = (
            float("inf")
            if self._deadline_s is None
            else max(0.0, self._deadline_s - time.monotonic())
        )
        found = forecast(remaining, self.nbytes_per_s, left_s)
        self._lanes.order = {ref: i for i, ref in enumerate(found.order)}
        return found


@dataclass
class _Hashed:
    """`chunks`: hashes of a job's chunks, by file and number; `sums`: of its weights, that are
    known; `made`: those that were made."""

    since: str = ""
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    chunks: dict[str, dict[int, str]] = field(default_factory=dict)
    sums: dict[tuple[str, int], int] = field(default_factory=dict)
    made: dict[tuple[str, int], int] = field(default_factory=dict)


class _Hashes:
    """What was hashed of each rank's last share, for what the next one says is the same."""

    def __init__(self, snapshots: Snapshots):
        self._snapshots, self._last = snapshots, dict[int, _Hashed]()

    def of(
        self, job: UploadJob, files: Mapping[str, memoryview], pause: Callable[[int], None]
    ) -> _Hashed:
        """Hash what is not the same. `pause` is called before so many bytes."""
        last = self._last.get(job.rank, _Hashed())
        since = job.unchanged.since
        if not since or last.since != since or last.files != job.files:
            last = _Hashed()
        size = self._snapshots.chunk_nbytes
        found = _Hashed(f"{job.token} {job.ref.name}", dict(job.files))

        def hashed(content: memoryview) -> str:
            pause(len(content))
            return chunk_hash(content)

        for name, view in files.items():
            before = last.chunks.get(name, {})
            found.chunks[name] = {
                i: before[i]
                if i in before and job.unchanged.covers(name, start, min(start + size, len(view)))
                else hashed(view[start : start + size])
                for i, start in enumerate(range(0, len(view), size))
            }
        for (name, i), total in last.made.items():
            chunks = job.tensors[name]["chunks"] if name in job.tensors else []
            if i < len(chunks) and job.unchanged.covers(
                chunks[i]["part"], chunks[i]["start"], chunks[i]["end"]
            ):
                found.sums[name, i] = total
        return found

    def keep(self, job: UploadJob, found: _Hashed) -> None:
        self._last[job.rank] = found


class _Base:
    """The newest snapshot that we know to be committed, on which the next one is based."""

    def __init__(self, snapshots: Snapshots):
        self._snapshots, self._lock = snapshots, threading.Lock()
        self._known: Manifest | None = None
        self._looked = False

    def committed(self, manifest: Manifest) -> None:
        with self._lock:
            if self._known is None or self._known.ref < manifest.ref:
                self._known = manifest

    def newest(self) -> Manifest | None:
        """The snapshot whose chunks need not be sent again; None if we cannot tell."""
        with self._lock:
            base, looked, self._looked = self._known, self._looked, True
        if base is not None and not self._snapshots.stay([base.ref]):  # pruned, or found damaged
            base, looked = None, False
        if base is None and not looked:
            with contextlib.suppress(StoreError):
                refs = self._snapshots.refs()
                base = self._snapshots.load(refs[0]) if refs else None
            with self._lock:
                self._known = base
        return base


__all__ = ["Forecast", "OutOfTime", "UploadJob", "UploadOutcome", "Uploader", "forecast"]
