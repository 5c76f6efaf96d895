"""`harness run`: run the agent of one node."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import re
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from harness.agent.agent import Agent
from harness.agent.flight_recorder import on_gpus
from harness.agent.host import RealHost
from harness.agent.instance_price import PlaceFinder
from harness.agent.run_orders import LOOK_EVERY_S
from harness.agent.sky_node import cluster_info, give_back
from harness.agent.workers import (
    AgentConfig,
    Fitness,
    HelperConfig,
    Leaving,
    Timing,
    Uploads,
    Worlds,
)
from harness.bucket.signed_heads import sign_off
from harness.cli.common import (
    PROMETHEUS,
    AlertFlags,
    checked_store,
    duration_text,
    mesh_text,
    prometheus_address,
    when,
    worlds,
)
from harness.cli.run_record import RecordFlags, said_in_variables
from harness.core import extensions
from harness.core.flags import Bounds, StepsAsked, flag, positional
from harness.core.input_files import output_folder, readable_file
from harness.core.mesh import meshes_told, parse_choice, replica_ranks_told
from harness.core.world import BadInput
from harness.node.heartbeat import FACTOR, Limits, die_with_parent, tolerate_full_logs
from harness.node.worker_gpus import NodeHardware
from harness.notices.sources import (
    LimitSource,
    MachineInfo,
    detect,
    moment,
    parse_duration,
    sigterm_s,
)
from harness.rendezvous.rendezvous import free_port
from harness.uploader.node_tiers import NearbyConfig
from storage.canonical_json import BadObject, parsed
from storage.stores.store_urls import normalize, open_store

if TYPE_CHECKING:
    from harness.agent.host import FindPlace
    from harness.notices.notice import NoticeSource

# The variables by which `harness run` adapts scripts whose training loop is not ours.

# modules to preload: importing them takes seconds, which forks of the warm process save
FRAMEWORKS = {
    "transformers": "transformers.trainer",
    "trl": "transformers.trainer",
    "accelerate": "accelerate",
    "lightning": "lightning.pytorch",
    "pytorch_lightning": "pytorch_lightning",
    "datasets": "datasets",
    "peft": "peft",
    "torchtitan": "torchtitan.trainer",
}


class AdaptFlags(Protocol):
    """The flags of `harness run` that `adapting` reads."""

    @property
    def adapt(self) -> str: ...
    @property
    def attach(self) -> tuple[str, ...]: ...
    @property
    def script_world(self) -> int: ...
    @property
    def preload(self) -> str: ...


def adapting(flags: AdaptFlags, argv: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the workers. Raises BadInput."""
    said = {"HARNESS_ADAPT": flags.adapt}
    if flags.attach:
        said["HARNESS_ATTACH"] = json.dumps(dict(map(_option, flags.attach)))
    if flags.script_world:
        said["HARNESS_SCRIPT_WORLD"] = str(flags.script_world)
    if flags.preload == "auto":
        if "HARNESS_PRELOAD" not in env and flags.adapt != "none":
            said["HARNESS_PRELOAD"] = ",".join(to_preload(argv))
    else:
        said["HARNESS_PRELOAD"] = "" if flags.preload == "none" else flags.preload
    return said


# Frameworks whose trainer takes all GPUs that it sees, so that it must see one. Scripts of the
# others choose theirs by LOCAL_RANK among all, and Accelerate does either.
ALONE = ("transformers", "trl", "lightning", "pytorch_lightning", "lightning_fabric")
BY_RANK = ("torchtitan", "deepspeed", "megatron")


def wants_one_gpu(adapt: str, argv: Sequence[str]) -> bool:
    """Return whether each worker should see its own GPU only, from the script's beginning: CUDA
    reads the variable once, and a script may use CUDA before it makes its trainer. What a script
    imports elsewhere is noticed when the trainer is made (`worker/alone.py`)."""
    if adapt != "auto":
        return adapt in ("transformers", "lightning", "fabric")
    text, tops = _imports(argv)
    by_rank = "LOCAL_RANK" in text or any(top in BY_RANK for top in tops)
    return not by_rank and any(top in ALONE for top in tops)


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise BadInput(f"--attach {text}: wanted NAME=VALUE, such as snapshot_every_s=60")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value  # a plain word that is no JSON


