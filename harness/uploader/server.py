"""Uploads beside the trainer: the uploader process of a node, and what the session and the agent say to it.

`python -m harness.uploader.server` is started by the agent, one per node. It makes the shared segments that workers stage into, sends what
they hand over, commits, prunes, records the facts of it, and lives on when a worker dies. It dies with its agent. One JSON object per
line over a Unix socket in the stage's folder, which only its own user can enter; bytes never travel, they lie in the segments.

    reserve   a segment for one more snapshot of a rank            held    where a committed snapshot lies near (nearby.py)
    send      a job; its outcome is told when it is known          drain   there is a deadline; busy: how many shares are not written

Without an agent a session uses `Local`: the same engine on threads of the trainer's process. Knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from harness.bucket.epochs import newest_epoch
from harness.bucket.journal import Journal
from harness.core.facts import DrainVerdict, Fact, SnapshotCommitted, SnapshotFailed
from harness.core.world import Fenced
from harness.node.progress import WAITS_FOR_SNAPSHOTS, Progress, Sign
from harness.node.progress import read as read_sign
from harness.uploader.nearby import NEAR, Nearby, NearbyConfig, tiers_for
from storage.manifest import Manifest, Ref, SnapshotCorrupt
from storage.objects import ObjectStore, StoreError, open_store
from storage.snapshots import Snapshots
from storage.staging import PREFIX, Segment, Segments, Stage, StageFull, default_parent, sweep
from storage.tiers import FolderTier, SegmentTier, share
from storage.upload import Forecast, Job, Outcome, Uploader

ANSWER_S = 30.0  # the longest wait for an answer of the uploader (making a big segment takes seconds)
CONNECT_S = 5.0  # ... for its start; then the trainer sends for itself
AGENT_ANSWER_S = 2.0  # the agent has more to do than to wait
BUFFERS = 2  # one being sent, one being filled
NICE = 10

Done = Callable[[Outcome], None]
Place = tuple[str, int, int]  # file, start, end


class Courier(Protocol):
    """What a session needs of whoever sends its snapshots."""

    def segment(self, nbytes: int) -> Segment:
        """Memory for one more snapshot, ours until it is sent or given back. Raises StageFull."""

    def give_back(self, segment: Segment) -> None:
        """It is not needed after all."""

    def send(self, job: Job, segment: Segment, done: Done) -> None:
        """Hand over; the segment is free again when `done` has been told."""

    def held(self, ref: Ref) -> dict[str, Any]:
        """Where a snapshot lies nearer than in the bucket, as `nearby.tiers_for` takes it; {}: nowhere."""


def fence(store: ObjectStore) -> Callable[[Ref], None]:
    """No snapshot of an epoch is committed when a newer epoch exists."""

    def check(ref: Ref) -> None:
        if newest_epoch(store).epoch > ref.epoch:
            raise Fenced(f"epoch {ref.epoch} is over: a newer one exists, so its snapshot of step {ref.step} is not committed")

    return check


@contextlib.contextmanager
def _socket_in(folder: Path) -> Iterator[str]:
    """Its address: a path of at most 107 bytes, which on Linux any folder can have by way of a descriptor."""
    if not sys.platform.startswith("linux"):
        yield str(folder / "socket")
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)


def _seen(sign: Sign | None) -> tuple[int, bool] | None:
    """As `storage.upload.Watch`."""
    return None if sign is None else (sign.step, sign.place in WAITS_FOR_SNAPSHOTS)


@dataclass
class _Slot:
    segment: Segment
    busy: bool = False


class Local:
    """In the trainer's own process, in memory of its own."""

    def __init__(self, store: ObjectStore, on_outcome: Callable[[Job, Outcome], None], progress: Progress | None = None):
        seen = (lambda where: _seen(progress.sign)) if progress is not None else (lambda where: None)
        self._uploader = Uploader(store, fence(store), on_outcome, nice=NICE, watch=seen)
        self._slots: list[_Slot] = []

    def segment(self, nbytes: int) -> Segment:
        self._slots = [s for s in self._slots if s.busy or s.segment.nbytes >= nbytes]
        for slot in self._slots:
            if not slot.busy:
                slot.busy = True
                return slot.segment
        if len(self._slots) >= BUFFERS:
            raise StageFull(f"{BUFFERS} snapshots are on their way already")
        self._slots.append(_Slot(Segment.anonymous(nbytes).touch(), busy=True))
        return self._slots[-1].segment

    def give_back(self, segment: Segment) -> None:
        for slot in self._slots:
            if slot.segment is segment:
                slot.busy = False

    def send(self, job: Job, segment: Segment, done: Done) -> None:
        def landed(outcome: Outcome) -> None:
            self.give_back(segment)
            done(outcome)

        self._uploader.submit(job, segment.view, landed)

    def held(self, ref: Ref) -> dict[str, Any]:
        return {}


