"""Carries staged snapshots to the bucket, outside of the trainer: hashing, parts in bounded
parallel, part list, commit, prune. No torch.

An `Uploader` takes `Job`s whose bytes lie in host memory (`staging.Segment`) and reports an
`Outcome` of each, once. It may run in the trainer's process or, better, in one of its own that
outlives the trainer. Parts of older snapshots go first. When a deadline is set (`drain`), what is
surest goes first, and what is not written when time is up is given up, so that the last word said
of it is true. Without one it watches the training's steps, where it is told how, and sends less at
once when that helps them (`throttle.py`).

    outcome.state   "committed"   the manifest is there
                    "failed"      not committed by us, and our share is not written: nobody can
                                  commit it
                    "waiting"     our share is written; another rank's is not, within the time:
                                  whoever is last commits
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from storage.errors import StoreError
from storage.leases import Watch as LeaseWatch
from storage.manifest import Manifest, Ref
from storage.objects import ObjectStore, limit_puts, puts_at_once
from storage.retention import Keep
from storage.snapshots import Snapshots
from storage.throttle import Throttle, levels
from storage.weights import combined, weights_sum

LANES = 4  # parts on their way at once
COMMIT_TIMEOUT_S = 600.0  # the longest wait for the other ranks' shares
POLITE_S = 10.0  # of a world of many ranks, so long the first rank of each group merges it
MARGIN = 0.8  # of a drain's time that is planned with; bandwidth varies
GIVE_UP_BEFORE_S = 0.5  # the deadline: time to say so
LOOK_AGAIN_S = 0.5  # whether a deadline has been set meanwhile
WINDOW_STEPS = 3  # steps whose median says how fast the training goes
LOOKS_PER_STEP = 8  # at the training, within a longest and a shortest time between two
LOOK_S = (0.02, 0.5)

Check = Callable[[Ref], None]  # raises when a snapshot may no longer be committed
# what a job's `watch` says: steps done; does the training wait for us? None: unknown
Watch = Callable[[str], tuple[int, bool] | None]


class OutOfTime(StoreError):
    """A drain's deadline came first."""


@dataclass(frozen=True)
class Job:
    """One rank's share of a snapshot. Plain data: `to_dict` goes through JSON."""

    ref: Ref
    rank: int
    world: int
    token: str  # unique to this attempt
    files: dict[str, tuple[int, int]]  # name -> (start, end) in the segment
    tensors: dict[str, Any]  # index, as `Snapshots.write` takes it
    data: dict[str, Any]
    weights: str = ""  # prefix of the tensors that data["weights"] is the hash of; "": none is made
    # objects to create before all else: key -> text
    before: dict[str, str] = field(default_factory=dict)
    # fields of retention.Keep: prune after the commit; None: another rank does
    keep: dict[str, Any] | None = None
    step_s: float = 0.0  # of an undisturbed training step; 0: unknown
    within_s: float = 0.0  # it may take so long for the sake of the training's speed; 0: full speed
    watch: str = ""  # where the training's progress is seen, for `Watch`
    # the caller's own, returned with the outcome
    note: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(end - start for start, end in self.files.values())

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "ref": self.ref.name}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Job:
        files = {name: (int(start), int(end)) for name, (start, end) in body["files"].items()}
        return cls(**{**body, "ref": Ref.parse(body["ref"]), "files": files})


@dataclass(frozen=True)
class Outcome:
    ref: Ref
    rank: int
    state: str  # see the module's docstring
    nbytes: int = 0  # of the whole snapshot
    weights: str = ""
    commit_s: float = 0.0  # from the job's arrival
    error: str = ""
    kind: str = ""  # name of the error's class
    parts: dict[str, str] = field(default_factory=dict)  # of what we wrote: part key -> file name
    note: dict[str, Any] = field(default_factory=dict)
    # of the training's steps while it was sent: 0.1 is a tenth longer; 0 also if it was not
    # measured
    slowdown: float = 0.0
    requests: int = 0  # puts, times requests of each, that the throttle left at once in the end

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ref": self.ref.name}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Outcome:
        return cls(**{**body, "ref": Ref.parse(body["ref"])})


@dataclass(frozen=True)
class Forecast:
    """What a drain expects. `order`: surest first; `sure`: what should be written in time;
    `need_s`: until then, by ref."""

    order: tuple[Ref, ...]
    sure: frozenset[Ref]
    need_s: dict[Ref, float]


