"""The train dataloader of a Lightning trainer: this rank's micro-batches, and a placeholder for
each micro-batch of other ranks. Runs in the worker."""

from __future__ import annotations

import copy
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from harness.adapters.lightning.parts import of_all_parts
from harness.adapters.whole_copies import whole_shares
from harness.loops.shared_batches import Share, SharedLoader
from harness.worker.batches import rng_state


@dataclass(frozen=True)
class Dealt:
    """A micro-batch on its way through Lightning. `m`: its number in its step, which has `count`;
    `samples`: of the step up to its end; `own`: it belongs to this rank."""

    m: int
    count: int
    samples: int
    own: bool
    share: Share


class TrainLoader:
    """The loader that Lightning iterates instead of the script's, and the iterator over its present
    epoch. It has the same interface. `parts`: the ranks of a copy of the model that each read a
    part of a micro-batch; `loader` then has the batches of all.

    `batches`: number per epoch, as Lightning limits it; infinite if unknown. `dealt`: micro-batches
    that were given to Lightning and have not reached its loop, which may fetch one ahead. `sample`:
    a copy of the first own batch, for use before any own one has arrived. `drawn`: the generators,
    as the script left them, that the order of the first epoch is drawn from; later epochs use the
    steps' generators.
    """

    def __init__(self, loader: Any, batches: Callable[[], float], parts: int = 1):
        self.loader, self._batches, self.parts = of_all_parts(loader, parts), batches, parts
        self.shared: SharedLoader | None = None
        self.micro_batches, self.begins = 1, 0
        self.dealt: deque[Dealt] = deque()
        self.sample: Any = None
        self.drawn: rng_state.State | None = rng_state.generators_state()
        self._walk: Iterator[Any] = iter(())

    def __deepcopy__(self, memo: Any) -> TrainLoader:
        """Return itself: a script may copy a trainer, which leads to it, and batches are dealt
        once."""
        return self

    def share_out(self, shared: SharedLoader, micro_batches: int, begins: int = 0) -> None:
        """Begin to deal the shares. `begins`: batches of the first epoch that are already done."""
        self.shared, self.micro_batches, self.begins = shared, micro_batches, begins

    def __len__(self) -> int:
        return len(self.loader) // self.parts

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the run keeps the position. So Lightning does not warn of a loader that
        cannot go on amid an epoch, and does not keep the state of the script's, whose position is
        counted differently."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        self._walk = self._deal()
        return self

    def __next__(self) -> Any:
        return next(self._walk)

    def _deal(self) -> Iterator[Any]:
        """Yield this rank's batches of an epoch, and a placeholder for each of the others."""
        # Lightning begins an iteration once before it is known which rank reads what
        if self.shared is None:
            return
        self.dealt.clear()
        place, self.begins = self.begins, 0
        whole = whole_shares(self.shared, self.parts)
        shares = self._after_a_sample(drawn_from(self.drawn, whole))
        self.drawn = None
        while (left := self._batches() - place) > 0:
            group: Iterator[Share] | list[Share]
            count = min(self.micro_batches, left)
            group = itertools.islice(shares, int(count))
            if math.isinf(left):  # the end of the data is found only by reading
                group = list(group)
                count = len(group)
            samples = began = 0
            for m, share in enumerate(group):
                began, samples = m + 1, samples + share.count
                self.dealt.append(Dealt(m, int(count), samples, share.mine, share))
                yield share.data
            place += began
            if not began:
                return

    def _after_a_sample(self, shares: Iterator[Share]) -> Iterator[Share]:
        """Yield the same shares; read ahead to the first own one if others come before it."""
        ahead: list[Share] = []
        if self.sample is None:
            for share in shares:
                ahead.append(share)
                if share.mine:
                    # the script may change the batch in place
                    self.sample = copy.deepcopy(share.data) if len(ahead) > 1 else share.data
                    break
            if self.sample is None and ahead:  # no own share is left in this epoch
                self.sample = self._any_batch(ahead[0])
        yield from ahead
        yield from shares

    def _any_batch(self, share: Share) -> Any:
        """Return another rank's batch, as an example of a batch. Reading it has no side effects."""
        dataset, loader = self.loader.dataset, self.loader
        with rng_state.kept():
            if hasattr(dataset, "__getitem__"):
                items = [dataset[int(key)] for key in share.keys]
            else:
                items = list(itertools.islice(copy.deepcopy(dataset), share.count))
        whole = getattr(loader, "batch_sampler", None) is None and loader.batch_size is None
        return loader.collate_fn(items[0] if whole else items)


def drawn_from(state: rng_state.State | None, shares: Iterator[Share]) -> Iterator[Share]:
    """Yield the same shares. Their initial draws use generators in this state, or the current ones
    (None)."""
    with rng_state.kept():
        if state is not None:
            rng_state.put(state)
        first = next(shares, None)
    if first is not None:
        yield first
        yield from shares
