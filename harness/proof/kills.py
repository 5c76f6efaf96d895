"""`make campaign`: writer, uploader and agent killed at many seeded points, every store call
failing once, and damage of every class.

    # a table; exit status 1 if anything that must hold did not
    python -m harness.proof.kills --points 500 --jobs 2

A life is one node: an agent, its uploader process (`harness.uploader.server.UploadServer`) and two
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
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.node.processes import die_with_parent
from harness.proof.damage import DAMAGE, damaged, every_call
from harness.proof.lives import bucket, fork, usual_s
from harness.proof.tiny_snapshots import LIVES, Broken

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
