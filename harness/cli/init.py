"""`harness init`: a task file and a script to begin with, from the package's own templates.

Knows files and nothing else. What it writes belongs to the user, so it never writes over anything.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from harness import __version__
from harness.core.config import flag, positional
from harness.core.given_files import output_folder
from harness.core.world import BadInput

TEMPLATES = ("train.yaml", "train.py")
PACKAGE = '"spotharness[worker]"'  # as the template says it


@dataclass(frozen=True)
class InitFlags:
    folder: str = positional(
        "where to write; it is made if it is not there", nargs="?", default=".", check=output_folder
    )
    package: str = flag(
        "", "what nodes install: the URL of a wheel, or what pip takes; default: this version"
    )


def init(flags: InitFlags) -> int:
    """Write a task file and a script to begin with, and say how to go on."""
    folder = Path(flags.folder)
    write(folder, requirement(flags.package))
    print(
        f"wrote {folder / 'train.yaml'} (a node of the run), {folder / 'train.py'} (the training)"
    )
    for lacking in _lacking():
        print(lacking)
    print("next:")
    if folder.resolve() != Path.cwd():
        print(f"  cd {folder}")
    print("  harness launch train.yaml --cloud local --nodes 1:2 --run runs/first")
    print("  harness report runs/first")
    print("  harness launch train.yaml --cloud sky --run s3://my-bucket/runs/first --dry-run")
    return 0


def requirement(package: str) -> str:
    """What a node gives to pip. To a bare URL the extra that workers need is added."""
    if not package:
        return f"spotharness[worker]=={__version__}"
    return (
        f"spotharness[worker] @ {package}" if "://" in package and " @ " not in package else package
    )


def write(folder: Path, package: str) -> None:
    """Write all templates into `folder`. Raises BadInput, and writes none, if one is there."""
    there = [name for name in TEMPLATES if (folder / name).exists()]
    if there:
        raise BadInput(
            f"wanted a folder without {there[0]}, found {folder / there[0]}; nothing was written: "
            "name another folder (harness init FOLDER), or move that file away"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in TEMPLATES:
            text = resources.files("harness.cli").joinpath("templates", name).read_text()
            with open(folder / name, "x") as out:
                out.write(text.replace(PACKAGE, json.dumps(package)))
    except OSError as e:
        raise BadInput(
            f"cannot write into {folder}: {e.strerror}; name a folder that you may write to"
        ) from e


def _lacking() -> list[str]:
    """What the first command would miss here, and what to do."""
    found = []
    if importlib.util.find_spec("torch") is None:
        found.append("train.py needs torch here, too: pip install 'spotharness[worker]'")
    programs = Path(sys.executable).parent
    if shutil.which("harness") is None and (programs / "harness").exists():
        found.append(f"nodes need `harness` on your PATH: export PATH={programs}:$PATH")
    return found
