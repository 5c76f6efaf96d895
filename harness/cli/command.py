"""The `harness` command: the only place that builds the real world (clock, cloud, randomness,
store).

Each subcommand is one frozen dataclass (its flags) and one function. Exit status: 0 done, 1
failed, 2 wrong input, 3 stopped before its end, 4 (`launch`) the controller cannot go on and has
left the nodes training, 130 interrupted. A supervisor restarts `launch` on 1 and 4.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import __version__
from harness.cli.common import DONE, FAILED, INTERRUPTED, WRONG_INPUT
from harness.core.extensions import extra_of
from harness.core.flags import FlagParser, add_flags, build, positional
from harness.core.masking import keep_secrets, masked
from harness.core.world import BadInput, HarnessError
from storage import snapshots_command
from storage.errors import StoreError, WrongInput
from storage.terminal_text import plain, why_not_a_word

# ---- main ----------------------------------------------------------------------------------------
GROUPS: dict[str, str] = {
    "runs": "Reports, pages, costs and alerts of runs; compare and repeat them.",
    "snapshots": "List, verify, export, copy, prune a run's snapshots; act on each.",
    "data": "Prepare a corpus or index files; show, verify, exclude documents.",
    "market": "Prices and capacity of offers; simulate runs on recorded markets.",
    "prove": "Prove that a run is right, and that a setup survives faults.",
}
SECTIONS = {  # the titles of the list in `--help`, by the first command below each
    "init": "start here",
    "launch": "run",
    "status": "watch and end",
    "runs": "more commands (harness GROUP --help)",
}
EXAMPLES = """examples:
  harness init first && cd first        write a task and a script
  harness check -- train.py --epochs 1  try a script of your own here
  harness launch train.yaml --nodes 1:4 train here, on nodes that come and go
  harness launch train.yaml --cloud sky --run s3://BUCKET/runs/x --budget-usd 50
  harness status s3://BUCKET/runs       list the runs there

