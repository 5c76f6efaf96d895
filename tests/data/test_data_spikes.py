"""Which steps of a run spike, and which samples of a corpus are odd."""

import random

import numpy as np
import pytest

import harness
from harness.core.facts import GuardTripped, StepDone
from harness.data.outliers import Oddities, spikes
from harness.data.verify import TokenRow
from support.corpora import poison, poisoned, prepared

KINDS = ("repeated", "noise", "script")


def steps(losses, norms=None):
    return [
        StepDone(i, 1, loss, 0.0, 0.1, grad_norm=norms[i - 1] if norms else None)
        for i, loss in enumerate(losses, 1)
    ]


# ---- which steps ---------------------------------------------------------------------------------
def test_what_stands_out_from_the_steps_before_it():
    rng = random.Random(1)
    losses = [5 / (1 + i / 10) + rng.gauss(0, 0.02) for i in range(400)]
    assert spikes(steps(losses)) == []
    losses[200] += 1.0
    losses[300] += 0.4
    found = spikes(steps(losses))
    assert [one.step for one in found] == [201, 301] and {one.what for one in found} == {"loss"}
    assert found[0].value == losses[200] and found[0].score > found[1].score > 6
    norms = [1 + rng.gauss(0, 0.05) for _ in range(400)]
    norms[30] = 9.0
    norms[200] = 500.0  # of one step the worse is told
    found = spikes(steps(losses, norms))
    assert [(one.step, one.what) for one in found][:2] == [(201, "gradient norm"), (31, "gradient norm")]


def test_what_is_not_finite_stands_out_most():
    losses = [2.0 + 0.01 * (i % 3) for i in range(60)]
    losses[40] = float("inf")
    losses[50] = float("nan")  # of which nothing can be said: a guard ends such a step
    facts = [*steps(losses), GuardTripped(61, 1, "non-finite", float("nan"))]
    assert [one.step for one in spikes(facts)] == [41, 61]
    assert spikes(steps([3.0] * 5)) == spikes([]) == spikes(steps([1.0] * 30000)) == []
    again = [*steps(losses[:40]), *steps([9.0] * 3), *steps(losses[:40])]
    assert spikes(again) == []  # done again, and calm


# ---- which samples -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return poisoned(tmp_path_factory.mktemp("corpus"), *KINDS, n=1000)


@pytest.mark.parametrize("length", [64, 512])
def test_the_oddest_samples_are_the_poisoned_ones(corpus, length):
    url = corpus
    row, windows = TokenRow(url, "train"), harness.data.Tokens(url, length)
    spans = [
        (start, start + len(ids))
        for start, ids in row.documents()
        if bytes(ids.tolist()).decode() in map(poison, KINDS)
    ]
    assert len(spans) == 3
    odd, rng = Oddities(windows), random.Random(2)
    usual = [odd.of(i).score for i in rng.choices(range(len(windows) // 2), k=200)]
    for start, end in spans:
        inside = range(-(-start // length), end // length)
        assert inside and min(odd.of(i).score for i in inside) > max(usual)
        found = odd.of(inside[len(inside) // 2])
        assert start <= (found.start + found.end) // 2 < end and "usual" in found.why


def test_odd_records_are_found(tmp_path):
    folder, rng = tmp_path / "f", random.Random(5)
    folder.mkdir()
    for i in range(60):
        data = " ".join(rng.choices(["red", "green", "blue"], k=300)).encode()
        (folder / f"{i:02d}.txt").write_bytes(rng.randbytes(1500) if i == 33 else data)
    prepared(tmp_path / "made", folder, kind="records")
    records = harness.data.Records(str(tmp_path / "made"))
    odd = Oddities(records)
    scores = [odd.of(i).score for i in range(60)]
    assert int(np.argmax(scores)) == 33 and sorted(scores)[-1] > 3 * sorted(scores)[-2]
