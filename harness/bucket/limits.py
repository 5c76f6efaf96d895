"""What a run may still cost, as its nodes know it: limits that they keep when nobody leads.

Pure: knows a store's interface. The controller writes them (`controller/allowance.py`), agents obey
them (`agent/leaderless.py`).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from harness.bucket.layout import LIMITS_KEY
from harness.core.values import Amount, BadObject, Natural, decoded, stamped
from storage.errors import NotFound
from storage.objects import ObjectStore


@dataclass(frozen=True)
class AttemptPrice:
    """What an open attempt costs. `yet_s`: for so long it is billed if it is to leave at once."""

    attempt: Natural
    usd_per_h: Amount
    yet_s: Amount


@dataclass(frozen=True)
class RunLimits:
    """What a run may still cost, and how long it may still go on, as of its writing. Its nodes keep
    these limits by themselves when nobody leads the run. A controller writes it anew at least every
    `every_s`, and before each launch. None: there is no such limit."""

    term: Natural  # of the controller that wrote it
    version: Natural  # rises with each writing of one term
    every_s: Amount
    launch_s: Amount  # the longest that a launch is expected to take
    budget_usd: Amount | None = None
    spent_usd: Amount = 0.0
    left_s: Amount | None = None  # until the limit of hours
    leaderless_s: Amount | None = None  # nodes drain when nobody has led for so long
    attempts: tuple[AttemptPrice, ...] = ()

    @classmethod
    def decode(cls, data: bytes) -> RunLimits:
        """Raises BadObject, NewerProtocol."""
        return decoded(cls, data)

    def encode(self) -> bytes:
        return json.dumps(stamped(dataclasses.asdict(self))).encode()


def run_limits(store: ObjectStore) -> RunLimits | None:
    """What nodes keep by themselves when nobody leads; None: nothing, or nothing that can be read.
    Raises StoreError."""
    try:
        return RunLimits.decode(store.get(LIMITS_KEY))
    except (NotFound, BadObject):
        return None
