"""What happened in a run as plain JSON: `harness report --json`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from harness.views.outlook import ChosenWaits
from harness.views.painting import BUCKETS, NANO
from harness.views.postmortem_text import as_json
from harness.views.rows import AttemptRow
from harness.views.snapshot_costs import snapshot_costs
from harness.views.summary import Summary


def to_json(s: Summary) -> dict[str, Any]:
    """The numbers as plain JSON (no NaN). Seconds and dollars, with the exact nanoseconds and
    nano-dollars of the ledger."""
    ledger = s.ledger

    def attempt(a: AttemptRow) -> dict[str, Any]:
        body = {f.name: getattr(a, f.name) for f in dataclasses.fields(a) if f.name != "segments"}
        return {**body, "billed_s": a.billed_s, "usd": a.usd}

    body = {
        "url": s.url,
        "state": s.state,
        "reason": s.reason,
        "step": s.step,
        "total_steps": s.total_steps,
        "loss": s.losses,
        "validation": {"name": s.validation_name, "points": s.validation} if s.validation else None,
        "started_s": s.started_s,
        "ended_s": s.ended_s,
        "wall_s": s.wall_s,
        "away_s": s.away_s,
        "deadline_s": s.asked.deadline_s if s.asked else None,
        "waited": dataclasses.asdict(ChosenWaits.of(s.facts, s.ended_s)),
        "worlds": s.worlds,
        "goodput": ledger.goodput,
        "steps_lost": ledger.steps_lost,
        "billed_s": ledger.billed_s,
        "buckets": {
            b: {"s": ledger.ns[b] / NANO, "ns": ledger.ns[b], "nusd": ledger.nusd[b]}
            for b in BUCKETS
        },
        "cost": {
            **dataclasses.asdict(ledger.cost),
            "saved_usd": ledger.cost.saved_usd,
            "saved": ledger.cost.saved,
            "usd_per_1k_steps": 1000 * ledger.usd / s.step if s.step else None,
            "usd_per_1m_tokens": s.usd_per_1m_tokens,
        },
        "attempts": [attempt(a) for a in ledger.attempts],
        "epochs": [
            {**dataclasses.asdict(e), "accumulation": e.accumulation} for e in ledger.epochs
        ],
        "notices": [
            {**dataclasses.asdict(n), "grace_s": n.grace_s, "in_time": n.in_time}
            for n in ledger.notices
        ],
        "snapshots": _snapshots(s),
        "trouble": [dataclasses.asdict(m) for m in s.marks],
        "problems": s.problems,
        "alerts": [dataclasses.asdict(a) for a in s.alerts],
        "interruptions": as_json(s.postmortem),
        "speed": {
            **dataclasses.asdict(s.speed),
            "step_s": s.speed.step_s,
            "shares": s.speed.shares,
        },
        "tokens": s.tokens or None,
        "setup": s.setups.to_json(),
        "logbook": s.logbook.to_json(),
        "side_jobs": {
            one.name: [{"step": step, "metrics": metrics} for step, metrics in one.rows]
            for one in s.side_jobs
        },
        "data": s.data and {**dataclasses.asdict(s.data), "requests_usd": s.data.requests_usd},
        "store": s.store and {**dataclasses.asdict(s.store), "moved_usd": s.store.moved_usd},
    }
    cleaned: dict[str, Any] = _finite(body)
    return cleaned


def _snapshots(s: Summary) -> dict[str, Any]:
    return {
        "kept": s.kept,
        "committed": [dataclasses.asdict(x) for x in s.snapshots],
        "cost": snapshot_costs(s.snapshots, s.ledger.epochs).to_json(),
    }


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; a loss may be either."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
