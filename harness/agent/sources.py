"""Where notices come from: one row and one parser for each cloud. Built by `cli.py` for the node agent.

Knows metadata endpoints, files and what machines say of themselves (DMI, environment, files); never tries an address to find out
where it is. Everything foreign is read below a root and from an environment that are given, so a test is any cloud it likes. What each
cloud promises, and where that is written: docs/NOTICES.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote, urlsplit

import yaml

from harness.agent.notices import KINDS, Notice, Source
from harness.core.world import BadInput

log = logging.getLogger(__name__)

AWS_V4, AWS_V6 = "http://169.254.169.254", "http://[fd00:ec2::254]"
GCP_HOST = "metadata.google.internal"
AZURE = "http://169.254.169.254"
TOKEN_TTL_S = 3600
REFRESH_BEFORE_S = 15.0  # as aws-node-termination-handler does
TOKENLESS_S = 60.0  # after a token request timed out (hop limit, in containers): how long to go on without
MAX_ANSWER = 1 << 20
SLOWEST_PACE_S = 5.0  # however long a service has been silent: the notice that it will give may leave us 30 s
SKEW_S = 2.0  # Date headers have whole seconds, so less than this is no difference of clocks
ANSWERLESS = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError)  # and answers that mean nothing
Parser: TypeAlias = Callable[[str], tuple[Notice, ...]]


# ---- what all services over HTTP have in common -----------------------------------------------------------------
@dataclass(frozen=True)
class Reply:
    status: int
    body: str
    headers: Mapping[str, str]  # names in lower case
    skew_s: float  # how far the service's clock is ahead of ours; 0.0 if the same, or unknown


class Endpoint:
    """One service over HTTP. Metadata is link-local, so no proxy is ever asked; nothing is retried, and every wait has a bound."""

    def __init__(self, base: str, *, now: Callable[[], float] = time.time, tls: ssl.SSLContext | None = None):
        self.base, self._now, self._tls = base.rstrip("/"), now, tls
        where = urlsplit(self.base)
        if where.scheme not in ("http", "https") or not where.hostname:
            raise BadInput(f"metadata endpoint {base!r}: wanted http://host or http://host:port")
        self._host, self._port, self._prefix, self._secure = where.hostname, where.port, where.path, where.scheme == "https"
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()
        self._closed = False

    def request(self, method: str, path: str, headers: Mapping[str, str], *, timeout_s: float, body: bytes | None = None) -> Reply:
        """Raises OSError (TimeoutError, refused, ...) or http.client.HTTPException when there is no answer."""
        if self._secure:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout_s, context=self._tls or ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("closed")
            self._connection = connection
        try:
            connection.request(method, self._prefix + path, body, dict(headers))
            answer = connection.getresponse()
            text = answer.read(MAX_ANSWER).decode(errors="replace")
            said = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, text, said, self._skew(said.get("date", "")))
        finally:
            with self._lock:
                self._connection = None
            connection.close()

    def close(self) -> None:
        """Break off a request that waits, and have no more."""
        with self._lock:
            self._closed = True
            wire = self._connection.sock if self._connection is not None else None
            if wire is not None:
                with contextlib.suppress(OSError):  # it has just ended by itself
                    wire.shutdown(socket.SHUT_RDWR)

    def _skew(self, date: str) -> float:
        try:
            skew_s = parsedate_to_datetime(date).timestamp() - self._now()
        except (ValueError, TypeError):
            return 0.0
        return skew_s if abs(skew_s) >= SKEW_S else 0.0


class Polled:
    """What sources that ask a service share: what is known outlives silence, silence slows the asking, deadlines are on our clock."""

    name = ""

    def __init__(self, endpoint: Endpoint, pace_s: float, timeout_s: float):
        self.pace_s, self.errors = pace_s, 0
        self._endpoint, self._usual_pace_s, self._timeout_s = endpoint, pace_s, timeout_s
        self._silent = 0  # polls in a row
        self._deadlines: dict[tuple[str, float], float] = {}

    def poll(self) -> Sequence[Notice]:
        raise NotImplementedError

    def acknowledge(self, notice: Notice) -> bool:
        return False

    def close(self) -> None:
        self._endpoint.close()

    def _heard(self) -> None:
        self._silent, self.pace_s = 0, self._usual_pace_s

    def _unheard(self, what: str, error: Exception) -> None:
        self.errors += 1
        self._silent += 1
        self.pace_s = max(self._usual_pace_s, min(SLOWEST_PACE_S, self._usual_pace_s * 2.0 ** min(self._silent - 1, 10)))
        say = log.warning if self._silent == 1 else log.debug  # an outage is told once
        say("notices: %s%s: %s: %s", self._endpoint.base, what, type(error).__name__, error)

    def _on_our_clock(self, notices: Sequence[Notice], skew_s: float) -> tuple[Notice, ...]:
        """A deadline is told by the cloud's clock. It is converted once, so that it stands still however the clocks wander."""
        return tuple(
            n if n.deadline_s is None else replace(n, deadline_s=self._deadlines.setdefault((n.id, n.deadline_s), n.deadline_s - skew_s))
            for n in notices
        )


