"""How a run was set up, and what changed on the way, as reports tell it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from harness.bucket.layout import SETUP
from harness.bucket.setups import of_people, places, readable
from harness.core.facts import SetupChanged, Stamped
from harness.core.setups import LAUNCH, LEVELS, PEOPLE, SESSION, Difference, Setup
from storage.objects import ObjectStore

MOST_TOLD = 20  # changes of one world, in a terminal


@dataclass(frozen=True)
class SetupShift:
    """A world that was set up otherwise than the run began. `t`: when it was found (wall clock);
    `more`: changes that are not listed."""

    t: float
    epoch: int
    action: str  # "warned" | "accepted" | "refused"
    changes: tuple[Difference, ...]
    more: int = 0

    @property
    def level(self) -> str:
        """Of its weightiest change."""
        return next((n for n in LEVELS if any(c.level == n for c in self.changes)), LEVELS[-1])


@dataclass(frozen=True)
class SetupSummary:
    """`first`: how the run began; None: nobody has said."""

    first: Setup | None = None
    asked: Setup | None = None  # of the first `harness launch`
    people: dict[str, str] = field(default_factory=dict)  # setups.PEOPLE
    shifts: tuple[SetupShift, ...] = ()

    def to_json(self) -> dict[str, Any]:
        setup, git = self.first, self.first.git if self.first else None
        return {
            "people": self.people,
            "argv": list(setup.argv) if setup else [],
            "config": setup.config if setup else {},
            "git": {
                "commit": git.commit,
                "branch": git.branch,
                "remote": git.remote,
                "changed": bool(git.diff),
                "kept": git.kept,
            }
            if git and git.commit
            else None,
            "software": setup.software if setup else {},
            "hardware": setup.hardware if setup else {},
            "packages": len(setup.packages) if setup else 0,
            "launch": list(self.asked.argv) if self.asked else [],
            "changes": [
                {
                    "t": shift.t,
                    "epoch": shift.epoch,
                    "action": shift.action,
                    "level": shift.level,
                    "changes": [vars(change) for change in shift.changes],
                    "more": shift.more,
                }
                for shift in self.shifts
            ],
        }


def summarize_setups(store: ObjectStore, facts: Iterable[Stamped]) -> SetupSummary:
    """Raises StoreError."""
    keys = store.list(SETUP)
    sessions, launches = places(keys, SESSION), places(keys, LAUNCH)
    first, asked = readable(store, sessions[:1]), readable(store, launches[:1])
    newest = readable(store, sessions[-1:]) if len(sessions) > 1 else first
    return SetupSummary(first, asked, of_people((newest, asked)), tuple(shifts_of(facts)))


def shifts_of(facts: Iterable[Stamped]) -> list[SetupShift]:
    """In order of time."""
    return [
        SetupShift(s.t, s.fact.epoch, s.fact.action, _differences(s.fact), s.fact.more)
        for s in facts
        if isinstance(s.fact, SetupChanged)
    ]


def _differences(fact: SetupChanged) -> tuple[Difference, ...]:
    return tuple(
        Difference(*(str(row.get(name, "")) for name in ("level", "name", "was", "now")))
        for row in fact.changes
    )


def setup_rows(found: SetupSummary) -> list[tuple[str, str]]:
    """What a person wants to know of it, as rows of a table."""
    rows = [(name, found.people[name]) for name in PEOPLE if found.people.get(name)]
    if (setup := found.first) is not None:
        rows.append(("command", " ".join(setup.argv)))
        if git := setup.git.commit:
            changed = f", {setup.git.diff_nbytes:,} bytes not committed" if setup.git.diff else ""
            rows.append(("git", f"{git[:12]} ({setup.git.branch or 'no branch'}){changed}"))
        versions = [
            f"{n} {setup.software[n]}" for n in ("python", "torch", "cuda") if setup.software.get(n)
        ]
        rows.append(("software", f"{', '.join(versions)}; {len(setup.packages)} packages"))
    return rows


def shift_words(shift: SetupShift) -> str:
    more = len(shift.changes) - MOST_TOLD + shift.more
    told = "; ".join(map(str, shift.changes[:MOST_TOLD]))
    return told + (f"; and {more} more" if more > 0 else "")
