"""`harness check`: test whether a script trains correctly under the harness."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from harness.cli.common import INTERRUPTED, mesh_text
from harness.cli.node import RunFlags, _nproc
from harness.clouds.own_wheel import WHEEL_ENV, keep_wheel
from harness.core.flags import flag, positional
from harness.core.input_files import output_folder
from harness.core.mesh import parse
from harness.core.world import BadInput
from storage.terminal_text import Console

LEAST_STEPS = 8  # for a snapshot, a kill, the repeated steps, and some more


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
        "--script-world` takes it, one at least for each of check's two; 3 is split into 2 and 1; "
        "with --mesh: copies of the model",
        at_least=2,
    )
    mesh: str = flag(
        "",
        "the workers that share a copy of the model, such as dp_shard=2, as `harness run --mesh` "
        "takes it; then one copy is tried and two",
        check=mesh_text,
    )
    cpu: bool = flag(False, "leave this machine's GPUs alone")
    json: bool = flag(False, "print what was found as JSON")
    keep: str = flag("", "leave runs, logs and evidence in this empty folder", check=output_folder)


def check(flags: CheckFlags) -> int:
    """Try a script here: on one worker and two, killed, noticed, resumed.

    Exit status 0: the script passed; 1: it did not; 2: it could not be tried.
    """
    from harness.check import check as checks
    from harness.check.two_runs import ScriptAsked

    argv = flags.script
    if not argv:
        raise BadInput("no script: write `harness check -- train.py --its-flags`")
    if argv[0] != "-m" and not Path(argv[0]).is_file():
        raise BadInput(f"{argv[0]}: no such file (working directory: {Path.cwd()})")
    if flags.keep and Path(flags.keep).exists() and any(Path(flags.keep).iterdir()):
        raise BadInput(f"--keep {flags.keep}: wanted an empty folder")
    ranks = parse(flags.mesh).copy_ranks if flags.mesh else 1
    told = ["--adapt", flags.adapt, "--script-world", str(flags.script_world * ranks)]
    told += [word for option in flags.attach for word in ("--attach", option)]
    told += ["--mesh", flags.mesh] if flags.mesh else []
    env = {"CUDA_VISIBLE_DEVICES": ""} if flags.cpu else {}
    gpus = 0 if flags.cpu else _gpus()
    asked = ScriptAsked(argv, tuple(told), env, steps=flags.steps, gpus=gpus, copy_ranks=ranks)
    keep = str(Path(flags.keep).resolve()) if flags.keep else ""
    # SIGTERM must clean up as well
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))
    report = checks.check(asked, flags.within_s, frozenset(flags.ignore), flags.must_fall, keep)
    if flags.json:
        print(checks.to_json(report))
    else:
        checks.show(report, Console())
    return checks.STATUS[report.verdict]


def _gpus() -> int:
    """Return the number of GPUs that this process sees."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return 0
    found = [p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()]
    return min(len(found), _nproc("auto", os.environ)) if found else 0


# `harness init`: write a task file and a script to begin with, from the package's own templates.

TEMPLATES = ("train.yaml", "train.py")
NO_WHEEL = f'{WHEEL_ENV}: ""'  # the placeholder in the template


@dataclass(frozen=True)
class InitFlags:
    folder: str = positional(
        "where to write; it is made if it is not there", nargs="?", default=".", check=output_folder
    )


def init(flags: InitFlags) -> int:
    """Write a task file and a script to begin with; print the next steps."""
    folder = Path(flags.folder)
    write(folder)
    print(
        f"wrote {folder / 'train.yaml'} (a node of the run), {folder / 'train.py'} (the training)"
    )
    for lacking in _lacking():
        print(lacking)
    print("next:")
    if folder.resolve() != Path.cwd():
        print(f"  cd {folder}")
    print("  harness launch train.yaml --cloud local --nodes 1:2 --market once --run runs/first")
    print("    (two nodes; after a tenth of the steps one is told that it will be taken in 8 s)")
    print("  harness logs runs/first")
    print("  harness runs report runs/first")
    print("  harness launch train.yaml --cloud sky --run s3://my-bucket/runs/first --dry-run")
    return 0


def write(folder: Path) -> None:
    """Write all templates into `folder`. Raises BadInput, and writes none, if one exists there."""
    there = [name for name in TEMPLATES if (folder / name).exists()]
    if there:
        raise BadInput(
            f"wanted a folder without {there[0]}, found {folder / there[0]}; nothing was written: "
            "name another folder (harness init FOLDER), or move that file away"
        )
    wheel = f"{WHEEL_ENV}: {json.dumps(keep_wheel(Path.home()))}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in TEMPLATES:
            text = resources.files("harness.cli").joinpath("templates", name).read_text()
            with open(folder / name, "x") as out:
                out.write(text.replace(NO_WHEEL, wheel))
    except OSError as e:
        raise BadInput(
            f"cannot write into {folder}: {e.strerror}; name a folder that you may write to"
        ) from e


def _lacking() -> list[str]:
    """Return what the first command lacks on this computer, with what to do about it."""
    found = []
    if importlib.util.find_spec("torch") is None:
        found.append("train.py needs torch here, too: install the extra [worker]")
    programs = Path(sys.executable).parent
    if shutil.which("harness") is None and (programs / "harness").exists():
        found.append(f"nodes need `harness` on your PATH: export PATH={programs}:$PATH")
    return found
