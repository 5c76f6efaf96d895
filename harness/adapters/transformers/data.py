"""The Trainer's training data, shared out over the ranks, and evaluation during training, shared
out if only losses are needed. Runs in the worker.

All ranks iterate over all batches. An evaluation goes in rounds of as many batches as there are
copies of the model: each copy computes one, then all exchange the losses, so the Trainer sees what
it would see with one copy.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader

from harness.adapters.accelerate.rounds import Interleaved, like_loader, sampler_shard
from harness.adapters.transformers.ranks_together import AllRanks, Hooks, Meters, Original
from harness.adapters.whole_copies import own_parts, whole_shares
from harness.core.world import BadInput
from harness.loops.shared_batches import Share, SharedLoader
from harness.worker.batches.loader import fingerprint

# The Trainer's training data, shared out over the ranks.


class TrainerFeed:
    """A replacement for the Trainer's DataLoader that yields a `Share` for each batch. The
    samplers' draws are part of snapshots (`state_dict`)."""

    def __init__(
        self,
        theirs: Any,
        micro_batches: int,
        seed: int,
        first: Callable[[Any], Any],
        tell: Callable[[str], None],
        parts: int = 1,
    ):
        """Wrap `theirs`, the loader as accelerate prepared it. `first` returns rank 0's value on
        all ranks; `tell` prints a message for the user; `parts`: the ranks of a copy of the model
        that each read a part of a micro-batch. Raises BadInput."""
        self._theirs, self._micro_batches, self._parts = theirs, micro_batches, parts
        self._seed, self._first, self._tell = seed, first, tell
        # accelerate's own only moves batches to the device, which the Trainer does as well
        self._plain = getattr(theirs, "base_dataloader", theirs)
        if not isinstance(self._plain, DataLoader):
            raise BadInput(
                "get_train_dataloader: wanted a torch DataLoader, whose batches can be shared out, "
                f"found {type(theirs).__name__}; return one, or run with --adapt none"
            )
        if parts > 1:
            self._plain = _of_all_parts(self._plain, parts)
        self._shared: SharedLoader | None = None
        self._loaded: Any = None

    def share(self, mine: range, part: int = 0) -> None:
        """Begin with this rank's share, once it is known, and apply the state that was loaded.
        `mine`: its micro-batches in a step; `part`: which part of each it reads."""
        parts = self._parts
        self._shared = SharedLoader(
            self._plain,
            micro_batches=self._micro_batches * parts,
            mine=own_parts(mine, parts, part),
            seed=self._seed,
            agree=self._first,
            tell=self._tell,
        )
        if self._loaded is not None:
            self._shared.load_state_dict(self._loaded)

    # ---- the interface of a DataLoader -----------------------------------------------------------
    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._theirs, "set_epoch"):
            self._theirs.set_epoch(epoch)

    def seek(self, epoch: int, batches: int) -> None:
        """Make the next iteration start in this epoch after `batches`. Raises BadInput."""
        assert self._shared is not None
        self._shared.resume_at(epoch, batches * self._parts)

    def __iter__(self) -> Iterator[Share]:
        assert self._shared is not None
        shares, last = whole_shares(self._shared, self._parts), None
        with contextlib.suppress(TypeError):  # a stream has no length
            last = len(self._shared) // self._parts - 1
        for share in shares:
            if share.index == last:
                # The Trainer reads no further, but the samplers must reach their end.
                next(shares, None)
            yield share

    # ---- state -----------------------------------------------------------------------------------
    def state_dict(self) -> Any:
        return {} if self._shared is None else self._shared.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._loaded = state or None


def _of_all_parts(loader: DataLoader[Any], parts: int) -> Any:
    """Return a DataLoader of all batches that accelerate deals out among the ranks of a copy, which
    `loader` is one rank's of. Raises BadInput."""
    shard = loader.batch_sampler
    if not isinstance(shard, sampler_shard()) or shard.split_batches:
        raise BadInput(
            "wanted a map-style dataset, whose batches a model's ranks share out by index, found "
            f"{type(loader.dataset).__name__} (or split_batches); give the Trainer a map-style "
            "dataset, or a GPU that holds the whole model"
        )
    whole = Interleaved(shard.batch_sampler, parts, split=False, even=shard.even_batches)
    return like_loader(loader, whole)


