"""Averages that TRL's trainers keep while they train, over the micro-batches of all ranks. Runs in
the worker.

TRL appends to `_metrics["train"][name]` (some trainers: `_stored_metrics`) in each micro-batch,
after a gather over ranks that is hidden from it here. So each rank holds the values of its own
micro-batches only. After a step every rank receives all of them, in the order of the micro-batches,
as a single process would have them.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from harness.worker.session import Session

# Collectives over the ranks, for the parts of the Trainer adapter.


class AllRanks:
    """The other ranks. All ranks call each method together, in the same order. `copies`: of the
    model; `copy`: the one that this rank belongs to, at this `place` of its `copy_ranks`; `writes`:
    it is the first copy, whose ranks save checkpoints together, as the Trainer does."""

    def __init__(self, run: Session):
        self._peers = run._peers
        self.alone = self._peers.control is None
        self.copies, self.copy = self._peers.replicas, self._peers.replica
        self.copy_ranks = self._peers.replica_ranks
        self.place = self._peers.rank % self.copy_ranks
        self.writes = self.copy == 0

    def gather(self, value: Any) -> list[Any]:
        """Return each rank's value, in rank order."""
        return self._peers.gather(value)

    def first(self, value: Callable[[], Any]) -> Any:
        """Return rank 0's value; only rank 0 computes it."""
        return self._peers.agree(value)

    def value_of_first(self, value: Any) -> Any:
        return self._peers.agree(lambda: value)

    def gather_copies(self, value: Any) -> list[Any]:
        """Return the values of the ranks at this rank's place in each copy, in order."""
        return self.gather(value)[self.place :: self.copy_ranks]

    def total(self, numbers: list[float]) -> list[float]:
        """Return the sums over copies, of the ranks at this rank's place. Exact where one copy has
        a number and the others have 0."""
        if self.alone:
            return numbers
        every = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(every, group=self._peers.across or self._peers.control)
        return every.tolist()

    @contextlib.contextmanager
    def leader_first(self, of_each_node: bool) -> Iterator[None]:
        """Run the body on the first rank (of each node, or of all) before the others."""
        first = (self._peers.local_rank if of_each_node else self._peers.rank) == 0
        if not first:
            self._peers.barrier()
        try:
            yield
        finally:
            if first:
                self._peers.barrier()


# Methods of single objects, replaced while a training runs.

_NOTHING = object()
Original = Callable[..., Any]  # the function that a hook replaced


class Hooks:
    """Hooks in methods of single objects. An instance attribute takes precedence over the class and
    all its bases, so a hook sees every call, whatever a subclass overrides."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace `owner.name(...)` with `function(original, ...)`."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        self._before.append((owner, name, vars(owner).get(name, _NOTHING)))
        setattr(owner, name, hooked)

    def clear(self) -> None:
        """Restore all methods."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


TOTAL = "num_tokens"  # not appended to: the newest total replaces the old one


class Meters:
    """The metric lists of a TRL `trainer`. `kept`: lists by mode and name; the trainer may also
    count `_total_train_tokens`. `mode`: "train" or "eval"."""

    def __init__(self, trainer: Any, kept: dict[str, dict[str, list[Any]]], mode: str):
        self._trainer, self._kept, self._mode = trainer, kept, mode
        self._lengths: dict[str, int] = {}
        self._tokens = 0
        self._added: dict[int, tuple[dict[str, list[float]], int]] = {}

    @staticmethod
    def of(trainer: Any, mode: str = "train") -> Meters | None:
        """Return the trainer's meters, or None if it keeps none."""
        for name in ("_metrics", "_stored_metrics"):
            kept = getattr(trainer, name, None)
            if isinstance(kept, dict):
                return Meters(trainer, kept, mode)
        return None

    def begin(self) -> None:
        """Begin a step."""
        self._lengths = {name: len(values) for name, values in self._lists().items()}
        self._tokens = getattr(self._trainer, "_total_train_tokens", 0)
        self._added = {}

    def take(self, m: int) -> None:
        """Collect what own micro-batch m added. If it runs twice, the second result counts."""
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
        """Merge the values of the step's micro-batches over all ranks. Collective."""
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
        """Return the state as JSON-compatible data."""
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
