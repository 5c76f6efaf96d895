"""For tests: a script's end by SIGKILL, once a snapshot is there; or by a notice, at a step."""

import os
import signal

from worlds import newest, until


def die_at(where, once=None):
    """If DIE_AT is "WHERE:STEP": after that step's snapshot was committed. `once`: a file; only the
    process that makes it dies."""
    place, _, step = os.environ.get("DIE_AT", "").partition(":")
    if place == where and not (once and os.path.exists(once)):
        until(lambda: getattr(newest(os.environ["HARNESS_RUN"]), "step", 0) >= int(step))
        if once:
            try:
                open(once, "x").close()
            except FileExistsError:
                return
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_notice(where):
    """If NOTICE_AT says so: until the agent has told that the node is asked to leave."""
    if os.environ.get("NOTICE_AT") == where:
        until(lambda: os.path.exists(os.environ["HARNESS_MARK"]))
