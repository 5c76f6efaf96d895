"""The settings of a run, and the limits that hold whatever the policy decides.

Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from harness.bucket.controller_lease import AttemptPrice, RunLimits
from harness.bucket.layout import LIMITS_KEY
from harness.core.world import BadInput, Node, View, cloud_of
from harness.ledger.attempts import AttemptHistory
from storage.stores.objects import ObjectStore

TINY, MOST = 1e-9, 1e12  # any setting beyond these is a mistake


@dataclass(frozen=True)
class RunSpec:
    """The number of nodes of a run, and its limits. `None` means no limit."""

    min_nodes: int = 1
    max_nodes: int = 1
    poll_s: float = 2.0
    budget_usd: float | None = None
    max_hours: float | None = None
    max_hours_without_progress: float = 24.0  # no capacity, or nodes that commit nothing
    # for each of max_nodes; attempts that found no capacity do not count
    max_attempts_without_progress: int = 20
    max_failures_at_one_step: int = 3  # in a row: then the script itself is at fault
    # in a row, with exit code 0 and without progress: the script thinks that it is done
    max_idle_ends: int = 3
    max_early_ends: int = 10  # with exit code 0 before the last step, though with progress
    # outage of cloud or bucket before the controller gives up (nodes go on; launch it again)
    max_outage_s: float = 3600.0
    # the same for a bucket that refuses: credentials may be renewed, or a policy changed meanwhile
    max_refused_s: float = 300.0
    # an intended node that the cloud does not show after this time was never launched
    lost_after_s: float = 20.0
    block_limit_s: float = 60.0  # upper limit of the backoff of an offer without capacity
    exit_grace_s: float = 120.0  # for nodes to drain and leave when the run ends
    terminate_timeout_s: float = 600.0  # for the cloud to terminate those that did not leave
    # duration of a launch that the budget assumes until some were timed (ledger/attempts.py); a
    # drain is assumed to take exit_grace_s
    launch_s: float = 600.0
    terminate_s: float = 300.0  # ... and the duration of a termination by the cloud
    # a node is billed for this long after its agent left without a controller; then the cloud ends
    # it
    alone_s: float = 0.0
    leaderless_s: float | None = None  # nodes drain after so long without a controller; None: each
    # uses its own setting (`harness run --set leaderless_hours`)

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise BadInput(
                f"wanted 1 <= min_nodes <= max_nodes, found {self.min_nodes} and {self.max_nodes}"
            )
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            least = 0 if each.name not in ("poll_s", "budget_usd", "max_hours") else TINY
            if value is not None and not least <= value <= MOST:
                raise BadInput(
                    f"{each.name}: wanted a number from {least:g} to {MOST:g}, found {value!r}"
                )


def broken(run: RunSpec, book: AttemptHistory, view: View) -> str | None:
    """Return which limit of the run is exceeded, in words; None if none is."""
    if book.streaks.failures >= run.max_failures_at_one_step:
        return (
            f"the nodes' command failed {book.streaks.failures} times in a row after step "
            f"{book.step}, by itself and not by a signal; see the nodes' logs"
        )
    if book.streaks.refused >= run.max_failures_at_one_step and not book.open:
        return (
            f"{book.streaks.refused} nodes in a row were refused: they speak another protocol "
            "than the run; launch it with the version of this code that wrote it last, or a "
            "newer one"
        )
    if book.streaks.idle >= run.max_idle_ends or book.streaks.early >= run.max_early_ends:
        times = max(book.streaks.early, book.streaks.idle)
        return (
            f"the script ended with exit code 0 before its last step {times} times in a row, "
            f"the last time after step {book.step}, and made no final snapshot; call "
            "run.finish() where it is done, or let run.steps() come to its end"
        )
    if book.streaks.fruitless >= run.max_attempts_without_progress * run.max_nodes:
        last = max(book.ended.values(), key=lambda e: (e.gone_s, e.attempt))
        why = last.reason if last.reason in ("", last.end) else f"{last.end}: {last.reason}"
        return (
            f"{book.streaks.fruitless} attempts in a row ended without a new snapshot after "
            f"step {book.step} (the last: {why or last.end})"
        )
    if (
        view.now_s - max(view.last_progress_s, view.started_s)
        >= run.max_hours_without_progress * 3600
    ):
        what = (
            "though nodes are up"
            if any(n.up_s is not None for n in view.alive)
            else "for lack of capacity"
        )
        return (
            f"no new snapshot after step {book.step} for {run.max_hours_without_progress:g} "
            f"h, {what}"
        )
    return None


# The limits that a controller leaves to its nodes in case it dies, with the cost so far and the
# price of each attempt.

WRITE_EVERY_S = 30.0  # while nothing else changes
# a node that comes up waits for so long before it decides that there is no controller
# (`agent/run_orders.py`)
STARTING_S = 120.0


@dataclass
class LimitsWriter:
    """A writer that keeps `control/limits.json` up to date. For a run without limits it only
    replaces the limits of an earlier launch by none."""

    store: ObjectStore
    run: RunSpec
    term: int
    version: int = 0
    _written_s: float = -math.inf
    _open: frozenset[tuple[int, bool]] = frozenset()  # attempts, and whether they were up

    @property
    def done(self) -> bool:
        """True if nothing is left to write, since the run has no limits."""
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
        """Write the limits if it is due: `WRITE_EVERY_S` has passed, or nodes have come or gone.
        `times`: by cloud, as `View.times`. Raises StoreError."""
        run, nodes = self.run, list(nodes)
        if self._unlimited:
            # an earlier launch may have left limits
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
