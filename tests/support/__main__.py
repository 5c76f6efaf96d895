"""Proofs of the project that are not commands of users. `make simsystem`, `make money` and `make
soak`
wrap them.

    PYTHONPATH=tests python -m support system --seeds 1000 --jobs 2     the whole system, simulated
    PYTHONPATH=tests python -m support money --seeds 1000 --jobs 2      budgets, simulated
    PYTHONPATH=tests python -m support soak 1000 --runs 2               real processes and faults
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
    asked = parser.parse_args()
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
