"""What bounds a run: its settings, and the limits that hold whatever the policy says.

Pure.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from harness.controller.book import Book
from harness.core.world import BadInput, View

TINY, MOST = 1e-9, 1e12  # of any setting of a run: beyond these it is a mistake


@dataclass(frozen=True)
class RunSpec:
    """How many nodes, and a limit on everything."""

    min_nodes: int = 1
    max_nodes: int = 1
    poll_s: float = 2.0
    budget_usd: float | None = None
    max_hours: float | None = None
    max_hours_without_progress: float = 24.0  # without capacity, or with nodes that commit nothing
    # for each of max_nodes; refusals by the cloud do not count
    max_attempts_without_progress: int = 20
    max_failures_at_one_step: int = 3  # one after the other: the script itself is at fault
    # with exit code 0 and without progress, one after the other: the script thinks that it is done
    max_idle_ends: int = 3
    max_early_ends: int = 10  # with exit code 0, though each of them got a little further
    # of cloud or bucket, before the controller gives up (nodes go on; launch it again)
    max_outage_s: float = 3600.0
    # the same of a bucket that answers "no": credentials that are renewed, a policy that is changed
    max_refused_s: float = 300.0
    # an intended node that the cloud has not shown by then was never launched
    lost_after_s: float = 20.0
    block_limit_s: float = 60.0  # the longest that an offer without capacity is left alone
    exit_grace_s: float = 120.0  # for nodes to drain and leave by themselves when the run ends
    terminate_timeout_s: float = 600.0  # for them to be surely gone
    # what the budget assumes of a launch until some were timed (durations.py); of a drain it
    # assumes exit_grace_s
    launch_s: float = 600.0
    terminate_s: float = 300.0  # ... and of the cloud's part of an end
    # so long a node is billed after its agent has left while nobody leads: the cloud ends it then
    alone_s: float = 0.0
    leaderless_s: float | None = None  # nodes drain when nobody has led for so long; None: as
    # each of them was told (`harness run --leaderless-hours`)

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


def broken(run: RunSpec, book: Book, view: View) -> str | None:
    """The limits that hold whatever the policy says."""
    if book.streaks.failures >= run.max_failures_at_one_step:
        return (
            f"the script failed {book.streaks.failures} times in a row after step {book.step}; "
            "see the workers' logs"
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
