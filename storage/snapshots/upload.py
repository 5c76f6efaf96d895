"""Upload of staged snapshots to the bucket, outside of the trainer: hashing, parts in bounded
parallel, part list, commit, prune. No torch.

An `Uploader` takes `UploadJob`s whose bytes lie in host memory (`staging.Segment`) and reports one
`UploadOutcome` for each. It may run in the trainer's process or, better, in one of its own that
outlives the trainer. Parts of older snapshots go first. Under a deadline (`drain`) the surest goes
first, and what is not written in time is given up, so that the reported outcome is true. Without
one it watches the training's steps, if it can, and sends no faster than they allow (`pacer.py`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tenacity import (
    RetryCallState,
    retry,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential,
)

from storage.errors import StoreError, StoreUnavailable
from storage.snapshots.manifest import Manifest, Ref, chunk_hash
from storage.snapshots.pacer import LEAST_STEPS, IdlePriority, Pacer, TrainingWatch, slowdown
from storage.snapshots.reader_leases import Watch
from storage.snapshots.retention import Keep
from storage.snapshots.snapshots import Snapshots
from storage.snapshots.tensor_hash import combined, weights_sum
from storage.stores.objects import Gate, ObjectStore, put_paced
from storage.tensor_threads import start_thread

# Upload jobs, their outcomes and forecasts: plain data. Pure.

MARGIN = 0.8  # share of a drain's time that is planned with; bandwidth varies


@dataclass(frozen=True)
class Unchanged:
    """The byte ranges, by file, that are the same as in the share that this rank handed over as
    `since` ("": unknown)."""

    since: str = ""
    files: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def covers(self, name: str, start: int, end: int) -> bool:
        """Return whether these bytes of a file are all unchanged."""
        return any(low <= start and end <= high for low, high in self.files.get(name, ()))

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Unchanged:
        files = {
            name: [(int(start), int(end)) for start, end in ranges]
            for name, ranges in body["files"].items()
        }
        return cls(str(body["since"]), files)


@dataclass(frozen=True)
class TrainingBeside:
    """The training that continues while a snapshot is sent.

    `within_s`: seconds that the sending may take for the training's sake; 0: full speed. `step_s`:
    seconds of an undisturbed step; 0: unknown. `pace`: bytes per second from the node that it has
    not noticed so far; 0: unknown. `watch`: where to observe it, for `TrainingWatch`.
    """

    step_s: float = 0.0
    within_s: float = 0.0
    pace: float = 0.0
    watch: str = ""

    @property
    def may_last(self) -> bool:
        """True if the sending may be slow. A training that cannot be watched may be waiting."""
        return self.within_s > 0 and bool(self.watch)


@dataclass(frozen=True)
class UploadJob:
    """One rank's share of a snapshot. Plain data: `to_dict` goes through JSON."""

    ref: Ref
    rank: int
    world: int
    token: str  # unique to this attempt
    files: dict[str, tuple[int, int]]  # name -> (start, end) in the segment
    tensors: dict[str, Any]  # index in the form that `Snapshots.write` takes
    data: dict[str, Any]
    weights: str = ""  # prefix of the tensors that data["weights"] hashes; "": no such hash
    unchanged: Unchanged = field(default_factory=lambda: Unchanged())
    # objects to create before everything else: key -> text
    before: dict[str, str] = field(default_factory=dict)
    # fields of retention.Keep for the prune after the commit; None: another rank prunes
    keep: dict[str, Any] | None = None
    beside: TrainingBeside = field(default_factory=TrainingBeside)
    # the caller's own data, returned with the outcome
    note: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(end - start for start, end in self.files.values())

    def to_dict(self) -> dict[str, Any]:
        inside = {"unchanged": vars(self.unchanged), "beside": vars(self.beside)}
        return {**vars(self), "ref": self.ref.name, **inside}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> UploadJob:
        files = {name: (int(start), int(end)) for name, (start, end) in body["files"].items()}
        inside: dict[str, Any] = {
            "unchanged": Unchanged.from_dict(body["unchanged"]),
            "beside": TrainingBeside(**body["beside"]),
        }
        return cls(**{**body, "ref": Ref.parse(body["ref"]), "files": files, **inside})


