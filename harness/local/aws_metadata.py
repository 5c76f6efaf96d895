"""A fake of AWS's instance metadata service, with spot notices. It ships with the package."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone

from harness.local.metadata_reply import (
    MAX_TTL_S,
    NOT_FOUND,
    TOKEN_HEADER,
    TOKEN_PATH,
    TTL_HEADER,
    Answer,
    json_answer,
    no_kind,
    rfc3339,
)


# ---- AWS -----------------------------------------------------------------------------------------
class AwsImds:
    """The instance metadata service, version 2, of one EC2 instance."""

    server = "EC2ws"

    def __init__(
        self,
        instance_id: str,
        *,
        zone: str = "local-1a",
        instance_type: str = "local.cpu",
        zone_id: str = "",  # the zone's id, which is the same in every account
        launched_s: float | None = None,  # wall clock, seconds since 1970
        tokens_required: bool = True,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self._monotonic, self._tokens_required = monotonic, tokens_required
        self._lock = threading.Lock()
        self._tokens: dict[str, float] = {}  # token -> when it expires
        region = zone[:-1] if zone[-1:].isalpha() else zone
        self._fixed = {
            "instance-id": instance_id,
            "instance-type": instance_type,
            "instance-life-cycle": "spot",
            "local-ipv4": "127.0.0.1",
            "local-hostname": "localhost",
            "placement/availability-zone": zone,
            "placement/region": region,
            **({"placement/availability-zone-id": zone_id} if zone_id else {}),
        }
        self._identity = {
            "instanceId": instance_id,
            "instanceType": instance_type,
            "region": region,
            "availabilityZone": zone,
            **({} if launched_s is None else {"pendingTime": rfc3339(launched_s)}),
        }
        self._notices: dict[str, Answer] = {}
        self._maintenance: list[dict[str, str]] = []

    # -- what happens to the instance --
    def notice(self, kind: str, deadline_s: float) -> str:
        match kind:
            case "kill":
                self.announce("terminate", deadline_s)
                return "spot/instance-action"
            case "soft":
                self.rebalance(deadline_s)
                return "events/recommendations/rebalance"
            case "maintenance":
                event = f"instance-event-{secrets.token_hex(8)}"
                at = datetime.fromtimestamp(deadline_s, timezone.utc).strftime(
                    "%d %b %Y %H:%M:%S GMT"
                )
                self.maintenance(
                    {
                        "NotBefore": at,
                        "Code": "system-reboot",
                        "Description": "reboot",
                        "EventId": event,
                        "State": "active",
                    }
                )
                return event
        raise no_kind(kind)

    def announce(self, action: str, deadline_s: float) -> None:
        """Announce a spot interruption. `action`: "terminate", "stop" or "hibernate";
        `deadline_s`: wall clock, seconds since 1970."""
        at = rfc3339(deadline_s)
        with self._lock:
            self._notices["spot/instance-action"] = json_answer({"action": action, "time": at})
            if action == "terminate":
                self._notices["spot/termination-time"] = Answer(200, at)

    def cancel(self, name: str = "") -> None:
        """Withdraw the notice `name`, or all of them. (Real AWS cancels scheduled events only; the
        tests of withdrawn notices need more.)"""
        with self._lock:
            for path in [p for p in self._notices if not name or p == name]:
                self._notices.pop(path, None)
                if path == "spot/instance-action":
                    self._notices.pop("spot/termination-time", None)
            for event in self._maintenance:
                if not name or event["EventId"] == name:
                    event["State"] = "canceled"

    def release(self) -> None:
        pass

    def rebalance(self, noticed_s: float) -> None:
        with self._lock:
            self._notices["events/recommendations/rebalance"] = json_answer(
                {"noticeTime": rfc3339(noticed_s)}
            )

    def maintenance(self, event: Mapping[str, str]) -> None:
        """Add a scheduled event, or replace the one with the same EventId (its State goes from
        active to completed or canceled)."""
        with self._lock:
            self._maintenance = [
                e for e in self._maintenance if e.get("EventId") != event.get("EventId")
            ] + [dict(event)]

    # -- what the instance sees --
    def answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> Answer:
        path = path.partition("?")[0].rstrip("/") or "/"
        with self._lock:
            if path == TOKEN_PATH:
                return (
                    self._token(headers)
                    if method == "PUT"
                    else Answer(405, "405 - Method Not Allowed")
                )
            if method != "GET":
                return Answer(405, "405 - Method Not Allowed")
            echo: dict[str, str] = {}
            token = headers.get(TOKEN_HEADER.lower())
            if token is not None or self._tokens_required:
                left_s = self._tokens.get(token or "", 0.0) - self._monotonic()
                if left_s <= 0:
                    return Answer(401, "401 - Unauthorized")
                echo[TTL_HEADER] = str(int(left_s))
            found = self._get(path)
        return Answer(found.status, found.body, found.content_type, echo)

    def _token(self, headers: Mapping[str, str]) -> Answer:
        if headers.get("x-forwarded-for") is not None:
            return Answer(403, "403 - Forbidden")
        ttl = headers.get(TTL_HEADER.lower()) or ""
        if not (ttl.isascii() and ttl.isdigit()) or not 1 <= int(ttl) <= MAX_TTL_S:
            return Answer(400, "400 - Bad Request")
        now = self._monotonic()
        # drop the expired tokens, so that the table stays bounded
        self._tokens = {t: until for t, until in self._tokens.items() if until > now}
        token = secrets.token_urlsafe(42)
        self._tokens[token] = now + int(ttl)
        return Answer(200, token, headers={TTL_HEADER: ttl})

    def _get(self, path: str) -> Answer:
        if path == "/latest/dynamic/instance-identity/document":
            return json_answer(self._identity)
        if path == "/latest/meta-data":
            return Answer(
                200,
                "\n".join(
                    sorted({*(k.partition("/")[0] for k in self._fixed), "events/", "spot/"})
                ),
            )
        name = path.removeprefix("/latest/meta-data/")
        if name == "events/maintenance/scheduled":
            return json_answer(self._maintenance)  # an empty list, not 404, when nothing is planned
        if name in self._fixed:
            return Answer(200, self._fixed[name])
        return self._notices.get(name, Answer(404, NOT_FOUND, "text/html"))
