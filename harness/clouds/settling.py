"""SkyPilot's own bill of nodes that it launched without us, written into their run.

A node of plain `sky launch` or of a managed job knows since when it is paid for, but not how long
it stays after its agent has ended. SkyPilot knows, where it was launched: `sky cost-report`
multiplies these very seconds. What is found is told as facts (NodeBilled), each once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.bucket.journal import Journal, read_facts
from harness.clouds.sky_client import REFRESH_TIMEOUT_S, Sky
from harness.core.facts import AgentStarted, NodeBilled, NodeFound, Stamped
from harness.core.values import amount
from storage.objects import ObjectStore

EARLY_S = 60.0  # two clocks: an agent may seem to have begun so long before its cluster
MOST_DAYS = 3650  # SkyPilot looks back 30 days when it is not told how far


@dataclass(frozen=True)
class _Launched:
    """A node that SkyPilot launched without us: its member, its cluster, when its agent began."""

    member: str
    cluster: str
    began_s: float


@dataclass(frozen=True)
class _Unsettled:
    """A run with such nodes, and the bills of them that it has."""

    store: ObjectStore
    nodes: list[_Launched]
    told: dict[str, NodeBilled]


def settle(sky: Sky, stores: Iterable[ObjectStore], now: Callable[[], float]) -> list[NodeBilled]:
    """Ask SkyPilot, once, for the bills of runs' nodes that no controller launched, and write down
    what is new. Raises SkyError, CloudUnavailable, StoreError."""
    runs = [run for store in stores if (run := _unsettled(store)).nodes]
    names = sorted({node.cluster for run in runs for node in run.nodes})
    rows = sky("spans", REFRESH_TIMEOUT_S, names=names, days=MOST_DAYS) if names else []
    new: list[NodeBilled] = []
    for run in runs:
        found = [bill for node in run.nodes if (bill := _bill(node, rows))]
        fresh = [b for b in found if run.told.get(b.member) != b or b.gone_s is None]
        if fresh:
            journal = Journal(run.store, f"bills-{secrets.token_hex(4)}", now)
            for bill in fresh:
                journal.record(bill)
            journal.flush()
        new += fresh
    return new


def _unsettled(store: ObjectStore) -> _Unsettled:
    facts = read_facts(store, steps=False)
    told = {s.fact.member: s.fact for s in facts if isinstance(s.fact, NodeBilled)}
    return _Unsettled(store, list(_launched(facts)), told)


def _launched(facts: Iterable[Stamped]) -> Iterable[_Launched]:
    clusters: dict[str, str] = {}
    began: dict[str, float] = {}
    for s in facts:
        if isinstance(s.fact, NodeFound) and s.fact.cluster:
            clusters[s.fact.member] = s.fact.cluster
        elif isinstance(s.fact, AgentStarted) and not s.fact.attempt:
            began[s.fact.member] = s.t
    for member in sorted(clusters.keys() & began.keys()):
        yield _Launched(member, clusters[member], began[member])


def _bill(node: _Launched, rows: Iterable[Mapping[str, Any]]) -> NodeBilled | None:
    """Of the time in which its agent began: a name may be launched again and again."""
    for row in rows:
        for begin, end in row.get("usage_intervals") or ():
            if row.get("name") != node.cluster or begin is None:
                continue
            if begin - EARLY_S <= node.began_s and (end is None or node.began_s <= end):
                nodes, seconds = amount(row.get("num_nodes")), amount(row.get("duration"))
                usd = amount(row.get("total_cost"))
                price = usd / seconds * 3600 / nodes if usd and seconds and nodes else None
                gone_s = None if end is None else float(end)
                return NodeBilled(node.member, float(begin), gone_s, price, node.cluster)
    return None
