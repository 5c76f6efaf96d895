"""The `harness` command: the only place that builds the real world (clock, cloud, randomness,
store).

Each sub-command is one frozen dataclass (its flags) and one function. Exit status: 0 it is done, 1
it failed, 2 the input was wrong, 3 it was stopped before its end, 4 (`launch`) the controller
cannot go on and has left the nodes training, 130 interrupted. A supervisor starts `launch` again on
1 and 4.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.cli.again import LogbookFlags, RerunFlags, logbook, rerun
from harness.cli.alerts import AlertsFlags, alerts
from harness.cli.ask import DownFlags, SnapshotFlags, StopFlags, down, snapshot, stop
from harness.cli.check import CheckFlags, check
from harness.cli.common import FAILED, INTERRUPTED, WRONG_INPUT
from harness.cli.costs import CostsFlags, PricesFlags, costs, prices
from harness.cli.data import DataFlags, data
from harness.cli.init import InitFlags, init
from harness.cli.launch import LaunchFlags, launch
from harness.cli.look import LogsFlags, ReportFlags, StatusFlags, logs, report, status
from harness.cli.market import MarketFlags, market
from harness.cli.plan import PlanFlags, plan
from harness.cli.postmortem import PostmortemFlags, postmortem
from harness.cli.prove import (
    CompareFlags,
    DoctorFlags,
    DrillFlags,
    FakeMetadataFlags,
    ReplayFlags,
    VerifyFlags,
    compare,
    doctor,
    drill,
    fake_metadata,
    replay,
    verify,
)
from harness.cli.run import RunFlags, run
from harness.cli.serve import ServeFlags, serve
from harness.cli.shelf import SnapshotsFlags, snapshots
from harness.cli.simulate import SimulateFlags, simulate
from harness.cli.track import DashboardsFlags, SyncFlags, dashboards, sync
from harness.cli.watch import WatchFlags, watch
from harness.core.config import FlagParser, add_flags, build
from harness.core.last_words import keep_secrets
from harness.core.masking import masked
from harness.core.world import BadInput, HarnessError
from storage.errors import StoreError, WrongInput
from storage.text import plain, why_not_a_word

if TYPE_CHECKING:
    pass


# ---- main ----------------------------------------------------------------------------------------
COMMANDS: dict[str, tuple[type[Any], Callable[[Any], int]]] = {
    "init": (InitFlags, init),
    "plan": (PlanFlags, plan),
    "launch": (LaunchFlags, launch),
    "run": (RunFlags, run),
    "watch": (WatchFlags, watch),
    "data": (DataFlags, data),
    "status": (StatusFlags, status),
    "report": (ReportFlags, report),
    "serve": (ServeFlags, serve),
    "postmortem": (PostmortemFlags, postmortem),
    "costs": (CostsFlags, costs),
    "prices": (PricesFlags, prices),
    "market": (MarketFlags, market),
    "verify": (VerifyFlags, verify),
    "compare": (CompareFlags, compare),
    "check": (CheckFlags, check),
    "replay": (ReplayFlags, replay),
    "rerun": (RerunFlags, rerun),
    "logbook": (LogbookFlags, logbook),
    "stop": (StopFlags, stop),
    "drain": (StopFlags, stop),
    "down": (DownFlags, down),
    "logs": (LogsFlags, logs),
    "snapshot": (SnapshotFlags, snapshot),
    "snapshots": (SnapshotsFlags, snapshots),
    "alerts": (AlertsFlags, alerts),
    "sync": (SyncFlags, sync),
    "dashboards": (DashboardsFlags, dashboards),
    "simulate": (SimulateFlags, simulate),
    "fake-metadata": (FakeMetadataFlags, fake_metadata),
    "drill": (DrillFlags, drill),
    "doctor": (DoctorFlags, doctor),
}


@functools.cache
def parser() -> tuple[FlagParser, dict[str, FlagParser]]:
    """The whole command, and the parser of each sub-command."""
    root = FlagParser(prog="harness", description="Train on spot machines; runs that outlive them.")
    commands = root.add_subparsers(
        dest="subcommand", required=True, parser_class=FlagParser, metavar="COMMAND"
    )
    subs: dict[str, FlagParser] = {}
    for name, (cls, function) in COMMANDS.items():
        help_text = (function.__doc__ or "").split("\n")[0]
        subs[name] = commands.add_parser(name, help=help_text, description=help_text)
        add_flags(subs[name], cls)
    return root, subs


def main(argv: list[str] | None = None) -> None:
    """Entry point of the `harness` command."""
    given = list(sys.argv[1:] if argv is None else argv)
    after: list[str] = []
    # everything behind it is the script's own
    if "--" in given and given[0] in ("run", "replay", "check", "watch"):
        at = given.index("--")
        given, after = given[:at], given[at + 1 :]
    root, subs = parser()
    for word in given:
        if why := why_not_a_word(word):
            root.error(f"{word!r:.80}: {why}")
    namespace, unknown = root.parse_known_args(given)
    if unknown:
        subs[namespace.subcommand].error(f"unrecognized arguments: {' '.join(unknown)}")
    cls, function = COMMANDS[namespace.subcommand]
    if after:
        namespace.script = after
    keep_secrets(os.environ)
    try:
        sys.exit(function(build(cls, namespace)))
    except (BadInput, WrongInput) as e:
        print(masked(plain(f"harness {given[0]}: {e}", keep="\n")), file=sys.stderr)
        sys.exit(WRONG_INPUT)
    except (HarnessError, StoreError) as e:
        print(masked(plain(f"harness {given[0]}: {e}", keep="\n")), file=sys.stderr)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `harness report | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
