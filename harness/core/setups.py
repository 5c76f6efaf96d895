"""How a run was set up: what it ran, of which code, with which packages, on what, for whom.

Pure. A `Setup` is the run's reproducibility record. Rank 0 of a world, or `harness launch`, writes
it (`bucket/setups.py`); a session compares its own with the one that began the run (`changes`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from harness.core.values import Count, Natural

SESSION, LAUNCH = "session", "launch"  # seats: who is set up so

# How much a change weighs. TRAINING: another training may come of it. SOFTWARE: the same one, to
# rounding, or not at all. HARDWARE: on spot machines it changes with every node.
TRAINING, SOFTWARE, HARDWARE = "training", "software", "hardware"
LEVELS = (TRAINING, SOFTWARE, HARDWARE)

OWNER, PROJECT, EXPERIMENT, PURPOSE = "owner", "project", "experiment", "purpose"
# the variables that say them
PEOPLE = {
    OWNER: "HARNESS_OWNER",
    PROJECT: "HARNESS_PROJECT",
    EXPERIMENT: "HARNESS_EXPERIMENT",
    PURPOSE: "HARNESS_PURPOSE",
}
# packages on whose versions a result depends; all others are kept in the lock, and not compared
PACKAGES = (
    "accelerate",
    "datasets",
    "deepspeed",
    "flash-attn",
    "numpy",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "peft",
    "safetensors",
    "sentencepiece",
    "spotharness",
    "tiktoken",
    "tokenizers",
    "torch",
    "torchao",
    "torchaudio",
    "torchdata",
    "torchvision",
    "transformers",
    "triton",
    "trl",
    "xformers",
)
MOST_CHANGES = 60
MOST_WORDS = 200  # letters of a value that is told


@dataclass(frozen=True)
class GitState:
    """The work tree that the script ran in. `diff`: sha256 of what was not committed; `kept`: what
    of it lies in the bucket: "whole", "cut" (its beginning) or "hash" (nothing of it)."""

    commit: str = ""
    branch: str = ""
    remote: str = ""  # URL, without credentials
    folder: str = ""  # from the top of the work tree to where the script was started
    pushed: bool | None = None  # a branch of some remote holds the commit, as far as was known
    diff: str = ""  # "": all is committed
    diff_nbytes: Natural = 0
    diff_key: str = ""  # digest of what is kept of it, which names its object
    kept: str = ""
    masked: Natural = 0  # lines of it that looked like secrets
    masked_before: Natural = 0  # ... of these, lines of the commit: such a patch does not apply
    context: Natural = 3  # lines around a change; 0: they held what looked like secrets
    untracked: tuple[str, ...] = ()  # files that git does not know; the first ones
    untracked_count: Natural = 0


@dataclass(frozen=True)
class Setup:
    """`argv`: the script (or "-m" and a module, or of a launch the words after `harness`) and its
    arguments, without secrets. `config`: what `attach` was given."""

    seat: str = SESSION
    argv: tuple[str, ...] = ()
    script: str = ""  # sha256 of the script's file
    config: dict[str, Any] = field(default_factory=dict)
    git: GitState = field(default_factory=GitState)
    packages: dict[str, str] = field(default_factory=dict)  # all: name -> version, or "@ URL"
    software: dict[str, str] = field(default_factory=dict)  # "python", "torch", "cuda", "image"...
    hardware: dict[str, str] = field(default_factory=dict)  # "device", "driver", ...
    environment: dict[str, str] = field(default_factory=dict)  # variables that steer libraries
    people: dict[str, str] = field(default_factory=dict)  # OWNER, PROJECT, EXPERIMENT, PURPOSE
    task: str = ""  # of a launch: the text of its task file, without secrets
    left_out: tuple[str, ...] = ()  # what of all this could not be kept, and why
    version: Count = 1


@dataclass(frozen=True)
class Difference:
    """What is not as it was. `level`: see LEVELS."""

    level: str
    name: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.name} was {self.was}, now it is {self.now}"


# ---- command lines -------------------------------------------------------------------------------
def script_of(argv: Sequence[str]) -> str:
    """The script's name without folders, or the module's."""
    if argv[:1] == ("-m",) or list(argv[:1]) == ["-m"]:
        return argv[1] if len(argv) > 1 else ""
    return PurePath(argv[0]).name if argv else ""


def flags_of(argv: Sequence[str]) -> dict[str, str]:
    """A script's arguments by name: ["x.py", "--lr", "0.1", "--fast", "data"] -> {"--lr": "0.1",
    "--fast": "", "arguments": "data"}; what is given more than once is joined by spaces."""
    found: dict[str, list[str]] = {}
    words, name = list(argv[2:] if list(argv[:1]) == ["-m"] else argv[1:]), ""
    for word in words:
        if word.startswith("-") and not _is_number(word):
            name, equals, value = word.partition("=")
            found.setdefault(name, []).extend([value] if equals else [])
            name = "" if equals else name
        else:
            found.setdefault(name or "arguments", []).append(word)
            name = ""
    return {name: " ".join(values) for name, values in found.items()}


def _is_number(word: str) -> bool:
    return word[1:2].isdigit() or word[1:2] == "."


# ---- comparing -----------------------------------------------------------------------------------
def changes(first: Setup, now: Setup) -> tuple[Difference, ...]:
    """What is different from `first`, weightiest first. What only one of them knows of git, the
    script's file, software or hardware is no difference."""
    found = [*_of_script(first, now), *_of_code(first, now), *_of_machine(first, now)]
    return tuple(sorted(found, key=lambda d: LEVELS.index(d.level)))


