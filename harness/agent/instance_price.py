"""The location and hourly price of this machine, when no controller of ours knows them. Runs in the
agent, in a thread of its own.

With plain `sky launch`, `sky jobs launch`, Slurm or a shell on a machine, the data is in the
environment (SkyPilot's and Slurm's variables, HARNESS_USD_PER_H), in files that SkyPilot leaves on
its nodes (~/.sky/sky_ray.yml, jobs.db), in the cloud's metadata service, and in SkyPilot's catalog.
It is recorded as the fact NodeFound, and once more if a slow source adds to it. Nothing here may
delay training: every wait is limited, and without an answer a value is unknown.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import re
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from harness.core.decoding import MOST_T
from harness.core.facts import NodeFound
from harness.notices import aws, azure, gcp
from harness.notices.notice import ANSWERLESS
from harness.notices.sources import MachineInfo, metadata_endpoint, places

# The price of an hour of a machine: from SkyPilot's catalog on the node, or sent with the task.

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 180.0  # for importing SkyPilot and downloading a catalog, on a busy node
MOST_USD_PER_H = 1e5  # a higher price is invalid
MOST_PRICES = 64 << 10  # characters of HARNESS_PRICES that are read


@dataclass(frozen=True)
class Shape:
    """The machine whose price is wanted. `zones`: the names that its zone may have in a catalog
    (AWS has two for each). `accelerators`: "H100:8"."""

    cloud: str
    region: str
    zones: tuple[str, ...]
    instance_type: str
    accelerators: str
    spot: bool


@dataclass(frozen=True)
class HourlyPrice:
    """The price of one node, in USD per hour. None: not known."""

    usd: float | None = None
    on_demand_usd: float | None = None

    @property
    def whole(self) -> bool:
        return self.usd is not None and self.on_demand_usd is not None

    def filled(self, other: HourlyPrice) -> HourlyPrice:
        """Return this price with unknown values taken from `other`."""
        return HourlyPrice(
            other.usd if self.usd is None else self.usd,
            other.on_demand_usd if self.on_demand_usd is None else self.on_demand_usd,
        )


def usd_of(text: object) -> float | None:
    """Return the price in a table or an environment variable; None if it is not a valid one."""
    try:
        found = float(str(text))
    except ValueError:
        return None
    return found if math.isfinite(found) and 0 <= found <= MOST_USD_PER_H else None


# ---- the table that came with the task -----------------------------------------------------------
def offered(table: str, shape: Shape) -> HourlyPrice:
    """Return the price from `name=usd/on_demand_usd;...`, where a name is that of an offer
    (cloud/region/zone/instance type, and /on-demand): the entry that matches most of what is known
    of this machine, and contradicts none of it; the cheapest of equally good ones."""
    best: tuple[int, float, HourlyPrice] | None = None
    for entry in table[:MOST_PRICES].split(";"):
        name, _, said = entry.strip().rpartition("=")
        usd, on_demand_usd = map(usd_of, (said.partition("/")[::2]))
        fits = _fit(name, shape)
        if usd is None or fits is None:
            continue
        found = HourlyPrice(usd, on_demand_usd if shape.spot else usd)
        if best is None or (-fits, usd) < best[:2]:
            best = (-fits, usd, found)
    return best[2] if best else HourlyPrice()


def _fit(name: str, shape: Shape) -> int | None:
    """Return how many parts of an offer's name match this machine; None if one contradicts it."""
    words = [word.lower() for word in name.split("/")]
    on_demand = words[-1:] == ["on-demand"]
    words = words[:-1] if on_demand else words
    if not words or words[0] != shape.cloud.lower() or on_demand == shape.spot:
        return None
    last = words[-1]
    if shape.instance_type and last != shape.instance_type.lower():
        return None
    known = {shape.region.lower(), *(zone.lower() for zone in shape.zones)} - {""}
    middle = words[1:-1]
    if shape.region and middle and middle[0] != shape.region.lower():
        return None
    if shape.zones and len(middle) > 1 and middle[1] not in known:
        return None
    return len([word for word in words if word in {*known, shape.instance_type.lower()}])


# ---- catalog files -------------------------------------------------------------------------------
def catalog_price(home: Path, shape: Shape) -> HourlyPrice:
    """Return the price from the newest `~/.sky/catalogs/v*/<cloud>/vms.csv`. Raises nothing: a
    price that cannot be read is unknown."""
    folders = sorted((home / ".sky/catalogs").glob("v[0-9]*"), key=_version, reverse=True)
    for folder in folders:
        try:
            rows = list(_rows(folder / shape.cloud.lower() / "vms.csv", shape))
        except (OSError, csv.Error, UnicodeDecodeError):
            continue
        on_demand_usd = _cheapest(rows, "Price", shape)
        usd = _cheapest(rows, "SpotPrice", shape) if shape.spot else on_demand_usd
        return HourlyPrice(usd, on_demand_usd)
    return HourlyPrice()


