"""Some steps in a row, as people name them: "20:23"."""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_STEPS = 100


@dataclass(frozen=True)
class StepsAsked:
    """Both included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> StepsAsked:
        """Raises ValueError that says what is wanted."""
        found = re.fullmatch(r"(\d{1,12})(?::(\d{1,12}))?", text.strip(), re.ASCII)
        wanted = "wanted a step or the first and the last of some, such as 20 or 20:23"
        if not found:
            raise ValueError(f"{wanted}; found {text!r:.40}")
        first, last = int(found[1]), int(found[2] or found[1])
        if not 1 <= first <= last:
            raise ValueError(f"{wanted}, from 1 on; found {text!r:.40}")
        if last - first >= MOST_STEPS:
            raise ValueError(f"wanted at most {MOST_STEPS} steps, found {last - first + 1}")
        return cls(first, last)
