"""What a run pays besides its nodes: the bucket's storage, and data that leaves a cloud or a
region. Estimates, for `harness report`.

Nobody bills a run for this by itself, so it can only be estimated: from what facts say was read and
written where, and list prices (`egress.csv`). It stands apart from the ledger, whose numbers are
exact. Pure but for reading the table.

Where the bucket is follows from its URL; in which region nobody says, so the first place of its
cloud that trained is taken for it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.core import tables
from harness.core.facts import (
    AgentStarted,
    AttemptIntended,
    EpochStarted,
    NodeFound,
    SessionStarted,
    SnapshotCommitted,
    Stamped,
    StepsTimed,
)

CLOUD_OF = {
    "s3": "aws",
    "gs": "gcp",
    "gcs": "gcp",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "r2": "cloudflare",
    "oci": "oci",
}
MONTH_S = 30 * 86400.0
# Requests of one node that trains: its beats, its looks for others and for orders, facts. Measured,
# at S3's prices (docs/RENDEZVOUS.md, docs/STORES.md); those of other clouds lie near.
REQUESTS_USD_PER_NODE_H = 0.008
GET_USD = 4e-7  # of a request that reads data, of S3 Standard (aws.amazon.com/s3/pricing, 2026-11)


@dataclass(frozen=True)
class Moved:
    """Bytes that left `source` for `target`, each a place such as "aws/us-east-1"."""

    source: str
    target: str
    nbytes: int
    usd: float


@dataclass(frozen=True)
class DataRead:
    """What steps read of data. `nbytes`: by a URL's scheme, or "cache", the node's."""

    nbytes: dict[str, int]
    requests: int

    @property
    def requests_usd(self) -> float:
        """0: none of it lies in a cloud's bucket."""
        return GET_USD * self.requests if any(map(CLOUD_OF.get, self.nbytes)) else 0.0


def data_read(facts: Iterable[Stamped]) -> DataRead | None:
    """Of a whole run, those of its nodes that died untold left out; None: nobody counted."""
    told = [s.fact for s in facts if isinstance(s.fact, StepsTimed) and s.fact.read_nbytes]
    nbytes = sum((Counter(one.read_nbytes) for one in told), Counter[str]())
    return DataRead(dict(nbytes), sum(one.read_requests for one in told)) if told else None


@dataclass(frozen=True)
class Estimate:
    """`storage_usd`: for the time of the run; `month_usd`: for each month that its snapshots
    are kept."""

    cloud: str
    stored_nbytes: int
    storage_usd: float
    month_usd: float
    moved: tuple[Moved, ...]

    @property
    def moved_usd(self) -> float:
        return sum(m.usd for m in self.moved)

    @property
    def moved_nbytes(self) -> int:
        return sum(m.nbytes for m in self.moved)


def cloud_of(url: str) -> str:
    """Of a bucket; "": it is no cloud's (a folder)."""
    return CLOUD_OF.get(url.partition("://")[0], "")


def requests_usd(url: str, node_s: float) -> float:
    """What nodes ask of the bucket `url` in so many seconds of nodes, about; 0: it is a folder."""
    return REQUESTS_USD_PER_NODE_H * node_s / 3600 if cloud_of(url) else 0.0


@functools.cache
def prices() -> Mapping[tuple[str, str], float]:
    """(cloud, "internet" | "region" | "storage") -> USD per GB."""
    return {
        (row["cloud"], row["what"]): float(row["usd_per_gb"]) for row in tables.rows("egress.csv")
    }


def transfer_usd(source: str, target: str, nbytes: int) -> float:
    """What it costs to bring so many bytes from one place to another. Who receives pays
    nothing; an unknown cloud is taken to be free."""
    (cloud, region), (other, other_region) = (
        place.partition("/")[::2] for place in (source, target)
    )
    if cloud == other and (region == other_region or not region or not other_region):
        return 0.0
    return prices().get((cloud, "region" if cloud == other else "internet"), 0.0) * nbytes / 1e9


