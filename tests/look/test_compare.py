"""Two runs are the same training if what they committed says so."""

import io

import pytest
from rich.console import Console

from harness.core.world import BadInput
from harness.look.reports.compare import compare, print_comparison
from storage.snapshots.manifest import Ref
from storage.stores.folder_store import MemoryStore
from support.truerun import IDENTITY, TrueRun


def said(found, rtol=1e-3):
    out = io.StringIO()
    status = print_comparison(found, Console(file=out, width=200), rtol)
    return status, out.getvalue()


def test_interrupted_run_is_identical():
    a = TrueRun().train(20, final=True)
    b = TrueRun().train(7, world=2).train(12, world=3).rewind(Ref(epoch=1, step=5))
    b = b.train(20, world=1, final=True)
    found = compare(a.store, b.store)
    assert (found.identical_until, found.first_difference, found.max_at, found.same_weights) == (
        20,
        None,
        None,
        True,
    )
    assert found.max_relative_loss_difference == 0.0
    status, text = said(found)
    assert status == 0
    assert "identical from step 1 to 20 (loss bits, samples)" in text
    assert "weights: the same" in text


def test_rounding_is_told_and_tolerated():
    a = TrueRun().train(40)
    b = TrueRun(
        loss=lambda step: 2.0 / (step + 1) * (1 + (2e-7 if step == 32 else 1e-8) * (step > 31))
    ).train(40)
    found = compare(a.store, b.store)
    assert (found.identical_until, found.first_difference, found.max_at) == (31, 32, 32)
    assert found.max_relative_loss_difference == pytest.approx(2e-7, rel=1e-3)
    status, text = said(found)
    assert status == 0
    assert (
        "steps 1-31 identical; largest relative difference of the loss 2.0e-07 at step 32; within "
        "0.001: yes" in text
    )
    assert said(found, rtol=1e-9)[0] == 1


def test_different_identity_names_the_field():
    status, text = said(
        compare(TrueRun().train(5).store, TrueRun(identity={**IDENTITY, "seed": 8}).train(5).store)
    )
    assert status == 1
    assert "different seed: 7 and 8" in text
    assert "step 1 consumed other samples" in text


def test_created_by_is_no_difference():
    found = compare(
        TrueRun().train(5).store, TrueRun(identity={**IDENTITY, "created_by": "x"}).train(5).store
    )
    assert not found.different_identity
    assert said(found)[0] == 0


def test_shorter_run_is_not_the_same():
    found = compare(TrueRun().train(5).store, TrueRun().train(10).store)
    status, text = said(found)
    assert status == 1
    assert "a has 5 committed steps, b has 10; compared up to step 5" in text
    assert "not comparable" in text


def test_weights_by_parts_when_no_hash():
    a, b = (TrueRun(weights=False).train(10) for _ in range(2))
    assert compare(a.store, b.store).same_weights is True
    c = TrueRun(weights=False).train(10, world=3)  # other ranks wrote other boxes
    assert compare(a.store, c.store).same_weights is None
    key = a.store.list("snapshots/parts/0000000010-e000001/r00000")[0]
    assert len(a.store.get(key)) == 200
    d = TrueRun(weights=False, salt="other").train(10)
    assert compare(a.store, d.store).same_weights is False


def test_no_finite_loss_is_never_within_tolerance():
    found = compare(
        TrueRun().train(3).store,
        TrueRun(loss=lambda step: float("inf") if step == 2 else 2.0 / (step + 1)).train(3).store,
    )
    assert found.max_relative_loss_difference == float("inf")
    assert said(found)[0] == 1


STREAM = {**IDENTITY, "samples": 0, "shuffle": False}


def test_of_streams_no_more_is_said_than_is_known():
    hashed = {**STREAM, "contents": True}
    a, b, c = (
        TrueRun(identity=hashed).train(5, contents=contents)
        for contents in ("0" * 16, "0" * 16, "1" * 16)
    )
    status, text = said(compare(a.store, b.store))
    assert status == 0 and "identical from step 1 to 5 (loss bits, contents)" in text
    assert "contents are hashes of what was read" in text
    status, text = said(compare(a.store, c.store))
    assert status == 1 and "contents: step 1 consumed other samples" in text


def test_nothing_there():
    with pytest.raises(BadInput, match=r"found no run\.json"):
        compare(TrueRun().train(3).store, MemoryStore("memory://none", {}))
    empty = compare(TrueRun().store, TrueRun().store)
    assert (empty.steps_a, empty.identical_until, empty.same_weights) == (0, 0, None)
    assert "no step that both have committed" in said(empty)[1]
