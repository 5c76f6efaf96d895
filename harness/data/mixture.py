"""A mixture of sources as one dataset: weights, their schedule, and passes over each source decide
what a step consumes.

    train = harness.data.Mixture(
        {"web": Tokens(...), "code": Tokens(...)}, weights={"web": 0.7, "code": 0.3}
    )

Runs in the worker and in a DataLoader's processes. Its items are those of all sources, one source
after the other; `run.steps` requests their order (core/sample_order.py).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence, Sized
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core.batch import Batching, Int64s
from harness.core.read_traffic import Traffic
from harness.core.sample_order import (
    GROUPS,
    MOST_ROW,
    MOST_SOURCES,
    MOST_STAIRS,
    Blocks,
    MixedOrder,
    MixedSource,
    WeightPhase,
    Weights,
    blocks_for,
    stretches_of,
)
from harness.core.world import BadInput
from harness.data.datasets import Records, Tokens, named_by

if TYPE_CHECKING:
    from storage.tiers.tiers import Tier

STAIRS = 32  # stairs of a ramp between two phases
NAMED = "mixture:"


class Mixture:
    """A dataset of several sources. `sources`: map-style datasets by name; their samples must be
    alike, so that they can be collated.

    `weights`: each source's share of the samples, by name, in any unit. Or `schedule`: [(0,
    weights), (10_000, weights), ...], each in force once that many steps are done; `ramp="linear"`:
    change from one to the next in `stairs` equal stairs, so that every entry but the last begins a
    ramp; the same weights twice are a plateau. A source that is not named has weight 0.

    `epochs`: a source ends after this many passes, and the others share its weight. Without weights
    it gives the passes of each source in one pass of the mixture: weights are passes times samples.

    Raises BadInput.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        *,
        schedule: Sequence[tuple[int, Mapping[str, float]]] | None = None,
        ramp: str = "",
        stairs: int = STAIRS,
        epochs: Mapping[str, float] | None = None,
    ):
        if not 1 <= len(sources) <= MOST_SOURCES:
            raise BadInput(
                f"Mixture(...): wanted 1 to {MOST_SOURCES} sources, found {len(sources)}"
            )
        for name, one in sources.items():
            if not (isinstance(name, str) and 0 < len(name) <= 60 and _is_source(one)):
                raise BadInput(
                    f"Mixture(...): wanted map-style datasets with samples, by names of up to 60 "
                    f"letters, found {type(one).__name__} as {name!r:.100}"
                )
        self.sources = dict(sources)
        self._names = tuple(self.sources)
        self._starts = list(accumulate(map(len, self.sources.values()), initial=0))
        well = type(stairs) is int and 1 <= stairs <= MOST_STAIRS
        if ramp not in ("", "linear") or not well or (ramp and schedule is None):
            raise BadInput(
                f'Mixture(ramp={ramp!r}, stairs={stairs!r}): wanted ramp="linear" and 1 to '
                f"{MOST_STAIRS} stairs, with a schedule=, or neither"
            )
        self._most_epochs: dict[str, int] = {}
        if weights is None and schedule is None:
            weights = self._passes(epochs or dict.fromkeys(self._names, 1))
        elif epochs is not None:
            self._most_epochs = self._limits(epochs)
        if (weights is None) is (schedule is None):
            raise BadInput("Mixture(...): wanted weights= or schedule=, found both")
        phases = schedule if schedule is not None else [(0, weights or {})]
        self._phases = self._checked(phases, stairs if ramp else 0)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: int) -> Any:
        name, item = self.source_of(i)
        return self.sources[name][item]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return many items at once, as a DataLoader requests them."""
        if self.draws:
            self.read_ahead(indices)
            return [self[i] for i in indices]
        found: dict[int, Any] = {}
        for name, places in self.by_source(indices).items():
            source, items = self.sources[name], [item for _, item in places]
            read = zip(places, source.__getitems__(items), strict=True)
            found |= {where: one for (where, _), one in read}
        return [found[where] for where in range(len(indices))]

    @property
    def draws(self) -> bool:
        """True if reading an item of any source may draw from a generator: see `Tokens.draws`."""
        if type(self).__getitem__ is not Mixture.__getitem__:
            return True
        return any(getattr(one, "draws", True) is not False for one in self.sources.values())

    def by_thread(self, *in_turns: int) -> bool:
        """Return whether a thread may read all sources: see `Tokens.by_thread`."""
        if self.draws or len(in_turns) != len(self.sources):
            return False
        several = [getattr(one, "by_thread", None) for one in self.sources.values()]
        return all(one and one(n) for one, n in zip(several, in_turns, strict=True))

    def hold(self, *in_turns: int) -> None:
        """Keep chunks in memory, in each source that can: see `Tokens.hold`."""
        for one, n in zip(self.sources.values(), in_turns, strict=True):
            if (hold := getattr(one, "hold", None)) is not None:
                hold(n)

    def source_of(self, i: int) -> tuple[str, int]:
        """Return (name of the source, index within it) of an item."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"item {i} of {len(self)}")
        i = int(i) % len(self)
        s = bisect_right(self._starts, i) - 1
        return self._names[s], i - self._starts[s]

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Fetch the chunks of these items, in sources that can."""
        for name, places in self.by_source(indices).items():
            if (ahead := getattr(self.sources[name], "read_ahead", None)) is not None:
                ahead([item for _, item in places])

    @property
    def traffic(self) -> list[Traffic]:
        """Counters of what this process has read so far, of sources that have them."""
        return [t for one in self.sources.values() for t in getattr(one, "traffic", ())]

    def pieces(self, indices: Sequence[int]) -> list[Any]:
        """Return the chunks of these items, in sources where fetching ahead is useful."""
        out: list[Any] = []
        for name, places in self.by_source(indices).items():
            one = self.sources[name]
            if hasattr(one, "pieces") and one.ahead_nbytes(1):
                out += one.pieces([item for _, item in places])
        return out

    def ahead_nbytes(self, processes: int) -> int:
        """Return the most bytes that one of this many processes of the node may fetch ahead: the
        smallest limit among the sources, since they share it."""
        several = [one for one in self.sources.values() if hasattr(one, "ahead_nbytes")]
        limits = [nbytes for one in several if (nbytes := one.ahead_nbytes(processes))]
        return min(limits, default=0)

    @property
    def caches(self) -> dict[str, int]:
        """This node's caches, of sources that have one: folder -> its limit in bytes."""
        several = (getattr(one, "caches", {}) for one in self.sources.values())
        return {folder: nbytes for caches in several for folder, nbytes in caches.items()}

    def ask_peers(self, peers: Tier | None, nodes: int, once: bool) -> None:
        """Share chunks with other nodes: see `Chunks.ask_peers`."""
        for one in self.sources.values():
            if hasattr(one, "ask_peers"):
                one.ask_peers(peers, nodes, once)

    def scattered(self, nodes: int) -> str:
        """Return the first source's reason why random order is expensive: see
        `CorpusReader.scattered`."""
        several = (
            one.scattered(nodes) for one in self.sources.values() if hasattr(one, "scattered")
        )
        return next(filter(None, several), "")

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of all sources. None if one has none; a few samples of the mixture then serve
        instead."""
        own = [getattr(one, "fingerprint", None) for one in self.sources.values()]
        if not all(isinstance(one, str) for one in own):
            return None
        return NAMED + json.dumps(list(zip(self._names, own, strict=True)), separators=(",", ":"))

    @property
    def content_ids(self) -> Callable[..., Int64s] | None:
        """Function like `Tokens.content_ids`; None unless all sources have one."""
        every = self.sources.values()
        known = all(callable(getattr(one, "content_ids", None)) for one in every)
        return self._content_ids if known else None

    def by_source(self, indices: Sequence[int]) -> dict[str, list[tuple[int, int]]]:
        """Return, by the source's name, pairs (position in `indices`, index within the source)."""
        out: dict[str, list[tuple[int, int]]] = {}
        for where, i in enumerate(indices):
            name, item = self.source_of(i)
            out.setdefault(name, []).append((where, item))
        return out

    def sample_order(
        self, global_batch: int, micro_batch: int, shuffle: bool | str | Blocks
    ) -> MixedOrder:
        """Return the order in which `run.steps` reads in these batches. Raises BadInput."""
        blocked = not isinstance(shuffle, bool)
        lanes = global_batch // micro_batch if blocked else 1
        made = tuple(
            MixedSource(name, len(one), _blocks_in(one, shuffle, lanes) if blocked else None)
            for name, one in self.sources.items()
        )
        batch = global_batch // lanes
        if not any(one.blocks for one in made):
            lanes, batch = 1, global_batch
        found = stretches_of(self._phases, made, self._most_epochs, lanes, batch)
        return MixedOrder(made, found, lanes, batch)

    def _content_ids(self, indices: Sequence[int], as_read: bool = True) -> Int64s:
        out = np.empty(len(indices), np.int64)
        for name, places in self.by_source(indices).items():
            where, items = zip(*places, strict=True)
            out[list(where)] = self.sources[name].content_ids(items, as_read)
        return out

    # ---- what was asked for ----------------------------------------------------------------------
    def _passes(self, epochs: Mapping[str, float]) -> dict[str, float]:
        """Return the weights that follow from passes over each source."""
        found = self._numbers("epochs", epochs)
        return {name: float(n * len(self.sources[name])) for name, n in found.items()}

    def _limits(self, epochs: Mapping[str, float]) -> dict[str, int]:
        for name, n in self._numbers("epochs", epochs).items():
            if n.denominator != 1 or n < 1:
                raise BadInput(
                    f"Mixture(epochs={{{name!r}: {epochs[name]!r}}}): wanted a whole number of "
                    "passes, from 1 on, where there are weights"
                )
        return {name: int(n) for name, n in epochs.items()}

    def _checked(
        self, phases: Sequence[tuple[int, Mapping[str, float]]], stairs: int
    ) -> list[WeightPhase]:
        steps = [after for after, _ in phases]
        if (
            not all(type(after) is int for after in steps)
            or steps[:1] != [0]
            or steps != sorted(set(steps))
        ):
            raise BadInput(
                "Mixture(schedule=...): wanted phases in their order, each from another number of "
                f"steps on and the first from 0, found {steps[:20]}"
            )
        made = []
        for after, weights in phases:
            found = self._numbers("weights", weights)
            if not any(found.values()):
                raise BadInput(
                    f"Mixture(weights={dict(weights)}): wanted a weight above 0 for one source at "
                    "least, found none"
                )
            total = sum(found.values())
            row: Weights = tuple(found.get(name, Fraction(0)) / total for name in self._names)
            for name, share in zip(self._names, row, strict=True):
                if 0 < share * MOST_ROW < 1:
                    raise BadInput(
                        f"Mixture(weights={dict(weights)}): wanted each source to have 1 of "
                        f"{MOST_ROW} samples at least, or none, found less for {name!r}"
                    )
            made.append(WeightPhase(after, row, stairs))
        return made

    def _numbers(self, what: str, given: Mapping[str, float]) -> dict[str, Fraction]:
        """Return the numbers as exact decimals: 0.7 is seven tenths."""
        out = {}
        for name, value in given.items():
            if name not in self.sources:
                raise BadInput(
                    f"Mixture({what}=...): wanted names of its sources ({', '.join(self._names)}), "
                    f"found {name!r}"
                )
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise BadInput(
                    f"Mixture({what}={{{name!r}: {value!r}}}): wanted a number, 0 or more"
                )
            out[name] = Fraction(str(value))
        return out


