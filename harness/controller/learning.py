"""What a run has learned, for policies that forecast (`View.known`).

Pure.
"""

from __future__ import annotations

from typing import Protocol

from harness.controller.book import Book
from harness.core.known import Knowledge


class Learner(Protocol):
    """Tells what forecasts need (`View.known`); asked in every round, so it must be quick."""

    def known(self, now_s: float, book: Book) -> Knowledge: ...


class KnowsNothing:
    """For policies that look at nothing but what is offered."""

    def known(self, now_s: float, book: Book) -> Knowledge:
        return Knowledge(capacity=book.capacity)
