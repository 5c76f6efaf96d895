"""What users, machines and buckets wrote, on a terminal: shown as it is, never as markup, and
without what could drive the terminal.

Every command prints through this `Console`. Knows rich; knows nothing of what is printed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

if TYPE_CHECKING:
    from rich.progress import Progress

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would compute


def plain(text: object, keep: str = "") -> str:
    """Without control characters, escapes, lone surrogates and the like: a space stands for
    each, except for those in `keep`."""
    whole = str(text)
    if whole.isprintable():
        return whole
    return "".join(c if c.isprintable() or c in keep else " " for c in whole)


def cell(text: object) -> str:
    """Text in a CSV file: an apostrophe goes before what a spreadsheet would compute."""
    shown = plain(text)
    return f"'{shown}" if shown.startswith(FORMULA) else shown


def why_not_a_word(word: str) -> str:
    """What is wrong with a word of a command line, "" if nothing."""
    if "\0" in word or any("\ud800" <= c <= "\udfff" for c in word):
        return "wanted text, found zero bytes or other bytes than UTF-8"
    if word.startswith("--") and word.endswith("=--"):  # argparse would take it for no value
        return "wanted a value behind ="
    return ""


class Console(rich.console.Console):
    """rich's, but square brackets are square brackets, and only rich itself can drive the
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
    """Of bytes done of how many; nothing where nobody looks."""
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
