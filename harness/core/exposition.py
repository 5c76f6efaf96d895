"""Numbers as Prometheus reads them: its text format, version 0.0.4.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGE, COUNTER = "gauge", "counter"

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Exposed:
    """One metric. `samples`: labels and value of each of its series."""

    name: str
    help: str
    samples: tuple[tuple[Labels, float], ...]
    kind: str = GAUGE

    @classmethod
    def of(cls, name: str, help: str, value: float | None, kind: str = GAUGE) -> Exposed:
        """Without labels; None: it is not known, and has no series."""
        return cls(name, help, () if value is None else (((), value),), kind)

    @classmethod
    def one_of(cls, name: str, help: str, label: str, known: Iterable[str], now: str) -> Exposed:
        """A state: 1 for the one that holds, 0 for the others."""
        states = dict.fromkeys([*known, now])
        return cls(name, help, tuple((((label, s),), float(s == now)) for s in states))


def exposition(metrics: Iterable[Exposed], labels: Labels = ()) -> str:
    """`labels`: that all series have."""
    lines: list[str] = []
    for metric in metrics:
        words = metric.help.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {metric.name} {words}", f"# TYPE {metric.name} {metric.kind}"]
        for own, value in metric.samples:
            lines.append(f"{metric.name}{_labels((*labels, *own))} {_number(value)}")
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{n}="{quoted(v)}"' for n, v in labels) + "}" if labels else ""


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