def _hashed(prefix: str, body: str) -> str:
    return f"{prefix}-{hashlib.sha256(body.encode()).hexdigest()[:16]}"


def utc(text: str) -> float:
    """RFC 3339 (`2017-09-18T08:22:00Z`), RFC 1123 (`Mon, 11 Apr 2026 22:26:58 GMT`) or EC2's `21 Jan 2019 09:00:43 GMT`, as seconds
    since 1970. Raises ValueError."""
    if text.endswith(" GMT"):
        text = text.rpartition(", ")[2]  # the name of the day says nothing new, and may be wrong
        return datetime.strptime(text, "%d %b %Y %H:%M:%S GMT").replace(tzinfo=timezone.utc).timestamp()
    at = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()


# ---- AWS --------------------------------------------------------------------------------------------------------
class AwsSource(Polled):
    """EC2: spot interruption (kill), rebalance recommendation (soft) and scheduled events (maintenance), over IMDSv2."""

    name = "aws"

    def __init__(
        self,
        endpoint: str = AWS_V4,
        *,
        pace_s: float = 0.5,
        timeout_s: float = 2.0,
        maintenance_every_s: float = 30.0,  # it is announced days before
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ):
        super().__init__(Endpoint(endpoint, now=now), pace_s, timeout_s)
        self._monotonic, self._maintenance_every_s = monotonic, maintenance_every_s
        self._token, self._token_until_s, self._tokenless_until_s = "", 0.0, 0.0
        self._maintenance_due_s = 0.0
        self._known: dict[str, tuple[Notice, ...]] = {}

    def poll(self) -> Sequence[Notice]:
        now = self._monotonic()
        paths: list[tuple[str, Parser]] = [("spot/instance-action", interruption), ("events/recommendations/rebalance", rebalance)]
        if now >= self._maintenance_due_s:
            paths.append(("events/maintenance/scheduled", maintenance))
        for path, read in paths:
            if not self._learn(path, read):
                break  # the endpoint is silent: its other paths would each cost another time-out
            if read is maintenance:
                self._maintenance_due_s = now + self._maintenance_every_s
        return [notice for notices in self._known.values() for notice in notices]

    def _learn(self, path: str, read: Parser) -> bool:
        """Ask for one kind of notice. Without an answer, or with nonsense, what was in force stays so. False: silence."""
        try:
            reply = self._get(f"/latest/meta-data/{path}")
            self._known[path] = () if reply.status == 404 else self._on_our_clock(read(reply.body), reply.skew_s)
        except ANSWERLESS as e:
            self._unheard(f"/{path}", e)
            return not isinstance(e, (OSError, http.client.HTTPException))
        self._heard()
        return True

    def _get(self, path: str) -> Reply:
        """200 or 404. A 401 (expired token) gets one more try with a new token."""
        for last in (False, True):
            token = self._fresh_token()
            headers = {"X-aws-ec2-metadata-token": token} if token else {}
            reply = self._endpoint.request("GET", path, headers, timeout_s=self._timeout_s)
            if reply.status in (200, 404):
                return reply
            if reply.status != 401 or last:
                break
            self._token, self._tokenless_until_s = "", 0.0
        raise ValueError(f"status {reply.status}")

    def _fresh_token(self) -> str:
        now = self._monotonic()
        if self._token and now < self._token_until_s - REFRESH_BEFORE_S:
            return self._token
        if now < self._tokenless_until_s:
            return ""
        ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
        try:
            reply = self._endpoint.request("PUT", "/latest/api/token", ttl, timeout_s=self._timeout_s)
        except TimeoutError:
            # The hop limit swallows the token's way back into a container; IMDSv1 may still answer.
            self.errors += 1
            self._token, self._tokenless_until_s = "", now + TOKENLESS_S
            return ""
        if reply.status != 200 or not reply.body:
            raise ValueError(f"no token: status {reply.status}")
        self._token, self._token_until_s = reply.body, now + TOKEN_TTL_S
        return reply.body


