"""The bill of a node (`bill`), the rows of a ledger, and estimates of a run's other costs: the
bucket's storage, and data that leaves a cloud or a region.

The other costs are not billed per run, so they can only be estimated: from the facts about what was
read and written where, and from list prices (`egress.csv`). They are kept apart from the ledger,
whose numbers are exact. Pure but for reading the table.

The bucket's cloud follows from its URL. Its region is not known, so the first place of that cloud
where nodes trained is assumed.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from harness.core import hardware
from harness.core.decoding import amount
from harness.core.facts import (
    AgentStarted,
    AttemptEnded,
    AttemptIntended,
    EpochStarted,
    NodeFound,
    NodeMeasured,
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
# Requests of one training node: heartbeats, polls for members and orders, facts. Measured, at S3's
# prices (docs/design/RENDEZVOUS.md, docs/design/STORES.md); those of other clouds are similar.
REQUESTS_USD_PER_NODE_H = 0.008
GET_USD = 4e-7  # price of a GET request of S3 Standard (aws.amazon.com/s3/pricing, 2026-11)


@dataclass(frozen=True)
class Moved:
    """Bytes that left `source` for `target`, each a place such as "aws/us-east-1"."""

    source: str
    target: str
    nbytes: int
    usd: float


@dataclass(frozen=True)
class DataRead:
    """The data that steps read. `nbytes`: bytes by URL scheme, or "cache" for the node's cache."""

    nbytes: dict[str, int]
    requests: int

    @property
    def requests_usd(self) -> float:
        """Price of the requests; 0 if none of the data lies in a cloud's bucket."""
        return GET_USD * self.requests if any(map(CLOUD_OF.get, self.nbytes)) else 0.0


def data_read(facts: Iterable[Stamped]) -> DataRead | None:
    """Return the data read in a whole run, without what nodes read but died before reporting; None
    if nothing was counted."""
    told = [s.fact for s in facts if isinstance(s.fact, StepsTimed) and s.fact.read_nbytes]
    nbytes = sum((Counter(one.read_nbytes) for one in told), Counter[str]())
    return DataRead(dict(nbytes), sum(one.read_requests for one in told)) if told else None


@dataclass(frozen=True)
class Estimate:
    """The estimated costs besides nodes. `storage_usd`: for the time of the run; `month_usd`: for
    each month that its snapshots are kept."""

    cloud: str
    stored_nbytes: int
    storage_usd: float
    month_usd: float
    moved: tuple[Moved, ...]

    @property
    def moved_usd(self) -> float:
        return sum(m.usd for m in self.moved)


def cloud_of_bucket(url: str) -> str:
    """Return the cloud of a bucket, or "" if it is in no cloud (a folder)."""
    return CLOUD_OF.get(url.partition("://")[0], "")


def requests_usd(url: str, node_s: float) -> float:
    """Estimate the price of the requests to bucket `url` in `node_s` node-seconds; 0 for a
    folder."""
    return REQUESTS_USD_PER_NODE_H * node_s / 3600 if cloud_of_bucket(url) else 0.0


@functools.cache
def prices() -> Mapping[tuple[str, str], float]:
    """Return (cloud, "internet" | "region" | "zone" | "storage") -> USD per GB."""
    return {
        (row["cloud"], row["what"]): float(row["usd_per_gb"])
        for row in hardware.table_rows("egress.csv", "harness.ledger")
    }


def transfer_usd(source: str, target: str, nbytes: int) -> float:
    """Return the price of moving `nbytes` bytes from one place to another. The receiving side pays
    nothing; an unknown cloud is taken to be free."""
    (cloud, region), (other, other_region) = (
        place.partition("/")[::2] for place in (source, target)
    )
    if cloud == other and (region == other_region or not region or not other_region):
        return 0.0
    return prices().get((cloud, "region" if cloud == other else "internet"), 0.0) * nbytes / 1e9


def beside(url: str, trained: Iterable[str]) -> str:
    """Return the assumed place of the bucket `url`: the first place of its cloud in `trained`, the
    places where nodes trained; "" if unknown."""
    return _first_in(cloud_of_bucket(url), trained)


def _first_in(cloud: str, places: Iterable[str]) -> str:
    return next((place for place in places if place.partition("/")[0] == cloud), "")


