"""The train dataloader of a Lightning trainer: this rank's micro-batches, and a placeholder for
each of the others'. Runs in the worker."""

from __future__ import annotations

import copy
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from harness.worker import chance
from harness.worker.shares import Share, SharedLoader


@dataclass(frozen=True)
class Dealt:
    """A micro-batch on its way through Lightning. `m`: its number in its step, which has `count`;
    `samples`: of the step up to its end; `own`: this rank does it."""

    m: int
    count: int
    samples: int
    own: bool
    share: Share


class TrainLoader:
    """What Lightning iterates in the place of the script's loader. It looks like that one.

    `batches`: of an epoch, as Lightning limits it; infinite: nobody knows. `dealt`: what was given
    to Lightning and has not arrived at its loop, which may fetch one ahead. `sample`: a copy of the
    first own batch, from before any own one has arrived. `drawn`: the generators that the order of
    the first epoch is drawn from, as the script has left them; later ones are the steps'.
    """

    def __init__(self, loader: Any, batches: Callable[[], float]):
        self.loader, self._batches = loader, batches
        self.shared: SharedLoader | None = None
        self.micro_batches, self.begins = 1, 0
        self.dealt: deque[Dealt] = deque()
        self.sample: Any = None
        self.drawn: chance.State | None = chance.taken()

    def share_out(self, shared: SharedLoader, micro_batches: int, begins: int = 0) -> None:
        """`begins`: batches of the first epoch that are done already."""
        self.shared, self.micro_batches, self.begins = shared, micro_batches, begins

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("loader", "state_dict", "load_state_dict"):
            # with a state of its own Lightning would keep its place, by another reckoning
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        # Lightning begins to iterate once before it is known who reads what
        if self.shared is None:
            return
        self.dealt.clear()
        place, self.begins = self.begins, 0
        shares = self._after_a_sample(drawn_from(self.drawn, iter(self.shared)))
        self.drawn = None
        while (left := self._batches() - place) > 0:
            group: Iterator[Share] | list[Share]
            count = min(self.micro_batches, left)
            group = itertools.islice(shares, int(count))
            if math.isinf(left):  # where it ends shows only when it is read
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
        """The same; the first own one is read ahead if others' come before it."""
        ahead: list[Share] = []
        if self.sample is None:
            for share in shares:
                ahead.append(share)
                if share.mine:
                    # the script may change the batch itself, in place
                    self.sample = copy.deepcopy(share.data) if len(ahead) > 1 else share.data
                    break
            if self.sample is None and ahead:  # there is none in what is left of this epoch
                self.sample = self._any_batch(ahead[0])
        yield from ahead
        yield from shares

    def _any_batch(self, share: Share) -> Any:
        """That of another rank, to look like a batch; nothing is changed by reading it."""
        dataset, loader = self.loader.dataset, self.loader
        with chance.kept():
            if hasattr(dataset, "__getitem__"):
                items = [dataset[int(key)] for key in share.keys]
            else:
                items = list(itertools.islice(copy.deepcopy(dataset), share.count))
        whole = getattr(loader, "batch_sampler", None) is None and loader.batch_size is None
        return loader.collate_fn(items[0] if whole else items)


def drawn_from(state: chance.State | None, shares: Iterator[Share]) -> Iterator[Share]:
    """The same; what is drawn when they begin is drawn of generators in this state, or of those
    that are there (None)."""
    with chance.kept():
        if state is not None:
            chance.put(state)
        first = next(shares, None)
    if first is not None:
        yield first
        yield from shares
