"""A run's facts by what they are about: a world, a member, an attempt.  Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

from harness.core.columns import NONE, Columns, joined, newest_told, of_facts
from harness.core.facts import (
    AttemptDoubted,
    AttemptIntended,
    Decided,
    Fact,
    NoticeCancelled,
    NoticeSeen,
    ProfileTaken,
    SessionStarted,
    SnapshotQuarantined,
    Stamped,
    StepDone,
    StepsTimed,
    Validated,
)
from harness.core.values import amount

F = TypeVar("F", bound=Fact)
MANY = (StepDone, StepsTimed, Validated, ProfileTaken)  # of an epoch, and not about its end


class Testimony:
    """Facts in the order of their times. `steps`: as they were told live, among the facts and
    besides."""

    def __init__(self, facts: Iterable[Stamped], steps: Columns = NONE):
        self._of_epoch: dict[int, list[Stamped]] = defaultdict(list)
        self._of_member: dict[str, list[Stamped]] = defaultdict(list)
        self._of_attempt: dict[int, list[Stamped]] = defaultdict(list)
        self.dismissed: list[tuple[float, Decided]] = []  # nodes, by the controller
        # by whom they were found bad is not told, only which world had made them
        self.quarantined: list[tuple[float, SnapshotQuarantined]] = []
        live: list[StepDone] = []
        for stamped in sorted(facts, key=lambda s: s.t):
            fact = stamped.fact
            if isinstance(fact, StepDone):
                live.append(fact)
            elif isinstance(fact, Decided) and fact.decision in ("release", "terminate"):
                self.dismissed.append((stamped.t, fact))
            elif isinstance(fact, SnapshotQuarantined):
                self.quarantined.append((stamped.t, fact))
            if isinstance(fact, MANY):
                continue
            if isinstance(epoch := getattr(fact, "epoch", None), int):
                self._of_epoch[epoch].append(stamped)
            if isinstance(member := getattr(fact, "member", None), str):
                self._of_member[member].append(stamped)
            if isinstance(attempt := getattr(fact, "attempt", None), int):
                self._of_attempt[attempt].append(stamped)
        self.steps = newest_told(joined([steps, of_facts(live)]))

    def of_epoch(self, epoch: int, kind: type[F]) -> list[tuple[float, F]]:
        return _of(self._of_epoch.get(epoch, ()), kind)

    def of_member(self, member: str, kind: type[F]) -> list[tuple[float, F]]:
        return _of(self._of_member.get(member, ()), kind)

    def of_attempt(self, attempt: int, kind: type[F]) -> list[tuple[float, F]]:
        return _of(self._of_attempt.get(attempt, ()), kind)

    def notices(self, member: str) -> list[tuple[float, NoticeSeen]]:
        """Those that a node must heed."""
        return [(t, n) for t, n in self.of_member(member, NoticeSeen) if n.notice != "soft"]

    def cancelled_s(self, member: str, notice: NoticeSeen) -> float | None:
        """When it was taken back."""
        found = [t for t, c in self.of_member(member, NoticeCancelled) if c.id == notice.id]
        return min(found, default=None)

    def doubted_s(self, attempt: int) -> float | None:
        """Since when another node was looked for in its place; None: it was to stay."""
        since_s = None
        for t, fact in self.of_attempt(attempt, AttemptDoubted):
            since_s = (since_s or t) if fact.doubted else None
        return since_s

    def session(self, epoch: int) -> tuple[float, SessionStarted] | None:
        """The first of an epoch: its scripts may loop again and say so again."""
        return next(iter(self.of_epoch(epoch, SessionStarted)), None)

    def gpus(self, attempt: int) -> int:
        """Of an attempt's node, as it was asked for; 1 for a node without any, or unknown."""
        asked = self.of_attempt(attempt, AttemptIntended)
        return max(1, int(amount(asked[0][1].offer.get("gpus")))) if asked else 1


def _of(stamped: Iterable[Stamped], kind: type[F]) -> list[tuple[float, F]]:
    return [(s.t, s.fact) for s in stamped if isinstance(s.fact, kind)]