class Line:
    """Requests and answers over the uploader's socket. Raises ConnectionError when it is not there (any more)."""

    def __init__(self, folder: Path, connect_s: float = CONNECT_S, on_lost: Callable[[], None] = lambda: None):
        deadline_s = time.monotonic() + connect_s
        while True:
            self._socket = socket.socket(socket.AF_UNIX)
            try:
                with _socket_in(folder) as address:
                    self._socket.connect(address)
                break
            except OSError as e:
                self._socket.close()
                if time.monotonic() > deadline_s:
                    raise ConnectionError(f"no uploader answers in {folder} ({e})") from e
                time.sleep(0.05)
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._later: dict[int, tuple[Job, Done]] = {}
        self._on_lost, self.lost = on_lost, False
        threading.Thread(target=self._read, name="uploader-line", daemon=True).start()

    def ask(self, what: str, *, answer_s: float = ANSWER_S, **body: Any) -> dict[str, Any]:
        """The answer. Raises ConnectionError, StageFull."""
        answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        number = next(self._numbers)
        self._answers[number] = answers
        self._say({"do": what, "n": number, **body})
        try:
            answer = answers.get(timeout=answer_s)
        except queue.Empty:
            answer = None
        if answer is None:
            raise ConnectionError(f"the uploader did not answer within {answer_s:.0f} s")
        if "error" in answer:
            raise StageFull(answer["error"])
        return answer

    def send(self, job: Job, path: str, done: Done) -> None:
        """`done` is told the outcome. Raises ConnectionError."""
        number = next(self._numbers)
        self._later[number] = job, done
        self._say({"do": "send", "n": number, "job": job.to_dict(), "path": path})

    def _say(self, body: dict[str, Any]) -> None:
        with self._lock:
            if self.lost:
                raise ConnectionError("the uploader is gone")
            self._socket.sendall(json.dumps(body).encode() + b"\n")

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
            for line in lines:
                body = json.loads(line)
                number = body["n"]
                if number in self._answers:
                    self._answers.pop(number).put(body)
                elif "outcome" in body:
                    self._later.pop(number)[1](Outcome.from_dict(body["outcome"]))
                elif "error" in body:
                    job, done = self._later.pop(number)
                    done(Outcome(job.ref, job.rank, "failed", error=body["error"], kind="StoreError", note=job.note))
        with self._lock:
            self.lost = True
        for one in list(self._answers.values()):
            one.put(None)
        self._on_lost()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Remote:
    """The uploader process of this node. Should it die, what it had not finished is sent from here, and so is all that follows."""

    def __init__(self, folder: Path, epoch: int, local_rank: int, fallback: Local):
        self._epoch, self._rank, self._fallback = epoch, local_rank, fallback
        self._slots: list[_Slot] = []
        self._pending: dict[Ref, tuple[Job, Segment, Done]] = {}
        self._lock, self._reserving = threading.Lock(), threading.Lock()
        self._line = Line(folder, on_lost=self._take_over)

    def segment(self, nbytes: int) -> Segment:
        with self._reserving:
            for slot in self._slots:
                if not slot.busy and slot.segment.nbytes == max(1, nbytes):
                    slot.busy = True
                    return slot.segment
            unused = [str(s.segment.path) for s in self._slots if not s.busy]  # of another size
            self._slots = [s for s in self._slots if s.busy]
            try:
                answer = self._line.ask("reserve", rank=self._rank, epoch=self._epoch, nbytes=max(1, nbytes), unused=unused)
            except ConnectionError:
                return self._fallback.segment(nbytes)
            except StageFull as e:
                if self._slots:
                    raise
                print(f"harness: {e}; snapshots are staged in the trainer's own memory", flush=True)
                return self._fallback.segment(nbytes)
            self._slots.append(_Slot(Segment.open(Path(answer["path"])).touch(), busy=True))
            return self._slots[-1].segment

    def give_back(self, segment: Segment) -> None:
        self._fallback.give_back(segment)
        for slot in self._slots:
            if slot.segment is segment:
                slot.busy = False

    def send(self, job: Job, segment: Segment, done: Done) -> None:
        if not any(slot.segment is segment for slot in self._slots):
            self._fallback.send(job, segment, done)
            return

        def landed(outcome: Outcome) -> None:
            with self._lock:
                self._pending.pop(job.ref, None)
            self.give_back(segment)
            done(outcome)

        with self._lock:
            self._pending[job.ref] = job, segment, landed
        try:
            self._line.send(job, str(segment.path), landed)
        except OSError:  # it died; had it our job, then `_take_over` was called, and does nothing the second time
            self._take_over()

    def _take_over(self) -> None:
        """The token is the same, so sending a share again is harmless."""
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
        for job, segment, landed in pending:
            self._fallback.send(job, segment, landed)

    def held(self, ref: Ref) -> dict[str, Any]:
        try:
            return dict(self._line.ask("held", ref=ref.name)["near"])
        except (ConnectionError, StageFull):
            return {}


