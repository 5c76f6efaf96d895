"""`harness run`: one node's agent."""

from __future__ import annotations

import os
import shlex
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.adapt import adapting
from harness.cli.common import (
    PROMETHEUS,
    checked_store,
    duration_text,
    mesh_text,
    prometheus_address,
    when,
    worlds,
)
from harness.cli.record import RecordFlags, said_in_variables
from harness.cli.variables import (
    check_address,
    check_for_workers,
    check_modules,
    check_trackers,
    cluster_info,
    number_in,
)
from harness.core.config import Bounds, flag, positional
from harness.core.given_files import output_folder, readable_file
from harness.core.mesh import replica_ranks_told
from harness.core.meshes import meshes_told, parse_choice
from harness.core.steps_asked import StepsAsked
from harness.core.world import BadInput
from harness.node.progress import FACTOR, Limits
from storage.opening import normalize, open_store

if TYPE_CHECKING:
    from harness.agent.config import AgentConfig, HelperConfig, Worlds
    from harness.agent.host import FindPlace
    from harness.agent.notices import NoticeSource


def _workers(text: str) -> None:
    """A number of workers, or auto. Raises ValueError that says what is wanted."""
    if text != "auto" and not (text.isdecimal() and int(text) >= 1):
        raise ValueError(f"wanted a number or auto, at least 1; found {text!r}")


def _steps(text: str) -> None:
    """Steps to profile, or none. Raises ValueError that says what is wanted."""
    if text:
        StepsAsked.parse(text)


def _gpu_health(text: str) -> None:
    """auto, off, or a file. Raises ValueError that says what is wanted."""
    if text not in ("auto", "off"):
        readable_file(text)


def _signal(text: str) -> None:
    """The name of a signal, or none. Raises ValueError that says what is wanted."""
    if text and f"SIG{text.removeprefix('SIG')}" not in signal.Signals.__members__:
        raise ValueError(f"wanted the name of a signal, such as USR1 or TERM; found {text!r}")


# ---- run (the agent) -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Pace:
    """How often an agent speaks to its store, and how long another one may be silent."""

    beat_s: float
    dead_s: float
    control_s: float


FOLDER, BUCKET = Pace(1.0, 5.0, 0.3), Pace(2.0, 10.0, 5.0)
USUAL = Limits()


