"""Going on from a state that nodes have kept ahead of a loss (`kept_ahead.py`), which is read as a
snapshot is: each rank its part, from this node's memory and that of others. Runs in the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from harness.bucket.layout import read_epoch
from harness.core.world import HarnessError
from harness.uploader.ahead_state import AheadState, lost_share
from harness.uploader.node_tiers import tiers_for
from harness.worker.process_group import Peers
from harness.worker.resuming.hand_over import chained
from harness.worker.resuming.kept_state import KeptState
from harness.worker.run_context import Run
from storage.canonical_json import BadObject
from storage.errors import StoreError
from storage.snapshots.manifest import Manifest, Ref
from storage.snapshots.restore import RewindOrder, left_behind
from storage.snapshots.snapshots import Snapshots
from storage.tiers.tiers import Tiered

if TYPE_CHECKING:
    from harness.worker.snapshotter import StagingBuffers

StateInMemory = KeptState | AheadState


@dataclass(frozen=True)
class ChosenAhead:
    """The state that nodes keep and that the world may go on from. `holder`: a rank whose node has
    the list of its shares; `step`: 0 if there is none."""

    step: int = 0
    holder: int = 0


def choose_ahead(
    heads: Sequence[AheadState | None],
    run: str,
    phase: int,
    newest: str,
    orders: Sequence[RewindOrder],
) -> ChosenAhead:
    """Choose from the heads of what the ranks' nodes keep, in rank order: the newest state that
    comes after the newest snapshot. `newest`, `orders`: as in `hand_over.choose`."""
    least = Ref.parse(newest).step if newest else 0
    found = [
        (head.ref, -rank)
        for rank, head in enumerate(heads)
        if head is not None
        and (head.run, head.phase) == (run, phase)
        and newest in head.behind
        and head.step > least
        and not left_behind([head.ref], orders)
    ]
    if not found:
        return ChosenAhead()
    ref, rank = max(found, key=lambda one: (one[0].step, *one))
    return ChosenAhead(ref.step, -rank)


class AheadStates:
    """The state that the nodes keep, as this rank's uploader tells it. `tell`: warns, on rank 0."""

    def __init__(self, peers: Peers, run: Run, hold: StagingBuffers, tell: Callable[[str], None]):
        self._peers, self._run, self._hold, self._tell = peers, run, hold, tell
        self._mine: AheadState | None = None

    def head(self) -> AheadState | None:
        """Return the head of what this node keeps, on its first rank; None: nothing."""
        first = self._run.epoch > 1 and self._peers.local_rank == 0
        text = self._hold.courier.ahead() if first else ""
        self._mine = AheadState.decode(text) if text else None
        return self._mine and self._mine.head()

    def take(
        self, chosen: ChosenAhead, after: int, load: Callable[[Manifest, Snapshots], None]
    ) -> AheadState | None:
        """Load the chosen state on all ranks, which call this together, and return it; None: it
        cannot be used. `after`, `load`: as in `Survivors.take`. Raises HarnessError if some rank
        could not load it; then no node keeps it any more."""
        peers, store = self._peers, self._run.store
        box = [self._mine if peers.rank == chosen.holder else None]
        if peers.control is not None:
            dist.broadcast_object_list(box, src=chosen.holder, group=peers.control)
        state = box[0]
        assert state is not None
        held = self._hold.courier.held(state.ref)
        if self._fails(self._unusable(state, after, held)):
            return None
        why = ""
        try:
            manifest = state.manifest()
            near = Tiered(store, manifest, tiers_for(manifest, held, store))
            load(manifest, Snapshots(near))
        except (StoreError, ValueError, KeyError) as e:
            why = str(e)
        if self._fails(why):  # other ranks have loaded it, so this world cannot begin elsewhere
            if peers.local_rank == 0:
                self._hold.courier.set_ahead("")
            raise HarnessError("a state that nodes kept was bad: the next world begins without it")
        return replace(state, told=())

    def _unusable(self, state: AheadState, after: int, held: dict[str, Any]) -> str:
        """Return why this rank cannot use the state; "": it can, as far as it knows."""
        try:
            chained(state.steps(), after, "")  # raises for a gap
            world = read_epoch(self._run.store, state.epoch)
        except (StoreError, BadObject, ValueError) as e:
            return str(e)
        return lost_share(world, held.get("members", ()))

    def _fails(self, why: str) -> bool:
        found = [said for said in self._peers.gather(why) if said]
        if found:
            self._tell(f"the state that nodes keep in memory is not used: {found[0]}")
        return bool(found)