def interruption(body: str) -> tuple[Notice, ...]:
    said = json.loads(body)
    action = str(said["action"])
    # A hibernating instance is taken at once; the time is when the notice began.
    deadline_s = None if action == "hibernate" else utc(said["time"])
    return (Notice("aws", "kill", _hashed("aws-itn", body), deadline_s, False, f"spot {action} at {said['time']}"),)


def rebalance(body: str) -> tuple[Notice, ...]:
    noticed = json.loads(body)["noticeTime"]
    return (Notice("aws", "soft", _hashed("aws-rebalance", body), None, False, f"rebalance recommended at {noticed}"),)


def maintenance(body: str) -> tuple[Notice, ...]:
    return tuple(
        Notice("aws", "maintenance", str(e["EventId"]), utc(e["NotBefore"]), True, f"{e.get('Code', '')}: {e.get('Description', '')}")
        for e in json.loads(body)
        if e.get("State", "active") == "active"
    )


# ---- GCP --------------------------------------------------------------------------------------------------------
PREEMPTED, MAINTENANCE_EVENT = "instance/preempted", "instance/maintenance-event"
GCP_KILL_S = 30.0  # from TRUE to the end, best effort
GCP_TERMINATE_S = {True: 3600.0, False: 60.0}  # from the notice to the end, with a GPU and without


class GcpSource(Polled):
    """One value of Compute Engine's metadata server, heard of at the moment of its change by a GET that hangs until then.

    GCP tells no times: they follow from when the value changed, if we saw that. A value that was there before us says only: at once.
    """

    name = "gcp"

    def __init__(
        self,
        endpoint: str = f"http://{GCP_HOST}",
        path: str = PREEMPTED,
        *,
        gpu: bool = True,
        hang_s: float = 60.0,
        pace_s: float = 0.1,  # between two hanging GETs: a server that does not hang must not be stormed
        timeout_s: float = 2.0,
        now: Callable[[], float] = time.time,
    ):
        super().__init__(Endpoint(endpoint, now=now), pace_s, timeout_s)
        self._path, self._gpu, self._hang_s, self._now = path, gpu, hang_s, now
        self._etag, self._value = "", ""
        self._known: tuple[Notice, ...] = ()

    def poll(self) -> Sequence[Notice]:
        # The first answer after a silence must come at once: only then is it known what we missed.
        hang = f"?wait_for_change=true&timeout_sec={self._hang_s:g}&last_etag={quote(self._etag)}" if self._etag else ""
        limit_s = self._timeout_s + (self._hang_s if self._etag else 0.0)
        try:
            reply = self._endpoint.request(
                "GET", f"/computeMetadata/v1/{self._path}{hang}", {"Metadata-Flavor": "Google"}, timeout_s=limit_s
            )
            if reply.status != 200 or reply.headers.get("metadata-flavor") != "Google":
                raise ValueError(f"status {reply.status}, Metadata-Flavor {reply.headers.get('metadata-flavor')!r}")
            self._take(reply.body.strip())
        except ANSWERLESS as e:
            self._etag = ""
            self._unheard(f"/{self._path}", e)
            return self._known
        self._etag = reply.headers.get("etag", "")
        self._heard()
        if not self._etag:  # then there is nothing to wait by
            self.pace_s = max(self.pace_s, 1.0)
        return self._known

    def _take(self, value: str) -> None:
        if value == self._value:
            return
        saw_it_change, fresh = bool(self._value), gcp_value(self._path, value, self._gpu, self._now())
        if not saw_it_change:
            fresh = tuple(replace(n, deadline_s=None) if n.kind == "maintenance" else n for n in fresh)
        self._value, self._known = value, fresh


