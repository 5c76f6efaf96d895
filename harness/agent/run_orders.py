"""A node's access to its run in the bucket, besides the rendezvous: orders, doubts, the run's end.

Everything raises StoreError as the store does; nothing here decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.agent.node_state import AgentState
from harness.bucket.controller_lease import RunLimits, run_limits, sign_of_life
from harness.bucket.layout import (
    CONTROL,
    DOUBT,
    HUNG,
    LEAVE,
    RELEASED,
    SNAPSHOT,
    STOP_KEY,
    WITHOUT_SESSION,
    Epoch,
    Identity,
    StopOrder,
    order_by,
    order_key,
    phase_key,
    phase_of,
)
from harness.bucket.orders import ask_to_stop, asked_to_leave, stop_order
from harness.core.batch import halved
from storage.canonical_json import BadObject
from storage.errors import NotFound, StoreUnavailable
from storage.snapshots.manifest import Ref, SnapshotCorrupt
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore

# The behaviour of a node whose run has no controller: it trains on, but not without limit. Used
# by `run_state.py`.

LOOK_EVERY_S = 60.0  # between two looks at the lease
COUNTED_S = 3 * LOOK_EVERY_S  # the most that counts of the time between two looks
# a node trains on for so long without its bucket: nothing that it computes is committed
BUCKETLESS_S = 3600.0
# a controller that has not updated the limits for so many times `every_s`, and for so long, does
# not enforce them any more
MISSED, STILL_S = 3.0, 2 * LOOK_EVERY_S


@dataclass
class Leaderless:
    """One node's view of the lease. `bound_s`: how long it goes on without a controller; 0: no
    limit."""

    bound_s: float
    term: int = 0  # the newest fencing token that was seen
    still_s: float = 0.0  # observed time without a new heartbeat
    beat: bytes | None = None
    unanswered_s: float = 0.0  # observed time in which the bucket did not answer
    _looked_s: float = 0.0

    def see(self, now: float, term: int, beat: bytes) -> str:
        """Record the newest term (0: none) and its heartbeat as of `now` (s, by this node's own
        clock). Return why the node must leave, or ""."""
        same = self.beat == beat and self.term == term
        passed_s = self._passed_s(now)
        self.still_s = self.still_s + passed_s if same else 0.0
        self.term, self.beat, self.unanswered_s = term, beat, 0.0
        if not term or beat == RELEASED or not self.bound_s or self.still_s < self.bound_s:
            return ""
        return (
            f"nobody leads the run: the beat of its controller (lease, term {term}) has stood "
            f"still for {self.bound_s / 3600:g} h"
        )

    def unanswered(self, now: float) -> str:
        """Record that the bucket does not answer. Return why the node must leave, or ""."""
        bound_s = min(self.bound_s, BUCKETLESS_S)
        self.unanswered_s += self._passed_s(now)
        if not bound_s or self.unanswered_s < bound_s:
            return ""
        return f"the bucket has not answered for {self.unanswered_s / 60:.0f} min"

    def _passed_s(self, now: float) -> float:
        passed_s = min(max(0.0, now - self._looked_s), COUNTED_S)
        self._looked_s = now
        return passed_s


@dataclass
class LimitsKeeper:
    """One node's check of the run's limits while no controller enforces them."""

    limits: RunLimits | None = None  # the newest that were seen
    seen_s: float = 0.0  # when they were first seen
    read_s: float = 0.0  # the earliest time at which they may have been written
    _looked_s: float | None = None

    def see(self, now: float, found: RunLimits | None, lease: Leaderless) -> str:
        """Record the limits in the bucket as of `now` (s, by this node's own clock) and the view of
        the lease. `found` None: they cannot be read, so the last ones count. Return why the node
        must leave, or ""."""
        known = self.limits
        if found is not None and (
            known is None or (found.term, found.version) > (known.term, known.version)
        ):
            # limits that were there at our first look may be as old as our launch
            before_s = now - found.launch_s if self._looked_s is None else self._looked_s
            self.limits, self.seen_s, self.read_s = found, now, before_s
        self._looked_s = now
        if self.limits is None or now - self.seen_s < max(MISSED * self.limits.every_s, STILL_S):
            return ""
        # a newer controller may not know such an object, or may not have written its own yet
        led = lease.term > self.limits.term and lease.still_s < STILL_S
        if led and lease.beat != RELEASED:
            return ""
        return self._beyond(self.limits, now - self.read_s + LOOK_EVERY_S)

    def _beyond(self, limits: RunLimits, since_s: float) -> str:
        """Return which limit is exceeded, in words, or "". `since_s`: from when the limits were
        written until the next look."""
        why = f"nobody leads the run (its limits were last written {since_s / 60:.0f} min ago)"
        # all nodes are assumed to go on, and are billed for a while after they have left
        yet_usd = sum(a.usd_per_h * (since_s + a.yet_s) / 3600 for a in limits.attempts)
        if limits.budget_usd is not None and limits.spent_usd + yet_usd >= limits.budget_usd:
            return f"{why}, and its budget of {limits.budget_usd:g} USD is spent"
        if limits.left_s is not None and since_s >= limits.left_s:
            return f"{why}, and its hours are over"
        if limits.leaderless_s is not None and since_s >= limits.leaderless_s:
            return f"{why}, and it was to go on for {limits.leaderless_s / 60:g} min without"
        return ""


NO_LIMIT = 1 << 30


class UnreadableEnd(StoreUnavailable):
    """The snapshot that may be the run's last one cannot be read now."""


class RunOrders:
    """The run as one member sees it. `attempt` 0: no controller launched it. `replica_ranks`: ranks
    that compute one micro-batch together."""

    def __init__(
        self,
        store: ObjectStore,
        member: str,
        attempt: int,
        leaderless_s: float,
        replica_ranks: int = 1,
    ):
        self.store, self.member, self.attempt = store, member, attempt
        self.snapshots = Snapshots(store)
        self._leaderless, self._limits = Leaderless(leaderless_s), LimitsKeeper()
        self._control: set[str] = set()  # keys under control/, as of the last look
        # None: requests that are older than our first look are not for us
        self._control_seen: set[str] | None = None
        self._doubt_told = False  # the bucket says that this node may not stay
        self._replica_ranks = replica_ranks
        self._phase = 1  # the newest that has begun, as of the last look
        self._room: int | None = None  # ranks that a step has work for; None: not known yet

    # ---- requests --------------------------------------------------------------------------------
    def look(self) -> None:
        """Read all requests to the run, by a single list."""
        self._control = set(self.store.list(CONTROL))
        newest = max(self._phase, *map(phase_of, self._control), 1)
        if newest != self._phase:
            self._phase, self._room = newest, None

    def stop(self) -> str | None:
        """Return why the run must stop; None if it must not."""
        order = stop_order(self.store) if STOP_KEY in self._control else None
        return order.reason if order else None

    def requests(self) -> list[str]:
        """Return the keys of the snapshot requests since the last call of this method."""
        seen, self._control_seen = self._control_seen, self._control
        if seen is None:
            return []
        return [key for key in sorted(self._control - seen) if key.startswith(SNAPSHOT)]

    def released(self) -> bool:
        """Return whether the controller has asked this node to leave."""
        asked = bool(self.attempt) and order_key(LEAVE, self.attempt) in self._control
        return asked and asked_to_leave(self.store, self.attempt)

    # ---- the controller --------------------------------------------------------------------------
    def unled(self, now: float) -> str:
        """Return why this node must leave, if the run has had no controller for too long, or no
        bucket, or has reached its limits without a controller; "" otherwise."""
        lease, limits = self._leaderless, None
        try:
            why = lease.see(now, *sign_of_life(self.store, lease.term))
            limits = run_limits(self.store)
        except StoreUnavailable:
            why = lease.unanswered(now)
        return self._limits.see(now, limits, lease) or why

    @property
    def bucketless(self) -> bool:
        """True if the bucket did not answer the last look."""
        return self._leaderless.unanswered_s > 0

    # ---- reports ---------------------------------------------------------------------------------
    def tell_doubt(self, node: AgentState, doubtful: bool) -> None:
        """Write to the bucket, for the controller, whether this node may not stay. After an error
        the next call retries."""
        if doubtful == self._doubt_told or not self.attempt:
            return
        key = order_key(DOUBT, self.attempt)
        if doubtful:
            said = [f"{n.kind} notice from {n.source}" for n in node.notices.values()]
            self.store.create(key, order_by(self.member, ", ".join(said)))
        else:
            self.store.delete(key)
        self._doubt_told = doubtful

    def hung_elsewhere(self, step: int) -> bool:
        """Record that this node's workers hang too often, the last time after `step`. Return
        whether another node was worn out so after the same step: then it is no node's fault."""
        there = f"{HUNG}{step:012d}-"
        self.store.create(f"{there}{self.member}.json", order_by(self.member))
        # written first and read afterwards, so that of two nodes at once one sees the other
        return any(key != f"{there}{self.member}.json" for key in self.store.list(there))

    def ask_to_stop(self, reason: str, log_tail: tuple[str, ...]) -> None:
        """Request a stop of the run, as failed: more tries would only cost money."""
        ask_to_stop(self.store, StopOrder(reason, self.member, failed=True, log_tail=log_tail))

    # ---- progress --------------------------------------------------------------------------------
    def committed(self) -> int:
        """Return the newest committed step; 0 if there is none."""
        return max((r.step for r in self.snapshots.refs()), default=0)

    def room(self) -> int | None:
        """Return the number of ranks that a step has work for; None: no limit, or not known yet."""
        if self._room is None:
            try:
                found = self._identity()
                self._room = found.micro_batches * self._replica_ranks or NO_LIMIT
            except (NotFound, BadObject):
                # not there yet, or invalid: workers report errors in it
                return None
        return None if self._room == NO_LIMIT else self._room

    def micro_batch(self, halvings: int) -> int:
        """Return the samples of a micro-batch after so many halvings; 0: not known."""
        try:
            found = self._identity().micro_batch
        except (NotFound, BadObject):
            return 0
        return halved(found, halvings) if found else 0

    def _identity(self) -> Identity:
        """Return the identity of the newest phase. Raises NotFound, BadObject, StoreUnavailable."""
        return Identity.decode(self.store.get(phase_key(self._phase)))

    def is_over(self) -> bool:
        """Return whether the run has ended, as far as its newest snapshot can be read."""
        try:
            return self.surely_over()
        except UnreadableEnd:  # workers will find a good snapshot, and read it
            return False

    def surely_over(self) -> bool:
        """Return whether the run has ended. Raises UnreadableEnd if its newest snapshot is listed
        and cannot be read: one such answer proves nothing."""
        refs = self.snapshots.refs()
        try:
            return bool(refs) and bool(self.snapshots.ended(self.snapshots.load(refs[0])))
        except (NotFound, SnapshotCorrupt) as e:
            raise UnreadableEnd(f"snapshot {refs[0]} is listed, and cannot be read: {e}") from e

    def finish_for_script(self, epoch: Epoch) -> None:
        """Commit the end of a run whose script has no session and has ended well. Its snapshots are
        not touched: the run ends with the newest one, or else with an empty one of all ranks."""
        why = WITHOUT_SESSION
        if refs := self.snapshots.refs():
            self.snapshots.end(refs[0], why)
            return
        ref = Ref(epoch=epoch.epoch, step=0)
        data = {"final": True, "ended": why, "samples": None, "parent": ""}
        for rank in range(epoch.world):
            self.snapshots.write(
                ref, rank, epoch.world, {}, {}, data if rank == 0 else {}, token=self.member
            )
        self.snapshots.commit(ref, epoch.world)
