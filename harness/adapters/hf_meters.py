"""Averages that TRL's trainers keep while they train, over the micro-batches of all ranks. Runs in
the worker.

TRL appends to `_metrics["train"][name]` (some: `_stored_metrics`) in each micro-batch, after asking
the other ranks, which it does not see here. So each rank has what its own micro-batches gave; after
a step all of them get all of it, in the order of the micro-batches, as one process alone would have
it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

TOTAL = "num_tokens"  # not appended to: the newest total replaces what is there


class Meters:
    """`trainer`: of TRL; `kept`: its lists by mode and name; it may count `_total_train_tokens`
    too. `mode`: "train" or "eval"."""

    def __init__(self, trainer: Any, kept: dict[str, dict[str, list[Any]]], mode: str):
        self._trainer, self._kept, self._mode = trainer, kept, mode
        self._lengths: dict[str, int] = {}
        self._tokens = 0
        self._added: dict[int, tuple[dict[str, list[float]], int]] = {}

    @staticmethod
    def of(trainer: Any, mode: str = "train") -> Meters | None:
        """None: it keeps none."""
        for name in ("_metrics", "_stored_metrics"):
            kept = getattr(trainer, name, None)
            if isinstance(kept, dict):
                return Meters(trainer, kept, mode)
        return None

    def begin(self) -> None:
        """A step begins."""
        self._lengths = {name: len(values) for name, values in self._lists().items()}
        self._tokens = getattr(self._trainer, "_total_train_tokens", 0)
        self._added = {}

    def take(self, m: int) -> None:
        """What own micro-batch m has added, if it is done twice then what it added last."""
        lists, added = self._lists(), {}
        for name, values in lists.items():
            if name == TOTAL:
                continue
            length = self._lengths.get(name, 0)
            if new := values[length:]:
                added[name] = [float(value) for value in new]
                del values[length:]
        tokens = getattr(self._trainer, "_total_train_tokens", 0) - self._tokens
        self._added[m] = (added, tokens)
        if tokens:
            self._trainer._total_train_tokens = self._tokens

    def merge(self, gather: Callable[[Any], list[Any]]) -> None:
        """All ranks: the step's micro-batches are done."""
        everyone: dict[int, tuple[dict[str, list[float]], int]] = {}
        for each in gather(self._added):
            everyone |= each
        lists, tokens = self._lists(), self._tokens
        for m in sorted(everyone):
            added, more = everyone[m]
            tokens += more
            for name, values in added.items():
                lists[name].extend(values)
        if hasattr(self._trainer, "_total_train_tokens"):
            self._trainer._total_train_tokens = tokens
            if TOTAL in lists or any(added for added, _ in everyone.values()):
                lists[TOTAL] = [tokens]

    def state(self) -> dict[str, Any]:
        """As JSON has it."""
        lists = {name: [float(v) for v in values] for name, values in self._lists().items()}
        return {"lists": lists, "tokens": getattr(self._trainer, "_total_train_tokens", 0)}

    def restore(self, state: dict[str, Any]) -> None:
        lists = self._lists()
        lists.clear()
        for name, values in state["lists"].items():
            lists[name] = list(values)
        if hasattr(self._trainer, "_total_train_tokens"):
            self._trainer._total_train_tokens = state["tokens"]

    def _lists(self) -> dict[str, list[Any]]:
        return self._kept.setdefault(self._mode, defaultdict(list))
