"""A fake of GCP's metadata server, with preemption and maintenance. It ships with the package."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

from harness.local.metadata_reply import MAX_HANG_S, Answer, no_kind

# ---- GCP -----------------------------------------------------------------------------------------
PREEMPTED, MAINTENANCE_EVENT = "instance/preempted", "instance/maintenance-event"


class GcpMetadata:
    """The metadata server of one Compute Engine instance: values with ETags, and GETs that wait
    until one changes."""

    server = "Metadata Server for VM"
    FLAVOR: ClassVar[Mapping[str, str]] = {"Metadata-Flavor": "Google"}

    def __init__(self, name: str, *, zone: str = "local-1a", machine_type: str = "local-cpu"):
        self._changed = threading.Condition()
        self._salt = secrets.token_hex(4)  # so that ETags of different servers differ
        self._released = False
        self._values = {
            PREEMPTED: "FALSE",
            MAINTENANCE_EVENT: "NONE",
            "instance/name": name,
            "instance/id": str(int(hashlib.sha256(name.encode()).hexdigest()[:15], 16)),
            "instance/zone": f"projects/0/zones/{zone}",
            "instance/machine-type": f"projects/0/machineTypes/{machine_type}",
            "instance/scheduling/preemptible": "TRUE",
        }

    # -- what happens to the instance --
    def set(self, path: str, value: str) -> None:
        with self._changed:
            self._values[path] = value
            self._changed.notify_all()

    def notice(self, kind: str, deadline_s: float) -> str:
        """Announce a notice. GCP sends no deadline, so `deadline_s` is unused: an instance knows
        the grace period of each kind of notice."""
        match kind:
            case "kill":
                self.set(PREEMPTED, "TRUE")
                return PREEMPTED
            case "soft":
                self.set(MAINTENANCE_EVENT, "MIGRATE_ON_HOST_MAINTENANCE")
            case "maintenance":
                self.set(MAINTENANCE_EVENT, "TERMINATE_ON_HOST_MAINTENANCE")
            case _:
                raise no_kind(kind)
        return MAINTENANCE_EVENT

    def cancel(self, name: str = "") -> None:
        if name in ("", PREEMPTED):
            self.set(PREEMPTED, "FALSE")
        if name in ("", MAINTENANCE_EVENT):
            self.set(MAINTENANCE_EVENT, "NONE")

    def release(self) -> None:
        with self._changed:
            self._released = True
            self._changed.notify_all()

    # -- what the instance sees --
    def answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> Answer:
        asked = urlsplit(path)
        if asked.path == "/":
            return Answer(200, "computeMetadata/\n", "application/text", self.FLAVOR)
        if headers.get("x-forwarded-for") is not None:
            return Answer(
                403,
                "Your client does not have permission to get URL from this server.",
                "text/html",
                self.FLAVOR,
            )
        if headers.get("metadata-flavor") != "Google":
            return Answer(403, "Missing Metadata-Flavor:Google header.", "text/html", self.FLAVOR)
        if method != "GET":
            return Answer(405, "Method Not Allowed", "text/html", self.FLAVOR)
        query = {k: v[-1] for k, v in parse_qs(asked.query).items()}
        try:
            hang_s = min(float(query.get("timeout_sec", MAX_HANG_S)), MAX_HANG_S)
        except ValueError:
            return Answer(400, "timeout_sec: wanted a number", "text/html", self.FLAVOR)
        name = asked.path.removeprefix("/computeMetadata/v1/").rstrip("/")
        with self._changed:
            if name not in self._values or not asked.path.startswith("/computeMetadata/v1/"):
                return Answer(404, "Not Found", "text/html", self.FLAVOR)
            if query.get("wait_for_change") == "true":
                seen = query.get("last_etag", self._etag(name))
                self._changed.wait_for(
                    lambda: self._released or self._etag(name) != seen, timeout=hang_s
                )
                if self._released:
                    return Answer(503, "Service Unavailable", "text/html", self.FLAVOR)
            return Answer(
                200,
                self._values[name],
                "application/text",
                {**self.FLAVOR, "ETag": self._etag(name)},
            )

    def _etag(self, name: str) -> str:
        return hashlib.sha256(f"{self._salt} {name} {self._values[name]}".encode()).hexdigest()[:16]
