"""What the command of a local node finds in its environment."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

from harness.clouds.machines import Config, LocalMachine
from harness.clouds.metadata import environment_of


def node_env(
    config: Config, machine: LocalMachine, folder: Path, endpoint: str, instance: str
) -> dict[str, str]:
    """What a node's command sees: what the caller gave, what SkyPilot sets on a one-node
    cluster, and who it is."""
    share = share_of_gpus(config.gpus, machine.slot, config.max_nodes)
    place = {
        "cluster_name": f"local-{machine.attempt}",
        "cloud": "local",
        "region": machine.offer.name,
        "zone": None,
    }
    run = hashlib.sha256((config.run_url or str(folder.parent.parent)).encode()).hexdigest()[:12]
    env = {
        "OMP_NUM_THREADS": "1",
        **machine.asked.env,
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": str(len(share)),
        "SKYPILOT_TASK_ID": f"local-{run}_{config.name}",
        "SKYPILOT_CLUSTER_INFO": json.dumps(place),
        "SKYPILOT_INTERNAL_JOB_ID": "1",
        "HARNESS_ATTEMPT": str(machine.attempt),
        "HARNESS_NODE_DIR": str(folder),
        "HARNESS_HOST": f"local-{machine.attempt}",
        "HARNESS_OFFER": machine.offer.name,
        "HARNESS_PROVIDER": instance,
        **environment_of(config.notices, endpoint),
        "PATH": os.pathsep.join(
            [os.path.dirname(sys.executable), machine.asked.env.get("PATH", os.defpath)]
        ),
    }
    if config.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(share)
    return env


def share_of_gpus(gpus: tuple[str, ...], slot: int, nodes: int) -> tuple[str, ...]:
    """A node's GPUs: an equal part of all, or one that several nodes share when there are fewer
    than nodes."""
    if not gpus:
        return ()
    each = len(gpus) // nodes
    if each == 0 or (slot + 1) * each > len(gpus):
        return (gpus[slot % len(gpus)],)
    return gpus[slot * each : (slot + 1) * each]
