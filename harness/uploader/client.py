"""Who talks to a node's uploader: workers that hand it snapshots, the agent that holds it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from harness.bucket.epochs import newest_epoch
from harness.core.facts import Fact, SnapshotCommitted, SnapshotFailed
from harness.core.values import NewerProtocol
from harness.core.world import Fenced
from harness.node.progress import WAITS_FOR_SNAPSHOTS, ProgressFile, Sign
from harness.uploader.nearby import NEAR, NearbyConfig, tiers_for
from storage.errors import StoreError
from storage.folder_tiers import FolderTier
from storage.last_in_line import LastInLine
from storage.manifest import Manifest, Ref
from storage.objects import ObjectStore
from storage.own_folders import NotOurs, check_caller, is_ours
from storage.pacing import TrainingSeen
from storage.staging import PREFIX, Segment, Stage, StageFull, default_parent, sweep
from storage.tiers import SegmentTier, share
from storage.upload import Uploader, UploadJob, UploadOutcome

# the longest wait for an answer of the uploader (making a big segment takes seconds)
ANSWER_S = 30.0
CONNECT_S = 15.0  # ... for its start; then the trainer sends for itself
FREE_S = 10.0  # ... until it no longer reads a segment that is needed
AGENT_ANSWER_S = 2.0  # the agent has more to do than to wait
BUFFERS = 2  # one being sent, one being filled
NICE = 10
NEAR_S = 20.0  # the longest that a node which leaves stays for its neighbour to have what it holds
Done = Callable[[UploadOutcome], None]
Free = Callable[[], None]
FileRange = tuple[str, int, int]  # file, start, end


class Courier(Protocol):
    """What a session needs of whoever sends its snapshots."""

    def segment(self, nbytes: int) -> Segment:
        """Memory for one more snapshot, ours until it is sent or given back. Raises StageFull."""

    def give_back(self, segment: Segment) -> None:
        """It is not needed after all."""

    def send(self, job: UploadJob, segment: Segment, done: Done) -> None:
        """Hand over. The segment is free again when `done` has been told, or some time later: who
        needs one asks for it by `segment`."""

    def held(self, ref: Ref) -> dict[str, Any]:
        """Where a snapshot lies nearer than in the bucket, as `nearby.tiers_for` takes it; {}:
        nowhere."""

    def open_data(self, folder: str, nbytes: int) -> dict[str, Any]:
        """Open a cache of data to other nodes. Where theirs are, as `nearby.data_peers` takes it;
        {}: nowhere."""


def fence(store: ObjectStore) -> Callable[[Ref], None]:
    """No snapshot of an epoch is committed when a newer epoch exists."""

    def check(ref: Ref) -> None:
        try:
            newest = newest_epoch(store).epoch
        except NewerProtocol as e:
            raise Fenced(
                f"epoch {ref.epoch} is over: a newer version of this code has begun another ({e})"
            ) from e
        if newest > ref.epoch:
            raise Fenced(
                f"epoch {ref.epoch} is over: a newer one exists, so its snapshot of step "
                f"{ref.step} is not committed"
            )

    return check


@contextlib.contextmanager
def socket_in(folder: Path) -> Iterator[str]:
    """Its address: a path of at most 107 bytes, which on Linux any folder can have by way of a
    descriptor."""
    if not sys.platform.startswith("linux"):
        yield str(folder / "socket")
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)


def sign_seen(sign: Sign | None) -> TrainingSeen | None:
    """As `storage.pacing.TrainingWatch`."""
    if sign is None:
        return None
    return TrainingSeen(sign.step, sign.place in WAITS_FOR_SNAPSHOTS, sign.step_s)


@dataclass
class _Slot:
    """`near`: what it holds is committed, and on its way to nearer tiers."""

    segment: Segment
    busy: bool = False
    near: bool = False


class Local:
    """In the trainer's own process, in memory of its own."""

    def __init__(
        self,
        store: ObjectStore,
        on_outcome: Callable[[UploadJob, UploadOutcome], None],
        progress: ProgressFile | None = None,
    ):
        seen = (
            (lambda where: sign_seen(progress.sign))
            if progress is not None
            else (lambda where: None)
        )
        self._uploader = Uploader(
            store, fence(store), on_outcome, line=LastInLine(NICE), watch=seen
        )
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

    def send(self, job: UploadJob, segment: Segment, done: Done) -> None:
        def landed(outcome: UploadOutcome) -> None:
            self.give_back(segment)
            done(outcome)

        self._uploader.submit(job, segment.view, landed)

    def held(self, ref: Ref) -> dict[str, Any]:
        return {}

    def open_data(self, folder: str, nbytes: int) -> dict[str, Any]:
        return {}


