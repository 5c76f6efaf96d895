"""The setup of a run: its command, code, packages, hardware, and the people it runs for.

Pure. A `Setup` is the run's reproducibility record. Rank 0 of a world, or `harness launch`, writes
it (`bucket/setup_objects.py`); a session compares its own with the one that began the run
(`changes`)."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import math
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from harness.core.decoding import Count, Natural
from harness.core.masking import MASK, is_secret, masked_value
from harness.core.world import BadInput
from storage.canonical_json import MOST_INT

# Conversion of any configuration to plain, bounded JSON, for `attach(config=...)`.

MOST_VALUES = 2000
MOST_LETTERS = 2000  # characters of a string
MOST_NAME = 200  # characters of a key
MOST_TEXT = 200_000  # characters of all strings
MOST_DEEP = 16
MOST_NAMED = 50  # names in the list of omissions

NOTHING = object()  # marks a value that has no plain form


@dataclass
class _Plain:
    """The state of a walk through one configuration. `budget`, `letters`: values and characters of
    text that may still be kept."""

    budget: int = MOST_VALUES
    letters: int = MOST_TEXT
    left_out: list[str] = field(default_factory=list)

    def omit(self, name: str, why: str) -> Any:
        if len(self.left_out) < MOST_NAMED:
            self.left_out.append(f"{name} ({why})")
        return NOTHING

    def of(self, value: Any, name: str, deep: int) -> Any:
        if self.budget <= 0 or self.letters <= 0:
            return self.omit(name, f"more than {MOST_VALUES} values, or {MOST_TEXT} letters")
        self.budget -= 1
        if deep > MOST_DEEP:
            return self.omit(name, f"nested deeper than {MOST_DEEP}")
        # A user's object may raise anything (OmegaConf does so for a missing value); that must not
        # end a run.
        try:
            if (fields := _fields(value)) is not None:
                return self._mapping(fields, name, deep)
            if isinstance(value, (list, tuple, set, frozenset)):
                return self._row(value, name, deep)
            found = _scalar(value)
        except Exception as e:
            return self.omit(name, f"it cannot be read: {type(e).__name__}")
        if found is NOTHING:
            return self.omit(name, type(value).__name__)
        if isinstance(found, str):
            most = min(MOST_LETTERS, self.letters)
            self.letters -= min(most, len(found))
            if len(found) > most:
                self.omit(name, f"cut off after {most} letters")
            return found[:most]
        return found

    def _mapping(self, fields: Mapping[str, Callable[[], Any]], name: str, deep: int) -> Any:
        found: dict[str, Any] = {}
        for key, read in fields.items():
            place = f"{name}.{key}" if name else key
            if is_secret(key):
                self.omit(place, "it is called like a secret")
                found[key] = MASK
                continue
            try:
                value = read()
            except Exception as e:  # as in `of`
                self.omit(place, f"it cannot be read: {type(e).__name__}")
                continue
            if (plain := self.of(value, place, deep + 1)) is not NOTHING:
                found[key] = plain
        return found

    def _row(self, values: Collection[Any], name: str, deep: int) -> Any:
        ordered = sorted(values, key=str) if isinstance(values, (set, frozenset)) else values
        found = []
        for i, value in enumerate(ordered):
            if self.budget <= 0:
                self.omit(f"{name}[{i}:]", f"more than {MOST_VALUES} values")
                break
            plain = self.of(value, f"{name}[{i}]", deep + 1)
            found.append(None if plain is NOTHING else plain)
        return found


def plain_config(config: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a configuration as JSON, and the parts that could not be kept, such as "data.collate
    (function)". Raises BadInput if `config` is not a configuration."""
    if config is None:
        return {}, ()
    walk = _Plain()
    found = walk.of(config, "", 0)
    if not isinstance(found, dict):
        raise BadInput(
            f"attach(config=...): wanted a dict, a dataclass, an argparse.Namespace, a pydantic "
            f"model or a mapping such as OmegaConf's, found {type(config).__name__}; give "
            "{name: value} of what the result depends on"
        )
    return found, tuple(walk.left_out)


def _fields(value: Any) -> dict[str, Callable[[], Any]] | None:
    """Return a configuration's fields as name -> reader, or None for a single value."""
    if isinstance(value, type):
        return None
    if isinstance(value, Mapping):
        return {_name(key): _item(value, key) for key in value}
    if dataclasses.is_dataclass(value):
        return {f.name: _attribute(value, f.name) for f in dataclasses.fields(value)}
    for declared in ("model_fields", "__fields__"):  # pydantic 2, pydantic 1
        if isinstance(names := getattr(type(value), declared, None), dict):
            return {name: _attribute(value, name) for name in names}
    if (attributes := getattr(type(value), "__attrs_attrs__", None)) is not None:
        return {a.name: _attribute(value, a.name) for a in attributes}
    if callable(to_dict := getattr(value, "to_dict", None)):
        found = to_dict()
        return _fields(found) if isinstance(found, Mapping) else None
    if isinstance(value, types.SimpleNamespace) or type(value).__name__ == "Namespace":
        return {_name(name): _attribute(value, name) for name in vars(value)}
    return None


