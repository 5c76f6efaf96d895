"""What `harness launch` says and leaves when a run has ended, or when it cannot lead on"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.text import Text

from harness.cli.common import DONE, ENDED_EARLY, FAILED, LEFT, book_of
from harness.core.world import BadInput, HarnessError
from storage.errors import StoreError
from storage.objects import ObjectStore
from storage.text import Console

if TYPE_CHECKING:
    from harness.clouds.local import LocalCloud
    from harness.clouds.skypilot import SkyPilotCloud
    from harness.controller.recovery import RunOutcome


def say_how_it_ended(outcome: RunOutcome, store: ObjectStore, console: Console, url: str) -> int:
    """The exit status."""
    if outcome.unproven:
        words = (
            f"{outcome.reason}. This cloud never showed their machines. Look whether they are "
            f"gone, from where they were launched: harness down {url}"
        )
        console.print(f"\n{words}", style="bold red", highlight=False, soft_wrap=True)
    if outcome.outcome == "done":
        return FAILED if outcome.unproven else DONE
    console.print(
        Text.assemble("\n", (outcome.outcome, "bold red"), f": {outcome.reason}"), soft_wrap=True
    )
    _print_tail(store, console)
    console.print(
        f"The run stands at step {outcome.committed_step}; the same command resumes it from there.",
        highlight=False,
    )
    return FAILED if outcome.outcome == "failed" else ENDED_EARLY


def give_up(
    error: Exception,
    store: ObjectStore,
    cloud: LocalCloud | SkyPilotCloud | None,
    console: Console,
    url: str,
) -> int:
    """This controller cannot lead on. Nodes need none in order to train, so they are left as they
    are. A mistake in the input that is found before there are any ends everything: then it raises
    `error`."""
    if cloud is not None:
        if isinstance(error, BadInput) and _nothing_runs(store, cloud):
            cloud.shutdown()
            raise error
        cloud.close()
    said = f"""harness launch: {error}
This controller cannot lead the run on. It has touched no node: nodes go on training and commit
snapshots without it.
  lead them again   the same command, once the cause is mended (exit status {LEFT}: a supervisor may
                    try again)
  watch them        harness status {url}
  end them          harness down {url}
Until then no lost node is replaced. Nodes keep --budget-usd and --max-hours by themselves: they
drain when these are reached, or without a controller for longer than --leaderless-minutes, or
`harness run --leaderless-hours` (24)."""
    console.print(said, markup=False, highlight=False, soft_wrap=True)
    return LEFT


def _nothing_runs(store: ObjectStore, cloud: LocalCloud | SkyPilotCloud) -> bool:
    """Is it sure that no node of this run is there? Then a mistake in the input has cost
    nothing yet."""
    from harness.bucket.beats import Beats

    try:
        book = book_of(store)
        if (
            book.unread
            or any(n.alive for n in cloud.nodes())
            or any(n.up_s is not None for n in book.open.values())
        ):
            return False
        return not any(
            b.attempt in book.open and not b.gone for b in Beats(store, time.monotonic).look()
        )
    except (HarnessError, StoreError):
        return False


def _print_tail(store: ObjectStore, console: Console) -> None:
    """The last words of the script that failed."""
    from harness.bucket.journal import read_facts
    from harness.core.facts import WorkerFailed

    failures = [s.fact for s in read_facts(store, steps=False) if isinstance(s.fact, WorkerFailed)]
    if failures:
        last = failures[-1]
        console.print(
            f"\nLast words of rank {last.rank} on {last.member} ({last.error}):",
            style="bold",
            highlight=False,
        )
        console.print(last.log_tail, markup=False, highlight=False, soft_wrap=True)
