"""What a controller leaves to the nodes of its run in case that it dies: limits, what is spent, and
what each attempt costs.

Pure: knows a store's interface. Agents obey it by `agent/leaderless.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from harness.bucket.layout import LIMITS_KEY
from harness.bucket.limits import AttemptPrice, RunLimits
from harness.controller.bounds import RunSpec
from harness.core.world import Node, cloud_of
from storage.objects import ObjectStore

WRITE_EVERY_S = 30.0  # while nothing else changes
# a node that comes up looks for so long before it believes that nobody leads
# (`agent/leaderless.py`)
STARTING_S = 120.0


@dataclass
class LimitsWriter:
    """Keeps `control/limits.json` up to date; of a run without limits only that it has none, where
    an earlier launch had some."""

    store: ObjectStore
    run: RunSpec
    term: int
    version: int = 0
    _written_s: float = -math.inf
    _open: frozenset[tuple[int, bool]] = frozenset()  # attempts, and whether they were up

    @property
    def done(self) -> bool:
        """Is there nothing to tell any more, since the run has no limits?"""
        return self._unlimited and self.version > 0

    @property
    def _unlimited(self) -> bool:
        limits = self.run.budget_usd, self.run.max_hours, self.run.leaderless_s
        return all(limit is None for limit in limits)

    def tell(
        self,
        now_s: float,
        started_s: float,
        spent_usd: Callable[[], float],
        nodes: Iterable[Node],
        times: Mapping[str, tuple[float, float]],
    ) -> None:
        """If it is due: since the last writing a while has passed, or nodes have come or gone.
        `times`: by cloud, as `View.times`. Raises StoreError."""
        run, nodes = self.run, list(nodes)
        if self._unlimited:
            # an earlier launch may have left some
            if not self.version and self.store.list(LIMITS_KEY):
                none = RunLimits(self.term, 1, WRITE_EVERY_S, run.launch_s)
                self.store.put(LIMITS_KEY, none.encode())
            self.version = 1
            return
        there = frozenset((node.attempt, node.up_s is not None) for node in nodes)
        if there == self._open and now_s - self._written_s < WRITE_EVERY_S:
            return
        usual = (
            max((launch_s for launch_s, _ in times.values()), default=run.launch_s),
            max((leave_s for _, leave_s in times.values()), default=run.exit_grace_s),
        )
        prices = []
        for node in sorted(nodes, key=lambda node: node.attempt):
            launch_s, leave_s = times.get(cloud_of(node.offer.name), usual)
            pending_s = max(launch_s, now_s - node.asked_s) + STARTING_S
            pending_s = 0.0 if node.up_s is not None else pending_s
            yet_s = pending_s + leave_s + run.alone_s
            prices.append(AttemptPrice(node.attempt, node.offer.usd_per_h, yet_s))
        self.version += 1
        limits = RunLimits(
            term=self.term,
            version=self.version,
            every_s=WRITE_EVERY_S,
            launch_s=usual[0],
            budget_usd=run.budget_usd,
            spent_usd=max(0.0, spent_usd()),
            left_s=(
                None
                if run.max_hours is None
                else max(0.0, run.max_hours * 3600 - max(0.0, now_s - started_s))
            ),
            leaderless_s=run.leaderless_s,
            attempts=tuple(prices),
        )
        self.store.put(LIMITS_KEY, limits.encode())
        self._written_s, self._open = now_s, there
