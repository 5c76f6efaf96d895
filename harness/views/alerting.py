"""Who fires a run's alerts and tells them: beside the controller, and beside rank 0.

    python -m harness.views.alerting URL      beside rank 0; the agent starts and ends it
                                              (HARNESS_ALERTS, HARNESS_ALERT_RULES)

An evaluator follows the facts, fires what the rules find (`bucket/alerts.py`: once, whoever was
first), and tells it to each receiver: a claim, the message, a receipt, each create-only. While a
claim stands nobody else tells that alert there; who claimed it and wrote no receipt for CLAIM_S, by
the observer's own clock, is taken to be dead, and another claims it anew. So every alert is told
exactly once, but for one case that no sender can exclude: it died, or was not answered, between the
message and the receipt. Then the receiver gets it again, with the same `key`.

A receiver that fails is tried again, within bounds, until the alert is STALE_S old. Whatever a
receiver or the bucket does, training is not touched: errors are said and tried again later.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenacity import (
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_after_attempt,
    stop_when_event_set,
    wait_random_exponential,
)

from harness.bucket.alerts import (
    GIVEN_UP,
    SENT,
    TOLD,
    Alert,
    AlertLog,
    AlertReceipt,
    told_claim_key,
    told_key,
)
from harness.bucket.journal import Follower
from harness.bucket.layout import RELEASED, USUAL_TTL_S, Claim
from harness.bucket.lease import sign_of_life
from harness.core import facts as f
from harness.core.last_words import keep_secrets
from harness.core.values import canonical, digest
from harness.core.world import BadInput
from harness.views.alert_own import all_rules
from harness.views.alert_rules import BUILT_IN, AlertRule
from harness.views.alert_state import Sight
from harness.views.alerts import AlertWatch
from harness.views.sinks import AlertSink, Untold, asked_sinks, sinks_of
from storage.errors import NotFound, StoreError, StoreUnavailable
from storage.objects import ObjectStore
from storage.opening import open_store

log = logging.getLogger("harness.views.alerting")

POLL_S = 5.0
TRIES = 3  # at once, of one message
CLAIM_S = 120.0  # longer than TRIES messages can take
MOST_CLAIMS = 4  # of one alert at one receiver
STALE_S = 3600.0  # older news is not told any more
LEADER_S = 30.0  # between two looks at the lease
SILENT_S = 2 * USUAL_TTL_S  # a beat that stands still so long is no leader's
MAX_PAUSE_S = 300.0  # after a receiver failed
FINISH_S = 20.0  # after SIGTERM


# ---- one receiver --------------------------------------------------------------------------------
@dataclass
class _Telling:
    """One alert at one receiver. `claim`: the newest that was seen; -1: none; `since_s`: since when
    it is (monotonic)."""

    claim: int = -1
    mine: bool = False
    since_s: float = 0.0
    not_before_s: float = 0.0
    failures: int = 0
    receipt: AlertReceipt | None = None  # of ours, to be written


@dataclass
class AlertTeller:
    """Tells one receiver of a run's alerts. Any number of tellers may serve the same receiver."""

    store: ObjectStore
    sink: AlertSink
    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    stop: threading.Event = field(default_factory=threading.Event)
    token: str = field(default_factory=lambda: secrets.token_hex(4))
    pause_s: float = 1.0  # before the second of TRIES
    _done: set[int] | None = None
    _open: dict[int, _Telling] = field(default_factory=dict)

    def round(self, alerts: Sequence[Alert | None]) -> None:
        """Tell what is due of the log (`AlertLog.alerts`). Raises StoreError."""
        if self._done is None:
            pattern = re.compile(re.escape(f"{TOLD}{self.sink.name}/") + r"(\d{6,12})\.json")
            found = map(pattern.fullmatch, self.store.list(f"{TOLD}{self.sink.name}/"))
            self._done = {int(each[1]) for each in found if each}
        for number, alert in enumerate(alerts):
            if alert is None or number in self._done:
                continue
            state = self._open.setdefault(number, _Telling())
            stale = self.now() - alert.t > STALE_S and not state.mine
            if stale or self._one(number, alert, state):
                self._done.add(number)
                del self._open[number]

    def _one(self, number: int, alert: Alert, state: _Telling) -> bool:
        """Is this alert done with?"""
        if state.receipt is None:
            if self.monotonic() < state.not_before_s:
                return False
            if state.claim >= 0 and self._exists(told_key(self.sink.name, number)):
                return True
            if not self._ours(number, state):
                return False
            state.receipt = self._tell(number, alert, state)
        if state.receipt is None:
            return False
        self.store.create(told_key(self.sink.name, number), state.receipt.encode())
        return True

    def _ours(self, number: int, state: _Telling) -> bool:
        """Do we hold the newest claim? Takes over what has stood for too long."""
        following = told_claim_key(self.sink.name, number, state.claim + 1)
        if state.mine and not (state.failures and self._exists(following)):
            return True
        now = self.monotonic()
        due = state.claim < 0 or now - state.since_s > CLAIM_S
        if state.mine or (due and state.claim + 1 < MOST_CLAIMS):
            mine = Claim(self.token, self.now()).encode()
            # the second look: a first try that was not answered may have been ours
            state.mine = self.store.create(following, mine) or self.store.get(following) == mine
            state.claim, state.since_s = state.claim + 1, now
        return state.mine

    def _exists(self, key: str) -> bool:
        try:
            self.store.size(key)
        except NotFound:
            return False
        return True

    def _tell(self, number: int, alert: Alert, state: _Telling) -> AlertReceipt | None:
        """None: it is tried again later."""
        key = digest(canonical([self.store.url, number, alert.id]))[:32]
        retrying = Retrying(
            stop=stop_after_attempt(TRIES) | stop_when_event_set(self.stop),
            wait=wait_random_exponential(multiplier=self.pause_s, max=8.0),
            retry=retry_if_exception(lambda e: isinstance(e, Untold) and e.again),
            sleep=sleep_using_event(self.stop),
            reraise=True,
        )
        try:
            retrying(self.sink.tell, alert, self.store.url, key)
        except Untold as e:
            late = self.now() - alert.t > STALE_S
            log.warning("%s: %s is not told: %s", self.sink.about, alert.rule, e)
            if e.again and not late:
                state.failures += 1
                pause_s = min(MAX_PAUSE_S, self.pause_s * 10 * 2.0 ** min(state.failures, 10))
                state.not_before_s = self.monotonic() + pause_s
                return None
            return AlertReceipt(GIVEN_UP, self.now(), self.token, str(e))
        log.debug("%s: %s", self.sink.about, alert.rule)
        return AlertReceipt(SENT, self.now(), self.token)


