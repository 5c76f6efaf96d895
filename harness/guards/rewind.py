"""Rewinds: when the loss spikes, a run goes back to an older snapshot and leaves out the updates of
the steps up to the spike. Runs in the worker.

Rank 0 writes an order into the bucket (`RewindOrder` of `storage/snapshots/restore.py`), and all
ranks leave as they do when the world changes. What follows is an ordinary recovery: a restore
passes over the snapshots that the order names. When the steps that it leaves out come again, their
updates are skipped, so all later steps keep their samples and any world does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from harness.core.facts import GuardTripped
from harness.core.world import BadInput
from harness.guards.guard_rules import LEFT_OUT, Guards
from storage.errors import StoreUnavailable
from storage.snapshots.restore import RewindOrder, left_behind, order_rewind, rewinds
from storage.snapshots.retention import lineage
from storage.snapshots.snapshots import Snapshots

if TYPE_CHECKING:
    from harness.worker.step import Work

WENT_BACK = "went back to step"  # of GuardTripped, with the number


LEASE = "rewind"  # on the snapshot that the run goes back to
LOOKS = 3  # for one that is not being pruned


def snapshot_before(snapshots: Snapshots, step: int, orders: Sequence[RewindOrder]) -> int:
    """Return the step of the newest usable snapshot that is not after `step`; else that of the
    oldest one; 0: there is none. A prune that is under way, or follows a commit that is, spares it:
    its lease lasts until a pruner takes it for a dead reader's. Raises StoreError."""
    for _ in range(LOOKS):
        committed, doomed = snapshots.manifests()
        usable = committed - doomed - snapshots.quarantined()
        line = lineage(usable - left_behind(usable, orders))
        found = next((ref for ref in line if ref.step <= step), min(line, default=None))
        if found is None:
            return 0
        if snapshots.begin_reading(found, LEASE):
            return found.step
    raise StoreUnavailable(
        f"{snapshots.store.url}: wanted a snapshot to go back to, found {LOOKS} that were pruned "
        "meanwhile: the next try looks again"
    )


class Rewinds:
    """The rewinds of one run, as one rank of a session knows them: those that earlier generations
    (the code's `epoch`) have ordered, and the next one."""

    def __init__(self, guards: Guards):
        self._guards = guards
        self._orders: list[RewindOrder] | None = None  # None: not read yet
        self._warmth = 1.0  # factor on the learning rate of the present step
        self._hooks: list[Any] = []

    def why_left_out(self, work: Work, number: int) -> str:
        """Return why a rewind leaves out this step; "": none does. Raises StoreError."""
        if self._orders is None:
            run = work.run
            found = work.peers.agree(lambda: rewinds(run.store)) if run.url else []
            self._orders = [order for order in found if order.why]
        self._warmth = self._warmth_at(number)
        return next(
            (
                f"{LEFT_OUT}, since {order.why} and the run went back to step {order.step}"
                for order in self._orders
                if order.first <= number <= order.last
            ),
            "",
        )

    def _warmth_at(self, number: int) -> float:
        """Return the factor on the learning rate: it rises for some steps after those left out."""
        ends = (order.last for order in self._orders or ())
        since = min((number - last for last in ends if number > last), default=0)
        steps = self._guards.rewarm_steps
        return since / (steps + 1) if 0 < since <= steps else 1.0

    def order(self, work: Work, number: int, loss: float, usual: float) -> None:
        """Order the run back, since its loss spikes in this step. All ranks call it, and leave
        afterwards. Raises BadInput if it went back too often, or nobody keeps snapshots."""
        run, orders = work.run, self._orders or []
        spike = f"the loss of step {number} was {loss:.4g}, where {usual:.4g} is usual"
        if not run.url:
            raise BadInput(f"{spike}: wanted a run with a bucket to go back in; give --run URL")
        if len(orders) >= self._guards.most_rewinds:
            run.close()
            raise BadInput(
                f"{spike}, and the run went back {len(orders)} times before, wanted at most "
                f"{self._guards.most_rewinds} (guards: most_rewinds). Look at the samples "
                "(`harness runs bisect`), the learning rate and the precision, then launch again"
            )
        first = max(1, number - self._guards.rewind_steps + 1)

        def written() -> RewindOrder:
            before = max(first - 1, run.phase.begins)
            step = snapshot_before(run.snapshots, before, orders)
            made = RewindOrder(
                run.epoch + 1, step, number - 1, spike, max(first, step + 1), number
            )
            order_rewind(run.store, made)
            return made

        made: RewindOrder = work.peers.agree(written)
        run.fact(GuardTripped(number, run.epoch, f"{WENT_BACK} {made.step}", loss))
        work.peers.print(
            f"harness: {spike}: going back to step {made.step}; the updates of steps {made.first} "
            f"to {made.last} will be left out"
        )

    # ---- the learning rate after a rewind --------------------------------------------------------
    def rewarm(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let these optimizers step with a lower learning rate for some steps after a rewind."""
        while self._hooks:  # an earlier training's: this one may have the same optimizer
            self._hooks.pop().remove()
        if not self._guards.rewarm_steps:
            return
        for optimizer in optimizers:
            kept: list[Any] = []
            self._hooks += [
                optimizer.register_step_pre_hook(
                    lambda one, *_, kept=kept: self._cool(one, kept)
                ),
                optimizer.register_step_post_hook(lambda one, *_, kept=kept: _restored(one, kept)),
            ]

    def _cool(self, optimizer: torch.optim.Optimizer, kept: list[Any]) -> None:
        kept[:] = [group["lr"] for group in optimizer.param_groups]
        if self._warmth != 1.0:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self._warmth


def _restored(optimizer: torch.optim.Optimizer, kept: list[Any]) -> None:
    for group, lr in zip(optimizer.param_groups, kept, strict=True):
        group["lr"] = lr