def forecast(remaining: Mapping[Ref, int], nbytes_per_s: float, left_s: float) -> Forecast:
    """Which of the snapshots (bytes that are still to send, by ref) to send first with `left_s`
    seconds left.

    All of them, oldest first, when they fit; else the newest one that fits alone (the older ones
    are worth nothing after it); else the one with the least to send.
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


class Uploader:
    """Threads of one process. `check(ref)` raises when a snapshot may not be committed (a newer
    epoch exists).

    `on_outcome(job, outcome)` is told from a thread of ours, before `done` of `submit` is, and
    before old snapshots are pruned.
    """

    def __init__(
        self,
        store: ObjectStore,
        check: Check = lambda ref: None,
        on_outcome: Callable[[Job, Outcome], None] = lambda job, outcome: None,
        lanes: int = LANES,
        nice: int = 0,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
        watch: Watch = lambda where: None,
    ):
        self.store, self.snapshots, self._check, self._on_outcome = (
            store,
            Snapshots(store),
            check,
            on_outcome,
        )
        self._commit_timeout_s, self._nice = commit_timeout_s, nice
        self._lock = threading.Lock()
        self._running: dict[int, _Running] = {}
        self._numbers = itertools.count()
        self._lanes = _Lanes(lanes, nice)
        self._watch, self._levels, self._level = watch, levels(lanes, puts_at_once(store)), 0
        self.throttle, self._watching = Throttle(len(self._levels)), False
        self._deadline_s: float | None = None  # monotonic
        self._base: Manifest | None = None  # the newest snapshot that we know to be committed
        self._looked = False
        self._leases = LeaseWatch()

    def submit(
        self,
        job: Job,
        view: memoryview,
        done: Callable[[Outcome], None],
        expect: Callable[[Forecast | None], None] = lambda forecast: None,
    ) -> None:
        """Returns at once. `view`: the segment's bytes, which must not change until `done` is told.
        `done` is called exactly once. `expect` is told what to expect before anything is sent."""
        with self._lock:
            one = _Running(job, view, done, next(self._numbers), job.nbytes, time.monotonic())
            self._running[one.number] = one
        expect(self._plan())
        self._pace(hurry=False)
        threading.Thread(
            target=self._run, args=(one,), name=f"upload-{job.ref}", daemon=True
        ).start()

    def busy(self) -> int:
        """Shares that are not yet written, or whose commit may still be ours."""
        with self._lock:
            return sum(not one.written for one in self._running.values())

    def drain(self, deadline_s: float | None) -> Forecast | None:
        """Be done by `deadline_s` (monotonic clock; None: no hurry). Holds also for what is
        submitted later. Returns what to expect."""
        self._deadline_s = deadline_s
        self._pace(hurry=False)
        return self._plan()

    @property
    def nbytes_per_s(self) -> float:
        """Measured while something was on its way; a cautious guess before that."""
        return self._lanes.nbytes_per_s

    # ---- one job ---------------------------------------------------------------------------------
    def _run(self, one: _Running) -> None:
        _be_nice(self._nice)
        job = one.job
        try:
            manifest, parts = self._send(one)
            state = "committed" if manifest is not None else "waiting"
            error = (
                ""
                if manifest is not None
                else (
                    f"not whole after {self._commit_timeout_s:.0f} s: a rank did not write its "
                    "share"
                )
            )
            outcome = Outcome(
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
                one.slowdown,
                one.requests,
            )
        except Exception as e:  # whatever it is, the one who waits for us must hear of it
            outcome = Outcome(
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
            with contextlib.suppress(StoreError):  # the next commit prunes what this one did not
                self.snapshots.prune(keep, expired=self._leases)

    def _send(self, one: _Running) -> tuple[Manifest | None, dict[str, str]]:
        job = one.job
        for key, text in job.before.items():
            self.store.create(key, text.encode())
        self._check(job.ref)
        files = {name: one.view[start:end] for name, (start, end) in job.files.items()}

        def data() -> dict[str, Any]:  # made while the lanes send
            if not job.weights:
                return job.data
            return {
                **job.data,
                "weights": combined([f"{weights_sum(job.tensors, files, job.weights):x}"]),
            }

        snapshots = Snapshots(
            _Ahead(self.store, self._lanes, one, self._left_s), self.snapshots.chunk_nbytes
        )
        base = self._newest()
        mine = snapshots.write(
            job.ref, job.rank, job.world, files, job.tensors, data, job.token, base
        )
        one.requests = math.prod(self._levels[self._level])
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
            with self._lock:
                if self._base is None or self._base.ref < manifest.ref:
                    self._base = manifest
        names = {f"{job.token}-{name}": name for name in job.files}
        own = {
            p.key: names[tail]
            for p in mine.parts
            if (tail := p.key.rpartition("/")[2].partition("-")[2]) in names
        }
        return manifest, own

    def _newest(self) -> Manifest | None:
        """The snapshot whose chunks need not be sent again; None if we cannot tell."""
        with self._lock:
            base, looked, self._looked = self._base, self._looked, True
        if base is not None and not self.snapshots.stay([base.ref]):  # pruned, or found damaged
            base, looked = None, False
        if base is None and not looked:
            with contextlib.suppress(StoreError):
                refs = self.snapshots.refs()
                base = self.snapshots.load(refs[0]) if refs else None
            with self._lock:
                self._base = base
        return base

    def _is_old(self, one: _Running) -> bool:
        """A later snapshot of the same rank is written: nobody needs this one any more."""
        with self._lock:
            return any(
                o.written and o.job.rank == one.job.rank and o.job.ref > one.job.ref
                for o in self._running.values()
            )

    def _left_s(self, one: _Running) -> float | None:
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

    # ---- how much at once ------------------------------------------------------------------------
    def _pace(self, hurry: bool) -> int:
        """Set how much may be on its way: as the throttle says, or all of it when there is a
        deadline or somebody waits. The level."""
        with self._lock:
            sending = [one for one in self._running.values() if not one.written]
            left = sum(one.left for one in sending)
            left_s = min(
                (one.t_start + one.job.within_s - time.monotonic() for one in sending), default=0.0
            )
            level = (
                0 if hurry or self._deadline_s is not None else self.throttle.allowed(left, left_s)
            )
            watched = next(
                (
                    one
                    for one in sending
                    if one.job.watch and one.job.step_s > 0 and one.job.within_s > 0
                ),
                None,
            )
            begin, self._watching = (
                watched is not None and not self._watching,
                self._watching or watched is not None,
            )
            self._level, (self._lanes.limit, requests) = level, self._levels[level]
            limit_puts(self.store, requests)
        if begin:
            threading.Thread(
                target=self._look, args=(watched,), name="upload-pace", daemon=True
            ).start()
        return level

    def _look(self, one: _Running) -> None:
        """Watches the training for as long as this job is sent."""
        pause_s = min(max(one.job.step_s / LOOKS_PER_STEP, LOOK_S[0]), LOOK_S[1])
        window, before = _Window(-1, 0, 0.0), list[float]()
        while one.number in self._running and not one.written:
            seen = self._watch(one.job.watch)
            waits = seen is not None and seen[1]
            level, now, sent = self._pace(hurry=waits), time.monotonic(), self._lanes.sent_nbytes
            if (
                seen is None
                or waits
                or window.level != level
                or self._lanes.busy > self._lanes.limit
            ):
                window = _Window(level, sent, now)
            if seen is not None:
                window.look(seen[0], now)
            if window.steps_s:
                slowdown = window.slowdown(one.job.step_s)
                one.slowdown = max(0.0, statistics.median([*before, slowdown]))
                if len(window.steps_s) >= WINDOW_STEPS and sent > window.sent:
                    before.append(slowdown)
                    self.throttle.observe(level, slowdown, sent - window.sent, now - window.t_start)
                    window = replace(window, sent=sent, t_start=now, steps_s=[])
            time.sleep(pause_s)
        if len(window.steps_s) == WINDOW_STEPS - 1:  # it was short; better so than never
            sent, now = self._lanes.sent_nbytes, time.monotonic()
            self.throttle.observe(
                window.level,
                window.slowdown(one.job.step_s),
                sent - window.sent,
                now - window.t_start,
            )
        with self._lock:
            self._watching = False
        self._pace(hurry=False)  # for who comes next

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
class _Running:
    job: Job
    view: memoryview
    done: Callable[[Outcome], None]
    number: int
    left: int  # bytes still to send
    t_start: float
    written: bool = False
    slowdown: float = 0.0
    requests: int = 0


@dataclass
class _Window:
    """Some steps of the training while the level was the same."""

    level: int
    sent: int  # bytes, when it began
    t_start: float
    steps_s: list[float] = field(default_factory=list)
    last: tuple[int, float] | None = None  # steps done, and when that was first seen

    def look(self, steps: int, now: float) -> None:
        if self.last is None:
            self.last = steps, -1.0  # how long ago it ended nobody knows
        elif steps != self.last[0]:
            if self.last[1] >= 0 and steps > self.last[0]:
                self.steps_s += [(now - self.last[1]) / (steps - self.last[0])] * (
                    steps - self.last[0]
                )
            self.last = steps, now

    def slowdown(self, step_s: float) -> float:
        return statistics.median(self.steps_s) / step_s - 1.0


class _Ahead:
    """The store for one `Snapshots.write`: parts are put by the lanes, and everything else
    waits until they are there."""

    def __init__(
        self,
        inner: ObjectStore,
        lanes: _Lanes,
        one: _Running,
        left_s: Callable[[_Running], float | None],
    ):
        self._inner, self.url, self._lanes, self._one, self._left_s = (
            inner,
            inner.url,
            lanes,
            one,
            left_s,
        )
        self._ahead: list[Future[None]] = []

    def put(self, key: str, data: bytes | memoryview) -> None:
        nbytes = memoryview(data).nbytes

        def one_part() -> int:
            self._left_s(self._one)
            self._inner.put(key, data)
            self._one.left -= nbytes
            return nbytes

        self._ahead.append(self._lanes.submit(self._one.job.ref, one_part))

    def _arrive(self) -> ObjectStore:
        """All parts are stored. Raises the first error, after none of them is under way any
        more; OutOfTime at once."""
        ahead, self._ahead = self._ahead, []
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


class _Lanes:
    """A few threads that put parts, those of the ref that comes first in `order` first."""

    def __init__(self, n: int, nice: int):
        self.order: dict[Ref, int] = {}
        self._tasks: list[tuple[Ref, int, Callable[[], int], Future[None]]] = []
        self._condition = threading.Condition()
        self._numbers = itertools.count()
        self._n, self._nice, self._started = n, nice, 0
        self._busy, self._busy_since_s, self._limit = 0, 0.0, n
        self.sent_nbytes = 0
        self._sent_nbytes, self._sent_s, self._period_nbytes = 0.0, 0.0, 0

    def submit(self, ref: Ref, task: Callable[[], int]) -> Future[None]:
        """`task` returns the bytes that it moved."""
        future: Future[None] = Future()
        with self._condition:
            self._tasks.append((ref, next(self._numbers), task, future))
            self._condition.notify()
            if self._started < self._n:
                self._started += 1
                threading.Thread(target=self._work, name="upload-lane", daemon=True).start()
        return future

    @property
    def busy(self) -> int:
        return self._busy

    @property
    def limit(self) -> int:
        """So many puts at once; those that are on their way go on."""
        return self._limit

    @limit.setter
    def limit(self, puts: int) -> None:
        with self._condition:
            self._limit = puts
            self._condition.notify_all()

    @property
    def nbytes_per_s(self) -> float:
        with self._condition:
            sent_s = self._sent_s + (time.monotonic() - self._busy_since_s if self._busy else 0.0)
            nbytes = self._sent_nbytes + self._period_nbytes
            return nbytes / sent_s if nbytes and sent_s > 0 else 20e6

    def _work(self) -> None:
        _be_nice(self._nice)
        while True:
            with self._condition:
                while not self._tasks or self._busy >= self._limit:
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
            except Exception as e:  # for who waits for the future
                error = e
            with self._condition:
                self._busy -= 1
                self._condition.notify()  # who waits for the limit
                self._period_nbytes += nbytes
                self.sent_nbytes += nbytes
                if self._busy == 0:  # older measurements count half as much each time
                    self._sent_s = self._sent_s / 2 + time.monotonic() - self._busy_since_s
                    self._sent_nbytes, self._period_nbytes = (
                        self._sent_nbytes / 2 + self._period_nbytes,
                        0,
                    )
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


def _be_nice(nice: int) -> None:
    """This thread only gets what the training leaves. Linux: a thread's own number; elsewhere
    nothing."""
    if nice:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


__all__ = ["Forecast", "Job", "OutOfTime", "Outcome", "Uploader", "forecast"]
