"""What `harness check` judges, and how it says what it found; and the numbers that rules compare.
Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.proof.check_evidence import Gradient, Outcome, RankLife
from harness.proof.check_script import SourceText

HOLDS, FAILS, UNTRIED, NOTE = "holds", "fails", "untried", "note"
SAME = 1e-5  # relative, of what one worker computes twice
ALIKE = 2e-3  # relative, of sums that two workers made: room for half precision
CLEARLY = 0.95  # a loss that falls so far in a few steps does not by chance
PARALLEL = 1 - 1e-6  # cosine of gradients that differ by a factor only


@dataclass(frozen=True)
class Ruling:
    """Of one promise. `where`: FILE:LINE to change, "" not known."""

    promise: str
    state: str  # HOLDS, FAILS, UNTRIED or NOTE
    what: str
    where: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Case:
    """What is judged. `two`: None: not tried; `ignored`: names that may be lost; `must_fall`: the
    loss has to; `shared`: both of two workers were on one GPU, which not everything stands."""

    one: Outcome
    two: Outcome | None
    source: SourceText
    ignored: frozenset[str] = frozenset()
    must_fall: bool = False
    shared: bool = False

    @property
    def before(self) -> RankLife:
        """One worker, until it was killed."""
        return self.one.of_rank(0, 0) or RankLife()

    @property
    def after(self) -> RankLife | None:
        """The same, resumed."""
        return self.one.of_rank(0, 1) if self.one.struck else None

    @property
    def prepare_line(self) -> str:
        said = self.before.prepared
        return said.where if said else ""

    @property
    def driver(self) -> str:
        """The framework that makes the steps; "": the script itself."""
        said = self.before.prepared
        return said.driver if said else ""

    @property
    def same_samples(self) -> bool:
        """Are the samples of a step known to be the same, however often it is made and wherever:
        are there records of them?"""
        return bool(self.one.records)

    def at(self, line: int) -> str:
        return f"{self.source.path}:{line}" if line else ""


# ---- words and numbers ---------------------------------------------------------------------------
def falling(losses: list[float]) -> bool:
    """Do they, by more than they scatter? The slope of the line through them is below zero by twice
    its standard error, or the last third lies clearly below the first."""
    count = len(losses)
    if not all(map(math.isfinite, losses)) or count < 4:
        return False
    third = max(1, count // 3)
    if median(losses[-third:]) < CLEARLY * median(losses[:third]):
        return True
    steps, mean = [i - (count - 1) / 2 for i in range(count)], sum(losses) / count
    square = sum(x * x for x in steps)
    slope = sum(x * y for x, y in zip(steps, losses, strict=True)) / square
    rest = sum((y - mean - slope * x) ** 2 for x, y in zip(steps, losses, strict=True))
    return slope < -2 * math.sqrt(rest / (count - 2) / square)


def median(values: list[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def usable(gradients: tuple[Gradient, ...]) -> bool:
    return bool(gradients) and all(math.isfinite(g.norm) and g.norm > 0 for g in gradients)


def distance(a: Gradient, b: Gradient) -> float:
    """How far apart, relative to `a`."""
    apart = math.dist(a.sketch, b.sketch)
    size = math.hypot(*a.sketch) or 1e-30
    return 0.0 if apart == 0 else max(apart / size, abs(a.norm - b.norm) / (a.norm or 1e-30))


def cosine(a: Gradient, b: Gradient) -> float:
    both = sum(x * y for x, y in zip(a.sketch, b.sketch, strict=True))
    return both / ((math.hypot(*a.sketch) * math.hypot(*b.sketch)) or 1e-30)


def differ(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """The greatest relative difference of two lists; of other lengths: infinite."""
    if len(a) != len(b):
        return math.inf
    return max(
        (abs(x - y) / max(abs(x), 1e-12) for x, y in zip(a, b, strict=True) if x != y), default=0.0
    )
