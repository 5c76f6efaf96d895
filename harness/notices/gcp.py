"""Notices of GCP, and the metadata of an instance there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from urllib.parse import quote

from harness.core.facts import NodeFound
from harness.notices.notice import ANSWERLESS, Endpoint, Notice, Polled

GCP_HOST = "metadata.google.internal"
# ---- GCP -----------------------------------------------------------------------------------------
PREEMPTED, MAINTENANCE_EVENT = "instance/preempted", "instance/maintenance-event"
GCP_KILL_S = 30.0  # from TRUE to the end, best effort
GCP_TERMINATE_S = {True: 3600.0, False: 60.0}  # from the notice to the end, with a GPU and without


class GcpSource(Polled):
    """Notices from one value of Compute Engine's metadata server. A GET that hangs until the value
    changes returns at once then.

    GCP gives no times: deadlines follow from when the value changed, if we saw that. For a value
    that was set before we looked no time is known: act at once.
    """

    name = "gcp"

    def __init__(
        self,
        endpoint: str = f"http://{GCP_HOST}",
        path: str = PREEMPTED,
        *,
        gpu: bool = True,
        hang_s: float = 60.0,
        # between two hanging GETs: a server that does not hang must not be flooded
        pace_s: float = 0.1,
        timeout_s: float = 2.0,
        now: Callable[[], float] = time.time,
    ):
        super().__init__(Endpoint(endpoint, now=now), pace_s, timeout_s)
        self._path, self._gpu, self._hang_s, self._now = path, gpu, hang_s, now
        self._etag, self._value = "", ""
        self._known: tuple[Notice, ...] = ()

    def poll(self) -> Sequence[Notice]:
        # The first GET after an outage must not hang: it shows what changed meanwhile.
        hang = (
            f"?wait_for_change=true&timeout_sec={self._hang_s:g}&last_etag={quote(self._etag)}"
            if self._etag
            else ""
        )
        limit_s = self._timeout_s + (self._hang_s if self._etag else 0.0)
        try:
            reply = self._endpoint.request(
                "GET",
                f"/computeMetadata/v1/{self._path}{hang}",
                {"Metadata-Flavor": "Google"},
                timeout_s=limit_s,
            )
            if reply.status != 200 or reply.headers.get("metadata-flavor") != "Google":
                raise ValueError(
                    f"status {reply.status}, Metadata-Flavor "
                    f"{reply.headers.get('metadata-flavor')!r}"
                )
            self._take(reply.body.strip())
        except ANSWERLESS as e:
            self._etag = ""
            self._unheard(f"/{self._path}", e)
            return self._known
        self._etag = reply.headers.get("etag", "")
        self._heard()
        if not self._etag:  # without it the next GET cannot hang
            self.pace_s = max(self.pace_s, 1.0)
        return self._known

    def _take(self, value: str) -> None:
        if value == self._value:
            return
        saw_it_change, fresh = (
            bool(self._value),
            gcp_value(self._path, value, self._gpu, self._now()),
        )
        if not saw_it_change:
            fresh = tuple(
                replace(n, deadline_s=None) if n.kind == "maintenance" else n for n in fresh
            )
        self._value, self._known = value, fresh


def gcp_value(path: str, value: str, gpu: bool, since_s: float) -> tuple[Notice, ...]:
    """Return the notices of a value. `since_s`: when it changed. Raises ValueError for values that
    Compute Engine does not define."""
    name = f"gcp-{path.rpartition('/')[2]}-{value.lower()}-{since_s:.0f}"
    match path, value:
        case (_, "FALSE") if path == PREEMPTED:
            return ()
        case (_, "TRUE") if path == PREEMPTED:
            return (Notice("gcp", "kill", name, since_s + GCP_KILL_S, False, "preempted"),)
        case (_, "NONE") if path == MAINTENANCE_EVENT:
            return ()
        # a pause; machines with GPUs are never migrated
        case (_, "MIGRATE_ON_HOST_MAINTENANCE") if path == MAINTENANCE_EVENT:
            return (Notice("gcp", "soft", name, None, True, "live migration", pause=True),)
        case (_, "TERMINATE_ON_HOST_MAINTENANCE") if path == MAINTENANCE_EVENT:
            return (
                Notice(
                    "gcp",
                    "maintenance",
                    name,
                    since_s + GCP_TERMINATE_S[gpu],
                    True,
                    "host maintenance",
                ),
            )
    raise ValueError(f"{path} is {value!r}")


def instance(endpoint: str, timeout_s: float = 2.0) -> tuple[NodeFound, tuple[str, ...]]:
    """Return this instance, and (). Its metadata do not contain its start time. Raises the
    exceptions of `notice.ANSWERLESS`."""
    service = Endpoint(endpoint)

    def said(path: str) -> str:
        reply = service.request(
            "GET",
            f"/computeMetadata/v1/instance/{path}",
            {"Metadata-Flavor": "Google"},
            timeout_s=timeout_s,
        )
        if reply.status != 200 or reply.headers.get("metadata-flavor") != "Google":
            raise ValueError(f"instance/{path}: status {reply.status}")
        return reply.body.strip().rpartition("/")[2]

    zone = said("zone")
    found = NodeFound(
        "",
        cloud="gcp",
        region=zone.rpartition("-")[0],
        zone=zone,
        instance_type=said("machine-type"),
        spot=said("scheduling/preemptible").upper() == "TRUE",
        source="gcp",
    )
    return found, ()