@dataclass(frozen=True)
class UploadOutcome:
    ref: Ref
    rank: int
    state: str  # see the module's docstring
    nbytes: int = 0  # bytes of the whole snapshot
    weights: str = ""
    commit_s: float = 0.0  # seconds from the job's arrival
    error: str = ""
    kind: str = ""  # name of the error's class
    # parts that we wrote: part key -> file name
    parts: dict[str, str] = field(default_factory=dict)
    note: dict[str, Any] = field(default_factory=dict)
    # slowdown of the training's steps meanwhile: 0.1 is a tenth longer; 0 also if unknown
    slowdown: float = 0.0
    # bytes per second from the node that the training does not notice; 0: unknown
    pace: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ref": self.ref.name}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> UploadOutcome:
        return cls(**{**body, "ref": Ref.parse(body["ref"])})


@dataclass(frozen=True)
class Forecast:
    """The expectation for a drain. `order`: surest first; `sure`: what should be written in time;
    `need_s`: seconds until each is written, by ref."""

    order: tuple[Ref, ...]
    sure: frozenset[Ref]
    need_s: dict[Ref, float]


def forecast(remaining: Mapping[Ref, int], nbytes_per_s: float, left_s: float) -> Forecast:
    """Return which snapshots to send first, with `left_s` seconds left. `remaining`: bytes still to
    send, by ref.

    All of them, oldest first, when they fit; otherwise first the newest one that fits alone (the
    older ones are worth nothing after it), or the one with the least to send.
    """
    refs = sorted(remaining)
    time_s = {ref: remaining[ref] / max(nbytes_per_s, 1.0) for ref in refs}
    spare_s = left_s * MARGIN
    if sum(time_s.values()) > spare_s:
        fitting = [ref for ref in refs if time_s[ref] <= spare_s]
        first = fitting[-1] if fitting else min(refs, key=lambda ref: (time_s[ref], ref))
        refs = [first, *(ref for ref in refs if ref != first)]
    need_s = dict(zip(refs, itertools.accumulate(time_s[ref] for ref in refs), strict=True))
    return Forecast(tuple(refs), frozenset(ref for ref in refs if need_s[ref] <= spare_s), need_s)


# Threads that put a snapshot's parts, a few at once, in the order of their snapshots.

LOOK_AGAIN_S = 0.5  # seconds between checks for a new deadline


@dataclass(eq=False)
class Running:
    """An upload job under way."""

    job: UploadJob
    view: memoryview
    done: Callable[[UploadOutcome], None]
    number: int
    left: int  # bytes still to send
    t_start: float
    written: bool = False
    steps_s: list[float] = field(default_factory=list)  # step times of the training beside it
    moved_s: float = field(default_factory=time.monotonic)  # when bytes were last sent
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def sent(self, nbytes: int) -> None:
        """Subtract `nbytes` from what is left; several lanes may call it at once."""
        with self._lock:
            self.left -= nbytes
            self.moved_s = time.monotonic()

    def forget(self) -> None:
        """Let go of the segment. What is left of an upload refers to itself, and the memory of a
        segment that is not needed any more must not wait until Python finds that."""
        self.view, self.done = memoryview(b""), lambda outcome: None