def gcp_value(path: str, value: str, gpu: bool, since_s: float) -> tuple[Notice, ...]:
    """`since_s`: when it became so. Raises ValueError for what Compute Engine does not say."""
    name = f"gcp-{path.rpartition('/')[2]}-{value.lower()}-{since_s:.0f}"
    match path, value:
        case (_, "FALSE") if path == PREEMPTED:
            return ()
        case (_, "TRUE") if path == PREEMPTED:
            return (Notice("gcp", "kill", name, since_s + GCP_KILL_S, False, "preempted"),)
        case (_, "NONE") if path == MAINTENANCE_EVENT:
            return ()
        case (_, "MIGRATE_ON_HOST_MAINTENANCE") if path == MAINTENANCE_EVENT:  # a pause; machines with GPUs are never migrated
            return (Notice("gcp", "soft", name, None, True, "live migration", pause=True),)
        case (_, "TERMINATE_ON_HOST_MAINTENANCE") if path == MAINTENANCE_EVENT:
            return (Notice("gcp", "maintenance", name, since_s + GCP_TERMINATE_S[gpu], True, "host maintenance"),)
    raise ValueError(f"{path} is {value!r}")


# ---- Azure ------------------------------------------------------------------------------------------------------
AZURE_KINDS = {"Preempt": "kill", "Terminate": "kill", "Reboot": "maintenance", "Redeploy": "maintenance", "Freeze": "soft"}
AZURE_VERSION, AZURE_NAME_VERSION = "2020-07-01", "2021-02-01"


class AzureSource(Polled):
    """Scheduled Events of a virtual machine. Can tell Azure to go ahead, and tells it nothing that concerns other machines."""

    name = "azure"

    def __init__(
        self,
        endpoint: str = AZURE,
        *,
        pace_s: float = 0.5,
        timeout_s: float = 2.0,
        first_timeout_s: float = 130.0,  # the first call ever switches the service on, which takes up to two minutes
        speaks_for_all: bool = False,
        now: Callable[[], float] = time.time,
    ):
        super().__init__(Endpoint(endpoint, now=now), pace_s, timeout_s)
        self._first_timeout_s, self._answered, self._speaks_for_all = first_timeout_s, False, speaks_for_all
        self._own_name = ""
        self._incarnation: int | None = None
        self._known: tuple[Notice, ...] = ()

    def poll(self) -> Sequence[Notice]:
        try:
            reply = self._ask("GET", f"/metadata/scheduledevents?api-version={AZURE_VERSION}")
            document = json.loads(reply.body)
            if int(document["DocumentIncarnation"]) != self._incarnation:
                before, name = {n.id: n for n in self._known}, self._name()
                fresh = self._on_our_clock(azure_events(document, name, self._speaks_for_all), reply.skew_s)
                # An event that has started tells its time no more.
                self._known = tuple(before[n.id] if n.deadline_s is None and n.id in before else n for n in fresh)
                self._incarnation = int(document["DocumentIncarnation"]) if name else None
        except ANSWERLESS as e:
            self._incarnation = None  # another service may count from one again
            self._unheard("/metadata/scheduledevents", e)
            return self._known
        self._heard()
        return self._known

    def acknowledge(self, notice: Notice) -> bool:
        body = json.dumps({"StartRequests": [{"EventId": notice.id}]}).encode()
        try:
            self._ask("POST", f"/metadata/scheduledevents?api-version={AZURE_VERSION}", body)
        except ANSWERLESS as e:
            self._unheard("/metadata/scheduledevents", e)
            return False
        return True

    def _name(self) -> str:
        """This machine's name among an event's Resources; "" if it cannot be had now."""
        if not self._own_name:
            path = f"/metadata/instance/compute/name?api-version={AZURE_NAME_VERSION}&format=text"
            try:
                self._own_name = self._ask("GET", path).body.strip()
            except ANSWERLESS as e:
                self._unheard("/metadata/instance/compute/name", e)
        return self._own_name

    def _ask(self, method: str, path: str, body: bytes | None = None) -> Reply:
        limit_s = self._timeout_s if self._answered else self._first_timeout_s
        headers = {"Metadata": "true", **({"Content-Type": "application/json"} if body else {})}
        # `acknowledge` is called by another thread than `poll`, so it has a connection of its own.
        endpoint = Endpoint(self._endpoint.base) if method == "POST" else self._endpoint
        reply = endpoint.request(method, path, headers, timeout_s=limit_s, body=body)
        if reply.status != 200:
            raise ValueError(f"status {reply.status}")
        self._answered = True
        return reply


