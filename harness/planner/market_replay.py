"""A recorded market, replayed through the real recovery loop: what a policy would have cost there.

Real: `recovery.recover`, book, lease, orders, and the policy. Simulated: the cloud and the nodes
(`market_nodes.py`), which commit snapshots without content in every tick; facts are counted in the
book, and not stored. Time jumps from tick to tick: every sleep ends at the next one. So a policy
decides once in a tick, as often as it likes; what is refused is refused until the next.

Pure: no torch, sockets, wall clock or global randomness.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from harness.bucket.controller_lease import Lease
from harness.bucket.layout import LEAVE, order_key
from harness.controller import combinators
from harness.controller.learning import PriceBook
from harness.controller.recovery import RunOutcome, recover
from harness.controller.run_limits import RunSpec
from harness.core.estimates import Estimates
from harness.core.facts import Fact, Stamped
from harness.core.world import DRAINED, FINISHED, STOPPED, Node, NodeState, Offer, Policy, World
from harness.ledger.attempts import AttemptHistory
from harness.planner.market_nodes import MarketFleet, NodeSpan, ReplayJob
from harness.planner.traces import ZoneTrace
from storage.snapshots.manifest import Manifest, PartList, Ref
from storage.snapshots.snapshot_keys import manifest_key
from storage.stores.folder_store import SortedStore


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay. `usd`: the bill; `late_usd`: the part of it that lateness costs.
    `finish_h`: hours until the last step was committed; infinite if it never was. `spans`: for each
    node its offer, when it was given and gone (hours), and whether it was preempted."""

    usd: float
    finish_h: float
    missed: bool
    launches: int
    moves: int  # starts in another place than the node before
    losses: int
    on_demand_h: float
    spot_h: float
    goodput: float  # work that was kept, as a share of the node-hours that were paid for
    outcome: str
    reason: str
    spans: tuple[NodeSpan, ...] = field(repr=False, default=())
    late_usd: float = 0.0


def result_of(fleet: MarketFleet, outcome: str, reason: str) -> ReplayResult:
    """Return the result, once no node is left."""
    bill, spans = fleet.bill, sorted(fleet.spans, key=lambda span: span[1:])
    finish_h = math.inf if bill.done_s is None else bill.done_s / 3600
    late_h = max(0.0, min(finish_h, fleet.now_s / 3600) - fleet.job.deadline_h)
    late_usd = late_h * (fleet.job.usd_per_hour_late or 0.0)
    return ReplayResult(
        usd=bill.usd + late_usd,
        finish_h=finish_h,
        missed=finish_h > fleet.job.deadline_h + 1e-6,
        launches=len(spans),
        moves=bill.moves,
        losses=bill.losses,
        on_demand_h=bill.on_demand_s / 3600,
        spot_h=(bill.paid_s - bill.on_demand_s) / 3600,
        goodput=bill.goodput,
        outcome=outcome,
        reason=reason,
        spans=tuple(spans),
        late_usd=late_usd,
    )


def replay(
    zones: Sequence[ZoneTrace],
    first: int,
    job: ReplayJob,
    policy: Policy,
) -> ReplayResult:
    """Replay from tick `first` of aligned zones on. Beyond their end there is no spot."""
    return MarketReplay(zones, first, job, policy).play()


class TickClock:
    """A clock on which every sleep ends at the next tick."""

    def __init__(self, tick_s: float, at_tick: Callable[[], None]):
        self.tick_s, self.at_tick, self.tick = tick_s, at_tick, 0

    def now(self) -> float:
        return self.tick * self.tick_s

    def sleep(self, seconds: float) -> None:
        self.tick += 1
        self.at_tick()


class _NoRecord:
    """A log that keeps nothing: the book has counted the facts, and nobody reads them."""

    def record(self, fact: Fact) -> None: ...
    def flush(self) -> None: ...

    def read(self) -> list[Stamped]:
        return []


