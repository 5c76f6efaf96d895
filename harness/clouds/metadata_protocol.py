"""What every metadata service is to the server that plays it (`metadata.py`)."""

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
MAX_HANG_S = 3600.0  # of one hanging GET
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
    """One cloud's metadata service: a request in (header names in lower case), an answer out."""

    server: str  # what it calls itself in the Server header

    def answer(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> Answer: ...

    def notice(self, kind: str, deadline_s: float) -> str:
        """Announce what this cloud has of that kind ("kill", "soft" or "maintenance") for a
        wall-clock time; its id."""

    def cancel(self, name: str = "") -> None:
        """Take back what `notice` returned this id for; everything, without one."""

    def release(self) -> None:
        """The server ends: answer every request that hangs."""


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
