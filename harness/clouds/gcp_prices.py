"""Google's current spot prices per region, summed from the prices of a machine's parts.

The Cloud Billing Catalog has no price of a machine: it lists cores, memory and GPUs with
free-text descriptions, and the price of a machine is their sum. If a part is not found, or has two
prices, the machine gets no price: none is better than a wrong one. Disks are not included, as in
SkyPilot's catalog.

Google does not publish how often spot machines are preempted, except in a beta of its API
(advice.capacityHistory, November 2026).
"""

from __future__ import annotations

import importlib
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from harness.clouds.price_api import ask_json
from harness.core.world import CloudUnavailable

COMPUTE_ENGINE = "6F81-5844-456A"  # https://cloud.google.com/skus
SKUS_URL = f"https://cloudbilling.googleapis.com/v1/services/{COMPUTE_ENGINE}/skus"
SCOPE = "https://www.googleapis.com/auth/cloud-billing.readonly"
MOST_PAGES, PAGE = 30, 5000  # some 32,000 products in 2026
# The names of cores and memory, by the prefix of the machine's name. Other machines keep the price
# of SkyPilot's catalog, as do machines of a family with prices of their own (a3-megagpu).
FAMILIES = {
    "a2-": "A2 Instance",
    "a3-highgpu-": "A3 Instance",
    "c2-": "Compute optimized",
    "c3-": "C3 Instance",
    "e2-": "E2 Instance",
    "g2-": "G2 Instance",
    "n1-": "N1 Predefined Instance",
    "n2-": "N2 Instance",
    "n2d-": "N2D AMD Instance",
}
GPUS = {
    "A100": "A100 GPU",
    "A100-80GB": "A100 80GB GPU",
    "H100": "H100 80GB GPU",
    "L4": "L4 GPU",
    "P100": "P100 GPU",
    "P4": "P4 GPU",
    "T4": "T4 GPU",
    "V100": "V100 GPU",
}
NOT_PLAIN = ("custom", "premium", "reserved", "sole tenancy", "dws")


@dataclass(frozen=True)
class GcpMachine:
    """One node: its shape and the GPUs that are attached to it."""

    region: str
    shape: str
    vcpus: float
    memory_gib: float
    accelerator: str = ""
    gpus: int = 0


@dataclass(frozen=True)
class _SkuPart:
    """A part of a machine as it is sold on spot. `t`: start of the price, seconds since 1970."""

    group: str
    words: str
    regions: frozenset[str]
    usd_per_h: float
    t: float


def spot_usd(
    machines: Sequence[GcpMachine], headers: Mapping[str, str], url: str = SKUS_URL
) -> list[tuple[float, float] | None]:
    """Return the spot price of each machine as (start in seconds since 1970, USD per hour), or
    `None` if a part has no price. `headers`: see `login`. Raises CloudUnavailable."""
    parts, token = list[_SkuPart](), ""
    for _ in range(MOST_PAGES):
        query = {"pageSize": PAGE, "currencyCode": "USD", **({"pageToken": token} if token else {})}
        answer = ask_json(f"{url}?{urllib.parse.urlencode(query)}", headers)
        skus = answer.get("skus")
        if not isinstance(skus, list):
            raise CloudUnavailable(f"gcp: wanted an answer with skus, found {sorted(answer)[:5]}")
        parts += _parts(skus)
        token = str(answer.get("nextPageToken") or "")
        if not token:
            break
    return [_sum(machine, parts) for machine in machines]


def login() -> tuple[dict[str, str], str]:
    """Return the headers of a request to Google's APIs, with the credentials that SkyPilot uses
    (Google's "application default"), and their project, "" if they name none. Raises
    CloudUnavailable that says what to do."""
    try:
        auth = importlib.import_module("google.auth")
        transport = importlib.import_module("google.auth.transport.requests")
    except ImportError as e:
        raise CloudUnavailable(
            "wanted the package google-auth, found none; pip install 'skypilot[gcp]'"
        ) from e
    headers: dict[str, str] = {}
    try:
        credentials, project = auth.default(scopes=[SCOPE])
        credentials.refresh(transport.Request())
        credentials.apply(headers)
    except auth.exceptions.GoogleAuthError as e:
        words = " ".join(str(e).split())[:300]
        raise CloudUnavailable(f"{words}; try gcloud auth application-default login") from e
    return headers, str(project or "")


def _parts(skus: Iterable[Mapping[str, Any]]) -> list[_SkuPart]:
    """Return the products that may be a part of a plain spot machine. Malformed products are
    skipped."""
    found = []
    for sku in skus:
        try:
            category, words = sku["category"], str(sku["description"])
            if category["resourceFamily"] != "Compute" or category["usageType"] != "Preemptible":
                continue
            if any(word in words.lower() for word in NOT_PLAIN):
                continue
            newest = sku["pricingInfo"][-1]
            rates = newest["pricingExpression"]["tieredRates"]
            if len(rates) != 1 or rates[0]["unitPrice"]["currencyCode"] != "USD":
                continue
            usd = int(rates[0]["unitPrice"].get("units", 0)) + rates[0]["unitPrice"]["nanos"] / 1e9
            began = datetime.fromisoformat(newest["effectiveTime"].replace("Z", "+00:00"))
            found.append(
                _SkuPart(
                    category["resourceGroup"],
                    words,
                    frozenset(sku["serviceRegions"]),
                    usd,
                    began.timestamp(),
                )
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            continue
    return found


def _sum(machine: GcpMachine, parts: Sequence[_SkuPart]) -> tuple[float, float] | None:
    family = next((w for name, w in FAMILIES.items() if machine.shape.startswith(name)), "")
    known = machine.vcpus > 0 and machine.memory_gib > 0
    if not family or not known or (machine.gpus and machine.accelerator not in GPUS):
        return None
    here = [part for part in parts if machine.region in part.regions]
    wanted = [
        (machine.vcpus, [p for p in here if _is(p, "CPU", "Core", family)]),
        (machine.memory_gib, [p for p in here if _is(p, "RAM", "Ram", family)]),
    ]
    if machine.gpus:
        name = GPUS[machine.accelerator]
        gpus = [p for p in here if p.group == "GPU" and name in p.words]
        wanted.append((machine.gpus, gpus))
    usd, since_s = 0.0, 0.0
    for amount, choices in wanted:
        if len({part.usd_per_h for part in choices}) != 1:
            return None
        usd += amount * choices[0].usd_per_h
        since_s = max(since_s, choices[0].t)
    return since_s, usd


def _is(part: _SkuPart, group: str, word: str, family: str) -> bool:
    """Return whether a part is the cores or the memory of a family. Those of N1 have their own
    group, so there the description decides."""
    if family.lower() not in part.words.lower():
        return False
    return part.group == group or (part.group == "N1Standard" and word in part.words)
