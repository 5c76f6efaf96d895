"""The task files without our recovery loop: plain `sky launch`, `sky jobs launch`, and a gang under the strategy ELASTIC.

    python tests/lab/jobs.py DIR [--only plain,managed,elastic]     (DIR: of a lab that is up, see lab.py; or `make lab`)

plain:    one node trains to the end.
managed:  the node is powered off; SkyPilot recovers the job, which resumes from the bucket under the same SKYPILOT_TASK_ID.
elastic:  two nodes; one is powered off, and only one node is left anywhere: the job goes on with that one.

Every run must hold under `harness verify`, and nothing may be left. SkyPilot's server gets our plugin, as docs/CLOUDS.md tells; its network
probe is pointed at the server itself, since job controllers ask public addresses otherwise, which a closed network does not reach.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent.parent)]

from lab import CLUSTERS, Lab  # noqa: E402
from task import in_lab  # noqa: E402

from harness.facts import EpochStarted, StepDone  # noqa: E402
from harness.journal import read_facts  # noqa: E402
from storage.objects import open_store  # noqa: E402
from storage.snapshots import Snapshots  # noqa: E402

WITHIN_S = 900.0
SERVER = "http://127.0.0.1:46580"
STATES = "PENDING|SUBMITTED|STARTING|RUNNING|RECOVERING|SUCCEEDED|FAILED[A-Z_]*|CANCELL[A-Z]*"


class Stage:
    def __init__(self, lab: Lab):
        self.lab = lab

    def server(self) -> None:
        """Register the plugin; the server reads it when it starts."""
        plugin = {"class": "harness.sky_plugin.ElasticPlugin", "parameters": {"network_probe": f"{SERVER}/api/health"}}
        (self.lab.controller_home / ".sky" / "plugins.yaml").write_text(json.dumps({"plugins": [plugin]}))
        self.sky("api", "stop", fails=True)
        self.sky("api", "start")

    def sky(self, *words: str, fails: bool = False, timeout_s: float = WITHIN_S) -> str:
        command = [str(self.lab.venv / "bin/sky"), *words]
        done = subprocess.run(
            command, env=self.lab.env(), capture_output=True, text=True, timeout=timeout_s, cwd=self.lab.code, stdin=subprocess.DEVNULL
        )
        if done.returncode and not fails:
            raise SystemExit(f"sky {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return done.stdout

    def until(self, what: str, true: Callable[[], bool], within_s: float = WITHIN_S) -> None:
        began_s = time.monotonic()
        while not true():
            if time.monotonic() - began_s > within_s:
                raise SystemExit(f"not within {within_s:g} s: {what}\n{self.sky('jobs', 'queue', fails=True)}")
            time.sleep(1.0)
        print(f"{time.strftime('%T')}  {what}  ({time.monotonic() - began_s:.1f} s)", flush=True)

    def job(self, name: str) -> str:
        """State of a managed job, from `sky jobs queue`."""
        for line in self.sky("jobs", "queue", "-a", fails=True).splitlines():
            if f" {name} " in line and (found := re.findall(STATES, line)):
                return str(found[-1])
        return "UNKNOWN"

    def busy(self) -> list[str]:
        return [n for c in CLUSTERS for n in self.lab.busy(c.name)]


class Play:
    """One run of one task file."""

    def __init__(self, stage: Stage, name: str, task: str, **resources: Any):
        self.stage, self.name = stage, f"{name}-{int(time.time())}"
        self.url = str(stage.lab.bucket / self.name)
        os.makedirs(self.url, mode=0o777, exist_ok=True)
        os.chmod(self.url, 0o777)
        self.ids = Path(f"{self.url}.ids")  # SKYPILOT_TASK_ID of every start
        self.ids.touch()
        self.ids.chmod(0o666)
        self.task = in_lab(
            task, stage.lab.venv, stage.lab.root / f"{name}.yaml", stage.lab.code, f'echo "$SKYPILOT_TASK_ID" >> {self.ids}', **resources
        )
        self.store = open_store(self.url)

    def given(self, steps: int) -> list[str]:
        return [str(self.task), "-y", "--env", f"RUN={self.url}", "--env", f"STEPS={steps}", "--env", "SIZE=1m", "--env", "GLOBAL_BATCH=24"]

    def step(self) -> int:
        newest = Snapshots(self.store).latest()
        return newest.step if newest else 0

    def worlds(self) -> list[int]:
        found = {s.fact.epoch: s.fact.world for s in read_facts(self.store) if isinstance(s.fact, EpochStarted)}
        return [found[e] for e in sorted(found)]

    def holds(self, steps: int) -> None:
        verify = [str(self.stage.lab.venv / "bin/harness"), "verify", self.url]
        done = subprocess.run(verify, env=self.stage.lab.env(), capture_output=True, text=True, timeout=300)
        ids = self.ids.read_text().split()
        print(f"          step {self.step()}, worlds {self.worlds()}, {len(ids)} starts, {len(set(ids))} SKYPILOT_TASK_ID", flush=True)
        if done.returncode or self.step() != steps:
            raise SystemExit(f"wanted step {steps} and a run that holds, found step {self.step()}\n{done.stdout}")


def plain(stage: Stage) -> None:
    play = Play(stage, "plain", "train.yaml")
    began_s = time.time()
    stage.sky("launch", "-c", "plain", *play.given(8))
    first_s = min(s.t for s in read_facts(play.store) if isinstance(s.fact, StepDone))
    print(f"          from sky launch to the first step: {first_s - began_s:.1f} s", flush=True)
    play.holds(8)
    stage.sky("down", "-y", "plain")


def managed(stage: Stage) -> None:
    steps = 40
    play = Play(stage, "managed", "train.yaml")
    stage.sky("jobs", "launch", "-d", "-n", play.name, *play.given(steps))
    stage.until("the managed job has committed a snapshot", lambda: play.step() > 0)
    node = stage.busy()[0]
    epochs = len(play.worlds())
    stage.lab.power_off(node)
    print(f"{time.strftime('%T')}  {node} is off at step {play.step()}", flush=True)
    stage.until("SkyPilot has recovered it", lambda: len(play.worlds()) > epochs)
    stage.until(
        "the job ends", lambda: stage.job(play.name) not in ("PENDING", "SUBMITTED", "STARTING", "RUNNING", "RECOVERING", "UNKNOWN")
    )
    ended(stage, play, steps)
    stage.lab.node_up(node)


def elastic(stage: Stage) -> None:
    steps = 60
    play = Play(
        stage, "elastic", "train_gang.yaml", job_recovery={"strategy": "ELASTIC", "min_nodes": 1, "recover_on_exit_codes": [33, 37]}
    )
    stage.sky("jobs", "launch", "-d", "-n", play.name, *play.given(steps))
    stage.until("two nodes train", lambda: 2 in play.worlds() and play.step() > 0)
    here = next(c for c in CLUSTERS if stage.lab.busy(c.name))
    other = next(c for c in CLUSTERS if c is not here)
    victim = here.nodes[0]
    stage.lab.drain(here.name)
    stage.lab.drain(other.name, other.nodes[1:])
    stage.lab.power_off(victim)
    print(f"{time.strftime('%T')}  {victim} is off at step {play.step()}; one node is left, in {other.name}", flush=True)
    stage.until("the job is started again on one node", lambda: len(play.ids.read_text().split()) == 3)
    if stage.lab.busy(other.name) != [other.nodes[0]]:
        raise SystemExit(f"wanted it on {other.nodes[0]}, found {stage.busy()}")
    at = play.step()
    stage.until("... and goes on", lambda: play.step() > at)
    stage.until(
        "the job ends", lambda: stage.job(play.name) not in ("PENDING", "SUBMITTED", "STARTING", "RUNNING", "RECOVERING", "UNKNOWN")
    )
    ended(stage, play, steps)
    stage.lab.node_up(victim)
    for cluster in CLUSTERS:
        stage.lab.resume(cluster.name)


def ended(stage: Stage, play: Play, steps: int) -> None:
    state = stage.job(play.name)
    if state != "SUCCEEDED":
        log = stage.sky("jobs", "logs", "--controller", "--no-follow", "-n", play.name, fails=True)[-3000:]
        raise SystemExit(f"{play.name}: wanted SUCCEEDED, found {state}\n{log}")
    play.holds(steps)
    if len(set(play.ids.read_text().split())) != 1:
        raise SystemExit(f"SKYPILOT_TASK_ID did not stay the same: {play.ids.read_text()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", help="where the lab's state lies (python tests/lab/lab.py up DIR)")
    parser.add_argument("--only", default="plain,managed,elastic")
    flags = parser.parse_args()
    os.umask(0)
    lab = Lab(flags.dir)
    lab.refresh_code()
    stage = Stage(lab)
    stage.server()
    for name in flags.only.split(","):
        print(f"{time.strftime('%T')}  == {name}", flush=True)
        {"plain": plain, "managed": managed, "elastic": elastic}[name](stage)
    stage.until("no node is held", lambda: not stage.busy(), 120.0)
    if "No existing clusters" not in (left := stage.sky("status", "-r")):
        raise SystemExit(f"something is left:\n{left}")
    print("Everything holds.")


if __name__ == "__main__":
    main()
