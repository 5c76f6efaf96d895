"""What a node agent is told when it starts. `harness run` builds it from flags and environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from harness.agent.leaderless import LOOK_EVERY_S
from harness.core.meshes import MeshChoice
from harness.node import progress
from harness.uploader.nearby import NearbyConfig


@dataclass(frozen=True)
class Timing:
    """How often an agent looks and speaks, and how long silence may last. All in seconds."""

    beat_s: float = 1.0
    dead_s: float = 5.0
    tick_s: float = 0.3
    # how often to look for what people ask of the run; each look is a list, which object stores
    # bill
    control_s: float = 0.3
    flush_s: float = 1.0
    measure_s: float = 0.0  # between two facts about this machine's hardware; 0: none
    wait_limit_s: float = 3600.0  # how long to wait for a place in an epoch
    # so long this node goes on when nobody leads the run any more; 0: for ever
    leaderless_s: float = 0.0
    lease_s: float = LOOK_EVERY_S  # how often to look whether somebody does


@dataclass(frozen=True)
class Leaving:
    """What a notice leaves us, and who is told."""

    grace_s: float = 30.0  # what a SIGTERM leaves us when nobody says
    drain_lead_s: float = 120.0  # so long before an end that is known long before, we drain
    # and so long before it, whoever launched us may look for another node
    doubt_ahead_s: float = 900.0
    acknowledge: bool = True  # tell the cloud, where it can be told, that we have gone
    notify_signal: str = ""  # for scripts without a session: sent to them on a notice


@dataclass(frozen=True)
class Fitness:
    """When workers count as hung, and this node as unfit."""

    hang: progress.Limits = field(default_factory=progress.Limits)
    hangs_allowed: int = 3  # so many hangs of our own workers: this node is unfit
    # "auto": by NVML; "off"; or the path of a script for the fake (harness/agent/health.py)
    gpu_health: str = "off"
    flights: bool = False  # NCCL's flight recorder is on, and asked when workers hang
    unfit_grace_s: float = 60.0  # how long workers on a sick GPU have to reach a step boundary


@dataclass(frozen=True)
class Uploads:
    """Where snapshots are staged, and what else keeps them."""

    stage_dir: Path | None = None  # a RAM disk for staged snapshots; None: /dev/shm
    stage_nbytes: int | None = None  # what they may take of it; None: half of what is free
    # tiers of snapshots besides this node's stage
    nearby: NearbyConfig = field(default_factory=NearbyConfig)
    settle_s: float = 30.0  # how long the next epoch waits for uploads whose worker has died


@dataclass(frozen=True)
class HelperConfig:
    """What runs beside the first member of an epoch."""

    trackers: str = ""
    replica: str = ""  # URL of a second bucket that snapshots are copied to
    replica_cap_usd: float | None = None
    # who is told of alerts, as HARNESS_ALERTS says it: it may hold secrets
    alerts: str = field(default="", repr=False)
    alert_rules: str = ""


@dataclass(frozen=True)
class Worlds:
    """What a world is made of."""

    min_members: int = 1
    # that are given the same samples, where no mesh says it; only whole replicas train
    replica_ranks: int = 1
    # how ranks share one copy of the model, in order of preference; only whole copies train
    meshes: MeshChoice | None = None
    ranks: tuple[int, ...] = ()  # only so many train; (): any number


@dataclass(frozen=True)
class AgentConfig:
    run: str
    argv: list[str]
    nproc: int
    attempt: int
    addr: str
    node_dir: Path
    accelerator: str = "cpu"
    speed: float = 1.0
    place: str = ""  # nodes of one place reach each other and form worlds; those of others wait
    worlds: Worlds = field(default_factory=Worlds)
    timing: Timing = field(default_factory=Timing)
    leaving: Leaving = field(default_factory=Leaving)
    fitness: Fitness = field(default_factory=Fitness)
    uploads: Uploads = field(default_factory=Uploads)
    beside: HelperConfig = field(default_factory=HelperConfig)
