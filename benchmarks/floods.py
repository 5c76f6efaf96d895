"""What strangers at every port cost a step: a run of two nodes on the local cloud, quiet and
besieged in turns. No assertions.

    .venv/bin/python benchmarks/floods.py
    .venv/bin/python benchmarks/floods.py --rounds 10 --rate 50 --hold 200

One `harness launch` trains with peers' chunks and Prometheus endpoints on; every turn takes
`--seconds`, and in every second one another process floods, holds, drips and says garbage at all
ports that the harness listens on (`tests/support/port_floods.py`). A ratio is the median step of a
besieged turn by that of the quiet turn before it; the first quiet turn is not counted. The
attackers share this machine's cores with the training: their processor time is told beside, so on
few cores the ratio is an upper bound. Look at `uptime` before you believe it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

TRAINER = """\
import time, torch, harness
data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randn(4096, 1))
run = harness.attach(seed=1, snapshot_every_s=5.0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.prepare(model, optimizer)
with open("steps", "a") as told:
    for step in run.steps(data, total=10**6, global_batch=64, micro_batch=16):
        for x, y in step:
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        time.sleep(SLEEP_S)
        step.update()
        if run.rank == 0:
            print(time.monotonic(), file=told, flush=True)
"""
TASK = """\
name: floods
workdir: {folder}
resources: {{use_spot: true, accelerators: L4:1}}
envs: {{RUN: null}}
run: |
  exec harness run --run "$RUN" --set peer_tier=memory --prometheus 127.0.0.1:0 -- {folder}/train.py
"""


def ports(folder: Path) -> list[str]:
    """All on which processes of this run listen, but for the script's own."""
    found = []
    for p in psutil.process_iter():
        try:
            line, environ = " ".join(p.cmdline()), p.environ()
            here = str(folder) in line or environ.get("HARNESS_NODE_DIR", "").startswith(
                str(folder)
            )
            if not here or "harness.node.forkserver" in line:
                continue
            listening = [c for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            found += [f"{c.laddr.ip}:{c.laddr.port}" for c in listening]
        except psutil.Error:
            continue
    return sorted(set(found))


def moments(folder: Path) -> list[float]:
    """When each step ended, in seconds of a monotonic clock."""
    path = folder / "steps"
    return [float(x) for x in path.read_text().splitlines()] if path.exists() else []


def turn(folder: Path, seconds: float, siege: list[str]) -> tuple[float, float]:
    """Median seconds of a step, and how many cores the attackers used."""
    attackers = subprocess.Popen(siege, stdout=subprocess.DEVNULL) if siege else None
    time.sleep(seconds / 5)  # until all places are taken
    begun_s = time.monotonic()
    time.sleep(seconds)
    cpu_s = 0.0
    if attackers is not None:
        cpu_s = sum(psutil.Process(attackers.pid).cpu_times()[:2])
        attackers.send_signal(signal.SIGINT)
        attackers.wait()
    ends_s = [t for t in moments(folder) if t >= begun_s]
    return statistics.median(b - a for a, b in itertools.pairwise(ends_s)), cpu_s / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a turn")
    parser.add_argument(
        "--sleep-s", type=float, default=0.02, help="of each step, on an accelerator"
    )
    parser.add_argument("--rate", type=float, default=10.0, help="new connections a second, each")
    parser.add_argument("--hold", type=int, default=100, help="connections held, each")
    flags = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, one turn {flags.seconds:g} s")
    with tempfile.TemporaryDirectory(prefix="floods-") as name:
        folder, run = Path(name), Path(name) / "run"
        (folder / "train.py").write_text(TRAINER.replace("SLEEP_S", str(flags.sleep_s)))
        (folder / "task.yaml").write_text(TASK.format(folder=folder))
        words = ["launch", folder / "task.yaml", "--run", run, "--nodes", "2:2", "--market", "calm"]
        with open(folder / "log", "wb") as log:
            launch = subprocess.Popen(
                [sys.executable, "-m", "harness.cli", *map(str, words)], stdout=log, stderr=log
            )
        try:
            while len(moments(folder)) < 50:
                assert launch.poll() is None, (folder / "log").read_text()
                time.sleep(0.5)
            strangers = Path(__file__).resolve().parents[1] / "tests/support/port_floods.py"
            siege = [sys.executable, str(strangers), *ports(folder)]
            siege += ["--rate", str(flags.rate), "--hold", str(flags.hold), "--seconds", "3600"]
            turn(folder, flags.seconds, [])
            ratios = []
            for number in range(1, flags.rounds + 1):
                quiet_s, _ = turn(folder, flags.seconds, [])
                loud_s, cpu = turn(folder, flags.seconds, siege)
                ratios.append(loud_s / quiet_s)
                print(
                    f"{number}: quiet {1e3 * quiet_s:.1f} ms, besieged {1e3 * loud_s:.1f} ms, "
                    f"ratio {ratios[-1]:.3f}; attackers use {cpu:.2f} cores",
                    flush=True,
                )
            print(f"median ratio {statistics.median(ratios):.3f} at {len(ports(folder))} ports")
        finally:
            launch.send_signal(signal.SIGINT)
            try:
                launch.wait(60)
            except subprocess.TimeoutExpired:
                launch.kill()
            state = folder / "run" / "local-cloud"
            for p in psutil.process_iter(["cmdline"]):
                if str(state) in " ".join(p.info["cmdline"] or []):
                    p.kill()


if __name__ == "__main__":
    main()
