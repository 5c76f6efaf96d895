"""What a launch, or a node's agent, adds to the run's record: for whom, why, how it was asked."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core.config import flag
from harness.core.masking import MASK, SECRET_NAMES, is_secret, keep_out, masked_line, masked_value
from harness.core.setups import LAUNCH, PEOPLE, Setup

if TYPE_CHECKING:
    from harness.clouds.tasks import Task
    from storage.objects import ObjectStore

# flags of `harness launch` and `harness run` that nodes and workers are told in variables
VARIABLES = {**PEOPLE, "on_change": "HARNESS_ON_CHANGE", "diff": "HARNESS_DIFF"}
IMAGE = "HARNESS_IMAGE"
TASK_NBYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class RecordFlags:
    """Flags of `harness launch`, which hands them on to its nodes, and of `harness run`."""

    on_change: str = flag(
        "",
        "what nodes do when the run was begun with another script, configuration, commit or "
        "software: warn, refuse, or accept it from now on; default: HARNESS_ON_CHANGE, else warn",
        choices=["refuse", "warn", "accept"],
    )
    diff: str = flag(
        "",
        "what the run's bucket keeps of changes that are not committed to git: keep (all, without "
        "secrets), or hash; default: HARNESS_DIFF, else keep",
        choices=["keep", "hash"],
    )
    owner: str = flag("", "who trains this; default: HARNESS_OWNER, else who is logged in")
    project: str = flag("", "what it belongs to; default: HARNESS_PROJECT")
    experiment: str = flag("", "and there to which experiment; default: HARNESS_EXPERIMENT")
    purpose: str = flag("", "why; default: HARNESS_PURPOSE")


def said_in_variables(flags: RecordFlags) -> dict[str, str]:
    """Of the flags that were given."""
    told = {variable: getattr(flags, name) for name, variable in VARIABLES.items()}
    return {variable: value for variable, value in told.items() if value}


def about_launch(flags: RecordFlags, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for the nodes of a launch: what flags say, else what is set here. The owner is who
    launches, not who is logged in on a node."""
    from harness.node.surroundings import people

    here = {PEOPLE[name]: value for name, value in people(environ).items()}
    here |= {v: environ[v] for v in VARIABLES.values() if environ.get(v)}
    return {**here, **said_in_variables(flags)}


def with_names(task: Task) -> Task:
    """The task, whose nodes are told the image that it names, and which of their variables are
    secrets. From now on this process masks these."""
    keep_out(task.secrets.values())
    names = ",".join(sorted({*task.secrets, *task.managed_secrets}))
    told = {SECRET_NAMES: names} if names else {}
    return with_image(dataclasses.replace(task, envs={**task.envs, **told}))


def with_image(task: Task) -> Task:
    """The task, whose nodes are told the image that it names."""
    image = task.resources.get("image_id")
    if not isinstance(image, str) or IMAGE in task.envs:
        return task
    return dataclasses.replace(task, envs={**task.envs, IMAGE: image})


def keep_launch(store: ObjectStore, flags: Any, task: Task) -> None:
    """Write down what was asked for: flags, task file, and the work tree that nodes are given.
    Raises StoreError."""
    from harness.bucket.setups import with_diff, write_launch
    from harness.clouds.tasks import pairs
    from harness.core.config import words_of
    from harness.node import surroundings

    secrets = tuple(word.partition("=")[0] for word in flags.secret)
    env = tuple(
        f"{name}={MASK if is_secret(name) else masked_value(value)}"
        for name, value in pairs(flags.env, os.environ).items()
    )
    asked = dataclasses.replace(flags, secret=secrets, env=env)
    folder = task.workdir or Path.cwd()
    keep_diff = task.envs.get("HARNESS_DIFF", "keep") != "hash"
    git, diff = surroundings.git_state(folder, keep_diff)
    text, cut = _text_of(task)
    left_out = (
        *(f"{name} (a secret)" for name in (*secrets, *task.secrets)),
        *([f"the task file (cut off after {TASK_NBYTES} letters)"] if cut else []),
    )
    setup = Setup(
        seat=LAUNCH,
        argv=("launch", *map(masked_value, words_of(asked))),
        git=git,
        software=surroundings.software(os.environ),
        people=surroundings.people(task.envs),
        task=text,
        left_out=tuple(dict.fromkeys(left_out)),
    )
    write_launch(store, with_diff(setup, diff), diff)


def _text_of(task: Task) -> tuple[str, bool]:
    """The task file without secrets, and whether it was cut off."""
    try:
        text = task.path.read_text(errors="replace")
    except OSError:  # it was read a moment ago
        return "", False
    for value in task.secrets.values():
        if len(value) > 3:
            text = text.replace(value, MASK)
    lines = [masked_line(line) for line in text[:TASK_NBYTES].splitlines()]
    return "\n".join(lines) + "\n", len(text) > TASK_NBYTES
