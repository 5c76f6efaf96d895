"""The documentation site (`make docs`): a copy of this folder's pages, and references that are made
from the code: commands and flags, public names, facts. Builds without a network."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

project = "spotharness"
html_title = "spotharness"
extensions = ["myst_parser"]
myst_heading_anchors = 3
myst_enable_extensions = ["linkify"]
myst_linkify_fuzzy_links = False
html_theme = "furo"
html_static_path: list[str] = []
nitpicky = True


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def flags_of(command: argparse.ArgumentParser) -> list[str]:
    rows = ["| | |", "|---|---|"]
    for action in command._actions:
        if action.help in (None, argparse.SUPPRESS) or isinstance(action, argparse._HelpAction):
            continue
        usual = argparse.HelpFormatter("")._format_action_invocation(action)
        given = dict(vars(action), prog=command.prog)
        rows.append(f"| `{cell(usual)}` | {cell(str(action.help) % given)} |")
    return rows if len(rows) > 2 else []


def command_page() -> str:
    from harness.cli.command import parser

    lines = ["# Command line", ""]
    for name, command in sorted(parser()[1].items()):
        said = re.sub(r"\s+", " ", command.description or "").strip()
        lines += [f"## harness {name}", "", cell(said), "", *flags_of(command), ""]
    return "\n".join(lines)


HARNESS = ("harness", "harness.data", "harness.policies", "harness.testing")
DOORS = (*HARNESS, "storage", "storage.testing")


def prose(text: str | None) -> str:
    """Return a docstring as Markdown in which only code in backticks is markup."""
    parts = re.split(r"(`[^`]*`)", inspect.cleandoc(text or ""))
    plain = [re.sub(r"([*_\[\]{}<>#|$~])", r"\\\1", part) for part in parts[::2]]
    code = [*parts[1::2], ""]
    return re.sub(r"(?m)^ +", "", "".join(a + b for a, b in zip(plain, code, strict=True)))


def own_words(what: Any) -> str:
    """Return the docstring of a class or function, unless dataclasses made it up."""
    said = what.__doc__ or ""
    return "" if said.startswith(f"{getattr(what, '__name__', '')}(") else prose(said)


def signature(what: Any) -> str:
    """Return the arguments of a function or class, or nothing for what has none."""
    try:
        found = str(inspect.signature(what)) if callable(what) else ""
    except (TypeError, ValueError):  # a type that is an alias, or made in C
        return ""
    return re.sub(r"<[\w.]+ object at 0x\w+>|<factory>", "...", found).replace("'", "")


def methods(kind: type) -> Iterator[str]:
    """Yield a list item for each public method and property of a class."""
    for name, member in vars(kind).items():
        member = getattr(member, "__func__", member)
        if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        arguments = signature(member) if inspect.isfunction(member) else ""
        said = prose((inspect.getdoc(member) or "").partition("\n\n")[0])
        yield f"- `{name}{arguments}`" + (f": {' '.join(said.split())}" if said else "")


def api_page() -> str:
    lines = ["# Python API: the names in full", ""]
    for door in DOORS:
        package, _, last = door.rpartition(".")
        module = (
            getattr(importlib.import_module(package), last)
            if door == "harness.policies"
            else importlib.import_module(door)
        )
        lines += [f"## {door}", "", prose(module.__doc__), ""]
        for name in sorted(module.__all__):
            what = getattr(module, name)
            own = inspect.isclass(what) or inspect.isroutine(what) or inspect.ismodule(what)
            lines += [f"### {door}.{name}", "", f"`{name}{signature(what)}`", ""]
            lines += [own_words(what) if own else "", ""]
            lines += [*methods(what), ""] if inspect.isclass(what) else []
    return "\n".join(lines)


def facts_page() -> str:
    from harness.core.facts import KINDS

    lines = ["# Facts: the event log", "", "Fields that alerts' rules and trackers may use.", ""]
    for name, kind in sorted(KINDS.items()):
        lines += [f"## {name}", "", own_words(kind), ""]
        lines += [f"- `{field.name}`: `{field.type}`" for field in dataclasses.fields(kind)] + [""]
    return "\n".join(lines)


def outside(app: Any, docname: str, source: list[str]) -> None:
    """Lead links to files that are no pages to the repository's own address, as code."""
    source[0] = re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", source[0])


def setup(app: Any) -> None:
    (HERE / "site").mkdir(exist_ok=True)
    for name, page in (("cli", command_page), ("api", api_page), ("facts", facts_page)):
        (HERE / "site" / f"{name}.md").write_text(page())
    app.connect("source-read", outside)
