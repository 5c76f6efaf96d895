"""The repetition of a run from its bucket (`harness runs reproduce`): the commands, the lock of
packages, and a list of the parts that cannot be restored.

All values come from a bucket and are not trusted: each is quoted for the shell or is a comment.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.bucket.archive import read_committed
from harness.bucket.layout import IDENTITY, Identity, read_epoch
from harness.bucket.setup_objects import SetupAt, list_setups, read_setup, readable
from harness.core import step_records as rec
from harness.core.masking import MASK
from harness.core.setup_record import LAUNCH, Setup, changes
from harness.core.world import BadInput
from storage.canonical_json import BadObject
from storage.errors import NotFound
from storage.snapshots.manifest import SnapshotCorrupt
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore
from storage.terminal_text import plain

PATCH, LOCK, TASK = "uncommitted.patch", "requirements.lock", "task.yaml"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*", re.IGNORECASE)
_VERSION = re.compile(r"[a-z0-9][a-z0-9.!+_-]*", re.IGNORECASE)
_BUILD = re.compile(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)$")
_TORCH_INDEX = "https://download.pytorch.org/whl/"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class SetupFound:
    """The setup of a run at one of its steps, as its bucket holds it. `launch`: the request to
    `harness launch`; `None` if the run was not launched."""

    url: str
    step: int
    epoch: int  # generation that trained the step; 0: not known
    at: SetupAt
    setup: Setup
    launch: Setup | None
    world_flags: str  # options of `harness run`: replicas, mesh
    others: tuple[str, ...]  # descriptions of the run's other setups


def find(store: ObjectStore, step: int | None) -> SetupFound:
    """Return the setup with which `step` was trained, or the first one if `step` is `None`. Raise
    BadInput if there is no record or no such step, StoreError if the bucket fails."""
    places = list_setups(store)
    if not places:
        raise BadInput(
            f"{store.url}: wanted a record of how this run was set up (setup/), found none; it "
            "has not begun, or its loop is not ours"
        )
    epoch = _epoch_of(store, step or 1)
    if step and not epoch:
        raise BadInput(
            f"{store.url}: wanted the committed step {step}, found none; `harness status` says how "
            "far the run is"
        )
    at = next((p for p in reversed(places) if p.number <= (epoch or places[0].number)), places[0])
    try:
        setup = read_setup(store, at)
    except (BadObject, NotFound) as e:
        raise BadInput(
            f"{at.key}: wanted how the run was set up, found something else ({e})"
        ) from e
    launches = list_setups(store, LAUNCH)
    launch = readable(store, launches[-1:] if step else launches[:1])
    others = tuple(_others(store, places, at, setup))
    world = _world_flags(store, at.number)
    return SetupFound(store.url, step or 1, epoch, at, setup, launch, world, others)


def _world_flags(store: ObjectStore, epoch: int) -> str:
    """Return the options of `harness run` that give worlds of the same layout, or ""."""
    try:
        found = read_epoch(store, epoch)
    except (NotFound, BadObject):
        return ""
    if found.mesh:
        return f" --mesh {_quoted(found.mesh)}"
    return f" --replica-ranks {found.replica_ranks}" if found.replica_ranks > 1 else ""


def _epoch_of(store: ObjectStore, step: int) -> int:
    """Return the generation that trained this step of the committed lineage; 0 means none."""
    try:
        manifest = Snapshots(store).latest()
        named = rec.named(manifest.data) if manifest else None
        if named is None:
            return 0
        identity = Identity.decode(store.get(IDENTITY))
        rows = read_committed(store, named, rec.genesis(identity.body)).rows
    except (NotFound, SnapshotCorrupt, BadObject, rec.BrokenRecords):
        return 0
    found = rows["epoch"][rows["step"] == step]
    return int(found[-1]) if len(found) else 0


def _others(
    store: ObjectStore, places: Sequence[SetupAt], mine: SetupAt, setup: Setup
) -> Iterator[str]:
    for at in places:
        other = readable(store, [at]) if at != mine else None
        if other is not None and (told := changes(setup, other)):
            more = f" and {len(told) - 3} more" if len(told) > 3 else ""
            yield f"from generation {at.number} on: {'; '.join(map(str, told[:3]))}{more}"


# ---- packages ------------------------------------------------------------------------------------
def requirements_file(found: SetupFound) -> str:
    """Return a requirements file for pip. Packages that no index has become comments."""
    setup, url = found.setup, plain(found.url)
    python = plain(setup.software.get("python", "?"))
    lines = [f"# Packages of {url}, {plain(found.at.key)}; Python {python}"]
    builds = {m[1] for v in setup.packages.values() if (m := _BUILD.search(v.partition(" ")[0]))}
    lines += [f"--extra-index-url {_TORCH_INDEX}{build}" for build in sorted(builds)]
    for name, said in setup.packages.items():
        version, _, place = said.partition(" @ ")
        known = _NAME.fullmatch(name) and _VERSION.fullmatch(version)
        if not known or place.startswith("file:"):
            lines.append(
                f"# {plain(name)}=={plain(version)}: installed from a folder of its machine"
            )
        elif place and plain(place) == place and " " not in place:
            lines.append(f"{name} @ {place}")
        else:
            lines.append(f"{name}=={version}")
    return "\n".join(lines) + "\n"


# ---- commands ------------------------------------------------------------------------------------
def recipe(found: SetupFound, to: str, *, by_run: bool = False, here: bool = False) -> str:
    """Return a shell script that repeats the run at the URL `to`. `by_run`: run on this machine
    even if it was launched; `here`: use the packages that are installed here."""
    launch = None if by_run else found.launch
    setup = found.setup
    when = f"step {found.step} was trained" if found.epoch else "it began"
    lines = [
        f"# Makes {plain(found.url)} again, as it was set up when {when} ({found.at.key}).",
        *(f"# {plain(line)}" for line in not_restorable(found)),
        *(f"# It was set up otherwise {plain(line)}" for line in found.others),
        *(["# `--step N` prints how to make it as it was then."] if found.others else []),
        "set -e",
        f"RUN={_quoted(to)}  # the new run: any URL",
        "",
        *_code(found),
        "",
        *_packages(found, here),
        "",
        "# the run",
        *(
            f"export {name}={_quoted(value)}"
            for name, value in setup.environment.items()
            if _VARIABLE.fullmatch(name)
        ),
        *(_launch(found, launch) if launch else [_run(found)]),
        "",
        "# the same training?",
        f'harness runs compare {_quoted(found.url)} "$RUN"',
    ]
    return "\n".join(lines) + "\n"


def not_restorable(found: SetupFound) -> list[str]:
    """Return sentences about the parts that cannot be restored from the bucket alone."""
    setup, git = found.setup, found.setup.git
    told = []
    if not git.commit:
        kept = "only the script is kept" if git.diff_key else "nothing of it is kept"
        told.append(
            f"The code was in no git work tree: {kept}. Put the rest where this is executed; "
            f"sha256 of the script: {setup.script or 'not known'}."
        )
    elif git.pushed is False:
        told.append(
            "No branch of a remote was known to hold the commit: it may be only where it was made."
        )
    if git.untracked_count:
        more = git.untracked_count - len(git.untracked)
        names = ", ".join(git.untracked) + (f" and {more} more" if more > 0 else "")
        told.append(f"Files that git did not know are not kept: {names}.")
    if git.kept in ("hash", "cut"):
        what = "only a hash" if git.kept == "hash" else "only the beginning"
        told.append(f"Of {git.diff_nbytes:,} bytes of uncommitted changes {what} is kept.")
    elif git.masked:
        told.append(
            f"{git.masked} lines of the uncommitted changes looked like secrets: look for {MASK}."
        )
    if setup.left_out:
        told.append(f"Left out: {'; '.join(setup.left_out)}.")
    places = [f"{name} {value}" for name, value in setup.hardware.items()]
    if image := setup.software.get("image"):
        told.append(f"It ran in the image {image}.")
    told.append(f"It ran on: {', '.join(places)}. Other machines may round otherwise.")
    told.append("Data are not kept: run.json has their fingerprint, and another one is refused.")
    return told


def _code(found: SetupFound) -> Iterator[str]:
    git = found.setup.git
    yield "# the code"
    if git.commit:
        source = _quoted(git.remote) if git.remote else '"${CODE:?the repository, URL or folder}"'
        yield f"git clone --no-checkout -- {source} code"
        yield "cd code"
        yield f"git checkout --detach {git.commit}"
    elif git.diff_key:
        yield "mkdir code"
        yield "cd code"
    if git.diff_key and git.kept == "whole" and not git.masked_before:
        yield f"harness runs reproduce {_quoted(found.url)}{_step(found)} --diff {PATCH}"
        yield f"git apply {'--unidiff-zero ' if not git.context else ''}{PATCH}"
    elif git.diff:
        yield "# its uncommitted changes cannot be applied, see above: this is not what was trained"
    if git.folder.strip("/"):
        yield f"cd {_quoted('./' + git.folder)}"


def _packages(found: SetupFound, here: bool) -> Iterator[str]:
    yield f"# packages (Python {plain(found.setup.software.get('python', '?'))})"
    if here:
        yield "# those that are installed here"
        return
    yield f"harness runs reproduce {_quoted(found.url)}{_step(found)} --lock {LOCK}"
    yield f"python3 -m venv .venv && .venv/bin/python -m pip install -r {LOCK}"
    yield 'PATH="$PWD/.venv/bin:$PATH"'


def _run(found: SetupFound) -> str:
    return f'harness run --run "$RUN"{found.world_flags} -- {_words(found.setup.argv)}'


def _launch(found: SetupFound, launch: Setup) -> Iterator[str]:
    """Yield the lines that repeat the `harness launch` with the original task file."""
    yield f"harness runs reproduce {_quoted(found.url)}{_step(found)} --task {TASK}"
    words = list(launch.argv[1:])
    told: list[str] = []
    skip = False
    for i, word in enumerate(words):
        if skip:
            skip = False
        elif i == 0:
            told.append(TASK)
        elif word == "--run":
            skip = True
        elif i > 1 and words[i - 1] == "--env":
            name, _, value = word.partition("=")  # a secret comes from the environment
            told.append(_quoted(name) if value == MASK else _quoted(word))
        else:
            told.append(_quoted(word))
    yield f'harness launch {" ".join(told)} --run "$RUN"'


def _step(found: SetupFound) -> str:
    return f" --step {found.step}" if found.epoch else ""


def _words(words: Sequence[str]) -> str:
    """Return the words quoted for the shell, with masked secrets as variables of their names."""
    told, flag = [], ""
    for word in words:
        name, _, value = word.partition("=")
        if word == MASK:
            told.append(_secret(flag))
        elif value == MASK and name.startswith("-"):
            told.append(f"{_quoted(name)}={_secret(name)}")
        else:
            told.append(_quoted(word))
        flag = word
    return " ".join(told)


def _secret(flag: str) -> str:
    name = re.sub(r"\W", "_", flag.lstrip("-"), flags=re.ASCII).upper() or "SECRET"
    return f'"${{{"_" if name[0].isdigit() else ""}{name}:?a secret that is not kept}}"'


def _quoted(word: str) -> str:
    """Return one word quoted for the shell, on one line and without terminal control codes."""
    if word.isprintable():
        return shlex.quote(word)
    told = []
    for letter in word:
        if letter.isprintable() and letter not in "\\'":
            told.append(letter)
        else:
            # either a byte of a command line that was not UTF-8, or some unprintable character
            was_byte = "\udc80" <= letter <= "\udcff"
            data = letter.encode(errors="surrogateescape" if was_byte else "replace")
            told += [f"\\x{byte:02x}" for byte in data]
    return f"$'{''.join(told)}'"
