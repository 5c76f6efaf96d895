"""The ledgers of commit 610e0cb, computed again from the same facts.

`tests/fixtures/ledgers.json.gz` holds twenty simulated runs: eight of the recovery loop alone, eight of the
whole system, and four of those without their controllers' facts (machines of others, some with a
bill by SkyPilot). Of each it has the facts, the committed steps, and what that commit computed from
them at three moments. Money is in nano-dollars, time in nanoseconds: nothing may differ.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from harness.core.facts import Stamped, parse
from harness.core.step_records import Committed, decode
from harness.ledger.attempts import AttemptHistory
from harness.ledger.ledger import Ledger
from harness.ledger.run_state import RunState

RUNS = json.loads(gzip.decompress((Path(__file__).parents[1] / "fixtures" / "ledgers.json.gz").read_bytes()))


def known(run: dict[str, Any], t: float) -> tuple[list[Stamped], Committed]:
    """Return the facts and the committed steps up to `t`."""
    facts = [Stamped(body["t"], writer, parse(dict(body))) for writer, body in run["facts"]]
    lines = "\n".join(run["records"]).encode()
    every = Committed.of(decode(lines, "corpus")) if lines else Committed.of([])
    if t < max(s.t for s in facts):
        rows = every.rows[every.rows["end"] <= t]
        every = Committed(rows, every.worlds, every.metrics)
    return [s for s in facts if s.t <= t], every


def nano(usd: float) -> int:
    return round(usd * 1e9)


@pytest.mark.parametrize("run", RUNS, ids=[f"{r['what']}-{r['seed']}" for r in RUNS])
def test_the_ledger_is_the_same_to_the_nanodollar(run: dict[str, Any]) -> None:
    for wanted in run["found"]:
        facts, records = known(run, wanted["t"])
        ledger = Ledger.of(facts, records, wanted["t"])
        found = [
            [a.name, a.billed_ns, a.billed_nusd, [*a.nusd.values()], [*a.ns.values()], a.end]
            for a in ledger.attempts
        ]
        assert found == wanted["attempts"]
        assert [
            [e.epoch, e.steps, e.steps_lost, e.gap_s, e.lost_s, e.ended] for e in ledger.epochs
        ] == wanted["epochs"]
        cost = ledger.cost
        assert [
            *map(nano, (cost.spot_usd, cost.on_demand_usd, cost.undisturbed_usd)),
            cost.known,
        ] == [*wanted["cost"], wanted["known"]]


@pytest.mark.parametrize("run", RUNS, ids=[f"{r['what']}-{r['seed']}" for r in RUNS])
def test_the_controller_and_the_live_view_pay_the_same(run: dict[str, Any]) -> None:
    """Up to the rounding of each node's bill; facts may come in any order."""
    for wanted in run["found"]:
        t, (facts, _) = wanted["t"], known(run, wanted["t"])
        near = len(wanted["attempts"])
        book = AttemptHistory.of(facts, random.Random(1))
        assert nano(book.spent_usd(t)) == pytest.approx(wanted["controller"], abs=near)
        for seed in range(3):
            random.Random(seed).shuffle(facts)
            state = RunState.of(facts)
            assert list(map(nano, state.spent(t))) == pytest.approx(wanted["live"], abs=near)
            found = [state.step, list(state.committed), state.run_state, state.refused]
            assert found == [
                wanted[name] for name in ("step", "committed", "state", "refused")
            ], seed
