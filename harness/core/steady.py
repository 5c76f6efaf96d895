"""Wall-clock time that never jumps: read once when the process begins, and carried on by a clock
that nobody sets.

Whoever counts hours, bills and leases goes by this one: a wall clock that is set anew while a
process runs, by a person or by NTP, changes nothing for it. It goes on while the machine is
suspended, where the system can tell (Linux).
"""

from __future__ import annotations

import time


def _running_s() -> float:
    """Since some moment before the process began, suspended time included where it can be."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


_BEGAN_WALL_S = time.time() - _running_s()


def now() -> float:
    """Seconds since 1970, by the wall clock as it was when this process began."""
    return _BEGAN_WALL_S + _running_s()
