"""Garbage and strange objects in a run's bucket, and hostile metadata services, stop nobody."""

from __future__ import annotations

import pytest

from support import hostile_objects as objects
from support.hostile import Case


def failures(cases: list[Case]) -> list[str]:
    return [f"{one.name}: {why}" for one in cases if (why := one.run())]


def test_every_class_of_garbage_before_a_command() -> None:
    """One command for each class; `make audit` has all of both."""
    assert failures(objects.some_garbage()) == []


@pytest.mark.parametrize("cloud", objects.SOURCES)
def test_hostile_answers_of_a_metadata_service(cloud: str) -> None:
    assert failures([objects.answer(cloud, name) for name in objects.ANSWERS]) == []


def test_strange_objects_before_a_takeover_and_beside_a_live_agent() -> None:
    assert failures(objects.strange()) == []


def test_the_tables_are_as_large_as_they_were() -> None:
    """Of the audit of the first version: 14 classes x 5 commands, 8, 10, 12 answers x 3."""
    assert len(objects.GARBAGE) >= 14 and len(objects.COMMANDS) >= 5
    assert len(objects.STRANGE) >= 10
    assert len(objects.ANSWERS) >= 12 and len(objects.SOURCES) == 3
