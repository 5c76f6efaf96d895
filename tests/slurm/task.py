"""A task of ours as it runs in the lab: the same file, on the lab's machines (Slurm has no spot
nodes) and with its image.

python tests/slurm/task.py run NAME VENV RUN [NAME=value ...]     the `run` section of sky_tasks/NAME.yaml on this computer, as a node would
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

TASKS = Path(__file__).resolve().parent.parent.parent / "sky_tasks"


def in_lab(
    name: str,
    venv: Path,
    into: Path,
    code: Path = TASKS.parent,
    first: str = ":",
    flags: str = "",
    **resources: Any,
) -> Path:
    """Write `sky_tasks/<name>` for the lab; returns where. code: what is sent to nodes; first:
    a command of theirs before all others; flags: more of `harness run`."""
    task = yaml.safe_load((TASKS / name).read_text())
    recovery = task["resources"].get("job_recovery") or task["resources"].get("any_of", [{}])[
        0
    ].get("job_recovery")
    task["resources"] = {
        "infra": "slurm",
        "accelerators": "H100:1",
        "job_recovery": recovery,
        **resources,
    }
    task["workdir"] = str(code)
    task["envs"] |= {"VENV": str(venv), "TRACKERS": ""}
    # A bucket that is a folder is shared by two users there: what the controller makes, nodes must
    # be able to write. Machines there are told of their end as on AWS, by a service whose address
    # stands on the local disk. Their GPUs are names only. Training must not starve the controller
    # and the API server, which are elsewhere in real life.
    kind = "umask 0\nexport CUDA_VISIBLE_DEVICES=\nrenice -n 10 -p $$ > /dev/null"
    run = task["run"].replace("harness run ", f"harness run {flags} ")
    task["run"] = (
        f"{kind}\n{first}\n[ ! -f {code.parent}/local/metadata ] || . "
        f"{code.parent}/local/metadata\n{run}"
    )
    into.write_text(yaml.safe_dump(task, sort_keys=False))
    return into


def run_here(
    name: str,
    venv: Path,
    run: str,
    more: dict[str, str],
    env: Mapping[str, str] = os.environ,
    cwd: Path = TASKS.parent,
    out: Any = None,
) -> int:
    """Execute what SkyPilot would on a node; returns its exit status."""
    task = yaml.safe_load((TASKS / f"{name}.yaml").read_text())
    envs = {
        k: str(v or "")
        for k, v in {
            **task["envs"],
            **task.get("secrets", {}),
            "RUN": run,
            "VENV": venv,
            **more,
        }.items()
    }
    script = f"umask 0\n{task['run']}"
    return subprocess.run(
        ["bash", "-c", script],
        cwd=cwd,
        env={**env, **envs},
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
    ).returncode


if __name__ == "__main__":
    if len(sys.argv) < 5 or sys.argv[1] != "run":
        sys.exit(__doc__)
    sys.exit(
        run_here(
            sys.argv[2],
            Path(sys.argv[3]),
            sys.argv[4],
            dict(item.split("=", 1) for item in sys.argv[5:]),
        )
    )
