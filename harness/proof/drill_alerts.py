"""What a drill's fault must fire: alerts that reach a webhook on loopback, each exactly once.

The drill's own process evaluates them, as a controller would.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.proof.receiver import AlertReceiver
from harness.views.alerting import Alerting
from harness.views.sinks import sink_of
from storage.opening import open_store

LOOK_S = 0.5
JOIN_S = 30.0
MIDDLE = ("step", "staging", "upload", "commit")  # phases of a world that trains
# by fault: what must be fired wherever it happens, and what if a world trains; one of A|B
ANYWHERE = {
    "agent-term": "notice-seen",
    "notice": "notice-seen",
    "cancelled-notice": "notice-seen",
    "notice-without-loss": "notice-seen",
}
TRAINING = {
    "worker-kill": "worker-failed",
    "worker-stop": "worker-hung",
    "agent-kill": "node-lost",
    "agent-stop": "node-lost",
    "node-kill": "node-lost",
    "node-stop": "node-lost",
    "both-killed": "node-lost",
    "cut": "worker-hung|node-lost",  # whichever is noticed first
    "worker-kill-and-outage": "worker-failed",
    "node-kill-and-worker-stop": "node-lost",
}


def expected(fault: str, phase: str) -> list[set[str]]:
    """Of each of these sets of rules one must have fired."""
    found = [ANYWHERE.get(fault, ""), TRAINING.get(fault, "") if phase in MIDDLE else ""]
    return [set(names.split("|")) for names in found if names]


@dataclass
class Listened:
    """One cell's alerts, while it goes on."""

    receiver: AlertReceiver
    alerting: Alerting
    thread: threading.Thread

    def end(self) -> None:
        """After one more look."""
        self.alerting.stop.set()
        self.thread.join(JOIN_S)

    def judge(self, fault: str, phase: str) -> None:
        """Raises AssertionError."""
        self.end()
        times = Counter(str(body["key"]) for body in self.receiver.got)
        twice = [b["rule"] for b in self.receiver.got if times[str(b["key"])] > 1]
        if twice:
            raise AssertionError(f"alerts came more than once: {', '.join(twice)}")
        fired = [alert.id for alert in self.alerting.log.read()]
        if Counter(fired) != Counter(str(body["id"]) for body in self.receiver.got):
            raise AssertionError(f"fired: {len(fired)} alerts, received: {len(times)}")
        rules = set(self.receiver.rules())
        for names in expected(fault, phase):
            if not names & rules:
                wanted = " or ".join(sorted(names))
                raise AssertionError(f"wanted the alert {wanted}, found {sorted(rules)}")


@contextmanager
def listening(run: Path) -> Iterator[Listened]:
    """Evaluate a run's alerts as it goes on, and tell them to a webhook."""
    with AlertReceiver() as receiver:
        alerting = Alerting(open_store(str(run)), [sink_of(receiver.url)], leads=True)
        thread = threading.Thread(target=alerting.run, args=(LOOK_S,), daemon=True)
        thread.start()
        listened = Listened(receiver, alerting, thread)
        try:
            yield listened
        finally:
            listened.end()
