"""The cold start of a run's nodes is told by part, and its parts are those of the ledger."""

import dataclasses
from statistics import median

import pytest

from harness.core.facts import SessionStarted
from harness.core.formatting import duration
from harness.ledger.bill import NANO
from harness.look.reports.cold_start import cold_start_rows, cold_starts, warm_first_steps
from harness.look.reports.report import headline, to_json
from harness.look.reports.summary import summarize
from storage.stores.folder_store import MemoryStore
from support.histories import whole_run


@pytest.fixture(scope="module")
def summary():
    history = whole_run()
    return summarize(history.store, now=lambda: history.t + 1e6)


def test_every_node_that_trained_has_a_cold_start_of_its_own(summary):
    trained = [a for a in summary.ledger.attempts if a.ns["useful"]]
    starts = cold_starts(summary)
    assert len(starts) == len(trained) == 5
    steps = {(p.epoch, p.step): p.seconds for p in (*summary.curve, *summary.lost)}
    for node, start in zip(trained, starts, strict=True):
        first = next(e for e in summary.ledger.epochs if node.name in e.attempts)
        paid_s = sum(node.ns[bucket] for bucket in ("provision", "setup", "start")) / NANO
        assert start.total == pytest.approx(paid_s + steps[first.epoch, first.first_step])
    assert to_json(summary)["cold_starts"] == [dataclasses.asdict(one) for one in starts]


def test_from_when_a_generation_is_ready_it_is_the_first_step(summary):
    first = next(e for e in summary.ledger.epochs if e.first_s is not None)
    moved = tuple(
        dataclasses.replace(s, t=first.first_s - 2.0)
        if isinstance(s.fact, SessionStarted) and s.fact.epoch == first.epoch
        else s
        for s in summary.facts
    )
    was, found = cold_starts(summary)[0], cold_starts(dataclasses.replace(summary, facts=moved))[0]
    assert found.first_step == pytest.approx(was.first_step + 2.0)
    assert found.total == pytest.approx(was.total)


def test_the_first_step_of_nodes_that_have_trained_before_is_told_beside_it(summary):
    """... for there nothing is compiled again."""
    seen, known = set(), []
    steps = {(p.epoch, p.step): p.seconds for p in (*summary.curve, *summary.lost)}
    for e in summary.ledger.epochs:
        if seen.issuperset(e.attempts):
            known.append(e)
        seen.update(e.attempts)
    starts = {s.fact.epoch: s.t for s in reversed(summary.facts) if isinstance(s.fact, SessionStarted)}
    expected = [e.first_s - starts[e.epoch] + steps[e.epoch, e.first_step] for e in known]
    assert known and warm_first_steps(summary) == pytest.approx(expected)
    row = dict(headline(summary))["cold start"]
    assert f"({duration(median(expected))} once its nodes have trained)" in row
    first = dataclasses.replace(summary.ledger, epochs=summary.ledger.epochs[:1])
    ((_, row),) = cold_start_rows(dataclasses.replace(summary, ledger=first))
    assert "once its nodes" not in row


def test_the_head_of_the_report_names_the_parts_and_what_spares_a_long_setup(summary):
    row = dict(headline(summary))["cold start"]
    assert row.startswith("11.7 s to a node's first step (median of 5 nodes): provision 3.0 s, ")
    assert "setup" not in row and "first step 1.2 s" in row
    slow = [dataclasses.replace(a, ns=a.ns | {"setup": 90 * NANO}) for a in summary.ledger.attempts]
    ledger = dataclasses.replace(summary.ledger, attempts=tuple(slow))
    ((_, row),) = cold_start_rows(dataclasses.replace(summary, ledger=ledger))
    assert "setup 90.0 s" in row and row.endswith("an image spares the setup (harness image)")


def test_a_run_without_a_step_has_none():
    assert cold_start_rows(summarize(MemoryStore("memory://none", {}))) == []
