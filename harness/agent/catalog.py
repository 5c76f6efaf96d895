"""What an hour of a machine costs: SkyPilot's catalog on the node, and prices that came with the
task.

Three sources, each tried when the one before did not know: the table that the laptop sent along
(HARNESS_PRICES, made by `harness prices`), catalog files under ~/.sky/catalogs, and SkyPilot
itself, which installs a runtime of its own on the nodes that it launches. The last one gives the
very number that `sky cost-report` multiplies; it may download its catalog, so it is asked in a
process of its own, niced and within a bound. Knows no run and no bucket.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 180.0  # importing SkyPilot and fetching a catalog, on a node that is busy
MOST_USD_PER_H = 1e5  # beyond it, a price is damage
MOST_PRICES = 64 << 10  # letters of HARNESS_PRICES


@dataclass(frozen=True)
class Shape:
    """What is priced: a machine of a cloud at a place. `zones`: the names that its zone may have in
    a catalog (AWS has two for each). `accelerators`: "H100:8"."""

    cloud: str
    region: str
    zones: tuple[str, ...]
    instance_type: str
    accelerators: str
    spot: bool


@dataclass(frozen=True)
class HourlyPrice:
    """USD per hour of one node. None: not known."""

    usd: float | None = None
    on_demand_usd: float | None = None

    @property
    def whole(self) -> bool:
        return self.usd is not None and self.on_demand_usd is not None

    def filled(self, other: HourlyPrice) -> HourlyPrice:
        """What is not known here, from `other`."""
        return HourlyPrice(
            other.usd if self.usd is None else self.usd,
            other.on_demand_usd if self.on_demand_usd is None else self.on_demand_usd,
        )


def usd_of(text: object) -> float | None:
    """A price as a table or an environment variable has it; None: it is none."""
    try:
        found = float(str(text))
    except ValueError:
        return None
    return found if math.isfinite(found) and 0 <= found <= MOST_USD_PER_H else None


# ---- the table that came with the task -----------------------------------------------------------
def offered(table: str, shape: Shape) -> HourlyPrice:
    """From `name=usd/on_demand_usd;...`, where a name is that of an offer
    (cloud/region/zone/instance type, and /on-demand): the entry that names most of what is known
    of this machine, and contradicts none of it. Of several that do, the cheapest."""
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
    """How many parts of an offer's name this machine is known to have; None: it is another
    machine's."""
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
def listed(home: Path, shape: Shape) -> HourlyPrice:
    """From the newest `~/.sky/catalogs/v*/<cloud>/vms.csv`. Raises nothing: what cannot be read
    is not known."""
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
    """Those of this instance type in this region, and of its accelerators where a cloud prices
    them apart."""
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
    """`H100:8` as a name and a number."""
    name, _, count = text.partition(":")
    return name, usd_of(count or 1) or 0.0


def _cheapest(rows: list[dict[str, str]], column: str, shape: Shape) -> float | None:
    """Machine and accelerators together, in its own zone where the catalog tells zones apart."""
    total: float | None = None
    zones = {zone.lower() for zone in shape.zones}
    for apart in (False, True):
        of_kind = [r for r in rows if bool(r.get("InstanceType")) != apart]
        here = [r for r in of_kind if (r.get("AvailabilityZone") or "").lower() in zones]
        usd = [p for r in here or of_kind if (p := usd_of(r.get(column))) is not None]
        if usd:
            total = (total or 0.0) + min(usd)
        elif not apart:
            return None  # accelerators alone are no machine
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
    """The Python in which SkyPilot runs on a node that it launched."""
    for base in dict.fromkeys((env.get("SKY_RUNTIME_DIR"), env.get("HOME"))):
        if not base:
            continue
        path = Path(base) / "skypilot-runtime/bin/python"
        if path.exists():
            return path
    return None


class Asking:
    """One question to SkyPilot, which may be given up from another thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock, self._over = threading.Lock(), False

    def ask(
        self, python: Path, shape: Shape, env: Mapping[str, str], within_s: float = ASK_TIMEOUT_S
    ) -> HourlyPrice:
        """Raises nothing: what SkyPilot does not say in time is not known."""
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
        """Give it up; a later question is not asked."""
        with self._lock:
            self._over = True
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def _answer(out: str) -> HourlyPrice:
    """The last line that it printed: [usd, on_demand_usd]."""
    try:
        usd, on_demand_usd = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError, TypeError):
        return HourlyPrice()
    return HourlyPrice(usd_of(usd), usd_of(on_demand_usd))
