"""Current prices and interruption rates from the clouds themselves, beside SkyPilot's catalog.

AWS and Azure publish both, Google only prices; `price_api.py`, `azure_prices.py` and
`gcp_prices.py` read them. Where credentials are needed, they are those that SkyPilot uses, and the
broker process makes the request. Prices of other clouds are the catalog's. Clouds that do not
answer are reported and left out.
"""

from __future__ import annotations

import http.client
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.clouds import azure_prices, gcp_prices
from harness.clouds.price_api import ADVISOR_NBYTES, ADVISOR_URL, interruption_bands
from harness.clouds.sky_broker import REFRESH_TIMEOUT_S, Sky, SkyError
from harness.core.world import BadInput, CloudUnavailable, Offer

HISTORY_S = 7 * 86_400.0
MOST_REGIONS, MOST_SHAPES = 32, 100
FETCH_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class LiveOffer:
    """An offer with its cloud's current price. `changes`: prices of the last week as (seconds since
    1970, USD per hour), oldest first; if empty, `offer` has the catalog's price. `interrupted`: the
    share of nodes that is preempted, as the cloud gives it, such as "5-10%/month"; "": unknown."""

    offer: Offer
    catalog_usd_per_h: float
    changes: tuple[tuple[float, float], ...] = ()
    interrupted: str = ""


@dataclass(frozen=True)
class MarketUrls:
    """The URLs of clouds' prices and interruption rates. `advisor`: AWS's Spot Instance Advisor, or
    a copy."""

    advisor: str = ADVISOR_URL
    azure_retail: str = azure_prices.PRICES_URL
    azure_graph: str = azure_prices.GRAPH_URL
    gcp_skus: str = gcp_prices.SKUS_URL


def ask_clouds(
    sky: Sky,
    offers: Sequence[Offer],
    nodes: int,
    now_s: float,
    urls: MarketUrls | None = None,
) -> tuple[list[LiveOffer], list[str]]:
    """Return the live offers, cheapest first, and notes on the clouds that did not answer. `nodes`:
    number of nodes in an offer; clouds publish prices per node."""
    asking = _CloudAsker(sky, nodes, now_s, urls or MarketUrls())
    by_cloud: defaultdict[str, list[_OfferPlace]] = defaultdict(list)
    for offer in offers:
        if offer.spot and (at := _place(offer)):
            by_cloud[at.cloud].append(at)
    for cloud, ask in (("aws", asking.aws), ("azure", asking.azure), ("gcp", asking.gcp)):
        if places := by_cloud[cloud]:
            ask(places)
    found = [asking.live(offer) for offer in offers]
    return sorted(found, key=lambda live: live.offer), asking.notes


@dataclass(frozen=True)
class _OfferPlace:
    """The parts of an offer's name such as aws/us-east-1/use1-az1/p3.2xlarge; `zone` may be ""."""

    offer: Offer
    cloud: str
    region: str
    zone: str
    shape: str


def _place(offer: Offer) -> _OfferPlace | None:
    parts = offer.name.split("/")
    if len(parts) < 3:
        return None
    return _OfferPlace(offer, parts[0], parts[1], parts[2] if len(parts) > 3 else "", parts[-1])


@dataclass
class _CloudAsker:
    """The clouds' answers, by the names of offers, and notes on those that did not answer."""

    sky: Sky
    nodes: int
    now_s: float
    urls: MarketUrls
    changes: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    bands: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def live(self, offer: Offer) -> LiveOffer:
        changes = tuple(self.changes.get(offer.name, ()))
        now = replace(offer, usd_per_h=changes[-1][1]) if changes else offer
        return LiveOffer(now, offer.usd_per_h, changes, self.bands.get(offer.name, ""))

    def aws(self, places: Sequence[_OfferPlace]) -> None:
        shapes: defaultdict[str, set[str]] = defaultdict(set)
        for at in places:
            shapes[at.region].add(at.shape)
        told: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
        for region, wanted in sorted(shapes.items())[:MOST_REGIONS]:
            answer = self._ask(
                f"aws/{region}: its prices are the catalog's",
                "spot_prices",
                region=region,
                instances=sorted(wanted)[:MOST_SHAPES],
                since_s=self.now_s - HISTORY_S,
                now_s=self.now_s,
            )
            for one in answer:
                change = (float(one["t"]), self.nodes * float(one["usd_per_h"]))
                for zone in {one["zone"], one["zone_id"]} - {""}:
                    told.setdefault((region, zone, one["instance"]), []).append(change)
        bands = self._advice()
        for at in places:
            if changes := told.get((at.region, at.zone, at.shape)):
                self.changes[at.offer.name] = changes
            if band := bands.get((at.region, at.shape)):
                self.bands[at.offer.name] = f"{band}/month"

    def _advice(self) -> Mapping[tuple[str, str], str]:
        url = self.urls.advisor
        try:
            with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT_S) as answer:
                return interruption_bands(answer.read(ADVISOR_NBYTES))
        except (OSError, http.client.HTTPException, ValueError, BadInput) as e:
            self.notes.append(f"aws: how often it interrupts is not known ({url}: {e})")
            return {}

    def azure(self, places: Sequence[_OfferPlace]) -> None:
        told: dict[tuple[str, str], tuple[float, float]] = {}
        shapes = sorted({at.shape for at in places})[:MOST_SHAPES]
        for shape in shapes:
            try:
                prices = azure_prices.spot_prices(
                    shape, self.now_s - HISTORY_S, self.now_s, self.urls.azure_retail
                )
            except CloudUnavailable as e:
                self.notes.append(f"azure: its prices are the catalog's ({e})")
                break
            for one in prices:
                told[one["region"], shape] = (one["t"], self.nodes * one["usd_per_h"])
        evictions = self._ask(
            "azure: how often it interrupts is not known",
            "azure_evictions",
            instances=shapes,
            regions=sorted({at.region for at in places}),
            url=self.urls.azure_graph,
        )
        bands = {(one["region"], one["instance"]): one["band"] for one in evictions}
        for at in places:
            if change := told.get((at.region, at.shape)):
                self.changes[at.offer.name] = [change]
            if band := bands.get((at.region, at.shape)):
                self.bands[at.offer.name] = f"{band}%/hour"

    def gcp(self, places: Sequence[_OfferPlace]) -> None:
        machines = [
            {
                "region": at.region,
                "shape": at.shape,
                "accelerator": at.offer.accelerator if at.offer.gpus else "",
                "gpus": at.offer.gpus // self.nodes,
            }
            for at in places
        ]
        answer = self._ask(
            "gcp: its prices are the catalog's",
            "gcp_spot_prices",
            machines=machines,
            url=self.urls.gcp_skus,
        )
        for at, price in zip(places, answer, strict=False):
            if price is not None:
                since_s, usd = price
                since_s = max(since_s, self.now_s - HISTORY_S)
                self.changes[at.offer.name] = [(since_s, self.nodes * usd)]

    def _ask(self, otherwise: str, method: str, **arguments: Any) -> Sequence[Any]:
        """Call SkyPilot and return its answer. Without one, add the note `otherwise` and return an
        empty tuple."""
        try:
            answer: Sequence[Any] = self.sky(method, REFRESH_TIMEOUT_S, **arguments)
            return answer
        except (SkyError, CloudUnavailable) as e:
            self.notes.append(f"{otherwise} ({e})")
            return ()
