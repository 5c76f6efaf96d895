"""What a script without a session is told when the world changes: a signal, on every node of it.

A session hears of changes through marks, and its ranks agree. A script that has none would die with
the connections of a node that goes, and never make room for one that comes. So a node whose workers
have none tells the others, and each of them sends the signal that was agreed upon
(`harness run --notify-signal`). The script saves and ends, with whatever status; who has not ended
within a bound is ended. Runs in the node agent.
"""

from __future__ import annotations

from harness.agent.ends import CHANGING
from harness.agent.host import WorkerPool
from harness.agent.memory import Stay
from harness.agent.rendezvous import Rendezvous
from harness.node.marks import Want


def tell_script(
    workers: WorkerPool, rendezvous: Rendezvous, stay: Stay, want: Want, signal: str, now: float
) -> None:
    """Once in an epoch. `want`: RESIZE or STOP; `signal`: its name; "": none is agreed upon, and
    nobody is told (a session may be on its way)."""
    if not signal or workers.attached() or stay.told_s is not None:
        return
    if rendezvous.me.end != CHANGING:
        rendezvous.mention(end=CHANGING)
    workers.signal(signal)
    stay.told, stay.told_s = want, now


def why_overdue(stay: Stay, bound_s: float, now: float) -> str:
    """Why the workers are ended now although nobody has failed; "": they are not."""
    if stay.told_s is None or now - stay.told_s <= bound_s:
        return ""
    return f"its script was told {bound_s:.0f} s ago that the world changes, and has not ended"
