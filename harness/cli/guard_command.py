"""`harness guard`: list everything that is alive in an account, and end what is forgotten."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.table import Table

from harness.cli.common import DONE, FAILED, is_final, sky_broker
from harness.clouds.account import Alive, alive, end
from harness.clouds.sky_broker import SkyError
from harness.core.flags import flag
from harness.core.world import BadInput
from storage.errors import StoreError
from storage.stores.store_urls import open_store
from storage.terminal_text import Console


@dataclass(frozen=True)
class GuardFlags:
    end: str = flag("", "names of clusters to end, with commas", metavar="NAMES")
    end_idle: bool = flag(False, "end what costs money for nothing: no job, or a run that is over")
    timeout_s: float = flag(600.0, "how long to wait until what is ended is gone")


def guard(flags: GuardFlags) -> int:
    """List every cluster of the account: cost, owner, what works there, what ends it."""
    sky, console = sky_broker("guard"), Console()
    try:
        found = alive(sky, _has_ended)
        show(found, console)
        names = [name.strip() for name in flags.end.split(",") if name.strip()]
        if unknown := sorted(set(names) - {one.name for one in found}):
            raise BadInput(f"--end: wanted names of the list above, found {', '.join(unknown)}")
        if flags.end_idle:
            names += [one.name for one in found if one.forgotten and one.name not in names]
        if not names:
            return FAILED if any(one.forgotten for one in found) else DONE
        ended = end(sky, names, flags.timeout_s)
    except SkyError as e:
        console.print(f"SkyPilot refused: {e}", markup=False, highlight=False, soft_wrap=True)
        return FAILED
    finally:
        sky.close()
    console.print(f"Ended: {', '.join(ended) or 'none'}.")
    return DONE


def _has_ended(url: str) -> bool | None:
    try:
        return is_final(open_store(url))
    except (StoreError, BadInput):
        return None


def show(found: list[Alive], console: Console) -> None:
    """Print what is alive, and what of it costs money for nothing."""
    if not found:
        console.print("SkyPilot knows of no cluster. (Machines made by hand are not seen here.)")
        return
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
    for column in ("cluster", "owner", "hours", "$/h", "$", "works", "ends by itself"):
        table.add_column(column, justify="right" if column in ("hours", "$/h", "$") else "left")
    for one in found:
        works = one.idle or ("its run is over" if one.over else one.job or "is being launched")
        lease = "never" if one.lease_min is None else f"{one.lease_min} min after its job"
        table.add_row(
            one.name,
            one.owner,
            f"{one.hours:.1f}",
            "?" if one.usd_per_h is None else f"{one.usd_per_h:.2f}",
            "?" if one.usd is None else f"{one.usd:.2f}",
            works,
            lease,
        )
    console.print(table)
    hourly = sum(one.usd_per_h or 0.0 for one in found)
    console.print(f"{len(found)} clusters, {hourly:.2f} USD an hour.", highlight=False)
    for one in found:
        if one.forgotten:
            console.print(
                f"FORGOTTEN: {one.name} ({one.where}): {one.idle or 'its run is over'}"
                + (f"; run {one.run}" if one.run else "")
                + f". End it: harness guard --end {one.name}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