`harness guard` lists what is alive in your account, whatever its run;
`harness image` makes an image from which nodes start fast.
`harness help all` lists every command, `harness help COMMAND` explains one."""
UNLISTED = ("guard", "image")  # not among the names at the top of `--help`, which are enough
SYNONYMS = {  # words of other tools, and what they mean here
    "cancel": "harness stop",
    "delete": "harness down",
    "drain": "harness stop",
    "kill": "harness down",
    "list": "harness status FOLDER",
    "ls": "harness status FOLDER",
    "ps": "harness status FOLDER",
    "queue": "harness status FOLDER",
    "resume": "harness launch",
    "start": "harness launch",
    "submit": "harness launch",
    "tail": "harness logs",
    "terminate": "harness down",
    "train": "harness launch",
    "version": "harness --version",
}
# the words of each command, in the order of `--help`: its module here, flags and function
COMMANDS = {
    "init": ("start", "InitFlags", "init"),
    "check": ("start", "CheckFlags", "check"),
    "plan": ("plan_command", "PlanFlags", "plan"),
    "launch": ("launch", "LaunchFlags", "launch"),
    "run": ("node", "RunFlags", "run"),
    "status": ("status", "StatusFlags", "status"),
    "logs": ("node_logs", "LogsFlags", "logs"),
    "stop": ("stop", "StopFlags", "stop"),
    "down": ("stop", "DownFlags", "down"),
    "guard": ("account_commands", "GuardFlags", "guard"),
    "image": ("account_commands", "ImageFlags", "image"),
    "runs report": ("status", "ReportFlags", "report"),
    "runs serve": ("status", "ServeFlags", "serve"),
    "runs postmortem": ("status", "PostmortemFlags", "postmortem"),
    "runs costs": ("status", "CostsFlags", "costs"),
    "runs compare": ("prove", "CompareFlags", "compare"),
    "runs note": ("run_record", "NoteFlags", "note"),
    "runs reproduce": ("run_record", "ReproduceFlags", "reproduce"),
    "runs replay": ("prove", "ReplayFlags", "replay"),
    "runs bisect": ("prove", "BisectFlags", "bisect"),
    "runs alerts": ("alerts_command", "AlertsFlags", "alerts"),
    "runs sync": ("publish", "SyncFlags", "sync"),
    "runs dashboards": ("publish", "DashboardsFlags", "dashboards"),
    "snapshots take": ("stop", "TakeFlags", "take"),
    "snapshots watch": ("publish", "WatchFlags", "watch"),
    "data prepare": ("corpus_command", "PrepareFlags", "prepare"),
    "data index": ("corpus_command", "IndexFlags", "index"),
    "data show": ("corpus_command", "ShowFlags", "show"),
    "data exclude": ("corpus_command", "ExcludeFlags", "exclude"),
    "data spikes": ("corpus_command", "SpikesFlags", "spikes"),
    "data verify": ("corpus_command", "DataVerifyFlags", "verify"),
    "market show": ("market_command", "HistoryShowFlags", "show"),
    "market learn": ("market_command", "LearnFlags", "learn"),
    "market export": ("market_command", "ExportFlags", "export"),
    "market draw": ("market_command", "DrawFlags", "draw"),
    "market live": ("market_command", "LiveFlags", "live"),
    "market prices": ("market_command", "PricesFlags", "prices"),
    "market simulate": ("simulate", "SimulateFlags", "simulate"),
    "prove verify": ("prove", "VerifyFlags", "verify"),
    "prove drill": ("prove", "DrillFlags", "drill"),
    "prove doctor": ("prove", "DoctorFlags", "doctor"),
    "prove fake-metadata": ("prove", "FakeMetadataFlags", "fake_metadata"),
}

# the satellite of a module of commands, where that is not the spine
OF_COMMANDS = {
    "alerts_command": "look",
    "corpus_command": "data",
    "market_command": "planner",
    "plan_command": "planner",
    "prove": "lab",
    "publish": "look",
    "simulate": "lab",
    "start": "check",
    "status": "look",
}


@dataclass(frozen=True)
class AbsentFlags:
    """The flags of a command that is not installed: it takes any words, to say what to install."""

    words: tuple[str, ...] = positional("", nargs="*")


@functools.cache
def command(words: str) -> tuple[type[Any], Callable[[Any], int]]:
    """Return a command's flags and function. If its satellite is not installed, its function says
    so."""
    place, flags, function = COMMANDS[words]
    module = f"harness.cli.{place}"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if not is_ours(e):
            raise
        return AbsentFlags, _absent(e)
    return getattr(found, flags), getattr(found, function)


def is_ours(error: ModuleNotFoundError) -> bool:
    """Return whether a module of this project is missing, so that a satellite is not installed."""
    return (error.name or "").split(".")[0] in ("harness", "storage")


def what_to_install(error: ModuleNotFoundError) -> str:
    """Return what a person is told if a module of this project is missing."""
    name = error.name or ""
    extra = OF_COMMANDS.get(name.rpartition(".")[2]) or extra_of(name)
    return f'this needs "spotharness[{extra}]"; pip install "spotharness[{extra}]"'


def _absent(error: ModuleNotFoundError) -> Callable[[Any], int]:
    what = what_to_install(error)

    def refuse(flags: Any) -> int:
        raise BadInput(what)

    refuse.__doc__ = f"Not installed: {what}."
    return refuse


def about(words: str) -> str:
    """Return what a command does: its function's docstring, read without importing its module,
    which takes long."""
    place, _, function = COMMANDS[words]
    spec = importlib.util.find_spec(f"harness.cli.{place}")
    satellite = f"harness.{OF_COMMANDS.get(place, 'cli')}"
    if spec is None or spec.origin is None or importlib.util.find_spec(satellite) is None:
        return command(words)[1].__doc__ or ""
    return _docstrings(spec.origin)[function]


@functools.cache
def _docstrings(path: str) -> dict[str, str]:
    """Return the docstrings of a file's functions by name."""
    body = ast.parse(Path(path).read_bytes()).body
    functions = [one for one in body if isinstance(one, ast.FunctionDef)]
    return {one.name: ast.get_docstring(one) or "" for one in functions}


