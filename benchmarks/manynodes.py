"""Many nodes: how soon an epoch of them is formed, what it asks of the bucket and the network, and
what the commit of a snapshot of many ranks costs.

    python benchmarks/manynodes.py                 # members 1 to 256, then 8 to 1,024 ranks
    python benchmarks/manynodes.py --quick         # up to 64 members

The members are simulated: the real rendezvous and the real lines under a virtual clock
(tests/support/rendezvous_crowd.py), 30 ms for each request of the bucket,
1 ms over the network. Seconds are
virtual, CPU is real and of all members together. The commit is the real one, in real time, on a
store in memory whose every request takes 30 ms. Each figure stands beside its target, with yes or
NO; the exit status is 1 if there is a NO.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from longrun import Slow  # and finds `support`

from storage.snapshots.manifest import Ref
from storage.snapshots.snapshots import Snapshots, groups
from storage.stores.folder_store import MemoryStore
from support.rendezvous_crowd import REQUEST_S, Crowd

SIZES = (1, 2, 8, 16, 17, 64, 128, 256)
WORLDS = (8, 100, 1024)
FORM_S, RECOVER_S, VANISH_S, COMMIT_S = 3.0, 3.0, 9.0, 5.0
LINES, START_REQUESTS, CALM_REQUESTS_PER_S, CALM_NBYTES_PER_S = 15, 40, 0.5, 4096
CALM_S, LIMIT_S = 20.0, 60.0


@dataclass
class Judge:
    """Prints figures beside their targets."""

    failed: int = 0

    def __call__(self, what: str, value: float, target: float, unit: str) -> None:
        good = value <= target
        self.failed += not good
        print(
            f"  {what:58} {value:10.2f} {unit:8} at most {target:8.2f}  {'yes' if good else 'NO'}",
            flush=True,
        )


# ---- epochs --------------------------------------------------------------------------------------
def changes(
    crowd: Crowd, what: str, do: Callable[[], object], limit_s: float, judge: Judge
) -> None:
    """What happens to all, and how long until those that live train together."""
    crowd.scheduler.run(lambda: False, crowd.scheduler.now + 3.0)
    before, begun_s, cpu_s = crowd.requests(), crowd.scheduler.now, time.process_time()
    do()
    formed = crowd.scheduler.run(
        lambda: crowd.trains([m.name for m in crowd.living()]), begun_s + LIMIT_S
    )
    spent = sum(crowd.requests().values()) - sum(before.values())
    took_s = crowd.scheduler.now - begun_s if formed else float("inf")
    judge(what, took_s, limit_s, "s")
    print(
        f"    {spent} requests in all, {spent / len(crowd.living()):.1f} per node; "
        f"{time.process_time() - cpu_s:.1f} s of CPU for all nodes"
    )


def members(n: int, judge: Judge) -> None:
    print(f"\n{n} members")
    crowd, cpu_s = Crowd(seed=n, min_members=n), time.process_time()
    names = [f"m{i:04d}-{crowd.scheduler.rng.getrandbits(24):06x}" for i in range(n)]
    for name in names:
        crowd.join(name)
    formed = crowd.scheduler.run(lambda: crowd.trains(names), LIMIT_S)
    took_s = crowd.scheduler.now if formed else float("inf")
    judge("all come at once: the epoch is formed", took_s, FORM_S, "s")
    requests = crowd.requests()
    judge("... requests per node", sum(requests.values()) / n, START_REQUESTS, "")
    judge("... connections that a node makes", max(len(m.protocol.wanted) for m in crowd.living()),
          LINES, "")  # fmt: skip
    print(
        f"    {sum(requests.values())} requests in all ({dict(requests)}); "
        f"{sum(m.sent['bytes'] for m in crowd.living()) / n / 2**10:.0f} KiB sent per node; "
        f"{time.process_time() - cpu_s:.1f} s of CPU for all nodes"
    )
    for m in crowd.living():
        m.rendezvous.min_members = 1
    crowd.min_members = 1
    crowd.scheduler.run(lambda: False, crowd.scheduler.now + 10.0)
    calm(crowd, n, judge)
    if n > 1:
        changes(crowd, "one process is killed", lambda: crowd.kill(names[n // 2]), RECOVER_S, judge)
        if n > 2:
            changes(crowd, "rank 0 is killed", lambda: crowd.kill(names[0]), RECOVER_S, judge)
        changes(crowd, "one joins", lambda: crowd.join("m9000-aaaaaa"), RECOVER_S, judge)
    if n >= 64:
        some = crowd.scheduler.rng.sample([m.name for m in crowd.living()], n // 8)
        changes(crowd, f"{len(some)} are killed at once", lambda: [crowd.kill(x) for x in some],
                RECOVER_S, judge)  # fmt: skip
        last = crowd.living()[-1].name
        changes(crowd, "one machine vanishes (dead_s is 5 s)", lambda: crowd.kill(last, host=True),
                VANISH_S, judge)  # fmt: skip


def calm(crowd: Crowd, n: int, judge: Judge) -> None:
    """All train, and nothing happens."""
    before, sent = crowd.requests(), sum(m.sent["bytes"] for m in crowd.living())
    crowd.scheduler.run(lambda: False, crowd.scheduler.now + CALM_S)
    spent = sum(crowd.requests().values()) - sum(before.values())
    nbytes = sum(m.sent["bytes"] for m in crowd.living()) - sent
    judge("calm: rendezvous requests per node and second", spent / n / CALM_S,
          CALM_REQUESTS_PER_S, "")  # fmt: skip
    judge("... over lines, sent per node", nbytes / n / CALM_S, CALM_NBYTES_PER_S, "B/s")


# ---- manifests -----------------------------------------------------------------------------------
def commit(world: int, judge: Judge) -> None:
    """All ranks' part lists are there: how long until the manifest is, and by how many requests?
    The first rank of each group merges it, all at the same time."""
    print(f"\na snapshot of {world} ranks")
    inner, ref = MemoryStore("memory://slow", {}), Ref(1, 1)
    for rank in range(world):
        index = {
            f"layer{i}.weight": {
                "dtype": "float32", "shape": [world, 1024],
                "chunks": [{"part": "x", "offsets": [rank, 0], "sizes": [1, 1024],
                            "start": i * 4096, "end": (i + 1) * 4096}],
            }
            for i in range(4)
        }  # fmt: skip
        Snapshots(inner).write(ref, rank, world, {"x": bytes(4 * 4096)}, index, {}, "t")
    store = Slow(inner, REQUEST_S)
    firsts = [g[0] for g in groups(world, Snapshots.group_ranks)][1:]
    begun_s = time.monotonic()
    others = [
        threading.Thread(target=Snapshots(store).commit, args=(ref, world, rank)) for rank in firsts
    ]
    for t in others:
        t.start()
    manifest = None
    while manifest is None:
        manifest = Snapshots(store).commit(ref, world, 0)
    took_s = time.monotonic() - begun_s
    for t in others:
        t.join()
    judge("from the last part list to the manifest", took_s, COMMIT_S, "s")
    judge("... requests in all, per rank", store.total / world, 4.0, "")
    print(f"    {dict(store.requests)}; the manifest has {len(manifest.to_json()) >> 10} KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="up to 64 members")
    parser.add_argument("--members", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--ranks", type=int, nargs="+", default=list(WORLDS))
    flags = parser.parse_args()
    judge = Judge()
    for n in flags.members:
        if not flags.quick or n <= 64:
            members(n, judge)
    for world in flags.ranks:
        commit(world, judge)
    print(f"\n{judge.failed} targets missed" if judge.failed else "\nall targets met")
    sys.exit(judge.failed > 0)


if __name__ == "__main__":
    main()
