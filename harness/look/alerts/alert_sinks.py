"""The receivers of alerts: a webhook, a command, and what `apprise` knows. `sink_of` makes one from
a flag's text.

    https://host/path            the alert as JSON
    command:program arguments    the alert as JSON on the program's standard input
    slack://..., mailto://...    text, by the package apprise (also https://hooks.slack.com/...)

A URL or a command may hold a secret, so neither is ever shown: a sink is named by its kind, its
host or program, and a hash. A message has the same `key` however often it is sent, so it serves
receivers as a dedupe key: it is a field of the JSON and the header Idempotency-Key, PagerDuty's
dedup_key, and the last line of a text.
"""

from __future__ import annotations

import base64
import http.client
import importlib.util
import json
import logging
import queue
import shlex
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from harness.core.world import BadInput
from harness.look.alerts.alert_log import CRITICAL, INFO, Alert
from storage.canonical_json import digest

TIMEOUT_S = 10.0  # timeout of each wait of a request
COMMAND_S = 15.0  # timeout of a command
TELL_S = 20.0  # bound on a whole message, whatever its receiver does
MOST_SINKS = 20
SLACK = "hooks.slack.com"


class Untold(Exception):
    """A receiver did not accept an alert. `again`: a retry may succeed. Its text has no secret."""

    def __init__(self, why: str, again: bool):
        super().__init__(why)
        self.again = again


class AlertSink(Protocol):
    """A receiver of alerts. Neither `name` (for keys) nor `about` (for people) has a secret."""

    @property
    def name(self) -> str: ...
    @property
    def about(self) -> str: ...
    def tell(self, alert: Alert, run: str, key: str) -> None:
        """Send the alert once, within seconds. Raise Untold if it was not accepted."""


def message_of(alert: Alert, run: str, key: str) -> dict[str, Any]:
    """Return the message for webhooks and commands. `run`: its URL; `time`: `t` (s) for people."""
    said = {n: getattr(alert, n) for n in ("id", "rule", "severity", "title", "text", "subject")}
    time = datetime.fromtimestamp(alert.t, timezone.utc).isoformat(timespec="milliseconds")
    return {"version": 1, "key": key, **said, "t": alert.t, "time": time, "run": run} | {
        "help": alert.help
    }


def _without_user(url: str) -> tuple[str, dict[str, str]]:
    """Split `https://user:password@host/` into a URL without user and a Basic auth header."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    said = base64.b64encode(unquote(user).encode()).decode()
    return parts._replace(netloc=host).geturl(), {"Authorization": f"Basic {said}"}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A handler that refuses redirects, so that an alert goes only where it was addressed."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True)
class Webhook:
    """A webhook. `url` is kept out of every representation."""

    url: str = field(repr=False)
    timeout_s: float = TIMEOUT_S

    @property
    def name(self) -> str:
        return f"webhook-{digest(self.url.encode())[:12]}"

    @property
    def about(self) -> str:
        return f"webhook {urlsplit(self.url).hostname} ({self.name[-12:]})"

    def tell(self, alert: Alert, run: str, key: str) -> None:
        url, headers = _without_user(self.url)
        headers |= {"Content-Type": "application/json", "User-Agent": "harness"}
        said = json.dumps(message_of(alert, run, key)).encode()
        request = urllib.request.Request(url, said, {**headers, "Idempotency-Key": key})
        try:
            opener = urllib.request.build_opener(_NoRedirect)
            # the status says that it is taken; a body may drip for minutes
            opener.open(request, timeout=self.timeout_s).close()
        except urllib.error.HTTPError as e:
            e.close()
            again = e.code in (408, 425, 429) or e.code >= 500
            raise Untold(f"it answered {e.code} {e.reason}", again) from None
        except urllib.error.URLError as e:
            raise Untold(self._without_url(f"it is not reached: {e.reason}"), again=True) from None
        except (OSError, http.client.HTTPException) as e:
            why = self._without_url(f"it did not answer: {type(e).__name__}: {e}")
            raise Untold(why, again=True) from None

    def _without_url(self, text: str) -> str:
        parts = urlsplit(self.url)
        for secret in (self.url, parts.query, parts.path, parts.password or ""):
            text = text.replace(secret, "***") if len(secret) > 1 else text
        return text


@dataclass(frozen=True)
class AlertCommand:
    """A program of the user. It has accepted the alert if it exits with status 0."""

    argv: tuple[str, ...] = field(repr=False)
    timeout_s: float = COMMAND_S

    @property
    def name(self) -> str:
        return f"command-{digest(shlex.join(self.argv).encode())[:12]}"

    @property
    def about(self) -> str:
        return f"command {self.argv[0].rpartition('/')[2]} ({self.name[-12:]})"

    def tell(self, alert: Alert, run: str, key: str) -> None:
        said = json.dumps(message_of(alert, run, key)).encode()
        quiet = subprocess.DEVNULL
        try:
            ended = subprocess.run(
                self.argv, input=said, stdout=quiet, stderr=quiet, timeout=self.timeout_s
            )
        except subprocess.TimeoutExpired:
            raise Untold(f"it did not end within {self.timeout_s:.0f} s", again=True) from None
        except OSError as e:
            raise Untold(f"it cannot be started: {e.strerror}", again=False) from None
        if ended.returncode:
            raise Untold(f"it ended with status {ended.returncode}", again=True)


@dataclass(frozen=True)
class AppriseSink:
    """A receiver that the package apprise knows: Slack, PagerDuty, mail, and some hundred more.
    `url` is apprise's, and is kept out of every representation."""

    url: str = field(repr=False)

    @property
    def name(self) -> str:
        return f"{self._kind}-{digest(self.url.encode())[:12]}"

    @property
    def about(self) -> str:
        return f"{self._kind} ({self.name[-12:]})"

    @property
    def _kind(self) -> str:
        scheme, _, rest = self.url.partition("://")
        return "slack" if rest.startswith(SLACK) else scheme.lower()

    def made(self) -> Any:
        """Return apprise's object for the URL, without redirects; None if it knows none."""
        import apprise

        logging.getLogger("apprise").setLevel(logging.CRITICAL)  # what it logs may have secrets
        return apprise.Apprise.instantiate(
            self.url, asset=apprise.AppriseAsset(http_redirects=False)
        )

    def tell(self, alert: Alert, run: str, key: str) -> None:
        made = self.made()
        if hasattr(made, "dedup"):
            made.dedup = key
        body = "\n".join(filter(None, (alert.text, run, alert.help, f"key {key}")))
        kind = {INFO: "info", CRITICAL: "failure"}.get(alert.severity, "warning")
        if not made.notify(body, title=f"{alert.severity}: {alert.title}", notify_type=kind):
            raise Untold("it did not take it (or is not reached)", again=True)


