"""The hand-off of snapshots from workers to their node's uploader: the client in each worker, and
the server with its process. `node_uploader.py` starts and stops that process for the agent."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.bucket.journal import Journal
from harness.bucket.signed_heads import signed
from harness.core.facts import DrainVerdict
from harness.core.masking import keep_secrets
from harness.node.heartbeat import die_with_parent, tolerate_full_logs
from harness.node.heartbeat import read as read_sign
from harness.uploader.liveness import UploaderHeartbeat
from harness.uploader.node_tiers import NearbyConfig, NodeTiers
from harness.uploader.senders import (
    NICE,
    Done,
    InProcessSender,
    Slot,
    SnapshotSender,
    fact_of,
    fence,
    not_kept,
    sign_seen,
)
from storage.errors import StoreError
from storage.http_server import DEAF_S, OUT_OF_DESCRIPTORS
from storage.private_folders import NotOurs, check_caller, is_ours
from storage.snapshots.manifest import Ref, SnapshotCorrupt
from storage.snapshots.pacer import IdlePriority, TrainingSeen, can_come_back
from storage.snapshots.snapshots import Snapshots
from storage.snapshots.staging import Segment, Segments, StageFull
from storage.snapshots.upload import Forecast, Uploader, UploadJob, UploadOutcome
from storage.stores.bounded_store import once_unread, reader_of
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import open_store
from storage.tiers.tiers import SegmentTier

# the longest wait for an answer of the uploader (making a big segment takes seconds)
ANSWER_S = 30.0
CONNECT_S = 15.0  # the longest wait for its start; afterwards the trainer itself uploads
HAND_OVER_S = 1.0  # the longest that a trainer waits until a job is in the socket
PUT_AWAY_S = 1.0  # between two looks whether the agent has given up a silent uploader
FREE_S = 10.0  # the longest wait for a needed segment that it still reads
AGENT_ANSWER_S = 2.0  # the agent's timeout, shorter since it must not block
NEAR_S = 20.0  # the longest that a leaving node waits until its neighbour has copied its data
Free = Callable[[], None]
FileRange = tuple[str, int, int]  # file, start, end


@contextlib.contextmanager
def socket_in(folder: Path) -> Iterator[str]:
    """Yield the address of the socket in a folder. It must be a path of at most 107 bytes; on Linux
    a path through a file descriptor makes any folder's short enough."""
    if not sys.platform.startswith("linux"):
        yield str(folder / "socket")
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/socket"
    finally:
        os.close(fd)


UploaderAnswer = queue.SimpleQueue[dict[str, Any] | None]  # one answer; None: the uploader is gone


