"""Waiting in tests: for something to become true, with a bound, on any clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

WITHIN_S = 60.0  # generous: machines that run tests are busy


def until(
    condition: Callable[[], T],
    what: str,
    within_s: float = WITHIN_S,
    sleep: Callable[[float], object] = time.sleep,
    every_s: float = 0.02,
) -> T:
    """What `condition` says, when that is true. Raises AssertionError after `within_s` seconds of
    the clock that `sleep` moves."""
    waited_s = 0.0
    while not (found := condition()):
        assert waited_s < within_s, f"waited {within_s:g} s for {what}"
        sleep(every_s)
        waited_s += every_s
    return found
