"""From a seed that breaks a rule to a short history that breaks the same rule. Pure.

Faults are taken away in halves, quarters and so on down to single ones (delta debugging, Zeller
and Hildebrandt 2002), then the world is made simpler, and so again until nothing can go. What is
left is told as a timeline.
"""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from harness.worker.snapshot_timer import Interval
from support.system.fault_plan import Fault, Setting, faults_of
from support.system.system_run import Failed, Played, SystemBuild, play

TRIES = 400  # worlds, at most
LAST_WORDS = 60  # lines of a timeline


@dataclass(frozen=True)
class Shrunk:
    """The least world that still breaks the rule. `tries`: worlds that were played for it."""

    seed: int
    setting: Setting
    faults: tuple[Fault, ...]
    error: Failed
    tries: int

    def __str__(self) -> str:
        told = [f"  {f}" for f in self.faults] or ["  nothing goes wrong"]
        said = [f"{t:9.2f} s  {who:<14} {what}" for t, who, what in self.error.said[-LAST_WORDS:]]
        return "\n".join(
            (
                f"{self.error}",
                f"shrunk to {len(self.faults)} faults, in {self.tries} worlds: {self.setting}",
                *told,
                "what happened:",
                *said,
            )
        )


def rule_of(error: Failed) -> str:
    """The rule's name: what stands before the first colon."""
    return str(error).partition(":")[0]


def shrink(
    seed: int,
    build: SystemBuild | None = None,
    setting: Setting | None = None,
    faults: Sequence[Fault] | None = None,
) -> Shrunk | None:
    """None: nothing is broken."""
    setting = setting or Setting.of(seed)
    faults = tuple(faults_of(seed, setting) if faults is None else faults)
    tries = 0

    def broken(setting: Setting, faults: Sequence[Fault]) -> Failed | None:
        nonlocal tries
        tries += 1
        try:
            play(seed, build, setting, faults)
        except Failed as e:
            return e
        return None

    error = broken(setting, faults)
    if error is None:
        return None
    best = Shrunk(seed, setting, faults, error, tries)

    def better(setting: Setting, faults: Sequence[Fault]) -> bool:
        nonlocal best
        if tries >= TRIES:
            return False
        found = broken(setting, faults)
        if found is None or rule_of(found) != rule_of(best.error):
            return False
        best = Shrunk(seed, setting, tuple(faults), found, tries)
        return True

    while True:
        before = best.setting, best.faults
        fewer(best.faults, lambda some: better(best.setting, some))
        for simpler in simpler_than(best.setting):
            better(simpler, best.faults)
        if (best.setting, best.faults) == before or tries >= TRIES:
            return replace(best, tries=tries)


def fewer(faults: Sequence[Fault], broken: Callable[[Sequence[Fault]], bool]) -> None:
    """Take away what can be: first large pieces, then small ones."""
    kept, size = list(faults), max(1, len(faults) // 2)
    while kept:
        at, gone = 0, False
        while at < len(kept):
            rest = kept[:at] + kept[at + size :]
            if broken(rest):
                kept, gone = rest, True
            else:
                at += size
        if size == 1 and not gone:
            return
        size = max(1, size // 2)


def simpler_than(setting: Setting) -> Iterator[Setting]:
    """The same with one thing less."""
    yield replace(setting, publishes=False)
    yield replace(setting, interleaved=0.0)
    yield replace(setting, skews_s=(0.0,))
    yield replace(setting, versions=("now",))
    yield replace(setting, meshes="")
    yield replace(setting, nproc=1)
    yield replace(setting, offers=setting.offers[:1])
    yield replace(setting, interval=Interval(every_steps=5))
    for nodes in range(1, setting.max_nodes):
        yield replace(setting, max_nodes=nodes, min_nodes=min(nodes, setting.min_nodes))
    yield replace(setting, min_nodes=1)
    yield replace(setting, total_steps=max(10, setting.total_steps // 2))


# `python -m support system`: many whole worlds on many cores, and what came of them.

CHUNK = 20  # worlds that a core is given at once
T = TypeVar("T")


@dataclass(frozen=True)
class BrokenSeed:
    seed: int
    words: str


def one(seed: int) -> Played | BrokenSeed:
    """A world; what people would read of it stays out of the way."""
    logging.getLogger("harness.look.trackers.trackers").setLevel(logging.ERROR)
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
