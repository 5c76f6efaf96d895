"""`harness check`: does a script keep what the harness promises?"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.cli.common import INTERRUPTED
from harness.cli.run import RunFlags, _nproc
from harness.core.config import flag, positional
from harness.core.given_files import output_folder
from harness.core.world import BadInput
from storage.text import Console

LEAST_STEPS = 8  # a snapshot, a kill, the same steps again, and some more


@dataclass(frozen=True)
class CheckFlags:
    script: tuple[str, ...] = positional(
        "-- script.py and its arguments, or -- -m module", nargs="*"
    )
    steps: int = flag(12, "stop it after so many steps", at_least=LEAST_STEPS)
    within_s: float = flag(180.0, "the longest that it may take, in seconds", above=0)
    ignore: tuple[str, ...] = flag(
        (), "a variable that may begin anew after a resume; repeat for more", metavar="NAME"
    )
    must_fall: bool = flag(False, "a loss that does not fall is a fault")
    adapt: str = flag(
        "auto",
        "whose training loop the script uses, as `harness run --adapt` takes it",
        choices=list(RunFlags.__dataclass_fields__["adapt"].metadata["choices"]),
    )
    attach: tuple[str, ...] = flag(
        (),
        "an option of harness.attach(), as `harness run --attach` takes it",
        metavar="NAME=VALUE",
    )
    script_world: int = flag(
        3,
        "how many workers an unchanged script's batch is meant for, as `harness run "
        "--script-world` takes it; 3 is shared out as 2 and 1",
        at_least=2,
    )
    cpu: bool = flag(False, "leave this machine's GPUs alone")
    json: bool = flag(False, "print what was found as JSON")
    keep: str = flag("", "leave runs, logs and evidence in this empty folder", check=output_folder)


def check(flags: CheckFlags) -> int:
    """Try a script on this computer: on one worker and on two, with a kill, a notice and a resume.
    Exit status 0: it holds; 1: something does not; 2: it could not be tried."""
    from harness.proof import check as checks
    from harness.proof.check_lives import ScriptAsked

    argv = flags.script
    if not argv:
        raise BadInput("no script: write `harness check -- train.py --its-flags`")
    if argv[0] != "-m" and not Path(argv[0]).is_file():
        raise BadInput(f"{argv[0]}: no such file (working directory: {Path.cwd()})")
    if flags.keep and Path(flags.keep).exists() and any(Path(flags.keep).iterdir()):
        raise BadInput(f"--keep {flags.keep}: wanted an empty folder")
    told = ["--adapt", flags.adapt, "--script-world", str(flags.script_world)]
    told += [word for option in flags.attach for word in ("--attach", option)]
    env = {"CUDA_VISIBLE_DEVICES": ""} if flags.cpu else {}
    gpus = 0 if flags.cpu else _gpus()
    asked = ScriptAsked(argv, tuple(told), env, steps=flags.steps, gpus=gpus)
    keep = str(Path(flags.keep).resolve()) if flags.keep else ""
    # who is told to end must clean up as well
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))
    report = checks.check(asked, flags.within_s, frozenset(flags.ignore), flags.must_fall, keep)
    if flags.json:
        print(checks.to_json(report))
    else:
        checks.show(report, Console())
    return checks.STATUS[report.verdict]


def _gpus() -> int:
    """How many this process sees."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return 0
    found = [p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()]
    return min(len(found), _nproc("auto", os.environ)) if found else 0