class UploadPool:
    """A few threads that put parts; those of the ref that is first in `order` go first."""

    def __init__(self, n: int, line: IdlePriority):
        self.order: dict[Ref, int] = {}
        self._tasks: list[tuple[Ref, int, Callable[[], int], Future[None]]] = []
        self._condition = threading.Condition()
        self._numbers = itertools.count()
        self._n, self.line, self._started = n, line, 0
        self.ending = threading.Event()  # the process ends soon
        self._busy, self._busy_since_s, self._paced = 0, 0.0, False
        self._sent_nbytes, self._sent_s, self._period_nbytes = 0.0, 0.0, 0

    def submit(self, ref: Ref, task: Callable[[], int]) -> Future[None]:
        """Queue a task for the lanes. `task` returns the bytes that it moved at full speed."""
        future: Future[None] = Future()
        with self._condition:
            self._tasks.append((ref, next(self._numbers), task, future))
            self._condition.notify()
            if self._started < self._n:
                self._started += 1
                start_thread("upload-lane", self._work, self.end)
        return future

    def end(self) -> None:
        """Let each lane end once nothing waits for it, since the process ends."""
        with self._condition:
            self.ending.set()
            self._condition.notify_all()

    @property
    def paced(self) -> bool:
        """True: only one put at a time starts; those under way continue. The bytes sent meanwhile
        say nothing about the possible speed."""
        return self._paced

    @paced.setter
    def paced(self, paced: bool) -> None:
        with self._condition:
            if paced != self._paced:
                self._learn()
                self._paced = paced
                self._condition.notify_all()

    def _learn(self) -> None:
        """Add the ended busy period to the measured speed. Older periods count half as much each
        time."""
        now = time.monotonic()
        if self._busy_since_s and not self._paced and self._period_nbytes:
            self._sent_s = self._sent_s / 2 + now - self._busy_since_s
            self._sent_nbytes = self._sent_nbytes / 2 + self._period_nbytes
        self._busy_since_s, self._period_nbytes = now if self._busy else 0.0, 0

    @property
    def nbytes_per_s(self) -> float:
        with self._condition:
            sent_s, nbytes = self._sent_s, self._sent_nbytes
            if self._busy and not self._paced:
                sent_s += time.monotonic() - self._busy_since_s
                nbytes += self._period_nbytes
            return nbytes / sent_s if nbytes and sent_s > 0 else 20e6

    def _work(self) -> None:
        with self.line.member():
            self._serve()

    def _serve(self) -> None:
        while True:
            with self._condition:
                while not self._tasks or self._busy >= (1 if self._paced else self._n):
                    if self.ending.is_set() and not self._tasks:
                        return
                    self._condition.wait()
                chosen = min(self._tasks, key=lambda t: (self.order.get(t[0], 1 << 30), t[1]))
                self._tasks.remove(chosen)
                if self._busy == 0:
                    self._busy_since_s = time.monotonic()
                self._busy += 1
            _, _, task, future = chosen
            nbytes, error = 0, None
            try:
                nbytes = task()
            except Exception as e:  # passed on through the future
                error = e
            with self._condition:
                self._busy -= 1
                self._condition.notify()  # wakes a lane that waits for its turn
                self._period_nbytes += nbytes
                if self._busy == 0:
                    self._learn()
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
            del chosen, task, future, error  # they hold the segment; the next task may come late


class Ahead:
    """The store for one `Snapshots.write`: lanes put the parts, and every other call waits until
    they are stored. `gate`: called before each piece of a paced put."""

    def __init__(
        self,
        inner: ObjectStore,
        lanes: UploadPool,
        one: Running,
        left_s: Callable[[Running], float | None],
        gate: Gate,
    ):
        self._inner, self.url, self._lanes, self._one = inner, inner.url, lanes, one
        self._left_s, self._gate = left_s, gate
        self._ahead: list[Future[None]] = []
        self._unchanged = one.job.nbytes  # bytes that turn out not to need sending

    def put(self, key: str, data: bytes | memoryview) -> None:
        nbytes = memoryview(data).nbytes
        self._unchanged -= nbytes

        def one_part() -> int:
            self._left_s(self._one)
            if not self._lanes.paced:
                self._inner.put(key, data)
                self._one.sent(nbytes)
                return nbytes
            return self._put_paced(key, data, nbytes)

        self._ahead.append(self._lanes.submit(self._one.job.ref, one_part))

    def _put_paced(self, key: str, data: bytes | memoryview, nbytes: int) -> int:
        """Put a part through the gate and return the bytes that went at full speed in the end."""
        gone = slow = 0

        def gate(piece: int) -> bool:
            nonlocal gone, slow
            paced = self._gate(piece)
            self._left_s(self._one)
            more = min(piece, nbytes - gone)  # a store that retries passes the same bytes again
            gone, slow = gone + more, slow + more * paced
            self._one.sent(more)
            return paced

        try:
            put_paced(self._inner, key, data, gate)
        except BaseException:
            self._one.sent(-gone)
            raise
        self._one.sent(nbytes - gone)
        return nbytes - slow

    def _arrive(self) -> ObjectStore:
        """Wait until all parts are stored and return the inner store. Raises the first error, once
        none is under way any more, but OutOfTime at once."""
        ahead, self._ahead = self._ahead, []
        self._one.sent(self._unchanged)
        self._unchanged = 0
        errors = []
        for future in ahead:
            while not future.done():
                left_s = self._left_s(self._one)
                wait([future], LOOK_AGAIN_S if left_s is None else min(left_s, LOOK_AGAIN_S))
            errors += [e] if (e := future.exception()) is not None else []
        if errors:
            raise errors[0]
        self._left_s(self._one)
        return self._inner

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self._arrive().create(key, data)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._arrive().get(key, start, end)

    def list(self, prefix: str) -> list[str]:
        return self._arrive().list(prefix)

    def delete(self, key: str) -> None:
        self._arrive().delete(key)

    def size(self, key: str) -> int:
        return self._arrive().size(key)


