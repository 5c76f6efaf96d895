"""Whoever may write to the bucket changes a run, and makes every hash anew that an outsider can
make: what `harness verify` finds."""

import pytest
from tampering import EIGHTEEN, TABLE, TellingRun, copied, small_run

from harness.views.audit import audit


@pytest.fixture(scope="module")
def whole():
    """A run, and what lay in its bucket after its first epoch."""
    run = TellingRun().train(7, world=2)
    old = copied(run.store)
    return run.train(12, world=3).train(20, world=1, final=True).end().store, old


def test_nothing_is_found_in_a_run_that_nobody_touched():
    report = audit(small_run().store)
    assert report.ok, report.first_violation


@pytest.mark.parametrize("one", TABLE, ids=lambda one: one.name)
def test_tampering(whole, one):
    store = copied(whole[0])
    one.do(store, whole[1])
    report = audit(store)
    assert report.ok != one.alone, report.first_violation


def test_the_table_has_what_the_audit_tried():
    assert len(TABLE) > EIGHTEEN
    assert len({one.name for one in TABLE}) == len(TABLE)
