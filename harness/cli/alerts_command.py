"""`harness runs alerts`: show what fired in a run and who received it; and the evaluator beside a
controller."""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from harness.bucket.archive import read_facts
from harness.cli.common import DONE, FAILED, AlertFlags, existing_store
from harness.core.flags import flag, positional
from harness.core.formatting import clock
from harness.core.world import BadInput
from harness.look.alerts.alert_evaluator import POLL_S, Alerting, AlertWatch, test_alert
from harness.look.alerts.alert_log import (
    CRITICAL,
    INFO,
    TOLD,
    Alert,
    AlertLog,
    AlertReceipt,
    same_as_any,
)
from harness.look.alerts.alert_sinks import Untold, asked_sinks, sinks_of, tell_in_time
from harness.look.alerts.custom_rules import all_rules
from storage.stores.objects import ObjectStore, get_each
from storage.terminal_text import Console, plain

if TYPE_CHECKING:
    from harness.look.alerts.alert_rules import AlertRule
    from harness.look.alerts.alert_sinks import AlertSink

JOIN_S = 30.0  # for the last alerts to be sent when a controller ends
STYLES = {INFO: "cyan", CRITICAL: "bold red"}
WANTED = "--alert RECEIVER, or HARNESS_ALERTS"


@dataclass(frozen=True)
class AlertsFlags(AlertFlags):
    url: str = positional("URL of the run")
    follow: bool = flag(False, "go on: print what fires, and tell --alert; Ctrl-C ends it")
    test: bool = flag(False, f"send a test alert to each receiver ({WANTED})")
    json: bool = flag(False, "print what fired as JSON")


def alerts(flags: AlertsFlags) -> int:
    """Show which alerts fired in a run and who received them; or send a test."""
    sinks, rules = receivers(flags.alert, flags.alert_rules)
    store, console = existing_store(flags.url), Console()
    if flags.test:
        return _test(store, sinks, console)
    if flags.follow:
        return _follow(store, sinks, rules, console)
    found = _everything(store, rules)
    told = receipts(store)
    if flags.json:
        body = [
            {**asdict(a), "told": {s: asdict(r) for s, r in told.get(n, {}).items()}}
            for n, a in found
        ]
        print(json.dumps(body, indent=2))
        return DONE
    if not found:
        console.print("Nothing has fired.")
        return DONE
    for number, alert in found:
        console.print(line_of(alert, dated=True), highlight=False, soft_wrap=True)
        said = Text(plain(f"{' ' * 21}{_told(number, told)}"), "dim")
        console.print(said, highlight=False, soft_wrap=True)
    return DONE


def receivers(
    given: Sequence[str], asked_rules: str
) -> tuple[list[AlertSink], tuple[AlertRule, ...]]:
    """Return the receivers and the rules of flags and environment. Raises BadInput."""
    rules = asked_rules or os.environ.get("HARNESS_ALERT_RULES", "")
    return sinks_of(asked_sinks(given, os.environ)), all_rules(rules)


def alerts_for_nodes(given: Sequence[str]) -> dict[str, str]:
    """Return the nodes' secret with the receivers of alerts: all but commands, which run on this
    machine only. Raises BadInput."""
    urls = [a for a in asked_sinks(given, os.environ) if not a.startswith("command:")]
    return {"HARNESS_ALERTS": shlex.join(urls)} if urls else {}


def _everything(store: ObjectStore, rules: tuple[AlertRule, ...]) -> list[tuple[int | None, Alert]]:
    """Return all alerts by time: those that fired, with their number, and those that the facts
    would fire but nobody has evaluated yet, with `None`."""
    log, watch = AlertLog(store), AlertWatch(rules)
    log.read()
    found: list[tuple[int | None, Alert]] = [
        (n, a) for n, a in enumerate(log.alerts) if a is not None
    ]
    known = [a for _, a in found]
    for alert in watch.see(read_facts(store)):
        if not same_as_any(alert, known, watch.cool_down_s[alert.rule]):
            found.append((None, alert))
    return sorted(found, key=lambda each: each[1].t)


def receipts(store: ObjectStore) -> dict[int | None, dict[str, AlertReceipt]]:
    """Return the receipts of alerts: number -> receiver -> receipt. Raises StoreError."""
    found: dict[int | None, dict[str, AlertReceipt]] = {}
    keys = [key for key in store.list(TOLD) if key.endswith(".json")]
    for key, data in get_each(store, keys):
        sink, _, name = key.removeprefix(TOLD).partition("/")
        number = name.removesuffix(".json")
        if data is not None and number.isdecimal():
            found.setdefault(int(number), {})[sink] = AlertReceipt.decode(data)
    return found


def _told(number: int | None, told: dict[int | None, dict[str, AlertReceipt]]) -> str:
    if number is None:
        return "nobody has evaluated it"
    words = [
        f"{sink} {r.outcome}{f' ({r.why})' if r.why else ''}"
        for sink, r in told.get(number, {}).items()
    ]
    return ", ".join(words) or "told nobody"


def _test(store: ObjectStore, sinks: Sequence[AlertSink], console: Console) -> int:
    """Send a test alert to each receiver, without recording it. Raises BadInput without a
    receiver."""
    if not sinks:
        raise BadInput(f"--test: wanted a receiver ({WANTED}), found none")
    alert, failed = test_alert(time.time()), False
    for sink in sinks:
        try:
            tell_in_time(sink, alert, store.url, alert.id)
            console.print(f"{sink.about}: it has taken the test", highlight=False)
        except Untold as e:
            failed = True
            console.print(f"{sink.about}: {e}", style="red", highlight=False)
    return FAILED if failed else DONE


def _follow(
    store: ObjectStore, sinks: Sequence[AlertSink], rules: tuple[AlertRule, ...], console: Console
) -> int:
    with alerting_beside(store, sinks, rules, console, leads=False, all_severities=True):
        while True:
            time.sleep(3600.0)


# ---- beside a controller -------------------------------------------------------------------------
def line_of(alert: Alert, dated: bool = False) -> Text:
    """Return an alert as a line for the terminal, with the date if `dated`."""
    style = STYLES.get(alert.severity, "yellow")
    return Text.assemble(
        f"{clock(alert.t)[0 if dated else 11 :]}  ",
        (alert.severity, style),
        plain(f"  {alert.title}: {alert.text}"),
        (plain(f"  {alert.help}"), "dim"),
    )


@contextmanager
def alerting_beside(
    store: ObjectStore,
    sinks: Sequence[AlertSink],
    rules: tuple[AlertRule, ...],
    console: Console,
    *,
    leads: bool = True,
    all_severities: bool = False,
) -> Iterator[Alerting]:
    """Evaluate and send a run's alerts in a thread while entered. Alerts above severity INFO, or
    `all_severities`, are printed as well."""

    def say(alert: Alert) -> None:
        if all_severities or alert.severity != INFO:
            console.print(line_of(alert), highlight=False, soft_wrap=True)

    alerting = Alerting(store, sinks, rules, leads, say)
    poll_s = 1.0 if store.url.startswith("file://") else POLL_S
    thread = threading.Thread(target=alerting.run, args=(poll_s,), name="alerts", daemon=True)
    thread.start()
    try:
        yield alerting
    finally:
        alerting.stop.set()
        thread.join(JOIN_S)
