"""From a seed that breaks a rule to a short history that breaks the same rule. Pure.

Faults are taken away in halves, quarters and so on down to single ones (delta debugging, Zeller
and Hildebrandt 2002), then the world is made simpler, and so again until nothing can go. What is
left is told as a timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.proof.system.faults import Fault, Setting, faults_of
from harness.proof.system.whole import Failed, SystemBuild, play
from harness.worker.machine import Interval

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