def leave_usd(url: str, trained: Iterable[str], offered: Iterable[str], nbytes: int) -> float:
    """Return the price of reading `nbytes` bytes of the bucket `url` once from another place than
    its own (`beside`): from another region of its cloud if one of the places `offered` is in that
    cloud, else over the internet. 0 if it is in no cloud (a folder)."""
    cloud = cloud_of_bucket(url)
    if not cloud:
        return 0.0
    home = beside(url, trained)
    others = sorted(place for place in offered if place and place != home)
    near = any(place.partition("/")[0] == cloud for place in others) or not others
    if home:
        return transfer_usd(home, f"{cloud}/another region" if near else others[0], nbytes)
    return 0.0 if near else transfer_usd(cloud, others[0], nbytes)


def estimate(url: str, facts: Iterable[Stamped], kept: int, seconds: float) -> Estimate | None:
    """Estimate the costs of a run in the bucket `url` that keeps `kept` snapshots and lasted
    `seconds`. Return None if the bucket is in no cloud (a folder)."""
    cloud = cloud_of_bucket(url)
    if not cloud:
        return None
    facts = list(facts)
    said = [s.fact for s in facts]
    committed = {f.step: f.nbytes for f in said if isinstance(f, SnapshotCommitted)}
    stored = kept * max(committed.values(), default=0)
    month_usd = prices().get((cloud, "storage"), 0.0) * stored / 1e9
    moved = (*_moved(cloud, said, committed), *_between_zones(facts))
    return Estimate(cloud, stored, month_usd * seconds / MONTH_S, month_usd, moved)


def _between_zones(facts: Iterable[Stamped]) -> Iterator[Moved]:
    """Yield what nodes sent to nodes in other zones of their region, by region, which AWS and GCP
    bill. An upper bound: the network of a node is measured as a whole, so uploads are in it, and
    each world's traffic is taken to go to all members alike."""
    zone_of, attempt_of, world = dict[str, str](), dict[int, str](), tuple[str, ...]()
    sent: dict[str, float] = defaultdict(float)
    for s in sorted(facts, key=lambda s: s.t):
        match s.fact:
            case AttemptIntended(attempt=attempt, offer=offer):
                attempt_of[attempt] = "/".join(str(offer.get("name", "")).split("/")[:3])
            case AgentStarted(member=member, attempt=attempt):
                zone_of.setdefault(member, attempt_of.get(attempt, ""))
            case NodeFound(member=member, cloud=cloud, region=region, zone=zone) if zone:
                zone_of[member] = zone_of.get(member) or f"{cloud}/{region}/{zone}"
            case EpochStarted(members=members):
                world = tuple(members)
            case NodeMeasured(member=member, seconds=seconds, metrics=metrics):
                mine, others = zone_of.get(member, ""), [m for m in world if m != member]
                region = mine.rpartition("/")[0]
                if member not in world or not others or mine.count("/") != 2:
                    continue
                far = [
                    zone for zone in (zone_of.get(m, "") for m in others)
                    if zone != mine and zone.rpartition("/")[0] == region
                ]  # fmt: skip
                rate = amount(metrics.get("net/sent_bytes_per_s", 0.0))
                sent[region] += rate * amount(seconds) * len(far) / len(others)
    for region, nbytes in sorted(sent.items()):
        usd = prices().get((region.partition("/")[0], "zone"), 0.0) * nbytes / 1e9
        if usd > 0:
            yield Moved(f"zones of {region}", "each other", int(nbytes), usd)


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
        # an upper bound: every node reads the whole snapshot
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


# The division of time into buckets by use, in whole nanoseconds so that sums are exact. Pure.

# in the order in which they are shown
BUCKETS = (
    *("useful", "straggle", "redone", "snapshot"),
    *("provision", "setup", "start", "reform"),
    *("drain", "drained", "idle", "other"),
)
# Where several buckets cover a moment, the first in this order gets it.
PRECEDENCE = (
    *("snapshot", "straggle", "useful", "redone", "other"),
    *("provision", "setup", "start", "drained", "drain", "idle", "reform"),
)
NANO = 1_000_000_000
Span = tuple[int, int]  # [from, to) in nanoseconds
LabelledSpan = tuple[int, int, str]  # a Span and its bucket


def ns(seconds: float) -> int:
    return round(seconds * NANO)


# The bill of a node. Pure.


class Billable(Protocol):
    """A node as its bill needs it: a controller's `Node`, or an `Attempt` of a run's state. Times
    are wall-clock seconds; None: not yet. `usd_per_h`: its price."""

    @property
    def up_s(self) -> float | None: ...
    @property
    def gone_s(self) -> float | None: ...
    @property
    def usd_per_h(self) -> float: ...


