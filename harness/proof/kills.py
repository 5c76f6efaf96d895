"""`make campaign`: writer, uploader and agent killed at many seeded points, every store call
failing once, and damage of every class.

    # a table; exit status 1 if anything that must hold did not
    python -m harness.proof.kills --points 500 --jobs 2

A life is one node: an agent, its uploader process (`harness.uploader.server.Server`) and two ranks
that take tiny snapshots through it, all forked from one warm process, with real SIGKILLs, sockets,
shared memory and files. The uploader is killed before or after its n-th call to the store, the
others after a part of the time that a life takes. Ten lives follow each other in one bucket, each
an epoch with what the ones before it left. After each: the newest valid snapshot is whole, to the
byte what its ranks had; it is not older than any that was reported committed; and in the end one
more snapshot can be taken, and a prune leaves nothing that nobody refers to.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from harness.bucket.journal import read_facts
from harness.core.facts import SnapshotCommitted
from harness.node.processes import die_with_parent
from harness.uploader.client import Local, courier_at
from harness.uploader.nearby import NearbyConfig
from harness.uploader.server import Server
from storage.errors import StoreError
from storage.faults import FaultyStore, Mode, corrupt
from storage.files import MemoryStore
from storage.manifest import Manifest, Ref, SnapshotCorrupt
from storage.objects import ObjectStore
from storage.opening import open_store
from storage.retention import Keep
from storage.snapshot_keys import DOOM
from storage.snapshots import Snapshots
from storage.staging import Stage
from storage.upload import Job, Outcome, Uploader

T = TypeVar("T")
ROLES = ("writer", "uploader", "agent")
RANKS, STEPS, LIVES = 2, 4, 10
FROZEN_NBYTES, TRAINED_NBYTES, CHUNK_NBYTES = 24 << 10, 6 << 10, 4 << 10
CALLS = 90  # of the uploader in one life, about
LIFE_S = 60.0  # the longest that a life may take
# what is left of a node after a kill goes on for so long before it is taken away as well
SETTLE_S = 0.05


class Broken(AssertionError):
    """What must hold did not. The message says how to see it again."""


# ---- what is saved -------------------------------------------------------------------------------
def content(ref: Ref, rank: int) -> bytes:
    """A rank's bytes: most are the same in all snapshots."""
    frozen, own = random.Random(rank), random.Random(f"{ref} {rank}")
    return frozen.randbytes(FROZEN_NBYTES) + own.randbytes(TRAINED_NBYTES)


