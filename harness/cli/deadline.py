"""`--deadline` and `--work` of `harness launch`: what they mean, and whether they can be kept."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from harness.core.world import BadInput

if TYPE_CHECKING:
    from harness.controller.book import Book
    from harness.controller.learning import RunGoals

# seconds from asking for a node until it trains, while none was seen
CHANGEOVER_S = {"local": 15.0, "sky": 300.0}


class WithDeadline(Protocol):
    """The flags in question."""

    @property
    def deadline(self) -> str: ...
    @property
    def work(self) -> str: ...
    @property
    def cloud(self) -> str: ...


def deadline_text(text: str) -> None:
    """Raises ValueError that says what is wanted."""
    from harness.agent.polling import utc

    if text and _hours(text) is None:
        try:
            utc(text)
        except ValueError:
            raise ValueError(
                f"wanted a time from the launch on, such as 36h, or a date, such as 2026-11-25 or "
                f"2026-11-25T18:00Z; found {text!r}"
            ) from None


def work_text(text: str) -> None:
    """Raises ValueError that says what is wanted."""
    if text and not _hours(text):
        raise ValueError(f"wanted a duration above 0, such as 48h or 90m; found {text!r}")


def deadline_at(text: str, started_s: float) -> float | None:
    """Wall clock. `started_s`: when the run was launched. None: there is none."""
    from harness.agent.polling import utc

    if not text:
        return None
    hours = _hours(text)
    return utc(text) if hours is None else started_s + hours * 3600


def wanted(flags: WithDeadline, nodes: tuple[int, int], book: Book, now_s: float) -> RunGoals:
    """What a learner is told. A deadline in hours counts from the run's launch, also for a
    controller that takes it over. Raises BadInput for one that a new run cannot keep."""
    from harness.controller.learning import RunGoals
    from harness.views.words import clock, duration

    is_new = book.started_s is None
    deadline_s = deadline_at(flags.deadline, now_s if book.started_s is None else book.started_s)
    work_h = _hours(flags.work) or 0.0
    if deadline_s is not None and is_new:
        left_s = deadline_s - now_s
        if left_s <= 0:
            raise BadInput(
                f"--deadline {flags.deadline}: wanted a time to come, found {clock(deadline_s)} "
                "UTC, which is over"
            )
        if not book.step and work_h * 3600 > left_s:
            raise BadInput(
                f"--deadline {flags.deadline} is in {duration(left_s)}, and --work {flags.work} "
                f"takes longer on {nodes[1]} nodes, even undisturbed: allow more time, or more "
                "--nodes"
            )
    return RunGoals(deadline_s, work_h * 3600, nodes[1], CHANGEOVER_S[flags.cloud])


def _hours(text: str) -> float | None:
    """`90m`, `36h`, `7d` in hours; None: it is something else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text.strip())
    return float(found[1]) * {"m": 1 / 60, "h": 1.0, "d": 24.0}[found[2]] if found else None
