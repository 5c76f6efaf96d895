"""A node that SkyPilot provisioned: what SkyPilot says about its cluster, and the end of a Slurm
allocation that nobody else would end."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Any

from harness.core.world import BadInput
from storage.canonical_json import BadObject, parsed

# as long as SkyPilot leaves an idle machine of a cloud (`IDLE_MINUTES` of sky_broker.py)
SPARE_MINUTES = 10
ANSWER_WITHIN_S = 20.0


def cluster_info(env: Mapping[str, str]) -> dict[str, Any]:
    """Return SkyPilot's description of this node's cluster; {} without one. Raises BadInput."""
    text = env.get("SKYPILOT_CLUSTER_INFO") or "{}"
    try:
        found = parsed(text)
    except BadObject as e:
        raise BadInput(f"SKYPILOT_CLUSTER_INFO={text[:80]!r}: wanted a JSON object: {e}") from None
    if not isinstance(found, dict):
        raise BadInput(f"SKYPILOT_CLUSTER_INFO={text[:80]!r}: wanted a JSON object")
    return found


def give_back(env: Mapping[str, str], at_once: bool) -> str:
    """Let the Slurm allocation of one of our attempts end: now, or in `SPARE_MINUTES`, before which
    a controller that lives has ended it. Return what went wrong, or "".

    On other clouds SkyPilot's autostop does this; on Slurm it has none, and holds the allocation
    until somebody asks it to end the cluster. Where no controller of ours launched this node, it is
    left alone."""
    job = env.get("SLURM_JOB_ID", "")
    if not (job.isdigit() and env.get("HARNESS_ATTEMPT")) or not env.get("SKYPILOT_CLUSTER_INFO"):
        return ""
    later = ["scontrol", "update", f"jobid={job}", f"endtime=now+{SPARE_MINUTES}minutes"]
    asked = ["scancel", job] if at_once else later
    try:
        subprocess.run(asked, check=True, capture_output=True, text=True, timeout=ANSWER_WITHIN_S)
    except (OSError, subprocess.SubprocessError) as e:
        said = getattr(e, "stderr", "") or e
        return f"`{' '.join(asked)}` failed: {str(said).strip()}"
    return ""