def _version(folder: Path) -> int:
    digits = folder.name.removeprefix("v")
    return int(digits) if digits.isdecimal() else 0


def _rows(path: Path, shape: Shape) -> Iterator[dict[str, str]]:
    """Yield the rows of this instance type in this region, and of its accelerators where a cloud
    prices them separately."""
    accelerator, count = accelerators_of(shape.accelerators)
    with open(path, newline="") as lines:
        for row in csv.DictReader(lines):
            if (row.get("Region") or "").lower() != shape.region.lower():
                continue
            instance = row.get("InstanceType") or ""
            alone = not instance and accelerator
            mine = alone and row.get("AcceleratorName") == accelerator
            if mine and usd_of(row.get("AcceleratorCount")) != count:
                continue
            if instance == shape.instance_type or mine:
                yield row


def accelerators_of(text: str) -> tuple[str, float]:
    """Split `H100:8` into a name and a number."""
    name, _, count = text.partition(":")
    return name, usd_of(count or 1) or 0.0


def _cheapest(rows: list[dict[str, str]], column: str, shape: Shape) -> float | None:
    """Return the price of machine plus accelerators, in its own zone if the catalog has zones; None
    if unknown."""
    total: float | None = None
    zones = {zone.lower() for zone in shape.zones}
    for apart in (False, True):
        of_kind = [r for r in rows if bool(r.get("InstanceType")) != apart]
        here = [r for r in of_kind if (r.get("AvailabilityZone") or "").lower() in zones]
        usd = [p for r in here or of_kind if (p := usd_of(r.get(column))) is not None]
        if usd:
            total = (total or 0.0) + min(usd)
        elif not apart:
            return None  # accelerators without a machine have no usable price
    return total


# ---- SkyPilot itself -----------------------------------------------------------------------------
ASK = """
import json, sys
import sky
q = json.loads(sys.argv[1])
def usd(spot):
    for zone in [*q["zones"], None]:
        try:
            return float(sky.Resources(
                infra="/".join(p for p in (q["cloud"], q["region"], zone) if p),
                instance_type=q["instance_type"], use_spot=spot,
                accelerators=q["accelerators"] or None,
            ).get_cost(3600))
        except Exception as e:  # SkyPilot's own, of any kind: the caller is told that it knows none
            print(f"{type(e).__name__}: {e}", file=sys.stderr)
print(json.dumps([usd(q["spot"]), usd(False)]))
"""


def runtime(env: Mapping[str, str]) -> Path | None:
    """Return the Python in which SkyPilot runs on a node that it launched, or None."""
    for base in dict.fromkeys((env.get("SKY_RUNTIME_DIR"), env.get("HOME"))):
        if not base:
            continue
        path = Path(base) / "skypilot-runtime/bin/python"
        if path.exists():
            return path
    return None


class Asking:
    """One query to SkyPilot, which another thread may cancel."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock, self._over = threading.Lock(), False

    def ask(
        self, python: Path, shape: Shape, env: Mapping[str, str], within_s: float = ASK_TIMEOUT_S
    ) -> HourlyPrice:
        """Return SkyPilot's price. Raises nothing: without an answer within `within_s` it is
        unknown."""
        question = {**vars(shape), "zones": list(shape.zones)}
        words = ["nice", "-n", "19", str(python), "-c", ASK, json.dumps(question)]
        quiet = {**env, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        with self._lock:
            if self._over:
                return HourlyPrice()
            try:
                self._process = subprocess.Popen(
                    words,
                    env=quiet,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as e:
                log.warning("prices: %s cannot be asked: %s", python, e.strerror)
                return HourlyPrice()
        try:
            out, told = self._process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.close()
            log.warning("prices: SkyPilot did not answer within %g s", within_s)
            return HourlyPrice()
        found = _answer(out)
        if found.usd is None:
            log.warning("prices: SkyPilot knows none: %s", " ".join(told.split())[-300:])
        return found

    def close(self) -> None:
        """Cancel the query; later calls of `ask` do nothing."""
        with self._lock:
            self._over = True
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def _answer(out: str) -> HourlyPrice:
    """Parse the last line that it printed: [usd, on_demand_usd]."""
    try:
        usd, on_demand_usd = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError, TypeError):
        return HourlyPrice()
    return HourlyPrice(usd_of(usd), usd_of(on_demand_usd))


MOST_FILE = 4 << 20  # largest file of SkyPilot's that is read, in bytes
BUSY_WITHIN_S = 2.0  # how long to wait for a lock of its database
# from SkyPilot's request for a machine to the machine's start; more belongs to another attempt
LEAD_WITHIN_S = 120.0
QUARTER_S = 900.0  # all time zones are whole quarters of an hour apart
METADATA = {
    "aws": aws.instance,
    "gcp": gcp.instance,
    "azure": azure.instance,
}
WHO = {  # names of these values in SkyPilot's configuration of a node
    "instance_type": ("InstanceType", "instance_type", "instanceType", "machineType", "vmSize"),
    "region": ("region", "location", "cluster"),
    "zone": ("availability_zone", "zone", "partition"),
}


def find(machine: MachineInfo, took: Callable[[NodeFound], None], asking: Asking) -> None:
    """Report to `took` what is found, at once and again if SkyPilot adds to it. Blocks for as long
    as that takes, a few minutes at most."""
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
    price = told.filled(offered(machine.env.get("HARNESS_PRICES", ""), shape))
    source = "environment" if price.usd is not None else ""
    priced = bool(shape.cloud and shape.region and shape.instance_type)
    if priced and not price.whole:
        price = price.filled(catalog_price(home(machine), shape))
        source = source or ("catalog" if price.usd is not None else "")
    first = _with_price(found, price, source)
    if any(getattr(first, f.name) not in ("", None) for f in fields(first) if f.name != "member"):
        took(first)
    python = runtime(machine.env)
    # the controller that launched this node knows its price
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
    """A thread that runs `find`, and that can be stopped."""

    def __init__(self, machine: MachineInfo, took: Callable[[NodeFound], None]):
        self._machine, self._took, self._asking = machine, took, Asking()
        self._thread = threading.Thread(target=self._find, name="whereabouts", daemon=True)
        self._thread.start()

    def _find(self) -> None:
        try:
            find(self._machine, self._took, self._asking)
        except Exception:
            # External files and answers: an error in them may only lose the node's price.
            log.exception("whereabouts")

    def stop(self) -> None:
        self._asking.close()
        self._thread.join(timeout=BUSY_WITHIN_S)


def home(machine: MachineInfo) -> Path:
    return Path(machine.env.get("HOME") or "/")


# ---- the sources ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Known:
    """The data of one source. `zones`: more names of the machine's zone."""

    found: NodeFound
    zones: tuple[str, ...] = ()


