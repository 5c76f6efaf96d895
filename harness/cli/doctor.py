"""Checks of everything that a launch will need, at no cost, with a remedy for what is missing.

`harness prove doctor [task.yaml] [--run URL]` runs them. On a laptop: SkyPilot, its API server, the
clouds, the task's offers, the bucket, the tracker's key. On a node (or a workstation): torch and
its GPUs. Each check is a function that returns a `Finding`; none raises. Knows how to query
SkyPilot, buckets and clouds; decides nothing. Nothing is launched and nothing is left behind.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from harness.bucket.layout import CONTROL
from harness.clouds.sky_broker import Sky, SkyError
from harness.clouds.sky_task import Task
from harness.clouds.skypilot import SkyPilotCloud
from harness.core.world import BadInput, CloudUnavailable, Offer
from harness.look.trackers.wandb_api import wandb_key, wandb_online
from storage.errors import StoreError
from storage.stores.objects import ObjectStore
from storage.terminal_text import plain

WANTED_SKYPILOT = "0.14.1"
ASK_TIMEOUT_S = 120.0
GPU_TIMEOUT_S = 60.0  # for importing torch and one small kernel; a broken driver hangs
OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Quota:
    """The cloud's own command that lists an account's spot quotas in a region (SkyPilot knows no
    quotas)."""

    command: tuple[str, ...]  # {region} is filled in; its output is JSON
    rows: Callable[[Any], Iterable[tuple[str, float]]]  # (what, how many)
    more: str  # how to get more


def _gcp_rows(answer: Any) -> Iterable[tuple[str, float]]:
    return (
        (q["metric"], q["limit"])
        for q in answer["quotas"]
        if q["metric"].startswith("PREEMPTIBLE_NVIDIA")
    )


AWS_SPOT = (
    "Quotas[?starts_with(QuotaName, 'All ') && contains(QuotaName, 'Spot')].{name: "
    "QuotaName, value: Value}"
)
QUOTAS = {
    "aws": Quota(
        (
            "aws",
            "service-quotas",
            "list-service-quotas",
            "--service-code",
            "ec2",
            "--region",
            "{region}",
            "--output",
            "json",
            "--query",
            AWS_SPOT,
        ),
        lambda answer: ((q["name"], q["value"]) for q in answer),
        "ask for more vCPUs (p5.48xlarge has 192): Service Quotas > Amazon EC2 > All P5 Spot "
        "Instance Requests",
    ),
    "gcp": Quota(
        ("gcloud", "compute", "regions", "describe", "{region}", "--format=json"),
        _gcp_rows,
        "ask for more: IAM & Admin > Quotas, metric PREEMPTIBLE_NVIDIA_<GPU>_GPUS of that region",
    ),
    "azure": Quota(
        ("az", "vm", "list-usage", "--location", "{region}", "--output", "json"),
        lambda answer: (
            (q["name"]["value"], float(q["limit"]))
            for q in answer
            if "lowPriority" in q["name"]["value"]
        ),
        "ask for more: Quotas > Compute > Total Regional Spot vCPUs",
    ),
}


@dataclass(frozen=True)
class Finding:
    """The result of one check. `remedy`: what to do; empty if nothing is to be done."""

    what: str
    state: str  # "ok" | "warn": a launch may work | "fail": it will not
    found: str
    remedy: str = ""


def refuse(found: Finding) -> None:
    """Refuse a launch that cannot work. Raises BadInput."""
    if found.state == FAIL:
        raise BadInput(
            f"--cloud sky: {found.what}: {found.found}; {found.remedy} (`harness prove doctor` "
            "checks all that a launch needs)"
        )


# ---- checks --------------------------------------------------------------------------------------
def skypilot() -> Finding:
    """Check that SkyPilot is installed, in the version that this package was made for."""
    if importlib.util.find_spec("sky") is None:
        return Finding("SkyPilot", FAIL, "not installed", 'pip install "spotharness[controller]"')
    version = importlib.metadata.version("skypilot")
    if version != WANTED_SKYPILOT:
        return Finding(
            "SkyPilot",
            WARN,
            version,
            f"this was made for {WANTED_SKYPILOT}: pip install skypilot=={WANTED_SKYPILOT}",
        )
    return Finding("SkyPilot", OK, version)


def server(sky: Sky) -> Finding:
    try:
        found = sky("server", ASK_TIMEOUT_S)
    except (SkyError, CloudUnavailable) as e:
        return Finding(
            "API server",
            FAIL,
            str(e),
            "sky api start (or sky api login for a remote one); its log: sky api logs",
        )
    state = OK if found["status"] == "healthy" else FAIL
    return Finding(
        "API server",
        state,
        f"{found['endpoint']} {found['status']}, {found['version']}",
        "" if state == OK else "sky api login",
    )


def clouds(sky: Sky) -> Finding:
    try:
        names = sky("enabled", ASK_TIMEOUT_S)
    except (SkyError, CloudUnavailable) as e:
        return Finding("clouds", FAIL, str(e), "sky check")
    if not names:
        return Finding(
            "clouds", FAIL, "none is enabled", "sky check -v tells for each cloud what is missing"
        )
    more = (
        ""
        if len(names) > 1
        else (
            "with one cloud there is nowhere to go when it is full; sky check -v tells how to "
            "enable more"
        )
    )
    return Finding("clouds", OK if len(names) > 1 else WARN, ", ".join(names), more)


def offers(sky: Sky, task: Task) -> tuple[list[Finding], Sequence[Offer]]:
    """Check which offers the task has, and whether their nodes would reach each other."""
    try:
        cloud = SkyPilotCloud(task, "doctor", sky)
        found = cloud.offers()
    except CloudUnavailable as e:
        return [Finding("offers", FAIL, str(e), "try again when that is mended")], ()
    except (BadInput, SkyError) as e:
        remedy = "loosen `resources`, or enable more clouds: sky check -v"
        return [Finding("offers", FAIL, str(e), remedy)], ()
    more = network(cloud.apart, [o.name for o in found])
    best, places = found[0], {o.place for o in found}
    left = f"; {len(cloud.no_market)} without a spot market left out" if cloud.no_market else ""
    said = (
        f"{len(found)} in {len(places)} places, from {best.usd_per_h:.4g} USD/h ({best.name}){left}"
    )
    if len(places) == 1:
        remedy = "only one place suits: when it is full the run waits; add accelerators (any_of)"
        return [Finding("offers", WARN, said, remedy), *more], found
    return [Finding("offers", OK, said), *more], found


def network(apart: Mapping[str, str], names: Sequence[str]) -> list[Finding]:
    """Return a finding for each reason why nodes of some offers do not reach each other. `names`:
    all offers."""
    found = [
        Finding(
            "network",
            WARN,
            f"{len(alone)} of {len(names)} offers, such as {alone[0]}, are for single nodes only: "
            "nodes there do not reach each other",
            why,
        )
        for why in dict.fromkeys(apart.values())
        if (alone := [name for name in names if apart.get(name) == why])
    ]
    if not found:
        unknown = "not looked at: your own firewalls, security groups and NetworkPolicies"
        found.append(Finding("network", OK, f"nodes of a place reach each other ({unknown})"))
    return found


def quotas(found: Sequence[Offer], ask: Callable[[Sequence[str]], str]) -> list[Finding]:
    """Check the spot quotas of the cheapest region of each cloud among the offers. `ask` runs a
    command, and may raise OSError or SubprocessError."""
    regions: dict[str, str] = {}
    for offer in found:
        cloud, _, region = offer.place.partition("/")
        regions.setdefault(cloud, region)
    return [
        quota(cloud, region, ask) for cloud, region in regions.items() if cloud in QUOTAS and region
    ]


def quota(cloud: str, region: str, ask: Callable[[Sequence[str]], str]) -> Finding:
    what, known = f"quota {cloud}", QUOTAS[cloud]
    command = [word.replace("{region}", region) for word in known.command]
    by_hand = f"a new account may have none; look yourself: {shlex.join(command)}"
    try:
        rows = list(known.rows(json.loads(ask(command))))
    except FileNotFoundError:
        return Finding(what, WARN, f"not asked: `{command[0]}` is not installed here", by_hand)
    except subprocess.CalledProcessError as e:
        said = (e.stderr or e.stdout or str(e)).strip().splitlines()
        return Finding(what, WARN, f"not told: {said[-1] if said else e}", by_hand)
    except (subprocess.TimeoutExpired, ValueError, KeyError, TypeError, OSError) as e:
        return Finding(what, WARN, f"not told: {type(e).__name__}", by_hand)
    some = ", ".join(f"{name} {limit:g}" for name, limit in sorted(rows, key=lambda r: -r[1])[:4])
    if not any(limit for _, limit in rows):
        return Finding(
            what, WARN, f"{region}: none of {len(rows)} spot quotas is above 0", known.more
        )
    return Finding(what, OK, f"{region}: {some}")


def ask_command(command: Sequence[str]) -> str:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=ASK_TIMEOUT_S,
        check=True,
        stdin=subprocess.DEVNULL,
    ).stdout


def bucket(url: str, open_at: Callable[[str], ObjectStore], token: str) -> Finding:
    """Check the operations that commits need: list, create, read back, create-only, delete. Leaves
    nothing behind."""
    key, began_s = f"{CONTROL}doctor-{token}", time.monotonic()
    try:
        store = open_at(url)
        there = len(store.list(CONTROL))
        made = store.create(key, b"doctor")
        try:
            if not made or store.get(key) != b"doctor":
                return Finding(
                    "bucket", FAIL, "what was written could not be read back", "use another bucket"
                )
            if store.create(key, b"second"):
                remedy = (
                    "use a store with conditional writes (S3, GCS, Azure, R2, MinIO, Ceph): "
                    "commits are not safe here"
                )
                return Finding("bucket", FAIL, "a create-only write overwrote an object", remedy)
        finally:
            store.delete(key)
    except (StoreError, BadInput, OSError) as e:
        return Finding(
            "bucket",
            FAIL,
            f"{type(e).__name__}: {e}",
            "check the bucket's name, region and the credentials that this shell has",
        )
    ms = (time.monotonic() - began_s) * 1000 / 6
    return Finding(
        "bucket",
        OK,
        f"{url}: list, create, read, create-only, delete ({ms:.0f} ms each); {there} objects under "
        "control/",
    )


def tracker(task: Task | None, env: Mapping[str, str], home: Path) -> Finding:
    """Check which trackers will publish, and where. Only the presence of a key is checked; it is
    neither sent nor shown."""
    wants = [
        t.strip()
        for t in (task.envs.get("TRACKERS", "") if task else "wandb").split(",")
        if t.strip()
    ]
    given = task.secrets.get("WANDB_API_KEY", "") if task else ""
    wants = wants or (["wandb"] if given else [])  # a key alone is enough (node.py)
    if "wandb" not in wants:
        return Finding("tracker", OK, f"{', '.join(wants) or 'none'} (needs no key)")
    here = wandb_key(env, home)
    # nodes in a cloud do not see this shell's environment
    key = task.secrets.get("WANDB_API_KEY", "") if task else here
    mode = (task.envs if task else env).get("WANDB_MODE") or ""
    whose = "in the task's secrets" if task else "here"
    later = "offline: what is committed is kept in the bucket, for `harness runs sync` later"
    if wandb_online(key, mode):
        return Finding("tracker", OK, f"wandb: online, a key is {whose}")
    if key:
        return Finding(
            "tracker",
            WARN,
            f"wandb: {later}; a key is {whose}, but WANDB_MODE is {mode}",
            "leave WANDB_MODE out to go online",
        )
    if mode == "online":
        remedy = "--secret WANDB_API_KEY" if task else "wandb login"
        return Finding(
            "tracker",
            FAIL,
            "wandb: WANDB_MODE is online, but there is no key: nothing will be published",
            remedy,
        )
    if mode:
        return Finding("tracker", OK, f"wandb: {later} (WANDB_MODE is {mode})")
    if here:
        return Finding(
            "tracker",
            WARN,
            f"wandb: {later}; a key is here, but nodes have none",
            "--secret WANDB_API_KEY gives it to them",
        )
    remedy = "wandb login, then --secret WANDB_API_KEY; or --env WANDB_MODE=offline"
    return Finding("tracker", WARN, f"wandb: {later}; there is no key", remedy)


GPU_PROBE = """
import json, torch
n = torch.cuda.device_count()
names = [torch.cuda.get_device_name(i) for i in range(n)]
if n:
    x = torch.randn(512, 512, device="cuda"); torch.cuda.synchronize()
    assert torch.isfinite(x @ x).all()
