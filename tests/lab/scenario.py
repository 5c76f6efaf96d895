"""The whole way, for real: `harness launch --cloud sky` on the lab's two clouds, with everything that can happen to a run.

    python tests/lab/scenario.py DIR [STEPS]     (DIR: of a lab that is up; about ten minutes)

Two members train on the cheaper cloud; one is powered off without a word and there is no more capacity; the run goes on with one;
that one is powered off too, and the run moves to the dearer cloud; the controller is killed and another one adopts the nodes;
SkyPilot's API server is restarted under it; the run ends. Then `harness verify` must hold, nothing may be left, and the bill must
agree with SkyPilot's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent.parent)]

from lab import Lab  # noqa: E402
from task import in_lab  # noqa: E402

from harness.facts import AttemptEnded, AttemptIntended, AttemptUp, EpochStarted, RunEnded  # noqa: E402
from harness.journal import read_facts  # noqa: E402
from storage.objects import open_store  # noqa: E402
from storage.snapshots import Snapshots  # noqa: E402

WITHIN_S = 900.0  # of a computer that others use too


class Scene:
    def __init__(self, lab: Lab, steps: int):
        self.lab, self.url = lab, str(lab.bucket / f"run-{int(time.time())}")
        self.task = in_lab("train.yaml", lab.venv, lab.root / "train.yaml", lab.code)
        self.steps, self.controller = steps, None
        self.store = open_store(self.url)

    def launch(self) -> None:
        command = [self.lab.venv / "bin/harness", "launch", self.task, "--cloud", "sky", "--run", self.url, "--nodes", "1:2"]
        with open(self.lab.root / "log" / "scenario.log", "ab") as log:
            self.controller = subprocess.Popen(
                ["sh", "-c", 'umask 0; exec "$@"', "sh", *command, "--env", f"STEPS={self.steps}", "--budget-usd", "5"],
                env=self.lab.env(), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def facts(self, kind: type) -> list[Any]:
        return [s.fact for s in read_facts(self.store) if isinstance(s.fact, kind)]

    def step(self) -> int:
        newest = Snapshots(self.store).latest()
        return newest.step if newest else 0

    def places(self) -> set[str]:
        """Of the attempts that are up."""
        offers = {f.attempt: f.offer["place"] for f in self.facts(AttemptIntended)}
        ended = {f.attempt for f in self.facts(AttemptEnded)}
        return {offers[f.attempt] for f in self.facts(AttemptUp) if f.attempt not in ended}

    def until(self, what: str, true: Callable[[], bool], within_s: float = WITHIN_S) -> None:
        began_s = time.monotonic()
        while not true():
            if time.monotonic() - began_s > within_s:
                raise SystemExit(f"not within {within_s:g} s: {what}; look at {self.lab.root}/log/scenario.log and {self.url}")
            if self.controller and self.controller.poll() not in (None, 0):
                raise SystemExit(f"the controller ended ({self.controller.returncode}) before: {what}")
            time.sleep(0.5)
        print(f"{time.strftime('%T')}  {what}  ({time.monotonic() - began_s:.1f} s)", flush=True)

    def play(self) -> None:
        lab = self.lab
        self.launch()
        self.until("two members train in the cheaper cloud", lambda: any(e.world == 2 for e in self.facts(EpochStarted)))
        self.until("a snapshot is committed", lambda: self.step() > 0)
        victim, other = lab.busy("east")
        lab.drain("east")
        lab.power_off(victim)
        epochs = len(self.facts(EpochStarted))
        self.until("the other goes on alone", lambda: any(e.world == 1 for e in self.facts(EpochStarted)[epochs:]))
        self.until("the loss is known", lambda: any(e.end == "preempted" for e in self.facts(AttemptEnded)))
        at = self.step()
        self.until("steps are made alone", lambda: self.step() > at)
        lab.power_off(other)
        self.until("the run has moved to the dearer cloud", lambda: self.places() == {"slurm/west"})
        self.until("two train there", lambda: self.facts(EpochStarted)[-1].world == 2)
        self.controller.send_signal(signal.SIGKILL)
        self.controller.wait()
        before = len(self.facts(AttemptIntended))
        at = self.step()
        self.until_without("training goes on without a controller", lambda: self.step() > at)
        self.launch()
        time.sleep(20.0)
        subprocess.run([lab.venv / "bin/sky", "api", "stop"], env=lab.env(), timeout=120, check=True, capture_output=True)
        print(f"{time.strftime('%T')}  the API server was stopped; whoever needs it starts it")
        self.until("the run ends", lambda: bool(self.facts(RunEnded)), 1200.0)
        self.controller.wait(120)
        if len(self.facts(AttemptIntended)) != before:
            raise SystemExit("the new controller launched nodes though all were there")
        self.check()

    def until_without(self, what: str, true: Callable[[], bool]) -> None:
        self.controller = None
        self.until(what, true)

    def check(self) -> None:
        """What must be true when it is over."""
        env = self.lab.env()
        verified = subprocess.run([self.lab.venv / "bin/harness", "verify", self.url], env=env, capture_output=True, text=True, timeout=300)
        print(verified.stdout.splitlines()[-1])
        left = subprocess.run([self.lab.venv / "bin/sky", "status", "-r"], env=env, capture_output=True, text=True, timeout=120).stdout
        held = [n for c in ("east", "west") for n in self.lab.busy(c)]
        from harness.skypilot import Broker, tag
        from storage.objects import normalize

        broker = Broker(env, self.lab.root / "log" / "broker.log")
        theirs = broker("costs", 120.0, prefix=f"{tag(normalize(self.url))}-")
        broker.close()
        ended = {f.attempt: f for f in self.facts(AttemptEnded)}
        rows = {int(r["name"].rpartition("-")[2]): r["total_cost"] for r in theirs}
        billed = {n: f for n, f in ended.items() if f.end != "no-capacity"}
        ours_usd, theirs_usd = sum(f.usd for f in billed.values()), sum(rows.get(n, 0.0) for n in billed)
        print(json.dumps({"ours_usd": round(ours_usd, 4), "skypilot_usd": round(theirs_usd, 4), "attempts": len(ended)}))
        if verified.returncode or "No existing clusters" not in left or held:
            raise SystemExit(f"verify {verified.returncode}, held {held}, sky status:\n{left}")
        if abs(ours_usd - theirs_usd) > 0.25 * theirs_usd:
            raise SystemExit("the two bills differ by more than a quarter")
        print("Everything holds.")


if __name__ == "__main__":
    os.umask(0)
    the_lab = Lab(sys.argv[1])
    the_lab.refresh_code()
    Scene(the_lab, int(sys.argv[2]) if len(sys.argv) > 2 else 600).play()
