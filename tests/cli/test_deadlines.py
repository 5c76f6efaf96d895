"""Deadlines, as `harness launch` is told them."""

from __future__ import annotations

import dataclasses
import random

import pytest

from harness.cli import dry_run
from harness.controller.learning import RunGoals
from harness.core.world import BadInput
from harness.ledger.attempts import AttemptHistory


@dataclasses.dataclass(frozen=True)
class Said:
    deadline: str = ""
    work: str = ""
    cloud: str = "local"
    usd_per_hour_late: float | None = None


def led(started_s=None, step=0):
    book = AttemptHistory(random.Random(0))
    book.started_s, book.step = started_s, step
    return book


def test_a_deadline_counts_from_the_launch_for_every_controller():
    new = dry_run.wanted(Said("36h", "48h"), (1, 4), led(step=7), 1e6)
    assert new == RunGoals(1e6 + 36 * 3600, 48 * 3600, 4, 15.0)
    taken_over = dry_run.wanted(Said("90m", cloud="sky"), (1, 4), led(1e6 - 8000), 1e6)
    assert taken_over.deadline_s == 1e6 - 8000 + 5400 and taken_over.changeover_s == 300.0
    date = dry_run.wanted(Said("2026-11-25T18:00"), (1, 1), led(), 1e6)
    assert date.deadline_s == 1795629600.0
    assert dry_run.wanted(Said(), (1, 1), led(), 1e6).deadline_s is None


@pytest.mark.parametrize(
    ("said", "why"),
    [(Said("2020-01-01"), "a time to come"), (Said("36h", "48h"), "allow more time")],
)
def test_a_deadline_that_a_new_run_cannot_keep_is_refused(said, why):
    with pytest.raises(BadInput, match=why):
        dry_run.wanted(said, (1, 1), led(), 1.7e9)
    dry_run.wanted(said, (1, 1), led(1.69e9, 5), 1.7e9)  # there is no way back


@pytest.mark.parametrize("text", ["", "36h", "1.5d", "90m", "2026-11-25", "2026-11-25T18:00:00Z"])
def test_deadlines_that_are_understood(text):
    dry_run.deadline_text(text)


@pytest.mark.parametrize("text", ["soon", "36", "-3h", "2026-13-01", "36 hours"])
def test_deadlines_that_are_not(text):
    with pytest.raises(ValueError, match="such as 36h, or a date"):
        dry_run.deadline_text(text)
    if text:
        with pytest.raises(ValueError, match="such as 48h"):
            dry_run.work_text(text)
