"""The clusters of a run at SkyPilot's API server, found by their names."""

from __future__ import annotations

import hashlib
import re
import time
from typing import TYPE_CHECKING, Any

from harness.clouds.sky_client import CALL_TIMEOUT_S, REFRESH_TIMEOUT_S, SkyError
from harness.core.world import CloudUnavailable

if TYPE_CHECKING:
    from harness.clouds.sky_client import Sky


DIGITS = 16  # of the hash of the run's URL in the names of its clusters
OLD_DIGITS = 8  # in the names that older versions gave: found and ended still, given no more


def _hash(run_url: str, digits: int) -> str:
    return hashlib.sha256(run_url.encode()).hexdigest()[:digits]


def tag(run_url: str) -> str:
    """The beginning of the names of all clusters of a run: the same for every controller that
    leads it."""
    return f"sh-{_hash(run_url, DIGITS)}"


def cluster_name(tag: str, attempt: int) -> str:
    """The name of an attempt's cluster. `tag` is the run's. With the hash of the user that SkyPilot
    adds it is 33 letters long; GCP allows 35."""
    return f"{tag}-{attempt:04d}"


def prefix(run_url: str) -> str:
    """What the names of all clusters of a run begin with, also of those that older versions
    launched. Names of other runs may begin so too: `attempt_of` tells."""
    return f"sh-{_hash(run_url, OLD_DIGITS)}"


def attempt_of(name: str, run_url: str) -> int | None:
    """Which attempt of this run a cluster is; None: it is none of this run's."""
    old, rest = _hash(run_url, OLD_DIGITS), _hash(run_url, DIGITS)[OLD_DIGITS:]
    found = re.fullmatch(rf"sh-{old}(?:{rest})?-([0-9]{{4,12}})", name)
    return int(found[1]) if found else None


def listed(sky: Sky, run_url: str, **more: Any) -> list[dict[str, Any]]:
    """The records of all clusters of a run that are there. `more`: for `Broker.clusters`. Raises
    SkyError, CloudUnavailable."""
    rows = sky("clusters", REFRESH_TIMEOUT_S, prefix=prefix(run_url), **more)
    return [row for row in rows if attempt_of(row["name"], run_url) is not None]


def billed(sky: Sky, run_url: str) -> list[dict[str, Any]]:
    """SkyPilot's own bill of a run: [{"name", "duration" (s), "total_cost" (USD)}]. Raises
    SkyError, CloudUnavailable."""
    rows = sky("costs", REFRESH_TIMEOUT_S, prefix=prefix(run_url))
    return [row for row in rows if attempt_of(str(row["name"]), run_url) is not None]


def known_once(sky: Sky, run_url: str) -> set[int]:
    """Attempts whose clusters this API server has had: those that it does not show any more are
    gone. Raises SkyError, CloudUnavailable."""
    found = (attempt_of(str(row["name"]), run_url) for row in billed(sky, run_url))
    return {number for number in found if number is not None}


def bring_down(sky: Sky, run_url: str, timeout_s: float) -> list[str]:
    """End every cluster of a run; returns their names. Raises CloudUnavailable that names those
    not proven to be down in time."""
    give_up_s = time.monotonic() + timeout_s
    ended: dict[str, str] = {}  # name -> the request that brings it down
    while True:
        left = [r["name"] for r in listed(sky, run_url)]
        if not left:
            return sorted(ended)
        if time.monotonic() > give_up_s:
            raise CloudUnavailable(
                f"not proven to be down after {timeout_s:g} s, end them by hand (`sky down`): "
                f"{' '.join(left)}"
            )
        states = sky("requests", CALL_TIMEOUT_S, ids=[r for r in ended.values() if r])
        for name in left:
            if states.get(ended.get(name, ""), "LOST") not in ("PENDING", "RUNNING", "WAITING"):
                try:
                    ended[name] = sky("down", CALL_TIMEOUT_S, name=name)
                except SkyError as e:
                    ended[name] = ""
                    if e.type != "ClusterDoesNotExist":
                        raise CloudUnavailable(
                            f"SkyPilot does not bring {name} down ({e}); try `sky down {name}`"
                        ) from e
        time.sleep(1.0)


def tails(sky: Sky, run_url: str, lines: int) -> dict[str, str]:
    """The last lines of every cluster of a run that is there, by its name."""
    found = {}
    for record in listed(sky, run_url):
        try:
            found[record["name"]] = str(
                sky("tail", REFRESH_TIMEOUT_S, name=record["name"], lines=lines)
            )
        except (SkyError, CloudUnavailable) as e:
            found[record["name"]] = f"(no log: {e})"
    return found
