"""What AWS says of spot: prices of the last days in each zone, and how often it interrupts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from harness.core.world import BadInput

PRODUCT = "Linux/UNIX"
MOST_PAGES = 20  # of 1,000 changes; a shape in a region has some tens in a week
ADVISOR_URL = "https://spot-bid-advisor.s3.amazonaws.com/spot-advisor-data.json"
ADVISOR_NBYTES = 32 << 20


def price_changes(
    client: Any, instances: Sequence[str], since_s: float, now_s: float
) -> list[dict[str, Any]]:
    """Every change of these shapes' prices in the client's region, the oldest first: `instance`,
    `zone` and `zone_id`, `t` (seconds since 1970), `usd_per_h`. The first of each zone is what held
    at `since_s`. `client`: EC2, of boto3; what it raises is raised."""
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
    """Of AWS's Spot Instance Advisor: by region and shape, which share of nodes was interrupted in
    the last month, as "5-10%". Raises BadInput."""
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
