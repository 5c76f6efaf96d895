"""What is uploaded, what became of it, and what to expect of it: plain data. Pure.

outcome.state   "committed"   the manifest is there
                "failed"      not committed by us, and our share is not written: nobody can
                              commit it
                "waiting"     our share is written; another rank's is not, within the time:
                              whoever is last commits
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from storage.manifest import Ref

MARGIN = 0.8  # of a drain's time that is planned with; bandwidth varies


@dataclass(frozen=True)
class Unchanged:
    """What of a share is as it was in the one that the same rank handed over as `since` ("": who
    knows): file -> (start, end) in it."""

    since: str = ""
    files: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def covers(self, name: str, start: int, end: int) -> bool:
        """These bytes of a file?"""
        return any(low <= start and end <= high for low, high in self.files.get(name, ()))

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Unchanged:
        files = {
            name: [(int(start), int(end)) for start, end in ranges]
            for name, ranges in body["files"].items()
        }
        return cls(str(body["since"]), files)


@dataclass(frozen=True)
class TrainingBeside:
    """The training that goes on while a snapshot is sent, for whose sake it may last `within_s`; 0:
    full speed. `step_s`: of an undisturbed step; 0: unknown. `pace`: bytes per second from the
    node that it has not felt so far; 0: unknown. `watch`: where it is seen, for `TrainingWatch`."""

    step_s: float = 0.0
    within_s: float = 0.0
    pace: float = 0.0
    watch: str = ""

    @property
    def may_last(self) -> bool:
        """Who cannot be seen may be waiting."""
        return self.within_s > 0 and bool(self.watch)


@dataclass(frozen=True)
class UploadJob:
    """One rank's share of a snapshot. Plain data: `to_dict` goes through JSON."""

    ref: Ref
    rank: int
    world: int
    token: str  # unique to this attempt
    files: dict[str, tuple[int, int]]  # name -> (start, end) in the segment
    tensors: dict[str, Any]  # index, as `Snapshots.write` takes it
    data: dict[str, Any]
    weights: str = ""  # prefix of the tensors that data["weights"] is the hash of; "": none is made
    unchanged: Unchanged = field(default_factory=lambda: Unchanged())
    # objects to create before all else: key -> text
    before: dict[str, str] = field(default_factory=dict)
    # fields of retention.Keep: prune after the commit; None: another rank does
    keep: dict[str, Any] | None = None
    beside: TrainingBeside = field(default_factory=TrainingBeside)
    # the caller's own, returned with the outcome
    note: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(end - start for start, end in self.files.values())

    def to_dict(self) -> dict[str, Any]:
        inside = {"unchanged": vars(self.unchanged), "beside": vars(self.beside)}
        return {**vars(self), "ref": self.ref.name, **inside}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> UploadJob:
        files = {name: (int(start), int(end)) for name, (start, end) in body["files"].items()}
        inside: dict[str, Any] = {
            "unchanged": Unchanged.from_dict(body["unchanged"]),
            "beside": TrainingBeside(**body["beside"]),
        }
        return cls(**{**body, "ref": Ref.parse(body["ref"]), "files": files, **inside})


@dataclass(frozen=True)
class UploadOutcome:
    ref: Ref
    rank: int
    state: str  # see the module's docstring
    nbytes: int = 0  # of the whole snapshot
    weights: str = ""
    commit_s: float = 0.0  # from the job's arrival
    error: str = ""
    kind: str = ""  # name of the error's class
    parts: dict[str, str] = field(default_factory=dict)  # of what we wrote: part key -> file name
    note: dict[str, Any] = field(default_factory=dict)
    # of the training's steps while it was sent: 0.1 is a tenth longer; 0 also if nobody can tell
    slowdown: float = 0.0
    pace: float = 0.0  # bytes per second from the node that are not felt; 0: not known yet

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ref": self.ref.name}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> UploadOutcome:
        return cls(**{**body, "ref": Ref.parse(body["ref"])})


@dataclass(frozen=True)
class Forecast:
    """What a drain expects. `order`: surest first; `sure`: what should be written in time;
    `need_s`: until then, by ref."""

    order: tuple[Ref, ...]
    sure: frozenset[Ref]
    need_s: dict[Ref, float]


def forecast(remaining: Mapping[Ref, int], nbytes_per_s: float, left_s: float) -> Forecast:
    """Which of the snapshots (bytes that are still to send, by ref) to send first with `left_s`
    seconds left.

    All of them, oldest first, when they fit; else the newest one that fits alone (the older ones
    are worth nothing after it); else the one with the least to send.
    """
    refs = sorted(remaining)
    time_s = {ref: remaining[ref] / max(nbytes_per_s, 1.0) for ref in refs}
    spare_s = left_s * MARGIN
    if sum(time_s.values()) > spare_s:
        fitting = [ref for ref in refs if time_s[ref] <= spare_s]
        first = fitting[-1] if fitting else min(refs, key=lambda ref: (time_s[ref], ref))
        refs = [first, *(ref for ref in refs if ref != first)]
    need_s = dict(zip(refs, itertools.accumulate(time_s[ref] for ref in refs), strict=True))
    return Forecast(tuple(refs), frozenset(ref for ref in refs if need_s[ref] <= spare_s), need_s)