def beside(url: str, trained: Iterable[str]) -> str:
    """Where the bucket `url` is taken to be: the first place of its cloud where nodes `trained`.
    "": not known."""
    return _first_in(cloud_of(url), trained)


def _first_in(cloud: str, places: Iterable[str]) -> str:
    return next((place for place in places if place.partition("/")[0] == cloud), "")


def leave_usd(url: str, trained: Iterable[str], offered: Iterable[str], nbytes: int) -> float:
    """What it costs to read so many bytes of the bucket `url` once where it is not (`beside`): in
    another region of its cloud if one of the places `offered` is there, else over the internet.
    0: it is no cloud's (a folder)."""
    cloud = cloud_of(url)
    if not cloud:
        return 0.0
    home = beside(url, trained)
    others = sorted(place for place in offered if place and place != home)
    near = any(place.partition("/")[0] == cloud for place in others) or not others
    if home:
        return transfer_usd(home, f"{cloud}/another region" if near else others[0], nbytes)
    return 0.0 if near else transfer_usd(cloud, others[0], nbytes)


def estimate(url: str, facts: Iterable[Stamped], kept: int, seconds: float) -> Estimate | None:
    """Of a run in the bucket `url`, with so many snapshots kept, for so many seconds. None: the
    bucket is no cloud's (a folder)."""
    cloud = cloud_of(url)
    if not cloud:
        return None
    said = [s.fact for s in facts]
    committed = {f.step: f.nbytes for f in said if isinstance(f, SnapshotCommitted)}
    stored = kept * max(committed.values(), default=0)
    month_usd = prices().get((cloud, "storage"), 0.0) * stored / 1e9
    return Estimate(
        cloud, stored, month_usd * seconds / MONTH_S, month_usd, _moved(cloud, said, committed)
    )


def _moved(cloud: str, said: Sequence[object], committed: Mapping[int, int]) -> tuple[Moved, ...]:
    place_of = {
        f.attempt: str(f.offer.get("place", "")) for f in said if isinstance(f, AttemptIntended)
    }
    attempt_of = {f.member: f.attempt for f in said if isinstance(f, AgentStarted)}
    found = {
        f.member: "/".join(p for p in (f.cloud, f.region) if p)
        for f in said
        if isinstance(f, NodeFound)
    }
    worlds = {f.epoch: f.members for f in said if isinstance(f, EpochStarted)}

    def place(epoch: int) -> str:
        known = (
            place_of.get(attempt_of.get(m, 0), "") or found.get(m, "")
            for m in worlds.get(epoch, ())
        )
        return next((p for p in known if p), "")

    trained = [place(e) for e in sorted(worlds)]
    home = _first_in(cloud, trained) or cloud
    ways: dict[tuple[str, str], int] = {}
    for fact in said:
        # at most: every node reads all of it
        if isinstance(fact, SessionStarted) and fact.resumed_step and (at := place(fact.epoch)):
            nbytes = committed.get(fact.resumed_step, 0) * max(1, len(worlds.get(fact.epoch, ())))
            ways[home, at] = ways.get((home, at), 0) + nbytes
        if isinstance(fact, SnapshotCommitted) and (at := place(fact.epoch)):
            ways[at, home] = ways.get((at, home), 0) + fact.nbytes
        if isinstance(fact, StepsTimed) and (at := place(fact.epoch)):
            for scheme, nbytes in fact.read_nbytes.items():
                if other := CLOUD_OF.get(scheme, ""):
                    source = home if other == cloud else _first_in(other, trained) or other
                    ways[source, at] = ways.get((source, at), 0) + nbytes
    priced = (
        Moved(a, b, nbytes, transfer_usd(a, b, nbytes)) for (a, b), nbytes in sorted(ways.items())
    )
    return tuple(m for m in priced if m.usd > 0)
