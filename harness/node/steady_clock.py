"""Wall-clock time that never jumps: read once when the process begins, and continued by a monotonic
clock.

Hours, bills and leases are counted by this clock: it does not change when the wall clock is set
while a process runs, by a person or by NTP. It goes on while the machine is suspended, where the
system supports that (Linux).
"""

from __future__ import annotations

import time


def _running_s() -> float:
    """Return the seconds since a fixed moment before the process began, including suspended time
    where the system supports it."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


_BEGAN_WALL_S = time.time() - _running_s()


def now() -> float:
    """Return seconds since 1970, by the wall clock as it was set when this process began."""
    return _BEGAN_WALL_S + _running_s()