def tell_in_time(
    sink: AlertSink, alert: Alert, run: str, key: str, within_s: float = TELL_S
) -> None:
    """Send an alert, and wait at most `within_s`, whatever the receiver does: one that answers a
    byte at a time outlasts every timeout of a socket. Raises Untold."""
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def tell() -> None:
        try:
            sink.tell(alert, run, key)
        except Exception as e:
            ended.put(e)
        else:
            ended.put(None)

    threading.Thread(target=tell, name=f"tell {sink.name}", daemon=True).start()
    try:
        failed = ended.get(timeout=within_s)
    except queue.Empty:
        raise Untold(f"it did not answer within {within_s:.0f} s", again=True) from None
    if failed is not None:
        raise failed


def sink_of(text: str) -> AlertSink:
    """Make a sink from a flag's text. Raise BadInput, whose text shows no possible secret."""
    wanted = "wanted https://..., command:PROGRAM ARGUMENTS or a URL of apprise (slack://...)"
    kind, _, rest = text.partition(":")
    if kind == "command":
        try:
            argv = tuple(shlex.split(rest))
        except ValueError as e:
            raise BadInput(f"--alert command:...: {e}; {wanted}") from None
        if not argv:
            raise BadInput(f"--alert command: names no program; {wanted}")
        return AlertCommand(argv)
    try:
        parts = urlsplit(text)
        host, usable = parts.hostname, bool(parts.scheme and parts.netloc)
    except ValueError:
        usable = False
    web = kind in ("http", "https")
    # show only a known scheme: the rest may be a pasted token
    found = f"{kind}:..." if web else "something else"
    if not usable or not text.isascii() or any(c.isspace() for c in text):
        raise BadInput(f"--alert: {wanted}; found {found}")
    if web and host != SLACK:
        return Webhook(text)
    if importlib.util.find_spec("apprise") is None:
        raise BadInput(
            "--alert: all but https://... and command:... needs the package apprise: "
            'pip install "spotharness[alerts]"'
        )
    sink = AppriseSink(text)
    if sink.made() is None:
        raise BadInput(f"--alert: {wanted}; found {found}")
    return sink


def sinks_of(texts: Sequence[str]) -> list[AlertSink]:
    """Return the sinks without duplicates. Raise BadInput if one is bad or there are too many."""
    found = {sink.name: sink for sink in map(sink_of, texts)}
    if len(found) > MOST_SINKS:
        raise BadInput(f"--alert: wanted at most {MOST_SINKS} receivers, found {len(found)}")
    return list(found.values())


def asked_sinks(given: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the receivers from `--alert` and HARNESS_ALERTS (separated by spaces, quoted as in a
    shell). Raise BadInput if the quoting is wrong."""
    try:
        return [*given, *shlex.split(environ.get("HARNESS_ALERTS", ""))]
    except ValueError as e:
        raise BadInput(f"HARNESS_ALERTS: {e}; quote it as in a shell") from None