class UploaderConnection:
    """A connection to the uploader's socket, for requests and answers. Raises ConnectionError when
    the uploader is not there, or no longer there.

    Requests are sent by a thread, as an uploader that is stopped reads nothing."""

    def __init__(
        self, folder: Path, connect_s: float = CONNECT_S, on_lost: Callable[[], None] = lambda: None
    ):
        deadline_s = time.monotonic() + connect_s
        while True:
            self._socket = socket.socket(socket.AF_UNIX)
            try:
                if not is_ours(folder):
                    raise ConnectionError("it is no folder of this user's own")
                self._path, self._inode = folder / "socket", _inode(folder / "socket")
                with socket_in(folder) as address:
                    self._socket.settimeout(0.0)  # whose queue of callers is full may be stopped
                    self._socket.connect(address)
                    self._socket.settimeout(None)
                check_caller(self._socket)
                break
            except (OSError, NotOurs) as e:
                self._socket.close()
                if time.monotonic() > deadline_s:
                    raise ConnectionError(f"no uploader answers in {folder} ({e})") from e
                time.sleep(0.05)
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._answers: dict[int, UploaderAnswer] = {}
        self._later: dict[int, tuple[UploadJob, Done, Free]] = {}
        # requests, and what is set once each is in the socket; None: the end
        self._outbox: queue.SimpleQueue[tuple[bytes, threading.Event] | None] = queue.SimpleQueue()
        self._on_lost, self.lost = on_lost, False
        threading.Thread(target=self._read, name="uploader-line", daemon=True).start()
        threading.Thread(target=self._write, name="uploader-requests", daemon=True).start()

    def begin(self, what: str, **body: Any) -> UploaderAnswer:
        """Send a request, and return where its answer will be. Raises ConnectionError."""
        answers: UploaderAnswer = queue.SimpleQueue()
        number = next(self._numbers)
        self._answers[number] = answers
        self._say({"do": what, "n": number, **body})
        return answers

    def ask(self, what: str, *, answer_s: float = ANSWER_S, **body: Any) -> dict[str, Any]:
        """Send a request and return its answer. Raises ConnectionError, also after a timeout of
        `answer_s`, and StageFull for an answer that is an error."""
        answers = self.begin(what, **body)
        try:
            answer = answers.get(timeout=answer_s)
        except queue.Empty:
            answer = None
        if answer is None:
            raise ConnectionError(f"the uploader did not answer within {answer_s:.0f} s")
        if "error" in answer:
            raise StageFull(answer["error"])
        return answer

    def send(
        self,
        job: UploadJob,
        path: str,
        done: Done,
        free: Free = lambda: None,
        what: str = "send",
    ) -> None:
        """Hand over a job. `done` is called with its outcome; `free` when nobody needs the segment
        any more. Unless the uploader is stopped, the job outlives this process from now on. Raises
        ConnectionError."""
        number = next(self._numbers)
        self._later[number] = job, done, free
        said = self._say({"do": what, "n": number, "job": job.to_dict(), "path": path})
        said.wait(HAND_OVER_S)

    def _say(self, body: dict[str, Any]) -> threading.Event:
        said = threading.Event()
        with self._lock:
            if self.lost:
                raise ConnectionError("the uploader is gone")
            self._outbox.put((json.dumps(body).encode() + b"\n", said))
        return said

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # `_read` notices that the uploader is gone
            while (request := self._outbox.get()) is not None:
                line, said = request
                self._socket.sendall(line)
                said.set()

    def _lines(self) -> Iterator[bytes]:
        """Yield what the uploader says, until it is gone or the agent has put it away: a process
        that hangs in the kernel keeps its connections even when it is killed."""
        poll, rest = select.poll(), b""
        poll.register(self._socket, select.POLLIN)
        while True:
            while not poll.poll(PUT_AWAY_S * 1000):
                if _inode(self._path) != self._inode:
                    return
            if not (data := self._socket.recv(1 << 20)):
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from lines

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._lines():
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
        self._outbox.put(None)
        with contextlib.suppress(OSError):  # ends a request that nobody reads
            self._socket.shutdown(socket.SHUT_RDWR)
        for one in list(self._answers.values()):
            one.put(None)
        self._on_lost()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _inode(path: Path) -> int:
    """Return the number of a file, which another file of the same name does not have; 0: none."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


class UploaderClient:
    """The courier that hands snapshots to this node's uploader process. If that dies, unfinished
    snapshots are sent by `fallback`, and so are later ones until there is a new uploader."""

    def __init__(self, folder: Path, epoch: int, local_rank: int, fallback: InProcessSender):
        self._folder, self._fallback, self._slots = folder, fallback, list[Slot]()
        self._mine: dict[str, Any] = {"rank": local_rank, "epoch": epoch}
        self._pending: dict[Ref, tuple[UploadJob, Segment, Done]] = {}
        self._keeping: dict[Ref, tuple[UploadJob, Done]] = {}
        self._lock, self._reserving = threading.Lock(), threading.Lock()
        self._freed = threading.Condition()
        self._line = UploaderConnection(folder, on_lost=self._take_over)

    def segment(self, nbytes: int, must: bool = True) -> Segment:
        with self._reserving:
            if self._line.lost:
                with contextlib.suppress(ConnectionError):  # there is no new uploader yet
                    line = UploaderConnection(self._folder, 0.0, self._take_over)
                    self._slots = []  # first: `send` must not name them to a new uploader
                    self._line = line
            if (segment := self._free_one(nbytes)) is not None:
                return segment
            # free segments here have another size
            unused = [str(s.segment.path) for s in self._slots if not s.busy]
            self._slots = [s for s in self._slots if s.busy]
            try:
                need: dict[str, Any] = {"nbytes": max(1, nbytes), "unused": unused}
                answer = self._line.ask("reserve", **self._mine, **need)
            except ConnectionError:
                return self._fallback.segment(nbytes)
            except StageFull as e:
                if not must:
                    raise
                with self._freed:  # the uploader stops copying to nearer tiers for this
                    self._freed.wait_for(lambda: not any(s.near for s in self._slots), FREE_S)
                if (segment := self._free_one(nbytes)) is not None:
                    return segment
                if self._slots:
                    raise
                print(f"harness: {e}; snapshots are staged in the trainer's own memory", flush=True)
                return self._fallback.segment(nbytes)
            self._slots.append(Slot(Segment.open(Path(answer["path"])).touch(), busy=True))
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
        line, slots = self._line, self._slots
        slot = next((slot for slot in slots if slot.segment is segment), None)
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
            line.send(job, str(segment.path), landed, free)
        except OSError:
            # The uploader died. If it already had our job, `_take_over` has run, and a second call
            # does nothing.
            self._take_over()

    def keep(self, job: UploadJob, segment: Segment, done: Done) -> None:
        if not any(slot.segment is segment for slot in self._slots):
            self._fallback.keep(job, segment, done)
            return

        def kept(outcome: UploadOutcome) -> None:
            with self._lock:
                waits = self._keeping.pop(job.ref, None)
            if waits is not None:
                done(outcome)

        with self._lock:
            self._keeping[job.ref] = job, done
        try:
            self._line.send(job, str(segment.path), kept, what="keep")
        except OSError:
            self._take_over()

    def set_ahead(self, state: str) -> None:
        with contextlib.suppress(ConnectionError):
            self._line.begin("set ahead", state=state)

    def ahead(self) -> str:
        try:
            return str(self._line.ask("ahead")["state"])
        except (ConnectionError, StageFull):
            return ""

    def _take_over(self) -> None:
        """Send unfinished jobs by the fallback. The fencing token is unchanged, so sending a share
        twice is harmless."""
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
            keeping, self._keeping = list(self._keeping.values()), {}
        for job, done in keeping:
            done(not_kept(job, "this node's uploader has ended"))
        for slot in [slot for slot in self._slots if slot.near]:
            self.give_back(slot.segment)
        for job, segment, landed in pending:
            self._fallback.send(job, segment, landed)

    def close(self) -> None:
        with self._lock:
            self._pending.clear()  # the uploader has it
        self._line.close()

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


def courier_at(folder: Path, epoch: int, local_rank: int, local: InProcessSender) -> SnapshotSender:
    """Return a courier to the uploader whose stage is `folder`; `local` if nobody answers there."""
    try:
        return UploaderClient(folder, epoch, local_rank, local)
    except ConnectionError as e:
        print(f"harness: {e}; snapshots are sent from this process", flush=True)
        return local


# The uploader process of a node, which uploads snapshots beside the trainer, and its protocol.

TellLater = Callable[[dict[str, Any]], None]
CONNECTIONS = (
    128  # at once: the agent, this node's workers of this and the last generation, a few people
)
STACK_NBYTES = 1 << 20  # of each thread; small, since there are many
LONGEST_NBYTES = 256 << 20  # of one request; a job lists every tensor of a rank's share
NO_REQUEST = (ValueError, AttributeError, KeyError, TypeError, OverflowError)


# ---- the process ---------------------------------------------------------------------------------
@dataclass
class _Kept:
    """A segment and its contents."""

    segment: Segment
    rank: int
    epoch: int
    busy: bool = False
    ref: Ref | None = None  # the snapshot, or kept state, whose share of this rank is in here
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)
    tier: SegmentTier | None = None  # the part that peers may read


class _Trainers:
    """The trainers that hand over snapshots: the progress file and process id of each (0:
    unknown)."""

    def __init__(self, line: IdlePriority):
        self.line, self._pids, self._lock = line, dict[str, int](), threading.Lock()

    def came(self, watch: str, pid: int) -> None:
        with self._lock:
            self._set({**self._pids, watch: pid})

    def left(self, pid: int) -> None:
        with self._lock:
            self._set({w: p for w, p in self._pids.items() if not pid or p != pid})

    def _set(self, pids: dict[str, int]) -> None:
        """Replace both collections. They are never changed in place, since other threads read
        them."""
        self._pids, self.line.trainers = pids, set(pids.values()) - {0, os.getpid()}

    def seen(self, watch: str) -> TrainingSeen | None:
        """Return a trainer's progress, for `TrainingWatch`; None: it has left."""
        return sign_seen(read_sign(Path(watch))) if watch in self._pids else None