@functools.cache
def parser(only: str | None = None) -> tuple[FlagParser, dict[str, FlagParser]]:
    """Return the parser of the whole command, and the parser of each command by its words. `only`:
    the words of the one command that gets its flags, "" for none, so that no other module is
    imported; None: all commands get theirs."""
    root = FlagParser(
        prog="harness",
        description="Train on spot machines; runs that outlive them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.sections, root.synonyms = SECTIONS, SYNONYMS
    root.add_argument("--version", action="version", version=f"harness {__version__}")
    groups = {"": root}
    subs: dict[str, FlagParser] = {}
    for words in COMMANDS:
        group, _, word = words.rpartition(" ")
        if group not in groups:
            groups[group] = root.add_command(group, GROUPS[group])
        listed = only in (None, "", words)
        subs[words] = groups[group].add_command(word, about(words) if listed else "")
        if only in (None, words):
            add_flags(subs[words], command(words)[0])
    for word in UNLISTED:
        del root.commands[word]
    stored = snapshots_command.add_commands(
        groups["snapshots"].add_command, snapshots_command.all_commands()
    )
    for word, sub in stored.items():
        subs[f"snapshots {word}"] = sub
    for words, sub in subs.items():
        sub.set_defaults(chosen=words)
        root.elsewhere.setdefault(words.rpartition(" ")[2], []).append(f"harness {words}")
    return root, subs


def words_of(given: list[str]) -> str:
    """Return the words of the command that a command line names; "" if it names none."""
    known = {*COMMANDS, *(f"snapshots {word}" for word in snapshots_command.all_commands())}
    return next((w for n in (2, 1) if (w := " ".join(given[:n])) in known), "")


def asks_for_help(given: list[str]) -> list[str]:
    """Return the command line with `harness help COMMAND`, and a group or nothing alone, written as
    `--help`."""
    if given[:1] == ["help"]:
        given = [*given[1:], "--help"]
    return [*given, "--help"] if not given or given in [[group] for group in GROUPS] else given


def list_all() -> None:
    """Print every command with the first sentence about it."""
    _, subs = parser("")
    for words in sorted(subs, key=lambda words: (" " in words, list(subs).index(words))):
        about_it = (subs[words].description or about(words)).split(". ")[0].rstrip(".")
        print(f"harness {words:22} {about_it}")


def takes_script(words: str) -> bool:
    """Return whether everything after `--` belongs to the script of this command."""
    return words in COMMANDS and "script" in command(words)[0].__dataclass_fields__


def main(argv: list[str] | None = None) -> None:
    """Run the `harness` command and exit with its status."""
    given = asks_for_help(list(sys.argv[1:] if argv is None else argv))
    after: list[str] = []
    # everything after "--" belongs to the script
    if "--" in given and takes_script(words_of(given)):
        at = given.index("--")
        given, after = given[:at], given[at + 1 :]
    root, subs = parser(words_of(given))
    for word in given:
        if why := why_not_a_word(word):
            root.error(f"{word!r:.80}: {why}")
    if given[0] == "all" and given[1:] == ["--help"]:
        list_all()
        sys.exit(DONE)
    if given[0].startswith("-") and given[0] not in root._option_string_actions:
        root.error(f"unrecognized arguments: {given[0]}")
    namespace, unknown = root.parse_known_args(given)
    words: str = namespace.chosen
    if unknown:
        subs[words].error(f"unrecognized arguments: {' '.join(unknown)}")
    if after:
        namespace.script = after
    keep_secrets(os.environ)
    try:
        if words not in COMMANDS:
            notes_of = importlib.import_module("harness.cli.run_record").notes_of
            word = words.rpartition(" ")[2]
            sys.exit(snapshots_command.execute(word, namespace, "harness snapshots", notes_of))
        cls, function = command(words)
        sys.exit(function(build(cls, namespace)))
    except (BadInput, WrongInput) as e:
        print(masked(plain(f"harness {words}: {e}", keep="\n")), file=sys.stderr)
        sys.exit(WRONG_INPUT)
    except (HarnessError, StoreError) as e:
        print(masked(plain(f"harness {words}: {e}", keep="\n")), file=sys.stderr)
        sys.exit(FAILED)
    except ModuleNotFoundError as e:
        if not is_ours(e):
            raise
        print(f"harness {words}: {what_to_install(e)}", file=sys.stderr)
        sys.exit(WRONG_INPUT)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `harness status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
