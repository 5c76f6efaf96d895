"""`harness check`: a few steps of a script on one worker and on two, with a kill, a notice and a
resume, on this computer. It reports which promises hold and which do not, with the line to change.

The processes are real (`two_runs.py`), what they do is observed from inside (`probe_hooks.py`),
and rules judge it afterwards (`check_rules.py`). Everything lies in a temporary folder, which is
deleted when the check is over.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.check.check_case import FAILS, HOLDS, NOTE, UNTRIED, Case, Ruling, SourceText
from harness.check.check_rules import rulings
from harness.check.two_runs import Course, ScriptAsked, one, two

FIRST = 0.55  # share of the time for the run with one worker
STATUS = {HOLDS: 0, FAILS: 1, UNTRIED: 2}
COLOURS = {HOLDS: "green", FAILS: "red", UNTRIED: "yellow", NOTE: "cyan"}
SHOWN = {HOLDS: "holds", FAILS: "DOES NOT HOLD", UNTRIED: "not tried", NOTE: "note"}


@dataclass(frozen=True)
class CheckReport:
    """The result of a check. `seconds`: how long it took; `warnings`: warnings of the harness in
    the runs; `tail`: end of the first node's log; `host_nbytes`, `gpu_nbytes`: the most memory that
    a worker held (0 means unknown, or no GPU)."""

    rulings: tuple[Ruling, ...]
    seconds: float
    warnings: tuple[str, ...] = ()
    tail: str = ""
    host_nbytes: int = 0
    gpu_nbytes: int = 0

    @property
    def verdict(self) -> str:
        """FAILS if any promise does; else UNTRIED if one could not be tried; else HOLDS."""
        states = {ruling.state for ruling in self.rulings}
        return next((s for s in (FAILS, UNTRIED) if s in states), HOLDS)


def check(
    asked: ScriptAsked, within_s: float, ignored: frozenset[str], must_fall: bool, keep: str = ""
) -> CheckReport:
    """Check the script, within `within_s` seconds and a little more for cleaning up. `keep`: an
    empty folder in which all files are kept."""
    began_s = time.monotonic()
    folder = Path(keep) if keep else Path(tempfile.mkdtemp(prefix="harness-check-"))
    try:
        all_s = began_s + within_s
        alone = one(Course(folder / "one", asked, began_s + FIRST * within_s, all_s))
        seen = any(life.steps for life in alone.lives)
        pair = two(Course(folder / "two", asked, all_s, all_s)) if seen else None
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    source = SourceText.read(asked.path)
    case = Case(alone, pair, source, ignored, must_fall, shared=asked.gpus == 1)
    said = dict.fromkeys((*alone.warnings, *(pair.warnings if pair else ())))
    lives = (*alone.lives, *(pair.lives if pair else ()))
    return CheckReport(
        tuple(rulings(case)),
        time.monotonic() - began_s,
        tuple(said),
        alone.tail,
        max((life.host_nbytes for life in lives), default=0),
        max((life.gpu_nbytes for life in lives), default=0),
    )


def relative(where: str) -> str:
    """Return FILE:LINE relative to the working folder, if the file lies below it."""
    here = f"{Path.cwd()}{os.sep}"
    return where.removeprefix(here)


def show(report: CheckReport, console: Console) -> None:
    """Print the report as a table; add the end of the first worker's log if nothing could be
    tried."""
    table = Table(show_lines=True, expand=True)
    table.add_column("promise", ratio=2)
    table.add_column("", no_wrap=True)
    table.add_column("what was found, and what to do", ratio=6, overflow="fold")
    for r in report.rulings:
        found = Text(r.what)
        if r.where:
            found.append(f"\n{relative(r.where)}", style="bold")
        if r.remedy and r.state != HOLDS:
            found.append(f"\n-> {r.remedy}", style="dim")
        table.add_row(Text(r.promise), Text(SHOWN[r.state], style=COLOURS[r.state]), found)
    console.print(table)
    for warning in report.warnings:
        console.print(f"warned: {warning}", highlight=False)
    if all(r.state in (UNTRIED, FAILS) for r in report.rulings):
        console.print(f"the end of what it wrote:\n{report.tail}", highlight=False)
    if report.host_nbytes:
        gpu = f", and {report.gpu_nbytes / 1e9:.1f} GB on its GPU" if report.gpu_nbytes else ""
        took = f"a worker took up to {report.host_nbytes / 1e9:.1f} GB of host memory{gpu}"
        console.print(took, highlight=False)
    count = sum(r.state == FAILS for r in report.rulings)
    words = {
        HOLDS: "all that was tried holds",
        FAILS: f"{count} thing{'s do' if count > 1 else ' does'} not hold",
        UNTRIED: "not everything could be tried",
    }
    verdict = report.verdict
    console.print(
        Text(f"{words[verdict]} ({report.seconds:.0f} s)", style=COLOURS[verdict]), highlight=False
    )


def to_json(report: CheckReport) -> str:
    return json.dumps(
        {
            "verdict": report.verdict,
            "status": STATUS[report.verdict],
            "seconds": round(report.seconds, 1),
            "rulings": [{**asdict(r), "where": relative(r.where)} for r in report.rulings],
            "warnings": report.warnings,
            "host_nbytes": report.host_nbytes,
            "gpu_nbytes": report.gpu_nbytes,
        },
        indent=2,
    )