def proved_by(
    fingerprint: str, urls: str | Sequence[str], **reading: Any
) -> Tokens | Records | Mixture:
    """Return what a run with this fingerprint has read, from the corpora at `urls` (in any order),
    for proving or showing it. `reading`: see `CorpusReader`. Raises BadInput if a corpus is
    missing, or is another one."""
    urls = [urls] if isinstance(urls, str) else urls
    if not fingerprint.startswith(NAMED):
        if len(urls) != 1:
            raise BadInput(f"wanted one corpus, which the run has read, found {len(urls)}")
        return named_by(fingerprint, urls[0], **reading)
    sources, used = {}, set()
    for name, own in json.loads(fingerprint.removeprefix(NAMED)):
        why: list[str] = []
        for url in urls:
            try:
                sources[name] = named_by(own, url, **reading)
            except BadInput as e:
                why.append(str(e))
                continue
            used.add(url)
            break
        else:
            raise BadInput(
                f"wanted the corpus of the source {name!r} among those that were named, found "
                f"none; name its URL too: {'; '.join(why)}"
            )
    if unused := [url for url in urls if url not in used]:
        raise BadInput(f"{unused[0]}: wanted a corpus that the run has read, found another")
    return Mixture(sources, dict.fromkeys(sources, 1))


def _is_source(dataset: Any) -> bool:
    """Return whether this is a map-style dataset with samples. A mixture is refused, since its own
    weights would be ignored in another one."""
    map_style = hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)
    return map_style and len(dataset) > 0 and not isinstance(dataset, Mixture)


def _blocks_in(source: Any, shuffle: bool | str | Blocks, lanes: int) -> Blocks | None:
    """Return the blocks of a source; None if it is so small that its lanes would be almost
    empty."""
    assert not isinstance(shuffle, bool)
    if len(source) < GROUPS * lanes:
        blocks_for(shuffle, 0, len(source), lanes, 1)  # only checks the argument
        return None
    made = blocks_for(shuffle, getattr(source, "block_items", 0), len(source), lanes, 1)
    made.check(Batching(len(source), lanes, 1, 0))
    return made