def _look(machine: MachineInfo) -> tuple[NodeFound, tuple[str, ...]]:
    """Return everything but the price, and more names of the zone. If several sources have a value,
    the first one counts."""
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
    """Return the prices that a person set, which have priority over all others."""
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
    """Return the data of a Slurm allocation, requested by SkyPilot or by `sbatch`."""
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
    """Return the data in SkyPilot's table of this cluster's jobs (on its first node): when ours was
    submitted, which is when its `setup` may begin, and the accelerators that it requested."""
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
    """Return our row in SkyPilot's table of this cluster's jobs; None if there is none."""
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
        except sqlite3.Error as e:  # the schema may be of another version
            log.warning("whereabouts: %s: %s", path, e)
    return None


def _from_config(machine: MachineInfo) -> NodeFound:
    """Return the data in the configuration of SkyPilot's provisioner. The file holds keys as well,
    so only the values named here are read."""
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
    """Return the first value in `tree` with one of these names, upper levels first; None if there
    is none."""
    if not isinstance(tree, (dict, list)) or not depth:
        return None
    if isinstance(tree, dict):
        for name in names:
            if isinstance(tree.get(name), (str, int, float)) and tree[name] != "":
                return tree[name]
    below = tree.values() if isinstance(tree, dict) else tree
    return next((v for b in below if (v := _first(b, names, depth - 1)) is not None), None)


# ---- the start of billing ------------------------------------------------------------------------
# variables of machines that are made for one job, and billed for as long as they exist
FOR_ONE_JOB = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "RUNPOD_POD_ID")


def _paid_since(machine: MachineInfo, found: NodeFound) -> float | None:
    """Return when this run began to pay for the machine. None: when its agent starts, since the
    time before is not this run's: on a permanent machine, and for a later job of its cluster."""
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
    """Return when this machine, or container, started; None if unknown."""
    env = machine.env
    if env.get("SLURM_JOB_ID"):  # an allocation of a machine that has long been up
        return _written(home(machine) / ".sky_sbatch_ready")
    booted_s = _stat(machine.root / "proc/stat", "btime")
    if booted_s is None or not (env.get("KUBERNETES_SERVICE_HOST") or env.get("RUNPOD_POD_ID")):
        return booted_s
    try:  # a container on a shared machine: it started with its first process
        ticks = (machine.root / "proc/1/stat").read_text().rpartition(")")[2].split()[19]
        return booted_s + int(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _lead_s(machine: MachineInfo, began_s: float) -> float:
    """Return the seconds from SkyPilot's request for the machine, when its bill begins, until the
    machine started; 0.0 if unknown. The name of the cluster's job has the time of the request, by
    the launcher's wall clock in an unknown time zone; so the remainder beyond whole quarters of an
    hour is used."""
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
    """Return `value` as seconds since 1970; None if it is not a plausible time."""
    try:
        found = float(str(value))
    except ValueError:
        return None
    return found if 0 < found < MOST_T else None


def _word(value: object) -> str:
    return value[:200] if isinstance(value, str) else ""