class MarketReplay:
    """The cloud, the clock and the learner of one replay."""

    def __init__(
        self,
        zones: Sequence[ZoneTrace],
        first: int,
        job: ReplayJob,
        policy: Policy,
    ):
        self.job, self.rng = job, random.Random(0)
        # not a limit of the RunSpec, which would be written to the bucket for nodes; none of these
        # reads it
        self.policy = combinators.within_hours(policy, hours=job.limit_h)
        self.fleet = MarketFleet(zones, first, job)
        self.clock = TickClock(self.fleet.tick_s, self._tick)
        self.store = SortedStore()
        self.ended: list[Node] = []  # since `nodes` was last called
        self.manifests: list[Ref] = []
        self.prices = PriceBook()
        self.run = RunSpec(
            *job.nodes,
            poll_s=self.fleet.tick_s,
            max_hours_without_progress=job.limit_h,
            max_attempts_without_progress=10**9,
            block_limit_s=0.5 * self.fleet.tick_s,
            exit_grace_s=0.0,
            launch_s=0.0,
            terminate_s=0.0,
        )

    def play(self) -> ReplayResult:
        world = World(self.clock, self, self.store, self.rng)
        lease = Lease(self.store, self.clock, "replay", ttl_s=10 * self.fleet.tick_s)
        ended: RunOutcome = recover(self.run, self.policy, world, _NoRecord(), lease, self)
        for attempt in list(self.fleet.nodes):
            self.fleet.end(attempt, self.clock.now())
        return result_of(self.fleet, ended.outcome, ended.reason)

    # ---- Cloud -----------------------------------------------------------------------------------
    def offers(self) -> Sequence[Offer]:
        return self.fleet.offers()

    def launch(self, attempt: int, offer: Offer) -> None:
        node = self.fleet.launch(attempt, offer)
        if not node.alive:
            self.ended.append(node)

    def nodes(self) -> Sequence[Node]:
        """Return the nodes that exist, and those that ended since the last call."""
        found = [*self.fleet.nodes.values(), *self.ended]
        self.ended = []
        return found

    def terminate(self, attempt: int) -> None:
        self._gone(self.fleet.end(attempt, self.clock.now()), STOPPED, "terminated")

    # ---- Learner ---------------------------------------------------------------------------------
    def known(self, now_s: float, book: AttemptHistory, offers: Sequence[Offer]) -> Estimates:
        self.prices.see(now_s, offers)
        return self.fleet.known(book.capacity, self.prices.known)

    # ---- what happens ----------------------------------------------------------------------------
    def _gone(
        self, node: Node | None, code: int | None, reason: str, at_s: float | None = None
    ) -> None:
        if node is not None:
            at_s = self.clock.now() if at_s is None else at_s
            gone = dataclasses.replace(
                node, state=NodeState.GONE, gone_s=at_s, exit_code=code, reason=reason
            )
            self.ended.append(gone)

    def _tick(self) -> None:
        """Execute and bill the tick that has just ended; then advance the market."""
        fleet = self.fleet
        if asked := {*self.store.list(LEAVE)}:  # of all attempts ever
            for attempt in [n for n in fleet.nodes if order_key(LEAVE, n) in asked]:
                since_s = fleet.now_s
                self._gone(fleet.end(attempt, since_s), DRAINED, "exited", since_s)
        was_done = fleet.bill.done_s is not None
        fleet.work()
        if not was_done and fleet.bill.done_s is not None:
            for attempt in list(fleet.nodes):
                done_s = fleet.bill.done_s
                self._gone(fleet.end(attempt, done_s), FINISHED, "exited", done_s)
        for attempt in fleet.too_many():
            self._gone(fleet.take(attempt), None, "preempted")
        self._commit(fleet.steps())

    @property
    def _committed(self) -> int:
        return self.manifests[-1].step if self.manifests else 0

    def _commit(self, step: int) -> None:
        """Commit a snapshot of this step, if it is new. Two are kept."""
        if step <= self._committed:
            return
        ref = Ref(1, step)
        data = {"step": step, "final": self.fleet.bill.done_s is not None}
        share = PartList(ref, 0, 1, "replay", (), {}, data)
        self.store.create(manifest_key(ref), Manifest.merge([share]).to_json().encode())
        self.manifests.append(ref)
        for old in self.manifests[:-2]:
            self.store.delete(manifest_key(old))
        self.manifests = self.manifests[-2:]
