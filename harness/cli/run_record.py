"""The part of a run's record that a launch or a node agent adds: its owner, purpose and command."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.bucket.archive import read_facts
from harness.bucket.journal import Journal
from harness.bucket.layout import IDENTITY, PHASES, SAMPLES
from harness.bucket.phases import read_phases
from harness.bucket.setup_objects import read_diff, with_diff, write_launch
from harness.cli.common import DONE, existing_store, with_key
from harness.clouds.sky_task import pairs
from harness.core.facts import (
    SessionStarted,
    SnapshotCommitted,
    SnapshotExported,
    SnapshotReplicated,
    Warned,
)
from harness.core.flags import flag, positional, words_of
from harness.core.input_files import output_file
from harness.core.masking import MASK, SECRET_NAMES, is_secret, keep_out, masked_line, masked_value
from harness.core.setup_record import LAUNCH, PEOPLE, Setup
from harness.core.world import BadInput
from harness.node import provenance
from harness.node.provenance import people
from harness.uploader.node_uploader import seen_here
from storage.canonical_json import BadObject
from storage.errors import NotFound, StoreError
from storage.snapshots.manifest import Ref
from storage.snapshots_command import Note, Notes
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import normalize
from storage.terminal_text import Console

if TYPE_CHECKING:
    from harness.clouds.sky_task import Task
    from harness.core.facts import Fact
    from harness.look.reports.rerun import SetupFound
    from storage.snapshots.transfer import Exported


# `harness runs reproduce`, `runs note`: how to repeat a run, and notes about why it was made.


@dataclass(frozen=True)
class ReproduceFlags:
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


def reproduce(flags: ReproduceFlags) -> int:
    """Print the commands that repeat a run, from its bucket alone."""
    from harness.look.reports import rerun as again

    store = existing_store(flags.url)
    found = again.find(store, flags.step)
    if flags.diff or flags.lock or flags.task:
        _write(flags, store, found)
        return DONE
    to = normalize(flags.to or f"runs/again-{store.url.rstrip('/').rpartition('/')[2]}")
    print(again.recipe(found, to, by_run=flags.by_run, here=flags.here), end="")
    return DONE


def _write(flags: ReproduceFlags, store: ObjectStore, found: SetupFound) -> None:
    from harness.look.reports.rerun import requirements_file

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
        Path(flags.lock).write_text(requirements_file(found), errors="replace")
    if flags.task:
        if not (found.launch and found.launch.task):
            raise BadInput("--task: wanted the task file of a `harness launch`, found none")
        Path(flags.task).write_text(found.launch.task, errors="replace")


@dataclass(frozen=True)
class NoteFlags:
    url: str = positional("URL of the run")
    message: str = flag("", "write this down; without it the logbook is shown", short="-m")
    step: int | None = flag(None, "the step that the note is about", at_least=0)
    author: str = flag("", "who writes; default: who is logged in")
    json: bool = flag(False, "show it as JSON")


def note(flags: NoteFlags) -> int:
    """Write a note about a run into its bucket, or show all notes."""
    from harness.look.reports.setup_report import LogbookEntry, read_logbook, write_note

    store = existing_store(flags.url)
    if flags.message:
        author = flags.author or os.environ.get("HARNESS_OWNER") or _login()
        entry = LogbookEntry(time.time(), flags.message, author, flags.step)
        write_note(store, entry, secrets.token_hex(4))
        return DONE
    found = read_logbook(store)
    if flags.json:
        json.dump(found.to_json(), sys.stdout, indent=2)
        print()
        return DONE
    lines = found.lines() or ["Nothing is written here yet: harness runs note URL -m 'why'"]
    Console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    return DONE


def _login() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user of a container may have no name
        return ""


# flags of `harness launch` and `harness run` that reach nodes and workers as variables
VARIABLES = {**PEOPLE, "on_change": "HARNESS_ON_CHANGE", "diff": "HARNESS_DIFF"}
IMAGE = "HARNESS_IMAGE"
TASK_NBYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class RecordFlags:
    """The flags shared by `harness run` and `harness launch`, which passes them to its nodes."""

    on_change: str = flag(
        "",
        "what nodes do when the run was begun with another script, configuration, commit or "
        "software: warn, refuse, or accept it from now on; default: HARNESS_ON_CHANGE, else warn",
        choices=["refuse", "warn", "accept"],
    )
    diff: str = flag(
        "",
        "what the bucket keeps of changes that are not committed to git: keep, hash\nkeep: all, "
        "without secrets; default: HARNESS_DIFF, else keep",
        choices=["keep", "hash"],
    )
    owner: str = flag("", "who trains this\ndefault: HARNESS_OWNER, else who is logged in")
    project: str = flag("", "what it belongs to\ndefault: HARNESS_PROJECT")
    experiment: str = flag("", "and there to which experiment\ndefault: HARNESS_EXPERIMENT")
    purpose: str = flag("", "why it is trained\ndefault: HARNESS_PURPOSE")


def said_in_variables(flags: RecordFlags) -> dict[str, str]:
    """Return the variables of the flags that were given."""
    told = {variable: getattr(flags, name) for name, variable in VARIABLES.items()}
    return {variable: value for variable, value in told.items() if value}


def about_launch(flags: RecordFlags, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the nodes of a launch: from flags, else from our environment. The
    owner is who launches, not who is logged in on a node."""
    here = {PEOPLE[name]: value for name, value in people(environ).items()}
    here |= {v: environ[v] for v in VARIABLES.values() if environ.get(v)}
    return {**here, **said_in_variables(flags)}


