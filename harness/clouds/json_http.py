"""Questions to public endpoints of clouds: JSON over HTTP, within bounds of time and size."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from harness.core.world import CloudUnavailable

ASK_TIMEOUT_S = 20.0
ANSWER_NBYTES = 32 << 20
WORDS = 300  # letters of an error that are told


class _NowhereElse(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: a token goes to nobody who was not asked."""

    def redirect_request(self, *_: Any) -> None:
        return None


def ask_json(
    url: str, headers: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """GET, or POST of a `body`. Raises CloudUnavailable with what the endpoint said."""
    said = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, said, {**(headers or {}), "Accept": "application/json"})
    if said is not None:
        request.add_header("Content-Type", "application/json")
    host = urllib.parse.urlsplit(url).netloc
    try:
        opener = urllib.request.build_opener(_NowhereElse)
        with opener.open(request, timeout=ASK_TIMEOUT_S) as answer:
            text = answer.read(ANSWER_NBYTES + 1)
    except urllib.error.HTTPError as e:
        raise CloudUnavailable(f"{host} answered {e.code} {_words(e)}".rstrip()) from e
    except (OSError, http.client.HTTPException) as e:
        raise CloudUnavailable(f"{host} does not answer ({e})") from e
    if len(text) > ANSWER_NBYTES:
        raise CloudUnavailable(f"{host} answered with more than {ANSWER_NBYTES >> 20} MiB")
    try:
        found = json.loads(text)
    except ValueError as e:
        raise CloudUnavailable(f"{host}: wanted JSON, found {text[:60]!r}") from e
    if not isinstance(found, dict):
        raise CloudUnavailable(f"{host}: wanted a JSON object, found {text[:60]!r}")
    return found


def _words(error: urllib.error.HTTPError) -> str:
    """Of the body: Azure and Google tell `{"error": {"message": ...}}`."""
    try:
        text = error.read(ANSWER_NBYTES).decode(errors="replace")
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = str(error.reason)
    except (OSError, http.client.HTTPException):
        return ""
    return " ".join(message.split())[:WORDS]