# ---- a run ---------------------------------------------------------------------------------------
@dataclass
class _Looker:
    """Reads a run's facts, and sees what no fact tells. `leads`: we are the controller, and need
    not ask whether somebody leads."""

    store: ObjectStore
    now: Callable[[], float]
    monotonic: Callable[[], float]
    leads: bool
    _sign: tuple[int, bytes] = (0, b"")  # of the leader's life
    _sign_s: float = 0.0  # since when (wall clock)
    _looked_s: float = 0.0
    # of the bucket: its last answer (monotonic), and whether it failed since
    _answered_s: float | None = None
    _refused: bool = False

    def __post_init__(self) -> None:
        self._follower = Follower(self.store)

    def look(self) -> tuple[list[f.Stamped], Sight]:
        """What is new. Raises StoreError."""
        try:
            facts = [s for s in self._follower.poll() if not isinstance(s.fact, f.Unreadable)]
            leader_s = None if self.leads else self._leader_silent_since()
        except StoreError:
            self._refused = True
            raise
        now, before = self.monotonic(), self._answered_s
        silent_s = now - before if self._refused and before is not None else None
        self._answered_s, self._refused = now, False
        return facts, Sight(leader_s, silent_s)

    def _leader_silent_since(self) -> float | None:
        """Wall clock; None: somebody leads, nobody ever did, or the lease was given back."""
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
    """One run's evaluator and its receivers. `leads`: this is its controller's process. `say`: told
    of each alert that is news here, such as a terminal is."""

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
        self._looker = _Looker(self.store, *times, self.leads)
        self.tellers = [AlertTeller(self.store, s, *times, self.stop) for s in self.sinks]
        self._pending: list[Alert] = []
        self._said, self._since_s = 0, self.now()

    def run(self, poll_s: float = POLL_S) -> None:
        """Until `stop` is set; then once more. Never raises StoreError."""
        while True:
            last = self.stop.wait(poll_s)
            try:
                self.round()
            except StoreError as e:
                log.warning("%s; it is tried again", e)
            if last:
                return

    def round(self) -> None:
        """Look once, fire and tell. Raises StoreError."""
        facts, sight = self._looker.look()
        self._pending += [*self.watch.see(facts), *self.watch.look(self.now(), sight)]
        while self._pending:
            self.log.fire(self._pending[0], self.watch.cool_down_s[self._pending[0].rule])
            del self._pending[0]
        self.log.read()
        self._tell_here()
        for teller in self.tellers:
            teller.round(self.log.alerts)

    def _tell_here(self) -> None:
        new, self._said = self.log.alerts[self._said :], len(self.log.alerts)
        for alert in new if self.say else ():
            if self.say and alert is not None and alert.t > self._since_s - POLL_S:
                self.say(alert)


def test_alert(now_s: float) -> Alert:
    """What `harness alerts --test` sends."""
    text = "This is a test: alerts of this run reach you. Nothing is wrong."
    return Alert.of("test", "info", "a test of alerts", text, now_s)


# ---- the process beside rank 0 -------------------------------------------------------------------
def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.views.alerting", description="Fire and tell a run's alerts."
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the agent
    alerting = Alerting(store, sinks, rules, stop=stop)
    alerting.run(2.0 if flags.url.startswith("file://") else POLL_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