def spelled(trainer: Any) -> str:
    """Describe the data and its order, for the run's identity."""
    args = trainer.args
    order = {
        "sampling": str(args.train_sampling_strategy),
        "drop_last": args.dataloader_drop_last,
        "seed": args.seed,
        "data_seed": args.data_seed,
    }
    said = json.dumps([fingerprint(trainer.train_dataset), order], sort_keys=True)
    return f"trainer:{xxhash.xxh3_128_hexdigest(said.encode())}"


# packages whose compute_loss and prediction_step keep nothing of a batch except in `Meters`
KNOWN = ("transformers", "trl")


def shares_losses(trainer: Any) -> bool:
    """Return whether its evaluations need only losses, from methods that keep nothing else."""
    kind = type(trainer)
    methods = (kind.compute_loss, kind.prediction_step)
    known = all(method.__module__.partition(".")[0] in KNOWN for method in methods)
    return known and (trainer.compute_metrics is None or trainer.args.prediction_loss_only)


class EvaluationRounds:
    """A replacement for an evaluation's DataLoader: it reads rounds of as many batches as there are
    copies of the model, and yields them one by one. The DataLoader does everything else."""

    def __init__(self, theirs: Any, copies: int):
        self.theirs, self._copies = theirs, copies
        self.round: list[Any] = []  # batches of the round; `at`: index of the newest one yielded
        self.at = 0

    def __getattr__(self, name: str) -> Any:
        if name == "theirs":  # the object is still being constructed
            raise AttributeError(name)
        return getattr(self.theirs, name)

    def __len__(self) -> int:
        return len(self.theirs)

    def __iter__(self) -> Iterator[Any]:
        theirs = self.theirs
        # iterating accelerate's own would signal the end as soon as the last round is read
        batches = iter(getattr(theirs, "base_dataloader", theirs))
        begin, end = getattr(theirs, "begin", None), getattr(theirs, "end", None)
        if begin is not None:
            begin()
        self.round = list(itertools.islice(batches, self._copies))
        while self.round:
            following = list(itertools.islice(batches, self._copies))
            for at, batch in enumerate(self.round):
                self.at = at
                if not following and at == len(self.round) - 1 and begin is not None:
                    theirs.end_of_dataloader = True  # accelerate needs it to count samples
                yield batch
            self.round = following
        if end is not None:
            end()


class SharedEvaluation:
    """A distributed `prediction_step` for a Trainer's evaluations during its training."""

    def __init__(self, trainer: Any, company: AllRanks):
        self._trainer, self._company = trainer, company
        self._meters = Meters.of(trainer, "eval")
        self._rounds: EvaluationRounds | None = None
        self._losses: list[float | None] = []  # of the current round

    @contextlib.contextmanager
    def over(self, dataloader: Any) -> Iterator[EvaluationRounds]:
        """Yield the loader to evaluate over, with the prediction step replaced."""
        rounds = self._rounds = EvaluationRounds(dataloader, self._company.copies)
        hooks = Hooks()
        hooks.put(self._trainer, "prediction_step", self._prediction_step)
        try:
            yield rounds
        finally:
            hooks.clear()
            self._rounds = None

    def _prediction_step(
        self, original: Original, model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, None, None]:
        rounds, copy = self._rounds, self._company.copy
        assert rounds is not None
        if rounds.at == 0:
            if self._meters is not None:
                self._meters.begin()
            mine: float | None = None
            if copy < len(rounds.round):
                loss, *_ = original(model, rounds.round[copy], *args, **kwargs)
                mine = None if loss is None else float(loss)
                if self._meters is not None:
                    self._meters.take(copy)
            self._losses = self._company.gather_copies(mine)
            if self._meters is not None:
                self._meters.merge(self._company.gather)
        found = self._losses[rounds.at]
        if found is None:
            return None, None, None
        return torch.tensor(found, device=self._trainer.args.device), None, None
