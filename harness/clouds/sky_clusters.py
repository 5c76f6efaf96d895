"""The clusters of a run at SkyPilot's API server, found by their names."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.bucket.archive import read_facts
from harness.bucket.journal import Journal
from harness.clouds.sky_broker import CALL_TIMEOUT_S, REFRESH_TIMEOUT_S, Sky, SkyError
from harness.core.decoding import amount
from harness.core.facts import AgentStarted, NodeBilled, NodeFound, Stamped
from harness.core.world import CloudUnavailable
from storage.stores.objects import ObjectStore

# letters in the names of a run's clusters: of the run's name, and of the hash of its URL (5 bits
# each)
NAME, HASH = 9, 9


def tag(run_url: str) -> str:
    """Return the prefix of the names of all clusters of a run, the same for every controller: the
    last part of its URL, as far as a cloud takes it, and a hash of all of it."""
    name = re.sub("[^a-z0-9]+", "-", run_url.rstrip("/").rpartition("/")[2].lower()).strip("-")
    if not name[:1].isalpha():
        name = f"run-{name}"  # SkyPilot wants a letter first
    digest = base64.b32encode(hashlib.sha256(run_url.encode()).digest()).decode().lower()
    return f"{name[:NAME].strip('-')}-{digest[:HASH]}"


def cluster_name(tag: str, attempt: int) -> str:
    """Return the name of an attempt's cluster, such as `gpt-124m-k3f9q2abz-0003`, in `sky status`
    and SkyPilot's dashboard. `tag` is the run's. With the hash of the user that SkyPilot adds, it
    has at most 33 characters; GCP allows 35."""
    return f"{tag}-{attempt:04d}"


def attempt_of_cluster(name: str, run_url: str) -> int | None:
    """Return the number of the attempt that a cluster is; `None` if it is not this run's."""
    found = re.fullmatch(rf"{tag(run_url)}-([0-9]{{4,12}})", name)
    return int(found[1]) if found else None


def clusters_of(sky: Sky, run_url: str, **more: Any) -> list[dict[str, Any]]:
    """Return the records of all clusters of a run that exist. `more`: further arguments of
    `sky_broker.Calls.clusters`. Raises SkyError, CloudUnavailable."""
    rows = sky("clusters", REFRESH_TIMEOUT_S, prefix=tag(run_url), **more)
    return [row for row in rows if attempt_of_cluster(row["name"], run_url) is not None]


def billed(sky: Sky, run_url: str) -> list[dict[str, Any]]:
    """Return SkyPilot's own bill of a run: [{"name", "duration" (s), "total_cost" (USD)}]. Raises
    SkyError, CloudUnavailable."""
    rows = sky("costs", REFRESH_TIMEOUT_S, prefix=tag(run_url))
    return [row for row in rows if attempt_of_cluster(str(row["name"]), run_url) is not None]


def known_once(sky: Sky, run_url: str) -> set[int]:
    """Return the attempts whose clusters this API server ever had. Those that it no longer lists
    are gone. Raises SkyError, CloudUnavailable."""
    found = (attempt_of_cluster(str(row["name"]), run_url) for row in billed(sky, run_url))
    return {number for number in found if number is not None}


def bring_down(sky: Sky, run_url: str, timeout_s: float) -> list[str]:
    """End every cluster of a run, as `end_clusters` does."""
    return end_clusters(sky, lambda: [r["name"] for r in clusters_of(sky, run_url)], timeout_s)


def end_clusters(sky: Sky, existing: Callable[[], list[str]], timeout_s: float) -> list[str]:
    """End the clusters that `existing` names until it names none, and return their names. Raises
    CloudUnavailable that names those not proven to be down within `timeout_s`."""
    give_up_s = time.monotonic() + timeout_s
    ended: dict[str, str] = {}  # cluster name -> id of the request that ends it
    while True:
        if not (left := existing()):
            return sorted(ended)
        if time.monotonic() > give_up_s:
            raise CloudUnavailable(
                f"not proven to be down after {timeout_s:g} s, end them by hand (`sky down`): "
                f"{' '.join(left)}"
            )
        states = sky("requests", CALL_TIMEOUT_S, ids=[r for r in ended.values() if r])
        for name in left:
            if states.get(ended.get(name, ""), "LOST") not in ("PENDING", "RUNNING", "WAITING"):
                try:
                    ended[name] = sky("down", CALL_TIMEOUT_S, name=name)
                except SkyError as e:
                    ended[name] = ""
                    if e.type != "ClusterDoesNotExist":
                        raise CloudUnavailable(
                            f"SkyPilot does not bring {name} down ({e}); try `sky down {name}`"
                        ) from e
        time.sleep(1.0)


def tails(sky: Sky, run_url: str, lines: int) -> dict[str, str]:
    """Return the last log lines of every existing cluster of a run, by cluster name."""
    found = {}
    for record in clusters_of(sky, run_url):
        try:
            found[record["name"]] = str(
                sky("tail", REFRESH_TIMEOUT_S, name=record["name"], lines=lines)
            )
        except (SkyError, CloudUnavailable) as e:
            found[record["name"]] = f"(no log: {e})"
    return found


# The bills of nodes that SkyPilot launched without a controller of ours, recorded in their runs.

EARLY_S = 60.0  # clock skew: an agent may seem to start this long before its cluster
MOST_DAYS = 3650  # without a number of days, SkyPilot looks back 30


@dataclass(frozen=True)
class _Launched:
    """A node that SkyPilot launched without a controller of ours. `began_s`: when its agent
    started, seconds since 1970."""

    member: str
    cluster: str
    began_s: float


@dataclass(frozen=True)
class _Unsettled:
    """A run with its nodes of this kind. `told`: the bills that it already has, by member."""

    store: ObjectStore
    nodes: list[_Launched]
    told: dict[str, NodeBilled]


def settle(sky: Sky, stores: Iterable[ObjectStore], now: Callable[[], float]) -> list[NodeBilled]:
    """Ask SkyPilot once for the bills of the nodes that no controller launched, record the new
    ones, and return them. Raises SkyError, CloudUnavailable, StoreError."""
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
    """Return the bill of the usage interval in which the node's agent started, or `None`. The
    interval matters because one cluster name may be launched several times."""
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
