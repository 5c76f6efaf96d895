"""Attempts and epochs of a run while its ledger is put together.  Pure."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np

from harness.core import columns
from harness.core.columns import NONE, Columns
from harness.core.facts import AttemptEnded, EpochLeft, SessionEnded, WorkerFailed
from harness.core.values import amount
from harness.views.painting import NANO, PRECEDENCE, LabelledSpan, Span, ns
from harness.views.spans import LEVEL, Ints, PaintedEpoch, painted

LARGE = 2000  # steps of an epoch that is shared out by pieces (spans.py)
# facts.EpochLeft.why of workers that left with a committed snapshot
GOOD_ENDS = ("finished", "drained", "resize", "stopped")


@dataclass
class NodeSoFar:
    """An attempt while it is put together."""

    name: str
    attempt: int
    asked_s: float
    offer: dict[str, object] = field(default_factory=dict)
    up_s: float | None = None
    ended: AttemptEnded | None = None
    members: list[str] = field(default_factory=list)
    gone_s: float | None = None
    stranger: bool = False  # no controller launched it

    def number(self, key: str) -> float:
        return amount(self.offer.get(key))


@dataclass
class EpochSoFar:
    number: int
    started_s: float
    reason: str = ""
    members: list[str] = field(default_factory=list)
    world: int = 0
    shares: tuple[int, ...] = ()
    resumed_step: int = 0
    session_s: float | None = None  # workers were ready to train
    session_ended: SessionEnded | None = None
    left: list[tuple[float, EpochLeft]] = field(default_factory=list)
    failures: list[WorkerFailed] = field(default_factory=list)
    done: Columns = field(default_factory=lambda: NONE)  # as told live
    committed: Columns = field(default_factory=lambda: NONE)  # by the records
    stalls: list[Span] = field(default_factory=list)
    end: int | None = None  # None: it is not over

    @property
    def over(self) -> bool:
        return self.end is not None

    @functools.cached_property
    def window(self) -> Span | None:
        """From the begin of its first step to the end of its last."""
        spans = [step_spans(rows) for rows in (self.done, self.committed) if len(rows)]
        if not spans:
            return None
        return min(int(a.min()) for a, _ in spans), max(int(b.max()) for _, b in spans)

    @functools.cached_property
    def lost(self) -> Columns:
        """Steps that were done and are not committed."""
        return columns.without(self.done, self.committed)

    @property
    def orderly(self) -> bool:
        """It ended with a committed snapshot."""
        return self.session_ended is not None or any(left.why in GOOD_ENDS for _, left in self.left)

    @functools.cached_property
    def world_time(self) -> PaintedEpoch:
        """What its members did, by bucket. Steps after the newest snapshot of a world that lives
        are useful so far. Only when all is known of it."""
        layers = [(a, b, LEVEL["snapshot"]) for a, b in self.stalls]
        if self.window:
            layers.append((*self.window, LEVEL["other"]))
        if self.over and self.end is not None and not self.orderly:
            # It was working when it broke; what it did since its last known step is lost, told to
            # the bucket or not.
            since = (
                self.window[1]
                if self.window
                else None
                if self.session_s is None
                else ns(self.session_s)
            )
            if since is not None:
                layers.append((since, self.end, LEVEL["redone"]))
        starts, ends, levels = np.array(layers, np.int64).reshape(-1, 3).T
        kinds = ((self.committed, "useful"), (self.lost, "redone" if self.over else "useful"))
        parts = [(*step_spans(rows), LEVEL[bucket]) for rows, bucket in kinds]
        return PaintedEpoch(
            painted(
                np.concatenate([starts, *(a for a, _, _ in parts)]),
                np.concatenate([ends, *(b for _, b, _ in parts)]),
                np.concatenate([levels, *(np.full(len(a), level) for a, _, level in parts)]),
            )
        )

    @property
    def large(self) -> bool:
        return len(self.done) + len(self.committed) > LARGE

    def layers(self) -> list[LabelledSpan]:
        """`world_time` as segments."""
        spans = self.world_time.spans
        found = zip(spans.starts.tolist(), spans.ends.tolist(), spans.levels.tolist(), strict=True)
        return [(a, b, PRECEDENCE[level]) for a, b, level in found]


def step_spans(rows: Columns) -> tuple[Ints, Ints]:
    """When each step was done, in nanoseconds."""
    starts = np.rint(rows["start"] * NANO).astype(np.int64)
    return starts, np.rint(rows["end"] * NANO).astype(np.int64)


def cut_by_epoch(rows: Columns) -> dict[int, Columns]:
    """`rows`, in the order of their epochs, cut at each."""
    if not len(rows):
        return {}
    cuts = np.flatnonzero(rows["epoch"][1:] != rows["epoch"][:-1]) + 1
    return {int(part["epoch"][0]): part for part in np.split(rows, cuts)}