class Line:
    """Requests and answers over the uploader's socket. Raises ConnectionError when it is not
    there (any more)."""

    def __init__(
        self, folder: Path, connect_s: float = CONNECT_S, on_lost: Callable[[], None] = lambda: None
    ):
        deadline_s = time.monotonic() + connect_s
        while True:
            self._socket = socket.socket(socket.AF_UNIX)
            try:
                if not is_ours(folder):
                    raise ConnectionError("it is no folder of this user's own")
                with socket_in(folder) as address:
                    self._socket.connect(address)
                check_caller(self._socket)
                break
            except (OSError, NotOurs) as e:
                self._socket.close()
                if time.monotonic() > deadline_s:
                    raise ConnectionError(f"no uploader answers in {folder} ({e})") from e
                time.sleep(0.05)
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._later: dict[int, tuple[UploadJob, Done, Free]] = {}
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

    def send(self, job: UploadJob, path: str, done: Done, free: Free = lambda: None) -> None:
        """`done` is told the outcome; `free`, that nobody needs the segment any more. Raises
        ConnectionError."""
        number = next(self._numbers)
        self._later[number] = job, done, free
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
                    continue
                job, done, free = self._later[number]
                if body.get("free") or "error" in body:
                    del self._later[number]
                    free()
                if "outcome" in body:
                    done(UploadOutcome.from_dict(body["outcome"]))
                elif "error" in body:
                    done(
                        UploadOutcome(
                            job.ref,
                            job.rank,
                            "failed",
                            error=body["error"],
                            kind="StoreError",
                            note=job.note,
                        )
                    )
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
    """The uploader process of this node. Should it die, what it had not finished is sent from
    here, and so is all that follows."""

    def __init__(self, folder: Path, epoch: int, local_rank: int, fallback: Local):
        self._epoch, self._rank, self._fallback = epoch, local_rank, fallback
        self._slots: list[_Slot] = []
        self._pending: dict[Ref, tuple[UploadJob, Segment, Done]] = {}
        self._lock, self._reserving = threading.Lock(), threading.Lock()
        self._freed = threading.Condition()
        self._line = Line(folder, on_lost=self._take_over)

    def segment(self, nbytes: int) -> Segment:
        with self._reserving:
            if (segment := self._free_one(nbytes)) is not None:
                return segment
            unused = [str(s.segment.path) for s in self._slots if not s.busy]  # of another size
            self._slots = [s for s in self._slots if s.busy]
            try:
                answer = self._line.ask(
                    "reserve",
                    rank=self._rank,
                    epoch=self._epoch,
                    nbytes=max(1, nbytes),
                    unused=unused,
                )
            except ConnectionError:
                return self._fallback.segment(nbytes)
            except StageFull as e:
                with self._freed:  # it stops copying for that
                    self._freed.wait_for(lambda: not any(s.near for s in self._slots), FREE_S)
                if (segment := self._free_one(nbytes)) is not None:
                    return segment
                if self._slots:
                    raise
                print(f"harness: {e}; snapshots are staged in the trainer's own memory", flush=True)
                return self._fallback.segment(nbytes)
            self._slots.append(_Slot(Segment.open(Path(answer["path"])).touch(), busy=True))
            return self._slots[-1].segment

    def _free_one(self, nbytes: int) -> Segment | None:
        for slot in self._slots:
            if not slot.busy and slot.segment.nbytes == max(1, nbytes):
                slot.busy = True
                return slot.segment
        return None

    def give_back(self, segment: Segment) -> None:
        self._fallback.give_back(segment)
        with self._freed:
            for slot in self._slots:
                if slot.segment is segment:
                    slot.busy = slot.near = False
            self._freed.notify_all()

    def send(self, job: UploadJob, segment: Segment, done: Done) -> None:
        slot = next((slot for slot in self._slots if slot.segment is segment), None)
        if slot is None:
            self._fallback.send(job, segment, done)
            return

        def landed(outcome: UploadOutcome) -> None:
            with self._lock:
                self._pending.pop(job.ref, None)
            slot.near = slot.busy
            done(outcome)

        def free() -> None:
            self.give_back(segment)

        def sent_from_here(outcome: UploadOutcome) -> None:
            free()
            landed(outcome)

        with self._lock:
            self._pending[job.ref] = job, segment, sent_from_here
        try:
            self._line.send(job, str(segment.path), landed, free)
        except OSError:
            # it died; had it our job, then `_take_over` was called, and does nothing the second
            # time
            self._take_over()

    def _take_over(self) -> None:
        """The token is the same, so sending a share again is harmless."""
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
        for slot in [slot for slot in self._slots if slot.near]:
            self.give_back(slot.segment)
        for job, segment, landed in pending:
            self._fallback.send(job, segment, landed)

    def held(self, ref: Ref) -> dict[str, Any]:
        try:
            return dict(self._line.ask("held", ref=ref.name)["near"])
        except (ConnectionError, StageFull):
            return {}

    def open_data(self, folder: str, nbytes: int) -> dict[str, Any]:
        try:
            return dict(self._line.ask("data", folder=folder, nbytes=nbytes)["near"])
        except (ConnectionError, StageFull):
            return {}


