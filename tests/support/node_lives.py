"""Lives of a node, one after another in one bucket, each with a kill."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from harness.bucket.archive import read_facts
from harness.core.facts import SnapshotCommitted
from harness.node.heartbeat import die_with_parent
from harness.uploader.handoff import InProcessSender, UploadServer, courier_at
from harness.uploader.node_tiers import NearbyConfig
from storage.errors import StoreError
from storage.snapshots.manifest import Manifest, Ref, SnapshotCorrupt
from storage.snapshots.retention import Keep
from storage.snapshots.snapshot_keys import DOOM
from storage.snapshots.snapshots import Snapshots
from storage.snapshots.staging import Stage
from storage.snapshots.upload import Uploader, UploadJob, UploadOutcome
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import open_store

# Snapshots so tiny that thousands can be taken, and what must hold of them.

RANKS, STEPS, LIVES = 2, 4, 10
FROZEN_NBYTES, TRAINED_NBYTES, CHUNK_NBYTES = 24 << 10, 6 << 10, 4 << 10


class Broken(AssertionError):
    """What must hold did not. The message says how to see it again."""


def content(ref: Ref, rank: int) -> bytes:
    """A rank's bytes: most are the same in all snapshots."""
    frozen, own = random.Random(rank), random.Random(f"{ref} {rank}")
    return frozen.randbytes(FROZEN_NBYTES) + own.randbytes(TRAINED_NBYTES)


