"""For tests: a script's end by SIGKILL, once a snapshot is there; or by a notice, at a step."""

import os
import signal
import time
from pathlib import Path

from support.worlds import newest, until

seen = set()


def die_at(where, once=None):
    """If DIE_AT is "WHERE:STEP": after that step's snapshot was committed. `once`: a file; only the
    process that makes it dies. Before that, where `where` is a step, the snapshot of each DIE_EVERY
    steps is waited for: none is left out because the one before it is still being written."""
    place, _, step = os.environ.get("DIE_AT", "").partition(":")
    if not place or (once and os.path.exists(once)):
        return
    if where.isdecimal() and int(where) <= int(place):
        every = int(os.environ.get("DIE_EVERY", "3"))
        wait_for((int(where) - 1) // every * every)
    if place == where:
        wait_for(int(step))
        if once:
            try:
                open(once, "x").close()
            except FileExistsError:
                return
        os.kill(os.getpid(), signal.SIGKILL)


def lose_one(where, once):
    """If LOSE is "WHERE:RANK", and this is the worker of that rank. `once`: a file; if it is there,
    nobody dies any more."""
    place, _, rank = os.environ.get("LOSE", "").partition(":")
    name = Path("/proc/self/comm").read_text().strip()
    if place == where and name == f"rank-{rank}" and not os.path.exists(once):
        Path(once).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for(step):
    until(lambda: step <= getattr(newest(os.environ["HARNESS_RUN"]), "step", 0), f"snapshot {step}")
    if step not in seen:  # it is in the bucket; the session hears of that a moment later
        seen.add(step)
        time.sleep(0.5)


def wait_for_notice(where):
    """If NOTICE_AT says so: until the agent has told that the node is asked to leave."""
    if os.environ.get("NOTICE_AT") == where:
        until(lambda: os.path.exists(os.environ["HARNESS_MARK"]))
