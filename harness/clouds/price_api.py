"""Queries to clouds' public price endpoints, bounded in time and size, and AWS's spot prices and
interruption rates."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from harness.core.world import BadInput, CloudUnavailable

PRODUCT = "Linux/UNIX"
MOST_PAGES = 20  # of 1,000 changes; a shape has some tens per region and week
ADVISOR_URL = "https://spot-bid-advisor.s3.amazonaws.com/spot-advisor-data.json"
ADVISOR_NBYTES = 32 << 20


def price_changes(
    client: Any, instances: Sequence[str], since_s: float, now_s: float
) -> list[dict[str, Any]]:
    """Return the price changes of these shapes in the client's region, oldest first, as dicts with
    `instance`, `zone`, `zone_id`, `t` (seconds since 1970) and `usd_per_h`. The first change of
    each zone is the price at `since_s`. `client`: boto3's EC2 client; its errors are passed on."""
    found: list[dict[str, Any]] = []
    token = ""
    for _ in range(MOST_PAGES):
        more = {"NextToken": token} if token else {}
        answer = client.describe_spot_price_history(
            InstanceTypes=list(instances),
            ProductDescriptions=[PRODUCT],
            StartTime=datetime.fromtimestamp(since_s, timezone.utc),
            EndTime=datetime.fromtimestamp(now_s, timezone.utc),
            **more,
        )
        for one in answer.get("SpotPriceHistory", ()):
            found.append(
                {
                    "instance": one["InstanceType"],
                    "zone": one["AvailabilityZone"],
                    "zone_id": one.get("AvailabilityZoneId", ""),
                    "t": max(since_s, one["Timestamp"].timestamp()),
                    "usd_per_h": float(one["SpotPrice"]),
                }
            )
        token = answer.get("NextToken", "")
        if not token:
            break
    return sorted(found, key=lambda one: (one["t"], one["zone"], one["instance"]))


def interruption_bands(advisor: bytes) -> dict[tuple[str, str], str]:
    """Parse the data of AWS's Spot Instance Advisor. Return, by (region, shape), the share of nodes
    that was interrupted in the last month, such as "5-10%". Raises BadInput."""
    try:
        said = json.loads(advisor)
        labels = {int(one["index"]): str(one["label"]) for one in said["ranges"]}
        return {
            (region, shape): labels[int(advice["r"])]
            for region, systems in said["spot_advisor"].items()
            for shape, advice in systems.get("Linux", {}).items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise BadInput(
            "wanted the data of AWS's Spot Instance Advisor, found something else "
            f"({type(e).__name__}: {e})"
        ) from e


# JSON requests to public endpoints of clouds, bounded in time and size.

ASK_TIMEOUT_S = 20.0
ANSWER_NBYTES = 32 << 20
WORDS = 300  # most characters of an error that are reported


class _NowhereElse(urllib.request.HTTPRedirectHandler):
    """A redirect handler that refuses, so that a token never goes to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def ask_json(
    url: str,
    headers: Mapping[str, str] | None = None,
    body: Mapping[str, Any] | None = None,
    method: str | None = None,
) -> dict[str, Any]:
    """Send a GET, or a POST if there is a `body`, or another `method`, and return the JSON object
    of the answer, {} if it is empty. Raises CloudUnavailable with the endpoint's error message."""
    said = None if body is None else json.dumps(body).encode()
    known = {**(headers or {}), "Accept": "application/json"}
    request = urllib.request.Request(url, said, known, method=method)
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
        found = json.loads(text or "{}")
    except ValueError as e:
        raise CloudUnavailable(f"{host}: wanted JSON, found {text[:60]!r}") from e
    if not isinstance(found, dict):
        raise CloudUnavailable(f"{host}: wanted a JSON object, found {text[:60]!r}")
    return found


def _words(error: urllib.error.HTTPError) -> str:
    """Return the message of an error. Azure and Google send `{"error": {"message": ...}}`."""
    try:
        text = error.read(ANSWER_NBYTES).decode(errors="replace")
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = str(error.reason)
    except (OSError, http.client.HTTPException):
        return ""
    return " ".join(message.split())[:WORDS]
