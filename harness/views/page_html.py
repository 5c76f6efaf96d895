"""What the page's sections are made of: a section, a table, a list of numbers.

Everything that users, machines or clouds wrote goes through `esc`; nothing else becomes markup.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import resources

from harness.views.plots import esc
from harness.views.words import plural

MOST_ROWS = 400  # of a table; --json has all


def asset(name: str) -> str:
    """A file that is written into the page, which has to stand alone."""
    return resources.files("harness.views").joinpath(name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class PageSection:
    """One part of the page. `note` and `body` are HTML."""

    title: str
    body: str
    note: str = ""

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    def html(self) -> str:
        note = f"<p class=note>{self.note}</p>" if self.note else ""
        return f'<section id="{self.anchor}"><h2>{esc(self.title)}</h2>{note}{self.body}</section>'


def section(title: str, body: str, note: str = "") -> PageSection | None:
    """None if there is nothing to show."""
    return PageSection(title, body, note) if body else None


def html_table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: Collection[int] = (),
    most: int = MOST_ROWS,
) -> str:
    """Cells are HTML already. Of very many rows the newest."""

    def cells(row: Sequence[object], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=r' if i in right else ''}>{c}</{tag}>" for i, c in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows[-most:])
    table = f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
    left_out = len(rows) - most
    more = f"<p class=note>{plural(left_out, 'earlier row')} left out</p>" if left_out > 0 else ""
    return f"{more}<div class=scroll>{table}</div>"


def numbers(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values, one below the other."""
    if not rows:
        return ""
    return "<dl>" + "".join(f"<dt>{esc(a)}</dt><dd>{esc(b)}</dd>" for a, b in rows) + "</dl>"


def stack(parts: Sequence[tuple[str, float, str]]) -> str:
    """One bar of 100 %: (class, share, words at the pointer)."""
    shown = "".join(
        f'<div class="{tone}" style="flex:{share:.5f} 0 0" data-tip="{esc(tip)}">'
        f"{esc(f'{100 * share:.1f} %') if share > 0.07 else ''}</div>"
        for tone, share, tip in parts
    )
    return f"<div class=stack>{shown}</div>"
