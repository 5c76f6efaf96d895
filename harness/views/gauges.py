"""A run's numbers for Prometheus, as its controller exposes them.

Knows the bucket: it follows the facts by itself, so a scrape disturbs nobody. What counts and costs
is the ledger's, as in `harness report`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from harness.bucket.journal import Follower
from harness.core import facts as f
from harness.core.exposition import COUNTER, Exposed, exposition
from harness.core.world import HarnessError
from harness.views.alerts import AlertWatch
from harness.views.committed import Lineage
from harness.views.operations import Operations
from harness.views.plugins import RunInfo
from harness.views.watching import LiveState
from storage.errors import NotFound, StoreError
from storage.objects import ObjectStore

LOOK_S = 2.0  # between two looks into the bucket, however often it is scraped
LEDGER_S = 30.0  # between two ledgers, which cost more in a long run
STATES = (
    "waiting for capacity",
    "waiting for a node",
    "starting",
    "forming a world",
    "training",
    "re-forming",
    "done",
    "finished",
    "stopped",
    "failed",
)
# of the ledger: (what it is called there, name, help, kind)
OF_LEDGER = (
    ("cost/usd_total", "harness_usd_total", "Dollars billed so far.", COUNTER),
    ("cost/usd_per_h", "harness_usd_per_hour", "Dollars an hour of the nodes that are up.", ""),
    ("cost/saved_usd", "harness_saved_usd", "Dollars saved against on-demand nodes.", ""),
    ("goodput/fraction", "harness_goodput_ratio", "Billed time that went into kept steps.", ""),
    ("spot/notices", "harness_notices_total", "Notices so far.", COUNTER),
    ("spot/losses", "harness_losses_total", "Nodes lost so far.", COUNTER),
    ("spot/steps_lost", "harness_steps_lost_total", "Steps that were done again.", COUNTER),
    ("spot/recoveries", "harness_recoveries_total", "Times that training went on.", COUNTER),
    (
        "ckpt/stall_total_s",
        "harness_snapshot_stall_seconds_total",
        "Seconds that training stood still for snapshots.",
        COUNTER,
    ),
)


@dataclass
class RunGauges:
    """`text` is what a scrape gets; from any thread."""

    store: ObjectStore
    now: Callable[[], float] = time.time
    watch: AlertWatch = field(default_factory=AlertWatch)

    def __post_init__(self) -> None:
        self._follower, self._lock = Follower(self.store), threading.Lock()
        self._operations: Operations | None = None
        self._ledger: dict[str, float] = {}
        self._looked_s = self._counted_s = 0.0
        self._answered = False

    def text(self) -> str:
        """Of the last moment that the bucket answered."""
        with self._lock:
            now = self.now()
            if now - self._looked_s >= LOOK_S:
                self._look(now)
            live = self.watch.run.live
            return exposition([*self._of_run(live, now), *self._of_ledger(), self._alerts(now)])

    def _look(self, now: float) -> None:
        answered = True
        try:
            new = self._follower.poll()
            self.watch.see(s for s in new if not isinstance(s.fact, f.Unreadable))
            self.watch.look(now)
            if now - self._counted_s >= LEDGER_S:
                self._count(now)
                self._counted_s = now
        except (StoreError, HarnessError):
            answered = False  # `harness_bucket_up` says so
        self._looked_s, self._answered = now, answered

    def _count(self, now: float) -> None:
        if self._operations is None:
            try:
                info = RunInfo.of(self.store)
            except NotFound:
                return  # nobody has trained yet
            self._operations = Operations(self.store, Lineage(self.store, info))
        self._operations.poll()
        self._ledger = self._operations.values(now)

    def _of_run(self, live: LiveState, now: float) -> list[Exposed]:
        committed, taken_s = live.committed
        last = live.last_step
        age_s = None if taken_s is None or live.over else max(0.0, now - taken_s)
        loss, step_s = (last.loss, last.seconds) if last else (None, None)
        of = Exposed.of
        return [
            of("harness_bucket_up", "The bucket answered the last look.", float(self._answered)),
            Exposed.one_of(
                "harness_run_state", "The run's state.", "state", STATES, live.run_state
            ),
            of("harness_step", "The newest step that was done.", live.step),
            of("harness_committed_step", "The newest step that a snapshot holds.", committed),
            of("harness_total_steps", "Steps of the whole run.", live.total or None),
            of("harness_epoch", "The newest world's number.", live.epoch),
            of("harness_world_ranks", "Ranks that train now.", live.world),
            of("harness_world_members", "Nodes that train now.", len(live.training())),
            of("harness_nodes_up", "Nodes that are up.", self.watch.run.nodes_up),
            of("harness_snapshot_age_seconds", "Age of the newest snapshot.", age_s),
            of("harness_loss", "Loss of the newest step.", loss),
            of("harness_step_seconds", "Duration of the newest step.", step_s),
            self._nodes(live, now),
        ]

    def _nodes(self, live: LiveState, now: float) -> Exposed:
        """One series a node; without the seconds that a notice leaves, which would be many."""
        samples = []
        for node in live.shown_nodes(now):
            state = live.node_state(node, now)[1].partition(",")[0]
            labels = (("node", node.name), ("place", node.offer), ("state", state))
            samples.append((labels, 1.0))
        return Exposed("harness_node_state", "What each node does.", tuple(samples))

    def _of_ledger(self) -> list[Exposed]:
        return [
            Exposed.of(name, help, self._ledger.get(key), kind or "gauge")
            for key, name, help, kind in OF_LEDGER
        ]

    def _alerts(self, now: float) -> Exposed:
        samples = tuple(
            ((("rule", rule), ("severity", severity), ("subject", subject)), 1.0)
            for (rule, subject), severity in self.watch.firing(now).items()
        )
        return Exposed("harness_alerts_firing", "What is wrong now (docs/RUNBOOK.md).", samples)
