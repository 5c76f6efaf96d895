"""The interface between a fake metadata service and the server that serves it
(`metadata_server.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Protocol

TOKEN_PATH = "/latest/api/token"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
MAX_TTL_S = 21_600
MAX_HANG_S = 3600.0  # longest wait of one GET for a change
CONTROL_PATH = "/-/control"  # no cloud has such a path
NOT_FOUND = (
    '<?xml version="1.0" encoding="iso-8859-1"?>\n<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0 '
    'Transitional//EN"\n'
    '\t"http://www.w3.org/TR/xhtml1/DTD/xhtml1-transitional.dtd">\n<html '
    'xmlns="http://www.w3.org/1999/xhtml">\n'
    " <head>\n  <title>404 - Not Found</title>\n </head>\n <body>\n  <h1>404 - Not Found</h1>\n "
    "</body>\n</html>\n"
)


@dataclass(frozen=True)
class Answer:
    status: int
    body: str = ""
    content_type: str = "text/plain"
    headers: Mapping[str, str] = field(default_factory=dict)


class MetadataProtocol(Protocol):
    """The metadata service of one cloud. Requests have header names in lower case."""

    server: str  # value of the Server header

    def answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> Answer: ...

    def notice(self, kind: str, deadline_s: float) -> str:
        """Announce this cloud's notice of a kind ("kill", "soft" or "maintenance") and return its
        id. `deadline_s`: wall clock, seconds since 1970."""

    def cancel(self, name: str = "") -> None:
        """Withdraw the notice with this id, or all notices if `name` is ""."""

    def release(self) -> None:
        """Answer every waiting request, because the server ends."""


def rfc3339(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def json_answer(value: Any) -> Answer:
    return Answer(200, json.dumps(value), "application/json")


def no_kind(kind: str) -> ValueError:
    return ValueError(f"kind {kind!r} is none of kill, soft, maintenance")


# ---- Azure ---------------------------------------------------------------------------------------
EVENTS_PATH, NAME_PATH = "/metadata/scheduledevents", "/metadata/instance/compute/name"
COMPUTE_PATH = "/metadata/instance/compute"


def azure_error(text: str) -> Answer:
    return Answer(400, json.dumps({"error": text}), "application/json")