def courier_at(folder: Path, epoch: int, local_rank: int, local: Local) -> Courier:
    """The uploader whose stage `folder` is; `local` if nobody answers there."""
    try:
        return Remote(folder, epoch, local_rank, local)
    except ConnectionError as e:
        print(f"harness: {e}; snapshots are sent from this process", flush=True)
        return local


def fact_of(job: Job, outcome: Outcome) -> Fact:
    """What the journal says of a job that is done."""
    note, ref = job.note, job.ref
    if outcome.state != "committed":
        return SnapshotFailed(ref.step, ref.epoch, outcome.error)
    commit_s = time.time() - note["t_start"]
    return SnapshotCommitted(
        ref.step, ref.epoch, outcome.nbytes, note["stall_s"], commit_s, note["why"], note["t_start"], outcome.weights, outcome.slowdown,
        outcome.requests,
    )  # fmt: skip


def seen_here(parent: Path | None = None) -> Callable[[Manifest], dict[str, float]]:
    """What the uploaders of this node and user have of a snapshot: tier -> share of its bytes, nearest first. Nobody answers: {}."""
    lines = []
    for folder in (parent or default_parent()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of a dead agent, or another user's
            lines.append(Line(folder, connect_s=0.0))

    def near(manifest: Manifest) -> dict[str, float]:
        chunks: dict[str, set[str]] = {}
        for line in lines:
            with contextlib.suppress(OSError, StoreError):
                held = line.ask("held", answer_s=AGENT_ANSWER_S, ref=manifest.ref.name)["near"]
                for tier in tiers_for(manifest, {**held, "peers": []}):
                    if isinstance(tier, SegmentTier | FolderTier):
                        chunks.setdefault(tier.name, set()).update(tier.list())
        return {name: found for name, ids in chunks.items() if (found := share(manifest, ids))}

    return near


# ---- the agent's side -------------------------------------------------------------------------------------------
class NodeUploader:
    """The uploader of a node, held by its agent, and the stage that both own. Every call is bounded and harmless when it is dead."""

    def __init__(self, run: str, member: str, parent: Path | None, budget_nbytes: int | None, log: Path, nearby: NearbyConfig):
        self.run, self.member, self._log, self._nearby = run, member, log, nearby
        sweep(parent)
        self.stage = Stage(parent, budget_nbytes)
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Line | None = None
        self._deadline_s: float | None = None

    def ensure(self) -> None:
        """Start it, or start it again."""
        if self._process is not None and self._process.poll() is None:
            return
        for left in self.stage.folder.iterdir():  # what one that died has left; who maps a segment keeps its memory
            if left.name not in ("lock", NEAR):
                left.unlink(missing_ok=True)
        self._line = None
        order = {"run": self.run, "folder": str(self.stage.folder), "budget_nbytes": self.stage.budget_nbytes, "member": self.member}
        order["nearby"] = replace(self._nearby, memory_nbytes=self.stage.budget_nbytes // 2).to_dict()
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.uploader.server", json.dumps(order)], stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
            )

    def busy(self) -> int:
        """Shares of snapshots that are not written yet; 0 if nobody answers."""
        answer = self._ask("busy")
        return int(answer["busy"]) if answer else 0

    def drain(self, deadline_s: float | None) -> None:
        """This node has until then (wall clock); None: it stays after all."""
        self._deadline_s = deadline_s
        self._ask("drain", deadline_s=deadline_s)

    def settle(self, wait_s: float) -> None:
        """Until nothing is under way, or `wait_s`."""
        until_s = time.monotonic() + wait_s
        while self.busy() and time.monotonic() < until_s:
            time.sleep(0.05)

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(AGENT_ANSWER_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.stage.close()

    def _ask(self, what: str, **body: Any) -> dict[str, Any] | None:
        if self._process is None or self._process.poll() is not None:
            return None
        try:
            if self._line is None or self._line.lost:
                self._line = Line(self.stage.folder, connect_s=0.0)
                if self._deadline_s is not None and what != "drain":
                    self._line.ask("drain", answer_s=AGENT_ANSWER_S, deadline_s=self._deadline_s)
            return self._line.ask(what, answer_s=AGENT_ANSWER_S, **body)
        except (OSError, StoreError):
            return None


# ---- the process ------------------------------------------------------------------------------------------------
@dataclass
class _Kept:
    """A segment and what is known of it."""

    segment: Segment
    rank: int
    epoch: int
    busy: bool = False
    ref: Ref | None = None  # committed, and whole in here as far as this rank's share goes
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)
    tier: SegmentTier | None = None  # what peers may have of it


class Server:
    """One node's uploader. `serve` returns when `stop` is called."""

    def __init__(self, store: ObjectStore, folder: Path, budget_nbytes: int, member: str, nearby: NearbyConfig):
        self.store, self.member = store, member
        self.snapshots = Snapshots(store)
        self.journal = Journal(store, f"uploader-{member}-{secrets.token_hex(3)}", time.time)
        self.segments = Segments(folder, budget_nbytes)
        self.uploader = Uploader(store, fence(store), self._record, nice=NICE, watch=lambda path: _seen(read_sign(Path(path))))
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()
        self._expected: dict[tuple[Ref, int], tuple[bool, float, float]] = {}
        self._deadline_s: float | None = None  # wall clock
        self.nearby = Nearby(store, member, folder, nearby, self._staged)
        self._socket = socket.socket(socket.AF_UNIX)
        with _socket_in(folder) as address:
            self._socket.bind(address)
        self._socket.listen(64)

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # stopped
                return
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.nearby.close()
        with contextlib.suppress(StoreError):
            self.journal.flush()

    def _talk(self, connection: socket.socket) -> None:
        """With one worker, or the agent. That it hangs up (or dies) changes nothing for what it has handed over."""
        lock = threading.Lock()

        def say(body: dict[str, Any]) -> None:
            with lock, contextlib.suppress(OSError):
                connection.sendall(json.dumps(body).encode() + b"\n")

        with contextlib.suppress(OSError), connection, connection.makefile("rb") as lines:
            for line in lines:
                request = json.loads(line)
                number = request.pop("n")
                answer: dict[str, Any] | None
                try:
                    answer = self._answer(request, lambda outcome, n=number: say({"n": n, "outcome": outcome.to_dict()}))  # type: ignore[misc]
                except StoreError as e:
                    answer = {"error": str(e)}
                if answer is not None:
                    say({"n": number, **answer})

    def _answer(self, request: dict[str, Any], done: Done) -> dict[str, Any] | None:
        """None: the outcome will be the answer."""
        match request.pop("do"):
            case "reserve":
                return {"path": str(self._reserve(**request).path)}
            case "send":
                self._send(Job.from_dict(request["job"]), request["path"], done)
                return None
            case "held":
                return {"near": {"parts": self._held(Ref.parse(request["ref"])), **self.nearby.told()}}
            case "drain":
                self._drain(request["deadline_s"])
                return {}
            case "busy":
                return {"busy": self.uploader.busy()}
            case what:
                return {"error": f"the uploader does not know {what!r}"}

    def _reserve(self, rank: int, epoch: int, nbytes: int, unused: list[str]) -> Segment:
        with self._lock:
            # Whoever reserves has restored, and so have all ranks of its epoch: what older epochs left is of no use to them.
            for path, kept in list(self._kept.items()):
                if not kept.busy and (path in unused or kept.epoch < epoch):
                    self.segments.drop(Path(path))
                    del self._kept[path]
            self.nearby.shared_no_more()
            segment = self.segments.create(nbytes)
            self._kept[str(segment.path)] = _Kept(segment, rank, epoch)
            return segment

    def _send(self, job: Job, path: str, done: Done) -> None:
        with self._lock:
            kept = self._kept[path]
            kept.busy, kept.ref, kept.parts, kept.tier = True, None, {}, None

        def landed(outcome: Outcome) -> None:
            if outcome.state == "committed" and self.nearby.config.keeps and self._deadline_s is None:
                self._fill(kept, job, outcome)
            with self._lock:
                kept.busy = False
                if outcome.state in ("committed", "waiting"):
                    kept.ref = job.ref
                    kept.parts = {key: job.files[name] for key, name in outcome.parts.items()}
            done(outcome)

        self.uploader.submit(job, kept.segment.view, landed, lambda forecast: self._expect(forecast, job))

    def _held(self, ref: Ref) -> dict[str, Place]:
        with self._lock:
            kept = [(path, k) for path, k in self._kept.items() if k.ref == ref]
            return {key: (path, start, end) for path, k in kept for key, (start, end) in k.parts.items()}

    def _fill(self, kept: _Kept, job: Job, outcome: Outcome) -> None:
        """The nearer tiers have it too. That they do not is no error."""
        with contextlib.suppress(StoreError, SnapshotCorrupt):
            manifest = self.snapshots.load(job.ref)
            places = {key: job.files[name] for key, name in outcome.parts.items()}
            path = str(kept.segment.path)
            kept.tier = SegmentTier(manifest, {key: (path, start, end) for key, (start, end) in places.items()})
            self.nearby.fill(manifest, {key: kept.segment.view[start:end] for key, (start, end) in places.items()})

    def _staged(self) -> list[SegmentTier]:
        with self._lock:
            return [k.tier for k in self._kept.values() if k.tier is not None]

    # -- drains and facts --
    def _drain(self, deadline_s: float | None) -> None:
        """`deadline_s`: wall clock, None: called off."""
        self._deadline_s = deadline_s
        self.uploader.drain(None if deadline_s is None else time.monotonic() + deadline_s - time.time())
        with contextlib.suppress(PermissionError):  # now it is the training that waits for us
            os.setpriority(os.PRIO_PROCESS, 0, 0 if deadline_s is not None else NICE)

    def _expect(self, found: Forecast | None, job: Job) -> None:
        if found is None or self._deadline_s is None or job.ref not in found.need_s:
            return
        left_s, need_s, sure = self._deadline_s - time.time(), found.need_s[job.ref], job.ref in found.sure
        self._expected[job.ref, job.rank] = (sure, left_s, need_s)
        word = "will commit" if sure else "may not commit"
        print(f"harness: {left_s:.1f} s left, {need_s:.1f} s needed: the snapshot of step {job.ref.step} {word}", flush=True)

    def _record(self, job: Job, outcome: Outcome) -> None:
        ref = job.ref
        if job.rank == 0:
            self.journal.record(fact_of(job, outcome))
        expected = self._expected.pop((ref, job.rank), None)
        with contextlib.suppress(StoreError):  # kept, and tried again with the next fact
            if expected is not None:
                last = max((r.step for r in self.snapshots.refs()), default=0)
                committed = outcome.state == "committed"
                self.journal.record(DrainVerdict(self.member, ref.step, ref.epoch, job.rank, committed, last, *expected))
                if not committed:
                    print(f"harness: the snapshot of step {ref.step} is not committed; last good is step {last}", flush=True)
            self.journal.flush()


def main() -> None:
    from harness.node.processes import die_with_parent

    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the agent
        signal.signal(number, signal.SIG_IGN)
    order = json.loads(sys.argv[1])
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    nearby = NearbyConfig(**order.get("nearby", {}))
    server = Server(open_store(order["run"]), Path(order["folder"]), order["budget_nbytes"], order["member"], nearby)
    threading.Thread(target=server.serve, daemon=True).start()
    sys.stdin.read()  # until the agent closes it
    server.stop()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()


__all__ = ["Courier", "Line", "Local", "NodeUploader", "Remote", "Server", "courier_at", "fact_of", "fence", "seen_here"]
