"""`harness simulate --system`: many whole worlds on many cores, and what came of them."""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from harness.proof.system.faults import Setting, faults_of
from harness.proof.system.shrink import shrink
from harness.proof.system.whole import Failed, Played, play

CHUNK = 20  # worlds that a core is given at once
T = TypeVar("T")


@dataclass(frozen=True)
class BrokenSeed:
    seed: int
    words: str


def one(seed: int) -> Played | BrokenSeed:
    """A world; what people would read of it stays out of the way."""
    logging.getLogger("harness.views.trackers").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            return play(seed)
        except Failed as e:
            return BrokenSeed(seed, str(e))


def many(seeds: Iterable[int], jobs: int, play_one: Callable[[int], T]) -> Iterator[T]:
    """In the order in which they end."""
    if jobs == 1:
        yield from map(play_one, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(play_one, seeds, chunksize=CHUNK)


def command(seeds: int, seed: int | None, first: int, jobs: int) -> int:
    """Prints what came of it; 1 if a rule was broken."""
    if seed is not None:
        return tell_one(seed)
    began_s = time.perf_counter()
    played: list[Played] = []
    broken: list[BrokenSeed] = []
    for found in many(range(first, first + seeds), jobs, one):
        if isinstance(found, BrokenSeed):
            broken.append(found)
            print(found.words, flush=True)
        else:
            played.append(found)
    took_s = time.perf_counter() - began_s
    ends = Counter(p.outcome for p in played)
    kinds = Counter(kind for p in played for kind in {fault.kind for fault in p.faults})
    hours = sum(p.elapsed_s for p in played) / 3600
    print(
        f"{seeds} worlds: {', '.join(f'{n} {end}' for end, n in ends.most_common())}, "
        f"{len(broken)} broke a rule; {hours:.1f} virtual hours, "
        f"{sum(p.steps_done for p in played)} steps, {sum(p.events for p in played)} events, "
        f"{sum(len(p.faults) for p in played)} faults of {len(kinds)} kinds"
    )
    if played:
        print(
            f"median world: {statistics.median(p.elapsed_s for p in played):.0f} virtual s, "
            f"{statistics.median(p.epochs for p in played):g} epochs, "
            f"{statistics.median(p.nodes for p in played):g} nodes"
        )
    print(
        f"{seeds / took_s:.1f} worlds a second, {hours / took_s * 3600:.0f} virtual hours an hour, "
        f"on {jobs} cores, in {took_s:.0f} s"
    )
    if broken:
        print("the first of them, shrunk:")
        print(shrink(min(broken, key=lambda b: b.seed).seed))
    return 1 if broken else 0


def tell_one(seed: int) -> int:
    """One world as a timeline; shrunk if it breaks a rule."""
    setting = Setting.of(seed)
    print(setting)
    for fault in faults_of(seed, setting):
        print(fault)
    try:
        played = play(seed)
    except Failed as e:
        print(e)
        print(shrink(seed))
        return 1
    for t, who, what in played.said:
        print(f"{t:9.2f} s  {who:<14} {what}")
    print(f"seed {seed}: {played.outcome} at step {played.committed_step}: {played.reason}")
    return 0
