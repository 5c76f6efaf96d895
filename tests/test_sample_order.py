"""Blocks and mixtures: every sample exactly once in each pass, a share of the reads for each node,
the same for any world."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.batch import Batching, indices_at
from harness.core.blocks import Blocks


@st.composite
def in_blocks(draw):
    micro, micros = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    size = micro * micros
    n = draw(st.integers(size, size + 400))
    lane = max(1, max(0, n // size - 1) * micro)
    items = draw(st.integers(1, lane))
    blocks = Blocks(items, draw(st.integers(1, lane // items)))
    return Batching(n, size, micro, draw(st.integers(0, 2**63 - 1)), order=blocks)


@settings(deadline=None)
@given(in_blocks(), st.integers(0, 10**6))
def test_every_sample_exactly_once_per_epoch(b, epoch):
    at = np.arange(epoch * b.samples, (epoch + 1) * b.samples)
    found = indices_at(b, at)
    assert sorted(found.tolist()) == list(range(b.samples))
    one = at[len(at) // 3 :][:1]
    assert indices_at(b, one).tolist() == found[one - at[0]].tolist()
