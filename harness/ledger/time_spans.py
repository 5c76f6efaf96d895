"""The array version of `bill.paint`, fast enough for a million steps. Pure.

A world's time is painted once, and each of its nodes gets its share from sums over pieces of some
minutes; only pieces that are cut are examined segment by segment. Exact to the nanosecond, like
`paint`. It does not return every segment: within a piece, time is summed by bucket.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from harness.ledger.bill import PRECEDENCE, LabelledSpan, paint

Ints: TypeAlias = NDArray[np.int64]
LevelSums: TypeAlias = list[int]  # nanoseconds by level
Piece: TypeAlias = tuple[int, int, LevelSums]  # from, to
PIECE = 1024  # segments that are summed as one
# most segments of one node; more are summed in this many groups, each by bucket
MOST_SEGMENTS, GROUPS = 512, 128
NOTHING = len(PRECEDENCE)
LEVEL = {bucket: i for i, bucket in enumerate(PRECEDENCE)}


@dataclass(frozen=True)
class Spans:
    """Intervals [starts, ends) in nanoseconds, each of one bucket (`levels`: its precedence), in
    order and without overlap; there may be gaps."""

    starts: Ints
    ends: Ints
    levels: Ints

    def clipped(self, start: int, end: int) -> Spans:
        a, b = np.searchsorted(self.ends, start, "right"), np.searchsorted(self.starts, end)
        starts, ends = self.starts[a:b].clip(min=start), self.ends[a:b].clip(max=end)
        return Spans(starts, ends, self.levels[a:b])

    def cut(self, at: int) -> Spans:
        """Return the spans with the one across `at`, if any, split in two."""
        i = int(np.searchsorted(self.ends, at, "right"))
        if i == len(self.ends) or self.starts[i] >= at:
            return self
        starts, ends = np.insert(self.starts, i + 1, at), np.insert(self.ends, i, at)
        return Spans(starts, ends, np.insert(self.levels, i, self.levels[i]))

    def totals(self) -> Ints:
        """Return the nanoseconds by level."""
        # bincount is not used because it sums floats, which is not exact
        found = np.zeros(NOTHING + 1, np.int64)
        np.add.at(found, self.levels, self.ends - self.starts)
        return found


def painted(starts: Ints, ends: Ints, levels: Ints) -> Spans:
    """Give each moment to the bucket of highest precedence that covers it; join neighbours."""
    whole = ends > starts
    starts, ends, levels = starts[whole], ends[whole], levels[whole]
    if not len(starts):
        return Spans(starts, ends, levels)
    times, where = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    begins, stops = where[: len(starts)], where[len(starts) :]
    top = np.full(len(times), NOTHING, np.int64)
    for level in sorted(set(levels.tolist()), reverse=True):
        mine = levels == level
        change = np.bincount(begins[mine], minlength=len(times)) - np.bincount(
            stops[mine], minlength=len(times)
        )
        top[np.cumsum(change) > 0] = level
    first = np.ones(len(times), bool)
    first[1:] = top[1:] != top[:-1]
    at, kept = times[first], top[first]
    covered = kept[:-1] != NOTHING  # nothing follows the last moment
    return Spans(at[:-1][covered], at[1:][covered], kept[:-1][covered])


class WorldSpans:
    """The painted time of one generation, prepared for sharing it among nodes."""

    def __init__(self, spans: Spans, cut_at: int | None = None):
        """Divide the spans into pieces, none of which lies across `cut_at` (nanoseconds)."""
        spans = spans if cut_at is None else spans.cut(cut_at)
        self.spans, self._cut_at = spans, cut_at
        count, lengths = len(spans.starts), spans.ends - spans.starts
        gaps = np.flatnonzero(spans.starts[1:] != spans.ends[:-1]) + 1
        if cut_at is not None:
            gaps = np.append(gaps, np.searchsorted(spans.starts, cut_at))
        # where pieces begin; no piece has a gap inside
        begins = np.union1d(np.arange(0, count, PIECE), gaps)
        cuts: Ints = begins[begins < count].astype(np.int64)
        sums: Ints = np.zeros((len(cuts), NOTHING + 1), np.int64)
        for level in range(NOTHING if count else 0):
            of_level = np.where(spans.levels == level, lengths, 0)
            sums[:, level] = np.add.reduceat(of_level, cuts)
        # plain ints, because every node reads them one by one
        self._begun: list[int] = spans.starts[cuts].tolist()
        self._over: list[int] = spans.ends[np.append(cuts, count)[1:] - 1].tolist()
        self._sums: list[LevelSums] = sums.tolist()

    @property
    def bounds(self) -> list[int]:
        """Begin, `cut_at` if given, and end. The generation must have spans."""
        cut = [] if self._cut_at is None else [self._cut_at]
        return [int(self.spans.starts[0]), *cut, int(self.spans.ends[-1])]

    def pieces(self, start: int, end: int) -> list[Piece]:
        """Return the pieces in [start, end), cut to it."""
        found: list[Piece] = []
        for i in range(bisect_right(self._over, start), bisect_left(self._begun, end)):
            a, b = self._begun[i], self._over[i]
            if start <= a and b <= end:
                found.append((a, b, self._sums[i]))
            else:
                a, b = max(a, start), min(b, end)
                found.append((a, b, self.spans.clipped(a, b).totals().tolist()))
        return found


# sums of overlapping pieces, by (worlds, start, end)
Overlaps: TypeAlias = dict[tuple[tuple[WorldSpans, ...], int, int], LevelSums]


def share_between(
    worlds: Sequence[WorldSpans],
    layers: Sequence[LabelledSpan],
    start: int,
    end: int,
    known: Overlaps,
) -> list[LabelledSpan]:
    """Return what `paint` would for the layers of these worlds and `layers`, which must be of lower
    precedence or `other`; within each piece, time is summed by bucket. `known` is a cache for nodes
    of the same worlds."""
    pieces = _apart(worlds, start, end, known)
    inside = [(a, b, "snapshot") for a, b, _ in pieces]  # the highest precedence
    found: list[LabelledSpan] = []
    at = 0
    for a, b, bucket in paint([*layers, *inside], start, end):
        if bucket != "snapshot":
            found.append((a, b, bucket))
            continue
        while at < len(pieces) and pieces[at][1] <= b:  # neighbours were joined
            found += _told(pieces[at][0], pieces[at][2])
            at += 1
    if len(found) <= MOST_SEGMENTS:
        return found
    bounds = {t for world in worlds if len(world.spans.starts) for t in world.bounds}
    return _coarse(found, bounds)


def _apart(worlds: Sequence[WorldSpans], start: int, end: int, known: Overlaps) -> list[Piece]:
    """Return the pieces of all worlds in [start, end), in order. Overlapping ones (a world that did
    not know yet that it was replaced) are joined."""
    found: list[tuple[int, int, LevelSums, tuple[WorldSpans, ...]]] = []
    pieces = [(*piece, world) for world in worlds for piece in world.pieces(start, end)]
    for a, b, sums, world in sorted(pieces, key=lambda p: p[:2]):
        if found and a < found[-1][1]:
            first, last, _, others = found[-1]
            both = others if world in others else (*others, world)
            found[-1] = (first, max(b, last), sums, both)
        else:
            found.append((a, b, sums, (world,)))
    return [
        (a, b, sums if len(of) == 1 else _together(of, a, b, known)) for a, b, sums, of in found
    ]


def _together(worlds: tuple[WorldSpans, ...], start: int, end: int, known: Overlaps) -> LevelSums:
    """Return the nanoseconds by level of the union of the worlds' spans in [start, end)."""
    if (worlds, start, end) not in known:
        clipped = [world.spans.clipped(start, end) for world in worlds]
        spans = painted(
            np.concatenate([one.starts for one in clipped]),
            np.concatenate([one.ends for one in clipped]),
            np.concatenate([one.levels for one in clipped]),
        )
        known[worlds, start, end] = spans.totals().tolist()
    return known[worlds, start, end]


def _told(start: int, sums: LevelSums) -> list[LabelledSpan]:
    """Return the sums of a piece as consecutive spans, one per bucket."""
    found: list[LabelledSpan] = []
    for level, spent in enumerate(sums):
        if spent:
            end = start + spent
            found.append((start, end, PRECEDENCE[level]))
            start = end
    return found


def _coarse(segments: list[LabelledSpan], bounds: set[int]) -> list[LabelledSpan]:
    """Return fewer segments with the same sums. None lies across the begin or end of a world, so
    that each world keeps its own losses."""
    found: list[LabelledSpan] = []
    size = -(-len(segments) // GROUPS)
    group: list[LabelledSpan] = []
    for segment in segments:
        if group and (len(group) == size or segment[0] in bounds):
            found += _summed(group)
            group = []
        group.append(segment)
    return found + _summed(group)


def _summed(group: list[LabelledSpan]) -> list[LabelledSpan]:
    sums = [0] * (NOTHING + 1)
    for a, b, bucket in group:
        sums[LEVEL[bucket]] += b - a
    return _told(group[0][0], sums) if group else []
