"""The process that fires and sends a run's alerts, beside the controller and beside rank 0.

    python -m harness.look.alerts.alert_evaluator URL    beside rank 0; the agent starts and ends it
                                                         (HARNESS_ALERTS, HARNESS_ALERT_RULES)

An evaluator follows the facts, fires the rules' findings (`alert_log.py`: once, whichever evaluator
is first), and sends each alert to each receiver at least once. The first evaluator to create the
receipt sends; if its receipt stands still for TAKE_OVER_S, another sends as well. Whenever an alert
is sent again, it has the same dedupe key.

Each receiver has a thread of its own, and each message a bound on its total time, so a slow
receiver holds up only itself. A receiver that fails is retried until the alert is STALE_S old. No
fault of a receiver or the bucket touches training: errors are logged and retried later.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.bucket.controller_lease import sign_of_life
from harness.bucket.journal import Follower
from harness.bucket.layout import RELEASED, USUAL_TTL_S
from harness.core import facts as f
from harness.core.facts import Stamped
from harness.core.masking import keep_secrets
from harness.core.world import BadInput
from harness.look.alerts.alert_log import (
    GIVEN_UP,
    SENDING,
    SENT,
    Alert,
    AlertLog,
    AlertReceipt,
    told_key,
)
from harness.look.alerts.alert_rules import (
    BUILT_IN,
    AlertRule,
    AlertState,
    EvaluatorInputs,
    Symptom,
)
from harness.look.alerts.alert_sinks import (
    AlertSink,
    Untold,
    asked_sinks,
    sinks_of,
    tell_in_time,
)
from harness.look.alerts.custom_rules import all_rules
from storage.canonical_json import canonical, digest
from storage.errors import StoreError, StoreUnavailable
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import open_store

# The alerts that a run's facts fire, each once. `fired` evaluates a whole run, `AlertWatch` facts
# as they come.

LOOK_S = 10.0  # between two evaluations of `holds` in old facts
MOST_LOOKS = 2000  # and at most so many, however long the history is
MOST_SUBJECTS = 8  # of one rule within its cool-down: the loss of a thousand nodes is one event
SHIPPED = {rule.name for rule in BUILT_IN}
STILL_S = 600.0  # an alert of a single fact counts as firing for so long


def fired(
    facts: Iterable[Stamped], now_s: float, rules: Sequence[AlertRule] = BUILT_IN
) -> list[Alert]:
    """Return all alerts of these facts up to `now_s` (wall clock, s), oldest first."""
    watch = AlertWatch(rules)
    found = watch.see(s for s in facts if s.t <= now_s)
    return sorted([*found, *watch.look(now_s)], key=lambda a: a.t)


class AlertWatch:
    """An evaluator: `see` is given facts as they come, `look` is called from time to time."""

    def __init__(self, rules: Sequence[AlertRule] = BUILT_IN):
        self.rules, self.run = rules, AlertState()
        self.cool_down_s = {rule.name: rule.cool_down_s for rule in rules}
        self._by_kind: dict[type[f.Fact], list[AlertRule]] = {}
        for rule in rules:
            for kind in rule.kinds if rule.says else ():
                self._by_kind.setdefault(kind, []).append(rule)
        self._looked_s: float | None = None
        self._told: dict[tuple[str, str], float] = {}  # (rule, subject) -> time of its last alert
        self._seen: dict[tuple[str, str], deque[float]] = {}  # for rules that count
        # what holds now: (rule, subject) -> (since when, whether its alert was fired)
        self._holds: dict[tuple[str, str], tuple[float, bool]] = {}
        self._severity: dict[str, str] = {rule.name: rule.severity for rule in rules}

    def see(self, facts: Iterable[Stamped]) -> list[Alert]:
        """Return the new alerts of these facts."""
        found: list[Alert] = []
        ordered = sorted(facts, key=lambda s: s.t)
        span_s = ordered[-1].t - ordered[0].t if ordered else 0.0
        pause_s = max(LOOK_S, span_s / MOST_LOOKS)
        for stamped in ordered:
            # look at what held until this fact, which may end it
            if self._looked_s is None:
                self._looked_s = stamped.t
            elif stamped.t - self._looked_s >= pause_s:
                found += self.look(stamped.t)
            self.run.apply(stamped)
            for rule in self._by_kind.get(type(stamped.fact), ()):
                said = (rule.says(stamped, self.run) if rule.says else None) or ()
                for symptom in (said,) if isinstance(said, Symptom) else said:
                    if self._enough(rule, symptom, stamped.t):
                        found += self._fire(rule, symptom, stamped.t)
        return found

    def look(self, now_s: float, sight: EvaluatorInputs | None = None) -> list[Alert]:
        """Return the new alerts of conditions that hold at `now_s` (wall clock, s)."""
        self.run.sight = sight or EvaluatorInputs()
        self._looked_s = now_s
        found: list[Alert] = []
        for rule in self.rules:
            if rule.holds is None:
                continue
            here: set[tuple[str, str]] = set()
            for symptom in rule.holds(self.run, now_s):
                key = (rule.name, symptom.subject)
                here.add(key)
                first_s, told = self._holds.get(key, (now_s, False))
                since_s = first_s if symptom.since_s is None else symptom.since_s
                due = now_s - since_s >= rule.for_s
                if due and not told:
                    found += self._fire(rule, symptom, since_s + rule.for_s)
                self._holds[key] = since_s, told or due
            for key in [k for k in self._holds if k[0] == rule.name and k not in here]:
                del self._holds[key]
        return found

    def firing(self, now_s: float) -> dict[tuple[str, str], str]:
        """Return what is wrong now: (rule, subject) -> severity."""
        held = {key for key, (_, told) in self._holds.items() if told}
        recent = {key for key, t in self._told.items() if 0 <= now_s - t < STILL_S}
        return {key: self._severity[key[0]] for key in sorted(held | recent)}

    def _enough(self, rule: AlertRule, symptom: Symptom, t: float) -> bool:
        if rule.count <= 1:
            return True
        times = self._seen.setdefault((rule.name, symptom.subject), deque(maxlen=rule.count))
        times.append(t)
        return len(times) == rule.count and t - times[0] <= rule.within_s

    def _fire(self, rule: AlertRule, symptom: Symptom, t: float) -> list[Alert]:
        key = (rule.name, symptom.subject)
        last_s = self._told.get(key)
        if last_s is not None and abs(t - last_s) < rule.cool_down_s:
            return []
        others = [s for (name, _), s in self._told.items() if name == rule.name]
        if sum(abs(t - s) < rule.cool_down_s for s in others) >= MOST_SUBJECTS:
            return []
        self._told[key] = t
        where = f"docs/RUNBOOK.md#{rule.name}" if rule.name in SHIPPED else ""
        said = (symptom.title, symptom.text, t, symptom.subject, where)
        return [Alert.of(rule.name, rule.severity, *said)]


log = logging.getLogger("harness.look.alerts.alert_evaluator")

POLL_S = 5.0
PAUSE_S, MAX_PAUSE_S = 1.0, 60.0  # backoff after a receiver failed: at first, at most
TAKE_OVER_S = 150.0  # longer than a pause and a message can take together
STALE_S = 3600.0  # older alerts are no longer sent
LEADER_S = 30.0  # between two looks at the lease
SILENT_S = 2 * USUAL_TTL_S  # a heartbeat that stands still so long: no live controller
FINISH_S = 20.0  # grace period after SIGTERM


# ---- one receiver --------------------------------------------------------------------------------
@dataclass
class _Delivery:
    """The sending of one alert to one receiver. `mine`: we send it; `other`: another evaluator's
    newest receipt; `receipt`: our last one, still to be written."""

    alert: Alert
    mine: bool = False
    other: bytes = b""
    not_before_s: float = 0.0  # monotonic
    failures: int = 0
    receipt: AlertReceipt | None = None


@dataclass
class AlertSender:
    """The sender of a run's alerts to one receiver. Any number may serve the same receiver."""

    store: ObjectStore
    sink: AlertSink
    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    _open: dict[int, _Delivery] = field(default_factory=dict)
    _seen: int = 0  # alerts of the log that were looked at

    def run(self, alerts: Sequence[Alert | None], over: threading.Event, poll_s: float) -> None:
        """Send the log's alerts until `over` is set, then once more. Never raises StoreError."""
        last = False
        while not last:
            last = over.wait(poll_s)
            try:
                self.round(alerts)
            except StoreError as e:
                log.warning("%s; it is tried again", e)

    def round(self, alerts: Sequence[Alert | None]) -> None:
        """Send the alerts of the log (`AlertLog.alerts`) that are due. Raises StoreError."""
        for number in range(self._seen, len(alerts)):
            if (alert := alerts[number]) is not None:
                self._open[number] = _Delivery(alert)
            self._seen = number + 1
        for number, delivery in list(self._open.items()):
            if self._one(number, delivery):
                del self._open[number]

    def _one(self, number: int, delivery: _Delivery) -> bool:
        """Return whether this alert needs no more work."""
        key = told_key(self.sink.name, number)
        if self.now() - delivery.alert.t > STALE_S and not delivery.mine:
            return True
        if self.monotonic() < delivery.not_before_s:
            return False
        if not delivery.mine:
            delivery.mine = self.store.create(key, AlertReceipt(SENDING, self.now()).encode())
        if not delivery.mine:
            found = self.store.get(key)
            if AlertReceipt.decode(found).outcome != SENDING:
                return True
            if found != delivery.other:
                delivery.other, delivery.not_before_s = found, self.monotonic() + TAKE_OVER_S
                return False
            delivery.mine = True
        if delivery.receipt is None:
            delivery.receipt = self._send(number, delivery)
        self.store.put(key, delivery.receipt.encode())  # if this fails, only this is tried again
        outcome, delivery.receipt = delivery.receipt.outcome, None
        return outcome != SENDING

    def _send(self, number: int, delivery: _Delivery) -> AlertReceipt:
        alert = delivery.alert
        key = digest(canonical([self.store.url, number, alert.id]))[:32]
        try:
            tell_in_time(self.sink, alert, self.store.url, key)
        except Untold as e:
            log.warning("%s: %s is not told: %s", self.sink.about, alert.rule, e)
            pause_s = min(MAX_PAUSE_S, PAUSE_S * 2.0 ** min(delivery.failures, 10))
            delivery.failures += 1
            delivery.not_before_s = self.monotonic() + pause_s
            again = e.again and self.now() - alert.t <= STALE_S
            return AlertReceipt(SENDING if again else GIVEN_UP, self.now(), str(e))
        log.debug("%s: %s", self.sink.about, alert.rule)
        return AlertReceipt(SENT, self.now())


