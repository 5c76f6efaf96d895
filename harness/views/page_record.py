"""The page's sections on people and setup: the logbook, and how the run was made."""

from __future__ import annotations

from collections.abc import Mapping

from harness.core.setups import leaves_of
from harness.views.page_html import PageSection, html_table, numbers, section
from harness.views.plots import esc
from harness.views.setups import setup_rows, shift_words
from harness.views.summary import Summary
from harness.views.words import clock, duration, plural

MOST_NOTES = 100
MOST_LEAVES = 400  # of a configuration


def logbook(s: Summary) -> PageSection | None:
    """What people wrote, newest first."""
    book = s.logbook
    shown = book.entries[::-1][:MOST_NOTES]
    rows = []
    for entry in shown:
        about = f"step {entry.step:,}" if entry.step is not None else ""
        who = " · ".join(x for x in (entry.author, about) if x)
        rows.append(
            f"<li><b>{esc(clock(entry.t))}</b> <i>{esc(who)}</i><p>{esc(entry.text)}</p></li>"
        )
    left = len(book.entries) - len(shown) + book.more
    more = f"<p class=note>{plural(left, 'note')} more: harness logbook</p>" if left else ""
    purpose = f"<p class=reason>{esc(book.purpose)}</p>" if book.purpose else ""
    body = purpose + (f"<ul class=notes>{''.join(rows)}</ul>" if rows else "") + more
    return section("Logbook", body)


def made(s: Summary) -> PageSection | None:
    """The record that the run can be made again from."""
    found = s.setups
    body = numbers(setup_rows(found))
    setup = found.first
    if setup is not None:
        body += _folded("configuration", dict(leaves_of(setup.config)))
        body += _folded("hardware", setup.hardware) + _folded("software", setup.software)
        body += _folded("environment", setup.environment) + _folded("packages", setup.packages)
        if setup.left_out:
            body += f"<p class=note>not kept: {esc('; '.join(setup.left_out))}</p>"
    if found.shifts:
        rows = [
            [
                "+" + duration(max(0.0, shift.t - s.started_s)),
                esc(shift.epoch),
                f"<span class='{'bad' if shift.action == 'refused' else ''}'>{esc(shift.action)}"
                f"<small>{esc(shift.level)}</small></span>",
                esc(shift_words(shift)),
            ]
            for shift in found.shifts
        ]
        table = html_table(
            ["at", "epoch", "", "what was otherwise than at the begin"], rows, {0, 1}
        )
        body += f"<h3>Changes on the way</h3>{table}"
    note = "harness rerun prints the commands that make this run again from its bucket"
    return section("How it was made", body, note)


def _folded(title: str, values: Mapping[str, object]) -> str:
    if not values:
        return ""
    rows = [(name, str(value)) for name, value in sorted(values.items())][:MOST_LEAVES]
    left = len(values) - len(rows)
    more = f"<p class=note>{left:,} more are in the bucket</p>" if left > 0 else ""
    count = f"{title}: {len(values):,}"
    return f"<details><summary>{esc(count)}</summary>{numbers(rows)}{more}</details>"
