"""What learning how often work is lost is worth: wall-clock time of a run over that of its work,
where worlds are lost at random without notice and go on at once. No assertions.

    python benchmarks/intervals.py
    python benchmarks/intervals.py --hours 300 --seeds 50

Three ways: the interval for an assumed loss every hour ("assumed"), the one that the worker's
`Rhythm` derives from what snapshots carry of earlier worlds ("learned"), and Daly's for the true
rate, which nobody knows ("known"). Time is played, so the load of the machine does not matter.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

from harness.core.loss_rates import RunLosses
from harness.worker.snapshot_timer import Interval, Rhythm

WAYS = ("assumed", "learned", "known")
MEANS_H = (0.1, 0.25, 1.0, 4.0, 20.0, 100.0)
COSTS_S = ((0.05, 8.0), (2.0, 20.0), (10.0, 40.0))  # of training, and from begin to commit


class PlayedClock:
    """Seconds that pass when the play says so."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def overhead(
    way: str, mean_s: float, cost_s: float, commit_s: float, work_s: float, seed: int
) -> float:
    """How much longer than its work the run takes, as a share of the work. A world that is lost
    loses what is not committed, and the snapshot that is on its way."""
    rng, now, saved_s = random.Random(seed), PlayedClock(), 0.0
    data: Any = None
    known_s = Interval().seconds(0.0, cost_s, commit_s, mean_s)
    while saved_s < work_s:
        rhythm = Rhythm(Interval(), RunLosses("here"), now)
        rhythm.resumed(data if way == "learned" else None)
        rhythm.begin()
        rhythm.stall_s, rhythm.commit_s = cost_s, commit_s
        assumed_s = Interval().seconds(0.0, cost_s, commit_s)
        end_s = now.s + rng.expovariate(1 / mean_s)
        while saved_s < work_s:
            every_s = {"assumed": assumed_s, "known": known_s}.get(way) or rhythm.interval_s()
            if now.s + every_s + max(cost_s, commit_s) > end_s:
                now.s = end_s
                break
            now.s += every_s
            rhythm.begin()
            data = json.loads(json.dumps({"losses": rhythm.losses("interval")}))
            now.s, saved_s = now.s + cost_s, saved_s + every_s
    return now.s / work_s - 1


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--hours", type=float, default=100.0, help="of work, in each run")
    p.add_argument("--seeds", type=int, default=20)
    a = p.parse_args()
    print(f"time beyond the work, {a.seeds} runs of {a.hours:g} h each")
    print("losses every | a snapshot costs, is there after |" + "".join(f"{w:>9}" for w in WAYS))
    for mean_h in MEANS_H:
        for cost_s, commit_s in COSTS_S:
            shares = [
                sum(
                    overhead(way, 3600 * mean_h, cost_s, commit_s, 3600 * a.hours, seed)
                    for seed in range(a.seeds)
                )
                / a.seeds
                for way in WAYS
            ]
            row = "".join(f"{100 * share:8.2f}%" for share in shares)
            print(f"{mean_h:10g} h | {cost_s:>12g} s {commit_s:>16g} s |{row}", flush=True)


if __name__ == "__main__":
    main()
