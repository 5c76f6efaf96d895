"""Notices of Azure, and the metadata of a virtual machine there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.core.facts import NodeFound
from harness.notices.notice import ANSWERLESS, Endpoint, Notice, Polled, utc

if TYPE_CHECKING:
    from harness.notices.notice import MetadataReply

AZURE = "http://169.254.169.254"
# ---- Azure ---------------------------------------------------------------------------------------
AZURE_KINDS = {
    "Preempt": "kill",
    "Terminate": "kill",
    "Reboot": "maintenance",
    "Redeploy": "maintenance",
    "Freeze": "soft",
}
AZURE_VERSION, AZURE_NAME_VERSION = "2020-07-01", "2021-02-01"


class AzureSource(Polled):
    """Scheduled Events of a virtual machine. They can be acknowledged; those that concern other
    machines are not, unless `speaks_for_all`."""

    name = "azure"

    def __init__(
        self,
        endpoint: str = AZURE,
        *,
        pace_s: float = 0.5,
        timeout_s: float = 2.0,
        # the first call ever enables the service, which takes up to two minutes
        first_timeout_s: float = 130.0,
        speaks_for_all: bool = False,
        now: Callable[[], float] = time.time,
    ):
        super().__init__(Endpoint(endpoint, now=now), pace_s, timeout_s)
        self._first_timeout_s, self._answered, self._speaks_for_all = (
            first_timeout_s,
            False,
            speaks_for_all,
        )
        self._own_name = ""
        self._incarnation: int | None = None
        self._known: tuple[Notice, ...] = ()

    def poll(self) -> Sequence[Notice]:
        try:
            reply = self._ask("GET", f"/metadata/scheduledevents?api-version={AZURE_VERSION}")
            document = json.loads(reply.body)
            if int(document["DocumentIncarnation"]) != self._incarnation:
                before, name = {n.id: n for n in self._known}, self._name()
                fresh = self._on_our_clock(
                    azure_events(document, name, self._speaks_for_all), reply.skew_s
                )
                # An event that has started no longer has a time: the earlier one is kept.
                self._known = tuple(
                    before[n.id] if n.deadline_s is None and n.id in before else n for n in fresh
                )
                self._incarnation = int(document["DocumentIncarnation"]) if name else None
        except ANSWERLESS as e:
            self._incarnation = None  # a restarted service may count from one again
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
        """Return this machine's name among an event's Resources; "" if it is not available now."""
        if not self._own_name:
            path = f"/metadata/instance/compute/name?api-version={AZURE_NAME_VERSION}&format=text"
            try:
                self._own_name = self._ask("GET", path).body.strip()
            except ANSWERLESS as e:
                self._unheard("/metadata/instance/compute/name", e)
        return self._own_name

    def _ask(self, method: str, path: str, body: bytes | None = None) -> MetadataReply:
        limit_s = self._timeout_s if self._answered else self._first_timeout_s
        headers = {"Metadata": "true", **({"Content-Type": "application/json"} if body else {})}
        # `acknowledge` is called by another thread than `poll`, so it has a connection of its own.
        endpoint = Endpoint(self._endpoint.base) if method == "POST" else self._endpoint
        reply = endpoint.request(method, path, headers, timeout_s=limit_s, body=body)
        if reply.status != 200:
            raise ValueError(f"status {reply.status}")
        self._answered = True
        return reply


def azure_events(
    document: Mapping[str, Any], own_name: str, speaks_for_all: bool = False
) -> tuple[Notice, ...]:
    """Return the events that name this machine (all events, if its name is unknown). An
    acknowledgement starts the event for all machines that it names, so only the first of them gives
    it, and only if they are all ours."""
    found = []
    for e in document["Events"]:
        named = [str(r) for r in e.get("Resources") or []]
        if named and own_name and own_name.lower() not in (r.lower() for r in named):
            continue
        kind, name = AZURE_KINDS.get(e["EventType"], "soft"), str(e["EventId"])
        detail = f"{e['EventType']}: {e.get('Description') or e.get('EventSource') or ''}".rstrip(
            ": "
        )
        deadline_s = utc(e["NotBefore"]) if e.get("NotBefore") and kind != "soft" else None
        alone = [r.lower() for r in named] == [own_name.lower()]
        leads = alone or (
            speaks_for_all and bool(own_name) and own_name.lower() == min(r.lower() for r in named)
        )
        pause, scope = kind == "soft", "self" if alone else "others"
        found.append(
            Notice(
                "azure",
                kind,
                name,
                deadline_s,
                True,
                detail,
                scope,
                pause,
                acknowledge=leads and not pause,
            )
        )
    return tuple(found)


def instance(endpoint: str, timeout_s: float = 2.0) -> tuple[NodeFound, tuple[str, ...]]:
    """Return this virtual machine, and (). Its metadata do not contain its start time. Raises the
    exceptions of `notice.ANSWERLESS`."""
    reply = Endpoint(endpoint).request(
        "GET",
        f"/metadata/instance/compute?api-version={AZURE_NAME_VERSION}&format=json",
        {"Metadata": "true"},
        timeout_s=timeout_s,
    )
    if reply.status != 200:
        raise ValueError(f"/metadata/instance/compute: status {reply.status}")
    said = json.loads(reply.body)
    found = NodeFound(
        "",
        cloud="azure",
        region=str(said["location"]),
        zone=str(said.get("zone") or ""),
        instance_type=str(said["vmSize"]),
        spot=str(said.get("priority") or "").lower() == "spot",
        source="azure",
    )
    return found, ()
