"""The phases of a run whose script trains more than once: each training is one, in the order in
which they begin.

A phase has an identity of its own: run.json for the first one, and `control/phases/` for the
others, with the number of steps that came before it. Steps are counted through all phases, so that
snapshots, records and facts of one run stay in one order. A phase has ended where the next one
begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.bucket.layout import PHASES, Identity, phase_key, phase_of
from storage.canonical_json import BadObject
from storage.errors import NotFound
from storage.stores.objects import ObjectStore


@dataclass
class RunPhase:
    """A phase. `ended`: the last steps of the phases before it, in order; `ends`: its own last
    step, once the next phase has begun, else None; `identity`: None until it is known; `begins`:
    the number of steps before it."""

    ended: tuple[int, ...] = ()
    ends: int | None = None
    identity: dict[str, Any] | None = None
    # no properties: each step reads them
    number: int = field(init=False)
    begins: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = len(self.ended) + 1
        self.begins = self.ended[-1] if self.ended else 0

    @property
    def key(self) -> str:
        return phase_key(self.number)

    @property
    def said(self) -> dict[str, int]:
        """The entries of an identity that a first phase does not have."""
        return {} if self.number == 1 else {"phase": self.number, "begins": self.begins}

    @property
    def label(self) -> str:
        """The name of the phase in messages for people."""
        return f"phase {self.number} of the run (the script's training {self.number})"


def read_phases(store: ObjectStore) -> list[RunPhase]:
    """Return the phases that have begun. Raises NotFound if there is no run.json; BadObject;
    NewerProtocol."""
    later = sorted(filter(None, map(phase_of, store.list(PHASES))))
    found: list[RunPhase] = []
    for number in (1, *later):
        key = phase_key(number)
        identity = Identity.decode(store.get(key))
        before = found[-1].begins if found else 0
        if number != len(found) + 1 or identity.phase != number or identity.begins < before:
            raise BadObject(
                f"{key}: wanted phase {len(found) + 1}, from step {before} or later on, found "
                f"phase {identity.phase} from step {identity.begins} on"
            )
        if found:
            found[-1].ends = identity.begins
        ended = (*found[-1].ended, identity.begins) if found else ()
        found.append(RunPhase(ended, None, identity.body))
    return found


def phase_at(phases: Sequence[RunPhase], step: int) -> RunPhase:
    """Return the phase that made `step`."""
    return next(one for one in reversed(phases) if one.begins < step or one.number == 1)


def phases_text(phases: Sequence[RunPhase]) -> str:
    """Return for people which steps each phase has made; "" if there is only one."""
    if len(phases) < 2:
        return ""
    return ", ".join(
        f"{one.number}: "
        + (f"from step {one.begins + 1}" if one.ends is None else _steps(one.begins, one.ends))
        for one in phases
    )


def _steps(before: int, last: int) -> str:
    return f"steps {before + 1} to {last}" if last > before else "no step"


def end_of(store: ObjectStore, number: int) -> int | None:
    """Return the last step of a phase; None: it has not ended. Raises BadObject, NewerProtocol."""
    try:
        return Identity.decode(store.get(phase_key(number + 1))).begins
    except NotFound:
        return None
