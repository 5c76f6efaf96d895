"""`harness rerun`, `logbook`: how to make a run again, and why it was made."""

from __future__ import annotations

import getpass
import os
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.common import DONE, existing_store
from harness.core.config import flag, positional
from harness.core.given_files import output_file
from harness.core.world import BadInput
from storage.opening import normalize
from storage.text import Console

if TYPE_CHECKING:
    from harness.views.rerun import SetupFound
    from storage.objects import ObjectStore


@dataclass(frozen=True)
class RerunFlags:
    url: str = positional("URL of the run")
    step: int | None = flag(
        None, "as the run was set up when this step was trained; default: the first", at_least=1
    )
    to: str = flag("", "URL of the new run; default: a folder beside where you are")
    by_run: bool = flag(
        False, "with `harness run` on one machine, though the run was led by `harness launch`"
    )
    here: bool = flag(False, "with the packages that are installed here")
    diff: str = flag(
        "", "instead write the changes that were not committed to this file", check=output_file
    )
    lock: str = flag(
        "", "instead write its packages to this file, for pip install -r", check=output_file
    )
    task: str = flag(
        "", "instead write the task file of its launch to this file", check=output_file
    )


def rerun(flags: RerunFlags) -> int:
    """Print the commands that make a run again, from its bucket alone."""
    from harness.views import rerun as again

    store = existing_store(flags.url)
    found = again.find(store, flags.step)
    if flags.diff or flags.lock or flags.task:
        _write(flags, store, found)
        return DONE
    to = normalize(flags.to or f"runs/again-{store.url.rstrip('/').rpartition('/')[2]}")
    print(again.recipe(found, to, by_run=flags.by_run, here=flags.here), end="")
    return DONE


def _write(flags: RerunFlags, store: ObjectStore, found: SetupFound) -> None:
    from harness.bucket.setups import read_diff
    from harness.core.values import BadObject
    from harness.views.rerun import lock
    from storage.errors import NotFound

    if flags.diff:
        try:
            diff = read_diff(store, found.setup)
        except (BadObject, NotFound) as e:
            raise BadInput(f"{flags.url}: its uncommitted changes cannot be read: {e}") from e
        if not diff:
            why = "only their hash was kept" if found.setup.git.diff else "there were none"
            raise BadInput(f"--diff: wanted changes that were not committed, found none: {why}")
        Path(flags.diff).write_bytes(diff)
    if flags.lock:
        Path(flags.lock).write_text(lock(found), errors="replace")
    if flags.task:
        if not (found.launch and found.launch.task):
            raise BadInput("--task: wanted the task file of a `harness launch`, found none")
        Path(flags.task).write_text(found.launch.task, errors="replace")


@dataclass(frozen=True)
class LogbookFlags:
    url: str = positional("URL of the run")
    message: str = flag("", "write this down; without it the logbook is shown", short="-m")
    step: int | None = flag(None, "the step that the note is about", at_least=0)
    author: str = flag("", "who writes; default: who is logged in")
    json: bool = flag(False, "show it as JSON")


def logbook(flags: LogbookFlags) -> int:
    """Keep in a run's bucket why something was done, or show what was written."""
    from harness.bucket.notes import LogbookEntry, write_note
    from harness.views.logbook import read_logbook

    store = existing_store(flags.url)
    if flags.message:
        author = flags.author or os.environ.get("HARNESS_OWNER") or _login()
        entry = LogbookEntry(time.time(), flags.message, author, flags.step)
        write_note(store, entry, secrets.token_hex(4))
        return DONE
    found = read_logbook(store)
    if flags.json:
        import json

        json.dump(found.to_json(), sys.stdout, indent=2)
        print()
        return DONE
    lines = found.lines() or ["Nothing is written here yet: harness logbook URL -m 'why'"]
    Console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    return DONE


def _login() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return ""