LANES = 4  # parts under way at once
SEEN_STEPS = 8  # newest training steps beside any upload that are remembered
COMMIT_TIMEOUT_S = 600.0  # longest wait for the other ranks' shares
# A job that has sent nothing for so long, beyond the time that it may take for the training's
# sake, hangs: all its waits for the store and for other ranks are shorter.
STANDSTILL_S = 1200.0
POLITE_S = 10.0  # seconds that a big world leaves to the first rank of each group to merge it
GIVE_UP_BEFORE_S = 0.5  # time before the deadline that reporting a failure takes

CommitCheck = Callable[[Ref], None]  # raises if a snapshot may no longer be committed


class OutOfTime(StoreError):
    """The drain's deadline came before the snapshot was written."""


class Uploader:
    """Uploads jobs with threads of this process. `check(ref)` raises if a snapshot may not be
    committed (a newer generation exists).

    `on_outcome(job, outcome)` is called from one of its threads, before `done` of `submit`, and
    before old snapshots are pruned.
    """

    def __init__(
        self,
        store: ObjectStore,
        check: CommitCheck = lambda ref: None,
        on_outcome: Callable[[UploadJob, UploadOutcome], None] = lambda job, outcome: None,
        lanes: int = LANES,
        line: IdlePriority | None = None,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
        watch: TrainingWatch = lambda where: None,
    ):
        self.store, self.snapshots, self._check, self._on_outcome = (
            store,
            Snapshots(store),
            check,
            on_outcome,
        )
        self._commit_timeout_s, line = commit_timeout_s, line or IdlePriority()
        self._lock = threading.Lock()
        self._running: dict[int, Running] = {}
        self._numbers = itertools.count()
        self._lanes = UploadPool(lanes, line)
        self._pacer = Pacer(self._lanes, self._sending, watch, line)
        # ratios of step times beside uploads to undisturbed ones: one upload may see too few to
        # tell
        self._steps_x: deque[float] = deque(maxlen=SEEN_STEPS)
        self._deadline_s: float | None = None  # seconds on the monotonic clock
        self._base, self._hashes = _Base(self.snapshots), _Hashes(self.snapshots)
        self._leases = Watch()

    def submit(
        self,
        job: UploadJob,
        view: memoryview,
        done: Callable[[UploadOutcome], None],
        expect: Callable[[Forecast | None], None] = lambda forecast: None,
    ) -> None:
        """Start an upload and return at once. `view`: the segment's bytes, which must not change
        until `done` is called, exactly once. `expect` receives the forecast before anything is
        sent."""
        with self._lock:
            one = Running(job, view, done, next(self._numbers), job.nbytes, time.monotonic())
            self._running[one.number] = one
        expect(self._plan())
        self._pacer.begin(one)
        run = functools.partial(self._run, one)
        start_thread(f"upload-{job.ref}", run, self._lanes.end)

    def busy(self) -> int:
        """Return the number of shares that are not written, or that nobody tried to commit yet."""
        return len(self._sending())

    def stands_still(self) -> bool:
        """Return whether a job hangs: it has sent nothing for longer than any of its waits."""
        now = time.monotonic()
        with self._lock:
            return any(
                now - one.moved_s > STANDSTILL_S + one.job.beside.within_s
                for one in self._running.values()
            )

    def _sending(self) -> list[Running]:
        with self._lock:
            return [one for one in self._running.values() if not one.written]

    def drain(self, deadline_s: float | None) -> Forecast | None:
        """Finish by `deadline_s` (monotonic clock; None: no hurry), including later jobs. Returns
        the forecast."""
        self._deadline_s, self._pacer.draining = deadline_s, deadline_s is not None
        self._pacer.set()
        return self._plan()

    @property
    def nbytes_per_s(self) -> float:
        """Bytes per second at full speed: measured while something was under way; a cautious guess
        before that."""
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
        except Exception as e:  # any error must reach the caller that waits
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
            one.forget()
            if outcome.state == "failed":
                gc.collect()  # errors hold the frames that they passed, and these the segment
        if outcome.state == "committed" and job.keep is not None and self._deadline_s is None:
            keep = Keep(**job.keep)
            if self.busy():  # a job under way may build on the previous snapshot
                keep = replace(keep, last=max(2, keep.last))
            self._prune(keep)

    def _slowdown(self, one: Running) -> float:
        """Return the slowdown of the training's steps beside this upload; with too few steps, also
        counting those beside earlier uploads."""
        base_s = one.job.beside.step_s
        own = [s / base_s for s in one.steps_s] if base_s > 0 else []
        with self._lock:
            self._steps_x.extend(own)
            newest = list(self._steps_x)
        return slowdown(own if len(own) >= LEAST_STEPS else newest, 1.0) if own else 0.0

    def _prune(self, keep: Keep) -> None:
        try:
            self.snapshots.prune(keep, expired=self._leases)
        except StoreError:  # the next commit prunes it
            pass
        except RuntimeError:  # Python raises this for a new thread at its own exit
            if threading.main_thread().is_alive():
                raise

    def _send_for_others(self, one: Running) -> tuple[Manifest | None, dict[str, str]]:
        """Send like `_send`, but keep retrying a store that does not answer, for as long as other
        ranks may wait for this share."""

        def begin(_: RetryCallState) -> None:
            one.left = one.job.nbytes  # objects already there are overwritten with the same bytes

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

        def data() -> dict[str, Any]:  # computed while the lanes send
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
        self._check(job.ref)  # checked again, as sending may have taken long
        manifest = self.snapshots.commit(job.ref, job.world, job.rank)
        one.written = True
        deadline_s, pause_s = time.monotonic() + self._commit_timeout_s, 0.02
        while manifest is None and time.monotonic() < deadline_s and not self._is_old(one):
            if self._lanes.ending.wait(pause_s):  # other ranks are still writing
                raise StoreError(f"snapshot of step {job.ref.step}: the script ended before it")
            pause_s = min(2 * pause_s, 1.0)
            self._check(job.ref)
            waited_s = time.monotonic() - (deadline_s - self._commit_timeout_s)
            # the rank that should merge may be gone; the others step in at different times
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
        """Return whether a later snapshot of the same rank is written, so that nobody needs this
        one."""
        with self._lock:
            return any(
                o.written and o.job.rank == one.job.rank and o.job.ref > one.job.ref
                for o in self._running.values()
            )

    def _left_s(self, one: Running) -> float | None:
        """Return seconds until the upload must be given up; None: no hurry. Raises OutOfTime."""
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
        """Set and return which refs' parts go first."""
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
    """Hashes of one job. `chunks`: by file and number of the chunk; `sums`: known sums of its
    weights; `made`: all computed sums."""

    since: str = ""
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    chunks: dict[str, dict[int, str]] = field(default_factory=dict)
    sums: dict[tuple[str, int], int] = field(default_factory=dict)
    made: dict[tuple[str, int], int] = field(default_factory=dict)


