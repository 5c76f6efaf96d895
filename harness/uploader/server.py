"""Uploads beside the trainer: the uploader process of a node, and what the session and the agent
say to it.

`python -m harness.uploader.server` is started by the agent, one per node. It makes the shared
segments that workers stage into, sends what they hand over, commits, prunes, records the facts of
it, and lives on when a worker dies. It dies with its agent. One JSON object per line over a Unix
socket in the stage's folder, which only its own user can enter; bytes never travel, they lie in the
segments.

    reserve   a segment for one more snapshot of a rank            held    where a committed
              snapshot lies near (nearby.py)
    send      a job; its outcome is told when it is known, and     drain   there is a deadline;
              when its segment is free again                       busy: how many shares are not
                                                                   written
    data      a cache of data, open to peers from now on; where theirs are

Without an agent a session uses `Local`: the same engine on threads of the trainer's process. Knows
nothing of torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.bucket.heads import signed
from harness.bucket.journal import Journal
from harness.core.facts import DrainVerdict
from harness.core.last_words import keep_secrets
from harness.node.progress import read as read_sign
from harness.uploader.client import NICE, fact_of, fence, sign_seen, socket_in
from harness.uploader.nearby import Nearby, NearbyConfig
from storage.bounded_http import DEAF_S, OUT_OF_DESCRIPTORS
from storage.errors import StoreError
from storage.last_in_line import LastInLine, can_come_back
from storage.manifest import Ref, SnapshotCorrupt
from storage.objects import ObjectStore
from storage.opening import open_store
from storage.own_folders import NotOurs, check_caller
from storage.pacing import TrainingSeen
from storage.snapshots import Snapshots
from storage.staging import Segment, Segments, StageFull
from storage.tiers import SegmentTier
from storage.upload import Forecast, Uploader, UploadJob, UploadOutcome

if TYPE_CHECKING:
    from harness.uploader.client import FileRange

TellLater = Callable[[dict[str, Any]], None]
CONNECTIONS = (
    128  # at once: the agent, workers of this node and of the epoch before, a person or two
)
STACK_NBYTES = 1 << 20  # of a thread, of which there are many
LONGEST_NBYTES = 256 << 20  # of one request: a job names every tensor of a rank's share
NO_REQUEST = (ValueError, AttributeError, KeyError, TypeError, OverflowError)


# ---- the process ---------------------------------------------------------------------------------
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


class _Trainers:
    """Who hands over snapshots: where each one's progress is seen, and its process (0: not
    known)."""

    def __init__(self, line: LastInLine):
        self.line, self._pids, self._lock = line, dict[str, int](), threading.Lock()

    def came(self, watch: str, pid: int) -> None:
        with self._lock:
            self._set({**self._pids, watch: pid})

    def left(self, pid: int) -> None:
        with self._lock:
            self._set({w: p for w, p in self._pids.items() if not pid or p != pid})

    def _set(self, pids: dict[str, int]) -> None:
        """Both are replaced and never changed: others read them meanwhile."""
        self._pids, self.line.trainers = pids, set(pids.values()) - {0, os.getpid()}

    def seen(self, watch: str) -> TrainingSeen | None:
        """As `TrainingWatch`; None of who has left."""
        return sign_seen(read_sign(Path(watch))) if watch in self._pids else None


class UploadServer:
    """One node's uploader. `serve` returns when `stop` is called."""

    def __init__(
        self,
        store: ObjectStore,
        folder: Path,
        budget_nbytes: int,
        member: str,
        nearby: NearbyConfig,
        line: LastInLine | None = None,
    ):
        self.store, self.member = store, member
        self.snapshots = Snapshots(store)
        self.journal = Journal(store, f"uploader-{member}-{secrets.token_hex(3)}", time.time)
        self.segments = Segments(folder, budget_nbytes)
        self._trainers = _Trainers(line or LastInLine(NICE))
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
        self.nearby = Nearby(store, member, folder, nearby, self._staged)
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
                if e.errno not in OUT_OF_DESCRIPTORS:  # stopped
                    return
                time.sleep(DEAF_S)
            else:
                if self._places.acquire(blocking=False):
                    threading.Thread(
                        target=self._talk, args=(connection, caller), daemon=True
                    ).start()
                else:
                    connection.close()

    def stop(self) -> None:
        self._stopped = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.nearby.close()
        with contextlib.suppress(StoreError):
            self.journal.flush()

    def _talk(self, connection: socket.socket, caller: int) -> None:
        """With one worker, or the agent. That it hangs up (or dies) changes nothing for what it
        has handed over, but that nobody minds any more how fast that is sent."""
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
        """One request. Raises ConnectionError for what is none: who says it is not of this
        version."""
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
        """None: the answer comes `later`, in one piece or two."""
        match request.pop("do"):
            case "reserve":
                return {"path": str(self._reserve(**request).path)}
            case "send":
                job = UploadJob.from_dict(request["job"])
                self._trainers.came(job.beside.watch, caller)
                self._send(job, request["path"], later)
                return None
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
            # Whoever reserves has restored, and so have all ranks of its epoch: what older epochs
            # left is of no use to them.
            for path, kept in list(self._kept.items()):
                if not kept.busy and (path in unused or kept.epoch < epoch):
                    self.segments.drop(Path(path))
                    del self._kept[path]
            self.nearby.shared_no_more()
            try:
                segment = self.segments.create(nbytes)
            except StageFull:
                self.nearby.hurry()  # who asks may have one of those that are copied
                raise
            self._kept[str(segment.path)] = _Kept(segment, rank, epoch)
            return segment

    def _send(self, job: UploadJob, path: str, later: TellLater) -> None:
        """Tells the outcome when it is known, and that the segment is free when the nearer tiers
        have had what they can of it: nobody waits for these."""
        with self._lock:
            kept = self._kept[path]
            kept.busy, kept.ref, kept.parts, kept.tier = True, None, {}, None

        def landed(outcome: UploadOutcome) -> None:
            in_a_hurry = self._deadline_s is not None and self.uploader.busy()
            near = outcome.state == "committed" and self.nearby.config.keeps and not in_a_hurry
            with self._lock:
                kept.busy = near
                if outcome.state in ("committed", "waiting"):
                    kept.ref = job.ref
                    kept.parts = {key: job.files[name] for key, name in outcome.parts.items()}
            later({"outcome": outcome.to_dict(), "free": not near})
            if near:
                try:
                    self._fill(kept, job, outcome)
                finally:
                    kept.busy = False
                    later({"free": True})

        self.uploader.submit(
            job, kept.segment.view, landed, lambda forecast: self._expect(forecast, job)
        )

    def _held(self, ref: Ref) -> dict[str, FileRange]:
        with self._lock:
            kept = [(path, k) for path, k in self._kept.items() if k.ref == ref]
            return {
                key: (path, start, end) for path, k in kept for key, (start, end) in k.parts.items()
            }

    def _fill(self, kept: _Kept, job: UploadJob, outcome: UploadOutcome) -> None:
        """The nearer tiers have it too. That they do not is no error."""
        with contextlib.suppress(StoreError, SnapshotCorrupt):
            manifest = self.snapshots.load(job.ref)
            places = {key: job.files[name] for key, name in outcome.parts.items()}
            path = str(kept.segment.path)
            kept.tier = SegmentTier(
                manifest, {key: (path, start, end) for key, (start, end) in places.items()}
            )
            self.nearby.fill(
                manifest,
                {key: kept.segment.view[start:end] for key, (start, end) in places.items()},
            )

    def _staged(self) -> list[SegmentTier]:
        with self._lock:
            return [k.tier for k in self._kept.values() if k.tier is not None]

    # -- drains and facts --
    def _drain(self, deadline_s: float | None) -> None:
        """`deadline_s`: wall clock, None: called off."""
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
        with contextlib.suppress(StoreError):  # kept, and tried again with the next fact
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
    from harness.node.processes import die_with_parent

    die_with_parent()
    keep_secrets(os.environ)
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the agent
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
        LastInLine(NICE, idle=can_come_back(NICE)),
    )
    threading.Thread(target=server.serve, daemon=True).start()
    sys.stdin.read()  # until the agent closes it
    server.stop()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
