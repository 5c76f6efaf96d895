"""Everything that is alive in an account, as SkyPilot's API server shows it: whose it is, what it
costs, whether something works there, and what ends it if nobody does; and the machines of SkyPilot
that the clouds list and that it does not know (any more).

Machines without SkyPilot's tags are not seen here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from harness.clouds.sky_broker import (
    JOB_OVER,
    JOB_TIMEOUT_S,
    OFFERS_TIMEOUT_S,
    REFRESH_TIMEOUT_S,
    Sky,
    SkyError,
)
from harness.clouds.sky_clusters import end_clusters
from harness.core.decoding import amount
from harness.core.world import CloudUnavailable

MANAGED = "SkyPilot's own controller of managed jobs or services"


@dataclass(frozen=True)
class Alive:
    """A cluster that exists. `run`: URL of its run, "" if it has none; `job`: state of its newest
    job; `lease_min`: minutes without a job after which it ends by itself, None: it never does;
    `usd_per_h`, `usd`: by SkyPilot's own bill, None: unknown; `idle`: why nothing works there, "":
    something does, or it cannot be known; `over`: its run has ended; `known`: SkyPilot has it, else
    it is a cloud's list that does; `ours`: this user's SkyPilot launched it."""

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
    known: bool = True
    ours: bool = True

    @property
    def forgotten(self) -> bool:
        """True if it is ours and costs money for nothing: no job works there, or its run has
        ended."""
        return self.ours and (bool(self.idle) or self.over)


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


def unknown_to_skypilot(
    sky: Sky, has_ended: Callable[[str], bool | None], now: Callable[[], float] = time.time
) -> tuple[list[Alive], dict[str, str]]:
    """Return the clusters whose machines carry SkyPilot's tags in a cloud's own list and which
    SkyPilot does not know, the dearest first; and whose list was not read, with the reason. What
    works there cannot be known. Raises SkyError, CloudUnavailable."""
    answer = sky("machines", OFFERS_TIMEOUT_S)
    clusters: dict[str, list[Mapping[str, Any]]] = {}
    for machine in answer["found"]:
        clusters.setdefault(machine["cluster"], []).append(machine)
    found = [_unknown(machines, has_ended, now()) for machines in clusters.values()]
    return sorted(found, key=lambda one: (-(one.usd_per_h or 0.0), one.name)), answer["silent"]


def _unknown(
    machines: list[Mapping[str, Any]], has_ended: Callable[[str], bool | None], now_s: float
) -> Alive:
    one = machines[0]
    prices = [0.0 if m["stopped"] else m["usd_per_h"] for m in machines]
    place = "/".join(p for p in (one["cloud"], one["zone"] or one["region"]) if p)
    ids = " ".join(m["id"].rpartition("/")[2] for m in machines)
    return Alive(
        name=one["cluster"],
        owner=one["user"],
        where=f"{len(machines)}x {one['shape']}{'[spot]' if one['spot'] else ''} {place}: {ids}",
        hours=max(0.0, now_s - min(m["since_s"] for m in machines)) / 3600,
        run=one["run"],
        usd_per_h=None if None in prices else sum(prices),
        idle="it is stopped: its disks are billed" if all(m["stopped"] for m in machines) else "",
        over=one["ours"] and bool(one["run"]) and has_ended(one["run"]) is True,
        known=False,
        ours=one["ours"],
    )


def end_unknown(sky: Sky, names: Collection[str], timeout_s: float) -> list[str]:
    """End the machines of these clusters, which SkyPilot does not know, until the clouds list none,
    and return their names. Raises SkyError; CloudUnavailable if some are not proven to be gone."""
    give_up_s = time.monotonic() + timeout_s
    ended: set[str] = set()
    while left := sky("end_machines", OFFERS_TIMEOUT_S, clusters=sorted(names)):
        ended.update(left)
        if time.monotonic() > give_up_s:
            raise CloudUnavailable(
                f"not proven to be gone after {timeout_s:g} s, end them at their cloud: "
                f"{' '.join(left)}"
            )
        time.sleep(1.0)
    return sorted(ended)


def end(sky: Sky, names: Collection[str], timeout_s: float) -> list[str]:
    """End these clusters, as `sky_clusters.end_clusters` does."""

    def existing() -> list[str]:
        rows = sky("clusters", REFRESH_TIMEOUT_S, prefix="")
        return [str(row["name"]) for row in rows if row["name"] in names]

    return end_clusters(sky, existing, timeout_s)
