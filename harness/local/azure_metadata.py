"""A fake of Azure's Scheduled Events service. It ships with the package."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, urlsplit

from harness.local.metadata_reply import (
    COMPUTE_PATH,
    EVENTS_PATH,
    NAME_PATH,
    Answer,
    azure_error,
    json_answer,
    no_kind,
)


class AzureScheduledEvents:
    """The Scheduled Events and the description of one virtual machine. An event that is over or was
    cancelled is no longer in the document."""

    server = "IMDS/150.870.65.1854"

    def __init__(
        self,
        name: str,
        *,
        region: str = "local",
        size: str = "Local_CPU",
        clock: Callable[[], float] = time.time,
    ):
        self.name, self._clock = name, clock
        self._compute = {"name": name, "location": region, "vmSize": size}
        self._compute |= {"zone": "", "priority": "Spot"}
        self._lock = threading.Lock()
        self._incarnation = 1
        self._events: list[dict[str, Any]] = []
        # ids of the events that were requested to start, in the order of the requests
        self.acknowledged: list[str] = []

    # -- what happens to the machine --
    def schedule(
        self,
        event_type: str,
        not_before_s: float,
        resources: tuple[str, ...] = (),
        duration_s: int = -1,
    ) -> str:
        """Add an event of a type ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate") and
        return its id. `not_before_s`: wall clock, seconds since 1970."""
        event = {
            "EventId": str(uuid.uuid4()).upper(),
            "EventType": event_type,
            "ResourceType": "VirtualMachine",
            "Resources": list(resources or (self.name,)),
            "EventStatus": "Scheduled",
            "NotBefore": formatdate(not_before_s, usegmt=True),
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": duration_s,
        }
        with self._lock:
            self._events.append(event)
            self._incarnation += 1
        return str(event["EventId"])

    def change(self, event_id: str, **fields: Any) -> None:
        with self._lock:
            for event in self._events:
                if event["EventId"] == event_id:
                    event.update(fields)
                    self._incarnation += 1

    def start(self, event_id: str) -> None:
        """Mark the event as started; a started event has no NotBefore time."""
        self.change(event_id, EventStatus="Started", NotBefore="")

    def notice(self, kind: str, deadline_s: float) -> str:
        types = {"kill": "Preempt", "soft": "Freeze", "maintenance": "Redeploy"}
        if kind not in types:
            raise no_kind(kind)
        return self.schedule(types[kind], deadline_s, duration_s=5 if kind == "soft" else -1)

    def cancel(self, name: str = "") -> None:
        with self._lock:
            left = [e for e in self._events if name and e["EventId"] != name]
            if len(left) != len(self._events):
                self._events, self._incarnation = left, self._incarnation + 1

    def release(self) -> None:
        pass

    # -- what the machine sees --
    def answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> Answer:
        asked = urlsplit(path)
        version = parse_qs(asked.query).get("api-version", [""])[-1]
        if headers.get("metadata", "").lower() != "true":
            return azure_error("Bad request. Required metadata header not specified")
        if headers.get("x-forwarded-for") is not None:
            return azure_error("Bad request. X-Forwarded-For is not allowed")
        if len(version) != 10:
            return azure_error(
                "Bad request. api-version is invalid or was not specified in the request."
            )
        if asked.path == NAME_PATH and method == "GET":
            return Answer(200, self.name)
        if asked.path == COMPUTE_PATH and method == "GET":
            return json_answer(self._compute)
        if asked.path != EVENTS_PATH:
            return Answer(404, json.dumps({"error": "Not found"}), "application/json")
        if method == "GET":
            with self._lock:
                return json_answer(
                    {"DocumentIncarnation": self._incarnation, "Events": self._events}
                )
        if method == "POST":
            return self._start_requests(body)
        return Answer(405, json.dumps({"error": "Method not allowed"}), "application/json")

    def _start_requests(self, body: bytes) -> Answer:
        """Start the events that a request names. Repeating a request is no error; a malformed
        request or an unknown event is."""
        try:
            wanted = [str(request["EventId"]) for request in json.loads(body)["StartRequests"]]
        except (ValueError, KeyError, TypeError):
            return azure_error("Bad request. StartRequests is malformed")
        with self._lock:
            known = {e["EventId"] for e in self._events}
            if not set(wanted) <= known | set(self.acknowledged):
                return azure_error("Bad request. There is no such event")
            self.acknowledged += wanted
            waiting = [
                e
                for e in self._events
                if e["EventId"] in wanted and e["EventStatus"] == "Scheduled"
            ]
            for event in waiting:
                event.update(EventStatus="Started", NotBefore="")
            self._incarnation += bool(waiting)
        return Answer(200)
