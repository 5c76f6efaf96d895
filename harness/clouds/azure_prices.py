"""Azure's spot prices, per region, and its eviction rates.

Prices are public (the Retail Prices API) and change monthly. Azure Resource Graph reports eviction
rates to every account that may read anything of a tenant: bands of the chance, in percent, that a
node is evicted within the next hour, measured over the last 28 days.
https://learn.microsoft.com/azure/virtual-machines/spot-vms, read 2026-11.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness.clouds.price_api import ask_json
from harness.core.world import CloudUnavailable

PRICES_URL = "https://prices.azure.com/api/retail/prices"
GRAPH_URL = (
    "https://management.azure.com/providers/Microsoft.ResourceGraph/resources"
    "?api-version=2022-10-01"
)
MOST_PAGES = 20  # of 1,000 rows; a shape has some hundreds of prices in all regions together
LOGIN_TIMEOUT_S = 30.0  # the same as SkyPilot's: `az` may be slow
SAFE = re.compile(r"[\w.-]+")  # names that need no escaping in a query


def spot_prices(
    shape: str, since_s: float, now_s: float, url: str = PRICES_URL
) -> list[dict[str, Any]]:
    """Return the current spot price of a Linux node of this shape in each region that has it, as
    dicts with `instance`, `region`, `t` (start of the price, seconds since 1970, not before
    `since_s`) and `usd_per_h`. Raises CloudUnavailable."""
    wanted = (
        "serviceName eq 'Virtual Machines' and priceType eq 'Consumption' "
        f"and armSkuName eq '{shape}'"
    )
    rows = list[Mapping[str, Any]]()
    page = f"{url}?{urllib.parse.urlencode({'$filter': wanted}, quote_via=urllib.parse.quote)}"
    for _ in range(MOST_PAGES if SAFE.fullmatch(shape) else 0):
        answer = ask_json(page)
        rows += _objects(answer, "Items")
        page = answer.get("NextPageLink") or ""
        if not page.startswith(url):  # the last page; links to other hosts are not followed
            break
    newest: dict[str, tuple[float, float]] = {}
    for row in rows:
        if not _is_linux_spot(row) or row["armSkuName"] != shape:
            continue
        begins_s = _seconds(row.get("effectiveStartDate"), 0.0)
        if begins_s <= now_s <= _seconds(row.get("effectiveEndDate"), now_s):
            region = str(row["armRegionName"]).lower()
            price = (begins_s, float(row["unitPrice"]))
            newest[region] = max(newest.get(region, price), price)
    return [
        {"instance": shape, "region": region, "t": max(since_s, t), "usd_per_h": usd}
        for region, (t, usd) in sorted(newest.items())
    ]


def eviction_bands(
    shapes: Sequence[str], regions: Sequence[str], headers: Mapping[str, str], url: str = GRAPH_URL
) -> list[dict[str, str]]:
    """Return the eviction rates as dicts with `instance` (as in `shapes`), `region` and `band`
    ("5-10": percent of nodes per hour). `headers`: see `login`. Raises CloudUnavailable."""
    named = {shape.lower(): shape for shape in shapes if SAFE.fullmatch(shape)}
    places = sorted({region.lower() for region in regions if SAFE.fullmatch(region)})
    # paging works only if the query returns the id column
    query = (
        "SpotResources | where type =~ 'microsoft.compute/skuspotevictionrate/location' "
        f"| where sku.name in~ ({_quoted(sorted(named))}) | where location in~ ({_quoted(places)}) "
        "| project id, skuName = tostring(sku.name), location, "
        "spotEvictionRate = tostring(properties.evictionRate) | order by id asc"
    )
    found, token = list[dict[str, str]](), ""
    for _ in range(MOST_PAGES if named and places else 0):
        options = {"resultFormat": "objectArray", **({"$skipToken": token} if token else {})}
        # no subscription is named: these rows belong to the tenant
        answer = ask_json(url, headers, {"query": query, "options": options})
        for row in _objects(answer, "data"):
            shape = named.get(str(row.get("skuName", "")).lower())
            band = str(row.get("spotEvictionRate") or "")
            if shape and band:
                region = str(row.get("location", "")).lower()
                found.append({"instance": shape, "region": region, "band": band})
        token = str(answer.get("$skipToken") or "")
        if not token:
            break
    return found


def login() -> tuple[dict[str, str], str]:
    """Return the headers of a request to Azure's management API, and the subscription. Both come
    from the command `az`, which SkyPilot uses as well. Raises CloudUnavailable that says what to
    do."""
    az = shutil.which("az") or shutil.which("az", path=str(Path(sys.executable).parent))
    if az is None:
        raise CloudUnavailable(
            "wanted Azure's command `az`, found none; pip install 'skypilot[azure]', then az login"
        )
    wanted = ("account", "get-access-token", "--resource", "https://management.azure.com/")
    try:
        done = subprocess.run(
            [az, *wanted, "--output", "json"],
            capture_output=True,
            text=True,
            timeout=LOGIN_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            words = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
            raise CloudUnavailable(f"`az` gives no token: {words[:300]}")
        said = json.loads(done.stdout)
        bearer = {"Authorization": f"Bearer {said['accessToken']}"}
        return bearer, str(said.get("subscription") or "")
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as e:
        raise CloudUnavailable(f"`az` gives no token ({type(e).__name__}); try az login") from e


def _is_linux_spot(row: Mapping[str, Any]) -> bool:
    """Return whether the row is a usable spot price of a Linux machine. On-demand, Windows and Low
    Priority (another product, for sets of machines) rows are not."""
    product = str(row.get("productName", ""))
    return (
        str(row.get("skuName", "")).endswith(" Spot")
        and not re.search(r" Win| Cloud ?Services", product)
        and row.get("type", "Consumption") == "Consumption"
        and row.get("currencyCode", "USD") == "USD"
        and row.get("unitOfMeasure", "1 Hour") == "1 Hour"
        and isinstance(row.get("unitPrice"), int | float)
        and row["unitPrice"] > 0
        and {"armSkuName", "armRegionName"} <= row.keys()
    )


def _objects(answer: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the dicts of the list `answer[name]`. Raises CloudUnavailable if there is no list."""
    rows = answer.get(name)
    if not isinstance(rows, list):
        raise CloudUnavailable(f"azure: wanted an answer with {name}, found {sorted(answer)[:5]}")
    return [row for row in rows if isinstance(row, dict)]


def _seconds(date: object, otherwise: float) -> float:
    """Return a date as seconds since 1970, or `otherwise` if it is none. Dates are in UTC."""
    try:
        at = datetime.fromisoformat(str(date).replace("Z", "+00:00"))
    except ValueError:
        return otherwise
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
