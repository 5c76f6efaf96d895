"""Alerts in a run's bucket: each fired once, and who was told of it.

    alerts/fired/{number:06d}.json                  create-only: an alert; numbers have no gaps
    alerts/told/{sink}/{number:06d}-{n:02d}.claim   create-only: somebody tells it
    alerts/told/{sink}/{number:06d}.json            create-only: it was told, or given up

Any number of evaluators may look at a run at once (the controller, rank 0's node). Whoever creates
number n first has fired it; the others read it and do not fire the same again: an alert is the same
as one of its rule and subject that lies less than a cool-down away. So two that know different
facts, or whose clocks differ a little, still fire once.

Pure: knows an ObjectStore; the keys' names are here, the rules in `views/alert_rules.py`, who tells
what in `views/alerting.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from harness.bucket.layout import SMALL_NBYTES
from harness.core.masking import masked_deep
from harness.core.values import BadObject, canonical, decoded, digest
from storage.errors import NotFound
from storage.objects import ObjectStore, get_each

ALERTS = "alerts/"
FIRED, TOLD = f"{ALERTS}fired/", f"{ALERTS}told/"
MOST_FIRED = 10_000  # in one run; beyond it nothing is fired, so that no loop fills a bucket
TITLE_LETTERS, TEXT_LETTERS = 64, 1000
INFO, WARNING, CRITICAL = SEVERITIES = ("info", "warning", "critical")

_FIRED = re.compile(r"alerts/fired/(\d{6,12})\.json")


def fired_key(number: int) -> str:
    return f"{FIRED}{number:06d}.json"


def told_claim_key(sink: str, number: int, again: int) -> str:
    """`again`: 0 for who tells it first, 1 for who takes over, ..."""
    return f"{TOLD}{sink}/{number:06d}-{again:02d}.claim"


def told_key(sink: str, number: int) -> str:
    return f"{TOLD}{sink}/{number:06d}.json"


# ---- objects -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Alert:
    """What a person should be told. `t`: wall clock, when it became true; `subject`: what it is
    about, where a rule has several (a member); `help`: where the runbook tells of it."""

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
        """With an id that any evaluator gives it, and words cut to their bounds."""
        name = digest(canonical([rule, subject, t]))[:16]
        title, text = title[:TITLE_LETTERS], text[:TEXT_LETTERS]
        return cls(name, title, text, t, severity, rule, subject[:TITLE_LETTERS], help)

    @classmethod
    def decode(cls, data: bytes) -> Alert:
        """Raises BadObject."""
        found = decoded(cls, data, most_nbytes=SMALL_NBYTES)
        if found.severity not in SEVERITIES:
            raise BadObject(f"severity: wanted one of {SEVERITIES}, found {found.severity!r:.40}")
        return found

    def encode(self) -> bytes:
        return canonical(masked_deep(dataclasses.asdict(self)))


SENT, GIVEN_UP = "sent", "given up"


@dataclass(frozen=True)
class AlertReceipt:
    """What became of an alert at one receiver. `outcome`: SENT or GIVEN_UP; `why`: for people,
    without secrets."""

    outcome: str
    t: float
    by: str = ""
    why: str = ""

    @classmethod
    def decode(cls, data: bytes) -> AlertReceipt:
        """Never fails: that the object exists means that nobody need tell it any more."""
        try:
            return decoded(cls, data, most_nbytes=SMALL_NBYTES)
        except BadObject:
            return cls(SENT, 0.0, why="the receipt cannot be read")

    def encode(self) -> bytes:
        return canonical(masked_deep(dataclasses.asdict(self)))


# ---- the log -------------------------------------------------------------------------------------
@dataclass
class AlertLog:
    """What a run's evaluators have fired, in order. `alerts[n]` is number n; None: what lies there
    cannot be read."""

    store: ObjectStore
    alerts: list[Alert | None] = field(default_factory=list)
    _listed: bool = False

    def read(self) -> list[Alert]:
        """All that can be read, after looking for new ones. Raises StoreError."""
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
        """Write it down, unless it is there. Is it new, and ours? Raises StoreError."""
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