def job(ref: Ref, rank: int, world: int = RANKS, keep: int = 2) -> Job:
    nbytes = FROZEN_NBYTES + TRAINED_NBYTES
    files = {"0000.bin": (0, FROZEN_NBYTES // 2), "0001.bin": (FROZEN_NBYTES // 2, nbytes)}
    sizes = [end - start for start, end in files.values()]
    chunks = [
        {"offsets": [sum(sizes[:i])], "sizes": [n], "part": name, "start": 0, "end": n}
        for i, (name, n) in enumerate(zip(files, sizes, strict=True))
    ]
    tensors = {f"model/w{rank}": {"shape": [nbytes], "dtype": "uint8", "chunks": chunks}}
    note = {"t_start": time.time(), "stall_s": 0.0, "why": "interval"}
    return Job(
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


# ---- one life ------------------------------------------------------------------------------------
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


def _fork(do: Callable[[], None]) -> int:
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
    server = Server(
        _Deadly(store, *deadly) if deadly else store, stage, 16 << 20, "m1", NearbyConfig()
    )
    _thrifty(server.uploader)
    server.serve()
    os._exit(0)


def _thrifty(uploader: Uploader) -> None:
    uploader.snapshots.chunk_nbytes = CHUNK_NBYTES


def _rank(url: str, stage: Path, epoch: int, rank: int, told: int) -> None:
    die_with_parent()
    local = Local(open_store(url), lambda job, outcome: None)
    _thrifty(local._uploader)
    courier = courier_at(stage, epoch, rank, local)
    for step in range(epoch * STEPS, epoch * STEPS + STEPS):
        ref, done = Ref(epoch, step), threading.Event()
        one, segment = job(ref, rank), courier.segment(FROZEN_NBYTES + TRAINED_NBYTES)
        segment.view[: one.nbytes] = content(ref, rank)

        def heard(outcome: Outcome, done: threading.Event = done) -> None:
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
    children = [_fork(lambda: _uploader(url, stage.folder, deadly))]
    children += [
        _fork(lambda rank=rank: _rank(url, stage.folder, epoch, rank, told))  # type: ignore[misc]
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
    agent = _fork(lambda: _agent(url, folder, epoch, told_w, deadly, pids_w))
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
                f"harness.proof.kills --only {role} --seed {seed})"
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


# ---- every store call fails once -----------------------------------------------------------------
def short_run(store: ObjectStore) -> set[Ref]:
    """Three snapshots of two ranks by the upload engine, one lane, in this process. What was
    reported committed."""
    committed: set[Ref] = set()
    uploaders = [Uploader(store, lanes=1, commit_timeout_s=0.05) for _ in range(RANKS)]
    for uploader in uploaders:
        _thrifty(uploader)
    for step in (1, 2, 3):
        ref = Ref(1, step)
        for rank in range(RANKS):
            done = threading.Event()

            def heard(outcome: Outcome, done: threading.Event = done) -> None:
                if outcome.state == "committed":
                    committed.add(outcome.ref)
                done.set()

            uploaders[rank].submit(
                job(ref, rank, keep=1), memoryview(bytearray(content(ref, rank))), heard
            )
            done.wait(LIFE_S)
    return committed


def every_call(modes: tuple[Mode, ...], every: int = 1) -> Counter[str]:
    """Each call of a short run fails once, in each mode. Raises Broken."""
    counting = FaultyStore(MemoryStore(objects={}), random.Random(0))
    short_run(counting)
    found = Counter[str]()
    for mode in modes:
        for call in range(1, counting.calls + 1, every):
            inner = MemoryStore(objects={})
            committed = short_run(FaultyStore(inner, random.Random(0), fail_call=call, mode=mode))
            snapshots = Snapshots(inner, CHUNK_NBYTES)
            newest = snapshots.latest()
            if committed and (newest is None or newest.ref < max(committed)):
                raise Broken(
                    f"call {call}, {mode}: {max(committed)} was reported, the newest valid "
                    f"snapshot is {newest and newest.ref}"
                )
            if newest is not None and not whole(snapshots, newest):
                raise Broken(
                    f"call {call}, {mode}: {newest.ref} has other bytes than its ranks had"
                )
            found[mode] += 1
    return found


# ---- damage --------------------------------------------------------------------------------------
def _commit(snapshots: Snapshots, ref: Ref, base: Manifest | None) -> Manifest:
    for rank in range(RANKS):
        one, view = job(ref, rank), memoryview(content(ref, rank))
        files = {name: view[start:end] for name, (start, end) in one.files.items()}
        snapshots.write(ref, rank, RANKS, files, one.tensors, one.data, one.token, base)
    manifest = snapshots.commit(ref, RANKS)
    assert manifest is not None
    return manifest


DAMAGE = (
    "bit flip",
    "truncation",
    "missing",
    "stale",
    "mixed parts",
    "zombie write",
    "wrong store object",
)


def damaged(how: str, seed: int) -> tuple[bool, bool]:
    """Snapshots 1 to 3 are committed, then 3 is damaged. Was it caught, and was 2, or what is
    right, used instead?"""
    rng, store = random.Random(f"{how} {seed}"), MemoryStore(objects={})
    snapshots = Snapshots(store, CHUNK_NBYTES)
    base = _commit(snapshots, Ref(2, 1), None)
    for step in (2, 3):
        base = _commit(snapshots, Ref(2, step), base if step == 3 else None)
    own = sorted(base.objects.keys() - base.refers)  # what it shares with 2 spoils both
    manifest_key, key = f"snapshots/manifests/{base.ref.name}.json", rng.choice(own)
    right = Ref(2, 2)
    match how:
        case "bit flip":
            corrupt(store, rng.choice([key, manifest_key]), "flip", rng)
        case "truncation":
            corrupt(store, rng.choice([key, manifest_key]), rng.choice(["truncate", "empty"]), rng)
        case "missing":
            store.delete(key)
        case "stale":  # the bytes that the snapshot before had at that place
            rank = int(key.rpartition("/r")[2][:5])
            store.put(key, content(Ref(2, 2), rank)[-store.size(key) :])
        case "mixed parts":
            corrupt(store, own[0], "swap", rng, other=own[1])
        # a writer of an older epoch, further on by its own count, overwrites and commits
        case "zombie write":
            _commit(snapshots, Ref(1, 99), None)
            if rng.random() < 0.5:
                store.put(key, rng.randbytes(store.size(key)))
            else:
                right = base.ref
        case "wrong store object":
            if rng.random() < 0.5:
                store.put(manifest_key, store.get(f"snapshots/manifests/{Ref(2, 1).name}.json"))
            else:
                store.put(key, content(Ref(7, 7), 0)[: store.size(key)])
    caught: list[Ref] = []

    def bad(ref: Ref, why: str) -> None:
        caught.append(ref)
        snapshots.quarantine(ref, why)

    while (newest := snapshots.latest(bad)) is not None:
        try:
            if not whole(snapshots, newest):
                return False, False
            break
        except SnapshotCorrupt as e:
            snapshots.quarantine(newest.ref, str(e))
            caught.append(newest.ref)
    fell_back = newest is not None and newest.ref == right
    return (right == base.ref or base.ref in snapshots.quarantined()), fell_back


# ---- the whole -----------------------------------------------------------------------------------
def kills(
    roles: tuple[str, ...], points: int, seed: int, jobs: int, say: Callable[[str], None]
) -> dict[str, Counter[str]]:
    """`points` kills of each role, in `jobs` processes. Raises Broken."""
    usual_s()
    tasks = [
        (role, seed + i, min(LIVES, points - i * LIVES))
        for role in roles
        for i in range(-(-points // LIVES))
    ]
    found = {role: Counter[str]() for role in roles}
    for role, one in _in_parallel(tasks, jobs):
        found[role] += one
        say(f"{sum(c['killed'] for c in found.values())} of {points * len(roles)} kills")
    return found


def _in_parallel(
    tasks: list[tuple[str, int, int]], jobs: int
) -> Iterator[tuple[str, Counter[str]]]:
    """Forked, not threads: a fork with threads about is no place to live in."""
    waiting, running = tasks[::-1], dict[int, tuple[str, Any, Path]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                role, seed, points = waiting.pop()
                scratch = Path(tempfile.mkdtemp(prefix="kills-"))
                answer = scratch / "answer"

                def work(
                    role: str = role,
                    seed: int = seed,
                    points: int = points,
                    scratch: Path = scratch,
                    answer: Path = answer,
                ) -> None:
                    die_with_parent()
                    try:
                        text = json.dumps(bucket(role, seed, points, scratch))
                    except Broken as e:
                        text = json.dumps(str(e))
                    answer.write_text(text)

                running[_fork(work)] = role, answer, scratch
            pid, _ = os.wait()
            role, answer, scratch = running.pop(pid)
            said = (
                json.loads(answer.read_text())
                if answer.exists()
                else f"{role}: no answer ({scratch})"
            )
            if isinstance(said, str):
                raise Broken(said)
            shutil.rmtree(scratch, ignore_errors=True)
            yield role, Counter(said)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main() -> int:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=500, help="kills of each role")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", choices=ROLES)
    flags = parser.parse_args()
    console = Console()
    table = Table("what", "tried", "held", "notes")
    try:
        with console.status("kills") as status:
            roles = (flags.only,) if flags.only else ROLES
            for role, found in kills(
                roles, flags.points, flags.seed, flags.jobs, status.update
            ).items():
                tried = found["killed"]
                nothing = found["nothing committed in this life"]
                notes = (
                    f"{found['too late']} more came too late, {found['reported']} reports, "
                    f"{nothing} lives without a commit"
                )
                table.add_row(f"SIGKILL of the {role}", str(tried), str(tried), notes)
            if not flags.only:
                status.update("every store call fails once")
                for mode, n in every_call(("before", "after", "torn", "full")).items():
                    table.add_row(
                        f"a store call fails: {mode}",
                        str(n),
                        str(n),
                        "every call of six shares, once",
                    )
                status.update("damage")
                for how in DAMAGE:
                    results = [damaged(how, seed) for seed in range(flags.points)]
                    caught, right = sum(c for c, _ in results), sum(f for _, f in results)
                    table.add_row(
                        f"damage: {how}",
                        str(len(results)),
                        str(min(caught, right)),
                        f"{caught} caught, {right} right fallbacks",
                    )
                    if min(caught, right) != len(results):
                        raise Broken(
                            f"{how}: only {caught} of {len(results)} were caught, {right} fell "
                            "back rightly"
                        )
    except Broken as e:
        console.print(table)
        console.print(f"broken: {e}", style="red", markup=False)
        return 1
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
