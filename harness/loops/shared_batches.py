"""A script's own DataLoader, shared between ranks: each rank gets all batches of an epoch in the
order that a single process would, with the data of its own batches only. Runs in the worker.

    loader = SharedLoader(theirs, micro_batches=M, mine=loop.share, seed=seed, agree=peers.first)
    for share in loader:        # share.data is PLACEHOLDER for the other ranks' batches

Batch i of an epoch is micro-batch i % M of a step. The state at the beginning of the epoch
(generators, counters of samplers) is kept, so a repeated epoch can continue at any batch, on any
world.
"""

from __future__ import annotations

import copy
import enum
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from harness.core.world import BadInput
from harness.loops.shared_dataset import Readers, Walk, batched
from harness.loops.shared_stream import OwnStream, Read, StreamMark, is_mapped
from harness.worker.batches import rng_state

Array = np.ndarray[Any, Any]
T = TypeVar("T")


class Placeholder(enum.Enum):
    """The value that stands for a batch that another rank reads."""

    PLACEHOLDER = "PLACEHOLDER"


PLACEHOLDER = Placeholder.PLACEHOLDER


@dataclass(frozen=True)
class Share:
    """A batch of an epoch. `micro`: the number of the micro-batch in its step; `count`: its
    samples; `keys`: int64, indices of the dataset, or positions if there are none (in a stream:
    since the run's beginning); `contents`: int64, hashes of the samples, where the keys do not
    identify them."""

    index: int
    micro: int
    mine: bool
    data: Any
    keys: Array
    contents: Array | None
    count: int


def alone(value: Any) -> Any:
    """Return the value: an `agree` for a single rank."""
    return value


def print_line(text: str) -> None:
    print(text, flush=True)


@dataclass
class _Place:
    """The place of training. `batch`: number of the epoch's batches that were yielded; `samples`,
    `digest`: of those; `batches_before`, `samples_before`: totals of the earlier epochs."""

    epoch: int = 0
    batch: int = 0
    samples: int = 0
    digest: int = 0
    batches_before: int = 0
    samples_before: int = 0
    begun: bool = False
    ended: bool = False

    def next(self) -> _Place:
        """Return the beginning of the next epoch."""
        if not self.begun:
            return _Place(self.epoch, begun=True)
        return _Place(
            self.epoch + 1,
            batches_before=self.batches_before + self.batch,
            samples_before=self.samples_before + self.samples,
            begun=True,
        )

    def again(self) -> _Place:
        """Return the beginning of this epoch."""
        return replace(self, batch=0, samples=0, digest=0, begun=True, ended=False)


@dataclass(frozen=True)
class _Resume:
    """The point at which the next iteration continues. `place`: the beginning of its epoch; `skip`:
    number of batches that are not yielded again; `begin`: generators and samplers as the epoch
    began (None: their present state). `check`: (number of batches, their expected digest)."""

    place: _Place
    skip: int
    begin: Mapping[str, Any] | None = None
    check: tuple[int, int] = (0, 0)
    marks: tuple[StreamMark, ...] = ()


