"""Alerts in a run's bucket: each fired once, with its delivery to each receiver.

    alerts/fired/{number:06d}.json         create-only: an alert; numbers have no gaps
    alerts/told/{sink}/{number:06d}.json   its delivery: a process is at it, has done it, or gave up

Any number of evaluators may look at a run at once (the controller, rank 0's node). The first to
create number n has fired it; the others read it and do not fire it again. Two alerts are the same
if they have the same rule and subject and lie less than a cool-down apart. So evaluators that know
different facts, or whose clocks differ a little, still fire an alert once.

Pure: knows an ObjectStore. The keys are defined here, the rules in `alert_rules.py`, the delivery
in `alert_evaluator.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from harness.bucket.layout import SMALL_NBYTES
from harness.core.decoding import decoded
from harness.core.masking import masked_deep
from storage.canonical_json import BadObject, canonical, digest
from storage.errors import NotFound
from storage.stores.objects import ObjectStore, get_each

ALERTS = "alerts/"
FIRED, TOLD = f"{ALERTS}fired/", f"{ALERTS}told/"
MOST_FIRED = 10_000  # in one run; no more are fired, so that a loop cannot fill a bucket
TITLE_LETTERS, TEXT_LETTERS = 64, 1000
INFO, WARNING, CRITICAL = SEVERITIES = ("info", "warning", "critical")

_FIRED = re.compile(r"alerts/fired/(\d{6,12})\.json")


def fired_key(number: int) -> str:
    return f"{FIRED}{number:06d}.json"


def told_key(sink: str, number: int) -> str:
    return f"{TOLD}{sink}/{number:06d}.json"


# ---- objects -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Alert:
    """A message for people. `t`: wall clock at which its condition became true; `subject`: the
    object of a rule that has several (a member); `help`: place in the runbook."""

    id: str
    title: str
    text: str
    t: float
    severity: str = WARNING
    rule: str = ""
    subject: str = ""
    help: str = ""

    @classmethod
    def of(
        cls,
        rule: str,
        severity: str,
        title: str,
        text: str,
        t: float,
        subject: str = "",
        help: str = "",
    ) -> Alert:
        """Make an alert, with an id that is the same for all evaluators and texts cut to their
        bounds."""
        name = digest(canonical([rule, subject, t]))[:16]
        title, text = title[:TITLE_LETTERS], text[:TEXT_LETTERS]
        return cls(name, title, text, t, severity, rule, subject[:TITLE_LETTERS], help)

    @classmethod
    def decode(cls, data: bytes) -> Alert:
        """Decode an alert. Raises BadObject."""
        found = decoded(cls, data, most_nbytes=SMALL_NBYTES)
        if found.severity not in SEVERITIES:
            raise BadObject(f"severity: wanted one of {SEVERITIES}, found {found.severity!r:.40}")
        return found

    def encode(self) -> bytes:
        return canonical(masked_deep(dataclasses.asdict(self)))


SENDING, SENT, GIVEN_UP = "being sent", "sent", "given up"


@dataclass(frozen=True)
class AlertReceipt:
    """The state of an alert's delivery to one receiver. `outcome`: SENDING, SENT or GIVEN_UP; `t`:
    of the newest try; `why` it failed: for people, without secrets."""

    outcome: str
    t: float
    why: str = ""

    @classmethod
    def decode(cls, data: bytes) -> AlertReceipt:
        """Decode a receipt. Never fails: if the object exists, no further delivery is needed."""
        try:
            return decoded(cls, data, most_nbytes=SMALL_NBYTES)
        except BadObject:
            return cls(SENT, 0.0, why="the receipt cannot be read")

    def encode(self) -> bytes:
        return canonical(masked_deep(dataclasses.asdict(self)))


# ---- the log -------------------------------------------------------------------------------------
@dataclass
class AlertLog:
    """The alerts fired by a run's evaluators, in order. `alerts[n]` is number n; None: it cannot be
    read."""

    store: ObjectStore
    alerts: list[Alert | None] = field(default_factory=list)
    _listed: bool = False

    def read(self) -> list[Alert]:
        """Look for new alerts, and return all that are readable. Raises StoreError."""
        if not self._listed:
            found = (_FIRED.fullmatch(key) for key in self.store.list(FIRED))
            numbers = sorted(int(each[1]) for each in found if each)
            there = dict(get_each(self.store, [fired_key(n) for n in numbers]))
            for number in range(min(len(numbers), MOST_FIRED)):
                data = there.get(fired_key(number))
                if data is None:
                    break
                self._take(data)
            self._listed = True
        while len(self.alerts) < MOST_FIRED:
            try:
                self._take(self.store.get(fired_key(len(self.alerts))))
            except NotFound:
                break
        return [a for a in self.alerts if a is not None]

    def _take(self, data: bytes) -> None:
        try:
            self.alerts.append(Alert.decode(data))
        except BadObject:
            self.alerts.append(None)

    def fire(self, alert: Alert, cool_down_s: float) -> bool:
        """Fire an alert unless the same one exists. Return whether we fired it. `cool_down_s`: time
        within which two alerts are the same. Raises StoreError."""
        for _ in range(MOST_FIRED):
            if same_as_any(alert, self.read(), cool_down_s) or len(self.alerts) >= MOST_FIRED:
                return False
            data = alert.encode()
            if self.store.create(fired_key(len(self.alerts)), data):
                self._take(data)
                return True
        return False


def same_as_any(alert: Alert, known: Iterable[Alert], cool_down_s: float) -> bool:
    return any(
        a.id == alert.id
        or (
            (a.rule, a.subject) == (alert.rule, alert.subject)
            and math.fabs(a.t - alert.t) < cool_down_s
        )
        for a in known
    )
