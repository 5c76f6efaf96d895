"""The task files by other ways than our recovery loop: plain `sky launch`, `sky jobs launch`, a
gang under the strategy ELASTIC.

    python tests/slurm/jobs.py DIR [--only plain,managed,...]     (DIR: of a lab that is up, see lab.py; or `make lab`)

plain:      one node trains to the end; and how much sooner its first step is than that of `harness
            launch` with one node.
canary:     canary.yaml by `sky launch`.
controller: the commands of controller.yaml, on this computer: they lead a run, and nothing is left.
drill:      the commands of drill.yaml, on this computer.
managed:    the node is powered off; SkyPilot recovers the job, which resumes from the bucket under
            the same SKYPILOT_TASK_ID.
elastic:    two nodes; one is powered off, and only one node is left anywhere: the job goes on with
            that one.

Every run must hold under `harness prove verify`, and nothing may be left. SkyPilot's server gets our
plugin, as docs/CLOUDS.md tells; its network probe is pointed at the server itself, since job
controllers ask public addresses otherwise, which a closed network does not reach.
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

sys.path[:0] = [
    str(Path(__file__).resolve().parent),
    str(Path(__file__).resolve().parent.parent.parent),
]

from task import in_lab, run_here  # noqa: E402

from harness.bucket.archive import read_facts  # noqa: E402
from harness.core.facts import EpochStarted, Fact, RunEnded, StepDone  # noqa: E402
from lab import CLUSTERS, Lab  # noqa: E402
from storage.snapshots.snapshots import Snapshots  # noqa: E402
from storage.stores.store_urls import open_store  # noqa: E402

WITHIN_S = 900.0
# that `harness launch` may take to the first step beyond what `sky launch` takes
MORE_WITHIN_S = 20.0
SERVER = "http://127.0.0.1:46580"
STATES = "PENDING|SUBMITTED|STARTING|RUNNING|RECOVERING|SUCCEEDED|FAILED[A-Z_]*|CANCELL[A-Z]*"


class Stage:
    def __init__(self, lab: Lab):
        self.lab = lab
        self.late: list[str] = []  # what took too long; said at the end

    def server(self) -> None:
        """Register the plugin; the server reads it when it starts."""
        plugin = {
            "class": "harness.clouds.sky_plugin.ElasticPlugin",
            "parameters": {"network_probe": f"{SERVER}/api/health"},
        }
        (self.lab.controller_home / ".sky" / "plugins.yaml").write_text(
            json.dumps({"plugins": [plugin]})
        )
        self.lab.jobs_here(True)
        self.sky("api", "stop", fails=True)
        self.sky("api", "start")

    def sky(self, *words: str, fails: bool = False, timeout_s: float = WITHIN_S) -> str:
        command = [str(self.lab.venv / "bin/sky"), *words]
        done = subprocess.run(
            command,
            env=self.lab.env(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=self.lab.code,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode and not fails:
            raise SystemExit(
                f"sky {' '.join(words)} ended with "
                f"{done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            )
        return done.stdout

    def harness(self, *words: str, timeout_s: float = WITHIN_S) -> str:
        command = [
            "sh",
            "-c",
            'umask 0; exec "$@"',
            "sh",
            str(self.lab.venv / "bin/harness"),
            *words,
        ]
        done = subprocess.run(
            command,
            env=self.lab.env(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=self.lab.code,
        )
        if done.returncode:
            raise SystemExit(
                f"harness {' '.join(words)} ended with "
                f"{done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
            )
        return done.stdout

    def until(self, what: str, true: Callable[[], bool], within_s: float = WITHIN_S) -> None:
        began_s = time.monotonic()
        while not true():
            if time.monotonic() - began_s > within_s:
                raise SystemExit(
                    f"not within {within_s:g} s: {what}\n{self.sky('jobs', 'queue', fails=True)}"
                )
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
            task,
            stage.lab.venv,
            stage.lab.root / f"{name}.yaml",
            stage.lab.code,
            f'echo "$SKYPILOT_TASK_ID" >> {self.ids}',
            **resources,
        )
        self.store = open_store(self.url)

    def given(self, steps: int) -> list[str]:
        return [
            str(self.task),
            "-y",
            "--env",
            f"RUN={self.url}",
            "--env",
            f"STEPS={steps}",
            "--env",
            "SIZE=1m",
            "--env",
            "GLOBAL_BATCH=24",
        ]

    def step(self) -> int:
        newest = Snapshots(self.store).latest()
        return newest.step if newest else 0

    def facts(self, kind: type[Fact]) -> list[Any]:
        """(when, fact)"""
        return [(s.t, s.fact) for s in read_facts(self.store) if isinstance(s.fact, kind)]

    def worlds(self) -> list[int]:
        found = {f.epoch: f.world for _, f in self.facts(EpochStarted)}
        return [found[e] for e in sorted(found)]

    def holds(self, steps: int) -> None:
        self.stage.harness("prove", "verify", self.url)
        ids = self.ids.read_text().split()
        print(
            f"          step {self.step()}, worlds {self.worlds()}, {len(ids)} starts, "
            f"{len(set(ids))} SKYPILOT_TASK_ID",
            flush=True,
        )
        if self.step() != steps:
            raise SystemExit(f"wanted step {steps}, found step {self.step()} in {self.url}")


def plain(stage: Stage) -> None:
    """By turns, twice; what counts is the better one of each, since others may use this
    computer too."""
    first_s: dict[str, list[float]] = {"sky-launch": [], "harness-launch": []}
    for name in [*first_s] * 2:
        play, began_s = Play(stage, f"{name}-{len(first_s[name])}", "train.yaml"), time.time()
        if name == "sky-launch":
            stage.sky("launch", "-c", "plain", *play.given(8))
        else:
            env = [word for word in play.given(8)[1:] if word != "-y"]
            stage.harness(
                "launch",
                str(play.task),
                "--cloud",
                "sky",
                "--run",
                play.url,
                "--nodes",
                "1",
                "--brief",
                *env,
            )
        first_s[name].append(min(t for t, _ in play.facts(StepDone)) - began_s)
        print(f"          {name}: {first_s[name][-1]:.1f} s to the first step", flush=True)
        play.holds(8)
        if name == "sky-launch":
            stage.sky("down", "-y", "plain")
    more_s = min(first_s["harness-launch"]) - min(first_s["sky-launch"])
    print(f"          harness launch takes {more_s:.1f} s more", flush=True)
    if more_s > MORE_WITHIN_S:
        stage.late.append(
            f"from harness launch to the first step: {more_s:.1f} s more than sky launch takes, "
            f"wanted {MORE_WITHIN_S:g} s"
        )


def canary(stage: Stage) -> None:
    play = Play(stage, "canary", "canary.yaml")
    env = {"RUN": play.url, "STEPS": "12", "ARGS": "--size 1m", "LIMIT_S": "600"}
    stage.sky(
        "launch",
        "-y",
        "-c",
        "canary",
        str(play.task),
        *(word for k, v in env.items() for word in ("--env", f"{k}={v}")),
    )
    log = stage.sky("logs", "canary", "--no-follow", fails=True)
    stage.sky("down", "-y", "canary")
    play.holds(12)
    print(f"          it says: {log.strip().splitlines()[-1][:120]}", flush=True)


def controller(stage: Stage) -> None:
    """Its machine is this one: what its commands find there is the same."""
    play = Play(stage, "lead", "train.yaml")
    seat = stage.lab.code / ".venv"
    seat.unlink(missing_ok=True)
    seat.symlink_to(stage.lab.venv)
    given = {
        "TASK": str(play.task),
        "NODES": "1:1",
        "BUDGET_USD": "2",
        "ARGS": "--env STEPS=8 --brief",
    }
    try:
        here(stage, "controller", play, given)
    finally:
        seat.unlink()
    play.holds(8)
    if [f.outcome for _, f in play.facts(RunEnded)] != ["done"]:
        raise SystemExit(f"wanted a run that was led to its end, found {play.facts(RunEnded)}")


def drill(stage: Stage) -> None:
    play = Play(stage, "drill", "train.yaml")
    here(stage, "drill", play, {"STEPS": "40", "NODES": "1:2"})
    play.holds(40)


def here(stage: Stage, name: str, play: Play, given: dict[str, str]) -> None:
    log = stage.lab.root / "log" / f"{name}.log"
    with open(log, "ab") as out:
        code = run_here(
            name, stage.lab.venv, play.url, given, env=stage.lab.env(), cwd=stage.lab.code, out=out
        )
    print(f"          the commands of {name}.yaml ended with {code}", flush=True)
    if code:
        raise SystemExit(f"wanted 0, see {log}")


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
        "the job ends",
        lambda: (
            stage.job(play.name)
            not in ("PENDING", "SUBMITTED", "STARTING", "RUNNING", "RECOVERING", "UNKNOWN")
        ),
    )
    ended(stage, play, steps)
    stage.lab.node_up(node)


def elastic(stage: Stage) -> None:
    # the node that is left trains on until SkyPilot ends it (25 s): more than it can do in that
    # time
    steps = 200
    play = Play(
        stage,
        "elastic",
        "train_gang.yaml",
        job_recovery={"strategy": "ELASTIC", "min_nodes": 1, "recover_on_exit_codes": [33, 37]},
    )
    stage.sky("jobs", "launch", "-d", "-n", play.name, *play.given(steps))
    stage.until("two nodes train", lambda: 2 in play.worlds() and play.step() > 0)
    here = next(c for c in CLUSTERS if stage.lab.busy(c.name))
    other = next(c for c in CLUSTERS if c is not here)
    victim = here.nodes[0]
    stage.lab.drain(here.name)
    stage.lab.drain(other.name, other.nodes[1:])
    stage.lab.power_off(victim)
    print(
        f"{time.strftime('%T')}  {victim} is off at step {play.step()}; one node is left, in "
        f"{other.name}",
        flush=True,
    )
    stage.until(
        "the job is started again on one node", lambda: len(play.ids.read_text().split()) == 3
    )
    if stage.lab.busy(other.name) != [other.nodes[0]]:
        raise SystemExit(f"wanted it on {other.nodes[0]}, found {stage.busy()}")
    if (at := play.step()) >= steps:
        raise SystemExit(
            f"the node that was left did all {steps} steps before SkyPilot ended it: this computer "
            "needs more of them here"
        )
    stage.until("... and goes on", lambda: play.step() > at)
    stage.until(
        "the job ends",
        lambda: (
            stage.job(play.name)
            not in ("PENDING", "SUBMITTED", "STARTING", "RUNNING", "RECOVERING", "UNKNOWN")
        ),
    )
    ended(stage, play, steps)
    stage.lab.node_up(victim)
    for cluster in CLUSTERS:
        stage.lab.resume(cluster.name)


PARTS = {
    "plain": plain,
    "canary": canary,
    "controller": controller,
    "drill": drill,
    "managed": managed,
    "elastic": elastic,
}


def ended(stage: Stage, play: Play, steps: int) -> None:
    state = stage.job(play.name)
    if state != "SUCCEEDED":
        log = stage.sky("jobs", "logs", "--controller", "--no-follow", "-n", play.name, fails=True)[
            -3000:
        ]
        raise SystemExit(f"{play.name}: wanted SUCCEEDED, found {state}\n{log}")
    play.holds(steps)
    if len(set(play.ids.read_text().split())) != 1:
        raise SystemExit(f"SKYPILOT_TASK_ID did not stay the same: {play.ids.read_text()}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", help="where the lab's state lies (python tests/slurm/lab.py up DIR)")
    parser.add_argument("--only", default=",".join(PARTS))
    flags = parser.parse_args()
    os.umask(0)
    lab = Lab(flags.dir)
    lab.refresh_code()
    stage = Stage(lab)
    server = False
    for name in flags.only.split(","):
        if name in ("managed", "elastic") and not server:
            stage.server()
            server = True
        print(f"{time.strftime('%T')}  == {name}", flush=True)
        PARTS[name](stage)
    stage.until("no node is held", lambda: not stage.busy(), 120.0)
    if "No existing clusters" not in (left := stage.sky("status", "-r")):
        raise SystemExit(f"something is left:\n{left}")
    if stage.late:
        raise SystemExit("\n".join(stage.late))
    print("Everything holds.")


if __name__ == "__main__":
    main()