@dataclass(frozen=True)
class RunFlags(RecordFlags):
    script: tuple[str, ...] = positional(
        "-- script.py and its arguments, or -- -m module", nargs="*"
    )
    run: str = flag("", "URL of the run; default: HARNESS_RUN")
    nproc: str = flag(
        "auto", "workers on this node: a number, or auto (one per GPU, else one)", check=_workers
    )
    speed: float = flag(
        1.0, "relative speed of this node's workers, for uneven shares on mixed hardware", above=0
    )
    min_nodes: int = flag(1, "do not train with fewer nodes than this", at_least=1)
    replica_ranks: int = flag(
        0,
        "ranks that hold one copy of the model together: only whole replicas train, nodes that are "
        "left over wait; 0: HARNESS_REPLICA_RANKS, else 1",
        at_least=0,
    )
    mesh: str = flag(
        "",
        "how ranks share one copy of the model, such as dp_shard=8,tp=2, or several in order of "
        "preference, such as 'dp_shard=8|auto:2..4' (docs/MESHES.md): only whole copies train, "
        "nodes that are left over wait; default: HARNESS_MESH, else each rank by itself",
        check=mesh_text,
    )
    mesh_wait_s: float = flag(
        30.0, "how long a world waits for a mesh that is preferred to what can be had", at_least=0
    )
    worlds: str = flag(
        "",
        "only these numbers of ranks train, such as 1,2,4: the greatest that the nodes at hand "
        "make, and the rest waits; default: HARNESS_WORLDS, else any number",
        check=worlds,
    )
    grace_s: float = flag(
        0.0,
        "how long a SIGTERM leaves us before the end; 0: what this cloud promises, 30 s where it "
        "promises nothing",
    )
    notices: str = flag(
        "",
        "where to listen for notices, such as aws,kubernetes, a source of your own as "
        "package.module:function, auto (what this machine says of itself), or none; default: auto",
    )
    notice_ack: str = flag(
        "own",
        "tell Azure that this node has gone: own, all (every machine that an event names is ours), "
        "never",
        choices=["own", "all", "never"],
    )
    leave_at: str = flag(
        "",
        "when this node ends, such as the end of a capacity block: 2026-11-21T08:00:00Z, or "
        "seconds since 1970",
        check=when,
    )
    leave_after: str = flag(
        "", "this node ends so long after its start: 12h, 90m, seconds", check=duration_text
    )
    drain_lead_s: float = flag(
        120.0, "how long before an end that is known long before the node drains"
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
    replica_cap_usd: float | None = flag(
        None,
        "copy nothing that would cost more; default: HARNESS_REPLICA_CAP_USD, else no limit",
    )
    alert: tuple[str, ...] = flag(
        (),
        "tell alerts to https://..., slack:https://... or command:'PROGRAM ARGUMENTS'; repeat for "
        "more; also HARNESS_ALERTS",
        metavar="RECEIVER",
    )
    alert_rules: str = flag(
        "",
        "rules of alerts besides those that ship: files, package.module:function, "
        "comma-separated; default: HARNESS_ALERT_RULES",
    )
    prometheus: str = flag("", PROMETHEUS, check=prometheus_address)
    stage_gib: float = flag(
        0.0, "host memory for staged snapshots, in GiB; 0: half of what is free"
    )
    stage_dir: str = flag(
        "", "RAM disk for staged snapshots; default: /dev/shm", check=output_folder
    )
    disk_tier_gib: float = flag(
        0.0, "keep the last snapshots on this much of the node's disk, too; 0: do not"
    )
    disk_tier_dir: str = flag("", "where; default: the node's scratch folder", check=output_folder)
    peer_tier: str = flag(
        "memory",
        "where each node keeps a copy of a neighbour's share of a snapshot, so that nodes take the "
        "state from each other before the bucket; off: nowhere",
        choices=["off", "memory", "disk"],
    )
    peer_encrypt: bool = flag(
        False, "encrypt what they tell each other; on all nodes (wants the package cryptography)"
    )
    hang_after_s: float = flag(
        0.0,
        f"a worker without a sign of life for so long is hung; 0: {FACTOR:g} times its slowest "
        f"step, at least {USUAL.floor_s:g} s",
    )
    stuck_after_s: float = flag(
        0.0,
        f"the same for start-up and resuming, and for saving; 0: {USUAL.start_s:g} s and "
        f"{USUAL.save_s:g} s",
    )
    gpu_health: str = flag(
        "auto",
        "auto (NVML, where there is a driver), off, or the file that drives a fake one",
        check=_gpu_health,
    )
    measure_s: float = flag(
        60.0,
        "how often this node tells how busy its hardware is (CPU, memory, disk, network, GPUs); in "
        "worlds of more than 8 nodes less often; 0: never",
        at_least=0,
    )
    flight_recorder: str = flag(
        "auto",
        "keep what NCCL remembers of its last collectives when workers hang: on, off, auto (where "
        "there are GPUs)",
        choices=["auto", "on", "off"],
    )
    beat_s: float = flag(
        0.0,
        f"how often this node says that it lives; 0: {FOLDER.beat_s:g} s (folder), "
        f"{BUCKET.beat_s:g} s (bucket)",
    )
    dead_s: float = flag(
        0.0,
        f"silence of a node that means its death; 0: {FOLDER.dead_s:g} s (folder), "
        f"{BUCKET.dead_s:g} s (bucket)",
    )
    profile: str = flag(
        "",
        "write a trace of these steps (20:23: both included) to the bucket, on every rank, and on "
        "GPUs one of their memory; default: HARNESS_PROFILE",
        check=_steps,
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
    preload: str = flag(
        "auto",
        "modules that the node imports once for all its workers, comma-separated; auto: what the "
        "script imports of the known frameworks; none",
        check=check_modules,
    )
    allow_rewind: bool = flag(
        False, "go on though committed steps must be done again (HARNESS_ALLOW_REWIND)"
    )
    leaderless_hours: float = flag(
        24.0, "a controller that led this run has been silent for so long: drain; 0: train on"
    )
    addr: str = flag(
        "",
        "this node's address as the other nodes see it; default: from SkyPilot, else loopback",
        check=check_address,
    )


def run(flags: RunFlags) -> int:
    """Be this node's agent: join the run, start the script's workers, heed notices."""
    from harness.agent.agent import Agent
    from harness.agent.gauges import agent_gauges
    from harness.agent.host import RealHost
    from harness.bucket.heads import sign_off
    from harness.cli.prometheus import exposing
    from harness.node.processes import die_with_parent

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
    if flags.profile:
        env["HARNESS_PROFILE"] = flags.profile
    env.update(said_in_variables(flags))  # for its workers as well
    env.update(adapting(flags, argv, env))
    check_for_workers(env)
    if env.get("HARNESS_NODE_DIR"):  # a node of the local cloud dies as a whole, like a machine
        die_with_parent()
    beside, sources = _beside(flags, env), _sources(flags, env)
    config = _config(flags, env, normalize(url), argv, beside)
    # what is wrong with the input is told before anything is written anywhere
    open_store(url)
    if beside.replica:
        checked_store(normalize(beside.replica), retry_within_s=10.0)
    # an agent must hear notices while the bucket is silent
    store = checked_store(normalize(url), retry_within_s=10.0)
    # for whom we start: to them a refusal is an outage as well
    os.environ["STORAGE_ANSWERED"] = normalize(url)
    agent = Agent(config, store, sources, RealHost(_place_finder(env)))
    with exposing(flags.prometheus, lambda: agent_gauges(agent)) as at:
        if at:
            print(f"harness run: numbers for Prometheus at {at}", flush=True)
        try:
            return agent.execute()
        finally:
            sign_off(store)


def _beside(flags: RunFlags, env: Mapping[str, str]) -> HelperConfig:
    """What runs beside the first member. Raises BadInput, WrongInput."""
    from harness.agent.config import HelperConfig

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
        trackers = "wandb"  # a key alone is enough
    check_trackers(trackers)
    return HelperConfig(trackers, replica, cap_usd, *_alerts(flags, env))


def _alerts(flags: RunFlags, env: Mapping[str, str]) -> tuple[str, str]:
    """Who is told of alerts, and the rules besides ours. Raises BadInput if either is wrong."""
    rules = flags.alert_rules or env.get("HARNESS_ALERT_RULES", "")
    if not (flags.alert or env.get("HARNESS_ALERTS")):
        return "", rules
    from harness.views.alert_own import all_rules
    from harness.views.sinks import asked_sinks, sinks_of

    asked = asked_sinks(flags.alert, env)
    sinks_of(asked)
    all_rules(rules)
    return shlex.join(asked), rules


def _place_finder(env: Mapping[str, str]) -> FindPlace | None:
    """Who finds out where this node stands and what it costs. None: a node of the local cloud,
    whose provider knows."""
    from harness.agent.sources import MachineInfo
    from harness.agent.whereabouts import PlaceFinder

    if env.get("HARNESS_NODE_DIR"):
        return None
    machine = MachineInfo(dict(env))
    return lambda took: PlaceFinder(machine, took)


def _sources(flags: RunFlags, env: Mapping[str, str]) -> list[NoticeSource]:
    """Where this node's notices come from, and when its time is over."""
    from harness.agent.sources import LimitSource, detect, duration, moment

    found = detect(dict(env), asked=flags.notices, speaks_for_all=flags.notice_ack == "all")
    if flags.leave_at:
        found.append(LimitSource("limit", moment(flags.leave_at)))
    if flags.leave_after:
        found.append(LimitSource("limit", time.time() + duration(flags.leave_after)))
    return found


def _config(
    flags: RunFlags, env: Mapping[str, str], url: str, argv: list[str], beside: HelperConfig
) -> AgentConfig:
    from harness.agent.config import AgentConfig, Fitness, Leaving, Timing, Uploads
    from harness.agent.flight import on_gpus
    from harness.agent.leaderless import LOOK_EVERY_S
    from harness.agent.sources import sigterm_s
    from harness.uploader.nearby import NearbyConfig

    node_dir = Path(env.get("HARNESS_NODE_DIR") or tempfile.mkdtemp(prefix="harness-node-"))
    pace = FOLDER if url.startswith("file://") else BUCKET
    return AgentConfig(
        run=url,
        argv=argv,
        nproc=_nproc(flags.nproc, env),
        attempt=number_in(env, "HARNESS_ATTEMPT", 0),
        addr=flags.addr or _address(env),
        node_dir=node_dir,
        accelerator=env.get("HARNESS_OFFER", ""),
        speed=flags.speed,
        place=_place(env),
        worlds=_worlds(flags, env),
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
    """What a world is made of. Raises BadInput if none can be."""
    from harness.agent.config import Worlds

    meshes = parse_choice(flags.mesh) if flags.mesh else meshes_told(env)
    meshes = meshes and replace(meshes, wait_s=flags.mesh_wait_s)
    # a flag is stronger than the environment
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
    found = Worlds(flags.min_nodes, size, meshes, ranks)
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


def _nproc(text: str, env: Any) -> int:
    if text != "auto":
        return int(text)
    if "CUDA_VISIBLE_DEVICES" in env:
        return max(
            1,
            len([d for d in env["CUDA_VISIBLE_DEVICES"].split(",") if d.strip() not in ("", "-1")]),
        )
    found = [
        p for p in Path("/dev").glob("nvidia[0-9]*") if p.name.removeprefix("nvidia").isdigit()
    ]
    return max(1, len(found))


def _address(env: Any) -> str:
    addresses = env.get("SKYPILOT_NODE_IPS", "").split()
    rank = number_in(env, "SKYPILOT_NODE_RANK", 0)
    return addresses[rank] if rank < len(addresses) else "127.0.0.1"


def _place(env: Any) -> str:
    """Cloud and region of this node, from SkyPilot: nodes of others are not reached. Empty:
    unknown, or the local cloud."""
    about = cluster_info(env)
    if about.get("cloud") == "local":
        return ""
    return "/".join(str(about[k]).lower() for k in ("cloud", "region") if about.get(k))