def azure_events(document: Mapping[str, Any], own_name: str, speaks_for_all: bool = False) -> tuple[Notice, ...]:
    """The events that name this machine (any event, if its name is unknown). An acknowledgement starts the event for all machines that
    it names, so only the first of them gives it, and only if they are all ours."""
    found = []
    for e in document["Events"]:
        named = [str(r) for r in e.get("Resources") or []]
        if named and own_name and own_name.lower() not in (r.lower() for r in named):
            continue
        kind, name = AZURE_KINDS.get(e["EventType"], "soft"), str(e["EventId"])
        detail = f"{e['EventType']}: {e.get('Description') or e.get('EventSource') or ''}".rstrip(": ")
        deadline_s = utc(e["NotBefore"]) if e.get("NotBefore") and kind != "soft" else None
        alone = [r.lower() for r in named] == [own_name.lower()]
        leads = alone or (speaks_for_all and bool(own_name) and own_name.lower() == min(r.lower() for r in named))
        pause, scope = kind == "soft", "self" if alone else "others"
        found.append(Notice("azure", kind, name, deadline_s, True, detail, scope, pause, acknowledge=leads and not pause))
    return tuple(found)


# ---- Kubernetes -------------------------------------------------------------------------------------------------
ACCOUNT = "var/run/secrets/kubernetes.io/serviceaccount"
# taint -> kind, seconds from its timeAdded to the end (None: not known). Who puts them there: docs/NOTICES.md.
TAINTS: dict[str, tuple[str, float | None]] = {
    "aws-node-termination-handler/spot-itn": ("kill", 120.0),
    "aws-node-termination-handler/asg-lifecycle-termination": ("kill", None),
    "aws-node-termination-handler/scheduled-maintenance": ("maintenance", None),
    "aws-node-termination-handler/rebalance-recommendation": ("soft", None),
    "cloud.google.com/impending-node-termination": ("kill", 25.0),
    "karpenter.sh/disrupted": ("kill", None),
    "karpenter.sh/disruption": ("kill", None),
    "ToBeDeletedByClusterAutoscaler": ("kill", None),
    "DeletionCandidateOfClusterAutoscaler": ("soft", None),
    "node.cloudprovider.kubernetes.io/shutdown": ("kill", None),
}


class KubernetesSource(Polled):
    """What the API server says of our pod (it is being deleted) and of our node (taints), as far as the service account may read it."""

    name = "kubernetes"

    def __init__(
        self,
        endpoint: str,
        pod: str,
        account: Path,
        *,
        pace_s: float = 2.0,  # the API server is shared by the whole cluster
        timeout_s: float = 2.0,
        now: Callable[[], float] = time.time,
    ):
        authority = account / "ca.crt"
        tls = ssl.create_default_context(cafile=str(authority)) if endpoint.startswith("https") and authority.exists() else None
        super().__init__(Endpoint(endpoint, now=now, tls=tls), pace_s, timeout_s)
        self._pod, self._account, self._node = pod, account, ""
        self._forbidden: set[str] = set()
        self._known: dict[str, tuple[Notice, ...]] = {}

    def poll(self) -> Sequence[Notice]:
        try:
            space = (self._account / "namespace").read_text().strip()
            self._learn(f"/api/v1/namespaces/{space}/pods/{self._pod}", self._read_pod)
            if self._node:
                self._learn(f"/api/v1/nodes/{self._node}", node_taints)
        except ANSWERLESS as e:
            self._unheard("", e)
        else:
            self._heard()
        return [notice for notices in self._known.values() for notice in notices]

    def _learn(self, path: str, read: Parser) -> None:
        if path in self._forbidden:
            return
        token = (self._account / "token").read_text().strip()  # the kubelet renews it
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        reply = self._endpoint.request("GET", path, headers, timeout_s=self._timeout_s)
        if reply.status == 403:
            self._forbidden.add(path)
            log.warning("notices: the service account may not read %s; without it only SIGTERM tells", path)
            return
        if reply.status != 200:
            raise ValueError(f"{path}: status {reply.status}")
        self._known[path] = self._on_our_clock(read(reply.body), reply.skew_s)

    def _read_pod(self, body: str) -> tuple[Notice, ...]:
        self._node = str(json.loads(body)["spec"].get("nodeName") or "")
        return pod_deletion(body)


