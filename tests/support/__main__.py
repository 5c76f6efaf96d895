"""Proofs of the project that are not commands of users. `make simsystem`, `make money`, `make soak`
and `make guards` wrap them.

    PYTHONPATH=tests python -m support system --seeds 1000 --jobs 2     the whole system, simulated
    PYTHONPATH=tests python -m support money --seeds 1000 --jobs 2      budgets, simulated
    PYTHONPATH=tests python -m support soak 1000 --runs 2               real processes and faults
    PYTHONPATH=tests python -m support guards --faults 100              bad steps and healthy ones
"""

from __future__ import annotations

import argparse
import sys

from storage.terminal_text import Console


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m support", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("system", "money"):
        one = kinds.add_parser(kind)
        one.add_argument("--seeds", type=int, default=200, help="how many seeded worlds")
        one.add_argument("--seed", type=int, help="one world only")
        one.add_argument("--first", type=int, default=0, help="the first seed")
        one.add_argument("--jobs", type=int, default=1, help="processes at the same time")
    one = kinds.add_parser("soak")
    one.add_argument("faults", type=int, help="kills, pauses and store faults")
    one.add_argument("--runs", type=int, default=1, help="over so many runs, one after the other")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--keep", default="", help="keep runs and logs in this empty folder")
    one = kinds.add_parser("guards")
    one.add_argument("--faults", type=int, default=100, help="trainings that go wrong")
    one.add_argument("--healthy", type=int, default=200, help="trainings that do not")
    one.add_argument("--first", type=int, default=0, help="the first seed")
    asked = parser.parse_args()
    if asked.kind == "guards":
        from support import guard_campaign

        return guard_campaign.command(asked.faults, asked.healthy, asked.first, Console())
    if asked.kind == "soak":
        from support import soak

        return soak.command(asked.faults, asked.runs, asked.seed, asked.keep, Console())
    if asked.kind == "system":
        from support.system import shrink

        return shrink.command(asked.seeds, asked.seed, asked.first, asked.jobs)
    from support import budget_simulation

    return budget_simulation.command(asked.seeds, asked.seed, asked.first, asked.jobs)


if __name__ == "__main__":
    sys.exit(main())
