"""Worlds that move from place to place, as facts tell it."""

from harness.core.facts import (
    AgentStarted,
    AttemptIntended,
    EpochStarted,
    SessionStarted,
    SnapshotCommitted,
    Stamped,
)

GB = 10**9


def facts(*places):
    """A world of two nodes in each place in turn; every one makes a snapshot of 10 GB, and the
    next resumes from it."""
    found, attempt = [], 0
    for epoch, place in enumerate(places, 1):
        members = []
        for _ in range(2):
            attempt += 1
            members.append(f"m{attempt}")
            found.append(AttemptIntended(attempt, {"place": place, "name": f"{place}/x"}, ""))
            found.append(AgentStarted(f"m{attempt}", attempt, "h", 1, "", 1))
        found.append(EpochStarted(epoch, tuple(members), 2, "start"))
        step = 10 * (epoch - 1)
        found.append(
            SessionStarted(epoch, 2, step, epoch - 1, 100, 8, 2, (2, 2), "fast", "ddp", "cpu", 1.0)
        )
        found.append(SnapshotCommitted(step + 10, epoch, 10 * GB, 0.0, 1.0, "interval", 0.0))
    return [Stamped(float(i), "w", f) for i, f in enumerate(found)]