# ---- a run ---------------------------------------------------------------------------------------
@dataclass
class _FactPoller:
    """A reader of a run's facts that also notices silence. `leads`: this is the controller, so
    there is no need to check whether a controller is alive."""

    store: ObjectStore
    now: Callable[[], float]
    monotonic: Callable[[], float]
    leads: bool
    _sign: tuple[int, bytes] = (0, b"")  # the controller's last sign of life
    _sign_s: float = 0.0  # since when it is unchanged (wall clock)
    _looked_s: float = 0.0
    # the bucket's last answer (monotonic), and whether it failed since
    _answered_s: float | None = None
    _refused: bool = False

    def __post_init__(self) -> None:
        self._follower = Follower(self.store)

    def look(self) -> tuple[list[f.Stamped], EvaluatorInputs]:
        """Return the new facts and what was observed without facts. Raises StoreError."""
        try:
            facts = [s for s in self._follower.poll() if not isinstance(s.fact, f.Unreadable)]
            leader_s = None if self.leads else self._leader_silent_since()
        except StoreError:
            self._refused = True
            raise
        now, before = self.monotonic(), self._answered_s
        silent_s = now - before if self._refused and before is not None else None
        self._answered_s, self._refused = now, False
        return facts, EvaluatorInputs(leader_s, silent_s)

    def _leader_silent_since(self) -> float | None:
        """Return since when the controller is silent (wall clock). None: a controller is alive,
        there never was one, or it gave the lease back."""
        now = self.now()
        if now - self._looked_s >= LEADER_S:
            self._looked_s = now
            if (sign := sign_of_life(self.store, self._sign[0])) != self._sign:
                self._sign, self._sign_s = sign, now
        term, beat = self._sign
        if not term or beat == RELEASED or now - self._sign_s < SILENT_S:
            return None
        return self._sign_s


