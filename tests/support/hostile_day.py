"""`make audit`: everything that a hostile day does, as a table of figures. Exit status 1 unless all
of it is handled.

Inputs, generated inputs, garbage before commands, strange objects, hostile answers, each in this
process; secrets and tamperings by the tests that prove them.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.progress import track
from rich.table import Table

from storage.terminal_text import Console
from support import hostile_inputs as inputs
from support import hostile_objects as objects
from support.hostile import Case

TREE = Path(__file__).parents[2]
Tables = dict[str, Callable[[], list[Case]]]
TABLES: Tables = {
    "URLs of runs": inputs.urls,
    "flags": inputs.flags,
    "YAML files": inputs.files,
    "environment variables": inputs.environment,
    "generated inputs": inputs.generated,
    "garbage x commands": objects.all_garbage,
    "strange objects, takeover and live agent": objects.strange,
    "hostile answers x metadata services": objects.answers,
}
# ... and tests that are a table of their own
TESTS = {
    "fuzzed decoders": "bucket/test_layout.py",
    "foreign objects": "look/test_foreign_objects.py",
    "text on terminals and pages": "cli/test_text.py",
    "secrets": "local/test_secrets.py",
    "tamperings": "look/test_tampering.py",
}
LIMIT_S = 1800


def of_cases(name: str, cases: Sequence[Case], console: Console) -> tuple[int, list[str]]:
    """How many there are, and what is wrong with those that were not handled."""
    shown = track(cases, name, console=console, transient=True, disable=not console.is_terminal)
    return len(cases), [f"{one.name}: {why}" for one in shown if (why := one.run())]


def of_test(file: Path) -> tuple[int, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(file)]
        subprocess.run(
            [sys.executable, *words], cwd=TREE, capture_output=True, timeout=LIMIT_S
        )
        suites = ET.parse(report).getroot().iter("testcase") if report.exists() else []
        found = list(suites)
    failed = [
        f"{one.get('classname')}::{one.get('name')}"
        for one in found
        if one.find("failure") is not None or one.find("error") is not None
    ]
    return len(found), failed if found else [f"{file.name}: no test ran"]


def main() -> int:
    logging.disable(logging.CRITICAL)  # what is handled is said by whoever handles it
    console, began_s = Console(), time.monotonic()
    table = Table("what is done", "times", "handled", "", header_style="bold", box=None)
    bad: list[str] = []

    def add(name: str, count: int, wrong: list[str]) -> None:
        table.add_row(name, str(count), str(count - len(wrong)), "" if not wrong else "NOT ALL")
        bad.extend(f"{name}: {one}" for one in wrong)

    for name, cases in TABLES.items():
        add(name, *of_cases(name, cases(), console))
    for name, file in TESTS.items():
        add(name, *of_test(TREE / "tests" / file))
    for one in bad:
        console.print(one[:600], style="red", soft_wrap=True)
    console.print(table)
    console.print(f"{len(bad)} not handled, {time.monotonic() - began_s:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
