"""Many steps as one array: what a report needs of each, in 48 bytes instead of an object.

Pure. A run of a month has a million steps. Views keep them, and the archive stores them
(`bucket/archive.py`), as rows of one NumPy type, little-endian, so the bytes are the same on every
machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from harness.core.facts import StepDone
from harness.core.records import StepRecord

# `start`, `end`: wall clock, seconds; `seconds`: how long it took, as its writer measured it
ROW = np.dtype(
    [
        ("epoch", "<i8"),
        ("step", "<i8"),
        ("loss", "<f8"),
        ("start", "<f8"),
        ("end", "<f8"),
        ("seconds", "<f8"),
    ]
)
Columns: TypeAlias = NDArray[Any]  # of ROW
NONE: Columns = np.empty(0, ROW)


@dataclass(frozen=True)
class Committed:
    """A chain of step records, as far as views need it. `worlds`: ranks and their shares, by epoch.
    `metrics`: by step, but the gradient's norm."""

    rows: Columns
    worlds: dict[int, tuple[int, tuple[int, ...]]]
    metrics: dict[int, dict[str, float]]

    @classmethod
    def of(cls, records: Iterable[StepRecord]) -> Committed:
        found = list(records)
        return cls(
            of_records(found),
            {r.epoch: (r.world, tuple(r.shares)) for r in found},
            {r.step: named for r in found if (named := metrics_of(r))},
        )


def metrics_of(record: StepRecord) -> dict[str, float]:
    return {name: value for name, value in record.metrics.items() if name != "grad_norm"}


def of_facts(steps: Iterable[StepDone]) -> Columns:
    """What was told live, in the same order."""
    rows = [
        (s.epoch, s.step, s.loss, s.t_start, s.t_start + max(0.0, s.seconds), s.seconds)
        for s in steps
    ]
    return np.array(rows, ROW) if rows else NONE


def of_records(records: Iterable[StepRecord]) -> Columns:
    """What was committed, in the same order."""
    rows = [(r.epoch, r.step, r.loss, r.t - r.dt, r.t, r.dt) for r in records]
    return np.array(rows, ROW) if rows else NONE


def from_bytes(data: bytes, start: int = 0) -> Columns:
    """What `tobytes` of rows gave, from byte `start` on."""
    return np.frombuffer(data, ROW, offset=start) if len(data) > start else NONE


def joined(parts: Iterable[Columns]) -> Columns:
    """All of them, one after the other."""
    found = [part for part in parts if len(part)]
    if len(found) == 1:
        return found[0]
    return np.concatenate(found) if found else NONE


def newest_told(rows: Columns) -> Columns:
    """By (epoch, step), each once: of several the one that began last (a loop that is run again
    in the same session tells its steps again)."""
    if _is_ascending(rows):
        return rows
    order = np.lexsort((rows["start"], rows["step"], rows["epoch"]))
    epochs, steps = rows["epoch"][order], rows["step"][order]
    last = np.ones(len(rows), bool)
    last[:-1] = (epochs[1:] != epochs[:-1]) | (steps[1:] != steps[:-1])
    found: Columns = rows[order[last]]
    return found


def _is_ascending(rows: Columns) -> bool:
    """By (epoch, step), each once."""
    epochs, steps = rows["epoch"], rows["step"]
    later = (epochs[1:] == epochs[:-1]) & (steps[1:] > steps[:-1])
    return bool((later | (epochs[1:] > epochs[:-1])).all())


def without(rows: Columns, others: Columns) -> Columns:
    """The rows whose (epoch, step) is none of `others`', in their order."""
    if not len(rows) or not len(others):
        return rows
    both = (rows, others)
    wide = any(p["epoch"].max() >= 2**23 or p["step"].max() >= 2**40 for p in both)
    mine, theirs = _names(rows, wide), _names(others, wide)
    if wide or not (theirs[1:] > theirs[:-1]).all():
        return rows[~np.isin(mine, theirs)]
    at = np.searchsorted(theirs, mine)  # in order: by far quicker than sorting them again
    found: Columns = rows[theirs[at.clip(max=len(theirs) - 1)] != mine]
    return found


def in_both(a: Columns, b: Columns) -> tuple[Columns, Columns]:
    """The rows of each whose (epoch, step) the other has, in order; each has them once."""
    if not len(a) or not len(b):
        return NONE, NONE
    wide = any(p["epoch"].max() >= 2**23 or p["step"].max() >= 2**40 for p in (a, b))
    found = np.intersect1d(_names(a, wide), _names(b, wide), return_indices=True)
    return a[found[1]], b[found[2]]


def _names(rows: Columns, wide: bool) -> NDArray[Any]:
    """(epoch, step) as one number each, or (`wide`) as a pair."""
    if not wide:
        small: NDArray[Any] = rows["epoch"] * 2**40 + rows["step"]
        return small
    found: NDArray[Any] = np.empty(len(rows), [("epoch", "<i8"), ("step", "<i8")])
    found["epoch"], found["step"] = rows["epoch"], rows["step"]
    return found
