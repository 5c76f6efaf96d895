"""What a node reads of its run in the bucket, and writes there, besides the rendezvous: orders, its
doubts, the run's end.

Everything raises StoreError as the store does; nothing here decides.
"""

from __future__ import annotations

from harness.agent.leaderless import Leaderless, LimitsKeeper
from harness.agent.machine import AgentState
from harness.bucket.layout import (
    CONTROL,
    DOUBT,
    IDENTITY,
    LEAVE,
    SNAPSHOT,
    STOP_KEY,
    Epoch,
    Identity,
    StopOrder,
    order_by,
    order_key,
)
from harness.bucket.lease import sign_of_life
from harness.bucket.limits import run_limits
from harness.bucket.orders import ask_to_stop, asked_to_leave, stop_order
from harness.core.values import BadObject
from storage.errors import NotFound
from storage.manifest import Ref, SnapshotCorrupt
from storage.objects import ObjectStore
from storage.snapshots import Snapshots

NO_LIMIT = 1 << 30


class RunState:
    """The run as one member sees it. `attempt` 0: nobody launched it by number.
    `replica_ranks`: ranks that do one micro-batch together."""

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
        self._control: set[str] = set()  # what lies under control/, as we saw it last
        # what was asked of the run before we looked first is not for us
        self._control_seen: set[str] | None = None
        self._doubt_told = False  # that this node may not stay stands in the bucket
        self._replica_ranks = replica_ranks
        self._room: int | None = None  # ranks that a step has work for, once that is known

    # ---- what is asked ---------------------------------------------------------------------------
    def look(self) -> None:
        """One list tells of everything that is asked of the run."""
        self._control = set(self.store.list(CONTROL))

    def stop(self) -> str | None:
        """Why the run shall stop, if it shall."""
        order = stop_order(self.store) if STOP_KEY in self._control else None
        return order.reason if order else None

    def requests(self) -> list[str]:
        """Keys of the snapshots that were asked for since this was asked last."""
        seen, self._control_seen = self._control_seen, self._control
        if seen is None:
            return []
        return [key for key in sorted(self._control - seen) if key.startswith(SNAPSHOT)]

    def released(self) -> bool:
        """Is this node asked to leave, by who leads the run?"""
        asked = bool(self.attempt) and order_key(LEAVE, self.attempt) in self._control
        return asked and asked_to_leave(self.store, self.attempt)

    # ---- who leads -------------------------------------------------------------------------------
    def unled(self, now: float) -> str:
        """Why this node is to leave, if nobody has led the run for too long, or nobody keeps limits
        that are reached; ""."""
        lease = self._leaderless
        why = lease.see(now, *sign_of_life(self.store, lease.term))
        return self._limits.see(now, run_limits(self.store), lease) or why

    # ---- what we tell ----------------------------------------------------------------------------
    def tell_doubt(self, node: AgentState, doubtful: bool) -> None:
        """Who launched us by number sees in the bucket that we may not stay. After an error it
        is told later."""
        if doubtful == self._doubt_told or not self.attempt:
            return
        key = order_key(DOUBT, self.attempt)
        if doubtful:
            said = [f"{n.kind} notice from {n.source}" for n in node.notices.values()]
            self.store.create(key, order_by(self.member, ", ".join(said)))
        else:
            self.store.delete(key)
        self._doubt_told = doubtful

    def ask_to_stop(self, reason: str, log_tail: tuple[str, ...]) -> None:
        """More tries would only burn money."""
        ask_to_stop(self.store, StopOrder(reason, self.member, failed=True, log_tail=log_tail))

    # ---- how far it is ---------------------------------------------------------------------------
    def committed(self) -> int:
        """The newest step that is; 0: none."""
        return max((r.step for r in self.snapshots.refs()), default=0)

    def room(self) -> int | None:
        """Ranks that a step has work for; None: no limit, or not known yet."""
        if self._room is None:
            try:
                found = Identity.decode(self.store.get(IDENTITY))  # never changes
                self._room = found.micro_batches * self._replica_ranks or NO_LIMIT
            except (NotFound, BadObject):
                # not there yet, or not ours: workers say what is wrong
                return None
        return None if self._room == NO_LIMIT else self._room

    def is_over(self) -> bool:
        """Has the run ended?"""
        refs = self.snapshots.refs()
        try:
            return bool(refs) and bool(self.snapshots.ended(self.snapshots.load(refs[0])))
        except (NotFound, SnapshotCorrupt):
            # pruned just now, or damaged: workers will find what is good, and what it says
            return False

    def finish_for_script(self, epoch: Epoch) -> None:
        """A script without a session has ended well: commit that, since progress is what is
        committed. Snapshots that it made in its own way are not touched: the run ends with the
        newest of them, or else with an empty one of all ranks."""
        why = "the script exited 0"
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
