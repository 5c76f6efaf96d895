"""`harness alerts`: what fired in a run and who was told; and the evaluator beside a controller."""

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

from harness.bucket.alerts import CRITICAL, INFO, TOLD, Alert, AlertLog, AlertReceipt
from harness.cli.common import DONE, FAILED, existing_store
from harness.core.config import flag, positional
from harness.core.world import BadInput
from storage.objects import ObjectStore, get_each
from storage.text import Console, plain

if TYPE_CHECKING:
    from harness.views.alert_rules import AlertRule
    from harness.views.alerting import Alerting
    from harness.views.sinks import AlertSink

JOIN_S = 30.0  # for the last alerts to be told when a controller ends
STYLES = {INFO: "cyan", CRITICAL: "bold red"}
WANTED = "--alert RECEIVER, or HARNESS_ALERTS"


@dataclass(frozen=True)
class AlertsFlags:
    url: str = positional("URL of the run")
    follow: bool = flag(False, "go on: print what fires, and tell --alert; Ctrl-C ends it")
    test: bool = flag(False, f"send a test alert to each receiver ({WANTED})")
    json: bool = flag(False, "print what fired as JSON")
    alert: tuple[str, ...] = flag(
        (),
        "https://..., slack:https://... or command:'PROGRAM ARGUMENTS'; repeat for more; also "
        "HARNESS_ALERTS",
        metavar="RECEIVER",
    )
    alert_rules: str = flag("", "files of rules, package.module:function; HARNESS_ALERT_RULES")


def alerts(flags: AlertsFlags) -> int:
    """What fired in a run, and who was told of it; or send a test."""
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
    """Of flags and environment. Raises BadInput."""
    from harness.views.alert_own import all_rules
    from harness.views.sinks import asked_sinks, sinks_of

    rules = asked_rules or os.environ.get("HARNESS_ALERT_RULES", "")
    return sinks_of(asked_sinks(given, os.environ)), all_rules(rules)


def alerts_for_nodes(given: Sequence[str]) -> dict[str, str]:
    """What nodes are told of receivers, as a secret: all but commands, which are this machine's.
    Raises BadInput."""
    from harness.views.sinks import asked_sinks

    urls = [a for a in asked_sinks(given, os.environ) if not a.startswith("command:")]
    return {"HARNESS_ALERTS": shlex.join(urls)} if urls else {}


def _everything(store: ObjectStore, rules: tuple[AlertRule, ...]) -> list[tuple[int | None, Alert]]:
    """What was fired, with its number, and (None) what the facts would fire beside it: nobody has
    evaluated them yet."""
    from harness.bucket.alerts import same_as_any
    from harness.bucket.journal import read_facts
    from harness.views.alerts import AlertWatch

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
    """What became of alerts: number -> receiver -> receipt. Raises StoreError."""
    found: dict[int | None, dict[str, AlertReceipt]] = {}
    keys = [key for key in store.list(TOLD) if key.endswith(".json") and key.count("/") == 3]
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
    """Past the bucket: each test is sent."""
    from harness.views.alerting import test_alert
    from harness.views.sinks import Untold

    if not sinks:
        raise BadInput(f"--test: wanted a receiver ({WANTED}), found none")
    alert, failed = test_alert(time.time()), False
    for sink in sinks:
        try:
            sink.tell(alert, store.url, alert.id)
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
    """As terminals show it."""
    from harness.views.words import clock

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
    """Fire and tell a run's alerts, in a thread; what is more than news is a line on the
    terminal."""
    from harness.views.alerting import POLL_S, Alerting

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
