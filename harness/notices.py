"""Watch for word that this machine will be taken.  Runs in the node agent, one per machine.

Knows clouds' metadata endpoints and files; knows nothing of torch, storage or SkyPilot. A source tells what is in force
now; `watch` calls back when a notice appears and when it vanishes, so that a cancelled one does not stay latched.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger(__name__)

AWS_V4, AWS_V6 = "http://169.254.169.254", "http://[fd00:ec2::254]"
TOKEN_TTL_S = 3600
REFRESH_BEFORE_S = 15.0  # as aws-node-termination-handler does
TOKENLESS_S = 60.0  # after a token request timed out (hop limit, in containers): how long to go on without
MAX_ANSWER = 1 << 20


@dataclass(frozen=True)
class Notice:
    """A cloud's word. `deadline_s` is wall-clock UTC seconds; None means that no time is known: act at once."""

    source: str  # "aws", "file", ...
    kind: str  # "kill": the node will be taken | "soft": it may be | "maintenance": it will be disturbed
    id: str  # the same notice has the same id at every poll
    deadline_s: float | None
    cancellable: bool = False
    detail: str = ""


class Source(Protocol):
    """One place where notices appear."""

    name: str
    pace_s: float  # between two polls
    errors: int  # polls, or parts of them, that were not answered

    def poll(self) -> Sequence[Notice]:
        """The notices in force now. A source that got no answer repeats what it knew; it never raises for that."""


