"""Where this machine stands and what an hour of it costs, when no controller of ours says so. Runs
in the agent, in a thread of its own.

Plain `sky launch`, `sky jobs launch`, Slurm or a shell on a machine: what is known lies in the
environment (SkyPilot's and Slurm's variables, HARNESS_USD_PER_H), in files that SkyPilot leaves on
its nodes (~/.sky/sky_ray.yml, jobs.db), in the cloud's metadata service, and in SkyPilot's catalog
(`catalog.py`). It is told as the fact NodeFound, and once more if a slow source adds to it. Nothing
here may hold up training: every wait has a bound, and no answer means that something is not known.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from harness.agent import aws, azure, catalog, gcp
from harness.agent.catalog import Asking, HourlyPrice, Shape, usd_of
from harness.agent.polling import ANSWERLESS
from harness.agent.sources import MachineInfo, metadata_endpoint, places
from harness.core.facts import NodeFound
from harness.core.values import MOST_T

log = logging.getLogger(__name__)

MOST_FILE = 4 << 20  # bytes of a file of SkyPilot's
BUSY_WITHIN_S = 2.0  # its database may be locked for so long
# between SkyPilot's asking for a machine and the machine's own beginning; more was another attempt
LEAD_WITHIN_S = 120.0
QUARTER_S = 900.0  # all time zones are whole quarters of an hour apart
METADATA = {
    "aws": aws.instance,
    "gcp": gcp.instance,
    "azure": azure.instance,
}
WHO = {  # what SkyPilot's configuration of a node calls the same things
    "instance_type": ("InstanceType", "instance_type", "instanceType", "machineType", "vmSize"),
    "region": ("region", "location", "cluster"),
    "zone": ("availability_zone", "zone", "partition"),
}


def find(machine: MachineInfo, took: Callable[[NodeFound], None], asking: Asking) -> None:
    """Tell what is found, at once and again if SkyPilot adds to it. Blocks for as long as that
    takes, a few minutes at most."""
    found, zones = _look(machine)
    shape = Shape(
        found.cloud,
        found.region,
        tuple(zone for zone in dict.fromkeys((found.zone, *zones)) if zone),
        found.instance_type,
        found.accelerators,
        bool(found.spot),
    )
    told = _told(machine.env)
    price = told.filled(catalog.offered(machine.env.get("HARNESS_PRICES", ""), shape))
    source = "environment" if price.usd is not None else ""
    priced = bool(shape.cloud and shape.region and shape.instance_type)
    if priced and not price.whole:
        price = price.filled(catalog.listed(home(machine), shape))
        source = source or ("catalog" if price.usd is not None else "")
    first = _with_price(found, price, source)
    if any(getattr(first, f.name) not in ("", None) for f in fields(first) if f.name != "member"):
        took(first)
    python = catalog.runtime(machine.env)
    # the controller that launched it knows its price
    ours = machine.env.get("HARNESS_ATTEMPT", "0") != "0"
    if priced and not price.whole and python is not None and not ours:
        more = price.filled(asking.ask(python, shape, machine.env))
        if more != price:
            took(_with_price(found, more, source or "skypilot"))


def _with_price(found: NodeFound, price: HourlyPrice, source: str) -> NodeFound:
    names = [name for name in (*found.source.split(), source) if name]
    return replace(
        found,
        usd_per_h=price.usd,
        on_demand_usd_per_h=price.on_demand_usd,
        source=" ".join(dict.fromkeys(names)),
    )


class PlaceFinder:
    """`find` in a thread, which may be given up."""

    def __init__(self, machine: MachineInfo, took: Callable[[NodeFound], None]):
        self._machine, self._took, self._asking = machine, took, Asking()
        self._thread = threading.Thread(target=self._find, name="whereabouts", daemon=True)
        self._thread.start()

    def _find(self) -> None:
        try:
            find(self._machine, self._took, self._asking)
        except Exception:
            # Files and answers of others: nothing in them may cost more than the node's price.
            log.exception("whereabouts")

    def stop(self) -> None:
        self._asking.close()
        self._thread.join(timeout=BUSY_WITHIN_S)


def home(machine: MachineInfo) -> Path:
    return Path(machine.env.get("HOME") or "/")


# ---- what is known, and by whom ------------------------------------------------------------------
@dataclass(frozen=True)
class _Known:
    """What one source says. `zones`: more names of the machine's zone."""

    found: NodeFound
    zones: tuple[str, ...] = ()


