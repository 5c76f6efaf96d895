"""Terminal output of text that users, machines and buckets wrote: shown as it is, never as markup,
and without characters that could control the terminal.

Every command prints through this `Console`. Knows rich, and nothing of what is printed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

if TYPE_CHECKING:
    from rich.progress import Progress

# first characters of cells that a spreadsheet would compute
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def plain(text: object, keep: str = "") -> str:
    """Return the text with a space for each control character, escape, lone surrogate and other
    unprintable character, except those in `keep`."""
    whole = str(text)
    if whole.isprintable():
        return whole
    return "".join(c if c.isprintable() or c in keep else " " for c in whole)


def cell(text: object) -> str:
    """Return text for a CSV file, with an apostrophe before anything that a spreadsheet would
    compute."""
    shown = plain(text)
    return f"'{shown}" if shown.startswith(FORMULA) else shown


def why_not_a_word(word: str) -> str:
    """Return what is wrong with a word of a command line, or "" if nothing is."""
    if "\0" in word or any("\ud800" <= c <= "\udfff" for c in word):
        return "wanted text, found zero bytes or other bytes than UTF-8"
    # argparse would take it for an option without a value
    if word.startswith("--") and word.endswith("=--"):
        return "wanted a value behind ="
    return ""


class Console(rich.console.Console):
    """A rich console that prints square brackets as they are and lets only rich control the
    terminal. Use styles, not markup."""

    def __init__(self, **more: Any):
        super().__init__(**{"markup": False, "emoji": False, **more})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            harmless = segment.control or segment.text.isprintable() or segment.text == "\n"
            yield segment if harmless else Segment(plain(segment.text, keep="\n"), segment.style)


def progress_bar(console: Console) -> Progress:
    """Return a progress bar of bytes, which is disabled if the console is no terminal."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
