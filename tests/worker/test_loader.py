"""What identifies data, what is read of a stream, and where a stream goes on."""

import collections
import copy
import dataclasses
import datetime
import enum
import random

import numpy as np
import pytest
import torch

from harness.core.batch import Batching, Plan
from harness.core.world import BadInput
from harness.worker.batches.content_hash import content_hash
from harness.worker.batches.loader import Stream, fingerprint


class Colour(enum.Enum):
    RED = 1


class Sample:
    """With the default repr, which has an address."""

    def __init__(self, i, **more):
        self.pixels, self.label, self.more = torch.full((3,), float(i)), i, more


@dataclasses.dataclass
class Row:
    x: object
    tags: set


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a):
        self.a = a


class Samples(torch.utils.data.Dataset):
    def __init__(self, make):
        self.make, self.kept = make, []

    def __len__(self):
        return 20

    def __getitem__(self, i):
        self.kept.append(self.make(i))  # so that addresses are never used again
        return self.kept[-1]


MAKERS = {
    "object": Sample,
    "objects in containers": lambda i: {"row": [Sample(i), Row(Sample(i), {"a", "b", str(i)})]},
    "nested": lambda i: Sample(
        i, other=Slotted(np.arange(i)), when=datetime.datetime(2026, 1, 1 + i)
    ),
    "sets": lambda i: {frozenset({i, "x"}), Colour.RED},
    "ordered": lambda i: collections.OrderedDict(a=Slotted(i)),
    "objects of numpy": lambda i: np.array([Slotted(i), None], dtype=object),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_fingerprint_is_of_values_not_of_addresses(make):
    one, two = fingerprint(Samples(make)), fingerprint(Samples(make))
    assert one == two != fingerprint(Samples(lambda i: make(i + 1)))


def test_contents_tell_values_apart():
    cycle = []
    cycle.append(cycle)
    values = [
        None,
        True,
        1,
        1.0,
        "1",
        b"1",
        1j,
        [],
        (),
        {},
        set(),
        [[]],
        [1, 23],
        [12, 3],
        ["a", "b"],
        ["ab"],
        {1: 2},
        {"1": 2},
        {2: 1},
        cycle,
        np.float32(1),
        np.ones(1),
        np.ones((1, 1)),
        torch.ones(1),
        torch.ones(1, 1),
        torch.ones(1).to_sparse(),
        float("nan"),
        -0.0,
        0.0,
        Colour.RED,
        Colour,
        Slotted(1),
        Slotted(2),
        Row(1, {1}),
        Row(1, {2}),
        bytearray(b"2"),
        collections.OrderedDict(a=1),
        range(3),
    ]
    hashes = [content_hash(v) for v in values]
    same = [
        (values[i], values[j])
        for i in range(len(values))
        for j in range(i)
        if hashes[i] == hashes[j]
    ]
    # the sparse one
    assert (
        all(isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) for a, b in same)
        and len(same) == 1
    )
    assert hashes == [content_hash(copy.deepcopy(v)) for v in values]
    # what cannot be taken apart counts by its type
    assert content_hash(i for i in ()) == content_hash(i for i in (1,))


class Numbers(torch.utils.data.IterableDataset):
    """0, 1, ... n - 1. `sticky`: every pass after a load begins where the state was, as Hugging
    Face's do."""

    def __init__(self, n=6, sticky=False):
        self.n, self.sticky, self.at, self.start = n, sticky, 0, 0

    def __iter__(self):
        if self.sticky:
            self.at = self.start
        while self.at < self.n:
            self.at += 1
            yield self.at - 1
        if not self.sticky:
            self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.start = state["at"]


class Buffered(Numbers):
    """Reads everything ahead into a buffer that no state holds: what it has read is lost on
    load."""

    def __iter__(self):
        ahead = list(super().__iter__())
        self.at = self.n
        random.Random(0).shuffle(ahead)
        yield from ahead


def read(dataset, steps, state=None, batch=4):
    stream = Stream(dataset, Batching(1 << 62, batch, 2, 0, False), Plan((batch // 2,)), 0, None)
    if state is not None:
        stream.load_state_dict(state)
    items = [[int(x) for micro in stream.step(k) for x in micro.data] for k in range(1, steps + 1)]
    return items, copy.deepcopy(stream.state_dict())


@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("stop", range(1, 8))
def test_a_stream_goes_on_where_it_was_and_passes_begin_at_the_beginning(stop, sticky):
    """Stopped in the middle of a pass, exactly at its end (step 3), and in later passes."""
    calm, _ = read(Numbers(), 12)
    before, state = read(Numbers(sticky=sticky), stop)
    after, _ = read(Numbers(sticky=sticky), 12 - stop, state)
    assert before + after == calm


def test_a_stream_whose_buffer_was_lost_goes_on_with_its_next_pass():
    """Its state says that all is read; what the buffer held is not read again, and the contents
    say so."""
    _, state = read(Buffered(sticky=True), 1)
    after, _ = read(Buffered(sticky=True), 2, state)
    assert after == read(Buffered(sticky=True), 2)[0]


def test_a_stream_that_gives_nothing_is_empty():
    with pytest.raises(BadInput, match="a whole pass from its beginning gave nothing"):
        read(Numbers(0), 1)
    with pytest.raises(BadInput, match="a whole pass from its beginning gave nothing"):
        read(Numbers(0), 1, {"at": 0})


def test_contents_do_not_depend_on_who_reads_them():
    batching = Batching(1 << 62, 8, 2, 0, False)

    def contents(shares, dataset):
        ranks = [
            Stream(copy.deepcopy(dataset), batching, Plan(shares), rank, None)
            for rank in range(len(shares))
        ]
        return sorted(tuple(m.contents.tolist()) for s in ranks for m in s.step(1))

    one = contents((4,), Numbers(9))
    assert (
        one
        == contents((3, 1), Numbers(9))
        == contents((1, 1, 2), Numbers(9))
        != contents((4,), Numbers(7))
    )
    assert len(one) == 4


def test_items_that_the_script_changed_cannot_be_given_again():
    class Rows(Numbers):
        def __iter__(self):
            for i in super().__iter__():
                yield torch.full((2,), float(i))

    for collate, copies in ((None, True), (lambda items: items[0], False)):
        stream = Stream(Rows(), Batching(1 << 62, 1, 1, 0, False), Plan((1,)), 0, collate)
        batch = next(stream.step(1))
        batch.data.add_(1)
        if copies:
            assert stream.collated_again(batch).tolist() == [[0.0, 0.0]]
        else:
            with pytest.raises(BadInput, match="changed what the stream gave it in place"):
                stream.collated_again(batch)