def _look(machine: MachineInfo) -> tuple[NodeFound, tuple[str, ...]]:
    """Everything but the price; of what several sources say, the first one counts."""
    found, zones = NodeFound(""), list[str]()
    for one in _sources(machine):
        gaps = {
            f.name: value
            for f in fields(one.found)
            if (value := getattr(one.found, f.name)) not in ("", None)
            and getattr(found, f.name) in ("", None)
            and f.name != "source"
        }
        if gaps:
            found = replace(found, **gaps, source=f"{found.source} {one.found.source}".strip())
        zones += one.zones
    return replace(found, launched_s=_paid_since(machine, found)), tuple(zones)


def _sources(machine: MachineInfo) -> Iterator[_Known]:
    yield _Known(_from_skypilot(machine.env))
    for cloud in places(machine.env, machine.root):
        endpoint = metadata_endpoint(cloud, machine)
        if cloud in METADATA and endpoint:
            try:
                yield _Known(*METADATA[cloud](endpoint))
            except ANSWERLESS as e:
                log.warning("whereabouts: %s: %s: %s", endpoint, type(e).__name__, e)
    yield _Known(_from_jobs(machine))
    yield _Known(_from_config(machine))
    yield _Known(_from_slurm(machine.env))


def _told(env: Mapping[str, str]) -> HourlyPrice:
    """What a person says goes before all that is found."""
    return HourlyPrice(
        usd_of(env.get("HARNESS_USD_PER_H")), usd_of(env.get("HARNESS_ON_DEMAND_USD_PER_H"))
    )


def _from_skypilot(env: Mapping[str, str]) -> NodeFound:
    try:
        about = json.loads(env.get("SKYPILOT_CLUSTER_INFO") or "{}")
    except ValueError:
        about = {}
    about = about if isinstance(about, dict) else {}
    job = env.get("SKYPILOT_MANAGED_JOB_ID", "")
    return NodeFound(
        "",
        cloud=_word(about.get("cloud")).lower(),
        region=_word(about.get("region")),
        zone=_word(about.get("zone")),
        cluster=_word(about.get("cluster_name")),
        job=f"managed {job}" if job else _word(env.get("SKYPILOT_TASK_ID")),
        source="skypilot",
    )


def _from_slurm(env: Mapping[str, str]) -> NodeFound:
    """An allocation, whether SkyPilot asked for it or `sbatch`."""
    if not env.get("SLURM_JOB_ID"):
        return NodeFound("")
    began = env.get("SLURM_JOB_START_TIME", "")
    return NodeFound(
        "",
        cloud="slurm",
        region=_word(env.get("SLURM_CLUSTER_NAME")),
        zone=_word(env.get("SLURM_JOB_PARTITION")),
        spot=False,
        launched_s=_moment(began),
        job=f"slurm {_word(env['SLURM_JOB_ID'])}",
        source="slurm",
    )


def _from_jobs(machine: MachineInfo) -> NodeFound:
    """SkyPilot's table of the jobs of this cluster (on its first node): when ours was submitted,
    which is when its `setup` may begin, and the accelerators that it asked for."""
    row = _job(machine)
    if row is None:
        return NodeFound("")
    asked = re.search(r"\[(?:CPU:[\d.]+,? ?)?([A-Za-z][\w.-]*:[\d.]+)", _word(row["resources"]))
    return NodeFound(
        "",
        accelerators=asked[1] if asked and not asked[1].startswith("CPU:") else "",
        setup_s=_moment(row["submitted_at"]),
        source="skypilot",
    )


def _job(machine: MachineInfo) -> Mapping[str, Any] | None:
    """Our row in SkyPilot's table of this cluster's jobs. None: there is none."""
    own = machine.env.get("SKYPILOT_INTERNAL_JOB_ID", "")
    if not own.isdecimal():
        return None
    for base in dict.fromkeys((machine.env.get("SKY_RUNTIME_DIR"), machine.env.get("HOME"))):
        path = Path(base or "/nowhere") / ".sky/jobs.db"
        if not path.exists():
            continue
        try:
            uri = f"{path.as_uri()}?mode=ro"
            with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_WITHIN_S)) as db:
                db.row_factory = sqlite3.Row
                text = "SELECT submitted_at, run_timestamp, resources FROM jobs WHERE job_id = ?"
                row = db.execute(text, (int(own),)).fetchone()
                return dict(row) if row else None
        except sqlite3.Error as e:  # another version's
            log.warning("whereabouts: %s: %s", path, e)
    return None