def _name(key: Any) -> str:
    return str(key.value if isinstance(key, enum.Enum) else key)[:MOST_NAME]


def _item(value: Mapping[Any, Any], key: Any) -> Callable[[], Any]:
    return lambda: value[key]


def _attribute(value: Any, name: str) -> Callable[[], Any]:
    return lambda: getattr(value, name)


def _scalar(value: Any) -> Any:
    """Return the plain form of a single value, or NOTHING if it has none."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, int):
        return int(value) if -MOST_INT <= value <= MOST_INT else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str):
        return masked_value(str(value[: 2 * MOST_LETTERS]))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta)):
        return str(value)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        named = f"{value.__module__}.{value.__qualname__}"
        return NOTHING if "<" in named else named
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        found = item()  # numpy's and torch's scalars
        return _scalar(found) if isinstance(found, (bool, int, float, str)) else NOTHING
    return NOTHING


SESSION, LAUNCH = "session", "launch"  # seats: the kind of process that a setup describes

# The weight of a change. TRAINING: the result may differ. SOFTWARE: the result is the same up to
# rounding, or exactly. HARDWARE: on spot machines it changes with every node.
TRAINING, SOFTWARE, HARDWARE = "training", "software", "hardware"
LEVELS = (TRAINING, SOFTWARE, HARDWARE)

OWNER, PROJECT, EXPERIMENT, PURPOSE = "owner", "project", "experiment", "purpose"
# the environment variables that set them
PEOPLE = {
    OWNER: "HARNESS_OWNER",
    PROJECT: "HARNESS_PROJECT",
    EXPERIMENT: "HARNESS_EXPERIMENT",
    PURPOSE: "HARNESS_PURPOSE",
}
# packages whose versions affect a result; all others are recorded but not compared
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
MOST_WORDS = 200  # characters of a reported value


@dataclass(frozen=True)
class GitState:
    """The work tree that the script ran in. `diff`: sha256 of the uncommitted changes; `kept`: how
    much of them lies in the bucket: "whole", "cut" (the beginning) or "hash" (nothing)."""

    commit: str = ""
    branch: str = ""
    remote: str = ""  # URL, without credentials
    folder: str = ""  # from the top of the work tree to the folder where the script was started
    pushed: bool | None = None  # a remote branch holds the commit, as far as known locally
    diff: str = ""  # "": everything is committed
    diff_nbytes: Natural = 0
    diff_key: str = ""  # digest of the kept part, which names its object
    kept: str = ""
    masked: Natural = 0  # lines of the diff that looked like secrets
    masked_before: Natural = 0  # those of them in the commit: such a patch does not apply
    context: Natural = 3  # lines around a change; 0: they looked like secrets
    untracked: tuple[str, ...] = ()  # the first files that git does not know
    untracked_count: Natural = 0


@dataclass(frozen=True)
class Setup:
    """The reproducibility record of a run. `argv`: the script (or "-m" and a module; for a launch
    the words after `harness`) and its arguments, without secrets. `config`: the one of `attach`."""

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
    task: str = ""  # for a launch: the text of its task file, without secrets
    left_out: tuple[str, ...] = ()  # parts that could not be kept, and why
    version: Count = 1


@dataclass(frozen=True)
class Difference:
    """One difference between two setups. `level`: see LEVELS."""

    level: str
    name: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.name} was {self.was}, now it is {self.now}"


# ---- command lines -------------------------------------------------------------------------------
def script_of(argv: Sequence[str]) -> str:
    """Return the script's name without folders, or the module's name; "" if there is neither."""
    if argv[:1] == ("-m",) or list(argv[:1]) == ["-m"]:
        return argv[1] if len(argv) > 1 else ""
    return PurePath(argv[0]).name if argv else ""


def flags_of(argv: Sequence[str]) -> dict[str, str]:
    """Return a script's arguments by name. A word after a flag counts as its value: ["x.py",
    "data", "--lr", "0.1"] -> {"arguments": "data", "--lr": "0.1"}. Values that are given more than
    once are joined by spaces."""
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
    """Return the differences from `first`, the most important level first. Git, script text,
    software and hardware that only one of the two knows are not a difference."""
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
    """Yield a configuration's values by dotted name: ("optimizer.lr", "0.1"). A list is one
    value."""
    if isinstance(config, dict) and config:
        for key, value in config.items():
            yield from leaves_of(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, config if isinstance(config, str) else json.dumps(config)