@dataclass(frozen=True)
class Bill:
    """The billed time [begin, end) of one node in nanoseconds, and its cost in nano-dollars."""

    begin_ns: int
    end_ns: int
    nusd: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / NANO

    @property
    def usd(self) -> float:
        return self.nusd / NANO


def bill(attempt: Billable, until_s: float, ended: AttemptEnded | None = None) -> Bill:
    """Return the bill of a node up to `until_s`, or until it was gone. Every dollar of node time is
    computed here. A bill that a controller recorded (`ended`) wins."""
    if attempt.up_s is None:
        return Bill(0, 0, ns(ended.usd) if ended else 0)
    begin = ns(attempt.up_s)
    end = max(begin, ns(until_s if attempt.gone_s is None else attempt.gone_s))
    return Bill(begin, end, ns(ended.usd) if ended else price(end - begin, attempt.usd_per_h))


def price(billed_ns: int, usd_per_h: float) -> int:
    """Return nanoseconds times nano-dollars an hour in nano-dollars, rounded once."""
    hour = 3600 * NANO
    return (2 * billed_ns * ns(usd_per_h) + hour) // (2 * hour)


# ---- painting time -------------------------------------------------------------------------------
def paint(layers: Iterable[LabelledSpan], start: int, end: int) -> list[LabelledSpan]:
    """Cut [start, end) into segments without gap or overlap, each in the bucket of highest
    precedence that covers it (`reform` where none does). Neighbours of one bucket are joined."""
    level = {bucket: i for i, bucket in enumerate(PRECEDENCE)}
    cuts: list[tuple[int, int, int]] = []
    for a, b, bucket in layers:
        a, b = max(a, start), min(b, end)
        if a < b:
            cuts += [(a, level[bucket], 1), (b, level[bucket], -1)]
    cuts.sort()
    open_ = [0] * len(PRECEDENCE)
    painted: list[LabelledSpan] = []
    at = start
    for t, i, change in [*cuts, (end, 0, 0)]:
        if t > at:
            bucket = PRECEDENCE[next((k for k, n in enumerate(open_) if n), len(PRECEDENCE) - 1)]
            if painted and painted[-1][2] == bucket:
                painted[-1] = (painted[-1][0], t, bucket)
            else:
                painted.append((at, t, bucket))
            at = t
        open_[i] += change
    return painted


def totals(segments: Iterable[LabelledSpan]) -> dict[str, int]:
    found = dict.fromkeys(BUCKETS, 0)
    for a, b, bucket in segments:
        found[bucket] += b - a
    return found


def apportion(amount: int, weights: dict[str, int]) -> dict[str, int]:
    """Divide `amount` in proportion to `weights` into whole units that add up to it. If all
    weights are zero, `other` gets all of it."""
    whole = sum(weights.values())
    if not whole:
        return {bucket: amount if bucket == "other" else 0 for bucket in weights}
    shares: dict[str, int] = {}
    before = done = 0
    for bucket, weight in weights.items():  # rounding the running sum keeps the total exact
        before += weight
        shares[bucket] = amount * before // whole - done
        done += shares[bucket]
    return shares


# The rows of a ledger. Pure.

# values of AttemptEnded.end that mean an unwanted end
BAD_ENDS = ("failed", "killed", "preempted", "lost", "unfit", "refused")


# ---- rows ----------------------------------------------------------------------------------------
class Billed:
    """Billed time and money by bucket: `ns` in 1e-9 s, `nusd` in 1e-9 USD."""

    ns: dict[str, int]
    nusd: dict[str, int]

    @property
    def billed_ns(self) -> int:
        return sum(self.ns.values())

    @property
    def billed_s(self) -> float:
        return self.billed_ns / NANO

    @property
    def billed_nusd(self) -> int:
        return sum(self.nusd.values())

    @property
    def usd(self) -> float:
        return self.billed_nusd / NANO


@dataclass(frozen=True)
class AttemptRow(Billed):
    """One attempt and the use of its billed time. `name` is its number, or the member of a node
    that no controller launched."""

    name: str
    attempt: int
    members: tuple[str, ...]
    offer: str
    accelerator: str
    spot: bool
    usd_per_h: float
    on_demand_usd_per_h: float
    asked_s: float
    up_s: float | None
    gone_s: float | None  # None: still there
    end: str  # facts.AttemptEnded.end; "" while it lives
    reason: str
    exit_code: int | None
    segments: tuple[LabelledSpan, ...]
    ns: dict[str, int]  # by bucket; adds up to billed_ns
    nusd: dict[str, int]  # 1e-9 USD by bucket; adds up to billed_nusd


