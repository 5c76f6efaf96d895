"""Notices of AWS, and the metadata of an instance there."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from harness.core.facts import NodeFound
from harness.notices.notice import (
    ANSWERLESS,
    REFRESH_BEFORE_S,
    TOKEN_TTL_S,
    TOKENLESS_S,
    Endpoint,
    Notice,
    Polled,
    hashed,
    utc,
)

if TYPE_CHECKING:
    from harness.notices.notice import MetadataReply, NoticeParser

AWS_V4, AWS_V6 = "http://169.254.169.254", "http://[fd00:ec2::254]"


# ---- AWS -----------------------------------------------------------------------------------------
class AwsSource(Polled):
    """Notices of EC2: spot interruption (kill), rebalance recommendation (soft) and scheduled
    events (maintenance), over IMDSv2."""

    name = "aws"

    def __init__(
        self,
        endpoint: str = AWS_V4,
        *,
        pace_s: float = 0.5,
        timeout_s: float = 2.0,
        maintenance_every_s: float = 30.0,  # maintenance is announced days before
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
        paths: list[tuple[str, NoticeParser]] = [
            ("spot/instance-action", interruption),
            ("events/recommendations/rebalance", rebalance),
        ]
        if now >= self._maintenance_due_s:
            paths.append(("events/maintenance/scheduled", maintenance))
        for path, read in paths:
            if not self._learn(path, read):
                break  # no answer: each of the other paths would cost another timeout
            if read is maintenance:
                self._maintenance_due_s = now + self._maintenance_every_s
        return [notice for notices in self._known.values() for notice in notices]

    def _learn(self, path: str, read: NoticeParser) -> bool:
        """Read one kind of notice. Without a valid answer, known notices stay in force. Return
        False if there was no answer."""
        try:
            reply = self._get(f"/latest/meta-data/{path}")
            self._known[path] = (
                () if reply.status == 404 else self._on_our_clock(read(reply.body), reply.skew_s)
            )
        except ANSWERLESS as e:
            self._unheard(f"/{path}", e)
            return not isinstance(e, (OSError, http.client.HTTPException))
        self._heard()
        return True

    def _get(self, path: str) -> MetadataReply:
        """Return a reply with status 200 or 404. A 401 (expired token) is retried once with a new
        token. Raises ValueError for other statuses."""
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
            reply = self._endpoint.request(
                "PUT", "/latest/api/token", ttl, timeout_s=self._timeout_s
            )
        except TimeoutError:
            # The hop limit keeps the token from reaching a container; IMDSv1 may still answer.
            self.errors += 1
            self._token, self._tokenless_until_s = "", now + TOKENLESS_S
            return ""
        if reply.status != 200 or not reply.body:
            raise ValueError(f"no token: status {reply.status}")
        self._token, self._token_until_s = reply.body, now + TOKEN_TTL_S
        return reply.body

    def said(self, path: str) -> str:
        """Return the text at one path. Raises the exceptions of `notice.ANSWERLESS`."""
        reply = self._get(path)
        if reply.status != 200:
            raise ValueError(f"{path}: status {reply.status}")
        return reply.body.strip()


def instance(endpoint: str, timeout_s: float = 2.0) -> tuple[NodeFound, tuple[str, ...]]:
    """Return this instance, and another name of its zone: catalogs name zones by ids ("use1-az1")
    that mean the same to every account. Raises the exceptions of `notice.ANSWERLESS`."""
    source = AwsSource(endpoint, timeout_s=timeout_s)
    document = json.loads(source.said("/latest/dynamic/instance-identity/document"))
    began = document.get("pendingTime")
    try:
        life, zone = (
            source.said(f"/latest/meta-data/{path}")
            for path in ("instance-life-cycle", "placement/availability-zone-id")
        )
    except ValueError:  # an older service has no zone ids
        life, zone = source.said("/latest/meta-data/instance-life-cycle"), ""
    found = NodeFound(
        "",
        cloud="aws",
        region=str(document["region"]),
        zone=str(document["availabilityZone"]),
        instance_type=str(document["instanceType"]),
        spot=life == "spot",
        launched_s=utc(began) if began else None,
        source="aws",
    )
    return found, (zone,) if zone else ()


def interruption(body: str) -> tuple[Notice, ...]:
    said = json.loads(body)
    action = str(said["action"])
    # A hibernating instance ends at once; the time is when the notice began.
    deadline_s = None if action == "hibernate" else utc(said["time"])
    return (
        Notice(
            "aws",
            "kill",
            hashed("aws-itn", body),
            deadline_s,
            False,
            f"spot {action} at {said['time']}",
        ),
    )


def rebalance(body: str) -> tuple[Notice, ...]:
    noticed = json.loads(body)["noticeTime"]
    return (
        Notice(
            "aws",
            "soft",
            hashed("aws-rebalance", body),
            None,
            False,
            f"rebalance recommended at {noticed}",
        ),
    )


def maintenance(body: str) -> tuple[Notice, ...]:
    return tuple(
        Notice(
            "aws",
            "maintenance",
            str(e["EventId"]),
            utc(e["NotBefore"]),
            True,
            f"{e.get('Code', '')}: {e.get('Description', '')}",
        )
        for e in json.loads(body)
        if e.get("State", "active") == "active"
    )
