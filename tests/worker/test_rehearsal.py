"""Streams are tried before the first step."""

import random

import pytest

from harness.core.world import BadInput
from harness.worker.batches.feed import rehearse


class Numbers:
    """0, 1, 2, ... `forgets`: so many are lost when it is loaded."""

    def __init__(self, forgets=0, most=100):
        self.next, self.forgets, self.most = 0, forgets, most

    def __iter__(self):
        while self.next < self.most:
            self.next += 1
            yield self.next - 1

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"] + self.forgets


class Shuffled(Numbers):
    """With a buffer that its state leaves out."""

    def __iter__(self):
        rng, held = random.Random(0), []
        for item in super().__iter__():
            held.append(item)
            if len(held) > 8:
                yield held.pop(rng.randrange(len(held)))


class Opened(Numbers):
    def __init__(self):
        super().__init__()
        self.file = open(__file__)  # noqa: SIM115


class Odd(Numbers):
    def state_dict(self):
        return {"next": object()}


class Deaf(Numbers):
    def load_state_dict(self, state):
        raise KeyError("epoch")


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (Numbers(), ""),
        (Numbers(most=2), ""),
        (Numbers(most=4), ""),
        (Numbers(forgets=1), "another item 4 than it would"),
        (Numbers(forgets=97), "another item 4 than it would"),
        (Shuffled(), "samples are lost or repeated"),
        (Opened(), "could not be tried"),
    ],
)
def test_what_a_resume_would_read_otherwise_is_told(dataset, says):
    found = rehearse(dataset)
    assert (says in found) if says else found == ""
    assert dataset.next == 0


@pytest.mark.parametrize(("dataset", "says"), [(Odd(), "cannot be saved"), (Deaf(), "KeyError")])
def test_a_state_that_cannot_be_kept_is_refused(dataset, says):
    with pytest.raises(BadInput, match=says):
        rehearse(dataset)
