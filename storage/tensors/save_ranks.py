"""The ranks that save or load a state together; every result and error of one is shared with all.

All methods are collective: all ranks call each one, in the same order. Works with any backend that
can gather objects (gloo, NCCL).

Errors: an error of one rank is raised on all, with its own class if that is one of `storage`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from storage import errors
from storage.errors import StoreError
from storage.snapshots.manifest import SnapshotCorrupt, SnapshotTooNew
from storage.snapshots.restore import Rewind

T = TypeVar("T")


def gathered(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks of a group, in order; None means this process alone."""
    if group is None:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


class Ranks:
    """The ranks that save or load together: all of torch.distributed, or this process alone."""

    def __init__(self, alone: bool):
        together = not alone and dist.is_available() and dist.is_initialized()
        self.group = dist.group.WORLD if together and dist.get_world_size() > 1 else None
        self.rank = 0 if self.group is None else dist.get_rank()
        self.world = 1 if self.group is None else dist.get_world_size()

    def gather(self, mine: Any) -> list[Any]:
        """Return the values of all ranks, in order."""
        return gathered(mine, self.group)

    def each(self, do: Callable[[], T]) -> T:
        """Run `do` on every rank and return this rank's result. If one rank fails, all raise."""
        return self._told(do, lambda mine, failed: self.gather(failed))

    def first(self, do: Callable[[], T]) -> T:
        """Run `do` on rank 0 and return its result on all ranks. If it fails, all raise."""
        told: list[Any] = [None]

        def tell(mine: T | None, failed: tuple[str, str] | None) -> list[Any]:
            told[0] = mine, failed
            if self.group is not None:
                dist.broadcast_object_list(told, src=0, group=self.group)
            return [told[0][1]]

        self._told(do if self.rank == 0 else lambda: None, tell)
        found: T = told[0][0]
        return found

    def _told(
        self, do: Callable[[], T], tell: Callable[[T | None, tuple[str, str] | None], list[Any]]
    ) -> T:
        mine: T | None = None
        failed: Exception | None = None
        try:
            mine = do()
        except Exception as e:  # sent to all, otherwise they would wait for us forever
            failed = e
        said = tell(mine, None if failed is None else (type(failed).__name__, str(failed)))
        if failed is not None:
            raise failed
        for rank, other in enumerate(said):
            if other is not None:
                raise _named(rank, *other)
        return mine  # type: ignore[return-value]


def _named(rank: int, kind: str, text: str) -> StoreError:
    """Return the error of another rank, with the same class if it is one of this package."""
    known = {one.__name__: one for one in (SnapshotCorrupt, SnapshotTooNew, Rewind)}
    one = getattr(errors, kind, known.get(kind))
    if isinstance(one, type) and issubclass(one, StoreError):
        return one(f"rank {rank}: {text}")
    return StoreError(f"rank {rank}: {kind}: {text}")


__all__ = ["Ranks", "gathered"]