class _Hashes:
    """Hashes of each rank's last share, reused where the next share is declared unchanged."""

    def __init__(self, snapshots: Snapshots):
        self._snapshots, self._last = snapshots, dict[int, _Hashed]()

    def of(
        self, job: UploadJob, files: Mapping[str, memoryview], pause: Callable[[int], None]
    ) -> _Hashed:
        """Hash what has changed. `pause(nbytes)` is called before that many bytes are hashed."""
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
    """The newest snapshot known to be committed, on which the next one builds."""

    def __init__(self, snapshots: Snapshots):
        self._snapshots, self._lock = snapshots, threading.Lock()
        self._known: Manifest | None = None
        self._looked = False

    def committed(self, manifest: Manifest) -> None:
        with self._lock:
            if self._known is None or self._known.ref < manifest.ref:
                self._known = manifest

    def newest(self) -> Manifest | None:
        """Return the snapshot whose chunks need not be sent again; None if that is unknown."""
        with self._lock:
            base, looked, self._looked = self._known, self._looked, True
        # it was pruned, or found damaged
        if base is not None and not self._snapshots.stay([base.ref]):
            base, looked = None, False
        if base is None and not looked:
            with contextlib.suppress(StoreError):
                refs = self._snapshots.refs()
                base = self._snapshots.load(refs[0]) if refs else None
            with self._lock:
                self._known = base
        return base


__all__ = ["Forecast", "OutOfTime", "UploadJob", "UploadOutcome", "Uploader", "forecast"]