# ---- AWS --------------------------------------------------------------------------------------------------------
class AwsSource:
    """EC2: spot interruption (kill), rebalance recommendation (soft) and scheduled events (maintenance), over IMDSv2."""

    name = "aws"

    def __init__(
        self,
        endpoint: str = AWS_V4,
        *,
        pace_s: float = 2.0,
        timeout_s: float = 2.0,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self.pace_s, self.errors = pace_s, 0
        self._base, self._timeout_s, self._monotonic = endpoint.rstrip("/"), timeout_s, monotonic
        # Metadata is link-local: a proxy would answer for another machine, or not at all.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._token, self._token_until_s, self._tokenless_until_s = "", 0.0, 0.0
        self._known: dict[str, tuple[Notice, ...]] = {}

    def poll(self) -> Sequence[Notice]:
        for path, read in (
            ("spot/instance-action", _interruption),
            ("events/recommendations/rebalance", _rebalance),
            ("events/maintenance/scheduled", _maintenance),
        ):
            if not self._learn(path, read):
                break  # the endpoint is silent: its other paths would each cost another time-out
        return [notice for notices in self._known.values() for notice in notices]

    def _learn(self, path: str, read: Callable[[str], tuple[Notice, ...]]) -> bool:
        """Ask for one kind of notice. Without an answer, or with nonsense, what was in force stays so. False: silence."""
        try:
            body = self._get(f"/latest/meta-data/{path}")
            self._known[path] = () if body is None else read(body)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as e:
            self.errors += 1
            log.info("notices: %s/%s: %s: %s", self._base, path, type(e).__name__, e)
            return not isinstance(e, (TimeoutError, urllib.error.URLError))
        return True

    def _get(self, path: str) -> str | None:
        """The body, or None for 404. A 401 (expired token) gets one more try with a new token."""
        for last in (False, True):
            token = self._fresh_token()
            headers = {"X-aws-ec2-metadata-token": token} if token else {}
            status, body = self._request("GET", path, headers)
            if status == 200:
                return body
            if status == 404:
                return None
            if status != 401 or last:
                raise ValueError(f"status {status}")
            self._token, self._tokenless_until_s = "", 0.0
        return None

    def _fresh_token(self) -> str:
        now = self._monotonic()
        if self._token and now < self._token_until_s - REFRESH_BEFORE_S:
            return self._token
        if now < self._tokenless_until_s:
            return ""
        try:
            status, body = self._request("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)})
        except (TimeoutError, urllib.error.URLError) as e:
            if isinstance(e, urllib.error.URLError) and not isinstance(e.reason, TimeoutError):
                raise
            # The hop limit swallows the token's way back into a container; IMDSv1 may still answer.
            self.errors += 1
            self._token, self._tokenless_until_s = "", now + TOKENLESS_S
            return ""
        if status != 200 or not body:
            raise ValueError(f"no token: status {status}")
        self._token, self._token_until_s = body, now + TOKEN_TTL_S
        return body

    def _request(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        request = urllib.request.Request(self._base + path, method=method, headers=dict(headers))
        try:
            with self._open(request, timeout=self._timeout_s) as response:
                return int(response.status), response.read(MAX_ANSWER).decode()
        except urllib.error.HTTPError as e:
            with e:
                return e.code, ""


def _hashed(prefix: str, body: str) -> str:
    return f"{prefix}-{hashlib.sha256(body.encode()).hexdigest()[:16]}"


def _interruption(body: str) -> tuple[Notice, ...]:
    said = json.loads(body)
    action = str(said["action"])
    # A hibernating instance is taken at once; the time is when the notice began.
    deadline_s = None if action == "hibernate" else utc(said["time"])
    return (Notice("aws", "kill", _hashed("aws-itn", body), deadline_s, False, f"spot {action} at {said['time']}"),)


def _rebalance(body: str) -> tuple[Notice, ...]:
    noticed = json.loads(body)["noticeTime"]
    return (Notice("aws", "soft", _hashed("aws-rebalance", body), None, False, f"rebalance recommended at {noticed}"),)


def _maintenance(body: str) -> tuple[Notice, ...]:
    return tuple(
        Notice("aws", "maintenance", str(e["EventId"]), utc(e["NotBefore"]), True, f"{e.get('Code', '')}: {e.get('Description', '')}")
        for e in json.loads(body)
        if e.get("State", "active") == "active"
    )


def utc(text: str) -> float:
    """RFC 3339 (`2017-09-18T08:22:00Z`) or EC2's `21 Jan 2019 09:00:43 GMT`, as seconds since 1970."""
    if text.endswith(" GMT"):
        return datetime.strptime(text, "%d %b %Y %H:%M:%S GMT").replace(tzinfo=timezone.utc).timestamp()
    at = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()


# ---- a file -----------------------------------------------------------------------------------------------------
class FileSource:
    """A file that a person may `touch`, or a script fill with JSON; removing it takes the notice back.

    Empty: go now. JSON: any of `{"kind", "grace_s" | "deadline_s", "id", "detail"}`; grace counts from the file's last change.
    """

    name = "file"

    def __init__(self, path: str | Path, *, pace_s: float = 1.0, settle_s: float = 0.2, now: Callable[[], float] = time.time):
        self.path, self.pace_s, self.errors = Path(path), pace_s, 0
        self._settle_s, self._now = settle_s, now
        self._seen: tuple[int, int] = (0, 0)
        self._notice: Notice | None = None

    def poll(self) -> Sequence[Notice]:
        try:
            stat = self.path.stat()
            text = self.path.read_text(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            self._notice, self._seen = None, (0, 0)
            return []
        except OSError as e:
            self.errors += 1
            log.warning("notices: %s: %s", self.path, e.strerror)
            return [self._notice] if self._notice else []
        if self._notice is None or self._seen != (stat.st_ino, stat.st_mtime_ns):
            try:
                said = json.loads(text) if text.strip() else {}
                if not isinstance(said, dict):
                    raise ValueError("not a JSON object")
                fresh = self._read(said, stat)
            except (ValueError, TypeError) as e:
                fresh, said = None, {"detail": f"unreadable: {e}"}
            if not text.strip() or fresh is None:
                if 0 <= self._now() - stat.st_mtime < self._settle_s:
                    return [self._notice] if self._notice else []  # somebody may be in the middle of writing it
                if fresh is None:  # somebody wants something: the safe reading is that the node goes
                    self.errors += 1
                    fresh = self._read(said, stat)
            self._notice, self._seen = fresh, (stat.st_ino, stat.st_mtime_ns)
        return [self._notice]

    def _read(self, said: Mapping[str, Any], stat: Any) -> Notice:
        deadline_s = said.get("deadline_s")
        if deadline_s is None and said.get("grace_s") is not None:
            deadline_s = stat.st_mtime + float(said["grace_s"])
        kind = said.get("kind", "kill")
        if kind not in ("kill", "soft", "maintenance"):
            raise ValueError(f"kind {kind!r} is none of kill, soft, maintenance")
        name = str(said.get("id") or f"file-{stat.st_ino}-{stat.st_mtime_ns}")
        deadline_s = None if deadline_s is None else float(deadline_s)
        return Notice("file", kind, name, deadline_s, True, str(said.get("detail", "")) or str(self.path))


# ---- finding and watching ---------------------------------------------------------------------------------------
def detect(env: Mapping[str, str], dmi: Path = Path("/sys/class/dmi/id")) -> list[Source]:
    """The sources of this machine, by what it says of itself; never by trying addresses and waiting for time-outs."""
    sources: list[Source] = []
    path = env.get("HARNESS_NOTICE_FILE") or (f"{env['HARNESS_NODE_DIR']}/notice" if env.get("HARNESS_NODE_DIR") else "")
    if path:
        sources.append(FileSource(path))
    endpoint = env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or env.get("INSTANCE_METADATA_URL")
    if not endpoint and _dmi_says(dmi, "Amazon EC2"):
        endpoint = AWS_V6 if env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower() == "ipv6" else AWS_V4
    if endpoint and env.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true":
        sources.append(AwsSource(endpoint))
    return sources


def _dmi_says(dmi: Path, vendor: str) -> bool:
    """Xen instances name themselves in other files than Nitro ones."""
    for name in ("sys_vendor", "board_vendor", "bios_vendor", "product_version", "bios_version"):
        try:
            said = (dmi / name).read_text(errors="replace").strip().lower()
        except OSError:
            continue
        if vendor.lower() in said or (vendor == "Amazon EC2" and said.endswith("amazon")):
            return True
    return False


class Watcher:
    """The running threads of `watch`, one per source."""

    def __init__(self, threads: Sequence[threading.Thread], stopped: threading.Event):
        self._threads, self._stopped = threads, stopped

    def stop(self, within_s: float = 10.0) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=within_s)


def watch(sources: Sequence[Source], on_notice: Callable[[Notice], None], on_cancel: Callable[[Notice], None]) -> Watcher:
    """Call back, from the sources' own threads, once per notice that appears and once when it vanishes."""
    stopped = threading.Event()
    threads = [
        threading.Thread(target=_follow, args=(s, on_notice, on_cancel, stopped), name=f"notices-{s.name}", daemon=True) for s in sources
    ]
    for thread in threads:
        thread.start()
    return Watcher(threads, stopped)


def _follow(source: Source, on_notice: Callable[[Notice], None], on_cancel: Callable[[Notice], None], stopped: threading.Event) -> None:
    known: dict[str, Notice] = {}
    while not stopped.is_set():
        try:
            known = step(source, known, on_notice, on_cancel)
        except Exception:
            # A watcher that dies unseen costs the snapshot that its next notice would have saved; the trace is kept.
            source.errors += 1
            log.exception("notices: %s", source.name)
        stopped.wait(source.pace_s)


def step(
    source: Source, known: Mapping[str, Notice], on_notice: Callable[[Notice], None], on_cancel: Callable[[Notice], None]
) -> dict[str, Notice]:
    """One poll: call back for what is new and what has gone; returns what is in force."""
    now = {notice.id: notice for notice in source.poll()}
    # New ones first: a notice that replaces another must not look like a cancellation in between.
    for name, notice in now.items():
        if name not in known:
            on_notice(notice)
    for name, notice in known.items():
        if name not in now:
            on_cancel(notice)
    return now