def courier_at(folder: Path, epoch: int, local_rank: int, local: Local) -> Courier:
    """The uploader whose stage `folder` is; `local` if nobody answers there."""
    try:
        return Remote(folder, epoch, local_rank, local)
    except ConnectionError as e:
        print(f"harness: {e}; snapshots are sent from this process", flush=True)
        return local


def fact_of(job: UploadJob, outcome: UploadOutcome) -> Fact:
    """What the journal says of a job that is done."""
    note, ref = job.note, job.ref
    if outcome.state != "committed":
        return SnapshotFailed(ref.step, ref.epoch, outcome.error)
    commit_s = time.time() - note["t_start"]
    return SnapshotCommitted(
        ref.step,
        ref.epoch,
        outcome.nbytes,
        note["stall_s"],
        commit_s,
        note["why"],
        note["t_start"],
        outcome.weights,
        outcome.slowdown,
        outcome.pace,
        note.get("interval_s", 0.0),
        note.get("between_losses_s", 0.0),
    )


def seen_here(parent: Path | None = None) -> Callable[[Manifest], dict[str, float]]:
    """What the uploaders of this node and user have of a snapshot: tier -> share of its bytes,
    nearest first. Nobody answers: {}."""
    lines = []
    for folder in filter(is_ours, (parent or default_parent()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):  # of a dead agent
            lines.append(Line(folder, connect_s=0.0))

    def near(manifest: Manifest) -> dict[str, float]:
        chunks: dict[str, set[str]] = {}
        for line in lines:
            with contextlib.suppress(OSError, StoreError):
                held = line.ask("held", answer_s=AGENT_ANSWER_S, ref=manifest.ref.name)["near"]
                for tier in tiers_for(manifest, held):
                    if isinstance(tier, SegmentTier | FolderTier):
                        chunks.setdefault(tier.name, set()).update(tier.list())
        return {name: found for name, ids in chunks.items() if (found := share(manifest, ids))}

    return near


# ---- the agent's side ----------------------------------------------------------------------------
class NodeUploader:
    """The uploader of a node, held by its agent, and the stage that both own. Every call is
    bounded and harmless when it is dead."""

    def __init__(
        self,
        run: str,
        member: str,
        parent: Path | None,
        budget_nbytes: int | None,
        log: Path,
        nearby: NearbyConfig,
    ):
        self.run, self.member, self._log, self._nearby = run, member, log, nearby
        sweep(parent)
        self.stage = Stage(parent, budget_nbytes)
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Line | None = None
        self._deadline_s: float | None = None

    @property
    def folder(self) -> Path:
        """Where snapshots are staged."""
        return self.stage.folder

    def ensure(self) -> None:
        """Start it, or start it again."""
        if self._process is not None and self._process.poll() is None:
            return
        # what one that died has left; who maps a segment keeps its memory
        for left in self.stage.folder.iterdir():
            if left.name not in ("lock", NEAR):
                left.unlink(missing_ok=True)
        self._line = None
        order = {
            "run": self.run,
            "folder": str(self.stage.folder),
            "budget_nbytes": self.stage.budget_nbytes,
            "member": self.member,
        }
        order["nearby"] = replace(
            self._nearby, memory_nbytes=self.stage.budget_nbytes // 2
        ).to_dict()
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.uploader.server", json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def busy(self) -> int:
        """Shares of snapshots that are not written yet; 0 if nobody answers."""
        answer = self._ask("busy")
        return int(answer["busy"]) if answer else 0

    def drain(self, deadline_s: float | None) -> None:
        """This node has until then (wall clock); None: it stays after all."""
        self._deadline_s = deadline_s
        self._ask("drain", deadline_s=deadline_s)

    def settle(self, wait_s: float, near: bool = False) -> None:
        """Until nothing is under way to the bucket, or `wait_s`. `near`: nor to a nearer tier, or
        `NEAR_S`."""
        until_s = time.monotonic() + (min(wait_s, NEAR_S) if near else wait_s)
        while time.monotonic() < until_s:
            said = self._ask("busy")
            if not said or not said["near" if near else "busy"]:
                break
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