@dataclass(frozen=True)
class EpochRow:
    """One world: its members, its steps, why it ended and what the end cost."""

    epoch: int
    reason: str  # why it began: facts.EpochStarted.reason
    members: tuple[str, ...]
    attempts: tuple[str, ...]  # AttemptRow.name of its members
    world: int
    shares: tuple[int, ...]
    resumed_step: int
    first_step: int | None  # executed, whether committed or not
    last_step: int | None
    steps: int
    committed: int  # steps that are in the lineage
    steps_lost: int  # executed by a world that is over, and not in the lineage
    started_s: float
    first_s: float | None  # begin of its first step
    last_s: float | None  # end of its last step
    end_s: float | None  # None while it lives
    # from the previous generation's last step to its first one; None: no predecessor, or no step
    gap_s: float | None
    lost_s: float  # wall-clock seconds lost by its end: work to redo, and the gap that followed
    ended: str  # the cause as text; "" while it lives

    @property
    def accumulation(self) -> int:
        """Gradient accumulation: the micro-batches per step of the busiest rank."""
        return max(self.shares, default=0)


@dataclass(frozen=True)
class NoticeRow:
    """One notice to one node, and whether a snapshot was committed in time."""

    member: str
    attempt: str
    kind: str  # "kill" | "soft" | "maintenance"
    source: str
    seen_s: float
    deadline_s: float | None
    # seconds from the notice to the commit of a state at or after it; None: there was no commit
    commit_s: float | None
    step: int | None  # step of that snapshot
    training: bool  # the node was in a world when it came; else there was nothing to save
    cancelled: bool

    @property
    def grace_s(self) -> float | None:
        return None if self.deadline_s is None else self.deadline_s - self.seen_s

    @property
    def in_time(self) -> bool | None:
        """True if the commit was in time; `None`: nothing to save, or the notice was cancelled."""
        if not self.training or self.cancelled:
            return None
        return self.commit_s is not None and (self.grace_s is None or self.commit_s <= self.grace_s)


@dataclass(frozen=True)
class Cost:
    """The amount paid, and what the same work would have cost on demand."""

    spot_usd: float  # billed amount
    on_demand_usd: float  # the same node-seconds at on-demand prices
    # on demand without losses: steps, validation and one start per node of the first world
    undisturbed_usd: float
    known: bool  # all on-demand prices are known; else the paid price replaces unknown ones

    @classmethod
    def of(cls, attempts: Sequence[AttemptRow], first_nodes: int) -> Cost:
        """Compute the cost. `first_nodes`: nodes of the first world that did a step."""

        def usd_per_h(a: AttemptRow) -> float:
            if not a.usd_per_h and not a.billed_nusd:
                return 0.0  # the paid price is not known either
            return a.on_demand_usd_per_h or a.usd_per_h

        def spent(a: AttemptRow, buckets: Sequence[str]) -> float:
            return sum(a.ns[bucket] for bucket in buckets) * usd_per_h(a)

        # One start per node of the first world is the minimum that an on-demand run pays as well.
        starts = [spent(a, ("provision", "setup", "start")) for a in attempts if a.ns["useful"]]
        start = median(starts) * min(first_nodes, len(starts)) if starts else 0.0
        steps = sum(spent(a, ("useful", "straggle", "other")) for a in attempts)
        return cls(
            spot_usd=sum(a.billed_nusd for a in attempts) / NANO,
            on_demand_usd=sum(a.billed_ns * usd_per_h(a) for a in attempts) / NANO / 3600,
            undisturbed_usd=(steps + start) / NANO / 3600,
            known=all(a.on_demand_usd_per_h > 0 for a in attempts if a.billed_ns),
        )

    @property
    def saved_usd(self) -> float:
        """Dollars saved relative to the same node-seconds on demand."""
        return self.on_demand_usd - self.spot_usd

    @property
    def saved(self) -> float:
        return self.saved_usd / self.on_demand_usd if self.on_demand_usd else 0.0

    @property
    def saved_undisturbed(self) -> float:
        """Share saved relative to an on-demand run without interruptions: the harder comparison,
        since interruptions count against spot."""
        return 1.0 - self.spot_usd / self.undisturbed_usd if self.undisturbed_usd else 0.0
