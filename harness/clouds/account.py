"""Everything that is alive in an account, as SkyPilot's API server shows it: whose it is, what it
costs, whether something works there, and what ends it if nobody does.

Machines that SkyPilot does not know (another API server's, or made by hand) are not seen here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from harness.clouds.sky_broker import JOB_OVER, JOB_TIMEOUT_S, REFRESH_TIMEOUT_S, Sky, SkyError
from harness.clouds.sky_clusters import end_clusters
from harness.core.decoding import amount
from harness.core.world import CloudUnavailable

MANAGED = "SkyPilot's own controller of managed jobs or services"


@dataclass(frozen=True)
class Alive:
    """A cluster that exists. `run`: URL of its run, "" if it has none; `job`: state of its newest
    job; `lease_min`: minutes without a job after which it ends by itself, None: it never does;
    `usd_per_h`, `usd`: by SkyPilot's own bill, None: unknown; `idle`: why nothing works there, "":
    something does, or it cannot be known; `over`: its run has ended."""

    name: str
    owner: str
    where: str
    hours: float
    run: str = ""
    job: str = ""
    lease_min: int | None = None
    usd_per_h: float | None = None
    usd: float | None = None
    idle: str = ""
    over: bool = False

    @property
    def forgotten(self) -> bool:
        """True if it costs money for nothing: no job works there, or its run has ended."""
        return bool(self.idle) or self.over


def alive(
    sky: Sky, has_ended: Callable[[str], bool | None], now: Callable[[], float] = time.time
) -> list[Alive]:
    """Return what exists, the dearest first. `has_ended`: tells of a run's URL whether the run has
    ended; None: unknown. Raises SkyError, CloudUnavailable."""
    rows = sky("clusters", REFRESH_TIMEOUT_S, prefix="")
    bills = {str(b["name"]): b for b in sky("costs", REFRESH_TIMEOUT_S, prefix="")} if rows else {}
    found = [_alive(sky, row, bills.get(row["name"], {}), has_ended, now()) for row in rows]
    return sorted(found, key=lambda one: (-(one.usd_per_h or 0.0), one.name))


def _alive(
    sky: Sky,
    row: Mapping[str, Any],
    bill: Mapping[str, Any],
    has_ended: Callable[[str], bool | None],
    now_s: float,
) -> Alive:
    seconds, usd = amount(bill.get("duration")), amount(bill.get("total_cost"))
    autostop = row.get("autostop")
    job, idle = _job(sky, row)
    run = str(row.get("run") or "")
    return Alive(
        name=str(row["name"]),
        owner=str(row.get("user") or "?"),
        where=str(row.get("resources") or "?"),
        hours=max(0.0, now_s - (amount(row.get("launched_at")) or now_s)) / 3600,
        run=run,
        job=job,
        lease_min=autostop if isinstance(autostop, int) and autostop >= 0 else None,
        usd_per_h=usd / seconds * 3600 if usd and seconds else None,
        usd=usd,
        idle=idle,
        over=bool(run) and has_ended(run) is True,
    )


def _job(sky: Sky, row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the state of a cluster's newest job, and why nothing works there ("": unknown, or
    something does)."""
    status = str(row.get("status") or "")
    if row.get("managed"):
        return MANAGED, ""
    if status == "STOPPED":
        return "", "it is stopped: its disks are billed"
    if status != "UP":
        return "", ""  # it is being launched, or ended
    try:
        state = sky("job", JOB_TIMEOUT_S, name=row["name"])
    except (SkyError, CloudUnavailable) as e:
        return f"unknown ({e})"[:60], ""
    if state is None:
        return "", "it has no job"
    return str(state), "its last job is over" if state in JOB_OVER else ""


def end(sky: Sky, names: Collection[str], timeout_s: float) -> list[str]:
    """End these clusters, as `sky_clusters.end_clusters` does."""

    def existing() -> list[str]:
        rows = sky("clusters", REFRESH_TIMEOUT_S, prefix="")
        return [str(row["name"]) for row in rows if row["name"] in names]

    return end_clusters(sky, existing, timeout_s)