def with_names(task: Task) -> Task:
    """Return the task with variables for its image and for the names of its secrets. This process
    masks the secrets' values from now on."""
    keep_out(task.secrets.values())
    names = ",".join(sorted({*task.secrets, *task.managed_secrets}))
    told = {SECRET_NAMES: names} if names else {}
    return with_image(dataclasses.replace(task, envs={**task.envs, **told}))


def with_image(task: Task) -> Task:
    """Return the task with a variable for the image that it names."""
    image = task.resources.get("image_id")
    if not isinstance(image, str) or IMAGE in task.envs:
        return task
    return dataclasses.replace(task, envs={**task.envs, IMAGE: image})


def keep_launch(store: ObjectStore, flags: Any, task: Task) -> None:
    """Record what was requested: flags, task file, and the work tree that nodes get. Raises
    StoreError."""
    secrets = tuple(word.partition("=")[0] for word in flags.secret)
    env = tuple(
        f"{name}={MASK if is_secret(name) else masked_value(value)}"
        for name, value in pairs(flags.env, os.environ).items()
    )
    asked = dataclasses.replace(flags, secret=secrets, env=env)
    folder = task.workdir or Path.cwd()
    keep_diff = task.envs.get("HARNESS_DIFF", "keep") != "hash"
    git, diff = provenance.git_state(folder, keep_diff)
    text, cut = _text_of(task)
    left_out = (
        *(f"{name} (a secret)" for name in (*secrets, *task.secrets)),
        *([f"the task file (cut off after {TASK_NBYTES} letters)"] if cut else []),
    )
    setup = Setup(
        seat=LAUNCH,
        argv=("launch", *map(masked_value, words_of(asked))),
        git=git,
        software=provenance.software(os.environ),
        people=provenance.people(task.envs),
        task=text,
        left_out=tuple(dict.fromkeys(left_out)),
    )
    write_launch(store, with_diff(setup, diff), diff)


def _text_of(task: Task) -> tuple[str, bool]:
    """Return the text of the task file without secrets, and whether it was cut off."""
    try:
        text = task.path.read_text(errors="replace")
    except OSError:  # removed since it was loaded
        return "", False
    for value in task.secrets.values():
        if len(value) > 3:
            text = text.replace(value, MASK)
    lines = [masked_line(line) for line in text[:TASK_NBYTES].splitlines()]
    return "\n".join(lines) + "\n", len(text) > TASK_NBYTES


# `harness snapshots`: the commands of `python -m storage`, with notes from the run's facts.


def notes_of(store: ObjectStore) -> Notes:
    """Return what the run's facts say about its snapshots, and which objects a copy needs so that
    it can be resumed and audited."""
    of: defaultdict[Ref, Note] = defaultdict(Note)
    for stamped in read_facts(store, steps=False):
        match stamped.fact:
            case SnapshotCommitted() as f:
                ref = Ref(f.epoch, f.step)
                of[ref] = replace(of[ref], committed_at=stamped.t, commit_s=f.commit_s, why=f.why)
            case SnapshotReplicated() as f:
                ref = Ref(f.epoch, f.step)
                of[ref] = replace(of[ref], copies=(*of[ref].copies, f.url))
            case SessionStarted() as f if f.resumed_epoch and f.tier != "bucket":
                ref = Ref(f.resumed_epoch, f.resumed_step)
                of[ref] = replace(of[ref], restored=f.tier)

    def pardoned(ref: Ref, what: str) -> None:
        _say(store, Warned(ref.step, ref.epoch, f"snapshot {ref}: {what}"))

    def exported(ref: Ref, made: Exported, dtype: str) -> None:
        said = (made.files, made.tensors, made.nbytes, dtype)
        try:
            _say(store, SnapshotExported(ref.step, ref.epoch, *said))
        except StoreError as e:
            print(f"harness: the export is whole, and not in the run's record ({e})")

    extra = [*store.list(IDENTITY), *store.list(PHASES), *store.list(SAMPLES)]
    ended = read_phases(store)[-1].ended if store.list(PHASES) else ()
    return Notes(of, extra, ended, seen_here(), pardoned, exported)


def _say(store: ObjectStore, fact: Fact) -> None:
    """Record a fact as written by a person."""
    journal = Journal(with_key(store), f"person-{secrets.token_hex(6)}", time.time)
    journal.record(fact)
    journal.flush()
