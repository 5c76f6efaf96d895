"""The Trainer's training data, shared out over the ranks. Runs in the worker."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import xxhash
from torch.utils.data import DataLoader

from harness.core.world import BadInput
from harness.worker.loader import fingerprint
from harness.worker.shares import Share, SharedLoader


class TrainerFeed:
    """In the place of the DataLoader that the Trainer made: gives a `Share` for each batch. What
    samplers drew travels in snapshots (`state_dict`)."""

    def __init__(
        self,
        theirs: Any,
        micro_batches: int,
        seed: int,
        first: Callable[[Any], Any],
        tell: Callable[[str], None],
    ):
        """`theirs`: as accelerate prepared it; `first`: rank 0's value, on all ranks; `tell`: what
        people should know. Raises BadInput."""
        self._theirs, self._micro_batches = theirs, micro_batches
        self._seed, self._first, self._tell = seed, first, tell
        # accelerate's own only move batches to the device, which the Trainer does as well
        self._plain = getattr(theirs, "base_dataloader", theirs)
        if not isinstance(self._plain, DataLoader):
            raise BadInput(
                "get_train_dataloader: wanted a torch DataLoader, whose batches can be shared out, "
                f"found {type(theirs).__name__}; return one, or run with --adapt none"
            )
        self._shared: SharedLoader | None = None
        self._loaded: Any = None

    def share(self, mine: range) -> None:
        """The ranks' shares are known, and what a snapshot holds is loaded."""
        self._shared = SharedLoader(
            self._plain,
            micro_batches=self._micro_batches,
            mine=mine,
            seed=self._seed,
            agree=self._first,
            tell=self._tell,
        )
        if self._loaded is not None:
            self._shared.load_state_dict(self._loaded)

    # ---- what the Trainer asks of a DataLoader ---------------------------------------------------
    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._theirs, "set_epoch"):
            self._theirs.set_epoch(epoch)

    def seek(self, epoch: int, batches: int) -> None:
        """The next iteration is of this epoch, without its first `batches`. Raises BadInput."""
        assert self._shared is not None
        self._shared.resume_at(epoch, batches)

    def __iter__(self) -> Iterator[Share]:
        assert self._shared is not None
        shares, last = iter(self._shared), None
        with contextlib.suppress(TypeError):  # a stream
            last = len(self._shared) - 1
        for share in shares:
            if share.index == last:
                # The Trainer does not ask for more, and the samplers shall know that it is over.
                next(shares, None)
            yield share

    # ---- state -----------------------------------------------------------------------------------
    def state_dict(self) -> Any:
        return {} if self._shared is None else self._shared.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._loaded = state or None


def spelled(trainer: Any) -> str:
    """What the data and its order are, for the run's identity."""
    args = trainer.args
    order = {
        "sampling": str(args.train_sampling_strategy),
        "drop_last": args.dataloader_drop_last,
        "seed": args.seed,
        "data_seed": args.data_seed,
    }
    said = json.dumps([fingerprint(trainer.train_dataset), order], sort_keys=True)
    return f"trainer:{xxhash.xxh3_128_hexdigest(said.encode())}"
