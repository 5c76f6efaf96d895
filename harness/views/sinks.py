"""Where alerts go: a webhook, Slack, a command. `sink_of` makes one from what a flag says.

    https://host/path            the alert as JSON
    slack:https://...            in Slack's format (also without `slack:` for hooks.slack.com)
    command:program arguments    the alert as JSON on the program's standard input

A URL or a command may hold a secret, so neither is ever shown: a sink is named by its kind, its
host or program, and a hash. Every message has the same `key` however often it is sent, so a
receiver can tell a repetition (also as the header Idempotency-Key).
"""

from __future__ import annotations

import base64
import http.client
import json
import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from harness.bucket.alerts import CRITICAL, INFO, Alert
from harness.core.values import digest
from harness.core.world import BadInput

TIMEOUT_S = 10.0  # of one request
COMMAND_S = 15.0  # that a command may take
MOST_SINKS = 20
COLOURS = {INFO: "#3b82f6", CRITICAL: "#dc2626"}  # of Slack's bar; else WARNING's
AMBER = "#d97706"


class Untold(Exception):
    """A receiver did not take an alert. `again`: it may later. The words hold no secret."""

    def __init__(self, why: str, again: bool):
        super().__init__(why)
        self.again = again


class AlertSink(Protocol):
    """`name`: in keys of the bucket; `about`: for people; neither tells a secret."""

    @property
    def name(self) -> str: ...
    @property
    def about(self) -> str: ...
    def tell(self, alert: Alert, run: str, key: str) -> None:
        """Tell it once, within seconds. Raises Untold."""


def message_of(alert: Alert, run: str, key: str) -> dict[str, Any]:
    """What webhooks and commands get. `run`: its URL; `time`: `t` (wall clock, s) for people."""
    said = {n: getattr(alert, n) for n in ("id", "rule", "severity", "title", "text", "subject")}
    time = datetime.fromtimestamp(alert.t, timezone.utc).isoformat(timespec="milliseconds")
    return {"version": 1, "key": key, **said, "t": alert.t, "time": time, "run": run} | {
        "help": alert.help
    }


def slack_message_of(alert: Alert, run: str, key: str) -> dict[str, Any]:
    def safe(text: str) -> str:  # the three letters that are markup there
        return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

    words = {"color": COLOURS.get(alert.severity, AMBER), "text": safe(alert.text)}
    words["footer"] = safe(f"{run}  {alert.rule}  {alert.help}")
    title = f"{alert.severity}: {alert.title}"
    return {"text": safe(title), "attachments": [{**words, "ts": int(alert.t)}]}


def _without_user(url: str) -> tuple[str, dict[str, str]]:
    """`https://user:password@host/` as a URL and a header."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    said = base64.b64encode(unquote(user).encode()).decode()
    return parts._replace(netloc=host).geturl(), {"Authorization": f"Basic {said}"}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A message that holds an alert goes where it was addressed, and nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True)
class Webhook:
    """`url` is kept out of every representation."""

    url: str = field(repr=False)
    slack: bool = False
    timeout_s: float = TIMEOUT_S

    @property
    def name(self) -> str:
        return f"{'slack' if self.slack else 'webhook'}-{digest(self.url.encode())[:12]}"

    @property
    def about(self) -> str:
        kind = "Slack" if self.slack else "webhook"
        return f"{kind} {urlsplit(self.url).hostname} ({self.name[-12:]})"

    def tell(self, alert: Alert, run: str, key: str) -> None:
        made = slack_message_of if self.slack else message_of
        url, headers = _without_user(self.url)
        headers |= {"Content-Type": "application/json", "User-Agent": "harness"}
        said = json.dumps(made(alert, run, key)).encode()
        request = urllib.request.Request(url, said, {**headers, "Idempotency-Key": key})
        try:
            opener = urllib.request.build_opener(_NoRedirect)
            with opener.open(request, timeout=self.timeout_s) as answer:
                answer.read(1000)
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
    """A program of the user's; it has taken the alert when it ends with status 0."""

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


def sink_of(text: str) -> AlertSink:
    """Raises BadInput, without what may be a secret."""
    wanted = "wanted https://..., slack:https://... or command:PROGRAM ARGUMENTS"
    kind, _, rest = text.partition(":")
    if kind == "command":
        try:
            argv = tuple(shlex.split(rest))
        except ValueError as e:
            raise BadInput(f"--alert command:...: {e}; {wanted}") from None
        if not argv:
            raise BadInput(f"--alert command: names no program; {wanted}")
        return AlertCommand(argv)
    url = rest if kind == "slack" else text
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable or not url.isascii() or any(c.isspace() for c in url):
        # the scheme alone, if it looks like one: the rest may be a token that was pasted here
        found = f"{kind}:..." if kind in ("http", "https", "slack") else "something else"
        raise BadInput(f"--alert: {wanted}; found {found}")
    return Webhook(url, kind == "slack" or parts.hostname == "hooks.slack.com")


def sinks_of(texts: Sequence[str]) -> list[AlertSink]:
    """Each once. Raises BadInput."""
    found = {sink.name: sink for sink in map(sink_of, texts)}
    if len(found) > MOST_SINKS:
        raise BadInput(f"--alert: wanted at most {MOST_SINKS} receivers, found {len(found)}")
    return list(found.values())


def asked_sinks(given: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """What `--alert` and HARNESS_ALERTS (separated by spaces, quoted as in a shell) say. Raises
    BadInput."""
    try:
        return [*given, *shlex.split(environ.get("HARNESS_ALERTS", ""))]
    except ValueError as e:
        raise BadInput(f"HARNESS_ALERTS: {e}; quote it as in a shell") from None
