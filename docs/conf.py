"""The documentation site (`make docs`): a copy of this folder's pages, and a command reference that
is made from the parser. Builds without a network."""

from __future__ import annotations

import argparse
import re
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


def outside(app: Any, docname: str, source: list[str]) -> None:
    """Lead links to files that are no pages to the repository's own address, as code."""
    source[0] = re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", source[0])


def setup(app: Any) -> None:
    (HERE / "site").mkdir(exist_ok=True)
    (HERE / "site" / "cli.md").write_text(command_page())
    app.connect("source-read", outside)
