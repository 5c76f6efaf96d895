"""What a W&B server was told, beside what a run's record says."""

import contextlib
import threading

from harness.bucket.archive import read_facts
from harness.ledger.ledger import Ledger
from harness.look.trackers.committed_steps import committed
from harness.look.trackers.tracker_registry import RunInfo


def ledger_of(story, t):
    info = RunInfo.of(story.store)
    known = [s for s in read_facts(story.store) if s.t <= t]
    return Ledger.of(known, [r for r in committed(story.store, info, 1, 10**6)[0] if r.t <= t], t)


@contextlib.contextmanager
def states_of(server):
    """What W&B's page shows of the one run, looked at all the time."""
    seen, over = [], threading.Event()

    def look():
        while not over.wait(0.01):
            for run_id in list(server.runs):
                if seen[-1:] != [state := server.state(run_id)]:
                    seen.append(state)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def lines(run):
    """Without what depends on when it was sent."""
    return [
        {k: v for k, v in row.items() if k not in ("_runtime", "_wandb")} for row in run.history
    ]