nccl = torch.cuda.nccl.version() if n else None
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl, "gpus": names}
print(json.dumps(found))
"""


def gpus() -> Finding:
    """Check torch and the GPUs of this computer, in a process of its own since it may hang."""
    if importlib.util.find_spec("torch") is None:
        return Finding("GPU stack", OK, "no torch here (a controller needs none)")
    try:
        done = subprocess.run(
            [sys.executable, "-c", GPU_PROBE],
            capture_output=True,
            text=True,
            timeout=GPU_TIMEOUT_S,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Finding(
            "GPU stack",
            FAIL,
            f"torch did not answer within {GPU_TIMEOUT_S:g} s",
            "nvidia-smi; dmesg | grep -i xid; restart the node",
        )
    except (subprocess.CalledProcessError, ValueError, IndexError) as e:
        words = (getattr(e, "stderr", "") or str(e)).strip().splitlines()[-1:]
        return Finding(
            "GPU stack",
            FAIL,
            " ".join(words),
            "pip install torch as the README says; driver and CUDA must fit (nvidia-smi)",
        )
    if not found["gpus"]:
        driver = shutil.which("nvidia-smi")
        remedy = (
            "the driver is there, but torch sees no GPU: is it the CPU build?" if driver else ""
        )
        return Finding(
            "GPU stack", WARN if driver else OK, f"torch {found['torch']}, no GPU here", remedy
        )
    return Finding(
        "GPU stack",
        OK,
        f"torch {found['torch']}, CUDA {found['cuda']}, {len(found['gpus'])} x {found['gpus'][0]}",
    )


# ---- all of them ---------------------------------------------------------------------------------
def examine(
    task: Task | None,
    url: str,
    sky: Sky,
    open_at: Callable[[str], ObjectStore],
    env: Mapping[str, str],
    home: Path,
    token: str,
    ask: Callable[[Sequence[str]], str] = ask_command,
) -> list[Finding]:
    """Run all checks that are possible, in order. `env`, `home`: the person's; `token`: part of the
    name of the object that is written to the bucket."""
    found = [skypilot()]
    if found[0].state != FAIL:
        found.append(server(sky))
        if found[-1].state == OK:
            found.append(clouds(sky))
            if found[-1].state != FAIL and task:
                findings, some = offers(sky, task)
                found += [*findings, *quotas(some, ask)]
    if url:
        found.append(bucket(url, open_at, token))
    return [*found, tracker(task, env, home), gpus()]


def show(found: list[Finding], console: Console) -> None:
    colour = {OK: "green", WARN: "yellow", FAIL: "red"}
    for f in found:
        console.print(
            Text.assemble(
                (f"{f.state:<4}", colour[f.state]), plain(f"  {f.what:<12}  {f.found}", keep="\n")
            ),
            soft_wrap=True,
        )
        if f.remedy:
            console.print(Text(f"{'':20}-> {f.remedy}"), soft_wrap=True)


def to_json(found: list[Finding]) -> str:
    return json.dumps(
        {"ok": all(f.state != FAIL for f in found), "findings": [asdict(f) for f in found]},
        indent=2,
    )
