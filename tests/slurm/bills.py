"""Runs that nobody of ours launched have the bill that SkyPilot has: one by plain `sky launch`, one
as a managed job, at the same time.

    python tests/slurm/bills.py DIR     (DIR: of a lab that is up, see lab.py)

Their agents find out where they stand, what an hour costs (SkyPilot's prices of Slurm clusters are
only where it was launched, so `harness market prices` sends them along) and since when they are paid for.
How long the machines stayed after that, `harness runs costs --ask-sky` asks. What `harness runs report` then
says must be what `sky cost-report` says, within 2 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).resolve().parent),
    str(Path(__file__).resolve().parent.parent.parent),
]

from jobs import Play, Stage, ended  # noqa: E402

from harness.clouds.sky_broker import Broker  # noqa: E402
from harness.core.facts import AgentStarted, NodeBilled, NodeFound  # noqa: E402
from lab import Lab  # noqa: E402

STEPS = 16
WITHIN = 0.02
MANAGED = "bill-job"


class Bills:
    def __init__(self, stage: Stage):
        self.stage = stage
        name = f"bills-{int(time.time())}"
        (stage.lab.root / name).mkdir()
        self.plain = Play(stage, f"{name}/plain", "train.yaml")
        self.managed = Play(stage, f"{name}/managed", "train.yaml")
        self.folder = os.path.dirname(self.plain.url)
        os.chmod(self.folder, 0o777)
        self.prices = stage.harness("market", "prices", str(self.plain.task)).strip().splitlines()[-1]

    def given(self, play: Play) -> list[str]:
        return [*play.given(STEPS), "--env", f"HARNESS_PRICES={self.prices}"]

    def run(self) -> None:
        """Both at once: each takes a node of its own."""
        stage, cluster = self.stage, "bill-plain"
        words = [str(stage.lab.venv / "bin/sky"), "launch", "-c", cluster, *self.given(self.plain)]
        log = stage.lab.root / "log" / "bills.log"
        with open(log, "ab") as out:
            plain = subprocess.Popen(
                words,
                env=stage.lab.env(),
                cwd=stage.lab.code,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        stage.sky("jobs", "launch", "-d", "-n", MANAGED, *self.given(self.managed))
        stage.until("the plain launch has ended", lambda: plain.poll() is not None)
        if plain.returncode:
            raise SystemExit(f"sky launch ended with {plain.returncode}, see {log}")
        said = stage.harness("guard", "--end", cluster)
        if f"FORGOTTEN: {cluster}" not in said or f"Ended: {cluster}." not in said:
            raise SystemExit(f"wanted {cluster}, whose job is over, named and ended; found\n{said}")
        going_on = ("PENDING", "SUBMITTED", "STARTING", "RUNNING", "RECOVERING", "UNKNOWN")
        stage.until("the job ends", lambda: stage.job(MANAGED) not in going_on)
        stage.until("its node is given back", lambda: not stage.busy())
        self.managed.name = MANAGED
        ended(stage, self.managed, STEPS)
        self.plain.holds(STEPS)

    def check(self) -> None:
        said = json.loads(self.stage.harness("runs", "costs", self.folder, "--ask-sky", "--json"))
        print(self.stage.harness("runs", "costs", self.folder, "--by", "run"), flush=True)
        if len(said["rows"]) != 2 or said["unread"]:
            raise SystemExit(f"wanted the costs of two runs, found {said}")
        wrong = [w for play in (self.plain, self.managed) if (w := self.compared(play))]
        if wrong:
            raise SystemExit("; ".join(wrong))
        for play in (self.plain, self.managed):
            self.stage.harness("prove", "verify", play.url)

    def compared(self, play: Play) -> str:
        """What does not agree with SkyPilot's bill; empty if all does."""
        found = {f.member: f for _, f in play.facts(NodeFound)}
        began = {f.member: t for t, f in play.facts(AgentStarted)}
        bills = {f.member: f for _, f in play.facts(NodeBilled)}
        ours = json.loads(self.stage.harness("runs", "report", play.url, "--json"))
        theirs = self.theirs({f.cluster for f in found.values()})
        usd, their_usd = ours["cost"]["spot_usd"], sum(r["total_cost"] for r in theirs)
        for member, f in found.items():
            bill, launched_s = bills[member], f.launched_s or began[member]
            print(
                f"          {member} on {f.cloud}/{f.region}/{f.zone} {f.instance_type}, "
                f"${f.usd_per_h} an hour (from: {f.source}), job {f.job!r}; paid for since "
                f"{launched_s - bill.launched_s:+.1f} s of what SkyPilot says, setup after "
                f"{(f.setup_s or launched_s) - launched_s:.1f} s, agent after "
                f"{began[member] - launched_s:.1f} s"
            )
        shares = {b: round(v["s"], 1) for b, v in ours["buckets"].items() if v["ns"]}
        print(f"          {play.name}: {usd:.5f} USD, SkyPilot {their_usd:.5f}; {shares} s")
        if not their_usd or abs(usd - their_usd) > WITHIN * their_usd:
            return f"{play.url}: the bill is {usd:.5f} USD, SkyPilot's is {their_usd:.5f}"
        return ""

    def theirs(self, clusters: set[str]) -> list[dict[str, Any]]:
        broker = Broker(self.stage.lab.env(), self.stage.lab.root / "log" / "broker.log")
        try:
            rows = broker("spans", 120.0, names=sorted(clusters), days=1)
        finally:
            broker.close()
        # names are used again by every run of this test
        newest = {row["name"]: row for row in sorted(rows, key=lambda r: r["launched_at"] or 0)}
        return list(newest.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", help="where the lab's state lies (python tests/slurm/lab.py up DIR)")
    flags = parser.parse_args()
    os.umask(0)
    lab = Lab(flags.dir)
    lab.refresh_code()
    stage = Stage(lab)
    stage.server()
    began_s = time.monotonic()
    bills = Bills(stage)
    bills.run()
    bills.check()
    print(f"The bills agree. {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
