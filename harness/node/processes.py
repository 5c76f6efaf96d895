"""What processes of one machine agree on: who dies with whom, names, signals.  No torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
# loaded here: a freshly forked child must not import or allocate much
LIBC = ctypes.CDLL(None, use_errno=True)
MESSAGE_NBYTES = 1 << 20
DUMP_SIGNAL = signal.SIGUSR2  # the agent asks a hung worker where it hangs


def die_with_parent(parent: int | None = None) -> None:
    """Linux: be killed when the parent dies, however it dies. Elsewhere there is no such call;
    pipes closing must do.

    `parent`: its id, from before we were forked; it may have died before we could ask to die with
    it.
    """
    parent = os.getppid() if parent is None else parent
    with contextlib.suppress(OSError, AttributeError):
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """What `top` and `ps -o comm` show."""
    with contextlib.suppress(OSError, AttributeError):
        LIBC.prctl(PR_SET_NAME, name.encode()[:15])
