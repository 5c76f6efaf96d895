"""The cold start of a run's nodes, by part: how long a node is paid for until its first step."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from harness.core.facts import SessionStarted
from harness.core.formatting import duration, plural
from harness.ledger.bill import NANO, AttemptRow, EpochRow

if TYPE_CHECKING:
    from harness.look.reports.summary import Summary

LONG_SETUP_S = 60.0  # from here on an image is worth its while


@dataclass(frozen=True)
class ColdStart:
    """The seconds until the first step of a node, by part. `provision`: until the task's setup
    began; `setup`: the task's setup; `imports`: from its agent's begin until its generation was
    ready to train, with rendezvous and restore; `first_step`: from there to the end of the first
    step, with what is compiled in it."""

    provision: float
    setup: float
    imports: float
    first_step: float

    @property
    def total(self) -> float:
        return self.provision + self.setup + self.imports + self.first_step


PARTS = ("provision", "setup", "imports", "first_step")


def cold_starts(s: Summary) -> list[ColdStart]:
    """Return the cold start of each node that made a step, in the order of attempts."""
    ready, took = _times(s)
    found = []
    for node in s.ledger.attempts:
        trained = (e for e in s.ledger.epochs if node.name in e.attempts and e.first_s is not None)
        if (first := next(trained, None)) is not None:
            step_s = took.get((first.epoch, first.first_step or 0), 0.0)
            found.append(_cold_start(node, first, ready.get(first.epoch), step_s))
    return found


def warm_first_steps(s: Summary) -> list[float]:
    """Return the seconds from ready to the end of the first step, of each generation whose nodes
    had all trained before: what torch.compile made is on their disks."""
    ready, took = _times(s)
    found, before = [], set[str]()
    for e in s.ledger.epochs:
        if e.first_s is None:
            continue
        if before.issuperset(e.attempts) and e.epoch in ready:
            step_s = took.get((e.epoch, e.first_step or 0), 0.0)
            found.append(max(0.0, e.first_s - ready[e.epoch]) + step_s)
        before.update(e.attempts)
    return found


def _times(s: Summary) -> tuple[dict[int, float], dict[tuple[int, int], float]]:
    """Return when each generation was ready to train (wall clock), and the seconds of each step by
    (generation, step)."""
    ready: dict[int, float] = {}
    for stamped in s.facts:
        if isinstance(stamped.fact, SessionStarted):
            known = ready.get(stamped.fact.epoch, stamped.t)
            ready[stamped.fact.epoch] = min(known, stamped.t)
    return ready, {(p.epoch, p.step): p.seconds for p in (*s.curve, *s.lost)}


def _cold_start(
    node: AttemptRow, first: EpochRow, ready_s: float | None, step_s: float
) -> ColdStart:
    start_s = node.ns["start"] / NANO
    begun_s = first.first_s or 0.0
    waited_s = 0.0 if ready_s is None else min(start_s, max(0.0, begun_s - ready_s))
    return ColdStart(
        node.ns["provision"] / NANO, node.ns["setup"] / NANO, start_s - waited_s, waited_s + step_s
    )


def typical(starts: list[ColdStart]) -> ColdStart:
    """Return the median of each part. `starts`: at least one."""
    return ColdStart(*(median(getattr(one, part) for one in starts) for part in PARTS))


def cold_start_rows(s: Summary) -> list[tuple[str, str]]:
    """Return the row of the report's head; none if no node has made a step."""
    starts = cold_starts(s)
    if not starts:
        return []
    one = typical(starts)
    named = [(part.replace("_", " "), getattr(one, part)) for part in PARTS]
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in named if seconds > 0)
    told = f"{duration(one.total)} to a node's first step (median of {plural(len(starts), 'node')})"
    warm = warm_first_steps(s)
    again = f" ({duration(median(warm))} once its nodes have trained)" if warm else ""
    advice = "; an image spares the setup (harness image)" if one.setup >= LONG_SETUP_S else ""
    return [("cold start", f"{told}: {parts}{again}{advice}")]