def to_preload(argv: Sequence[str]) -> list[str]:
    """Return the modules to preload: of the known frameworks that a script imports at top level, or
    that `-m` names a module of."""
    tops = _imports(argv)[1]
    return list(dict.fromkeys(FRAMEWORKS[top] for top in tops if top in FRAMEWORKS))


def _imports(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return a script's text, and the packages that it imports at top level; of `-m`, the package
    of the module. What cannot be read has none: the worker will report the error."""
    if argv[0] == "-m":
        return "", [argv[1].partition(".")[0]] if len(argv) > 1 else []
    if not argv[0].endswith(".py"):
        return "", []
    try:
        data = Path(argv[0]).read_bytes()
        tree = ast.parse(data)
    except (OSError, SyntaxError, ValueError):
        return "", []
    tops: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            tops += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            tops.append(node.module.partition(".")[0])
    return data.decode(errors="replace"), tops


# Checks of the variables that `harness run` and its workers read, before anything is started.

MOST_ATTEMPTS = 10**6
MOST_WORKERS = 1024  # of a node
TRACKERS = ("wandb", "tensorboard", "mlflow", "jsonl")
CHOICES = {"HARNESS_ON_CHANGE": ("refuse", "warn", "accept"), "HARNESS_DIFF": ("keep", "hash")}


def number_in(
    env: Mapping[str, str], name: str, usual: int, at_least: int = 0, at_most: int = MOST_ATTEMPTS
) -> int:
    """Return a variable as a whole number; `usual` if it is not set. Raises BadInput."""
    if not (text := env.get(name, "")):
        return usual
    try:
        return int(Bounds(at_least=at_least, at_most=at_most).of(text, int))
    except ValueError as e:
        raise BadInput(f"{name}: {e}") from None


def check_address(text: str) -> None:
    """Check a host name or an address, or "". Raises ValueError that says what is wanted."""
    if text and not re.fullmatch(r"[A-Za-z0-9_.:%-]{1,253}", text, re.ASCII):
        raise ValueError(f"wanted a host name or an IP address; found {text[:80]!r}")


def check_modules(text: str) -> None:
    """Check comma-separated names of modules, "auto", "none" or "". Raises ValueError."""
    for word in text.split(",") if text else ():
        if not all(part.isidentifier() for part in word.strip().split(".")):
            raise ValueError(f"wanted modules such as torch,transformers; found {word[:80]!r}")


def check_trackers(text: str) -> None:
    """Check comma-separated trackers (names, or package.module:function), or "". Raises
    BadInput."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if ":" not in name and name not in TRACKERS:
            from harness.look.trackers.tracker_registry import KNOWN

            raise BadInput(f"tracker {name[:80]!r} is not known; wanted {KNOWN}")


def check_for_workers(env: Mapping[str, str]) -> None:
    """Check the variables of workers here, because a worker would fail on them at every restart.
    Raises BadInput."""
    checks: dict[str, Callable[[str], object]] = {
        "HARNESS_PROFILE": StepsAsked.parse,
        "HARNESS_SCRIPT_WORLD": lambda text: Bounds(at_least=1).of(text, int),
        "HARNESS_ATTACH": _options,
        "HARNESS_LOOK_AGAIN_S": _pauses,
        "HARNESS_USD_PER_H": lambda text: Bounds().of(text, float),
        "HARNESS_ON_DEMAND_USD_PER_H": lambda text: Bounds().of(text, float),
        "HARNESS_PRELOAD": check_modules,
        "HARNESS_DATA_CACHE_GIB": _gib,
        "HARNESS_GUARDS": _guards,
    }
    for name, check in checks.items():
        if text := env.get(name, ""):
            try:
                check(text)
            except (ValueError, BadObject) as e:
                raise BadInput(f"{name}={text[:80]!r}: {e}") from None
    for name, known in CHOICES.items():
        if (text := env.get(name, "")) and text not in known:
            raise BadInput(f"{name}={text[:80]!r}: wanted one of {', '.join(known)}")


def _options(text: str) -> None:
    found = parsed(text)
    if not isinstance(found, dict):
        raise ValueError("wanted a JSON object of options of harness.attach()")


def _pauses(text: str) -> None:
    for word in text.split(","):
        found = float(word)
        if not (math.isfinite(found) and 0.0 <= found <= 600.0):
            raise ValueError("wanted seconds between 0 and 600, for example 1,3,8")


def _guards(text: str) -> object:
    return extensions.load(extensions.GUARD_RULES, "--guards")(text)


def _gib(text: str) -> object:
    from harness.data.chunk_cache import gib_nbytes

    return gib_nbytes(text)


def _workers(text: str) -> None:
    """Check a number of workers, or "auto". Raises ValueError that says what is wanted."""
    if text != "auto" and not (text.isdecimal() and int(text[:9]) >= 1):
        raise ValueError(f"wanted a number or auto, at least 1; found {text!r:.80}")
    if text != "auto" and int(text[:9]) > MOST_WORKERS:
        raise ValueError(f"wanted at most {MOST_WORKERS} workers on a node; found {text!r:.80}")


def _steps(text: str) -> None:
    """Check the steps to profile, or "". Raises ValueError that says what is wanted."""
    if text:
        StepsAsked.parse(text)


def _gpu_health(text: str) -> None:
    """Check "auto", "off", or a readable file. Raises ValueError that says what is wanted."""
    if text not in ("auto", "off"):
        readable_file(text)


def _signal(text: str) -> None:
    """Check the name of a signal, or "". Raises ValueError that says what is wanted."""
    if text and f"SIG{text.removeprefix('SIG')}" not in signal.Signals.__members__:
        raise ValueError(f"wanted the name of a signal, such as USR1 or TERM; found {text!r}")


# ---- run (the agent) -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Pace:
    """The intervals of an agent in seconds: between heartbeats (`beat_s`), of silence after which
    another node is dead (`dead_s`), and between looks for requests to the run (`control_s`)."""

    beat_s: float
    dead_s: float
    control_s: float


FOLDER, BUCKET = Pace(1.0, 5.0, 0.3), Pace(2.0, 10.0, 5.0)
USUAL = Limits()


@dataclass(frozen=True)
class RunFlags(RecordFlags, AlertFlags):
    SETTINGS = ("diff", "owner", "project", "experiment", "purpose", "alert_rules")
    TITLES: ClassVar = {
        "nodes and their ranks": ("min_nodes", "mesh", "replica_ranks", "worlds"),
        "preemption notices": ("notices", "grace_s", "notify_signal"),
        "unchanged scripts": ("adapt", "attach", "script_world"),
        "bad steps": ("guards",),
        "observability": ("trackers", "profile", "prometheus", "alert"),
        "snapshots and provenance": ("replica", "on_change"),
    }

    script: tuple[str, ...] = positional(
        "-- script.py and its arguments, or -- -m module", nargs="*"
    )
    run: str = flag("", "URL of the run; default: HARNESS_RUN")
    nproc: str = flag(
        "auto", "workers on this node: a number, or auto (one per GPU, else one)", check=_workers
    )
    min_nodes: int = flag(1, "do not train with fewer nodes than this", at_least=1)
    mesh: str = flag(
        "",
        "how ranks share one copy of the model, such as dp_shard=8,tp=2, or several in order of "
        "preference, such as 'dp_shard=8|auto:2..4' (docs/MESHES.md): only whole copies train, "
        "nodes that are left over wait; default: HARNESS_MESH, else each rank by itself",
        check=mesh_text,
    )
    replica_ranks: int = flag(
        0,
        "ranks that hold one copy of the model together: only whole replicas train, nodes that are "
        "left over wait; 0: HARNESS_REPLICA_RANKS, else 1",
        at_least=0,
    )
    worlds: str = flag(
        "",
        "only these numbers of ranks train, such as 1,2,4: the greatest that the nodes at hand "
        "make, and the rest waits; default: HARNESS_WORLDS, else any number",
        check=worlds,
    )
    notices: str = flag(
        "",
        "where to listen for notices, such as aws,kubernetes, a source of your own as "
        "package.module:function, auto (what this machine says of itself), or none; default: auto",
    )
    grace_s: float = flag(
        0.0,
        "how long a SIGTERM leaves us before the end; 0: what this cloud promises, 30 s where it "
        "promises nothing",
    )
    notify_signal: str = flag(
        "",
        "for scripts without harness.attach(): send them this signal (USR1, TERM...), on all "
        "nodes, when one gets a notice, when one joins, and on `harness stop`; who has not ended "
        "--grace-s later is ended, and the script starts again in the new world",
        check=_signal,
    )
    trackers: str = flag(
        "",
        "where to publish the run: wandb, tensorboard, mlflow, jsonl, or package.module:function, "
        "comma-separated; default: wandb if WANDB_API_KEY is set",
    )
    replica: str = flag(
        "", "URL of a second bucket: committed snapshots are copied there; default: HARNESS_REPLICA"
    )
    adapt: str = flag(
        "auto",
        "whose training loop the script uses: transformers, accelerate, lightning, fabric, "
        "torchtitan; auto: found out when the script uses it; none: it is left alone. A script "
        "that calls harness.attach() is left alone in any case",
        choices=["auto", "none", "transformers", "accelerate", "lightning", "fabric", "torchtitan"],
    )
    attach: tuple[str, ...] = flag(
        (),
        "an option of harness.attach() for a script that does not call it, such as "
        "snapshot_every_s=60 or reduce=exact; repeat for more",
        metavar="NAME=VALUE",
    )
    script_world: int = flag(
        0,
        "how many workers an unchanged script's batch is meant for: its batch x accumulation x "
        "this is the global batch of the whole run; 0: HARNESS_SCRIPT_WORLD, else the first world "
        "of the run",
        at_least=0,
    )
    guards: str = flag(
        "",
        "clip and skip bad steps, and report spikes of the loss (docs/GUARDS.md): default, off, or "
        "a YAML file of settings; default: HARNESS_GUARDS, else off",
    )
    profile: str = flag(
        "",
        "write a trace of these steps (20:23: both included) to the bucket, on every rank, and on "
        "GPUs one of their memory; default: HARNESS_PROFILE",
        check=_steps,
    )
    prometheus: str = flag("", PROMETHEUS, check=prometheus_address)

    speed: float = flag(
        0.0,
        "relative speed of this node's workers\nfor uneven shares on mixed hardware; 0: "
        "HARNESS_SPEED, which the controller sets to the speed of the offer, else 1",
        at_least=0,
        advanced=True,
    )
    addr: str = flag(
        "",
        "this node's address as the other nodes see it\ndefault: from SkyPilot, else loopback",
        check=check_address,
        advanced=True,
    )
    mesh_wait_s: float = flag(
        30.0,
        "wait for a mesh that is preferred to what can be had",
        at_least=0,
        advanced=True,
    )
    notice_ack: str = flag(
        "own",
        "tell Azure that this node has gone: own, all, never\nall: every machine that an event "
        "names is ours",
        choices=["own", "all", "never"],
        advanced=True,
    )
    leave_at: str = flag(
        "",
        "when this node ends: 2026-11-21T08:00:00Z, or seconds since 1970\nsuch as the end of a "
        "capacity block",
        check=when,
        advanced=True,
    )
    leave_after: str = flag(
        "",
        "this node ends so long after its start: 12h, 90m, seconds",
        check=duration_text,
        advanced=True,
    )
    drain_lead_s: float = flag(
        120.0, "drain so long before an end that is known long before", advanced=True
    )
    leaderless_hours: float = flag(
        24.0,
        "drain when the controller is silent for so long; 0: never\nruns that never had "
        "a controller are exempt",
        advanced=True,
    )
    allow_rewind: bool = flag(
        False,
        "true: go on though committed steps must be done again\nas HARNESS_ALLOW_REWIND=1",
        advanced=True,
    )
    oom: str = flag(
        "retry",
        "where memory ran out: retry, or halve the micro-batch\nthe global batch stays",
        choices=["retry", "halve"],
        advanced=True,
    )
    beat_s: float = flag(
        0.0,
        "time between two heartbeats\n"
        f"0: {FOLDER.beat_s:g} s (folder), {BUCKET.beat_s:g} s (bucket)",
        advanced=True,
    )
    dead_s: float = flag(
        0.0,
        "silence of a node that means its death\n"
        f"0: {FOLDER.dead_s:g} s (folder), {BUCKET.dead_s:g} s (bucket)",
        advanced=True,
    )
    hang_after_s: float = flag(
        0.0,
        "a worker without a sign of life for so long is hung\n"
        f"0: {FACTOR:g} times its slowest step, at least {USUAL.floor_s:g} s",
        advanced=True,
    )
    stuck_after_s: float = flag(
        0.0,
        "the same for start-up and resuming, and for saving\n"
        f"0: {USUAL.start_s:g} s and {USUAL.save_s:g} s",
        advanced=True,
    )
    gpu_health: str = flag(
        "auto",
        "auto (NVML, if there is a driver), off, or the file of a fake",
        check=_gpu_health,
        advanced=True,
    )
    flight_recorder: str = flag(
        "auto",
        "keep what NCCL remembers of a hang: on, off, auto (on GPUs)\nits last "
        "collectives, when workers hang",
        choices=["auto", "on", "off"],
        advanced=True,
    )
    stage_gib: float = flag(
        0.0, "host memory for staged snapshots, in GiB; 0: half of what is free", advanced=True
    )
    stage_dir: str = flag(
        "",
        "RAM disk for staged snapshots\ndefault: /dev/shm",
        check=output_folder,
        advanced=True,
    )
    disk_tier_gib: float = flag(
        0.0, "keep the last snapshots on this much of the node's disk, too", advanced=True
    )
    disk_tier_dir: str = flag(
        "",
        "where the disk tier lies\ndefault: the node's scratch folder",
        check=output_folder,
        advanced=True,
    )
    peer_tier: str = flag(
        "memory",
        "where a node keeps a neighbour's share: memory, disk, off\nso that nodes take the state "
        "from each other before the bucket; off: nowhere",
        choices=["off", "memory", "disk"],
        advanced=True,
    )
    peer_encrypt: bool = flag(
        False,
        "true, on all nodes: encrypt what they tell each other\nwants the package cryptography",
        advanced=True,
    )
    replica_cap_usd: float | None = flag(
        None,
        "copy nothing to --replica that would cost more\ndefault: HARNESS_REPLICA_CAP_USD, else "
        "no limit",
        advanced=True,
    )
    preload: str = flag(
        "auto",
        "modules that the node imports once for all its workers\ncomma-separated; auto: what the "
        "script imports of the known frameworks; none",
        check=check_modules,
        advanced=True,
    )
    measure_s: float = flag(
        60.0,
        "how often this node reports its hardware's load; 0: never\nCPU, memory, disk, network, "
        "GPUs; in worlds of more than 8 nodes less often",
        at_least=0,
        advanced=True,
    )


def run(flags: RunFlags) -> int:
    """Run this node's agent: join the run, start workers, act on notices."""
    env = os.environ
    url = flags.run or env.get("HARNESS_RUN", "")
    if not url:
        raise BadInput(
            "no run URL: give --run URL (or HARNESS_RUN), for example --run s3://my-bucket/runs/x"
        )
    argv = list(flags.script)
    if not argv:
        raise BadInput("no script: write `harness run --run URL -- train.py --its-flags`")
    if argv[0] != "-m" and not Path(argv[0]).is_file():
        raise BadInput(f"{argv[0]}: no such file (working directory: {Path.cwd()})")
    if flags.allow_rewind:
        env["HARNESS_ALLOW_REWIND"] = "1"  # for its workers
    env["HARNESS_OOM"] = flags.oom
    if flags.profile:
        env["HARNESS_PROFILE"] = flags.profile
    if flags.guards:
        is_file = flags.guards not in ("default", "off")
        env["HARNESS_GUARDS"] = os.path.abspath(flags.guards) if is_file else flags.guards
    env.update(said_in_variables(flags))  # for its workers as well
    env.update(adapting(flags, argv, env))
    check_for_workers(env)
    if env.get("HARNESS_NODE_DIR"):  # nodes of the local cloud die as a whole, like machines
        die_with_parent()
    tolerate_full_logs()
    beside, sources = _beside(flags, env), _sources(flags, env)
    config = _config(flags, env, normalize(url), argv, beside)
    # wrong input is reported before anything is written anywhere
    open_store(url)
    _check_own(config.addr)
    if beside.replica:
        checked_store(normalize(beside.replica), retry_within_s=10.0)
    # short retries, so that the agent can act on notices while the bucket is silent
    store = checked_store(normalize(url), retry_within_s=10.0)
    # tells the processes that we start that the store has answered: a refusal then is an outage
    os.environ["STORAGE_ANSWERED"] = normalize(url)
    agent = Agent(config, store, sources, RealHost(_place_finder(env)))
    with contextlib.ExitStack() as stack:
        stack.callback(sign_off, store)
        if flags.prometheus:
            from harness.look.trackers.prometheus import agent_gauges, exposing

            at = stack.enter_context(exposing(flags.prometheus, lambda: agent_gauges(agent)))
            print(f"harness run: numbers for Prometheus at {at}", flush=True)
        code = agent.execute()
    if failed := give_back(env, at_once=agent.unled):
        print(f"harness run: this allocation may not end by itself: {failed}", flush=True)
    return code


def _beside(flags: RunFlags, env: Mapping[str, str]) -> HelperConfig:
    """Return the configuration of the helpers beside the first member. Raises BadInput,
    WrongInput."""
    replica = flags.replica or env.get("HARNESS_REPLICA", "")
    if replica:
        open_store(replica)
    cap_usd = flags.replica_cap_usd
    if cap_usd is None and (said := env.get("HARNESS_REPLICA_CAP_USD", "")):
        try:
            cap_usd = Bounds().of(said, float)
        except ValueError as e:
            raise BadInput(f"HARNESS_REPLICA_CAP_USD: {e}") from None
    trackers = flags.trackers or env.get("HARNESS_TRACKERS", "")
    if not trackers and env.get("WANDB_API_KEY"):
        trackers = "wandb"  # the key alone requests it
    check_trackers(trackers)
    return HelperConfig(trackers, replica, cap_usd, *_alerts(flags, env))


def _alerts(flags: RunFlags, env: Mapping[str, str]) -> tuple[str, str]:
    """Return the receivers of alerts (as shell words; "" for none) and the additional rules.
    Raises BadInput if either is wrong."""
    rules = flags.alert_rules or env.get("HARNESS_ALERT_RULES", "")
    if not (flags.alert or env.get("HARNESS_ALERTS")):
        return "", rules
    from harness.look.alerts.alert_sinks import asked_sinks, sinks_of
    from harness.look.alerts.custom_rules import all_rules

    asked = asked_sinks(flags.alert, env)
    sinks_of(asked)
    all_rules(rules)
    return shlex.join(asked), rules


def _place_finder(env: Mapping[str, str]) -> FindPlace | None:
    """Return the function that finds this node's place and price; `None` for a node of the local
    cloud, whose provider knows them."""
    if env.get("HARNESS_NODE_DIR"):
        return None
    machine = MachineInfo(dict(env))
    return lambda took: PlaceFinder(machine, took)


def _sources(flags: RunFlags, env: Mapping[str, str]) -> list[NoticeSource]:
    """Return the sources of this node's notices, including the end given by leave_at and
    leave_after."""
    found = detect(dict(env), asked=flags.notices, speaks_for_all=flags.notice_ack == "all")
    if flags.leave_at:
        found.append(LimitSource("limit", moment(flags.leave_at)))
    if flags.leave_after:
        found.append(LimitSource("limit", time.time() + parse_duration(flags.leave_after)))
    return found


def _config(
    flags: RunFlags, env: Mapping[str, str], url: str, argv: list[str], beside: HelperConfig
) -> AgentConfig:
    node_dir = Path(env.get("HARNESS_NODE_DIR") or tempfile.mkdtemp(prefix="harness-node-"))
    pace = FOLDER if url.startswith("file://") else BUCKET
    worlds = _worlds(flags, env)
    return AgentConfig(
        run=url,
        argv=argv,
        nproc=_nproc(flags.nproc, env),
        attempt=number_in(env, "HARNESS_ATTEMPT", 0),
        must_adopt=bool(env.get("HARNESS_MUST_ADOPT")),
        addr=flags.addr or _address(env),
        node_dir=node_dir,
        hardware=NodeHardware(
            env.get("HARNESS_OFFER", ""),
            _speed(flags.speed, env),
            node_gpus(env),
            not worlds.splits and wants_one_gpu(flags.adapt, argv),
        ),
        place=_place(env),
        worlds=worlds,
        timing=Timing(
            beat_s=flags.beat_s or pace.beat_s,
            dead_s=flags.dead_s or pace.dead_s,
            control_s=pace.control_s,
            measure_s=flags.measure_s,
            leaderless_s=flags.leaderless_hours * 3600,
            lease_s=min(LOOK_EVERY_S, flags.leaderless_hours * 900) or LOOK_EVERY_S,
        ),
        leaving=Leaving(
            grace_s=flags.grace_s or sigterm_s(env, asked=flags.notices),
            drain_lead_s=flags.drain_lead_s,
            acknowledge=flags.notice_ack != "never",
            notify_signal=flags.notify_signal,
        ),
        fitness=Fitness(
            hang=_hang_limits(flags.hang_after_s, flags.stuck_after_s),
            gpu_health=flags.gpu_health,
            flights=flags.flight_recorder == "on"
            or (flags.flight_recorder == "auto" and on_gpus()),
        ),
        uploads=Uploads(
            stage_dir=Path(flags.stage_dir) if flags.stage_dir else None,
            stage_nbytes=int(flags.stage_gib * 2**30) or None,
            nearby=NearbyConfig(
                disk_nbytes=int(flags.disk_tier_gib * 2**30),
                disk_root=flags.disk_tier_dir or str(node_dir / "disk-tier"),
                peer=flags.peer_tier,
                encrypt=flags.peer_encrypt,
            ).checked(),
        ),
        beside=beside,
    )


def _worlds(flags: RunFlags, env: Mapping[str, str]) -> Worlds:
    """Return the constraints on worlds: least nodes, ranks of a replica, meshes and numbers of
    ranks. Raises BadInput if no world can meet them."""
    meshes = parse_choice(flags.mesh) if flags.mesh else meshes_told(env)
    meshes = meshes and replace(meshes, wait_s=flags.mesh_wait_s)
    # flags override the environment
    said = flags.replica_ranks or (None if flags.mesh else replica_ranks_told(env))
    each = [] if meshes is None else meshes.fixed
    if other := [mesh for mesh in each if said and said != mesh.replica_ranks]:
        raise BadInput(
            f"--mesh {other[0]}: its replicas have {other[0].replica_ranks} ranks, found {said} "
            "(--replica-ranks, HARNESS_REPLICA_RANKS); leave one of the two out"
        )
    try:
        ranks = worlds(flags.worlds or env.get("HARNESS_WORLDS", ""))
    except ValueError as e:
        raise BadInput(f"HARNESS_WORLDS: {e}") from None
    nproc = _nproc(flags.nproc, env)
    size = said if said and meshes is None else 1
    found = Worlds(flags.min_nodes, size, meshes, ranks, flags.oom == "halve")
    if split := [mesh for mesh in each if nproc % mesh.tp]:
        raise BadInput(
            f"--mesh {split[0]}: wanted a node's workers in whole groups of {split[0].tp} (tp), "
            f"found {nproc}: matrix products that cross the network are slower than one GPU; use a "
            "smaller tp, or nodes with more GPUs"
        )
    whole = [n for n in ranks if (meshes.makes(n) if meshes else not n % size)]
    if ranks and not any(n >= nproc for n in whole):
        of = f"of the mesh {meshes}" if meshes else f"of {size}"
        raise BadInput(
            f"--worlds {','.join(map(str, ranks))}: wanted a number of ranks that this node's "
            f"{nproc} can be part of, in whole replicas {of}; found none: all would wait for ever"
        )
    return found


def _hang_limits(hang_after_s: float, stuck_after_s: float) -> Limits:
    usual = Limits(hang_after_s or None)
    return replace(usual, start_s=stuck_after_s, save_s=stuck_after_s) if stuck_after_s else usual


def _nproc(text: str, env: Mapping[str, str]) -> int:
    return max(1, len(node_gpus(env))) if text == "auto" else int(text)


def node_gpus(env: Mapping[str, str], dev: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the GPUs that this node's workers may use, as CUDA_VISIBLE_DEVICES names them. `dev`:
    the folder of devices, whose numbers need not be CUDA's: a container may have /dev/nvidia3
    only."""
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return tuple(d.strip() for d in listed.split(",") if d.strip() not in ("", "-1"))
    found = [p for p in dev.glob("nvidia[0-9]*") if p.name.removeprefix("nvidia").isdigit()]
    return tuple(map(str, range(len(found))))


def _speed(said: float, env: Mapping[str, str]) -> float:
    """Return the relative speed of this node's workers: `said` unless it is 0, else that of the
    offer that the controller launched, else 1. Raises BadInput."""
    if said:
        return said
    try:
        return float(Bounds(above=0).of(env.get("HARNESS_SPEED") or "1", float))
    except ValueError as e:
        raise BadInput(f"HARNESS_SPEED: {e}") from None


def _check_own(addr: str) -> None:
    """Check that this machine can listen on the address. Raises BadInput."""
    try:
        free_port(addr)
    except (OSError, UnicodeError) as e:
        why = getattr(e, "strerror", "") or e
        raise BadInput(
            f"--set addr={addr}: wanted an address of this machine, at which the other nodes reach "
            f"it; it cannot be listened on here: {why}"
        ) from None


def _address(env: Any) -> str:
    addresses = env.get("SKYPILOT_NODE_IPS", "").split()
    rank = number_in(env, "SKYPILOT_NODE_RANK", 0)
    return addresses[rank] if rank < len(addresses) else "127.0.0.1"


def _place(env: Any) -> str:
    """Return cloud and region of this node, from SkyPilot: nodes in other places are not reached.
    "" means unknown, or the local cloud."""
    about = cluster_info(env)
    if about.get("cloud") == "local":
        return ""
    return "/".join(str(about[k]).lower() for k in ("cloud", "region") if about.get(k))
