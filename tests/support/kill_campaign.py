"""`make campaign`: writer, uploader and agent killed at many seeded points, every store call
failing once, and damage of every class.

    # a table; exit status 1 if anything that must hold did not
    python -m support.kill_campaign --points 500 --jobs 2

A life is one node: an agent, its uploader process (`harness.uploader.handoff.UploadServer`) and two
ranks that take tiny snapshots through it, all forked from one warm process, with real SIGKILLs,
sockets, shared memory and files. The uploader is killed before or after its n-th call to the store,
the others after a part of the time that a life takes. Ten lives follow each other in one bucket,
each an epoch with what the ones before it left. After each: the newest valid snapshot is whole, to
the byte what its ranks had; it is not older than any that was reported committed; and in the end
one more snapshot can be taken, and a prune leaves nothing that nobody refers to.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.node.heartbeat import die_with_parent
from storage.snapshots.manifest import Manifest, Ref, SnapshotCorrupt
from storage.snapshots.snapshots import Snapshots
from storage.snapshots.upload import Uploader, UploadOutcome
from storage.stores.folder_store import MemoryStore
from storage.stores.objects import ObjectStore
from storage.testing.faulty_store import FaultyStore, Mode, corrupt
from support.node_lives import (
    CHUNK_NBYTES,
    LIFE_S,
    LIVES,
    RANKS,
    Broken,
    bucket,
    content,
    fork,
    job,
    usual_s,
    whole,
    with_small_chunks,
)

# Every store call fails once, and every class of damage is done.


def short_run(store: ObjectStore) -> set[Ref]:
    """Three snapshots of two ranks by the upload engine, one lane, in this process. What was
    reported committed."""
    committed: set[Ref] = set()
    uploaders = [Uploader(store, lanes=1, commit_timeout_s=0.05) for _ in range(RANKS)]
    for uploader in uploaders:
        with_small_chunks(uploader)
    for step in (1, 2, 3):
        ref = Ref(1, step)
        for rank in range(RANKS):
            done = threading.Event()

            def heard(outcome: UploadOutcome, done: threading.Event = done) -> None:
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


ROLES = ("writer", "uploader", "agent")


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

                running[fork(work)] = role, answer, scratch
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
