"""Steps whose loss or gradient stands out from the steps before them, by a robust z-score.

Pure. From each number the median of the `NEAR` ones before it is taken off, so that what falls
steadily has nothing that stands out. What is left is compared with the same of the `WINDOW` steps
before: its distance above their median, in median absolute deviations (times 1.4826, as of a normal
distribution), is the score.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from harness.core.facts import Fact, GuardTripped, StepDone

NEAR, WINDOW, FEWEST = 15, 50, 8  # steps before that a number is compared with
SCORE = 6.0  # from which on it stands out
LEAST_SPREAD = 0.01  # of the median: numbers that hardly differ make no spikes
ROWS = 10_000  # steps that are looked at together
Float64s: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Spike:
    """`what`: "loss" or "gradient norm"; `usual`: the median right before it; `score`: infinite if
    `value` is not finite."""

    step: int
    what: str
    value: float
    usual: float
    score: float


def spikes(facts: Iterable[Fact], least: float = SCORE) -> list[Spike]:
    """Of a run's facts, by time: the worst first, one for each step. Of a step that was done again
    the last time counts; one that a guard ended has no other fact."""
    steps: dict[int, StepDone] = {}
    ended: dict[int, float] = {}
    for fact in facts:
        if isinstance(fact, StepDone):
            steps[fact.step] = fact
            ended.pop(fact.step, None)
        elif isinstance(fact, GuardTripped) and fact.step not in steps:
            ended[fact.step] = fact.value
    rows = [steps[step] for step in sorted(steps)]
    found = [Spike(step, "loss", value, math.nan, math.inf) for step, value in ended.items()]
    for what, values in (
        ("loss", [s.loss for s in rows]),
        ("gradient norm", [math.nan if s.grad_norm is None else s.grad_norm for s in rows]),
    ):
        usual, scores = _scored(np.array(values, np.float64))
        for i in np.flatnonzero(scores >= least).tolist():
            found.append(Spike(rows[i].step, what, values[i], float(usual[i]), float(scores[i])))
    worst: dict[int, Spike] = {}
    for spike in sorted(found, key=lambda s: (-s.score, s.step)):
        worst.setdefault(spike.step, spike)
    return list(worst.values())


def _scored(values: Float64s) -> tuple[Float64s, Float64s]:
    """(median right before, score) of each, both (n,); 0 where too few came before."""
    usual, _ = _before(values, NEAR)
    left = values - usual
    middle, spread = _before(left, WINDOW)
    spread = np.maximum(1.4826 * spread, LEAST_SPREAD * np.abs(usual))
    scores = (left - middle) / np.maximum(spread, np.finfo(np.float64).tiny)
    scores = np.where(left > 0, scores, 0.0)  # one that falls more slowly than before is no spike
    return usual, np.nan_to_num(scores, nan=0.0, posinf=math.inf, neginf=0.0)


def _before(values: Float64s, window: int) -> tuple[Float64s, Float64s]:
    """Of each, the median of so many finite ones before it, and their median distance from that,
    both (n,); NaN where there are too few."""
    middle, spread = np.full((2, len(values)), math.nan)
    known = np.where(np.isfinite(values), values, math.nan)
    known = np.concatenate([np.full(window, math.nan), known])
    for start in range(0, len(values), ROWS):
        end = min(start + ROWS, len(values))
        seen = np.lib.stride_tricks.sliding_window_view(known[start : end + window - 1], window)
        enough = np.flatnonzero(np.isfinite(seen).sum(axis=1) >= FEWEST)
        if len(enough):
            here = middle[start + enough] = np.nanmedian(seen[enough], axis=1)
            spread[start + enough] = np.nanmedian(np.abs(seen[enough] - here[:, None]), axis=1)
    return middle, spread
