"""Prices and interruptions as clouds tell them now, beside what SkyPilot's catalog says.

AWS tells both: prices through the credentials that SkyPilot uses, interruptions in a public file.
Other clouds' prices change by the month and are the catalog's. Who cannot be asked is named, and
left out.
"""

from __future__ import annotations

import http.client
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.clouds.aws_prices import ADVISOR_NBYTES, ADVISOR_URL, interruption_bands
from harness.clouds.sky_client import REFRESH_TIMEOUT_S, Sky, SkyError
from harness.core.world import BadInput, CloudUnavailable, Offer

HISTORY_S = 7 * 86_400.0
MOST_REGIONS, MOST_SHAPES = 32, 100
FETCH_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class LiveOffer:
    """An offer as its cloud tells of it now. `changes`: (when, USD per hour) of a week, the oldest
    first; empty: nothing was told, and `offer` has the catalog's price. `interrupted`: the share of
    nodes in the last month, as the cloud says it; "": it does not."""

    offer: Offer
    catalog_usd_per_h: float
    changes: tuple[tuple[float, float], ...] = ()
    interrupted: str = ""


def ask_clouds(
    sky: Sky,
    offers: Sequence[Offer],
    nodes: int,
    now_s: float,
    advisor_url: str = "",
) -> tuple[list[LiveOffer], list[str]]:
    """Of each offer, the cheapest first, and who could not be asked. `nodes`: of an offer, each of
    which costs what the cloud says. `advisor_url`: a copy of AWS's Spot Instance Advisor."""
    wanted: defaultdict[str, set[str]] = defaultdict(set)
    for offer in offers:
        if (at := _aws(offer)) and offer.spot:
            wanted[at.region].add(at.shape)
    notes = list[str]()
    told: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for region, shapes in sorted(wanted.items())[:MOST_REGIONS]:
        try:
            changes = sky(
                "spot_prices",
                REFRESH_TIMEOUT_S,
                region=region,
                instances=sorted(shapes)[:MOST_SHAPES],
                since_s=now_s - HISTORY_S,
                now_s=now_s,
            )
        except (SkyError, CloudUnavailable) as e:
            notes.append(f"aws/{region}: its prices are the catalog's ({e})")
            continue
        for one in changes:
            change = (float(one["t"]), nodes * float(one["usd_per_h"]))
            for zone in {one["zone"], one["zone_id"]} - {""}:
                told.setdefault((region, zone, one["instance"]), []).append(change)
    bands = _bands(advisor_url or ADVISOR_URL, notes) if wanted else {}
    found = [_live(offer, told, bands) for offer in offers]
    return sorted(found, key=lambda live: live.offer), notes


@dataclass(frozen=True)
class _AwsPlace:
    region: str
    zone: str
    shape: str


def _aws(offer: Offer) -> _AwsPlace | None:
    """Of a name like aws/us-east-1/use1-az1/p3.2xlarge."""
    parts = offer.name.removesuffix("/on-demand").split("/")
    if parts[0] != "aws" or len(parts) < 3:
        return None
    return _AwsPlace(parts[1], parts[2] if len(parts) > 3 else "", parts[-1])


def _live(
    offer: Offer,
    told: Mapping[tuple[str, str, str], Sequence[tuple[float, float]]],
    bands: Mapping[tuple[str, str], str],
) -> LiveOffer:
    at = _aws(offer)
    if at is None or not offer.spot:
        return LiveOffer(offer, offer.usd_per_h)
    changes = tuple(told.get((at.region, at.zone, at.shape), ()))
    now = replace(offer, usd_per_h=changes[-1][1]) if changes else offer
    return LiveOffer(now, offer.usd_per_h, changes, bands.get((at.region, at.shape), ""))


def _bands(url: str, notes: list[str]) -> dict[tuple[str, str], str]:
    try:
        with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT_S) as answer:
            return interruption_bands(answer.read(ADVISOR_NBYTES))
    except (OSError, http.client.HTTPException, ValueError, BadInput) as e:
        notes.append(f"aws: how often it interrupts is not known ({url}: {e})")
        return {}
