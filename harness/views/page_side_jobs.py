"""The page's section on side jobs: what `harness watch` measured of each snapshot."""

from __future__ import annotations

from harness.views.page_html import PageSection, html_table, section
from harness.views.plots import esc
from harness.views.side_jobs import SideJobRows
from harness.views.summary import Summary
from harness.views.words import duration, number, plural

MOST_NUMBERS = 8  # columns
MOST_SHOWN = 50  # rows of a watch, the newest


def side_jobs(s: Summary) -> PageSection | None:
    return section("Side jobs", "".join(_table(one) for one in s.side_jobs))


def _table(one: SideJobRows) -> str:
    names = one.metrics[:MOST_NUMBERS]
    lowest = {name: one.lowest(name) for name in names}
    rows = [
        [
            f"{step:,}",
            *(_number(metrics.get(name), step == lowest[name]) for name in names),
        ]
        for step, metrics in one.rows
    ]
    head = ["step", *map(esc, names)]
    left = len(one.metrics) - len(names)
    more = f"; {plural(left, 'number')} more with --json" if left > 0 else ""
    took = f"{plural(len(rows), 'snapshot')}, {duration(one.seconds)} each{more}"
    table = html_table(head, rows, right=range(len(head)), most=MOST_SHOWN)
    return f"<h3>{esc(one.name)}</h3><p class=note>{took}</p>{table}"


def _number(value: float | None, best: bool) -> str:
    return f"<span class=good>{number(value)}</span>" if best else number(value)