def _of_script(first: Setup, now: Setup) -> Iterator[Difference]:
    if first.argv and now.argv:
        names = script_of(first.argv), script_of(now.argv)
        if names[0] != names[1]:
            yield _difference(TRAINING, "script", *names)
        yield from _unlike(TRAINING, "", flags_of(first.argv), flags_of(now.argv))
    if first.config and now.config:
        leaves = dict(leaves_of(first.config)), dict(leaves_of(now.config))
        yield from _unlike(TRAINING, "config ", *leaves)


def _of_code(first: Setup, now: Setup) -> Iterator[Difference]:
    if first.git.commit and now.git.commit:
        if first.git.commit != now.git.commit:
            yield _difference(TRAINING, "git commit", first.git.commit, now.git.commit)
        if first.git.diff != now.git.diff:
            told = [d[:16] or "none" for d in (first.git.diff, now.git.diff)]
            yield _difference(TRAINING, "uncommitted changes", *told)
    elif first.script and now.script and first.script != now.script:
        yield _difference(TRAINING, "text of the script", first.script[:16], now.script[:16])


def _of_machine(first: Setup, now: Setup) -> Iterator[Difference]:
    if first.packages and now.packages:
        kept = [{k: s.packages[k] for k in PACKAGES if k in s.packages} for s in (first, now)]
        yield from _unlike(SOFTWARE, "", *kept)
    for level, a, b in (
        (SOFTWARE, first.software, now.software),
        (HARDWARE, first.hardware, now.hardware),
    ):
        both = [{k: v for k, v in each.items() if a.get(k) and b.get(k)} for each in (a, b)]
        yield from _unlike(level, "", *both)
    if first.environment or now.environment:
        yield from _unlike(SOFTWARE, "", first.environment, now.environment)


def _unlike(
    level: str, what: str, first: Mapping[str, str], now: Mapping[str, str]
) -> Iterator[Difference]:
    for name in [*first, *(n for n in now if n not in first)]:
        was, found = first.get(name), now.get(name)
        if was != found:
            words = ["not given" if v is None else v or "given" for v in (was, found)]
            yield _difference(level, what + name, *words)


def _difference(level: str, name: str, was: str, now: str) -> Difference:
    return Difference(level, name[:MOST_WORDS], was[:MOST_WORDS], now[:MOST_WORDS])


def leaves_of(config: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """A configuration's values by dotted name: ("optimizer.lr", "0.1"). Rows are values."""
    if isinstance(config, dict) and config:
        for key, value in config.items():
            yield from leaves_of(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, config if isinstance(config, str) else json.dumps(config)