class UploadServer:
    """The uploader of one node. `serve` returns when `stop` is called."""

    def __init__(
        self,
        store: ObjectStore,
        folder: Path,
        budget_nbytes: int,
        member: str,
        nearby: NearbyConfig,
        line: IdlePriority | None = None,
    ):
        self.store, self.member = store, member
        self.snapshots = Snapshots(store)
        self.journal = Journal(store, f"uploader-{member}-{secrets.token_hex(3)}", time.time)
        self.segments = Segments(folder, budget_nbytes)
        self._trainers = _Trainers(line or IdlePriority(NICE))
        self.uploader = Uploader(
            store,
            fence(store),
            self._record,
            line=self._trainers.line,
            watch=self._trainers.seen,
        )
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()
        self._expected: dict[tuple[Ref, int], tuple[bool, float, float]] = {}
        self._deadline_s: float | None = None  # wall clock
        self.nearby = NodeTiers(store, member, folder, nearby, self._staged)
        self._places, self._stopped = threading.BoundedSemaphore(CONNECTIONS), False
        self._socket = socket.socket(socket.AF_UNIX)
        with socket_in(folder) as address:
            self._socket.bind(address)
        self._socket.listen(64)

    def serve(self) -> None:
        while not self._stopped:
            try:
                connection, _ = self._socket.accept()
                caller = check_caller(connection)
            except NotOurs:
                connection.close()
            except OSError as e:
                if e.errno not in OUT_OF_DESCRIPTORS:  # `stop` was called
                    return
                time.sleep(DEAF_S)
            else:
                if self._places.acquire(blocking=False):
                    words = connection, caller
                    threading.Thread(target=self._talk, args=words, daemon=True).start()
                else:
                    connection.close()

    def works(self) -> bool:
        """Return whether requests are answered and jobs go on. Blocks where a request would."""
        with self._lock:
            return not self._stopped and not self.uploader.stands_still()

    def stop(self) -> None:
        self._stopped = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.nearby.close()
        with contextlib.suppress(StoreError):
            self.journal.flush()

    def _talk(self, connection: socket.socket, caller: int) -> None:
        """Serve the connection of one worker or the agent. When it closes (or the caller dies), the
        jobs it handed over go on, but no longer at a pace that spares that trainer."""
        lock = threading.Lock()

        def say(body: dict[str, Any]) -> None:
            with lock, contextlib.suppress(OSError):
                connection.sendall(json.dumps(body).encode() + b"\n")

        try:
            with contextlib.suppress(OSError), connection, connection.makefile("rb") as lines:
                while (line := lines.readline(LONGEST_NBYTES)).endswith(b"\n"):
                    self._hear(line, say, caller)
        finally:
            self._trainers.left(caller)
            self._places.release()

    def _hear(self, line: bytes, say: Callable[[dict[str, Any]], None], caller: int) -> None:
        """Answer one request. Raises ConnectionError for a line that is no request, since its
        sender is not of this version."""
        try:
            request = json.loads(line)
            number = int(request.pop("n"))
        except (*NO_REQUEST, RecursionError) as e:
            raise ConnectionError(f"no request: {e}") from e
        answer: dict[str, Any] | None
        try:
            answer = self._answer(request, lambda body: say({"n": number, **body}), caller)
        except (StoreError, OSError) as e:
            answer = {"error": str(e)}
        except NO_REQUEST as e:
            answer = {"error": f"the uploader does not understand that: {type(e).__name__}: {e}"}
        if answer is not None:
            say({"n": number, **answer})

    def _answer(
        self, request: dict[str, Any], later: TellLater, caller: int
    ) -> dict[str, Any] | None:
        """Return the answer to a request; None: it comes by `later`, in one piece or two."""
        match request.pop("do"):
            case "reserve":
                return {"path": str(self._reserve(**request).path)}
            case "send":
                job = UploadJob.from_dict(request["job"])
                self._trainers.came(job.beside.watch, caller)
                self._send(job, request["path"], later)
                return None
            case "keep":
                job = UploadJob.from_dict(request["job"])
                words = job, self._filling(request["path"]), later
                threading.Thread(target=self._keep, args=words, daemon=True).start()
                return None
            case "set ahead":
                self.nearby.set_ahead(request["state"])
                return {}
            case "ahead":
                return {"state": self.nearby.ahead.encode() if self.nearby.ahead else ""}
            case "held":
                return {
                    "near": {"parts": self._held(Ref.parse(request["ref"])), **self.nearby.told()}
                }
            case "data":
                return {"near": self.nearby.open_data(request["folder"], request["nbytes"])}
            case "drain":
                self._drain(request["deadline_s"])
                return {}
            case "busy":
                with self._lock:
                    near = sum(k.busy and k.ref is not None for k in self._kept.values())
                return {"busy": self.uploader.busy(), "near": near}
            case what:
                return {"error": f"the uploader does not know {what!r}"}

    def _reserve(self, rank: int, epoch: int, nbytes: int, unused: list[str]) -> Segment:
        with self._lock:
            # A worker that reserves has restored, and so have all ranks of its generation (the
            # code's `epoch`): they need nothing that older generations left, except the newest
            # state of all nodes, in case there is a loss before the next one.
            for path, kept in list(self._kept.items()):
                ahead = self.nearby.ahead is not None and kept.ref == self.nearby.ahead.ref
                if not kept.busy and (path in unused or (kept.epoch < epoch and not ahead)):
                    self.segments.drop(Path(path))
                    del self._kept[path]
            self.nearby.shared_no_more()
            try:
                segment = self.segments.create(nbytes)
            except StageFull:
                self.nearby.hurry()  # frees the segments that are being copied to nearer tiers
                raise
            self._kept[str(segment.path)] = _Kept(segment, rank, epoch)
            return segment

    def _send(self, job: UploadJob, path: str, later: TellLater) -> None:
        """Upload a job. Report its outcome when it is known, and that the segment is free once the
        nearer tiers have copied what they can; nobody waits for that."""
        kept = self._filling(path)
        view = kept.segment.view

        def landed(outcome: UploadOutcome) -> None:
            in_a_hurry = self._deadline_s is not None and self.uploader.busy()
            near = outcome.state == "committed" and self.nearby.config.keeps and not in_a_hurry
            # told the segment is free, the trainer may send the next snapshot from it at once
            stays = near or reader_of(view) is not None
            with self._lock:
                kept.busy = stays
                if outcome.state in ("committed", "waiting"):
                    kept.ref = job.ref
                    kept.parts = {key: job.files[name] for key, name in outcome.parts.items()}
            if outcome.state == "committed":
                self.nearby.outdate(job.ref)
            later({"outcome": outcome.to_dict(), "free": not stays})
            if stays:
                try:
                    if near:
                        self._fill(kept, job, outcome)
                finally:
                    once_unread(view, free)

        def free() -> None:
            kept.busy = False
            later({"free": True})

        self.uploader.submit(
            job, kept.segment.view, landed, lambda forecast: self._expect(forecast, job)
        )

    def _filling(self, path: str) -> _Kept:
        """Return the segment at this path, which now holds what is not known yet."""
        with self._lock:
            kept = self._kept[path]
            kept.busy, kept.ref, kept.parts, kept.tier = True, None, {}, None
            return kept

    def _keep(self, job: UploadJob, kept: _Kept, later: TellLater) -> None:
        """Keep a share in memory here and on the next node, and report its outcome."""
        began_s, path, view = time.monotonic(), str(kept.segment.path), kept.segment.view
        try:
            files = {name: view[start:end] for name, (start, end) in job.files.items()}
            told = self.snapshots.list_of(
                job.ref, job.rank, job.world, files, job.tensors, job.data, job.token
            )
            spans = {
                part.key: span for part, span in zip(told.parts, job.files.values(), strict=True)
            }
            tier = SegmentTier(told.parts, {key: (path, *span) for key, span in spans.items()})
            self.nearby.keep(told, list(files.values()))
        except (StoreError, OSError, ValueError) as e:
            kept.busy = False
            later({"outcome": not_kept(job, str(e)).to_dict(), "free": True})
            return
        with self._lock:
            kept.busy, kept.ref, kept.parts, kept.tier = False, job.ref, spans, tier
        note = {**job.note, "part_list": told.to_json()}
        took_s = time.monotonic() - began_s
        outcome = UploadOutcome(
            job.ref, job.rank, "kept", job.nbytes, commit_s=took_s, note=note
        )
        later({"outcome": outcome.to_dict(), "free": True})

    def _held(self, ref: Ref) -> dict[str, FileRange]:
        with self._lock:
            kept = [(path, k) for path, k in self._kept.items() if k.ref == ref]
            return {
                key: (path, start, end) for path, k in kept for key, (start, end) in k.parts.items()
            }

    def _fill(self, kept: _Kept, job: UploadJob, outcome: UploadOutcome) -> None:
        """Copy a committed share to the nearer tiers. A failure is no error."""
        with contextlib.suppress(StoreError, SnapshotCorrupt):
            manifest = self.snapshots.load(job.ref)
            places = {key: job.files[name] for key, name in outcome.parts.items()}
            path = str(kept.segment.path)
            kept.tier = SegmentTier(
                manifest.parts, {key: (path, start, end) for key, (start, end) in places.items()}
            )
            self.nearby.fill(
                manifest,
                {key: kept.segment.view[start:end] for key, (start, end) in places.items()},
            )

    def _staged(self) -> list[SegmentTier]:
        with self._lock:
            return [k.tier for k in self._kept.values() if k.tier is not None]

    # ---- drains and facts ------------------------------------------------------------------------
    def _drain(self, deadline_s: float | None) -> None:
        """Begin a drain that ends at `deadline_s` (wall clock); None: cancel it."""
        self._deadline_s = deadline_s
        self.uploader.drain(
            None if deadline_s is None else time.monotonic() + deadline_s - time.time()
        )

    def _expect(self, found: Forecast | None, job: UploadJob) -> None:
        if found is None or self._deadline_s is None or job.ref not in found.need_s:
            return
        left_s, need_s, sure = (
            self._deadline_s - time.time(),
            found.need_s[job.ref],
            job.ref in found.sure,
        )
        self._expected[job.ref, job.rank] = (sure, left_s, need_s)
        word = "will commit" if sure else "may not commit"
        print(
            f"harness: {left_s:.1f} s left, {need_s:.1f} s needed: the snapshot of step "
            f"{job.ref.step} {word}",
            flush=True,
        )

    def _record(self, job: UploadJob, outcome: UploadOutcome) -> None:
        ref = job.ref
        if job.rank == 0:
            self.journal.record(fact_of(job, outcome))
        expected = self._expected.pop((ref, job.rank), None)
        with contextlib.suppress(StoreError):  # facts are kept, and retried with the next one
            if expected is not None:
                last = max((r.step for r in self.snapshots.refs()), default=0)
                committed = outcome.state == "committed"
                self.journal.record(
                    DrainVerdict(
                        self.member, ref.step, ref.epoch, job.rank, committed, last, *expected
                    )
                )
                if not committed:
                    print(
                        f"harness: the snapshot of step {ref.step} is not committed; last good is "
                        f"step {last}",
                        flush=True,
                    )
            self.journal.flush()


def main() -> None:
    die_with_parent()
    tolerate_full_logs()
    keep_secrets(os.environ)
    for number in (signal.SIGINT, signal.SIGTERM):  # the agent handles them
        signal.signal(number, signal.SIG_IGN)
    order = json.loads(sys.argv[1])
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    threading.stack_size(STACK_NBYTES)
    nearby = NearbyConfig(**order.get("nearby", {}))
    server = UploadServer(
        signed(open_store(order["run"]), os.environ, f"uploader {order['member']}", time.time),
        Path(order["folder"]),
        order["budget_nbytes"],
        order["member"],
        nearby,
        IdlePriority(NICE, idle=can_come_back(NICE)),
    )
    threading.Thread(target=server.serve, daemon=True).start()
    UploaderHeartbeat(Path(order["folder"]), server.works)
    sys.stdin.read()  # returns when the agent closes it or dies
    server.stop()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