@dataclass
class Alerting:
    """One run's evaluator and its receivers. `leads`: this is its controller's process. `say` is
    called with each alert that is new here (to print it on a terminal, for example)."""

    store: ObjectStore
    sinks: Sequence[AlertSink] = ()
    rules: Sequence[AlertRule] = BUILT_IN
    leads: bool = False
    say: Callable[[Alert], None] | None = None
    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.watch, self.log = AlertWatch(self.rules), AlertLog(self.store)
        times = self.now, self.monotonic
        self._looker = _FactPoller(self.store, *times, self.leads)
        self.senders = [AlertSender(self.store, s, *times) for s in self.sinks]
        self._pending: list[Alert] = []
        self._said, self._since_s = 0, self.now()

    def run(self, poll_s: float = POLL_S) -> None:
        """Work until `stop` is set, then once more. Each receiver has a thread. Never raises
        StoreError."""
        over, last = threading.Event(), False
        threads = [
            threading.Thread(target=sender.run, args=(self.log.alerts, over, poll_s), daemon=True)
            for sender in self.senders
        ]
        for thread in threads:
            thread.start()
        while not last:
            last = self.stop.wait(poll_s)
            try:
                self.look()
            except StoreError as e:
                log.warning("%s; it is tried again", e)
        over.set()
        for thread in threads:
            thread.join()

    def round(self) -> None:
        """Look once, fire and send. Raises StoreError."""
        self.look()
        for sender in self.senders:
            sender.round(self.log.alerts)

    def look(self) -> None:
        """Look once, and fire. Raises StoreError."""
        facts, sight = self._looker.look()
        self._pending += [*self.watch.see(facts), *self.watch.look(self.now(), sight)]
        while self._pending:
            self.log.fire(self._pending[0], self.watch.cool_down_s[self._pending[0].rule])
            del self._pending[0]
        self.log.read()
        self._tell_here()

    def _tell_here(self) -> None:
        new, self._said = self.log.alerts[self._said :], len(self.log.alerts)
        for alert in new if self.say else ():
            if self.say and alert is not None and alert.t > self._since_s - POLL_S:
                self.say(alert)


