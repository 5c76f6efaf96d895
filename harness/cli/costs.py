"""`harness costs`, `prices`: what runs cost, and what their nodes will."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.common import DONE, FAILED, cache_dir, names_of, task_resources, with_key
from harness.core.config import flag, positional
from harness.core.given_files import output_file
from harness.core.world import BadInput, CloudUnavailable
from storage.opening import normalize, open_store
from storage.text import Console

if TYPE_CHECKING:
    from harness.clouds.sky_client import Broker

KEYS = "owner, project, experiment, run, month"


def _keys(text: str) -> None:
    """Raises ValueError that says what is wanted."""
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) != len(names) or not set(names) <= set(KEYS.split(", ")):
        raise ValueError(f"wanted some of {KEYS}, comma-separated, each once; found {text!r}")


def _month(text: str) -> None:
    """Raises ValueError that says what is wanted."""
    if text and not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", text):
        raise ValueError(f"wanted a month such as 2026-11, found {text!r}")


# ---- costs ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class CostsFlags:
    url: str = positional("URL of a folder of runs, at any depth below it; or of one run")
    by: str = flag("run", f"group by some of {KEYS}, comma-separated", check=_keys)
    month: str = flag("", "of this month only (UTC), such as 2026-11", check=_month)
    csv: str = flag(
        "", "write CSV to this file; -: to the terminal, in place of the table", check=output_file
    )
    html: str = flag("", "write a page to this file", check=output_file)
    json: bool = flag(False, "print JSON in place of the table")
    ask_sky: bool = flag(
        False,
        "ask SkyPilot on this computer how long nodes that it launched without us have lived, and "
        "write that into their runs",
    )


def costs(flags: CostsFlags) -> int:
    """What runs cost: by owner, project, experiment, run, month."""
    from harness.bucket.setups import people_of
    from harness.views import costs_shown
    from harness.views.costs import read_costs

    url, console = normalize(flags.url), Console()
    names = [name.strip() for name in flags.by.split(",")]
    if flags.ask_sky:
        ask_sky(url)
    found = read_costs(url, open_store, people_of, time.time)
    if not found.runs and not found.unread:
        raise BadInput(f"{flags.url}: there is no run here, nor in a folder below it")
    if flags.month:
        found = found.within(flags.month)
    if flags.csv == "-":
        print(costs_shown.to_csv(found, names), end="")
    elif flags.csv:
        Path(flags.csv).write_text(costs_shown.to_csv(found, names), encoding="utf-8")
    if flags.html:
        Path(flags.html).write_text(costs_shown.to_html(found, names), encoding="utf-8")
    if flags.json:
        print(json.dumps(costs_shown.to_json(found, names), indent=2))
    elif flags.csv != "-":
        costs_shown.print_costs(found, names, console)
    for path in (flags.csv, flags.html):
        if path not in ("", "-") and not flags.json and flags.csv != "-":
            console.print(f"written  {path}", highlight=False, soft_wrap=True)
    return DONE if found.runs else FAILED


def ask_sky(url: str) -> None:
    """Write what SkyPilot knows of the nodes that it launched without us into their runs. Raises
    BadInput if it cannot be asked."""
    from harness.clouds.settling import settle
    from harness.clouds.sky_client import SkyError
    from harness.views.costs import find_runs

    sky = _sky(url)
    try:
        settle(sky, (with_key(store) for _, store in find_runs(url, open_store)), time.time)
    except (SkyError, CloudUnavailable) as e:
        raise BadInput(
            f"--ask-sky: SkyPilot does not answer on this computer ({e}); ask where the runs were "
            "launched, or leave --ask-sky out"
        ) from e
    finally:
        sky.close()


def _sky(url: str) -> Broker:
    """Who speaks with SkyPilot; nothing is written among runs."""
    from harness.clouds.sky_client import Broker

    return Broker(os.environ, cache_dir(url, "sky-logs") / "broker.log")


# ---- prices --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PricesFlags:
    task: str = positional("the SkyPilot task YAML")
    clouds: str = flag("", "only these clouds, such as aws,gcp, without asking for accounts")
    most: int = flag(200, "so many offers, the cheapest first", at_least=1)


def prices(flags: PricesFlags) -> int:
    """Prices of a task's offers in one line, for nodes that `sky launch` and `sky jobs launch`
    start: --env HARNESS_PRICES="$(harness prices TASK)"."""
    from harness.clouds.sky_client import OFFERS_TIMEOUT_S, SkyError

    config = task_resources(flags.task)
    # an offer is for all nodes of a task; a price that a node looks up is its own
    config.pop("num_nodes", None)
    clouds = names_of(flags.clouds) or None
    sky = _sky(normalize(flags.task))
    try:
        offers = sky("offers", OFFERS_TIMEOUT_S, config=config, clouds=clouds, on_demand=True)
    except (SkyError, CloudUnavailable) as e:
        raise BadInput(f"{flags.task}: SkyPilot has no offer: {e}") from e
    finally:
        sky.close()
    print(
        ";".join(
            f"{o['name']}={o['usd_per_h']:g}/{o['on_demand_usd_per_h']:g}"
            for o in offers[: flags.most]
        )
    )
    return DONE