def _from_config(machine: MachineInfo) -> NodeFound:
    """What SkyPilot's provisioner was told to launch. The file holds keys as well: only what is
    named here is looked at."""
    path = home(machine) / ".sky/sky_ray.yml"
    try:
        if path.stat().st_size > MOST_FILE:
            return NodeFound("")
        said = yaml.safe_load(path.read_text())
        types = said["available_node_types"]
        node = types[said.get("head_node_type", "ray_head_default")]["node_config"]
        provider = said["provider"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return NodeFound("")
    count = _first(node, ("accelerator_count",))
    name = _word(_first(node, ("accelerator_type",)))
    return NodeFound(
        "",
        region=_word(_first(provider, WHO["region"])),
        zone=_word(_first(provider, WHO["zone"])).partition(",")[0],
        instance_type=_word(_first(node, WHO["instance_type"])).rpartition("/")[2],
        accelerators=f"{name}:{count}" if name and count else "",
        spot=_spot(node),
        source="skypilot",
    )


def _spot(node: Any) -> bool:
    market = _first(node, ("MarketType", "provisioningModel", "priority"))
    flag = _first(node, ("preemptible", "Preemptible", "use_spot", "UseSpot", "interruptible"))
    return _word(market).lower() == "spot" or flag is True


def _first(tree: Any, names: tuple[str, ...], depth: int = 6) -> Any:
    """The first value that has one of these names, the upper ones first; None: there is none."""
    if not isinstance(tree, (dict, list)) or not depth:
        return None
    if isinstance(tree, dict):
        for name in names:
            if isinstance(tree.get(name), (str, int, float)) and tree[name] != "":
                return tree[name]
    below = tree.values() if isinstance(tree, dict) else tree
    return next((v for b in below if (v := _first(b, names, depth - 1)) is not None), None)


# ---- since when it is paid for -------------------------------------------------------------------
# what somebody makes for one job, and pays for as long as it is there
FOR_ONE_JOB = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "RUNPOD_POD_ID")


def _paid_since(machine: MachineInfo, found: NodeFound) -> float | None:
    """None: from its agent's begin on, since what was before is not this run's: on a machine that
    somebody keeps, and for a job that is not its cluster's first."""
    own = machine.env.get("SKYPILOT_INTERNAL_JOB_ID", "")
    if not found.cluster and not any(machine.env.get(name) for name in FOR_ONE_JOB):
        return None
    if own.isdecimal() and int(own) > 1:
        return None
    began_s = found.launched_s or _begun(machine)
    if began_s is None or not found.cluster:
        return began_s
    lead_s = _lead_s(machine, began_s)
    return began_s - lead_s * (lead_s <= LEAD_WITHIN_S)


def _begun(machine: MachineInfo) -> float | None:
    """When this machine, or this container of one, began."""
    env = machine.env
    if env.get("SLURM_JOB_ID"):  # an allocation of a machine that has long been up
        return _written(home(machine) / ".sky_sbatch_ready")
    booted_s = _stat(machine.root / "proc/stat", "btime")
    if booted_s is None or not (env.get("KUBERNETES_SERVICE_HOST") or env.get("RUNPOD_POD_ID")):
        return booted_s
    try:  # a container of somebody's machine: it began with its first process
        ticks = (machine.root / "proc/1/stat").read_text().rpartition(")")[2].split()[19]
        return booted_s + int(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _lead_s(machine: MachineInfo, began_s: float) -> float:
    """SkyPilot's bill begins when it asks for the machine, some seconds before that exists. When
    it asked stands in the name of the cluster's job, by the clock on the wall of whoever launched
    it, in a time zone that nobody says; the seconds are told by what is left beyond whole
    quarters of an hour. 0: not known."""
    row = _job(machine)
    stamp = re.search(r"\d{4}(?:-\d\d){5}", _word(row["run_timestamp"]) if row else "")
    try:
        asked = datetime.strptime(stamp[0] if stamp else "", "%Y-%m-%d-%H-%M-%S")
    except ValueError:
        return 0.0
    return (began_s - asked.replace(tzinfo=timezone.utc).timestamp()) % QUARTER_S


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _stat(path: Path, name: str) -> float | None:
    try:
        line = next(x for x in path.read_text().splitlines() if x.startswith(f"{name} "))
        return float(line.split()[1])
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _moment(value: object) -> float | None:
    """Seconds since 1970; None: it is none, or cannot be."""
    try:
        found = float(str(value))
    except ValueError:
        return None
    return found if 0 < found < MOST_T else None


def _word(value: object) -> str:
    return value[:200] if isinstance(value, str) else ""