def test_alert(now_s: float) -> Alert:
    """Return the alert that `harness runs alerts --test` sends."""
    text = "This is a test: alerts of this run reach you. Nothing is wrong."
    return Alert.of("test", "info", "a test of alerts", text, now_s)


# ---- the process beside rank 0 -------------------------------------------------------------------
def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.look.alerts.alert_evaluator",
        description="Fire and tell a run's alerts.",
    )
    parser.add_argument("url", help="URL of the run")
    flags = parser.parse_args(argv)
    keep_secrets(environ)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s alerts: %(message)s", stream=sys.stderr
    )
    try:
        sinks = sinks_of(asked_sinks((), environ))
        rules = all_rules(environ.get("HARNESS_ALERT_RULES", ""))
        store = open_store(flags.url)
    except (BadInput, StoreUnavailable) as e:
        print(f"harness: {e}", file=sys.stderr)
        return 2
    stop = threading.Event()

    def told_to_stop(*_: Any) -> None:
        if not stop.is_set():
            stop.set()
            watchdog = threading.Timer(FINISH_S, lambda: os._exit(1))  # whatever hangs
            watchdog.daemon = True
            watchdog.start()

    signal.signal(signal.SIGTERM, told_to_stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the agent
    alerting = Alerting(store, sinks, rules, stop=stop)
    alerting.run(2.0 if flags.url.startswith("file://") else POLL_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
