"""Folders that a script names for its own files, and which of them go with their node: `harness
launch` asks before money is spent, `harness check` has seen the files. Pure."""

from __future__ import annotations

import ast
import itertools
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.check.check_case import SourceText
from harness.core.formatting import plural

if TYPE_CHECKING:
    from harness.clouds.sky_task import Task

GOES = "on the node's disk, which goes when the node goes"
REMEDY = (
    "train from snapshots, and get the model with `harness snapshots export`; or write to a bucket "
    "that the task mounts, or keep them with run.files"
)
# flags of transformers and Accelerate's examples, of Lightning, and of LightningCLI; the same names
# are keywords of TrainingArguments, Accelerator and lightning.Trainer
FOLDERS = ("output_dir", "project_dir", "default_root_dir", "trainer.default_root_dir")
LIGHTNING = ("lightning", "pytorch_lightning")
UNNAMED = "trainer_output"  # of transformers, where a script names none
WORKDIR = "~/sky_workdir"  # where SkyPilot puts a task's workdir and runs its commands
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)")


@dataclass(frozen=True)
class OutputFolder:
    """A folder, as the script's command or its source names it. `keyword`: one of FOLDERS; `said`:
    the flag or the call that names the folder."""

    keyword: str
    said: str
    folder: str


def lost_with_node(task: Task) -> str:
    """Return a warning of the folders of the task's script that lie on a node's own disk; "" if
    there are none, or if the script keeps files with `run.files`."""
    argv = script_command(task.run, task.envs)
    name = next(iter(argv), "")
    source = SourceText.read(str((task.workdir or task.path.parent) / name))
    if source.mentions("files"):
        return ""
    given = {one.keyword: one for one in of_command(argv)}
    # a flag that is given takes the place of its default
    named = [*given.values(), *(one for one in of_source(source) if one.keyword not in given)]
    lost = [one for one in named if not outlives(one.folder, task)]
    if not lost:
        return ""
    more = f" and {plural(len(lost) - 1, 'other folder')}" if len(lost) > 1 else ""
    verb = "are" if more else "is"
    return f"{task.path}: {lost[0].said}: {lost[0].folder}{more} {verb} {GOES}: {REMEDY}"


def script_command(run: str, envs: Mapping[str, str]) -> list[str]:
    """Return the script and its arguments: what follows `harness run ... --` in a task's shell
    text, with variables replaced by `envs`; [] if there is none that can be read."""
    for line in run.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(_filled(line, envs), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quote that goes on in the next line
            continue
        begins = [i for i, pair in enumerate(itertools.pairwise(words)) if _runs(*pair)]
        if begins and "--" in words[begins[0] :]:
            argv = words[words.index("--", begins[0]) + 1 :]
            end = next((i for i, word in enumerate(argv) if set(word) <= set("();<>|&")), None)
            return argv[:end]
    return []


def _runs(command: str, verb: str) -> bool:
    return verb == "run" and posixpath.basename(command) in ("harness", "harness.cli")


def _filled(text: str, envs: Mapping[str, str]) -> str:
    """Replace `$NAME`, `${NAME}` and `${NAME:-default}`; variables that are unknown stay."""
    known = {"HOME": "~", **envs}

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        return known.get(name) or (found[2] or "" if name in known or found[2] else found[0])

    return VARIABLE.sub(value, text)


def of_command(argv: Sequence[str]) -> Iterator[OutputFolder]:
    """Yield the folders that flags name, as `--output_dir out` or `--output-dir=out`."""
    for i, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if keyword := _keyword(flag):
            folder = value if equals else next(iter(argv[i + 1 : i + 2]), "")
            yield OutputFolder(keyword, flag, folder)


def _keyword(flag: str) -> str:
    name = flag.removeprefix("--").replace("-", "_")
    return name if flag.startswith("--") and name in FOLDERS else ""


def of_source(source: SourceText) -> Iterator[OutputFolder]:
    """Yield the folders that calls in the source name as plain text, also as the default of a flag,
    and those that trainers take where a call names none."""
    lightning = source.imports(*LIGHTNING)
    for node in ast.walk(source.tree) if source.tree else ():
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        at = f"in line {node.lineno} of {source.path}"
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        arguments = name.endswith("TrainingArguments")
        if arguments and node.args:
            given["output_dir"] = node.args[0]
        flag = next((text for text in map(_text, node.args) if _keyword(text)), "")
        if name == "add_argument" and flag and (folder := _text(given.get("default"))):
            yield OutputFolder(_keyword(flag), f"{flag}, by its default {at}", folder)
        for keyword in FOLDERS:
            if folder := _text(given.get(keyword)):
                yield OutputFolder(keyword, f"{name}({keyword}=...) {at}", folder)
        if None in given:  # **more
            continue
        if arguments and "output_dir" not in given:
            yield OutputFolder("output_dir", f"{name}(...) without output_dir= {at}", UNNAMED)
        if lightning and name == "Trainer" and "default_root_dir" not in given:
            said = f"{name}(...) without default_root_dir= {at}"
            yield OutputFolder("default_root_dir", said, ".")


def _text(value: ast.expr | None) -> str:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def outlives(folder: str, task: Task) -> bool:
    """Return whether files there outlive the node: it is a URL, below a mounted bucket or a named
    volume, or has an unknown variable in it. A mount with mode COPY is a node's own copy."""
    if "://" in folder or "$" in folder:
        return True
    mounted = [
        to
        for to, source in task.file_mounts.items()
        if isinstance(source, dict) and str(source.get("mode", "MOUNT")).upper() != "COPY"
    ]
    # a volume that is described in place by its size is made for one node, and goes with it
    mounted += [
        to for to, volume in task.volumes.items() if isinstance(volume, str) or "size" not in volume
    ]
    place = _whole(folder)
    return any(place == at or place.startswith(at + "/") for at in map(_whole, mounted))


def _whole(path: str) -> str:
    home = path.startswith("~")
    return posixpath.normpath(path if home else posixpath.join(WORKDIR, path))