def pod_deletion(body: str) -> tuple[Notice, ...]:
    """`deletionTimestamp` of a pod is when its grace is over."""
    about = json.loads(body)["metadata"]
    at = about.get("deletionTimestamp")
    return (Notice("kubernetes", "kill", f"pod-{about.get('uid', '')}", utc(at), False, "the pod is being deleted"),) if at else ()


def node_taints(body: str) -> tuple[Notice, ...]:
    node = json.loads(body)
    found = []
    for taint in node["spec"].get("taints") or []:
        if taint["key"] in TAINTS:
            kind, lead_s = TAINTS[taint["key"]]
            since = taint.get("timeAdded")
            deadline_s = utc(since) + lead_s if since and lead_s is not None else None
            found.append(Notice("kubernetes", kind, f"taint-{taint['key']}-{since or ''}", deadline_s, True, f"node taint {taint['key']}"))
    return tuple(found)


# ---- files ------------------------------------------------------------------------------------------------------
class FileSource:
    """A file that a person may `touch`, or a script fill with JSON; removing it takes the notice back.

    Empty: go now. JSON: any of `{"kind", "grace_s" | "deadline_s", "id", "detail"}`; grace counts from the file's last change.
    """

    name = "file"

    def __init__(self, path: str | Path, *, pace_s: float = 0.5, settle_s: float = 0.2, now: Callable[[], float] = time.time):
        self.path, self.pace_s, self.errors = Path(path), pace_s, 0
        self._settle_s, self._now = settle_s, now
        self._seen: tuple[int, int] = (0, 0)
        self._known: tuple[Notice, ...] = ()

    def poll(self) -> Sequence[Notice]:
        try:
            stat = self.path.stat()
            text = self.path.read_text(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            self._known, self._seen = (), (0, 0)
            return []
        except OSError as e:
            self.errors += 1
            log.warning("notices: %s: %s", self.path, e.strerror)
            return list(self._known)
        if self._seen != (stat.st_ino, stat.st_mtime_ns):
            try:
                fresh, whole = self._parse(text, stat), bool(text.strip())
            except (ValueError, TypeError, yaml.YAMLError) as e:
                fresh, whole = self._unreadable(f"unreadable: {e}", stat), False
            if not whole and 0 <= self._now() - stat.st_mtime < self._settle_s:
                return list(self._known)  # somebody may be in the middle of writing it
            if any(n.detail.startswith("unreadable") for n in fresh):
                self.errors += 1
            self._known, self._seen = fresh, (stat.st_ino, stat.st_mtime_ns)
        return list(self._known)

    def acknowledge(self, notice: Notice) -> bool:
        return False

    def close(self) -> None:
        pass

    def _id(self, stat: Any) -> str:
        return f"{self.name}-{stat.st_ino}-{stat.st_mtime_ns}"

    def _unreadable(self, why: str, stat: Any) -> tuple[Notice, ...]:
        """Somebody wants something: the safe reading is that the node goes."""
        return (Notice(self.name, "kill", self._id(stat), None, True, why),)

    def _parse(self, text: str, stat: Any) -> tuple[Notice, ...]:
        said = json.loads(text) if text.strip() else {}
        if not isinstance(said, dict):
            raise ValueError("not a JSON object")
        deadline_s = said.get("deadline_s")
        if deadline_s is None and said.get("grace_s") is not None:
            deadline_s = stat.st_mtime + float(said["grace_s"])
        kind = said.get("kind", "kill")
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
        deadline_s = None if deadline_s is None else float(deadline_s)
        name, detail = str(said.get("id") or self._id(stat)), str(said.get("detail", "")) or str(self.path)
        return (Notice("file", kind, name, deadline_s, True, detail),)


class MithrilSource(FileSource):
    """A Mithril bid is lost: a YAML file says so five minutes before, and vanishes if the bid wins again."""

    name = "mithril"
    LEAD_S = 300.0
    LOSING = ("STATUS_PREEMPTING", "STATUS_RELOCATING")

    def _parse(self, text: str, stat: Any) -> tuple[Notice, ...]:
        said = yaml.safe_load(text)
        if not isinstance(said, dict):
            raise ValueError("not a YAML mapping")
        status, end = str(said.get("instance_status", "")), said.get("end_time")
        if status not in self.LOSING:
            return ()
        if isinstance(end, datetime):
            deadline_s = (end if end.tzinfo else end.replace(tzinfo=timezone.utc)).timestamp()
        elif isinstance(end, str) and end.strip():
            deadline_s = utc(end.strip())
        else:
            deadline_s = float(end) if end is not None else stat.st_mtime + self.LEAD_S
        detail = f"{status}, bid {said.get('bid_status', '?')}"
        return (Notice("mithril", "kill", f"mithril-{deadline_s:.0f}", deadline_s, True, detail),)


# ---- a time that is known from the start ------------------------------------------------------------------------
class LimitSource:
    """The end of a capacity block, of a batch system's time limit, or of one's patience."""

    def __init__(self, name: str, deadline_s: float):
        self.name, self.pace_s, self.errors = name, 60.0, 0
        self._notice = Notice(name, "maintenance", f"{name}-{deadline_s:.0f}", deadline_s, False, "the time is up then")

    def poll(self) -> Sequence[Notice]:
        return [self._notice]

    def acknowledge(self, notice: Notice) -> bool:
        return False

    def close(self) -> None:
        pass


def moment(text: str) -> float:
    """`2026-11-21T08:00:00Z`, or seconds since 1970. Raises BadInput."""
    try:
        return float(text) if re.fullmatch(r"\d{9,}(\.\d*)?", text) else utc(text)
    except ValueError:
        raise BadInput(f"{text!r} is no time; wanted 2026-11-21T08:00:00Z or seconds since 1970") from None


def duration(text: str) -> float:
    """`90`, `90s`, `30m`, `12h`, `7d` in seconds. Raises BadInput."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None:
        raise BadInput(f"{text!r} is no duration; wanted seconds, or a number with s, m, h or d, such as 12h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


# ---- which of them this machine has -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Machine:
    """What a machine says of itself: its environment, and files below `root`."""

    env: Mapping[str, str]
    root: Path = Path("/")
    speaks_for_all: bool = False  # every machine that an event names is of this run, so one of them may acknowledge it for all

    def dmi(self, *signs: str) -> bool:
        """Does its firmware name one of these? Containers see it too. Xen instances name themselves in other files than Nitro ones."""
        if "HARNESS_NODE_DIR" in self.env:  # a node of the local cloud is not the machine that it runs on
            return False
        for name in ("sys_vendor", "product_name", "board_vendor", "bios_vendor", "product_version", "bios_version", "chassis_asset_tag"):
            try:
                said = (self.root / "sys/class/dmi/id" / name).read_text(errors="replace").strip().lower()
            except OSError:
                continue
            if any(sign.lower() in said for sign in signs) or ("Amazon EC2" in signs and said.endswith("amazon")):
                return True
        return False

    @property
    def gpu(self) -> bool:
        return any((self.root / "dev").glob("nvidia[0-9]*"))


@dataclass(frozen=True)
class Row:
    """One cloud: how a machine is known to be there, what SIGTERM leaves it, and where its notices appear."""

    here: Callable[[Machine], bool]
    sigterm_s: float | None  # None: as long as it likes; SIGTERM is no sign of the end there
    sources: Callable[[Machine], list[Source]]


def _aws(m: Machine) -> list[Source]:
    v6 = m.env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower() == "ipv6"
    endpoint = m.env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or m.env.get("INSTANCE_METADATA_URL") or (AWS_V6 if v6 else AWS_V4)
    return [] if m.env.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true" else [AwsSource(endpoint)]


def _gcp(m: Machine) -> list[Source]:
    endpoint = f"http://{m.env.get('GCE_METADATA_HOST') or m.env.get('GCE_METADATA_ROOT') or m.env.get('GCE_METADATA_IP') or GCP_HOST}"
    return [GcpSource(endpoint, path, gpu=m.gpu) for path in (PREEMPTED, MAINTENANCE_EVENT)]


def _kubernetes(m: Machine) -> list[Source]:
    host, port = m.env.get("KUBERNETES_SERVICE_HOST", ""), m.env.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
    account = m.root / ACCOUNT
    pod = m.env.get("POD_NAME") or m.env.get("HOSTNAME", "")
    if not (host and pod and (account / "token").exists()):
        return []
    return [KubernetesSource(f"https://{f'[{host}]' if ':' in host else host}:{port}", pod, account)]


def _slurm(m: Machine) -> list[Source]:
    end = m.env.get("SLURM_JOB_END_TIME", "")
    return [LimitSource("slurm", float(end))] if end.isdigit() and int(end) else []


def _file(m: Machine) -> list[Source]:
    path = m.env.get("HARNESS_NOTICE_FILE") or (f"{m.env['HARNESS_NODE_DIR']}/notice" if m.env.get("HARNESS_NODE_DIR") else "")
    return [FileSource(path)] if path else []


def _limit(m: Machine) -> list[Source]:
    return [LimitSource("limit", moment(m.env["HARNESS_CAPACITY_END"]))] if m.env.get("HARNESS_CAPACITY_END") else []


def _given(*names: str) -> Callable[[Machine], bool]:
    return lambda m: any(m.env.get(name) for name in names)


def _none(_: Machine) -> list[Source]:
    return []


# Narrower places come first: their SIGTERM is the one that reaches us.
CLOUDS: dict[str, Row] = {
    "file": Row(lambda m: bool(_file(m)), None, _file),
    "limit": Row(_given("HARNESS_CAPACITY_END"), None, _limit),
    "slurm": Row(_given("SLURM_JOB_ID"), 30.0, _slurm),
    "kubernetes": Row(_given("KUBERNETES_SERVICE_HOST"), 25.0, _kubernetes),
    "runpod": Row(_given("RUNPOD_POD_ID"), 5.0, _none),
    "sagemaker": Row(_given("SM_TRAINING_ENV"), 120.0, _none),
    "mithril": Row(lambda m: (m.root / "opt/mithril").is_dir(), 30.0, lambda m: [MithrilSource(m.root / "opt/mithril/MITHRIL_SIGNAL.yml")]),
    "nebius": Row(lambda m: m.dmi("Nebius"), 60.0, _none),
    "aws": Row(lambda m: _given("AWS_EC2_METADATA_SERVICE_ENDPOINT", "INSTANCE_METADATA_URL")(m) or m.dmi("Amazon EC2"), 30.0, _aws),
    "gcp": Row(
        lambda m: _given("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")(m) or m.dmi("Google Compute Engine"), 25.0, _gcp
    ),
    "azure": Row(
        lambda m: _given("HARNESS_AZURE_METADATA")(m) or m.dmi("7783-7084-3265-9085-8269-3286-77"),
        30.0,
        lambda m: [AzureSource(m.env.get("HARNESS_AZURE_METADATA") or AZURE, speaks_for_all=m.speaks_for_all)],
    ),
}


def places(env: Mapping[str, str], root: Path = Path("/"), asked: str = "") -> list[str]:
    """The rows of `CLOUDS` that hold here: those `asked` for by name ("aws,gcp"), or what the machine says of itself. Raises BadInput."""
    machine = Machine(env, root)
    if not asked:
        return [name for name, row in CLOUDS.items() if row.here(machine)]
    names = [name.strip() for name in asked.split(",") if name.strip() not in ("", "none")]
    if unknown := [name for name in names if name not in CLOUDS]:
        raise BadInput(f"--notices: {', '.join(unknown)} is not known; wanted a list of {', '.join(CLOUDS)}, or none")
    return names


def detect(env: Mapping[str, str], root: Path = Path("/"), asked: str = "", speaks_for_all: bool = False) -> list[Source]:
    """The sources of this machine, by what it says of itself (or as asked for); never by trying addresses and waiting for time-outs."""
    machine = Machine(env, root, speaks_for_all)
    return [source for name in places(env, root, asked) for source in CLOUDS[name].sources(machine)]


def sigterm_s(env: Mapping[str, str], root: Path = Path("/"), asked: str = "") -> float:
    """How long a SIGTERM leaves us here: the shortest that any of our places promises; 30 s where nobody promises anything."""
    promised = [grace for name in places(env, root, asked) if (grace := CLOUDS[name].sigterm_s) is not None]
    return min(promised, default=30.0)