class SharedLoader:
    """A replacement for a DataLoader that yields a `Share` for each of its batches. Everything else
    (its `len`, `dataset`, `sampler`, ...) is the DataLoader's.

    Of a map-style dataset, only this rank's batches are read. An iterable dataset is read whole by
    every rank (see shared_stream.py), and so is a loader with its own `__iter__`.
    """

    def __init__(
        self,
        loader: Any,
        *,
        micro_batches: int,
        mine: range,
        seed: int,
        agree: Callable[[Any], Any] = alone,
        tell: Callable[[str], None] = print_line,
        across_epochs: bool = False,
        lossy_streams: bool = False,
    ):
        """Wrap `loader`. `agree`: returns rank 0's value on all ranks, which call it together;
        `across_epochs`: a step that is incomplete at an epoch's end is filled by the next epoch;
        `lossy_streams`: a stream whose state is incomplete continues from it all the same, instead
        of reading its epoch again. Raises BadInput."""
        if micro_batches < 1 or not set(mine) <= set(range(micro_batches)):
            raise BadInput(f"wanted shares within range({micro_batches}), found {mine}")
        self.loader, self.micro_batches, self.mine, self._seed = loader, micro_batches, mine, seed
        self._agree, self._tell = agree, tell
        self._across_epochs = across_epochs
        self._memory = rng_state.SamplerMemory(loader)
        _check_samplers(self._memory)
        self._place = _Place()
        self._resume: _Resume | None = _Resume(_Place().next(), 0)
        self._loaded: Mapping[str, Any] | None = None
        self._begin: Mapping[str, Any] = {}
        self._walk: Walk | None = None
        self._readers: Readers | None = None
        self._stream: OwnStream | None = None
        if not is_mapped(loader):
            self._stream = OwnStream(loader, micro_batches, agree, tell, lossy_streams)
            _tell_of_stream(self._stream, len(mine) < micro_batches, tell)

    # ---- as a DataLoader -------------------------------------------------------------------------
    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: the object is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Return the batches of an epoch. Raises TypeError if their number is unknown."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of samplers, dataset and loader, as scripts do to shuffle by epoch."""
        for thing in (*self._memory.samplers().values(), self.loader.dataset, self.loader):
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(epoch)

    @property
    def is_stream(self) -> bool:
        """True if the data can only be read in order, so that every rank reads all of it."""
        return self._stream is not None

    @property
    def epoch(self) -> int:
        """The epoch that was begun last, counted from 0."""
        return self._place.epoch

    @property
    def batch(self) -> int:
        """Number of batches of that epoch that were yielded."""
        return self._place.batch

    def __iter__(self) -> Iterator[Share]:
        """Yield the next epoch, or the rest of a resumed one. An epoch that was begun and left
        counts; an iterator from which nothing was taken does not."""
        resume, self._resume = self._resume, None
        if resume is None:
            self._forget_ahead()
            resume = _Resume(self._place.next(), 0)
        self._place, self._loaded = resume.place, None
        yield from self._read_stream(resume) if self._stream else self._read_own(resume)
        self._place.ended = True

    # ---- a map-style dataset ---------------------------------------------------------------------
    def _read_own(self, resume: _Resume) -> Iterator[Share]:
        place = self._place
        if resume.begin is None and place.epoch == 0:
            self._try_order()
        walk = self._walk = self._opened(resume.begin, self._walk_on)
        for entry in walk.skip(resume.skip):
            self._count(entry.index + 1, entry.start + len(entry.keys), entry.digest)
            self._check(resume.check, entry.index + 1, entry.digest)
        if self.mine and self._readers is None:
            self._readers = Readers(self.loader, self._seed)
        data = self._readers.read(walk, place.epoch) if self._readers else iter(())
        while walk.all or walk.advance():
            entry = walk.all.popleft()
            mine = self._is_mine(entry.index)
            contents, batch = next(data) if mine else (None, PLACEHOLDER)
            self._count(entry.index + 1, entry.start + len(entry.keys), entry.digest)
            yield Share(
                entry.index,
                self._micro(entry.index),
                mine,
                batch,
                entry.numbers(),
                contents,
                len(entry.keys),
            )

    def _walk_on(self) -> Walk:
        """Return the walk through an epoch, from the present state of the generators. It draws from
        generators and samplers exactly as a DataLoader does."""
        loader = self.loader
        if not (loader.persistent_workers and self._place.epoch):  # torch's base seed of processes
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        sampler = loader.batch_sampler if batched(loader) else loader.sampler
        if loader.num_workers and not (loader.persistent_workers and self._place.epoch):
            iter(sampler)  # torch then calls it twice, and torchdata's samplers draw in `iter`
        asked = iter(sampler)
        # not a method: a reference cycle would keep reading processes alive for too long
        is_mine = functools.partial(_is_among, self.mine, self.micro_batches, self._offset())
        return Walk(asked, batched(loader), is_mine, self._memory)

    def _try_order(self) -> None:
        """Try whether an unknown sampler yields the same order again, and warn if it does not."""
        strange = [s for s in self._memory.samplers().values() if not _is_known(s)]
        if not strange:
            return
        begin, digests = self._state_now(), []
        for _ in range(2):
            with rng_state.kept():
                self._memory.put(begin["samplers"])
                walk = self._walk_on()
                walk.advance()
                digests.append(walk.digest)
        self._memory.put(begin["samplers"])
        if digests[0] != digests[1]:
            self._tell(f"harness: {_other_order(strange[0])}")

    def _forget_ahead(self) -> None:
        """Reset the samplers after an epoch that was left early. More was drawn from them than was
        yielded, by an amount that depends on the world; that surplus is undone."""
        walk, place = self._walk, self._place
        if walk is None or place.ended or not (walk.ended or walk.walked > place.batch):
            return
        now, then = self._memory.taken(), walk.left
        wanted = self._after(self._begin, place.batch)
        for name, value in now.items():
            # values that the script has set since (set_epoch, manual_seed) are kept
            if not rng_state.equal_entries(value, then.get(name)):
                wanted[name] = value
        self._memory.put(wanted)

    def _after(self, begin: Mapping[str, Any], batches: int) -> rng_state.State:
        """Return the samplers' state after `batches` batches of an epoch that began as `begin`."""
        walk = self._opened(begin, self._walk_on)
        while walk.walked < batches and walk.advance(batches - walk.walked):
            pass
        return self._memory.taken()

    # ---- a stream --------------------------------------------------------------------------------
    def _read_stream(self, resume: _Resume) -> Iterator[Share]:
        stream, place = self._stream, self._place
        assert stream is not None
        for read in self._found_again(stream, resume):
            self._count(read.index + 1, read.start + len(read.contents), read.digest)
            if read.index < resume.skip:
                continue
            mine = self._is_mine(read.index)
            first = place.samples_before + read.start
            yield Share(
                read.index,
                self._micro(read.index),
                mine,
                read.data if mine else PLACEHOLDER,
                np.arange(first, first + len(read.contents), dtype=np.int64),
                read.contents,
                len(read.contents),
            )

    def _found_again(self, stream: OwnStream, resume: _Resume) -> Iterator[Read]:
        """Yield the epoch's batches, from the last state that gives the same samples again."""
        offset, begin = self._offset(), resume.begin
        usable = [m for m in resume.marks if m.batch <= resume.skip and stream.has_state]
        if begin is None:
            yield from stream.read(self._opened(None, stream.open_fresh), None, offset)
            return
        if not usable:
            yield from self._read_all_again(stream, resume)
            return
        before, last = usable[0], usable[-1]
        items = self._opened(begin, functools.partial(stream.open, before))
        reads, digest = stream.read(items, before, offset), before.digest
        for read in itertools.islice(reads, last.batch - before.batch):
            digest = read.digest
        if digest == last.digest:
            for read in reads:
                self._check(resume.check, read.index + 1, read.digest)
                yield read
            return
        said = "harness: the stream, set to its state of a step ago, gave other samples than before"
        if not stream.lossy:
            self._tell(f"{said}: that state leaves something out, so it is not gone on with")
            yield from self._read_all_again(stream, resume)
            return
        self._tell(
            f"{said}; it goes on from its state at batch {last.batch} of epoch {self.epoch}, and "
            "what that leaves out (a shuffle buffer's content, the rest of a block of rows, draws "
            "of generators) is lost or repeated"
        )
        items = self._opened(begin, functools.partial(stream.open, last))
        yield from stream.read(items, last, offset)

    def _read_all_again(self, stream: OwnStream, resume: _Resume) -> Iterator[Read]:
        if resume.skip:
            self._tell(
                f"harness: reads the {resume.skip} batches of epoch {self.epoch} again that were "
                "trained on, and trains on those after them"
            )
        items = self._opened(resume.begin, stream.open_again)
        for read in stream.read(items, None, self._offset()):
            self._check(resume.check, read.index + 1, read.digest)
            yield read

    # ---- both ------------------------------------------------------------------------------------
    def _opened(self, begin: Mapping[str, Any] | None, open_it: Callable[[], T]) -> T:
        """Begin to read an epoch with `open_it`. `begin`: the state as it began before, which is
        set only for that call; None: the present state, made the same on all ranks."""
        if begin is None:
            begin = now = self._state_now()
            if self._agree is not alone:
                begin = self._agree(now)
                self._set_generators(begin)
            self._begin = begin
            return open_it()
        self._begin = begin
        with rng_state.kept():
            self._set_generators(begin)
            return open_it()

    def _state_now(self) -> dict[str, Any]:
        return {"random": rng_state.generators_state(), "samplers": self._memory.taken()}

    def _set_generators(self, state: Mapping[str, Any]) -> None:
        rng_state.put(state["random"])
        self._memory.put(state["samplers"])

    def _offset(self) -> int:
        """Return how many batches of the epoch's first step were filled by earlier epochs."""
        return self._place.batches_before % self.micro_batches if self._across_epochs else 0

    def _micro(self, index: int) -> int:
        return (index + self._offset()) % self.micro_batches

    def _is_mine(self, index: int) -> bool:
        return _is_among(self.mine, self.micro_batches, self._offset(), index)

    def _count(self, batch: int, samples: int, digest: int) -> None:
        place = self._place
        place.batch, place.samples, place.digest = batch, samples, digest

    def _check(self, wanted: tuple[int, int], batch: int, digest: int) -> None:
        if batch == wanted[0] and digest != wanted[1]:
            what = (
                f"the stream gave other samples when its first {wanted[0]} batches of epoch "
                f"{self.epoch} were read again, so some are lost and some repeated in this epoch; "
                "give its shuffling a fixed seed"
                if self._stream
                else _other_order(self.loader.batch_sampler or self.loader.sampler)
            )
            self._tell(f"harness: {what}")

    # ---- state -----------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the state at the epoch's beginning, and the place in it: the same on all ranks."""
        begin = self._begin or self._state_now()
        # a copy, since a snapshot is loaded in place and must not see one tensor under two names
        ended = self._place.ended
        after = self._memory.taken() if ended else copy.deepcopy(begin["samplers"])
        return {
            "place": {**asdict(self._place), "digest": f"{self._place.digest:016x}"},
            "begin": begin,
            "after": after,
            "marks": self._stream.marks() if self._stream else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue where the state was taken."""
        place = _Place(**{**state["place"], "digest": int(state["place"]["digest"], 16)})
        self._loaded = state
        if place.begun and place.ended:
            self.resume_at(place.epoch + 1, 0)
        else:
            self.resume_at(place.epoch, place.batch)

    def resume_at(self, epoch: int, batch: int) -> None:
        """Make the next iteration begin at that batch of that epoch. Call it after
        `load_state_dict`. It must be the epoch of that state, or the beginning of the next one.
        Raises BadInput."""
        state = self._loaded
        if state is None or not state["place"]["begun"]:
            self._resume = _Resume(_Place(epoch, begun=True), batch)
            return
        place = _Place(**{**state["place"], "digest": int(state["place"]["digest"], 16)})
        self._place, self._begin = place, state["begin"]
        if epoch == place.epoch:
            self._memory.put(state["begin"]["samplers"])
            marks = tuple(StreamMark.of(mark) for mark in state["marks"])
            check = (place.batch, place.digest)
            self._resume = _Resume(place.again(), batch, state["begin"], check, marks)
        elif (epoch, batch) == (place.epoch + 1, 0):
            after = state["after"]
            if not place.ended and self._stream is None:
                after = self._after(state["begin"], place.batch)
            self._memory.put(after)
            self._resume = _Resume(place.next(), 0)
        else:
            raise BadInput(
                f"wanted to go on at batch {batch} of epoch {epoch}, but the state is of batch "
                f"{place.batch} of epoch {place.epoch}: only that epoch can be gone on with, or "
                "the next one begun"
            )


def _is_among(mine: range, micro_batches: int, offset: int, index: int) -> bool:
    return (index + offset) % micro_batches in mine


KNOWN = ("torch", "torchdata", "accelerate", "transformers", "trl", "lightning", "harness")


def _is_known(sampler: Any) -> bool:
    """Return whether it is from a library whose samplers yield the same order again."""
    module = type(sampler).__module__.partition(".")[0]
    return module in KNOWN or isinstance(sampler, (list, tuple, range))


def _other_order(sampler: Any) -> str:
    return (
        f"{type(sampler).__name__} gave another order when it was asked again, so a resumed run "
        "repeats some samples of the epoch and misses others; let its order be a function of "
        "torch's, numpy's or Python's global generators, of a torch.Generator in one of its "
        "attributes, or of set_epoch(epoch), or give it state_dict and load_state_dict"
    )


def _check_samplers(memory: rng_state.SamplerMemory) -> None:
    for sampler in memory.samplers().values():
        if getattr(sampler, "num_replicas", 1) != 1:
            raise BadInput(
                f"wanted a loader of all samples, found a {type(sampler).__name__} for one of "
                f"{sampler.num_replicas} ranks; let it be made for one rank (num_replicas=1, "
                "rank=0, or from WORLD_SIZE, which says 1 here): batches are dealt out afterwards"
            )


def _tell_of_stream(stream: OwnStream, shared: bool, tell: Callable[[str], None]) -> None:
    if shared:
        tell("harness: the data is a stream: every rank reads all of it, and trains on its share")
    if not stream.has_state:
        tell(
            "harness: the stream has no state that could be kept: a resumed run reads its epoch "
            "again, up to where it was, and trains on the rest. torchdata's StatefulDataLoader, or "
            "state_dict and load_state_dict of the dataset (and num_workers=0), would save that"
        )