def job(ref: Ref, rank: int, world: int = RANKS, keep: int = 2) -> UploadJob:
    nbytes = FROZEN_NBYTES + TRAINED_NBYTES
    files = {"0000.bin": (0, FROZEN_NBYTES // 2), "0001.bin": (FROZEN_NBYTES // 2, nbytes)}
    sizes = [end - start for start, end in files.values()]
    chunks = [
        {"offsets": [sum(sizes[:i])], "sizes": [n], "part": name, "start": 0, "end": n}
        for i, (name, n) in enumerate(zip(files, sizes, strict=True))
    ]
    tensors = {f"model/w{rank}": {"shape": [nbytes], "dtype": "uint8", "chunks": chunks}}
    note = {"t_start": time.time(), "stall_s": 0.0, "why": "interval"}
    return UploadJob(
        ref,
        rank,
        world,
        f"t{rank}",
        files,
        tensors,
        {"step": ref.step},
        "model/",
        note=note,
        keep={"last": keep} if rank == 0 else None,
    )


def whole(snapshots: Snapshots, manifest: Manifest) -> bool:
    """Verified, and the bytes are those that its ranks had."""
    snapshots.verify(manifest)
    for rank in range(manifest.world):
        (entry,) = (entry for name, entry in manifest.tensors.items() if name == f"model/w{rank}")
        parts = [snapshots.read(manifest, c["part"], c["start"], c["end"]) for c in entry["chunks"]]
        if b"".join(parts) != content(manifest.ref, rank):
            return False
    return True


def with_small_chunks(uploader: Uploader) -> None:
    uploader.snapshots.chunk_nbytes = CHUNK_NBYTES


T = TypeVar("T")
CALLS = 90  # of the uploader in one life, about
LIFE_S = 60.0  # the longest that a life may take
# what is left of a node after a kill goes on for so long before it is taken away as well
SETTLE_S = 0.05


class _Deadly:
    """A store whose caller is killed before or after its n-th call."""

    def __init__(self, inner: ObjectStore, n: int, after: bool):
        self.url, self._inner, self._n, self._after, self._lock = (
            inner.url,
            inner,
            n,
            after,
            threading.Lock(),
        )

    def _call(self, do: Callable[[], T]) -> T:
        with self._lock:
            self._n -= 1
            mine = self._n == 0
        if mine and not self._after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = do()
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._call(lambda: self._inner.get(key, start, end))

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._call(lambda: self._inner.put(key, data))

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self._call(lambda: self._inner.create(key, data))

    def list(self, prefix: str) -> list[str]:
        return self._call(lambda: self._inner.list(prefix))

    def delete(self, key: str) -> None:
        self._call(lambda: self._inner.delete(key))

    def size(self, key: str) -> int:
        return self._call(lambda: self._inner.size(key))


def fork(do: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        do()
    except BaseException as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def _uploader(url: str, stage: Path, deadly: tuple[int, bool] | None) -> NoReturn:
    die_with_parent()
    store = open_store(url)
    server = UploadServer(
        _Deadly(store, *deadly) if deadly else store, stage, 16 << 20, "m1", NearbyConfig()
    )
    with_small_chunks(server.uploader)
    server.serve()
    os._exit(0)


def _rank(url: str, stage: Path, epoch: int, rank: int, told: int) -> None:
    die_with_parent()
    local = InProcessSender(open_store(url), lambda job, outcome: None)
    with_small_chunks(local._uploader)
    courier = courier_at(stage, epoch, rank, local)
    for step in range(epoch * STEPS, epoch * STEPS + STEPS):
        ref, done = Ref(epoch, step), threading.Event()
        one, segment = job(ref, rank), courier.segment(FROZEN_NBYTES + TRAINED_NBYTES)
        segment.view[: one.nbytes] = content(ref, rank)

        def heard(outcome: UploadOutcome, done: threading.Event = done) -> None:
            if outcome.state == "committed":
                os.write(told, f"{outcome.ref.name}\n".encode())
            done.set()

        courier.send(one, segment, heard)
        done.wait()


def _agent(
    url: str, folder: Path, epoch: int, told: int, deadly: tuple[int, bool] | None, pids: int
) -> None:
    die_with_parent()
    stage = Stage(folder, 16 << 20)
    children = [fork(lambda: _uploader(url, stage.folder, deadly))]
    children += [
        fork(lambda rank=rank: _rank(url, stage.folder, epoch, rank, told))  # type: ignore[misc]
        for rank in range(RANKS)
    ]
    os.write(pids, " ".join(map(str, children)).encode() + b"\n")
    os.close(pids)
    failed = [status for pid in children[1:] if (status := os.waitpid(pid, 0)[1])]
    os.kill(children[0], signal.SIGKILL)
    os.waitpid(children[0], 0)
    stage.close()
    if failed:
        os._exit(1)


def life(
    url: str, folder: Path, epoch: int, kill: tuple[str, float, bool] | None
) -> tuple[set[Ref], float, bool]:
    """kill: role, when (0 to 1 of a usual life), after the call. Refs that were reported,
    seconds that it took, and was it killed?"""
    told_r, told_w = os.pipe()
    pids_r, pids_w = os.pipe()
    deadly = (1 + int(kill[1] * CALLS), kill[2]) if kill and kill[0] == "uploader" else None
    t0 = time.monotonic()
    agent = fork(lambda: _agent(url, folder, epoch, told_w, deadly, pids_w))
    os.close(told_w)
    os.close(pids_w)
    with os.fdopen(pids_r) as f:
        children = [int(pid) for pid in f.readline().split()]
    killed = kill is not None
    if kill and kill[0] != "uploader":
        victim = agent if kill[0] == "agent" else children[1 + kill[2]]
        time.sleep(kill[1] * usual_s())
        killed = os.waitpid(agent, os.WNOHANG) == (0, 0)
        if killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            time.sleep(SETTLE_S)  # the others go on meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)
            os.waitpid(agent, 0)
    else:  # the ranks go on without their uploader, to the end
        guard = threading.Timer(LIFE_S, os.kill, (agent, signal.SIGKILL))
        guard.start()
        status = os.waitpid(agent, 0)[1]
        guard.cancel()
        if status != 0:
            raise Broken(
                f"the ranks did not get to the end without their uploader (status {status})"
            )
    with os.fdopen(told_r) as f:  # ends when the last of them is dead
        refs = {Ref.parse(line.strip()) for line in f if line.endswith("\n")}
    took_s = time.monotonic() - t0
    shutil.rmtree(folder, ignore_errors=True)
    return refs, took_s, killed


_usual_s: list[float] = []


def usual_s() -> float:
    """How long a life without a kill takes here, now."""
    if not _usual_s:
        with tempfile.TemporaryDirectory() as scratch:
            _usual_s.extend(
                life(f"file://{scratch}/run", Path(scratch) / "stage", epoch, None)[1]
                for epoch in (1, 2, 3)
            )
    return sorted(_usual_s)[1]


def look(url: str, reported: set[Ref]) -> Ref | None:
    """What must hold after any kill. The newest valid snapshot."""
    store = open_store(url)
    snapshots, bad = Snapshots(store, CHUNK_NBYTES), list[str]()
    newest = snapshots.latest(lambda ref, why: bad.append(f"{ref}: {why}"))
    committed = {
        Ref(s.fact.epoch, s.fact.step)
        for s in read_facts(store, "uploader-")
        if isinstance(s.fact, SnapshotCommitted)
    } | reported
    if bad:
        raise Broken(f"a kill was taken for damage: {bad[0]}")
    if committed and (newest is None or newest.ref < max(committed)):
        raise Broken(
            f"the newest valid snapshot is {newest and newest.ref}; {max(committed)} was reported "
            "committed"
        )
    if newest is not None and not whole(snapshots, newest):
        raise Broken(f"snapshot {newest.ref} has other bytes than its ranks had")
    return newest.ref if newest else None


def bucket(role: str, seed: int, points: int, scratch: Path) -> Counter[str]:
    """`points` kills in one bucket, a life each, and some more whose kill came too late. Raises
    Broken."""
    rng, url, found = random.Random(f"{role} {seed}"), f"file://{scratch}/run", Counter[str]()
    reported: set[Ref] = set()
    epoch = 0
    while found["killed"] < points and epoch < 5 * points:
        epoch += 1
        kill = role, rng.random(), rng.random() < 0.5
        try:
            refs, _, killed = life(url, scratch / "stage", epoch, kill)
            reported |= refs
            newest = look(url, reported)
        except (Broken, SnapshotCorrupt, StoreError) as e:
            raise Broken(
                f"{role}, seed {seed}, life {epoch}, kill {kill}: {e} (python -m "
                f"support.kill_campaign --only {role} --seed {seed})"
            ) from e
        found["killed" if killed else "too late"] += 1
        found["reported"] += len(refs)
        found["nothing committed in this life"] += newest is None or newest.epoch != epoch
    if found["killed"] < points:
        raise Broken(
            f"{role}, seed {seed}: only {found['killed']} of {points} kills came before the end of "
            "a life"
        )
    epoch += 1
    refs, _, _ = life(url, scratch / "stage", epoch, None)
    if look(url, reported | refs) != Ref(epoch, epoch * STEPS + STEPS - 1):
        raise Broken(f"{role}, seed {seed}: after the kills no snapshot can be committed any more")
    store = open_store(url)
    snapshots = Snapshots(store, CHUNK_NBYTES)
    snapshots.prune(Keep(1))
    last = snapshots.latest()
    assert last is not None
    needed = {f"snapshots/manifests/{last.ref.name}.json", *last.objects}
    left = [
        k
        for k in store.list("snapshots/")
        if k not in needed and not k.endswith(DOOM) and f"{last.ref.name}/list-" not in k
    ]
    if left or not whole(snapshots, last):
        raise Broken(f"{role}, seed {seed}: the last prune left {left}")
    return found
