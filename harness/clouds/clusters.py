"""The clusters of a run at SkyPilot's API server, found by their names."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

from harness.clouds.sky_client import CALL_TIMEOUT_S, REFRESH_TIMEOUT_S, SkyError
from harness.core.world import CloudUnavailable

if TYPE_CHECKING:
    from harness.clouds.sky_client import Sky


def tag(run_url: str) -> str:
    """The beginning of the names of all clusters of a run: the same for every controller that
    leads it."""
    return f"sh-{hashlib.sha256(run_url.encode()).hexdigest()[:8]}"


def cluster_name(tag: str, attempt: int) -> str:
    """The name of an attempt's cluster. `tag` is the run's."""
    return f"{tag}-{attempt:04d}"


def known_once(sky: Sky, run_url: str) -> set[int]:
    """Attempts whose clusters this API server has had: those that it does not show any more are
    gone. Raises SkyError."""
    names = (
        str(row["name"]).rpartition("-")
        for row in sky("costs", REFRESH_TIMEOUT_S, prefix=f"{tag(run_url)}-")
    )
    return {int(number) for _, _, number in names if number.isdecimal()}


def bring_down(sky: Sky, run_url: str, timeout_s: float) -> list[str]:
    """End every cluster of a run; returns their names. Raises CloudUnavailable that names those
    not proven to be down in time."""
    prefix, give_up_s = f"{tag(run_url)}-", time.monotonic() + timeout_s
    ended: dict[str, str] = {}  # name -> the request that brings it down
    while True:
        left = [r["name"] for r in sky("clusters", REFRESH_TIMEOUT_S, prefix=prefix)]
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
    for record in sky("clusters", REFRESH_TIMEOUT_S, prefix=f"{tag(run_url)}-"):
        try:
            found[record["name"]] = str(
                sky("tail", REFRESH_TIMEOUT_S, name=record["name"], lines=lines)
            )
        except (SkyError, CloudUnavailable) as e:
            found[record["name"]] = f"(no log: {e})"
    return found
