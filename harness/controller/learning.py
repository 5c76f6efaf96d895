"""What a run has learned, for policies that forecast (`View.known`).

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from harness.controller.book import Book
from harness.core.known import Knowledge
from harness.core.world import Offer


class Learner(Protocol):
    """Tells what forecasts need (`View.known`); asked in every round, so it must be quick, and it
    never fails: what it cannot find out now it tells later. `offers`: as they are now."""

    def known(self, now_s: float, book: Book, offers: Sequence[Offer]) -> Knowledge: ...


class KnowsNothing:
    """For policies that look at nothing but what is offered."""

    def known(self, now_s: float, book: Book, offers: Sequence[Offer]) -> Knowledge:
        return Knowledge(capacity=book.capacity)
